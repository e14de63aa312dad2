"""verify and its parts: walks over a text, divergence, references that run no code of a plan."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hf_checkpoints import make_checkpoint, oracle_logits
from hypothesis import given
from hypothesis import strategies as st
from plain_modules import MlpMixer
from safetensors.torch import load_file, save_file

import metainfer
from metainfer.compiler.perplexity import (
    Walk,
    compare,
    decode_walk,
    divergence,
    log_softmax,
    prefill_walk,
    walks,
)
from metainfer.compiler.verify import (
    EXACT_KL,
    INT4_KL,
    LOSSY_KL,
    MXFP4_KL,
    NVFP4_KL,
    compile_reference,
    default_limit,
    reference_spec,
    verify,
)
from metainfer.ir.errors import MetainferError
from metainfer.ir.graph import Module
from metainfer.ir.parser import parse_module
from metainfer.ir.plan import Plan
from metainfer.ir.printer import print_module
from metainfer.models.spec import ModelSpec
from metainfer.passes.pipeline import PIPELINE, Pass, run_passes
from metainfer.passes.target import Target

SMALL: dict[str, Any] = {"max_tokens": 32, "max_sequences": 2, "max_context": 96}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("model") / "tiny", tokenizer=True)


@pytest.fixture(scope="module")
def plan(tiny: Path) -> Plan:
    return metainfer.compile(tiny, "cpu", exact=True, **SMALL)


# --- walks -------------------------------------------------------------------------------------


@given(
    count=st.integers(2, 70),
    chunk=st.integers(1, 33),
    rows=st.integers(1, 5),
    repeats=st.integers(1, 3),
)
def test_prefill_walks_every_token_and_samples_known_successors(
    count: int, chunk: int, rows: int, repeats: int
) -> None:
    tokens = list(range(100, 100 + count))
    steps = list(prefill_walk(tokens, chunk, rows, repeats))
    seen: dict[int, int] = {}
    for step in steps:
        ((number, first, part),) = step.sequences
        assert number == 0
        assert len(part) <= chunk
        assert 1 <= len(step.rows) <= rows
        assert len(set(step.rows)) == len(step.rows)
        seen.update({first + i: token for i, token in enumerate(part)})
        for row, target in zip(step.rows, step.targets, strict=True):
            position = first + row
            assert target == (tokens[position + 1] if position + 1 < count else -1)
    assert seen == dict(enumerate(tokens))


def test_a_walk_of_small_steps_samples_every_row() -> None:
    steps = list(prefill_walk(list(range(10)), 4, 4))
    assert [s.rows for s in steps] == [(0, 1, 2, 3), (0, 1, 2, 3), (0, 1)]


@given(page=st.integers(1, 9), chunk=st.integers(1, 7), count=st.integers(2, 30))
def test_records_give_each_token_a_slot_of_its_own(page: int, chunk: int, count: int) -> None:
    most = -(-count // page)
    slots: list[int] = []
    for step in prefill_walk(list(range(count)), chunk, 2):
        record = step.record(page, most)
        slots += record["slots"].tolist()
        assert record["lengths"][0] == record["positions"][-1] + 1
        table = record["pages"][0]
        at = record["positions"]
        assert np.array_equal(table[at // page] * page + at % page, record["slots"])
    assert len(set(slots)) == count
    assert min(slots) >= page  # the null page is never written


def test_decode_walks_sequences_side_by_side() -> None:
    steps = list(decode_walk([[1, 2, 3], [4, 5, 6]]))
    assert [s.tokens.tolist() for s in steps] == [[1, 4], [2, 5], [3, 6]]
    assert [s.targets for s in steps] == [(2, 5), (3, 6), (-1, -1)]
    record = steps[2].record(2, 2)
    assert record["pages"].tolist() == [[1, 2], [3, 4]]
    assert record["slots"].tolist() == [4, 8]


def test_a_long_text_begins_anew_after_a_window() -> None:
    large, small, decode = walks(list(range(50)), 32, 2, 20)
    firsts = [(s.sequences[0][1], len(s.tokens)) for s in large.steps]
    assert set(firsts) == {(0, 20), (0, 10)}
    assert sum(len(s.rows) for s in small.steps) == 50
    assert decode.longest == 20
    assert max(w.longest for w in (large, small)) == 20


# --- figures -----------------------------------------------------------------------------------


def test_divergence_is_that_of_the_definition() -> None:
    q, p = np.array([[0.5, 0.25, 0.25]]), np.array([[0.25, 0.25, 0.5]])
    expected = 0.5 * np.log(2) + 0.25 * np.log(0.5)
    assert divergence(np.log(q), np.log(p)) == pytest.approx([expected])
    assert divergence(np.log(q), np.log(q)) == pytest.approx([0.0])


@given(shift=st.floats(-50, 50), seed=st.integers(0, 99))
def test_probabilities_ignore_a_shift(shift: float, seed: int) -> None:
    logits = np.random.default_rng(seed).standard_normal((2, 7)) * 10
    assert np.exp(log_softmax(logits)).sum(axis=1) == pytest.approx([1, 1])
    assert log_softmax(logits + shift) == pytest.approx(log_softmax(logits), abs=1e-9)


def test_perplexity_is_that_of_transformers(tiny: Path, plan: Plan) -> None:
    tokens = list(b"the quick brown fox")
    model = metainfer.load(plan)
    walk = Walk("all", tuple(prefill_walk(tokens, 2, 2)), len(tokens))
    found = compare(walk, model, model)
    logits = torch.from_numpy(oracle_logits(tiny, tokens)[:-1])
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor(tokens[1:]))
    assert found.perplexity == pytest.approx(float(loss.exp()), rel=1e-3)
    assert found.perplexity == found.reference_perplexity
    assert (found.mean_kl, found.agreement, found.max_difference) == (0.0, 1.0, 0.0)


# --- whole -------------------------------------------------------------------------------------


def test_an_exact_plan_passes_its_tight_limit(plan: Plan) -> None:
    assert default_limit(plan) == EXACT_KL
    found = verify(plan, tokens=40)
    assert found.passed
    assert [c.name for c in found.comparisons] == [
        "prefill, T=32",
        "prefill, T=2",
        "decode, B=2",
    ]
    assert all(c.agreement == 1.0 and c.max_kl < 1e-6 for c in found.comparisons)
    assert [e.name for e in found.errors] == ["tiny form against the interpreter"]


def test_a_spoiled_weight_is_found(tiny: Path, plan: Plan, tmp_path: Path) -> None:
    """The same plan over weights of which one is wrong: verify against the right ones fails."""
    other = make_checkpoint("qwen3", tmp_path / "other", tokenizer=True, seed=1)
    model = metainfer.load(plan)
    spoiled = metainfer.load(plan, other, allow_checkpoint_mismatch=True)
    walk = walks(list(b"the quick brown fox jumps over it"), 32, 2, 96)[2]
    assert compare(walk, spoiled, model).mean_kl > 10 * LOSSY_KL


@pytest.mark.parametrize(
    ("what", "bad"),
    [
        ("mlp.up_proj", np.nan),
        pytest.param("self_attn.o_proj", np.inf, marks=pytest.mark.thorough),
    ],
)
def test_the_first_op_that_is_not_finite_is_named(
    tiny: Path, plan: Plan, tmp_path: Path, what: str, bad: float
) -> None:
    broken = shutil.copytree(tiny, tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    tensors[f"model.layers.1.{what}.weight"][2, 3] = float(bad)
    save_file(tensors, broken / "model.safetensors")
    with pytest.raises(MetainferError, match="is not finite, the first of a prefill step") as found:
        verify(plan, weights=broken, tokens=20, allow_checkpoint_mismatch=True)
    assert "layers.1." in found.value.text
    assert "linear" in found.value.what
    # Gate and up are read as one weight.
    part = what.split(".")[1].removeprefix("up_")
    assert part in found.value.advice
    assert "may hold NaN or infinite numbers" in found.value.advice


def test_a_rewrite_that_is_wrong_is_found(
    tiny: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass that spoils every norm: the reference must not be spoiled with it."""

    def spoil(module: Module, target: Target) -> Module:
        return parse_module(print_module(module).replace("eps = 1e-06", "eps = 0.5"))

    passes = tuple(Pass("fuse", spoil) if p.name == "fuse" else p for p in PIPELINE)
    monkeypatch.setattr(run_passes, "__defaults__", (passes,))
    spoiled = metainfer.compile(tiny, "cpu", exact=True, **SMALL)
    assert "eps = 0.5" in spoiled.texts["stage0.decode.mir"]
    assert "eps = 0.5" not in plan.texts["stage0.decode.mir"]
    found = verify(spoiled, tokens=24)
    assert not found.passed
    assert min(c.mean_kl for c in found.comparisons) > EXACT_KL


