"""Random mixes of requests give what each gives alone, and leave nothing behind."""

from dataclasses import dataclass
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from step_runners import (
    END_ID,
    LETTERS,
    AheadHashRunner,
    HashRunner,
    hash_logits,
    letter_tokenizer,
)

from metainfer.runtime.engine import Engine
from metainfer.runtime.requests import Request
from metainfer.runtime.sampling import SamplingParams, sample

TOKENIZER = letter_tokenizer()


@dataclass(frozen=True)
class Asked:
    """A request, the step before which it comes, and the step before which it is dropped."""

    prompt: tuple[int, ...]
    params: SamplingParams
    arrives: int
    leaves: int | None

    @property
    def most_tokens(self) -> int:
        return len(self.prompt) + self.params.max_tokens - 1


@dataclass(frozen=True)
class Mix:
    asked: tuple[Asked, ...]
    sizes: dict[str, int]


def alone(asked: Asked) -> tuple[str, list[int], str]:
    """Text, tokens and finish reason of a request, by the definition."""
    params, noise = asked.params, asked.params.noise()
    tokens: list[int] = []
    text = ""
    while len(tokens) < params.max_tokens:
        logits = hash_logits([*asked.prompt, *tokens], len(LETTERS))
        token = int(sample(logits[None], [params], [noise])[0])
        tokens.append(token)
        if token == END_ID:
            return text, tokens, "stop"
        text += LETTERS[token]
        ends = [s for s in params.stop if text.endswith(s)]
        if ends:
            return text[: len(text) - max(map(len, ends))], tokens, "stop"
    return text, tokens, "length"


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.0, 0.7, 1.5]),
    top_p=st.sampled_from([1.0, 0.8]),
    top_k=st.sampled_from([0, 5]),
    min_p=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 5),
    max_tokens=st.integers(1, 25),
    stop=st.lists(st.text("abcdefgh", min_size=1, max_size=2), max_size=3).map(tuple),
)


def asked_for(leaves: st.SearchStrategy[int | None]) -> st.SearchStrategy[Asked]:
    prompts = st.integers(1, 100).flatmap(
        lambda n: st.integers(0, 2**32 - 1).map(
            lambda seed: tuple((seed >> (i % 27)) * (i + 1) % len(LETTERS) for i in range(n))
        )
    )
    return st.builds(Asked, prompts, PARAMS, st.integers(0, 12), leaves)


@st.composite
def mixes(draw: st.DrawFn, leaves: st.SearchStrategy[int | None]) -> Mix:
    asked = draw(st.lists(asked_for(leaves), min_size=1, max_size=7))
    page_size = draw(st.integers(1, 9))
    longest = max(a.most_tokens for a in asked)
    sizes = {
        "max_tokens": draw(st.integers(1, 40)),
        "max_sequences": draw(st.integers(1, 5)),
        "max_context": longest,
        "page_size": page_size,
        # At least what the largest request needs: the others may have to wait for it.
        "num_pages": 1 - (-longest // page_size) + draw(st.integers(0, 30)),
    }
    return Mix(tuple(asked), sizes)


@dataclass
class Played:
    runner: HashRunner
    engine: Engine
    requests: list[Request]
    tokens_at: list[list[int]]
    first_step: dict[int, int]


def play(mix: Mix, kind: type[HashRunner] = HashRunner) -> Played:
    """Run a mix step by step, noting when each request came on and got its tokens."""
    runner = kind(**mix.sizes)
    engine = Engine(runner, TOKENIZER)
    requests: dict[int, Request] = {}
    tokens_at: list[list[int]] = [[] for _ in mix.asked]
    first_step: dict[int, int] = {}
    number = 0
    while len(requests) < len(mix.asked) or engine.has_work:
        for i, asked in enumerate(mix.asked):
            if asked.arrives == number:
                requests[i] = engine.submit(asked.prompt, asked.params)
            if asked.leaves == number and i in requests:
                engine.cancel(requests[i])
        engine.step()
        for i, request in requests.items():
            tokens_at[i] += [number] * len(request.take()[1])
            if request.computed and i not in first_step:
                first_step[i] = number
        number += 1
        assert number < 2000
    return Played(runner, engine, [requests[i] for i in sorted(requests)], tokens_at, first_step)


KINDS = st.sampled_from([HashRunner, AheadHashRunner])


@settings(deadline=None)
@given(mixes(leaves=st.none()), KINDS)
def test_batching_and_chunking_change_no_answer(mix: Mix, kind: type[HashRunner]) -> None:
    played = play(mix, kind)
    for asked, request in zip(mix.asked, played.requests, strict=True):
        answer = request.completion(played.engine.plan_hash)
        assert (answer.text, list(answer.token_ids), answer.finish_reason) == alone(asked)
        assert answer.generated_tokens == len(answer.token_ids)
        assert answer.prompt_tokens == len(asked.prompt)
    pages = played.engine._replicas.schedulers[0].pages
    assert (pages.num_taken, pages.num_free) == (0, pages.num_pages - 1)
    counters = played.engine.counters
    assert counters.prefill_tokens == sum(len(a.prompt) for a in mix.asked)
    # Every token but the last of each answer is written, and once; what was begun ahead for an
    # answer that ended is written in vain.
    kept = sum(len(r.tokens) - 1 for r in played.requests)
    if kind is HashRunner:
        assert played.runner.num_writes == kept
        assert counters.prefill_steps + counters.decode_steps == len(played.runner.log)
    else:
        assert kept <= played.runner.num_writes <= kept + len(played.requests)


@settings(deadline=None)
@given(mixes(leaves=st.none()))
def test_nobody_starves(mix: Mix) -> None:
    played = play(mix)
    for times in played.tokens_at:
        assert all(after - before <= 2 for before, after in pairwise(times))
    # While a prompt is under way, no two decode steps follow each other: chunks of max_tokens
    # come every other step at least, behind the prompts that were admitted before it.
    room = mix.sizes["max_tokens"]
    most = sum(len(a.prompt) for a in mix.asked)
    for i, first in played.first_step.items():
        assert played.tokens_at[i][0] - first <= 2 * -(-most // room)
    order = sorted(played.first_step, key=lambda i: (mix.asked[i].arrives, i))
    began = [played.first_step[i] for i in order]
    assert began == sorted(began)


@settings(deadline=None)
@given(mixes(leaves=st.none() | st.integers(0, 25)), KINDS)
def test_dropped_requests_disturb_nobody(mix: Mix, kind: type[HashRunner]) -> None:
    played = play(mix, kind)
    for asked, request in zip(mix.asked, played.requests, strict=True):
        _, tokens, reason = alone(asked)
        got = request.tokens[len(asked.prompt) :]
        if request.is_cancelled:
            assert got == tokens[: len(got)]
        else:
            assert (got, request.finish_reason) == (tokens, reason)
    pages = played.engine._replicas.schedulers[0].pages
    assert (pages.num_taken, pages.num_free) == (0, pages.num_pages - 1)
