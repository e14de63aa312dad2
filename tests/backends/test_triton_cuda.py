"""Triton kernels on a CUDA device: the numbers of the references, capture into a graph."""

from typing import Any

import numpy as np
import pytest
import torch
from torch_samples import Case, build, fused
from triton_groups import (
    GROUPS,
    KERNEL,
    SINGLE,
    WIDTHS,
    check_group,
    group,
    group_data,
    random,
    writing_group,
)
from triton_products import gated, linear
from triton_worker import check_on_gpu, refused

from metainfer.backends.registry import installed
from metainfer.backends.torch.call import TorchCall
from metainfer.backends.torch.check import difference, make_call, make_op, run_reference
from metainfer.backends.triton.records_linear import TURNED
from metainfer.ir.dtypes import BF16, I32, parse_dtype, quantize
from metainfer.ir.types import tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


def ids(value: Any) -> str:
    return value if isinstance(value, str) else str(value[0])


@pytest.mark.parametrize(("case", "float_type"), SINGLE, ids=ids)
def test_single_ops(case: Case, float_type: str) -> None:
    op, data = build(case, float_type)
    if not refused(f"triton.{op.name}", op):
        check_on_gpu(f"triton.{op.name}", op, data)


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("size", [*WIDTHS, "large"])
@pytest.mark.parametrize("kind", GROUPS)
def test_groups(kind: str, size: str, dtype: str) -> None:
    op = group(kind, dtype, WIDTHS.get(size, 4096))
    for tokens in (1, 300):
        check_group(op, group_data(op, tokens), {"T": tokens}, "cuda")


@pytest.mark.parametrize("tokens", [1, 19, 70])
@pytest.mark.parametrize(
    ("kind", "tile"),
    [(kind, tile) for kind, tiles in TURNED.items() for tile in tiles if "few64" not in tile],
)
def test_products_that_are_turned_and_written(kind: str, tile: str, tokens: int) -> None:
    width = 128 if kind == "linear_rope_kv_write" or tile.startswith("turn") else 64
    op, data = writing_group(kind, tokens, width, False, inner=2048)
    data[1] = (data[1].astype(np.float32) / 2048**0.5).astype(data[1].dtype)
    check_on_gpu(f"triton.{kind}_plain_{tile}", op, data, {"T": tokens})


@pytest.mark.parametrize("tokens", [1, 19, 70])
@pytest.mark.parametrize("weight", ["f8e4m3/128x128:f32", "f4e2m1/32:f8e8m0", "u4/32:f16+f16"])
@pytest.mark.parametrize(
    ("kind", "tile"),
    [("linear_rope_kv_write", "few16"), ("linear_qk_norm_rope_kv_write", "few16"),
     ("linear_qk_norm_rope_kv_write", "turn16")],
)  # fmt: skip
def test_products_by_codes_that_are_turned_and_written(
    kind: str, tile: str, weight: str, tokens: int
) -> None:
    width = 128 if tile == "turn16" or kind == "linear_rope_kv_write" else 64
    op, data = writing_group(kind, tokens, width, False, inner=1024, weight=weight)
    check_on_gpu(f"triton.{kind}_{FORMATS[weight]}_{tile}", op, data, {"T": tokens})


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("kind", ["rope_kv_write", "qk_norm_rope_kv_write"])
def test_keys_and_values_are_written(kind: str, interleaved: bool) -> None:
    for tokens, width in ((1, 64), (90, 128)):
        op, data = writing_group(kind, tokens, width, interleaved)
        check_group(op, data, {"T": tokens}, "cuda")


@pytest.mark.parametrize("table", ["bf16", "i8/32:f16", "f8e4m3/32:f8e8m0"])
def test_embedding(table: str) -> None:
    rng = np.random.default_rng(3)
    types = [tensor(I32, 300), tensor(parse_dtype(table), 1000, 576)]
    values = rng.normal(size=(1000, 576)).astype(np.float32)
    format_ = types[1].dtype
    data = quantize(values, format_) if "/" in table else values.astype(BF16.numpy)  # type: ignore[arg-type]
    op = make_op("embedding", types, {"dtype": "bf16"}, [1])
    check_on_gpu("triton.embedding", op, [rng.integers(-1, 1000, 300).astype(np.int32), data])


