"""GGUF files that the gguf package wrote: file in, the logits of the dequantized weights out."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf.quants import dequantize, quantize
from lm_steps import EXACT, compile_and_load, error, mean_kl, run_chunked

import metainfer

HIDDEN, INNER, HEADS, KV_HEADS, SIZE, LAYERS, VOCAB = 256, 512, 4, 2, 64, 2, 300
LENGTH = 40

Weights = dict[str, np.ndarray]


@dataclass(frozen=True)
class Written:
    """A file, and its weights as float32 under the names of Hugging Face."""

    path: Path
    weights: Weights
    has_bias: bool

    def logits(self, tokens: list[int]) -> np.ndarray:
        """What transformers computes with the float32 weights."""
        common = {
            "vocab_size": VOCAB,
            "hidden_size": HIDDEN,
            "intermediate_size": INNER,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        }
        if self.has_bias:
            model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**common))
        else:
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**common))
        model.load_state_dict({n: torch.from_numpy(w) for n, w in self.weights.items()})
        with torch.no_grad():
            return model.eval()(torch.tensor([tokens]), use_cache=False).logits[0].numpy()


def k_blocks(kind: str, values: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Random K blocks whose values spread like those given; the package cannot make them."""
    rows, width = values.shape
    spread = float(values.std())
    size = {"Q4_K": 144, "Q6_K": 210}[kind]
    raw = rng.integers(0, 256, (rows, width // 256, size), dtype=np.uint8)

    def scale(at: int, number: float) -> None:
        numbers = number * rng.uniform(0.5, 1.5, (rows, width // 256, 1))
        raw[..., at : at + 2] = numbers.astype(np.float16).view(np.uint8)

    if kind == "Q4_K":
        # Codes 0..15, scales and offsets 0..63: offset at the middle of the codes.
        scale(0, spread / 185)
        scale(2, spread / 185 * 7.5)
    else:
        scale(208, spread / 1370)
    return raw.reshape(rows, -1)


def encode(
    kind: str, values: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """(bytes or array for the file, what they mean in float32)."""
    type_ = gguf.GGMLQuantizationType[kind]
    data = k_blocks(kind, values, rng) if kind.endswith("_K") else quantize(values, type_)
    return data, dequantize(data, type_).astype(np.float32)


def halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows in Hugging Face's order; "llama" files interleave the two halves of a head."""
    return weight.reshape(heads, SIZE // 2, 2, -1).swapaxes(1, 2).reshape(weight.shape)


def write(
    path: Path,
    kind_of: Callable[[str], str],
    *,
    architecture: str = "llama",
    tie: bool = False,
    seed: int = 0,
) -> Written:
    """Write a tiny decoder; ``kind_of`` gives the storage type of each matrix."""
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    weights: Weights = {}
    has_bias = architecture == "qwen2"

    def vector(name: str, hf_name: str, width: int, middle: float) -> None:
        values = (middle + 0.2 * rng.standard_normal(width)).astype(np.float32)
        writer.add_tensor(name, values)
        weights[hf_name] = values

    def matrix(name: str, hf_name: str, rows: int, width: int, heads: int = 0) -> None:
        values = (rng.standard_normal((rows, width)) * width**-0.5).astype(np.float32)
        kind = kind_of(name)
        data, wide = encode(kind, values, rng)
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[kind])
        weights[hf_name] = halves(wide, heads) if heads and not has_bias else wide

    matrix("token_embd.weight", "model.embed_tokens.weight", VOCAB, HIDDEN)
    for i in range(LAYERS):
        ours, theirs = f"blk.{i}.", f"model.layers.{i}."
        vector(ours + "attn_norm.weight", theirs + "input_layernorm.weight", HIDDEN, 1.0)
        vector(ours + "ffn_norm.weight", theirs + "post_attention_layernorm.weight", HIDDEN, 1.0)
        for part, heads in (("q", HEADS), ("k", KV_HEADS), ("v", 0)):
            rows = (heads or KV_HEADS) * SIZE
            name = f"{theirs}self_attn.{part}_proj."
            matrix(f"{ours}attn_{part}.weight", name + "weight", rows, HIDDEN, heads)
            if has_bias:
                vector(f"{ours}attn_{part}.bias", name + "bias", rows, 0.0)
        matrix(ours + "attn_output.weight", theirs + "self_attn.o_proj.weight", HIDDEN, HIDDEN)
        matrix(ours + "ffn_gate.weight", theirs + "mlp.gate_proj.weight", INNER, HIDDEN)
        matrix(ours + "ffn_up.weight", theirs + "mlp.up_proj.weight", INNER, HIDDEN)
        matrix(ours + "ffn_down.weight", theirs + "mlp.down_proj.weight", HIDDEN, INNER)
    vector("output_norm.weight", "model.norm.weight", HIDDEN, 1.0)
    if tie:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    else:
        matrix("output.weight", "lm_head.weight", VOCAB, HIDDEN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Written(path, weights, has_bias)


def like_q4_k_m(name: str) -> str:
    """As llama.cpp mixes them: some layers have wider values and down projections."""
    wider = name.startswith("blk.1.") and ("attn_v" in name or "ffn_down" in name)
    return "Q6_K" if wider or name == "output.weight" else "Q4_K"


def check(written: Written, divergence: float) -> None:
    """The exact plan within 1e-4 of float32, the default plan within a divergence (nats)."""
    tokens = np.random.default_rng(1).integers(0, VOCAB, LENGTH).tolist()
    wanted = written.logits(tokens)
    assert np.abs(wanted).max() > 1
    for options in (EXACT, {"activations": "f32", "weights": "keep", "exact": True}):
        exact = compile_and_load(written.path, **options)
        assert error(run_chunked(exact, tokens, 16), wanted) < 1e-4
        assert error(run_chunked(exact, tokens, 1, "decode"), wanted) < 1e-4
    default = compile_and_load(written.path)
    assert mean_kl(run_chunked(default, tokens, 16), wanted) < divergence
    assert mean_kl(run_chunked(default, tokens, 1, "decode"), wanted) < divergence


# Measured: exact plans within 3e-5; divergences in the comments. F16 tables become bf16.
@pytest.mark.parametrize(
    ("kind", "divergence"),
    [
        pytest.param("F32", 1e-9, marks=pytest.mark.thorough),  # 5e-13
        pytest.param("F16", 1.5e-5, marks=pytest.mark.thorough),  # 6.8e-6
        pytest.param("BF16", 1e-9, marks=pytest.mark.thorough),  # 5e-13
        ("Q8_0", 5e-4),  # 2.4e-4: activations are rounded to 8 bits
        pytest.param("Q4_0", 5e-4, marks=pytest.mark.thorough),  # 2.0e-4
        pytest.param("Q4_1", 5e-4, marks=pytest.mark.thorough),  # 2.3e-4
        ("Q4_K", 5e-4),  # 1.4e-4
        pytest.param("Q6_K", 5e-4, marks=pytest.mark.thorough),  # 8.0e-5
    ],
)
def test_every_storage_type(tmp_path: Path, kind: str, divergence: float) -> None:
    check(write(tmp_path / "tiny.gguf", lambda name: kind), divergence)


@pytest.mark.thorough
def test_mixed_types_make_blocks_of_their_own(tmp_path: Path) -> None:
    written = write(tmp_path / "mixed.gguf", like_q4_k_m)
    plan = metainfer.compile(written.path, "cpu", activations="f32", weights="keep", exact=True)
    calls = [str(c.attr["block"]) for c in plan.module("decode").calls()]
    assert len(set(calls)) == LAYERS
    check(written, 5e-4)  # 3.0e-5


@pytest.mark.thorough
def test_tied_embedding(tmp_path: Path) -> None:
    check(write(tmp_path / "tied.gguf", lambda name: "Q8_0", tie=True), 5e-4)  # 2.3e-4


def test_qwen2_keeps_rows_in_halves_and_has_biases(tmp_path: Path) -> None:
    check(write(tmp_path / "qwen.gguf", lambda name: "F16", architecture="qwen2"), 1.5e-5)
