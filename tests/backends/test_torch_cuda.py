"""Torch kernels on a CUDA device: numbers, launches, capture into a graph."""

from typing import Any

import numpy as np
import pytest
import torch
from torch_samples import (
    BATCHES,
    FLOAT_CASES,
    KERNELS,
    LAYOUTS,
    OTHER_CASES,
    Case,
    assert_close,
    attention_case,
    build,
    check,
    floats,
    fused,
    ints,
    scalar,
    weight,
)

from metainfer.backends.kernel import Kernel, Query
from metainfer.backends.torch.check import make_call, run_reference
from metainfer.backends.torch.quantize import quantize
from metainfer.hardware.load import load_machine
from metainfer.ir.dtypes import Block, parse_dtype
from metainfer.ir.graph import Op
from metainfer.ir.interpret import Data

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
H200 = load_machine("1xh200").device(0)
CASES = [
    *((c, t) for c in FLOAT_CASES for t in ("f32", "bf16", "f16", "f64")),
    *((c, "f32") for c in OTHER_CASES),
]


def applying(op: Op) -> list[Kernel]:
    """Kernels that take the op on a GPU, maybe after repairs."""
    found = []
    for kernel in KERNELS.candidates(Query(op, H200, {}).kind):
        refusals = kernel.refusals(Query(op, H200, {}))
        if not refusals or kernel.repairs_for(refusals) is not None:
            found.append(kernel)
    return found


@pytest.mark.parametrize(
    ("case", "float_type"), CASES, ids=lambda p: p if isinstance(p, str) else p[0]
)
def test_what_applies_is_right(case: Case, float_type: str) -> None:
    op, data = build(case, float_type)
    for kernel in applying(op):
        check(kernel, op, data, "cuda")


def linear_case(dtype: str, format: str, bias: bool, rows: int = 9, k: int = 100) -> Any:
    specs = [floats(2, 3, k), weight(format, rows, k), *([floats(rows)] if bias else [])]
    return build(("linear", specs, {}), dtype, weights=[1])


LINEARS = [
    ("cuda.linear_bf16", "bf16", "float"),
    ("cuda.linear_f16", "f16", "float"),
    ("cuda.linear_f32", "f32", "float"),
    ("cuda.linear_dequantized_bf16", "bf16", "i8/32:f16"),
    ("cuda.linear_dequantized_f16", "f16", "u4/32:f16+f16"),
    ("cuda.linear_dequantized_f32", "f32", "f4e2m1/32:f8e8m0"),
    ("cuda.linear_fp8", "bf16", "f8e4m3/row:f32"),
    ("cuda.linear_fp8", "bf16", "f8e4m3/row:f8e8m0"),
    ("cuda.linear_fp8", "bf16", "f8e4m3/tensor:f32"),
    ("cuda.linear_codes_f8e4m3_bf16", "bf16", "f8e4m3/16x16:f32"),
    ("cuda.linear_codes_f8e4m3_bf16", "bf16", "f8e4m3/row:f32"),
    ("cuda.linear_codes_f4e2m1_bf16", "bf16", "f4e2m1/32:f8e8m0"),
    ("torch.linear_plain", "bf16", "f8e4m3/16x16:f32"),
    ("torch.linear_plain", "f32", "bf16"),
]


@pytest.mark.parametrize(("name", "dtype", "format"), LINEARS)
@pytest.mark.parametrize("bias", [False, True])
def test_linears(name: str, dtype: str, format: str, bias: bool) -> None:
    op, data = linear_case(dtype, format, bias)
    kernel = KERNELS.get(name)
    assert kernel in applying(op)
    check(kernel, op, data, "cuda")


@pytest.mark.parametrize("format", ["f8e4m3/row:f32", "f8e4m3/128:f32", "f8e4m3/128:f8e8m0",
                                    "f4e2m1/32:f8e8m0"])  # fmt: skip
