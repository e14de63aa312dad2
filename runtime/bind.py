"""Binding: values of a flat module as addresses for CPU kernels and as views for torch kernels."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from metainfer.backends.cpu.emit import CpuBinder, CpuCall, ProgramDims
from metainfer.backends.cpu.program import ProgramBuilder
from metainfer.backends.kernel import Kernel
from metainfer.backends.torch.call import TorchBinder, TorchCall
from metainfer.backends.torch.plain_shape import VIEWS
from metainfer.backends.torch.tensors import BlockTensors, block_view, torch_dtype
from metainfer.backends.triton.launch import TritonBinder
from metainfer.ir.arena import Arena
from metainfer.ir.dtypes import Block
from metainfer.ir.errors import PlanError
from metainfer.ir.flatten import FlatModule, FlatOp
from metainfer.ir.graph import Op, Value
from metainfer.ir.interpret import concrete_attr
from metainfer.ir.ops.record import op_def
from metainfer.ir.types import TensorType
from metainfer.runtime.storage import Storage


def complete_attrs(op: Op) -> dict[str, Any]:
    """Attributes with defaults; a fused group's own are few and have none."""
    return dict(op.attr) if op.name == "fused" else dict(op_def(op.name).complete(op.attr))


@dataclass(frozen=True)
class CpuEmitter:
    """Emits commands of CPU kernels over a storage."""

    storage: Storage
    weights: Mapping[str, Any]
    flat: FlatModule
    arena: Arena
    limits: Mapping[str, tuple[int, int]]

    def emit(
        self, item: FlatOp, kernel: Kernel, builder: ProgramBuilder, dims: ProgramDims
    ) -> None:
        """Append a group's commands.

        Raises: PlanError if the kernel is none of this backend's.
        """
        if not isinstance(kernel.binder, CpuBinder):
            raise PlanError(f"kernel {kernel.name} cannot be bound into a CPU program")
        op = item.op
        kernel.binder.emit(
            CpuCall(
                op=op,
                attrs=complete_attrs(op),
                builder=builder,
                dims=dims,
                operand=lambda i, field: self._address(op.operands[i], field),
                result=lambda i: self._address(op.results[i], ""),
                workspace=self.storage.base + self.arena.workspace_of(op.stream),
                rope=self._rope,
                max_rows=self._max_rows,
            )
        )

    def _address(self, value: Value, field: str) -> int:
        if value.is_state:
            state = self.storage.states[self.flat.state_of[value.name]]
            return state[field].data_ptr()
        if value.name.startswith("step."):
            return self.storage.step_field(value.name.removeprefix("step.")).data_ptr()
        if value.is_weight:
            return int(self.weights[value.name].data_ptr())
        owner = self.arena.owner[value.name]
        shift = self._shift(value.name, owner)
        if owner in self.arena.buffers:
            return self.storage.base + self.arena.buffers[owner].offset + shift
        return self._address(self._root(owner), field) + shift

    def _root(self, name: str) -> Value:
        """The weight or step field that a view of it reads."""
        for item in self.flat.ops:
            for value in item.op.operands:
                if value.name == name:
                    return value
        raise PlanError(f"{name} has no storage")

    def _shift(self, name: str, owner: str) -> int:
        """Bytes from the owner's start: dense slices begin later."""
        producers = self._producers()
        shift = 0
        while name != owner:
            op = producers[name]
            if op.name == "slice":
                start = op.attr["start"]
                type_ = op.operands[0].tensor
                axis = int(op.attr["dim"])  # type: ignore[arg-type]
                inner = math.prod(n.static for n in type_.shape[axis + 1 :])
                shift += type_.dtype.size_bytes((int(start) * inner,))  # type: ignore[arg-type]
            name = op.operands[0].name
        return shift

    def _producers(self) -> Mapping[str, Op]:
        found: dict[str, Op] | None = self.__dict__.get("_cache")
        if found is None:
            found = {v.name: i.op for i in self.flat.ops for v in i.op.results}
            self.__dict__["_cache"] = found
        return found

    def _rope(self, attrs: Mapping[str, Any], width: int) -> tuple[int, int]:
        cos, sin = self.storage.rope_tables(attrs, width)
        return cos.data_ptr(), sin.data_ptr()

    def _max_rows(self, type_: TensorType) -> int:
        return math.prod(n.bounds(self.limits)[1] for n in type_.shape[:-1])


