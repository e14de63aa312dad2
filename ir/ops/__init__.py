"""One record per op: infer, reference, flops, bytes, sharding rule.

Importing this package registers them all.
"""

from metainfer.ir.ops import (
    attention,
    collective,
    elementwise,
    latent,
    linear,
    load,
    moe,
    nn,
    placement,
    reduce,
    shape,
)
from metainfer.ir.ops.record import OPS, Builder, OpDef, infer_types, op_def, op_sizes

__all__ = [
    "OPS",
    "Builder",
    "OpDef",
    "attention",
    "collective",
    "elementwise",
    "infer_types",
    "latent",
    "linear",
    "load",
    "moe",
    "nn",
    "op_def",
    "op_sizes",
    "placement",
    "reduce",
    "shape",
]
