"""Launches of the product template: tiles, ways that a weight is stored, epilogues."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from metainfer.backends.kernel import Constraint, Effort, Query
from metainfer.backends.pace import product_sizes
from metainfer.backends.torch.call import TorchCall
from metainfer.backends.torch.codes import Codes
from metainfer.backends.torch.tensors import BlockTensors
from metainfer.backends.triton import words
from metainfer.backends.triton.emit.epilogue import emit_epilogue
from metainfer.backends.triton.emit.source import body_of
from metainfer.backends.triton.launch import Launch
from metainfer.backends.triton.pointwise import argument, sizes_of
from metainfer.backends.triton.words import Words
from metainfer.hardware.device import Device
from metainfer.ir.dtypes import F4E2M1, F8E4M3, F8E8M0, F32, Block, DType
from metainfer.ir.graph import Op

ALONE = 0.5  # of a processor's rate that a program reaches with nobody beside it
_WGMMA_ROWS = 64
_LEAST_BLOCK = 16  # numbers of a row: a matrix instruction takes so many
BAND = 8  # tiles of rows that neighbouring programs share columns over


@dataclass(frozen=True)
class Tile:
    """How a program cuts a product.

    Attributes:
        name: in the kernel's name.
        rows: of y, a program's.
        columns: of y, a program's.
        inner: of a step.
        num_warps: of a program.
        num_stages: buffers of the loop over steps.
        sharing: programs up to which tiles are shared, of products of few rows: about one for
            each processor of a large card, or two.
        head: columns of the weight that a program of such a product reads before it waits for the
            launch in front; of plain numbers, and of e4m3 codes under scales of whole steps.
        is_turned: whether rows of the weight are those of the matrix instruction.
    """

    name: str
    rows: int
    columns: int
    inner: int
    num_warps: int
    num_stages: int
    sharing: int = 128
    head: int = 0
    is_turned: bool = False

    def programs(self, rows: int, columns: int) -> int:
        """Programs of a product."""
        return -(-rows // self.rows) * -(-columns // self.columns)

    def effort(self, compute: float, parts: Callable[[int, int], int] | None = None) -> Effort:
        """Work of whole tiles over that of the product, more where processors are left idle.

        Args:
            compute: fraction of the rate that all processors together reach.
            parts: programs that share the sums of a tile, by tiles and inner size; None for one.
        """

        def factor(op: Op, device: Device, env: Mapping[str, int]) -> float:
            rows, columns, inner = product_sizes(op, env)
            tiles = self.programs(rows, columns)
            if tiles == 0 or device.num_sms == 0:
                return 1.0
            programs = tiles * (parts(tiles, inner) if parts else 1)
            whole = tiles * self.rows * self.columns / (rows * columns)
            return whole * max(1.0, crowding(programs, device, compute))

        return factor


def crowding(programs: int, device: Device, compute: float) -> float:
    """Time that programs take over what they would if all processors were busy to the end.

    Args:
        programs: of a launch.
        device: where.
        compute: fraction of the rate that all processors together reach; one that shares the last
            cache with few others reaches ALONE of its own.
    """
    waves = -(-programs // device.num_sms)
    return waves * device.num_sms / programs * compute / ALONE


@dataclass(frozen=True)
class Storage:
    """One way that weights are stored.

    Attributes:
        name: in the kernel's name.
        text: which formats those are, for explain.
        layout: packing of the weight, "" for none.
        holds: whether it is that of a weight's type, for activations of a type and a tile.
        parts: packed weight -> (step of weight_tiles, pointers, FORMAT).
        is_rounded: whether activations are fp8 codes, too; else they are of 16 bits.
    """

    name: str
    text: str
    layout: str
    holds: Callable[[DType, DType, Tile], bool]
    parts: Callable[[Any], tuple[str, tuple[torch.Tensor, ...], Any]]
    is_rounded: bool = False


@dataclass(frozen=True)
class Activations:
    """Activations as templates take them.

    Attributes:
        pointers: numbers, or codes and scales.
        group: numbers along K that share a scale; 0 for a whole row, -1 for plain numbers.
        matrix: operand type of the matrix instruction.
    """

    pointers: tuple[torch.Tensor, ...]
    group: int
    matrix: str


def activations_of(x: torch.Tensor | BlockTensors) -> Activations:
    """The activations of a call."""
    if isinstance(x, BlockTensors):
        return Activations((x.codes, x.scales), x.format.block[0], x.format.element.name)
    return Activations((x,), -1, "f16" if x.dtype == torch.float16 else "bf16")


def is_alike(x: Activations, format_: Any, columns: int) -> bool:
    """Whether scales of fp8 codes are few: blocks span the rows of the weight that a tile has."""
    return x.group >= 0 and format_[0] > 0 and format_[0] % columns == 0


def launches(storage: Storage, tile: Tile) -> Callable[[TorchCall], Sequence[Launch]]:
    """Launches of a group that begins with a linear, by one storage and tile."""

    def made(call: TorchCall) -> Sequence[Launch]:
        # Imported where it is launched: templates need Triton.
        from metainfer.backends.triton.templates import weight_tiles
        from metainfer.backends.triton.templates.gemm import gemm

        x, y = call.inputs[0], call.outputs[0]
        inner, columns = x.shape[-1], y.shape[-1]
        rows = math.prod(y.shape[:-1])
        if rows * columns == 0:
            return ()
        graph = body_of(call.op)
        epilogue = emit_epilogue(graph)
        env = sizes_of(graph, call)
        operands = tuple(argument(p, call, (), (), env) for p in epilogue.parameters)
        step, pointers, format_ = storage.parts(call.inputs[1])
        given = activations_of(x)
        return (
            Launch(
                gemm,
                (tile.programs(rows, columns),),
                {
                    "x": given.pointers, "y": y, "weight": pointers,
                    # An empty tuple has no type that Triton could give it.
                    "operands": operands or (y,),
                    "rows": rows, "columns": columns, "inner": inner,
                },
                {
                    "step": getattr(weight_tiles, step), "epilogue": epilogue.function(),
                    "FORMAT": format_, "GROUP": given.group, "BM": tile.rows, "BN": tile.columns,
                    "BK": tile.inner, "BAND": BAND, "TURNED": tile.is_turned,
                    "ALIKE": is_alike(given, format_, tile.columns),
                },
                num_warps=tile.num_warps,
                num_stages=tile.num_stages,
                matrix=given.matrix,
            ),
        )  # fmt: skip

    return made


def follows() -> Constraint:
    """The group is a product and what an epilogue can do."""

    def check(query: Query) -> str | None:
        # What it cannot do is raised, and read from there as the reason.
        emit_epilogue(body_of(query.op))
        return None

    return Constraint("a product and what an epilogue can do", check)


def stored_as(storage: Storage, tile: Tile) -> Constraint:
    """The weight is stored in a way, and its groups suit the tile."""

    def check(query: Query) -> str | None:
        x, weight = query.dtype(0), query.dtype(1)
        if not (is_rounded(x) if storage.is_rounded else x.name in ("bf16", "f16")):
            return f"activations of {x}"
        return None if storage.holds(weight, x, tile) else str(weight)

    return Constraint(f"operand 1 is {storage.text}", check)


def takes_rows(tile: Tile) -> Constraint:
    """The matrix units multiply fp8 codes by as few rows as a tile has, of the weight where turned.

    Those of wgmma and tcgen05 do by 64 and more; by fewer Triton widens codes to f16 and multiplies
    those.
    """

    def check(query: Query) -> str | None:
        wide = query.device.has("wgmma") or query.device.has("tcgen05")
        few = (tile.columns if tile.is_turned else tile.rows) < _WGMMA_ROWS and wide
        return f"{_WGMMA_ROWS} at least" if few else None

    return Constraint(f"matrix units that take {tile.rows} rows of fp8 codes", check)


def is_rounded(x: DType) -> bool:
    """Whether activations are such codes as the templates multiply."""
    return (
        isinstance(x, Block)
        and x.element == F8E4M3
        and x.scale == F32
        and x.is_single
        and len(x.block) == 1
    )


# --- ways of storing ------------------------------------------------------------------------------


def _bytes(part: torch.Tensor) -> torch.Tensor:
    """Powers of two as their bytes: Triton has no type for them."""
    return part.view(torch.uint8) if part.dtype == torch.float8_e8m0fnu else part


def _plain_parts(weight: torch.Tensor) -> tuple[str, tuple[torch.Tensor, ...], Any]:
    return "plain_step", (weight,), ()


def _codes_hold(weight: DType, x: DType, tile: Tile) -> bool:
    """e4m3 codes that are exact in 16 bits, by scales of whole steps or by narrow ones."""
    if not isinstance(weight, Block) or not weight.is_single or weight.element != F8E4M3:
        return False
    if tile.head:
        return words.is_moved(weight)
    high, wide = weight.extents(2)
    if wide == 0 or wide % tile.inner == 0:
        return True
    narrow = weight.scale.name in ("f8e8m0", "f8e4m3")
    return narrow and high == 1 and tile.inner % wide == 0


def _blocks_hold(weight: DType, x: DType, tile: Tile) -> bool:
    """Blocks of some rows that are narrower than a step: 32 x 32."""
    if not isinstance(weight, Block) or weight.element != F8E4M3 or not weight.is_single:
        return False
    high, wide = weight.extents(2)
    narrow = wide > 0 and wide % _LEAST_BLOCK == 0 and wide < tile.inner
    return high > 1 and narrow and tile.inner % wide == 0


def _ordered_parts(weight: Words) -> tuple[str, tuple[torch.Tensor, ...], Any]:
    scales, blocks = _bytes(weight.scales), weight.format.extents(2)
    if words.is_moved(weight.format, weight.codes.ndim):
        return "moved_step", (weight.codes.view(torch.int32), scales), ("moved", *blocks)
    return "ordered_step", (weight.codes.view(torch.float8_e4m3fn), scales), blocks


def _words_hold(weight: DType, x: DType, tile: Tile) -> bool:
    fp4 = isinstance(weight, Block) and weight.element == F4E2M1
    return fp4 and words.takes(weight) and x.name == "bf16"


def _words_parts(weight: Words) -> tuple[str, tuple[torch.Tensor, ...], Any]:
    pointers: tuple[torch.Tensor, ...] = (weight.codes, weight.scales)
    if weight.row_scales is not None:
        pointers = (*pointers, weight.row_scales)
    format_ = weight.format
    return "words_step", pointers, ("lifted", words.group_of(format_), format_.scale == F8E8M0)


def _rounded_hold(weight: DType, x: DType, tile: Tile) -> bool:
    """Each step lies under one scale on either side: codes are multiplied as they are."""
    if not isinstance(weight, Block) or not weight.is_single or weight.element != F8E4M3:
        return False
    group = x.block[0] if isinstance(x, Block) else 0
    return weight.extents(2)[1] % tile.inner == 0 and group % tile.inner == 0


def _rounded_parts(weight: Codes) -> tuple[str, tuple[torch.Tensor, ...], Any]:
    codes = weight.codes.view(torch.float8_e4m3fn)
    return "rounded_step", (codes, _bytes(weight.scales)), weight.format.extents(2)


def _groups_hold(*elements: str) -> Callable[[DType, DType, Tile], bool]:
    def holds(weight: DType, x: DType, tile: Tile) -> bool:
        return (
            isinstance(weight, Block)
            and weight.element.name in elements
            and weight.row is None
            and len(weight.block) == 1
            and weight.block[0] > 1
            and 0 in (tile.inner % weight.block[0], weight.block[0] % tile.inner)
        )

    return holds


def _counted_parts(weight: Words) -> tuple[str, tuple[torch.Tensor, ...], Any]:
    pointers: tuple[torch.Tensor, ...] = (weight.codes, _bytes(weight.scales))
    if weight.offsets is not None:
        pointers = (*pointers, weight.offsets)
    leasts = {"i4": -8.0, "u4": 0.0}
    codes = weight.codes.view(torch.int8) if weight.format.element.name == "i8" else weight.codes
    format_ = (weight.format.block[0], leasts.get(weight.format.element.name))
    return "counted_step", (codes, *pointers[1:]), format_


STORAGES: Mapping[str, Storage] = {
    s.name: s
    for s in (
        Storage("plain", "of the activations' type", "", lambda w, x, _: w == x, _plain_parts),
        Storage("codes", "fp8 codes", words.NAME, _codes_hold, _ordered_parts),
        Storage("blocks", "fp8 codes in small blocks", words.NAME, _blocks_hold, _ordered_parts),
        Storage("fp4", "fp4 codes in groups", words.NAME, _words_hold, _words_parts),
        Storage(
            "fp8", "fp8 codes, of activations that are", "torch.codes", _rounded_hold,
            _rounded_parts, is_rounded=True,
        ),
        Storage(
            "int4", "4-bit integers in groups", words.NAME, _groups_hold("u4", "i4"),
            _counted_parts,
        ),
        Storage(
            "int8", "8-bit integers in groups", words.NAME, _groups_hold("i8", "u8"),
            _counted_parts,
        ),
    )
}  # fmt: skip


def _coded(many: Tile) -> tuple[Tile, ...]:
    return (
        Tile("m16", 16, 64, 128, 4, 4, is_turned=True),
        Tile("m64", 64, 128, 128, 8, 3, is_turned=True),
        many,
    )


# Rows of a step of decoding; of a few sequences, or a short prompt; of many tokens. Codes are
# widened in the registers of the first operand, so their tiles are turned; the largest are cut so
# that no card spills registers. Of twins of 128 rows the second, which widens codes twice, is for
# cards whose units want both operands in registers.
TILES: Mapping[str, tuple[Tile, ...]] = {
    "plain": (
        Tile("m16", 16, 32, 128, 4, 4),
        Tile("m64", 64, 64, 64, 4, 4),
        Tile("m128", 128, 128, 64, 8, 3),
    ),
    # Hopper multiplies fp8 by 64 rows and more only: a thin tile is for its few rows. The last one
    # is for scales of 64 numbers each: blocks of 128 that ranks cut in half.
    "fp8": (
        Tile("m16", 16, 64, 128, 4, 5, is_turned=True),
        Tile("thin", 64, 32, 128, 4, 4),
        Tile("m64", 64, 64, 128, 4, 3),
        Tile("m128", 128, 128, 128, 8, 3),
        Tile("half", 64, 64, 64, 4, 4),
    ),
    "codes": (
        *_coded(Tile("m128", 128, 64, 128, 4, 3, is_turned=True)),
        Tile("twin128", 128, 64, 128, 8, 3, is_turned=True),
    ),
    "blocks": _coded(Tile("m128", 128, 64, 128, 4, 3, is_turned=True)),
    "fp4": _coded(Tile("m128", 128, 128, 128, 8, 2, is_turned=True)),
    **dict.fromkeys(("int4", "int8"), _coded(Tile("m128", 128, 64, 128, 8, 3, is_turned=True))),
}


def _few16(inner: int, num_stages: int) -> Tile:
    return Tile("few16", 16, 64, inner, 4, num_stages, sharing=512)


_FEW64 = (
    Tile("few64", 64, 64, 128, 4, 3, sharing=256),
    Tile("wide64", 64, 128, 128, 8, 3, sharing=256),
)
# Few rows, the weight streamed: two programs on each processor, or one with more on its way. A head
# wants room for a third: the next launch's, which reads its own while these end. Codes take several
# programs: a step of one waits for memory, for its codes to be widened, and for their product.
SKINNY_TILES: Mapping[str, tuple[Tile, ...]] = {
    "plain": (
        Tile("few16", 16, 64, 128, 4, 5),
        Tile("deep16", 16, 64, 128, 4, 6),
        Tile("head16", 16, 64, 128, 4, 3, sharing=264, head=256),
        Tile("few64", 64, 64, 128, 4, 3),
        Tile("deep64", 64, 64, 128, 4, 5),
        Tile("wide64", 64, 128, 64, 4, 5),
    ),
    **dict.fromkeys(("blocks", "int4", "int8"), (_few16(128, 5), *_FEW64)),
    "codes": (
        _few16(128, 5),
        Tile("head16", 16, 64, 128, 4, 3, sharing=512, head=256),
        Tile("all16", 16, 64, 128, 4, 3, sharing=512, head=512),
        _FEW64[0],
        replace(_FEW64[0], name="head64", head=256),
    ),
    "fp4": (_few16(256, 3), *_FEW64),
    "fp8": (
        Tile("few16", 16, 64, 128, 4, 3, sharing=512, is_turned=True),
        Tile("few32", 32, 64, 128, 4, 3, sharing=512, is_turned=True),
    ),
}
# Of queries, keys and values that are normed: whole heads of 128.
_TURNED_CODES = (
    Tile("turn16", 16, 128, 128, 8, 4, sharing=512),
    Tile("turn64", 64, 128, 128, 8, 3, sharing=256),
)
TURNED_TILES: Mapping[str, tuple[Tile, ...]] = {
    "plain": (
        Tile("turn16", 16, 128, 64, 8, 4, sharing=264, head=128),
        Tile("turn64", 64, 128, 64, 4, 3, sharing=264),
    ),
    **dict.fromkeys(("codes", "blocks", "fp4", "int4", "int8"), _TURNED_CODES),
}
# Where gate and up are taken apart two tiles of sums are held: 128 columns of them spill registers.
_SPLIT = Tile("m128", 128, 64, 128, 8, 3)
GATED_TILES: Mapping[str, tuple[Tile, ...]] = {
    **TILES,
    "fp8": tuple(_SPLIT if tile.name == _SPLIT.name else tile for tile in TILES["fp8"]),
}
