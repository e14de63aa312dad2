"""Simulated ranks: the interpreter for a module in local form, all ranks of its mesh in lockstep.

It is the oracle of `shard` and of everything after it: N simulated ranks give what one rank gives.
Every rank runs the same text, so ops are taken one by one over all ranks; at a collective the
ranks of its axis exchange their parts (`ir.ops.collective.exchange`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from metainfer.ir.errors import TypeMismatch
from metainfer.ir.graph import Binding, Graph, Module, Op
from metainfer.ir.interpret import (
    Data,
    Result,
    Run,
    StateArrays,
    Weights,
    bind_symbols,
    round_to,
)
from metainfer.ir.ops.collective import MEETING, OWN, exchange, own
from metainfer.ir.ops.record import Array, op_def
from metainfer.ir.types import Mesh


@dataclass(frozen=True)
class RankInput:
    """What one rank is given: inputs of main, its step record, its parts of the states."""

    inputs: Sequence[Array]
    step: Mapping[str, Array]
    states: Mapping[str, StateArrays]


def simulate(module: Module, ranks: Sequence[RankInput], weights: Weights) -> list[Result]:
    """Run a module's main once on every rank of its mesh.

    Args:
        module: a verified module in local form.
        ranks: one input for each rank, in rank order.
        weights: full name -> checkpoint tensor, whole.

    Raises: TypeMismatch if the number of inputs is not that of the mesh, or shapes do not fit.
    """
    count = module.mesh.num_ranks
    if len(ranks) != count:
        raise TypeMismatch(f"the mesh {module.mesh} has {count} ranks, inputs are for {len(ranks)}")
    runs = [
        Run(
            module,
            weights,
            bind_symbols(module.main.inputs, rank.inputs, rank.step),
            dict(rank.step),
            dict(rank.states),
        )
        for rank in ranks
    ]
    lockstep = _Lockstep(module, runs)
    outputs = lockstep.graph(module.main, [rank.inputs for rank in ranks], Binding(""))
    return [
        Result(tuple(cast(Array, o) for o in made), run.states)
        for made, run in zip(outputs, runs, strict=True)
    ]


@dataclass(frozen=True)
class _Lockstep:
    """All ranks of one execution."""

    module: Module
    runs: Sequence[Run]

    def graph(
        self, graph: Graph, inputs: Sequence[Sequence[Data]], binding: Binding
    ) -> list[tuple[Data, ...]]:
        values: list[dict[str, Data]] = []
        for run, given in zip(self.runs, inputs, strict=True):
            found = {v.name: data for v, data in zip(graph.inputs, given, strict=True)}
            for state in graph.states:
                found[state.name] = run.states[binding.full_name(state.name[1:])]
            values.append(found)
        self._load(graph, binding, values)
        self.ops(graph.ops, values)
        for run, found in zip(self.runs, values, strict=True):
            for state, final in zip(graph.states, graph.state_outputs, strict=True):
                name = binding.full_name(state.name[1:])
                run.states[name] = cast(StateArrays, found[final.name])
        return [tuple(found[v.name] for v in graph.outputs) for found in values]

    def _load(self, graph: Graph, binding: Binding, values: list[dict[str, Data]]) -> None:
        load = self.module.load(graph.name)
        sources = graph.weights if load is None else load.weights
        read = {w.name: self.runs[0].weights(binding.full_name(w.name[1:])) for w in sources}
        if load is None:
            for found in values:
                found.update(read)
            return
        made: list[dict[str, Data]] = [dict(read) for _ in self.runs]
        self.ops(load.ops, made)
        for found, own_made in zip(values, made, strict=True):
            pairs = zip(graph.weights, load.outputs, strict=True)
            found.update((w.name, own_made[v.name]) for w, v in pairs)

    def ops(self, ops: Sequence[Op], values: list[dict[str, Data]]) -> None:
        for op in ops:
            operands = [
                [run.operand(v, found) for v in op.operands]
                for run, found in zip(self.runs, values, strict=True)
            ]
            for found, results in zip(values, self._apply(op, operands), strict=True):
                found.update((v.name, data) for v, data in zip(op.results, results, strict=True))

    def _apply(self, op: Op, operands: list[list[Data]]) -> Sequence[Sequence[Data]]:
        if op.name == "call":
            block = self.module.graph(str(op.attr["block"]))
            return self.graph(block, operands, Binding.of(op))
        if op.name == "fused" and op.body is not None:
            return self._body(op.body, operands)
        if op.name in MEETING:
            return self._exchanged(op, [cast(Array, o[0]) for o in operands])
        if op.name in OWN:
            numbers = axis_numbers(self.module.mesh, str(op.attr["axis"]))
            attrs = op_def(op.name).complete(op.attr)
            own_parts = (
                own(op.name, cast(Array, o[0]), attrs, n)
                for o, n in zip(operands, numbers, strict=True)
            )
            return [[part] for part in own_parts]
        return [run.apply(op, given) for run, given in zip(self.runs, operands, strict=True)]

    def _body(self, body: Graph, operands: list[list[Data]]) -> Sequence[Sequence[Data]]:
        values = [
            {p.name: data for p, data in zip(body.inputs, given, strict=True)} for given in operands
        ]
        self.ops(body.ops, values)
        return [[found[v.name] for v in body.outputs] for found in values]

    def _exchanged(self, op: Op, parts: list[Array]) -> list[list[Data]]:
        attrs = op_def(op.name).complete(op.attr)
        results: list[list[Data]] = [[] for _ in parts]
        for group in axis_groups(self.module.mesh, str(attrs["axis"])):
            if len(group) != attrs["ranks"]:
                raise TypeMismatch(
                    f"{op.name} is over {attrs['ranks']} ranks, the mesh is {self.module.mesh}"
                )
            made = exchange(op.name, [parts[r] for r in group], attrs)
            for rank, data in zip(group, made, strict=True):
                results[rank] = [round_to(data, op.result)]
        return results


def axis_numbers(mesh: Mesh, axis: str) -> list[int]:
    """Each rank's number along an axis, in rank order; the last axis runs fastest.

    Raises: TypeMismatch if the mesh has no such axis.
    """
    stride, size = _stride(mesh, axis)
    return [rank // stride % size for rank in range(mesh.num_ranks)]


def axis_groups(mesh: Mesh, axis: str) -> list[tuple[int, ...]]:
    """Ranks that differ along one axis only, in order along it: who meets in a collective.

    Raises: TypeMismatch if the mesh has no such axis.
    """
    stride, size = _stride(mesh, axis)
    starts = [r for r in range(mesh.num_ranks) if r // stride % size == 0]
    return [tuple(start + i * stride for i in range(size)) for start in starts]


def _stride(mesh: Mesh, axis: str) -> tuple[int, int]:
    stride = 1
    for name, size in reversed(mesh.axes):
        if name == axis:
            return stride, size
        stride *= size
    raise TypeMismatch(f"the mesh {mesh} has no axis {axis!r}")
