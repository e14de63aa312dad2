"""The JAX references against the numpy ones, op by op."""

import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from op_samples import SAMPLES, SETTINGS, Sample

from metainfer.ir.dtypes import BlockArray
from metainfer.ir.interpret import as_reference_input
from metainfer.ir.ops import OPS, op_def
from metainfer.ir.ops.record import RAW

jax = pytest.importorskip("jax", reason="the second reference needs the extra metainfer[jax]")
# Each shape compiles anew, and runs once.
jax.config.update("jax_disable_most_optimizations", True)

from metainfer.backends.jax.reference import REFERENCES  # noqa: E402


def operands_of(sample: Sample, seed: int) -> list[Any]:
    raw = op_def(sample.name).has(RAW)
    data = sample.data(np.random.default_rng(seed))
    return [as_reference_input(d, raw=raw) for d in data]


def both(sample: Sample, seed: int) -> tuple[list[Any], list[Any]]:
    """Results of the JAX and of the numpy reference, on the same operands."""
    record = op_def(sample.name)
    operands, attrs = operands_of(sample, seed), record.complete(sample.attrs)
    made = REFERENCES[sample.name](*operands, **attrs)
    with np.errstate(all="ignore"):
        wanted = record.reference(*operands, **attrs)
    listed = [list(r) if isinstance(r, tuple) else [r] for r in (made, wanted)]
    return listed[0], listed[1]


def check_agree(made: Any, wanted: Any) -> None:
    if isinstance(wanted, dict):
        assert set(made) == set(wanted)
        for name in wanted:
            check_agree(made[name], wanted[name])
        return
    if isinstance(wanted, BlockArray):
        assert made.format == wanted.format
        for part in ("codes", "scales", "offsets"):
            one, other = getattr(made, part), getattr(wanted, part)
            assert (one is None) == (other is None)
            if other is not None:
                assert one.dtype == other.dtype
                assert np.array_equal(one.astype(np.float32), other.astype(np.float32))
        return
    assert np.shape(made) == np.shape(wanted)
    assert np.asarray(made).dtype == np.asarray(wanted).dtype
    if np.asarray(wanted).dtype.kind in "biu":
        # Whole numbers and indices are equal, ties included.
        assert np.array_equal(made, wanted)
        return
    one, other = (np.asarray(r).astype(np.float64) for r in (made, wanted))
    scale = float(np.max(np.abs(other[np.isfinite(other)]), initial=1.0))
    np.testing.assert_allclose(one, other, rtol=2e-5, atol=4e-6 * scale)


def test_every_op_has_a_twin() -> None:
    missing = sorted(set(OPS) - set(REFERENCES))
    assert not missing, f"write {', '.join(missing)} in backends/jax too"
    assert set(REFERENCES) == set(OPS)


@pytest.mark.parametrize(
    "env", [SETTINGS[0], pytest.param(SETTINGS[1], marks=pytest.mark.thorough)], ids=str
)
@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_the_two_references_agree(sample: Sample, env: dict[str, int]) -> None:
    concrete = sample.at(env)
    seed = zlib.crc32(f"{sample} {env}".encode())
    made, wanted = both(concrete, seed)
    assert len(made) == len(wanted)
    for one, other in zip(made, wanted, strict=True):
        check_agree(one, other)


@settings(deadline=None)
@given(st.sampled_from(SAMPLES), st.sampled_from(SETTINGS[:2]), st.integers(0, 2**32 - 1))
def test_they_agree_on_other_numbers(sample: Sample, env: dict[str, int], seed: int) -> None:
    made, wanted = both(sample.at(env), seed)
    for one, other in zip(made, wanted, strict=True):
        check_agree(one, other)


@pytest.mark.parametrize("name", ["topk", "argmax"])
@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.uint8, np.bool_])
def test_ties_go_to_the_lower_index(name: str, dtype: Any) -> None:
    attrs: dict[str, Any] = {"k": 4} if name == "topk" else {"dim": -1}
    rng = np.random.default_rng(0)
    for high in (1, 2, 3):
        x = rng.integers(0, high, (6, 9)).astype(dtype)
        made, wanted = REFERENCES[name](x, **attrs), OPS[name].reference(x, **attrs)
        for one, other in zip(np.atleast_1d(made), np.atleast_1d(wanted), strict=True):
            assert np.array_equal(one, other)


def test_masked_rows_are_zero() -> None:
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((2, n, 4)).astype(np.float32) for n in (3, 5, 5))
    mask = np.array([[1, 0, 1, 1, 0], [0] * 5, [1] * 5], bool)
    made, wanted = (f(q, k, v, mask) for f in (REFERENCES["sdpa"], OPS["sdpa"].reference))
    np.testing.assert_allclose(made, wanted, rtol=1e-5, atol=1e-6)
    assert not made[:, 1].any()


def test_integers_divided_by_zero_are_zero() -> None:
    x, y = np.array([-3, 0, 7], np.int32), np.zeros(3, np.int32)
    with np.errstate(all="ignore"):
        for name in ("div", "floor_div", "remainder"):
            assert REFERENCES[name](x, y).tolist() == [0, 0, 0]
            assert OPS[name].reference(x, y).tolist() == [0, 0, 0]


@pytest.mark.parametrize("format", ["i8/32:f16", "i4/32:f16", "u4/32:f16+f16", "i8/row:f32",
                                    "f4e2m1/32:f8e8m0", "f4e2m1/16:f8e4m3*f32", "f8e4m3/4x4:f32",
                                    "i8/32:f8e4m3"])  # fmt: skip
@pytest.mark.parametrize("scale", [1e-6, 0.02, 1.0, 300.0])
def test_block_formats_agree(format: str, scale: float) -> None:
    rng = np.random.default_rng(2)
    x = (rng.standard_normal((3, 41)) * scale + scale).astype(np.float32)
    made, wanted = (
        f(x, format=format) for f in (REFERENCES["quantize"], OPS["quantize"].reference)
    )
    check_agree(made, wanted)
    values = REFERENCES["dequantize"](wanted)
    assert np.array_equal(values, wanted.dequantize())
