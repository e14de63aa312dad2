"""Numbers as codes and scales on the wire of a compressed collective: three passes over them.

Where Triton runs each pass is one launch that reads and writes once; elsewhere torch's operations
make the same bytes, those of sums up to a rounding.
"""

from typing import Any

import torch

from metainfer.backends.ranks.rounds import sum_parts
from metainfer.backends.torch.quantize import quantize
from metainfer.backends.triton.launch import Launch
from metainfer.ir.dtypes import FP8_GROUP

GROUP = FP8_GROUP.block[-1]
_GROUPS = 16  # of a program
_OLDEST = (8, 9)  # compute capability that converts e4m3


def part_of(count: int, ranks: int) -> int:
    """Numbers of a rank's part: whole groups."""
    return -(-count // ranks // GROUP) * GROUP


def row_bytes(part: int) -> int:
    """Bytes of a part: codes, then scales."""
    return part + 4 * (part // GROUP)


def encoded(x: torch.Tensor, ranks: int) -> torch.Tensor:
    """A flat tensor as one row of bytes for each rank, filled up with zeros.

    Shapes: x [count] -> u8 [ranks, bytes].
    """
    part = part_of(x.numel(), ranks)
    if is_launched(x):
        made = torch.empty(ranks, row_bytes(part), dtype=torch.uint8, device=x.device)
        launch_of("encode", made, part, x=x, count=x.numel()).run()
        return made
    whole = torch.nn.functional.pad(x, (0, part * ranks - x.numel()))
    return _rows_encoded(whole.view(ranks, part))


def summed(rows: torch.Tensor, part: int) -> torch.Tensor:
    """The sum of rows as a row. Shapes: u8 [ranks, bytes] -> u8 [1, bytes]."""
    if is_launched(rows):
        made = torch.empty(1, row_bytes(part), dtype=torch.uint8, device=rows.device)
        launch_of("add", rows, part, made=made).run()
        return made
    return _rows_encoded(sum_parts(tuple(_rows_decoded(rows, part)))[None])


def decode(rows: torch.Tensor, part: int, out: torch.Tensor) -> None:
    """Write the numbers of rows to a tensor. Shapes: u8 [ranks, bytes], out [count]."""
    if is_launched(rows):
        launch_of("decode", rows, part, out=out, count=out.numel()).run()
        return
    out.copy_(_rows_decoded(rows, part).view(-1)[: out.numel()])


def is_launched(x: torch.Tensor) -> bool:
    """Whether the passes are launches where a tensor is."""
    if x.device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(x.device) >= _OLDEST


def launch_of(function: str, rows: torch.Tensor, part: int, **given: Any) -> Launch:
    """The launch of a pass over rows of bytes.

    Args:
        function: of `backends.triton.templates.wire_codes`.
        rows: read, or written by ``encode``.
        part: numbers of a row.
        given: the function's other tensors, and ``count`` of numbers that there are.
    """
    # Imported where it is launched: templates need Triton.
    from metainfer.backends.triton.templates import wire_codes

    constants = {"GROUP": GROUP, "GROUPS": _GROUPS}
    arguments = {"codes": _codes(rows), "scales": _scales(rows), "part": part, **given}
    across = -(-part // GROUP // _GROUPS)
    if function == "add":
        made = arguments.pop("made")
        arguments |= {"sum_codes": _codes(made), "sum_scales": _scales(made)}
        return Launch(wire_codes.add, (across,), arguments, {**constants, "ROWS": len(rows)})
    return Launch(getattr(wire_codes, function), (across, len(rows)), arguments, constants)


def _codes(rows: torch.Tensor) -> torch.Tensor:
    return rows.view(torch.float8_e4m3fn)


def _scales(rows: torch.Tensor) -> torch.Tensor:
    return rows.view(torch.float32)


def _rows_encoded(x: torch.Tensor) -> torch.Tensor:
    codes, scales = quantize(x.float(), FP8_GROUP)
    return torch.cat((codes.view(torch.uint8), scales.view(torch.uint8)), dim=1)


def _rows_decoded(rows: torch.Tensor, part: int) -> torch.Tensor:
    codes = rows[:, :part].view(torch.float8_e4m3fn).float()
    scales = rows[:, part:].contiguous().view(torch.float32)
    return (codes.view(*scales.shape, -1) * scales[..., None]).view(-1, part)
