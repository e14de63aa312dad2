"""DeepSeek-V2-Lite and DeepSeek-V3 as published, and tiny forms that every mesh up to 8 divides.

Latent attention; the first layers dense, then routed experts beside shared ones.
Source: config.json of deepseek-ai/DeepSeek-V2-Lite and deepseek-ai/DeepSeek-V3. The layer of V3
that predicts a second token is left away: it changes no token.
"""

from dataclasses import replace

from metainfer.ir.rope import Rope
from metainfer.models.decoder import decoder_spec
from metainfer.models.decoder_config import DecoderConfig
from metainfer.models.deepseek_config import stretched_scale
from metainfer.models.experts_config import ExpertsConfig
from metainfer.models.latent_config import LatentConfig
from metainfer.models.spec import ModelSpec

_YARN = Rope(theta=10000.0, scaling="yarn", factor=40.0, original_max=4096, attention_factor=1.0)
_DEPTH_LITE, _DEPTH = 0.707, 1.0  # "mscale_all_dim"
_LATENT = LatentConfig()
_LATENT_LITE = LatentConfig(query_rank=0)

config_v2_lite = DecoderConfig(
    hidden=2048,
    layers=27,
    heads=16,
    kv_heads=16,
    head_dim=64,
    intermediate=10944,
    vocab=102400,
    max_positions=163840,
    rope=_YARN,
    scale=stretched_scale(_LATENT_LITE, _DEPTH_LITE, _YARN.factor),
    experts=ExpertsConfig(
        num=64, chosen=6, intermediate=1408, renormalise=False,
        layers=(False, *[True] * 26), shared=2816, shared_gate=False,
    ),
    latent=_LATENT_LITE,
)  # fmt: skip
config_v3 = DecoderConfig(
    hidden=7168,
    layers=61,
    heads=128,
    kv_heads=128,
    head_dim=64,
    intermediate=18432,
    vocab=129280,
    max_positions=163840,
    rope=_YARN,
    scale=stretched_scale(_LATENT, _DEPTH, _YARN.factor),
    experts=ExpertsConfig(
        num=256, chosen=8, intermediate=2048, layers=(False, False, False, *[True] * 58),
        shared=2048, shared_gate=False, scores="sigmoid", groups=8, chosen_groups=4, scaling=2.5,
    ),
    latent=_LATENT,
)  # fmt: skip
_TINY_LATENT = LatentConfig(rank=32, rope_width=16, plain_width=32, value_width=16, query_rank=48)
config_tiny = replace(
    config_v3,
    hidden=64,
    layers=4,
    heads=8,
    kv_heads=8,
    head_dim=16,
    intermediate=128,
    vocab=256,
    max_positions=256,
    scale=stretched_scale(_TINY_LATENT, _DEPTH, _YARN.factor),
    experts=ExpertsConfig(
        num=16, chosen=4, intermediate=64, layers=(False, True, True, True), shared=64,
        shared_gate=False, scores="sigmoid", groups=4, chosen_groups=2, scaling=2.5,
    ),
    latent=_TINY_LATENT,
)  # fmt: skip
config_tiny_lite = replace(
    config_tiny,
    scale=stretched_scale(_TINY_LATENT, _DEPTH_LITE, _YARN.factor),
    experts=ExpertsConfig(
        num=16, chosen=4, intermediate=64, renormalise=False, layers=(False, True, True, True),
        shared=128, shared_gate=False,
    ),
    latent=replace(_TINY_LATENT, query_rank=0),
)  # fmt: skip


def _spec(name: str, config: DecoderConfig) -> ModelSpec:
    return decoder_spec(f"deepseek_{name}", config, dtype="bf16")


variants = {
    "v2-lite": _spec("v2_lite", config_v2_lite),
    "v3": _spec("v3", config_v3),
    "tiny": _spec("tiny", config_tiny),
    "tiny-lite": _spec("tiny_lite", config_tiny_lite),
}
spec = variants["v2-lite"]
