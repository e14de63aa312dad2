"""From text to raw syntax: runs the grammar, keeps positions, words syntax errors.

Nothing here knows what a name means. ``parser.py`` turns the raw nodes into graphs and ``rules.py``
into rules; both report faults at a token of the text through ``SourceText.error``.
"""

import difflib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from metainfer.ir.dims import Dim, Quotient, dim
from metainfer.ir.errors import ParseError, TypeMismatch

if TYPE_CHECKING:
    from lark import Lark, Token, Transformer, UnexpectedInput

MAX_NESTING = 32
_WIDEST_LINE = 160
_MOST_WORDS = 8
_DECODER = json.JSONDecoder(strict=False)


class RawTensor(NamedTuple):
    """``bf16[T,576] @ (tp=S1) as "layout"``; the token holds dtype and sizes."""

    token: "Token"
    sharding: "list[tuple[Token, Token]]"
    layout: "Token | None"


class RawState(NamedTuple):
    """``pages(k: bf16[3,64]) per token page 16``."""

    token: "Token"
    fields: "list[tuple[Token, RawTensor]]"
    growth: "Token"
    page: "Token | None"


class RawNamedType(NamedTuple):
    """A bare word where a type stands: ``state``, in rules."""

    token: "Token"


RawType = RawTensor | RawState | RawNamedType


class RawDecl(NamedTuple):
    """``%x: bf16[T,576]``."""

    name: "Token"
    type: RawType


class RawDim(NamedTuple):
    """``dim(2*T+1)`` as an attribute; an error where the size cannot be."""

    token: "Token"
    size: Dim | TypeMismatch


class RawTuple(NamedTuple):
    """A tuple of attribute values: tokens, RawDim or RawTuple."""

    items: list[Any]


class RawChoice(NamedTuple):
    """One row of ``by {T <= 16: a, else: b}``; ``else`` has no symbol."""

    symbol: "Token | None"
    limit: "Token | None"
    kernel: "Token"


class RawClause(NamedTuple):
    """What follows an op's operands: attrs, types, loc, stream, after, by or body."""

    tag: str
    payload: Any


class RawOp(NamedTuple):
    """One op; the label is the word after ``call`` or in the brackets of ``fused[...]``."""

    targets: "list[Token]"
    name: "Token"
    label: "Token | None"
    operands: "list[Token]"
    clauses: list[RawClause]


class RawGraph(NamedTuple):
    """A graph, block, body or pattern."""

    name: "Token | None"
    params: list[RawDecl]
    sections: "list[tuple[Token, list[RawDecl]]]"
    ops: list[RawOp]
    outputs: "list[Token]"
    state_outputs: "list[Token]"


class RawModule(NamedTuple):
    """A module: its items in the order of the text, tagged by their rule's name."""

    name: "Token"
    items: list[RawClause]


class RawRuleClause(NamedTuple):
    """One clause of a rule: its keyword, and what follows."""

    keyword: "Token"
    payload: list[Any]


class RawRule(NamedTuple):
    """A rule before its names are checked."""

    name: "Token"
    clauses: list[RawRuleClause]


@dataclass(frozen=True)
class SourceText:
    """A text under reading, and where it came from ("" if nobody knows)."""

    text: str
    origin: str = ""

    def error(self, at: "Token | int", what: str, advice: str = "") -> ParseError:
        """Make the error that points at a token, or at a 0-based offset."""
        offset = at if isinstance(at, int) else (at.start_pos or 0)
        length = 1 if isinstance(at, int) else max(1, len(at.split("\n", 1)[0]))
        start = self.text.rfind("\n", 0, offset) + 1
        column = offset - start + 1
        line = self.text[start:].split("\n", 1)[0].rstrip("\r")
        return ParseError(
            what,
            line=self.text.count("\n", 0, offset) + 1,
            column=column,
            text=_with_caret(line, column - 1, length),
            origin=self.origin,
            advice=advice,
        )

    def reword(self, at: "Token | int", error: TypeMismatch) -> ParseError:
        """Give an error of a type's or size's constructor its place in the text."""
        return self.error(at, error.what, error.advice)


def nearest(name: str, known: Iterable[str]) -> str:
    """Advice naming the known word closest to a wrong one, or all of a few."""
    words = list(known)
    close = difflib.get_close_matches(name, words, n=1)
    if close:
        return f"did you mean {close[0]}?"
    if not words:
        return ""
    return f"known: {', '.join(words[:12])}{', ...' if len(words) > 12 else ''}"


def unquote(source: SourceText, token: "Token") -> str:
    """The string that a bare word or a quoted token stands for.

    Raises: ParseError if an escape is not one of JSON's.
    """
    if not token.startswith('"'):
        return str(token)
    try:
        return str(_DECODER.decode(token))
    except ValueError as error:
        raise source.error(
            token, f"bad escape in a string: {error}", 'write \\" \\\\ \\n \\t or \\u00e9'
        ) from None


