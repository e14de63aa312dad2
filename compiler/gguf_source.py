"""Reads the decoder that a GGUF file describes in its metadata.

Source: key names of the GGUF specification; frequency factors as llama.cpp's converter writes them.
"""

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from metainfer.compiler.hf_folder import identifier
from metainfer.ir.errors import Unsupported
from metainfer.ir.rope import Rope
from metainfer.models.decoder import decoder_spec
from metainfer.models.decoder_config import DecoderConfig
from metainfer.models.gguf_names import decoder_renames, rope_unpermute
from metainfer.models.spec import ModelSpec
from metainfer.runtime.checkpoint import Checkpoint, open_checkpoint

# Mistral's and SmolLM's files say "llama" too.
_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_SCALINGS = ("none", "linear", "yarn")
_FACTORS = "rope_freqs.weight"
_MISSING = object()
# What Llama 3.1 and later were published with; only the factor differs between them.
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_ORIGINAL = 1.0, 4.0, 8192


def gguf_spec(path: Path) -> ModelSpec:
    """The spec of the decoder in a GGUF file; the file is checkpoint and tokenizer as well.

    Raises: Unsupported if the architecture or a feature is not known, CheckpointError if the file
        is damaged.
    """
    with closing(open_checkpoint(path)) as checkpoint:
        reader = _Reader(checkpoint, path)
        config = reader.decoder()
        has_tokenizer = "tokenizer.ggml.tokens" in checkpoint.metadata
    return decoder_spec(
        identifier(path.stem),
        config,
        checkpoint=path,
        tokenizer=path if has_tokenizer else None,
        renames=decoder_renames(config),
        unpermute=rope_unpermute(config) if reader.architecture == "llama" else (),
        source_file=path,
    )


@dataclass(frozen=True)
class _Reader:
    """Reads typed values of one file, with errors that name the key."""

    checkpoint: Checkpoint
    path: Path

    @property
    def metadata(self) -> Mapping[str, object]:
        return self.checkpoint.metadata

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture"))

    def unsupported(self, what: str, advice: str) -> Unsupported:
        return Unsupported(
            f"GGUF architecture {self.architecture!r}: {what}",
            origin=str(self.path),
            advice=advice,
        )

    def get(self, key: str, default: Any = _MISSING) -> Any:
        """Value of a key of the architecture."""
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        if value is _MISSING:
            raise self.unsupported(f"no {key!r} in the metadata", "convert the model again")
        return value

    def integer(self, key: str, default: Any = _MISSING) -> int:
        value = self.get(key, default)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        raise self.unsupported(
            f"{key} is {value!r}, wanted one integer", "sizes that vary by layer are not supported"
        )

    def number(self, key: str, default: Any = _MISSING) -> float:
        value = self.get(key, default)
        if isinstance(value, int | float) and not isinstance(value, bool):
            # Files hold float32: its shortest text is the number that was meant.
            return float(str(np.float32(value)))
        raise self.unsupported(f"{key} is {value!r}, wanted a number", "convert the model again")

    def has_tensor(self, name: str) -> bool:
        return name in self.checkpoint.tensors

    def decoder(self) -> DecoderConfig:
        if self.architecture not in _ARCHITECTURES:
            known = ", ".join(_ARCHITECTURES)
            raise Unsupported(
                f"GGUF architecture {self.architecture!r} is not known",
                origin=str(self.path),
                advice=f"known: {known}; write any other model as a model.py with a ModelSpec",
            )
        if self.integer("expert_count", 0):
            raise self.unsupported("a mixture of experts", "write it as a model.py")
        heads, hidden = self.integer("attention.head_count"), self.integer("embedding_length")
        head_dim = self.integer("attention.key_length", hidden // heads)
        self._check_heads(head_dim)
        layers = self.integer("block_count")
        window = self.integer("attention.sliding_window", 0)
        return DecoderConfig(
            hidden=hidden,
            layers=layers,
            heads=heads,
            kv_heads=self.integer("attention.head_count_kv", heads),
            head_dim=head_dim,
            intermediate=self.integer("feed_forward_length"),
            vocab=self._vocab(),
            max_positions=self.integer("context_length"),
            eps=self.number("attention.layer_norm_rms_epsilon"),
            rope=self._rope(head_dim),
            tie=not self.has_tensor("output.weight"),
            qkv_bias=self.has_tensor("blk.0.attn_q.bias"),
            o_bias=self.has_tensor("blk.0.attn_output.bias"),
            mlp_bias=self.has_tensor("blk.0.ffn_gate.bias"),
            qk_norm=self.has_tensor("blk.0.attn_q_norm.weight"),
            windows=(window,) * layers if window else (),
        )

    def _check_heads(self, head_dim: int) -> None:
        for key in ("attention.value_length", "rope.dimension_count"):
            if self.integer(key, head_dim) != head_dim:
                raise self.unsupported(
                    f"{key} is {self.get(key)}, heads are {head_dim} wide", "both must be equal"
                )

    def _vocab(self) -> int:
        info = self.checkpoint.tensors.get("token_embd.weight")
        if info is None:
            raise self.unsupported("no tensor token_embd.weight", "convert the model again")
        return info.shape[0]

    def _rope(self, head_dim: int) -> Rope:
        theta = self.number("rope.freq_base", 10000.0)
        scaling = self.get("rope.scaling.type", "none")
        if scaling not in _SCALINGS:
            known = ", ".join(_SCALINGS)
            raise self.unsupported(f"rope scaling {scaling!r}", f"known: {known}")
        if self.has_tensor(_FACTORS):
            return self._llama3(theta, head_dim)
        if scaling == "none":
            return Rope(theta)
        factor = self.number("rope.scaling.factor")
        if scaling == "linear":
            return Rope(theta, "linear", factor)
        rope = Rope(
            theta,
            "yarn",
            factor,
            original_max=self.integer("rope.scaling.original_context_length"),
            beta_fast=self.number("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=self.number("rope.scaling.yarn_beta_slow", 1.0),
        )
        multiple = self.number("rope.scaling.attn_factor", 1.0)
        if multiple == 1.0:
            return rope
        return Rope(**{**rope.attrs(), "attention_factor": multiple * rope.magnitude()})

    def _llama3(self, theta: float, head_dim: int) -> Rope:
        """The llama3 scaling whose frequencies the file's factors give.

        Files hold only the divisors of the frequencies; the greatest is the scaling's factor.
        Raises: Unsupported if no scaling of Llama 3 gives these divisors.
        """
        stored = self.checkpoint.read(_FACTORS)
        divisors = np.asarray(stored, np.float32)
        rope = Rope(
            theta,
            "llama3",
            float(divisors.max()),
            low_freq_factor=_LLAMA3_LOW,
            high_freq_factor=_LLAMA3_HIGH,
            original_max=_LLAMA3_ORIGINAL,
        )
        wanted = Rope(theta).inverse_frequencies(head_dim) / rope.inverse_frequencies(head_dim)
        if divisors.shape == wanted.shape and np.allclose(divisors, wanted, rtol=1e-4):
            return rope
        raise self.unsupported(
            f"{_FACTORS} holds frequencies that are not those of Llama 3",
            "use the safetensors form of the model",
        )
