"""Processes that stay: each becomes a rank of one world after another, as a test asks.

Starting eight processes that import torch takes a quarter of a minute; these are forked from one
that has imported it. Tasks are functions of `rank_tasks`, called on every rank.
"""

import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

_PRELOAD = ("torch", "torch.distributed", "metainfer.runtime.load", "rank_tasks")


@dataclass(frozen=True)
class Failed:
    """What a task raised.

    Attributes:
        kind: name of the exception's class.
        text: its message.
        trace: for whoever reads the test's output.
    """

    kind: str
    text: str
    trace: str


class RankPool:
    """Processes that serve as ranks.

    Args:
        count: the largest world.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(_PRELOAD))
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(self, world: int, task: Callable[..., Any], *args: Any, limit_s: float = 90) -> Any:
        """What a task returns on rank 0; every rank must succeed."""
        found = self.outcomes(world, task, *args, limit_s=limit_s)
        failed = [one for one in found if isinstance(one, Failed)]
        assert not failed, "\n".join(one.trace for one in failed)
        return found[0]

    def outcomes(
        self, world: int, task: Callable[..., Any], *args: Any, limit_s: float = 90
    ) -> list[Any]:
        """What a task returns, or `Failed`, on every rank of a new world."""
        self._start(world)
        port = _free_port()
        for rank in range(world):
            self._pipes[rank].send((task, rank, world, port, args))
        found: dict[int, Any] = {}
        end = time.monotonic() + limit_s
        while len(found) < world:
            left = {self._pipes[r]: r for r in range(world) if r not in found}
            ready = wait(list(left), timeout=max(end - time.monotonic(), 0))
            if not ready:
                self.close()
                raise TimeoutError(f"ranks {sorted(left.values())} of {world} hang in {task}")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                found[left[pipe]] = pipe.recv()
        return [found[rank] for rank in range(world)]

    def _start(self, world: int) -> None:
        assert world <= self._count
        while len(self._processes) < world:
            here, there = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(there,), daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)

    def close(self) -> None:
        """End all processes; the next task starts new ones."""
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []


def _serve(pipe: Connection) -> None:
    while True:
        try:
            task, rank, world, port, args = pipe.recv()
        except EOFError:
            return
        os.environ.update(
            RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank),
            LOCAL_WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        )  # fmt: skip
        try:
            pipe.send(task(*args))
        except BaseException as error:
            pipe.send(Failed(type(error).__name__, str(error), traceback.format_exc()))


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
