"""Sampling on the device that the logits lie on: only token ids travel to the host."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from metainfer.backends.triton.attention import power_above
from metainfer.backends.triton.launch import Launch

_BLOCK = 4096  # numbers of a program
_WARPS = 8
_GROUP = 64  # numbers whose largest one is kept
_LOOSE = 16  # bits of a rank that tell where top_k may cut
_WAYS = 16  # thresholds that are tried at once
_SLICE = 512  # numbers that are held against them, or put into bins, at once
_DRAWN = 1024  # numbers that are drawn from at once
_BINS_BITS = 12  # of a key, found by one level
_BINS = 1024  # bins that are summed at once
# What a row's token is where its logits have no finite largest one.
FAULTS = {-1: float("nan"), -2: float("inf"), -3: float("-inf")}


@dataclass(frozen=True)
class Draw:
    """How a row's token is drawn (`runtime.sampling`).

    Attributes:
        temperature: 0 takes the most likely token.
        top_k: keep that many most likely tokens, 0 all.
        top_p: keep the fewest most likely ones whose probabilities reach this.
        min_p: keep those at least this fraction as likely as the most likely one.
        key: 64 bits of the row's noise.
        position: number of the draw.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    key: int = 0
    position: int = 0


def packed(draws: Sequence[Draw]) -> np.ndarray:
    """Draws as the kernel reads them: f32 [R, 3] as bits, then words [R, 4]; i32 [R * 7]."""
    numbers = np.array([[d.temperature, d.top_p, d.min_p] for d in draws], np.float32)
    words = np.array(
        [[d.top_k, d.position, d.key & 0xFFFFFFFF, d.key >> 32] for d in draws], np.uint32
    )
    return np.concatenate([numbers.view(np.int32).ravel(), words.view(np.int32).ravel()])


@dataclass(frozen=True)
class Filters:
    """Which filters some row of a launch has: the launches that they need are made.

    Attributes:
        top_k: some row keeps fewer tokens than there are.
        top_p: some row keeps a part of all tokens' probability.
        wide: some row does so without top_k.
        min_p: some row has min_p.
    """

    top_k: bool = True
    top_p: bool = True
    wide: bool = True
    min_p: bool = True

    @property
    def is_any(self) -> bool:
        """Whether there is one at all."""
        return self.top_k or self.top_p or self.min_p


def filters_of(draws: Sequence[Draw], width: int) -> Filters:
    """What some draws from ``width`` tokens need."""
    drawn = [d for d in draws if d.temperature > 0]
    limited = [0 < d.top_k < width for d in drawn]
    return Filters(
        any(limited),
        any(d.top_p < 1 for d in drawn),
        any(d.top_p < 1 and not k for d, k in zip(drawn, limited, strict=True)),
        any(d.min_p > 0 for d in drawn),
    )


@dataclass(frozen=True)
class Scratch:
    """What programs of a launch leave for each other and for later launches, for some rows.

    Attributes:
        arrived: i32 [R], zeros between launches.
        best: f32 [R, parts, 2].
        where: i32 [R, parts].
        state: i64 [R, FIELDS].
        maxima: f32 [R, groups].
        sums: f32 [R, parts, WAYS].
        bins: i64 [R, 2 ** BINS_BITS], zeros between launches.
    """

    arrived: torch.Tensor
    best: torch.Tensor
    where: torch.Tensor
    state: torch.Tensor
    maxima: torch.Tensor
    sums: torch.Tensor
    bins: torch.Tensor


