"""What measures in the tests of the tuner's worker; imported by the processes that it starts."""

import os
import time
from collections.abc import Callable
from typing import Any

from metainfer.ir.errors import Unsupported


def crashing() -> Callable[[Any], float]:
    """A watch for tasks that are texts: what it is to do."""

    def watch(task: str) -> float:
        if task == "crash":
            os.abort()
        if task == "hang":
            time.sleep(60)
        if task == "refuse":
            raise Unsupported("the compiler refuses", text="at line 3")
        if task == "raise":
            raise ValueError("no such\ntile")
        return 2.5

    return watch


def planted() -> Callable[[Any], float]:
    """A watch that ends the process at kernels of torch, and counts 10 us for others."""

    def watch(task: Any) -> float:
        if task.kernel.startswith("torch."):
            os.abort()
        return 10.0

    return watch


def steady() -> Callable[[Any], float]:
    """A watch by which everything takes 10 us."""
    return lambda task: 10.0
