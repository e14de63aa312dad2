"""The constraint that a kernel's launches fit into a card: asked of the compiler, not predicted."""

from collections.abc import Mapping
from typing import Any

import torch

from metainfer.backends.kernel import Constraint, Query
from metainfer.backends.layout import LayoutRegistry
from metainfer.backends.torch.call import TorchCall
from metainfer.backends.torch.tensors import BlockTensors, torch_dtype
from metainfer.backends.triton.cross import faults_of, resources_of
from metainfer.backends.triton.launch import Launches
from metainfer.ir.dtypes import Block
from metainfer.ir.errors import PlanError
from metainfer.ir.graph import Op, Value
from metainfer.ir.interpret import concrete_attr
from metainfer.ir.ops.record import op_def
from metainfer.ir.types import StateType, TensorType

TEXT = "launches fit the card, as compiled"
_META = "meta"
_ROPE_POSITIONS = 16
_STATE_PAGES = 16


def fits(launches: Launches, layouts: Mapping[int, str], registry: LayoutRegistry) -> Constraint:
    """All launches compile for the device within its limits, with the instructions they want."""

    def check(query: Query) -> str | None:
        # Whole multiples, as most sizes are: two phases ask about one and the same code.
        env = {name: -(-high // 16) * 16 for name, (_, high) in query.limits.items()}
        call = typed_call(query.op, env, layouts, registry)
        for launch in launches(call):
            taken = resources_of(launch, query.device)
            faults = faults_of(taken, launch, query.device, spills=False)
            if faults:
                return f"{launch.function.__name__}: {'; '.join(faults)}"
        return None

    return Constraint(TEXT, check)


def typed_call(
    op: Op,
    env: Mapping[str, int],
    layouts: Mapping[int, str],
    registry: LayoutRegistry,
    workspace: int = 0,
) -> TorchCall:
    """The call that a runtime would make, with tensors that have types and shapes only.

    Args:
        op: the group.
        env: values of its size symbols.
        layouts: operand number -> packing that the kernel reads.
        registry: the packings.
        workspace: scratch bytes that the kernel asks for.
    """
    inputs = tuple(
        _operand(v, env, layouts.get(i, ""), registry) for i, v in enumerate(op.operands)
    )
    outputs = tuple(_tensor(v.tensor, env) for v in op.results if not v.is_state)
    attrs = op.attr if op.name == "fused" else op_def(op.name).complete(op.attr)
    return TorchCall(
        op,
        inputs,
        outputs,
        {k: concrete_attr(v, env) for k, v in attrs.items()},
        workspace=torch.empty(workspace, dtype=torch.uint8, device=_META),
        rope=_rope,
        sizes=env,
    )


def _rope(attrs: Mapping[str, Any], width: int) -> tuple[torch.Tensor, torch.Tensor]:
    table = torch.empty(_ROPE_POSITIONS, width // 2, device=_META)
    return table, table


def _operand(value: Value, env: Mapping[str, int], layout: str, registry: LayoutRegistry) -> Any:
    if isinstance(value.type, StateType):
        page = value.type.page_size or 1
        return {
            name: torch.empty(
                (_STATE_PAGES, page, *entry.concrete({})),
                dtype=torch_dtype(entry.dtype),
                device=_META,
            )
            for name, entry in value.type.fields
        }
    if layout:
        typed = registry.get(layout).typed
        if typed is None:
            raise PlanError(f"layout {layout} does not say what its packed form looks like")
        return typed(value.type)
    return _tensor(value.type, env)


def _tensor(type_: TensorType, env: Mapping[str, int]) -> Any:
    shape = type_.concrete(env)
    if not isinstance(type_.dtype, Block):
        return torch.empty(shape, dtype=torch_dtype(type_.dtype), device=_META)
    format_ = type_.dtype
    scales = format_.scale_shape(shape)
    element = torch.uint8 if format_.element.name == "f4e2m1" else torch_dtype(format_.element)

    def empty(sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(sizes, dtype=dtype, device=_META)

    offsets = None if format_.offset is None else empty(scales, torch_dtype(format_.offset))
    row_scales = None
    if format_.row is not None:
        row_scales = empty((*shape[:-1], 1), torch_dtype(format_.row))
    codes, of_blocks = empty(shape, element), empty(scales, torch_dtype(format_.scale))
    return BlockTensors(format_, codes, of_blocks, offsets, row_scales)
