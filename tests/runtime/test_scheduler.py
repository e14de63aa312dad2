import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from step_runners import SMALL, HashRunner, InterpretedRunner

from metainfer.ir.errors import CapacityError, MetainferError
from metainfer.runtime.replicas import Replicas
from metainfer.runtime.requests import Request
from metainfer.runtime.sampling import SamplingParams
from metainfer.runtime.scheduler import Batch, build_step, pad_step


def request(number: int, prompt: int, max_tokens: int = 4) -> Request:
    tokens = [(number + i) % 20 for i in range(prompt)]
    return Request(number, tokens, SamplingParams(max_tokens=max_tokens), None, time.perf_counter)


def next_batch(queues: Replicas) -> Batch | None:
    """The only replica's part of the next step."""
    found = queues.next_round()
    return None if found is None else found.batches[0]


def play(batch: Batch) -> None:
    """What the engine does with a batch, the token being 1."""
    sampled = [c.request for c in batch.chunks if c.is_sampled]
    for chunk in batch.chunks:
        chunk.request.computed = chunk.end
    for one in sampled:
        one.accept(1, ())


def plan_of(batch: Batch | None) -> tuple[str, list[tuple[int, int, int]]]:
    assert batch is not None
    return batch.phase, [(c.request.number, c.start, c.count) for c in batch.chunks]


def test_prompts_share_a_step_and_the_last_is_cut() -> None:
    scheduler = Replicas(HashRunner(max_tokens=8))
    for number, prompt in ((1, 3), (2, 9), (3, 2)):
        scheduler.submit(request(number, prompt))
    seen = []
    for _ in range(5):
        batch = next_batch(scheduler)
        seen.append(plan_of(batch))
        assert batch is not None
        play(batch)
    assert seen == [
        ("prefill", [(1, 0, 3), (2, 0, 5)]),
        ("decode", [(1, 3, 1)]),
        ("prefill", [(2, 5, 4), (3, 0, 2)]),
        ("decode", [(1, 4, 1), (2, 9, 1), (3, 2, 1)]),
        ("decode", [(1, 5, 1), (2, 10, 1), (3, 3, 1)]),
    ]


def test_admission_is_in_order_and_waits_for_pages() -> None:
    # 4 pages of 4 tokens; a request of 7 + 2 - 1 tokens takes 2 of them.
    scheduler = Replicas(HashRunner(num_pages=5, max_context=16))
    first, large, small = request(1, 7, 2), request(2, 12, 2), request(3, 1, 1)
    for one in (first, large, small):
        scheduler.submit(one)
    assert plan_of(next_batch(scheduler))[1] == [(1, 0, 7)]
    assert scheduler.schedulers[0].pages.num_free == 2
    scheduler.remove(first)
    assert plan_of(next_batch(scheduler))[1] == [(2, 0, 12)]
    scheduler.remove(large)
    scheduler.remove(small)
    scheduler.remove(small)
    assert not scheduler.has_work
    assert next_batch(scheduler) is None
    assert scheduler.schedulers[0].pages.num_free == 4


def test_a_request_that_never_fits_is_refused_with_numbers() -> None:
    by_context = Replicas(HashRunner(max_context=10))
    by_context.submit(request(1, 6, 5))
    with pytest.raises(CapacityError) as caught:
        by_context.submit(request(1, 6, 6))
    for words in (
        "a prompt of 6 tokens and max_tokens = 6 need 11 tokens of state",
        "max_context of 10 tokens",
        "set max_tokens to at most 5",
        "compile with a larger max_context",
    ):
        assert words in str(caught.value)
    with pytest.raises(CapacityError, match="the prompt is longer than the capacity: 11 tokens"):
        by_context.submit(request(1, 11, 1))
    by_pages = Replicas(HashRunner(num_pages=3, page_size=4))
    with pytest.raises(CapacityError, match="the 8 tokens of all 2 pages"):
        by_pages.submit(request(1, 8, 2))
    assert not by_pages.has_work


def test_capacity_tells_when_pages_are_too_large() -> None:
    good = Replicas(HashRunner(page_size=4, num_pages=65)).capacity
    assert (good.tokens, good.context, good.sequences, good.pinned_tokens) == (256, 64, 4, 4)
    assert not good.is_wasteful
    # The field's case: pages of 7,808 tokens.
    bad = Replicas(HashRunner(page_size=7808, num_pages=11)).capacity
    assert bad.pinned_share == pytest.approx(0.1)
    assert bad.is_wasteful


