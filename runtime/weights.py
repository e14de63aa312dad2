"""Weights of a plan: checkpoint tensors through the load graph, tensor by tensor.

A weight is made when it is first asked for; calls and phases that want the same tensor in the same
form share one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count, takewhile
from typing import Any, cast

import numpy as np

from metainfer.backends.registry import Backends
from metainfer.ir.dtypes import BlockArray
from metainfer.ir.errors import CheckpointError, PlanError
from metainfer.ir.flatten import FlatWeight, Recipe, recipe_of
from metainfer.ir.graph import Module, Op, Value
from metainfer.ir.interpret import as_reference_input, round_to
from metainfer.ir.ops.record import RAW, op_def
from metainfer.ir.types import TensorType
from metainfer.runtime.checkpoint import TensorSource
from metainfer.runtime.checkpoint.stacked import is_stacked, member, stack

Array = np.ndarray[Any, np.dtype[Any]]
Provider = Callable[[str], Array | BlockArray]


class WeightStore:
    """Makes and keeps packed weights.

    Args:
        provider: full name -> checkpoint tensor.
        backends: for the packers.
    """

    def __init__(self, provider: Provider, backends: Backends) -> None:
        self._provider = provider
        self._backends = backends
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
        return self._make(load.outputs[index], load.producers(), weight)

    def _make(self, value: Value, producers: Mapping[str, Op], weight: FlatWeight) -> Any:
        op = producers.get(value.name)
        if op is None:
            return self._read(value, weight)
        operands = [self._make(v, producers, weight) for v in op.operands]
        if op.name == "pack":
            return self._backends.layouts.get(str(op.attr["layout"])).pack(operands[0])
        record = op_def(op.name)
        raw = record.has(RAW)
        inputs = [as_reference_input(v, raw=raw) for v in operands]
        return round_to(record.reference(*inputs, **record.complete(op.attr)), op.result)

    def _read(self, value: Value, weight: FlatWeight) -> Array | BlockArray:
        name = weight.binding.full_name(value.name[1:])
        found = self._provider(name)
        wanted = cast(TensorType, value.type)
        shape = tuple(n.static for n in wanted.shape)
        if isinstance(found, BlockArray):
            held, same = str(found.format), found.format == wanted.dtype
        else:
            held, same = str(found.dtype), found.dtype == getattr(wanted.dtype, "numpy", None)
        if tuple(found.shape) != shape or not same:
            held = f"{held}{list(found.shape)}"
            raise CheckpointError(
                f"{name} is {held}, the plan was made for {wanted}",
                advice="give the checkpoint that the plan was compiled for, or compile again",
            )
        return found


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
            numbers = takewhile(lambda n: member(name, n) in self.renames, count())
            return stack([self(member(name, n)) for n in numbers])
        return self.source.read(self.renames.get(name, name))

    def _is_renamed_apart(self, name: str) -> bool:
        """Whether tensors that a pass stacked have names of their own in the checkpoint."""
        return is_stacked(name) and name not in self.renames and member(name, 0) in self.renames

    def part(self, name: str, dim: int, start: int, stop: int) -> Array | BlockArray:
        """Elements ``start:stop`` of one dim; only their bytes are read."""
        if name in self.constants:
            index = (slice(None),) * dim + (slice(start, stop),)
            return cast(Array, self.constants[name][index])
        if self._is_renamed_apart(name):
            members = [member(name, n) for n in range(start, stop)]
            if dim:
                numbers = takewhile(lambda n: member(name, n) in self.renames, count())
                parts = [self.part(member(name, n), dim - 1, start, stop) for n in numbers]
                return stack(parts)
            return stack([self(n) for n in members])
        return self.source.read_slice(self.renames.get(name, name), dim, start, stop)


def state_dict_provider(tensors: Mapping[str, Any], constants: Mapping[str, Array]) -> Provider:
    """Tensors of an nn.Module's state_dict."""
    from metainfer.backends.torch.tensors import to_numpy
    from metainfer.ir.dtypes import Scalar, parse_dtype

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
