"""GPUs that are not as a plan needs them: full, others, or of a compiler that refuses a kernel."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import metainfer.runtime.load as loading
from metainfer.backends.kernel import Constraint, Kernel, Registry
from metainfer.backends.layout import LayoutRegistry
from metainfer.backends.registry import Backends
from metainfer.backends.triton.launch import Launch
from metainfer.hardware import load_machine
from metainfer.ir.errors import CapacityError, CompileFailure, PlanError
from metainfer.ir.parser import parse_module
from metainfer.ir.plan import Plan
from metainfer.runtime.fallback import Standbys, StandIns, settled
from metainfer.runtime.legality import check_kernels

GIB = 2**30


def no_weights(name: str) -> np.ndarray:
    raise AssertionError(f"{name} was read")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Let torch see one GPU of 24 GiB with so many bytes free."""

    def seen(free: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (free, 24 * GIB))

    return seen


def test_too_little_free_memory_is_told_before_any_weight_is_read(
    forged, made: Plan, gpu: Callable[[int], None]
) -> None:
    meta = forged.meta
    meta["machine"]["devices"][0]["device"].update(kind="gpu")
    for term in meta["capacity"]["terms"]:
        term["bytes"] = 3 * GIB
    meta["capacity"]["total_bytes"] = 3 * GIB * len(meta["capacity"]["terms"])
    gpu(2 * GIB)
    with pytest.raises(CapacityError) as refused:
        loading.load(forged.seal(meta), no_weights, allow_machine_mismatch=True)
    needed = f"{3.0 * len(meta['capacity']['terms']):.2f} GiB"
    assert refused.value.what == f"GPU 0 has 2.00 GiB free, the plan needs {needed}"
    assert "weights           3.00 GiB" in refused.value.text
    assert "22.00 of its 24.00 GiB are taken" in refused.value.advice
    assert refused.value.exit_code == 3


def test_another_gpu_than_planned(
    gpu: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu(24 * GIB)
    planned, here = load_machine("1xh200"), load_machine("8x4090")
    monkeypatch.setattr(loading, "detect_machine", lambda kind, ranks: here)
    with pytest.raises(PlanError, match="was made for 1xh200, and this machine differs") as refused:
        loading.check_machine(planned)
    assert "missing features" in refused.value.text
    assert "wgmma" in refused.value.text
    assert "GB of memory" in refused.value.text
    assert "--allow-machine-mismatch" in refused.value.advice
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(PlanError, match="the plan is for 1xh200, here is no GPU"):
        loading.check_machine(planned, allow_mismatch=True)


# --- kernels that cannot be compiled --------------------------------------------------------------


def kernels(**faults: str) -> Backends:
    """Three kernels of relu by Triton and a generic one; some cannot be compiled."""
    registry = Registry()
    for name in ("a", "b", "c"):
        fault = faults.get(name)
        fits = Constraint("launches fit the card", lambda query, fault=fault: fault)
        over = {0: 0} if name != "b" else {}
        registry.add(Kernel(f"triton.{name}", "relu", "triton", fits=fits, in_place=over))
    registry.add(Kernel("torch.plain", "relu", "torch", generic=True))
    registry.add(Kernel("triton.exact_not", "relu", "triton", error=0.1, launches=0))
    registry.add(Kernel("triton.packed", "relu", "triton", layouts={0: "other"}, launches=0))
    return Backends(registry, LayoutRegistry())


MODULE = """
module m {
  dim T in [1, 8]
  main(%x: f32[T,8]) {
    %0 = relu(%x) : f32[T,8] by {T <= 4: triton.a, else: triton.b}
    return %0
  }
}
"""


def standbys(backends: Backends) -> Standbys:
    return Standbys(load_machine("1xh200").device(0), backends, is_exact=True)


def test_the_next_candidate_is_taken_when_a_plan_is_loaded() -> None:
    module, device = parse_module(MODULE), load_machine("1xh200").device(0)
    fine = kernels()
    assert settled(module, standbys(fine)) == (module, ())
    broken = kernels(a="Triton cannot compile it")
    with pytest.raises(PlanError, match=r"kernel triton\.a cannot run"):
        check_kernels(module, device, broken)
    found, notes = settled(module, standbys(broken))
    check_kernels(found, device, broken)
    assert [c.kernel for c in found.main.ops[0].choices] == ["triton.b", "triton.b"]
    assert notes == ("triton.b stands in for triton.a: Triton cannot compile it",)
    _, notes = settled(module, standbys(kernels(a="no", b="no", c="no")))
    assert "torch.plain, a generic one, stands in for triton.a: no" in notes


def test_the_next_candidate_is_taken_when_a_kernel_is_first_launched() -> None:
    backends, module = kernels(), parse_module(MODULE)
    op = module.main.ops[0]
    tried: list[str] = []

    def bind(kernel: Kernel) -> Callable[[], None]:
        def call() -> None:
            tried.append(kernel.name)
            if kernel.name in ("triton.a", "triton.b"):
                raise CompileFailure(f"Triton cannot compile {kernel.name}")

        return call

    stand_ins = StandIns(standbys(backends), module.limits())
    call = stand_ins.call(op, backends.kernels.get("triton.a"), bind)
    call()
    call()
    assert tried == ["triton.a", "triton.b", "triton.c", "triton.c"]
    assert stand_ins.notes == [
        "triton.b stands in for triton.a: Triton cannot compile triton.a",
        "triton.c stands in for triton.b: Triton cannot compile triton.b",
    ]
    # At other sizes what is known to be broken is not compiled again.
    stand_ins.call(op, backends.kernels.get("triton.a"), bind)()
    assert tried[4:] == ["triton.c"]
    assert len(stand_ins.notes) == 2
    # Where the result lies in an operand's place, only what may write there stands in.
    tried.clear()
    fresh = StandIns(standbys(backends), module.limits())
    fresh.call(op, backends.kernels.get("triton.a"), bind, placed=[0])()
    assert tried == ["triton.a", "triton.c"]


def test_without_another_candidate_the_failure_stays() -> None:
    registry, module = Registry(), parse_module(MODULE)
    only = registry.add(Kernel("triton.a", "relu", "triton"))
    stand_ins = StandIns(standbys(Backends(registry, LayoutRegistry())), module.limits())

    def bind(kernel: Kernel) -> Callable[[], None]:
        def call() -> None:
            raise CompileFailure(f"Triton cannot compile {kernel.name}")

        return call

    with pytest.raises(CompileFailure, match=r"compile triton\.a"):
        stand_ins.call(module.main.ops[0], only, bind)()


def test_what_the_compiler_raises_names_the_function() -> None:
    class CompilationError(Exception):
        pass

    class Function:
        __name__ = "gemm"
        arg_names = ()

        def __init__(self, error: Exception) -> None:
            self._error = error

        def __getitem__(self, grid: Any) -> Callable[..., None]:
            def run(**arguments: Any) -> None:
                raise self._error

            return run

    refused = Launch(Function(CompilationError("at 3:4\nno such instruction")), (1,), {})
    with pytest.raises(CompileFailure, match="cannot compile gemm here: no such instruction"):
        refused.run()
    with pytest.raises(ValueError, match="something else"):
        Launch(Function(ValueError("something else")), (1,), {}).run()
