"""Library kernels of CPUs against the references, through their packings."""

from typing import Any

import pytest
from torch_samples import (
    BATCHES,
    FLOAT_CASES,
    KERNELS,
    OTHER_CASES,
    Case,
    attention_case,
    build,
    check,
    floats,
    fused,
    ints,
    latent_case,
    weight,
)

from metainfer.backends.kernel import Kernel, Query
from metainfer.hardware.load import load_machine
from metainfer.ir.graph import Op
from metainfer.ir.interpret import Data

CPU = load_machine("cpu").device(0)
ALL_CASES = [
    *((c, t) for c in FLOAT_CASES for t in ("f32", "bf16", "f16", "f64")),
    *((c, "f32") for c in OTHER_CASES),
]
SINGLE = {k.name: k for k in KERNELS.all() if k.backend == "torch" and not k.generic}


def query(op: Op) -> Query:
    return Query(op, CPU, {})


def run(kernel: Kernel, op: Op, data: list[Data]) -> None:
    """The kernel accepts the op, maybe after repairs, and computes it."""
    refusals = kernel.refusals(query(op))
    assert not refusals or kernel.repairs_for(refusals) is not None, refusals
    check(kernel, op, data)


@pytest.mark.parametrize(
    ("case", "float_type"), ALL_CASES, ids=lambda p: p if isinstance(p, str) else p[0]
)
def test_what_applies_is_right(case: Case, float_type: str) -> None:
    op, data = build(case, float_type)
    kernels = [k for k in KERNELS.candidates(op.name) if not k.refusals(query(op))]
    assert kernels
    assert kernels[-1].name == f"torch.{op.name}_plain"
    for kernel in kernels:
        check(kernel, op, data)


def test_every_single_call_was_tried() -> None:
    tried = set()
    for case, float_type in ALL_CASES:
        op, _ = build(case, float_type)
        tried |= {k.name for k in KERNELS.candidates(op.name) if not k.refusals(query(op))}
    own = {
        name for name in SINGLE
        if name.startswith(("torch.linear_", "torch.experts_", "torch.sdpa", "torch.attention_",
                            "torch.latent_attention_"))
    }  # fmt: skip
    assert set(SINGLE) - own - tried == {
        "torch.embedding", "torch.kv_write", "torch.latent_write",
    }  # fmt: skip


DENSE: list[tuple[str, Case, str]] = [
    ("torch.linear_f32", ("linear", [floats(2, 3, 24), floats(5, 24), floats(5)], {}), "f32"),
    ("torch.linear_f32", ("linear", [floats(3, 24), floats(5, 24)], {}), "f32"),
    ("torch.linear_f32", ("linear", [floats(24), floats(5, 24)], {}), "f32"),
    *(
        ("torch.linear_dequantized_f32", ("linear", [floats(3, 70), weight(f, 6, 70)], {}), "f32")
        for f in ("i8/32:f16", "u4/32:f16+f16", "f4e2m1/32:f8e8m0", "f8e4m3/16x16:f32", "bf16")
    ),
    *(
        (f"torch.linear_codes_{f.partition('/')[0]}",
         ("linear", [floats(2, 3, k), weight(f, 9, k), floats(9)], {}), "f32")
        for k in (64, 71)
        for f in ("f8e4m3/row:f32", "f8e4m3/tensor:f32", "f8e4m3/4x16:f8e8m0", "f4e2m1/32:f8e8m0",
                  "f8e4m3/128x128:f32")
    ),
    *(
        ("torch.linear_int8", ("linear", [floats(3, k), weight(f, 9, k), floats(9)], {}), "bf16")
        for k in (64, 65, 576)
        for f in ("i8/row:f32", "i8/row:bf16", "i8/row:f16")
    ),
    *(
        ("torch.linear_int4", ("linear", [floats(2, 3, 100), weight(f, 24, 100)], {}), "bf16")
        for f in ("i4/32:f16", "i4/64:bf16", "u4/32:f16+f16", "u4/128:f32+f32")
    ),
    ("torch.sdpa", ("sdpa", [floats(2, 4, 5, 8), floats(2, 2, 5, 8), floats(2, 2, 5, 8)],
                    {"causal": True}), "f32"),
    ("torch.sdpa", ("sdpa", [floats(4, 5, 8), floats(4, 7, 8), floats(4, 7, 6)],
                    {"scale": 0.4}), "f32"),
    ("torch.sdpa_bf16", ("sdpa", [floats(2, 4, 5, 8), floats(2, 2, 5, 8), floats(2, 2, 5, 8)],
                         {}), "bf16"),
    ("torch.sdpa_bf16", ("sdpa", [floats(4, 5, 8), floats(4, 5, 8), floats(4, 5, 8)],
                         {"causal": True}), "f16"),
    ("torch.embedding", ("embedding", [ints(2, 3, low=0, high=40), floats(40, 12)],
                         {"dtype": "f32"}), "f32"),
    ("torch.embedding", ("embedding", [ints(3, low=0, high=40, dtype="i64"), floats(40, 12)],
                         {"dtype": "bf16"}), "bf16"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "case", "float_type"),
    DENSE,
    ids=[f"{n}-{c[1][1][0] if len(c[1]) > 1 else ''}" for n, c, _ in DENSE],
)
def test_products_and_attentions(name: str, case: Case, float_type: str) -> None:
    run(KERNELS.get(name), *build(case, float_type, weights=[1]))


