import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hf_checkpoints import CASES, VOCAB, make_case, oracle_logits
from safetensors.torch import load_file

from metainfer.ir.errors import MetainferError, TypeMismatch, Unsupported
from metainfer.ir.rope import Rope
from metainfer.models import qwen2_moe, qwen3_moe
from metainfer.models.decoder import Decoder, decoder_spec
from metainfer.models.decoder_config import DecoderConfig
from metainfer.models.experts_config import ExpertsConfig
from metainfer.models.hf_names import hf_renames

SMALL: dict[str, Any] = {
    "hidden": 32,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 8,
    "intermediate": 48,
    "vocab": 50,
    "max_positions": 64,
}
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 100,
    "max_position_embeddings": 256,
}


def load_decoder(path: Path) -> Decoder:
    """Our decoder with a checkpoint's weights; no weight may be missing or left over."""
    config = DecoderConfig.from_hf(json.loads((path / "config.json").read_text()))
    decoder = Decoder(config).eval()
    weights = load_file(path / "model.safetensors")
    kind = json.loads((path / "config.json").read_text())["model_type"]
    theirs = hf_renames(kind, config)
    for name, tensor in decoder.state_dict().items():
        stored = theirs.get(name, name)
        if "*" in name:
            parts = [weights.pop(stored.replace("*", str(n))) for n in range(len(tensor))]
            weights[name] = torch.stack(parts)
        elif name != stored:
            weights[name] = weights.pop(stored)
    if config.tie:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    decoder.load_state_dict(weights)
    return decoder


def run(decoder: torch.nn.Module, tokens: list[int]) -> np.ndarray:
    with torch.no_grad():
        positions = torch.arange(len(tokens), dtype=torch.int32)
        return decoder(torch.tensor(tokens), positions).numpy()


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    path = make_case(name, tmp_path)
    # Longer than every window and than the original context of the scaled ropes.
    tokens = np.random.default_rng(1).integers(0, VOCAB, 50).tolist()
    wanted = oracle_logits(path, tokens)
    assert np.abs(wanted).max() > 0.5
    np.testing.assert_allclose(run(load_decoder(path), tokens), wanted, atol=1e-5, rtol=1e-5)


