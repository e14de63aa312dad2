"""Qwen3-MoE: 30B-A3B and 235B-A22B as published, and a tiny form that every mesh up to 8 divides.

Source: config.json of Qwen/Qwen3-30B-A3B and Qwen/Qwen3-235B-A22B; Yang et al. 2025 for the model.
"""

from dataclasses import replace

from metainfer.ir.rope import Rope
from metainfer.models.decoder import decoder_spec
from metainfer.models.decoder_config import DecoderConfig
from metainfer.models.experts_config import ExpertsConfig
from metainfer.models.spec import ModelSpec

config_30b = DecoderConfig(
    hidden=2048,
    layers=48,
    heads=32,
    kv_heads=4,
    head_dim=128,
    intermediate=6144,
    vocab=151936,
    max_positions=40960,
    rope=Rope(theta=1e6),
    qk_norm=True,
    experts=ExpertsConfig(num=128, chosen=8, intermediate=768),
)
config_235b = replace(
    config_30b,
    hidden=4096,
    layers=94,
    heads=64,
    intermediate=12288,
    experts=ExpertsConfig(num=128, chosen=8, intermediate=1536),
)
config_tiny = replace(
    config_30b,
    hidden=64,
    layers=4,
    heads=8,
    kv_heads=4,
    head_dim=16,
    intermediate=96,
    vocab=256,
    max_positions=256,
    experts=ExpertsConfig(num=16, chosen=4, intermediate=64),
)


def _spec(name: str, config: DecoderConfig) -> ModelSpec:
    return decoder_spec(f"qwen3_moe_{name}", config, dtype="bf16")


variants = {
    "30b": _spec("30b", config_30b),
    "235b": _spec("235b", config_235b),
    "tiny": _spec("tiny", config_tiny),
}
spec = variants["30b"]