class TorchEmitter:
    """Makes calls of torch and Triton kernels at concrete sizes."""

    def __init__(
        self, storage: Storage, weights: Mapping[str, Any], flat: FlatModule, arena: Arena,
        env: Mapping[str, int],
    ) -> None:  # fmt: skip
        self._storage = storage
        self._weights = weights
        self._flat = flat
        self._arena = arena
        self._env = env
        self._views: dict[str, Any] = {}
        self._producers = {v.name: i.op for i in flat.ops for v in i.op.results}

    def bind(self, item: FlatOp, kernel: Kernel | None) -> Callable[[], None]:
        """A function without arguments that runs the group.

        Raises: PlanError if the kernel is none of this backend's.
        """
        op = item.op
        if kernel is None:
            return self._copy(op)
        if not isinstance(kernel.binder, TorchBinder | TritonBinder):
            raise PlanError(f"kernel {kernel.name} cannot be bound by torch")
        call = TorchCall(
            op,
            tuple(self._operand(v) for v in op.operands),
            tuple(self.held(v) for v in op.results if not v.is_state),
            {k: concrete_attr(v, self._env) for k, v in complete_attrs(op).items()},
            self._workspace(op.stream),
            self._storage.rope_tables,
            self._env,
            tuple(self._arena.buffers[v.name].size for v in op.results if not v.is_state),
        )
        if isinstance(kernel.binder, TritonBinder):
            return kernel.binder.bind(call)
        run = kernel.binder.run
        return lambda: run(call)

    def _workspace(self, stream: int) -> torch.Tensor:
        start = self._arena.workspace_of(stream)
        return self._storage.arena[start : start + self._arena.workspace_size]

    def _copy(self, op: Op) -> Callable[[], None]:
        """A reshape that cannot be a view."""
        source, target = self._operand(op.operands[0]), self.tensor(op.result)

        def copy() -> None:
            target.copy_(source.reshape(target.shape))

        return copy

    def _operand(self, value: Value) -> Any:
        if value.is_state:
            return self._storage.states[self._flat.state_of[value.name]]
        if value.is_weight:
            return self._weights[value.name]
        return self.held(value)

    def tensor(self, value: Value) -> torch.Tensor:
        """A tensor value of plain numbers as a view of its storage."""
        found = self.held(value)
        assert isinstance(found, torch.Tensor)
        return found

    def held(self, value: Value) -> torch.Tensor | BlockTensors:
        """A tensor value as a view of its storage; codes and scales of block formats."""
        if value.name not in self._views:
            self._views[value.name] = self._view(value)
        found: torch.Tensor | BlockTensors = self._views[value.name]
        return found

    def _view(self, value: Value) -> torch.Tensor | BlockTensors:
        shape = value.tensor.concrete(self._env)
        if value.name.startswith("step."):
            flat = self._storage.step_field(value.name.removeprefix("step."))
            return flat[: math.prod(shape)].view(shape)
        if value.name in self._arena.buffers:
            return self._owned(value, shape)
        op = self._producers[value.name]
        attrs = {k: concrete_attr(v, self._env) for k, v in complete_attrs(op).items()}
        made: torch.Tensor = VIEWS[op.name](self._operand(op.operands[0]), attrs)
        return made

    def _owned(self, value: Value, shape: tuple[int, ...]) -> torch.Tensor | BlockTensors:
        buffer = self._arena.buffers[value.name]
        format_, offset = value.tensor.dtype, buffer.offset
        if isinstance(format_, Block):
            return block_view(self._storage.arena[offset : offset + buffer.size], format_, shape)
        dtype = torch_dtype(format_)
        size = math.prod(shape) * dtype.itemsize
        return self._storage.arena[offset : offset + size].view(dtype).view(shape)
