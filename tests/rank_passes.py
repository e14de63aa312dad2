"""Groups of the ranks' backend run on two gloo ranks, Triton interpreted. Holds no tests."""

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from metainfer.backends.ranks.context import RankContext, set_context
from metainfer.backends.registry import installed
from metainfer.backends.torch.check import run_kernel
from metainfer.ir.graph import Op
from metainfer.ir.types import Mesh

RANKS = 2
# (kernel, group, operands of each rank, sizes)
Case = tuple[str, Op, Sequence[Sequence[np.ndarray]], dict[str, int]]


def run_on_ranks(cases: Sequence[Case], store: str) -> list[list[tuple[Any, ...]]]:
    """Results of every case on every rank.

    Args:
        cases: what to run, in order.
        store: path of a file that the ranks find each other by.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(RANKS, mp_context=context, initializer=_interpret) as pool:
        waiting = [pool.submit(_run, cases, rank, store) for rank in range(RANKS)]
        return [w.result(timeout=120) for w in waiting]


def _interpret() -> None:
    os.environ["TRITON_INTERPRET"] = "1"


def _run(cases: Sequence[Case], rank: int, store: str) -> list[tuple[Any, ...]]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    everybody = tuple(range(RANKS))
    group = dist.group.WORLD
    set_context(
        RankContext(
            Mesh((("tp", RANKS),)), rank, {"tp": rank}, {"tp": group}, {"tp": everybody}, 30.0
        )
    )
    found = installed()
    made = [
        run_kernel(found.kernels.get(name), op, list(data[rank]), found.layouts, env=env)
        for name, op, data, env in cases
    ]
    dist.destroy_process_group()
    return made
