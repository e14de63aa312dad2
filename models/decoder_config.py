"""Sizes and switches of a decoder, and how to read them from a Hugging Face config."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from metainfer.ir.errors import TypeMismatch, Unsupported
from metainfer.ir.rope import Rope
from metainfer.models.config_reader import ConfigReader
from metainfer.models.deepseek_config import (
    DEEPSEEK,
    deepseek_experts,
    deepseek_latent,
    deepseek_scale,
)
from metainfer.models.experts_config import ExpertsConfig
from metainfer.models.hf_quantization import check_quantization
from metainfer.models.latent_config import LatentConfig

ACTIVATIONS = ("silu", "gelu_tanh")

_HF_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_HF_TYPES = (
    "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", *DEEPSEEK,
)  # fmt: skip
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
# Families whose projections have no biases that the key "attention_bias" could switch on.
_UNBIASED = ("mistral", "mixtral", "qwen2", "qwen2_moe")
# Switches of these families that would change what is computed and that we do not know.
_REFUSED = ("attention_chunk_size", "attn_logit_softcapping")


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder: attention with grouped heads and rotary positions, then an MLP or experts.

    Attributes:
        hidden: width of the residual stream.
        layers: number of blocks.
        heads: query heads.
        kv_heads: key and value heads; divides ``heads``.
        head_dim: width of one head.
        intermediate: width of the MLP.
        vocab: rows of the embedding.
        max_positions: longest sequence.
        eps: added to the mean square in every norm.
        rope: parameters of the rotary embedding.
        tie: whether embedding and head share one weight.
        qkv_bias: whether the query, key and value projections have biases.
        o_bias: whether attention's output projection has one.
        mlp_bias: whether the MLP's projections have them.
        qk_norm: whether queries and keys are normalised per head.
        windows: last positions that each layer sees, 0 for all; () means 0 in every layer.
        activation: "silu" or "gelu_tanh".
        scale: multiplies attention scores; 0 means head_dim ** -0.5.
        experts: what stands in the place of the MLP; None for dense decoders.
        latent: sizes of latent attention, ``head_dim`` is that of its rotary part then; None for
            attention over keys and values.

    Raises: TypeMismatch if the sizes do not fit together, Unsupported for an unknown activation.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_positions: int
    eps: float = 1e-6
    rope: Rope = field(default_factory=Rope)
    tie: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int, ...] = ()
    activation: str = "silu"
    scale: float = 0.0
    experts: ExpertsConfig | None = None
    latent: LatentConfig | None = None

    def __post_init__(self) -> None:
        """Check that the sizes fit together."""
        sizes = ("hidden", "layers", "heads", "kv_heads", "head_dim", "intermediate", "vocab")
        for name in (*sizes, "max_positions"):
            if getattr(self, name) < 1:
                raise TypeMismatch(f"a decoder with {name} = {getattr(self, name)}")
        if self.heads % self.kv_heads:
            raise TypeMismatch(f"{self.heads} query heads over {self.kv_heads} key heads")
        if self.head_dim % 2:
            raise TypeMismatch(f"rotary heads of odd width {self.head_dim}")
        if self.latent is not None and (
            self.windows or self.qk_norm or self.latent.rope_width != self.head_dim
        ):
            raise TypeMismatch(
                f"latent attention with rotary keys of {self.latent.rope_width} numbers in heads "
                f"of {self.head_dim}, windows {self.windows}, norms of heads {self.qk_norm}",
                advice="latent attention has neither windows nor norms of heads",
            )
        if self.windows and len(self.windows) != self.layers:
            raise TypeMismatch(f"{len(self.windows)} windows for {self.layers} layers")
        sparse = self.experts.layers if self.experts else ()
        if sparse and len(sparse) != self.layers:
            raise TypeMismatch(f"{len(sparse)} kinds of MLP for {self.layers} layers")
        if self.activation not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise Unsupported(
                f"a decoder with activation {self.activation!r}", advice=f"known: {known}"
            )

    def window_of(self, layer: int) -> int:
        """Last positions that a layer sees; 0 for all."""
        return self.windows[layer] if self.windows else 0

    def experts_of(self, layer: int) -> ExpertsConfig | None:
        """The experts of a layer; None if it has an MLP."""
        if self.experts is None or (self.experts.layers and not self.experts.layers[layer]):
            return None
        return self.experts

    def tiny(self) -> "DecoderConfig":
        """A two-layer form with every switch kept, small enough to interpret.

        The first and the last layer's windows stay, cut to 5 positions.
        """
        groups = min(self.heads // self.kv_heads, 3)
        windows = (min(self.windows[0], 5), min(self.windows[-1], 5)) if self.windows else ()
        latent = self.latent and self.latent.tiny()
        return replace(
            self, hidden=48, layers=2, heads=2 * groups, kv_heads=2,
            head_dim=latent.rope_width if latent else 16, intermediate=80,
            vocab=96, max_positions=min(self.max_positions, 128), windows=windows,
            experts=self.experts and self.experts.tiny(), latent=latent,
        )  # fmt: skip

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], origin: str = "") -> "DecoderConfig":
        """Read the content of a config.json, of transformers 5 or older.

        Args:
            config: the parsed file.
            origin: where it came from, for messages.

        Raises: Unsupported for a model type or a feature that this decoder has not, or for a
            missing or malformed key.
        Source: configuration_*.py of transformers 5.
        """
        return _Reader(config, origin).decoder()


# What the families mean where a key is absent.
_SPARSE: Mapping[str, ExpertsConfig] = {
    "qwen2_moe": ExpertsConfig(60, 4, 1408, shared=5632),
    "qwen3_moe": ExpertsConfig(128, 8, 768),
}


def _layer_windows(read: "_Reader", layers: int, is_sparse: bool) -> tuple[int, ...]:
    """Windows of Qwen2 and Qwen3: by layer_types, else from max_window_layers on.

    Qwen2-MoE has them in every second layer before that one.
    """
    window = read.window() if read.flag("use_sliding_window") else 0
    types = read.get("layer_types", None)
    if types is None:
        end = read.integer("max_window_layers", 28)
        seen = [i % 2 == 0 and i < end if is_sparse else i >= end for i in range(layers)]
        return tuple(window if one else 0 for one in seen)
    known = {"full_attention": 0, "sliding_attention": window}
    unknown = [t for t in types if t not in known]
    if unknown:
        raise read.unsupported(f"layer type {unknown[0]!r}", f"known: {', '.join(known)}")
    if "sliding_attention" in types and not window:
        raise read.unsupported(
            "sliding_attention layers without use_sliding_window", "repair layer_types"
        )
    return tuple(known[t] for t in types[:layers])


@dataclass(frozen=True)
class _Reader(ConfigReader):
    """Reads a whole decoder."""

    def decoder(self) -> DecoderConfig:
        kind = self.config.get("model_type")
        if kind not in _HF_TYPES:
            known = ", ".join(_HF_TYPES)
            raise Unsupported(
                f"model type {kind!r} is not known",
                origin=self.origin,
                advice=f"known: {known}; write any other model as a model.py with a ModelSpec",
            )
        for key in _REFUSED:
            if self.config.get(key) is not None:
                raise self.unsupported(f"{key} is not supported", f"{key} must be null")
        check_quantization(self.config, self.origin)
        heads, hidden = self.integer("num_attention_heads"), self.integer("hidden_size")
        layers = self.integer("num_hidden_layers")
        latent = deepseek_latent(self) if kind in DEEPSEEK else None
        head_dim = self.integer("head_dim", 128 if kind == "qwen3" else hidden // heads)
        biased = kind not in _UNBIASED and self.flag("attention_bias")
        rope = self.rope(1e6 if kind == "mixtral" else 1e4)
        # Qwen2-MoE's bias of queries, keys and values can be switched off.
        always = kind == "qwen2" or (kind == "qwen2_moe" and self.flag("qkv_bias", True))
        return DecoderConfig(
            hidden=hidden,
            layers=layers,
            heads=heads,
            kv_heads=self.integer("num_key_value_heads", heads),
            head_dim=latent.rope_width if latent else head_dim,
            intermediate=self.integer("intermediate_size"),
            vocab=self.integer("vocab_size"),
            max_positions=self.integer("max_position_embeddings"),
            eps=self.number("rms_norm_eps", 1e-5 if kind == "mixtral" else 1e-6),
            rope=rope,
            tie=self.flag("tie_word_embeddings"),
            qkv_bias=biased or always,
            o_bias=biased,
            mlp_bias=kind in ("llama", "deepseek_v2") and self.flag("mlp_bias"),
            qk_norm=kind in ("qwen3", "qwen3_moe"),
            windows=self.windows(str(kind), layers),
            activation=self.activation(),
            scale=deepseek_scale(self, latent) if latent else 0.0,
            experts=self.experts(str(kind), layers),
            latent=latent,
        )

    def experts(self, kind: str, layers: int) -> ExpertsConfig | None:
        if kind == "mixtral":
            return ExpertsConfig(
                self.integer("num_local_experts", 8),
                self.integer("num_experts_per_tok", 2),
                self.integer("intermediate_size"),
            )
        if kind in DEEPSEEK:
            return deepseek_experts(self, layers)
        if kind not in _SPARSE:
            return None
        absent = _SPARSE[kind]
        # Transformers 5 writes num_local_experts, the published configs have num_experts.
        num = self.integer("num_experts", self.integer("num_local_experts", absent.num))
        if not num:
            return None
        dense, step = self.get("mlp_only_layers", ()), self.integer("decoder_sparse_step", 1)
        if step < 1:
            raise self.unsupported(f"decoder_sparse_step is {step}", "wanted 1 or more")
        sparse = tuple(i not in dense and (i + 1) % step == 0 for i in range(layers))
        if not any(sparse):
            return None
        return ExpertsConfig(
            num,
            self.integer("num_experts_per_tok", absent.chosen),
            self.integer("moe_intermediate_size", absent.intermediate),
            self.flag("norm_topk_prob"),
            () if all(sparse) else sparse,
            self.integer("shared_expert_intermediate_size", absent.shared) if absent.shared else 0,
        )

    def activation(self) -> str:
        name = self.get("hidden_act", "silu")
        if name not in _HF_ACTIVATIONS:
            known = ", ".join(_HF_ACTIVATIONS)
            raise self.unsupported(f"hidden_act {name!r} is not supported", f"known: {known}")
        return _HF_ACTIVATIONS[name]

    def window(self, absent: int = 4096) -> int:
        # Null switches the window off; only an absent key means the families' default.
        return self.integer("sliding_window", 0 if "sliding_window" in self.config else absent)

    def windows(self, kind: str, layers: int) -> tuple[int, ...]:
        if kind in ("llama", *DEEPSEEK):
            return ()
        if kind in ("mistral", "mixtral", "qwen3_moe"):
            # One window for all layers.
            used = kind != "qwen3_moe" or self.flag("use_sliding_window")
            window = self.window(0 if kind == "mixtral" else 4096) if used else 0
            return (window,) * layers if window else ()
        windows = _layer_windows(self, layers, kind == "qwen2_moe")
        return windows if any(windows) else ()

    def rope(self, absent: float) -> Rope:
        """Parameters under ``rope_parameters`` (transformers 5) or ``rope_scaling`` (older)."""
        given = self.get("rope_parameters", None) or self.get("rope_scaling", None) or {}
        if not isinstance(given, Mapping) or any(isinstance(v, Mapping) for v in given.values()):
            raise self.unsupported("rope parameters per layer type", "one set for all layers")
        # A key of the dictionary wins over the same key of the config, as in transformers.
        read = _Reader({**self.config, **given}, self.origin)
        kind = given.get("rope_type", given.get("type", "default"))
        if kind not in _ROPE_TYPES:
            known = ", ".join(_ROPE_TYPES)
            raise self.unsupported(f"rope type {kind!r} is not supported", f"known: {known}")
        if read.number("partial_rotary_factor", 1.0) != 1.0:
            raise self.unsupported("partial rotary embedding", "partial_rotary_factor must be 1")
        theta = read.number("rope_theta", absent)
        if kind == "default":
            return Rope(theta)
        if kind == "linear":
            return Rope(theta, "linear", read.number("factor"))
        positions = self.integer("max_position_embeddings")
        original = read.integer("original_max_position_embeddings", positions)
        return _SCALED[kind](read, theta, original)


def _llama3(read: _Reader, theta: float, original: int) -> Rope:
    return Rope(
        theta,
        "llama3",
        read.number("factor"),
        low_freq_factor=read.number("low_freq_factor"),
        high_freq_factor=read.number("high_freq_factor"),
        original_max=original,
    )


def _yarn(read: _Reader, theta: float, original: int) -> Rope:
    if read.get("truncate", True) is not True:
        raise read.unsupported("yarn without truncate", "truncate must be true")
    factor = read.number("factor", read.integer("max_position_embeddings") / original)
    rope = Rope(
        theta,
        "yarn",
        factor,
        original_max=original,
        beta_fast=read.number("beta_fast", 32),
        beta_slow=read.number("beta_slow", 1),
        attention_factor=read.number("attention_factor", 0.0),
    )
    scales = read.number("mscale", 0.0), read.number("mscale_all_dim", 0.0)
    if rope.attention_factor or not all(scales):
        return rope
    above, below = (1.0 + m * (rope.magnitude() - 1.0) for m in scales)
    return replace(rope, attention_factor=above / below)


_SCALED: Mapping[str, Callable[[_Reader, float, int], Rope]] = {"llama3": _llama3, "yarn": _yarn}
