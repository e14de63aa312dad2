"""Starting before the launch in front has ended.

A launch with EARLY set may find the launches in front of it still at work: until `wait` it reads
only what no launch of a step writes: weights, the step's fields, tables; and, behind a launch that
waits first (`wait_first`), what those in front of that one wrote. Every program has to wait before
it ends: the next launch relies on it.
"""

import triton
import triton.language as tl


@triton.jit
def let_next(EARLY: tl.constexpr):
    """Let the next launch start."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_last(EARLY: tl.constexpr):
    """Wait until the launches in front have ended and what they wrote is there."""
    if EARLY:
        tl.extra.cuda.gdc_wait()


@triton.jit
def wait(EARLY: tl.constexpr):
    """Let the next launch start, then wait until those in front have ended."""
    let_next(EARLY)
    wait_for_last(EARLY)


@triton.jit
def wait_first(EARLY: tl.constexpr):
    """Wait until the launches in front have ended, then let the next one start.

    The next launch may then read before its own wait what those in front of this one wrote.
    """
    wait_for_last(EARLY)
    let_next(EARLY)
