"""The interpreter: runs a module by the numpy reference of each op.

It is the oracle of every pass. Floating point is computed in float32 and rounded to the declared
type at each op's border.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from metainfer.ir.dims import Dim
from metainfer.ir.dtypes import F32, F64, Block, BlockArray, Scalar
from metainfer.ir.errors import TypeMismatch
from metainfer.ir.graph import Attr, Binding, Graph, Module, Op, Value
from metainfer.ir.ops.collective import MEETING, OWN
from metainfer.ir.ops.record import RAW, Array, op_def
from metainfer.ir.step import STEP_FIELDS
from metainfer.ir.types import StateType, TensorType

StateArrays = Mapping[str, Array]
Data = Array | BlockArray | StateArrays
Weights = Callable[[str], Array | BlockArray]


@dataclass(frozen=True)
class Result:
    """What a step returns: outputs in order, and every state by full name."""

    outputs: tuple[Array, ...]
    states: Mapping[str, StateArrays]


def interpret(
    module: Module,
    inputs: Sequence[Array],
    weights: Weights,
    *,
    step: Mapping[str, Array] | None = None,
    states: Mapping[str, StateArrays] | None = None,
) -> Result:
    """Run a module's main once.

    Args:
        module: a verified module.
        inputs: arrays for main's inputs.
        weights: full name -> checkpoint tensor (load graphs are applied to it).
        step: fields of the step record.
        states: full name -> fields, [pages, page_size, ...] each.

    Raises: TypeMismatch if shapes do not fit or a symbol stays unbound.
    """
    env = bind_symbols(module.main.inputs, inputs, step or {})
    run = Run(module, weights, env, dict(step or {}), dict(states or {}))
    outputs = run.graph(module.main, inputs, Binding(""))
    return Result(tuple(cast(Array, o) for o in outputs), run.states)


def interpret_graph(
    graph: Graph, inputs: Mapping[str, Data], *, env: Mapping[str, int] | None = None
) -> tuple[Data, ...]:
    """Run one graph on values for all its inputs, weights and states, by name.

    Returns: outputs, then final states.
    """
    params = (*graph.inputs, *graph.weights, *graph.states)
    bound = dict(env or {})
    for value in params:
        data = inputs[value.name]
        if isinstance(value.type, TensorType) and isinstance(data, np.ndarray | BlockArray):
            unify(value, tuple(data.shape), bound)
    module = Module("graph", graphs=(graph,))
    step = {k.removeprefix("step."): v for k, v in inputs.items() if k.startswith("step.")}
    for field, data in step.items():
        unify(Value(field, STEP_FIELDS[field]), tuple(cast(Array, data).shape), bound)
    run = Run(module, _no_weights, bound, cast(dict[str, Array], step), {})
    values = {v.name: inputs[v.name] for v in params}
    run.ops(graph.ops, values)
    return tuple(values[v.name] for v in (*graph.outputs, *graph.state_outputs))


def unify(value: Value, shape: tuple[int, ...], env: dict[str, int]) -> None:
    """Bind the symbols of a value's sizes to a concrete shape.

    Raises: TypeMismatch if a size contradicts what is bound.
    """
    sizes = value.tensor.shape
    if len(sizes) != len(shape):
        raise TypeMismatch(f"{value.name} is {value.type}, got shape {list(shape)}")
    for size, actual in zip(sizes, shape, strict=True):
        _unify_size(value, size, actual, env)


def _unify_size(value: Value, size: Dim, actual: int, env: dict[str, int]) -> None:
    free = [s for s in size.symbols() if s not in env]
    if not free:
        wanted = size.evaluate(env)
        if wanted != actual:
            raise TypeMismatch(f"{value.name} is {value.type}: {size} is {wanted}, got {actual}")
        return
    (symbol, coefficient), *others = size.terms
    number, rest = divmod(actual - size.constant, coefficient)
    if isinstance(symbol, str) and not others and rest == 0:
        env[symbol] = number
        return
    raise TypeMismatch(f"{value.name}: cannot tell {', '.join(free)} from {size} = {actual}")


def bind_symbols(
    values: Sequence[Value], inputs: Sequence[Array], step: Mapping[str, Array]
) -> dict[str, int]:
    """Values of the size symbols that inputs and the step record give.

    Raises: TypeMismatch if their number or a shape does not fit.
    """
    if len(values) != len(inputs):
        raise TypeMismatch(f"main takes {len(values)} inputs, got {len(inputs)}")
    env: dict[str, int] = {}
    for value, data in zip(values, inputs, strict=True):
        unify(value, data.shape, env)
    for field, data in step.items():
        unify(Value(f"step.{field}", STEP_FIELDS[field]), data.shape, env)
    return env


def _no_weights(name: str) -> Array:
    raise TypeMismatch(f"the graph reads the weight {name}, none are given")


@dataclass
class Run:
    """One execution: symbols are bound, states change as blocks return."""

    module: Module
    weights: Weights
    env: Mapping[str, int]
    step: dict[str, Array]
    states: dict[str, StateArrays]

    def graph(self, graph: Graph, inputs: Sequence[Data], binding: Binding) -> tuple[Data, ...]:
        """Run a graph on its inputs; states change in place of their names."""
        values: dict[str, Data] = {
            v.name: data for v, data in zip(graph.inputs, inputs, strict=True)
        }
        values.update(self._load(graph, binding))
        for state in graph.states:
            values[state.name] = self.states[binding.full_name(state.name[1:])]
        self.ops(graph.ops, values)
        for state, final in zip(graph.states, graph.state_outputs, strict=True):
            name = binding.full_name(state.name[1:])
            self.states[name] = cast(StateArrays, values[final.name])
        return tuple(values[v.name] for v in graph.outputs)

    def _load(self, graph: Graph, binding: Binding) -> dict[str, Data]:
        load = self.module.load(graph.name)
        if load is None:
            return {w.name: self.weights(binding.full_name(w.name[1:])) for w in graph.weights}
        values: dict[str, Data] = {
            w.name: self.weights(binding.full_name(w.name[1:])) for w in load.weights
        }
        self.ops(load.ops, values)
        pairs = zip(graph.weights, load.outputs, strict=True)
        return {w.name: values[made.name] for w, made in pairs}

    def ops(self, ops: Sequence[Op], values: dict[str, Data]) -> None:
        """Run ops in order, adding their results to ``values``."""
        for op in ops:
            operands = [self.operand(v, values) for v in op.operands]
            results = self.apply(op, operands)
            for value, data in zip(op.results, results, strict=True):
                values[value.name] = data

    def operand(self, value: Value, values: Mapping[str, Data]) -> Data:
        """A value of the graph, or a field of the step record."""
        if value.name in values:
            return values[value.name]
        return self.step[value.name.removeprefix("step.")]

    def apply(self, op: Op, operands: Sequence[Data]) -> Sequence[Data]:
        """Results of one op, rounded to their declared types.

        Raises: TypeMismatch for a collective, which needs other ranks.
        """
        if op.name == "call":
            block = self.module.graph(str(op.attr["block"]))
            return self.graph(block, operands, Binding.of(op))
        if op.name == "fused":
            body = cast(Graph, op.body)
            values = {p.name: d for p, d in zip(body.inputs, operands, strict=True)}
            self.ops(body.ops, values)
            return [values[v.name] for v in body.outputs]
        if op.name in MEETING | OWN and op.attr.get("ranks", 0) not in (0, 1):
            raise TypeMismatch(
                f"{op.name} over {op.attr['axis']} needs every rank of the axis",
                advice="interpret the module by `ir.simulate.simulate`",
            )
        record = op_def(op.name)
        attrs = {k: concrete_attr(v, self.env) for k, v in record.complete(op.attr).items()}
        raw = record.has(RAW)
        with np.errstate(all="ignore"):
            made = record.reference(*(as_reference_input(d, raw=raw) for d in operands), **attrs)
        results = made if isinstance(made, tuple) else (made,)
        return [round_to(d, v) for d, v in zip(results, op.results, strict=True)]


def concrete_attr(value: Attr, env: Mapping[str, int]) -> Any:
    """An attribute with its symbolic sizes evaluated."""
    if isinstance(value, Dim):
        return value.evaluate(env)
    if isinstance(value, tuple):
        return tuple(concrete_attr(v, env) for v in value)
    return value


def as_reference_input(data: Data, *, raw: bool = False) -> Any:
    """Data as references want it: floats in float32, block formats dequantized unless raw."""
    if isinstance(data, BlockArray):
        return data if raw else data.dequantize()
    if isinstance(data, np.ndarray) and _is_narrow_float(data.dtype):
        return data.astype(np.float32)
    return data


def _is_narrow_float(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in ("f", "V") and dtype not in (np.dtype(np.float32), np.dtype(np.float64))


def round_to(data: Any, value: Value) -> Data:
    """Round a reference's result to the declared type.

    Raises: TypeMismatch if its shape or kind is not that of the type.
    """
    if isinstance(value.type, StateType) or isinstance(data, BlockArray):
        return cast(Data, data)
    dtype = value.type.dtype
    array = np.asarray(data)
    if isinstance(dtype, Block):
        raise TypeMismatch(f"{value.name} is {value.type}, its reference made plain numbers")
    if isinstance(dtype, Scalar) and dtype not in (F32, F64) and dtype.is_float:
        return array.astype(np.float32).astype(dtype.numpy)
    return array.astype(dtype.numpy)
