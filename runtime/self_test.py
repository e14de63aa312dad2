"""Self-test of collectives: every algorithm that a plan names, on a known pattern, before any work.

A transport can be set up and still lose or damage data, or hang; what it costs to find out here is
little beside what it costs to find out in answers.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from metainfer.backends.kernel import Kernel
from metainfer.backends.ranks.context import current
from metainfer.backends.ranks.meeting import meeting
from metainfer.backends.registry import Backends
from metainfer.backends.torch.call import TorchBinder, TorchCall
from metainfer.backends.torch.tensors import to_torch, torch_dtype
from metainfer.ir.errors import PlanError, RankError, Unsupported
from metainfer.ir.graph import Module, Op
from metainfer.ir.interpret import concrete_attr
from metainfer.ir.ops.collective import exchange
from metainfer.ir.ops.record import op_def
from metainfer.ir.streams import meeting_of
from metainfer.ir.types import TensorType
from metainfer.runtime.alternates import Alternates, planned_algorithm, without
from metainfer.runtime.ranks import JOIN_LIMIT_S, Ranks, wait

LIMIT_S = 10.0
# NCCL connects the devices of a group when they first meet.
FORM_LIMIT_S = 60.0
# Larger steps are cut: what goes wrong does so at a few megabytes too.
_MOST_ELEMENTS = 1 << 20
_LINK_ELEMENTS = 1 << 16
_WRONG = " elements are wrong"
_REFUSED = " (all ranks refuse it)"


@dataclass(frozen=True)
class Trial:
    """One algorithm at one size.

    Attributes:
        op: a collective, in local form.
        kernel: the algorithm's kernel.
        shape: of the operand.
    """

    op: Op
    kernel: str
    shape: tuple[int, ...]

    @property
    def attrs(self) -> dict[str, Any]:
        """Attributes with defaults; every size is a number."""
        return {
            k: concrete_attr(v, {}) for k, v in op_def(self.op.name).complete(self.op.attr).items()
        }

    def __str__(self) -> str:
        """Name it as errors do."""
        return f"{self.op.name} over {self.op.attr['axis']} of {list(self.shape)} by {self.kernel}"


def trials(modules: Iterable[Module]) -> tuple[Trial, ...]:
    """The least and the largest case of every row of every collective's table, in text's order."""
    found: dict[tuple[object, ...], Trial] = {}
    for module in modules:
        limits = module.limits()
        for graph in module.graphs:
            for op in graph.ops:
                for trial in _of_op(op, limits):
                    key = (
                        trial.op.name,
                        trial.op.attrs,
                        trial.op.operands[0].tensor.dtype,
                        trial.kernel,
                        trial.shape,
                    )
                    found.setdefault(key, trial)
    return tuple(found.values())


def _of_op(op: Op, limits: Mapping[str, tuple[int, int]]) -> Iterable[Trial]:
    """Trials of an op; of a group that holds a collective, those of its algorithm by itself."""
    meeting = meeting_of(op)
    if meeting is None:
        return
    least = {name: low for name, (low, _) in limits.items()}
    for choice in op.choices:
        most = {name: high for name, (_, high) in limits.items()}
        if choice.symbol:
            most[choice.symbol] = min(choice.limit, most[choice.symbol])
        for env in (least, most):
            kernel = planned_algorithm(op, meeting, choice.kernel)
            yield Trial(meeting, kernel, _bounded(meeting.operands[0].tensor, env, limits))
        if choice.symbol:
            least[choice.symbol] = min(choice.limit + 1, limits[choice.symbol][1])


def _bounded(
    type_: TensorType, env: Mapping[str, int], limits: Mapping[str, tuple[int, int]]
) -> tuple[int, ...]:
    """The type's shape at sizes that are made smaller until it has few elements."""
    sizes = dict(env)
    shape = type_.concrete(sizes)
    while np.prod(shape) > _MOST_ELEMENTS:
        halved = {n: max(s // 2, limits[n][0]) for n, s in sizes.items()}
        if halved == sizes:
            break
        sizes, shape = halved, type_.concrete(halved)
    return shape


@dataclass(frozen=True)
class Tested:
    """Modules whose collectives work here.

    Attributes:
        modules: of this rank's stage, by phase; other algorithms stand in for broken ones.
        notes: what was replaced, a line each.
    """

    modules: Mapping[str, Module]
    notes: tuple[str, ...] = ()


def self_test(ranks: Ranks, modules: Mapping[str, Module], alternates: Alternates) -> Tested:
    """Run every trial; an algorithm that gives wrong numbers on any rank is replaced on all, as is
    one for which the ranks share no memory.

    All ranks stop at the first trial that fails on any of them, and begin anew without that
    algorithm. After one that hangs its ranks are out of step for good.

    Args:
        ranks: that meet.
        modules: of this rank's stage, by phase.
        alternates: what may stand in for a broken algorithm.

    Raises: RankError on all ranks that names op, algorithm and rank.
    """
    broken: frozenset[str] = frozenset()
    notes: list[str] = []
    with meeting("the self-test's agreement", ranks.rank, ranks.everybody, JOIN_LIMIT_S):
        said = _limited("forming groups", lambda: _connect(ranks), FORM_LIMIT_S)
        said = said or _limited("passing activations on", lambda: _links(ranks), FORM_LIMIT_S)
        _settle(ranks, Failure("", said) if said else None)
        while True:
            found = _first_failure(ranks, modules, alternates.backends)
            if not found:
                return Tested(modules, tuple(notes))
            broken |= {one.kernel for one in found}
            kept = {phase: without(m, broken, alternates) for phase, m in modules.items()}
            modules = {phase: m for phase, m in kept.items() if m is not None}
            if _most(ranks, int(len(modules) < len(kept))):
                raise _error(found)
            notes += [f"another algorithm stands in for {one.kernel}: {one.said}" for one in found]


@dataclass(frozen=True)
class Failure:
    """A trial that failed.

    Attributes:
        kernel: the algorithm, "" if another one cannot stand in.
        said: what was wrong.
    """

    kernel: str
    said: str


def _first_failure(
    ranks: Ranks, modules: Mapping[str, Module], backends: Backends
) -> tuple[Failure, ...]:
    """What ranks say of the first trial that fails on any; nothing if all trials go well."""
    found = trials(modules.values())
    # Stages have trials of their own, the agreement is over all ranks.
    for number in range(_most(ranks, len(found))):
        failure = _run(ranks, found[number], backends) if number < len(found) else None
        # NOTE: going on with ranks out of step would mix up messages of different sizes.
        failures = _settle(ranks, failure)
        if failures:
            return failures
    return ()


def _settle(ranks: Ranks, failure: Failure | None) -> tuple[Failure, ...]:
    """The failures of all ranks.

    Raises: RankError if nothing can stand in for what failed.
    """
    if not _most(ranks, int(failure is not None)):
        return ()
    own = ("", "") if failure is None else (failure.kernel, f"rank {ranks.rank}: {failure.said}")
    notes = [own] * ranks.layout.num_ranks
    dist.all_gather_object(notes, own, group=ranks.control)
    found = tuple(Failure(kernel, said) for kernel, said in notes if said)
    if not all(one.kernel for one in found):
        raise _error(found)
    return found


def _most(ranks: Ranks, number: int) -> int:
    """The largest of all ranks' numbers."""
    held = torch.tensor([number], dtype=torch.int32)
    begun = dist.all_reduce(held, op=dist.ReduceOp.MAX, group=ranks.control, async_op=True)
    wait(begun, JOIN_LIMIT_S)
    return int(held.item())


def _error(found: Sequence[Failure]) -> RankError:
    return RankError(
        "a collective of this plan does not work on this machine",
        text="\n".join(one.said for one in found[:10]),
        advice="compile again with --forbid KERNEL for the one named; GPUs: peer copies that hang "
        "or damage data come from ACS or an IOMMU: try NCCL_P2P_DISABLE=1",
    )


def _run(ranks: Ranks, trial: Trial, backends: Backends) -> Failure | None:
    """What is wrong with an algorithm, None if nothing is."""
    kernel = backends.kernels.get(trial.kernel)
    said = _limited(str(trial), lambda: _attempt(ranks, trial, kernel))
    if not said:
        return None
    return Failure(trial.kernel if said.endswith((_WRONG, _REFUSED)) else "", said)


def _limited(what: str, attempt: Callable[[], str], limit_s: float | None = None) -> str:
    """What an attempt says, or that it raised, or did not end in time."""
    outcome: list[str] = []

    def run() -> None:
        try:
            outcome.append(attempt())
        except Exception as error:
            lines = str(error).splitlines() or [type(error).__name__]
            outcome.append(f"{what}: {lines[0]}")

    # A thread of its own: one that hangs in a transport cannot be interrupted, only left behind.
    worker = threading.Thread(target=run, daemon=True)
    worker.start()
    limit_s = limit_s or LIMIT_S
    worker.join(limit_s)
    return outcome[0] if outcome else f"{what}: it did not end within {limit_s:g} s"


def _connect(ranks: Ranks) -> str:
    """Meet once in every group."""
    _use(ranks.device)
    for axis, group in ranks.groups.items():
        held = torch.ones(1, device=ranks.device)
        dist.all_reduce(held, group=group)
        if int(held.item()) != len(current().peers[axis]):
            return f"of the {len(current().peers[axis])} ranks along {axis}, {held.item():g} met"
    return ""


def _links(ranks: Ranks) -> str:
    """Pass a pattern from stage to stage."""
    _use(ranks.device)
    size = ranks.layout.stage_ranks
    if ranks.before is not None:
        peer = ranks.rank - size
        got = torch.zeros(_LINK_ELEMENTS, dtype=torch.int32, device=ranks.device)
        dist.recv(got, src=peer, group=ranks.before)
        if not torch.equal(got.cpu(), _numbered(peer)):
            return f"what rank {peer} passed on arrived damaged"
    if ranks.after is not None:
        dist.send(_numbered(ranks.rank).to(ranks.device), dst=ranks.rank + size, group=ranks.after)
    return _answers(ranks)


def _answers(ranks: Ranks) -> str:
    """Pass a pattern from every rank that has results to the leader, by the group for results."""
    if ranks.is_answering and not ranks.is_leader:
        dist.send(_numbered(ranks.rank).to(ranks.device), dst=0, group=ranks.answers)
    peers = [ranks.answering(replica) for replica in range(ranks.layout.dp)]
    for peer in peers if ranks.is_leader else ():
        if peer == ranks.rank:
            continue
        got = torch.zeros(_LINK_ELEMENTS, dtype=torch.int32, device=ranks.device)
        dist.recv(got, src=peer, group=ranks.answers)
        if not torch.equal(got.cpu(), _numbered(peer)):
            return f"what rank {peer} answered arrived damaged"
    return ""


def _numbered(rank: int) -> torch.Tensor:
    return torch.arange(rank, rank + _LINK_ELEMENTS, dtype=torch.int32)


def _use(device: torch.device) -> None:
    """A thread begins on device 0."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _attempt(ranks: Ranks, trial: Trial, kernel: Kernel) -> str:
    if not isinstance(kernel.binder, TorchBinder):
        raise PlanError(f"kernel {kernel.name} is no algorithm of a collective")
    _use(ranks.device)
    axis = str(trial.op.attr["axis"])
    own, peers = current().numbers[axis], len(current().peers[axis])
    parts = [pattern(trial, number) for number in range(peers)]
    wanted = exchange(trial.op.name, parts, trial.attrs)[own]
    dtype = torch_dtype(trial.op.result.tensor.dtype)
    # NOTE: what lay there before must not pass for a result.
    output = torch.full(wanted.shape, 77, dtype=dtype, device=ranks.device)
    operand = to_torch(parts[own]).to(ranks.device)
    try:
        kernel.binder.run(TorchCall(trial.op, (operand,), (output,), trial.attrs))
    except Unsupported as error:
        # Raised on all ranks alike, before any of them waits for another (`ranks.windows`).
        return f"{trial}: {error.what}{_REFUSED}"
    right = to_torch(np.ascontiguousarray(wanted))
    if kernel.option:
        # Codes do not hold these numbers: what is off by more than they are is damaged.
        off = (output.cpu().float() - right.float()).abs()
        different = int((off > kernel.error * sum(np.abs(p).max() for p in parts)).sum())
    else:
        different = int((output.cpu() != right).sum())
    return f"{trial}: {different} of {output.numel()}{_WRONG}" if different else ""


def pattern(trial: Trial, number: int) -> np.ndarray:
    """The operand of a rank: small whole numbers, so that sums are exact in every element type."""
    count = int(np.prod(trial.shape))
    values = (np.arange(count) * 5 + np.arange(count) // 7 + number * 3) % 7 - 3
    dtype = trial.op.operands[0].tensor.dtype
    made: np.ndarray = values.reshape(trial.shape).astype(np.float32).astype(_numpy(dtype))
    return made


def _numpy(dtype: object) -> np.dtype:
    found = getattr(dtype, "numpy", None)
    if found is None:
        raise PlanError(f"a collective of {dtype} cannot be tested")
    assert isinstance(found, np.dtype)
    return found
