"""Memory that ranks share: nobody overwrites what a slow peer reads, nothing stays behind."""

from pathlib import Path

import pytest
import rank_tasks
from hf_checkpoints import make_checkpoint
from rank_pool import RankPool

import metainfer
from metainfer.backends.ranks.direct import DIRECT
from metainfer.backends.ranks.windows import LEAST_BYTES, bucket_bytes, padded

ALGORITHMS = sorted(DIRECT["all_reduce"])


@pytest.mark.parametrize("late", ["reading", "writing"])
def test_a_slow_rank_reads_what_was_written_for_it(pool: RankPool, late: str) -> None:
    assert set(pool.run(2, rank_tasks.delayed_sums, ALGORITHMS, late, 2)) == {0}


def test_with_one_half_a_slow_rank_would_read_the_next_sum(pool: RankPool) -> None:
    found = pool.run(2, rank_tasks.delayed_sums, ["one_shot_push", "one_shot_pull"], "reading", 1)
    assert min(found) > 0


def test_sizes_share_windows_that_end_with_the_ranks(pool: RankPool) -> None:
    halves, left = pool.run(3, rank_tasks.windows_made, [1, 100, 2 << 20, 3 << 20, LEAST_BYTES])
    assert halves == [1 << 20, 2 << 20, 4 << 20]
    assert left == []


@pytest.mark.parametrize("guilty", [0, 1])
def test_what_one_rank_cannot_map_all_refuse(pool: RankPool, guilty: int) -> None:
    found = pool.outcomes(2, rank_tasks.windows_refused, guilty)
    assert set(found) == {
        "the ranks along tp share no memory: "
        f"rank {guilty} cannot map the memory of rank 0: not allowed here"
    }


def test_sizes_of_buckets() -> None:
    assert [bucket_bytes(n) for n in (0, LEAST_BYTES, LEAST_BYTES + 1)] == [
        LEAST_BYTES, LEAST_BYTES, 2 * LEAST_BYTES,
    ]  # fmt: skip
    assert [padded(n) for n in (0, 1, 16, 17)] == [0, 16, 16, 32]


MACHINE = """\
extends = "2xcpu"
name = "2xcpu-shared"
title = "two ranks that share memory"

[[links]]
from = ["cpu0", "cpu1"]
to = "socket0"
kind = "memory"
read = "13 GB/s"
write = "13 GB/s"
read_latency = "0.1 us"
write_latency = "0.1 us"
p2p = true
basis = "assumed"
source = "test"
"""


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan of pushes."""
    folder = tmp_path_factory.mktemp("shared")
    (folder / "shared.toml").write_text(MACHINE)
    model = make_checkpoint("llama", folder / "model", num_hidden_layers=2)
    found = metainfer.compile(
        str(model), str(folder / "shared.toml"), tp=2, out=folder / "plan", activations="f32",
        weights="f32", max_tokens=32, max_sequences=2, max_context=64,
    )  # fmt: skip
    kernels = {c.kernel for g in found.module("decode").graphs for o in g.ops for c in o.choices}
    assert any(name.endswith("_push") for name in kernels)
    return folder / "plan"


def test_a_plan_of_pushes_answers_and_one_that_fails_is_replaced(
    pool: RankPool, plan: Path
) -> None:
    asked = [5, 6, 7], 6
    notes, wanted = pool.run(2, rank_tasks.answer_with_a_liar, plan, (), 0, *asked)
    assert notes == ()
    liars = ("ranks.all_reduce_one_shot_push",)
    notes, found = pool.run(2, rank_tasks.answer_with_a_liar, plan, liars, 1, *asked)
    assert found == wanted
    assert [n.partition(":")[0] for n in notes] == [
        "another algorithm stands in for ranks.all_reduce_one_shot_push"
    ]


def test_where_no_memory_is_shared_the_library_stands_in(pool: RankPool, plan: Path) -> None:
    notes, found = pool.run(2, rank_tasks.answer_without_windows, plan, [5, 6, 7], 6)
    _, wanted = pool.run(2, rank_tasks.answer_with_a_liar, plan, (), 0, [5, 6, 7], 6)
    assert found == wanted
    assert all("cannot map the memory" in note and "all ranks refuse it" in note for note in notes)
    assert notes
