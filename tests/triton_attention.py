"""Paged attention cases, run by the Triton forms: interpreted, or on a GPU. Holds no tests."""

from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch_samples import scalar

from metainfer.backends.torch.check import make_op
from metainfer.backends.torch.tensors import to_numpy, to_torch
from metainfer.backends.triton.attention import Attention, Tile, prefill, split
from metainfer.backends.triton.interpreter import prepare
from metainfer.ir.entries import KV_FP8, entry_fields, stored_entry
from metainfer.ir.graph import Op
from metainfer.ir.interpret import Data
from metainfer.ir.types import StateType, tensor


@dataclass(frozen=True)
class Case:
    """Sequences (tokens in the state, new ones), heads, widths and attributes."""

    lengths: tuple[int, ...]
    new: tuple[int, ...]
    heads: tuple[int, int] = (4, 2)
    widths: tuple[int, int] = (64, 64)
    page: int = 16
    window: int = 0
    softcap: float = 0.0
    scale: float = 0.0
    dtype: str = "bf16"
    is_rounded: bool = False  # keys and values are fp8 codes with scales
    padding: tuple[int, int] = (2, 0)  # rows, sequences


def attention_op(case: Case) -> tuple[Op, list[Data]]:
    """The op and its data. What no sequence holds is NaN: nothing may read it."""
    rng = np.random.default_rng(7)
    (heads, groups), (d, e) = case.heads, case.widths
    type_ = scalar(case.dtype)
    held = KV_FP8 if case.is_rounded else type_
    entries = [entry_fields(n, tensor(type_, groups, w), held) for n, w in (("k", d), ("v", e))]
    state_type = StateType("pages", tuple(chain(*entries)), page_size=case.page)
    used = [-(-n // case.page) for n in case.lengths]
    pages = np.zeros((len(used) + case.padding[1], max(used) + 1), np.int32)
    order = 1 + rng.permutation(sum(used)).astype(np.int32)
    state = {
        f: np.full((1 + sum(used), case.page, *t.concrete({})), np.nan, scalar(str(t.dtype)).numpy)
        for f, t in state_type.fields
    }
    for b, (count, length) in enumerate(zip(used, case.lengths, strict=True)):
        pages[b, :count], order = order[:count], order[count:]
        at = np.arange(length)
        for name in ("k", "v"):
            made = stored_entry(state, name, rng.normal(size=(length, *state[name].shape[2:])))
            for field, numbers in made.items():
                state[field][pages[b, at // case.page], at % case.page] = numbers
    tokens = sum(case.new) + case.padding[0]
    q = rng.normal(size=(tokens, heads, d)).astype(type_.numpy)
    idle = [0] * case.padding[1]
    starts = np.cumsum([0, *case.new, *idle]).astype(np.int32)
    lengths = np.array([*case.lengths, *idle], np.int32)
    fields = [tensor(scalar("i32"), *a.shape) for a in (starts, lengths, pages)]
    attrs = {"window": case.window, "softcap": case.softcap, "scale": case.scale}
    op = make_op("attention", [tensor(type_, *q.shape), state_type, *fields], attrs)
    return op, [q, state, starts, lengths, pages]


def call_of(op: Op, data: list[Data], device: str) -> Attention:
    """The launchers' form of a case; results start as NaN."""

    def moved(array: Any) -> torch.Tensor:
        return to_torch(array.copy()).to(device)

    q, state, starts, lengths, pages = data
    assert isinstance(state, dict)
    k, v = moved(state["k"]), moved(state["v"])
    query = moved(q)
    out = query.new_full((*query.shape[:2], v.shape[-1]), float("nan"))
    scales = [moved(state[f]) if f in state else None for f in ("k_scale", "v_scale")]
    attrs: dict[str, Any] = dict(op.attr)
    return Attention(
        query, k, v, moved(starts), moved(lengths), moved(pages), out,
        attrs["scale"], attrs["window"], attrs["softcap"], None, *scales,
    )  # fmt: skip


def run_form(case: Case, form: str, tile: Tile, programs: int = 0, device: str = "cpu") -> Any:
    """Results of one form by one tile."""
    prepare(device)
    op, data = attention_op(case)
    call = call_of(op, data, device)
    launches = prefill(call, tile) if form == "prefill" else split(call, tile, programs)
    for launch in launches:
        launch.run()
    return to_numpy(call.out, scalar(case.dtype))
