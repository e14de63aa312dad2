"""Canonical names of computed values, so that equal text means equal graphs."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import count

from metainfer.ir.graph import Graph, Op, Value


def canonical_names(graph: Graph) -> Graph:
    """Name computed values %0, %1, ... in order, in bodies too; inputs keep their names.

    A number that is an input's name is skipped. Two graphs that differ only in the names of
    computed values give the same result::

        %y = add(%x, %x)      ->      %0 = add(%x, %x)
        return %y                     return %0
    """
    taken = {v.name for v in graph.inputs}
    fresh = (name for name in map("%{}".format, count()) if name not in taken)
    renamed: dict[str, Value] = {}
    ops = tuple(_rename(op, renamed, fresh) for op in graph.ops)
    return replace(
        graph,
        ops=ops,
        outputs=_apply(graph.outputs, renamed),
        state_outputs=_apply(graph.state_outputs, renamed),
    )


def _rename(op: Op, renamed: dict[str, Value], fresh: Iterator[str]) -> Op:
    """Rename one op, and remember its results' new names."""
    operands = _apply(op.operands, renamed)
    after = tuple(renamed[n].name if n in renamed else n for n in op.after)
    results = tuple(Value(next(fresh), v.type) for v in op.results)
    renamed.update((old.name, new) for old, new in zip(op.results, results, strict=True))
    body = canonical_names(op.body) if op.body else None
    return replace(op, operands=operands, results=results, body=body, after=after)


def _apply(values: tuple[Value, ...], renamed: dict[str, Value]) -> tuple[Value, ...]:
    return tuple(renamed.get(v.name, v) for v in values)
