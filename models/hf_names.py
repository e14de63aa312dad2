"""Weight names of checkpoints whose family names them otherwise than our decoder."""

from collections.abc import Mapping
from typing import Any

from metainfer.models.decoder_config import DecoderConfig

# Mixtral numbers the projections of an expert: w1 is the gate, w3 the up, w2 the down projection.
_MIXTRAL = {
    "mlp.gate.weight": "block_sparse_moe.gate.weight",
    "mlp.experts.*.gate_proj.weight": "block_sparse_moe.experts.*.w1.weight",
    "mlp.experts.*.up_proj.weight": "block_sparse_moe.experts.*.w3.weight",
    "mlp.experts.*.down_proj.weight": "block_sparse_moe.experts.*.w2.weight",
}


def hf_renames(kind: str, config: DecoderConfig) -> Mapping[str, str]:
    """Name in the checkpoint by name of the weight, for a Hugging Face model type.

    Source: published checkpoints of the families, as transformers 5 reads and writes them.
    """
    if kind != "mixtral":
        return {}
    layers = (f"model.layers.{i}." for i in range(config.layers))
    return {layer + ours: layer + theirs for layer in layers for ours, theirs in _MIXTRAL.items()}


def hf_unused(keys: Mapping[str, Any], config: DecoderConfig) -> tuple[str, ...]:
    """Patterns of tensors that a checkpoint has beside the decoder's.

    DeepSeek-V3's holds layers behind the last one that guess further tokens: they change none.
    """
    guessing = keys.get("num_nextn_predict_layers") or 0
    return tuple(f"model.layers.{config.layers + i}.*" for i in range(int(guessing)))
