"""Rewrite rules: before and after in the text form of graphs.

::

    rule add_rms_norm
      why   "one read and one write of the residual fewer"
      needs cpu, avx2
      phase decode
      priority 10
      where D % 32 == 0 and D * 4 <= device.smem_per_block_bytes
      before (%x: t[T,D], %r: t[T,D], @w: u[D]) {
        %0 = add(%x, %r)
        %1 = rms_norm(%0, @w) {eps = $eps}
        return %0, %1
      }
      after (%x: t[T,D], %r: t[T,D], @w: u[D]) {
        %0, %1 = fused[add_rms_norm](%x, %r, @w) {eps = $eps}
        return %0, %1
      }

Variables: capital names are sizes, lower-case names that are no element type (``t``, ``u``) are
variables for one, ``$name`` is an attribute's value. ``t[*]`` is a tensor of any shape,
``t[..., D]`` one with any dims before ``D``. Equal variables stand for equal things, but each ``*``
and ``...`` for its own. A parameter ``%p`` binds to any tensor of the graph, weights too; ``@w`` to
a weight only; ``$kv: state`` to a state. Result types may be written; they are inferred otherwise.

A ``fused[...]`` group in ``after`` has no body of its own: its body is the ``before`` graph, whose
parameters are its operands, by name. ``needs``, ``phase``, ``priority`` and ``where``
may be left out.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from metainfer.ir.dims import Dim
from metainfer.ir.dtypes import DType, parse_dtype
from metainfer.ir.errors import TypeMismatch
from metainfer.ir.parser import TypeReader
from metainfer.ir.patterns import (
    AnyPattern,
    AttrVar,
    DTypeVar,
    Param,
    Pattern,
    PatternAttr,
    PatternOp,
    StatePattern,
    TypePattern,
)
from metainfer.ir.printer import label_of, print_attr, print_head, print_return, quote, ref, word
from metainfer.ir.step import step_value
from metainfer.ir.syntax import (
    RawDecl,
    RawGraph,
    RawNamedType,
    RawOp,
    RawRule,
    RawRuleClause,
    RawTensor,
    RawType,
    SourceText,
    integer,
    nearest,
    parse_raw,
    parse_shape,
    ref_name,
    unquote,
)
from metainfer.ir.where import Where, evaluate_where, names_of, print_where, read_where

if TYPE_CHECKING:
    from lark import Token

__all__ = ["PHASES", "Rule", "evaluate_where", "parse_rule", "print_rule"]

PHASES = ("prefill", "decode", "mixed", "verify")
_SIZE = re.compile(r"[A-Z][A-Za-z0-9_]*")
_DTYPE_VARIABLE = re.compile(r"[a-z][a-z0-9_]*")
# A misspelt element type must not become a variable.
_LIKE_A_DTYPE = re.compile(r"(?:b|bf|f|i|u|int|uint|float|fp)\d.*")
_FREE = re.compile(r"\[\s*(\*|\.\.\.)\s*(,?)")


@dataclass(frozen=True)
class Rule:
    """A rewrite of ``before`` to ``after``.

    Attributes:
        name: what it makes.
        why: what is gained, for `explain`.
        needs: capabilities of the device or backend.
        phase: the only phase it applies in, "" for all.
        priority: rules of higher priority are tried first.
        where: condition over sizes, attributes and the device; None holds always.
        before: what is looked for.
        after: what takes its place; the body of a fused group in it is ``before``.
        source_path: where the rule was read from; not part of its value.
    """

    name: str
    why: str
    needs: tuple[str, ...]
    phase: str
    priority: int
    where: Where | None
    before: Pattern
    after: Pattern
    source_path: str = field(default="", compare=False)

    @property
    def fused(self) -> PatternOp | None:
        """The fused group that the rule makes, if it makes one."""
        return next((op for op in self.after.ops if op.name == "fused"), None)


def print_rule(rule: Rule) -> str:
    """Print a rule; `parse_rule` reads an equal one."""
    lines = [f"rule {word(rule.name)}", f"  why {quote(rule.why)}"]
    if rule.needs:
        lines.append(f"  needs {', '.join(map(word, rule.needs))}")
    if rule.phase:
        lines.append(f"  phase {rule.phase}")
    if rule.priority:
        lines.append(f"  priority {rule.priority}")
    if rule.where is not None:
        lines.append(f"  where {print_where(rule.where)}")
    for keyword, pattern in (("before", rule.before), ("after", rule.after)):
        lines += _pattern_lines(keyword, pattern)
    return "\n".join(lines) + "\n"


def _pattern_lines(keyword: str, pattern: Pattern) -> Iterator[str]:
    yield f"  {keyword} ({', '.join(f'{ref(p.name)}: {p.type}' for p in pattern.params)}) {{"
    for op in pattern.ops:
        yield f"    {_print_op(op)}"
    yield f"    {print_return(pattern.outputs, pattern.state_outputs)}"
    yield "  }"


def _print_op(op: PatternOp) -> str:
    label = label_of(op.name, op.attrs)
    text = f"{print_head(op.name, op.results, label)}{', '.join(map(ref, op.operands))})"
    shown = [f"{word(k)} = {_print_attr(v)}" for k, v in op.attrs if label is None or k != label[0]]
    if shown:
        text += f" {{{', '.join(shown)}}}"
    return f"{text} : {', '.join(map(str, op.result_types))}" if op.result_types else text


def _print_attr(value: PatternAttr) -> str:
    if isinstance(value, AttrVar):
        return ref(f"${value.name}")
    if not isinstance(value, tuple):
        return print_attr(value)
    inner = ", ".join(map(_print_attr, value))
    return f"({inner},)" if len(value) == 1 else f"({inner})"


def parse_rule(text: str, origin: str = "") -> Rule:
    """Read a rule.

    Args:
        text: the whole text, of one rule.
        origin: where it came from; kept as ``source_path``.

    Raises: ParseError where it is no rule: syntax, clauses missing or given twice, values not
        defined, variables in ``where`` or ``after`` that ``before`` does not bind, outputs that
        do not match.
    """
    source = SourceText(text, origin)
    raw: RawRule = parse_raw(source, "rule")
    return _RuleReader(source).rule(raw)


class _RuleReader(TypeReader):
    """Resolves the names of a raw rule."""

    def __init__(self, source: SourceText) -> None:
        super().__init__(source, None)

    def rule(self, raw: RawRule) -> Rule:
        clauses = self._clauses(raw)
        before = self._pattern(clauses["before"].payload[0])
        after = self._pattern(clauses["after"].payload[0])
        self._check_sides(clauses, before, after)
        where = clauses.get("where")
        condition = read_where(self.source, where.payload[0]) if where else None
        if where:
            self._check_bound(where.keyword, condition, before)
        return Rule(
            name=unquote(self.source, raw.name),
            why=unquote(self.source, clauses["why"].payload[0]),
            needs=tuple(unquote(self.source, token) for token in _payload(clauses, "needs")),
            phase=self._phase(_payload(clauses, "phase")),
            priority=integer(self.source, *_payload(clauses, "priority"))
            if "priority" in clauses
            else 0,
            where=condition,
            before=before,
            after=after,
            source_path=self.source.origin,
        )

    def _clauses(self, raw: RawRule) -> dict[str, RawRuleClause]:
        found: dict[str, RawRuleClause] = {}
        for clause in raw.clauses:
            if clause.keyword in found:
                raise self.source.error(clause.keyword, f"`{clause.keyword}` stands twice")
            found[str(clause.keyword)] = clause
        for keyword in ("why", "before", "after"):
            if keyword not in found:
                raise self.source.error(
                    raw.name,
                    f"rule {raw.name} has no `{keyword}`",
                    "a rule needs why, before and after",
                )
        return found

    def _phase(self, tokens: list[Any]) -> str:
        if not tokens:
            return ""
        if tokens[0] not in PHASES:
            raise self.source.error(
                tokens[0], f"unknown phase {tokens[0]}", f"known: {', '.join(PHASES)}"
            )
        return str(tokens[0])

    def _pattern(self, raw: RawGraph) -> Pattern:
        scope: dict[str, None] = {}
        if raw.sections:
            raise self.source.error(
                raw.sections[0][0],
                f"a pattern has no section `{raw.sections[0][0]}`",
                "put @weights and $states among the parameters",
            )
        params = tuple([self._param(decl, scope) for decl in raw.params])
        return Pattern(
            params=params,
            ops=tuple([self._op(op, scope) for op in raw.ops]),
            outputs=self._names(raw.outputs, scope),
            state_outputs=self._names(raw.state_outputs, scope),
        )

    def _param(self, decl: RawDecl, scope: dict[str, None]) -> Param:
        name = ref_name(self.source, decl.name)
        type_ = self._type_pattern(decl.type)
        if (name[0] == "$") != isinstance(type_, StatePattern):
            raise self.source.error(
                decl.name,
                f"{name} cannot have the type {type_}",
                "$kv: state, %x: t[T,D], @w: t[D]",
            )
        if name[0] == "s":
            raise self.source.error(decl.name, f"{name} is no parameter", "read it where needed")
        return Param(self._define(decl.name, scope), type_)

    def _define(self, token: "Token", scope: dict[str, None]) -> str:
        name = ref_name(self.source, token)
        if name in scope:
            raise self.source.error(
                token, f"{name} is defined twice", "every value has one definition: rename it"
            )
        scope[name] = None
        return name

    def _names(self, tokens: "Iterable[Token]", scope: dict[str, None]) -> tuple[str, ...]:
        return tuple([self._name(token, scope) for token in tokens])

    def _name(self, token: "Token", scope: dict[str, None]) -> str:
        name = ref_name(self.source, token)
        if name in scope:
            return name
        if name[0] == "s":
            try:
                return step_value(name.removeprefix("step.")).name
            except TypeMismatch as error:
                raise self.source.reword(token, error) from None
        raise self.source.error(token, f"{name} is used but not defined", nearest(name, scope))

    def _op(self, raw: RawOp, scope: dict[str, None]) -> PatternOp:
        name = unquote(self.source, raw.name)
        operands = self._names(raw.operands, scope)
        attrs: dict[str, PatternAttr] = {}
        types: tuple[AnyPattern, ...] = ()
        seen: set[str] = set()
        for tag, payload in raw.clauses:
            if tag not in ("attrs", "types") or tag in seen:
                what = "stands twice" if tag in seen else "has no meaning in a rule"
                raise self.source.error(raw.name, f"{raw.name}: {tag} {what}")
            seen.add(tag)
            if tag == "attrs":
                attrs.update(self.attrs(payload))
            else:
                types = tuple(map(self._type_pattern, payload))
        if raw.label is not None:
            self.label(raw.name, raw.label, attrs)
        if types and len(types) != len(raw.targets):
            raise self.source.error(
                raw.name, f"{raw.name}: {len(raw.targets)} results but {len(types)} result types"
            )
        results = tuple([self._result(token, scope) for token in raw.targets])
        pairs = sorted(attrs.items(), key=lambda pair: pair[0])
        return PatternOp(name, operands, results, tuple(pairs), types)

    def _result(self, token: "Token", scope: dict[str, None]) -> str:
        if token[0] != "%":
            raise self.source.error(token, f"{token} cannot be a result", "results are named %name")
        return self._define(token, scope)

    def variable(self, token: "Token") -> AttrVar:
        """Read ``$name`` where an attribute's value stands."""
        name = ref_name(self.source, token)
        if name[0] != "$":
            raise self.source.error(token, f"{name} is no attribute", "variables are written $name")
        return AttrVar(name[1:])

    def check_symbols(self, token: "Token", size: Dim) -> None:
        """Refuse a size variable in lower case, which a reader takes for an element type."""
        for name in sorted(size.symbols()):
            if not _SIZE.fullmatch(name):
                raise self.source.error(
                    token,
                    f"size variable {name} must begin with a capital",
                    f"write {name.upper()}",
                )

    def _type_pattern(self, raw: RawType) -> AnyPattern:
        if isinstance(raw, RawNamedType) and raw.token == "state":
            return StatePattern()
        if not isinstance(raw, RawTensor):
            raise self.source.error(
                raw.token, f"{raw.token} is no type of a pattern", "write t[T,D], t[*] or state"
            )
        if raw.sharding or raw.layout is not None:
            raise self.source.error(raw.token, "a pattern's type has no sharding and no layout")
        head = raw.token.partition("[")[0]
        free = _FREE.match(raw.token, len(head))
        at = len(head) if free is None else free.end() - 1
        shape = parse_shape(self.source, raw.token, "[" + raw.token[at + 1 :], at)
        for size in shape:
            self.check_symbols(raw.token, size)
        if free and bool(shape) != bool(free[2]):
            raise self.source.error(raw.token, f"bad sizes in {raw.token}", "t[*] or t[..., D]")
        return TypePattern(self._dtype(raw.token, head), shape, free is not None)

    def _dtype(self, token: "Token", text: str) -> DType | DTypeVar:
        try:
            return parse_dtype(text)
        except TypeMismatch as error:
            if _LIKE_A_DTYPE.fullmatch(text) or not _DTYPE_VARIABLE.fullmatch(text):
                raise self.source.reword(token, error) from None
        except ValueError:
            raise self.source.error(token, f"bad element type {text[:40]!r}") from None
        return DTypeVar(text)

    def _check_sides(
        self, clauses: dict[str, RawRuleClause], before: Pattern, after: Pattern
    ) -> None:
        """Refuse sides that do not replace one another."""
        at = clauses["after"].keyword
        known = {param.name: param for param in before.params}
        for param in after.params:
            if known.get(param.name) != param:
                raise self.source.error(
                    at,
                    f"parameter {param.name}: {param.type} of `after` is not one of `before`",
                    "give both sides the same parameters",
                )
        for kind in ("outputs", "state_outputs"):
            had, has = len(getattr(before, kind)), len(getattr(after, kind))
            if had != has:
                what = kind.replace("_", " ")
                raise self.source.error(at, f"`before` has {had} {what}, `after` has {has}")
        for kind in ("size_variables", "dtype_variables", "attr_variables"):
            free = sorted(getattr(after, kind)() - getattr(before, kind)())
            if free:
                raise self.source.error(at, f"{free[0]} of `after` is not bound by `before`")
        self._check_fused(at, before, after)

    def _check_fused(self, at: "Token", before: Pattern, after: Pattern) -> None:
        """A fused group stands for the whole of ``before``."""
        fused = [op for op in after.ops if op.name == "fused"]
        if not fused:
            return
        given = {name for name in fused[0].operands if not name.startswith("step.")}
        whole = (
            len(after.ops) == 1
            and given == {param.name for param in before.params}
            and fused[0].results == (*after.outputs, *after.state_outputs)
        )
        if not whole:
            raise self.source.error(
                at,
                "a fused group stands for the whole of `before`",
                "let it be the only op, take all parameters and make all outputs in their order",
            )
        if "kind" not in dict(fused[0].attrs):
            raise self.source.error(at, "a fused group needs its kind", "write fused[NAME](...)")

    def _check_bound(self, at: "Token", where: Where | None, before: Pattern) -> None:
        """Refuse names in ``where`` that matching cannot bind."""
        bound = {
            *before.size_variables(),
            *(f"{name}.bits" for name in before.dtype_variables()),
            *(f"${name}" for name in before.attr_variables()),
        }
        for name in sorted(names_of(where) - bound):
            if not name.startswith("device."):
                raise self.source.error(
                    at,
                    f"{name} in `where` is not bound by `before`",
                    nearest(name, sorted(bound)) or "fields of the device are device.NAME",
                )


def _payload(clauses: dict[str, RawRuleClause], keyword: str) -> list[Any]:
    return clauses[keyword].payload if keyword in clauses else []
