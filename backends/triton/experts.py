"""Launches of the experts' products: which tiles, which grid, for which sizes.

Shape letters: T tokens, K experts of a token, P = T * K pairs, E experts, D width, F inner width.
Few pairs go tile by pair, unsorted; more are sorted by expert on the device first. The number of
tiles of each expert never comes to the host.
"""

from dataclasses import dataclass, replace
from math import gcd
from typing import Any

import torch

from metainfer.backends.torch.call import TorchCall
from metainfer.backends.torch.tensors import BlockTensors
from metainfer.backends.triton.attention import power_above, sms_of
from metainfer.backends.triton.emit.epilogue import emit_epilogue, emit_row_epilogue
from metainfer.backends.triton.emit.source import body_of
from metainfer.backends.triton.experts_weight import Weight, weight_of
from metainfer.backends.triton.launch import Launch
from metainfer.backends.triton.pointwise import argument, sizes_of, strided_of
from metainfer.backends.triton.scratch import Piece, carve, scratch_bytes
from metainfer.ir.errors import Unsupported

DIRECT_PAIRS = 16  # up to so many, each pair is a tile of its own and nothing is sorted
EXACT_PAIRS = 1024  # up to so many, the pairs' results are kept in float32
MOST_PARTS = 8
SMALLEST_ROWS = 16
_FP8_ROWS, _FP8_DEPTH = 64, 32
_TURNED = ("ordered", "e2m1")  # formats whose codes are widened before they are multiplied
_FEW_PAIRS = 2048  # up to so many, each is compared with all others
_COMPARED = 4096  # comparisons of a program, then
_COUNTED = 65536  # comparisons with experts at once
_CHUNK = 128  # pairs that a program places where there are more
_SPAN = 8  # experts whose counts a program adds up
_SUM_COLUMNS = 1024
_READ = 32 * 4  # float32 numbers that a warp reads at once
_MOST_WARPS = 16
_HEAD = 256  # numbers of a row of weights: two registers of a thread each
_INT32 = torch.int32


@dataclass(frozen=True)
class Tile:
    """How one program of the products works.

    Attributes:
        rows: pairs of one expert.
        columns: outputs; gate and up take so many of each.
        depth: inputs of one step of the loop, at most; it divides the width.
        num_warps: warps of a program.
        num_stages: buffers of the loop.
        is_turned: whether outputs are the rows of the matrix instruction, tokens its columns.
        head: inputs whose weights the down product reads before the launch in front has ended.
    """

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int
    is_turned: bool = False
    head: int = 0


@dataclass(frozen=True)
class Tiles:
    """Tiles of the two products."""

    gate_up: Tile
    down: Tile
    parts: int = 1


@dataclass(frozen=True)
class Experts:
    """One call: its tensors and attributes.

    Shapes: x [T, D], ids and weights [T, K], gate and up [E, F, D], down [E, D, F], out [T, D].

    Attributes:
        epilogue: what is done to the sum over a token's experts; None for nothing.
        operands: what that reads beside the sum, and writes where it stores by itself.
        of_rows: whether it takes whole rows, and stores what it makes of them.
        x_scales: of x where that is codes, [T, scales of a row].
        group: numbers of a row that share one, 0 for all, -1 where x is plain numbers.
    """

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    gate: Weight
    up: Weight
    down: Weight
    out: torch.Tensor
    activation: str = "silu"
    total: int = 0
    workspace: torch.Tensor | None = None
    epilogue: Any = None
    operands: tuple[Any, ...] = ()
    of_rows: bool = False
    x_scales: torch.Tensor | None = None
    group: int = -1

    @property
    def pairs(self) -> int:
        """Pairs of a token and one of its experts."""
        return self.ids.shape[0] * self.ids.shape[1]

    @property
    def num_experts(self) -> int:
        """Experts held here."""
        return self.gate.codes.shape[0]


