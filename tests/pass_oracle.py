"""The oracle of pass tests: random data for a module, run before and after a pass.

Imported by tests of passes; holds no tests.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count, takewhile
from typing import Any

import numpy as np

from metainfer.hardware import load_machine
from metainfer.ir.dtypes import Block, BlockArray, Scalar, quantize
from metainfer.ir.graph import Binding, Graph, Module, Value
from metainfer.ir.interpret import Data, Result, StateArrays, interpret
from metainfer.ir.options import Options
from metainfer.ir.parser import parse_graph, parse_module
from metainfer.ir.printer import print_graph, print_module
from metainfer.ir.strategy import Strategy
from metainfer.ir.types import StateType, Symbol, TensorType
from metainfer.passes.absorb_latents import absorb_latents
from metainfer.passes.canonicalize import canonicalize
from metainfer.passes.fuse import fuse
from metainfer.passes.merge_linears import merge_linears
from metainfer.passes.quantize_activations import quantize_activations
from metainfer.passes.raise_experts import raise_experts
from metainfer.passes.raise_ops import raise_ops
from metainfer.passes.seam import seam
from metainfer.passes.target import Report, Target
from metainfer.runtime.checkpoint.stacked import stack

# The rewriting passes by name, in their order.
PASSES = {
    "raise": raise_ops,
    "raise_experts": raise_experts,
    "canonicalize": canonicalize,
    "absorb_latents": absorb_latents,
    "merge_linears": merge_linears,
    "quantize_activations": quantize_activations,
    "seam": seam,
    "fuse": fuse,
}

# Passes that round on purpose: how far a result may be off, as a fraction of the largest.
ROUNDING = {"quantize_activations": 0.1}

PAGE_SIZE = 4
STEP_SIZES = ({"T": 1, "B": 1, "P": 1, "R": 1}, {"T": 5, "B": 2, "P": 3, "R": 2})
STEP_SIZES += ({"T": 7, "B": 3, "P": 2, "R": 3},)
# Largest error, as a fraction of the largest number of the result, by element type.
TOLERANCE = {"f64": 1e-5, "f32": 1e-5, "f16": 4e-3, "bf16": 3e-2}


def target_for(hw: str = "cpu", phase: str = "decode", **strategy: Any) -> Target:
    """A target without kernels or costs, which none of the rewriting passes asks for."""
    nothing: Any = None
    typical = tuple(strategy.pop("typical", {"T": 8, "B": 8, "P": 16, "R": 8}).items())
    # On request only; devices without fp8 units refuse.
    strategy.setdefault("fp8_activations", True)
    chosen = Strategy(phase, typical=typical, **strategy)
    return Target(load_machine(hw), chosen, Options(), nothing, nothing, Report())


def parse_any(text: str) -> Module:
    """A module from the text of a module or of a bare graph."""
    plain = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    if plain.lstrip().startswith("module"):
        return parse_module(text)
    return as_module(parse_graph(text))


def as_module(graph: Graph) -> Module:
    """A module whose main is the graph, its sizes bounded, its name kept as the module's."""
    names = {s for v in graph.definitions().values() for s in symbols_of(v)}
    operands = {v for op in graph.ops for v in op.operands}
    has_step = any(v.name.startswith("step.") for v in operands)
    if has_step:
        names |= {"T", "B", "P", "R"}
    symbols = tuple(Symbol(name, 1, 512) for name in sorted(names))
    return Module(graph.name, symbols, graphs=(replace(graph, name="main"),), has_step=has_step)


def print_any(module: Module, *, bare: bool) -> str:
    """The text of a module, or of its main as a bare graph of the module's name."""
    if not bare:
        return print_module(module)
    return print_graph(replace(module.main, name=module.name))


def symbols_of(value: Value) -> set[str]:
    """Size symbols of a value's type."""
    if not isinstance(value.type, TensorType):
        return set()
    return {s for size in value.type.shape for s in size.symbols()}


