"""One op run by a kernel and by its reference, on numpy data: what kernels are checked with."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from metainfer.backends.kernel import Kernel, Query
from metainfer.backends.layout import LayoutRegistry
from metainfer.backends.torch.call import RopeTables, TorchCall
from metainfer.backends.torch.tensors import (
    BlockTensors,
    PlainWeight,
    plain_weight,
    to_numpy,
    to_torch,
    torch_dtype,
)
from metainfer.hardware.device import Device
from metainfer.ir.dtypes import Block, BlockArray, Scalar
from metainfer.ir.errors import PlanError
from metainfer.ir.graph import Graph, Op, Value, attrs_of
from metainfer.ir.interpret import Data, concrete_attr, interpret_graph
from metainfer.ir.ops.record import infer_types, op_def
from metainfer.ir.rope import Rope
from metainfer.ir.types import StateType, Type

Env = Mapping[str, int]
_POSITIONS = 2**14  # rows of the rotary tables


def make_op(
    name: str, types: Sequence[Type], attrs: Mapping[str, Any], weights: Sequence[int] = ()
) -> Op:
    """An op on operands of some types, results inferred; ``weights`` are named as such."""

    def named(i: int, type_: Type) -> Value:
        sigil = "$" if isinstance(type_, StateType) else "@" if i in weights else "%"
        return Value(f"{sigil}{i}", type_)

    operands = tuple(named(i, t) for i, t in enumerate(types))
    made = infer_types(name, types, attrs)
    results = tuple(Value(f"%r{i}", t) for i, t in enumerate(made))
    return Op(name, operands, results, attrs_of(attrs))


def difference(found: Data, wanted: Data) -> float:
    """Largest deviation, relative to the largest finite magnitude; inf where NaNs or infs differ.

    Block formats are compared by their values.

    Raises: PlanError if the shapes differ.
    """
    if isinstance(found, BlockArray) and isinstance(wanted, BlockArray):
        return difference(found.dequantize(), wanted.dequantize())
    if not isinstance(found, np.ndarray) or not isinstance(wanted, np.ndarray):
        raise PlanError("states are compared field by field")
    if found.shape != wanted.shape:
        raise PlanError(f"shape {list(found.shape)} where {list(wanted.shape)} is wanted")
    a, b = found.astype(np.float64), wanted.astype(np.float64)
    finite = np.isfinite(b)
    same = np.array_equal(a[~finite], b[~finite], equal_nan=True)
    if not same or not np.isfinite(a[finite]).all():
        return float("inf")
    top = np.max(np.abs(b[finite]), initial=1e-3)
    return float(np.max(np.abs(a[finite] - b[finite]), initial=0.0) / top)


def run_reference(op: Op, data: Sequence[Data], env: Env | None = None) -> tuple[Data, ...]:
    """Results of an op by the interpreter, states last and whole."""
    operands = {v.name: v for v in op.operands}
    tensors = tuple(v for v in operands.values() if not v.is_state)
    states = tuple(v for v in operands.values() if v.is_state)
    outputs = tuple(v for v in op.results if not v.is_state)
    made = tuple(v for v in op.results if v.is_state)
    graph = Graph("check", tensors, (), states, (op,), outputs, made or states)
    named = dict(zip((v.name for v in op.operands), data, strict=True))
    return interpret_graph(graph, named, env=env)


def run_kernel(
    kernel: Kernel,
    op: Op,
    data: Sequence[Data],
    layouts: LayoutRegistry,
    *,
    env: Env | None = None,
    device: str = "cpu",
    card: Device | None = None,
) -> tuple[Data, ...]:
    """Results of an op by a torch or Triton kernel through its packings, states last and whole.

    Args:
        kernel: what runs.
        op: the group.
        data: its operands.
        layouts: packings by name.
        env: values of the size symbols.
        device: where torch computes.
        card: description of the device, for kernels that ask for scratch space.

    Raises: PlanError if the kernel is bound by another backend.
    """
    run = getattr(kernel.binder, "run", None)
    if run is None:
        raise PlanError(f"{kernel.name} is no kernel of the torch executor")
    scratch = _scratch_bytes(kernel, op, env or {}, card)
    call = make_call(op, data, layouts, kernel.layouts, env or {}, device, scratch)
    run(call)
    results = [v for v in op.results if not v.is_state]
    tensors = [_as_data(t, v) for t, v in zip(call.outputs, results, strict=True)]
    states = [
        {name: _as_array(t, v, name) for name, t in held.items()}
        for held, v in zip(call.inputs, op.operands, strict=True)
        if v.is_state
    ]
    return (*tensors, *states)


def _scratch_bytes(kernel: Kernel, op: Op, env: Env, card: Device | None) -> int:
    if kernel.workspace is None:
        return 0
    if card is None:
        raise PlanError(f"{kernel.name} asks for scratch space, which depends on the device")
    return kernel.workspace(Query(op, card, {name: (n, n) for name, n in env.items()}))


def make_call(
    op: Op,
    data: Sequence[Data],
    layouts: LayoutRegistry,
    packings: Mapping[int, str],
    env: Env,
    device: str = "cpu",
    workspace: int = 0,
) -> TorchCall:
    """The call that the executor would make: operands packed and moved, outputs allocated.

    Outputs are filled with NaN (integers with their lowest value), so that what a kernel leaves out
    shows.
    """
    inputs = tuple(_placed(d, layouts, packings.get(i, ""), device) for i, d in enumerate(data))
    outputs = tuple(_output(v, env, device) for v in op.results if not v.is_state)
    attrs = op.attr if op.name == "fused" else op_def(op.name).complete(op.attr)
    concrete = {k: concrete_attr(v, env) for k, v in attrs.items()}
    # Scratch space holds whatever was left there.
    scratch = torch.full((workspace,), 0xFF, dtype=torch.uint8, device=device)
    return TorchCall(op, inputs, outputs, concrete, scratch, _rope_tables(device), env)


def _rope_tables(device: str) -> RopeTables:
    def tables(attrs: Mapping[str, Any], width: int) -> tuple[torch.Tensor, torch.Tensor]:
        rope = Rope(**{name: attrs[name] for name in Rope.__dataclass_fields__})
        cos, sin = rope.cos_sin(np.arange(_POSITIONS), width)
        return to_torch(cos).to(device), to_torch(sin).to(device)

    return tables


def _placed(data: Data, layouts: LayoutRegistry, layout: str, device: str) -> Any:
    if isinstance(data, np.ndarray | BlockArray):
        packed = layouts.get(layout).pack(data) if layout else plain_weight(data)
        return packed.to(device) if hasattr(packed, "to") and device != "cpu" else packed
    # States are written in place: the caller keeps its arrays.
    return {name: to_torch(array.copy()).to(device) for name, array in data.items()}


def _output(value: Value, env: Env, device: str) -> torch.Tensor | BlockTensors:
    shape, format_ = value.tensor.concrete(env), value.tensor.dtype
    if isinstance(format_, Block):
        codes = _filled(shape, format_.element, device)
        scales = _filled(format_.scale_shape(shape), format_.scale, device)
        return BlockTensors(format_, codes, scales)
    return _filled(shape, format_, device)


def _filled(shape: tuple[int, ...], dtype: Scalar, device: str) -> torch.Tensor:
    out = torch.empty(shape, dtype=torch_dtype(dtype), device=device)
    if out.dtype is torch.bool:
        return out
    if not out.dtype.is_floating_point:
        return out.fill_(torch.iinfo(out.dtype).min)
    return out.copy_(torch.tensor(float("nan")))


def _as_data(tensor: PlainWeight, value: Value) -> Data:
    if isinstance(tensor, BlockTensors):
        return tensor.to("cpu").to_blocks()
    return _as_array(tensor, value)


def _as_array(tensor: torch.Tensor, value: Value, field: str = "") -> np.ndarray[Any, Any]:
    type_ = value.type.field_type(field) if isinstance(value.type, StateType) else value.tensor
    if not isinstance(type_.dtype, Scalar):
        raise PlanError(f"{value.name} is {type_}: a kernel made plain numbers")
    return to_numpy(tensor, type_.dtype)
