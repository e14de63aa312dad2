"""Folders of fp8 and MXFP4 weights: the logits of transformers on the same numbers, spelled out."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hf_checkpoints import VOCAB, make_checkpoint
from lm_steps import Oracle, compile_and_load, error, run_chunked
from scaled_checkpoints import scale_folder

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
BOUND = 1e-4


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("plain") / "model", **SIZES)


@pytest.mark.parametrize("kind", ["deepseek", "by_tensor", "packed"])
def test_logits_of_the_same_numbers(plain: Path, tmp_path: Path, kind: str) -> None:
    scaled, twin = scale_folder(plain, tmp_path, kind)
    tokens = np.random.default_rng(0).integers(0, VOCAB, 20).tolist()
    wanted = Oracle(twin).logits(tokens)
    assert np.abs(wanted).max() > 0.5
    # Rounding to the format shows: the bound is far below it.
    assert error(Oracle(plain).logits(tokens), wanted) > 100 * BOUND
    model = compile_and_load(scaled, activations="f32", exact=True)
    formats = {
        d["chosen"] for d in model.plan.meta["phases"]["prefill"]["decisions"]
        if d["place"] == "quantize" and "_proj" in d["subject"]
    }  # fmt: skip
    assert all("/" in f for f in formats), formats
    assert error(run_chunked(model, tokens, 7), wanted) < BOUND
