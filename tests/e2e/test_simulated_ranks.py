"""Whole plans of several ranks, simulated: every layout gives what the plan of one rank gives.

The compiled text of every stage and phase is interpreted on all its ranks at once, after all
passes: sharding, fusion, layouts of weights and choices of kernels are those of the plan.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_steps import Step, decode_step, prefill_step
from ranks import ManyRanks, OneRank

import metainfer
from metainfer.hardware import load_machine
from metainfer.hardware.machine import Machine
from metainfer.ir.errors import HistogramError, Unsupported
from metainfer.ir.histogram import RoutingHistogram
from metainfer.ir.ops.collective import MEETING
from metainfer.ir.plan import Plan
from metainfer.models.decoder import Decoder, decoder_spec
from metainfer.models.decoder_config import DecoderConfig
from metainfer.models.experts_config import ExpertsConfig

PAGES, RANKS = 12, 8
PLACED = "place_experts"
DENSE = DecoderConfig(
    hidden=32, layers=3, heads=8, kv_heads=2, head_dim=8, intermediate=64, vocab=64,
    max_positions=64, qkv_bias=True,
)  # fmt: skip
SPARSE = dataclasses.replace(
    DENSE, qkv_bias=False, qk_norm=True, kv_heads=4, experts=ExpertsConfig(8, 3, 16)
)
SHARED = dataclasses.replace(
    SPARSE, layers=2, experts=ExpertsConfig(8, 3, 16, renormalise=False, shared=32)
)
CONFIGS = {"dense": DENSE, "sparse": SPARSE, "shared": SHARED}


@cache
def cpus() -> Machine:
    """The machine of 2xcpu.toml with eight ranks."""
    two = load_machine("2xcpu")
    devices = tuple(
        dataclasses.replace(two.devices[0], name=f"cpu{i}", rank=i) for i in range(RANKS)
    )
    links = tuple(
        dataclasses.replace(two.links[0], name=f"cpu{i}-socket0", ends=(f"cpu{i}", "socket0"))
        for i in range(RANKS)
    )
    return dataclasses.replace(two, name="8xcpu", devices=devices, links=links)


@cache
def weights_of(kind: str) -> Mapping[str, np.ndarray]:
    torch.manual_seed(5)
    model = Decoder(CONFIGS[kind]).eval()
    return {k: v.numpy() for k, v in model.state_dict().items()}


@cache
def plan_of(
    kind: str,
    pp: int,
    dp: int,
    tp: int,
    ep: int,
    routing: str = "",
    replicas: int = 0,
    parts: int = 0,
    kv: str = "auto",
) -> Plan:
    return metainfer.compile(
        decoder_spec("small", CONFIGS[kind]), cpus(), activations="f32", weights="f32",
        routing=routing, replicas=replicas, exact=True, max_tokens=16, max_sequences=4,
        micro_batches=parts, page_size=16, pp=pp, dp=dp, tp=tp, ep=ep, kv=kv,
    )  # fmt: skip


def provider(plan: Plan, kind: str) -> Callable[[str], np.ndarray]:
    """The model's tensors, and those that the plan carries."""
    return {**weights_of(kind), **plan.constants}.__getitem__


class Stages:
    """All stages of a plan, one after another, each on its simulated ranks."""

    def __init__(self, plan: Plan, kind: str) -> None:
        self.phases = {
            phase: [
                ManyRanks(plan.module(phase, stage), provider(plan, kind), PAGES, 16)
                for stage in range(plan.layout.pp)
            ]
            for phase in plan.phases
        }

    def run(self, phase: str, steps: Sequence[tuple[np.ndarray, Step]]) -> list[np.ndarray]:
        values: list[list[np.ndarray]] = [[tokens] for tokens, _ in steps]
        for number, stage in enumerate(self.phases[phase]):
            values = stage.run_all([(v, s) for v, (_, s) in zip(values, steps, strict=True)])
            for other in self.phases.values():
                other[number].states = stage.states
        return [v[0] for v in values]


@cache
def reference(
    kind: str, replica: int, lengths: tuple[int, ...], kv: str = "auto"
) -> list[np.ndarray]:
    plan = plan_of(kind, 1, 1, 1, 1, kv=kv)
    one = OneRank(plan.module("prefill"), weights_of(kind).__getitem__, PAGES, 16)
    tokens, step = prefill_step(lengths, replica, 16)
    results = [one.run(tokens, step)]
    one.module = plan.module("decode")
    tokens, step = decode_step(lengths, replica, 16)
    return [*results, one.run(tokens, step)]


