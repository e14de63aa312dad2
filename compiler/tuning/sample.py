"""One group by itself, as something that runs: a module, random data, and what executes it.

Data are random, never zeros: multiplying zeros draws less power and raises the clock. Whole numbers
stay within what the op that reads them allows: rows of its table, its experts, pages of the state.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from metainfer.backends.kernel import Kernel
from metainfer.backends.registry import Backends
from metainfer.backends.torch.tensors import BlockTensors, to_torch
from metainfer.hardware.device import Device
from metainfer.ir.arena import plan_arena
from metainfer.ir.dtypes import Block, BlockArray, quantize
from metainfer.ir.flatten import FlatModule, flatten
from metainfer.ir.graph import Choice, Graph, Module, Op, Value
from metainfer.ir.types import Symbol, TensorType
from metainfer.runtime.bind import TorchEmitter
from metainfer.runtime.executor import PhaseExecutor
from metainfer.runtime.in_place import in_place
from metainfer.runtime.storage import Storage
from metainfer.runtime.workspace import workspace_bytes

PHASE = "call"
_DRAWN = 1 << 22  # numbers of a weight that are drawn; larger ones repeat them
# Weights and states come from memory in a step of a model: so much more of them than the last cache
# holds goes by before one is met again. Activations were just written; few copies do for groups
# that stream next to nothing else.
_CACHES, _MOST_COPIES = 2, 64
_LITTLE_BYTES, _FEW_COPIES = 64 << 10, 4


@dataclass(frozen=True)
class Sample:
    """A group with one set of data.

    Attributes:
        executor: runs it.
        env: at these sizes.
    """

    executor: PhaseExecutor
    env: Mapping[str, int]


def module_of(op: Op, kernel: Kernel, env: Mapping[str, int]) -> Module:
    """A module of one group by one kernel, its weights packed as that wants them."""
    packed = _named(_packed(op, kernel))
    operands = list({v.name: v for v in packed.operands}.values())
    results = packed.results
    graph = Graph(
        "main",
        tuple(v for v in operands if v.name[0] == "%"),
        tuple(v for v in operands if v.is_weight),
        tuple(v for v in operands if v.is_state),
        (replace(packed, choices=(Choice(kernel.name),)),),
        tuple(v for v in results if not v.is_state),
        tuple(v for v in results if v.is_state),
    )
    symbols = tuple(Symbol(name, size, size) for name, size in env.items())
    has_step = any(v.name.startswith("step.") for v in operands)
    return Module("sample", symbols, graphs=(graph,), has_step=has_step)


def _packed(op: Op, kernel: Kernel) -> Op:
    """The group with the layouts of its weights as a kernel reads them."""

    def laid(index: int, value: Value) -> Value:
        if value.is_state or not value.is_weight:
            return value
        return replace(value, type=replace(value.tensor, layout=kernel.layouts.get(index, "")))

    operands = tuple(laid(i, v) for i, v in enumerate(op.operands))
    if op.body is None:
        return replace(op, operands=operands)
    inner = {p.name: replace(p, type=v.type) for p, v in zip(op.body.inputs, operands, strict=True)}
    body = replace(
        op.body,
        inputs=tuple(inner[v.name] for v in op.body.inputs),
        ops=tuple(
            replace(o, operands=tuple(inner.get(v.name, v) for v in o.operands))
            for o in op.body.ops
        ),
    )
    return replace(op, operands=operands, body=body)


def _named(op: Op) -> Op:
    """The group with states that earlier ops wrote named as states of the graph."""
    operands = tuple(
        replace(v, name=f"$state{i}") if v.is_state else v for i, v in enumerate(op.operands)
    )
    return replace(op, operands=operands)


class Samples:
    """Makes groups with data on a device; what two kernels read in one form is made once.

    Args:
        device: whose cache is not to help.
        backends: kernels and packings.
    """

    def __init__(self, device: Device, backends: Backends) -> None:
        self._device = device
        self._backends = backends
        self._where = torch.device("cuda" if device.kind == "gpu" else "cpu")
        self._rng = np.random.default_rng(0)
        self._plain: dict[TensorType, np.ndarray | BlockArray] = {}
        self._made: dict[tuple[TensorType, int], Any] = {}

    def of(self, op: Op, kernel: Kernel, env: Mapping[str, int]) -> list[Sample]:
        """As many copies of a group, with data of their own, as the cache cannot hold."""
        module = module_of(op, kernel, env)
        flat = flatten(module)
        copies = self._copies(module, flat, env)
        return [self._sample(module, flat, env, number) for number in range(copies)]

    def forget(self) -> None:
        """Let go of the weights of the group before."""
        self._plain.clear()
        self._made.clear()

    def _copies(self, module: Module, flat: FlatModule, env: Mapping[str, int]) -> int:
        size = sum(v.tensor.bytes_at(env) for v in module.main.weights)
        for state in flat.states.values():
            size += _pages(env) * state.state.page_size * state.state.entry_bytes()
        if size < _LITTLE_BYTES:
            return _FEW_COPIES
        return max(1, min(-(-_CACHES * self._device.l2_bytes // size), _MOST_COPIES))

    def _sample(
        self, module: Module, flat: FlatModule, env: Mapping[str, int], number: int
    ) -> Sample:
        limits = module.limits()
        scratch = workspace_bytes(module, flat, self._device, self._backends)
        # As in a step: a residual is overwritten. Run after run the product is added to it anew.
        over = in_place(flat, self._backends, over_inputs=True)
        arena = plan_arena(flat, limits, scratch, over)
        highs = {name: high for name, (_, high) in limits.items()}
        context = max((s.state.page_size for s in flat.states.values()), default=1) * _each(env)
        positions = max(context, *highs.values(), 1) if highs else context
        storage = Storage(arena.size, highs, self._where, positions, has_step=module.has_step)
        for weight in module.main.weights:
            made = storage.place(self._weight(weight.tensor, number))
            storage.weights_of(PHASE)[weight.name] = made
        for name, state in flat.states.items():
            storage.add_state(name, state.state, _pages(env))
            for field in storage.states[name].values():
                _fill(field)
        if module.has_step:
            page = max((s.state.page_size for s in flat.states.values()), default=1)
            storage.set_step(step_of(env, page))
        views = TorchEmitter(storage, storage.weights_of(PHASE), flat, arena, env)
        (op,) = module.main.ops
        for value in flat.inputs:
            self._fill_input(views.held(value), value, op, env)
        executor = PhaseExecutor(module, flat, arena, storage, self._backends, PHASE)
        return Sample(executor, env)

    def _fill_input(
        self, held: torch.Tensor | BlockTensors, value: Value, op: Op, env: Mapping[str, int]
    ) -> None:
        if isinstance(held, BlockTensors):
            made = self._random(replace(value.tensor, layout=""), env)
            assert isinstance(made, BlockArray)
            held.codes.copy_(to_torch(made.codes))
            held.scales.copy_(to_torch(made.scales))
        elif held.dtype == torch.bool:
            held.copy_(torch.rand(held.shape, device=held.device) > 0.5)
        elif not held.is_floating_point():
            held.random_(0, max(below(op, value), 1))
        else:
            _fill(held)

    def _weight(self, type_: TensorType, number: int) -> Any:
        """One copy of a weight, where kernels read it."""
        key = (type_, number)
        if key not in self._made:
            first = self._made.get((type_, 0))
            self._made[key] = copy.deepcopy(first) if number else self._packed_weight(type_)
        return self._made[key]

    def _packed_weight(self, type_: TensorType) -> Any:
        plain = replace(type_, layout="")
        if plain not in self._plain:
            self._plain[plain] = self._random(plain, {})
        made: Any = self._plain[plain]
        if type_.layout:
            made = self._backends.layouts.get(type_.layout).pack(made)
        if isinstance(made, np.ndarray):
            made = to_torch(made)
        return made.to(self._where) if hasattr(made, "to") else made

    def _random(self, type_: TensorType, env: Mapping[str, int]) -> np.ndarray | BlockArray:
        """Normal numbers of the size of a trained weight's; large tensors repeat few rows."""
        shape, dtype = type_.concrete(env), type_.dtype
        if not isinstance(dtype, Block) and not dtype.is_float:
            # Numbers of slots and of replicas: 1 is legal for all.
            return np.ones(shape, dtype.numpy)
        inner = int(np.prod(shape[1:], dtype=np.int64))
        rows = min(shape[0], max(_DRAWN // max(inner, 1), 1)) if shape else 0
        if isinstance(dtype, Block):
            extent = dtype.extents(len(shape))[0] or shape[0]
            rows = min(-(-rows // extent) * extent, shape[0])
        drawn = self._rng.standard_normal((rows, *shape[1:]) if shape else ()).astype(np.float32)
        drawn /= max(shape[-1], 1) ** 0.5 if shape else 1.0
        if not isinstance(dtype, Block):
            return np.resize(drawn.astype(dtype.numpy), shape)
        slab = quantize(drawn, dtype)
        return _repeated(slab, shape)


def _repeated(slab: BlockArray, shape: tuple[int, ...]) -> BlockArray:
    """A block of rows again and again, whole blocks of scales with it."""
    scales = slab.format.scale_shape(shape)

    def longer(array: np.ndarray | None, wanted: tuple[int, ...]) -> np.ndarray | None:
        return None if array is None else np.resize(array, wanted)

    codes, factors = longer(slab.codes, shape), longer(slab.scales, scales)
    assert codes is not None
    assert factors is not None
    return BlockArray(slab.format, codes, factors, longer(slab.offsets, scales))


def _fill(held: torch.Tensor) -> None:
    if held.dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        held.normal_()
    else:
        held.copy_(torch.randn(held.shape, device=held.device))


def below(op: Op, value: Value) -> int:
    """How large a whole number of an operand may not be: what the op that reads it allows."""
    inner = op.body.ops if op.body is not None else (op,)
    names = {value.name}
    if op.body is not None:
        names = {p.name for p, v in zip(op.body.inputs, op.operands, strict=True) if v == value}
    for one in inner:
        for index, operand in enumerate(one.operands):
            if operand.name in names:
                found = _below(one, index)
                if found:
                    return found
            if operand.name in names and one.name in ("reshape", "cast", "slice", "broadcast"):
                names.add(one.result.name)
    return 1


def _below(op: Op, index: int) -> int:
    """The bound of an operand of one op, 0 where it is not known."""
    rows = {("embedding", 0): 1, ("gather", 1): 0, ("route", 0): 1}.get((op.name, index))
    if rows is not None:
        size = op.operands[rows].tensor.shape[0]
        return size.static if size.is_static else 1
    if op.name == "experts" and index == 1:
        total = op.attr.get("total", 0)
        assert isinstance(total, int)
        return total or op.operands[3].tensor.shape[0].static
    return 0


def _each(env: Mapping[str, int]) -> int:
    return env.get("P", 1)


def _pages(env: Mapping[str, int]) -> int:
    """Pages of all sequences, and the null page."""
    return 1 + env.get("B", 1) * _each(env)


def step_of(env: Mapping[str, int], page_size: int) -> dict[str, np.ndarray]:
    """A step of equal sequences: each gets its share of the tokens at the end of its full pages."""
    tokens, batch, pages, rows = (env.get(name, 1) for name in "TBPR")
    context = pages * page_size
    starts = np.arange(batch + 1) * tokens // batch
    new = np.diff(starts)
    positions = np.concatenate([np.arange(context - n, context) for n in new]).clip(0)
    table = 1 + np.arange(batch * pages).reshape(batch, pages)
    sequence = np.repeat(np.arange(batch), new)
    slots = table[sequence, positions // page_size] * page_size + positions % page_size
    return {
        "positions": positions, "slots": slots, "starts": starts,
        "lengths": np.full(batch, context), "pages": table,
        "sample_rows": np.arange(rows) % max(tokens, 1), "num_valid": np.array([tokens, batch]),
    }  # fmt: skip
