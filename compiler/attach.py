"""Attach a checkpoint to a captured module: load graphs from what its headers say.

Calls of one block whose checkpoint tensors have different formats become calls of different blocks.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from metainfer.ir.dtypes import Block, DType
from metainfer.ir.errors import CheckpointError
from metainfer.ir.graph import Binding, Graph, Module, Op, Value, attrs_of
from metainfer.ir.ops.record import Builder
from metainfer.ir.types import TensorType

Header = Callable[[str], tuple[tuple[int, ...], DType] | None]


@dataclass(frozen=True)
class Stored:
    """How the checkpoint holds the tensors of one graph: formats by local weight name."""

    formats: tuple[tuple[str, DType, int], ...]  # (weight, format, heads to un-permute)


def attach_checkpoint(module: Module, header: Header, unpermute: Callable[[str], int]) -> Module:
    """Give every graph the load graph that its checkpoint tensors need.

    Args:
        module: captured; weights in the activations' type.
        header: full weight name -> (shape, format) in the checkpoint, None if it has none.
        unpermute: full weight name -> heads over which its rows are interleaved, or 0.

    Raises: CheckpointError listing tensors that are missing or of another shape.
    """
    problems = list(_problems(module, header))
    if problems:
        shown = problems[:12] + (
            [f"... and {len(problems) - 12} more"] if len(problems) > 12 else []
        )
        raise CheckpointError(
            f"the checkpoint is not that of {module.name}: {len(problems)} tensors do not fit",
            text="\n".join(shown),
            advice="give the checkpoint of this very model (sizes and names must agree)",
        )
    variants: dict[tuple[str, Stored], str] = {}
    made: dict[str, tuple[str, Stored]] = {}
    main_ops: list[Op] = []
    for op in module.main.ops:
        if not op.is_call:
            main_ops.append(op)
            continue
        block = module.graph(str(op.attr["block"]))
        key = (block.name, _stored(block, Binding.of(op), header, unpermute))
        if key not in variants:
            count = sum(name == block.name for name, _ in variants)
            variants[key] = block.name if not count else f"{block.name}_{count + 1}"
            made[variants[key]] = key
        main_ops.append(replace(op, attrs=attrs_of({**op.attr, "block": variants[key]})))
    graphs: list[Graph] = []
    loads: list[Graph] = []
    for name, (block_name, stored) in made.items():
        graph = replace(module.graph(block_name), name=name)
        graphs.append(graph)
        loads.append(_load_graph(graph, stored))
    main = replace(module.main, ops=tuple(main_ops))
    loads.append(_load_graph(main, _stored(main, Binding(""), header, unpermute)))
    return replace(module, graphs=(*graphs, main), loads=tuple(loads))


def _problems(module: Module, header: Header) -> Iterator[str]:
    for full, value in full_weights(module):
        found = header(full)
        wanted = tuple(n.static for n in value.tensor.shape)
        if found is None:
            yield f"{full}: missing, wanted {list(wanted)}"
        elif found[0] != wanted:
            yield f"{full}: is {list(found[0])}, wanted {list(wanted)}"


def full_weights(module: Module) -> Iterator[tuple[str, Value]]:
    """Full name and declaration of every weight, through all calls."""
    for weight in module.main.weights:
        yield weight.name[1:], weight
    for call in module.calls():
        binding = Binding.of(call)
        for weight in module.graph(str(call.attr["block"])).weights:
            yield binding.full_name(weight.name[1:]), weight


def _stored(
    graph: Graph, binding: Binding, header: Header, unpermute: Callable[[str], int]
) -> Stored:
    formats = []
    for weight in graph.weights:
        full = binding.full_name(weight.name[1:])
        found = cast(tuple[tuple[int, ...], DType], header(full))
        formats.append((weight.name, found[1], unpermute(full)))
    return Stored(tuple(formats))


def _load_graph(graph: Graph, stored: Stored) -> Graph:
    """checkpoint tensor -> un-permuted -> widened to the type that the graph reads."""
    builder = Builder()
    sources: list[Value] = []
    outputs: list[Value] = []
    for weight, (name, dtype, heads) in zip(graph.weights, stored.formats, strict=True):
        value = source = Value(name, TensorType(weight.tensor.shape, dtype))
        if heads:
            value = builder.emit("unpermute_rope", value, heads=heads)
        wanted = weight.tensor.dtype.name
        if isinstance(dtype, Block):
            value = builder.emit("dequantize", value, dtype=wanted)
        elif dtype.name != wanted:
            value = builder.emit("cast", value, dtype=wanted)
        sources.append(source)
        outputs.append(value)
    return Graph(graph.name, weights=tuple(sources), ops=tuple(builder.ops), outputs=tuple(outputs))


def header_without_weights(module: Module, dtype: DType) -> Header:
    """A header for a model whose weights are not here: the module's own shapes, one type."""
    shapes = {
        full: tuple(n.static for n in value.tensor.shape) for full, value in full_weights(module)
    }
    return lambda name: (shapes[name], dtype) if name in shapes else None


def header_of_tensors(tensors: Mapping[str, tuple[Sequence[int], DType]]) -> Header:
    """A header from name -> (shape, dtype)."""
    fixed = {name: (tuple(shape), dtype) for name, (shape, dtype) in tensors.items()}
    return fixed.get
