"""Root-mean-square norm as a module."""

import torch
from torch import Tensor, nn

from metainfer.models import functional


class RmsNorm(nn.Module):
    """Root-mean-square norm with a weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the rows of x [..., D]."""
        return functional.rms_norm(x, self.weight, self.eps)