def test_old_style_rope_keys_mean_the_same() -> None:
    scaling = {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    old = DecoderConfig.from_hf({**LLAMA, "rope_theta": 5000.0, "rope_scaling": scaling})
    new = DecoderConfig.from_hf(
        {**LLAMA, "rope_parameters": {**scaling, "rope_type": "yarn", "rope_theta": 5000.0}}
    )
    assert old == new
    assert old.rope == Rope(5000.0, "yarn", 4.0, original_max=32)
    plain = DecoderConfig.from_hf({**LLAMA, "rope_theta": 5000.0, "rope_scaling": None})
    assert plain.rope == Rope(5000.0)


def test_yarn_with_mscale_sets_the_attention_factor() -> None:
    scaling = {"rope_type": "yarn", "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.0}
    config = DecoderConfig.from_hf({**LLAMA, "rope_parameters": scaling})
    log = 0.1 * np.log(40.0)
    assert config.rope.magnitude() == pytest.approx((0.7 * log + 1) / (log + 1))
    assert config.rope.original_max == LLAMA["max_position_embeddings"]


def test_defaults_of_the_families() -> None:
    assert DecoderConfig.from_hf(LLAMA).kv_heads == 4
    assert DecoderConfig.from_hf(LLAMA).head_dim == 16
    assert DecoderConfig.from_hf({**LLAMA, "model_type": "qwen3"}).head_dim == 128
    assert DecoderConfig.from_hf({**LLAMA, "model_type": "mistral"}).windows == (4096, 4096)
    null = {**LLAMA, "model_type": "mistral", "sliding_window": None}
    assert DecoderConfig.from_hf(null).windows == ()
    qwen2 = {**LLAMA, "model_type": "qwen2", "sliding_window": 7}
    assert DecoderConfig.from_hf(qwen2).windows == ()
    sliding = {**qwen2, "use_sliding_window": True}
    assert DecoderConfig.from_hf({**sliding, "max_window_layers": 1}).windows == (0, 7)
    assert DecoderConfig.from_hf({**sliding, "sliding_window": None}).windows == ()
    # Qwen2-MoE has them in every second layer, up to that one.
    other = {**sliding, "model_type": "qwen2_moe", "num_hidden_layers": 4, "max_window_layers": 2}
    assert DecoderConfig.from_hf(other).windows == (7, 0, 0, 0)
    mixed = {**sliding, "layer_types": ["sliding_attention", "full_attention"]}
    assert DecoderConfig.from_hf(mixed).windows == (7, 0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"model_type": "gemma"},
            ["gemma", "llama, mistral, mixtral, qwen2, qwen2_moe,", "ModelSpec"],
        ),
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 0}, ["decoder_sparse_step is 0"]),
        ({"model_type": "qwen2_moe", "shared_expert_intermediate_size": "8"}, ["size is '8'"]),
        ({"model_type": "mixtral", "num_local_experts": "8"}, ["num_local_experts is '8'"]),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, ["'dynamic'", "yarn"]),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["per layer type"]),
        ({"rope_scaling": {"type": "linear"}}, ["no 'factor'"]),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": False}}, ["truncate"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor must be 1"]),
        ({"attention_chunk_size": 64}, ["attention_chunk_size"]),
        ({"quantization_config": {"quant_method": "gptq"}}, ["'gptq'", "fp8", "GGUF"]),
        (
            {"quantization_config": {"quant_method": "compressed-tensors", "format": "int8"}},
            ["compressed-tensors", "'int8'"],
        ),
        ({"quantization_config": "fp8"}, ["wanted an object"]),
        ({"hidden_act": "relu"}, ["'relu'", "gelu_pytorch_tanh"]),
        ({"hidden_size": None}, ["no 'hidden_size'"]),
        ({"vocab_size": "many"}, ["vocab_size is 'many'", "integer"]),
        ({"num_hidden_layers": True}, ["num_hidden_layers is True"]),
    ],
)
def test_unknown_features_are_refused(change: dict[str, object], words: list[str]) -> None:
    with pytest.raises(Unsupported) as caught:
        DecoderConfig.from_hf({**LLAMA, **change}, origin="some/config.json")
    for word in [*words, "some/config.json"]:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("change", "error", "word"),
    [
        ({"kv_heads": 3}, TypeMismatch, "4 query heads over 3"),
        ({"head_dim": 7}, TypeMismatch, "odd width 7"),
        ({"windows": (4,)}, TypeMismatch, "1 windows for 2 layers"),
        ({"layers": 0}, TypeMismatch, "layers = 0"),
        ({"activation": "relu"}, Unsupported, "silu, gelu_tanh"),
    ],
)
def test_configs_that_do_not_fit(
    change: dict[str, object], error: type[MetainferError], word: str
) -> None:
    with pytest.raises(error, match=word):
        DecoderConfig(**{**SMALL, **change})


QWEN_MOE: dict[str, Any] = {**LLAMA, "model_type": "qwen3_moe", "moe_intermediate_size": 24,
                            "num_experts_per_tok": 2}  # fmt: skip


def test_experts_of_a_config() -> None:
    published = DecoderConfig.from_hf({**QWEN_MOE, "num_experts": 5, "norm_topk_prob": True})
    assert published.experts == ExpertsConfig(5, 2, 24)
    # As transformers 5 writes it.
    assert published == DecoderConfig.from_hf(
        {**QWEN_MOE, "num_local_experts": 5, "norm_topk_prob": True, "mlp_only_layers": []}
    )
    some = DecoderConfig.from_hf({**QWEN_MOE, "num_experts": 5, "decoder_sparse_step": 2})
    assert some.experts == ExpertsConfig(5, 2, 24, renormalise=False, layers=(False, True))
    assert some.experts_of(0) is None
    assert some.experts_of(1) is some.experts
    assert some.tiny().experts_of(0) is None
    assert some.tiny().experts_of(1) is not None
    for dense in ({"num_experts": 0}, {"num_experts": 5, "mlp_only_layers": [0, 1]}):
        assert DecoderConfig.from_hf({**QWEN_MOE, **dense}).experts is None
    beside = DecoderConfig.from_hf({**QWEN_MOE, "model_type": "qwen2_moe"})
    assert beside.experts == ExpertsConfig(60, 2, 24, renormalise=False, shared=5632)
    assert (beside.qkv_bias, beside.o_bias, beside.qk_norm) == (True, False, False)
    assert beside.tiny().experts_of(1) == ExpertsConfig(8, 2, 32, renormalise=False, shared=48)
    mixtral = DecoderConfig.from_hf({**LLAMA, "model_type": "mixtral"})
    assert mixtral.experts == ExpertsConfig(8, 2, 96)
    assert (mixtral.rope.theta, mixtral.eps, mixtral.windows) == (1e6, 1e-5, ())