def of_call(call: TorchCall) -> Experts:
    """The op ``experts`` as the executor calls it, or a group that begins with it."""
    x, ids, weights = call.inputs[:3]
    gate, up, down = (weight_of(w) for w in call.inputs[3:6])
    is_rounded = isinstance(x, BlockTensors)
    made = Experts(
        x.codes if is_rounded else x, ids, weights, gate, up, down, call.outputs[0],
        call.attrs["activation"], call.attrs["total"], call.workspace,
        x_scales=x.scales if is_rounded else None, group=x.format.block[0] if is_rounded else -1,
    )  # fmt: skip
    if call.op.body is None:
        return made
    graph = body_of(call.op)
    of_rows = len(call.outputs) > 1
    emitted = (emit_row_epilogue if of_rows else emit_epilogue)(graph, *strided_of(call))
    env = sizes_of(graph, call)
    operands = tuple(argument(p, call, (), (), env) for p in emitted.parameters)
    return replace(made, epilogue=emitted.function(), operands=operands, of_rows=of_rows)


def experts(call: Experts, tiles: Tiles | None = None, *, wide: bool = False) -> list[Launch]:
    """Launches of a call.

    Args:
        call: tensors and attributes.
        tiles: how programs work; chosen by the sizes where None.
        wide: whether large tiles may take more than 99 KiB of shared memory.

    Raises: Unsupported if the kernels cannot take it.
    """
    check(call)
    tiles = tiles or tiles_for(call, wide=wide)
    direct = call.pairs <= DIRECT_PAIRS
    made = carve(call.workspace, scratch_of(call, tiles), call.x.device)
    order, table, counts, totals, hidden, pairs = made
    shared = {
        "ids": call.ids, "order": order, "tiles": table, "P": call.pairs, "E": call.num_experts,
        "LIMIT": table.shape[1],
    }  # fmt: skip
    sorted_by = (call.num_experts, tiles.down.rows, order, table, counts, totals)
    sorting = [] if direct else sort_pairs(call.ids, *sorted_by)
    return [
        *sorting,
        _gate_up(call, tiles.gate_up, shared, hidden, direct),
        _down(call, tiles, shared, hidden, pairs, direct),
        _sum(call, tiles.parts, pairs),
    ]


def check(call: Experts) -> None:
    """Make sure that the kernels can take a call.

    Raises: Unsupported if they cannot.
    """
    dense = {"ids": call.ids, "weights": call.weights, "out": call.out}
    if not all(t.is_contiguous() for t in dense.values()) or call.x.stride(1) != 1:
        raise Unsupported("experts: x, ids, weights or the result have gaps", advice="copy them")
    for name, weight in (("gate", call.gate), ("up", call.up), ("down", call.down)):
        if weight.inputs % SMALLEST_ROWS:
            raise Unsupported(
                f"experts: {name} takes {weight.inputs} inputs",
                advice="the kernels take multiples of 16: pad the weight",
            )
        if weight.codes.stride(2) != 1:
            raise Unsupported(f"experts: rows of {name} have gaps", advice="copy it")
        if weight.format == "e2m1" and call.x.dtype != torch.bfloat16:
            raise Unsupported(f"experts: fp4 weights and {call.x.dtype}", advice="use bf16")
    same = call.gate.scales.stride() == call.up.scales.stride() or call.gate.format == "plain"
    if call.gate.format != call.up.format or not same:
        raise Unsupported("experts: gate and up are of different formats")


def tile_limit(pairs: int, experts: int, rows: int) -> int:
    """Tiles that any routing can make: every expert may leave one partly filled."""
    return pairs // rows + min(experts, pairs)


def scratch_of(call: Experts, tiles: Tiles) -> tuple[Piece, ...]:
    """Scratch of a call: order, tiles, counts of chunks and in all, hidden rows, pair rows."""
    inner, width = call.down.inputs, call.out.shape[1]
    return scratch_for(call.pairs, call.num_experts, inner, width, call.out.dtype, tiles)


def scratch_for(
    pairs: int, experts: int, inner: int, width: int, dtype: torch.dtype, tiles: Tiles
) -> tuple[Piece, ...]:
    """As `scratch_of`, from sizes."""
    direct = pairs <= DIRECT_PAIRS
    limit = pairs if direct else tile_limit(pairs, experts, tiles.down.rows)
    exact = torch.float32 if pairs <= EXACT_PAIRS else dtype
    return (
        Piece((pairs,), _INT32),
        Piece((3, limit), _INT32),
        *sort_pieces(pairs, experts),
        Piece((pairs, inner), dtype),
        Piece((pairs, tiles.parts, width), exact),
    )


