"""The passes of compressed collectives as launches, for processes that interpret them."""

from unittest.mock import patch

import numpy as np
import torch

from metainfer.backends.ranks import wire_codes
from metainfer.backends.triton.interpreter import prepare


def passes(x: torch.Tensor, ranks: int, *, launched: bool) -> tuple[np.ndarray, ...]:
    """Bytes of a tensor's rows, those of their sum, and the rows' numbers again."""
    if launched:
        prepare(str(x.device.type))
    part = wire_codes.part_of(x.numel(), ranks)
    with patch.object(wire_codes, "is_launched", lambda _: launched):
        rows = wire_codes.encoded(x, ranks)
        total = wire_codes.summed(rows, part)
        out = torch.full_like(x, float("nan"))
        wire_codes.decode(rows, part, out)
    return rows.cpu().numpy(), total.cpu().numpy(), out.float().cpu().numpy()
