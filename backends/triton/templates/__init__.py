"""Hand-written ``@triton.jit`` functions; imported when the first of them is launched or compiled.

Triton reads their source, so they are untyped Python: tiles take the names of ``ir`` legends
(``x_MK``: rows by inner), constants are upper case.
"""
