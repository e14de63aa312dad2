"""Which tensors of a safetensors checkpoint are the codes and the scales of one weight.

Read from names, types and shapes of the headers; config.json beside the file says the block where
a shape leaves it open, and whether a missing scale is a fault::

    w.weight F8_E4M3 [N,K]     w.weight_scale_inv [N/128,K/128], F32 or F8_E8M0   DeepSeek, Qwen
    w.weight F8_E4M3 [N,K]     w.scale                           the same         DeepSeek V4
    w.weight F8_E4M3 [N,K]     w.weight_scale [], [1], [N], [N,1] or by blocks    compressed-tensors
    w_blocks U8 [...,G,16]     w_scales U8 [...,G]               MXFP4            gpt-oss
    w.weight U8 [N,K/2]        w.weight_scale U8 [N,K/32]        MXFP4
    w.weight_packed U8         w.weight_scale                    MXFP4            compressed-tensors
    w.weight U8 [N,K/2]        w.weight_scale F8_E4M3 [N,K/16]   NVFP4            modelopt
                               * w.weight_scale_2 F32 []
    w.weight_packed U8         w.weight_scale F8_E4M3 [N,K/16]   NVFP4            compressed-tensors
                               / w.weight_global_scale F32 [1]

Two codes of a byte: the first in the low half. Static scales of activations (``input_scale``)
belong to the weight and are left out: activations are rounded by their own values, or not at all.

Source: config.json and headers of the published checkpoints; transformers' integrations fp8, mxfp4.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from metainfer.ir.dtypes import F8E4M3, F8E8M0, F32, I8, MXFP4, NVFP4, U8, Block, Scalar
from metainfer.ir.errors import CheckpointError
from metainfer.runtime.checkpoint.interface import AGAIN, TensorInfo

_GPT_OSS_BYTES = 16
_GROUP = 32
_FP8_SCALES = ("{name}_scale_inv", "{name}_scale", "{stem}.scale")
_MXFP4_SCALES = ("{stem}.weight_scale", "{stem}.scale")
_STATIC = ("{stem}.input_scale", "{name}_input_scale", "{stem}.input_global_scale")
# Second scales of NVFP4: one multiplies, the other divides.
_FACTOR, _DIVISOR = "{stem}.weight_scale_2", "{stem}.weight_global_scale"
# Extents that published checkpoints use, in the order in which a shape is tried by them.
_BLOCKS = ((128, 128), (128,), (64, 64), (32, 32), (64,), (32,))
_SCALED_METHODS = ("fp8", "fbgemm_fp8", "compressed-tensors", "modelopt", "mxfp4")


@dataclass(frozen=True)
class Settings:
    """What config.json says of the checkpoint's quantization.

    Attributes:
        method: quant_method, "" without one.
        block: weight_block_size, () without one.
    """

    method: str = ""
    block: tuple[int, ...] = ()


@dataclass(frozen=True)
class ScaledWeight:
    """Tensors of the file that are one weight.

    Attributes:
        name: of the weight.
        shape: of the weight.
        format: its block format.
        codes: name of the tensor of codes, bytes of two where ``is_packed``.
        scales: name of the tensor of scales.
        unused: names of tensors that belong to it and that nothing reads.
        is_packed: whether a byte holds two codes.
        second: name of the tensor of second scales, "" without.
        divides: whether those divide.
    """

    name: str
    shape: tuple[int, ...]
    format: Block
    codes: str
    scales: str
    unused: tuple[str, ...] = ()
    is_packed: bool = False
    second: str = ""
    divides: bool = False


def read_settings(folder: Path) -> Settings:
    """What the config.json of a folder says; nothing if there is none.

    Raises: CheckpointError if it cannot be read, or weight_block_size is no list of sizes.
    """
    path = folder / "config.json"
    if not path.is_file():
        return Settings()
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"cannot read the config of the checkpoint: {error}", origin=str(path), advice=AGAIN
        ) from error
    found = content.get("quantization_config") if isinstance(content, dict) else None
    if not isinstance(found, dict):
        return Settings()
    block = found.get("weight_block_size") or ()
    if not isinstance(block, list | tuple) or not all(isinstance(n, int) and n > 0 for n in block):
        raise CheckpointError(
            f"weight_block_size is {block!r}, not a list of sizes", origin=str(path), advice=AGAIN
        )
    return Settings(str(found.get("quant_method", "")), tuple(block))


def scaled_weights(
    tensors: Mapping[str, TensorInfo], settings: Settings, origin: str
) -> tuple[ScaledWeight, ...]:
    """Every weight that is made of codes and scales.

    Raises: CheckpointError naming a scale that is missing or does not fit its codes.
    """
    found: list[ScaledWeight] = []
    lonely: list[TensorInfo] = []
    for info in tensors.values():
        weight = (
            _mxfp4_blocks(info, tensors, origin)
            or _nvfp4(info, tensors, origin)
            or _mxfp4_packed(info, tensors, origin)
        )
        if weight is None and info.dtype is F8E4M3 and len(info.shape) >= 2:
            weight = _fp8(info, tensors, settings, origin)
            if weight is None:
                lonely.append(info)
        if weight is not None:
            found.append(weight)
    has_fp8 = any(w.format.element is F8E4M3 for w in found)
    scales = {w.scales for w in found}
    lonely = [info for info in lonely if info.name not in scales]
    if lonely and (has_fp8 or settings.method in _SCALED_METHODS):
        raise _missing(lonely[0].name, _named(_FP8_SCALES, lonely[0].name), origin)
    return tuple(found)


def _named(patterns: tuple[str, ...], name: str) -> tuple[str, ...]:
    stem, _, last = name.rpartition(".")
    stem = stem if last in ("weight", "weight_packed") else name
    return tuple(p.format(name=name, stem=stem) for p in patterns)


def _missing(codes: str, scales: tuple[str, ...], origin: str) -> CheckpointError:
    return CheckpointError(
        f"tensor {codes!r} holds codes, and its scales {scales[0]!r} are missing",
        origin=origin,
        advice=f"download the checkpoint again; looked for {', '.join(scales)}",
    )


def _unused(name: str, tensors: Mapping[str, TensorInfo]) -> tuple[str, ...]:
    return tuple(n for n in _named(_STATIC, name) if n in tensors)


# --- fp8 ----------------------------------------------------------------------------------------


def _fp8(
    info: TensorInfo, tensors: Mapping[str, TensorInfo], settings: Settings, origin: str
) -> ScaledWeight | None:
    scales = next((tensors[n] for n in _named(_FP8_SCALES, info.name) if n in tensors), None)
    if scales is None:
        return None
    type_ = _scale_type(scales, origin)
    extents = next(_extents(info.shape, scales.shape, settings), None)
    if extents is None:
        raise CheckpointError(
            f"scales {scales.name!r} of shape {list(scales.shape)} do not fit the codes "
            f"{info.name!r} of shape {list(info.shape)}",
            origin=origin,
            advice="wanted one for the tensor, one a row, or one a block; config.json names the "
            "block in quantization_config.weight_block_size",
        )
    format_ = Block(F8E4M3, extents, type_)
    unused = _unused(info.name, tensors)
    return ScaledWeight(info.name, info.shape, format_, info.name, scales.name, unused)


def _scale_type(scales: TensorInfo, origin: str) -> Scalar:
    """The type of scales; bytes are exponents."""
    if scales.dtype in (U8, F8E8M0):
        return F8E8M0
    if isinstance(scales.dtype, Scalar) and scales.dtype.is_float and scales.dtype.bits >= 16:
        return scales.dtype
    raise CheckpointError(
        f"scales {scales.name!r} are {scales.dtype}, wanted floats or 8-bit exponents",
        origin=origin,
        advice="take the checkpoint in FP8, MXFP4, NVFP4 or bf16",
    )


def _extents(
    shape: tuple[int, ...], scales: tuple[int, ...], settings: Settings
) -> Iterator[tuple[int, ...]]:
    """Blocks that make scales of this shape, the likeliest first."""

    def fits(block: tuple[int, ...]) -> bool:
        if not 0 < len(block) <= len(shape):
            return False
        return Block(F8E4M3, block, F8E8M0).scale_shape(shape) == scales

    if fits(settings.block):
        yield settings.block
    lead = shape[:-2]
    if scales in ((), (1,), lead, (*lead, 1, 1)):
        yield (0, 0)
    if scales in (shape[:-1], (*shape[:-1], 1)):
        yield (0,)
    yield from (block for block in _BLOCKS if fits(block))


# --- mxfp4 --------------------------------------------------------------------------------------


def _mxfp4_blocks(
    info: TensorInfo, tensors: Mapping[str, TensorInfo], origin: str
) -> ScaledWeight | None:
    """gpt-oss: blocks of 16 bytes in a dim of their own."""
    if not info.name.endswith("_blocks") or info.dtype is not U8 or len(info.shape) < 2:
        return None
    if info.shape[-1] != _GPT_OSS_BYTES:
        return None
    name = info.name.removesuffix("_blocks")
    scales = tensors.get(f"{name}_scales")
    if scales is None:
        raise _missing(info.name, (f"{name}_scales",), origin)
    shape = (*info.shape[:-2], info.shape[-2] * _GROUP)
    return _mxfp4(name, shape, info, scales, (), origin)


def _mxfp4_packed(
    info: TensorInfo, tensors: Mapping[str, TensorInfo], origin: str
) -> ScaledWeight | None:
    """Bytes of two codes in the weight's own dims."""
    is_named_packed = info.name.endswith(".weight_packed")
    if info.dtype not in (U8, I8) or len(info.shape) < 2:
        return None
    if not is_named_packed and not info.name.endswith(".weight"):
        return None
    names = _named(_MXFP4_SCALES, info.name)
    scales = next((tensors[n] for n in names if n in tensors), None)
    if scales is None:
        if is_named_packed:
            raise _missing(info.name, names, origin)
        return None
    if info.dtype is I8 and scales.dtype not in (U8, F8E8M0):
        # Bytes that are 8-bit integers, with scales of their own kind.
        return None
    name = info.name.removesuffix("_packed")
    shape = (*info.shape[:-1], info.shape[-1] * 2)
    return _mxfp4(name, shape, info, scales, _unused(info.name, tensors), origin)


