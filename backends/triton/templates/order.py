"""Sizes of the order that codes lie in (the layout ``triton.words``), for the templates.

NOTE: they are read as attributes of this module. A global name in a Triton function becomes part of
its key, or not, by which function was asked for its key first, and figures of the package are found
by keys. What is here is part of no key of Triton's: a change needs a change of who reads it, too,
or Triton runs what it has on disk. (`cross` knows by this file's text.)
"""

from collections.abc import Callable
from typing import Any, TypeVar

import triton.language as tl

from metainfer.backends.triton.interpreter import is_interpreting

# The interpreter knows no assembler.
IS_INTERPRETED: tl.constexpr = tl.constexpr(is_interpreting())
CHUNK: tl.constexpr = tl.constexpr(128)  # 4-bit codes of a row that four threads share: 64 bytes
BYTES: tl.constexpr = tl.constexpr(64)  # codes of a byte, likewise
# Numbers of e2m1 codes are made 2^-32 of what they mean: scales up to 2^33 are then numbers of
# bf16, and products by scales down to 2^-100 are; smaller ones lose bits, of what is less than
# 2^-98.
LIFT: tl.constexpr = tl.constexpr(4294967296.0)


_Function = TypeVar("_Function", bound=Callable[..., Any])


def _while_compiling(function: _Function) -> _Function:
    """Have Triton call a function while it compiles, with what it compiles for."""
    marked: Any = function
    marked.__triton_builtin__ = True
    return function


@_while_compiling
def fours(rows: Any, group: Any = 0, _semantic: Any = None) -> tl.constexpr:
    """Whether a product of widened codes is told its numbers by fours.

    Triton lets a thread of a warp's instruction (``mma.sync``) hold four neighbours of an operand
    that was joined from words or read as bytes. Codes lie as a warpgroup's instruction takes them:
    two neighbours and the pair eight on. A warp's product is told that those four are neighbours,
    on either side: sums do not mind the order. Widened codes then stay in the registers that they
    were read to, where they would go through shared memory.

    Args:
        rows: of the product's sums.
        group: numbers of a row of codes that share a scale, 0 for all: fewer than 16 would part.
    """
    rows, group = (getattr(n, "value", n) for n in (rows, group))
    if _semantic is None:
        # Interpreted: either order is right.
        return tl.constexpr(INTERPRETED_FOURS and group % _TOLD == 0)
    if group % _TOLD:
        return tl.constexpr(False)
    generation = _generation(_semantic)
    by_warps = generation == 9 and not _by_warpgroups(rows, _semantic)
    return tl.constexpr(generation in (8, 12) or by_warps)


@_while_compiling
def apart(rows: Any, columns: Any, _semantic: Any = None) -> tl.constexpr:
    """Whether a step's product of widened codes is summed by itself, and then added.

    Triton makes a loop's product that only adds to sums asynchronous, and takes it apart where its
    first operand is in registers: 3.6 into single instructions, each with a fence, a wait and a
    descriptor made anew (77 of the 448 instructions that a thread took for 128 codes of MXFP4),
    3.7 into two. With few columns the addition is a handful of instructions, and other programs
    fill the wait; with many, the matrix units would wait for codes to be widened.

    Args:
        rows: of the product's sums.
        columns: likewise: tokens.
    """
    rows, columns = (getattr(n, "value", n) for n in (rows, columns))
    is_few = columns <= _FEW
    if _semantic is None:
        return tl.constexpr(is_few)
    return tl.constexpr(is_few and _by_warpgroups(rows, _semantic))


def _generation(semantic: Any) -> int:
    """The first number of a compute capability that Triton compiles for; 0 on other hardware."""
    arch = str(getattr(semantic.builder.options, "arch", ""))
    return int("".join(filter(str.isdigit, arch))) // 10 if arch.startswith("sm") else 0


def _by_warpgroups(rows: int, semantic: Any) -> bool:
    """Whether products of so many rows are Hopper's, of four warps and 64 rows at once."""
    is_whole = semantic.builder.options.num_warps % 4 == 0 and rows % 64 == 0
    return is_whole and _generation(semantic) == 9


INTERPRETED_FOURS = False
_TOLD = 16  # numbers of a step of the instructions, the widest that are told in another order
_FEW = 32  # columns of sums that are added by themselves; part of no key of Triton's
