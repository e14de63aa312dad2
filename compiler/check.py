"""METAINFER_VERIFY=2: interpret a module before and after each pass, and compare.

Sizes are small and numbers random; a model of real width is too slow for numpy, so what is compiled
with the check on is the model's tiny form.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from metainfer.ir.dtypes import F8E8M0, Block, BlockArray, DType, quantize
from metainfer.ir.entries import is_rounded
from metainfer.ir.errors import TypeMismatch
from metainfer.ir.graph import Binding, Module
from metainfer.ir.interpret import Result, StateArrays, interpret
from metainfer.ir.sharding import is_local
from metainfer.ir.simulate import RankInput, simulate
from metainfer.ir.strategy import Strategy
from metainfer.ir.types import TensorType
from metainfer.runtime.checkpoint.stacked import is_stacked, member, stack

_PAGE = 4  # tokens of a page, where the layout pass has not chosen yet
# Largest difference relative to the largest value, by the narrowest type that activations take.
_TOLERANCE = {"f64": 1e-9, "f32": 2e-4, "f16": 2e-2, "bf16": 6e-2}
# Where a pass rounds on purpose: root-mean-square difference over that of the values. A router may
# choose otherwise then, which changes single numbers beyond any bound; unrelated numbers have 1.4.
_ROUNDING = {"quantize_activations": 0.5}
# The same where states are codes of other numbers than before: those of every token change, and
# with them more choices of routers (0.52 was seen).
_ROUNDED_STATES = 0.8


@dataclass(frozen=True)
class _Step:
    """Two sequences: one new, one continued; or both new."""

    tokens: int = 5
    lengths: tuple[int, int] = (3, 6)
    counts: tuple[int, int] = (3, 2)


# What ranks hold of a history depends on the layout: their sequences are new.
_FRESH = _Step(lengths=(3, 2))


def pass_checker(
    module: Module, strategy: Strategy, constants: Mapping[str, np.ndarray], seed: int = 0
) -> Callable[[str, Module, Module], None]:
    """A function (pass, before, after) that raises if the two compute different numbers.

    Args:
        module: as captured, with its load graphs; its checkpoint tensors are drawn at random.
        strategy: of the phase: the type of activations sets the tolerance, and a mesh means that
            what is local to ranks is run on all of them.
        constants: tensors that passes make.
        seed: of the random numbers.
    """
    rng = np.random.default_rng(seed)
    drawn: dict[str, np.ndarray | BlockArray] = {}
    types = checkpoint_types(module)
    plan = _FRESH if strategy.mesh.num_ranks > 1 else _Step()

    def weight(name: str) -> np.ndarray | BlockArray:
        if name in constants:
            return constants[name]
        if name not in types and is_stacked(name):
            # A pass put tensors together that were apart.
            numbers = itertools.takewhile(lambda n: member(name, n) in types, itertools.count())
            return stack([weight(member(name, n)) for n in numbers])
        if name not in drawn:
            drawn[name] = _random_weight(rng, types[name])
        return drawn[name]

    outcome: dict[int, Result] = {}

    def run(candidate: Module) -> Result:
        key = id(candidate)
        if key not in outcome:
            outcome.clear()
            outcome[key] = _interpret(candidate, weight, seed, plan)
        return outcome[key]

    def fresh(candidate: Module) -> Result:
        return _interpret(candidate, weight, seed, _FRESH)

    def check(name: str, before: Module, after: Module) -> None:
        # A quantizing pass changes numbers on purpose; `metainfer verify` measures it.
        if name == "quantize":
            return
        rounding = _ROUNDING.get(name)
        if _fields(before) != _fields(after):
            # What a history is in another form depends on weights: sequences are new here, too.
            first, second = fresh(before), fresh(after)
            rounding = _ROUNDED_STATES if _has_codes(after) else rounding
        else:
            first, second = _interpret(before, weight, seed, plan), run(after)
        limit = _TOLERANCE.get(strategy.activations, _TOLERANCE["bf16"])
        _compare(name, first, second, limit, rounding)

    return check


def checkpoint_types(module: Module) -> dict[str, TensorType]:
    """Types of all tensors of the checkpoint that a module reads, by full name."""
    found: dict[str, TensorType] = {}
    bindings = [("main", Binding(""))]
    bindings += [(str(c.attr["block"]), Binding.of(c)) for c in module.calls()]
    for name, binding in bindings:
        load = module.load(name)
        sources = load.weights if load is not None else module.graph(name).weights
        for source in sources:
            found[binding.full_name(source.name[1:])] = source.tensor
    return found


def _random_weight(rng: np.random.Generator, type_: TensorType) -> np.ndarray | BlockArray:
    shape = tuple(n.static for n in type_.shape)
    fan_in = shape[-1] if len(shape) > 1 else 1
    values = rng.standard_normal(shape).astype(np.float32) / np.sqrt(fan_in)
    if len(shape) == 1:
        values = 1.0 + 0.1 * values
    return _as(values, type_.dtype, rng, shape)


def _as(
    values: np.ndarray, dtype: DType, rng: np.random.Generator, shape: tuple[int, ...]
) -> np.ndarray | BlockArray:
    if isinstance(dtype, Block):
        return quantize(values, dtype)
    if dtype.kind in ("int", "uint"):
        return rng.integers(0, 4, shape).astype(dtype.numpy)
    return values.astype(dtype.numpy)


def _interpret(module: Module, weight: Callable[[str], Any], seed: int, plan: _Step) -> Result:
    rng = np.random.default_rng(seed + 1)
    step, states = (_step(module, plan), _states(module, plan)) if module.has_step else ({}, {})
    sizes = {s.name: min(max(s.low, 3), s.high) for s in module.symbols}
    if module.has_step:
        sizes["T"] = plan.tokens
    inputs = []
    for value in module.main.inputs:
        shape = value.tensor.concrete(sizes)
        dtype = value.tensor.dtype
        values = rng.standard_normal(shape).astype(np.float32)
        inputs.append(np.asarray(_as(values, dtype, rng, shape)))
    if _is_of_one_rank(module):
        return interpret(module, inputs, weight, step=step, states=states)
    # Every replica is given the same step, so that all ranks return the same.
    ranks = [RankInput(inputs, step, states)] * module.mesh.num_ranks
    return simulate(module, ranks, weight)[0]


def _fields(module: Module) -> set[str]:
    """What the states of a module hold."""
    return {name for g in module.graphs for s in g.states for name, _ in s.state.fields}


def _has_codes(module: Module) -> bool:
    return any(is_rounded(s.state) for g in module.graphs for s in g.states)


def _is_of_one_rank(module: Module) -> bool:
    """Whether no op needs other ranks: one rank's module, or the global form of several."""
    graphs = (*module.graphs, *module.loads)
    return not any(is_local(op.name, op.attr) for graph in graphs for op in graph.ops)


