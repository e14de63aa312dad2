"""Weight files: safetensors and GGUF, mapped into memory and read tensor by tensor."""

from metainfer.runtime.checkpoint.expect import check_tensors
from metainfer.runtime.checkpoint.interface import Checkpoint, TensorInfo
from metainfer.runtime.checkpoint.locate import absent_shards, open_checkpoint

__all__ = ["Checkpoint", "TensorInfo", "absent_shards", "check_tensors", "open_checkpoint"]
