"""Conditions of rules: ``where D % 32 == 0 and D * 4 <= device.smem_per_block_bytes``.

Names are sizes of the pattern (``D``), attributes (``$eps``), fields of the device
(``device.smem_per_block_bytes``) and widths of element types (``t.bits``). There are numbers,
``+ - * // %``, comparisons, ``and or not``, and nothing else: a rule that needs more is a pass.
"""

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from metainfer.ir.errors import TypeMismatch
from metainfer.ir.printer import ref
from metainfer.ir.syntax import MAX_NESTING, SourceText, integer, ref_name

Env = Mapping[str, int | float | bool]


@dataclass(frozen=True)
class Number:
    """A number that is not negative, or ``true`` or ``false``."""

    value: int | float | bool


@dataclass(frozen=True)
class Name:
    """``D``, ``t.bits``, ``device.num_sms`` or, with its sigil, ``$eps``."""

    name: str


@dataclass(frozen=True)
class Unary:
    """``-operand`` or ``not operand``."""

    op: str
    operand: "Where"


@dataclass(frozen=True)
class Binary:
    """Arithmetic or a comparison of two operands."""

    op: str
    left: "Where"
    right: "Where"


@dataclass(frozen=True)
class Logical:
    """``and`` or ``or`` over two operands or more."""

    op: str
    operands: "tuple[Where, ...]"


Where = Number | Name | Unary | Binary | Logical

_ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
}
_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
_PRECEDENCE = {"or": 1, "and": 2, "not": 3, "+": 5, "-": 5, "*": 6, "//": 6, "%": 6}
_COMPARISON, _MINUS, _LEAF = 4, 7, 8


def evaluate_where(where: Where | None, env: Env) -> bool:
    """Say whether a condition holds; no condition always does.

    Args:
        where: the condition.
        env: names to numbers, spelt as `names_of` gives them: "D", "$eps", "device.num_sms".

    Raises: TypeMismatch if a name has no value, or for a division by zero.
    """
    return where is None or bool(_evaluate(where, env))


def _evaluate(where: Where, env: Env) -> Any:
    match where:
        case Number(value):
            return value
        case Name(name):
            if name not in env:
                known = ", ".join(sorted(env)) or "none"
                raise TypeMismatch(f"where: {name} has no value", advice=f"known: {known}")
            return env[name]
        case Unary("not", operand):
            return not _evaluate(operand, env)
        case Unary(_, operand):
            return -_evaluate(operand, env)
        case Logical("and", operands):
            return all(_evaluate(part, env) for part in operands)
        case Logical(_, operands):
            return any(_evaluate(part, env) for part in operands)
        case Binary(op, left, right):
            return _binary(where, op, _evaluate(left, env), _evaluate(right, env))


def _binary(where: Where, op: str, left: Any, right: Any) -> Any:
    if op in _COMPARISONS:
        return _COMPARISONS[op](left, right)
    if op in ("//", "%") and right == 0:
        raise TypeMismatch(f"where: division by zero in {print_where(where)}")
    return _ARITHMETIC[op](left, right)


def names_of(where: Where | None) -> frozenset[str]:
    """All names that a condition reads."""
    return frozenset(node.name for node in _walk(where) if isinstance(node, Name))


def _walk(where: Where | None) -> Iterator[Where]:
    if where is None:
        return
    yield where
    match where:
        case Unary(_, operand):
            yield from _walk(operand)
        case Binary(_, left, right):
            yield from _walk(left)
            yield from _walk(right)
        case Logical(_, operands):
            for part in operands:
                yield from _walk(part)


def print_where(where: Where) -> str:
    """Print a condition with no more parentheses than it needs."""
    match where:
        case Number(bool(value)):
            return "true" if value else "false"
        case Number(value):
            return repr(value)
        case Name(name):
            return ref(name) if name.startswith("$") else name
        case Unary("not", operand):
            return f"not {_inside(operand, 3)}"
        case Unary(op, operand):
            return f"{op}{_inside(operand, _MINUS)}"
        case Logical(op, operands):
            return f" {op} ".join(_inside(part, _PRECEDENCE[op] + 1) for part in operands)
        case Binary(op, left, right):
            level = _level(where)
            # Comparisons do not chain; arithmetic groups to the left.
            on_left = level + 1 if op in _COMPARISONS else level
            return f"{_inside(left, on_left)} {op} {_inside(right, level + 1)}"


def _inside(where: Where, least: int) -> str:
    text = print_where(where)
    return text if _level(where) >= least else f"({text})"


def _level(where: Where) -> int:
    match where:
        case Number() | Name():
            return _LEAF
        case Unary("not", _):
            return _PRECEDENCE["not"]
        case Unary():
            return _MINUS
        case Logical(op, _) | Binary(op, _, _):
            return _PRECEDENCE.get(op, _COMPARISON)


def read_where(source: SourceText, tree: Any) -> Where:
    """Read a raw condition.

    Raises: ParseError for a number where a condition must stand, or for deep nesting.
    """
    where = _read(source, tree, 0)
    _check_truth(source, tree, where)
    return where


def _read(source: SourceText, tree: Any, depth: int) -> Where:
    if depth > MAX_NESTING:
        raise source.error(first_token(tree), "a condition is nested too deeply")
    children = tree.children
    if tree.data == "literal":
        return Number(_number(source, children[0]))
    if tree.data == "reference":
        return Name(_reference(source, children[0]))
    parts: list[Any] = [
        _read(source, c, depth + 1) if hasattr(c, "data") else str(c) for c in children
    ]
    match str(tree.data):
        case "any" | "all":
            for child, part in zip(children, parts, strict=True):
                _check_truth(source, child, part)
            return Logical("or" if tree.data == "any" else "and", tuple(parts))
        case "inverse":
            _check_truth(source, children[0], parts[0])
            return Unary("not", parts[0])
        case "minus":
            if parts[0] != "-":
                raise source.error(children[0], "a number has no sign +", "leave the + away")
            return Unary("-", parts[1])
    left, op, right = parts
    return Binary(op, left, right)


def first_token(tree: Any) -> Any:
    """The leftmost token of a raw condition."""
    while hasattr(tree, "data"):
        tree = tree.children[0]
    return tree


def _number(source: SourceText, token: Any) -> int | float | bool:
    if token.type == "BOOL":
        return bool(token == "true")
    if token.isdigit():
        return integer(source, token)
    value = float(token)
    if math.isinf(value):
        raise source.error(token, f"{token} is too large for a number")
    return value


def _reference(source: SourceText, token: Any) -> str:
    if token.type == "PATH":
        return str(token)
    name = ref_name(source, token)
    if name[0] != "$":
        raise source.error(token, f"{name} is no number", "attributes are written $name")
    return name


def _check_truth(source: SourceText, tree: Any, where: Where) -> None:
    """Refuse arithmetic where a condition must stand: ``where D - 1``."""
    match where:
        case Number(bool()):
            return
        case Number() | Unary("-", _):
            pass
        case Binary(op, _, _) if op in _ARITHMETIC:
            pass
        case _:
            return
    raise source.error(
        first_token(tree),
        f"{print_where(where)} is a number where a condition is needed",
        "compare it: <= < == != > >=",
    )
