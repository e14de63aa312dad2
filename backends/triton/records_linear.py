"""Records of the product template: each way of storing a weight by each tile, with epilogues."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from metainfer.backends.kernel import (
    Constraint,
    Efficiency,
    Effort,
    Kernel,
    Query,
    Registry,
    dense,
    device_kind,
    dtype,
    feature,
    weight_operand,
)
from metainfer.backends.layout import LayoutRegistry
from metainfer.backends.pace import Pace, Wait
from metainfer.backends.torch.call import TorchCall
from metainfer.backends.torch.constraints import same_dtype, state_like
from metainfer.backends.triton import gated, linear, skinny, summed, turned, widened, words
from metainfer.backends.triton.fits import fits
from metainfer.backends.triton.launch import EARLY, Launch, TritonBinder
from metainfer.backends.triton.linear import (
    GATED_TILES,
    SKINNY_TILES,
    STORAGES,
    TILES,
    TURNED_TILES,
    Storage,
    Tile,
)
from metainfer.backends.triton.records_attention import state_is_plain
from metainfer.ir.dims import dim
from metainfer.ir.dtypes import BF16, FP8_GROUP, Block, DType
from metainfer.ir.graph import Graph, Op, Value, attrs_of
from metainfer.ir.types import TensorType, tensor

BF16_STEP = 2.0**-8
# Hopper's units keep 13 bits behind the point of the sums of 128 products of codes.
F8_SUMS = 2.0**-13
HERE: tuple[Constraint, ...] = (device_kind("gpu"), feature("triton"), feature("bf16_mma"))
_ERRORS = {"int4": BF16_STEP, "int8": BF16_STEP, "blocks": BF16_STEP, "fp8": F8_SUMS}
SIZE = 1024  # of the product that is compiled to see whether a tile fits a card
# The op, and what rules put behind it.
KINDS = ("linear", "linear_add", "linear_relu", "linear_gelu", "linear_silu")
GATED_KIND = "linear_silu_mul"
ROUNDED_KIND = "linear_silu_mul_quantize"
# Tiles whose half is a group of what comes out rounded: of 128 numbers.
ROUNDED_TILES = (
    Tile("wide16", 16, 256, 128, 8, 3),
    Tile("wide64", 64, 256, 128, 8, 3),
)
# Tiles of products that are queries, keys and values; norms want whole heads.
TURNED = {
    turned.PLAIN: ("few16", "head16", "few64", "deep64"),
    turned.NORMED: ("few16", "few64", "turn16", "turn64"),
}
# Tiles of products that are added to and normed, by storage: plain numbers, or codes.
_SUMMED_CODES = ("few16", "few64")
_SUMMED: Mapping[str, tuple[str, ...]] = {
    "plain": ("few16", "head16", "deep16", "few64", "deep64"),
    "codes": ("few16", "head16", "all16", "few64", "head64"),
    "fp8": (),
}
_STREAMED = (
    "memory: H200, captured, launches included, M=1: 0.71 (N=K=4096) to 0.95 (N=28672); M=64 less; "
    "the four products of a layer of Llama-8B one after the other 0.90 to 0.92, M=64 0.79; "
    "compute assumed"
)
_SOURCE = "assumed, to be replaced by a benchmark on an H200"
_ON = "H200, captured, launches included, 2026-11-30"
_CODES = (
    f"{_ON}, fitted to the four products of a layer of Llama-3.1-8B and 2112x7168, 7168x2048, "
    "2048x4096, e4m3 in blocks of 128, M=1, 16 and 64; M=1 in us: N=28672 34.8, K=14336 19.9, "
    "N=K=4096 7.7; M=64 60.3, 32.4, 13.3"
)
_UNSHARED = (
    f"{_ON}, fitted to 12 products of Llama-3.1-8B, Qwen3-30B-A3B and DeepSeek-V3, e4m3 in blocks "
    "of 128, M=1 to 16, while codes were widened by conversions"
)
_WIDENING = f"{_ON}, e4m3 in blocks of 128, N=28672, M=1024: 329 (m64) and 416 TFLOP/s (m128)"
_FP4 = (
    f"{_ON}, mxfp4, in us: N=28672, K=4096 M=1 24.2 (0.63 of the sustained bandwidth), without "
    "shared sums 28.0; K=14336, N=4096 14.3 and 39.0, N=2048, K=4096 5.4 (priced 9.5) and 12.0; "
    "M=64 of the first two 42.2 and 33.4 (wide64), 57.7 and 34.7 (few64)"
)
_TIMED = (
    f"{_ON}: times of 12 products of Llama-3.1-8B, Qwen3-30B-A3B and DeepSeek-V3 at 1 to 4,096 "
    "rows, e4m3 in groups of 128 by blocks of 128 x 128"
)
_SHARED = (
    f"{_ON}, fitted to the products that those by e4m3 codes alone are; in us: M=1 N=28672 33.2, "
    "K=14336 20.1, N=K=4096 8.8; M=64 54.2, 30.0, 12.3"
)
_AS_FP8 = "assumed: as e4m3 codes, which take more instructions"
# A tile of 16 x 32 reads 48 numbers for every 512 multiplications: the last cache bounds it. Large
# tiles are bound by arithmetic, and by widening the codes.
_EFFICIENCY = {
    ("plain", "m16"): Efficiency(0.6, 0.06, source=_SOURCE),
    ("plain", "m64"): Efficiency(0.6, 0.25, source=_SOURCE),
    ("plain", "m128"): Efficiency(0.6, 0.6, source=_SOURCE),
    ("codes", "m16"): Efficiency(0.8, 0.3, source=_UNSHARED),
    ("codes", "m64"): Efficiency(0.6, 0.42, source=_WIDENING),
    ("codes", "m128"): Efficiency(0.6, 0.6, source=_WIDENING),
    ("codes", "twin128"): Efficiency(0.6, 0.5, source=_SOURCE),
    ("codes", "few16"): Efficiency(0.74, 0.3, source=_CODES),
    ("codes", "head16"): Efficiency(0.76, 0.3, source=_CODES),
    ("codes", "all16"): Efficiency(0.75, 0.3, source=_CODES),
    ("codes", "few64"): Efficiency(0.7, 0.4, source=_CODES),
    ("codes", "head64"): Efficiency(0.7, 0.4, source=_CODES),
    ("fp4", "m16"): Efficiency(0.54, 0.3, source=_FP4),
    ("fp4", "m64"): Efficiency(0.5, 0.42, source=_AS_FP8),
    ("fp4", "m128"): Efficiency(0.5, 0.55, source=_AS_FP8),
    ("fp4", "few16"): Efficiency(0.63, 0.3, source=_FP4),
    ("fp4", "few64"): Efficiency(0.6, 0.38, source=_FP4),
    ("fp4", "wide64"): Efficiency(0.6, 0.56, source=_FP4),
    ("coded", "m16"): Efficiency(0.5, 0.08, source=_SOURCE),
    ("coded", "m64"): Efficiency(0.5, 0.4, source=_SOURCE),
    ("coded", "m128"): Efficiency(0.5, 0.4, source=_SOURCE),
    ("plain", "few16"): Efficiency(0.85, 0.2, source=_STREAMED),
    ("plain", "deep16"): Efficiency(0.86, 0.2, source=_STREAMED),
    ("plain", "head16"): Efficiency(0.9, 0.2, source=_STREAMED),
    ("plain", "turn16"): Efficiency(0.86, 0.2, source=_STREAMED),
    ("plain", "turn64"): Efficiency(0.8, 0.35, source=_STREAMED),
    ("plain", "few64"): Efficiency(0.8, 0.35, source=_STREAMED),
    ("plain", "deep64"): Efficiency(0.82, 0.35, source=_STREAMED),
    ("plain", "wide64"): Efficiency(0.81, 0.35, source=_STREAMED),
    ("coded", "few16"): Efficiency(0.6, 0.12, source=_SOURCE),
    ("coded", "few64"): Efficiency(0.55, 0.22, source=_SOURCE),
    ("coded", "turn16"): Efficiency(0.55, 0.12, source=_SOURCE),
    ("coded", "turn64"): Efficiency(0.5, 0.3, source=_SOURCE),
    ("coded", "wide64"): Efficiency(0.55, 0.3, source=_SOURCE),
    ("fp8", "m16"): Efficiency(0.76, 0.18, "f8e4m3", _TIMED),
    ("fp8", "thin"): Efficiency(0.55, 0.45, "f8e4m3", _TIMED),
    ("fp8", "m64"): Efficiency(0.72, 0.54, "f8e4m3", _TIMED),
    ("fp8", "m128"): Efficiency(0.52, 0.58, "f8e4m3", _TIMED),
    ("fp8", "few16"): Efficiency(0.8, 0.3, "f8e4m3", _SHARED),
    ("fp8", "few32"): Efficiency(0.78, 0.3, "f8e4m3", _SHARED),
    ("fp8", "wide16"): Efficiency(0.6, 0.06, "f8e4m3", _SOURCE),
    ("fp8", "wide64"): Efficiency(0.6, 0.4, "f8e4m3", _SOURCE),
    ("fp8", "half"): Efficiency(0.6, 0.4, "f8e4m3", _TIMED),
}
# Fitted to the same times. A program of few rows waits for memory: it takes as long for one row.
_PACES = {
    "m16": Pace(16, 64, 0.097, 4, 1024, _TIMED),
    "thin": Pace(64, 32, 0.148, 3, 768, _TIMED),
    "half": Pace(64, 64, 0.17, 4, 256, _TIMED),
    "m64": Pace(64, 64, 0.235, 6, 256, _TIMED),
    "m128": Pace(128, 128, 0.64, 1, 512, _TIMED),
}
_WAITS = {
    ("fp8", "few16"): Wait(16, 64, 4.2, 4, 900, _SHARED),
    ("fp8", "few32"): Wait(32, 64, 6.9, 4, 512, _SHARED),
    ("codes", "m16"): Wait(16, 64, 3.26, 4, 690, _UNSHARED),
    ("codes", "few16"): Wait(16, 64, 5.8, 4, 1000, _CODES),
    ("codes", "head16"): Wait(16, 64, 6.3, 4, 650, _CODES),
    ("codes", "all16"): Wait(16, 64, 6.0, 4, 500, _CODES),
    ("codes", "few64"): Wait(64, 64, 8.0, 4, 650, _CODES),
    ("codes", "head64"): Wait(64, 64, 7.8, 4, 500, _CODES),
    ("fp4", "m16"): Wait(16, 64, 2.63, 4, 466, _FP4),
    ("fp4", "few16"): Wait(16, 64, 4.85, 4, 750, _FP4),
    ("fp4", "few64"): Wait(64, 64, 8.0, 4, 650, _FP4),
    ("fp4", "wide64"): Wait(64, 128, 8.6, 2, 600, _FP4),
}
# Rows up to which tiles of products of codes by codes that share sums were measured.
_MOST_ROWS = {"few16": 16, "few32": 64}
_WIDENED = Efficiency(
    1.0, 1.0,
    source=f"{_ON}, e4m3, N=28672, K=4096, widening included: M=1024 397 us, M=4096 1,307 us",
)  # fmt: skip


def register_linear(kernels: Registry, layouts: LayoutRegistry) -> None:
    """Add the products and the layout of codes."""
    layouts.add(words.LAYOUT)
    for name, storage in STORAGES.items():
        for tile in SKINNY_TILES.get(name, ()):
            for kind in KINDS if storage.is_rounded else (*KINDS, GATED_KIND):
                kernels.add(_skinny(kind, storage, tile, layouts))
            if tile.name in _SUMMED.get(name, _SUMMED_CODES):
                kernels.add(_summed(storage, tile, layouts))
    for name, turning in TURNED_TILES.items():
        for tile in (*SKINNY_TILES[name], *turning):
            for kind, names in TURNED.items():
                if tile.name in names:
                    kernels.add(_turned(kind, STORAGES[name], tile, layouts))
    for kind in KINDS:
        for name, storage in STORAGES.items():
            for tile in TILES[name]:
                kernels.add(_kernel(kind, storage, tile, layouts))
    for name, storage in STORAGES.items():
        for tile in GATED_TILES[name]:
            kernels.add(_gated(storage, tile, layouts))
    for tile in ROUNDED_TILES:
        kernels.add(_rounded(STORAGES["fp8"], tile, layouts))
    for element in ("f8e4m3", "f4e2m1"):
        kernels.add(_widened(element, layouts))


def _fits(
    made: Callable[[TorchCall], Sequence[Launch]], packings: Mapping[int, str],
    layouts: LayoutRegistry, halves: int = 1,
) -> Constraint:  # fmt: skip
    """A product of the query's types fits the card.

    Shared memory depends on the tile and the types, hardly on sizes and on what follows: one
    compile answers for all of them. `make kernels-check` compiles every group of whole plans.
    """
    asked = fits(made, packings, layouts)

    def check(query: Query) -> str | None:
        given, weight = query.dtype(0), query.tensor(1)
        if query.kind == ROUNDED_KIND:
            return asked.check(Query(sample_gated(given, weight, rounded=True), query.device, {}))
        op = sample_product(given, weight, halves)
        return asked.check(Query(op, query.device, {}))

    return Constraint(asked.text, check)


def sample_product(x: DType, weight: TensorType, halves: int = 1) -> Op:
    """A product of activations of a type and a weight of a type, packing included.

    Args:
        x: type of the activations.
        weight: type of the weight.
        halves: columns of the product for each one of the result.
    """
    given = tensor(x, SIZE, SIZE)
    wide = replace(weight, shape=(dim(halves * SIZE), dim(SIZE)))
    made = tensor(BF16 if isinstance(x, Block) else x, SIZE, SIZE)
    return Op("linear", (Value("%x", given), Value("@w", wide)), (Value("%y", made),))


def sample_gated(x: DType, weight: TensorType, *, rounded: bool) -> Op:
    """A gated product of activations of a type and a weight of a type, rounded to codes or not."""
    product = sample_product(x, weight, 2)
    wide = product.result
    ops = [product, Op("silu_mul_halves", (wide,), (Value("%g", wide.type),))]
    if rounded:
        made = Value("%q", wide.tensor.with_dtype(FP8_GROUP))
        ops.append(Op("quantize", ops[-1].results, (made,), attrs_of({"format": str(FP8_GROUP)})))
    kind, outputs = ROUNDED_KIND if rounded else GATED_KIND, ops[-1].results
    body = Graph(kind, product.operands, ops=tuple(ops), outputs=outputs)
    return Op("fused", product.operands, outputs, attrs_of({"kind": kind}), body)


def _kernel(kind: str, storage: Storage, tile: Tile, layouts: LayoutRegistry) -> Kernel:
    made = linear.launches(storage, tile)
    return _record(kind, storage, tile, made, (linear.follows(),), layouts)


def _streams(storage: Storage, tile: Tile) -> tuple[Constraint, ...]:
    """What a tile of few rows asks of a card, of the weight and of the rows."""
    needs: tuple[Constraint, ...] = ()
    if storage.is_rounded:
        needs = (skinny.few_rows(_MOST_ROWS[tile.name]),)
    if storage.name == "codes" and tile.head:
        # Other units want codes in another order: with a head they spill registers.
        needs = (feature("wgmma"), skinny.shared(tile, is_all=tile.name == "all16"))
    if tile.name.startswith("deep"):
        needs = (skinny.one_wave(tile), skinny.room(tile))
    if tile.head:
        # It is read while others may still write: nothing but weights may be.
        needs = (*needs, feature(EARLY), weight_operand(1))
    return needs


def _summed(storage: Storage, tile: Tile, layouts: LayoutRegistry) -> Kernel:
    made = summed.launches(storage, tile)
    needs = (summed.ends_rows(), skinny.few_rows(summed.MOST_ROWS), *_streams(storage, tile))
    record = _record(summed.KIND, storage, tile, made, needs, layouts)
    return replace(
        record, workspace=summed.workspace_of(tile), launches=2,
        effort=_effort(storage, tile, record.efficiency, partial(skinny.split_of, tile)),
        fits=_fits(skinny.launches(storage, tile), record.layouts, layouts),
    )  # fmt: skip


def _skinny(kind: str, storage: Storage, tile: Tile, layouts: LayoutRegistry) -> Kernel:
    is_gated = kind == GATED_KIND
    if storage.is_rounded:
        made = skinny.rounded(storage, tile)
    else:
        made = skinny.launches(storage, tile, is_gated=is_gated)
    needs = (gated.GATED if is_gated else linear.follows(), *_streams(storage, tile))
    record = _record(kind, storage, tile, made, needs, layouts, halves=2 if is_gated else 1)
    effort = _effort(storage, tile, record.efficiency, partial(skinny.split_of, tile))
    return replace(record, workspace=skinny.workspace_of(tile), effort=effort)


def _turned(kind: str, storage: Storage, tile: Tile, layouts: LayoutRegistry) -> Kernel:
    made = turned.launches(storage, tile)
    state = 3 if kind == turned.PLAIN else 5
    needs = (
        *_streams(storage, tile), turned.whole_heads(tile), state_like(state, 0),
        state_is_plain(state),
    )  # fmt: skip
    record = _record(kind, storage, tile, made, needs, layouts)
    return replace(
        record, workspace=skinny.workspace_of(tile),
        effort=skinny.effort_of(tile, record.efficiency.compute), error=record.error + BF16_STEP,
        fits=_fits(skinny.launches(storage, tile), record.layouts, layouts),
    )  # fmt: skip


def _gated(storage: Storage, tile: Tile, layouts: LayoutRegistry) -> Kernel:
    made = gated.launches(storage, tile)
    return _record(GATED_KIND, storage, tile, made, (gated.GATED,), layouts, halves=2)


def _rounded(storage: Storage, tile: Tile, layouts: LayoutRegistry) -> Kernel:
    made = gated.launches(storage, tile)
    body = (gated.ROUNDED, gated.whole_groups(tile), feature("fp8_mma"))
    return _record(ROUNDED_KIND, storage, tile, made, body, layouts, halves=2)


def _widened(element: str, layouts: LayoutRegistry) -> Kernel:
    """Codes as plain numbers in scratch, and the library's product."""

    def check(query: Query) -> str | None:
        weight = query.dtype(1)
        held = isinstance(weight, Block) and weight.element.name == element and words.takes(weight)
        return None if held else str(weight)

    packings = {1: words.NAME}
    return Kernel(
        f"triton.linear_{element}_widened",
        "linear",
        "triton",
        requires=(
            *HERE, feature("cuda"), dtype(0, "bf16"),
            Constraint(f"operand 1 is {element} codes in order", check), weight_operand(1),
            same_dtype(0, 2), dense(0, 1),
        ),
        layouts=packings,
        efficiency=_WIDENED,
        launches=2,
        error=BF16_STEP,
        workspace=widened.workspace,
        effort=widened.effort_of(_WIDENED.memory, _WIDENED.compute),
        fits=fits(widened.launches, packings, layouts),
        binder=widened.WidenedBinder(widened.launches),
    )  # fmt: skip


