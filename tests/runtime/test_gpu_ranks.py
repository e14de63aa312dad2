"""Plans on several GPUs, with and without peer access, answer what one GPU answers."""

import os
from pathlib import Path
from typing import Any

import pytest
import rank_cases
import rank_tasks
import torch
from hf_checkpoints import VOCAB, make_checkpoint
from rank_pool import RankPool

import metainfer

OPTIONS: dict[str, Any] = {
    "activations": "f32", "weights": "f32", "exact": True, "max_tokens": 24, "max_sequences": 3,
    "max_context": 64,
}  # fmt: skip
SHARED: dict[str, Any] = {
    "num_experts": 8, "num_attention_heads": 8, "num_hidden_layers": 2,
    "shared_expert_intermediate_size": 64,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "num_experts": 8, "num_attention_heads": 8, "head_dim": 16, "hidden_size": 64,
    "moe_intermediate_size": 64,
}  # fmt: skip
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"tp": 2}),
    ("llama", {"pp": 2}),
    ("qwen3_moe", {"tp": 2}),
    ("qwen3_moe", {"tp": 2, "ep": 2}),
    ("qwen3_moe", {"dp": 2, "ep": 2}),
    ("qwen3_moe", {"pp": 2}),
    ("qwen3_moe", {"tp": 2, "ep": 2, "replicas": 4}),
    ("qwen2_moe", {"tp": 2, "ep": 2}),
    ("qwen2_moe", {"dp": 2, "ep": 2}),
]
MACHINES = ("2xh200-nop2p", "2xh200")  # the second where devices reach each other's memory
NEW_TOKENS = 8
PROMPTS = [[(7 * n + 3 * k) % VOCAB for k in range(1 + 5 * n % 23)] for n in range(5)]

pytestmark = [
    pytest.mark.multigpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="torch sees fewer than two GPUs"),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    sizes: dict[str, dict[str, Any]] = {"llama": {}, "qwen3_moe": EXPERTS, "qwen2_moe": SHARED}
    return {kind: make_checkpoint(kind, folder / kind, **keys) for kind, keys in sizes.items()}


@pytest.fixture(scope="module")
def one_gpu(
    pool: RankPool, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("plans")
    found = {}
    for kind, model in models.items():
        metainfer.compile(str(model), "1xh200", out=folder / kind, **OPTIONS)
        found[kind] = pool.run(1, rank_tasks.answers, folder / kind, PROMPTS, NEW_TOKENS)
    return found


def skip_without_peers(hw: str) -> None:
    """Skip where the devices can't reach each other, whatever the library is told to leave out."""
    if hw == "2xh200" and not torch.cuda.can_device_access_peer(0, 1):
        pytest.skip("the GPUs do not reach each other's memory")


def test_algorithms_over_windows_are_the_reference(pool: RankPool) -> None:
    skip_without_peers("2xh200")
    if os.environ.get("NCCL_P2P_DISABLE") == "1":
        pytest.skip("peer access is turned off: the windows refuse, as they should")
    cases = [c for c in rank_cases.cases(2) if c[0].endswith(("_push", "_pull"))]
    assert pool.run(2, rank_tasks.differences, cases, "gpu") == []


@pytest.mark.parametrize("hw", MACHINES)
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(("kind", "layout"), CASES, ids=str)
def test_gpus_answer_what_one_answers(
    pool: RankPool, models: dict[str, Path], one_gpu: dict[str, Any], tmp_path: Path,
    kind: str, layout: dict[str, Any], overlap: bool, hw: str,
) -> None:  # fmt: skip
    skip_without_peers(hw)
    metainfer.compile(
        str(models[kind]), hw, out=tmp_path / "plan", overlap=overlap, **OPTIONS,
        **layout,
    )  # fmt: skip
    found = pool.run(2, rank_tasks.answers, tmp_path / "plan", PROMPTS, NEW_TOKENS)
    assert found == one_gpu[kind]


@pytest.mark.parametrize("hw", MACHINES)
@pytest.mark.parametrize(("kind", "layout"), CASES, ids=str)
def test_captured_steps_answer_what_single_launches_answer(
    pool: RankPool, models: dict[str, Path], tmp_path: Path, kind: str, layout: dict[str, Any],
    hw: str,
) -> None:  # fmt: skip
    skip_without_peers(hw)
    # In bf16: exact plans have attention that asks the host, which no graph holds.
    options = {**OPTIONS, "activations": "bf16", "weights": "auto", "exact": False}
    metainfer.compile(str(models[kind]), hw, out=tmp_path / "plan", **options, **layout)
    task = rank_tasks.captured_and_single
    captured, single, notes = pool.run(2, task, tmp_path / "plan", PROMPTS, NEW_TOKENS)
    assert notes == ()
    assert captured == single
