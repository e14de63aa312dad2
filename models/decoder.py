"""Dense decoders (Llama, SmolLM2, Mistral, Qwen2, Qwen3) in plain PyTorch.

Single device, one flat row of tokens, weights named as Hugging Face names them.
"""

# T tokens, R rows sampled, D hidden, H query heads, G key and value heads, E head width,
# F MLP width, V vocabulary.

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from metainfer.ir.rope import Rope
from metainfer.models import functional
from metainfer.models.decoder_config import DecoderConfig
from metainfer.models.spec import ModelSpec


class RmsNorm(nn.Module):
    """Root-mean-square norm with a weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the rows of x [..., D]."""
        return functional.rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    """Causal attention with grouped heads, rotary positions and maybe a window."""

    def __init__(self, config: DecoderConfig, window: int) -> None:
        super().__init__()
        heads, kv_heads, width = config.heads, config.kv_heads, config.head_dim
        self.head_dim = width
        self.window = window
        self.scale = config.scale
        self.rope: Rope = config.rope
        self.q_proj = nn.Linear(config.hidden, heads * width, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden, kv_heads * width, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden, kv_heads * width, bias=config.qkv_bias)
        self.o_proj = nn.Linear(heads * width, config.hidden, bias=config.o_bias)
        if config.qk_norm:
            self.q_norm = RmsNorm(width, config.eps)
            self.k_norm = RmsNorm(width, config.eps)
        self.qk_norm = config.qk_norm

    def forward(self, x_TD: Tensor, positions_T: Tensor) -> Tensor:
        """Mix each token with those before it: x [T, D] -> [T, D]."""
        q_THE = self.q_proj(x_TD).unflatten(-1, (-1, self.head_dim))
        k_TGE = self.k_proj(x_TD).unflatten(-1, (-1, self.head_dim))
        v_TGE = self.v_proj(x_TD).unflatten(-1, (-1, self.head_dim))
        if self.qk_norm:
            q_THE, k_TGE = self.q_norm(q_THE), self.k_norm(k_TGE)
        rope = self.rope.attrs()
        q_THE = functional.rope(q_THE, positions_T, **rope)
        k_TGE = functional.rope(k_TGE, positions_T, **rope)
        mixed_THE = functional.attention(q_THE, k_TGE, v_TGE, scale=self.scale, window=self.window)
        return self.o_proj(mixed_THE.flatten(-2))


class Mlp(nn.Module):
    """Gated MLP."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        bias = config.mlp_bias
        self.gate_proj = nn.Linear(config.hidden, config.intermediate, bias=bias)
        self.up_proj = nn.Linear(config.hidden, config.intermediate, bias=bias)
        self.down_proj = nn.Linear(config.intermediate, config.hidden, bias=bias)
        self.activation = config.activation

    def forward(self, x_TD: Tensor) -> Tensor:
        """Transform each token: x [T, D] -> [T, D]."""
        gate_TF, up_TF = self.gate_proj(x_TD), self.up_proj(x_TD)
        if self.activation == "gelu_tanh":
            return self.down_proj(functional.gelu_mul(gate_TF, up_TF, approximate="tanh"))
        return self.down_proj(functional.silu_mul(gate_TF, up_TF))


class Layer(nn.Module):
    """One block: attention and MLP, each behind a norm and added to the residual."""

    def __init__(self, config: DecoderConfig, window: int) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(config.hidden, config.eps)
        self.self_attn = Attention(config, window)
        self.post_attention_layernorm = RmsNorm(config.hidden, config.eps)
        self.mlp = Mlp(config)

    def forward(self, x_TD: Tensor, positions_T: Tensor) -> Tensor:
        """Run the block: x [T, D] -> [T, D]."""
        x_TD = x_TD + self.self_attn(self.input_layernorm(x_TD), positions_T)
        return x_TD + self.mlp(self.post_attention_layernorm(x_TD))


class Stack(nn.Module):
    """Embedding, blocks and final norm, under the names that Hugging Face puts below "model."."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList(
            Layer(config, config.window_of(i)) for i in range(config.layers)
        )
        self.norm = RmsNorm(config.hidden, config.eps)

    def forward(self, tokens_T: Tensor, positions_T: Tensor) -> Tensor:
        """Normed hidden states of the sampled rows: tokens [T], positions [T] -> [R, D]."""
        x_TD = self.embed_tokens(tokens_T)
        for layer in self.layers:
            x_TD = layer(x_TD, positions_T)
        # Only sampled rows need logits: dropping the others here spares the norm as well.
        return self.norm(functional.sample_rows(x_TD))


class Decoder(nn.Module):
    """A dense decoder with its head."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Stack(config)
        self.lm_head = nn.Linear(config.hidden, config.vocab, bias=False)
        if config.tie:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens_T: Tensor, positions_T: Tensor) -> Tensor:
        """Logits of the sampled rows: tokens int [T], positions int32 [T] -> [R, V]."""
        return self.lm_head(self.model(tokens_T, positions_T))


# Older files keep the rotary frequencies, which the config gives; GGUF keeps Llama 3's divisors.
_UNUSED = ("*.rotary_emb.inv_freq", "rope_freqs.weight")


def decoder_spec(name: str, config: DecoderConfig, **fields: Any) -> ModelSpec:
    """The spec of a dense decoder; ``fields`` are further fields of `ModelSpec`.

    Raises: MetainferError if a field does not fit.
    """
    fields.setdefault("tiny", _tiny(name, config))
    # Some checkpoints repeat a tied weight under the head's name.
    fields.setdefault("ignore", (*_UNUSED, "lm_head.weight") if config.tie else _UNUSED)
    if config.tie:
        # Checkpoints keep a tied weight once, under the embedding's name.
        shared = "model.embed_tokens.weight"
        renames = dict(fields.get("renames", {}))
        renames.setdefault("lm_head.weight", renames.get(shared, shared))
        fields["renames"] = renames
    return ModelSpec(
        name=name,
        build=lambda: Decoder(config),
        kind="causal_lm",
        max_positions=config.max_positions,
        **fields,
    )


def _tiny(name: str, config: DecoderConfig) -> Callable[[], ModelSpec]:
    small = config.tiny()
    return lambda: ModelSpec(
        name=f"{name}_tiny",
        build=lambda: Decoder(small),
        kind="causal_lm",
        max_positions=small.max_positions,
    )
