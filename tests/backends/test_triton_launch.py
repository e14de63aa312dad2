"""Launches: what the interpreter computes, what a card takes, what is refused."""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import kept_figures
import ml_dtypes
import numpy as np
import pytest
import torch
from triton_worker import CARDS, interpreted

from metainfer.backends.torch.call import TorchCall
from metainfer.backends.triton import cross
from metainfer.backends.triton.cross import faults_of, resources_of, target_of
from metainfer.backends.triton.launch import Launch, TritonBinder
from metainfer.ir.errors import Unsupported

META = torch.device("meta")


def product(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, **options: Any) -> Launch:
    from triton_samples import add_row, product_and_row

    (m, k), n = x.shape, w.shape[0]
    row = torch.ones(n, dtype=x.dtype, device=x.device)
    return Launch(
        product_and_row,
        (-(-m // 16), -(-n // 32)),
        {"x": x, "w": w, "y": y, "operands": (row, 1), "rows": m, "columns": n, "inner": k},
        {"epilogue": add_row, "BM": 16, "BN": 32, "BK": 32},
        **{"num_warps": 4, "num_stages": 3, **options},
    )


def multiplied(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """The product in the interpreter, x and w given as bf16 bit patterns."""
    from metainfer.backends.triton.interpreter import is_interpreting, prepare

    assert is_interpreting()
    prepare("cpu")
    a, b = (torch.from_numpy(t).view(torch.bfloat16) for t in (x, w))
    y = torch.full((a.shape[0], b.shape[0]), float("nan"), dtype=torch.bfloat16)
    product(a, b, y).run()
    return y.view(torch.int16).numpy()


def test_the_interpreter_multiplies_bf16_and_rounds_to_even() -> None:
    rng = np.random.default_rng(3)
    x, w = (rng.normal(size=s).astype(ml_dtypes.bfloat16) for s in ((17, 70), (33, 70)))
    found = interpreted(multiplied, x.view(np.int16), w.view(np.int16)).view(ml_dtypes.bfloat16)
    exact = x.astype(np.float64) @ w.astype(np.float64).T + 1
    wanted = exact.astype(np.float32).astype(ml_dtypes.bfloat16)
    # The order of a float32 sum moves a few results across a tie, by one step.
    assert np.mean(found != wanted) < 0.01
    np.testing.assert_allclose(found.astype(np.float64), exact, rtol=2.0**-8, atol=1e-5)


def typed(**options: Any) -> Launch:
    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=META)

    return product(empty(64, 128), empty(64, 128), empty(64, 64), **options)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cross, "_FOUND", {})
    return tmp_path / "metainfer" / "triton" / "resources"


def test_a_card_that_is_not_here(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card = CARDS["8xpcie"]
    launch = typed(matrix="bf16")
    found = resources_of(launch, card)
    assert found.registers > 0
    assert 0 < found.shared_bytes < card.smem_per_block_bytes
    assert found.matrix == ("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",)
    assert faults_of(found, launch, card) == []
    (kept,) = own_cache.iterdir()
    assert json.loads(kept.read_text())["registers"] == found.registers
    monkeypatch.setattr(cross, "_compiled", None)
    monkeypatch.setattr(cross, "_FOUND", {})
    assert resources_of(launch, card) == found  # read from disk: nothing is left to compile with


def test_damaged_figures_are_made_anew(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card, launch = CARDS["8xpcie"], typed()
    found = resources_of(launch, card)
    (kept,) = own_cache.iterdir()
    kept.write_text("{")
    monkeypatch.setattr(cross, "_FOUND", {})
    assert resources_of(launch, card) == found


def test_figures_that_cannot_be_kept_are_made_nevertheless(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_cache.parent.parent.mkdir()
    own_cache.parent.write_text("a file where the folder should be")
    made = cross.Resources(1, 2, 3, ())
    monkeypatch.setattr(cross, "_compiled", lambda *given: made)
    assert resources_of(typed(), CARDS["8xpcie"]) == made


def test_figures_that_tests_keep_spare_the_compiler(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kept_figures.cache() == own_cache
    assert kept_figures.FIELDS == tuple(field.name for field in fields(cross.Resources))
    found = resources_of(typed(), CARDS["8xpcie"])
    assert kept_figures.pack(own_cache, tmp_path / "kept.json") == 1
    (made,) = own_cache.iterdir()
    made.unlink()
    kept_figures.unpack(tmp_path / "kept.json", own_cache)
    monkeypatch.setattr(cross, "_compiled", None)
    monkeypatch.setattr(cross, "_FOUND", {})
    assert resources_of(typed(), CARDS["8xpcie"]) == found


def test_faults_name_what_is_over() -> None:
    card, launch = CARDS["8xpcie"], typed(matrix="f8e4m3")
    found = replace(
        resources_of(launch, card), shared_bytes=card.smem_per_block_bytes + 1, spilled_bytes=100
    )
    assert faults_of(found, launch, card) == [
        "101,377 bytes of shared memory, 101,376 are there",
        "100 bytes of registers spilled",
        "wanted a matrix instruction for f8e4m3, got bf16 "
        "(mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32)",
    ]
    assert len(faults_of(found, launch, card, spills=False)) == 2
    # Timed, and quicker than what spills less.
    assert len(faults_of(found, replace(launch, most_spilled=100), card)) == 2
    assert len(faults_of(found, replace(launch, most_spilled=99), card)) == 3


def test_devices_that_triton_does_not_know() -> None:
    card = replace(CARDS["8xpcie"], capability="abc")
    with pytest.raises(Unsupported, match="does not compile for rtx_6000d"):
        target_of(card)


def test_code_that_triton_refuses(own_cache: Path) -> None:
    launch = typed()
    odd = replace(launch, constants={**launch.constants, "BK": 31})
    with pytest.raises(Unsupported, match="cannot compile product_and_row for rtx_6000d"):
        resources_of(odd, CARDS["8xpcie"])


def test_cpu_tensors_are_refused_where_nothing_interprets() -> None:
    binder = TritonBinder(lambda call: (typed(),))
    with pytest.raises(Unsupported, match="do not run on CPU tensors"):
        binder.run(TorchCall(None, (), (torch.zeros(1),), {}))  # type: ignore[arg-type]