def _effort(
    storage: Storage, tile: Tile, efficiency: Efficiency, parts: Callable[[int, int], int] | None
) -> Effort:
    """Work of a product by a tile, as its programs wait, or as their pace is, or neither.

    Args:
        storage: how the weight is stored.
        tile: of a program.
        efficiency: the record's.
        parts: programs that share the sums of a tile, by tiles and inner size; None for one.
    """
    wait = _WAITS.get((storage.name, tile.name))
    if wait is not None:
        rate = efficiency.rate or "bf16"
        waiting = replace(wait, rows=tile.rows, columns=tile.columns)
        return waiting.effort(rate, efficiency.compute, parts or (lambda tiles, inner: 1))
    pace = _PACES.get(tile.name) if storage.is_rounded else None
    if pace is None:
        return tile.effort(efficiency.compute, parts)
    # Gated products have narrower tiles of the same name.
    return replace(pace, rows=tile.rows, columns=tile.columns).effort(efficiency.compute)


def _record(
    kind: str, storage: Storage, tile: Tile, made: Callable[[TorchCall], Sequence[Launch]],
    body: tuple[Constraint, ...], layouts: LayoutRegistry, halves: int = 1,
) -> Kernel:  # fmt: skip
    packings = {1: storage.layout} if storage.layout else {}
    is_weight = () if storage.name == "plain" else (weight_operand(1),)
    group = storage.name if (storage.name, tile.name) in _EFFICIENCY else "coded"
    units: tuple[Constraint, ...] = ()
    if (storage.name, tile.name) == ("codes", "m128"):
        # Units that want both operands in registers leave too few of them.
        units = (feature("wgmma"),)
    if storage.is_rounded:
        units = (feature("fp8_mma"), linear.takes_rows(tile))
    efficiency = _EFFICIENCY[group, tile.name]
    return Kernel(
        f"triton.{kind}_{storage.name}_{tile.name}",
        kind,
        "triton",
        requires=(*HERE, *units, linear.stored_as(storage, tile), *is_weight, dense(), *body),
        layouts=packings,
        efficiency=efficiency,
        # Who stores a tile reads the same tile of what is added.
        in_place={0: 2} if kind == "linear_add" else {},
        # Codes of floats are exact in 16 bits; others are scaled and rounded to them. Halves that
        # are multiplied add up what they are off by, and what the rounding of either turns it into.
        error=(2 * halves - 1) * _ERRORS.get(storage.name, 0.0),
        effort=_effort(storage, tile, efficiency, None),
        fits=_fits(made, packings, layouts, halves),
        binder=TritonBinder(made),
    )
