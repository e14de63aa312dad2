"""Stacks of expert weights as the experts' kernels read them."""

from dataclasses import dataclass

import torch

from metainfer.backends.torch.codes import Codes
from metainfer.backends.triton.words import NAME as WORDS
from metainfer.backends.triton.words import Words, group_of
from metainfer.ir.dtypes import F4E2M1, F8E8M0
from metainfer.ir.errors import Unsupported


@dataclass(frozen=True)
class Weight:
    """One stack of expert weights as the kernels read it.

    Shapes: codes [E, outputs, inputs or words], scales [E, blocks of outputs, blocks of inputs], or
    [E, 1 or 2, chunks, outputs] of "e2m1".

    Attributes:
        codes: numbers or codes; only the last dim must be dense.
        format: "plain", "e4m3", "ordered" or "e2m1".
        scales: one for each block; the codes themselves where there are none.
        high: outputs of a block, 0 for all.
        wide: inputs of a block, 0 for all.
        powers: scales are exponents of two.
        rows: second scales, [E, outputs, 1]; None without.
        width: inputs of the product where codes are filled up past them; else 0.
    """

    codes: torch.Tensor
    format: str
    scales: torch.Tensor
    high: int = 0
    wide: int = 0
    powers: bool = False
    rows: torch.Tensor | None = None
    width: int = 0

    @property
    def second(self) -> torch.Tensor:
        """Second scales, or what stands in their place."""
        return self.scales if self.rows is None else self.rows

    @property
    def inputs(self) -> int:
        """Inputs of the product."""
        return self.width or self.codes.shape[2]

    @property
    def filled(self) -> int:
        """Inputs that rows are filled up to."""
        return self.codes.shape[2] * (8 if self.format == "e2m1" else 1)


def weight_of(data: torch.Tensor | Codes | Words) -> Weight:
    """A weight as the runtime holds it: a tensor, or packed as ``torch.codes``, ``triton.words``.

    Raises: Unsupported for a format that the kernels do not read.
    """
    if isinstance(data, torch.Tensor):
        return Weight(data, "plain", data)
    high, wide = data.format.extents(2)
    powers = data.format.scale == F8E8M0
    if isinstance(data, Words) and data.format.element == F4E2M1:
        return Weight(
            data.codes, "e2m1", data.scales, 1, group_of(data.format), powers, data.row_scales,
            data.width,
        )  # fmt: skip
    scales = data.scales.view(torch.uint8) if powers else data.scales
    codes = data.codes.view(torch.float8_e4m3fn)
    if isinstance(data, Words):
        return Weight(codes, "ordered", scales, high, wide, powers, None, data.width)
    if data.format.element == F4E2M1:
        raise Unsupported(f"experts of {data.format} by bytes", advice=f"pack them as {WORDS}")
    return Weight(codes, "e4m3", scales, high, wide, powers)
