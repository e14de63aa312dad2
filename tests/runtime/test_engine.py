from collections.abc import Callable, Iterator, Mapping
from itertools import count, pairwise
from typing import Any

import numpy as np
import pytest
from step_runners import (
    END_ID,
    LETTERS,
    AheadHashRunner,
    HashRunner,
    InterpretedRunner,
    hash_logits,
    letter_tokenizer,
)

from metainfer.ir.errors import CapacityError, MetainferError
from metainfer.runtime.engine import Engine
from metainfer.runtime.sampling import SamplingParams

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def is_clean(engine: Engine) -> bool:
    pages = engine._replicas.schedulers[0].pages
    return not engine.has_work and pages.num_taken == 0 and pages.num_free == pages.num_pages - 1


def ticking() -> Callable[[], float]:
    ticks = count()
    return lambda: float(next(ticks))


def greedy(prompt: list[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(hash_logits(tokens, len(LETTERS)).argmax()))
    return tokens[len(prompt) :]


def test_answers_come_in_the_order_of_their_prompts() -> None:
    engine = Engine(HashRunner(max_tokens=8, max_sequences=2))
    prompts = [[1, 2, 3], list(range(20)), [5], [6, 7]]
    answers = engine.generate(prompts, SamplingParams(max_tokens=6))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert list(answer.token_ids) == greedy(prompt, 6)
        assert answer.finish_reason == "length"
        assert (answer.prompt_tokens, answer.generated_tokens) == (len(prompt), 6)
        assert answer.plan_hash == "f00d"
        assert answer.text == ""
    assert is_clean(engine)
    assert engine.generate([]) == []


def test_texts_stop_texts_and_end_tokens() -> None:
    tokenizer = letter_tokenizer()
    engine = Engine(HashRunner(), tokenizer, end_ids=())
    (whole,) = engine.generate(["hello"], SamplingParams(max_tokens=20))
    assert whole.text == tokenizer.decode(greedy(tokenizer.encode("hello"), 20))
    stop = whole.text[4:6]
    cut = whole.text.index(stop)
    (answer,) = engine.generate(["hello"], SamplingParams(max_tokens=20, stop=(stop,)))
    assert answer.text == whole.text[:cut]
    assert (answer.finish_reason, answer.stop_text) == ("stop", stop)
    assert answer.generated_tokens == len(answer.token_ids) == cut + 2
    end = whole.token_ids[3]
    ended = Engine(HashRunner(), tokenizer, end_ids={end})
    (answer,) = ended.generate(["hello"], SamplingParams(max_tokens=20))
    place = whole.token_ids.index(end)
    assert answer.token_ids == whole.token_ids[: place + 1]
    assert answer.text == whole.text[:place]
    assert (answer.finish_reason, answer.stop_text) == ("stop", None)
    assert Engine(HashRunner(), tokenizer).end_ids == {END_ID}


def test_a_stream_is_the_answer_in_pieces() -> None:
    engine = Engine(HashRunner(), letter_tokenizer(), end_ids=())
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=4)
    (wanted,) = engine.generate(["hello"], params)
    pieces = list(engine.stream("hello", params))
    assert "".join(p.text for p in pieces) == wanted.text
    assert sum((p.token_ids for p in pieces), ()) == wanted.token_ids
    assert [p.completion is not None for p in pieces] == [False] * 11 + [True]
    last = pieces[-1].completion
    assert last is not None
    assert (last.text, last.token_ids) == (wanted.text, wanted.token_ids)
    assert is_clean(engine)


def test_no_part_of_a_stop_text_is_streamed() -> None:
    engine = Engine(HashRunner(), letter_tokenizer(), end_ids=())
    (whole,) = engine.generate(["hello"], SamplingParams(max_tokens=12))
    params = SamplingParams(max_tokens=12, stop=(whole.text[3:7],))
    texts = [p.text for p in engine.stream("hello", params)]
    assert "".join(texts) == whole.text[:3]
    assert len(texts) == 7


