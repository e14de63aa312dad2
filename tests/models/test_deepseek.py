"""DeepSeek-V2 and V3: what their configs say, and what is refused."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from metainfer.ir.errors import TypeMismatch, Unsupported
from metainfer.ir.rope import Rope
from metainfer.models import deepseek
from metainfer.models.decoder_config import DecoderConfig
from metainfer.models.experts_config import ExpertsConfig
from metainfer.models.hf_names import hf_unused
from metainfer.models.latent_config import LatentConfig

_SCALING = {
    "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32,
    "beta_slow": 1,
}  # fmt: skip
# What the published config.json of the models say of their sizes.
V2_LITE: dict[str, Any] = {
    "model_type": "deepseek_v2", "hidden_size": 2048, "num_hidden_layers": 27,
    "num_attention_heads": 16, "num_key_value_heads": 16, "intermediate_size": 10944,
    "moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2,
    "num_experts_per_tok": 6, "first_k_dense_replace": 1, "moe_layer_freq": 1,
    "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "n_group": 1, "topk_group": 1, "topk_method": "greedy",
    "norm_topk_prob": False, "scoring_func": "softmax", "routed_scaling_factor": 1.0,
    "vocab_size": 102400, "max_position_embeddings": 163840, "rms_norm_eps": 1e-6,
    "rope_theta": 10000, "rope_scaling": {**_SCALING, "mscale": 0.707, "mscale_all_dim": 0.707},
    "attention_bias": False, "tie_word_embeddings": False,
}  # fmt: skip
V3: dict[str, Any] = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61,
    "num_attention_heads": 128, "num_key_value_heads": 128, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "first_k_dense_replace": 3, "moe_layer_freq": 1,
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "n_group": 8, "topk_group": 4, "topk_method": "noaux_tc",
    "norm_topk_prob": True, "scoring_func": "sigmoid", "routed_scaling_factor": 2.5,
    "vocab_size": 129280, "max_position_embeddings": 163840, "rms_norm_eps": 1e-6,
    "rope_theta": 10000, "rope_scaling": {**_SCALING, "mscale": 1.0, "mscale_all_dim": 1.0},
    "attention_bias": False, "tie_word_embeddings": False, "num_nextn_predict_layers": 1,
}  # fmt: skip


def test_published_configs_are_those_of_the_variants() -> None:
    for keys, config in ((V2_LITE, deepseek.config_v2_lite), (V3, deepseek.config_v3)):
        read = DecoderConfig.from_hf(keys)
        assert read.rope.magnitude() == pytest.approx(1.0)
        assert read.scale == pytest.approx(config.scale, rel=1e-12)
        same: Any = {"rope": config.rope, "scale": config.scale}
        assert replace(read, **same) == config
    assert hf_unused(V3, deepseek.config_v3) == ("model.layers.61.*",)
    assert hf_unused(V2_LITE, deepseek.config_v2_lite) == ()


def test_stretched_positions_sharpen_the_scores() -> None:
    plain = DecoderConfig.from_hf({**V3, "rope_scaling": None})
    assert (plain.rope, plain.scale) == (Rope(10000.0), 192**-0.5)
    larger = 0.1 * math.log(40) + 1.0
    assert DecoderConfig.from_hf(V3).scale == pytest.approx(192**-0.5 * larger**2)


@pytest.mark.parametrize(
    ("name", "total", "active"), [("v2-lite", 15.71, 2.66), ("v3", 671.0, 37.6)]
)
def test_the_published_number_of_parameters(name: str, total: float, active: float) -> None:
    """Of those that a token takes, V2-Lite's 2.4 billion are given without its tables."""
    with torch.device("meta"):
        decoder = deepseek.variants[name].build()
    sizes = {n: p.numel() / 1e9 for n, p in decoder.named_parameters()}
    experts = sum(size for n, size in sizes.items() if "*" in n)
    config = decoder.config
    assert isinstance(config, DecoderConfig)
    assert isinstance(config.experts, ExpertsConfig)
    assert sum(sizes.values()) == pytest.approx(total, abs=0.05)
    chosen = experts * config.experts.chosen / config.experts.num
    assert sum(sizes.values()) - experts + chosen == pytest.approx(active, abs=0.05)


def test_corrections_stay_in_float32() -> None:
    decoder = deepseek.variants["tiny"].build().to(torch.bfloat16)
    kinds = {n.rsplit(".", 1)[1]: p.dtype for n, p in decoder.named_parameters() if "gate." in n}
    assert kinds == {"weight": torch.bfloat16, "e_score_correction_bias": torch.float32}


@pytest.mark.parametrize(
    ("keys", "change", "words"),
    [
        (V2_LITE, {"num_key_value_heads": 4}, "fewer key heads"),
        (V2_LITE, {"norm_topk_prob": True}, "norm_topk_prob is true"),
        (V2_LITE, {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'"),
        (V2_LITE, {"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'"),
        (V2_LITE, {"topk_method": "group_limited_greedy", "n_group": None}, "no 'n_group'"),
        (V2_LITE, {"moe_layer_freq": 2}, "moe_layer_freq is not 1"),
        (V3, {"topk_method": "greedy"}, "topk_method is 'greedy'"),
        (V3, {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        (V3, {"kv_lora_rank": "512"}, "kv_lora_rank is '512'"),
        (V3, {"model_type": "deepseek_v32"}, "not known"),
    ],
)
def test_what_is_refused(keys: dict[str, Any], change: dict[str, Any], words: str) -> None:
    with pytest.raises(Unsupported, match=words) as caught:
        DecoderConfig.from_hf({**keys, **change}, origin="some/config.json")
    assert "some/config.json" in str(caught.value)


def test_sizes_that_do_not_fit() -> None:
    with pytest.raises(TypeMismatch, match="3 of 2 groups of 8 experts"):
        ExpertsConfig(8, 2, 16, groups=2, chosen_groups=3)
    with pytest.raises(TypeMismatch, match="5 experts of 1 groups of 4"):
        ExpertsConfig(8, 5, 16, groups=2)
    with pytest.raises(Unsupported, match="scores 'tanh'"):
        ExpertsConfig(8, 5, 16, scores="tanh")
    with pytest.raises(TypeMismatch, match="empty parts"):
        LatentConfig(rank=0)
    with pytest.raises(TypeMismatch, match="rotary keys of 63 numbers"):
        LatentConfig(rope_width=63)
    with pytest.raises(TypeMismatch, match="rotary keys of 64 numbers in heads of 32"):
        replace(deepseek.config_v3, head_dim=32)
