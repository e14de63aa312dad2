"""Cases of the op experts, run by the Triton form: interpreted, or on a GPU. Holds no tests."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch_samples import scalar

from metainfer.backends.torch.check import make_op
from metainfer.backends.torch.tensors import to_numpy, to_torch
from metainfer.backends.triton.experts import (
    Experts,
    Tiles,
    experts,
    sort_pairs,
    sort_pieces,
    tile_limit,
)
from metainfer.backends.triton.experts_weight import weight_of
from metainfer.backends.triton.interpreter import prepare
from metainfer.backends.triton.scratch import carve
from metainfer.backends.triton.words import LAYOUT
from metainfer.ir.dtypes import Block, BlockArray, DType, parse_dtype, quantize
from metainfer.ir.graph import Op
from metainfer.ir.interpret import Data
from metainfer.ir.types import tensor


@dataclass(frozen=True)
class Case:
    """Sizes, formats and how tokens choose: "even", "one" expert for all, or "some" left out."""

    tokens: int
    choices: int = 2
    experts: int = 4
    width: int = 64
    inner: int = 48
    format: str = "bf16"
    dtype: str = "bf16"
    routing: str = "even"
    activation: str = "silu"
    total: int = 0


def _ids(case: Case, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    ids = rng.integers(0, case.experts, (case.tokens, case.choices)).astype(np.int32)
    if case.routing == "one":
        ids[:] = case.experts - 1
    if case.routing == "some":
        # Experts 0 of all are chosen by nobody, -1 and numbers past the end reach nobody.
        ids = np.where(ids == 0, -1, ids)
        ids[::3, 0] = case.experts + 5
        ids[1:2] = -1
    return ids


def experts_op(case: Case) -> tuple[Op, list[Data]]:
    """The op and its data."""
    rng = np.random.default_rng(5)
    type_, format_ = scalar(case.dtype), parse_dtype(case.format)
    e, f, d = case.experts, case.inner, case.width

    def stack(*shape: int) -> Data:
        values = rng.normal(size=shape).astype(np.float32) / shape[-1] ** 0.5
        return _kept(values, format_)

    x = rng.normal(size=(case.tokens, d)).astype(type_.numpy)
    shares = rng.uniform(0.1, 1.0, (case.tokens, case.choices)).astype(np.float32)
    data = [x, _ids(case, rng), shares, stack(e, f, d), stack(e, f, d), stack(e, d, f)]
    shapes = [(e, f, d), (e, f, d), (e, d, f)]
    types = [
        tensor(type_, case.tokens, d),
        tensor(scalar("i32"), case.tokens, case.choices),
        tensor(scalar("f32"), case.tokens, case.choices),
        *(tensor(format_, *shape) for shape in shapes),
    ]
    attrs = {"activation": case.activation, "total": case.total}
    return make_op("experts", types, attrs, weights=[3, 4, 5]), data


def _kept(values: np.ndarray[Any, Any], format_: DType) -> Data:
    return quantize(values, format_) if isinstance(format_, Block) else values.astype(format_.numpy)


def call_of(case: Case, device: str = "cpu") -> Experts:
    """The launchers' form of a case; results start as NaN."""
    _, data = experts_op(case)

    def moved(array: Any) -> Any:
        if isinstance(array, BlockArray):
            return LAYOUT.pack(array).to(device)
        return to_torch(array.copy()).to(device)

    x, ids, shares, *stacks = (moved(d) for d in data)
    gate, up, down = (weight_of(w) for w in stacks)
    out = torch.full_like(x, float("nan"))
    return Experts(x, ids, shares, gate, up, down, out, case.activation, case.total)


def run_tiles(case: Case, tiles: Tiles | None = None, device: str = "cpu") -> Any:
    """Results of a case."""
    prepare(device)
    call = call_of(case, device)
    for launch in experts(call, tiles):
        launch.run()
    return to_numpy(call.out, scalar(case.dtype))


def run_order(ids: np.ndarray[Any, Any], num: int, rows: int) -> tuple[Any, Any]:
    """The order of pairs and the table of tiles."""
    prepare("cpu")
    order = torch.full((ids.size,), -7, dtype=torch.int32)
    tiles = torch.full((3, tile_limit(ids.size, num, rows)), -7, dtype=torch.int32)
    scratch = carve(None, sort_pieces(ids.size, num), order.device)
    for launch in sort_pairs(torch.from_numpy(ids.copy()), num, rows, order, tiles, *scratch):
        launch.run()
    return order.numpy(), tiles.numpy()
