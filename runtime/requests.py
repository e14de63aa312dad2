"""Requests: what is asked for, how far it has come, and what is handed back."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Literal

from metainfer.runtime.noise import Noise
from metainfer.runtime.sampling import SamplingParams, StopMatcher
from metainfer.runtime.tokenizer import IncrementalDecoder, Tokenizer

FinishReason = Literal["stop", "length"]
Clock = Callable[[], float]
_US = 1e6


@dataclass(frozen=True)
class Timings:
    """When a request's tokens came. Units: microseconds of wall-clock time.

    Other requests share the steps, so these are what its user saw, not what it cost; the engine's
    `Counters` have the sums of all steps. No prompt is ever taken from a cache.

    Attributes:
        queued_us: from submission to its first step.
        prefill_us: from its first step to its first token.
        token_us: for each generated token, from submission to the token.
    """

    queued_us: float
    prefill_us: float
    token_us: tuple[float, ...]

    @property
    def first_token_us(self) -> float:
        """From submission to the first token."""
        return self.token_us[0]

    @property
    def decode_us(self) -> float:
        """From the first token to the last."""
        return self.token_us[-1] - self.token_us[0]

    @property
    def per_token_us(self) -> float | None:
        """Mean time of a token after the first; None if there is only the first."""
        after_first = len(self.token_us) - 1
        return self.decode_us / after_first if after_first else None


@dataclass(frozen=True)
class Completion:
    """The answer to a request.

    Attributes:
        text: the answer, without the stop text; "" without a tokenizer.
        token_ids: generated tokens, an end token included.
        finish_reason: "stop" at an end token or a stop text, "length" at max_tokens.
        stop_text: the stop text that ended the answer, if one did.
        prompt_tokens: tokens of the prompt.
        generated_tokens: tokens sampled, an end token included.
        timings: when the tokens came.
        plan_hash: of the plan that ran.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_text: str | None
    prompt_tokens: int
    generated_tokens: int
    timings: Timings
    plan_hash: str


@dataclass(frozen=True)
class Piece:
    """A part of a streamed answer.

    Attributes:
        text: what is new and certain; may be "" while a character or a stop text is incomplete.
        token_ids: the tokens that came since the last piece.
        completion: the whole answer, in the last piece only.
    """

    text: str
    token_ids: tuple[int, ...]
    completion: Completion | None = None


class _Answer:
    """The text of an answer as its tokens come, cut at the first stop text."""

    def __init__(self, tokenizer: Tokenizer | None, stops: tuple[str, ...]) -> None:
        self._decoder = IncrementalDecoder(tokenizer) if tokenizer is not None else None
        self._matcher = StopMatcher(stops)
        self.parts: list[str] = []

    @property
    def matched(self) -> str | None:
        return self._matcher.matched

    def push(self, token: int) -> None:
        if self._decoder is not None:
            self._add(self._matcher.push(self._decoder.push(token)))

    def finish(self) -> None:
        if self._decoder is not None:
            self._add(self._matcher.push(self._decoder.flush()))
            self._add(self._matcher.flush())

    def _add(self, text: str) -> None:
        if text:
            self.parts.append(text)


@dataclass(eq=False)
class Request:
    """A request on its way.

    Attributes:
        number: of the request; unique in its engine.
        prompt_tokens: how many of the tokens are the prompt's.
        params: how to sample and when to stop.
        tokens: ids of the prompt, then those generated.
        computed: tokens whose state is written.
        finish_reason: set when the answer is complete.
        error: what ended the request without an answer, if something did.
        is_cancelled: whether it was dropped before it had its answer.
    """

    number: int
    tokens: list[int]
    params: SamplingParams
    tokenizer: Tokenizer | None
    clock: Clock
    computed: int = 0
    finish_reason: FinishReason | None = None
    error: BaseException | None = None
    is_cancelled: bool = False
    prompt_tokens: int = field(init=False)
    noise: Noise = field(init=False)

    def __post_init__(self) -> None:
        """Start the random numbers and the text."""
        self.prompt_tokens = len(self.tokens)
        self.noise = self.params.noise()
        self._answer = _Answer(self.tokenizer, self.params.stop)
        self._submitted: float | None = None
        self._started: float | None = None
        self._token_times: list[float] = []
        self._parts_taken = 0
        self._tokens_taken = self.prompt_tokens

    @property
    def most_tokens(self) -> int:
        """Tokens in its state when it has its longest answer: the last token is never fed."""
        return self.prompt_tokens + self.params.max_tokens - 1

    @property
    def is_prefilling(self) -> bool:
        """Whether a part of the prompt is not computed yet."""
        return self.computed < self.prompt_tokens

    @property
    def ends_with_next(self) -> bool:
        """Whether its next token is its last, whatever it is."""
        return self.generated_tokens + 1 >= self.params.max_tokens

    @property
    def is_done(self) -> bool:
        """Whether nothing more will come: a complete answer, an error, or cancelled."""
        ended = self.finish_reason is not None or self.error is not None
        return ended or self.is_cancelled

    @property
    def generated_tokens(self) -> int:
        """Tokens sampled so far."""
        return len(self.tokens) - self.prompt_tokens

    def queue(self) -> None:
        """Note the time of submission."""
        self._submitted = self.clock()

    def start(self) -> None:
        """Note the time of the first step."""
        if self._started is None:
            self._started = self.clock()

    def accept(self, token: int, end_ids: Collection[int]) -> None:
        """Append a sampled token and see whether the answer is complete."""
        self.tokens.append(token)
        self._token_times.append(self.clock())
        if token in end_ids:
            self._finish("stop")
            return
        self._answer.push(token)
        if self._answer.matched is not None:
            self._finish("stop")
        elif self.generated_tokens >= self.params.max_tokens:
            self._finish("length")

    def _finish(self, reason: FinishReason) -> None:
        self._answer.finish()
        # Text held back to the end can still complete a stop text.
        self.finish_reason = "stop" if self._answer.matched is not None else reason

    def take(self) -> tuple[str, tuple[int, ...]]:
        """Return the text and the tokens that came since the last call."""
        text = "".join(self._answer.parts[self._parts_taken :])
        tokens = tuple(self.tokens[self._tokens_taken :])
        self._parts_taken, self._tokens_taken = len(self._answer.parts), len(self.tokens)
        return text, tokens

    def completion(self, plan_hash: str) -> Completion:
        """Return the answer of a request that has its finish reason."""
        assert self.finish_reason is not None
        return Completion(
            text="".join(self._answer.parts),
            token_ids=tuple(self.tokens[self.prompt_tokens :]),
            finish_reason=self.finish_reason,
            stop_text=self._answer.matched,
            prompt_tokens=self.prompt_tokens,
            generated_tokens=self.generated_tokens,
            timings=self._timings(),
            plan_hash=plan_hash,
        )

    def _timings(self) -> Timings:
        assert self._submitted is not None
        assert self._started is not None
        submitted = self._submitted
        return Timings(
            queued_us=(self._started - submitted) * _US,
            prefill_us=(self._token_times[0] - self._started) * _US,
            token_us=tuple((t - submitted) * _US for t in self._token_times),
        )
