"""The ranks of a plan: a process joins them, they agree on the plan, and meet in groups.

A process is one rank, started by torchrun or by `metainfer run --nproc N`. Its number along each
axis follows from the plan's layout: stages are outermost, then replicas, then tensor parallelism.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from metainfer.backends.ranks.context import RankContext, Team, set_context
from metainfer.backends.ranks.meeting import meeting
from metainfer.hardware.topology import Topology
from metainfer.ir.errors import PlanError
from metainfer.ir.simulate import axis_groups, axis_numbers
from metainfer.ir.strategy import Layout
from metainfer.runtime.watch import FIRST_TIMES

JOIN_LIMIT_S = 300.0
LOAD_LIMIT_S = 3600.0
# Waiting for work is no fault: whoever ends, or is killed, closes his connections.
_WORK_LIMIT_S = 30 * 24 * 3600.0
_HASH_CHARS = 64


@dataclass(frozen=True)
class Process:
    """What the launcher says of this process.

    Attributes:
        rank: of all processes.
        world: processes in all.
        local_rank: on this host.
        local_world: processes on this host.
    """

    rank: int
    world: int
    local_rank: int
    local_world: int


def launched() -> Process | None:
    """This process as torchrun numbered it; None if it was started by itself.

    Raises: PlanError if the numbers contradict each other.
    """
    found = {name: os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    if not all(found.values()):
        return None
    local = [os.environ.get(f"LOCAL_{n}", found[n]) for n in ("RANK", "WORLD_SIZE")]
    texts = (found["RANK"], found["WORLD_SIZE"], *local)
    if not all(t.isdecimal() for t in texts) or not int(texts[0]) < int(texts[1]):
        raise PlanError(
            f"RANK={texts[0]} of WORLD_SIZE={texts[1]} is no rank",
            advice="start ranks by metainfer run --nproc N, or by torchrun",
        )
    return Process(*map(int, texts))


@dataclass(frozen=True)
class Ranks:
    """The ranks of a plan, as one of them sees them.

    Attributes:
        layout: of the plan.
        process: this rank.
        device: where its tensors live.
        control: group of all ranks over the hosts' memory, for orders and results.
        groups: process group along each axis of the stage's mesh.
        answers: group in which replicas hand their logits to the leader: the control group, or on
            GPUs one of their own.
        before: group with the same place of the stage before, None in the first.
        after: group with the same place of the stage after, None in the last.
        limit_s: seconds that a meeting may take.
        is_owner: whether the process group was made here, and ends with the model.
    """

    layout: Layout
    process: Process
    device: torch.device
    control: Any
    groups: Mapping[str, Any]
    answers: Any
    before: Any
    after: Any
    limit_s: float
    is_owner: bool = field(default=True)

    @property
    def rank(self) -> int:
        """This rank's number."""
        return self.process.rank

    @property
    def is_leader(self) -> bool:
        """Whether this rank gives the orders."""
        return self.rank == 0

    @property
    def stage(self) -> int:
        """Pipeline stage of this rank."""
        return self.rank // self.layout.stage_ranks

    @property
    def numbers(self) -> dict[str, int]:
        """This rank's number along each axis of its stage's mesh."""
        return numbers_in(self.layout, self.rank)

    @property
    def replica(self) -> int:
        """The replica that this rank belongs to."""
        return self.numbers.get("dp", 0)

    @property
    def is_answering(self) -> bool:
        """Whether this rank hands its replica's results to the leader."""
        is_last = self.stage == self.layout.pp - 1
        return is_last and self.numbers.get("tp", 0) == 0

    def answering(self, replica: int) -> int:
        """The rank that has a replica's results."""
        return answering(self.layout, replica)

    def barrier(self, what: str) -> None:
        """Wait for all ranks. Raises: RankError if one is gone."""
        with meeting(what, self.rank, self.everybody, LOAD_LIMIT_S):
            wait(dist.barrier(group=self.control, async_op=True), LOAD_LIMIT_S)

    def any_of_stage(self, is_so: bool) -> bool:
        """Whether something is so on any rank of this one's stage.

        Raises: RankError if one is gone.
        """
        flag = torch.tensor([int(is_so)], device=self.device)
        for axis, group in self.groups.items():
            with meeting(f"an agreement over {axis}", self.rank, self.everybody, self.limit_s):
                dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
        return bool(flag.item())

    @property
    def everybody(self) -> tuple[int, ...]:
        """All ranks."""
        return tuple(range(self.layout.num_ranks))

    def close(self) -> None:
        """Leave the ranks."""
        set_context(None)
        if self.is_owner and dist.is_initialized():
            dist.destroy_process_group()


def wait(work: Any, limit_s: float) -> None:
    """Wait for what was begun on the control group, which itself waits for work without a limit.

    Raises: RuntimeError if it does not end in time.
    """
    work.wait(timedelta(seconds=limit_s))


def answering(layout: Layout, replica: int) -> int:
    """The rank that has a replica's results: the first of its last stage."""
    return (layout.pp - 1) * layout.stage_ranks + replica * layout.tp


def numbers_in(layout: Layout, rank: int) -> dict[str, int]:
    """A rank's number along each axis of its stage's mesh."""
    place = rank % layout.stage_ranks
    return {axis: axis_numbers(layout.mesh, axis)[place] for axis, _ in layout.mesh.axes}


