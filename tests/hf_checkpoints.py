"""Tiny random Hugging Face checkpoints, written by transformers, and its logits as the oracle."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCAB = 300
_SPECIAL = ("<|begin|>", "<|end|>")

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "use_cache": False,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {
        "head_dim": None,
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 12,
        "n_routed_experts": 6,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
    },
    "deepseek_v3": {
        "head_dim": None,
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 12,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0,
    },
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {"head_dim": None, "hidden_size": 64},
    "qwen2_moe": {
        "head_dim": None,
        "hidden_size": 64,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
    },
    "qwen3": {},
    "qwen3_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
_DEEP_YARN = {**_YARN, "mscale": 0.7, "mscale_all_dim": 1.0}
_LINEAR = {"rope_type": "linear", "rope_theta": 20000.0, "factor": 2.5}


@dataclass(frozen=True)
class Case:
    """A kind of model and the keys of its config that differ from the base."""

    kind: str
    options: Mapping[str, Any] = field(default_factory=dict)


CASES: dict[str, Case] = {
    "deepseek_v2": Case("deepseek_v2"),
    "deepseek_v2_groups": Case(
        "deepseek_v2",
        {
            "topk_method": "group_limited_greedy",
            "n_group": 3,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "q_lora_rank": 24,
            "attention_bias": True,
        },
    ),
    "deepseek_v3": Case("deepseek_v3", {"rope_parameters": _DEEP_YARN}),
    "deepseek_v3_dense": Case(
        "deepseek_v3",
        {"first_k_dense_replace": 3, "rope_interleave": False, "tie_word_embeddings": True},
    ),
    "llama": Case("llama"),
    "llama_tied": Case("llama", {"tie_word_embeddings": True}),
    "llama_biases": Case("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_rope_llama3": Case("llama", {"rope_parameters": _LLAMA3}),
    "llama_rope_linear": Case("llama", {"rope_parameters": _LINEAR}),
    "llama_gelu": Case("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "mistral": Case("mistral", {"num_key_value_heads": 1}),
    "mistral_window": Case("mistral", {"sliding_window": 5}),
    "qwen2": Case("qwen2", {"tie_word_embeddings": True}),
    "qwen2_window": Case(
        "qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    ),
    "qwen2_yarn": Case("qwen2", {"rope_parameters": _YARN}),
    "qwen3": Case("qwen3", {"num_key_value_heads": 4}),
    "qwen3_biases_tied": Case("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    "qwen3_moe": Case("qwen3_moe"),
    "qwen3_moe_some_dense": Case(
        "qwen3_moe",
        {"mlp_only_layers": [1], "norm_topk_prob": False, "attention_bias": True},
    ),
    "qwen3_moe_every_second": Case(
        "qwen3_moe",
        {"decoder_sparse_step": 2, "use_sliding_window": True, "sliding_window": 5},
    ),
    "qwen2_moe": Case(
        "qwen2_moe",
        {"mlp_only_layers": [2], "use_sliding_window": True, "sliding_window": 5},
    ),
    "mixtral_window": Case("mixtral", {"sliding_window": 5, "num_experts_per_tok": 1}),
    "qwen3_yarn_factor": Case("qwen3", {"rope_parameters": {**_YARN, "attention_factor": 1.3}}),
}

_CLASSES = {
    "deepseek_v2": (transformers.DeepseekV2Config, transformers.DeepseekV2ForCausalLM),
    "deepseek_v3": (transformers.DeepseekV3Config, transformers.DeepseekV3ForCausalLM),
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen2_moe": (transformers.Qwen2MoeConfig, transformers.Qwen2MoeForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
    "mixtral": (transformers.MixtralConfig, transformers.MixtralForCausalLM),
}


def make_checkpoint(
    kind: str,
    path: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    tokenizer: bool = False,
    **options: Any,
) -> Path:
    """Write a random checkpoint: config.json, safetensors, and maybe a byte-level tokenizer.

    Args:
        kind: a key of `_CLASSES`.
        path: folder to write to.
        seed: of the weights.
        dtype: of the weights.
        tokenizer: whether to write tokenizer.json.
        options: keys of the config that differ from the base.
    """
    make_config, make_model = _CLASSES[kind]
    keys = {**_BASE, **_DEFAULTS[kind], **options}
    config = make_config(**{k: v for k, v in keys.items() if k != "head_dim" or v})
    torch.manual_seed(seed)
    model = make_model(config).eval()
    _randomise(model)
    model.to(dtype).save_pretrained(path)
    if tokenizer:
        _write_tokenizer(path)
    return path


def make_case(name: str, path: Path, **options: Any) -> Path:
    """Write the checkpoint of a case of `CASES`."""
    case = CASES[name]
    return make_checkpoint(case.kind, path, **{**case.options, **options})


def oracle_logits(path: Path, tokens: list[int]) -> np.ndarray:
    """Logits [T, V] that transformers computes for one sequence, in float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        return model(torch.tensor([tokens]), use_cache=False).logits[0].numpy()


def _randomise(model: torch.nn.Module) -> None:
    """Give every weight a value that shows: transformers starts biases at 0 and norms at 1."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1.0 + 0.3 * torch.randn_like(parameter))
            elif name.endswith(".bias"):
                parameter.copy_(0.3 * torch.randn_like(parameter))
            else:
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.3 * torch.randn_like(buffer))


def _write_tokenizer(path: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: i for i, text in enumerate(alphabet)}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(_SPECIAL))
    made.save(str(path / "tokenizer.json"))
    settings = {"bos_token": _SPECIAL[0], "eos_token": _SPECIAL[1]}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
