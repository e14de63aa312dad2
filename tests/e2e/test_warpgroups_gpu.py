"""A whole model whose attention is that of warpgroups, on a GPU: logits, and steps as graphs.

No process interprets that kernel: this is where its launches are bound, kept and captured.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hf_checkpoints import VOCAB, make_checkpoint
from lm_steps import Oracle, Sequences, load_plan

import metainfer
from metainfer.ir.plan import Plan
from metainfer.runtime.engine import Engine
from metainfer.runtime.sampling import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
KERNEL = "triton.attention_warpgroups"
SIZES: dict[str, Any] = {"head_dim": 64, "max_position_embeddings": 512}
BOUND = 0.04  # of the largest logit; bf16 between ops, three layers
LENGTHS = (300, 131, 7)  # over several blocks of keys, into the second one, within the first


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "llama"
    return make_checkpoint("llama", path, dtype=torch.bfloat16, **SIZES)


@pytest.fixture(scope="module")
def plan(model: Path) -> Plan:
    made = metainfer.compile(
        str(model), "1xh200", pins=(("attention", KERNEL),), max_tokens=512, max_sequences=4,
        max_context=512, strict=True,
    )  # fmt: skip
    for phase in made.phases:
        ops = [o for o in made.module(phase).graph("layer").ops if o.name == "attention"]
        assert {choice.kernel for op in ops for choice in op.choices} == {KERNEL}
    return made


def tokens_of(number: int) -> list[int]:
    rng = np.random.default_rng(number)
    return rng.integers(0, VOCAB, LENGTHS[number]).tolist()


def test_logits_are_those_of_transformers(model: Path, plan: Plan) -> None:
    """Prompts in two steps, the second one beside what is cached, then two steps of decoding."""
    sequences, oracle = Sequences(load_plan(plan)), Oracle(model)
    texts = [tokens_of(n) for n in range(len(LENGTHS))]
    wanted = [oracle.logits(text) for text in texts]
    ends = [[len(t) // 3, len(t) - 2, len(t) - 1, len(t)] for t in texts]
    for step in range(4):
        begins = [0 if step == 0 else e[step - 1] for e in ends]
        chunks = {n: t[begins[n] : ends[n][step]] for n, t in enumerate(texts)}
        found = sequences.run("prefill" if step < 2 else "decode", chunks)
        rows = np.stack([one[e[step] - 1] for one, e in zip(wanted, ends, strict=True)])
        assert np.abs(found - rows).max() <= BOUND * np.abs(rows).max()


def test_what_is_captured_answers_what_is_launched(plan: Plan) -> None:
    """Keys are described to the copy engine by the host, in a graph once for all its replays."""
    model = load_plan(plan)
    prompts = [tokens_of(n) for n in range(len(LENGTHS))]
    params = [SamplingParams(max_tokens=5 + 4 * n) for n in range(len(prompts))]
    captured = [a.token_ids for a in Engine(model, end_ids=()).generate(prompts, params)]
    assert model.run_notes == ()
    model.launch_by_launch()
    launched = [a.token_ids for a in Engine(model, end_ids=()).generate(prompts, params)]
    assert captured == launched
    assert [len(ids) for ids in captured] == [5, 9, 13]
