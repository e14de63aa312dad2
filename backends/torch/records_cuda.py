"""Records of the library products and attentions for CUDA devices.

A plan may be made for them on any machine; they run only where torch has CUDA.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import torch

from metainfer.backends.kernel import (
    Constraint,
    Efficiency,
    Kernel,
    Query,
    Registry,
    attr_is,
    device_kind,
    dtype,
    feature,
    multiple_of,
    operand_count,
    weight_operand,
)
from metainfer.backends.pace import Pace
from metainfer.backends.torch import library_attention, library_linear
from metainfer.backends.torch.call import TorchBinder
from metainfer.backends.torch.codes import has_codes
from metainfer.backends.torch.constraints import (
    all_dtypes,
    block_format,
    body_attr,
    body_is,
    body_operands,
    causal_is_square,
    equal_widths,
    format_is,
    head_width,
    is_row_format,
    pad_repair,
    rank_is,
    same_dtype,
    state_like,
)
from metainfer.backends.torch.layouts import FP8_MULTIPLE
from metainfer.hardware.device import Device
from metainfer.ir.dtypes import FP8_BLOCK, FP8_GROUP, FP8_ROW
from metainfer.ir.graph import Op

# Rows of four scales: the library reads them 16 bytes at once.
BLOCKS_MULTIPLE = 4 * 128
BF16_STEP = 2.0**-8
F8_STEP = 2.0**-4
GPU, CUDA = device_kind("gpu"), feature("cuda")
WEIGHT = weight_operand(1)

# Sustained rates of device files are what cuBLAS reaches at large M. At small M it leaves 0.28
# (K=7168, N=4096) to 0.1 (K=4096, N=14336) of the bandwidth.
CUBLAS = {
    name: Efficiency(
        0.7, 1.0, name, "H200, captured: 0.72 of bandwidth at M=1, 800 TFLOP/s at 4096"
    )
    for name in ("bf16", "f16")
} | {"f32": Efficiency(0.75, 0.95, "f32", "H200: 0.78 of bandwidth, 51 TFLOP/s")}
# The product alone reaches 1,310 TFLOP/s; the passes that round the activations take the rest.
FP8 = Efficiency(
    0.37, 0.55, "f8e4m3", "H200, captured, M=4096: 615 (K=7168, N=4096), 866 TFLOP/s (4096, 14336)"
)
FP8_ALONE = Efficiency(
    0.5, 1.2, "f8e4m3",
    "H200, captured, 12 products of known models: M=4096 731 (K=512) to 1,404 TFLOP/s (7168, "
    "16384), M=256 282 (N=2048) to 1,170, M=16 0.23 to 0.53 of bandwidth",
)  # fmt: skip
ALONE = Pace(128, 128, 1.2, 1, 512, "fitted to the same times")
FP8_BLOCKED = Efficiency(
    0.72, 1.15, "f8e4m3",
    "H200, captured, turned scales included, 12 products of known models: M=4096 739 (K=512) to "
    "1,318 TFLOP/s (7168, 16384), M=256 234 (N=2048) to 1,058, M=16 0.31 to 0.65 of bandwidth",
)  # fmt: skip
BLOCKED = Pace(128, 128, 1.16, 1, 768, "fitted to the same times")
# The library cuts long sums of few rows into halves of its tiles; 16 rows were timed, not fewer.
BLOCKED_FEW = replace(BLOCKED, rows=64, alone=1.36, ends=5120)
# Of the sums of fp8 products, kept with 13 bits behind the point.
F8_SUMS = 2.0**-13
FLASH = Efficiency(0.6, 0.7, source="H200, 8 x 2048 tokens, 32 heads of 128: 489 TFLOP/s")
PAGED = Efficiency(
    0.33, 0.37, source="H200, captured: 0.11 of bandwidth at 64 x 1024, 259 TFLOP/s at 8 x 2048"
)


def register_cuda(kernels: Registry) -> None:
    """Register what CUDA libraries offer through torch for linears and attention."""
    for name in ("bf16", "f16", "f32"):
        for kernel in _linears(name):
            kernels.add(kernel)
    for kernel in (_fp8(), _fp8_rounded(), _fp8_blocks(), *_codes(), *_attention()):
        kernels.add(kernel)


def _linears(name: str) -> tuple[Kernel, ...]:
    plain, efficiency = TorchBinder(library_linear.linear), CUBLAS[name]
    here: tuple[Constraint, ...] = (GPU, CUDA)
    if name != "f32":
        here = (*here, feature(f"{name}_mma"))

    def kernel(
        kind: str,
        run: TorchBinder,
        *extra: Constraint,
        layout: str = "",
        error: float = 0.0,
        in_place: Mapping[int, int] = MappingProxyType({}),
    ) -> Kernel:
        return Kernel(
            f"cuda.{kind}_{name}",
            "linear" if kind.startswith("linear_dequantized") else kind,
            "cuda",
            requires=(*here, *extra),
            layouts={1: layout} if layout else {},
            efficiency=efficiency,
            in_place=in_place,
            starts_as_copy=bool(in_place),
            error=error,
            binder=run,
        )

    epilogue = (all_dtypes(name), operand_count(3))
    return (
        kernel("linear", plain, all_dtypes(name)),
        kernel(
            "linear_dequantized",
            plain,
            dtype(0, name),
            block_format(1),
            WEIGHT,
            same_dtype(0, 2),
            layout=f"torch.dense_{name}",
            error=0.0 if name == "f32" else BF16_STEP,
        ),
        kernel(
            "linear_add",
            TorchBinder(library_linear.linear_add),
            *epilogue,
            body_is("linear", "add"),
            body_operands(0, 2),
            in_place={0: 2},
        ),
        kernel(
            "linear_bias_relu",
            TorchBinder(library_linear.linear_activation(False)),
            *epilogue,
            body_is("linear", "relu"),
        ),
        kernel(
            "linear_bias_gelu",
            TorchBinder(library_linear.linear_activation(True)),
            *epilogue,
            body_is("linear", "gelu"),
            body_attr(1, "approximate", "tanh"),
        ),
    )


def _fp8() -> Kernel:
    outer = multiple_of(1, 0, FP8_MULTIPLE, "N")
    inner = multiple_of(1, 1, FP8_MULTIPLE, "K")
    return Kernel(
        "cuda.linear_fp8",
        "linear",
        "cuda",
        requires=(
            GPU,
            CUDA,
            feature("fp8_mma"),
            dtype(0, "bf16"),
            format_is(1, "f8e4m3/row or /tensor", is_row_format("f8e4m3", tensor=True)),
            WEIGHT,
            same_dtype(0, 2),
            outer,
            inner,
        ),
        repairs=(
            pad_repair(outer, "N", (1, 0), FP8_MULTIPLE),
            pad_repair(inner, "K", (1, 1), FP8_MULTIPLE),
        ),
        layouts={1: "cuda.fp8_cols"},
        efficiency=FP8,
        # Rounding the activations takes all but one of them.
        launches=15,
        error=F8_STEP,
        binder=TorchBinder(library_linear.linear_fp8),
    )


def _fp8_rounded() -> Kernel:
    """Activations that are codes with a scale a row: nothing is left to round."""
    outer = multiple_of(1, 0, FP8_MULTIPLE, "N")
    return Kernel(
        "cuda.linear_fp8_rounded",
        "linear",
        "cuda",
        requires=(
            GPU,
            CUDA,
            feature("fp8_mma"),
            dtype(0, str(FP8_ROW)),
            format_is(1, "f8e4m3/row or /tensor", is_row_format("f8e4m3", tensor=True)),
            WEIGHT,
            attr_is("dtype", "bf16"),
            dtype(2, "bf16"),
            outer,
            multiple_of(1, 1, FP8_MULTIPLE, "K"),
        ),
        repairs=(pad_repair(outer, "N", (1, 0), FP8_MULTIPLE),),
        layouts={1: "cuda.fp8_cols"},
        efficiency=FP8_ALONE,
        error=F8_SUMS,
        effort=ALONE.effort(FP8_ALONE.compute),
        binder=TorchBinder(library_linear.linear_fp8_rounded),
    )


def _older_cuda(query: Query) -> str | None:
    """The version of torch's CUDA where its library does not scale blocks yet."""
    version = torch.version.cuda
    if version is None or tuple(map(int, version.split(".")[:2])) >= (12, 9):
        return None
    return f"CUDA {version}"


