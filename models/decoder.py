"""Decoders of the Llama, Qwen and DeepSeek-V2 and V3 families in plain PyTorch.

Single device, one flat row of tokens, weights named as Hugging Face names them.
"""

# T tokens, R rows sampled, D hidden, H query heads, G key and value heads, E head width,
# F MLP width, V vocabulary; of experts: N in a layer, K chosen by a token.

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from metainfer.ir.rope import Rope
from metainfer.models import functional
from metainfer.models.decoder_config import DecoderConfig
from metainfer.models.experts_config import ExpertsConfig
from metainfer.models.latent import LatentAttention
from metainfer.models.norm import RmsNorm
from metainfer.models.router import Router
from metainfer.models.spec import ModelSpec, PureBuild


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

    def __init__(self, config: DecoderConfig, inner: int) -> None:
        super().__init__()
        bias = config.mlp_bias
        self.gate_proj = nn.Linear(config.hidden, inner, bias=bias)
        self.up_proj = nn.Linear(config.hidden, inner, bias=bias)
        self.down_proj = nn.Linear(inner, config.hidden, bias=bias)
        self.activation = config.activation

    def forward(self, x_TD: Tensor) -> Tensor:
        """Transform each token: x [T, D] -> [T, D]."""
        gate_TF, up_TF = self.gate_proj(x_TD), self.up_proj(x_TD)
        if self.activation == "gelu_tanh":
            return self.down_proj(functional.gelu_mul(gate_TF, up_TF, approximate="tanh"))
        return self.down_proj(functional.silu_mul(gate_TF, up_TF))


class Stacked(nn.Module):
    """One linear of every expert, stacked: a weight [N, out, in]."""

    def __init__(self, num: int, width: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num, outputs, width))
        nn.init.uniform_(self.weight, -(width**-0.5), width**-0.5)


class Experts(nn.Module):
    """The weights of all experts of a layer.

    Checkpoints hold one tensor for each expert, ``experts.5.up_proj.weight``; here all are one
    parameter, ``experts.*.up_proj.weight``: "*" stands for the experts' numbers.
    """

    def __init__(self, num: int, width: int, inner: int) -> None:
        super().__init__()
        every = nn.Module()
        every.gate_proj = Stacked(num, width, inner)
        every.up_proj = Stacked(num, width, inner)
        every.down_proj = Stacked(num, inner, width)
        self.add_module("*", every)

    def weights(self) -> tuple[Tensor, Tensor, Tensor]:
        """Gate and up [N, F, D], down [N, D, F]."""
        every = self.get_submodule("*")
        gate, up, down = (every.get_submodule(f"{n}_proj") for n in ("gate", "up", "down"))
        return (
            gate.get_parameter("weight"),
            up.get_parameter("weight"),
            down.get_parameter("weight"),
        )


class SparseMlp(nn.Module):
    """A router, the experts that it chooses from, and maybe one that all tokens go through."""

    def __init__(self, config: DecoderConfig, experts: ExpertsConfig) -> None:
        super().__init__()
        self.gate = Router(config.hidden, experts)
        self.experts = Experts(experts.num, config.hidden, experts.intermediate)
        self.activation = config.activation
        self.shared = experts.shared
        self.is_gated = experts.shared_gate
        if self.shared and self.is_gated:
            self.shared_expert = Mlp(config, experts.shared)
            self.shared_expert_gate = nn.Linear(config.hidden, 1, bias=False)
        elif self.shared:
            self.shared_experts = Mlp(config, experts.shared)

    def forward(self, x_TD: Tensor) -> Tensor:
        """Send each token through its best experts: x [T, D] -> [T, D]."""
        shares_TK, ids_TK = self.gate(x_TD)
        routed_TD = functional.experts(
            x_TD, ids_TK, shares_TK, *self.experts.weights(), activation=self.activation
        )
        if not self.shared:
            return routed_TD
        if not self.is_gated:
            return routed_TD + self.shared_experts(x_TD)
        return routed_TD + self.shared_expert_gate(x_TD).sigmoid() * self.shared_expert(x_TD)


class Layer(nn.Module):
    """One block: attention, then an MLP or experts, each behind a norm, added to the residual."""

    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(config.hidden, config.eps)
        if config.latent is None:
            self.self_attn: nn.Module = Attention(config, config.window_of(index))
        else:
            self.self_attn = LatentAttention(config, config.latent)
        self.post_attention_layernorm = RmsNorm(config.hidden, config.eps)
        experts = config.experts_of(index)
        if experts is None:
            self.mlp: nn.Module = Mlp(config, config.intermediate)
        else:
            self.mlp = SparseMlp(config, experts)

    def forward(self, x_TD: Tensor, positions_T: Tensor) -> Tensor:
        """Run the block: x [T, D] -> [T, D]."""
        x_TD = x_TD + self.self_attn(self.input_layernorm(x_TD), positions_T)
        return x_TD + self.mlp(self.post_attention_layernorm(x_TD))


class Stack(nn.Module):
    """Embedding, blocks and final norm, under the names that Hugging Face puts below "model."."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.layers))
        self.norm = RmsNorm(config.hidden, config.eps)

    def forward(self, tokens_T: Tensor, positions_T: Tensor) -> Tensor:
        """Normed hidden states of the sampled rows: tokens [T], positions [T] -> [R, D]."""
        x_TD = self.embed_tokens(tokens_T)
        for layer in self.layers:
            x_TD = layer(x_TD, positions_T)
        # Only sampled rows need logits: dropping the others here spares the norm as well.
        return self.norm(functional.sample_rows(x_TD))


class Decoder(nn.Module):
    """A decoder with its head."""

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


@dataclass(frozen=True)
class BuildDecoder(PureBuild):
    """Makes a decoder of a configuration."""

    config: DecoderConfig

    def __call__(self) -> Decoder:
        """Make it."""
        return Decoder(self.config)


def decoder_spec(name: str, config: DecoderConfig, **fields: Any) -> ModelSpec:
    """The spec of a decoder; ``fields`` are further fields of `ModelSpec`.

    Raises: MetainferError if a field does not fit.
    """
    fields.setdefault("tiny", _tiny(name, config))
    # Some checkpoints repeat a tied weight under the head's name.
    tied = ("lm_head.weight",) if config.tie else ()
    fields["ignore"] = (*fields.get("ignore", ()), *_UNUSED, *tied)
    if config.tie:
        # Checkpoints keep a tied weight once, under the embedding's name.
        shared = "model.embed_tokens.weight"
        renames = dict(fields.get("renames", {}))
        renames.setdefault("lm_head.weight", renames.get(shared, shared))
        fields["renames"] = renames
    return ModelSpec(
        name=name,
        build=BuildDecoder(config),
        kind="causal_lm",
        max_positions=config.max_positions,
        **fields,
    )


def _tiny(name: str, config: DecoderConfig) -> Callable[[], ModelSpec]:
    small = config.tiny()
    return lambda: ModelSpec(
        name=f"{name}_tiny",
        build=BuildDecoder(small),
        kind="causal_lm",
        max_positions=small.max_positions,
    )