@dataclass(frozen=True)
class Example:
    """Everything that a run of a module reads."""

    inputs: list[Any]
    weights: Mapping[str, Any]
    step: Mapping[str, Any]
    states: Mapping[str, StateArrays]

    def run(self, module: Module) -> Result:
        """Interpret the module on these data."""
        return interpret(module, self.inputs, self.weight, step=self.step, states=self.states)

    def weight(self, name: str) -> Any:
        """A weight by full name; tensors that a pass stacked, from their members."""
        if name in self.weights or "*" not in name:
            return self.weights[name]
        members = (name.replace("*", str(n)) for n in count())
        return stack([self.weights[m] for m in takewhile(self.weights.__contains__, members)])


def sizes_of(module: Module) -> Iterator[dict[str, int]]:
    """Three values for each size symbol, one of them 1."""
    if module.has_step:
        yield from (dict(env) for env in STEP_SIZES)
        return
    for base in (1, 3, 6):
        yield {
            s.name: min(s.high, max(s.low, base + (index if base > 1 else 0)))
            for index, s in enumerate(module.symbols)
        }


def example_for(
    module: Module, env: Mapping[str, int], seed: int = 0, *, is_fresh: bool = False
) -> Example:
    """Random data that fit a module at given sizes; fresh sequences have no history."""
    rng = np.random.default_rng(seed)
    inputs = [_random(v, env, rng, _row_limit(module.main, v, env)) for v in module.main.inputs]
    weights: dict[str, Any] = {}
    states: dict[str, StateArrays] = {}
    for graph, binding in _bound(module):
        load = module.load(graph.name)
        for weight in load.weights if load is not None else graph.weights:
            name = binding.full_name(weight.name[1:])
            if name not in weights:
                weights[name] = _random(weight, env, rng)
        for state in graph.states:
            name = binding.full_name(state.name[1:])
            states[name] = _state(state.state, 1 + env.get("B", 3) * env.get("P", 4), rng)
    step = _step(module, env, rng, is_fresh=is_fresh) if module.has_step else {}
    return Example(inputs, weights, step, states)


def _bound(module: Module) -> Iterator[tuple[Graph, Binding]]:
    yield module.main, Binding("")
    for call in module.calls():
        yield module.graph(str(call.attr["block"])), Binding.of(call)


def _row_limit(graph: Graph, value: Value, env: Mapping[str, int]) -> int:
    """How many rows an integer input may choose among."""
    limit, same = 50, {value.name}
    for op in graph.ops:
        names = [value.name if v.name in same else v.name for v in op.operands]
        if op.name == "reshape" and names[0] == value.name:
            same.add(op.result.name)
        if op.name == "gather" and names[1] == value.name:
            limit = min(limit, op.operands[0].tensor.shape[0].evaluate(env))
        if op.name == "embedding" and names[0] == value.name:
            limit = min(limit, op.operands[1].tensor.shape[0].evaluate(env))
        if op.name == "experts" and names[1] == value.name:
            limit = min(limit, op.operands[3].tensor.shape[0].evaluate(env))
        if op.name == "route" and names[2] == value.name:
            limit = 0  # each expert has one replica at least
        if op.name in ("kv_write", "latent_write") and names[3] == value.name:
            limit = -PAGE_SIZE  # each slot once
    return limit


def _random(value: Value, env: Mapping[str, int], rng: np.random.Generator, limit: int = 50) -> Any:
    type_ = value.tensor
    shape = type_.concrete(env)
    if isinstance(type_.dtype, Block):
        return quantize(rng.standard_normal(shape).astype(np.float32), type_.dtype)
    if type_.dtype.kind == "bool":
        return rng.random(shape) < 0.7
    if type_.dtype.kind in ("int", "uint"):
        if limit < 0:
            count = int(np.prod(shape, dtype=int))
            return rng.permutation(max(count, 13 * -limit))[:count].reshape(shape).astype(np.int32)
        if limit == 0:
            return np.ones(shape, type_.dtype.numpy)
        return rng.integers(0, limit, shape).astype(type_.dtype.numpy)
    return (rng.standard_normal(shape) * 0.5).astype(np.float32).astype(type_.dtype.numpy)


