"""Print modules, graphs and ops in the text form of ``grammar.lark``.

The output is canonical: equal values print equal text, and ``parser.py`` reads it back to an equal
value. Names that are not bare words are quoted: ``@"odd name"``.
"""

import json
import re
from collections.abc import Iterable, Sequence

from metainfer.ir.dims import Dim
from metainfer.ir.graph import Attr, Choice, Graph, Module, Op, Value
from metainfer.ir.types import StateType, TensorType, Type

# Words that mean something where an op's name could stand; an op so named is printed in quotes.
RESERVED_OP_NAMES = frozenset(
    "after as block body by call dim fused graph load loc main mesh module page per return rule "
    "states step stream weights".split()
)
_BARE_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-/]*")
# A colon is bare only where the reader cannot take what follows for a type.
_BARE_REF = re.compile(
    r"[A-Za-z0-9_.\-/]+(?:(?<=\.)\*(?=\.)[A-Za-z0-9_.\-/]+)*(?::(?!state$)[A-Za-z0-9_.\-/]+)*"
)
_STEP_FIELD = re.compile(r"step\.[A-Za-z0-9_]+")


def print_module(module: Module) -> str:
    """Print a module: mesh, sizes, step, load graphs, blocks and main, in this order."""
    lines = [f"module {word(module.name)} {{"]
    if module.mesh.axes:
        axes = ", ".join(f"{word(name)}={size}" for name, size in module.mesh.axes)
        lines.append(f"  mesh ({axes})")
    lines += [f"  dim {s.name} in [{s.low}, {s.high}]" for s in module.symbols]
    if module.has_step:
        lines.append("  step")
    types = _Types()
    for load in module.loads:
        params = f"({_decls(load.inputs, types)})" if load.inputs else ""
        _graph(lines, f"load {word(load.name)}{params}", load, "  ", types)
    for graph in module.graphs:
        head = "main" if graph.name == "main" else f"block {word(graph.name)}"
        _graph(lines, f"{head}({_decls(graph.inputs, types)})", graph, "  ", types)
    lines.append("}")
    return "\n".join(lines) + "\n"


def print_graph(graph: Graph) -> str:
    """Print a bare graph: ``graph NAME(%x: f32[4]) {...}``."""
    lines: list[str] = []
    types = _Types()
    _graph(lines, f"graph {word(graph.name)}({_decls(graph.inputs, types)})", graph, "", types)
    return "\n".join(lines) + "\n"


def print_op(op: Op) -> str:
    """Print an op on one line, for messages; a body is shown as ``body {...}``."""
    text = _op(op, _Types())
    return f"{text} body {{...}}" if op.body else text


def print_op_with_caret(op: Op, operand_index: int) -> str:
    """Print an op on one line, and carets under one of its operands on the next."""
    before = _head(op) + ", ".join(ref(v.name) for v in op.operands[:operand_index])
    start = len(before) + (2 if operand_index else 0)
    marks = "^" * len(ref(op.operands[operand_index].name))
    return f"{print_op(op)}\n{' ' * start}{marks}"


def word(name: str) -> str:
    """Print a name without a sigil, quoted unless it is a bare word."""
    return name if _BARE_WORD.fullmatch(name) else quote(name)


def op_word(name: str) -> str:
    """Print an op's name, quoted also where it is one of the grammar's words."""
    return quote(name) if name in RESERVED_OP_NAMES else word(name)


def ref(name: str) -> str:
    """Print a value's name: ``%0``, ``@w``, ``@"odd name"``, ``step.slots``."""
    if _BARE_REF.fullmatch(name, 1) and name[0] in "%@$":
        return name
    if _STEP_FIELD.fullmatch(name):
        return name
    return name[:1] + quote(name[1:])


def quote(text: str) -> str:
    """Print a string with JSON's escapes, readable characters as they are."""
    return json.dumps(text, ensure_ascii=not text.isprintable())