LAYOUTS = [
    ("dense", 1, 1, 2, 1),
    ("dense", 1, 1, 8, 1),
    ("dense", 3, 1, 2, 1),
    ("dense", 1, 2, 4, 1),
    ("dense", 2, 2, 2, 1),
    ("sparse", 1, 1, 4, 1),
    ("sparse", 1, 1, 4, 4),
    ("sparse", 1, 4, 1, 4),
    ("sparse", 2, 2, 2, 4),
    ("sparse", 1, 2, 2, 2),
]
SHARING = [(1, 1, 2, 1), (1, 1, 2, 2), (1, 2, 1, 2), (1, 2, 2, 4), (2, 1, 2, 1)]


# Each example interprets whole models on up to eight ranks.
FEW = settings(max_examples=settings().max_examples * 2 // 5)


@FEW
@given(
    layout=st.sampled_from(LAYOUTS),
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple),
)
def test_simulated_ranks_of_a_plan_compute_what_one_rank_computes(
    layout: tuple[str, int, int, int, int], lengths: tuple[int, ...]
) -> None:
    kind, pp, dp, tp, ep = layout
    stages = Stages(plan_of(kind, pp, dp, tp, ep), kind)
    prefill = [prefill_step(lengths, n, 16) for n in range(dp)]
    decode = [decode_step(lengths, n, 16) for n in range(dp)]
    got = [stages.run("prefill", prefill), stages.run("decode", decode)]
    for replica in range(dp):
        for phase, wanted in enumerate(reference(kind, replica, lengths)):
            np.testing.assert_allclose(got[phase][replica], wanted, atol=5e-5, rtol=5e-5)


@pytest.mark.thorough
def test_ranks_share_rounded_keys_and_values() -> None:
    """Two key heads over four ranks: each is held twice, with its scales."""
    plan, lengths = plan_of("dense", 1, 1, 4, 1, kv="fp8"), (4, 1, 3)
    (state,) = plan.module("decode").graph("layer").states
    assert [str(t) for _, t in state.state.fields] == ["f8e4m3[1,8]", "f8e8m0[1,1]"] * 2
    stages = Stages(plan, "dense")
    got = [
        stages.run("prefill", [prefill_step(lengths, 0, 16)]),
        stages.run("decode", [decode_step(lengths, 0, 16)]),
    ]
    exact = reference("dense", 0, lengths)
    for phase, wanted in enumerate(reference("dense", 0, lengths, "fp8")):
        np.testing.assert_allclose(got[phase][0], wanted, atol=5e-5, rtol=5e-5)
        # Rounding shows.
        assert np.abs(wanted - exact[phase]).max() > 1e-3


@pytest.mark.parametrize("layout", SHARING)
def test_ranks_share_an_expert_of_all_tokens(layout: tuple[int, int, int, int]) -> None:
    pp, dp, tp, ep = layout
    stages, lengths = Stages(plan_of("shared", pp, dp, tp, ep), "shared"), (4, 1, 3)
    got = [
        stages.run("prefill", [prefill_step(lengths, n, 16) for n in range(dp)]),
        stages.run("decode", [decode_step(lengths, n, 16) for n in range(dp)]),
    ]
    for replica in range(dp):
        for phase, wanted in enumerate(reference("shared", replica, lengths)):
            np.testing.assert_allclose(got[phase][replica], wanted, atol=5e-5, rtol=5e-5)