def test_text_held_back_for_a_stop_text_comes_at_the_end() -> None:
    engine = Engine(HashRunner(), letter_tokenizer(), end_ids=())
    (whole,) = engine.generate(["hello"], SamplingParams(max_tokens=6))
    params = SamplingParams(max_tokens=6, stop=(whole.text[-2:] + "never",))
    (answer,) = engine.generate(["hello"], params)
    assert (answer.text, answer.finish_reason, answer.stop_text) == (whole.text, "length", None)
    assert "".join(p.text for p in engine.stream("hello", params)) == whole.text


def test_a_closed_stream_frees_its_pages() -> None:
    engine = Engine(HashRunner(), letter_tokenizer(), end_ids=())
    stream = engine.stream("hello", SamplingParams(max_tokens=12))
    assert not engine.has_work
    next(stream)
    assert engine.has_work
    stream.close()
    assert is_clean(engine)


def test_streams_share_steps() -> None:
    runner = HashRunner()
    engine = Engine(runner, letter_tokenizer(), end_ids=())
    params = SamplingParams(max_tokens=8)
    wanted = [engine.generate([p], params)[0].text for p in ("abc", "xyz")]
    runner.log.clear()
    streams = [engine.stream(p, params) for p in ("abc", "xyz")]
    texts = ["", ""]
    for pair in zip(*streams, strict=True):
        texts = [text + piece.text for text, piece in zip(texts, pair, strict=True)]
    assert texts == wanted
    assert max(seen.sequences for seen in runner.log) == 2
    assert len(runner.log) < 16


def test_a_chat_goes_through_the_template() -> None:
    engine = Engine(HashRunner(), letter_tokenizer(TEMPLATE), end_ids=())
    messages = [{"role": "user", "content": "ab"}, {"role": "user", "content": "cd"}]
    params = SamplingParams(max_tokens=3)
    (wanted,) = engine.generate(["abcd"], params)
    assert engine.chat(messages, params).text == wanted.text
    assert [p.text for p in engine.stream_chat(messages, params)] == list(wanted.text)
    with pytest.raises(MetainferError, match="a chat needs a tokenizer"):
        Engine(HashRunner()).chat(messages)


def test_times_and_counters() -> None:
    runner = HashRunner(max_tokens=4)
    engine = Engine(runner, end_ids=(), clock=ticking())
    (answer,) = engine.generate([list(range(6))], SamplingParams(max_tokens=3))
    # Ticks: queued, step begins, started, step ends; begins, token, ends; begins, token, ends; ...
    times = answer.timings
    assert times.queued_us == 2e6
    assert times.prefill_us == 3e6
    assert times.token_us == (5e6, 8e6, 11e6)
    assert (times.first_token_us, times.decode_us, times.per_token_us) == (5e6, 6e6, 3e6)
    counters = engine.counters
    assert (counters.prefill_steps, counters.prefill_tokens, counters.prefill_us) == (2, 6, 4e6)
    assert (counters.decode_steps, counters.decode_tokens, counters.decode_us) == (2, 2, 4e6)
    (short,) = engine.generate([[1]], SamplingParams(max_tokens=1))
    assert short.timings.per_token_us is None


@pytest.mark.parametrize(
    ("prompts", "params", "words"),
    [
        ([[]], SamplingParams(), "the prompt is empty"),
        ([""], SamplingParams(), "the prompt is empty"),
        ([[1, 26]], SamplingParams(), "token 1 of the prompt is 26, outside the vocabulary of 26"),
        ([[-1]], SamplingParams(), "token 0 of the prompt is -1"),
        ([[1.5]], SamplingParams(), "token 0 of the prompt is 1.5"),
        ("text", SamplingParams(), "one prompt was given"),
        ([1, 2], SamplingParams(), "one prompt was given"),
        ([[1], [2]], [SamplingParams()], "1 SamplingParams for 2 prompts"),
        ([[1]], [], "0 SamplingParams for 1 prompts"),
    ],
)
def test_bad_requests(prompts: Any, params: Any, words: str) -> None:
    runner = HashRunner()
    engine = Engine(runner, letter_tokenizer())
    with pytest.raises(MetainferError, match=words):
        engine.generate(prompts, params)
    assert is_clean(engine)
    assert runner.log == []


def test_texts_need_a_tokenizer() -> None:
    engine = Engine(HashRunner())
    with pytest.raises(MetainferError, match="the prompt is a text, but there is no tokenizer"):
        engine.stream("hello")
    with pytest.raises(MetainferError, match=r"stop texts .* without a tokenizer"):
        engine.submit([1], SamplingParams(stop=("a",)))