def _page_of(module: Module) -> int:
    sizes = [s.state.page_size for g in module.graphs for s in g.states]
    return max(sizes, default=0) or _PAGE


def _step(module: Module, plan: _Step) -> dict[str, np.ndarray]:
    page = _page_of(module)
    most = -(-max(plan.lengths) // page)
    pages = np.zeros((2, most), np.int32)
    free = iter(range(1, 100))
    positions, slots = [], []
    for b, (length, count) in enumerate(zip(plan.lengths, plan.counts, strict=True)):
        for i in range(-(-length // page)):
            pages[b, i] = next(free)
        for position in range(length - count, length):
            positions.append(position)
            slots.append(int(pages[b, position // page]) * page + position % page)
    starts = np.cumsum([0, *plan.counts])
    found = {
        "positions": positions, "slots": slots, "starts": starts, "lengths": plan.lengths,
        "sample_rows": starts[1:] - 1, "num_valid": (plan.tokens, 2),
    }  # fmt: skip
    return {**{k: np.asarray(v, np.int32) for k, v in found.items()}, "pages": pages}


def _states(module: Module, plan: _Step) -> dict[str, StateArrays]:
    """Paged states with random history; the same numbers for every page size."""
    page = _page_of(module)
    table = _step(module, plan)["pages"]
    found: dict[str, StateArrays] = {}
    for call in (None, *module.calls()):
        graph = module.main if call is None else module.graph(str(call.attr["block"]))
        binding = Binding("") if call is None else Binding.of(call)
        for state in graph.states:
            name = binding.full_name(state.name[1:])
            rng = np.random.default_rng(sum(name.encode()))
            fields = {}
            for field, entry in state.state.fields:
                shape = tuple(n.static for n in entry.shape)
                history = rng.standard_normal((2, max(plan.lengths), *shape))
                if entry.dtype == F8E8M0:
                    history = np.abs(history) + 0.1  # a scale is no negative number
                pages = np.zeros((100, page, *shape), entry.dtype.numpy)  # type: ignore[union-attr]
                for b in range(2):
                    for at in range(plan.lengths[b] - plan.counts[b]):
                        pages[table[b, at // page], at % page] = history[b, at]
                fields[field] = pages
            found[name] = fields
    return found


def _compare(
    name: str, before: Result, after: Result, limit: float, rounding: float | None
) -> None:
    for number, (x, y) in enumerate(zip(before.outputs, after.outputs, strict=True)):
        a, b = x.astype(np.float64), y.astype(np.float64)
        difference, scale = _rms(a - b), _rms(a)
        if rounding is None:
            difference = float(np.max(np.abs(a - b), initial=0.0))
            scale = float(np.max(np.abs(a), initial=0.0))
        if not difference <= (rounding or limit) * max(scale, 1e-30):
            raise TypeMismatch(
                f"pass {name} changed output {number}: {difference:.3g} of {scale:.3g}",
                advice=f"METAINFER_DUMP shows both texts; --skip-pass {name} goes on without it",
            )


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(values**2))) if values.size else 0.0
