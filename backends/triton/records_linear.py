"""Records of the product template: each way of storing a weight by each tile, with epilogues."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from metainfer.backends.kernel import (
    Constraint,
    Efficiency,
    Kernel,
    Query,
    Registry,
    dense,
    device_kind,
    feature,
    weight_operand,
)
from metainfer.backends.layout import LayoutRegistry
from metainfer.backends.torch.call import TorchCall
from metainfer.backends.triton import gated, linear
from metainfer.backends.triton.fits import fits
from metainfer.backends.triton.launch import Launch, TritonBinder
from metainfer.backends.triton.linear import STORAGES, TILES, Storage, Tile
from metainfer.backends.triton.nibbles import LAYOUT
from metainfer.ir.dims import dim
from metainfer.ir.dtypes import DType
from metainfer.ir.graph import Op, Value
from metainfer.ir.types import TensorType, tensor

BF16_STEP = 2.0**-8
HERE: tuple[Constraint, ...] = (device_kind("gpu"), feature("triton"), feature("bf16_mma"))
SIZE = 1024  # of the product that is compiled to see whether a tile fits a card
# The op, and what rules put behind it.
KINDS = ("linear", "linear_add", "linear_relu", "linear_gelu", "linear_silu")
GATED_KIND = "linear_silu_mul"
_SOURCE = "assumed, to be replaced by a benchmark on an H200"
# A tile of 16 x 32 reads 48 numbers for every 512 multiplications: the last cache bounds it. Large
# tiles are bound by arithmetic, and by widening the codes.
_EFFICIENCY = {
    ("plain", "m16"): Efficiency(0.6, 0.06, source=_SOURCE),
    ("plain", "m64"): Efficiency(0.6, 0.25, source=_SOURCE),
    ("plain", "m128"): Efficiency(0.6, 0.6, source=_SOURCE),
    ("coded", "m16"): Efficiency(0.5, 0.05, source=_SOURCE),
    ("coded", "m64"): Efficiency(0.5, 0.18, source=_SOURCE),
    ("coded", "m128"): Efficiency(0.5, 0.35, source=_SOURCE),
}


def register_linear(kernels: Registry, layouts: LayoutRegistry) -> None:
    """Add the products and the layout of 4-bit integers."""
    layouts.add(LAYOUT)
    for kind in KINDS:
        for name, storage in STORAGES.items():
            for tile in TILES[name]:
                kernels.add(_kernel(kind, storage, tile, layouts))
    for name, storage in STORAGES.items():
        for tile in TILES[name]:
            kernels.add(_gated(storage, tile, layouts))


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
        op = sample_product(query.dtype(0), query.tensor(1), halves)
        return asked.check(Query(op, query.device, {}))

    return Constraint(asked.text, check)


def sample_product(x: DType, weight: TensorType, halves: int = 1) -> Op:
    """A product of activations of a type and a weight of a type, packing included.

    Args:
        x: type of the activations.
        weight: type of the weight.
        halves: columns of the product for each one of the result.
    """
    made = tensor(x, SIZE, SIZE)
    wide = replace(weight, shape=(dim(halves * SIZE), dim(SIZE)))
    return Op("linear", (Value("%x", made), Value("@w", wide)), (Value("%y", made),))


def _kernel(kind: str, storage: Storage, tile: Tile, layouts: LayoutRegistry) -> Kernel:
    made = linear.launches(storage, tile)
    return _record(kind, storage, tile, made, linear.follows(), layouts)


def _gated(storage: Storage, tile: Tile, layouts: LayoutRegistry) -> Kernel:
    made = gated.launches(storage, tile)
    return _record(GATED_KIND, storage, tile, made, gated.GATED, layouts, halves=2)


def _record(
    kind: str, storage: Storage, tile: Tile, made: Callable[[TorchCall], Sequence[Launch]],
    body: Constraint, layouts: LayoutRegistry, halves: int = 1,
) -> Kernel:  # fmt: skip
    packings = {1: storage.layout} if storage.layout else {}
    is_weight = () if storage.name == "plain" else (weight_operand(1),)
    efficiency = _EFFICIENCY["plain" if storage.name == "plain" else "coded", tile.name]
    return Kernel(
        f"triton.{kind}_{storage.name}_{tile.name}",
        kind,
        "triton",
        requires=(*HERE, linear.stored_as(storage, tile), *is_weight, dense(0, 1), body),
        layouts=packings,
        efficiency=efficiency,
        # Codes of floats are exact in 16 bits; integers are scaled and rounded to them. Halves that
        # are multiplied add up what they are off by, and what the rounding of either turns it into.
        error=(2 * halves - 1) * BF16_STEP if storage.name.startswith("int") else 0.0,
        effort=tile.effort(efficiency.compute, halves),
        fits=_fits(made, packings, layouts, halves),
        binder=TritonBinder(made),
    )