def print_attr(value: Attr) -> str:
    """Print an attribute's value: ``1``, ``1e-05``, ``true``, ``"text"``, ``(1,)``, ``dim(T)``."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return quote(value)
    if isinstance(value, Dim):
        return f"dim({value})"
    inner = ", ".join(map(print_attr, value))
    return f"({inner},)" if len(value) == 1 else f"({inner})"


def print_type(type_: Type) -> str:
    """Print a type with names quoted where they must be."""
    if isinstance(type_, StateType):
        inner = ", ".join(f"{word(name)}: {print_type(field)}" for name, field in type_.fields)
        page = f" page {type_.page_size}" if type_.page_size else ""
        return f"{type_.kind}({inner}) per {type_.growth}{page}"
    text = f"{type_.dtype}[{','.join(map(str, type_.shape))}]"
    if type_.sharding.axes:
        text += f" @ {_sharding(type_)}"
    return f"{text} as {quote(type_.layout)}" if type_.layout else text


def _sharding(type_: TensorType) -> str:
    axes = (
        f"{word(axis)}={f'S{place}' if isinstance(place, int) else word(place)}"
        for axis, place in type_.sharding.axes
    )
    return f"({', '.join(axes)})"


class _Types:
    """Texts of types already printed, by identity: graphs share few type objects."""

    def __init__(self) -> None:
        # The type is kept beside its text, so that its identity is not reused.
        self._texts: dict[int, tuple[Type, str]] = {}

    def text(self, type_: Type) -> str:
        found = self._texts.get(id(type_))
        if found is None:
            found = self._texts[id(type_)] = (type_, print_type(type_))
        return found[1]


def _decls(values: Iterable[Value], types: _Types) -> str:
    return ", ".join(f"{ref(v.name)}: {types.text(v.type)}" for v in values)


def _graph(lines: list[str], head: str, graph: Graph, indent: str, types: _Types) -> None:
    lines.append(f"{indent}{head} {{")
    inner = indent + "  "
    _section(lines, "weights", graph.weights, inner, types)
    _section(lines, "states", graph.states, inner, types)
    _ops(lines, graph, inner, types)
    lines.append(f"{indent}}}")


def _section(
    lines: list[str], keyword: str, values: Sequence[Value], indent: str, types: _Types
) -> None:
    if not values:
        return
    lines.append(f"{indent}{keyword} {{")
    lines += [f"{indent}  {ref(v.name)} : {types.text(v.type)}" for v in values]
    lines.append(f"{indent}}}")


def _ops(lines: list[str], graph: Graph, indent: str, types: _Types) -> None:
    for op in graph.ops:
        text = indent + _op(op, types)
        if op.body is None:
            lines.append(text)
        else:
            _body(lines, text, op.body, indent, types)
    names = ([v.name for v in values] for values in (graph.outputs, graph.state_outputs))
    lines.append(indent + print_return(*names))


def _body(lines: list[str], head: str, body: Graph, indent: str, types: _Types) -> None:
    name = "" if body.name == "body" else f"{word(body.name)} "
    params = _decls((*body.inputs, *body.weights, *body.states), types)
    lines.append(f"{head} body {name}({params}) {{")
    _ops(lines, body, indent + "  ", types)
    lines.append(f"{indent}}}")


def print_return(outputs: Sequence[str], state_outputs: Sequence[str]) -> str:
    """Print ``return %0, %1 states %2``."""
    text = "return"
    if outputs:
        text += " " + ", ".join(map(ref, outputs))
    if state_outputs:
        text += " states " + ", ".join(map(ref, state_outputs))
    return text


def label_of(op_name: str, attrs: Sequence[tuple[str, object]]) -> tuple[str, str] | None:
    """Attribute of a fused group or call that is printed with its name, and its value."""
    key = {"fused": "kind", "call": "block"}.get(op_name)
    for name, value in attrs if key else ():
        if name == key and isinstance(value, str):
            return name, value
    return None


def print_head(op_name: str, results: Iterable[str], label: tuple[str, str] | None) -> str:
    """Print an op up to its parenthesis: ``%0, %1 = fused[add_rms_norm](``."""
    made = ", ".join(map(ref, results))
    left = f"{made} = " if made else ""
    if label is None:
        name = op_name if op_name in ("fused", "call") else op_word(op_name)
        return f"{left}{name}("
    shown = f"fused[{word(label[1])}]" if op_name == "fused" else f"call {word(label[1])}"
    return f"{left}{shown}("


def _head(op: Op) -> str:
    return print_head(op.name, (v.name for v in op.results), label_of(op.name, op.attrs))


def _op(op: Op, types: _Types) -> str:
    """Print an op without its body."""
    label = label_of(op.name, op.attrs)
    parts = [
        print_head(op.name, [v.name for v in op.results], label),
        ", ".join([ref(v.name) for v in op.operands]),
        ")",
    ]
    shown = [f"{word(k)} = {print_attr(v)}" for k, v in op.attrs if label is None or k != label[0]]
    if shown:
        parts.append(f" {{{', '.join(shown)}}}")
    if op.results:
        parts.append(" : " + ", ".join([types.text(v.type) for v in op.results]))
    if op.source is not None:
        parts.append(f" loc({quote(op.source.file)}:{op.source.line})")
    if op.stream:
        parts.append(f" stream {op.stream}")
    if op.after:
        parts.append(f" after {', '.join(map(ref, op.after))}")
    if op.choices:
        parts.append(f" by {{{', '.join(map(_choice, op.choices))}}}")
    return "".join(parts)


def _choice(choice: Choice) -> str:
    if not choice.symbol:
        return f"else: {word(choice.kernel)}"
    return f"{choice.symbol} <= {choice.limit}: {word(choice.kernel)}"