def test_the_record_of_a_step_of_two_sequences() -> None:
    scheduler = Replicas(HashRunner(max_tokens=8, page_size=4))
    scheduler.submit(request(1, 3))
    scheduler.submit(request(2, 9))
    batch = next_batch(scheduler)
    assert batch is not None
    tokens, step = build_step(batch, scheduler.schedulers[0].pages)
    assert tokens.tolist() == [1, 2, 3, 2, 3, 4, 5, 6]
    assert {name: array.tolist() for name, array in step.items()} == {
        "positions": [0, 1, 2, 0, 1, 2, 3, 4],
        "slots": [4, 5, 6, 8, 9, 10, 11, 12],
        "starts": [0, 3, 8],
        "lengths": [3, 5],
        "pages": [[1, 0], [2, 3]],
        "sample_rows": [2],
        "num_valid": [8, 2],
    }
    assert all(array.dtype == np.int32 for array in (tokens, *step.values()))


def test_a_step_that_ends_no_prompt_samples_its_last_row() -> None:
    scheduler = Replicas(HashRunner(max_tokens=4))
    scheduler.submit(request(1, 9))
    batch = next_batch(scheduler)
    assert batch is not None
    assert not batch.chunks[0].is_sampled
    assert build_step(batch, scheduler.schedulers[0].pages)[1]["sample_rows"].tolist() == [3]


def some_step(page_size: int = 4) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    sizes = {"max_tokens": 8, "page_size": page_size, "num_pages": 16}
    scheduler = Replicas(HashRunner(**sizes))
    scheduler.submit(request(1, 3))
    scheduler.submit(request(2, 5))
    batch = next_batch(scheduler)
    assert batch is not None
    return build_step(batch, scheduler.schedulers[0].pages)


def test_padding_keeps_what_was_there() -> None:
    _, step = some_step()
    padded = pad_step(step, 11, 4, num_pages=3, num_samples=4)
    assert {name: array.tolist() for name, array in padded.items()} == {
        "positions": [0, 1, 2, 0, 1, 2, 3, 4, 0, 0, 0],
        "slots": [4, 5, 6, 8, 9, 10, 11, 12, 0, 0, 0],
        "starts": [0, 3, 8, 8, 8],
        "lengths": [3, 5, 0, 0],
        "pages": [[1, 0, 0], [2, 3, 0], [0, 0, 0], [0, 0, 0]],
        "sample_rows": [2, 7, 0, 0],
        "num_valid": [8, 2],
    }
    assert all(array.dtype == np.int32 for array in padded.values())
    same = pad_step(step, 8, 2)
    assert all((same[name] == step[name]).all() for name in step)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((7, 2, 2, 2), "8 tokens does not fit a bucket of 7"),
        ((8, 1, 2, 2), "2 sequences does not fit a bucket of 1"),
        ((8, 2, 1, 2), "2 pages does not fit a bucket of 1"),
        ((8, 2, 2, 1), "2 samples does not fit a bucket of 1"),
    ],
)
def test_a_step_larger_than_the_bucket(sizes: tuple[int, int, int, int], words: str) -> None:
    _, step = some_step()
    tokens, sequences, pages, samples = sizes
    with pytest.raises(MetainferError, match=words):
        pad_step(step, tokens, sequences, num_pages=pages, num_samples=samples)


@given(more=st.tuples(*[st.integers(0, 5)] * 4))
def test_padded_rows_write_to_the_null_page_only(more: tuple[int, int, int, int]) -> None:
    _, step = some_step()
    tokens, sequences, pages, samples = (a + b for a, b in zip((8, 2, 2, 2), more, strict=True))
    padded = pad_step(step, tokens, sequences, num_pages=pages, num_samples=samples)
    assert (padded["slots"][8:] < 4).all()
    assert (padded["slots"][8:] >= 0).all()
    assert (np.diff(padded["starts"])[2:] == 0).all()
    assert padded["pages"].shape == (sequences, pages)
    assert len(padded["sample_rows"]) == samples


def test_padding_changes_neither_logits_nor_states() -> None:
    tokens, step = some_step()
    plain, padded = (InterpretedRunner(max_tokens=32, page_size=4, num_pages=16) for _ in range(2))
    wanted = plain.compute(tokens, step)
    bucket = pad_step(step, 12, 4, num_pages=4, num_samples=4)
    got = padded.compute(np.pad(tokens, (0, 4)), bucket)
    np.testing.assert_allclose(got[:2], wanted, rtol=0, atol=1e-5)
    assert got.shape == (4, SMALL.vocab)
    for name, fields in plain.states.items():
        for field, array in fields.items():
            changed = padded.states[name][field]
            np.testing.assert_allclose(changed[1:], array[1:], rtol=0, atol=1e-5)
            assert np.abs(array[1:4]).max() > 0.01
            assert (array[0] == 0).all()
