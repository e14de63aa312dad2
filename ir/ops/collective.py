"""Collectives: ops that change how a tensor lies over one axis of the mesh, and no value.

Types carry global shapes, so on the whole tensor each of these is the identity; what it does to the
parts stands in its sharding rule (`ir.sharding`). A missing one is a type error.
"""

from metainfer.ir.ops.infer import same_as
from metainfer.ir.ops.record import COLLECTIVE, Array, op


@op("all_reduce", infer=same_as(), shard="partial => whole", traits=[COLLECTIVE])
def all_reduce(x: Array, *, axis: str) -> Array:
    """Finish a sum that is pending over an axis of the mesh; every rank gets all of it."""
    return x


@op("reduce_scatter", infer=same_as(), shard="partial => dim", traits=[COLLECTIVE])
def reduce_scatter(x: Array, *, axis: str, dim: int) -> Array:
    """Finish a sum that is pending over an axis; every rank keeps its part of a dim."""
    return x


@op("all_gather", infer=same_as(), shard="dim => whole", traits=[COLLECTIVE])
def all_gather(x: Array, *, axis: str, dim: int) -> Array:
    """Bring the parts of a dim together on every rank of an axis."""
    return x


@op("all_to_all", infer=same_as(), shard="source => target", traits=[COLLECTIVE])
def all_to_all(x: Array, *, axis: str, source: int, target: int) -> Array:
    """Exchange parts, so that another dim is the sharded one."""
    return x


@op("take_shard", infer=same_as(), shard="whole => dim", traits=[COLLECTIVE])
def take_shard(x: Array, *, axis: str, dim: int) -> Array:
    """Keep each rank's own part of a dim that every rank holds whole; nothing is sent."""
    return x
