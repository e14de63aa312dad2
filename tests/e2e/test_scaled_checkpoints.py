"""Folders of fp8 and fp4 weights: the logits of transformers on the same numbers, spelled out."""

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


# How the codes are met: as the cheapest option has it, widened when loaded, widened at each call.
WAYS: dict[str, tuple[dict[str, Any], str]] = {
    "deepseek": ({}, ""),
    "by_tensor": ({"weights": "keep"}, "torch.linear_dequantized_f32"),
    "packed": (
        {"weights": "keep", "forbids": ("torch.linear_dequantized_f32",)},
        "torch.linear_codes_f4e2m1",
    ),
    "modelopt": (
        {"weights": "keep", "forbids": ("torch.linear_dequantized_f32",)},
        "torch.linear_codes_f4e2m1",
    ),
}


# What only the scales' shape tells apart is read by tests of checkpoints, too.
KINDS = [pytest.param(k, marks=pytest.mark.thorough) if k == "by_tensor" else k for k in WAYS]


@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_the_same_numbers(plain: Path, tmp_path: Path, kind: str) -> None:
    scaled, twin = scale_folder(plain, tmp_path, kind)
    tokens = np.random.default_rng(0).integers(0, VOCAB, 20).tolist()
    wanted = Oracle(twin).logits(tokens)
    assert np.abs(wanted).max() > 0.5
    # Rounding to the format shows: the bound is far below it.
    assert error(Oracle(plain).logits(tokens), wanted) > 100 * BOUND
    options, kernel = WAYS[kind]
    model = compile_and_load(scaled, activations="f32", exact=True, **options)
    text = model.plan.texts["stage0.decode.mir"]
    assert kernel in text
    assert error(run_chunked(model, tokens, 7), wanted) < BOUND
