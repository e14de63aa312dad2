"""shard and localize: N simulated ranks give what one rank gives; what is cut or refused."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pass_oracle import parse_any
from ranks import ManyRanks, OneRank, as_ranks, rank_target

from metainfer.compiler.capture import capture_language_model
from metainfer.ir.errors import Unsupported
from metainfer.ir.graph import Module
from metainfer.ir.parser import parse_module
from metainfer.ir.printer import print_module
from metainfer.models.decoder import Decoder
from metainfer.models.decoder_config import DecoderConfig
from metainfer.models.latent_config import LatentConfig
from metainfer.passes.absorb_latents import absorb_latents
from metainfer.passes.canonicalize import canonicalize
from metainfer.passes.raise_ops import raise_ops
from metainfer.passes.shard import shard

PAGE = 4


def captured(config: DecoderConfig) -> tuple[Module, dict[str, np.ndarray]]:
    torch.manual_seed(3)
    model = Decoder(config).eval()
    found = capture_language_model(
        "small", lambda: Decoder(config), dtype=torch.float32, max_tokens=16,
        max_sequences=4, max_pages=16, kv_dtype="f32",
    )  # fmt: skip
    target = rank_target(())
    module = canonicalize(raise_ops(found.module, target), target)
    return module, {k: v.numpy() for k, v in model.state_dict().items()}


def config(**changes: object) -> DecoderConfig:
    sizes = {
        "hidden": 32, "layers": 2, "heads": 8, "kv_heads": 2, "head_dim": 8, "intermediate": 48,
        "vocab": 56, "max_positions": 64,
    }  # fmt: skip
    return DecoderConfig(**{**sizes, **changes})  # type: ignore[arg-type]


def two_steps(shift: int = 0) -> list[tuple[np.ndarray, dict[str, np.ndarray]]]:
    """A prefill of two sequences of unequal lengths, then one more token of each."""
    pages = np.array([[1, 2], [3, 4]], np.int32)

    def step(new: list[int], lengths: list[int]) -> dict[str, np.ndarray]:
        at = [np.arange(n - k, n) for k, n in zip(new, lengths, strict=True)]
        slots = [pages[b, p // PAGE] * PAGE + p % PAGE for b, p in enumerate(at)]
        starts = np.cumsum([0, *new])
        fields = {
            "positions": np.concatenate(at), "slots": np.concatenate(slots), "starts": starts,
            "lengths": np.array(lengths), "pages": pages, "sample_rows": starts[1:] - 1,
            "num_valid": np.array([sum(new), 2]),
        }  # fmt: skip
        return {k: v.astype(np.int32) for k, v in fields.items()}

    tokens = (np.arange(7) * 5 + 3 + shift) % 50
    return [
        (tokens.astype(np.int32), step([5, 2], [5, 2])),
        (np.array([7 + shift, 11], np.int32), step([1, 1], [6, 3])),
    ]


DENSE = [
    {"kv_heads": 2},
    {"kv_heads": 8, "qkv_bias": True, "tie": True},
    {"kv_heads": 1, "qk_norm": True},
    {"heads": 6, "kv_heads": 3, "head_dim": 8, "o_bias": True},
]


@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize("changes", DENSE)
def test_simulated_ranks_compute_what_one_rank_computes(changes: dict, tp: int) -> None:
    module, weights = captured(config(**changes))
    target = rank_target((("tp", tp),))
    local = as_ranks(module, target)
    assert parse_module(print_module(local)) == local
    one = OneRank(module, weights.__getitem__, 8, PAGE)
    many = ManyRanks(local, weights.__getitem__, 8, PAGE)
    for tokens, step in two_steps():
        (got,) = many.run([(tokens, step)])
        np.testing.assert_allclose(got, one.run(tokens, step), atol=2e-5, rtol=2e-5)


def test_every_projection_and_the_cache_are_cut() -> None:
    module, _ = captured(config(kv_heads=4))
    local = as_ranks(module, rank_target((("tp", 4),)))
    block = next(g for g in local.graphs if g.states)
    shapes = {w.name: tuple(n.static for n in w.tensor.shape) for w in block.weights}
    assert shapes["@self_attn.q_proj.weight"] == (16, 32)
    assert shapes["@self_attn.o_proj.weight"] == (32, 16)
    assert shapes["@mlp.gate_proj.weight"] == (12, 32)
    assert shapes["@mlp.down_proj.weight"] == (32, 12)
    fields = dict(block.states[0].state.fields)
    assert [n.static for n in fields["k"].shape] == [1, 8]
    # Two sums a layer: after attention and after the MLP.
    assert [op.name for op in block.ops].count("all_reduce") == 2


def test_few_key_heads_are_repeated_and_said_so() -> None:
    module, _ = captured(config(kv_heads=2))
    target = rank_target((("tp", 8),))
    local = as_ranks(module, target)
    load = next(g for g in local.loads if any(op.name == "repeat_rows" for op in g.ops))
    assert {op.attr["times"] for op in load.ops if op.name == "repeat_rows"} == {4}
    (line,) = [d for d in target.report.decisions if "key and value heads" in d.subject]
    assert "held by 4 ranks" in line.reason


@pytest.mark.parametrize("tp", [2, pytest.param(8, marks=pytest.mark.thorough)])
def test_latents_are_held_by_all_ranks_and_their_heads_by_one(tp: int) -> None:
    latent = LatentConfig(rank=16, rope_width=8, plain_width=12, value_width=4, query_rank=0)
    module, weights = captured(config(kv_heads=8, latent=latent))
    target = rank_target((("tp", tp),))
    absorbed = absorb_latents(module, target)
    local = as_ranks(absorbed, target)
    block = next(g for g in local.graphs if g.states)
    shapes = {w.name: tuple(n.static for n in w.tensor.shape) for w in block.weights}
    assert shapes["@self_attn.kv_b_proj.weight.keys"] == (8 // tp, 12, 16)
    assert shapes["@self_attn.kv_b_proj.weight.values"] == (8 // tp, 4, 16)
    assert block.states[0].state == absorbed.graph("layer").states[0].state
    (line,) = [d for d in target.report.decisions if "$self_attn.kv" in d.subject and d.data
               and d.place == "shard"]  # fmt: skip
    assert f"96 bytes on each rank, {tp} times the room of one copy" in line.reason
    one = OneRank(module, weights.__getitem__, 8, PAGE)
    many = ManyRanks(local, weights.__getitem__, 8, PAGE)
    for tokens, step in two_steps():
        (got,) = many.run([(tokens, step)])
        np.testing.assert_allclose(got, one.run(tokens, step), atol=2e-5, rtol=2e-5)


def test_heads_that_do_not_divide_leave_attention_whole_with_the_rule() -> None:
    module, _ = captured(config(heads=6, kv_heads=3))
    target = rank_target((("tp", 2),))
    shard(module, target)
    (line,) = [d for d in target.report.decisions if d.severity == "fallback"]
    assert "3 heads over 2" in line.reason


def test_a_layout_that_cuts_nothing_is_refused_with_the_rule() -> None:
    module = parse_any(
        "graph f(%x: f32[T,7], @w: f32[7,7]) {\n  %0 = linear(%x, @w) : f32[T,7]\n  return %0\n}"
    )
    with pytest.raises(Unsupported, match="tp = 2 shards nothing") as caught:
        shard(module, rank_target((("tp", 2),)))
    assert "divides by the ranks" in caught.value.text
    assert "--tp" in caught.value.advice


MOE = """
graph f(%x: f32[T,16], @router: f32[8,16], @gate: f32[8,12,16], @up: f32[8,12,16],
        @down: f32[8,16,12]) {
  %0 = linear(%x, @router) : f32[T,8]
  %1 = softmax(%0) {dim = 1} : f32[T,8]
  %2, %3 = topk(%1) {k = 3} : f32[T,3], i64[T,3]
  %4 = experts(%x, %3, %2, @gate, @up, @down) : f32[T,16]
  %5 = add(%x, %4) : f32[T,16]
  return %5
}
"""
LAYOUTS = [
    ((("tp", 2),), ()),
    ((("tp", 4),), ("tp",)),
    ((("dp", 4),), ("dp",)),
    ((("dp", 2), ("tp", 2)), ("dp", "tp")),
    ((("dp", 2), ("tp", 4)), ("dp",)),
    ((("dp", 2), ("tp", 2)), ("tp",)),
]


@pytest.mark.parametrize(("mesh", "experts"), LAYOUTS)
@given(tokens=st.integers(1, 5), seed=st.integers(0, 99))
def test_experts_over_any_axes(
    mesh: tuple[tuple[str, int], ...], experts: tuple[str, ...], tokens: int, seed: int
) -> None:
    module = parse_any(MOE)
    local = as_ranks(module, rank_target(mesh, experts))
    rng = np.random.default_rng(seed)
    shapes = {w.name[1:]: w.tensor.concrete({}) for w in module.main.weights}
    weights = {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    replicas = dict(mesh).get("dp", 1)
    inputs = [rng.standard_normal((tokens, 16)).astype(np.float32) for _ in range(replicas)]
    one = OneRank(module, weights.__getitem__, 1, PAGE)
    got = ManyRanks(local, weights.__getitem__, 1, PAGE).run([(x, {}) for x in inputs])
    for x, result in zip(inputs, got, strict=True):
        np.testing.assert_allclose(result, one.run(x, {}), atol=1e-4, rtol=1e-4)


def test_experts_spread_over_replicas_hold_their_share() -> None:
    local = as_ranks(parse_any(MOE), rank_target((("dp", 2), ("tp", 2)), ("dp", "tp")))
    shapes = {w.name: w.tensor.concrete({}) for w in local.main.weights}
    assert shapes["@gate"] == (2, 12, 16)
    met = [(op.name, op.attr["axis"]) for op in local.main.ops if "axis" in op.attr]
    assert met.count(("all_gather", "dp")) == 3
    assert met.count(("reduce_scatter", "dp")) == 1
    assert met.count(("all_reduce", "tp")) == 1


def test_experts_that_do_not_divide_by_replicas_are_refused() -> None:
    with pytest.raises(Unsupported, match="8 experts"):
        as_ranks(parse_any(MOE), rank_target((("dp", 3),), ("dp",)))
