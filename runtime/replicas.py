"""Replicas: sets of sequences that run side by side, each with its own queue and pages.

All replicas run the same phase in a step, at the same sizes: their tokens meet in the experts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from metainfer.backends.triton.sampling import Draw
from metainfer.runtime.requests import Request
from metainfer.runtime.runner import (
    Chosen,
    ReplicaRunner,
    SamplingRunner,
    StepRunner,
)
from metainfer.runtime.scheduler import (
    Batch,
    Chunk,
    Phase,
    PoolCapacity,
    Scheduler,
    build_step,
    pad_step,
)

# Tokens of a step and its record.
Given = tuple[np.ndarray, Mapping[str, np.ndarray]]


@dataclass(frozen=True)
class Round:
    """What one step computes on all replicas.

    Attributes:
        phase: of all of them.
        batches: of each, None where it idles.
    """

    phase: Phase
    batches: tuple[Batch | None, ...]

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """The chunks of all replicas."""
        return tuple(c for batch in self.batches if batch is not None for c in batch.chunks)

    @property
    def num_tokens(self) -> int:
        """Tokens of the step, padding apart."""
        return sum(c.count for c in self.chunks)


class Replicas:
    """The queues of all replicas.

    A request goes to the replica that has the least to do, and stays there.

    Args:
        runner: executes the steps; one replica unless it says otherwise.

    Attributes:
        schedulers: one for each replica.
    """

    def __init__(self, runner: StepRunner) -> None:
        count = runner.num_replicas if isinstance(runner, ReplicaRunner) else 1
        self._runner = runner
        self.schedulers = tuple(Scheduler(runner) for _ in range(count))
        self._last: Phase = "decode"

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs."""
        return any(s.has_work for s in self.schedulers)

    @property
    def capacity(self) -> PoolCapacity:
        """What fits into the states of all replicas at once; a sequence lies in one of them."""
        one, count = self.schedulers[0].capacity, len(self.schedulers)
        return PoolCapacity(
            one.tokens * count, one.context, one.sequences * count, one.pinned_tokens
        )

    def check(self, request: Request) -> None:
        """Make sure that a request can ever run. Raises: CapacityError with the numbers."""
        self.schedulers[0].check(request)

    def submit(self, request: Request) -> None:
        """Queue a request. Raises: CapacityError if it can never run."""
        min(self.schedulers, key=lambda s: s.load).submit(request)

    def remove(self, request: Request) -> None:
        """Forget a request that ended or is not wanted any more, and free its pages."""
        for scheduler in self.schedulers:
            scheduler.remove(request)

    def next_round(self) -> Round | None:
        """Return what the next step computes, None if there is nothing to do.

        Phases alternate while both are wanted by any replica.
        """
        wanted = frozenset[Phase]().union(*(s.admit() for s in self.schedulers))
        if not wanted:
            return None
        is_turn = self._last == "decode" or "decode" not in wanted
        self._last = "prefill" if "prefill" in wanted and is_turn else "decode"
        return Round(self._last, tuple(s.batch(self._last) for s in self.schedulers))

    def run(self, round_: Round) -> np.ndarray:
        """Execute a step; logits of the sampled rows of all replicas, one behind the other.

        Where no prompt of a replica is complete its last row is sampled, and left out here.
        """
        steps = [
            None if batch is None else build_step(batch, scheduler.pages)
            for batch, scheduler in zip(round_.batches, self.schedulers, strict=True)
        ]
        if isinstance(self._runner, ReplicaRunner):
            found = self._runner.run_together(round_.phase, steps)
        else:
            found = [self._runner.run(round_.phase, *one) for one in steps if one is not None]
        kept = [
            logits
            for logits, batch in zip(found, round_.batches, strict=True)
            if batch is not None and any(c.is_sampled for c in batch.chunks)
        ]
        if len(kept) == 1:
            return kept[0]
        return np.concatenate(kept) if kept else np.empty((0, self._runner.vocab_size), np.float32)

    def following(self, round_: Round) -> Round | None:
        """The step behind one that still runs, where it is known before that one's tokens are.

        None where it is not, and for several replicas.
        """
        if len(self.schedulers) != 1:
            return None
        (scheduler,), (running,) = self.schedulers, round_.batches
        batch = None if running is None else scheduler.following(running)
        return None if batch is None else Round("decode", (batch,))

    def start_sampled(
        self, runner: SamplingRunner, round_: Round, draws: Sequence[Draw], names: Sequence[str],
        sources: Sequence[int] | None = None,
    ) -> Chosen:  # fmt: skip
        """Start a step of the one replica there is; the tokens that its runner will choose.

        Where no prompt is complete its last row is sampled, and nobody reads what is chosen.
        """
        (batch,), (scheduler,) = round_.batches, self.schedulers
        assert batch is not None
        tokens, step = build_step(batch, scheduler.pages)
        idle_rows = [Draw()] * (len(step["sample_rows"]) - len(draws))
        rows = None if sources is None else np.array(sources, np.int32)
        all_draws = [*draws, *idle_rows]
        return runner.start_sampled(round_.phase, tokens, step, all_draws, names, rows)


def alike(steps: Sequence[Given | None]) -> list[Given]:
    """The steps padded to the largest of each size; a replica that idles gets padding alone."""
    given = [one if one is not None else idle() for one in steps]
    sizes = [_sizes(one) for one in given]
    tokens, sequences, pages, samples = (max(column) for column in zip(*sizes, strict=True))
    return [
        (
            np.pad(ids, (0, tokens - len(ids))),
            pad_step(step, tokens, sequences, num_pages=pages, num_samples=samples),
        )
        for ids, step in given
    ]


def _sizes(given: Given) -> tuple[int, int, int, int]:
    ids, step = given
    return len(ids), len(step["lengths"]), step["pages"].shape[1], len(step["sample_rows"])


def idle() -> Given:
    """A step of nothing: one padded row and one empty sequence, which write to the null page."""
    empty = {
        "positions": [0], "slots": [0], "starts": [0, 0], "lengths": [0], "pages": [[0]],
        "sample_rows": [0], "num_valid": [0, 0],
    }  # fmt: skip
    return np.zeros(1, np.int32), {name: np.array(v, np.int32) for name, v in empty.items()}
