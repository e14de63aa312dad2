"""Records of the experts' products, one for each format that their weights are kept in."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import cast

import torch

from metainfer.backends.kernel import (
    Constraint,
    Efficiency,
    Kernel,
    Query,
    Registry,
    dense,
    device_kind,
    dtype,
    feature,
    multiple_of,
    weight_operand,
)
from metainfer.backends.layout import LayoutRegistry
from metainfer.backends.torch.call import TorchCall
from metainfer.backends.torch.codes import NAME as CODES
from metainfer.backends.torch.constraints import format_is
from metainfer.backends.triton.emit.epilogue import Epilogue, emit_epilogue, emit_row_epilogue
from metainfer.backends.triton.emit.source import body_of
from metainfer.backends.triton.experts import experts, of_call, scratch_bound
from metainfer.backends.triton.fits import fits
from metainfer.backends.triton.launch import Launch, TritonBinder
from metainfer.backends.triton.linear import is_rounded
from metainfer.backends.triton.words import NAME as WORDS
from metainfer.hardware.device import Device
from metainfer.ir.dtypes import F8E4M3, MXFP4, NVFP4, Block, DType
from metainfer.ir.graph import Op

BF16_STEP = 2.0**-8
_STACKS = (3, 4, 5)
KIND, ADDED = "experts", "experts_add"
NORMED, ROUNDED = "experts_add_rms_norm", "experts_add_rms_norm_quantize"
_WIDEST_NORM = 8192  # columns of a row that one program sums

_SOURCE = "assumed, to be replaced by benchmarks/gpu/experts.py"
_ON = "H200, captured, launches included, 2026-11-30"
_LAYER = "256 experts of 4096 x 2048, 6 of a token, 16 and 4096 tokens"
PLAIN = Efficiency(
    0.95, 0.7, source=f"{_ON}, {_LAYER}: all of the bandwidth, 493 TFLOP/s; one token of 8 experts "
    "of Qwen3-30B-A3B 0.67",
)  # fmt: skip
WIDE = Efficiency(0.95, 0.7, source=f"as without much shared memory; its own tiles {_SOURCE}")
# Codes are widened in registers before the products.
CODED = {
    "e4m3": Efficiency(0.95, 0.39, source=f"{_ON}, {_LAYER}: 0.98 of the bandwidth, 273 TFLOP/s"),
    "e2m1": Efficiency(0.75, 0.46, source=f"{_ON}, {_LAYER}: 0.77 of the bandwidth, 323 TFLOP/s"),
    "nvfp4": Efficiency(
        0.71, 0.46, source=f"{_ON}, {_LAYER}: 0.73 of the bandwidth; before, 321 TFLOP/s"
    ),
}
# Codes by codes in the first of two products, two thirds of the work.
FP8 = Efficiency(0.65, 0.35, "f8e4m3", _SOURCE)


def register_experts(kernels: Registry, layouts: LayoutRegistry) -> None:
    """Add one kernel for each format, and one for the groups that add to their sum."""
    for kind in (KIND, ADDED, NORMED, ROUNDED):
        _register(kind, kernels, layouts)


def _register(kind: str, kernels: Registry, layouts: LayoutRegistry) -> None:
    for name in ("bf16", "f16"):
        plain = tuple(dtype(i, name) for i in _STACKS)
        kernels.add(_kernel(kind, name, (dtype(0, name), *plain), PLAIN, layouts))
        requires = (dtype(0, name), *plain)
        kernels.add(_kernel(kind, f"{name}_wide", requires, WIDE, layouts, wide=True))
    for form, text, holds, activations, unit in (
        ("e4m3", "e4m3 codes without offsets", _is_e4m3, ("bf16", "f16"), "fp8_mma"),
        ("e2m1", str(MXFP4), lambda found: found == MXFP4, ("bf16",), "bf16_mma"),
        ("nvfp4", str(NVFP4), lambda found: found == NVFP4, ("bf16",), "bf16_mma"),
    ):
        kept = tuple(format_is(i, text, holds) for i in _STACKS)
        requires = (dtype(0, *activations), *kept, alike(3, 4), feature(unit))
        for variant, wide in ((form, False), (f"{form}_wide", True)):
            kernels.add(
                _kernel(kind, variant, requires, CODED[form], layouts, wide=wide, layout=WORDS)
            )

    kept = tuple(format_is(i, "e4m3 codes without offsets", _is_e4m3) for i in _STACKS)
    rounded = format_is(0, "e4m3 codes with f32 scales in rows", is_rounded)
    requires = (rounded, *kept, alike(3, 4), feature("fp8_mma"))
    kernels.add(_kernel(kind, "fp8", requires, FP8, layouts, layout=CODES))


def _launches(call: TorchCall, wide: bool) -> list[Launch]:
    return experts(of_call(call), wide=wide)


def _kernel(
    kind: str,
    variant: str,
    formats: tuple[Constraint, ...],
    efficiency: Efficiency,
    registry: LayoutRegistry,
    *,
    wide: bool = False,
    layout: str = "",
) -> Kernel:
    layouts: dict[int, str] = {i: layout for i in _STACKS} if layout else {}
    run: Callable[[TorchCall], list[Launch]] = partial(_launches, wide=wide)
    step = 32 if variant.startswith("e2m1") else 16
    return Kernel(
        f"triton.{kind}_{variant}",
        kind,
        "triton",
        requires=(
            device_kind("gpu"),
            feature("triton"),
            *formats,
            dtype(1, "i32", "i64"),
            dtype(2, "f32", "bf16", "f16"),
            *(weight_operand(i) for i in _STACKS),
            multiple_of(3, 2, step, "D"),
            multiple_of(5, 2, step, "F"),
            dense(0, 1, 2),
            *_THEN[kind],
        ),
        layouts=layouts,
        efficiency=efficiency,
        launches=4,
        error=BF16_STEP,
        workspace=_workspace,
        effort=_effort,
        fits=fits(run, layouts, registry),
        binder=TritonBinder(run),
    )


def _followed(emitted: Callable[..., Epilogue]) -> Constraint:
    def check(query: Query) -> str | None:
        # What an epilogue cannot do is raised, and read from there as the reason.
        emitted(body_of(query.op), query.strided, query.strided)
        return None

    return Constraint("experts and what an epilogue can do", check)


def _is_narrow(query: Query) -> str | None:
    width = query.tensor(0).shape[1].static
    return None if width <= _WIDEST_NORM else str(width)


_OF_ROWS = (
    _followed(emit_row_epilogue), Constraint(f"rows of at most {_WIDEST_NORM}", _is_narrow),
)  # fmt: skip
_THEN: Mapping[str, tuple[Constraint, ...]] = {
    KIND: (), ADDED: (_followed(emit_epilogue),), NORMED: _OF_ROWS, ROUNDED: _OF_ROWS,
}  # fmt: skip


def alike(first: int, second: int) -> Constraint:
    """Two operands have the same element type."""

    def check(query: Query) -> str | None:
        a, b = query.dtype(first), query.dtype(second)
        return None if a == b else f"{a} and {b}"

    return Constraint(f"operands {first} and {second} are of one format", check)


def _is_e4m3(found: DType) -> bool:
    return isinstance(found, Block) and found.element is F8E4M3 and found.is_single


def _workspace(query: Query) -> int:
    tokens, choices = query.size(1, 0), query.tensor(1).shape[1].static
    held, inner, width = (d.static for d in query.tensor(3).shape)
    made = query.op.results[0].tensor.dtype
    kind = torch.float16 if made.name == "f16" else torch.bfloat16
    return scratch_bound(tokens * choices, held, inner, width, kind)


def _effort(op: Op, device: Device, env: Mapping[str, int]) -> float:
    """Rows of tiles over pairs: every expert that is chosen leaves one tile partly filled."""
    tokens, choices = (d.evaluate(env) for d in op.operands[1].tensor.shape)
    held = op.operands[3].tensor.shape[0].static
    total = int(cast(int, op.attr.get("total", 0))) or held
    each = max(tokens * choices / total, 1.0)
    rows = next((n for n in (16, 32, 64) if each <= 1.5 * n), 128)
    return -(-each // rows) * rows / each
