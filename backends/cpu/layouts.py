"""Weight layouts of the CPU kernels: pack, its exact inverse, and sizes.

Weights [N, K] are cut into panels of 16 rows (``_n16``), so that one vector holds an element of
each row and a product needs no sum across lanes. ``_n1`` is the row-major form of a block format
(tables of embeddings)::

    cpu.f32_n16     [ceil(N/16), K, 16] f32
    cpu.f16_n16     [ceil(N/16), K, 16] f16
    cpu.bf16_n16    [ceil(N/16), ceil(K/2), 16, 2] bf16
    cpu.i8g32_n16   per panel and block of 32 along K: scales, 8-bit codes        (GGUF Q8_0)
    cpu.u4g32_n16   per panel and block: scales, offsets, 4-bit codes             (GGUF Q4_1)
    cpu.i4g32_n16   per panel and block: scales, 4-bit codes stored plus 8        (GGUF Q4_0)

Stacked weights [E, N, K] are the blobs of their matrices, one behind the other.

formats.h says where a code lies. Rows are padded to whole panels and K to whole blocks (pairs for
bf16) with zeros; kernels know N and K and neither read activations nor write results beyond them.
"""

import re
from dataclasses import dataclass

import numpy as np

from metainfer.ir.dtypes import BF16, F16, F32, Block, BlockArray, DType, Scalar, parse_dtype
from metainfer.ir.errors import TypeMismatch

_GROUP = 32
_ALIGNMENT = 64
_NAME = re.compile(r"cpu\.(?P<kind>f32|f16|bf16|i8g32|u4g32|i4g32)(?P<wide>_s32)?_n(?P<rows>1|16)")

_PLAIN: dict[str, Scalar] = {"f32": F32, "f16": F16, "bf16": BF16}
# Block format of each layout by kind and whether scales are f32.
_FORMATS: dict[tuple[str, bool], str] = {
    ("i8g32", False): "i8/32:f16",
    ("i8g32", True): "i8/32:f32",
    ("u4g32", False): "u4/32:f16+f16",
    ("i4g32", False): "i4/32:f16",
    ("u4g32", True): "u4/32:f32+f32",
}
LAYOUTS: tuple[str, ...] = (
    "cpu.f32_n16",
    "cpu.f16_n16",
    "cpu.bf16_n16",
    *(f"cpu.{kind}{'_s32' if wide else ''}_n{rows}" for kind, wide in _FORMATS for rows in (1, 16)),
)


@dataclass(frozen=True)
class Layout:
    """A layout, taken apart.

    Attributes:
        name: text form.
        dtype: element type or block format of the weights it holds.
        rows: rows of a panel.
    """

    name: str
    dtype: DType
    rows: int


def parse_layout(name: str) -> Layout:
    """Look a layout up by name.

    Raises: TypeMismatch if there is none of that name.
    """
    match = _NAME.fullmatch(name)
    if match is None or name not in LAYOUTS:
        raise TypeMismatch(f"unknown CPU layout {name!r}", advice=f"known: {', '.join(LAYOUTS)}")
    rows = int(match["rows"])
    if match["kind"] in _PLAIN:
        return Layout(name, _PLAIN[match["kind"]], rows)
    return Layout(name, parse_dtype(_FORMATS[match["kind"], match["wide"] is not None]), rows)


def layout_for(dtype: DType, rows: int = 16) -> str:
    """Name the layout that holds weights of a type without loss.

    Raises: TypeMismatch if there is none.
    """
    for name in LAYOUTS:
        layout = parse_layout(name)
        if layout.dtype == dtype and layout.rows == rows:
            return name
    known = ", ".join(sorted({str(parse_layout(name).dtype) for name in LAYOUTS}))
    raise TypeMismatch(f"no CPU layout for weights of {dtype}", advice=f"there is one for: {known}")


