"""How each PyTorch op is spelled in the IR: one entry per op, found by name.

To add an op: give it a record in ``ir/ops/`` if it has none, then one entry in its family here.
"""

from metainfer.compiler.aten import (
    elementwise,
    indexing,
    makers,
    pooling,
    products,
    rounding,
    shapes,
    statistics,
)
from metainfer.compiler.aten.table import ATEN

__all__ = [
    "ATEN",
    "elementwise",
    "indexing",
    "makers",
    "pooling",
    "products",
    "rounding",
    "shapes",
    "statistics",
]
