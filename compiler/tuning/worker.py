"""A process that measures for another one: if a kernel ends it, nothing but a line is lost."""

import multiprocessing
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from metainfer.ir.errors import MetainferError

_LONGEST_TEXT = 300


# Measures a task, a `tasks.Task` or whatever else can be sent: microseconds.
Watch = Callable[[Any], float]
MakeWatch = Callable[[], Watch]


class TaskFailed(Exception):
    """A task that gave no time; the text says why."""


class Worker:
    """Measures tasks in a child process, which is started again when it was lost.

    Args:
        make: makes what measures, in the child; a function at the top of a module.
        limit_s: how long one task may take.
    """

    def __init__(self, make: MakeWatch, limit_s: float) -> None:
        self._make = make
        self._limit_s = limit_s
        self._context = multiprocessing.get_context("spawn")
        self._child: Any = None
        self._pipe: Any = None

    def measure(self, task: Any) -> float:
        """Microseconds of a task.

        Raises: TaskFailed with the reason if the kernel, its compiler or the process failed.
        """
        if self._child is None:
            self._start()
        try:
            self._pipe.send(task)
            if not self._pipe.poll(self._limit_s):
                self.close()
                raise TaskFailed(f"not done after {self._limit_s:.0f} s")
            found = self._pipe.recv()
        except (EOFError, OSError):
            raise TaskFailed(self._epitaph()) from None
        if isinstance(found, str):
            if found.startswith(_LOST):
                self.close()
            raise TaskFailed(found.removeprefix(_LOST))
        return float(found)

    def _start(self) -> None:
        self._pipe, theirs = self._context.Pipe()
        self._child = self._context.Process(target=_serve, args=(theirs, self._make), daemon=True)
        self._child.start()
        theirs.close()

    def _epitaph(self) -> str:
        """How the child ended."""
        self._child.join(5)
        code = self._child.exitcode
        self.close()
        if code is not None and code < 0:
            return f"it ended the process by signal {-code}"
        return f"it ended the process with code {code}"

    def close(self) -> None:
        """End the child, if there is one."""
        if self._child is None:
            return
        self._pipe.close()
        self._child.kill()
        self._child.join()
        self._child = None


_LOST = "lost: "  # begins what a child says of a device that it cannot use any more


def _serve(pipe: Connection, make: MakeWatch) -> None:
    """Measure what is asked until the other end is closed, as it is when that process is killed."""
    watch = make()
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        answer: float | str
        try:
            answer = watch(task)
        except Exception as error:  # compilers and libraries raise whatever they like
            answer = _said(error)
        try:
            pipe.send(answer)
        except OSError:
            return


def _said(error: Exception) -> str:
    if isinstance(error, MetainferError):
        text = f"{error.what}: {error.text}" if error.text else error.what
    else:
        lines = str(error).strip().splitlines() or ["no message"]
        text = f"{type(error).__name__}: {lines[0]}"
    return f"{'' if _is_device_well() else _LOST}{' '.join(text.split())[:_LONGEST_TEXT]}"


def _is_device_well() -> bool:
    """Whether this process can go on: an illegal access makes CUDA refuse everything after it."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True
