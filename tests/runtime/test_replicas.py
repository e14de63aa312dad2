"""Replicas: requests spread over queues, steps alike, answers as of one replica."""

from collections.abc import Mapping, Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from step_runners import LETTERS, HashRunner, hash_logits

from metainfer.runtime.engine import Engine
from metainfer.runtime.replicas import alike, idle
from metainfer.runtime.sampling import SamplingParams

Given = tuple[np.ndarray, Mapping[str, np.ndarray]]


class HashReplicas(HashRunner):
    """Several hash runners; what they are given together must be alike once padded."""

    def __init__(self, count: int, **sizes: int) -> None:
        super().__init__(**sizes)
        self.num_replicas = count
        self.runners = [HashRunner(**sizes) for _ in range(count)]
        self.phases: list[str] = []

    def run_together(self, phase: str, steps: Sequence[Given | None]) -> list[np.ndarray]:
        assert len(steps) == self.num_replicas
        assert any(step is not None for step in steps)
        self.phases.append(phase)
        check_alike(steps, alike(steps))
        nothing = np.empty((0, self.vocab_size), np.float32)
        return [
            nothing if step is None else runner.run(phase, *step)
            for runner, step in zip(self.runners, steps, strict=True)
        ]


def check_alike(steps: Sequence[Given | None], padded: Sequence[Given]) -> None:
    shapes = {(len(ids), *(step[k].shape for k in sorted(step))) for ids, step in padded}
    assert len(shapes) == 1
    for before, (ids, step) in zip(steps, padded, strict=True):
        known = 0 if before is None else len(before[0])
        # Whatever is padding writes to the null page, and belongs to no sequence.
        assert (step["slots"][known:] == 0).all()
        assert step["starts"][-1] == known
        assert step["num_valid"][0] == known
        if before is not None:
            np.testing.assert_array_equal(ids[:known], before[0])
            np.testing.assert_array_equal(step["slots"][:known], before[1]["slots"])


@given(
    count=st.integers(1, 4),
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12)), min_size=1, max_size=9),
)
def test_answers_do_not_depend_on_replicas(count: int, lengths: list[tuple[int, int]]) -> None:
    runner = HashReplicas(count)
    prompts = [[(7 * n + i) % len(LETTERS) for i in range(p)] for n, (p, _) in enumerate(lengths)]
    params = [SamplingParams(max_tokens=m) for _, m in lengths]
    found = Engine(runner, end_ids=()).generate(prompts, params)
    for prompt, param, answer in zip(prompts, params, found, strict=True):
        tokens = list(prompt)
        for _ in range(param.max_tokens):
            tokens.append(int(hash_logits(tokens, len(LETTERS)).argmax()))
        assert list(answer.token_ids) == tokens[len(prompt) :]


def test_requests_go_where_least_is_to_be_done() -> None:
    runner = HashReplicas(2)
    engine = Engine(runner, end_ids=())
    long, *short = [
        engine.submit([1] * size, SamplingParams(max_tokens=2)) for size in (30, 5, 5, 5)
    ]
    engine.step()
    queues = engine._replicas.schedulers
    assert [s.load for s in queues] == [31, 18]
    assert engine.capacity.sequences == 8
    while engine.has_work:
        engine.step()
    assert all(r.is_done for r in (long, *short))
    assert [s.pages.num_taken for s in queues] == [0, 0]
    # The short ones do not wait for the long one: both replicas run the same phase in each step.
    assert runner.phases[0] == "prefill"
    assert "decode" in runner.phases


def test_a_step_of_nothing_touches_only_the_null_page() -> None:
    ids, step = idle()
    assert len(ids) == len(step["positions"]) == 1
    assert step["num_valid"].tolist() == [0, 0]
    assert step["slots"].tolist() == [0]
    assert step["pages"].tolist() == [[0]]