def scratch_bound(pairs: int, experts: int, inner: int, width: int, dtype: torch.dtype) -> int:
    """Bytes of scratch that suffice for every number of pairs up to one."""
    small = Tile(SMALLEST_ROWS, 0, 0, 0, 0)
    sizes = {pairs: 1, min(pairs, EXACT_PAIRS): 1, min(pairs, DIRECT_PAIRS): MOST_PARTS}
    return max(
        scratch_bytes(scratch_for(n, experts, inner, width, dtype, Tiles(small, small, parts)))
        for n, parts in sizes.items()
    )


# --- tiles ---------------------------------------------------------------------------------------


def tiles_for(call: Experts, *, wide: bool = False) -> Tiles:
    """Tiles for a call, by how many pairs an expert gets if choices are spread evenly."""
    each = call.pairs / (call.total or call.num_experts)
    form = call.gate.format
    if call.pairs <= DIRECT_PAIRS:
        return _direct_tiles(call, form)
    rows = next((n for n in (16, 32, 64) if each <= 1.5 * n), 128)
    if form in _TURNED:
        return _turned_tiles(rows, form, wide=wide)
    if rows <= 32:
        # NOTE: 64 outputs of a scaled product become wgmma with its operands swapped, and tokens
        # are then read 4 bytes at a time.
        gate_up = Tile(rows, 32, 128, 4, 4 if form == "plain" else 5)
        return Tiles(gate_up, replace(gate_up, columns=64))
    if rows == 64:
        return Tiles(Tile(64, 64, 64, 4, 3), Tile(64, 128, 64, 4, 3))
    if wide:
        return Tiles(Tile(128, 128, 64, 8, 3), Tile(128, 256, 64, 8, 3))
    return Tiles(Tile(128, 64, 64, 8, 3), Tile(128, 128, 64, 8, 3))


