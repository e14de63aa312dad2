"""Groups for a kernel, made from samples of ops and from rules, and run by the executor.

A kernel needs nothing here: its op's line in ``op_samples.SAMPLES``, or the rule that forms its
group, and the types that its contract names say what to try.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from op_samples import SAMPLES, Sample
from pass_oracle import PAGE_SIZE, Example, as_module, target_for
from rule_instances import instances

from metainfer.backends.kernel import Kernel
from metainfer.backends.registry import installed
from metainfer.backends.torch.tensors import to_numpy, to_torch
from metainfer.compiler.by_hand import run_by_hand
from metainfer.hardware.load import load_machine
from metainfer.ir.arena import plan_arena
from metainfer.ir.dtypes import DType, Scalar, parse_dtype
from metainfer.ir.errors import MetainferError
from metainfer.ir.flatten import flatten
from metainfer.ir.graph import Graph, Module, Op, Value, attrs_of
from metainfer.ir.interpret import Result
from metainfer.ir.ops.record import infer_types
from metainfer.ir.options import Options
from metainfer.ir.step import step_value
from metainfer.ir.types import StateType
from metainfer.ir.verify import verify_module
from metainfer.passes.rewrite import apply_rules, load_rules
from metainfer.passes.target import Target
from metainfer.runtime.executor import PhaseExecutor
from metainfer.runtime.in_place import in_place
from metainfer.runtime.legality import check_kernels
from metainfer.runtime.storage import Storage
from metainfer.runtime.weights import WeightStore
from metainfer.runtime.workspace import workspace_bytes

CPU = load_machine("cpu").device(0)
POSITIONS = 256  # more than any position in the examples
_TYPED = re.compile(r"operand (\d+) is (?:a )?(\S+)")
# Operands of ops on states that come from the step record.
_STEP = {"kv_write": {3: "slots"}, "attention": {2: "starts", 3: "lengths", 4: "pages"}}
_STEP["latent_write"] = _STEP["kv_write"]
_STEP["latent_attention"] = {3: "starts", 4: "lengths", 5: "pages"}


@dataclass(frozen=True)
class Wanted:
    """What a kernel's contract says of its operands: element types, and which are weights."""

    dtypes: Mapping[int, DType]
    weights: frozenset[int]


def wanted_by(kernel: Kernel) -> Wanted:
    """Read a contract's text."""
    dtypes: dict[int, DType] = {}
    weights: set[int] = set()
    for constraint in kernel.requires:
        match = _TYPED.fullmatch(constraint.text.partition(" or ")[0])
        if match is None:
            continue
        if match[2] == "weight":
            weights.add(int(match[1]))
            continue
        try:
            dtypes[int(match[1])] = parse_dtype(match[2])
        except MetainferError:
            continue  # a description in words
    return Wanted(dtypes, frozenset(weights))


def groups_for(kernel: Kernel) -> Iterator[tuple[Module, Module]]:
    """(a module of one group, the same with the kernel chosen) for samples that it takes."""
    wanted = wanted_by(kernel)
    for graph, operands, rule in _bases(kernel.op):
        try:
            before = as_module(_retyped(graph, operands, wanted))
            verify_module(before)
            grouped = before
            if rule is not None:
                grouped = apply_rules(before, _target(), [rule], "test")
            options = Options(pins=((kernel.op, kernel.name),), page_size=PAGE_SIZE)
            after, _ = run_by_hand(grouped, ["layout", "select"], "cpu", "prefill", options)
        except MetainferError:
            continue  # types that the op or the kernel refuses
        taken = {c.kernel for op in after.main.ops for c in op.choices}
        if taken == {kernel.name}:
            yield before, after


def _target() -> Target:
    return target_for(phase="prefill")


def _bases(kind: str) -> Iterator[tuple[Graph, tuple[str, ...], Any]]:
    """(graph, names of the group's operands, rule that forms the group or None)."""
    for sample in SAMPLES:
        if sample.name == kind:
            graph = _graph_of(sample)
            yield graph, tuple(v.name for v in graph.ops[0].operands), None
    for rule in load_rules():
        if rule.fused is not None and dict(rule.fused.attrs)["kind"] == kind:
            for graph in instances(rule, CPU, lambda _: True):
                for variant in (graph, _with_exact_gelu(graph)):
                    yield variant, rule.fused.operands, rule


