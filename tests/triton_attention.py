"""Paged attention cases, run by the Triton forms: interpreted, or on a GPU. Holds no tests."""

from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch_samples import scalar

from metainfer.backends.torch.call import TorchCall
from metainfer.backends.torch.check import make_op
from metainfer.backends.torch.tensors import to_numpy, to_torch
from metainfer.backends.triton.attention import (
    Attention,
    Tile,
    of_call,
    of_latent_call,
    prefill,
    split,
)
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
    is_rounded: bool = False  # keys and values, or latents, are fp8 codes with scales
    is_latent: bool = False  # widths are those of latents and rotary keys, which one head has
    padding: tuple[int, int] = (2, 0)  # rows, sequences


def attention_op(case: Case) -> tuple[Op, list[Data]]:
    """The op and its data. What no sequence holds is NaN: nothing may read it."""
    rng = np.random.default_rng(7)
    (heads, groups), (d, e) = case.heads, case.widths
    type_ = scalar(case.dtype)
    held = KV_FP8 if case.is_rounded else type_
    entries = [entry_fields(n, tensor(type_, groups, w), held) for n, w in (("k", d), ("v", e))]
    if case.is_latent:
        entries = [entry_fields("c", tensor(type_, d), held), [("r", tensor(type_, e))]]
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
        for name in ("c", "r") if case.is_latent else ("k", "v"):
            made = stored_entry(state, name, rng.normal(size=(length, *state[name].shape[2:])))
            for field, numbers in made.items():
                state[field][pages[b, at // case.page], at % case.page] = numbers
    tokens = sum(case.new) + case.padding[0]
    widths = case.widths if case.is_latent else (d,)
    queries = [rng.normal(size=(tokens, heads, w)).astype(type_.numpy) for w in widths]
    idle = [0] * case.padding[1]
    starts = np.cumsum([0, *case.new, *idle]).astype(np.int32)
    lengths = np.array([*case.lengths, *idle], np.int32)
    fields = [tensor(scalar("i32"), *a.shape) for a in (starts, lengths, pages)]
    attrs = {"window": case.window, "softcap": case.softcap, "scale": case.scale}
    name = "attention"
    if case.is_latent:
        name, attrs = "latent_attention", {"scale": case.scale}
    types = [tensor(type_, *q.shape) for q in queries]
    op = make_op(name, [*types, state_type, *fields], attrs)
    return op, [*queries, state, starts, lengths, pages]


def call_of(op: Op, data: list[Data], device: str) -> Attention:
    """The launchers' form of a case; results start as NaN."""

    def moved(array: Any) -> torch.Tensor:
        return to_torch(array.copy()).to(device)

    *queries, state, starts, lengths, pages = data
    assert isinstance(state, dict)
    held = {name: moved(pages) for name, pages in state.items()}
    query = moved(queries[0])
    is_latent = len(queries) > 1
    width = query.shape[-1] if is_latent else held["v"].shape[-1]
    out = query.new_full((*query.shape[:2], width), float("nan"))
    inputs = (query, *map(moved, queries[1:]), held, *map(moved, (starts, lengths, pages)))
    attrs = {"window": 0, "softcap": 0.0, **dict(op.attr)}
    made = of_latent_call if is_latent else of_call
    return made(TorchCall(op, inputs, (out,), attrs))


def run_form(case: Case, form: str, tile: Tile, programs: int = 0, device: str = "cpu") -> Any:
    """Results of one form by one tile."""
    prepare(device)
    op, data = attention_op(case)
    call = call_of(op, data, device)
    launches = prefill(call, tile) if form == "prefill" else split(call, tile, programs)
    for launch in launches:
        launch.run()
    return to_numpy(call.out, scalar(case.dtype))