def _turned_tiles(rows: int, form: str, *, wide: bool) -> Tiles:
    """Tiles of sorted pairs whose weights are widened in the registers of the first operand."""
    if rows <= 32:
        # More programs a processor serve words better than more of their bytes on the way.
        steps = (256, 4, 3) if form == "e2m1" else (128, 4, 4)
        tile = Tile(rows, 64, *steps, is_turned=True)
    elif rows == 64 or not wide:
        tile = Tile(64, 128, 128, 8, 3, is_turned=True)
    else:
        tile = Tile(128, 128, 128, 8, 3, is_turned=True)
    return Tiles(replace(tile, columns=tile.columns // 2), tile)


def _direct_tiles(call: Experts, form: str) -> Tiles:
    """One pair a tile: few columns, so that all multiprocessors read weights.

    All but codes by codes are turned: outputs are many, tokens one.
    """
    depth, stages = {"plain": (128, 4), "e4m3": (128, 4), "ordered": (256, 3), "e2m1": (256, 4)}[
        form
    ]
    turned = form != "e4m3"
    down = Tile(SMALLEST_ROWS, 64 if turned else 32, depth, 4, stages, turned)
    # With a head, programs in flight count less than what each has on its way.
    head = _HEAD if form == "plain" and call.down.inputs >= _HEAD else 0
    wanted = (3 if head else 4) * sms_of(call.x.device) // 2
    programs = call.pairs * -(-call.out.shape[1] // down.columns)
    parts = power_above(-(-wanted // programs))
    steps = max(call.down.inputs // max(2 * depth, head), 1)
    parts = max(min(parts, 1 << (steps.bit_length() - 1), MOST_PARTS), 1)
    gate_up = replace(down, columns=down.columns // 2)
    if head:
        down = replace(down, head=head, num_stages=stages - 1)
    return Tiles(gate_up, down, parts)


def _depth(tile: Tile, weight: Weight, group: int) -> int:
    """The largest step that divides the inputs and suits blocks of scales, of x's too."""
    step = gcd(weight.filled, tile.depth)
    if weight.wide and weight.wide % step and step % weight.wide:
        step = gcd(step, weight.wide)
    if weight.format == "e4m3" and weight.wide:
        step = gcd(step, weight.wide)
    return gcd(step, group) if group > 0 else step


def _numbers(experts: int) -> int:
    """Experts as a power of two."""
    return max(power_above(experts), 16)


# --- launches -------------------------------------------------------------------------------------


def sort_pairs(
    ids: torch.Tensor,
    experts: int,
    rows: int,
    order: torch.Tensor,
    tiles: torch.Tensor,
    counts: torch.Tensor,
    totals: torch.Tensor,
) -> list[Launch]:
    """Pairs sorted by expert, and a table of tiles: one launch for few pairs, else three.

    Shapes: ids [T, K], order [P], tiles [3, limit], scratch: counts [chunks, numbers], totals
    [numbers].
    """
    from metainfer.backends.triton.templates import experts_order as kernels

    numbers = _numbers(experts)
    pairs, limit = ids.numel(), tiles.shape[1]
    table = {"tiles": tiles, "LIMIT": limit, "order": order, "ids": ids, "P": pairs, "E": experts}
    if pairs <= _FEW_PAIRS:
        every = max(power_above(pairs), 16)
        chunk = max(min(_COMPARED // every, _CHUNK), 4)
        step = min(max(_COUNTED // numbers, 16), every)
        sizes = {"ROWS": rows, "ALL": every, "CHUNK": chunk, "STEP": step, "NUMBERS": numbers}
        grid = (1 + -(-pairs // chunk),)
        return [Launch(kernels.order_few, grid, table, sizes, 8, 1)]
    chunks, sizes = -(-pairs // _CHUNK), {"CHUNK": _CHUNK, "NUMBERS": numbers}
    known = {"ids": ids, "counts": counts, "P": pairs, "E": experts}
    scan = {"STEP": _COMPARED // _SPAN, "SPAN": _SPAN, "NUMBERS": numbers}
    adding = {"counts": counts, "totals": totals, "CHUNKS": chunks}
    placed, place = {**table, "counts": counts, "totals": totals}, {**sizes, "ROWS": rows}
    return [
        Launch(kernels.order_count, (chunks,), known, sizes, 4, 1),
        Launch(kernels.order_scan, (numbers // _SPAN,), adding, scan, 8, 1),
        Launch(kernels.order_place, (1 + chunks,), placed, place, 4, 1),
    ]


def sort_pieces(pairs: int, experts: int) -> tuple[Piece, Piece]:
    """Scratch of `sort_pairs`: counts of chunks, and of all pairs."""
    numbers = _numbers(experts)
    return Piece((-(-pairs // _CHUNK), numbers), _INT32), Piece((numbers,), _INT32)


def _format(weight: Weight, tile: Tile, direct: bool, group: int = -1) -> dict[str, Any]:
    depth = _depth(tile, weight, group)
    is_fp8 = weight.format in ("e4m3", "ordered")
    is_narrow = 0 < weight.wide < depth
    return {
        "FORMAT": weight.format, "HIGH": weight.high, "WIDE": weight.wide,
        "POWERS": weight.powers, "ROWS": tile.rows, "COLUMNS": tile.columns,
        "DEPTH": depth, "DIRECT": direct,
        # A block of scales spans the columns of every tile.
        "ALIKE": is_fp8 and not is_narrow and weight.high % tile.columns == 0,
        "RAGGED": weight.filled != weight.inputs, "TURNED": tile.is_turned,
        "ROWED": weight.rows is not None,
    }  # fmt: skip


def _scale_strides(weight: Weight) -> dict[str, int]:
    stride = weight.scales.stride()
    if weight.format == "e2m1":
        steps = {"scale_out": stride[3], "scale_in": stride[2], "scale_half": stride[1]}
    else:
        steps = {"scale_out": stride[1], "scale_in": stride[2], "scale_half": 0}
    return {"scale_expert": stride[0], **steps}


def _gate_up(
    call: Experts, tile: Tile, shared: dict[str, Any], hidden: torch.Tensor, direct: bool
) -> Launch:
    from metainfer.backends.triton.templates.experts_grouped import experts_gate_up

    inner, scales = call.down.inputs, call.x_scales
    arguments = {
        **shared, "x": call.x, "x_scale": call.gate.scales if scales is None else scales,
        "x_scale_token": 0 if scales is None else scales.stride(0), "weights": call.weights,
        "gate": call.gate.codes,
        "gate_scale": call.gate.scales, "up": call.up.codes, "up_scale": call.up.scales,
        "gate_rows": call.gate.second, "up_rows": call.up.second,
        "hidden": hidden, "CHOICES": call.ids.shape[1], "D": call.x.shape[1], "F": inner,
        "x_token": call.x.stride(0), "hidden_row": inner,
        "gate_expert": call.gate.codes.stride(0), "gate_out": call.gate.codes.stride(1),
        "up_expert": call.up.codes.stride(0), "up_out": call.up.codes.stride(1),
        **_scale_strides(call.gate),
    }  # fmt: skip
    constants = {
        **_format(call.gate, tile, direct, call.group), "GELU": call.activation == "gelu_tanh",
        "GROUP": call.group,
    }  # fmt: skip
    grid = shared["LIMIT"] * -(-inner // tile.columns)
    return Launch(
        experts_gate_up, (grid,), arguments, constants, tile.num_warps, tile.num_stages,
        _matrix(call.x.dtype, tile, constants["DEPTH"]),
    )  # fmt: skip


def _down(
    call: Experts,
    tiles: Tiles,
    shared: dict[str, Any],
    hidden: torch.Tensor,
    pairs: torch.Tensor,
    direct: bool,
) -> Launch:
    from metainfer.backends.triton.templates.experts_grouped import experts_down

    tile, width, inner = tiles.down, call.out.shape[1], call.down.inputs
    arguments = {
        **shared, "hidden": hidden, "down": call.down.codes, "down_scale": call.down.scales,
        "down_rows": call.down.second, "pairs": pairs, "D": width, "F": inner, "hidden_row": inner,
        "down_expert": call.down.codes.stride(0), "down_out": call.down.codes.stride(1),
        **_scale_strides(call.down),
    }  # fmt: skip
    constants = {**_format(call.down, tile, direct), "PARTS": tiles.parts, "HEAD": tile.head}
    grid = shared["LIMIT"] * -(-width // tile.columns) * tiles.parts
    return Launch(
        experts_down, (grid,), arguments, constants, tile.num_warps, tile.num_stages,
        _matrix(call.out.dtype, tile, constants["DEPTH"]),
    )  # fmt: skip


def _sum(call: Experts, parts: int, pairs: torch.Tensor) -> Launch:
    from metainfer.backends.triton.templates.experts_then import (
        experts_sum,
        experts_sum_row,
        experts_sum_then,
    )

    tokens, width = call.out.shape
    columns = min(power_above(width), _SUM_COLUMNS)
    arguments = {
        "pairs": pairs, "ids": call.ids, "out": call.out, "E": call.num_experts, "D": width,
        "out_token": call.out.stride(0),
    }  # fmt: skip
    constants = {"CHOICES": call.ids.shape[1], "PARTS": parts, "COLUMNS": columns}
    grid = (tokens * -(-width // columns),)
    if call.epilogue is None:
        return Launch(experts_sum, grid, arguments, constants, 4, 1)
    constants["epilogue"] = call.epilogue
    # An empty tuple has no type that Triton could give it.
    arguments["operands"] = call.operands or (call.out,)
    if not call.of_rows:
        return Launch(experts_sum_then, grid, arguments, constants, 4, 1)
    del arguments["out"], arguments["out_token"]
    constants["COLUMNS"] = power_above(width)
    warps = 8 if width > 2 * _SUM_COLUMNS else 4
    if call.pairs <= EXACT_PAIRS:
        # Few tokens leave most of the machine idle: each thread has one read of a pair in flight.
        warps = min(max(constants["COLUMNS"] // _READ, warps), _MOST_WARPS)
    return Launch(experts_sum_row, (tokens,), arguments, constants, warps, 1)


def _matrix(dtype: torch.dtype, tile: Tile, depth: int) -> str:
    """Operand type of the matrix instructions that a tile must use, "" where any will do.

    Hopper multiplies fp8 by 64 rows and more; by fewer Triton widens codes to f16, exactly. No
    instruction takes fewer than 32 codes of a row: shorter steps widen them to bf16.
    """
    if dtype == torch.float8_e4m3fn:
        rows = 2 * tile.columns if tile.is_turned else tile.rows
        return "f8e4m3" if rows >= _FP8_ROWS and depth >= _FP8_DEPTH else ""
    return "f16" if dtype == torch.float16 else "bf16"
