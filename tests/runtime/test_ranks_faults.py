"""Ranks that do not fit together: every one of them says so, and nobody waits."""

from pathlib import Path
from typing import Any

import pytest
import rank_tasks
from hf_checkpoints import make_checkpoint
from rank_pool import Failed, RankPool

import metainfer
from metainfer.ir.errors import PlanError
from metainfer.runtime.ranks import launched

SMALL: dict[str, Any] = {"max_tokens": 16, "max_sequences": 2, "max_context": 32}


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two plans for two ranks, and one for a machine with GPUs."""
    folder = tmp_path_factory.mktemp("plans")
    model = str(make_checkpoint("llama", folder / "model", num_hidden_layers=1))
    for name, hw, pages in (("a", "2xcpu", 16), ("b", "2xcpu", 32), ("gpu", "2xh200", 16)):
        metainfer.compile(model, hw, tp=2, out=folder / name, page_size=pages, **SMALL)
    return {name: folder / name for name in ("a", "b", "gpu")}


def failures(found: list[Any], kind: str) -> list[str]:
    for one in found:
        assert isinstance(one, Failed), one
        assert one.kind == kind, one.trace
    return [one.text for one in found]


def test_ranks_with_different_plans(pool: RankPool, plans: dict[str, Path]) -> None:
    a, b = (metainfer.Plan.read(plans[name]).hash for name in "ab")
    found = pool.outcomes(2, rank_tasks.load_plan, [plans["a"], plans["b"]])
    for text in failures(found, "PlanError"):
        assert "the ranks have different plans" in text
        assert f"ranks 0: plan {a}" in text
        assert f"ranks 1: plan {b}" in text
        assert "give every rank the same folder" in text


def test_more_ranks_than_planned(pool: RankPool, plans: dict[str, Path]) -> None:
    found = pool.outcomes(3, rank_tasks.load_plan, [plans["a"]] * 3)
    for text in failures(found, "PlanError"):
        assert "the plan is for 2 ranks (tp=2), 3 are running" in text
        assert "--nproc 2" in text


def test_fewer_ranks_than_planned(pool: RankPool, plans: dict[str, Path]) -> None:
    (text,) = failures(pool.outcomes(1, rank_tasks.load_plan, [plans["a"]]), "PlanError")
    assert "the plan is for 2 ranks (tp=2), 1 are running" in text


def test_no_gpu_where_the_plan_wants_one(pool: RankPool, plans: dict[str, Path]) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there are GPUs here")
    found = pool.outcomes(2, rank_tasks.load_plan, [plans["gpu"]] * 2)
    for text in failures(found, "PlanError"):
        assert "the plan is for 2xh200, here is no GPU" in text


def test_a_rank_that_dies_is_noticed_by_the_others(pool: RankPool, plans: dict[str, Path]) -> None:
    found = pool.outcomes(2, rank_tasks.lose_a_rank, plans["a"])
    (text,) = failures(found[:1], "RankError")
    assert "rank 0 lost a peer in" in text
    assert found[1] == "left"
    pool.close()


@pytest.mark.parametrize(("rank", "world"), [("2", "2"), ("x", "2"), ("-1", "2"), ("0", "0")])
def test_numbers_that_are_no_rank(monkeypatch: pytest.MonkeyPatch, rank: str, world: str) -> None:
    for name, value in (("RANK", rank), ("WORLD_SIZE", world), ("MASTER_ADDR", "localhost")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(PlanError, match="is no rank"):
        launched()


@pytest.mark.thorough
def test_a_leader_that_stops_in_a_step_does_not_wait(
    pool: RankPool, plans: dict[str, Path]
) -> None:
    found = pool.outcomes(2, rank_tasks.stop_in_a_step, plans["a"])
    pool.close()
    assert found[0] < 3
    assert isinstance(found[1], Failed)
    assert found[1].kind == "RankError"