def test_one_request_too_large_stops_all_before_anything_runs() -> None:
    runner = HashRunner(max_context=10)
    engine = Engine(runner)
    with pytest.raises(CapacityError, match="max_context of 10"):
        engine.generate([[1], list(range(9))], SamplingParams(max_tokens=3))
    assert is_clean(engine)
    assert runner.log == []
    (answer,) = engine.generate([np.arange(9)], SamplingParams(max_tokens=2))  # type: ignore[list-item]
    assert list(answer.token_ids) == greedy(list(range(9)), 2)


def test_a_failed_step_leaves_the_engine_clean() -> None:
    runner = HashRunner(max_tokens=8)
    engine = Engine(runner)
    runner.fail_at = 3
    with pytest.raises(RuntimeError, match="fell off the bus"):
        engine.generate([[1, 2], [3]], SamplingParams(max_tokens=6))
    assert is_clean(engine)
    runner.fail_at = -1
    (answer,) = engine.generate([[1, 2]], SamplingParams(max_tokens=6))
    assert list(answer.token_ids) == greedy([1, 2], 6)


def test_a_failed_step_ends_its_own_requests_only() -> None:
    runner = HashRunner(max_tokens=4, max_sequences=2)
    engine = Engine(runner)
    params = SamplingParams(max_tokens=4)
    lost, kept = engine.submit([1, 2], params), engine.submit(list(range(8)), params)
    engine.step()
    runner.fail_at = 2
    with pytest.raises(RuntimeError):
        engine.step()
    assert isinstance(lost.error, RuntimeError)
    assert lost.is_done
    assert not kept.is_done
    while engine.has_work:
        engine.step()
    assert list(kept.completion("f00d").token_ids) == greedy(list(range(8)), 4)
    assert is_clean(engine)


def test_whoever_waits_meets_the_error_of_a_step_that_another_ran() -> None:
    runner = HashRunner(max_tokens=4, max_sequences=2)
    engine = Engine(runner)
    params = SamplingParams(max_tokens=6)
    first = engine.stream([1, 2], params)
    next(first)
    # The next step decodes the first stream alone, and fails; then the other's prompt runs.
    runner.fail_at = 2
    second = list(engine.stream([3, 4], params))
    assert second[-1].completion is not None
    assert list(second[-1].completion.token_ids) == greedy([3, 4], 6)
    with pytest.raises(RuntimeError, match="fell off the bus"):
        next(first)
    assert is_clean(engine)


def test_an_answer_that_ended_in_a_failed_step_counts() -> None:
    engine = Engine(HashRunner())
    ended = engine.submit([1, 2], SamplingParams(max_tokens=1))
    failed = engine.submit([3], SamplingParams(max_tokens=2))

    def fail(token: int, end_ids: object) -> None:
        raise ValueError("no such text")

    failed.accept = fail  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="no such text"):
        engine.step()
    assert ended.error is None
    assert list(ended.completion("f00d").token_ids) == greedy([1, 2], 1)
    assert isinstance(failed.error, ValueError)
    assert is_clean(engine)


class NanRunner(HashRunner):
    def compute(self, tokens: np.ndarray, step: Mapping[str, np.ndarray]) -> np.ndarray:
        return super().compute(tokens, step) * np.nan


class FlatRunner(HashRunner):
    def compute(self, tokens: np.ndarray, step: Mapping[str, np.ndarray]) -> np.ndarray:
        return super().compute(tokens, step)[:, :5]


@pytest.mark.parametrize(
    ("runner", "words"),
    [(NanRunner, "not finite"), (FlatRunner, r"logits of shape \[1, 5\], wanted \[1, 26\]")],
)
def test_logits_that_make_no_sense(runner: type[HashRunner], words: str) -> None:
    engine = Engine(runner())
    with pytest.raises(MetainferError, match=words):
        engine.generate([[1, 2]], SamplingParams(max_tokens=3))
    assert is_clean(engine)


