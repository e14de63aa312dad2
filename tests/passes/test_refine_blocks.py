"""Scale blocks and shards: what a rank's border would cut is refined, and the numbers stay."""

import numpy as np
import pytest
from pass_oracle import parse_any, target_for
from ranks import ManyRanks, OneRank, as_ranks, rank_target

from metainfer.ir.dtypes import Block, BlockArray, quantize
from metainfer.ir.graph import Module
from metainfer.ir.interpret import interpret
from metainfer.ir.verify import verify_module
from metainfer.passes.merge_linears import merge_linears


def mlp(dtype: str, width: int) -> Module:
    return parse_any(f"""
graph f(%x: f32[T,64], @up: {dtype}[{width},64], @down: {dtype}[64,{width}]) {{
  %0 = linear(%x, @up) : f32[T,{width}]
  %1 = silu(%0) : f32[T,{width}]
  %2 = linear(%1, @down) : f32[T,64]
  return %2
}}""")


def experts(dtype: str, width: int) -> Module:
    return parse_any(f"""
graph f(%x: f32[T,64], @router: f32[8,64], @gate: {dtype}[8,{width},64],
        @up: {dtype}[8,{width},64], @down: {dtype}[8,64,{width}]) {{
  %0 = linear(%x, @router) : f32[T,8]
  %1 = softmax(%0) {{dim = 1}} : f32[T,8]
  %2, %3 = topk(%1) {{k = 3}} : f32[T,3], i64[T,3]
  %4 = experts(%x, %3, %2, @gate, @up, @down) : f32[T,64]
  return %4
}}""")


def random_weights(module: Module, seed: int = 0) -> dict[str, np.ndarray | BlockArray]:
    rng = np.random.default_rng(seed)
    found: dict[str, np.ndarray | BlockArray] = {}
    for weight in module.main.weights:
        values = rng.standard_normal(weight.tensor.concrete({})).astype(np.float32) / 8
        dtype = weight.tensor.dtype
        found[weight.name[1:]] = quantize(values, dtype) if isinstance(dtype, Block) else values
    return found


# Fault: experts 1536 wide over 8 ranks leave 192 rows of blocks of 128; here 96 over 4, of 16.
@pytest.mark.parametrize(
    ("make", "dtype", "width", "ranks", "local"),
    [
        (mlp, "f8e4m3/16x16:f32", 96, 4, "f8e4m3/8x16:f32"),
        (mlp, "f4e2m1/32:f8e8m0", 96, 2, "f4e2m1/16:f8e8m0"),
        (experts, "f8e4m3/16x16:f32", 96, 4, "f8e4m3/8x8:f32"),
        (experts, "f4e2m1/16:f8e4m3*f32", 48, 2, "f4e2m1/8:f8e4m3*f32"),
        (experts, "f8e4m3/tensor:f32", 96, 4, "f8e4m3/tensor:f32"),
        (mlp, "f8e4m3/16x16:f32", 128, 4, "f8e4m3/16x16:f32"),
    ],
)
def test_ranks_that_cut_blocks_compute_what_one_does(
    make, dtype: str, width: int, ranks: int, local: str
) -> None:
    module, target = make(dtype, width), rank_target((("tp", ranks),))
    weights = random_weights(module)
    shards = as_ranks(module, target)
    cut = {w.name: w.tensor for w in shards.main.weights if w.name in ("@up", "@down", "@gate")}
    assert {t.concrete({})[-2:] for t in cut.values()} == {
        (width // ranks, 64), (64, width // ranks)
    }  # fmt: skip
    assert local in {str(t.dtype) for t in cut.values()}
    said = [d for d in target.report.decisions if "blocks of @" in d.subject]
    assert bool(said) == (local != dtype)
    assert all("no value changes" in d.reason and "bytes more" in d.reason for d in said)
    x = np.random.default_rng(1).standard_normal((5, 64)).astype(np.float32)
    one = OneRank(module, weights.__getitem__, 1, 4).run(x, {})
    (found,) = ManyRanks(shards, weights.__getitem__, 1, 4).run([(x, {})])
    np.testing.assert_allclose(found, one, atol=1e-4, rtol=1e-4)


def test_blocks_that_would_become_too_small_leave_the_weight_whole() -> None:
    """44 columns a rank in blocks of 16: they would be 4 wide."""
    shards = as_ranks(mlp("f8e4m3/16x16:f32", 88), rank_target((("tp", 2),)))
    assert {str(w.tensor.dtype) for w in shards.main.weights} == {"f8e4m3/16x16:f32"}


def test_linears_with_one_scale_each_are_joined_by_rows() -> None:
    dtype = "f8e4m3/tensor:f32"
    module = parse_any(f"""
graph f(%x: f32[T,64], @q: {dtype}[16,64], @k: {dtype}[8,64]) {{
  %0 = linear(%x, @q) : f32[T,16]
  %1 = linear(%x, @k) : f32[T,8]
  return %0, %1
}}""")
    merged = merge_linears(module, target_for())
    verify_module(merged)
    (weight,) = merged.main.weights
    assert str(weight.tensor.dtype) == "f8e4m3/row:f32"
    weights = random_weights(module)
    x = np.random.default_rng(1).standard_normal((3, 64)).astype(np.float32)
    first, second = (interpret(m, [x], weights.__getitem__).outputs for m in (module, merged))
    for a, b in zip(first, second, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
