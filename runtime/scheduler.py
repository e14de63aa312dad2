"""Decides what each step computes, and lays it out as a step record.

The policy, in three rules that exclude deadlock and starvation:

- Admission in order of arrival. A request is admitted when a sequence slot is free and the pages
  for its prompt and its longest answer can be reserved, so a request that runs always ends; none
  overtakes another that waits for pages.
- A step is either a prefill or a decode. While both are wanted they alternate, so a sequence waits
  for at most one prefill step between two of its tokens, and a prompt for at most one decode step.
- A decode step takes every sequence that has its prompt computed; a prefill step is filled with
  prompts in order of admission up to max_tokens, and the last one is cut there if need be.

Nothing is computed twice: preemption would recompute states by other kernels, and then an answer
could depend on what else was running.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from metainfer.ir.errors import CapacityError, MetainferError
from metainfer.ir.step import NULL_PAGE
from metainfer.runtime.pages import PageAllocator
from metainfer.runtime.requests import Request
from metainfer.runtime.runner import StepRunner

Phase = Literal["prefill", "decode"]
Step = dict[str, np.ndarray]

# A pool that a few of the shortest requests exhaust has pages that are too large.
_WASTE_LIMIT = 0.05


@dataclass(frozen=True)
class Chunk:
    """The next tokens of one request.

    Attributes:
        request: whose they are.
        start: place of the first in its sequence.
        count: how many.
        is_ahead: whether its one token is not known yet: the step in front chooses it.
    """

    request: Request
    start: int
    count: int
    is_ahead: bool = False

    @property
    def end(self) -> int:
        """Tokens in the request's state after the step."""
        return self.start + self.count

    @property
    def is_sampled(self) -> bool:
        """Whether the step computes the last known token, so that the next can be sampled."""
        return self.is_ahead or self.end == len(self.request.tokens)


