"""Starting before the launch in front has ended.

A launch with EARLY set may find the launches in front of it still at work: until `wait` it touches
no memory. Every program has to wait before it ends: the next launch relies on it.
"""

import triton
import triton.language as tl


@triton.jit
def wait(EARLY: tl.constexpr):
    """Let the next launch start, then wait until those in front have ended."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
