"""What a rewrite saves, counted before any kernel is chosen: bytes moved and launches.

Views count nothing: they move no number.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from metainfer.ir.dims import dim
from metainfer.ir.graph import Module, Op, Value
from metainfer.ir.ops.record import VIEW, op_def
from metainfer.ir.types import TensorType
from metainfer.passes.target import Target

Env = Mapping[str, int]
# Operators that an op stands for, where those are several; a sort by expert goes before them.
OPERATORS: Mapping[str, tuple[str, ...]] = {
    "experts": ("gather", "gate", "up", "activation", "down", "top-k reduce"),
}


@dataclass(frozen=True)
class Gain:
    """Saved by one rewrite.

    Units: bytes at the typical sizes of the strategy; launches.
    """

    bytes: int
    launches: int

    def __add__(self, other: "Gain") -> "Gain":
        """Add two gains."""
        return Gain(self.bytes + other.bytes, self.launches + other.launches)

    def time_us(self, target: Target) -> float:
        """Microseconds saved, by the device's memory rate and its time per launch."""
        device = target.device
        floor = device.kernel_floor_us or device.launch_latency_us
        return self.bytes / device.memory_bandwidth.sustained * 1e6 + self.launches * floor

    def text(self, target: Target, sizes: str) -> str:
        """One line for the report."""
        return (
            f"{self.bytes} bytes and {self.launches} launches fewer a step at {sizes}, "
            f"about {self.time_us(target):.1f} us"
        )


def typical_sizes(module: Module, target: Target) -> dict[str, int]:
    """Values of the symbols that gains are counted at: the strategy's, else the upper bound."""
    typical = dict(target.strategy.typical)
    return {s.name: min(typical.get(s.name, s.high), s.high) for s in module.symbols}


def sizes_text(env: Env) -> str:
    """Print ``T=8, B=8``."""
    return ", ".join(f"{name}={size}" for name, size in env.items()) or "its size"


def bytes_of(value: Value, env: Env) -> int:
    """Bytes of a tensor; a state counts nothing, since no rewrite moves it."""
    return value.type.bytes_at(env) if isinstance(value.type, TensorType) else 0


def is_view(op: Op) -> bool:
    """Whether an op moves no number."""
    return op.name not in ("call", "fused") and VIEW in op_def(op.name).traits


def gain_of_change(before: Sequence[Op], after: Sequence[Op], env: Env) -> Gain:
    """What is saved if other ops, each run by itself, stand for some ops."""
    had, has = ([op for op in ops if not is_view(op)] for ops in (before, after))
    return Gain(_traffic(had, env) - _traffic(has, env), len(had) - len(has))


def _traffic(ops: Sequence[Op], env: Env) -> int:
    return sum(bytes_of(v, env) for op in ops for v in (*op.operands, *op.results))


def gain_of_group(ops: Sequence[Op], returned: frozenset[str], env: Env) -> Gain:
    """What is saved if ops run as one: inner values stay inside, outer ones are read once.

    Args:
        ops: the group, in order.
        returned: names of values that leave it.
        env: sizes.
    """
    base: dict[str, Value] = {}

    def root(value: Value) -> Value:
        return base.get(value.name, value)

    working = [op for op in ops if not is_view(op)]
    for op in ops:
        if is_view(op) and op.operands:
            base[op.result.name] = root(op.operands[0])
    made = {v.name: v for op in working for v in op.results}
    leaving = {root(v).name for op in ops for v in op.results if v.name in returned}
    saved = sum(bytes_of(v, env) for name, v in made.items() if name not in leaving)
    read: set[str] = set()
    for op in working:
        for value in op.operands:
            origin = root(value)
            # A group reads what comes from outside once, and what it makes itself never.
            if origin.name in made or value.name in read:
                saved += bytes_of(value, env)
            read.add(value.name)
    return Gain(saved, max(len(working) - 1, 0))


def gain_of_kernel(op: Op, launches: int, env: Env) -> Gain:
    """What a group saves beside its operators, each run alone.

    Args:
        op: a group, or an op.
        launches: of its kernel.
        env: sizes.
    """
    inner = op.body.ops if op.body is not None else (op,)
    gain = Gain(0, 0)
    if op.body is not None:
        gain = gain_of_group(inner, frozenset(v.name for v in op.body.outputs), env)
    for one in inner:
        if one.name in OPERATORS:
            gain += _gain_of_experts(one, launches, env)
    return gain


def _gain_of_experts(op: Op, launches: int, env: Env) -> Gain:
    """Experts whose tokens are gathered, multiplied and activated by one launch."""
    fewer = len(OPERATORS["experts"]) + 1 - launches
    if fewer <= 0:
        return Gain(0, 0)
    tokens, chosen = op.operands[1].tensor.concrete(env)
    held, inner, width = (n.static for n in op.operands[3].tensor.shape)
    total = op.attr.get("total", 0) or held
    assert isinstance(total, int)
    pairs = tokens * chosen * held // total
    row = op.result.tensor.with_shape((dim(pairs), dim(2 * width + 4 * inner)))
    # Gathered rows and both products, each written and read again.
    return Gain(row.bytes_at({}), fewer)
