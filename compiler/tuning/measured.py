"""Measured times as the cost model uses them: exact where measured, between sizes by their ratio.

Between two measured numbers of rows the model's own shape is kept: its time there, by the ratio of
measured to predicted time, which runs straight in the logarithm of the rows from one to the other.
Outside what was measured nothing is said: prices of unlike origin are not mixed up by guesses.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from metainfer.backends.kernel import Cost, Kernel
from metainfer.compiler.tuning.keys import ROWS, key_of, sizes_text
from metainfer.compiler.tuning.tuned_file import FAILED, Figures
from metainfer.ir.graph import Op

HERE, ELSEWHERE = "measured here", "measured elsewhere"
Sizes = Mapping[str, int]


@dataclass(frozen=True)
class Point:
    """One measurement. Units: microseconds."""

    sizes: tuple[tuple[str, int], ...]
    us: float

    @property
    def at(self) -> dict[str, int]:
        """Sizes by symbol."""
        return dict(self.sizes)


@dataclass(frozen=True)
class Measured:
    """Times that were measured on the device that a plan is for.

    Attributes:
        groups: figures by the text of the group.
        basis: "measured here" or "measured elsewhere".
        source: the file, and what it was measured with.
    """

    groups: Mapping[str, Figures] = field(default_factory=dict[str, Figures])
    basis: str = ELSEWHERE
    source: str = ""
    _points: dict[tuple[str, str], tuple[Point, ...]] = field(
        default_factory=dict[tuple[str, str], tuple[Point, ...]], compare=False, repr=False
    )

    def figures(self, op: Op) -> Figures:
        """What is known of a group, by kernel; nothing for most."""
        return self.groups.get(key_of(op).text, {}) if self.groups else {}

    def failure(self, kernel: Kernel, op: Op) -> str:
        """Why a kernel could not be measured for a group, "" if it could."""
        for figure in self.figures(op).get(kernel.name, {}).values():
            if isinstance(figure, str):
                return figure.removeprefix(FAILED)
        return ""

    def adjusted(
        self, kernel: Kernel, op: Op, env: Sizes, analytic: Callable[[Sizes], Cost]
    ) -> Cost:
        """The cost of a group, its time as measured where it was.

        Args:
            kernel: which runs it.
            op: the group.
            env: values of the size symbols.
            analytic: the model's own cost at such values.
        """
        predicted = analytic(env)
        points = self._points_of(kernel, op)
        if not points:
            return predicted
        key = key_of(op)
        wanted = key.sizes(env)

        def ratio(point: Point) -> float:
            return point.us * 1e-6 / analytic(key.env(point.at, env)).seconds

        found = _factor(points, wanted, ratio)
        if found is None:
            return predicted
        factor, place = found
        basis = f"{self.basis}, {place}" if place else self.basis
        return replace(predicted, seconds=predicted.seconds * factor, basis=basis)

    def _points_of(self, kernel: Kernel, op: Op) -> tuple[Point, ...]:
        sizes = self.figures(op).get(kernel.name)
        if not sizes:
            return ()
        key = (key_of(op).text, kernel.name)
        if key not in self._points:
            self._points[key] = tuple(
                Point(parse_sizes(text), float(us)) for text, us in sizes.items() if us_known(us)
            )
        return self._points[key]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a plan."""
        return {"groups": dict(self.groups), "basis": self.basis, "source": self.source}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> "Measured":
        """Read plain data of a plan back; {} is nothing."""
        return Measured(data["groups"], data["basis"], data["source"]) if data else NOTHING


NOTHING = Measured()


def us_known(figure: float | str) -> bool:
    """Whether a figure is a time, not the reason why there is none."""
    return not isinstance(figure, str)


def parse_sizes(text: str) -> tuple[tuple[str, int], ...]:
    """Read what `keys.sizes_text` printed."""
    pairs = (part.split("=") for part in text.split() if "=" in part)
    return tuple((name, int(size)) for name, size in pairs)


def _factor(
    points: Sequence[Point], wanted: Sizes, ratio: Callable[[Point], float]
) -> tuple[float, str] | None:
    """(measured over predicted, where that is from) at sizes; None outside of what was measured."""
    series, place = _series(points, wanted)
    by_rows = sorted((p.at.get(_leading(wanted), 0), p) for p in series) if series else []
    rows = wanted.get(_leading(wanted), 0)
    for size, point in by_rows:
        if size == rows:
            return ratio(point), place
    for (low, before), (high, after) in pairwise(by_rows):
        if low < rows < high:
            share = math.log(rows / low) / math.log(high / low)
            between = f"between {_leading(wanted)}={low} and {high}"
            mixed = ratio(before) ** (1 - share) * ratio(after) ** share
            return mixed, f"{between}, {place}" if place else between
    return None


def _leading(sizes: Sizes) -> str:
    return ROWS if ROWS in sizes or not sizes else min(sizes)


def _series(points: Sequence[Point], wanted: Sizes) -> tuple[list[Point], str]:
    """Measurements that differ from the wanted sizes in rows alone; else those nearest to them.

    A size that is equal to the rows, as the sequences of a decode step are, moves with them.
    """
    lead = _leading(wanted)
    others = [name for name in wanted if name != lead]

    def moves(sizes: Sizes, name: str) -> bool:
        return sizes[name] == sizes[lead]

    alike = [p for p in points if p.at.keys() == wanted.keys()]
    best: dict[float, list[Point]] = {}
    for point in alike:
        at, distance = point.at, 0.0
        for name in others:
            if at[name] != wanted[name] and not (moves(at, name) and moves(wanted, name)):
                distance += abs(math.log(at[name] / wanted[name]))
        best.setdefault(round(distance, 9), []).append(point)
    if not best:
        return [], ""
    distance = min(best)
    if not distance:
        return best[distance], ""
    first = best[distance][0].at
    apart = {n: first[n] for n in others if first[n] != wanted[n] and not moves(first, n)}
    # Sequences that moved with the rows are not those that were asked about.
    return ([], "") if not apart else (best[distance], f"at {sizes_text(apart)}")
