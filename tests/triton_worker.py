"""Runs Triton kernels in Triton's interpreter: one process beside each that runs tests.

A process interprets Triton or compiles with it, decided when Triton is imported, so kernels are
interpreted in a process of their own and compiled in the one that runs the tests. Holds no tests.
"""

import atexit
import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from torch_samples import assert_close, scalar

from metainfer.backends.kernel import Kernel, Query
from metainfer.backends.registry import installed
from metainfer.backends.torch.check import run_kernel, run_reference
from metainfer.backends.triton.cross import faults_of, resources_of
from metainfer.backends.triton.fits import typed_call
from metainfer.hardware.device import Device
from metainfer.hardware.load import load_machine
from metainfer.ir.graph import Op
from metainfer.ir.interpret import Data

# One card for each way of computing: wgmma and much shared memory; mma.sync and little.
CARDS = {name: load_machine(name).device(0) for name in ("1xh200", "8xpcie")}


def interpreted(function: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """The result of a function (of a module, so that it can be named) in the interpreter."""
    return _worker().submit(function, *args, **named).result(timeout=120)


@cache
def _worker() -> ProcessPoolExecutor:
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(1, mp_context=context, initializer=_interpret)
    atexit.register(pool.shutdown, cancel_futures=True)
    return pool


def _interpret() -> None:
    os.environ["TRITON_INTERPRET"] = "1"


def run_named(name: str, op: Op, data: Sequence[Data], env: dict[str, int]) -> tuple[Data, ...]:
    """Results of an op by a kernel of the registry, on CPU tensors."""
    found = installed()
    card = CARDS["8xpcie"]
    return run_kernel(found.kernels.get(name), op, data, found.layouts, env=env, card=card)


def refused(name: str, op: Op, strided: frozenset[int] = frozenset()) -> list[str]:
    """What a kernel refuses on a card, in words, before anything is compiled."""
    query = Query(op, CARDS["1xh200"], {}, strided)
    return [str(r) for r in replace(installed().kernels.get(name), fits=None).refusals(query)]


def applies(name: str, op: Op, card: Device, limits: dict[str, tuple[int, int]]) -> list[str]:
    """What a kernel refuses on a card, in words, the compiler asked last."""
    return [str(r) for r in installed().kernels.get(name).refusals(Query(op, card, limits))]


def check_interpreted(
    name: str, op: Op, data: Sequence[Data], env: dict[str, int] | None = None, extra: float = 0.0
) -> None:
    """A kernel's interpreted results are the reference's."""
    kernel = installed().kernels.get(name)
    found = interpreted(run_named, name, op, list(data), env or {})
    compare(kernel, op, found, run_reference(op, data, env), extra)


def check_on_gpu(
    name: str, op: Op, data: Sequence[Data], env: dict[str, int] | None = None, extra: float = 0.0
) -> None:
    """A kernel's results on a CUDA device are the reference's."""
    found, card = installed(), CARDS["1xh200"]
    kernel = found.kernels.get(name)
    got = run_kernel(kernel, op, data, found.layouts, env=env, device="cuda", card=card)
    compare(kernel, op, got, run_reference(op, data, env), extra)


def compare(
    kernel: Kernel, op: Op, found: Sequence[Data], wanted: Sequence[Data], extra: float = 0.0
) -> None:
    """Tensors within one rounding of their type and the kernel's stated error; states alike."""
    tensors = [v for v in op.results if not v.is_state]
    for f, w, value in zip(found, wanted, tensors, strict=False):
        assert_close(f, w, value.tensor.dtype, kernel.error + extra)
    states = [v for v in op.results if v.is_state]
    if not states:
        return  # those that are only read come back all the same
    for value, f, w in zip(states, found[len(tensors) :], wanted[len(tensors) :], strict=True):
        assert isinstance(f, dict)
        assert isinstance(w, dict)
        for field, type_ in value.state.fields:
            pages, wanted_pages = np.asarray(f[field]), np.asarray(w[field])
            assert_close(pages, wanted_pages, scalar(type_.dtype.name), kernel.error + extra)


def check_compiles(
    name: str, op: Op, env: dict[str, int] | None = None, spills: bool = False
) -> None:
    """A kernel's launches compile for each of CARDS, within its limits."""
    found = installed()
    kernel = found.kernels.get(name)
    for card in CARDS.values():
        query = Query(op, card, {k: (n, n) for k, n in (env or {}).items()})
        scratch = kernel.workspace(query) if kernel.workspace else 0
        call = typed_call(op, env or {}, kernel.layouts, found.layouts, scratch)
        for launch in kernel.binder.launches(call):
            faults = faults_of(resources_of(launch, card), launch, card, spills=not spills)
            assert not faults, f"{card.name}: {faults}"
