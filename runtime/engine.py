"""The engine: prompts in, answers out; requests of any lengths share the steps of one runner."""

import time
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NoReturn, cast

import numpy as np

from metainfer.ir.errors import MetainferError
from metainfer.runtime.chat import Message, encode_chat
from metainfer.runtime.device_sampling import draw_of
from metainfer.runtime.replicas import Replicas, Round
from metainfer.runtime.requests import Clock, Completion, Piece, Request
from metainfer.runtime.runner import SamplingRunner, StepRunner
from metainfer.runtime.sampling import SamplingParams, sample
from metainfer.runtime.scheduler import PoolCapacity
from metainfer.runtime.tokenizer import Tokenizer

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class _Flight:
    """A step on its way.

    Attributes:
        round: what it computes.
        sampled: the requests that get a token, in the order of the tokens.
        tokens: gives the tokens when they are there, or raises what the step raised.
        wait: until nothing of it runs any more.
        began: when it was started.
    """

    round: Round
    sampled: tuple[Request, ...]
    tokens: Callable[[], np.ndarray]
    wait: Callable[[], None]
    began: float


@dataclass
class Counters:
    """Sums over all steps so far, by phase. Units: wall-clock microseconds.

    Attributes:
        prefill_steps: steps of the prefill phase.
        prefill_tokens: prompt tokens computed; all of them, none comes from a cache.
        prefill_us: time of these steps, sampling included.
        decode_steps: steps of the decode phase.
        decode_tokens: tokens that decode steps generated.
        decode_us: time of these steps, sampling included.
    """

    prefill_steps: int = 0
    prefill_tokens: int = 0
    prefill_us: float = 0.0
    decode_steps: int = 0
    decode_tokens: int = 0
    decode_us: float = 0.0

    def add(self, done: Round, duration_us: float) -> None:
        """Count a step."""
        if done.phase == "prefill":
            self.prefill_steps += 1
            self.prefill_tokens += done.num_tokens
            self.prefill_us += duration_us
        else:
            self.decode_steps += 1
            self.decode_tokens += done.num_tokens
            self.decode_us += duration_us


def _raised(error: BaseException) -> NoReturn:
    raise error


def _nothing() -> None:
    """What waits for a step that is done."""


