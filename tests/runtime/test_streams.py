"""Steps on several streams: every order that the waits allow gives the same numbers.

On a CPU the order of the text is run; here ops are run in other orders that streams might take,
over one arena that is filled with NaN, so that storage taken too early shows.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from metainfer.backends.kernel import Query
from metainfer.backends.registry import installed
from metainfer.hardware import load_machine
from metainfer.ir.arena import plan_arena
from metainfer.ir.dtypes import F32
from metainfer.ir.flatten import flatten
from metainfer.ir.graph import Choice, Graph, Module, Op, Value
from metainfer.ir.interpret import interpret
from metainfer.ir.ops.record import Builder
from metainfer.ir.streams import num_streams, order_of
from metainfer.ir.timeline import Sharing, simulate
from metainfer.ir.types import Symbol, tensor
from metainfer.ir.verify import verify_module
from metainfer.passes.list_schedule import Schedule
from metainfer.passes.step_tasks import tasks_of
from metainfer.passes.stream_order import on_streams
from metainfer.runtime.executor import PhaseExecutor
from metainfer.runtime.storage import Storage
from metainfer.runtime.streams import Issuer

WIDTH, ROWS = 8, 5


@st.composite
def modules(draw: st.DrawFn) -> Module:
    """Random branches over rows: elementwise ops, joins and cuts of parts."""
    builder = Builder()
    x = Value("%x", tensor(F32, "T", WIDTH))
    values = [x]
    for _ in range(draw(st.integers(3, 12))):
        read = draw(st.sampled_from(values[-5:]))
        kind = draw(st.sampled_from(["silu", "neg", "add", "parts"]))
        if kind == "add":
            values.append(builder.emit("add", read, draw(st.sampled_from(values))))
        elif kind == "parts":
            half, rows = x.tensor.shape[0] // 2, x.tensor.shape[0]
            first = builder.emit("slice", read, dim=0, start=0, stop=half)
            second = builder.emit("slice", read, dim=0, start=half, stop=rows)
            made = [builder.emit("exp", first), builder.emit("abs", second)]
            values.append(builder.emit("concat", *made, dim=0))
        else:
            values.append(builder.emit(kind, read))
    ops = tuple(with_kernel(op) for op in builder.ops)
    main = Graph("main", (x,), ops=ops, outputs=tuple(values[-2:]))
    return Module("m", (Symbol("T", 1, ROWS),), graphs=(main,))


def with_kernel(op: Op) -> Op:
    """The op with some kernel of torch; views need none."""
    device, registry = load_machine("cpu").device(0), installed().kernels
    for kernel in registry.candidates(op.name):
        if kernel.backend == "torch" and not kernel.refusals(Query(op, device, {"T": (1, ROWS)})):
            return replace(op, choices=(Choice(kernel.name),))
    return op


def on_random_streams(module: Module, random: Random) -> Module:
    """The module's ops on random streams, in a random order, with the waits that this needs."""
    tasks, numbers = tasks_of(module.main.ops, lambda op: (1.0, 1.0), {"T": ROWS})
    order: list[int] = []
    while len(order) < len(tasks):
        ready = [i for i, t in enumerate(tasks) if i not in order and set(t.after) <= set(order)]
        order.append(random.choice(ready))
    moved = [replace(t, stream=random.choice([0, 0, 1, 2])) for t in tasks]
    at = {number: place for place, number in enumerate(order)}
    placed = [replace(moved[i], after=tuple(at[a] for a in moved[i].after)) for i in order]
    line = simulate(placed, Sharing())
    found = Schedule(tuple(order), replace(line, tasks=tuple(moved)))
    made = module.with_graph(on_streams(module.main, module.main.ops, numbers, found))
    verify_module(made)
    return made


def executor_of(module: Module) -> tuple[PhaseExecutor, Storage]:
    flat = flatten(module)
    arena = plan_arena(flat, module.limits())
    storage = Storage(arena.size, {"T": ROWS}, torch.device("cpu"), 1, has_step=False)
    storage.arena.fill_(255)  # every float of it is NaN
    return PhaseExecutor(module, flat, arena, storage, installed(), "call"), storage


