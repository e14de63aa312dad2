"""Rotary frequencies against those of transformers."""

import warnings
from typing import Any

import numpy as np
import pytest

from metainfer.ir.errors import Unsupported
from metainfer.ir.rope import Rope

SCALINGS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("linear", {"factor": 4.0}, {"factor": 4.0}),
    (
        "llama3",
        {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max": 8192},
        {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    (
        "llama3",
        {"factor": 32.0, "low_freq_factor": 2.0, "high_freq_factor": 8.0, "original_max": 512},
        {
            "factor": 32.0,
            "low_freq_factor": 2.0,
            "high_freq_factor": 8.0,
            "original_max_position_embeddings": 512,
        },
    ),
    (
        "yarn",
        {"factor": 4.0, "original_max": 4096},
        {"factor": 4.0, "original_max_position_embeddings": 4096},
    ),
    (
        "yarn",
        {"factor": 1.0, "original_max": 4096},
        {"factor": 1.0, "original_max_position_embeddings": 4096},
    ),
    (
        "yarn",
        {"factor": 40.0, "original_max": 128, "beta_fast": 16.0, "attention_factor": 0.7},
        {
            "factor": 40.0,
            "original_max_position_embeddings": 128,
            "beta_fast": 16.0,
            "beta_slow": 1.0,
            "attention_factor": 0.7,
        },
    ),
]


def oracle(kind: str, theta: float, width: int, given: dict[str, Any]) -> tuple[Any, float]:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        hidden_size=width * 4,
        num_attention_heads=4,
        head_dim=width,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": kind, "rope_theta": theta, **given},
    )
    frequencies, magnitude = ROPE_INIT_FUNCTIONS[kind](config, device=None)
    return frequencies.numpy(), float(magnitude)


@pytest.mark.parametrize("width", [8, 64, 128])
@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
@pytest.mark.parametrize(("kind", "ours", "theirs"), SCALINGS)
def test_frequencies_are_those_of_transformers(
    kind: str, ours: dict[str, Any], theirs: dict[str, Any], theta: float, width: int
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        frequencies, magnitude = oracle(kind, theta, width, theirs)
    rope = Rope(theta=theta, scaling=kind, **ours)
    made = rope.inverse_frequencies(width)
    assert made.dtype == np.float32
    np.testing.assert_allclose(made, frequencies, rtol=3e-6)
    assert rope.magnitude() == pytest.approx(magnitude, rel=1e-12)


def test_plain_frequencies() -> None:
    made = Rope(theta=100.0).inverse_frequencies(4)
    np.testing.assert_allclose(made, [1.0, 0.1], rtol=1e-6)
    cos, sin = Rope(theta=100.0).cos_sin(np.array([[0, 3]]), 4)
    assert cos.shape == sin.shape == (1, 2, 2)
    np.testing.assert_allclose(cos[0], np.cos([[0, 0], [3.0, 0.3]]), rtol=1e-6)
    np.testing.assert_allclose(sin[0], np.sin([[0, 0], [3.0, 0.3]]), rtol=1e-6)


def test_yarn_multiplies_cosines() -> None:
    cos, _ = Rope(scaling="yarn", factor=4.0).cos_sin(np.array([0]), 8)
    np.testing.assert_allclose(cos, 0.1 * np.log(4.0) + 1.0, rtol=1e-6)


def test_attributes_rebuild_the_rope() -> None:
    rope = Rope(theta=5e5, scaling="llama3", factor=8.0)
    assert rope.attrs() == {"theta": 5e5, "scaling": "llama3", "factor": 8.0}
    assert Rope(**rope.attrs()) == rope
    with pytest.raises(Unsupported, match="unknown rope scaling 'ntk'"):
        Rope(scaling="ntk")
