"""Tiny checkpoints that transformers wrote: folder in, the logits of transformers out."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hf_checkpoints import CASES, VOCAB, make_case
from lm_steps import EXACT, Oracle, Sequences, compile_and_load, error, load_plan, run_chunked

import metainfer
from metainfer.runtime.load import LoadedModel
from metainfer.runtime.sampling import SamplingParams

BOUND = 1e-4  # of logits whose largest is above 1; measured: below 1e-5
CHUNKS = (1, 3, 7, 16, 64)
# Longer than every window, than the original context of scaled ropes, and than several pages.
LENGTH = 50

Made = tuple[LoadedModel, Oracle]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    """Compiled and loaded cases with their oracles, each made once."""
    kept: dict[str, Made] = {}

    def get(name: str) -> Made:
        if name not in kept:
            path = make_case(name, tmp_path_factory.mktemp(name), tokenizer=True)
            kept[name] = compile_and_load(path, **EXACT), Oracle(path)
        return kept[name]

    return get


# Each is covered by another case in all that it has.
_TWINS = (
    "llama_rope_linear", "mistral", "qwen2", "qwen3", "qwen3_moe_every_second", "deepseek_v2",
    "deepseek_v2_groups", "deepseek_v3_dense",
)  # fmt: skip
VARIANTS = [
    pytest.param(name, marks=pytest.mark.thorough) if name in _TWINS else name for name in CASES
]


def random_tokens(count: int, seed: int = 1) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, count).tolist()


@pytest.mark.parametrize("name", VARIANTS)
def test_prefill_in_one_chunk_and_in_several(made: Callable[[str], Made], name: str) -> None:
    model, oracle = made(name)
    tokens = random_tokens(LENGTH)
    wanted = oracle.logits(tokens)
    assert np.abs(wanted).max() > 0.5
    for chunk in CHUNKS:
        assert error(run_chunked(model, tokens, chunk), wanted) < BOUND, f"chunks of {chunk}"


@pytest.mark.parametrize("name", VARIANTS)
def test_decode_of_unequal_lengths(made: Callable[[str], Made], name: str) -> None:
    """1 to 8 sequences: prefilled in one step, decoded together, step by step."""
    model, oracle = made(name)
    for count in (1, 2, 3, 5, 8):
        lengths = [1 + (7 * i + 3 * count) % 23 for i in range(count)]
        texts = [random_tokens(n + 6, seed=10 * count + i) for i, n in enumerate(lengths)]
        wanted = [oracle.logits(t) for t in texts]
        sequences = Sequences(model, seed=count)
        found = sequences.run("prefill", {i: texts[i][:n] for i, n in enumerate(lengths)})
        rows = np.stack([wanted[i][n - 1] for i, n in enumerate(lengths)])
        assert error(found, rows) < BOUND
        for at in range(6):
            found = sequences.run("decode", {i: [texts[i][n + at]] for i, n in enumerate(lengths)})
            rows = np.stack([wanted[i][n + at] for i, n in enumerate(lengths)])
            assert error(found, rows) < BOUND, f"{count} sequences, step {at}"


@pytest.mark.parametrize("name", ["llama", "mistral_window", "qwen2_yarn", "qwen3_biases_tied"])
def test_steps_that_mix_phases(made: Callable[[str], Made], name: str) -> None:
    """A prefill step may hold new prompts, continued chunks and single tokens, in any order."""
    model, oracle = made(name)
    texts = [random_tokens(40, seed=i) for i in range(4)]
    wanted = [oracle.logits(t) for t in texts]
    sequences = Sequences(model)
    plan = [{0: 5}, {1: 9, 0: 1}, {2: 17, 1: 4, 0: 1}, {0: 1, 3: 1, 1: 1, 2: 13}, {3: 20, 0: 7}]
    for sizes in plan:
        at = {n: sequences.lengths.get(n, 0) for n in sizes}
        found = sequences.run("prefill", {n: texts[n][at[n] : at[n] + k] for n, k in sizes.items()})
        rows = np.stack([wanted[n][at[n] + k - 1] for n, k in sizes.items()])
        assert error(found, rows) < BOUND, f"step {sizes}"
        # In between a decode step of some of them.
        last = max(sizes)
        place = sequences.lengths[last]
        found = sequences.run("decode", {last: [texts[last][place]]})
        assert error(found[0], wanted[last][place]) < BOUND


def test_an_order_of_sequences_does_not_matter(made: Callable[[str], Made]) -> None:
    model, _ = made("llama")
    texts = {i: random_tokens(3 + 5 * i, seed=i) for i in range(5)}
    forward = Sequences(model, seed=3).run("prefill", texts)
    backward = Sequences(model, seed=4).run("prefill", dict(reversed(texts.items())))
    np.testing.assert_allclose(backward[::-1], forward, atol=1e-5)


@pytest.mark.parametrize("page_size", [1, 4, 16, 32])
def test_page_sizes(tmp_path: Path, page_size: int) -> None:
    path = make_case("mistral_window", tmp_path)
    model = compile_and_load(path, page_size=page_size, **EXACT)
    assert model.page_size == page_size
    oracle = Oracle(path)
    tokens = random_tokens(LENGTH)
    wanted = oracle.logits(tokens)
    for chunk in (7, 64):
        assert error(run_chunked(model, tokens, chunk), wanted) < BOUND
    assert error(run_chunked(model, tokens, 1, "decode"), wanted) < BOUND


@pytest.mark.parametrize("chunk", CHUNKS)
def test_engine_writes_what_transformers_writes(tmp_path: Path, chunk: int) -> None:
    """Greedy answers of eight unequal prompts, in steps of at most ``chunk`` prompt tokens."""
    path = make_case("qwen3_biases_tied", tmp_path, tokenizer=True)
    model = compile_and_load(path, max_tokens=chunk, max_sequences=min(chunk, 8), **EXACT)
    prompts = [random_tokens(1 + 5 * i, seed=i) for i in range(8)]
    engine = model.engine()
    answers = engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=12))
    oracle = Oracle(path)
    for prompt, answer in zip(prompts, answers, strict=True):
        # A token is greedy if it is the best one after all before it: one forward tells for all.
        best = oracle.logits([*prompt, *answer.token_ids[:-1]])[len(prompt) - 1 :].argmax(-1)
        assert answer.token_ids == tuple(best.tolist())
        ended = answer.token_ids[-1] in engine.end_ids
        assert ended or len(answer.token_ids) == 12
        assert not engine.end_ids.intersection(answer.token_ids[:-1])


def test_a_checkpoint_in_bf16_is_widened(tmp_path: Path) -> None:
    path = make_case("llama", tmp_path, dtype=torch.bfloat16)
    model = compile_and_load(path, **EXACT)
    tokens = random_tokens(20)
    assert error(run_chunked(model, tokens, 20), Oracle(path).logits(tokens)) < BOUND


def test_plan_round_trip(tmp_path: Path) -> None:
    """Saved, read and loaded: the same hash, the same numbers; compiled again: the same hash."""
    path = make_case("qwen2_window", tmp_path / "model")
    plan = metainfer.compile(path, "cpu", out=tmp_path / "plan", **EXACT)
    read = metainfer.Plan.read(tmp_path / "plan")
    assert read.hash == plan.hash
    assert read.texts == plan.texts
    assert metainfer.compile(path, "cpu", **EXACT).hash == plan.hash
    tokens = random_tokens(30)
    found = run_chunked(load_plan(tmp_path / "plan"), tokens, 16)
    np.testing.assert_array_equal(found, run_chunked(load_plan(plan), tokens, 16))
    other = metainfer.compile(path, "cpu", **{**EXACT, "page_size": 4})
    assert other.hash != plan.hash
