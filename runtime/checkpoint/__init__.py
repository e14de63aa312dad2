"""Weight files: safetensors and GGUF, mapped into memory and read tensor by tensor."""

from metainfer.runtime.checkpoint.expect import check_tensors
from metainfer.runtime.checkpoint.interface import Checkpoint, TensorInfo
from metainfer.runtime.checkpoint.locate import absent_shards, open_checkpoint
from metainfer.runtime.checkpoint.stacked import TensorSource, expand

__all__ = [
    "Checkpoint",
    "TensorInfo",
    "TensorSource",
    "absent_shards",
    "check_tensors",
    "expand",
    "open_checkpoint",
]
