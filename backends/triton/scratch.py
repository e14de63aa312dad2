"""Tensors carved out of the scratch bytes that a plan sets aside for a kernel."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from metainfer.ir.errors import PlanError

ALIGNMENT = 256


@dataclass(frozen=True)
class Piece:
    """One tensor of a scratch space: its shape and element type."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes, filled up so that the next one is aligned."""
        size = prod(self.shape) * self.dtype.itemsize
        return -(-size // ALIGNMENT) * ALIGNMENT


def scratch_bytes(pieces: Sequence[Piece]) -> int:
    """Bytes that some tensors take together."""
    return sum(p.num_bytes for p in pieces)


def carve(
    workspace: torch.Tensor | None, pieces: Sequence[Piece], device: torch.device
) -> list[torch.Tensor]:
    """Uninitialised tensors in a workspace, or of their own where there is none.

    On torch's ``meta`` device, where only types count, a workspace may be of any size.

    Raises: PlanError if the workspace is too small.
    """
    if workspace is None or workspace.is_meta:
        return [torch.empty(p.shape, dtype=p.dtype, device=device) for p in pieces]
    needed = scratch_bytes(pieces)
    if workspace.numel() < needed:
        raise PlanError(
            f"a kernel needs {needed:,} bytes of scratch, the plan has {workspace.numel():,}",
            advice="compile the plan again, for the machine it runs on",
        )
    made, at = [], 0
    for piece in pieces:
        size = prod(piece.shape) * piece.dtype.itemsize
        made.append(workspace[at : at + size].view(piece.dtype).view(piece.shape))
        at += piece.num_bytes
    return made
