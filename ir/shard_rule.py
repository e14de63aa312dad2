"""The sharding rule of an op as text.

A rule has named dims, one term per operand, then one per result::

    ... K+, N K+, N -> ... N                    linear with a bias
    {H D!}, T! H D!, T! H D!, T! -> {H D!}      kv_write; braces: every field of a state

- Dims of the same name are sharded alike; a dim of size 1 may stay whole, it broadcasts.
- ``...`` stands for all leading dims, named from the right, so that they align by broadcasting.
- ``D!`` must be whole. So must a dim that the results lack, unless it is contracted:
- ``K+`` is contracted: where it is sharded, the results are pending sums ("partial").
- ``; sums 0 | 1 2`` names the operands that let a pending sum through: operand 0 alone, or 1 and
  2 together; ``sums all`` needs every operand pending over the same axis.
- ``; times 0 2`` names operands that the sum multiplies: they may lack a contracted dim. Any other
  operand that lacks it (a bias) would be added once per rank.
- ``; index 1 E`` names an operand that holds row numbers of dim E: where E is sharded, each rank
  needs them in its own numbering, -1 for rows of other ranks (the op ``local_index``).
- ``...=`` is short for an elementwise op of any number of operands, ``...=+`` adds ``; sums all``.
- A rule of the form ``partial => dim`` is a collective over the axis named by the attribute
  ``axis``: ``partial``, ``whole``, or the attribute that holds the number of the sharded dim.
- No rule at all lets only whole operands through.
"""

import re
from dataclasses import dataclass, replace
from functools import lru_cache

_DIM = re.compile(r"(?P<name>\w+)(?P<mark>[!+]?)")


@dataclass(frozen=True)
class NamedDim:
    """One dim of a term.

    Attributes:
        name: dims of equal names are sharded alike.
        whole: never sharded ("!").
        contracted: summed over ("+").
    """

    name: str
    whole: bool = False
    contracted: bool = False


@dataclass(frozen=True)
class Term:
    """The dims of one operand or result.

    Attributes:
        dims: the trailing dims that have names.
        leading: whether any number of dims comes before them ("...").
    """

    dims: tuple[NamedDim, ...]
    leading: bool = False

    def labels(self, rank: int) -> tuple[NamedDim, ...]:
        """A name for each dim of a tensor.

        Raises: ValueError if the rank does not fit, a fault of the rule.
        """
        extra = rank - len(self.dims)
        if extra < 0 or (extra and not self.leading):
            raise ValueError(f"a term of {len(self.dims)} dims for a tensor of rank {rank}")
        return (*(NamedDim(f"...{extra - i}") for i in range(extra)), *self.dims)


@dataclass(frozen=True)
class Rule:
    """A parsed rule.

    Attributes:
        text: as written.
        operands: one term per operand; trailing optional operands may be absent.
        results: one term per result.
        sums: sets of operands through which a pending sum passes.
        sums_all: whether it passes through all operands together.
        times: operands that may lack a contracted dim.
        index: operands that hold row numbers, each with the name of the dim that they count.
        elementwise: whether the terms are "..." for any number of operands.
    """

    text: str
    operands: tuple[Term, ...] = ()
    results: tuple[Term, ...] = ()
    sums: tuple[frozenset[int], ...] = ()
    sums_all: bool = False
    times: frozenset[int] = frozenset()
    index: tuple[tuple[int, str], ...] = ()
    elementwise: bool = False

    def operand(self, index: int) -> Term:
        """Term of an operand."""
        return Term((), leading=True) if self.elementwise else self.operands[index]

    def result(self, index: int) -> Term:
        """Term of a result."""
        return Term((), leading=True) if self.elementwise else self.results[index]

    def multiplies(self, operand: int) -> bool:
        """Whether an operand may lack a contracted dim, since it is no summand."""
        return operand in self.times or operand in dict(self.index)

    def passes(self, pending: frozenset[int], count: int) -> bool:
        """Whether sums pending in exactly these of ``count`` operands pass through."""
        return pending in self.sums or (self.sums_all and len(pending) == count)


@lru_cache(maxsize=1024)
def parse_rule(text: str) -> Rule:
    """Read a rule.

    Raises: ValueError if it is malformed, a fault of the op's record.
    """
    if text in ("...=", "...=+"):
        return Rule(text, sums_all=text.endswith("+"), elementwise=True)
    body, *clauses = text.split(";")
    elementwise = body.strip() == "...="
    if not elementwise and body.count("->") != 1:
        raise ValueError(f"malformed sharding rule {text!r}")
    left, _, right = body.partition("->")
    operands = () if elementwise else tuple(_term(t, text) for t in left.split(","))
    results = () if elementwise else tuple(_term(t, text) for t in right.split(","))
    rule = Rule(text, operands, results, elementwise=elementwise)
    for clause in clauses:
        rule = _with_clause(rule, clause.split())
    return rule


def _with_clause(rule: Rule, words: list[str]) -> Rule:
    kind, *rest = words or [""]
    if kind == "sums" and rest == ["all"]:
        return replace(rule, sums_all=True)
    if kind == "sums" and rest:
        groups = " ".join(rest).split("|")
        return replace(rule, sums=tuple(frozenset(int(n) for n in g.split()) for g in groups))
    if kind == "times" and rest:
        return replace(rule, times=frozenset(map(int, rest)))
    if kind == "index" and len(rest) == 2:
        return replace(rule, index=(*rule.index, (int(rest[0]), rest[1])))
    raise ValueError(f"malformed sharding rule {rule.text!r}")


def _term(text: str, whole: str) -> Term:
    words = text.strip().removeprefix("{").removesuffix("}").split()
    leading = words[:1] == ["..."]
    dims = []
    for word in words[1:] if leading else words:
        match = _DIM.fullmatch(word)
        if match is None:
            raise ValueError(f"malformed dim {word!r} in the sharding rule {whole!r}")
        dims.append(NamedDim(match["name"], match["mark"] == "!", match["mark"] == "+"))
    return Term(tuple(dims), leading)
