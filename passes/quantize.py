"""quantize: choose the format of each weight that a linear, an embedding or experts read.

    before: load: %0 = dequantize(@w) {dtype = "f32"}    linear(%x, @w: f32[64,64])
    after:  load: @w as it is in the checkpoint          linear(%x, @w: i8/32:f16[64,64])

The checkpoint's own format is kept where the device has a made kernel for it, even one that holds
it wider: the reason then says what that takes in memory. Without such a kernel it takes
the activations' type, as the model was captured, or f32; a format that loses more is taken only
where not even that has a kernel, or on request (bf16, int8, int4).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from metainfer.ir.dims import dim
from metainfer.ir.dtypes import BF16, F16, F32, Block, DType, parse_dtype
from metainfer.ir.graph import Graph, Module, Op, Value
from metainfer.ir.types import TensorType
from metainfer.passes.candidates import candidates_of, query_of
from metainfer.passes.layout import cheapest_layouts
from metainfer.passes.target import Decision, Target
from metainfer.passes.weights import LoadEditor

INT8 = "i8/32:f16"
INT4 = "u4/32:f16+f16"
# A-priori bound of the relative error of one weight, as a fraction of its block's range.
ERROR_BUDGET = {INT8: 1 / 254, INT4: 1 / 30, "bf16": 2**-9, "f16": 2**-12, "f32": 0.0}
# Operands that are weights, by op; a kernel takes those of one op in one format.
_WEIGHTS = {"linear": (1,), "embedding": (1,), "experts": (3, 4, 5)}
# Large enough that what a packing fills up does not count.
_SAMPLE = (dim(4096), dim(4096))


@dataclass(frozen=True)
class _Weight:
    """A weight whose format is chosen.

    Attributes:
        stored: as the checkpoint has it.
        made: type that the graph reads now, the activations' as captured.
        readers: ops that read it, with the operand.
        is_outer: whether it is outside the layers.
        limits: of the size symbols.
    """

    stored: TensorType
    made: DType
    readers: tuple[tuple[Op, int], ...]
    is_outer: bool
    limits: Mapping[str, tuple[int, int]]

    @property
    def own(self) -> DType:
        """The checkpoint's format."""
        return self.stored.dtype

    @property
    def cut_rows(self) -> int:
        """Width of a weight of its readers whose rows are no whole blocks of 32, 0 if all are."""
        weights = (op.operands[i].tensor for op, _ in self.readers for i in _WEIGHTS[op.name])
        return next((w.shape[-1].static for w in weights if w.shape[-1].static % 32), 0)

    def bytes_as(self, dtype: DType) -> int:
        """Bytes in a format, not packed."""
        return self.stored.with_dtype(dtype).bytes_at({})


@dataclass(frozen=True)
class _Held:
    """How one reader holds a weight.

    Attributes:
        kernel: made kernel of the cheapest packing.
        resident_bytes: of the weight in that packing.
        is_widened: whether the packing takes more for each weight than the format.
    """

    kernel: str
    resident_bytes: int
    is_widened: bool


def quantize(module: Module, target: Target) -> Module:
    """Choose formats, rewriting load graphs."""
    for graph in module.graphs:
        for weight in graph.weights:
            readers = _readers(module.graph(graph.name), weight)
            if readers:
                module = _choose(module, graph.name, weight.name, readers, target)
    return module


def _readers(graph: Graph, weight: Value) -> tuple[tuple[Op, int], ...]:
    """Ops that read the weight, if all of them can take another format."""
    readers: list[tuple[Op, int]] = []
    for op in graph.ops:
        for position, value in enumerate(op.operands):
            if value.name != weight.name:
                continue
            if position not in _WEIGHTS.get(op.name, ()):
                return ()
            readers.append((op, position))
    return tuple(readers)


def _choose(
    module: Module, graph: str, name: str, readers: tuple[tuple[Op, int], ...], target: Target
) -> Module:
    editor = LoadEditor(module, graph)
    current = editor.made(name)
    stored = _stored(editor, current)
    made = current.tensor.dtype
    weight = _Weight(stored.tensor, made, readers, graph == "main", module.limits())
    wanted, reason = _wanted(weight, target)
    target.report.add(Decision("quantize", f"{name} of {graph}", wanted, reason))
    if wanted == str(made):
        return module
    editor.update(name, _convert(editor, stored, wanted))
    return editor.finish()


def _stored(editor: LoadEditor, made: Value) -> Value:
    """The weight before its load graph widened it to the activations' type."""
    for op in reversed(editor.ops):
        if op.name in ("dequantize", "cast") and op.result.name == made.name:
            return op.operands[0]
    return made