def layout_bytes(layout: str, shape: tuple[int, ...]) -> int:
    """Return the bytes of a blob of weights [N, K] or [E, N, K]."""
    if len(shape) == 3:
        return shape[0] * layout_bytes(layout, shape[1:])
    spec = parse_layout(layout)
    panels = -(-shape[0] // spec.rows)
    if isinstance(spec.dtype, Scalar):
        step = 2 if spec.dtype == BF16 else 1
        return panels * -(-shape[1] // step) * step * spec.rows * spec.dtype.bits // 8
    return panels * -(-shape[1] // _GROUP) * _block_bytes(spec)


def pack(layout: str, weight: np.ndarray | BlockArray) -> np.ndarray:
    """Lay weights [N, K] out for the kernels.

    Shapes: weight [N, K] or [E, N, K] -> u8 [layout_bytes], 64-byte aligned.
    Raises: TypeMismatch if the weights are not of the layout's type, or neither matrix nor stack.
    """
    shape = tuple(weight.shape)
    if len(shape) not in (2, 3):
        raise TypeMismatch(f"{layout} holds matrices, the weight has shape {shape}")
    blob = aligned_bytes(layout_bytes(layout, shape))
    if len(shape) == 2:
        _pack_matrix(layout, weight, blob)
        return blob
    for part, index in zip(blob.reshape(shape[0], -1), range(shape[0]), strict=True):
        _pack_matrix(layout, _part(weight, index), part)
    return blob


def _part(weight: np.ndarray | BlockArray, index: int) -> np.ndarray | BlockArray:
    """One matrix of a stack."""
    if not isinstance(weight, BlockArray):
        return np.asarray(weight[index])
    return weight.by_rows(lambda a: a[index])


def _pack_matrix(layout: str, weight: np.ndarray | BlockArray, blob: np.ndarray) -> None:
    spec = parse_layout(layout)
    if isinstance(weight, BlockArray):
        _check_dtype(spec, weight.format)
        _pack_blocks(spec, weight, blob)
        return
    if not isinstance(spec.dtype, Scalar) or weight.dtype != spec.dtype.numpy:
        raise TypeMismatch(f"{layout} holds {spec.dtype}, the weight is {weight.dtype}")
    step = 2 if spec.dtype == BF16 else 1
    padded = _padded(weight, spec.rows, step).view(_bits_of(spec.dtype))
    panels = padded.reshape(-1, spec.rows, padded.shape[1] // step, step)
    out = blob.view(padded.dtype).reshape(panels.shape[0], panels.shape[2], spec.rows, step)
    np.copyto(out, panels.transpose(0, 2, 1, 3))


def unpack(layout: str, blob: np.ndarray, shape: tuple[int, ...]) -> np.ndarray | BlockArray:
    """Invert ``pack`` exactly.

    Shapes: blob u8 [layout_bytes] -> [N, K] or [E, N, K] of the layout's type.
    Raises: TypeMismatch if the blob's size is not the layout's.
    """
    spec = parse_layout(layout)
    if blob.nbytes != layout_bytes(layout, shape):
        raise TypeMismatch(
            f"{layout} of {shape} has {layout_bytes(layout, shape)} bytes, the blob {blob.nbytes}"
        )
    if len(shape) == 3:
        return _stacked([unpack(layout, b, shape[1:]) for b in blob.reshape(shape[0], -1)])
    n, k = shape
    if isinstance(spec.dtype, Block):
        return _unpack_blocks(spec, blob, (n, k))
    step = 2 if spec.dtype == BF16 else 1
    panels = blob.view(_bits_of(spec.dtype)).reshape(
        -(-n // spec.rows), -(-k // step), spec.rows, step
    )
    flat = panels.transpose(0, 2, 1, 3).reshape(-(-n // spec.rows) * spec.rows, -1)
    return np.ascontiguousarray(flat[:n, :k]).view(spec.dtype.numpy)


def _stacked(parts: list[np.ndarray | BlockArray]) -> np.ndarray | BlockArray:
    blocks = [p for p in parts if isinstance(p, BlockArray)]
    if not blocks:
        return np.stack([np.asarray(p) for p in parts])
    return BlockArray.joined(blocks, np.stack)


def aligned_bytes(count: int) -> np.ndarray:
    """Allocate bytes that begin on a cache line. Shapes: -> u8 [count]."""
    memory = np.empty(count + _ALIGNMENT, dtype=np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + count]


def _bits_of(dtype: Scalar) -> np.dtype:
    """Unsigned integers of the same width: copies then move bits, NaN payloads included."""
    return np.dtype(f"u{dtype.bits // 8}")


def _check_dtype(spec: Layout, given: Block) -> None:
    if spec.dtype != given:
        raise TypeMismatch(
            f"{spec.name} holds {spec.dtype}, the weight is {given}",
            advice="convert the weight, or take layout_for(weight.format)",
        )


def _padded(array: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Fill up with zeros to whole multiples."""
    pads = [(0, -array.shape[0] % rows), (0, -array.shape[1] % columns)]
    if not any(after for _, after in pads):
        return np.ascontiguousarray(array)
    return np.pad(array, pads)


def _side_bytes(block: Block, rows: int) -> int:
    return rows * block.scale.bits // 8


def _code_bytes(block: Block, rows: int) -> int:
    return rows * _GROUP * block.element.bits // 8


def _block_bytes(spec: Layout) -> int:
    block = spec.dtype
    assert isinstance(block, Block)
    sides = 2 if block.offset else 1
    return sides * _side_bytes(block, spec.rows) + _code_bytes(block, spec.rows)


def _sections(spec: Layout, blob: np.ndarray, groups: int) -> list[np.ndarray]:
    """View scales, (offsets,) codes of every block. Shapes: each [panels, groups, bytes]."""
    block = spec.dtype
    assert isinstance(block, Block)
    side = _side_bytes(block, spec.rows)
    ends = [side, 2 * side] if block.offset else [side]
    blocks = blob.reshape(-1, groups, _block_bytes(spec))
    return np.split(blocks, ends, axis=2)


def _pack_blocks(spec: Layout, weight: BlockArray, blob: np.ndarray) -> None:
    block = weight.format
    groups, rows = -(-weight.shape[1] // _GROUP), spec.rows
    sections = _sections(spec, blob, groups)
    sides = [weight.scales] if weight.offsets is None else [weight.scales, weight.offsets]
    for section, values in zip(sections[:-1], sides, strict=True):
        bits = _padded(values, rows, 1).reshape(-1, rows, groups).view(_bits_of(block.scale))
        section.view(bits.dtype)[:] = bits.transpose(0, 2, 1)
    codes = _padded(weight.codes, rows, _GROUP)
    if block.element.kind == "int" and block.element.bits == 4:
        codes = codes + np.int8(8)
    codes = codes.view(np.uint8).reshape(-1, rows, groups, _GROUP)
    if block.element.bits == 4:
        codes = codes[..., : _GROUP // 2] | (codes[..., _GROUP // 2 :] << 4)
    # [panel, row, group, chunk, 4] -> [panel, group, chunk, row, 4], four bytes moved as one.
    fours = np.ascontiguousarray(codes).view(np.uint32)
    sections[-1].view(np.uint32).reshape(-1, groups, fours.shape[3], rows)[:] = fours.transpose(
        0, 2, 3, 1
    )


def _unpack_blocks(spec: Layout, blob: np.ndarray, shape: tuple[int, int]) -> BlockArray:
    block = spec.dtype
    assert isinstance(block, Block)
    n, k = shape
    groups, rows = -(-k // _GROUP), spec.rows
    sections = _sections(spec, blob, groups)
    sides = [
        np.ascontiguousarray(section)
        .view(block.scale.numpy)
        .transpose(0, 2, 1)
        .reshape(-1, groups)[:n]
        for section in sections[:-1]
    ]
    fours = (
        np.ascontiguousarray(sections[-1])
        .view(np.uint32)
        .reshape(len(sections[-1]), groups, -1, rows)
    )
    codes = np.ascontiguousarray(fours.transpose(0, 3, 1, 2)).view(np.uint8)
    if block.element.bits == 4:
        codes = np.concatenate([codes & 15, codes >> 4], axis=-1)
    flat = codes.reshape(-1, groups * _GROUP)[:n, :k]
    if block.element.bits == 4 and block.element.kind == "int":
        flat = flat - np.uint8(8)
    values = np.ascontiguousarray(flat).view(block.element.numpy)
    scales = np.ascontiguousarray(sides[0])
    offsets = np.ascontiguousarray(sides[1]) if block.offset else None
    return BlockArray(block, values, scales, offsets)
