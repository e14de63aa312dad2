"""Crossovers of a collective: from which size on which algorithm is taken, and what is next."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Crossover:
    """Neighbouring sizes of one collective at which one algorithm is taken, as compared.

    Units: bytes of the payload, seconds.

    Attributes:
        kernel: the algorithm's kernel.
        from_bytes: smallest of the sizes.
        to_bytes: largest of them.
        first_seconds: predicted at the smallest.
        last_seconds: predicted at the largest.
        basis: where that figure comes from.
        next_best: the runner-up at the largest, "" if nothing else applies.
        gap_seconds: how much longer it takes there.
    """

    kernel: str
    from_bytes: int
    to_bytes: int
    first_seconds: float
    last_seconds: float
    basis: str
    next_best: str
    gap_seconds: float


def crossovers_of(data: Mapping[str, Any]) -> tuple[Crossover, ...]:
    """Crossovers from a decision's data, () for a group in which ranks do not meet."""
    rows: Sequence[Sequence[Any]] = data.get("crossovers", ())
    found: list[Crossover] = []
    for size, kernel, seconds, basis, name, gap in rows:
        begin, first = size, seconds
        if found and found[-1].kernel == kernel:
            before = found.pop()
            begin, first = before.from_bytes, before.first_seconds
        found.append(Crossover(kernel, begin, size, first, seconds, basis, name, gap))
    return tuple(found)
