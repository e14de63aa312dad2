"""What ranks do in tests: functions that every process of a `RankPool` runs."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from captures import Recorder

import metainfer
from metainfer.backends.ranks import windows
from metainfer.backends.ranks.context import current, team_of
from metainfer.backends.ranks.direct import DIRECT
from metainfer.backends.ranks.windows import window_of
from metainfer.backends.registry import installed
from metainfer.backends.torch.call import TorchBinder, TorchCall
from metainfer.backends.torch.tensors import to_torch
from metainfer.hardware import load_machine
from metainfer.hardware.topology import Topology
from metainfer.ir.dtypes import Scalar, parse_dtype
from metainfer.ir.errors import Unsupported
from metainfer.ir.graph import Op, Value, attrs_of
from metainfer.ir.ops.collective import exchange
from metainfer.ir.ops.record import infer_types, op_def
from metainfer.ir.strategy import Layout
from metainfer.ir.types import tensor
from metainfer.runtime import self_test
from metainfer.runtime.engine import Engine
from metainfer.runtime.graphs import StepGraphs
from metainfer.runtime.model import LoadedModel
from metainfer.runtime.ranked import RankedModel
from metainfer.runtime.ranks import join, launched
from metainfer.runtime.sampling import SamplingParams


def answers(
    plan: Path, prompts: Sequence[Sequence[int]], max_tokens: int
) -> list[tuple[int, ...]] | None:
    """Greedy answers, on rank 0."""
    with metainfer.load(plan, allow_machine_mismatch=True, num_threads=1) as model:
        model.follow()
        return _answers(model, prompts, max_tokens) if model.is_leader else None


def _answers(
    model: LoadedModel, prompts: Sequence[Sequence[int]], max_tokens: int
) -> list[tuple[int, ...]]:
    params = SamplingParams(max_tokens=max_tokens)
    return [one.token_ids for one in Engine(model, end_ids=()).generate(prompts, params)]


def captured_and_single(
    plan: Path, prompts: Sequence[Sequence[int]], max_tokens: int
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]], tuple[str, ...]] | None:
    """Greedy answers by captured steps, launch by launch, and what running showed; on rank 0."""
    with metainfer.load(plan, allow_machine_mismatch=True) as model:
        model.follow()
        if not model.is_leader:
            return None
        captured, notes = _answers(model, prompts, max_tokens), model.run_notes
        # The leader says how a step runs.
        model._graphs = None
        return captured, _answers(model, prompts, max_tokens), notes


def replayed_answers(
    plan: Path, prompts: Sequence[Sequence[int]], max_tokens: int, refusing: int | None
) -> tuple[list[tuple[int, ...]], int, int, tuple[str, ...]] | None:
    """Greedy answers of captured steps, with the captures, replays and notes of rank 0.

    Args:
        refusing: the rank on which no step can be captured.
    """
    with metainfer.load(plan, allow_machine_mismatch=True, num_threads=1) as model:
        assert isinstance(model, RankedModel)
        process = launched()
        assert process is not None
        recorder = Recorder("a copy from the host" if process.rank == refusing else None)
        model._graphs = StepGraphs(recorder, model._agreed)
        model.follow()
        ids = _answers(model, prompts, max_tokens) if model.is_leader else []
        notes = model.run_notes
    # Captured steps hold communicators, which end only after them.
    assert model._graphs is None
    return (ids, len(recorder.caught), recorder.replays, notes) if model.is_leader else None


def pid() -> int:
    """This process."""
    return os.getpid()


def notes_and_setting(plan: Path, name: str) -> tuple[tuple[str, ...], str | None]:
    """What loading says on this rank, and a variable of its environment after it."""
    try:
        with metainfer.load(plan, allow_machine_mismatch=True, num_threads=1) as model:
            model.follow()
            return model.notes, os.environ.get(name)
    finally:
        # The process serves other tests after this one.
        os.environ.pop(name, None)


def load_plan(plans: Sequence[Path]) -> None:
    """Each rank loads a plan of its own."""
    process = launched()
    assert process is not None
    metainfer.load(plans[process.rank], allow_machine_mismatch=True).close()


def delayed_sums(algorithms: Sequence[str], late: str, halves: int) -> list[int]:
    """How many of many sums in a row are wrong where a rank is slow to write, or to read.

    Args:
        algorithms: over windows, one after the other.
        late: "reading" or "writing".
        halves: of a window that are used; 2 is how windows are.
    """
    process = launched()
    assert process is not None
    ranks = join(Layout(tp=process.world), "none", process, "cpu", 20.0)
    try:
        team = team_of("tp")
        window = window_of(team, 1 << 10, torch.device("cpu"))
        meet = window.barrier

        def barrier() -> None:
            if late == "writing" and process.rank == 1:
                time.sleep(0.02)
            meet()
            if late == "reading" and process.rank == 1:
                time.sleep(0.02)

        window.barrier = barrier
        found = torch.zeros(len(algorithms), dtype=torch.int32)
        for place, algorithm in enumerate(algorithms):
            for number in range(8):
                if halves == 1:
                    window.used = 0
                x = torch.full((64,), float(number * 10 + process.rank))
                out = torch.empty_like(x)
                DIRECT["all_reduce"][algorithm](x, out, team)
                total = sum(float(number * 10 + rank) for rank in range(process.world))
                found[place] += not torch.equal(out, torch.full_like(out, total))
        torch.distributed.all_reduce(found, group=ranks.control)
        return found.tolist()
    finally:
        ranks.close()


def windows_made(sizes: Sequence[int]) -> tuple[list[int], list[str]]:
    """Halves of the windows that calls of these sizes made, and mappings left after the end."""
    process = launched()
    assert process is not None
    ranks = join(Layout(tp=process.world), "none", process, "cpu", 20.0)
    for size in sizes:
        window_of(team_of("tp"), size, torch.device("cpu"))
    halves = sorted(half for _, half in current().windows)
    assert "memfd:window (deleted)" in Path("/proc/self/maps").read_text()
    ranks.close()
    left = Path("/proc/self/maps").read_text().splitlines()
    return halves, [line for line in left if "memfd:window" in line]


def windows_refused(guilty: int) -> str:
    """A rank cannot map the memory: what all are told."""
    process = launched()
    assert process is not None
    ranks = join(Layout(tp=process.world), "none", process, "cpu", 20.0)
    plain = windows._map

    def refusing(path: str, size: int) -> Any:
        raise PermissionError("not allowed here")

    try:
        windows._map = refusing if process.rank == guilty else plain
        window_of(team_of("tp"), 5, torch.device("cpu"))
    except Unsupported as error:
        return error.what
    finally:
        windows._map = plain
        ranks.close()
    return "made"


# --- collectives -------------------------------------------------------------------------------


def collective(
    name: str, shape: Sequence[int], dtype: str, attrs: dict[str, Any]
) -> tuple[Op, list[np.ndarray]]:
    """An op in local form, and the operand of every rank: numbers that round when summed."""
    complete = {**op_def(name).complete({"axis": "tp", **attrs})}
    x = Value("%x", tensor(parse_dtype(dtype), *shape))
    (result,) = infer_types(name, [x.type], complete)
    op = Op(name, (x,), (Value("%y", result),), attrs_of(complete))
    parts = []
    for rank in range(attrs["ranks"]):
        rng = np.random.default_rng([rank, len(shape)])
        numbers = rng.standard_normal(shape) * 100
        parts.append(numbers.astype(np.float32).astype(cast(Scalar, parse_dtype(dtype)).numpy))
    return op, parts


def differences(
    cases: Sequence[tuple[str, str, Sequence[int], str, dict[str, Any]]], kind: str = "cpu"
) -> list[str]:
    """Cases in which an algorithm is not `exchange`, with how far it is off."""
    process = launched()
    assert process is not None
    ranks = join(Layout(tp=process.world), "none", process, kind, 20.0, _near(process.world))
    found = []
    try:
        for algorithm, name, shape, dtype, attrs in cases:
            op, parts = collective(name, shape, dtype, {**attrs, "ranks": process.world})
            complete = op_def(name).complete(op.attr)
            wanted = to_torch(np.ascontiguousarray(exchange(name, parts, complete)[process.rank]))
            out = torch.full_like(wanted, 77, device=ranks.device)
            x = to_torch(parts[process.rank]).to(ranks.device)
            kernel = installed().kernels.get(f"ranks.{name}_{algorithm}")
            assert isinstance(kernel.binder, TorchBinder)
            kernel.binder.run(TorchCall(op, (x,), (out,), complete))
            if not torch.equal(out.cpu(), wanted):
                off = float((out.cpu().float() - wanted.float()).abs().max())
                found.append(f"{name} {algorithm} {list(shape)} {dtype}: {off:g}")
    finally:
        ranks.close()
    return found


def _near(world: int) -> Topology:
    """Of a machine whose ranks are in two islands, where they are even."""
    machine = load_machine("8xpcie")
    middle = 4 - world // 2 if world % 2 == 0 else 0
    devices = machine.devices[middle : middle + world]
    kept = {device.name for device in devices}
    links = tuple(
        link for link in machine.links if kept & set(link.ends) or link.kind == "xgmi"
    )  # fmt: skip
    placed = tuple(replace(device, rank=rank) for rank, device in enumerate(devices))
    return replace(machine, devices=placed, links=links).topology()


@contextmanager
def _replaced(kernel: str, run: Callable[[TorchCall], None]) -> Iterator[None]:
    """Another algorithm under the name of a kernel."""
    record = installed().kernels.get(kernel)
    before = record.binder
    object.__setattr__(record, "binder", TorchBinder(run))
    try:
        yield
    finally:
        object.__setattr__(record, "binder", before)


def load_with_fault(plan: Path, kernel: str, fault: str, guilty: int) -> None:
    """Load a plan where a rank's algorithm is broken: it "does nothing", or "hangs"."""
    process = launched()
    assert process is not None
    self_test.LIMIT_S = 2.0

    def broken(call: TorchCall) -> None:
        if fault == "hangs":
            time.sleep(20)

    if process.rank != guilty:
        metainfer.load(plan, allow_machine_mismatch=True).close()
        return
    with _replaced(kernel, broken):
        metainfer.load(plan, allow_machine_mismatch=True).close()