def _wanted(weight: _Weight, target: Target) -> tuple[str, str]:
    """(format, reason)."""
    request = target.strategy.weights
    if request in ("f32", "bf16"):
        return request, f"--weights {request}"
    if request in ("int8", "int4"):
        return _requested(weight, request, target)
    held = _widest(weight, weight.own, target)
    if held is not None:
        return str(weight.own), f"the checkpoint's own format{_as_held(weight, held)}"
    if request == "keep":
        return str(weight.own), "--weights keep, although only a generic kernel takes it"
    return _nearest(weight, target)


def _as_held(weight: _Weight, held: _Held) -> str:
    """What to say of a format that is kept: kernels may widen it."""
    if not held.is_widened:
        return ", and the device has kernels for it"
    reason = f", which {held.kernel} widens: {_resident(weight, held)}"
    narrow = weight.bytes_as(parse_dtype(INT8))
    if weight.cut_rows or narrow >= held.resident_bytes:
        return reason
    return f"{reason}; --weights int8 would take {narrow:,}, rounding once more"


def _resident(weight: _Weight, held: _Held) -> str:
    return f"resident at {held.resident_bytes:,} bytes instead of {weight.bytes_as(weight.own):,}"


def _requested(weight: _Weight, request: str, target: Target) -> tuple[str, str]:
    """The format asked for; tables and heads, outside the layers, stay at 8 bits.

    At 4 bits SmolLM2's tied table alone costs 0.08 of 0.084 nats a token.
    """
    own = weight.own
    wanted = INT8 if request == "int8" or weight.is_outer else INT4
    if weight.cut_rows:
        kept = "f32" if isinstance(own, Block) else str(own)
        return kept, f"--weights {request}, but rows of {weight.cut_rows} cut blocks of 32"
    if own.bits <= parse_dtype(wanted).bits:
        held = _widest(weight, own, target)
        widened = _as_held(weight, held) if held is not None and held.is_widened else ""
        return str(own), f"--weights {request}, and the checkpoint holds {own} already{widened}"
    budget = ERROR_BUDGET[wanted]
    return wanted, f"--weights {request}: each weight within {budget:.4f} of its block's range"


def _nearest(weight: _Weight, target: Target) -> tuple[str, str]:
    """The activations' type, as the model was captured; or f32; or what loses least."""
    lossy: list[DType] = [F16, BF16]
    if isinstance(weight.own, Block) and not weight.cut_rows:
        # Eight bits over codes of at most eight bits: the loss is far below the format's own.
        lossy.insert(0, parse_dtype(INT8))
    for dtype in dict.fromkeys((weight.made, F32, *(() if target.strategy.exact else lossy))):
        held = _widest(weight, dtype, target)
        if held is None:
            continue
        error = ERROR_BUDGET.get(str(dtype), 0.0)
        loss = f"error at most {error:.4f}" if error else "no value changes"
        return str(dtype), (
            f"the device has no made kernel for {weight.own}; {loss}; {_resident(weight, held)}"
        )
    return str(weight.own), f"the device has no made kernel for {weight.own} or any wider format"


def _widest(weight: _Weight, dtype: DType, target: Target) -> _Held | None:
    """How the reader that needs most memory holds the weight in a format.

    None if a reader has no kernel that is made for it (not a generic one).
    """
    found: list[_Held] = []
    for op, position in weight.readers:
        operands = tuple(
            replace(v, type=v.tensor.with_dtype(dtype))
            if v.is_weight and i in _WEIGHTS[op.name]
            else v
            for i, v in enumerate(op.operands)
        )
        changed = replace(op, operands=operands)
        chosen = cheapest_layouts(changed, target, weight.limits, frozenset())
        packing = chosen.get(position, "")
        query = query_of(changed, target, weight.limits, frozenset())
        made = [
            c.kernel.name
            for c in candidates_of(changed, query, target)
            if c.is_usable and not c.kernel.generic
            if c.kernel.layouts.get(position, "") == packing
        ]
        if not made:
            return None
        packed = replace(operands[position].tensor, layout=packing)
        found.append(_held(made[0], packed, target))
    return max(found, key=lambda held: held.resident_bytes)


def _held(kernel: str, packed: TensorType, target: Target) -> _Held:
    sample = replace(packed, shape=(*packed.shape[:-2], *_SAMPLE))
    plain = replace(sample, layout="").bytes_at({})
    is_widened = target.costs.resident_bytes(sample) > plain * 1.1
    return _Held(kernel, target.costs.resident_bytes(packed), is_widened)


def _convert(editor: LoadEditor, stored: Value, wanted: str) -> Value:
    own = stored.tensor.dtype
    if str(own) == wanted:
        return stored
    target_type = parse_dtype(wanted)
    if isinstance(target_type, Block):
        return editor.emit("quantize", stored, format=wanted)
    if isinstance(own, Block):
        return editor.emit("dequantize", stored, dtype=wanted)
    return editor.emit("cast", stored, dtype=wanted)
