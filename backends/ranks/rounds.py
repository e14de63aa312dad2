"""Rounds over a window: write to peers, sum what lies there, take it out.

On GPUs one Triton launch a round, on CPUs copies; both find the half of the window that is in use
by themselves, and give the same numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from metainfer.backends.ranks.windows import ALIGN, Place, Window
from metainfer.backends.triton.launch import Launch

# Programs of a launch: enough for any link, few enough to leave room for what runs beside.
_PROGRAMS = 64
_PROGRAM_BYTES = 8192  # that a program moves at once
_WARPS = 8
# Copies go by width: what the bits mean is no matter.
_BY_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Part:
    """A place of a window, and the element of the tensor at hand that goes with it."""

    place: Place
    start: int = 0


def sum_parts(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum in the order given, floats in float32, rounded once."""
    first = parts[0]
    total = first.float() if first.is_floating_point() else first.clone()
    total = total.clone() if total is first else total
    for part in parts[1:]:
        total += part
    return total.to(first.dtype)


def send(window: Window, x: torch.Tensor, parts: Sequence[Part], size: int) -> None:
    """Write elements of x to places, each from its start; zeros behind the end of x.

    Args:
        window: written to.
        x: dense, flat.
        parts: where to, and from where in x.
        size: elements of each.
    """
    raw = x.view(_BY_WIDTH[x.dtype.itemsize])
    if not window.is_launched:
        for part in parts:
            target = window.view(part.place, raw.dtype, size)
            held = raw[part.start : part.start + size]
            target[: held.numel()] = held
            target[held.numel() :] = 0
        return
    arguments = {
        "x": raw, "targets": _table(window, parts), "turns": window.turns,
        "half_bytes": window.half_bytes, "count": raw.numel(), "size": size,
    }  # fmt: skip
    _run("send", raw, size, arguments, parts, TARGETS=len(parts), ROUND=0)


def total(
    window: Window, out: torch.Tensor, sources: Sequence[Part], targets: Sequence[Part],
    size: int, *, is_last: bool,
) -> None:  # fmt: skip
    """Sum what lies at places, in their order; into ``out``, or to the targets if there are any.

    Args:
        window: read, and written where there are targets.
        out: dense, flat; its type is that of the sum.
        sources: of the parts.
        targets: of the sum.
        size: elements.
        is_last: whether the call ends with it.
    """
    if not window.is_launched:
        made = sum_parts([window.view(s.place, out.dtype, size) for s in sources])
        for part in targets:
            window.view(part.place, out.dtype, size).copy_(made)
        if not targets:
            out.copy_(made)
        window.used += is_last
        return
    arguments = {
        "out": out, "sources": _table(window, sources),
        "targets": _table(window, targets or sources), "turns": window.turns,
        "half_bytes": window.half_bytes, "size": size,
    }  # fmt: skip
    _run(
        "total", out, size, arguments, (*sources, *targets),
        SOURCES=len(sources), TARGETS=len(targets), ROUND=1, LAST=is_last,
    )  # fmt: skip


def receive(
    window: Window, out: torch.Tensor, parts: Sequence[Part], size: int, *, number: int = 1
) -> None:
    """Take elements out of places, each to its start in ``out``, as far as that goes; ends a call.

    Args:
        window: read.
        out: dense, flat.
        parts: where from, and to where in ``out``.
        size: elements of each.
        number: of the round.
    """
    raw = out.view(_BY_WIDTH[out.dtype.itemsize])
    if not window.is_launched:
        for part in parts:
            target = raw[part.start : part.start + size]
            target.copy_(window.view(part.place, raw.dtype, size)[: target.numel()])
        window.used += 1
        return
    arguments = {
        "out": raw, "sources": _table(window, parts), "turns": window.turns,
        "half_bytes": window.half_bytes, "count": raw.numel(), "size": size,
    }  # fmt: skip
    _run("receive", raw, size, arguments, parts, SOURCES=len(parts), ROUND=number)


def _table(window: Window, parts: Sequence[Part]) -> torch.Tensor:
    return window.table([p.place for p in parts], [p.start for p in parts])


def _run(
    function: str, like: torch.Tensor, size: int, arguments: dict[str, Any],
    parts: Sequence[Part], **constants: Any,
) -> None:  # fmt: skip
    from metainfer.backends.triton.templates import peers

    made = launch_of(getattr(peers, function), like, size, arguments, parts, constants)
    made.run()


def launch_of(
    function: Any, like: torch.Tensor, size: int, arguments: dict[str, Any],
    parts: Sequence[Part], constants: dict[str, Any],
) -> Launch:  # fmt: skip
    """The launch of a round.

    Args:
        function: of `backends.triton.templates.peers`.
        like: the tensor that is copied or summed.
        size: elements of a part.
        arguments: run-time arguments.
        parts: all places that it touches: whole vectors are moved where all begin on one.
        constants: the function's own.
    """
    width = like.dtype.itemsize
    is_aligned = like.data_ptr() % ALIGN == 0 and all(
        p.place.offset % ALIGN == 0 and p.start * width % ALIGN == 0 for p in parts
    )
    block = _PROGRAM_BYTES // width
    return Launch(
        function,
        (max(min(-(-size // block), _PROGRAMS), 1),),
        arguments,
        {**constants, "BLOCK": block, "VECTOR": ALIGN // width if is_aligned else 1},
        num_warps=_WARPS,
    )