def _with_exact_gelu(graph: Graph) -> Graph:
    """The instances of rules have GELU by tanh; kernels have forms for both."""
    ops = tuple(
        replace(op, attrs=attrs_of({**op.attr, "approximate": "none"}))
        if "approximate" in op.attr
        else op
        for op in graph.ops
    )
    return replace(graph, ops=ops)


def _graph_of(sample: Sample) -> Graph:
    operands: list[Value] = []
    for i, type_ in enumerate(sample.types):
        field = _STEP.get(sample.name, {}).get(i)
        name = f"${i}" if isinstance(type_, StateType) else f"%{i}"
        operands.append(step_value(field) if field else Value(name, type_))
    types = infer_types(sample.name, [v.type for v in operands], sample.attrs)
    results = tuple(Value(f"%r{i}", t) for i, t in enumerate(types))
    op = Op(sample.name, tuple(operands), results, attrs_of(sample.attrs))
    states = tuple(v for v in operands if v.is_state)
    made = tuple(v for v in results if v.is_state)
    return Graph(
        "group",
        tuple(v for v in operands if v.name[0] == "%"),
        states=states,
        ops=(op,),
        outputs=tuple(v for v in results if not v.is_state),
        state_outputs=made or states,
    )


def _retyped(graph: Graph, operands: tuple[str, ...], wanted: Wanted) -> Graph:
    """The graph with operands of the types that a kernel wants, weights named as such."""
    renamed: dict[str, Value] = {}
    for i, name in enumerate(operands):
        value = graph.definitions().get(name)
        if value is None or value.is_state:
            continue
        dtype = wanted.dtypes.get(i, value.tensor.dtype)
        new = f"@{name[1:]}" if i in wanted.weights else name
        renamed[name] = Value(new, value.tensor.with_dtype(dtype))
    return _inferred(graph, renamed)


def _inferred(graph: Graph, values: dict[str, Value]) -> Graph:
    """The graph over other operands, its results' types inferred anew."""
    ops: list[Op] = []
    for op in graph.ops:
        operands = tuple(values.get(v.name, v) for v in op.operands)
        types = infer_types(op.name, [v.type for v in operands], op.attr)
        results = tuple(replace(v, type=t) for v, t in zip(op.results, types, strict=True))
        values.update((v.name, v) for v in results)
        ops.append(replace(op, operands=operands, results=results))
    declared = [values.get(v.name, v) for v in (*graph.inputs, *graph.weights)]
    return replace(
        graph,
        inputs=tuple(v for v in declared if v.name[0] == "%"),
        weights=tuple(v for v in declared if v.name[0] == "@"),
        ops=tuple(ops),
        outputs=tuple(values.get(v.name, v) for v in graph.outputs),
    )


def execute(module: Module, example: Example, env: Mapping[str, int]) -> Result:
    """Run a compiled module without blocks as the runtime runs a plan's phase."""
    backends = installed()
    verify_module(module)
    check_kernels(module, CPU, backends)
    flat, limits = flatten(module), module.limits()
    scratch = workspace_bytes(module, flat, CPU, backends)
    arena = plan_arena(flat, limits, scratch, in_place(flat, backends))
    highs = {name: high for name, (_, high) in limits.items()}
    storage = Storage(arena.size, highs, torch.device("cpu"), POSITIONS, has_step=module.has_step)
    storage.arena.fill_(0xFF)  # what a kernel leaves out shows: not-a-numbers
    store = WeightStore(example.weights.__getitem__, backends, place=storage.place)
    for name, weight in flat.weights.items():
        storage.weights_of("call")[name] = store.get(module, weight)
    for name, value in flat.states.items():
        data = example.states[name[1:]]
        storage.add_state(name, value.state, len(next(iter(data.values()))))
        for field, array in data.items():
            storage.states[name][field].copy_(to_torch(array))
    executor = PhaseExecutor(module, flat, arena, storage, backends, "call")
    if example.step:
        storage.set_step(example.step)
    for index, array in enumerate(example.inputs):
        executor.input(index, env).copy_(to_torch(array))
    executor.run(env)
    outputs = tuple(_array(executor.output(i, env), v) for i, v in enumerate(flat.outputs))
    states = {
        name[1:]: {field: t.float().numpy() for field, t in fields.items()}
        for name, fields in storage.states.items()
    }
    return Result(outputs, states)


def _array(tensor: torch.Tensor, value: Value) -> np.ndarray:
    dtype = value.tensor.dtype
    assert isinstance(dtype, Scalar)
    return np.array(to_numpy(tensor.contiguous(), dtype))
