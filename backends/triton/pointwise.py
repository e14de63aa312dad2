"""Launches of emitted groups."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from metainfer.backends.kernel import Constraint, Query
from metainfer.backends.torch.call import TorchCall
from metainfer.backends.torch.tensors import BlockTensors
from metainfer.backends.triton.emit.source import Parameter, body_of, emit
from metainfer.backends.triton.emit.tiles import rotary
from metainfer.backends.triton.launch import Launch
from metainfer.ir.graph import Graph, Op
from metainfer.ir.interpret import unify
from metainfer.ir.step import is_step_field
from metainfer.ir.types import TensorType


def launches(call: TorchCall) -> Sequence[Launch]:
    """The launch of a group; none if a result is empty."""
    graph = body_of(call.op)
    strided, unit_last = strided_of(call)
    emitted = emit(graph, strided, unit_last, settled_of(call.op))
    env = sizes_of(graph, call)
    rows = [math.prod(n.evaluate(env) for n in s.lead) for s in emitted.spaces]
    programs = max(-(-n // s.rows) for n, s in zip(rows, emitted.spaces, strict=True))
    chunks = 1
    if emitted.chunks:
        chunks = max(-(-s.width.evaluate(env) // s.columns) for s in emitted.spaces)
    if programs * chunks == 0:
        return ()
    arguments = {p.name: argument(p, call, emitted.tables, rows, env) for p in emitted.parameters}
    return (
        Launch(
            emitted.function(), (programs, chunks), arguments, num_warps=emitted.num_warps,
        ),
    )  # fmt: skip


def settled_of(op: Op) -> frozenset[int]:
    """Operands that no launch of a step writes: weights, and the step's own fields."""
    return frozenset(i for i, v in enumerate(op.operands) if v.is_weight or is_step_field(v))


def strided_of(call: TorchCall) -> tuple[frozenset[int], frozenset[int]]:
    """Operands with gaps, and those of them whose last dim is dense."""
    views = {
        i: x
        for i, x in enumerate(call.inputs)
        if isinstance(x, torch.Tensor) and not x.is_contiguous()
    }
    return frozenset(views), frozenset(i for i, x in views.items() if x.stride(-1) == 1)


def sizes_of(graph: Graph, call: TorchCall) -> dict[str, int]:
    """Values of the size symbols of a call: the step's, and what shapes tell beyond them."""
    env = dict(call.sizes)
    known = zip(graph.inputs, call.inputs, strict=True)
    made = zip((v for v in graph.outputs if not v.is_state), call.outputs, strict=True)
    for value, data in (*known, *made):
        # A packed weight has no symbolic sizes.
        if isinstance(value.type, TensorType) and isinstance(data, torch.Tensor | BlockTensors):
            unify(value, tuple(data.shape), env)
    return env


def argument(
    parameter: Parameter, call: TorchCall, tables: Sequence[Op], rows: Sequence[int],
    env: dict[str, int],
) -> Any:  # fmt: skip
    """What a call passes for a parameter of an emitted function.

    Args:
        parameter: which one.
        call: the call.
        tables: rope ops, in the order of their tables.
        rows: rows of each space.
        env: values of the size symbols.
    """
    number, detail = parameter.number, parameter.detail
    if parameter.kind == "rows":
        return rows[number]
    if parameter.kind == "size":
        return detail.evaluate(env)
    if parameter.kind == "stride":
        return call.inputs[number].stride(detail)
    if parameter.kind == "output":
        return call.outputs[number]
    if parameter.kind == "made":
        return getattr(call.outputs[number], detail)
    if parameter.kind in ("cos", "sin"):
        assert call.rope is not None
        cos, sin = call.rope(*rotary(tables[number]))
        return cos if parameter.kind == "cos" else sin
    data = call.inputs[number]
    if parameter.kind in ("field", "part"):
        part = data[detail] if parameter.kind == "field" else getattr(data, detail)
        # Triton has no type for powers of two: it gets their bytes.
        return part.view(torch.uint8) if part.dtype == torch.float8_e8m0fnu else part
    return data


def emittable() -> Constraint:
    """The emitter knows all that the group does."""

    def check(query: Query) -> str | None:
        # What it cannot do is raised, and read from there as the reason.
        emit(body_of(query.op), query.strided, query.strided)
        return None

    return Constraint("a body that can be emitted", check)