def answer_with_a_liar(
    plan: Path, kernels: Sequence[str], guilty: int, prompt: Sequence[int], max_tokens: int
) -> tuple[tuple[str, ...], tuple[int, ...]] | None:
    """Load and answer where algorithms of a rank work, but get one element wrong."""
    process = launched()
    assert process is not None
    with ExitStack() as stack:
        for kernel in kernels if process.rank == guilty else ():
            stack.enter_context(_replaced(kernel, _wrong(kernel)))
        with metainfer.load(plan, allow_machine_mismatch=True, num_threads=1) as model:
            model.follow()
            if not model.is_leader:
                return None
            engine = Engine(model, end_ids=())
            (found,) = engine.generate([prompt], SamplingParams(max_tokens=max_tokens))
            return model.notes, found.token_ids


def answer_without_windows(
    plan: Path, prompt: Sequence[int], max_tokens: int
) -> tuple[tuple[str, ...], tuple[int, ...]] | None:
    """Load and answer where the last rank can map no memory of another."""
    process = launched()
    assert process is not None
    plain = windows._map

    def refusing(path: str, size: int) -> Any:
        raise PermissionError("not allowed here")

    try:
        windows._map = refusing if process.rank else plain
        return answer_with_a_liar(plan, (), 0, prompt, max_tokens)
    finally:
        windows._map = plain