def _nvfp4(info: TensorInfo, tensors: Mapping[str, TensorInfo], origin: str) -> ScaledWeight | None:
    """Bytes of two codes, scales of e4m3 for 16 codes, and one more for the tensor."""
    if info.dtype not in (U8, I8) or len(info.shape) < 2:
        return None
    (name,) = _named(("{stem}.weight_scale",), info.name)
    scales = tensors.get(name)
    if scales is None or scales.dtype is not F8E4M3:
        return None
    factor, divisor = _named((_FACTOR, _DIVISOR), info.name)
    second = tensors.get(factor) or tensors.get(divisor)
    if second is None:
        raise _missing(info.name, (factor, divisor), origin)
    shape, group = (*info.shape[:-1], info.shape[-1] * 2), NVFP4.block[0]
    fits = shape[-1] % group == 0 and scales.shape == (*shape[:-1], shape[-1] // group)
    if not fits or second.dtype is not F32 or second.shape not in ((), (1,)):
        raise CheckpointError(
            f"scales {scales.name!r} of shape {list(scales.shape)} and {second.name!r} of "
            f"{second.dtype}{list(second.shape)} do not fit the codes {info.name!r}: "
            f"{list(shape)} numbers in groups of {group}",
            origin=origin,
            advice=AGAIN,
        )
    return ScaledWeight(
        info.name.removesuffix("_packed"), shape, NVFP4, info.name, scales.name,
        _unused(info.name, tensors), is_packed=True, second=second.name,
        divides=second.name == divisor,
    )  # fmt: skip


def _mxfp4(
    name: str,
    shape: tuple[int, ...],
    codes: TensorInfo,
    scales: TensorInfo,
    unused: tuple[str, ...],
    origin: str,
) -> ScaledWeight:
    if _scale_type(scales, origin) is not F8E8M0:
        raise CheckpointError(
            f"scales {scales.name!r} of 4-bit codes are {scales.dtype}, wanted 8-bit exponents",
            origin=origin,
            advice="of 4-bit checkpoints MXFP4 and NVFP4 are read: take one of these, FP8 or bf16",
        )
    if shape[-1] % _GROUP or scales.shape != (*shape[:-1], shape[-1] // _GROUP):
        raise CheckpointError(
            f"scales {scales.name!r} of shape {list(scales.shape)} do not fit the codes "
            f"{codes.name!r}: {list(shape)} numbers in groups of {_GROUP}",
            origin=origin,
            advice=AGAIN,
        )
    return ScaledWeight(name, shape, MXFP4, codes.name, scales.name, unused, is_packed=True)
