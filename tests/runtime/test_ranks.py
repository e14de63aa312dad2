"""Plans on several ranks answer what one rank answers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rank_tasks
from hf_checkpoints import VOCAB, make_checkpoint
from rank_pool import RankPool

import metainfer
from metainfer.ir.plan import Plan
from metainfer.runtime.engine import Engine
from metainfer.runtime.sampling import SamplingParams

SMALL: dict[str, Any] = {"max_tokens": 24, "max_sequences": 3, "max_context": 64}
EXACT: dict[str, Any] = {"activations": "f32", "weights": "f32", "exact": True}
NEW_TOKENS = 7
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3_moe": {"num_experts": 8, "num_attention_heads": 8, "head_dim": 8},
}
# (model, layout, other options): every axis, every way to spread experts, every pair of axes.
CHOSEN: list[tuple[str, dict[str, int], dict[str, Any]]] = [
    ("llama", {"tp": 2}, {}),
    ("llama", {"pp": 2}, {}),
    ("llama", {"pp": 2, "tp": 2}, {"forbids": ("ranks.all_reduce_one_shot",)}),
    ("qwen3_moe", {"tp": 2}, {}),
    ("qwen3_moe", {"tp": 2, "ep": 2}, {"weights": "fp8"}),
    ("qwen3_moe", {"dp": 2, "ep": 2}, {}),
    ("qwen3_moe", {"dp": 2, "tp": 2, "ep": 4}, {}),
    ("qwen3_moe", {"pp": 2, "dp": 2, "tp": 2, "ep": 2}, {}),
    ("qwen3_moe", {"tp": 8, "ep": 8}, {}),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {kind: make_checkpoint(kind, folder / kind, **keys) for kind, keys in MODELS.items()}


def prompts() -> list[list[int]]:
    """Eight prompts of unequal lengths, one of a single token."""
    rng = np.random.default_rng(3)
    return [rng.integers(0, VOCAB, 1 + 5 * n % 23).tolist() for n in range(8)]


def alone(plan: Plan) -> list[tuple[int, ...]]:
    model = metainfer.load(plan, allow_machine_mismatch=True)
    found = Engine(model, end_ids=()).generate(prompts(), SamplingParams(max_tokens=NEW_TOKENS))
    return [one.token_ids for one in found]


@pytest.fixture(scope="module")
def one_rank(models: dict[str, Path]) -> Any:
    """Answers of the plan for one rank, by model and options."""
    known: dict[tuple[str, str], list[tuple[int, ...]]] = {}

    def answers(kind: str, options: dict[str, Any]) -> list[tuple[int, ...]]:
        key = kind, str(options)
        if key not in known:
            plan = metainfer.compile(str(models[kind]), "cpu", **options)
            known[key] = alone(plan)
        return known[key]

    return answers


def name_of(value: object) -> str:
    return "-".join(f"{k}{v}" for k, v in value.items()) if isinstance(value, dict) else str(value)


@pytest.mark.parametrize(("kind", "layout", "more"), CHOSEN, ids=name_of)
def test_ranks_answer_what_one_answers(
    pool: RankPool, models: dict[str, Path], one_rank: Any, tmp_path: Path,
    kind: str, layout: dict[str, Any], more: dict[str, Any],
) -> None:  # fmt: skip
    options = {**EXACT, **SMALL, **more}
    plan = metainfer.compile(str(models[kind]), "8xcpu", out=tmp_path / "plan", **options, **layout)
    options.pop("forbids", None)
    wanted = one_rank(kind, options)
    assert len(set(wanted)) == len(wanted)
    count = plan.layout.num_ranks
    found = pool.run(count, rank_tasks.answers, tmp_path / "plan", prompts(), NEW_TOKENS)
    assert found == wanted
