"""A plan on several ranks: the leader gives orders, every rank runs its part, results come back."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from metainfer.backends.ranks.meeting import meeting
from metainfer.backends.registry import Backends
from metainfer.hardware.machine import Machine
from metainfer.ir.errors import MetainferError, RankError, Unsupported
from metainfer.ir.graph import Value
from metainfer.ir.plan import Plan
from metainfer.runtime.executor import Measured, Observer, PhaseExecutor
from metainfer.runtime.model import LoadedModel
from metainfer.runtime.orders import Arrays, Order, give, take
from metainfer.runtime.ranks import Ranks, wait
from metainfer.runtime.replicas import Given, alike
from metainfer.runtime.self_test import Tested
from metainfer.runtime.watch import StepWatch
from metainfer.runtime.weights import Provider

_TOKENS = "tokens"
# How the leader runs its part of a step: at once, timed, or watched.
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
        return self._together(phase, steps, PhaseExecutor.run)

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

    def _together(self, phase: str, steps: Sequence[Given | None], run: Run) -> list[np.ndarray]:
        padded = self._give_step(phase, steps)
        try:
            with self._watched(phase, padded[0]):
                return self._collected(steps, padded, self._stage(phase, padded[0], run))
        except BaseException:
            # The others may be in the middle of the step, where no order reaches them.
            self._is_over = True
            raise

    def _give_step(self, phase: str, steps: Sequence[Given | None]) -> list[Given]:
        padded = alike(steps) if self.num_replicas > 1 else _all(steps)
        for given in padded:
            self._sized(phase, *given)
        self._give(Order("step", phase, tuple(_arrays(*given) for given in padded)))
        return padded

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
                logits = own.float().cpu()
            else:
                logits = torch.empty((rows, self.vocab_size), dtype=torch.float32)
                limit_s = self._ranks.limit_s * self._ranks.layout.pp
                with meeting(f"taking logits of rank {rank}", 0, (0, rank), limit_s):
                    group = self._ranks.control
                    wait(dist.irecv(logits, src=rank, group=group), limit_s)
            wanted = len(given[1]["sample_rows"]) if given is not None else 0
            found.append(logits[:wanted].numpy())
        return found

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
                self._obey_step(order.phase, given)

    def _obey_step(self, phase: str, given: Given) -> None:
        logits = self._stage(phase, given, PhaseExecutor.run)
        if logits is not None and self._ranks.answers:
            with self._waiting("handing logits to rank 0", 0):
                dist.send(logits.float().cpu().contiguous(), dst=0, group=self._ranks.control)
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
            self._pass_on(executor, env, is_sender=False)
        run(executor, env)
        if self._ranks.after is None:
            return executor.output(0, env)
        self._pass_on(executor, env, is_sender=True)
        return None

    def _pass_on(self, executor: PhaseExecutor, env: Mapping[str, int], *, is_sender: bool) -> None:
        """Hand a stage's outputs to the next stage, or take its inputs from the one before."""
        ranks, size = self._ranks, self._ranks.layout.stage_ranks
        if is_sender:
            peer, values, at, group = ranks.rank + size, executor.flat.outputs, "to", ranks.after
        else:
            peer, values, at, group = ranks.rank - size, executor.flat.inputs, "from", ranks.before
        with self._waiting(f"passing activations {at} rank {peer}", peer):
            for index in range(len(values)):
                if is_sender:
                    dist.send(executor.output(index, env).contiguous(), dst=peer, group=group)
                else:
                    dist.recv(executor.input(index, env), src=peer, group=group)

    def _waiting(self, what: str, peer: int) -> Any:
        return meeting(what, self._ranks.rank, (self._ranks.rank, peer), self._ranks.limit_s)

    def close(self) -> None:
        """Tell the other ranks to end, and leave them."""
        if self.is_leader and not self._is_over:
            give(self._ranks, Order("stop"))
        self._is_over = True
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
    named = {_TOKENS: tokens, **step}
    return {
        name: torch.from_numpy(np.ascontiguousarray(data, np.int32)) for name, data in named.items()
    }


def _given(arrays: Arrays) -> Given:
    step = {name: data.numpy() for name, data in arrays.items()}
    return step.pop(_TOKENS), step
