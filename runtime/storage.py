"""Memory of a loaded plan: arena, weights, states, step fields, rope tables."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from metainfer.backends.torch.tensors import plain_weight, to_torch, torch_dtype
from metainfer.ir.dtypes import BlockArray
from metainfer.ir.errors import PlanError
from metainfer.ir.rope import Rope
from metainfer.ir.step import STEP_FIELDS
from metainfer.ir.types import StateType
from metainfer.runtime.step_record import SOURCES, TOKENS, StepRecord

_ROPE_FIELDS = tuple(Rope.__dataclass_fields__)


class Storage:
    """Everything that lives between steps, and the arena that lives within one.

    Args:
        arena_bytes: of the largest phase.
        limits: upper bounds of the size symbols over all phases.
        device: where tensors live.
        positions: rows of the rope tables.
        has_step: whether the plan reads the step record.
    """

    def __init__(
        self, arena_bytes: int, limits: Mapping[str, int], device: torch.device, positions: int,
        *, has_step: bool,
    ) -> None:  # fmt: skip
        self.device = device
        # One spare line, so that the first buffer starts on a cache line.
        self._raw = _zeros((arena_bytes + 64,), torch.uint8, device)
        self.base = -(-self._raw.data_ptr() // 64) * 64
        self.arena = self._raw[self.base - self._raw.data_ptr() :]
        self._weights: dict[str, dict[str, Any]] = {}
        self.states: dict[str, dict[str, torch.Tensor]] = {}
        self._positions = positions
        self._tables: dict[tuple[Any, ...], tuple[torch.Tensor, torch.Tensor]] = {}
        sizes = {name: _most(name, limits) for name in STEP_FIELDS} if has_step else {}
        if has_step:
            sizes[TOKENS] = sizes[SOURCES] = sizes["positions"]
        self._record = StepRecord(sizes, device)

    def weights_of(self, phase: str) -> dict[str, Any]:
        """Resident weights of a phase by flat name; two phases may pack one tensor differently."""
        return self._weights.setdefault(phase, {})

    def place(self, data: Any) -> Any:
        """A weight where it stays: numpy arrays become tensors that share their memory."""
        if isinstance(data, BlockArray):
            data = plain_weight(data)
        elif isinstance(data, np.ndarray):
            data = to_torch(data)
        return data if self.device.type == "cpu" else _moved(data, self.device)

    def add_state(self, name: str, type_: StateType, num_pages: int) -> None:
        """Allocate a paged state: zeros, which the system maps as they are written."""
        if type_.kind != "pages":
            raise PlanError(f"state {name} is of kind {type_.kind}, which is not executed yet")
        self.states[name] = {
            field: _zeros(
                (num_pages, type_.page_size, *(n.static for n in entry.shape)),
                torch_dtype(entry.dtype),
                self.device,
            )
            for field, entry in type_.fields
        }

    def set_step(self, step: Mapping[str, np.ndarray]) -> None:
        """Copy the step record in."""
        self._record.write(step)

    def step_field(self, name: str) -> torch.Tensor:
        """Storage of a step field, flat."""
        return self._record.field(name)

    def rope_tables(
        self, attrs: Mapping[str, Any], width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines, float32 [positions, width / 2]."""
        parameters = {k: attrs[k] for k in _ROPE_FIELDS}
        key = (tuple(parameters.items()), width)
        if key not in self._tables:
            cos, sin = Rope(**parameters).cos_sin(np.arange(self._positions), width)
            self._tables[key] = (
                torch.from_numpy(np.ascontiguousarray(cos)).to(self.device),
                torch.from_numpy(np.ascontiguousarray(sin)).to(self.device),
            )
        return self._tables[key]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on a CPU by calloc, so that only pages that are used take memory and time."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    raw = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)


def _most(name: str, limits: Mapping[str, int]) -> int:
    total = 1
    for size in STEP_FIELDS[name].shape:
        total *= size.evaluate(limits)
    return total


def _moved(data: Any, device: torch.device) -> Any:
    return data.to(device) if hasattr(data, "to") else data
