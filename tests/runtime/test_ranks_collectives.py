"""Every algorithm of every collective beside what simulated ranks compute, and the self-test."""

from pathlib import Path

import pytest
import rank_cases
import rank_tasks
from hf_checkpoints import make_checkpoint
from rank_pool import Failed, RankPool

import metainfer
from metainfer.backends.ranks.algorithms import ALGORITHMS, COMPRESSED, FP8_ERROR
from metainfer.runtime.self_test import pattern, trials

ROUNDED = ("library", "islands", COMPRESSED)  # sums that are not the reference's bit for bit


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.thorough), 3, 8])
def test_algorithms_equal_the_reference_bit_for_bit(pool: RankPool, world: int) -> None:
    off = pool.run(world, rank_tasks.differences, rank_cases.cases(world))
    rounded = [line for line in off if line.startswith(tuple(f"all_reduce {a} " for a in ROUNDED))]
    assert [line for line in off if line not in rounded] == []
    for line in rounded:
        # Parts are within 500. The library rounds narrow floats between hops, islands at borders.
        size, bound = float(line.rsplit(" ", 1)[1]), 4.0 if "bf16" in line else 0.5
        assert size <= (FP8_ERROR * 500 * world if COMPRESSED in line else bound * world), line
    assert any(COMPRESSED in line for line in rounded)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plan")
    model = make_checkpoint("llama", folder / "model", num_hidden_layers=2)
    metainfer.compile(
        str(model), "2xcpu", tp=2, out=folder / "plan", activations="f32", weights="f32",
        max_tokens=32, max_sequences=2, max_context=64,
    )  # fmt: skip
    return folder / "plan"


def chosen(plan: Path) -> str:
    """The algorithm of the plan's all-reduces."""
    found = {t.kernel for t in trials([metainfer.Plan.read(plan).module("decode")])}
    return next(k for k in sorted(found) if "all_reduce" in k)


def test_trials_are_the_ends_of_every_row(plan: Path) -> None:
    read = metainfer.Plan.read(plan)
    found = trials(read.module(phase) for phase in read.phases)
    reduces = {t.shape for t in found if t.op.name == "all_reduce"}
    # Those of the blocks, and of the logits.
    assert reduces == {(1, 48), (2, 48), (32, 48), (1, 300), (2, 300)}
    one = next(t for t in found if t.shape == (32, 48))
    # Ranks, and places of a rank, have patterns of their own: an exchange of the two shows.
    assert (pattern(one, 0) != pattern(one, 1)).any()
    assert (pattern(one, 0)[:-1] != pattern(one, 0)[1:]).any()


@pytest.mark.parametrize("guilty", [pytest.param(0, marks=pytest.mark.thorough), 1])
def test_an_algorithm_that_does_nothing_is_caught(pool: RankPool, plan: Path, guilty: int) -> None:
    kernel = chosen(plan)
    found = pool.outcomes(2, rank_tasks.load_with_fault, plan, kernel, "does nothing", guilty)
    pool.close()
    for one in found:
        assert isinstance(one, Failed)
        assert one.kind == "RankError"
        assert f"rank {guilty}: all_reduce over tp of [1, 48] by {kernel}" in one.text
        assert "elements are wrong" in one.text


ALL_REDUCES = tuple(f"ranks.all_reduce_{name}" for name in ALGORITHMS["all_reduce"])


def test_an_algorithm_that_damages_data_is_replaced(pool: RankPool, plan: Path) -> None:
    asked = [5, 6, 7], 6
    notes, wanted = pool.run(2, rank_tasks.answer_with_a_liar, plan, (), 0, *asked)
    assert notes == ()
    kernel = chosen(plan)
    notes, found = pool.run(2, rank_tasks.answer_with_a_liar, plan, (kernel,), 1, *asked)
    assert found == wanted
    (note,) = notes
    assert note.startswith(f"another algorithm stands in for {kernel}: rank 1: all_reduce over tp")
    # Two of them lie: the third does it.
    liars = (kernel, next(k for k in ALL_REDUCES if k != kernel))
    notes, found = pool.run(2, rank_tasks.answer_with_a_liar, plan, liars, 0, *asked)
    assert found == wanted
    assert 1 <= len(notes) <= 2


def test_where_all_algorithms_damage_data_nothing_runs(pool: RankPool, plan: Path) -> None:
    liars = ALL_REDUCES
    found = pool.outcomes(2, rank_tasks.answer_with_a_liar, plan, liars, 1, [5], 2)
    for one in found:
        assert isinstance(one, Failed)
        assert one.kind == "RankError"
        assert "rank 1: all_reduce over tp of [1, 48] by ranks.all_reduce_" in one.text
        assert "1 of 48 elements are wrong" in one.text


def test_an_algorithm_that_hangs_is_an_error_within_its_limit(pool: RankPool, plan: Path) -> None:
    kernel = chosen(plan)
    found = pool.outcomes(2, rank_tasks.load_with_fault, plan, kernel, "hangs", 1, limit_s=15)
    pool.close()
    for rank, one in enumerate(found):
        assert isinstance(one, Failed)
        assert one.kind == "RankError"
        assert f"rank {rank}: all_reduce over tp of" in one.text
        assert "it did not end within 2 s" in one.text
        assert "NCCL_P2P_DISABLE=1" in one.text


def test_a_rank_that_hangs_in_a_step_is_named_with_the_op(pool: RankPool, plan: Path) -> None:
    found = pool.outcomes(2, rank_tasks.hang_in_a_step, plan, chosen(plan), limit_s=30)
    pool.close()
    assert isinstance(found[0], Failed)
    assert found[0].kind == "RankError"
    assert "rank 0: all_reduce over tp with 1 did not end within 1.5 s" in found[0].text
    assert "--time-limit" in found[0].text


def test_waiting_for_work_has_no_limit(pool: RankPool, plan: Path) -> None:
    assert pool.run(2, rank_tasks.answer_after_a_rest, plan) == 3
