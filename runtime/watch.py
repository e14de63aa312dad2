"""Watching the time of steps on devices: a hanging peer blocks a thread that nobody can interrupt.

The transports of hosts give up by themselves (`backends.ranks.meeting`). On a GPU a collective that
hangs blocks whoever waits for the device, so another thread ends the process, saying why.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from metainfer.backends.ranks.meeting import last_meeting, overdue
from metainfer.ir.errors import RankError

FIRST_TIMES = 10
_LOOKS = 20  # how often the watch looks at the clock within a limit


def leave(text: str, code: int, *, is_echo: bool = False) -> NoReturn:
    """Say what happened and end the process at once: a thread may hang in a transport.

    Args:
        text: for the user; goes where torch's elastic agent finds it, or to stderr.
        code: exit code.
        is_echo: whether another rank failed first.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file and text:
        extra = {"timestamp": str(int(time.time())), "is_echo": is_echo}
        Path(file).write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}))
    elif text:
        sys.stderr.write(f"{text}\n")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _leave_by(error: RankError) -> None:
    leave(f"error: {error.render()}", error.exit_code)


class StepWatch:
    """Looks at the clock while a step runs.

    Args:
        rank: whose steps.
        limit_s: seconds that a step may take.
        act: what to do when one takes longer; ends the process.
    """

    def __init__(
        self, rank: int, limit_s: float, act: Callable[[RankError], None] = _leave_by
    ) -> None:
        self._rank, self._limit_s, self._act = rank, limit_s, act
        self._known: set[Hashable] = set()
        self._ends: float | None = None
        self._is_over = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    @contextmanager
    def step(self, sizes: Hashable) -> Iterator[None]:
        """A step, watched; the first of its sizes has more time, since kernels are compiled in it.

        Args:
            sizes: of the step, phase included.
        """
        times = 1 if sizes in self._known else FIRST_TIMES
        self._ends = time.monotonic() + self._limit_s * times
        try:
            yield
            self._known.add(sizes)
        finally:
            self._ends = None

    def close(self) -> None:
        """Stop watching."""
        self._is_over.set()

    def _watch(self) -> None:
        while not self._is_over.wait(self._limit_s / _LOOKS):
            ends = self._ends
            if ends is not None and time.monotonic() > ends:
                what = last_meeting() or "its work"
                self._act(
                    overdue(f"a step (the last op begun was {what})", self._rank, self._limit_s)
                )
                return
