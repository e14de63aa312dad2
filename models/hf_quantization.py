"""Which quantized Hugging Face checkpoints can be read, from their config's own words."""

from collections.abc import Mapping
from typing import Any

from metainfer.ir.errors import Unsupported

# Tensors of these say by their names, types and shapes what they are.
METHODS = ("fp8", "fbgemm_fp8", "mxfp4")
_PACKED_FORMATS = (
    "float-quantized", "naive-quantized", "mxfp4-pack-quantized", "nvfp4-pack-quantized",
)  # fmt: skip
_MODELOPT = ("FP8", "NVFP4")
_ADVICE = (
    "read are fp8 (scales by tensor, row or block), mxfp4 and nvfp4 weights: take the model in one "
    "of those, in bf16, or as a GGUF file"
)


def check_quantization(config: Mapping[str, Any], origin: str = "") -> None:
    """Check that the weights of a config.json are in a format that checkpoints are read in.

    Args:
        config: the parsed file.
        origin: where it came from, for messages.

    Raises: Unsupported for a method or format that is not read.
    """
    found = config.get("quantization_config")
    if found is None:
        return
    if not isinstance(found, Mapping):
        raise Unsupported(
            f"quantization_config is {found!r}", origin=origin, advice="wanted an object"
        )
    method = found.get("quant_method")
    if method in METHODS or (method == "modelopt" and found.get("quant_algo") in _MODELOPT):
        return
    if method != "compressed-tensors":
        raise Unsupported(
            f"quantization_config of quant_method {method!r} is not supported",
            origin=origin,
            advice=_ADVICE,
        )
    format_ = found.get("format")
    if format_ not in _PACKED_FORMATS:
        raise Unsupported(
            f"quantization_config of compressed-tensors in format {format_!r} is not supported",
            origin=origin,
            advice=_ADVICE,
        )