def ref_name(source: SourceText, token: "Token") -> str:
    """Name of a value with its sigil: ``@"odd name"`` gives ``@odd name``."""
    if token[1:2] != '"':
        return str(token)
    try:
        return token[0] + str(_DECODER.decode(token[1:]))
    except ValueError as error:
        raise source.error(token, f"bad escape in a name: {error}") from None


def integer(source: SourceText, token: "Token") -> int:
    """Read an integer token.

    Raises: ParseError if Python refuses its length.
    """
    try:
        return int(token)
    except ValueError:
        raise source.error(token, f"a number of {len(token)} digits is too long") from None


def parse_raw(source: SourceText, start: str) -> Any:
    """Run the grammar over a text from one of its starts: module, graph or rule.

    Raises: ParseError where the text is not of the grammar.
    """
    from lark import UnexpectedInput

    try:
        return _grammar().parse(source.text, start=start)
    except UnexpectedInput as error:
        raise _syntax_error(source, error) from None


def parse_shape(source: SourceText, token: "Token", brackets: str, offset: int) -> tuple[Dim, ...]:
    """Read sizes in brackets, which stand ``offset`` characters into a token.

    Raises: ParseError where they are not sizes.
    """
    from lark import UnexpectedInput

    base = (token.start_pos or 0) + offset
    try:
        sizes = _shape(brackets)
    except UnexpectedInput as error:
        at = base + min(_offset(error, brackets), len(brackets) - 1)
        what, advice = _explain(error)
        raise source.error(at, what, advice) from None
    for size in sizes:
        if isinstance(size, TypeMismatch):
            raise source.reword(base, size)
    return sizes  # type: ignore[return-value]


@lru_cache(maxsize=4096)
def _shape(brackets: str) -> tuple[Dim | TypeMismatch, ...]:
    return tuple(_grammar().parse(brackets, start="shape"))  # type: ignore[arg-type]


@cache
def _grammar() -> "Lark":
    """Build the parser on first use: lark's import and the tables take a third of a second."""
    from lark import Lark

    text = files("metainfer.ir").joinpath("grammar.lark").read_text(encoding="utf-8")
    return Lark(
        text,
        parser="lalr",
        start=["module", "graph", "rule", "shape"],
        transformer=cast("Transformer[Token, Any]", _Build()),
        maybe_placeholders=True,
    )


# ---- raw nodes ---------------------------------------------------------------------------------


def _graph(name: "Token | None", params: list[RawDecl] | None, rest: list[Any]) -> RawGraph:
    sections, ops, (outputs, state_outputs) = rest
    return RawGraph(name, params or [], sections, ops, outputs, state_outputs)


def _tagged(tag: str) -> Callable[[object, list[Any]], RawClause]:
    return lambda _, children: RawClause(tag, children)


def _listed(_: object, children: list[Any]) -> list[Any]:
    return children


def _size(make: Callable[..., Dim]) -> Callable[[object, list[Any]], Dim | TypeMismatch]:
    """Lift size arithmetic: an error becomes the value, so that the reader can place it."""

    def build(_: object, children: list[Any]) -> Dim | TypeMismatch:
        for child in children:
            if isinstance(child, TypeMismatch):
                return child
        try:
            size = make(*children)
        except TypeMismatch as error:
            return error
        except ValueError:
            return TypeMismatch("a number in a size is too long")
        if _nesting(size) > MAX_NESTING:
            return TypeMismatch("a size is nested too deeply")
        return size

    return build


def _nesting(size: Dim) -> int:
    inner = [atom.inner for atom, _ in size.terms if isinstance(atom, Quotient)]
    return 1 + max(map(_nesting, inner), default=0)


