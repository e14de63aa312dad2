"""Plans on several ranks answer what one rank answers."""

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rank_tasks
import torch
from hf_checkpoints import VOCAB, make_checkpoint
from rank_pool import RankPool
from safetensors.torch import save_file
from torch import nn

import metainfer
from metainfer.ir.histogram import RoutingHistogram
from metainfer.ir.plan import Plan
from metainfer.ir.synthetic_router import zipf
from metainfer.runtime.engine import Engine
from metainfer.runtime.sampling import SamplingParams

SMALL: dict[str, Any] = {"max_tokens": 24, "max_sequences": 3, "max_context": 64}
EXACT: dict[str, Any] = {"activations": "f32", "weights": "f32", "exact": True}
NEW_TOKENS = 7
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3_moe": {
        "num_experts": 8, "num_attention_heads": 8, "head_dim": 8, "hidden_size": 64,
        "moe_intermediate_size": 64,
    },
    # An expert that all tokens go through, too.
    "qwen2_moe": {
        "num_experts": 8, "num_attention_heads": 8, "num_hidden_layers": 2,
        "shared_expert_intermediate_size": 64,
    },
    # Latents that every rank holds.
    "deepseek_v3": {"num_hidden_layers": 2, "moe_intermediate_size": 64},
}  # fmt: skip
# Experts that a skewed histogram places, hot ones twice.
SKEWED = {"routing": "skewed", "replicas": 4}
PLAIN = {"overlap": False}
# (model, layout, other options): every axis, every way to spread experts, and pairs of them with
# formats, algorithms, placement and overlap.
Case = tuple[str, dict[str, Any], dict[str, Any]]
CHOSEN: list[Case] = [
    ("llama", {"tp": 2}, {}),
    ("llama", {"pp": 2, "tp": 2}, {"forbids": ("ranks.all_reduce_one_shot",)}),
    ("qwen3_moe", {"tp": 2}, {"weights": "mxfp4"}),
    ("qwen3_moe", {"tp": 2, "ep": 2}, {"weights": "fp8", **PLAIN}),
    ("qwen3_moe", {"tp": 4, "ep": 4}, SKEWED),
    ("qwen3_moe", {"dp": 2, "tp": 2, "ep": 4}, {"weights": "nvfp4", **PLAIN}),
    ("qwen3_moe", {"pp": 2, "dp": 2, "tp": 2, "ep": 2}, {"weights": "fp8"}),
    ("qwen2_moe", {"dp": 2, "ep": 2}, {"micro_batches": 2}),
    ("deepseek_v3", {"tp": 2, "ep": 2}, {}),
]
LAYOUTS: dict[str, list[dict[str, Any]]] = {
    "llama": [{"tp": 2}, {"tp": 4}, {"pp": 2}, {"pp": 3}, {"pp": 2, "tp": 2}, {"pp": 2, "tp": 4}],
    "qwen3_moe": [
        {"tp": 2}, {"tp": 4}, {"tp": 8}, {"tp": 2, "ep": 2}, {"tp": 4, "ep": 4}, {"tp": 8, "ep": 8},
        {"dp": 2}, {"dp": 2, "ep": 2}, {"dp": 4, "ep": 4}, {"dp": 8, "ep": 8},
        {"dp": 2, "tp": 2, "ep": 1}, {"dp": 2, "tp": 2, "ep": 2}, {"dp": 2, "tp": 2, "ep": 4},
        {"dp": 2, "tp": 4, "ep": 8}, {"dp": 4, "tp": 2, "ep": 8}, {"pp": 2}, {"pp": 2, "tp": 2},
        {"pp": 2, "dp": 2, "tp": 2, "ep": 1}, {"pp": 2, "dp": 2, "tp": 2, "ep": 2},
        {"pp": 2, "dp": 2, "tp": 2, "ep": 4}, {"pp": 2, "tp": 4, "ep": 4},
        {"pp": 2, "dp": 4, "ep": 4},
    ],
    "qwen2_moe": [{"tp": 2}, {"tp": 2, "ep": 2}, {"dp": 2, "ep": 2}],
    "deepseek_v3": [{"tp": 2}, {"tp": 2, "ep": 2}, {"dp": 2, "ep": 2}, {"pp": 2, "tp": 2}],
}  # fmt: skip


_FORMATS = ("f32", "fp8", "mxfp4", "nvfp4")


def all_cases() -> list[Case]:
    found: list[Case] = []
    for kind, layouts in LAYOUTS.items():
        for layout, weights, more in product(layouts, _FORMATS, ({}, PLAIN, SKEWED)):
            # A placement needs experts that are spread.
            if more is not SKEWED or layout.get("ep", 1) > 1:
                found.append((kind, layout, {"weights": weights, **more}))
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "layout" in metafunc.fixturenames:
        cases = all_cases() if metafunc.config.getoption("--all-layouts") else CHOSEN
        metafunc.parametrize(("kind", "layout", "more"), cases, ids=name_of)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {kind: make_checkpoint(kind, folder / kind, **keys) for kind, keys in MODELS.items()}


@pytest.fixture(scope="module")
def skewed(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """By model, a histogram in which few experts have most of the tokens."""
    folder = tmp_path_factory.mktemp("routing")
    files = {kind: folder / f"{kind}.json" for kind in models}
    for kind, file in files.items():
        count = MODELS[kind].get("num_hidden_layers", 3)
        layers = tuple(f"model.layers.{n}.mlp.experts" for n in range(count))
        counts = tuple(tuple(int(1000 * c) for c in zipf(8, 1.2, seed)) for seed in range(count))
        RoutingHistogram(models[kind].name, layers, counts).save(file)
    return {kind: str(file) for kind, file in files.items()}


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


def test_ranks_answer_what_one_answers(
    pool: RankPool, models: dict[str, Path], one_rank: Any, tmp_path: Path,
    skewed: dict[str, str], kind: str, layout: dict[str, Any], more: dict[str, Any],
) -> None:  # fmt: skip
    options = {**EXACT, **SMALL, **more}
    if "routing" in more:
        options["routing"] = skewed[kind]
    plan = metainfer.compile(str(models[kind]), "8xcpu", out=tmp_path / "plan", **options, **layout)
    wanted = one_rank(kind, {**EXACT, **SMALL, "weights": options["weights"]})
    assert len(set(wanted)) == len(wanted)
    count = plan.layout.num_ranks
    found = pool.run(count, rank_tasks.answers, tmp_path / "plan", prompts(), NEW_TOKENS)
    assert found == wanted


def test_a_module_is_called_on_all_ranks(pool: RankPool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 8))
    save_file(mlp.state_dict(), tmp_path / "mlp.safetensors")
    example = (torch.randn(3, 16),)
    metainfer.compile(
        mlp, "2xcpu", tp=2, example_inputs=example, dynamic=(("B",),), out=tmp_path / "plan"
    )
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal((rows, 16)).astype(np.float32) for rows in (1, 7)]
    weights = tmp_path / "mlp.safetensors"
    found = pool.run(2, rank_tasks.call_module, tmp_path / "plan", weights, inputs)
    for x, y in zip(inputs, found, strict=True):
        wanted = mlp(torch.from_numpy(x)).detach().numpy()
        np.testing.assert_allclose(y, wanted, atol=1e-5)
