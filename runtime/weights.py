"""Weights of a plan: checkpoint tensors through the load graph, tensor by tensor.

A weight is made when it is first asked for; calls and phases that want the same tensor in the same
form share one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, takewhile
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np

from metainfer.backends.registry import Backends
from metainfer.ir.dtypes import BlockArray, DType, Scalar
from metainfer.ir.errors import CheckpointError, PlanError
from metainfer.ir.flatten import FlatWeight, Recipe, recipe_of
from metainfer.ir.graph import Module, Op, Value
from metainfer.ir.interpret import as_reference_input, round_to
from metainfer.ir.ops.record import RAW, attr_value, op_def
from metainfer.ir.types import TensorType
from metainfer.runtime.checkpoint import TensorSource
from metainfer.runtime.checkpoint.stacked import is_stacked, member, stack
from metainfer.runtime.parts import (
    Region,
    cut,
    needed_region,
    region_shape,
    shard_region,
    sliced_region,
    split_rows,
)

Array = np.ndarray[Any, np.dtype[Any]]
Provider = Callable[[str], Array | BlockArray]


class WeightStore:
    """Makes and keeps packed weights.

    Args:
        provider: full name -> checkpoint tensor.
        backends: for the packers.
        numbers: of the rank along each axis of the mesh; it keeps its own parts of weights.
    """

    def __init__(
        self, provider: Provider, backends: Backends, numbers: Mapping[str, int] | None = None
    ) -> None:
        self._provider = provider
        self._backends = backends
        self._numbers = numbers or {}
        self._made: dict[Recipe, Any] = {}

    def get(self, module: Module, weight: FlatWeight) -> Any:
        """The resident form of a weight: plain numpy, or what its layout packs.

        Raises: CheckpointError if a tensor is missing or of another shape or format.
        """
        key = recipe_of(module, weight)
        if key not in self._made:
            # Only what a graph reads is kept; the steps on the way are dropped.
            self._made[key] = self._evaluate(module, weight)
        return self._made[key]

    def _evaluate(self, module: Module, weight: FlatWeight) -> Any:
        load = module.load(weight.graph)
        if load is None:
            return self._provider(weight.binding.full_name(weight.local[1:]))
        index = [w.name for w in module.graph(weight.graph).weights].index(weight.local)
        return self._make(load.outputs[index], load.producers(), weight, {})

    def _make(
        self, value: Value, producers: Mapping[str, Op], weight: FlatWeight, region: Region
    ) -> Any:
        """A region of a value of the load graph; of packed forms there is only the whole."""
        op = producers.get(value.name)
        if op is None:
            return self._read(value, weight, region)
        if op.name == "take_shard":
            number = self._number(str(op.attr["axis"]))
            inner = shard_region(op, number, region)
            return self._make(op.operands[0], producers, weight, inner)
        if op.name == "take_rows" and 0 in region:
            return self._rows(op, producers, weight, region)
        if op.name == "slice" and region and attr_value(op, "step") == 1:
            return self._make(op.operands[0], producers, weight, sliced_region(op, region))
        if op.name == "reshape" and 0 in region and split_rows(op):
            return self._split(op, producers, weight, region)
        needed = needed_region(op, region) if region else {}
        made = self._apply(
            op, [self._make(v, producers, weight, needed or {}) for v in op.operands]
        )
        return cut(made, region, needed) if region else made

    def _rows(
        self, op: Op, producers: Mapping[str, Op], weight: FlatWeight, region: Region
    ) -> Array | BlockArray:
        """Some of the rows that a `take_rows` picks: each is read and made by itself, once."""
        start, stop = region[0]
        index = self._make(op.operands[1], producers, weight, {})[start:stop].tolist()
        made = {
            row: self._make(op.operands[0], producers, weight, {**region, 0: (row, row + 1)})
            for row in sorted(set(index))
        }
        join = op_def("concat_rows").reference
        return cast(Array | BlockArray, join(*(made[row] for row in index)))

    def _split(
        self, op: Op, producers: Mapping[str, Op], weight: FlatWeight, region: Region
    ) -> Array | BlockArray:
        """Some of the rows that a `reshape` splits: no others are read."""
        (start, stop), each = region[0], split_rows(op)
        held = {0: (start * each, stop * each)}
        made = self._make(op.operands[0], producers, weight, held)
        shape = (stop - start, *op.result.tensor.concrete({})[1:])
        return cut(made.reshape(shape), {d: b for d, b in region.items() if d})

    def _apply(self, op: Op, operands: Sequence[Any]) -> Any:
        if op.name == "pack":
            return self._backends.layouts.get(str(op.attr["layout"])).pack(operands[0])
        record = op_def(op.name)
        raw = record.has(RAW)
        inputs = [as_reference_input(v, raw=raw) for v in operands]
        return round_to(record.reference(*inputs, **record.complete(op.attr)), op.result)

    def _number(self, axis: str) -> int:
        if axis not in self._numbers:
            raise PlanError(
                f"the plan cuts weights over the axis {axis!r}, this process is no rank of one",
                advice="run the plan by metainfer run --nproc N, or under torchrun",
            )
        return self._numbers[axis]

    def _read(self, value: Value, weight: FlatWeight, region: Region) -> Array | BlockArray:
        name = weight.binding.full_name(value.name[1:])
        wanted = cast(TensorType, value.type)
        shape = tuple(n.static for n in wanted.shape)
        if region and isinstance(self._provider, PartsProvider):
            _check(name, wanted, shape, self._provider.find(name))
            found = self._provider.region(name, region)
            _check(name, wanted, region_shape(shape, region), _kind(found))
            return found
        found = self._provider(name)
        _check(name, wanted, shape, _kind(found))
        return cut(found, region)


# Shape and element type of a tensor; the type as numpy or the block format says it.
Kind = tuple[tuple[int, ...], str]


def _kind(array: Array | BlockArray) -> Kind:
    held = array.format if isinstance(array, BlockArray) else array.dtype
    return tuple(array.shape), str(held)


def _text(dtype: DType) -> str:
    return str(dtype.numpy) if isinstance(dtype, Scalar) else str(dtype)


def _check(name: str, wanted: TensorType, shape: tuple[int, ...], found: Kind) -> None:
    if found == (shape, _text(wanted.dtype)):
        return
    raise CheckpointError(
        f"{name} is {found[1]}{list(found[0])}, the plan was made for {wanted}",
        advice="give the checkpoint that the plan was compiled for, or compile again",
    )


@runtime_checkable
class PartsProvider(Protocol):
    """A provider that can read a part of a tensor."""

    def find(self, name: str) -> Kind:
        """Shape and element type of a whole tensor."""
        ...

    def region(self, name: str, region: Region) -> Array | BlockArray:
        """A region of a tensor; only its bytes are read."""
        ...


@dataclass(frozen=True)
class CheckpointProvider:
    """Tensors by full name: the plan's constants first, then the checkpoint's.

    Attributes:
        source: the checkpoint.
        renames: name in the checkpoint by name of the weight, where they differ.
        constants: tensors that the plan carries.
    """

    source: TensorSource
    renames: Mapping[str, str] = field(default_factory=dict[str, str])
    constants: Mapping[str, Array] = field(default_factory=dict[str, Array])

    def __call__(self, name: str) -> Array | BlockArray:
        """A tensor whole."""
        if name in self.constants:
            return self.constants[name]
        if self._is_renamed_apart(name):
            return stack([self(one) for one in self._members(name)])
        return self.source.read(self.renames.get(name, name))

    def _is_renamed_apart(self, name: str) -> bool:
        """Whether tensors that a pass stacked have names of their own in the checkpoint."""
        return is_stacked(name) and name not in self.renames and member(name, 0) in self.renames

    def find(self, name: str) -> Kind:
        """Shape and element type of a tensor.

        Raises: CheckpointError if there is none of the name.
        """
        if name in self.constants:
            return _kind(self.constants[name])
        if self._is_renamed_apart(name):
            shape, held = self.find(member(name, 0))
            return (len(self._members(name)), *shape), held
        shape, dtype = self.source.known(self.renames.get(name, name))
        return shape, _text(dtype)

    def region(self, name: str, region: Region) -> Array | BlockArray:
        """A region of a tensor; only its bytes are read."""
        if name in self.constants:
            return cut(self.constants[name], region)
        if self._is_renamed_apart(name):
            members = self._members(name)
            start, stop = region.get(0, (0, len(members)))
            inner = {dim - 1: bounds for dim, bounds in region.items() if dim}
            return stack([self.region(one, inner) for one in members[start:stop]])
        return self.source.read_region(self.renames.get(name, name), region)

    def _members(self, name: str) -> list[str]:
        names = (member(name, n) for n in count())
        return list(takewhile(lambda one: one in self.renames, names))


def state_dict_provider(tensors: Mapping[str, Any], constants: Mapping[str, Array]) -> Provider:
    """Tensors of an nn.Module's state_dict."""
    from metainfer.backends.torch.tensors import to_numpy
    from metainfer.ir.dtypes import parse_dtype

    names = {
        "torch.float32": "f32", "torch.float16": "f16", "torch.bfloat16": "bf16",
        "torch.float64": "f64", "torch.int64": "i64", "torch.int32": "i32", "torch.bool": "bool",
        "torch.uint8": "u8", "torch.int8": "i8",
    }  # fmt: skip

    def provide(name: str) -> Array:
        if name in constants:
            return constants[name]
        if is_stacked(name) and member(name, 0) in tensors:
            numbers = takewhile(lambda n: member(name, n) in tensors, count())
            return cast(Array, stack([provide(member(name, n)) for n in numbers]))
        if name not in tensors:
            raise CheckpointError(
                f"no tensor {name} among the given weights",
                advice="give the state_dict of the module that was compiled",
            )
        tensor = tensors[name]
        dtype = names.get(str(tensor.dtype))
        if dtype is None:
            raise PlanError(f"{name} has element type {tensor.dtype}, which no plan reads")
        return to_numpy(tensor, cast(Scalar, parse_dtype(dtype)))

    return provide