def _wrong(kernel: str) -> Callable[[TorchCall], None]:
    right = installed().kernels.get(kernel).binder
    assert isinstance(right, TorchBinder)

    def run(call: TorchCall) -> None:
        right.run(call)
        call.outputs[0].view(-1)[-1] += 1

    return run


def lose_a_rank(plan: Path) -> str:
    """Rank 1 leaves without a word while rank 0 works."""
    model = metainfer.load(plan, allow_machine_mismatch=True)
    if not model.is_leader:
        torch.distributed.destroy_process_group()
        return "left"
    engine = Engine(model, end_ids=())
    with model:
        engine.generate([[1, 2, 3]], SamplingParams(max_tokens=20))
    return "answered"


def hang_in_a_step(plan: Path, kernel: str) -> None:
    """Rank 1 hangs in a collective, long after the self-test."""

    def hanging(call: TorchCall) -> None:
        time.sleep(4)
        raise InterruptedError("waited long enough for the others to give up")

    with metainfer.load(plan, allow_machine_mismatch=True, time_limit_s=1.5) as model:
        if model.is_leader:
            Engine(model, end_ids=()).generate([[1, 2, 3]], SamplingParams(max_tokens=2))
            return
        with _replaced(kernel, hanging):
            model.follow()


def answer_after_a_rest(plan: Path) -> int:
    """The leader has nothing to do for longer than a meeting may take."""
    with metainfer.load(plan, allow_machine_mismatch=True, time_limit_s=1.0) as model:
        model.follow()
        if not model.is_leader:
            return 0
        time.sleep(2.5)
        (found,) = Engine(model, end_ids=()).generate([[1, 2]], SamplingParams(max_tokens=3))
        return len(found.token_ids)


def call_module(plan: Path, weights: Path, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Call a module on each of several inputs, on rank 0."""
    with metainfer.load(plan, weights, allow_machine_mismatch=True) as model:
        model.follow()
        if not model.is_leader:
            return []
        found = [model(torch.from_numpy(x)) for x in inputs]
        return [y.numpy() for y in found if isinstance(y, torch.Tensor)]


def stop_in_a_step(plan: Path) -> float:
    """The leader gives up in the middle of a step: how long it takes to leave."""
    model = metainfer.load(plan, allow_machine_mismatch=True, time_limit_s=4.0)
    if not model.is_leader:
        with model:
            model.follow()
        return 0.0

    def interrupted(call: TorchCall) -> None:
        raise KeyboardInterrupt

    kernels = [k.name for k in installed().kernels.all() if k.backend == "ranks"]
    begun = 0.0
    with ExitStack() as stack:
        for kernel in kernels:
            stack.enter_context(_replaced(kernel, interrupted))
        try:
            with model:
                begun = time.monotonic()
                Engine(model, end_ids=()).generate([[1, 2]], SamplingParams(max_tokens=2))
        except KeyboardInterrupt:
            return time.monotonic() - begun
    return 1e9
