"""What a placement becomes in a module: orders of rows for load graphs, tables for `route`.

A rank holds the rows of its slots, rank after rank: slot s of rank r is row r * slots + s of the
stacked weight, which the ranks then share evenly. Both are tensors of the plan, by layer, so that
layers that are placed differently stay calls of one block.

NOTE: a placement that changes while a plan runs must move the weights first and switch the tables
after, on all ranks at the same step: a table that is ahead of its weights names slots that still
hold other experts, and the results are silently wrong.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from metainfer.passes.placement import EMPTY, Placement

Array = np.ndarray[Any, np.dtype[Any]]


def slot_order(placement: Placement) -> Array:
    """The expert of each row of the stacked weight, an index for `take_rows`.

    Every rank has as many rows as any other. An empty slot, which nothing is routed to, repeats an
    expert of its rank, so that no other bytes of the checkpoint are read.
    Shapes: -> int32 [ranks * slots].
    """
    rows = []
    for row in placement.slots:
        filler = next((e for e in row if e != EMPTY), 0)
        rows += [filler if e == EMPTY else e for e in row]
    return np.array(rows, np.int32)


def route_table(placement: Placement, counts: Array, width: int = 0) -> tuple[Array, Array]:
    """Operands ``table`` and ``replicas`` of `route`.

    A step of few tokens takes the first replicas only: those are chosen, heaviest expert first, to
    lie on the ranks that have least to do by then; later turns follow rank by rank.

    Args:
        placement: of a layer.
        counts: how often each expert was chosen.
        width: columns of the table, at least the most replicas; 0: as many as that.

    Shapes: counts [experts] -> int32 [experts, width], int32 [experts].
    """
    replicas = placement.replicas()
    table = np.full((placement.num_experts, max(width, int(replicas.max()))), -1, np.int32)
    slots = placement.array()
    first_loads = np.zeros(placement.num_ranks)
    for expert in np.argsort(-np.asarray(counts, np.float64), kind="stable").tolist():
        ranks, columns = np.nonzero(slots == expert)
        start = int(np.argmin(first_loads[ranks]))
        first_loads[ranks[start]] += float(counts[expert])
        turns = ranks * placement.slots_per_rank + columns
        table[expert, : len(turns)] = np.roll(turns, -start)
    return table, replicas.astype(np.int32)


def table_width(placements: Sequence[Placement]) -> int:
    """Columns that the tables of all layers need, so that their types are equal."""
    return max(int(placement.replicas().max()) for placement in placements)