@pytest.fixture(scope="module")
def skewed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A histogram in which few experts do most of the work, others in each layer."""
    path = tmp_path_factory.mktemp("routing") / "skewed.json"
    layers = [f"model.layers.{i}.mlp.experts" for i in range(SPARSE.layers)]
    counts = [[1000 // (1 + (e + 3 * i) % 8) ** 2 for e in range(8)] for i in range(SPARSE.layers)]
    RoutingHistogram("small", tuple(layers), tuple(map(tuple, counts))).save(path)
    return str(path)


@pytest.mark.parametrize(
    ("layout", "replicas"),
    [((1, 1, 4, 4), 4), ((1, 4, 1, 4), 0), ((2, 2, 2, 4), 8), ((1, 3, 1, 3), 0)],
)
def test_placed_experts_with_replicas_compute_the_same(
    skewed: str, layout: tuple[int, int, int, int], replicas: int
) -> None:
    plan = plan_of("sparse", *layout, routing=skewed, replicas=replicas)
    orders = [v for n, v in plan.constants.items() if n.endswith("slot_order")]
    assert len(orders) == SPARSE.layers
    assert any(not np.array_equal(orders[0], other) for other in orders[1:])
    (line,) = {d["reason"] for d in plan.entry("decode")["decisions"] if d["place"] == PLACED}
    assert "of the mean" in line
    stages, lengths = Stages(plan, "sparse"), (4, 1, 3)
    got = [
        stages.run("prefill", [prefill_step(lengths, n, 16) for n in range(layout[1])]),
        stages.run("decode", [decode_step(lengths, n, 16) for n in range(layout[1])]),
    ]
    for replica in range(layout[1]):
        for phase, wanted in enumerate(reference("sparse", replica, lengths)):
            np.testing.assert_allclose(got[phase][replica], wanted, atol=5e-5, rtol=5e-5)


def test_a_histogram_of_another_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    RoutingHistogram("other", ("model.layers.0.mlp.experts",), ((1,) * 8,)).save(path)
    with pytest.raises(HistogramError, match="of model 'other'"):
        plan_of("sparse", 1, 1, 4, 4, routing=str(path))


def test_every_pass_of_several_ranks_is_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METAINFER_VERIFY", "2")
    spec = decoder_spec("checked", SPARSE, tiny=lambda: decoder_spec("tiny", SPARSE, tiny=None))
    plan = metainfer.compile(
        spec, cpus(), activations="f32", weights="f32", exact=True, max_tokens=16,
        max_sequences=4, dp=2, tp=2, ep=4, replicas=4,
    )  # fmt: skip
    assert plan.layout.num_ranks == 4


def test_a_rank_holds_its_part_of_the_weights() -> None:
    whole = plan_of("sparse", 1, 1, 1, 1).capacity()["terms"][0]["bytes"]
    for layout, most in (((1, 1, 4, 4), 0.35), ((2, 2, 2, 4), 0.25)):
        part = plan_of("sparse", *layout).capacity()["terms"][0]["bytes"]
        assert part < most * whole


@pytest.mark.parametrize(
    ("asked", "rule"),
    [
        ({"tp": 16}, "one rank a device"),
        ({"pp": 4}, "a stage holds one block"),
        ({"tp": 2, "dp": 2, "ep": 3}, "ep is 1, tp, dp or dp"),
        ({"tp": 3}, "tp = 3 shards nothing"),
    ],
)
def test_a_forbidden_layout_names_its_rule(asked: dict[str, int], rule: str) -> None:
    fixed = {"pp": 0, "dp": 0, "tp": 0, "ep": 0, **asked}
    with pytest.raises(Unsupported) as caught:
        plan_of("dense" if "tp" in asked and len(asked) == 1 else "sparse", **fixed)
    assert rule in f"{caught.value.what}\n{caught.value.text}"


OVERLAPPED = [
    ("dense", 1, 2, 4, 1, 3),
    ("sparse", 1, 4, 1, 4, 2),
    ("sparse", 2, 2, 2, 4, 4),
]


@FEW
@given(
    layout=st.sampled_from(OVERLAPPED),
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple),
)
def test_ranks_that_overlap_compute_what_one_rank_computes(
    layout: tuple[str, int, int, int, int, int], lengths: tuple[int, ...]
) -> None:
    kind, pp, dp, tp, ep, parts = layout
    plan = plan_of(kind, pp, dp, tp, ep, parts=parts)
    stages = Stages(plan, kind)
    # A step of a single token leaves all parts but one empty.
    got = [
        stages.run("prefill", [prefill_step(lengths, n, 16) for n in range(dp)]),
        stages.run("decode", [decode_step(lengths, n, 16) for n in range(dp)]),
    ]
    for replica in range(dp):
        for phase, wanted in enumerate(reference(kind, replica, lengths)):
            np.testing.assert_allclose(got[phase][replica], wanted, atol=5e-5, rtol=5e-5)


@pytest.mark.parametrize("layout", OVERLAPPED)
def test_forced_micro_batches_stand_in_the_text(
    layout: tuple[str, int, int, int, int, int],
) -> None:
    kind, pp, dp, tp, ep, parts = layout
    plan = plan_of(kind, pp, dp, tp, ep, parts=parts)
    for stage in range(pp):
        blocks = [g for g in plan.module("prefill", stage).graphs if g.states]
        for block in blocks:
            met = [op for op in block.ops if op.name in MEETING]
            assert {op.results[0].name.rpartition("/")[2] for op in met} >= set(
                map(str, range(parts))
            )
            assert any(op.stream for op in met)