def _blocked_effort(op: Op, device: Device, env: Mapping[str, int]) -> float:
    *lead, inner = op.operands[0].tensor.concrete(env)
    pace = BLOCKED_FEW if 8 < math.prod(lead) <= 16 and inner > 4096 else BLOCKED
    return pace.effort(FP8_BLOCKED.compute)(op, device, env)


def _fp8_blocks() -> Kernel:
    """Activations that are codes in groups of 128, weights in blocks of 128 x 128."""
    return Kernel(
        "cuda.linear_fp8_blocks",
        "linear",
        "cuda",
        requires=(
            GPU,
            CUDA,
            feature("fp8_mma"),
            # cuBLAS scales blocks on Hopper only, so far.
            feature("wgmma"),
            dtype(0, str(FP8_GROUP)),
            dtype(1, str(FP8_BLOCK)),
            WEIGHT,
            attr_is("dtype", "bf16"),
            dtype(2, "bf16"),
            multiple_of(1, 0, FP8_MULTIPLE, "N"),
            multiple_of(1, 1, BLOCKS_MULTIPLE, "K"),
        ),
        layouts={1: "torch.codes"},
        efficiency=FP8_BLOCKED,
        # The scales of the activations are turned first.
        launches=2,
        effort=_blocked_effort,
        fits=Constraint("CUDA 12.9 or newer, if there is one here", _older_cuda),
        error=F8_SUMS,
        workspace=library_linear.block_product_scratch,
        binder=TorchBinder(library_linear.linear_fp8_blocks),
    )