def test_experts_that_do_not_fit() -> None:
    with pytest.raises(TypeMismatch, match="5 of 4 experts of width 24"):
        ExpertsConfig(4, 5, 24)
    with pytest.raises(TypeMismatch, match="shared expert of width -1"):
        ExpertsConfig(4, 2, 24, shared=-1)
    with pytest.raises(TypeMismatch, match="3 kinds of MLP for 2 layers"):
        DecoderConfig(**SMALL, experts=ExpertsConfig(4, 2, 24, layers=(True, True, False)))


@pytest.mark.parametrize(("name", "total", "active"), [("30b", 30.5, 3.35), ("235b", 235.1, 22.2)])
def test_qwen3_moe_has_the_published_number_of_parameters(
    name: str, total: float, active: float
) -> None:
    with torch.device("meta"):
        decoder = qwen3_moe.variants[name].build()
    sizes = {n: p.numel() / 1e9 for n, p in decoder.named_parameters()}
    experts = sum(size for n, size in sizes.items() if "*" in n)
    assert sum(sizes.values()) == pytest.approx(total, rel=2e-3)
    assert sum(sizes.values()) - experts * (1 - 8 / 128) == pytest.approx(active, rel=2e-3)
    assert "model.layers.7.mlp.experts.*.gate_proj.weight" in sizes


def test_qwen2_moe_has_the_published_number_of_parameters() -> None:
    with torch.device("meta"):
        decoder = qwen2_moe.spec.build()
    sizes = {n: p.numel() / 1e9 for n, p in decoder.named_parameters()}
    experts = sum(size for n, size in sizes.items() if "*" in n)
    assert sum(sizes.values()) == pytest.approx(14.3, rel=5e-3)
    assert sum(sizes.values()) - experts * (1 - 4 / 60) == pytest.approx(2.7, rel=1e-2)
    assert "model.layers.23.mlp.shared_expert_gate.weight" in sizes


def test_tied_weights_are_one_parameter_also_on_meta() -> None:
    with torch.device("meta"):
        decoder = decoder_spec("tied", DecoderConfig(**SMALL, tie=True)).build()
    names = [name for name, _ in decoder.named_parameters()]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    assert all(p.is_meta for p in decoder.parameters())


def test_tied_head_is_read_under_the_embeddings_name() -> None:
    spec = decoder_spec("tied", DecoderConfig(**SMALL, tie=True))
    assert spec.checkpoint_name("lm_head.weight") == "model.embed_tokens.weight"
    assert spec.checkpoint_name("model.norm.weight") == "model.norm.weight"
    untied = decoder_spec("untied", DecoderConfig(**SMALL))
    assert untied.checkpoint_name("lm_head.weight") == "lm_head.weight"


def test_tiny_form_keeps_the_switches_and_runs() -> None:
    config = DecoderConfig(
        **{**SMALL, "layers": 4}, qk_norm=True, qkv_bias=True, windows=(0, 0, 9, 9), tie=True
    )
    small = config.tiny()
    assert (small.layers, small.windows) == (2, (0, 5))
    assert (small.qk_norm, small.qkv_bias, small.tie) == (True, True, True)
    assert small.heads // small.kv_heads == 2
    spec = decoder_spec("some", config)
    assert spec.tiny is not None
    logits = run(spec.tiny().build(), list(range(9)))
    assert logits.shape == (9, 96)
    assert np.isfinite(logits).all()


def test_rows_do_not_see_later_tokens() -> None:
    torch.manual_seed(0)
    decoder = Decoder(DecoderConfig(**SMALL))
    long, short = run(decoder, [3, 1, 4, 1, 5]), run(decoder, [3, 1, 4])
    np.testing.assert_allclose(long[:3], short, atol=1e-6)
