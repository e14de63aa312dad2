"""Decode steps by buckets: captured once each, right when padded, and said where refused."""

from pathlib import Path

import numpy as np
import pytest
import torch
from captures import Recorder
from hf_checkpoints import VOCAB, make_checkpoint

import metainfer
from metainfer.runtime.engine import Engine
from metainfer.runtime.graphs import StepGraphs
from metainfer.runtime.load import LoadedModel
from metainfer.runtime.sampling import SamplingParams

Answers = list[tuple[int, ...]]


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> metainfer.Plan:
    path: Path = make_checkpoint("llama", tmp_path_factory.mktemp("model") / "llama")
    return metainfer.compile(
        str(path), "cpu", activations="f32", weights="f32", exact=True, max_tokens=24,
        max_sequences=5, max_context=64,
    )  # fmt: skip


def answers(model: LoadedModel) -> Answers:
    """Prompts of unequal lengths that end at unequal times: 5, 4, ... 1 sequences a step."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, VOCAB, 1 + 7 * n % 20).tolist() for n in range(5)]
    params = [SamplingParams(max_tokens=3 + 4 * n) for n in range(5)]
    return [one.token_ids for one in Engine(model, end_ids=()).generate(prompts, params)]


def test_steps_in_buckets_answer_what_steps_alone_answer(plan: metainfer.Plan) -> None:
    wanted = answers(metainfer.load(plan))
    model, recorder = metainfer.load(plan), Recorder()
    model._graphs = StepGraphs(recorder)
    assert answers(model) == wanted
    first = len(recorder.caught)
    # Sizes 5, 4, 3 of 5, 2, 1: buckets 5, 4, 2, 1, and few numbers of pages.
    assert 4 <= first <= 10
    assert recorder.replays > first
    assert answers(model) == wanted
    assert len(recorder.caught) == first
    assert model.run_notes == ()


def test_a_step_that_cannot_be_captured_runs_launch_by_launch_and_says_so(
    plan: metainfer.Plan,
) -> None:
    wanted = answers(metainfer.load(plan))
    model, recorder = metainfer.load(plan), Recorder("a copy from the host\nmore")
    model._graphs = StepGraphs(recorder)
    assert answers(model) == wanted
    assert len(recorder.caught) == 1
    (note,) = model.run_notes
    assert note.endswith("launch by launch, no graph holds them: a copy from the host")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
def test_steps_that_are_started_ahead_answer_what_steps_one_by_one_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU tokens are fed from one step to the next; captured or not, drawn or not."""
    path = make_checkpoint("llama", tmp_path / "llama")
    plan = metainfer.compile(
        str(path), "1xh200", max_tokens=64, max_sequences=5, max_context=64
    )  # fmt: skip
    model = metainfer.load(plan, allow_machine_mismatch=True)
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, VOCAB, 1 + 7 * n % 20).tolist() for n in range(8)]
    params = [
        SamplingParams(n % 3 * 0.7, top_k=n % 4 * 9, seed=n, max_tokens=3 + 4 * n)
        for n in range(len(prompts))
    ]
    for captured in (True, False):
        if not captured:
            model.launch_by_launch()
        for end_ids in ((), range(0, VOCAB, 9)):
            one_by_one = Engine(model, end_ids=end_ids)
            assert one_by_one._sampling is not None
            monkeypatch.setattr(one_by_one._replicas, "following", lambda running: None)
            wanted = [a.token_ids for a in one_by_one.generate(prompts, params)]
            engine = Engine(model, end_ids=end_ids)
            assert [a.token_ids for a in engine.generate(prompts, params)] == wanted
            assert len(set(wanted)) > 3
