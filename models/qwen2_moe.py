"""Qwen1.5-MoE-A2.7B as published, and a tiny form that every mesh up to 8 divides.

Routed experts beside one that every token goes through behind a sigmoid gate.
Source: config.json of Qwen/Qwen1.5-MoE-A2.7B.
"""

from dataclasses import replace

from metainfer.ir.rope import Rope
from metainfer.models.decoder import decoder_spec
from metainfer.models.decoder_config import DecoderConfig
from metainfer.models.experts_config import ExpertsConfig
from metainfer.models.spec import ModelSpec

config_a2_7b = DecoderConfig(
    hidden=2048,
    layers=24,
    heads=16,
    kv_heads=16,
    head_dim=128,
    intermediate=5632,
    vocab=151936,
    max_positions=8192,
    rope=Rope(theta=1e6),
    qkv_bias=True,
    experts=ExpertsConfig(num=60, chosen=4, intermediate=1408, renormalise=False, shared=5632),
)
config_tiny = replace(
    config_a2_7b,
    hidden=64,
    layers=4,
    heads=8,
    kv_heads=8,
    head_dim=16,
    intermediate=128,
    vocab=256,
    max_positions=256,
    experts=ExpertsConfig(num=16, chosen=4, intermediate=64, renormalise=False, shared=128),
)


def _spec(name: str, config: DecoderConfig) -> ModelSpec:
    return decoder_spec(f"qwen2_moe_{name}", config, dtype="bf16")


variants = {
    "a2.7b": _spec("a2_7b", config_a2_7b),
    "tiny": _spec("tiny", config_tiny),
}
spec = variants["a2.7b"]
