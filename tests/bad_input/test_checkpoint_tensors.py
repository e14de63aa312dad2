"""Checkpoints whose tensors are not those of the model: named at compile, nothing is written."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import metainfer
from metainfer.cli.app import app
from metainfer.ir.errors import CheckpointError, PlanError

Tensors = dict[str, torch.Tensor]
Q = "model.layers.0.self_attn.q_proj.weight"
SMALL: dict[str, Any] = {"max_tokens": 16, "max_sequences": 2, "max_context": 32}


def missing(tensors: Tensors) -> None:
    del tensors[Q]


def renamed(tensors: Tensors) -> None:
    tensors[Q.replace("q_proj", "q_projection")] = tensors.pop(Q)


def extra(tensors: Tensors) -> None:
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(80, 48)
    tensors["lora.a"] = torch.zeros(3)


def transposed(tensors: Tensors) -> None:
    tensors[Q] = tensors[Q].T.contiguous()


def of_another_rank(tensors: Tensors) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"].reshape(1, 48)


def empty(tensors: Tensors) -> None:
    tensors.clear()


CASES: list[tuple[Callable[[Tensors], None], str, list[str]]] = [
    (missing, "1 missing, 0 extra, 0 misshapen", [f"missing: {Q} [64, 48]"]),
    (
        renamed,
        "1 missing, 1 extra, 0 misshapen",
        [f"missing: {Q} [64, 48] (nearest: {Q.replace('q_proj', 'q_projection')} [64, 48])"],
    ),
    (
        extra,
        "0 missing, 2 extra, 0 misshapen",
        ["extra: lora.a [3]", "extra: model.layers.1.mlp.up_proj.weight [80, 48]", "ignore"],
    ),
    (transposed, "0 missing, 0 extra, 1 misshapen", [f"{Q} has [48, 64], wanted [64, 48]"]),
    (of_another_rank, "1 misshapen", ["model.norm.weight has [1, 48], wanted [48]"]),
    (empty, "12 missing, 0 extra", ["missing: lm_head.weight [300, 48]", "missing: and 2 more"]),
]


def changed(model: Path, to: Path, change: Callable[[Tensors], None]) -> Path:
    shutil.copytree(model, to)
    tensors = load_file(to / "model.safetensors")
    change(tensors)
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return to


@pytest.mark.parametrize(("change", "counts", "words"), CASES, ids=[c[0].__name__ for c in CASES])
def test_tensors_that_do_not_fit_are_named(
    tiny: Path, tmp_path: Path, listing, change: Callable[[Tensors], None], counts: str,
    words: list[str],
) -> None:  # fmt: skip
    path = changed(tiny, tmp_path / "model", change)
    with pytest.raises(CheckpointError) as caught:
        metainfer.compile(path, "cpu", out=tmp_path / "plan", **SMALL)
    message = str(caught.value)
    assert counts in caught.value.what
    assert all(word in message for word in words), message
    assert "architecture and size" in caught.value.advice
    assert listing(tmp_path) == ["model"]


def test_the_command_says_the_same_and_ends_with_2(tiny: Path, tmp_path: Path, listing) -> None:
    path = changed(tiny, tmp_path / "model", missing)
    arguments = ["compile", str(path), "--max-context", "32", "--out", str(tmp_path / "plan")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert f"missing: {Q} [64, 48]" in result.stderr
    assert listing(tmp_path) == ["model"]


def test_tensors_that_the_spec_ignores_may_be_there(tiny: Path, tmp_path: Path) -> None:
    def add(tensors: Tensors) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)

    path = changed(tiny, tmp_path / "model", add)
    plan = metainfer.compile(path, "cpu", **SMALL)
    assert not any("inv_freq" in text for text in plan.texts.values())


def test_a_config_of_another_size_is_no_match(tiny: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny, tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "intermediate_size": 96}))
    with pytest.raises(CheckpointError) as caught:
        metainfer.compile(tmp_path / "model", "cpu", **SMALL)
    assert "0 missing, 0 extra, 3 misshapen" in caught.value.what
    assert "mlp.down_proj.weight has [48, 80], wanted [48, 96]" in caught.value.text


def tuned(tensors: Tensors) -> None:
    """A fine-tune: names, sizes and formats are the same."""
    for tensor in tensors.values():
        tensor.mul_(1.25)


def test_another_checkpoint_is_refused_by_its_fingerprint(tiny: Path, tmp_path: Path) -> None:
    plan = metainfer.compile(tiny, "cpu", **SMALL)
    for change in (tuned, transposed, missing):
        other = changed(tiny, tmp_path / change.__name__, change)
        with pytest.raises(PlanError, match="not the one that the plan of tiny") as caught:
            metainfer.load(plan, other)
        assert caught.value.origin == str(other)
        assert "--allow-checkpoint-mismatch" in caught.value.advice
    same = changed(tiny, tmp_path / "copy", lambda tensors: None)
    assert metainfer.load(plan, same).max_context == 32


def test_another_checkpoint_may_be_insisted_on_if_it_fits(tiny: Path, tmp_path: Path) -> None:
    plan = metainfer.compile(tiny, "cpu", **SMALL)
    fits = changed(tiny, tmp_path / "tuned", tuned)
    assert metainfer.load(plan, fits, allow_checkpoint_mismatch=True).max_context == 32
    for change, word in ((transposed, "[48, 64]"), (missing, Q)):
        broken = changed(tiny, tmp_path / change.__name__, change)
        with pytest.raises(CheckpointError) as found:
            metainfer.load(plan, broken, allow_checkpoint_mismatch=True)
        assert word in str(found.value)
        assert found.value.exit_code == 2


def test_a_plan_without_weights_takes_any_that_fit(tiny: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny, tmp_path / "tiny", ignore=shutil.ignore_patterns("*.safetensors"))
    plan = metainfer.compile(tmp_path / "tiny", "cpu", **SMALL)
    assert plan.meta["model"]["checkpoint_hash"] == ""
    assert metainfer.load(plan, tiny).max_context == 32


def test_the_verbs_refuse_other_weights_too(refused, tiny: Path, plan: Path, tmp_path) -> None:
    other = changed(tiny, tmp_path / "tuned", tuned)
    for verb in (("run", plan, "abc"), ("bench", plan), ("verify", plan)):
        found = refused(*verb, "--weights", other)
        assert "not the one that the plan of tiny was compiled with" in found.what
    insisted = [
        "run", str(plan), "abc", "--weights", str(other), "--max-new-tokens", "1",
        "--allow-checkpoint-mismatch",
    ]  # fmt: skip
    assert CliRunner().invoke(app, insisted).exit_code == 0
