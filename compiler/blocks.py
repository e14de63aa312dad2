"""Blocks: layers whose text, weights and states are equal become one block, called by prefix."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from metainfer.compiler.lowering import Lowering
from metainfer.ir.graph import Attr, Graph, Module, Op, Value, attrs_of
from metainfer.ir.printer import print_graph
from metainfer.ir.types import Symbol

_LEAST_OPS = 3  # a shorter layer is no easier to read as a call


@dataclass(frozen=True)
class Flat:
    """A captured model before it is cut into blocks.

    Attributes:
        name: of the model.
        inputs: main's inputs.
        weights: all weights, full names.
        state: the lowering: ops, their owners, states.
        outputs: main's outputs.
        symbols: size symbols.
        has_step: whether it is a language model.
    """

    name: str
    inputs: tuple[Value, ...]
    weights: tuple[Value, ...]
    state: Lowering
    outputs: tuple[Value, ...]
    symbols: tuple[Symbol, ...]
    has_step: bool


@dataclass
class _Segment:
    """Consecutive ops of one layer (prefix ends in "."), or of none (prefix "")."""

    prefix: str
    ops: list[Op]


def split_blocks(flat: Flat, model: nn.Module) -> Module:
    """Cut the list of ops at layer borders and merge equal layers into blocks."""
    layers = _layer_prefixes(model)
    segments = _segments(flat, layers)
    used_later = _used_later(segments, flat)
    blocks: dict[str, Graph] = {}
    main_ops: list[Op] = []
    finals = {f"${n}": v for n, v in flat.state.final.items()}
    for segment, later in zip(segments, used_later, strict=True):
        if not segment.prefix:
            main_ops += segment.ops
            continue
        graph, call = _as_block(segment, later, flat, finals)
        name = _named(graph, blocks, layers[segment.prefix])
        main_ops.append(replace(call, attrs=attrs_of({**call.attr, "block": name})))
    main = _main(flat, main_ops, finals)
    return Module(
        flat.name,
        flat.symbols,
        graphs=(*blocks.values(), main),
        has_step=flat.has_step,
    )


def _layer_prefixes(model: nn.Module) -> dict[str, str]:
    """Prefix -> block name, for children of module lists that hold like modules."""
    found: dict[str, str] = {}
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or len(module) < 2:
            continue
        if any(path.startswith(prefix) for prefix in found):
            continue  # the outermost list gives the blocks
        names = [type(child).__name__ for child in module]
        if isinstance(module, nn.Sequential) and len(set(names)) != 1:
            continue
        for index, child in enumerate(module):
            found[f"{path}.{index}." if path else f"{index}."] = _snake(type(child).__name__)
    return found


def _snake(name: str) -> str:
    return "".join("_" + c.lower() if c.isupper() and i else c.lower() for i, c in enumerate(name))


def _segments(flat: Flat, layers: dict[str, str]) -> list[_Segment]:
    segments: list[_Segment] = []
    for op, owner in zip(flat.state.builder.ops, flat.state.owner, strict=True):
        path = owner + "."
        prefix = next((p for p in _heads(path) if p in layers), "")
        if not segments or segments[-1].prefix != prefix:
            segments.append(_Segment(prefix, []))
        segments[-1].ops.append(op)
    counts: dict[str, int] = {}
    for segment in segments:
        counts[segment.prefix] = counts.get(segment.prefix, 0) + 1
    for segment in segments:
        # A layer that is visited twice shares weights between calls; it stays inline.
        if counts[segment.prefix] > 1 or len(segment.ops) < _LEAST_OPS:
            segment.prefix = ""
    return segments


def _heads(path: str) -> list[str]:
    """All dotted prefixes of a path, shortest first: "a.b.c." -> a., a.b., a.b.c."""
    heads = []
    start = path.find(".")
    while start >= 0:
        heads.append(path[: start + 1])
        start = path.find(".", start + 1)
    return heads


def _used_later(segments: Sequence[_Segment], flat: Flat) -> list[set[str]]:
    """For each segment, names that are read after it."""
    later = {v.name for v in flat.outputs}
    result: list[set[str]] = []
    for segment in reversed(segments):
        result.append(set(later))
        later |= {v.name for op in segment.ops for v in op.operands}
    return result[::-1]


def _as_block(
    segment: _Segment, later: set[str], flat: Flat, finals: dict[str, Value]
) -> tuple[Graph, Op]:
    made = {v.name for op in segment.ops for v in op.results}
    inputs: dict[str, Value] = {}
    weights: dict[str, Value] = {}
    states: dict[str, Value] = {}
    for op in segment.ops:
        for value in op.operands:
            if value.name in made or value.name.startswith("step."):
                continue
            group = {"@": weights, "$": states}.get(value.name[0], inputs)
            group[value.name] = value
    outputs = [v for op in segment.ops for v in op.results if v.name in later and not v.is_state]
    renamed = _relative_names(segment, inputs, weights, states)

    def local(value: Value) -> Value:
        return Value(renamed.get(value.name, value.name), value.type)

    ops = tuple(
        replace(
            op,
            operands=tuple(local(v) for v in op.operands),
            results=tuple(local(v) for v in op.results),
        )
        for op in segment.ops
    )
    graph = Graph(
        "",
        tuple(local(v) for v in inputs.values()),
        tuple(local(v) for v in weights.values()),
        tuple(local(v) for v in states.values()),
        ops,
        tuple(local(v) for v in outputs),
        tuple(local(finals[name]) for name in states),
    )
    shared = tuple(
        (renamed[name][1:], name[1:])
        for name in (*weights, *states)
        if not name[1:].startswith(segment.prefix)
    )
    attrs: dict[str, Attr] = {"prefix": segment.prefix}
    if shared:
        attrs["bind"] = shared
    call = Op("call", tuple(inputs.values()), tuple(outputs), attrs_of(attrs))
    return graph, call


def _relative_names(
    segment: _Segment, inputs: dict[str, Value], weights: dict[str, Value], states: dict[str, Value]
) -> dict[str, str]:
    """Block-local names: inputs %x0.., weights and states without the prefix, results %0.."""
    renamed = {name: f"%x{i}" if len(inputs) > 1 else "%x" for i, name in enumerate(inputs)}
    for name in (*weights, *states):
        bare = name[1:]
        local = bare.removeprefix(segment.prefix)
        renamed[name] = f"{name[0]}{local}"
    number = 0
    for op in segment.ops:
        for value in op.results:
            renamed[value.name] = f"%{number}"
            number += 1
    return renamed


def _named(graph: Graph, blocks: dict[str, Graph], base: str) -> str:
    """The name under which an equal block stands already, else a new one."""
    text = print_graph(replace(graph, name="block"))
    for name, known in blocks.items():
        if print_graph(replace(known, name="block")) == text:
            return name
    name = base if base not in blocks else f"{base}_{sum(n.startswith(base) for n in blocks) + 1}"
    blocks[name] = replace(graph, name=name)
    return name


def _main(flat: Flat, ops: list[Op], finals: dict[str, Value]) -> Graph:
    read = {v.name for op in ops for v in op.operands} | {v.name for v in flat.outputs}
    used = tuple(w for w in flat.weights if w.name in read)
    inline = {v.name: v for op in ops if not op.is_call for v in op.operands if v.is_state}
    states = tuple(
        Value(f"${n}", s.type) for n, s in flat.state.states.items() if f"${n}" in inline
    )
    return Graph(
        "main",
        flat.inputs,
        used,
        states,
        tuple(ops),
        flat.outputs,
        tuple(finals[s.name] for s in states),
    )
