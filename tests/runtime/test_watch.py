"""The watch of steps: one that takes too long is told of, with the last op that was begun."""

import subprocess
import sys
import time

from metainfer.backends.ranks.meeting import meeting
from metainfer.ir.errors import RankError
from metainfer.runtime.watch import StepWatch


def test_only_a_step_that_takes_too_long_is_told_of() -> None:
    told: list[RankError] = []
    watch = StepWatch(3, 0.4, told.append)
    # Kernels are compiled in the first step of its sizes: it may take longer.
    with watch.step("first"):
        time.sleep(0.8)
    for _ in range(5):
        with watch.step("first"):
            time.sleep(0.15)
    time.sleep(0.6)
    assert told == []
    with watch.step("first"), meeting("all_reduce over tp", 3, (2, 3), 0.4):
        time.sleep(1.0)
    assert len(told) == 1
    assert "rank 3: a step (the last op begun was all_reduce over tp)" in str(told[0])
    assert "did not end within 0.4 s" in str(told[0])
    assert "NCCL_P2P_DISABLE=1" in str(told[0])


def test_a_closed_watch_tells_nothing() -> None:
    told: list[RankError] = []
    watch = StepWatch(0, 0.1, told.append)
    watch.close()
    for _ in range(2):
        with watch.step("sizes"):
            time.sleep(0.3)
    assert told == []


def test_the_process_ends_with_the_error() -> None:
    text = (
        "import time\n"
        "from metainfer.runtime.watch import StepWatch\n"
        "with StepWatch(1, 0.05).step('sizes'):\n"
        "    time.sleep(30)\n"
    )
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, check=False, timeout=25
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: rank 1: a step")
    assert time.monotonic() - begun < 25
