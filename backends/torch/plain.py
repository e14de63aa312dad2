"""A plain PyTorch implementation of every op that a graph may run, on any device.

They mirror the references: floats are computed in float32 (f64 in f64) and rounded once. They are
slow and always there. Load-graph ops are evaluated by the loader and have none.
"""

from collections.abc import Callable

from metainfer.backends.torch.call import TorchCall
from metainfer.backends.torch.plain_attention import PLAIN_ATTENTION
from metainfer.backends.torch.plain_elementwise import PLAIN_ELEMENTWISE
from metainfer.backends.torch.plain_linear import PLAIN_LINEAR
from metainfer.backends.torch.plain_moe import PLAIN_MOE
from metainfer.backends.torch.plain_reduce import PLAIN_REDUCE
from metainfer.backends.torch.plain_shape import PLAIN_SHAPE, VIEWS

PLAIN: dict[str, Callable[[TorchCall], None]] = {
    **PLAIN_ELEMENTWISE,
    **PLAIN_SHAPE,
    **PLAIN_REDUCE,
    **PLAIN_LINEAR,
    **PLAIN_ATTENTION,
    **PLAIN_MOE,
}
LOAD_OPS = frozenset(
    {
        "dequantize",
        "concat_rows",
        "unpermute_rope",
        "refine_scales",
        "take_rows",
        "repeat_rows",
        "pack",
    }
)

__all__ = ["LOAD_OPS", "PLAIN", "VIEWS"]
