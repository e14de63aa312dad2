"""quantize: choose the format of each weight that a linear, an embedding or experts read.

    before: load: %0 = dequantize(@w) {dtype = "f32"}    linear(%x, @w: f32[64,64])
    after:  load: @w as it is in the checkpoint          linear(%x, @w: i8/32:f16[64,64])

Without a request ("auto") the checkpoint's own format is kept where the device has a made kernel
for it, even one that holds it wider: the reason then says what that takes in memory. Checkpoints of
fp8 and MXFP4 codes are weighed against conversions that lose no more than bf16 does: the cheapest
that fits the device's memory is taken. Without a kernel a weight takes the activations' type, as
the model was captured, or f32; a format that loses more is taken only where not even that has a
kernel, or on request: bf16, int8, int4, fp8, fp8-32x32, mxfp4, nvfp4. Routers and norms stay as
they are then, and tables and heads never take 4-bit or fp8 codes. States are captured in their
format; what rounded keys and values lose is reported here.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from metainfer.ir.dtypes import (
    BF16,
    F16,
    F32,
    FP8_BLOCK,
    FP8_BLOCK_32,
    FP8_ROW,
    MXFP4,
    NVFP4,
    Block,
    DType,
    parse_dtype,
)
from metainfer.ir.entries import ENTRIES, KV_FP8, is_rounded
from metainfer.ir.format_error import relative_rms
from metainfer.ir.graph import Module, Value
from metainfer.passes.held_weights import Held, bytes_as, widest
from metainfer.passes.target import Decision, Target
from metainfer.passes.weight_items import Item, narrow_rows, weight_items
from metainfer.passes.weight_options import (
    Limits,
    Option,
    choose_within,
    count_on_rank,
    formats_for,
    loss_of,
    options_for,
    weight_budget,
)
from metainfer.passes.weights import LoadEditor

INT8 = "i8/32:f16"
INT4 = "u4/32:f16+f16"
FP8 = {"fp8": FP8_BLOCK, "fp8-32x32": FP8_BLOCK_32}
FP4 = {"mxfp4": MXFP4, "nvfp4": NVFP4}
# A-priori bound of the error of one weight, as a fraction of its block's range.
RANGE_ERROR = {INT8: 1 / 254, INT4: 1 / 30}
# The same of a cast, as a fraction of the weight.
CAST_ERROR = {"bf16": 2**-9, "f16": 2**-12}


@dataclass(frozen=True)
class _Choice:
    """A format for an item, and why."""

    dtype: DType
    reason: str
    bytes: int = 0


def quantize(module: Module, target: Target) -> Module:
    """Choose formats, rewriting load graphs."""
    items = list(weight_items(module))
    choices = _choices(items, target, module.limits())
    for item, choice in zip(items, choices, strict=True):
        module = _apply(module, item, choice, target)
    _report_entries(module, target)
    return module


def _report_entries(module: Module, target: Target) -> None:
    """Keys and values that are captured as codes: what it loses, and what a token takes."""
    for graph in module.graphs:
        for state in (s for s in graph.states if is_rounded(s.state)):
            wide = sum(2 * t.num_elements().constant for n, t in state.state.fields if n in ENTRIES)
            reason = (
                f"--kv fp8: a scale for each token and head, a relative error of "
                f"{relative_rms(KV_FP8):.4f} is to be expected of each number; a token takes "
                f"{state.state.entry_bytes():,} bytes, {wide:,} in 16 bits"
            )
            data = (("relative_rms", relative_rms(KV_FP8)),)
            subject = f"{state.name} of {graph.name}"
            target.report.add(Decision("quantize", subject, str(KV_FP8), reason, data=data))


def _apply(module: Module, item: Item, choice: _Choice, target: Target) -> Module:
    editor = LoadEditor(module, item.graph)
    data: tuple[tuple[str, float], ...] = (("relative_rms", loss_of(item, choice.dtype)),)
    if choice.bytes:
        data += (("bytes", choice.bytes * item.calls),)
    changed = False
    for weight, stored in zip(item.weights, item.stored, strict=True):
        target.report.add(
            Decision("quantize", f"{weight} of {item.graph}", str(choice.dtype), choice.reason,
                     data=data)
        )  # fmt: skip
        if editor.made(weight).tensor.dtype != choice.dtype:
            editor.update(weight, _convert(editor, stored, choice.dtype))
            changed = True
    return editor.finish() if changed else module


def _convert(editor: LoadEditor, stored: Value, wanted: DType) -> Value:
    own = stored.tensor.dtype
    if own == wanted:
        return stored
    if isinstance(wanted, Block):
        return editor.emit("quantize", stored, format=str(wanted))
    if isinstance(own, Block):
        return editor.emit("dequantize", stored, dtype=str(wanted))
    return editor.emit("cast", stored, dtype=str(wanted))


def _choices(items: list[Item], target: Target, limits: Limits) -> list[_Choice]:
    request = target.strategy.weights
    if request in ("auto", "keep"):
        return _automatic(items, target, limits)
    return [_requested(item, request, target, limits) for item in items]


# --- on request ---------------------------------------------------------------------------------


def _requested(item: Item, request: str, target: Target, limits: Limits) -> _Choice:
    if request in ("f32", "bf16"):
        return _Choice(parse_dtype(request), f"--weights {request}")
    if item.is_router:
        return _kept(item, f"--weights {request}, but a router's scores choose the experts")
    if request in ("int8", "int4"):
        return _whole_numbers(item, request, target, limits)
    if request in FP8:
        return _fp8(item, request, FP8[request])
    return _fp4(item, request, FP4[request])


def _kept(item: Item, reason: str) -> _Choice:
    return _Choice(item.own or F32, reason)


def _whole_numbers(item: Item, request: str, target: Target, limits: Limits) -> _Choice:
    """The integer format asked for; tables and heads, outside the layers, stay at 8 bits.

    At 4 bits SmolLM2's tied table alone costs 0.08 of 0.084 nats a token.
    """
    wanted = INT8 if request == "int8" or item.is_outer else INT4
    cut = narrow_rows(item.shapes, 32)
    own = item.own
    if cut:
        kept = F32 if own is None or isinstance(own, Block) else own
        return _Choice(kept, f"--weights {request}, but rows of {cut} cut blocks of 32")
    if own is not None and own.bits <= parse_dtype(wanted).bits:
        held = widest(item, own, target, limits)
        widened = _as_held(item, own, held) if held is not None and held.is_widened else ""
        reason = f"--weights {request}, and the checkpoint holds {own} already{widened}"
        return _Choice(own, reason)
    bound = RANGE_ERROR[wanted]
    reason = f"--weights {request}: each weight within {bound:.4f} of its block's range"
    return _Choice(parse_dtype(wanted), reason)


def _fp8(item: Item, request: str, wanted: Block) -> _Choice:
    """Square blocks; a scale a row where a matrix is no whole number of them."""
    own = item.own
    if item.is_outer:
        return _kept(item, f"--weights {request}, but tables and heads stay")
    if isinstance(own, Block) and own.element == wanted.element:
        return _Choice(own, f"--weights {request}, and the checkpoint holds {own} already")
    size = wanted.block[-1]
    if all(n % size == 0 for shape in item.shapes for n in shape[-2:]):
        return _Choice(wanted, f"--weights {request}: {_error(item, wanted)}")
    why = f"{_sizes(item)} is no whole number of blocks of {size} x {size}"
    return _Choice(FP8_ROW, f"--weights {request}: {_error(item, FP8_ROW)}; {why}")


def _fp4(item: Item, request: str, wanted: Block) -> _Choice:
    if item.is_outer:
        return _kept(item, f"--weights {request}, but tables and heads stay")
    if item.own == wanted:
        return _Choice(wanted, f"--weights {request}, and the checkpoint holds it already")
    size = wanted.block[-1]
    cut = narrow_rows(item.shapes, size)
    if cut:
        choice = _fp8(item, request, FP8_BLOCK)
        return _Choice(choice.dtype, f"{choice.reason}; rows of {cut} cut groups of {size}")
    return _Choice(wanted, f"--weights {request}: {_error(item, wanted)}")


def _sizes(item: Item) -> str:
    return " and ".join(sorted({"x".join(map(str, s[-2:])) for s in item.shapes}))


def _error(item: Item, dtype: DType) -> str:
    """The budget in words: of exact normal numbers, whatever the checkpoint lost before."""
    return f"a relative error of {relative_rms(dtype):.4f} is to be expected of each weight"


# --- without one --------------------------------------------------------------------------------


def _automatic(items: list[Item], target: Target, limits: Limits) -> list[_Choice]:
    """Own formats where kernels take them as they are; float codes by time and memory."""
    fixed: dict[int, _Choice] = {}
    open_: dict[int, tuple[Option, ...]] = {}
    for number, item in enumerate(items):
        found = _settled(item, target, limits)
        if isinstance(found, _Choice):
            fixed[number] = found
        else:
            open_[number] = found
    budget = weight_budget(target) - _fixed_bytes(items, fixed, target, limits)
    counts = [count_on_rank(items[n], target) for n in open_]
    chosen = choose_within(list(open_.values()), counts, budget)
    for (number, options), option in zip(open_.items(), chosen, strict=True):
        reason = _why(items[number], option, options, budget)
        fixed[number] = _Choice(option.dtype, reason, option.bytes)
    return [fixed[n] for n in range(len(items))]


def _settled(item: Item, target: Target, limits: Limits) -> _Choice | tuple[Option, ...]:
    """The choice where there is only one, else the options to weigh."""
    own = item.own
    has_float_codes = any(_has_float_codes(v.tensor.dtype) for v in item.stored)
    is_kept = target.strategy.weights == "keep"
    if own is not None and (is_kept or not has_float_codes):
        held = widest(item, own, target, limits)
        if held is not None:
            return _Choice(own, f"the checkpoint's own format{_as_held(item, own, held)}")
        if is_kept:
            return _Choice(own, "--weights keep, although only a generic kernel takes it")
    if has_float_codes and not item.is_router:
        options = options_for(item, formats_for(item, target), target, limits)
        made = tuple(o for o in options if o.is_made)
        if made:
            return made
    return _nearest(item, target, limits)


def _has_float_codes(dtype: DType) -> bool:
    return isinstance(dtype, Block) and dtype.element.is_float


def _fixed_bytes(
    items: list[Item], fixed: Mapping[int, _Choice], target: Target, limits: Limits
) -> float:
    total = 0.0
    for number, choice in fixed.items():
        held = widest(items[number], choice.dtype, target, limits)
        size = held.resident_bytes if held else bytes_as(items[number], choice.dtype)
        total += size * count_on_rank(items[number], target)
    return total


def _why(item: Item, taken: Option, options: tuple[Option, ...], budget: float) -> str:
    quickest = min(options, key=lambda o: o.seconds)
    others = [o for o in options if o.dtype != taken.dtype]
    what = "the checkpoint's own format" if taken.dtype == item.own else (
        f"{item.own or 'several formats'} converted, a relative error of {taken.loss:.4f}"
    )  # fmt: skip
    text = f"{what} as {_packed(taken)}; {_priced(taken)}"
    if taken.seconds > quickest.seconds:
        missing = f"all weights so do not fit {max(budget, 0) / 2**30:.2f} GiB"
        return f"{text}; quicker is {_named(quickest)}: {_priced(quickest)}, but {missing}"
    if not others:
        return text
    second = min(others, key=lambda o: o.seconds)
    return f"{text}; next is {_named(second)}: {_priced(second)}"


def _named(option: Option) -> str:
    return f"{option.dtype} as {_packed(option)}"


def _packed(option: Option) -> str:
    return ", ".join(sorted({p or "it is" for p in option.packings}))


def _priced(option: Option) -> str:
    return f"{option.seconds * 1e3:.2f} ms a mix of steps, {option.bytes / 2**20:.1f} MiB"


def _nearest(item: Item, target: Target, limits: Limits) -> _Choice:
    """The activations' type, as the model was captured; or f32; or what loses least."""
    own = item.own
    lossy: list[DType] = [F16, BF16]
    if (own is None or isinstance(own, Block)) and not narrow_rows(item.shapes, 32):
        # Eight bits over codes of at most eight bits: the loss is far below the format's own.
        lossy.insert(0, parse_dtype(INT8))
    named = str(own) if own is not None else "several formats at once"
    for dtype in dict.fromkeys((item.made, F32, *(() if target.strategy.exact else lossy))):
        held = widest(item, dtype, target, limits)
        if held is None:
            continue
        error = CAST_ERROR.get(str(dtype), RANGE_ERROR.get(str(dtype), 0.0))
        loss = f"error at most {error:.4f}" if error else "no value changes"
        reason = f"the device has no made kernel for {named}; {loss}; {_resident(item, held)}"
        return _Choice(dtype, reason)
    return _kept(item, f"the device has no made kernel for {named} or any wider format")


def _as_held(item: Item, own: DType, held: Held) -> str:
    """What to say of a format that is kept: kernels may widen it."""
    if not held.is_widened:
        return ", and the device has kernels for it"
    reason = f", which {held.kernel} widens: {_resident(item, held)}"
    narrow = bytes_as(item, parse_dtype(INT8))
    if narrow_rows(item.shapes, 32) or narrow >= held.resident_bytes:
        return reason
    return f"{reason}; --weights int8 would take {narrow:,}, rounding once more"


def _resident(item: Item, held: Held) -> str:
    stored = sum(v.tensor.bytes_at({}) for v in item.stored)
    return f"resident at {held.resident_bytes:,} bytes instead of {stored:,}"
