"""Sizes of the order that codes lie in (the layout ``triton.words``), for the templates.

NOTE: they are read as attributes of this module. A global name in a Triton function becomes part of
its key, or not, by which function was asked for its key first, and figures of the package are found
by keys. Values here are part of no key: a change of one needs a change of who reads it.
"""

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
