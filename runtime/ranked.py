"""A plan on several ranks: the leader gives orders, every rank runs its part, results come back."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from metainfer.backends.ranks.meeting import meeting
from metainfer.backends.registry import Backends
from metainfer.backends.torch.tensors import torch_dtype
from metainfer.hardware.machine import Machine
from metainfer.ir.errors import MetainferError, RankError, Unsupported
from metainfer.ir.graph import Value
from metainfer.ir.plan import Plan
from metainfer.runtime.executor import Measured, Observer, PhaseExecutor
from metainfer.runtime.graphs import StepGraphs
from metainfer.runtime.model import LoadedModel
from metainfer.runtime.orders import Arrays, Kind, Order, give, take
from metainfer.runtime.ranks import Ranks, wait
from metainfer.runtime.replicas import Given, alike
from metainfer.runtime.self_test import Tested
from metainfer.runtime.step_record import TOKENS
from metainfer.runtime.watch import StepWatch
from metainfer.runtime.weights import Provider

# How the leader runs its part of a step otherwise than at once: timed, or watched.
Run = Callable[[PhaseExecutor, Mapping[str, int]], None]


class RankedModel(LoadedModel):
    """One rank's part of a plan.

    On the leader it is a step runner like a model on one rank; the others `follow`.

    Attributes:
        num_replicas: how many sets of sequences run side by side.
    """

    def __init__(
        self, plan: Plan, machine: Machine, provider: Provider, backends: Backends,
        num_threads: int, ranks: Ranks, tested: Tested,
    ) -> None:  # fmt: skip
        super().__init__(plan, machine, provider, backends, num_threads, ranks, tested.modules)
        self.notes = tested.notes
        self._ranks = ranks
        self._is_over = False
        on_gpu = ranks.device.type == "cuda"
        self._watch = StepWatch(ranks.rank, ranks.limit_s) if on_gpu else None
        self.num_replicas = plan.layout.dp
        last = plan.module(plan.phases[0], plan.layout.pp - 1).main.outputs[0]
        self._logits_dtype = torch_dtype(last.tensor.dtype)
        # Nobody begins a step while another still reads weights.
        ranks.barrier("the loading of weights")

    @property
    def is_leader(self) -> bool:
        """Whether this process gives the orders."""
        return self._ranks.is_leader

    # --- the leader ----------------------------------------------------------------------------

    def run(self, phase: str, tokens: np.ndarray, step: Mapping[str, np.ndarray]) -> np.ndarray:
        """Run one step on the first replica, the others idle. Shapes: as `LoadedModel.run`."""
        idle = [None] * (self.num_replicas - 1)
        return self.run_together(phase, [(tokens, step), *idle])[0]

    def run_together(self, phase: str, steps: Sequence[Given | None]) -> list[np.ndarray]:
        """Run one step on every replica; None lets one idle.

        Shapes: as `LoadedModel.run` for each; no rows for a replica that idles.
        Raises: CapacityError if a step is larger than the plan's; RankError if a rank is gone.
        """
        return self._together(phase, steps)

    def trace(
        self, phase: str, tokens: np.ndarray, step: Mapping[str, np.ndarray]
    ) -> tuple[np.ndarray, list[Measured], dict[str, int]]:
        """Run one step, timing every group of the leader's own part."""
        steps: list[Given | None] = [(tokens, step), *[None] * (self.num_replicas - 1)]
        measured: list[Measured] = []
        env: dict[str, int] = {}

        def run(executor: PhaseExecutor, sizes: Mapping[str, int]) -> None:
            measured.extend(executor.trace(sizes))
            env.update(sizes)

        return self._together(phase, steps, run)[0], measured, env

    def observe(
        self,
        phase: str,
        tokens: np.ndarray,
        step: Mapping[str, np.ndarray],
        watched: Mapping[str, Value],
        seen: Observer,
    ) -> np.ndarray:
        """Run one step, showing values on the way; for layouts of tensor parallelism alone.

        Raises: Unsupported if the leader does not see all layers and all sequences.
        """
        layout = self.plan.layout
        if layout.pp > 1 or layout.dp > 1:
            raise Unsupported(
                f"rank 0 sees only a part of a plan of {layout}",
                advice="compile for watching with --tp N alone, or for one rank",
            )

        def run(executor: PhaseExecutor, sizes: Mapping[str, int]) -> None:
            executor.observe(sizes, watched, seen)

        return self._together(phase, [(tokens, step)], run)[0]

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Run a module on all ranks. Raises: as `LoadedModel.__call__`."""
        env = self._call_sizes(inputs)
        self._give(Order("call", "call", ({str(i): t for i, t in enumerate(inputs)},)))
        return self._call(inputs, env)

    def _together(
        self, phase: str, steps: Sequence[Given | None], run: Run | None = None
    ) -> list[np.ndarray]:
        padded = alike(steps) if self.num_replicas > 1 else _all(steps)
        # A graph's warming up is a meeting: who replays is said by the order, to all alike.
        is_replayed = phase == "decode" and run is None and self._graphs is not None
        if is_replayed:
            padded = [self._in_bucket(*given) for given in padded]
        self._give_step("replay" if is_replayed else "step", phase, padded)
        try:
            with self._watched(phase, padded[0]):
                if is_replayed:
                    own = self._replayed_stage(padded[0])
                else:
                    own = self._stage(phase, padded[0], run or PhaseExecutor.run)
                return self._collected(steps, padded, own)
        except BaseException:
            # The others may be in the middle of the step, where no order reaches them.
            self._is_over = True
            raise

    def _give_step(self, kind: Kind, phase: str, padded: Sequence[Given]) -> None:
        for given in padded:
            self._sized(phase, *given)
        self._give(Order(kind, phase, tuple(_arrays(*given) for given in padded)))

    def _give(self, order: Order) -> None:
        if self._is_over or not self.is_leader:
            raise MetainferError(
                "the ranks take no more orders" if self.is_leader else "only rank 0 gives orders",
                advice="in all ranks but the first call follow(); after an error load anew",
            )
        try:
            give(self._ranks, order)
        except RankError:
            self._is_over = True
            raise

    def _collected(
        self, steps: Sequence[Given | None], padded: Sequence[Given], own: torch.Tensor | None
    ) -> list[np.ndarray]:
        """Logits of every replica, padding cut off."""
        found = []
        for replica, (given, (_, step)) in enumerate(zip(steps, padded, strict=True)):
            rank = self._ranks.answering(replica)
            rows = len(step["sample_rows"])
            if rank == self._ranks.rank:
                assert own is not None
                logits = own
            else:
                logits = self._answer_of(rank, rows)
            wanted = len(given[1]["sample_rows"]) if given is not None else 0
            found.append(self._readback.numbers(logits[:wanted], replica))
        return found

    def _answer_of(self, rank: int, rows: int) -> torch.Tensor:
        """Logits that another rank hands over."""
        shape, dtype = (rows, self.vocab_size), self._logits_dtype
        logits = torch.empty(shape, dtype=dtype, device=self._ranks.device)
        limit_s = self._ranks.limit_s * self._ranks.layout.pp
        with meeting(f"taking logits of rank {rank}", 0, (0, rank), limit_s):
            if self._ranks.answers is self._ranks.control:
                wait(dist.irecv(logits, src=rank, group=self._ranks.control), limit_s)
            else:
                dist.recv(logits, src=rank, group=self._ranks.answers)
        return logits

    # --- every rank ----------------------------------------------------------------------------

    def follow(self) -> None:
        """Do what the leader orders until it ends; the leader itself returns at once.

        Raises: RankError if the leader, or a rank that this one meets, is gone.
        """
        while not self.is_leader and not self._is_over:
            try:
                self._obey(take(self._ranks))
            except BaseException:
                self._is_over = True
                raise

    def _obey(self, order: Order) -> None:
        if order.kind == "stop":
            self._is_over = True
        elif order.kind == "call":
            inputs = tuple(order.arrays[0].values())
            self._call(inputs, self._call_sizes(inputs))
        else:
            given = _given(order.arrays[self._ranks.replica])
            with self._watched(order.phase, given):
                if order.kind == "replay":
                    self._answer(self._replayed_stage(given))
                else:
                    self._answer(self._stage(order.phase, given, PhaseExecutor.run))

    def _answer(self, logits: torch.Tensor | None) -> None:
        if logits is not None and self._ranks.is_answering:
            with self._waiting("handing logits to rank 0", 0):
                dist.send(logits.contiguous(), dst=0, group=self._ranks.answers)
        if self._ranks.device.type == "cuda":
            # The step record's buffer is written again by the next order.
            torch.cuda.current_stream().synchronize()

    def _watched(self, phase: str, given: Given) -> AbstractContextManager[None]:
        if self._watch is None:
            return nullcontext()
        return self._watch.step((phase, *self._sized(phase, *given)[1].values()))

    def _stage(self, phase: str, given: Given, run: Run) -> torch.Tensor | None:
        """Run this rank's stage of a step; its last stage returns the logits."""
        tokens, step = given
        executor, env = self._sized(phase, tokens, step)
        self._storage.set_step(step)
        if self._ranks.before is None:
            executor.input(0, env).copy_(torch.from_numpy(np.ascontiguousarray(tokens, np.int32)))
        else:
            self._take([executor.input(i, env) for i in range(len(executor.flat.inputs))])
        run(executor, env)
        return self._passed_on([executor.output(i, env) for i in range(len(executor.flat.outputs))])

    def _replayed_stage(self, given: Given) -> torch.Tensor | None:
        """Replay this rank's stage of a decode step, which is padded up to a bucket."""
        assert self._graphs is not None
        tokens, step = given
        _, env = self._sized("decode", tokens, step)
        self._storage.set_step({**step, TOKENS: tokens})
        made = self._graphs.step(env, lambda: self._capturable(env))
        if self._ranks.before is not None:
            self._take(made.inputs)
        self._graphs.run(env)
        return self._passed_on(made.outputs)

    def _given_to(
        self, held: Sequence[torch.Tensor], env: Mapping[str, int]
    ) -> tuple[torch.Tensor, ...]:
        if self._ranks.before is None:
            return super()._given_to(held, env)
        return tuple(torch.empty_like(value) for value in held)

    def _captures(self) -> StepGraphs:
        return StepGraphs(agree=self._agreed)

    def _agreed(self, refused: str) -> str:
        """Why this rank, or one that it meets, does not capture steps; "" if all do."""
        is_refused = self._ranks.any_of_stage(refused != "")
        return refused or ("another rank cannot capture its part" if is_refused else "")

    def _take(self, values: Sequence[torch.Tensor]) -> None:
        """Take a stage's inputs from the stage before."""
        peer = self._ranks.rank - self._ranks.layout.stage_ranks
        with self._waiting(f"passing activations from rank {peer}", peer):
            for value in values:
                dist.recv(value, src=peer, group=self._ranks.before)

    def _passed_on(self, values: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Hand a stage's outputs to the next stage; those of the last one are the logits."""
        if self._ranks.after is None:
            return values[0]
        peer = self._ranks.rank + self._ranks.layout.stage_ranks
        with self._waiting(f"passing activations to rank {peer}", peer):
            for value in values:
                dist.send(value.contiguous(), dst=peer, group=self._ranks.after)
        return None

    def _waiting(self, what: str, peer: int) -> Any:
        return meeting(what, self._ranks.rank, (self._ranks.rank, peer), self._ranks.limit_s)

    def close(self) -> None:
        """Tell the other ranks to end, and leave them."""
        if self.is_leader and not self._is_over:
            give(self._ranks, Order("stop"))
        self._is_over = True
        # A captured graph holds its communicators, which would wait for it when they end.
        self._graphs = None
        if self._watch is not None:
            self._watch.close()
        self._ranks.close()

    def __exit__(self, *raised: object) -> None:
        """Close the model; where ranks failed there is nobody to tell."""
        self._is_over = self._is_over or isinstance(raised[1], RankError)
        self.close()


def _all(steps: Sequence[Given | None]) -> list[Given]:
    return [given for given in steps if given is not None]


def _arrays(tokens: np.ndarray, step: Mapping[str, np.ndarray]) -> Arrays:
    named = {TOKENS: tokens, **step}
    return {
        name: torch.from_numpy(np.ascontiguousarray(data, np.int32)) for name, data in named.items()
    }


def _given(arrays: Arrays) -> Given:
    step = {name: data.numpy() for name, data in arrays.items()}
    return step.pop(TOKENS), step
