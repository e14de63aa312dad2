"""Layers with an expert of all tokens on a GPU: transformers' logits, streams on and off."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hf_checkpoints import VOCAB, make_checkpoint
from lm_steps import Oracle, Sequences, load_plan

import metainfer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
# All experts are chosen: in bf16 a near tie would choose others.
SIZES: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 4}
BOUND = 0.04  # of the largest logit; bf16 between ops, three layers
LENGTH = 40


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    return make_checkpoint("qwen2_moe", path, dtype=torch.bfloat16, **SIZES)


def logits_of(plan: Any) -> list[np.ndarray]:
    """A prefill of three sequences, then two steps of decoding."""
    loaded = load_plan(plan)
    texts = [tokens_of(n) for n in range(3)]
    sequences = Sequences(loaded)
    found = [sequences.run("prefill", {n: t[:-2] for n, t in enumerate(texts)})]
    for at in (-2, -1):
        found.append(sequences.run("decode", {n: [t[at]] for n, t in enumerate(texts)}))
    return found


def tokens_of(number: int) -> list[int]:
    rng = np.random.default_rng(number)
    return rng.integers(0, VOCAB, LENGTH - 13 * number).tolist()


@pytest.mark.parametrize("overlap", [True, False])
def test_logits_are_those_of_transformers(model: Path, overlap: bool) -> None:
    plan = metainfer.compile(str(model), "1xh200", overlap=overlap, strict=True)
    for phase in plan.phases:
        ops = plan.module(phase).graph("layer").ops
        kinds = {str(op.attr.get("kind", op.name)) for op in ops}
        # On streams the routed experts stand apart from what is added to their sum.
        assert ("experts" if overlap else "experts_add_rms_norm") in kinds
    wanted = [Oracle(model).logits(tokens_of(n)) for n in range(3)]
    for step, found in enumerate(logits_of(plan)):
        rows = np.stack([one[len(one) - 3 + step] for one in wanted])
        assert np.abs(found - rows).max() <= BOUND * np.abs(rows).max()


def test_streams_change_no_logit(model: Path) -> None:
    plans = [metainfer.compile(str(model), "1xh200", overlap=o) for o in (True, False)]
    apart, together = (logits_of(plan) for plan in plans)
    for found, wanted in zip(apart, together, strict=True):
        assert np.abs(found - wanted).max() <= 2.0**-7 * np.abs(wanted).max()