EXPERTS = [
    ("torch.experts_dequantized_f32", "f8e4m3/16x16:f32"),
    ("torch.experts_dequantized_f32", "f4e2m1/32:f8e8m0"),
    ("torch.experts_codes_f8e4m3", "f8e4m3/16x16:f32"),
    ("torch.experts_codes_f8e4m3", "f8e4m3/tensor:f32"),
    ("torch.experts_codes_f4e2m1", "f4e2m1/32:f8e8m0"),
]


@pytest.mark.parametrize(("name", "format"), EXPERTS)
def test_experts_of_float_codes(name: str, format: str) -> None:
    stacks = [weight(format, 4, 24, 40), weight(format, 4, 24, 40), weight(format, 4, 40, 24)]
    chosen = ints(7, 2, low=-1, high=4)
    specs = [floats(7, 40), chosen, floats(7, 2), *stacks]
    run(KERNELS.get(name), *build(("experts", specs, {}), "f32", weights=[3, 4, 5]))


ATTENTIONS: list[dict[str, Any]] = [{}, {"window": 3}, {"window": 50, "scale": 0.3}]


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("attrs", ATTENTIONS, ids=str)
@pytest.mark.parametrize("batch", BATCHES, ids=str)
def test_paged_attention(
    batch: tuple[list[int], list[int]], attrs: dict[str, Any], dtype: str
) -> None:
    name = "torch.attention_sdpa" + ("" if dtype == "f32" else "_bf16")
    run(KERNELS.get(name), *attention_case(dtype, batch, attrs))


@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize("batch", BATCHES, ids=str)
def test_latent_attention(batch: tuple[list[int], list[int]], dtype: str) -> None:
    run(KERNELS.get("torch.latent_attention_rows"), *latent_case(dtype, batch))


def test_paged_attention_without_padding() -> None:
    run(KERNELS.get("torch.attention_sdpa"), *attention_case("f32", ([9], [1]), {}, padding=0))


FUSED = [
    ("torch.linear_add_f32", "linear_add", False, "add", {}),
    ("torch.linear_bias_relu_f32", "linear_bias_relu", True, "relu", {}),
    ("torch.linear_bias_gelu_f32", "linear_bias_gelu", True, "gelu", {"approximate": "none"}),
]


@pytest.mark.parametrize(("name", "kind", "bias", "follows", "attrs"), FUSED, ids=lambda p: str(p))
@pytest.mark.parametrize("lead", [(3,), (2, 3)])
def test_linear_and_what_follows(
    name: str, kind: str, bias: bool, follows: str, attrs: dict[str, Any], lead: tuple[int, ...]
) -> None:
    run(KERNELS.get(name), *fused(kind, lead, bias, follows, attrs))


def test_bf16_products_need_the_instructions() -> None:
    kernel = KERNELS.get("torch.linear_bf16")
    op, _ = build(("linear", [floats(3, 64), floats(8, 64)], {}), "bf16", weights=[1])
    (refusal,) = kernel.refusals(query(op))
    assert str(refusal) == (
        f"wanted feature avx512_bf16 or amx_bf16, found {CPU.name} has none of them"
    )
