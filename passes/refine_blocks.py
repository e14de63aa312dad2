"""Before `shard`: scale blocks that a rank's border would cut are made smaller, by repeated scales.

1536 rows in blocks of 128 give each of 8 ranks 192: their blocks become 64 high. No value changes,
and a kernel that reads the coarse blocks may be lost: so only weights are refined whose blocks do
not fit, and never to less than `LEAST`, where scales would weigh more than they are worth; such a
weight stays whole on every rank.
"""

import math
from dataclasses import replace

from metainfer.ir.dtypes import Block
from metainfer.ir.graph import Module
from metainfer.ir.refine import refined_format
from metainfer.passes.target import Decision, Target
from metainfer.passes.weight_items import Item, weight_items
from metainfer.passes.weights import LoadEditor

LEAST = 8


def refine_blocks(module: Module, axis: str, ranks: int, target: Target) -> Module:
    """Refine the blocks of every weight that ``ranks`` of an axis could share but for them.

    Weights that one op reads get one format, as its kernels want.
    """
    for item in list(weight_items(module)):
        finer = _finer(item, axis, ranks, target)
        if finer is not None:
            module = _refined(module, item, finer, ranks, target)
    return module


def _finer(item: Item, axis: str, ranks: int, target: Target) -> Block | None:
    """The format that suits all weights of an item, None if nothing is to be done."""
    names = set(item.weights)
    held = {v.tensor.dtype for op in item.readers for v in op.operands if v.name in names}
    own = held.pop() if len(held) == 1 else None
    is_whole = axis in target.strategy.experts and any(op.name == "experts" for op in item.readers)
    if not isinstance(own, Block) or is_whole:
        return None
    extents = own.extents(len(item.shapes[0]))
    for shape in item.shapes:
        parts = {
            dim: size // ranks
            for dim, size in enumerate(shape)
            if size % ranks == 0 and size > ranks
        }
        fitting = refined_format(own, shape, parts).extents(len(shape))
        extents = tuple(math.gcd(a, b) for a, b in zip(extents, fitting, strict=True))
    least = min(LEAST, *(n for n in own.block if n)) if any(own.block) else 0
    finer = replace(own, block=extents)
    if finer == own or any(n < least for n in extents[-len(own.block) :]):
        return None
    return finer


def _refined(module: Module, item: Item, finer: Block, ranks: int, target: Target) -> Module:
    editor = LoadEditor(module, item.graph)
    before = sum(editor.made(w).tensor.bytes_at({}) for w in item.weights)
    own = editor.made(item.weights[0]).tensor.dtype
    for weight in item.weights:
        editor.update(weight, editor.emit("refine_scales", editor.made(weight), format=str(finer)))
    after = sum(editor.made(w).tensor.bytes_at({}) for w in item.weights)
    reason = (
        f"blocks of {own} do not end where the parts of {ranks} ranks do: scales are repeated, no "
        f"value changes, {after - before:,} bytes more"
    )
    for weight in item.weights:
        subject = f"{item.graph}: blocks of {weight}"
        target.report.add(Decision("shard", subject, str(finer), reason, "repair"))
    return editor.finish()
