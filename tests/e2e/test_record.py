"""`metainfer record` on a tiny Qwen3-MoE: counts are those of transformers' routers."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hf_checkpoints import make_checkpoint
from refusals import refuse
from typer.testing import CliRunner

import metainfer
from metainfer.cli.app import app
from metainfer.ir.histogram import RoutingHistogram
from metainfer.runtime.engine import Engine
from metainfer.runtime.load import LoadedModel
from metainfer.runtime.record import RecordingRunner, routed_layers
from metainfer.runtime.sampling import SamplingParams

PROMPTS = [[5, 9, 200, 31, 7], [88, 1], [17, 17, 3, 250, 41, 6, 12, 99, 140, 8]]
CHOSEN = 3  # of 6 experts


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny_moe"
    return make_checkpoint("qwen3_moe", folder, tokenizer=True, num_hidden_layers=2)


@pytest.fixture(scope="module")
def plan(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "tiny"
    sizes: dict[str, Any] = {"max_tokens": 8, "max_sequences": 2, "max_context": 64}
    metainfer.compile(tiny, "cpu", **sizes).save(path)
    return path


@pytest.fixture
def model(plan: Path) -> Iterator[LoadedModel]:
    threads = torch.get_num_threads()
    yield metainfer.load(plan, num_threads=1)
    torch.set_num_threads(threads)


def recorder(model: LoadedModel) -> RecordingRunner:
    layers = {p: routed_layers(model.executor(p).flat) for p in model.plan.phases}
    return RecordingRunner(model, layers)


def oracle_counts(path: Path, sequences: list[list[int]]) -> np.ndarray:
    """Experts that transformers' routers choose for sequences. Shapes: -> [layers, experts]."""
    loaded = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    counts = np.zeros((2, 6), np.int64)
    for ids in sequences:
        with torch.no_grad():
            made = loaded(torch.tensor([ids]), output_router_logits=True, use_cache=False)
        for layer, logits in enumerate(made.router_logits):
            chosen = logits.topk(CHOSEN, dim=-1).indices.numpy().ravel()
            counts[layer] += np.bincount(chosen, minlength=6)
    return counts


def test_counts_are_those_of_transformers_and_answers_those_of_run(
    tiny: Path, model: LoadedModel
) -> None:
    params = SamplingParams(max_tokens=6)
    plain = Engine(model, end_ids=()).generate(PROMPTS, params)
    runner = recorder(model)
    found = Engine(runner, end_ids=()).generate(PROMPTS, params)
    assert [c.token_ids for c in found] == [c.token_ids for c in plain]
    # The last token of an answer is never an input.
    sequences = [p + list(c.token_ids[:-1]) for p, c in zip(PROMPTS, found, strict=True)]
    assert runner.num_tokens == sum(map(len, sequences))
    histogram = runner.histogram("tiny_moe")
    assert histogram.layers == ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts")
    np.testing.assert_array_equal(histogram.array(), oracle_counts(tiny, sequences))


def test_record_writes_what_it_counts(plan: Path, tmp_path: Path) -> None:
    prompts, out = tmp_path / "p.txt", tmp_path / "h.json"
    prompts.write_text("hello there\n\nwhat?\n")
    arguments = ["record", plan, "--prompts", prompts, "--out", out, "--max-new-tokens", "3"]
    result = CliRunner().invoke(app, [*map(str, arguments), "--threads", "1", "--json"])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    found = RoutingHistogram.read(out)
    assert found.model == told["model"] == metainfer.Plan.read(plan).meta["model"]["name"]
    assert (told["experts"], told["layers"]) == (6, 2)
    assert found.array().sum(axis=1).tolist() == [told["tokens"] * CHOSEN] * 2
    assert told["active_experts"] == (found.array() > 0).sum(axis=1).tolist()


@pytest.mark.parametrize(
    ("prompts", "out", "says", "code"),
    [
        (b"\n \n", "h.json", "holds no prompts", 2),
        (b"\xff\xfe\n", "h.json", "cannot be read", 2),
        (None, "h.json", "cannot be read: No such file", 2),
        (b"hello\n", "h.csv", "is no histogram", 2),
        (b"hello\n", "there.json", "there.json exists already", 2),
        (b"hello\n" + b"x" * 900 + b"\n", "h.npz", "900", 3),
    ],
)
def test_bad_input_is_refused_and_leaves_nothing(
    plan: Path, tmp_path: Path, prompts: bytes | None, out: str, says: str, code: int
) -> None:
    (tmp_path / "there.json").write_text("kept")
    file = tmp_path / "p.txt"
    if prompts is not None:
        file.write_bytes(prompts)
    arguments = ("record", plan, "--prompts", file, "--out", tmp_path / out, "--threads", "1")
    assert says in refuse(tmp_path, *arguments, code=code).text
