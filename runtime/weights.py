"""Weights of a plan: checkpoint tensors through the load graph, tensor by tensor.

A weight is made when it is first asked for; calls and phases that want the same tensor in the same
form share one.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count, takewhile
from threading import Lock
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np

from metainfer.backends.registry import Backends
from metainfer.ir.dtypes import BlockArray, DType, Scalar
from metainfer.ir.errors import CheckpointError, PlanError
from metainfer.ir.flatten import FlatWeight, Recipe, recipe_of
from metainfer.ir.graph import Module, Op, Value
from metainfer.ir.interpret import as_reference_input, round_to
from metainfer.ir.ops.record import MOVES, RAW, VIEW, OpDef, attr_value, op_def
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

_MAKERS = min(4, os.cpu_count() or 1)
Array = np.ndarray[Any, np.dtype[Any]]
Provider = Callable[[str], Array | BlockArray]


def _as_made(data: Any) -> Any:
    return data


class WeightStore:
    """Makes and keeps packed weights.

    Args:
        provider: full name -> checkpoint tensor.
        backends: for the packers.
        numbers: of the rank along each axis of the mesh; it keeps its own parts of weights.
        place: puts what was made where it stays; the host's form is not kept.
        makers: threads of `get_all`; each holds one weight on its way.
    """

    def __init__(
        self, provider: Provider, backends: Backends, numbers: Mapping[str, int] | None = None,
        place: Callable[[Any], Any] = _as_made, makers: int = _MAKERS,
    ) -> None:  # fmt: skip
        self._provider = provider
        self._backends = backends
        self._numbers = numbers or {}
        self._place = place
        self._makers = makers
        self._made: dict[Recipe, Future[Any]] = {}
        self._lock = Lock()

    def get(self, module: Module, weight: FlatWeight) -> Any:
        """The resident form of a weight: plain numpy, or what its layout packs, placed.

        Threads may ask at once; one of them makes it.

        Raises: CheckpointError if a tensor is missing or of another shape or format.
        """
        key = recipe_of(module, weight)
        with self._lock:
            made = self._made.get(key)
            is_first = made is None
            if made is None:
                made = self._made[key] = Future[Any]()
        if is_first:
            try:
                # Only what a graph reads is kept; the steps on the way are dropped.
                made.set_result(self._place(self._evaluate(module, weight)))
            except BaseException as error:
                made.set_exception(error)
        return made.result()

    def get_all(self, wanted: Sequence[tuple[Module, FlatWeight]]) -> list[Any]:
        """Weights in order, a few of them made at once: reading, packing and copying overlap.

        Raises: as `get`.
        """
        with ThreadPoolExecutor(self._makers, thread_name_prefix="weights") as makers:
            started = [makers.submit(self.get, module, weight) for module, weight in wanted]
            try:
                return [one.result() for one in started]
            except BaseException:
                makers.shutdown(cancel_futures=True)
                raise

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
        if record.has(MOVES) or (record.has(VIEW) and isinstance(operands[0], np.ndarray)):
            return _moved(record, operands, op)
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


def _moved(record: OpDef, operands: Sequence[Any], op: Op) -> Array | BlockArray:
    """What an op makes that only moves numbers: by their bits, nothing is converted.

    numpy copies types that are not its own number by number.
    """
    attrs, first = record.complete(op.attr), operands[0]
    if isinstance(first, BlockArray):
        return cast(BlockArray, record.reference(*operands, **attrs))
    bits = np.dtype(f"u{first.dtype.itemsize}")
    given = [v.view(bits) if v.dtype == first.dtype else v for v in operands]
    return cast(Array, record.reference(*given, **attrs)).view(first.dtype)


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
