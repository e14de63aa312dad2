"""Triton text of each elementwise op: floats are float32 variables, integers and truth as typed."""

import math
from collections.abc import Callable, Sequence

from metainfer.ir.dtypes import DType, Scalar
from metainfer.ir.errors import Unsupported
from metainfer.ir.graph import Op

Formula = Callable[..., str]

# Triton's names of element types.
TYPES = {
    "bool": "tl.int1", "i8": "tl.int8", "u8": "tl.uint8", "i16": "tl.int16", "i32": "tl.int32",
    "i64": "tl.int64", "f16": "tl.float16", "bf16": "tl.bfloat16", "f32": "tl.float32",
    "f8e4m3": "tl.float8e4nv", "f8e5m2": "tl.float8e5",
}  # fmt: skip

_FLOATS: dict[str, Formula] = {
    "neg": lambda x: f"-{x}",
    "abs": lambda x: f"tl.abs({x})",
    "exp": lambda x: f"tl.exp({x})",
    "log": lambda x: f"tl.log({x})",
    "sqrt": lambda x: f"tl.sqrt_rn({x})",
    "rsqrt": lambda x: f"1.0 / tl.sqrt_rn({x})",
    "reciprocal": lambda x: f"1.0 / {x}",
    "sin": lambda x: f"tl.sin({x})",
    "cos": lambda x: f"tl.cos({x})",
    "tanh": lambda x: f"functions.tanh({x})",
    "erf": lambda x: f"tl.erf({x})",
    "sigmoid": lambda x: f"1.0 / (1.0 + tl.exp(-{x}))",
    "relu": lambda x: f"tl.maximum({x}, 0.0, propagate_nan=tl.PropagateNan.ALL)",
    "silu": lambda x: f"functions.silu({x})",
    "floor": lambda x: f"tl.floor({x})",
    "div": lambda x, y: f"{x} / {y}",
    "silu_mul": lambda x, y: f"functions.silu({x}) * {y}",
}
_INTEGERS: dict[str, Formula] = {
    "neg": lambda x: f"-{x}",
    "abs": lambda x: f"tl.abs({x})",
}
_NUMBERS: dict[str, Formula] = {
    "add": lambda x, y: f"{x} + {y}",
    "sub": lambda x, y: f"{x} - {y}",
    "mul": lambda x, y: f"{x} * {y}",
}
_TRUTH: dict[str, Formula] = {
    "add": lambda x, y: f"{x} | {y}",
    "mul": lambda x, y: f"{x} & {y}",
    "maximum": lambda x, y: f"{x} | {y}",
    "minimum": lambda x, y: f"{x} & {y}",
}
_ANY: dict[str, Formula] = {
    "eq": lambda x, y: f"{x} == {y}",
    "ne": lambda x, y: f"{x} != {y}",
    "lt": lambda x, y: f"{x} < {y}",
    "le": lambda x, y: f"{x} <= {y}",
    "gt": lambda x, y: f"{x} > {y}",
    "ge": lambda x, y: f"{x} >= {y}",
    "logical_and": lambda x, y: f"({x} != 0) & ({y} != 0)",
    "logical_or": lambda x, y: f"({x} != 0) | ({y} != 0)",
    "logical_not": lambda x: f"{x} == 0",
    "where": lambda c, x, y: f"tl.where({c}, {x}, {y})",
}
ELEMENTWISE = frozenset(
    {*_FLOATS, *_INTEGERS, *_NUMBERS, *_TRUTH, *_ANY, "gelu", "gelu_mul", "cast"}
)


def formula(op: Op, operands: Sequence[str]) -> str:
    """Text of an elementwise op on variables.

    Raises: Unsupported for an op or a type that has none.
    """
    kind = scalar(op.operands[-1].tensor.dtype)
    if op.name == "cast":
        return _cast(kind, str(op.attr["dtype"]), operands[0])
    if op.name in ("gelu", "gelu_mul"):
        exact = op.attr.get("approximate", "none") == "none"
        text = f"functions.gelu_{'erf' if exact else 'tanh'}({operands[0]})"
        return text if op.name == "gelu" else f"{text} * {operands[1]}"
    if op.name in ("maximum", "minimum") and kind.name != "bool":
        propagate = ", propagate_nan=tl.PropagateNan.ALL" if kind.is_float else ""
        return f"tl.{op.name}({', '.join(operands)}{propagate})"
    tables = [_ANY]
    if kind.name == "bool":
        tables.append(_TRUTH)
    else:
        tables += [_NUMBERS, _FLOATS if kind.is_float else _INTEGERS]
    for table in tables:
        if op.name in table:
            return table[op.name](*operands)
    raise Unsupported(
        f"the emitter has no formula for {op.name} of {kind}",
        advice="add one in backends/triton/emit/formulas.py",
    )


def scalar(dtype: DType) -> Scalar:
    """An element type that variables can have.

    Raises: Unsupported for others.
    """
    if not isinstance(dtype, Scalar) or dtype.name not in TYPES:
        raise Unsupported(
            f"the emitter does not compute with {dtype}", advice="cast or dequantize it first"
        )
    return dtype


def _cast(source: Scalar, target: str, x: str) -> str:
    if target not in TYPES:
        raise Unsupported(f"the emitter does not cast to {target}", advice="keep the cast apart")
    if target == source.name or (source.is_float and is_float(target)):
        return x  # rounding is what the border of the op does
    if target == "bool":
        return f"{x} != 0"
    return f"{x}.to({'tl.float32' if is_float(target) else TYPES[target]})"


def is_float(name: str) -> bool:
    """Whether a type of TYPES is floating point."""
    return name.startswith(("f", "bf"))


def rounded(x: str, dtype: Scalar) -> str:
    """Text that rounds a float32 variable to a type, as float32; "" where nothing changes."""
    if dtype.name == "f32" or not dtype.is_float:
        return ""
    if dtype.name in ("f8e4m3", "f8e5m2"):
        return f"functions.round_{dtype.name}({x})"
    return f"{x}.to({TYPES[dtype.name]}).to(tl.float32)"


def number(value: float | int | bool) -> str:
    """Text of a constant."""
    if isinstance(value, bool) or isinstance(value, int):
        return repr(value)
    return repr(value) if math.isfinite(value) else f'float("{value}")'