def test_the_reference_is_not_rewritten(plan: Plan) -> None:
    reference = compile_reference(plan, reference_spec(plan, None, None), 64)
    for phase in reference.phases:
        ops = [op for g in reference.module(phase).graphs for op in g.ops]
        assert not [op for op in ops if op.name == "fused"]
        assert sum(op.name == "linear" for op in ops) == 7 + 1


def test_limits_by_what_was_quantized(tiny: Path) -> None:
    int8 = metainfer.compile(tiny, "cpu", weights="int8", **SMALL)
    int4 = metainfer.compile(tiny, "cpu", weights="int4", **SMALL)
    assert (default_limit(int8), default_limit(int4)) == (LOSSY_KL, INT4_KL)
    found = verify(int8, tokens=32)
    assert found.passed
    assert EXACT_KL < max(c.mean_kl for c in found.comparisons) < LOSSY_KL


# Bounds are about twice what was measured, in nats (of random weights).
@pytest.mark.parametrize(
    ("weights", "bound"),
    [
        pytest.param("fp8", 0.03, marks=pytest.mark.thorough),
        pytest.param("mxfp4", 0.1, marks=pytest.mark.thorough),
        pytest.param("nvfp4", 0.17, marks=pytest.mark.thorough),
    ],
)
def test_float_codes_diverge_as_their_error_says(tiny: Path, weights: str, bound: float) -> None:
    plan = metainfer.compile(tiny, "cpu", weights=weights, **SMALL)
    limits = {"fp8": LOSSY_KL, "mxfp4": MXFP4_KL, "nvfp4": NVFP4_KL}
    assert default_limit(plan) == limits[weights]
    found = verify(plan, tokens=32)
    assert found.passed
    worst = max(c.mean_kl for c in found.comparisons)
    assert EXACT_KL < worst < bound


