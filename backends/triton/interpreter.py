"""Triton's interpreter: kernels on CPU tensors, one program after the other, for tests.

Triton decides when it is imported, by ``TRITON_INTERPRET=1``, whether a process interprets or
compiles; no process can do both. Faults of the interpreter (3.6 and 3.7) are repaired here:

| what | it does | repaired |
|---|---|---|
| float -> bf16, fp8 | truncates, or rounds half up and loses the carry | to nearest even |
| ``tl.dot`` of bf16 | multiplies the bit patterns as integers | as the floats they are |
| calls of functions | put the interpreter into the language: half the time | once a launch |
"""

from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

from metainfer.ir.errors import Unsupported


@cache
def is_interpreting() -> bool:
    """Whether this process interprets Triton.

    Raises: Unsupported if Triton is not installed.
    """
    return bool(_triton().knobs.runtime.interpret)


def prepare(device: str) -> None:
    """Make sure that kernels run on tensors of a type of device ("cpu", "cuda").

    Raises: Unsupported if they do not in this process.
    """
    if is_interpreting():
        _repair()
        return
    if device == "cpu":
        raise Unsupported(
            "Triton kernels do not run on CPU tensors",
            advice="compile the plan for this machine (--hw cpu); tests interpret them with "
            "TRITON_INTERPRET=1, set before Python starts",
        )


def _triton() -> Any:
    try:
        import triton
    except ImportError as error:
        raise Unsupported(
            "Triton is not installed, GPU plans need it",
            advice="on Linux: pip install 'triton>=3.6,<3.8' (the version that torch pins)",
        ) from error
    return triton


@cache
def _repair() -> None:
    """Put right what the interpreter computes wrongly, once a process."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder: Any = interpreter.InterpreterBuilder
    floats = {
        tl.bfloat16: ml_dtypes.bfloat16,
        tl.float16: np.float16,
        tl.float32: np.float32,
        tl.float64: np.float64,
        tl.float8e4nv: ml_dtypes.float8_e4m3fn,
        tl.float8e5: ml_dtypes.float8_e5m2,
    }
    plain_cast, plain_convert, plain_dot = (
        builder.cast_impl, builder.create_fp_to_fp, builder.create_dot,
    )  # fmt: skip

    def values(handle: Any) -> Any:
        return handle.data.view(floats[handle.dtype.scalar])

    def converted(source: Any, target: Any) -> Any:
        with np.errstate(all="ignore"):
            # Through float32, as the references round; exact for every narrower source.
            made = values(source).astype(np.float32).astype(floats[target])
        carrier = interpreter._get_np_dtype(target)
        return interpreter.TensorHandle(made.view(carrier), target)

    def is_narrow(*types: Any) -> bool:
        wide = (tl.float16, tl.float32, tl.float64)
        return all(t in floats for t in types) and not all(t in wide for t in types)

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        if is_narrow(source.dtype.scalar, target.scalar):
            return converted(source, target.scalar)
        return plain_cast(self, source, target)

    def create_fp_to_fp(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        if is_narrow(source.dtype.scalar, target.scalar):
            return converted(source, target.scalar)
        return plain_convert(self, source, target, rounding)

    def create_dot(self: Any, a: Any, b: Any, d: Any, precision: Any, imprecise: Any) -> Any:
        if not is_narrow(a.dtype.scalar, b.dtype.scalar):
            return plain_dot(self, a, b, d, precision, imprecise)
        product = np.matmul(values(a).astype(np.float32), values(b).astype(np.float32))
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    builder.cast_impl = cast_impl
    builder.create_fp_to_fp = create_fp_to_fp
    builder.create_dot = create_dot
    _patch_once_a_launch(interpreter, (tl, tl.core))


def _patch_once_a_launch(interpreter: Any, languages: tuple[Any, ...]) -> None:
    """Have functions that a kernel calls find the language as the launch left it.

    The interpreter puts its functions into the modules of the language that a function's module
    has at hand: before a launch, after which they are taken out, and before each call within it.
    """
    executor = interpreter.GridExecutor
    plain_patch, plain_launch = interpreter._patch_lang, executor.__call__
    patched: set[tuple[bool, ...]] = set()

    @cache
    def languages_of(function: Any) -> tuple[bool, ...]:
        names = function.__globals__.values()
        return tuple(any(value is language for value in names) for language in languages)

    def patch(function: Any) -> Any:
        found = languages_of(function)
        if found in patched:
            return None  # what a launch would take out, calls leave
        patched.add(found)
        return plain_patch(function)

    def launch(self: Any, *given: Any, **named: Any) -> None:
        patched.clear()
        plain_launch(self, *given, **named)

    interpreter._patch_lang = patch
    executor.__call__ = launch