def _state(type_: StateType, pages: int, rng: np.random.Generator) -> StateArrays:
    lead = (max(pages, 13), type_.page_size or PAGE_SIZE)
    return {
        name: rng.standard_normal((*lead, *field.concrete({})))
        .astype(np.float32)
        .astype(scalar(field).numpy)
        for name, field in type_.fields
    }


def scalar(type_: TensorType) -> Scalar:
    """The plain element type of a tensor."""
    assert isinstance(type_.dtype, Scalar)
    return type_.dtype


def _step(
    module: Module, env: Mapping[str, int], rng: np.random.Generator, *, is_fresh: bool = False
) -> dict[str, Any]:
    """A step of B sequences whose T tokens are new, over pages in random order."""
    found = [s.state.page_size for g in module.graphs for s in g.states]
    page = (found[0] if found else 0) or PAGE_SIZE
    tokens, sequences, pages = env["T"], env["B"], env["P"]
    cuts = np.sort(rng.integers(0, tokens + 1, sequences - 1)) if sequences > 1 else []
    starts = np.array([0, *cuts, tokens], np.int32)
    new = np.diff(starts)
    room = np.maximum(pages * page - new, 0) * (not is_fresh)
    lengths = (new + rng.integers(0, room + 1)).astype(np.int32)
    table = 1 + rng.permutation(sequences * pages).reshape(sequences, pages).astype(np.int32)
    positions = np.concatenate(
        [np.arange(n) + length - n for n, length in zip(new, lengths, strict=True)]
    ).astype(np.int32)
    owner = np.repeat(np.arange(sequences), new)
    slots = table[owner, positions // page] * page + positions % page
    return {
        "positions": positions,
        "slots": slots.astype(np.int32),
        "starts": starts,
        "lengths": lengths,
        "pages": table,
        "sample_rows": rng.integers(0, tokens, env["R"]).astype(np.int32),
        "num_valid": np.array([tokens, sequences], np.int32),
    }


def assert_same_numbers(
    before: Module, after: Module, *, exact: bool = False, rounding: float = 0.0
) -> None:
    """Run both modules on the same random data, at three sizes of each symbol."""
    # What a history is in states of another form depends on weights: those start empty.
    moved = _fields(before) != _fields(after)
    if moved and any(name.endswith("_scale") for name in _fields(after)):
        rounding = max(rounding, 0.1)  # codes of other numbers
    for seed, env in enumerate(sizes_of(before)):
        example = example_for(before, env, seed, is_fresh=moved)
        held = example_for(after, env, seed).states if moved else example.states
        wanted, got = example.run(before), replace(example, states=held).run(after)
        assert len(wanted.outputs) == len(got.outputs)
        for a, b in zip(wanted.outputs, got.outputs, strict=True):
            assert_close(a, b, exact=exact, rounding=rounding)
        assert wanted.states.keys() == got.states.keys()
        if moved:
            continue
        for name, fields in wanted.states.items():
            for field, array in fields.items():
                assert_close(array, got.states[name][field], exact=exact)


def _fields(module: Module) -> set[str]:
    return {name for g in module.graphs for s in g.states for name, _ in s.state.fields}


def assert_close(wanted: Data, got: Data, *, exact: bool = False, rounding: float = 0.0) -> None:
    """Compare two arrays with the tolerance of their element type, and of rounding on purpose."""
    if isinstance(wanted, BlockArray):
        assert isinstance(got, BlockArray)
        assert got.format == wanted.format
        assert_close(wanted.codes, got.codes, exact=True)
        assert_close(wanted.scales, got.scales, exact=True)
        return
    assert isinstance(wanted, np.ndarray)
    assert isinstance(got, np.ndarray)
    assert (wanted.dtype, wanted.shape) == (got.dtype, got.shape)
    name = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "float64": "f64"}.get(
        wanted.dtype.name
    )
    if exact or name is None:
        np.testing.assert_array_equal(wanted, got)
        return
    a, b = wanted.astype(np.float64), got.astype(np.float64)
    finite = np.abs(a[np.isfinite(a)])
    scale = float(finite.max()) if finite.size else 1.0
    most = max(TOLERANCE[name], rounding)
    np.testing.assert_allclose(b, a, rtol=0, atol=most * max(scale, 1e-3))
