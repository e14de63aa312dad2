"""Decode steps of several ranks in buckets: captured by all ranks that meet in them, or by none."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rank_tasks
from hf_checkpoints import VOCAB, make_checkpoint
from rank_pool import RankPool

import metainfer
from metainfer.runtime.engine import Engine
from metainfer.runtime.sampling import SamplingParams

OPTIONS: dict[str, Any] = {
    "activations": "f32", "weights": "f32", "exact": True, "max_tokens": 24, "max_sequences": 3,
    "max_context": 64,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "num_experts": 8, "num_attention_heads": 8, "head_dim": 8, "hidden_size": 64,
    "moe_intermediate_size": 64,
}  # fmt: skip
NEW_TOKENS = 7


def prompts() -> list[list[int]]:
    """Five prompts of unequal lengths: decode steps of one to three sequences."""
    rng = np.random.default_rng(3)
    return [rng.integers(0, VOCAB, 1 + 5 * n % 23).tolist() for n in range(5)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3_moe", tmp_path_factory.mktemp("model") / "qwen3_moe", **EXPERTS)


@pytest.fixture(scope="module")
def wanted(checkpoint: Path) -> list[tuple[int, ...]]:
    model = metainfer.load(metainfer.compile(str(checkpoint), "cpu", **OPTIONS))
    found = Engine(model, end_ids=()).generate(prompts(), SamplingParams(max_tokens=NEW_TOKENS))
    return [one.token_ids for one in found]


def replayed(
    pool: RankPool, checkpoint: Path, folder: Path, layout: dict[str, Any], refusing: int | None
) -> Any:
    plan = metainfer.compile(str(checkpoint), "8xcpu", out=str(folder), **OPTIONS, **layout)
    count = plan.layout.num_ranks
    return pool.run(count, rank_tasks.replayed_answers, folder, prompts(), NEW_TOKENS, refusing)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"tp": 2}, marks=pytest.mark.thorough),
        {"pp": 2, "tp": 2, "ep": 2},
        pytest.param({"pp": 2, "dp": 2, "tp": 2, "ep": 4}, marks=pytest.mark.thorough),
    ],
    ids=lambda sizes: "-".join(f"{k}{v}" for k, v in sizes.items()),
)
def test_captured_steps_answer_what_one_rank_answers(
    pool: RankPool, checkpoint: Path, wanted: Any, tmp_path: Path, layout: dict[str, Any]
) -> None:
    ids, caught, replays, notes = replayed(pool, checkpoint, tmp_path / "plan", layout, None)
    assert ids == wanted
    assert 2 <= caught < replays
    assert notes == ()


@pytest.mark.parametrize("refusing", [0, 1])
def test_all_ranks_refuse_where_one_cannot_capture(
    pool: RankPool, checkpoint: Path, wanted: Any, tmp_path: Path, refusing: int
) -> None:
    layout: dict[str, Any] = {"tp": 2, "ep": 2}
    ids, caught, replays, notes = replayed(pool, checkpoint, tmp_path / "plan", layout, refusing)
    assert ids == wanted
    # The first step is tried and refused by both; none is tried after it.
    assert (caught, replays) == (1, 0)
    why = "a copy from the host" if refusing == 0 else "another rank cannot capture its part"
    assert [note.endswith(why) for note in notes] == [True]
