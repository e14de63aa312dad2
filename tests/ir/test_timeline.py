"""The simulated step: who waits for whom, what runs beside what, and what decides the time."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metainfer.ir.errors import TypeMismatch
from metainfer.ir.timeline import Sharing, Task, simulate

FREE = Sharing()


def approx(*seconds: float) -> object:
    return pytest.approx(seconds)


def test_one_stream_takes_the_sum() -> None:
    line = simulate([Task("a", 2.0), Task("b", 3.0, after=(0,)), Task("c", 1.0)], FREE)
    assert line.seconds == line.serial_seconds == 6.0
    assert line.starts == (0.0, 2.0, 5.0)
    assert line.critical_path() == (0, 1, 2)
    assert line.meeting_seconds == line.hidden_share == 0.0


def test_chunks_hide_communication_but_the_first_and_last() -> None:
    # Two products, each followed by its collective: the first collective runs beside the second.
    tasks = [
        Task("p0", 4.0), Task("p1", 4.0),
        Task("c0", 3.0, 1, (0,), meets=True), Task("c1", 3.0, 1, (1,), meets=True),
    ]  # fmt: skip
    line = simulate(tasks, FREE)
    assert line.seconds == 11.0
    assert line.hidden_seconds == 3.0
    assert line.hidden_share == 0.5
    assert [tasks[i].name for i in line.critical_path()] == ["p0", "p1", "c1"]


def test_what_runs_beside_a_collective_runs_slower() -> None:
    tasks = [Task("p", 4.0), Task("c", 4.0, 1, meets=True)]
    line = simulate(tasks, Sharing(computing=0.5, meeting=0.8))
    # Together until the collective ends at 5; the product has done 2.5 of 4 then.
    assert line.ends == approx(6.5, 5.0)


def test_computations_share_the_device_by_their_loads() -> None:
    half = [Task("a", 4.0, 0, load=0.5), Task("b", 4.0, 2, load=0.5)]
    assert simulate(half, FREE).seconds == 4.0
    full = [Task("a", 4.0, 0), Task("b", 2.0, 2)]
    assert simulate(full, FREE).ends == approx(6.0, 4.0)


def test_a_wait_on_another_stream_takes_its_time() -> None:
    sharing = Sharing(wait_seconds=0.5)
    tasks = [Task("a", 1.0), Task("b", 1.0, 1, (0,)), Task("c", 1.0, 0, (0,))]
    assert simulate(tasks, sharing).starts == approx(0.0, 1.5, 1.0)


def test_streams_that_wait_for_each_other_are_named() -> None:
    tasks = [Task("a", 1.0, 0, (2,)), Task("b", 1.0, 1), Task("c", 1.0, 0)]
    with pytest.raises(TypeMismatch, match="none of these can begin: a, c"):
        simulate(tasks, FREE)


@st.composite
def graphs(draw: st.DrawFn) -> list[Task]:
    tasks: list[Task] = []
    for number in range(draw(st.integers(1, 9))):
        after = tuple(i for i in range(number) if draw(st.integers(0, 3)) == 0)
        meets = draw(st.booleans())
        seconds = float(draw(st.sampled_from([0, 1, 2, 5])))
        stream = 1 if meets else draw(st.sampled_from([0, 0, 2]))
        tasks.append(
            Task(str(number), seconds, stream, after, meets, draw(st.sampled_from([0.4, 1])))
        )
    return tasks


@given(graphs(), st.sampled_from([FREE, Sharing(0.9, 0.8, 0.1), Sharing(0.5, 0.5)]))
def test_a_timeline_respects_order_and_work(tasks: list[Task], sharing: Sharing) -> None:
    line = simulate(tasks, sharing)
    for number, task in enumerate(tasks):
        # Nothing runs faster than alone.
        assert line.ends[number] - line.starts[number] >= task.seconds - 1e-9
        for earlier in task.after:
            assert line.starts[number] >= line.ends[earlier] - 1e-9
        for other in range(number):
            if tasks[other].stream == task.stream:
                assert line.starts[number] >= line.ends[other] - 1e-9
    busiest = max(sum(t.seconds for t in tasks if t.stream == s) for s in (0, 1, 2))
    assert busiest - 1e-9 <= line.seconds
    assert 0 <= line.hidden_seconds <= line.meeting_seconds + 1e-9
    path = line.critical_path()
    assert line.ends[path[-1]] == line.seconds
    if sharing.wait_seconds == 0:
        # Without waits there is no gap on it: each begins when the one before ends.
        assert line.starts[path[0]] == 0
        for a, b in pairwise(path):
            assert math.isclose(line.ends[a], line.starts[b], abs_tol=1e-9)