class Engine:
    """Generates text with continuous batching; `scheduler` states the policy.

    An answer depends on its prompt, its parameters and its seed alone, as far as the runner's rows
    do not depend on each other. Not safe for use by several threads at once.

    Attributes:
        runner: executes the steps.
        tokenizer: for texts; None if prompts are ids.
        end_ids: tokens that end an answer.
        counters: sums over all steps.
    """

    def __init__(
        self,
        runner: StepRunner,
        tokenizer: Tokenizer | None = None,
        *,
        end_ids: Collection[int] | None = None,
        clock: Clock = time.perf_counter,
    ) -> None:
        """Make an engine without requests.

        Args:
            runner: executes the steps.
            tokenizer: of the model.
            end_ids: tokens that end an answer; None takes the tokenizer's, () runs to max_tokens.
            clock: seconds, ever growing.

        Raises: CapacityError if the runner has no pages.
        """
        default = tokenizer.eos_ids if tokenizer is not None else ()
        self.runner = runner
        self.tokenizer = tokenizer
        self.end_ids = frozenset(default if end_ids is None else end_ids)
        self.counters = Counters()
        self._clock = clock
        self._replicas = Replicas(runner)
        self._num_requests = 0
        self._flight: _Flight | None = None
        self._last_landed = float("-inf")
        samples = isinstance(runner, SamplingRunner) and runner.samples_on_device
        self._sampling = cast(SamplingRunner, runner) if samples else None

    @property
    def plan_hash(self) -> str:
        """Hash of the plan that runs."""
        return self.runner.plan_hash

    @property
    def capacity(self) -> PoolCapacity:
        """What fits into the states at once."""
        return self._replicas.capacity

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs."""
        return self._replicas.has_work

    # --- whole answers ---------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Answer prompts, in their order.

        Args:
            prompts: texts or lists of ids.
            params: for all prompts, or one for each; None is greedy.

        Raises: MetainferError if a prompt or its parameters do not fit, before anything runs;
            CapacityError if a request can never fit; what the runner raises.
        """
        requests = self._requests(prompts, SamplingParams() if params is None else params)
        try:
            for request in requests:
                self._replicas.submit(request)
            while not all(r.is_done for r in requests):
                self._advance(requests)
        finally:
            for request in requests:
                self.cancel(request)
        return [r.completion(self.plan_hash) for r in requests]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> Generator[Piece, None, None]:
        """Answer one prompt piece by piece; the last piece has the completion.

        The request is queued when the first piece is asked for, and dropped when the iterator is
        closed. Several streams of one engine share its steps.

        Raises: MetainferError and CapacityError as `generate`.
        """
        request = self._request(prompt, params or SamplingParams())
        return self._pieces(request)

    def chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> Completion:
        """Answer a chat.

        Raises: MetainferError if there is no tokenizer or the template refuses the messages;
            otherwise as `generate`.
        """
        return self.generate([self._chat_ids(messages)], params or SamplingParams())[0]

    def stream_chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None
    ) -> Generator[Piece, None, None]:
        """Answer a chat piece by piece. Raises: MetainferError as `chat` and `stream`."""
        return self.stream(self._chat_ids(messages), params)

    # --- step by step ----------------------------------------------------------------------------

    def submit(self, prompt: Prompt, params: SamplingParams | None = None) -> Request:
        """Queue a request; `step` moves it, ``request.take()`` gives what is new.

        Raises: MetainferError and CapacityError as `generate`.
        """
        request = self._request(prompt, params or SamplingParams())
        self._replicas.submit(request)
        return request

    def step(self) -> tuple[Request, ...]:
        """Run one step and return the requests that got a token.

        Where the runner chooses tokens on its device and the next step is known already, that one
        is started before this one's tokens are read: the host works beside the device.

        Raises: whatever the step raised. Its requests have it as their ``error`` and their pages
            are free; all others are untouched and go on with the next step.
        """
        flight = self._taken_off()
        return () if flight is None else self._landed(flight)

    def cancel(self, request: Request) -> None:
        """Drop a request and free its pages; one that is done is left as it is."""
        request.is_cancelled = not request.is_done or request.is_cancelled
        self._replicas.remove(request)

    # --- inside ----------------------------------------------------------------------------------

    def _taken_off(self) -> _Flight | None:
        """The step whose tokens come next: one that is on its way, or a new one."""
        flight, self._flight = self._flight, None
        if flight is not None and all(r.is_done for r in flight.sampled):
            # Its sequences ended with the step before: their pages may be others' from now on.
            flight.wait()
            flight = None
        if flight is not None:
            return flight
        found = self._replicas.next_round()
        return None if found is None else self._started(found)

    def _started(self, todo: Round, front: _Flight | None = None) -> _Flight:
        """Start a step; behind one that chooses its tokens, if there is one in front.

        What it raises comes out where its tokens are asked for.
        """
        sampled = tuple(c.request for c in todo.chunks if c.is_sampled)
        began = self._clock()
        for chunk in todo.chunks:
            chunk.request.start()
        try:
            tokens, wait = self._chosen(todo, sampled, front)
        except BaseException as error:
            tokens, wait = partial(_raised, error), _nothing
        return _Flight(todo, sampled, tokens, wait, began)

    def _landed(self, flight: _Flight) -> tuple[Request, ...]:
        """Read a step's tokens, having started the next one if that is known."""
        follows = self._replicas.following(flight.round) if self._sampling is not None else None
        if follows is not None:
            self._flight = self._started(follows, flight)
        try:
            sampled = self._accepted(flight, flight.tokens())
        except BaseException as error:
            for chunk in flight.round.chunks:
                self._fail(chunk.request, error)
            raise
        for request in sampled:
            if request.is_done:
                self._replicas.remove(request)
        now = self._clock()
        self.counters.add(flight.round, (now - max(flight.began, self._last_landed)) * 1e6)
        self._last_landed = now
        return sampled

    def _accepted(self, flight: _Flight, ids: np.ndarray) -> tuple[Request, ...]:
        """Give requests their tokens; one that ended while the step was on its way gets none."""
        for chunk in flight.round.chunks:
            chunk.request.computed = chunk.end
        given = list[Request]()
        for request, token in zip(flight.sampled, ids.tolist(), strict=True):
            if not request.is_done:
                request.accept(token, self.end_ids)
                given.append(request)
        return tuple(given)

    def _chosen(
        self, todo: Round, sampled: Sequence[Request], front: _Flight | None
    ) -> tuple[Callable[[], np.ndarray], Callable[[], None]]:
        """Start a step; what gives a token for each request that gets one, and what waits."""
        names = [f"request {r.number}" for r in sampled]
        if self._sampling is not None:
            draws = [draw_of(r.params, r.noise) for r in sampled]
            sources = None if front is None else [front.sampled.index(r) for r in sampled]
            chosen = self._replicas.start_sampled(self._sampling, todo, draws, names, sources)
            return lambda: chosen.ids()[: len(sampled)], chosen.wait
        ids = self._sampled_here(todo, sampled, names)
        return lambda: ids, _nothing

    def _sampled_here(
        self, todo: Round, sampled: Sequence[Request], names: Sequence[str]
    ) -> np.ndarray:
        """Execute a step and choose its tokens on the host."""
        logits = self._replicas.run(todo)
        if not sampled:
            return np.empty(0, np.int64)
        wanted = (len(sampled), self.runner.vocab_size)
        if logits.shape != wanted:
            raise MetainferError(
                f"the runner returned logits of shape {list(logits.shape)}, wanted {list(wanted)}",
                origin=f"{todo.phase} step of plan {self.plan_hash}",
            )
        return sample(logits, [r.params for r in sampled], [r.noise for r in sampled], names)

    def _fail(self, request: Request, error: BaseException) -> None:
        # A request can have ended in this very step, before another one failed.
        if request.finish_reason is None:
            request.error = error
        self._replicas.remove(request)

    def _advance(self, own: Sequence[Request]) -> None:
        """Run a step; raise what ended one of these requests, in this step or an earlier one."""
        failed = next((r.error for r in own if r.error is not None), None)
        if failed is not None:
            raise failed
        flight = self._taken_off()
        assert flight is not None
        try:
            self._landed(flight)
        except Exception:
            # A step of other requests alone: whoever waits for those meets their error.
            if any(r.error is not None for r in own):
                raise

    def _pieces(self, request: Request) -> Generator[Piece, None, None]:
        try:
            self._replicas.submit(request)
            while True:
                text, tokens = request.take()
                if request.finish_reason is not None:
                    yield Piece(text, tokens, request.completion(self.plan_hash))
                    return
                if tokens:
                    yield Piece(text, tokens)
                    continue
                self._advance([request])
        finally:
            self.cancel(request)

    def _chat_ids(self, messages: Sequence[Message]) -> list[int]:
        if self.tokenizer is None:
            raise MetainferError(
                "a chat needs a tokenizer", advice="give the engine the model's tokenizer"
            )
        return encode_chat(self.tokenizer, messages)

    def _requests(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[Request]:
        if isinstance(prompts, str) or any(isinstance(p, int | np.integer) for p in prompts):
            raise MetainferError(
                "one prompt was given where a list of prompts is wanted",
                text=repr(prompts)[:80],
                advice="write generate([prompt])",
            )
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise MetainferError(
                f"{len(each)} SamplingParams for {len(prompts)} prompts",
                advice="give one for each prompt, or a single one for all",
            )
        return [self._request(p, q) for p, q in zip(prompts, each, strict=True)]

    def _request(self, prompt: Prompt, params: SamplingParams) -> Request:
        if params.stop and self.tokenizer is None:
            raise MetainferError(
                f"stop texts {list(params.stop)} without a tokenizer",
                advice="give the engine the model's tokenizer, or end_ids",
            )
        tokens = self._ids(prompt)
        self._num_requests += 1
        request = Request(self._num_requests, tokens, params, self.tokenizer, self._clock)
        self._replicas.check(request)
        return request

    def _ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise MetainferError(
                    "the prompt is a text, but there is no tokenizer",
                    text=repr(prompt)[:80],
                    advice="give a list of ids, or give the engine the model's tokenizer",
                )
            tokens = self.tokenizer.encode(prompt)
        else:
            tokens = list(prompt)
        if not tokens:
            raise MetainferError(
                "the prompt is empty: it has no token", advice="give at least one token"
            )
        return [self._checked(token, place) for place, token in enumerate(tokens)]

    def _checked(self, token: object, place: int) -> int:
        size = self.runner.vocab_size
        if isinstance(token, int | np.integer) and 0 <= token < size:
            return int(token)
        raise MetainferError(
            f"token {place} of the prompt is {token!r}, outside the vocabulary of {size} ids",
            advice=f"ids are whole numbers from 0 to {size - 1}; check that the tokenizer is "
            "the model's",
        )
