"""What GGUF calls the weights of a dense decoder, and how it orders their rows.

Source: tensor name tables of the gguf package; `LlamaModel.permute` of llama.cpp's converter.
"""

from metainfer.models.decoder_config import DecoderConfig

_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _layer_weights(config: DecoderConfig) -> list[str]:
    """Weights of one layer without its prefix, as Hugging Face names them."""
    norms = {"self_attn.q_norm", "self_attn.k_norm"}
    parts = [p for p in _LAYER if config.qk_norm or p not in norms]
    biased = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"] * config.qkv_bias
    biased += ["self_attn.o_proj"] * config.o_bias
    biased += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"] * config.mlp_bias
    return [f"{p}.weight" for p in parts] + [f"{p}.bias" for p in biased]


def decoder_renames(config: DecoderConfig) -> dict[str, str]:
    """GGUF name of every weight, by its Hugging Face name; a tied head is the embedding."""
    names = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "token_embd.weight" if config.tie else "output.weight",
    }
    for weight in _layer_weights(config):
        part, _, form = weight.rpartition(".")
        for i in range(config.layers):
            names[f"model.layers.{i}.{weight}"] = f"blk.{i}.{_LAYER[part]}.{form}"
    return names


def rope_unpermute(config: DecoderConfig) -> tuple[tuple[str, int], ...]:
    """Rows that files of architecture "llama" keep interleaved, with their head counts.

    Qwen's files keep them in halves already.
    """
    forms = ("weight", "bias") if config.qkv_bias else ("weight",)
    heads = (("q_proj", config.heads), ("k_proj", config.kv_heads))
    return tuple((f"self_attn.{part}.{form}", n) for part, n in heads for form in forms)
