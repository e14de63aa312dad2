"""Activations rounded to float codes, a scale per row or group: torch's twin of `ir.dtypes`.

Bit for bit what `ir.dtypes.quantize` makes, so that fused and unfused paths, references and kernels
read the same codes.
"""

import math

import torch

from metainfer.ir.dtypes import F4E2M1, F8E4M3, F8E8M0, F32, Block
from metainfer.ir.errors import Unsupported

# Largest code, and half the distance of the codes there.
_TOP = {"f8e4m3": (448.0, 16.0), "f4e2m1": (6.0, 1.0)}
# Midpoints of neighbouring e2m1 magnitudes; whether a tie goes up, to the even code.
_E2M1_MIDDLES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_E2M1_TIES_UP = (False, True, False, True, False, True, False)


def takes(format: Block, width: int) -> bool:
    """Whether `quantize` rounds rows of a width to a format."""
    return (
        len(format.block) == 1
        and format.element in (F8E4M3, F4E2M1)
        and format.scale in (F32, F8E8M0)
        and format.is_single
        and width % (format.block[0] or width) == 0
    )


def quantize(x: torch.Tensor, format: Block) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of activations, rounded within their last dim.

    Args:
        x: floats, finite.
        format: e4m3 or e2m1 codes; blocks of one row or of a part of it; f32 or f8e8m0 scales.

    Shapes: x [..., K] -> codes [..., K] (e4m3, or u8 codes of e2m1), scales
        [..., K/block] f32 or f8e8m0.
    Raises: Unsupported for another format, or a K that cuts blocks.
    """
    width = x.shape[-1]
    extent = format.block[-1] or width
    if not takes(format, width):
        raise Unsupported(
            f"rounding of rows of {width} to {format}",
            advice="activations take e4m3 or e2m1 codes in whole blocks of a row",
        )
    blocks = x.reshape(*x.shape[:-1], width // extent, extent)
    # The infinity norm is the largest magnitude, in one pass.
    most = torch.linalg.vector_norm(blocks, math.inf, dim=-1, dtype=torch.float32)
    scales = _power_scales(most, format) if format.scale is F8E8M0 else _scales(most, format)
    wide = scales.float()
    # Blocks of zeros have scale 0 in f32. The quotient is f32, whatever is divided, and within
    # half a step of the largest code: nothing is to be clipped.
    ratio = (blocks / torch.where(wide > 0, wide, 1.0)[..., None]).reshape(x.shape)
    if format.element is F8E4M3:
        return ratio.to(torch.float8_e4m3fn), scales
    return _e2m1(ratio), scales


def _divided(x: torch.Tensor, by: float) -> torch.Tensor:
    # NOTE: CUDA multiplies by the reciprocal of a number that is no tensor: another last bit.
    return x / torch.full_like(x, by)


def _scales(most: torch.Tensor, format: Block) -> torch.Tensor:
    """The nearest scale, or the next one where the largest value would be cut by half a step."""
    top, half = _TOP[format.element.name]
    nearest = _divided(most, top)
    up = torch.nextafter(nearest, torch.full_like(nearest, math.inf))
    return torch.where(most > nearest * (top + half), up, nearest)


def _power_scales(most: torch.Tensor, format: Block) -> torch.Tensor:
    """The least power of two at which nothing saturates."""
    wanted = _divided(most, _TOP[format.element.name][0])
    mantissa, exponent = torch.frexp(wanted)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(-127, 127)
    exponent = torch.where((wanted == 0) & (most > 0), -127, exponent)
    # Zeros keep scale 1: frexp gives them exponent 0.
    return (exponent + 127).to(torch.uint8).view(torch.float8_e8m0fnu)


def _e2m1(ratio: torch.Tensor) -> torch.Tensor:
    magnitude = ratio.abs()
    codes = torch.zeros_like(ratio, dtype=torch.uint8)
    for middle, ties_up in zip(_E2M1_MIDDLES, _E2M1_TIES_UP, strict=True):
        codes += (magnitude >= middle) if ties_up else (magnitude > middle)
    return codes | (torch.signbit(ratio).to(torch.uint8) << 3)