@dataclass(frozen=True)
class Batch:
    """What one step computes."""

    phase: Phase
    chunks: tuple[Chunk, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of the step."""
        return sum(c.count for c in self.chunks)


@dataclass(frozen=True)
class PoolCapacity:
    """What fits into the states at once.

    Attributes:
        tokens: of all sequences together.
        context: of one sequence.
        sequences: that run at once.
        pinned_tokens: room that the shortest request takes.
    """

    tokens: int
    context: int
    sequences: int
    pinned_tokens: int

    @property
    def pinned_share(self) -> float:
        """Part of the pool that the shortest request takes."""
        return self.pinned_tokens / self.tokens

    @property
    def is_wasteful(self) -> bool:
        """Whether even the shortest request takes more than a twentieth of the pool."""
        return self.pinned_share > _WASTE_LIMIT


class Scheduler:
    """Queues of waiting and running requests of one replica, and the pages of those that run.

    Which phase is next is decided for all replicas together: `runtime.replicas`.
    """

    def __init__(self, runner: StepRunner) -> None:
        self.pages = PageAllocator(runner.num_pages, runner.page_size)
        self._max_tokens = runner.max_tokens
        self._max_sequences = runner.max_sequences
        self._max_context = runner.max_context
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self._waiting or self._running)

    @property
    def capacity(self) -> PoolCapacity:
        """What fits into the states at once."""
        return PoolCapacity(
            tokens=self.pages.capacity,
            context=min(self._max_context, self.pages.capacity),
            sequences=self._max_sequences,
            pinned_tokens=self.pages.page_size,
        )

    def check(self, request: Request) -> None:
        """Make sure that a request can ever run.

        Raises: CapacityError with the numbers.
        """
        capacity = self.capacity.context
        if request.most_tokens <= capacity:
            return
        if self._max_context <= self.pages.capacity:
            limit = f"the plan's max_context of {capacity} tokens"
            remedy = "compile with a larger max_context"
        else:
            limit = f"the {capacity} tokens of all {self.pages.num_pages - 1} pages"
            remedy = "compile with a larger memory_fraction or a smaller kv type"
        prompt = request.prompt_tokens
        if prompt > capacity:
            raise CapacityError(
                f"the prompt is longer than the capacity: {prompt} tokens, more than {limit}",
                advice=f"shorten the prompt, or {remedy}",
            )
        raise CapacityError(
            f"a prompt of {prompt} tokens and max_tokens = {request.params.max_tokens} need "
            f"{request.most_tokens} tokens of state, more than {limit}",
            advice=f"set max_tokens to at most {capacity - prompt + 1}, or {remedy}",
        )

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises: CapacityError if it can never run.
        """
        self.check(request)
        request.queue()
        self._waiting.append(request)

    @property
    def load(self) -> int:
        """Tokens that its requests may come to hold: what is still to be done, roughly."""
        return sum(r.most_tokens for r in (*self._waiting, *self._running))

    def admit(self) -> frozenset[Phase]:
        """Let requests in that fit; returns the phases for which there is work now."""
        while self._waiting and len(self._running) < self._max_sequences:
            request = self._waiting[0]
            if not self.pages.fits(request.most_tokens):
                break
            self.pages.allocate(request.number, request.most_tokens)
            self._running.append(self._waiting.popleft())
        return frozenset("prefill" if r.is_prefilling else "decode" for r in self._running)

    def batch(self, phase: Phase) -> Batch | None:
        """What a step of that phase computes, None if there is nothing to do."""
        if phase == "prefill":
            chunks = self._fill([r for r in self._running if r.is_prefilling])
        else:
            decoding = (r for r in self._running if not r.is_prefilling)
            chunks = tuple(Chunk(r, r.computed, 1) for r in decoding)
        return Batch(phase, chunks) if chunks else None

    def following(self, batch: Batch) -> Batch | None:
        """The decode step behind one that still runs, if that is certain to be a decode step.

        It takes the sequences that do not end with that step by their number of tokens; what it
        computes for one that ends there by its text is dropped. None while a prompt is wanted.
        """
        if batch.phase != "decode" or any(r.is_prefilling for r in self._running):
            return None
        if self._waiting and len(self._running) < self._max_sequences:
            return None
        chunks = tuple(
            Chunk(c.request, c.end, 1, is_ahead=True)
            for c in batch.chunks
            if not c.request.is_done and not c.request.ends_with_next
        )
        return Batch("decode", chunks) if chunks else None

    def remove(self, request: Request) -> None:
        """Forget a request that ended or is not wanted any more, and free its pages."""
        if request in self._running:
            self._running.remove(request)
            self.pages.free(request.number)
        elif request in self._waiting:
            self._waiting.remove(request)

    def _fill(self, prefilling: list[Request]) -> tuple[Chunk, ...]:
        chunks: list[Chunk] = []
        room = self._max_tokens
        for request in prefilling:
            count = min(request.prompt_tokens - request.computed, room)
            if count == 0:
                break
            chunks.append(Chunk(request, request.computed, count))
            room -= count
        return tuple(chunks)


def build_step(batch: Batch, pages: PageAllocator) -> tuple[np.ndarray, Step]:
    """Lay a batch out as the step's tokens and its record; takes the pages it needs.

    A step must sample a row: where no prompt is complete it is the last one, whose logits nobody
    reads.

    Shapes: -> tokens int32 [T], fields as in `ir.step`.
    """
    chunks = batch.chunks
    tables = [pages.ensure(c.request.number, c.end) for c in chunks]
    counts = np.array([c.count for c in chunks], np.int32)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    page_table = np.full((len(chunks), max(map(len, tables))), NULL_PAGE, np.int32)
    for b, table in enumerate(tables):
        page_table[b, : len(table)] = table
    tokens = [t for c in chunks for t in _known(c)]
    # Of each row: its sequence, and its place there.
    owners = np.repeat(np.arange(len(chunks)), counts)
    firsts = np.array([c.start for c in chunks], np.int32) - starts[:-1]
    positions = np.arange(starts[-1], dtype=np.int32) + firsts[owners]
    page_of_row = page_table[owners, positions // pages.page_size]
    slots = page_of_row * np.int32(pages.page_size) + positions % np.int32(pages.page_size)
    sampled = [starts[b + 1] - 1 for b, c in enumerate(chunks) if c.is_sampled]
    step = {
        "positions": positions,
        "slots": slots,
        "starts": starts,
        "lengths": np.array([c.end for c in chunks], np.int32),
        "pages": page_table,
        "sample_rows": np.array(sampled or [starts[-1] - 1], np.int32),
        "num_valid": np.array([starts[-1], len(chunks)], np.int32),
    }
    return np.array(tokens, np.int32), step


def _known(chunk: Chunk) -> list[int]:
    """Tokens of a chunk; 0 stands for one that is not known yet."""
    return [0] if chunk.is_ahead else chunk.request.tokens[chunk.start : chunk.end]


def pad_step(
    step: Mapping[str, np.ndarray],
    num_tokens: int,
    num_sequences: int,
    *,
    num_pages: int | None = None,
    num_samples: int | None = None,
) -> Step:
    """Enlarge a step record to the sizes of a bucket, such as those of a captured graph.

    Padded rows stand at position 0 and write to the null page; padded sequences are empty, and
    padded samples repeat row 0. Pad the tokens with any id of the vocabulary.

    Args:
        step: a record that is not padded.
        num_tokens: T of the bucket.
        num_sequences: B of the bucket.
        num_pages: P of the bucket; None keeps it.
        num_samples: R of the bucket; None keeps it.

    Raises: MetainferError if the step is larger than the bucket.
    """
    pages, rows = step["pages"], step["sample_rows"]
    wanted = {
        "tokens": (len(step["positions"]), num_tokens),
        "sequences": (len(step["lengths"]), num_sequences),
        "pages": (pages.shape[1], pages.shape[1] if num_pages is None else num_pages),
        "samples": (len(rows), len(rows) if num_samples is None else num_samples),
    }
    for what, (size, bucket) in wanted.items():
        if size > bucket:
            raise MetainferError(
                f"a step of {size} {what} does not fit a bucket of {bucket}",
                advice="choose a larger bucket",
            )
    more = {what: bucket - size for what, (size, bucket) in wanted.items()}
    # Slot 0 is the null page's first.
    fill = NULL_PAGE
    return {
        "positions": np.pad(step["positions"], (0, more["tokens"])),
        "slots": np.pad(step["slots"], (0, more["tokens"]), constant_values=fill),
        "starts": np.pad(step["starts"], (0, more["sequences"]), mode="edge"),
        "lengths": np.pad(step["lengths"], (0, more["sequences"])),
        "pages": np.pad(pages, ((0, more["sequences"]), (0, more["pages"])), constant_values=fill),
        "sample_rows": np.pad(rows, (0, more["samples"])),
        "num_valid": step["num_valid"],
    }
