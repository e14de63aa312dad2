"""Ops of placed experts: from the experts that a router chose to the slots that hold them."""

from collections.abc import Sequence

import numpy as np

from metainfer.ir.errors import TypeMismatch
from metainfer.ir.ops.infer import integers_of
from metainfer.ir.ops.record import Array, Attrs, op
from metainfer.ir.types import Type

# T tokens, K experts of a token, E experts, M most replicas of an expert.


def _infer_route(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    ids = integers_of(types[0], "numbers of experts")
    table = integers_of(types[1], "slots of experts")
    replicas = integers_of(types[2], "numbers of replicas")
    if ids.rank != 2 or table.rank != 2 or replicas.shape != table.shape[:1]:
        raise TypeMismatch(
            f"route of {ids} by {table} and {replicas}",
            advice="wanted ids [T, K], a table [E, M] and replicas [E]",
        )
    return (ids,)


@op("route", infer=_infer_route, shard="T! K, E! M!, E! -> T! K")
def route(ids: Array, table: Array, replicas: Array) -> Array:
    """Name the slot that serves each choice of an expert.

    Token t takes replica ``t mod replicas[e]`` of expert e, so that any run of tokens falls evenly
    on the replicas. Which one serves changes no number: replicas are the same weights. An id
    outside [0, E) becomes -1.
    Shapes: ids [T, K], table [E, M] of slots (-1 behind the last replica), replicas [E] ->
    [T, K] of ids' type.
    """
    known = (ids >= 0) & (ids < len(table))
    expert = np.where(known, ids, 0)
    turn = np.arange(len(ids))[:, None] % replicas[expert]
    return np.where(known, table[expert, turn], -1).astype(ids.dtype)