FORMATS = {
    "bf16": "plain", "f8e4m3/128x128:f32": "codes", "f8e4m3/row:f32": "codes",
    "f8e4m3/32:f8e8m0": "codes", "f4e2m1/32:f8e8m0": "fp4", "u4/32:f16+f16": "int4",
    "i4/32:f16": "int4", "i8/32:f16": "int8",
}  # fmt: skip


@pytest.mark.parametrize("tile", ["m16", "m64", "m128", "few16", "few64"])
@pytest.mark.parametrize("format_", FORMATS)
def test_products(format_: str, tile: str) -> None:
    for rows, columns, inner in ((1, 576, 576), (300, 1000, 1536), (129, 37, 197)):
        types = [tensor(BF16, rows, inner), tensor(parse_dtype(format_), columns, inner)]
        op = make_op("linear", types, {}, [1])
        check_on_gpu(f"triton.linear_{FORMATS[format_]}_{tile}", op, [random(t, {}) for t in types])


@pytest.mark.parametrize("tile", ["head16", "all16", "head64"])
def test_heads_of_codes(tile: str) -> None:
    for rows, columns, inner in ((1, 2048, 4096), (19, 576, 2048), (64, 640, 1100)):
        format_ = parse_dtype("f8e4m3/128x128:f32")
        types = [tensor(BF16, rows, inner), tensor(format_, columns, inner)]
        op = make_op("linear", types, {}, [1])
        check_on_gpu(f"triton.linear_codes_{tile}", op, [random(t, {}) for t in types])


@pytest.mark.parametrize("tile", ["few16", "deep16", "few64", "deep64"])
@pytest.mark.parametrize("shape", [(1, 4096, 4096), (64, 2048, 4096), (130, 128, 2048)], ids=str)
def test_parts_of_sums_meet_in_every_launch(tile: str, shape: tuple[int, int, int]) -> None:
    """One captured chain of launches, each on what the one in front of it made."""
    op, data = linear("bf16", shape)
    kernel = installed().kernels.get(f"triton.linear_plain_{tile}")
    x, w = (torch.from_numpy(d.view(np.int16)).view(torch.bfloat16).cuda() for d in data)
    y = torch.empty(shape[:2], dtype=torch.bfloat16, device="cuda")
    moved = torch.empty_like(x)
    run = kernel.binder.bind(TorchCall(op, (moved, w), (y,), {}))
    wanted = (x.float() @ w.float().T).to(torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    moved.copy_(x)
    run()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(4):
            y.fill_(float("nan"))
            moved.copy_(x)
            run()
    seen = []
    for _ in range(20):
        moved.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        seen.append(y.clone())
    assert all(torch.equal(s, seen[0]) for s in seen)
    assert torch.allclose(seen[0].float(), wanted.float(), rtol=2**-6, atol=2**-6)


def test_gates_of_few_rows() -> None:
    for tile in ("few16", "few64"):
        for shape in ((1, 1536, 576), (37, 21, 200), (64, 14336, 4096)):
            op, data = gated(*shape)
            check_on_gpu(f"triton.linear_silu_mul_plain_{tile}", op, data)


FOLLOWING = [
    ("linear_add", True, "add", {}),
    ("linear_silu", False, "silu", {}),
    ("linear_gelu", True, "gelu", {"approximate": "tanh"}),
]


@pytest.mark.parametrize(("kind", "bias", "follows", "attrs"), FOLLOWING, ids=str)
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_epilogues(kind: str, bias: bool, follows: str, attrs: dict[str, Any], dtype: str) -> None:
    op, data = fused(kind, (2, 90), bias, follows, attrs, dtype, (576, 640))
    for tile in ("m16", "m64", "m128"):
        check_on_gpu(f"triton.{kind}_plain_{tile}", op, data)


def test_a_group_is_captured() -> None:
    op = group("add_rms_norm", "bf16", 576)
    data = group_data(op, 64)
    call = make_call(op, data, installed().layouts, {}, {"T": 64}, "cuda")
    run = KERNEL.binder.bind(call)
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for output in call.outputs:
        output.zero_()
    graph.replay()
    torch.cuda.synchronize()
    for found, wanted in zip(call.outputs, run_reference(op, data, {"T": 64}), strict=True):
        assert difference(found.float().cpu().numpy(), np.asarray(wanted, np.float32)) < 2.0**-7
