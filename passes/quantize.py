"""quantize: choose the format of each weight that a linear, an embedding or experts read.

    before: load: %0 = dequantize(@w) {dtype = "f32"}    linear(%x, @w: f32[64,64])
    after:  load: @w as it is in the checkpoint          linear(%x, @w: i8/32:f16[64,64])

The checkpoint's own format is kept where the device has a made kernel for it; otherwise the nearest
format that loses least is taken and the reason recorded. int8 and int4 quantize what the checkpoint
holds in wider numbers, on request.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from metainfer.ir.dtypes import BF16, F16, F32, Block, DType, parse_dtype
from metainfer.ir.graph import Graph, Module, Op, Value
from metainfer.passes.candidates import candidates_of, query_of
from metainfer.passes.target import Decision, Target
from metainfer.passes.weights import LoadEditor

INT8 = "i8/32:f16"
INT4 = "u4/32:f16+f16"
# A-priori bound of the relative error of one weight, as a fraction of its block's range.
ERROR_BUDGET = {INT8: 1 / 254, INT4: 1 / 30, "bf16": 2**-9, "f16": 2**-12, "f32": 0.0}
# Operands that are weights, by op; a kernel takes those of one op in one format.
_WEIGHTS = {"linear": (1,), "embedding": (1,), "experts": (3, 4, 5)}


def quantize(module: Module, target: Target) -> Module:
    """Choose formats, rewriting load graphs."""
    for graph in module.graphs:
        for weight in graph.weights:
            readers = _readers(module.graph(graph.name), weight)
            if readers:
                module = _choose(module, graph.name, weight.name, readers, target)
    return module


def _readers(graph: Graph, weight: Value) -> list[Op]:
    """Ops that read the weight, if all of them can take another format."""
    readers: list[Op] = []
    for op in graph.ops:
        for position, value in enumerate(op.operands):
            if value.name != weight.name:
                continue
            if position not in _WEIGHTS.get(op.name, ()):
                return []
            readers.append(op)
    return readers


def _choose(
    module: Module, graph: str, weight: str, readers: Sequence[Op], target: Target
) -> Module:
    editor = LoadEditor(module, graph)
    current = editor.made(weight)
    stored = _stored(editor, current)
    wanted, reason = _wanted(stored, readers, target, module.limits(), is_outer=graph == "main")
    subject = f"{weight} of {graph}"
    target.report.add(Decision("quantize", subject, wanted, reason))
    if wanted == str(current.tensor.dtype):
        return module
    editor.update(weight, _convert(editor, stored, wanted))
    return editor.finish()


def _stored(editor: LoadEditor, made: Value) -> Value:
    """The weight before its load graph widened it to the activations' type."""
    for op in reversed(editor.ops):
        if op.name in ("dequantize", "cast") and op.result.name == made.name:
            return op.operands[0]
    return made


def _wanted(
    stored: Value,
    readers: Sequence[Op],
    target: Target,
    limits: Mapping[str, tuple[int, int]],
    *,
    is_outer: bool,
) -> tuple[str, str]:
    own = stored.tensor.dtype
    request = target.strategy.weights
    if request in ("f32", "bf16"):
        return request, f"--weights {request}"
    if request in ("int8", "int4"):
        return _requested(own, request, readers, is_outer=is_outer)
    if _is_served(own, stored, readers, target, limits):
        return str(own), "the checkpoint's own format, and the device has kernels for it"
    if request == "keep":
        return str(own), "--weights keep, although only a generic kernel takes it"
    return _nearest(own, stored, readers, target, limits)


def _requested(
    own: DType, request: str, readers: Sequence[Op], *, is_outer: bool
) -> tuple[str, str]:
    """The format asked for; tables and heads, outside the layers, stay at 8 bits.

    At 4 bits SmolLM2's tied table alone costs 0.08 of 0.084 nats a token.
    """
    wanted = INT8 if request == "int8" or is_outer else INT4
    cut = _cut_rows(readers)
    if cut:
        kept = "f32" if isinstance(own, Block) else str(own)
        return kept, f"--weights {request}, but rows of {cut} cut blocks of 32"
    bits = own.bits
    if bits <= parse_dtype(wanted).bits:
        return str(own), f"--weights {request}, and the checkpoint holds {own} already"
    budget = ERROR_BUDGET[wanted]
    return wanted, f"--weights {request}: each weight within {budget:.4f} of its block's range"


def _cut_rows(readers: Sequence[Op]) -> int:
    """Width of a weight whose rows are no whole blocks of 32, 0 if all are."""
    rows = (op.operands[i].tensor.shape[-1].static for op in readers for i in _WEIGHTS[op.name])
    return next((n for n in rows if n % 32), 0)


def _is_served(
    dtype: DType,
    stored: Value,
    readers: Sequence[Op],
    target: Target,
    limits: Mapping[str, tuple[int, int]],
) -> bool:
    """Whether every reader has a kernel that is made for the format (not a generic one)."""
    for op in readers:
        operands = tuple(
            replace(v, type=replace(v.tensor, dtype=dtype))
            if v.is_weight and i in _WEIGHTS[op.name]
            else v
            for i, v in enumerate(op.operands)
        )
        changed = replace(op, operands=operands)
        query = query_of(changed, target, limits, frozenset())
        found = candidates_of(changed, query, target)
        if not any(c.is_usable and not c.kernel.generic for c in found):
            return False
    return True


def _nearest(
    own: DType,
    stored: Value,
    readers: Sequence[Op],
    target: Target,
    limits: Mapping[str, tuple[int, int]],
) -> tuple[str, str]:
    """The format that loses least among those that the device has kernels for."""
    exact: list[DType] = [F32] if isinstance(own, Block) or own == F32 else [BF16, F16, F32]
    rows_fit = not _cut_rows(readers)
    lossy: list[DType] = []
    if isinstance(own, Block) and rows_fit and not target.strategy.exact:
        # Eight bits over codes of at most eight bits: the loss is far below the format's own.
        lossy = [parse_dtype(INT8)]
    for dtype in (*lossy, *exact, BF16):
        if _is_served(dtype, stored, readers, target, limits):
            budget = ERROR_BUDGET.get(str(dtype), 0.0)
            return str(
                dtype
            ), f"the device has no made kernel for {own}; error at most {budget:.4f}"
    return str(own), f"the device has no made kernel for {own} or any wider format"


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