class _Build:
    """Callbacks of the grammar's rules; each gets the list of its children."""

    def module(self, children: list[Any]) -> RawModule:
        return RawModule(children[0], children[1:])

    mesh = _tagged("mesh")
    axis = _listed
    size = _tagged("size")
    step = _tagged("step")

    def load(self, children: list[Any]) -> RawClause:
        return RawClause("load", _graph(children[0], children[1], children[2:]))

    def block(self, children: list[Any]) -> RawClause:
        return RawClause("graph", _graph(children[0], children[1], children[2:]))

    main = block

    def graph(self, children: list[Any]) -> RawGraph:
        return _graph(children[0], children[1], children[2:])

    params = sections = ops = targets = operands = _listed

    def decl(self, children: list[Any]) -> RawDecl:
        return RawDecl(children[0], children[1])

    def section(self, children: list[Any]) -> "tuple[Token, list[RawDecl]]":
        return children[0], children[1:]

    def plain_op(self, children: list[Any]) -> RawOp:
        targets, name, operands, *clauses = children
        return RawOp(targets or [], name, None, operands or [], clauses)

    def labelled_op(self, children: list[Any]) -> RawOp:
        targets, name, label, operands, *clauses = children
        return RawOp(targets or [], name, label, operands or [], clauses)

    def leave(self, children: list[Any]) -> "tuple[list[Token], list[Token]]":
        outputs, states = children
        return outputs or [], states or []

    attrs = _tagged("attrs")
    attr = _listed
    types = _tagged("types")
    loc = _tagged("loc")
    stream = _tagged("stream")
    after = _tagged("after")
    by = _tagged("by")

    def bounded(self, children: list[Any]) -> RawChoice:
        return RawChoice(*children)

    def otherwise(self, children: list[Any]) -> RawChoice:
        return RawChoice(None, None, children[0])

    def body(self, children: list[Any]) -> RawClause:
        return RawClause("body", _graph(children[0], children[1], children[2:]))

    def several(self, children: list[Any]) -> RawTuple:
        return RawTuple(children)

    def dim_value(self, children: list[Any]) -> RawDim:
        return RawDim(children[0], children[1])

    def tensor(self, children: list[Any]) -> RawTensor:
        token, sharding, layout = children
        return RawTensor(token, sharding or [], layout)

    sharding = placement = field = _listed

    def state(self, children: list[Any]) -> RawState:
        kind, *fields, growth, page = children
        return RawState(kind, fields, growth, page)

    def named_type(self, children: list[Any]) -> RawNamedType:
        return RawNamedType(children[0])

    shape = _listed
    number = _size(lambda digits: dim(int(digits)))
    symbol = _size(lambda name: dim(str(name)))
    negative = _size(lambda a: a * -1)
    add = _size(lambda a, b: a + b)
    subtract = _size(lambda a, b: a - b)
    multiply = _size(lambda a, b: a * b)
    divide = _size(lambda a, n: a // int(n))
    ceildiv = _size(lambda a, n: a.ceildiv(int(n)))

    def rule(self, children: list[Any]) -> RawRule:
        return RawRule(children[0], children[1:])

    def rule_clause(self, children: list[Any]) -> RawRuleClause:
        keyword, *payload = children
        if keyword.type in ("BEFORE", "AFTER"):
            return RawRuleClause(keyword, [_graph(None, payload[0], payload[1:])])
        return RawRuleClause(keyword, payload)


# ---- wording -----------------------------------------------------------------------------------


def _with_caret(line: str, start: int, length: int) -> str:
    """The line with carets under a part of it; a long line is cut around the part."""
    if len(line) > _WIDEST_LINE:
        first = max(0, start - _WIDEST_LINE // 2)
        line = line[first : first + _WIDEST_LINE]
        start -= first
    pad = "".join("\t" if c == "\t" else " " for c in line[:start])
    return f"{line}\n{pad}{'^' * max(1, min(length, len(line) - start))}"


def _offset(error: "UnexpectedInput", text: str) -> int:
    from lark import UnexpectedToken

    at_end = isinstance(error, UnexpectedToken) and error.token.type == "$END"
    position = len(text.rstrip()) if at_end else error.pos_in_stream
    return position or 0


def _syntax_error(source: SourceText, error: "UnexpectedInput") -> ParseError:
    what, advice = _explain(error)
    return source.error(_offset(error, source.text), what, advice)


def _explain(error: "UnexpectedInput") -> tuple[str, str]:
    """Say what stands there and what could stand instead."""
    from lark import UnexpectedCharacters, UnexpectedToken

    if isinstance(error, UnexpectedToken):
        found = "end of the text" if error.token.type == "$END" else repr(str(error.token))
        return f"unexpected {found}", _expected(error.accepts or error.expected)
    if isinstance(error, UnexpectedCharacters):
        return f"unexpected character {error.char!r}", _expected(error.allowed or ())
    return "text that is not of the language", ""


def _expected(terminals: Iterable[str]) -> str:
    words = sorted(set(_words(terminals)))
    if len(words) > _MOST_WORDS:
        words = [*words[:_MOST_WORDS], "..."]
    return f"expected {' or '.join(words)}" if words else ""


def _words(terminals: Iterable[str]) -> Iterator[str]:
    spelled = {t.name: t.pattern.value for t in _grammar().terminals if t.pattern.type == "str"}
    for name in terminals:
        if name in spelled:
            yield f"`{spelled[name]}`"
        elif name in _NAMES:
            yield _NAMES[name]


_NAMES = {
    "$END": "the end of the text",
    "REF": "a value such as %x, @weight or $state",
    "TENSOR": "a type such as f32[T,64]",
    "NAME": "a name",
    "STRING": 'a "string"',
    "NUMBER": "a number",
    "INT": "an integer",
    "UINT": "an integer",
    "UNSIGNED": "a number",
    "SYMBOL": "a size symbol",
    "PATH": "a size or device field",
    "COMPARISON": "a comparison",
    "SIGN": "`+` or `-`",
    "SCALE": "`*`, `//` or `%`",
    "BOOL": "`true` or `false`",
}