def scratch_of(rows: int, width: int, device: torch.device) -> Scratch:
    """Make room for launches of up to ``rows`` rows of ``width`` tokens."""
    from metainfer.backends.triton.templates.sample_rows import FIELDS

    _, parts, groups = _blocks(width)

    def made(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.zeros(rows, *shape, dtype=dtype, device=device)

    return Scratch(
        made(torch.int32), made(torch.float32, parts, 2), made(torch.int32, parts),
        made(torch.int64, FIELDS.value), made(torch.float32, groups),
        made(torch.float32, parts, _WAYS), made(torch.int64, 1 << _BINS_BITS),
    )  # fmt: skip


def _blocks(width: int) -> tuple[int, int, int]:
    """How a row is shared: (numbers of a block, how many blocks, groups of numbers in all)."""
    block = min(_BLOCK, power_above(max(width, 4)))
    parts = -(-width // block)
    return block, parts, parts * (block // min(_GROUP, block))


def _keys(logits: torch.Tensor) -> dict[str, int]:
    """Bits of a number's rank, and of its index."""
    ranks = 16 if logits.dtype == torch.bfloat16 else 32
    return {"RANKS": ranks, "PLACES": max(logits.shape[1] - 1, 1).bit_length()}


def _row(draws: torch.Tensor, width: int, scratch: Scratch) -> dict[str, Any]:
    """What every launch knows of its rows."""
    rows = len(draws) // 7
    return {
        "numbers": draws[: rows * 3].view(torch.float32), "words": draws[rows * 3 :],
        "state": scratch.state, "V": width,
    }  # fmt: skip


def launches(
    logits: torch.Tensor,
    draws: torch.Tensor,
    ids: torch.Tensor,
    scratch: Scratch,
    filters: Filters,
) -> tuple[Launch, ...]:
    """Choose a token for each row, or say what is wrong with its logits (`FAULTS`).

    A row's token depends neither on the other rows nor on which filters those have.

    Args:
        logits: of the rows.
        draws: of the rows, as `packed`.
        ids: what is chosen.
        scratch: room for as many rows or more.
        filters: at least those that the rows have.

    Shapes: logits [R, V], draws i32 [R * 7], ids i32 [R].
    """
    # Imported where it is launched: templates need Triton.
    from metainfer.backends.triton.templates import sample_rows as rules

    rows, width = logits.shape
    if rows == 0:
        return ()
    block, parts, groups = _blocks(width)
    keys, row = _keys(logits), _row(draws[: rows * 7], width, scratch)
    every = {**row, "logits": logits, "row_stride": logits.stride(0), "parts": parts}
    arriving = {**every, "arrived": scratch.arrived}

    def made(function: Any, given: dict[str, Any], **constants: Any) -> Launch:
        constants = {**keys, "BLOCK": block, **constants}
        return Launch(function, (rows * parts,), given, constants, num_warps=_WARPS)

    def level(*, count: bool, opens: bool) -> list[Launch]:
        how = {"COUNT": count, "OPENS": opens, "BINS_BITS": _BINS_BITS}
        given, inner = {**row, "bins": scratch.bins}, {**keys, **how, "SLICE": _BINS}
        return [
            made(rules.scatter, {**every, "bins": scratch.bins}, **how, SLICE=min(_SLICE, block)),
            Launch(rules.narrow, (rows,), given, inner, num_warps=_WARPS),
        ]

    found: list[Launch] = []
    levels = -(-sum(keys.values()) // _BINS_BITS)
    if filters.is_any:
        given = {**arriving, "maxima": scratch.maxima}
        held = {"GROUP": min(_GROUP, block), "GROUPS": power_above(groups), "LOOSE": _LOOSE}
        found.append(made(rules.survey, given, **held))
    if filters.top_k:
        found += level(count=True, opens=False) * levels
    if filters.wide:
        ways = {"WAYS": _WAYS, "PARTS": power_above(parts), "SLICE": min(_SLICE, block)}
        found.append(made(rules.coarse, {**arriving, "sums": scratch.sums}, **ways))
    if filters.top_p:
        found += level(count=False, opens=filters.top_k)
        found += level(count=False, opens=False) * (levels - 1)
    given = {**arriving, "ids": ids, "best": scratch.best, "where": scratch.where}
    drawn = {"FILTERED": filters.is_any, "PARTS": power_above(parts), "SLICE": min(_DRAWN, block)}
    return (*found, made(rules.race, given, **drawn))
