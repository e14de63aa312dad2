"""quantize_activations: products of fp8 weights read activations of fp8 codes, on request.

One rounding serves all products that read a value. What stays between the products (the residual
stream, norms, attention) keeps its type; `fuse` then joins the rounding to what makes the value.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from metainfer.ir.dtypes import F8E4M3, FP8_GROUP, FP8_ROW, Block, Scalar
from metainfer.ir.format_error import relative_rms
from metainfer.ir.graph import Graph, Module, Op, Value, attrs_of
from metainfer.ir.naming import canonical_names
from metainfer.ir.types import TensorType
from metainfer.passes.target import Decision, Target

NAME = "quantize_activations"
FEATURE = "fp8_mma"
# Numbers along K that a scale of the weight must cover: what a step of a product takes at least.
_STEP = 64
_ASKED = "--activations fp8"


@dataclass(frozen=True)
class _Rounding:
    """A value to be rounded, and the products that read it then."""

    value: Value
    format: Block
    readers: tuple[Op, ...]


def quantize_activations(module: Module, target: Target) -> Module:
    """Round what products of fp8 weights read to fp8 codes, a scale for each 128 numbers of a row.

    Rows that are no whole groups take one scale each, and so do those that only weights with a
    scale for a row or for all of them read: libraries multiply these. Needs matrix units for fp8
    operands: without them nothing changes, and the report says so.

    Before::

        graph f(%x: bf16[T,256], @w: f8e4m3/128x128:f32[128,256]) {
          %0 = linear(%x, @w) : bf16[T,128]
          return %0
        }

    After::

        graph f(%x: bf16[T,256], @w: f8e4m3/128x128:f32[128,256]) {
          %0 = quantize(%x) {format = "f8e4m3/128:f32"} : f8e4m3/128:f32[T,256]
          %1 = linear(%0, @w) {dtype = "bf16"} : bf16[T,128]
          return %1
        }
    """
    if not target.strategy.fp8_activations:
        return module
    if not target.device.has(FEATURE):
        reason = f"{_ASKED}, but {target.device.name} lacks {FEATURE}: codes would be widened again"
        target.report.add(Decision(NAME, "all products", "not rounded", reason, "fallback"))
        return module
    for graph in module.graphs:
        roundings = _roundings(graph, target)
        if roundings:
            module = module.with_graph(canonical_names(_rewritten(graph, roundings)))
    return module


def _roundings(graph: Graph, target: Target) -> list[_Rounding]:
    """Values to round, in the order in which they are first read."""
    readers: dict[str, list[Op]] = {}
    values: dict[str, Value] = {}
    for op in graph.ops:
        if op.name not in ("linear", "experts"):
            continue
        refusal = _refusal(op)
        if refusal:
            weight = _weights(op)[0]
            subject = f"{op.name} by {weight.name} of {graph.name}"
            reason = f"{_ASKED}, but {refusal}"
            target.report.add(Decision(NAME, subject, "not rounded", reason))
            continue
        value = op.operands[0]
        values[value.name] = value
        readers.setdefault(value.name, []).append(op)
    found = [_rounding(v, readers[v.name]) for v in values.values()]
    for rounding in found:
        _report(graph, rounding, target)
    return found


def _refusal(op: Op) -> str:
    """Why a product reads its activations as they are, "" if it need not."""
    x = op.operands[0].tensor
    if not isinstance(x.dtype, Scalar):
        return f"they are {x.dtype} already"
    for value in _weights(op):
        format_ = value.tensor.dtype
        if not isinstance(format_, Block) or format_.element != F8E4M3:
            return f"the weight is {format_}"
        if not value.is_weight or len(format_.block) > 2:
            return f"{value.name} is no plain weight"
        wide = _wide(value.tensor)
        if wide % _STEP:
            return f"scales of {wide} numbers each are shorter than a step of {_STEP}"
    return ""


def _weights(op: Op) -> tuple[Value, ...]:
    """Weights that the activations meet; those of experts' second products are not among them."""
    return op.operands[1:2] if op.name == "linear" else op.operands[3:5]


def _rounding(value: Value, readers: Sequence[Op]) -> _Rounding:
    """Groups of a row where one weight has scales along it, too, and they are whole."""
    is_cut = value.tensor.shape[-1].static % FP8_GROUP.block[0]
    has_groups = any(_wide(w.tensor) for op in readers for w in _weights(op))
    return _Rounding(value, FP8_GROUP if has_groups and not is_cut else FP8_ROW, tuple(readers))


def _wide(weight: TensorType) -> int:
    """Numbers along K under one scale of a weight, 0 for all of a row."""
    assert isinstance(weight.dtype, Block)
    return weight.dtype.extents(2)[1]


def _report(graph: Graph, rounding: _Rounding, target: Target) -> None:
    error, count = relative_rms(rounding.format), len(rounding.readers)
    weights = " ".join(w.name for op in rounding.readers for w in _weights(op))
    reason = (
        f"{_ASKED}: a relative error of {error:.4f} is to be expected of each number; "
        f"rounded once for {weights}"
    )
    data = (("relative_rms", error), ("products", count))
    subject = f"{rounding.value.name} of {graph.name}"
    target.report.add(Decision(NAME, subject, str(rounding.format), reason, data=data))


def _rewritten(graph: Graph, roundings: Sequence[_Rounding]) -> Graph:
    """The graph with each value rounded before its first product, canonical names left to do."""
    rounded = {
        r.value.name: Value(
            f"%{r.value.name[1:]}:rounded", r.value.tensor.with_dtype(r.format)
        )
        for r in roundings
    }  # fmt: skip
    formats = {r.value.name: str(r.format) for r in roundings}
    reading = {op.result.name for r in roundings for op in r.readers}
    begun: set[str] = set()
    ops: list[Op] = []
    for op in graph.ops:
        if op.results and op.results[0].name in reading:
            source = op.operands[0]
            if source.name not in begun:
                begun.add(source.name)
                attrs = attrs_of({"format": formats[source.name]})
                made = (rounded[source.name],)
                ops.append(Op("quantize", (source,), made, attrs, source=op.source))
            asked = attrs_of({**op.attr, "dtype": str(source.tensor.dtype)})
            op = replace(op, operands=(rounded[source.name], *op.operands[1:]), attrs=asked)
        ops.append(op)
    return replace(graph, ops=tuple(ops))