def test_a_cancelled_request_is_done() -> None:
    engine = Engine(HashRunner())
    params = SamplingParams(max_tokens=3)
    running, waiting = engine.submit([1, 2], params), engine.submit([3], params)
    engine.step()
    engine.cancel(running)
    engine.cancel(waiting)
    assert running.is_done
    assert waiting.is_done
    assert running.finish_reason is None
    assert is_clean(engine)
    assert engine.step() == ()


@pytest.mark.parametrize(("max_tokens", "max_sequences"), [(64, 1), (5, 3), (1, 2)])
def test_a_small_model_answers_like_pytorch(max_tokens: int, max_sequences: int) -> None:
    runner = InterpretedRunner(
        max_tokens=max_tokens, max_sequences=max_sequences, page_size=4, num_pages=24
    )
    engine = Engine(runner)
    prompts = [[1, 2, 3], [7] * 13, [9, 8, 7, 6, 5, 4]]
    answers = engine.generate(prompts, SamplingParams(max_tokens=6))
    assert [list(a.token_ids) for a in answers] == [runner.greedy(p, 6) for p in prompts]
    assert len({a.token_ids for a in answers}) > 1
    assert is_clean(engine)


def steps(engine: Engine) -> Iterator[int]:
    number = 0
    while engine.has_work:
        engine.step()
        yield number
        number += 1


def test_a_long_prompt_does_not_hold_up_decodes() -> None:
    engine = Engine(HashRunner(max_tokens=2, max_context=200, num_pages=200))
    short = engine.submit([1], SamplingParams(max_tokens=20))
    engine.step()
    engine.submit([i % 20 for i in range(60)], SamplingParams(max_tokens=1))
    came = [0]
    for number in steps(engine):
        came += [number] * len(short.take()[1])
    assert len(came) == 21
    assert max(b - a for a, b in pairwise(came)) <= 2


def test_the_next_step_is_started_before_the_last_ones_tokens_are_read() -> None:
    runner = AheadHashRunner()
    engine = Engine(runner, end_ids=())
    prompts = [[1, 2, 3], [5], [6, 7]]
    params = [SamplingParams(max_tokens=n) for n in (9, 2, 6)]
    answers = engine.generate(prompts, params)
    assert [list(a.token_ids) for a in answers] == [
        greedy(p, q.max_tokens) for p, q in zip(prompts, params, strict=True)
    ]
    assert is_clean(engine)
    # Eight decode steps; the first one's tokens come from a prefill. None is computed in vain.
    assert runner.num_ahead == 7
    assert [s.tokens for s in runner.log] == [6, 3, 2, 2, 2, 2, 1, 1, 1]


def test_a_step_that_was_started_for_an_answer_that_ended_is_dropped() -> None:
    end = greedy([1, 2, 3], 4)[3]
    runner = AheadHashRunner(num_pages=4, max_context=12)
    engine = Engine(runner, end_ids={end})
    first = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=9))[0]
    assert list(first.token_ids) == greedy([1, 2, 3], 4)
    assert len(runner.queue) == 1
    # Its pages are another's: what the step writes there comes before.
    (second,) = engine.generate([[7] * 9], SamplingParams(max_tokens=3))
    assert list(second.token_ids) == greedy([7] * 9, 3)
    assert runner.queue == []
    assert is_clean(engine)


def test_an_error_of_a_step_comes_when_its_tokens_are_asked_for() -> None:
    runner = AheadHashRunner()
    engine = Engine(runner, end_ids=())
    request = engine.submit([1, 2], SamplingParams(max_tokens=9))
    engine.step()
    runner.fail_at = 3
    assert engine.step() == (request,)
    with pytest.raises(RuntimeError, match="fell off the bus"):
        engine.step()
    assert isinstance(request.error, RuntimeError)
    assert request.tokens[2:] == greedy([1, 2], 2)
    assert is_clean(engine)


def test_a_prompt_comes_right_behind_the_step_that_was_started_before_it() -> None:
    runner = AheadHashRunner()
    engine = Engine(runner, end_ids=())
    engine.submit([1, 2], SamplingParams(max_tokens=9))
    engine.step()
    engine.step()
    assert len(runner.queue) == 1
    late = engine.submit([3, 4], SamplingParams(max_tokens=2))
    engine.step()
    assert engine.step() == (late,)
    assert [s.phase for s in runner.log] == ["prefill", "decode", "decode", "prefill"]