def test_activations_are_rounded_as_on_a_cpu(format: str) -> None:
    """Bit for bit, subnormal and zero rows included."""
    dtype = parse_dtype(format)
    assert isinstance(dtype, Block)
    x = torch.randn(300, 1024, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    x[:, ::7] *= 37
    x[1], x[2] = 0, x[2] * 1e-39
    codes, scales = quantize(x.cuda(), dtype)
    wanted_codes, wanted_scales = quantize(x, dtype)
    assert torch.equal(codes.cpu().view(torch.uint8), wanted_codes.view(torch.uint8))
    assert torch.equal(scales.cpu().view(torch.uint8), wanted_scales.view(torch.uint8))


FUSED = [
    ("linear_add", False, "add", {}),
    ("linear_bias_relu", True, "relu", {}),
    ("linear_bias_gelu", True, "gelu", {"approximate": "tanh"}),
]


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize(("kind", "bias", "follows", "attrs"), FUSED, ids=str)
def test_linear_and_what_follows(
    kind: str, bias: bool, follows: str, attrs: dict[str, Any], dtype: str
) -> None:
    op, data = fused(kind, (2, 3), bias, follows, attrs, dtype, (16, 32))
    kernel = KERNELS.get(f"cuda.{kind}_{dtype}")
    assert kernel in applying(op)
    check(kernel, op, data, "cuda")


@pytest.mark.parametrize("table", ["float", "i8/32:f16", "f4e2m1/32:f8e8m0", "f8e4m3/16x16:f32"])
def test_embedding(table: str) -> None:
    case: Case = (
        "embedding",
        [ints(2, 3, low=0, high=40), weight(table, 40, 64)],
        {"dtype": "bf16"},
    )
    op, data = build(case, "bf16")
    for kernel in applying(op):
        check(kernel, op, data, "cuda")


ATTENTIONS: list[dict[str, Any]] = [
    {}, {"window": 3}, {"window": 50, "scale": 0.3}, {"softcap": 4.0},
]  # fmt: skip


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("attrs", ATTENTIONS, ids=str)
@pytest.mark.parametrize("batch", BATCHES, ids=str)
def test_paged_attention(
    batch: tuple[list[int], list[int]], attrs: dict[str, Any], dtype: str
) -> None:
    op, data = attention_case(dtype, batch, attrs, 64)
    kernels = applying(op)
    paged = KERNELS.get("cuda.attention_paged")
    assert (paged in kernels) == (dtype != "f32" and "softcap" not in attrs)
    for kernel in kernels:
        check(kernel, op, data, "cuda")


@pytest.mark.parametrize("new", [1, 2])
def test_paged_attention_without_padding(new: int) -> None:
    op, data = attention_case("bf16", ([9], [new]), {}, 64, padding=0)
    for kernel in applying(op):
        check(kernel, op, data, "cuda")


def test_convolutions_keep_f32() -> None:
    case: Case = ("conv2d", [floats(1, 64, 16, 16), floats(32, 64, 3, 3)], {})
    check(KERNELS.get("torch.conv2d_plain"), *build(case, "f32"), "cuda")


def test_flash_sdpa() -> None:
    for attrs in ({}, {"causal": True}, {"scale": 0.2}):
        case: Case = (
            "sdpa",
            [floats(2, 4, 33, 64), floats(2, 2, 33, 64), floats(2, 2, 33, 64)],
            attrs,
        )
        op, data = build(case, "bf16")
        kernel = KERNELS.get("cuda.sdpa_flash")
        assert kernel in applying(op)
        check(kernel, op, data, "cuda")


def test_paged_attention_is_captured_and_follows_new_lengths() -> None:
    op, data = attention_case("bf16", ([9, 7], [1, 1]), {}, 64)
    kernel = KERNELS.get("cuda.attention_paged")
    call = make_call(op, data, LAYOUTS, kernel.layouts, {}, "cuda")
    kernel.binder.run(call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.binder.run(call)
    lengths = np.array([5, 12], np.int32)
    lengths[1] = 7
    call.inputs[3].copy_(torch.from_numpy(lengths))
    graph.replay()
    torch.cuda.synchronize()
    (wanted, *_) = run_reference(op, [*data[:3], lengths, data[4]])
    found = call.outputs[0].float().cpu().numpy()
    assert_close(found, np.asarray(wanted, np.float32), scalar("bf16"), kernel.error)


def launched(kernel: Kernel, op: Op, data: list[Data]) -> int:
    """Kernels, copies and fills that one call runs on the device."""
    call = make_call(op, data, LAYOUTS, kernel.layouts, {}, "cuda")
    kernel.binder.run(call)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        kernel.binder.run(call)
        torch.cuda.synchronize()
    return sum(str(e.device_type).endswith("CUDA") for e in profile.events() or [])


LAUNCHES: list[tuple[Op, list[Data]]] = [
    *(build(case, t) for case, t in CASES if t in ("f32", "bf16")),
    *(linear_case(d, f, True, 16, 128) for _, d, f in LINEARS),
    *(fused(k, (4,), b, f, a, "bf16", (16, 32)) for k, b, f, a in FUSED),
    *(attention_case(d, ([9], [3]), {"window": 4}, 64) for d in ("f32", "bf16")),
    build(("sdpa", [floats(2, 4, 33, 64), *[floats(2, 2, 33, 64)] * 2], {"causal": True}), "bf16"),
]


@pytest.mark.filterwarnings("ignore:.*Profiler clears events.*:UserWarning")
@pytest.mark.parametrize("sample", LAUNCHES, ids=lambda s: s[0].name)
def test_launches_are_not_understated(sample: tuple[Op, list[Data]]) -> None:
    op, data = sample
    for kernel in applying(op):
        found = launched(kernel, op, data)
        # What starts as a copy is priced with that where it is chosen.
        known = kernel.launches + kernel.starts_as_copy
        assert found <= known, f"{kernel.name} makes {found} launches"
