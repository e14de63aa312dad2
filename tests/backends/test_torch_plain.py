"""Every plain implementation against its op's reference."""

from typing import Any

import numpy as np
import pytest
import torch
from torch_samples import (
    BATCHES,
    FLOAT_CASES,
    FLOATS,
    FORMATS,
    KERNELS,
    LAYOUTS,
    OTHER_CASES,
    RNG,
    Case,
    attention_case,
    build,
    check,
    floats,
    ints,
    latent_case,
    paged,
    scalar,
    weight,
)

from metainfer.backends.kernel import Kernel
from metainfer.backends.torch.check import make_op, run_kernel, run_reference
from metainfer.backends.torch.plain import LOAD_OPS, PLAIN, VIEWS
from metainfer.ir.errors import Unsupported
from metainfer.ir.interpret import Data
from metainfer.ir.ops import OPS
from metainfer.ir.ops.collective import OWN
from metainfer.ir.ops.record import COLLECTIVE
from metainfer.ir.types import tensor


def plain(name: str) -> Kernel:
    return KERNELS.get(f"torch.{name}_plain")


def test_every_op_has_a_plain_kernel_without_requirements() -> None:
    local = {name for name, record in OPS.items() if not record.has(COLLECTIVE)} - OWN
    assert local - LOAD_OPS == set(PLAIN)
    for name in PLAIN:
        kernel = plain(name)
        assert kernel.generic
        assert not kernel.requires
        assert kernel.launches >= 1


@pytest.mark.parametrize("float_type", FLOATS)
@pytest.mark.parametrize("case", FLOAT_CASES, ids=lambda c: c[0])
def test_floats(case: Case, float_type: str) -> None:
    check(plain(case[0]), *build(case, float_type))


@pytest.mark.parametrize("case", OTHER_CASES, ids=lambda c: c[0])
def test_other_types(case: Case) -> None:
    check(plain(case[0]), *build(case, "f32"))


def test_all_ops_are_covered() -> None:
    seen = {c[0] for c in (*FLOAT_CASES, *OTHER_CASES)}
    paged = {"kv_write", "attention", "latent_write", "latent_attention"}
    assert set(PLAIN) - seen == {"embedding", *paged}


@pytest.mark.parametrize("float_type", ["f32", "bf16"])
@pytest.mark.parametrize("format", FORMATS)
def test_linear_and_embedding_of_formats(format: str, float_type: str) -> None:
    if format in ("bf16", "f16") and float_type == "bf16":
        pytest.skip("the verifier wants a cast")
    linear: Case = ("linear", [floats(3, 144), weight(format, 40, 144)], {})
    check(plain("linear"), *build(linear, float_type))
    attrs = {"dtype": float_type}
    table: Case = ("embedding", [ints(2, 3, low=-1, high=40), weight(format, 40, 144)], attrs)
    check(plain("embedding"), *build(table, float_type))


@pytest.mark.parametrize("format", ["i8/32:f16", "f8e4m3/32:f32", "u4/32:f16+f16"])
def test_rounding_to_formats_that_no_pass_takes(format: str) -> None:
    op, data = build(("quantize", [floats(3, 48)], {"format": format}))
    if format.startswith("u4"):
        with pytest.raises(Unsupported, match="activations of"):
            check(plain("quantize"), op, data)
    else:
        check(plain("quantize"), op, data)


@pytest.mark.parametrize("float_type", ["f32", "bf16"])
@pytest.mark.parametrize("rounded", ["f8e4m3/16:f32", "f8e4m3/row:f32"])
def test_products_of_codes_by_codes(rounded: str, float_type: str) -> None:
    specs = [weight(rounded, 2, 3, 144), weight("f8e4m3/16x16:f32", 40, 144), floats(40)]
    op, data = build(("linear", specs, {"dtype": float_type}), float_type)
    assert op.result.tensor.dtype == scalar(float_type)
    check(plain("linear"), op, data)


@pytest.mark.parametrize("format", FORMATS)
def test_experts_of_formats(format: str) -> None:
    stacks = [weight(format, *shape) for shape in ((3, 40, 144), (3, 40, 144), (3, 144, 40))]
    specs = [floats(5, 144), ints(5, 2, low=-1, high=3), floats(5, 2), *stacks]
    check(plain("experts"), *build(("experts", specs, {}), "f32"))


def test_a_negative_index_gives_a_row_of_zeros() -> None:
    for dtype in ("i32", "i64"):
        index = (dtype, np.array([[3, -1], [-1, 0]]))
        op, data = build(("embedding", [index, floats(4, 6)], {}))
        (found,) = run_kernel(plain("embedding"), op, data, LAYOUTS)
        assert isinstance(found, np.ndarray)
        assert not found[0, 1].any()
        assert not found[1, 0].any()
        np.testing.assert_array_equal(found, run_reference(op, data)[0])


ATTENTIONS: list[dict[str, Any]] = [
    {}, {"window": 3}, {"scale": 0.2, "softcap": 2.0}, {"window": 5, "scale": 0.4},
]  # fmt: skip


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("attrs", ATTENTIONS, ids=str)
@pytest.mark.parametrize("batch", BATCHES, ids=str)
def test_attention(batch: tuple[list[int], list[int]], attrs: dict[str, Any], dtype: str) -> None:
    check(plain("attention"), *attention_case(dtype, batch, attrs))


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("batch", BATCHES, ids=str)
def test_latent_attention(batch: tuple[list[int], list[int]], dtype: str) -> None:
    check(plain("latent_attention"), *latent_case(dtype, batch))


def test_kv_write_changes_its_slots_only() -> None:
    type_, state, *_ = paged("bf16", [9], [3])
    entries = tensor(scalar("bf16"), 3, 2, 8)
    op = make_op("kv_write", [type_, entries, entries, tensor(scalar("i32"), 3)], {})
    k, v = (RNG.uniform(-2, 2, (3, 2, 8)).astype(scalar("bf16").numpy) for _ in "kv")
    data: list[Data] = [state, k, v, np.array([5, 13, 0], np.int32)]
    (found,) = run_kernel(plain("kv_write"), op, data, LAYOUTS)
    (wanted,) = run_reference(op, data)
    assert isinstance(found, dict)
    assert isinstance(wanted, dict)
    for name in "kv":
        before, a, b = (t[name].astype(np.float32) for t in (state, found, wanted))
        np.testing.assert_array_equal(a, b)
        changed = np.any((a != before).reshape(-1, 16), axis=1)
        # The null page holds NaN, which differs from itself.
        assert set(np.flatnonzero(changed)) == {0, 1, 2, 3, 5, 13}


def test_views_share_memory_where_they_can() -> None:
    x = torch.arange(24).reshape(4, 6)
    cases: dict[str, dict[str, Any]] = {
        "reshape": {"shape": (2, 12)},
        "transpose": {"perm": (1, 0)},
        "broadcast": {"shape": (3, 4, 6)},
        "slice": {"dim": 1, "start": 1, "stop": 6, "step": 2},
    }
    assert set(cases) == set(VIEWS)
    for name, attrs in cases.items():
        view = VIEWS[name](x, attrs)
        wanted = OPS[name].reference(x.numpy(), **attrs)
        np.testing.assert_array_equal(view.numpy(), wanted)
        assert view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    copied = VIEWS["reshape"](x.t(), {"shape": (24,)})
    np.testing.assert_array_equal(copied.numpy(), x.numpy().T.reshape(24))