def test_rounded_keys_and_values_diverge_as_their_error_says(tiny: Path) -> None:
    exact = {**SMALL, "weights": "f32", "activations": "f32", "exact": True}
    plan = metainfer.compile(tiny, "cpu", kv="fp8", **exact)
    assert default_limit(plan) == LOSSY_KL
    found = verify(plan, tokens=32)
    assert found.passed
    # About twice what was measured, in nats.
    assert EXACT_KL < max(c.mean_kl for c in found.comparisons) < 0.008
    wide = metainfer.compile(tiny, "cpu", kv="f32", **exact)
    pages = [int(p.meta["capacity"]["page_bytes"]) for p in (plan, wide)]
    width = tiny_width(plan)
    assert pages[0] * 4 * width == pages[1] * (width + 1)


def tiny_width(plan: Plan) -> int:
    """Numbers of a head."""
    (state,) = plan.module("decode").graph("layer").states
    return int(state.state.field_type("k").shape[-1].static)


def test_a_module_is_held_against_pytorch(tmp_path: Path) -> None:
    torch.manual_seed(0)
    mixer = MlpMixer().eval()
    spec = ModelSpec(
        name="mixer",
        build=lambda: mixer,
        kind="module",
        example_inputs=lambda: (torch.randn(2, 3, 16, 16),),
    )
    plan = metainfer.compile(spec, "cpu")
    found = verify(plan, model=spec)
    assert found.passed
    assert found.reference == "PyTorch in float32"
    assert found.errors[0].relative_error < 1e-4
    assert not verify(plan, model=spec, limit=0.0).passed
    with pytest.raises(MetainferError, match="--text is for language models"):
        verify(plan, model=spec, text="abc")


def test_no_file_that_a_plan_names_is_run(plan: Plan, tmp_path: Path) -> None:
    planted = tmp_path / "planted.py"
    planted.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    model = {**plan.meta["model"], "argument": str(planted)}
    tampered = replace(plan, meta={**plan.meta, "model": model})
    with pytest.raises(MetainferError, match="a plan makes no Python run"):
        verify(tampered)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("argument", ["planted:spec", "os:path", "metainfer.models.smollm2:spec"])
def test_modules_that_a_plan_names_are_not_imported(plan: Plan, argument: str) -> None:
    model = {**plan.meta["model"], "argument": argument}
    with pytest.raises(MetainferError, match="a plan makes no Python run"):
        reference_spec(replace(plan, meta={**plan.meta, "model": model}), None, None)


def test_known_names_and_folders_are_found_again(plan: Plan) -> None:
    assert reference_spec(plan, None, None).kind == "causal_lm"
    model = {**plan.meta["model"], "argument": "smollm2"}
    assert reference_spec(replace(plan, meta={**plan.meta, "model": model}), None, None).name == (
        "smollm2"
    )
