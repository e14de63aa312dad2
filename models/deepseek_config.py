"""What the config.json of a DeepSeek-V2 or V3 model says beyond that of other decoders."""

import math

from metainfer.models.config_reader import ConfigReader
from metainfer.models.experts_config import ExpertsConfig
from metainfer.models.latent_config import LatentConfig

DEEPSEEK = ("deepseek_v2", "deepseek_v3")
# How experts are chosen: the value of "topk_method" and of "scoring_func" that each family has.
_V2_METHODS = ("greedy", "group_limited_greedy")
_V3 = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}


def deepseek_latent(read: ConfigReader) -> LatentConfig:
    """Sizes of latent attention.

    Raises: Unsupported if a key is malformed, or heads share keys.
    """
    heads = read.integer("num_attention_heads")
    if read.integer("num_key_value_heads", heads) != heads:
        raise read.unsupported(
            "fewer key heads than query heads", "num_key_value_heads must be num_attention_heads"
        )
    # Null means that queries are made from the token itself; an absent key, the families' 1536.
    null = 0 if "q_lora_rank" in read.config else 1536
    return LatentConfig(
        rank=read.integer("kv_lora_rank", 512),
        rope_width=read.integer("qk_rope_head_dim", 64),
        plain_width=read.integer("qk_nope_head_dim", 128),
        value_width=read.integer("v_head_dim", 128),
        query_rank=read.integer("q_lora_rank", null),
        interleaved=read.flag("rope_interleave", True),
    )


def deepseek_scale(read: ConfigReader, latent: LatentConfig) -> float:
    """What attention scores are multiplied by, from the config's rotary parameters."""
    given = read.get("rope_parameters", None) or read.get("rope_scaling", None) or {}
    kind = given.get("rope_type", given.get("type", "default"))
    rope = ConfigReader(given, read.origin)
    depth = rope.number("mscale_all_dim", 0.0) if kind != "default" else 0.0
    return stretched_scale(latent, depth, rope.number("factor") if depth else 1.0)


def stretched_scale(latent: LatentConfig, depth: float, factor: float) -> float:
    """What attention scores are multiplied by: more where positions are stretched by a factor.

    Args:
        latent: sizes of the attention.
        depth: how much more, "mscale_all_dim" of the config; 0 for nothing.
        factor: what rotary positions are stretched by.

    Source: modeling_deepseek_v3.py of transformers 5.
    """
    larger = 0.1 * depth * math.log(factor) + 1.0 if factor > 1 else 1.0
    return latent.key_width**-0.5 * larger * larger


def deepseek_experts(read: ConfigReader, layers: int) -> ExpertsConfig | None:
    """The experts of the layers behind the first dense ones; None if all layers are dense.

    Raises: Unsupported for a way of choosing experts that the family does not have.
    """
    is_v2 = read.config.get("model_type") == "deepseek_v2"
    dense = read.integer("first_k_dense_replace", 0 if is_v2 else 3)
    # Transformers 5 writes num_local_experts for V3, the published configs have n_routed_experts.
    num = read.integer("n_routed_experts", read.integer("num_local_experts", 64 if is_v2 else 256))
    if read.integer("moe_layer_freq", 1) != 1:
        raise read.unsupported("moe_layer_freq is not 1", "every layer behind the dense ones has "
                               "experts")  # fmt: skip
    if dense >= layers:
        return None
    inner = read.integer("moe_intermediate_size", 1407 if is_v2 else 2048)
    groups, chosen = _groups(read, is_v2=is_v2)
    return ExpertsConfig(
        num=num,
        chosen=read.integer("num_experts_per_tok", 8),
        intermediate=inner,
        renormalise=False if is_v2 else read.flag("norm_topk_prob", True),
        layers=tuple(i >= dense for i in range(layers)) if dense else (),
        shared=inner * read.integer("n_shared_experts", 2 if is_v2 else 1),
        shared_gate=False,
        scores="softmax" if is_v2 else "sigmoid",
        groups=groups,
        chosen_groups=chosen,
        scaling=read.number("routed_scaling_factor", 1.0 if is_v2 else 2.5),
    )


def _groups(read: ConfigReader, *, is_v2: bool) -> tuple[int, int]:
    """Groups of experts, and how many of them a token takes."""
    if not is_v2:
        for key, wanted in _V3.items():
            if read.get(key, wanted) != wanted:
                raise read.unsupported(f"{key} is {read.get(key)!r}", f"known: {wanted}")
        return read.integer("n_group", 8), read.integer("topk_group", 4)
    if read.flag("norm_topk_prob", False):
        raise read.unsupported(
            "norm_topk_prob is true", "transformers and we add shares as the softmax gives them"
        )
    if read.get("scoring_func", "softmax") != "softmax":
        raise read.unsupported(f"scoring_func is {read.get('scoring_func')!r}", "known: softmax")
    method = read.get("topk_method", "greedy")
    if method not in _V2_METHODS:
        raise read.unsupported(f"topk_method is {method!r}", f"known: {', '.join(_V2_METHODS)}")
    if method == "greedy":
        return 1, 1
    return read.integer("n_group"), read.integer("topk_group")