# Bytes moved for each byte of codes and scales, as timed: widening to f32, scaling, rounding.
CODES_TRAFFIC = {"f8e4m3": 38.0, "f4e2m1": 84.0}
CODES = replace(CUBLAS["bf16"], source="H200, 8192 x 8192, M=1: e4m3 885 us, e2m1 1,027 us")


def _codes() -> tuple[Kernel, ...]:
    """Weights that stay in their codes and are widened at each call: least memory."""
    return tuple(
        Kernel(
            f"cuda.linear_codes_{element}_bf16",
            "linear",
            "cuda",
            requires=(
                GPU,
                CUDA,
                dtype(0, "bf16"),
                format_is(1, f"{element} codes without offsets", has_codes(element)),
                WEIGHT,
                same_dtype(0, 2),
            ),
            layouts={1: "torch.codes"},
            efficiency=CODES,
            launches=9,
            error=BF16_STEP,
            extra_bytes=traffic,
            binder=TorchBinder(library_linear.linear_codes),
        )
        for element, traffic in CODES_TRAFFIC.items()
    )


def _attention() -> tuple[Kernel, ...]:
    return (
        Kernel(
            "cuda.sdpa_flash",
            "sdpa",
            "cuda",
            requires=(
                GPU,
                CUDA,
                dtype(0, "bf16", "f16"),
                same_dtype(0, 1, 2),
                operand_count(3),
                rank_is(0, 4),
                causal_is_square(),
                equal_widths(256, 8),
            ),
            efficiency=FLASH,
            launches=3,
            error=BF16_STEP,
            binder=TorchBinder(library_attention.sdpa),
        ),
        Kernel(
            "cuda.attention_paged",
            "attention",
            "cuda",
            requires=(
                GPU,
                CUDA,
                dtype(0, "bf16", "f16"),
                state_like(1, 0),
                head_width(1, 256, 8),
                attr_is("softcap", 0.0),
            ),
            efficiency=PAGED,
            launches=12,
            error=BF16_STEP,
            # Pages are gathered: written once and read once more.
            extra_bytes=2.0,
            binder=TorchBinder(library_attention.attention_flash),
        ),
    )