def join(
    layout: Layout, plan_hash: str, process: Process, kind: str, limit_s: float,
    topology: Topology | None = None,
) -> Ranks:  # fmt: skip
    """Meet all ranks, agree that all have the same plan, and form the groups.

    Args:
        layout: of the plan.
        plan_hash: of the plan.
        process: this one.
        kind: "cpu" or "gpu".
        limit_s: seconds that a meeting may take from then on.
        topology: of the plan's machine: which ranks are islands; None if that is no matter.

    Raises: PlanError on all ranks if their plans differ, or they are not as many as planned;
        RankError if one is gone.
    """
    is_owner = not dist.is_initialized()
    if is_owner:
        dist.init_process_group("gloo", timeout=timedelta(seconds=JOIN_LIMIT_S))
    try:
        everybody = tuple(range(process.world))
        with meeting("the exchange of plan hashes", process.rank, everybody, JOIN_LIMIT_S):
            _agree(plan_hash, process)
        check_world(layout, process.world)
        with meeting("the forming of groups", process.rank, everybody, JOIN_LIMIT_S):
            return _form(layout, process, kind, limit_s, is_owner, topology)
    except BaseException:
        if is_owner:
            dist.destroy_process_group()
        raise


def check_world(layout: Layout, world: int) -> None:
    """Require as many ranks as planned.

    Raises: PlanError that says how to start them.
    """
    if world != layout.num_ranks:
        raise PlanError(
            f"the plan is for {layout.num_ranks} ranks ({layout}), {world} are running",
            advice=f"metainfer run PLAN PROMPT --nproc {layout.num_ranks}, or compile for {world}",
        )


def _agree(plan_hash: str, process: Process) -> None:
    """Compare the plan's hash with those of all other ranks."""
    own = torch.zeros(_HASH_CHARS, dtype=torch.uint8)
    text = plan_hash.encode()[:_HASH_CHARS]
    own[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    found = [torch.empty_like(own) for _ in range(process.world)]
    dist.all_gather(found, own)
    hashes = [bytes(t.tolist()).rstrip(b"\0").decode() for t in found]
    if len(set(hashes)) == 1:
        return
    by_hash: dict[str, list[int]] = {}
    for rank, one in enumerate(hashes):
        by_hash.setdefault(one, []).append(rank)
    raise PlanError(
        "the ranks have different plans",
        text="\n".join(f"ranks {', '.join(map(str, r))}: plan {h}" for h, r in by_hash.items()),
        advice="give every rank the same folder; copy it to every host",
    )


def _form(
    layout: Layout, process: Process, kind: str, limit_s: float, is_owner: bool,
    topology: Topology | None,
) -> Ranks:  # fmt: skip
    """Form the groups; every rank must ask for all of them in the same order."""
    backend, device = "gloo", torch.device("cpu")
    if kind == "gpu":
        backend, device = "nccl", torch.device("cuda", process.local_rank)
        torch.cuda.set_device(device)
    # NOTE: NCCL's own watch aborts without a word; ours (`runtime.watch`) comes first.
    limit = timedelta(seconds=limit_s * (2 * FIRST_TIMES if kind == "gpu" else 1))
    control = dist.new_group(backend="gloo", timeout=timedelta(seconds=_WORK_LIMIT_S))
    groups, peers = {}, {}
    inner: dict[str, Team] = {}
    outer: dict[str, Team] = {}

    def met(members: Sequence[int]) -> Any:
        return dist.new_group(list(members), backend=backend, timeout=limit)

    for stage in range(layout.pp):
        for axis, _ in layout.mesh.axes:
            for places in axis_groups(layout.mesh, axis):
                members = tuple(stage * layout.stage_ranks + place for place in places)
                group = met(members)
                if process.rank in members:
                    groups[axis], peers[axis] = group, members
                islands = topology.islands_of(members) if topology is not None else ()
                inner |= _teams(f"{axis}.inner", axis, islands, process.rank, met)
                columns = tuple(zip(*islands, strict=True))
                outer |= _teams(f"{axis}.outer", axis, columns, process.rank, met)
    before = after = None
    for rank in range((layout.pp - 1) * layout.stage_ranks):
        pair = (rank, rank + layout.stage_ranks)
        # The later stage waits while all earlier ones compute.
        group = dist.new_group(list(pair), backend=backend, timeout=limit * layout.pp)
        if process.rank == pair[0]:
            after = group
        elif process.rank == pair[1]:
            before = group
    answers = control
    if kind == "gpu":
        meeting_there = sorted({0, *(answering(layout, replica) for replica in range(layout.dp))})
        answers = dist.new_group(meeting_there, backend=backend, timeout=limit * layout.pp)
    numbers = numbers_in(layout, process.rank)
    set_context(
        RankContext(layout.mesh, process.rank, numbers, groups, peers, limit_s, inner, outer)
    )
    return Ranks(
        layout, process, device, control, groups, answers, before, after, limit_s, is_owner
    )


def _teams(
    name: str, axis: str, teams: Sequence[tuple[int, ...]], rank: int,
    met: Callable[[Sequence[int]], Any],
) -> dict[str, Team]:  # fmt: skip
    """Form the groups of teams, in one order on all ranks; the one that a rank belongs to."""
    found = {}
    for members in teams:
        group = met(members)
        if rank in members:
            found[axis] = Team(name, group, tuple(members), members.index(rank))
    return found