def some_order(ops: Sequence[Op], random: Random) -> list[int]:
    """An order in which the streams might run the ops: whatever waits and streams allow."""
    order = order_of(ops)
    runs = [i for i in range(len(ops)) if order.streams[i] >= 0]
    done: list[int] = []
    while len(done) < len(runs):
        ready = [
            i
            for i in runs
            if i not in done and all(j in done for j in runs if order.precedes(j, i))
        ]
        done.append(random.choice(ready))
    return done


@given(modules(), st.integers(0, 10**6), st.integers(1, ROWS))
def test_any_order_that_streams_may_take_gives_the_same(
    module: Module, seed: int, rows: int
) -> None:
    # B84, B86: storage that another stream still reads is not taken.
    random = Random(seed)
    made = on_random_streams(module, random)
    x = np.random.default_rng(seed).standard_normal((rows, WIDTH)).astype(np.float32)
    wanted = interpret(module, [x], {}.__getitem__).outputs
    executor, _ = executor_of(made)
    env = {"T": rows}
    for _ in range(4):
        executor.input(0, env).copy_(torch.from_numpy(x))
        ops = [item.op for item in executor.flat.ops]
        runs = [i for i, stream in enumerate(order_of(ops).streams) if stream >= 0]
        calls = dict(zip(runs, executor.launches(env), strict=True))
        for number in some_order(ops, random):
            calls[number]()
        for index, value in enumerate(wanted):
            np.testing.assert_allclose(executor.output(index, env).numpy(), value, rtol=1e-5)


def three_streams() -> tuple[Op, ...]:
    """Two branches beside the main stream, joined."""
    x = Value("%x", tensor(F32, "T", WIDTH))
    a, b, c = (Value(f"%{i}", x.type) for i in range(3))
    return (
        Op("silu", (x,), (a,), stream=1, after=("%x",)),
        Op("neg", (x,), (b,), stream=2, after=("%x",)),
        Op("add", (a, b), (c,), after=("%0", "%1")),
    )


def test_a_cpu_runs_in_the_order_of_the_text() -> None:
    issuer = Issuer(three_streams(), torch.device("cpu"))
    assert issuer.num_streams == 3
    assert not issuer.is_active
    called: list[str] = []
    calls = [issuer.issued(op, lambda name=op.name: called.append(name)) for op in three_streams()]
    for call in [*issuer.begin(), *calls]:
        call()
    assert called == ["silu", "neg", "add"]


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
def test_a_device_runs_on_as_many_streams_as_planned(seed: int, captured: bool) -> None:
    # B65, B86: forked and joined by events only, a step on three streams can be captured.
    device, ops = torch.device("cuda"), three_streams()
    issuer = Issuer(ops, device)
    assert len(issuer.side_streams) == num_streams(ops) - 1 == 2
    torch.manual_seed(seed)
    x = torch.randn(1 << 22, device=device)
    a, b, c = (torch.full_like(x, float("nan")) for _ in range(3))
    seen: set[int] = set()

    def noted(run: Callable[[], object]) -> Callable[[], None]:
        def call() -> None:
            seen.add(torch.cuda.current_stream().cuda_stream)
            run()

        return call

    bodies = [
        lambda: a.copy_(x.exp().log().sigmoid()), lambda: b.copy_(x * 2), lambda: c.copy_(a + b),
    ]  # fmt: skip
    calls = [*issuer.begin()]
    calls += [issuer.issued(op, noted(body)) for op, body in zip(ops, bodies, strict=True)]
    for call in calls:
        call()
    torch.cuda.synchronize()
    if captured:
        graph = torch.cuda.CUDAGraph()
        seen.clear()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        for values in (a, b, c):
            values.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
    assert len(seen) == issuer.num_streams
    torch.testing.assert_close(c, x.exp().log().sigmoid() + x * 2)
