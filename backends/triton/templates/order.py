"""Sizes of the order that codes lie in (the layout ``triton.words``), for the templates.

NOTE: they are read as attributes of this module. A global name in a Triton function becomes part of
its key, or not, by which function was asked for its key first, and figures of the package are found
by keys. What is here is part of no key of Triton's: a change needs a change of who reads it, too,
or Triton runs what it has on disk. (`cross` knows by this file's text.)
"""

from typing import Any

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


def fours(rows: Any, group: Any = 0, _semantic: Any = None) -> tl.constexpr:
    """Whether a product of widened codes is told its numbers by fours.

    Triton lets a thread of a warp's instruction (``mma.sync``) hold four neighbours of an operand
    that was joined from words or read as bytes. Codes lie as a warpgroup's instruction takes them:
    two neighbours and the pair eight on. A warp's product is told that those four are neighbours,
    on either side: sums do not mind the order. Widened codes then stay in the registers that they
    were read to, where they would go through shared memory.

    Args:
        rows: of the product's sums: warpgroups take 64 at once.
        group: numbers of a row of codes that share a scale, 0 for all: fewer than 16 would part.
    """
    rows, group = (getattr(n, "value", n) for n in (rows, group))
    if _semantic is None:
        # Interpreted: either order is right.
        return tl.constexpr(INTERPRETED_FOURS and group % _TOLD == 0)
    options = _semantic.builder.options
    arch = str(getattr(options, "arch", ""))
    if not arch.startswith("sm") or group % _TOLD:
        return tl.constexpr(False)
    generation = int("".join(filter(str.isdigit, arch))) // 10
    is_warpgroup = options.num_warps % 4 == 0 and rows % 64 == 0
    return tl.constexpr(generation in (8, 12) or (generation == 9 and not is_warpgroup))


INTERPRETED_FOURS = False
_TOLD = 16  # numbers of a step of the instructions, the widest that are told in another order
# So that Triton calls it while it compiles, with what it compiles for.
fours.__triton_builtin__ = True  # type: ignore[attr-defined]
