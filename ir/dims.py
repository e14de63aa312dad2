"""Symbolic sizes: affine over named symbols, plus floor and ceiling division by constants.

Printed ``2*T+1``, ``T//4``, ``ceildiv(T,4)``. A size is kept in one canonical form, so equal text
means equal size; nothing more than affine arithmetic is ever decided here.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from metainfer.ir.errors import TypeMismatch


@dataclass(frozen=True, order=True)
class Quotient:
    """``inner // divisor``, or the ceiling of it."""

    inner: "Dim"
    divisor: int
    ceil: bool = False

    def __str__(self) -> str:
        """Print the text form."""
        if self.ceil:
            return f"ceildiv({self.inner},{self.divisor})"
        text = str(self.inner)
        return f"{text}//{self.divisor}" if text.isidentifier() else f"({text})//{self.divisor}"


Atom = str | Quotient


def _atom_key(atom: Atom) -> tuple[int, str]:
    return (0, atom) if isinstance(atom, str) else (1, str(atom))


@dataclass(frozen=True)
class Dim:
    """``sum of coefficient * atom + constant``; terms are sorted and have non-zero coefficients."""

    terms: tuple[tuple[Atom, int], ...] = ()
    constant: int = 0

    def __str__(self) -> str:
        """Print the text form."""
        parts: list[str] = []
        for atom, coefficient in self.terms:
            text = str(atom) if abs(coefficient) == 1 else f"{abs(coefficient)}*{_factor(atom)}"
            sign = "-" if coefficient < 0 else "+" if parts else ""
            parts.append(sign + text)
        if self.constant or not parts:
            parts.append(f"{self.constant:+d}" if parts else str(self.constant))
        return "".join(parts)

    def __lt__(self, other: "Dim") -> bool:
        """Order by text, so that quotients can be sorted."""
        return str(self) < str(other)

    @property
    def is_static(self) -> bool:
        """Whether the size is a number."""
        return not self.terms

    @property
    def static(self) -> int:
        """The number.

        Raises: TypeMismatch if the size is symbolic.
        """
        if self.terms:
            raise TypeMismatch(f"size {self} is symbolic where a number is needed")
        return self.constant

    @property
    def attr(self) -> "Dim | int":
        """The size as attributes hold it: a number where it is one."""
        return self if self.terms else self.constant

    def symbols(self) -> frozenset[str]:
        """Names of all symbols in the size."""
        names: set[str] = set()
        for atom, _ in self.terms:
            names |= {atom} if isinstance(atom, str) else atom.inner.symbols()
        return frozenset(names)

    def __add__(self, other: "Dim | int") -> "Dim":
        """Add two sizes."""
        right = dim(other)
        return _collect([*self.terms, *right.terms], self.constant + right.constant)

    __radd__ = __add__

    def __sub__(self, other: "Dim | int") -> "Dim":
        """Subtract a size."""
        return self + dim(other) * -1

    def __mul__(self, factor: "Dim | int") -> "Dim":
        """Multiply by a number (or by a size that is one).

        Raises: TypeMismatch for a product of two symbolic sizes.
        """
        right = dim(factor)
        if not right.is_static:
            if not self.is_static:
                raise TypeMismatch(f"size ({self})*({right}) is not affine")
            return right * self.constant
        k = right.constant
        return _collect([(atom, c * k) for atom, c in self.terms], self.constant * k)

    __rmul__ = __mul__

    def __floordiv__(self, divisor: int) -> "Dim":
        """Divide, rounding down."""
        return _divide(self, divisor, ceil=False)

    def ceildiv(self, divisor: int) -> "Dim":
        """Divide, rounding up."""
        return _divide(self, divisor, ceil=True)

    def evaluate(self, env: Mapping[str, int]) -> int:
        """Return the number for given values of the symbols.

        Raises: TypeMismatch if a symbol has no value.
        """
        total = self.constant
        for atom, coefficient in self.terms:
            total += coefficient * _evaluate_atom(atom, env)
        return total

    def substitute(self, env: Mapping[str, "Dim | int"]) -> "Dim":
        """Replace symbols by sizes."""
        if not self.terms:
            return self
        total = Dim(constant=self.constant)
        for atom, coefficient in self.terms:
            if isinstance(atom, str):
                part = dim(env.get(atom, Dim(((atom, 1),))))
            else:
                part = _divide(atom.inner.substitute(env), atom.divisor, ceil=atom.ceil)
            total = total + part * coefficient
        return total

    def bounds(self, limits: Mapping[str, tuple[int, int]]) -> tuple[int, int]:
        """Smallest and largest value within inclusive bounds of the symbols.

        By intervals; exact where a size of one symbol falls and rises (``T-256*(T//512)``).
        """
        symbols = self.symbols()
        if len(symbols) == 1 and any(isinstance(a, Quotient) and c < 0 for a, c in self.terms):
            return _scanned_bounds(self, *symbols, *limits[min(symbols)])
        return _interval_bounds(self, limits)


def _interval_bounds(size: Dim, limits: Mapping[str, tuple[int, int]]) -> tuple[int, int]:
    low = high = size.constant
    for atom, coefficient in size.terms:
        if isinstance(atom, str):
            a, b = limits[atom]
        else:
            a, b = (_quotient(v, atom) for v in atom.inner.bounds(limits))
        low += coefficient * (a if coefficient > 0 else b)
        high += coefficient * (b if coefficient > 0 else a)
    return low, high


_MOST_POINTS = 1 << 16  # a size that repeats more rarely is bounded by intervals


@lru_cache(maxsize=1024)
def _scanned_bounds(size: Dim, symbol: str, low: int, high: int) -> tuple[int, int]:
    """Bounds by evaluation: over a period the size changes by a constant.

    So its least and greatest values lie within the first or the last period of the range.
    """
    period = _period(size)
    if period > _MOST_POINTS:
        return _interval_bounds(size, {symbol: (low, high)})
    first = range(low, min(low + period, high + 1))
    last = range(max(high - period + 1, low), high + 1)
    values = [size.evaluate({symbol: n}) for points in (first, last) for n in points]
    return min(values), max(values)


def _period(size: Dim) -> int:
    """After how many steps of its symbol a size has changed by the same amount again."""
    return math.lcm(
        *(a.divisor * _period(a.inner) for a, _ in size.terms if isinstance(a, Quotient))
    )


def dim(value: "Dim | int | str") -> Dim:
    """Make a size from a number, a symbol's name, or a size."""
    if isinstance(value, Dim):
        return value
    if isinstance(value, str):
        return Dim(((value, 1),))
    return Dim(constant=int(value))


def product(sizes: Iterable[Dim]) -> Dim:
    """Multiply sizes, of which at most one may be symbolic.

    Raises: TypeMismatch otherwise.
    """
    total = Dim(constant=1)
    for size in sizes:
        total = total * size
    return total


def same_product(left: Iterable[Dim], right: Iterable[Dim]) -> bool:
    """Whether two products of sizes are equal for all values of the symbols.

    Unlike `product` it takes any number of symbolic sizes; equal products of unlike sizes (``T*T``
    against ``(T+1)*(T-1)+1``) are not seen.
    """
    return _primitive(left) == _primitive(right)


def _primitive(sizes: Iterable[Dim]) -> tuple[int, list[Dim]]:
    """Number in front of a product, and its symbolic sizes without common factors."""
    number, symbolic = 1, []
    for size in sizes:
        content = math.gcd(size.constant, *(c for _, c in size.terms))
        number *= content if size.terms else size.constant
        if size.terms:
            terms = tuple((atom, c // content) for atom, c in size.terms)
            symbolic.append(Dim(terms, size.constant // content))
    return number, sorted(symbolic)


def _factor(atom: Atom) -> str:
    text = str(atom)
    return text if text.isidentifier() or text.startswith("ceildiv(") else f"({text})"


def _collect(terms: list[tuple[Atom, int]], constant: int) -> Dim:
    if not terms:
        return Dim((), constant)
    sums: dict[Atom, int] = {}
    for atom, coefficient in terms:
        sums[atom] = sums.get(atom, 0) + coefficient
    kept = sorted(((a, c) for a, c in sums.items() if c), key=lambda item: _atom_key(item[0]))
    return Dim(tuple(kept), constant)


@lru_cache(maxsize=4096)
def _divide(size: Dim, divisor: int, *, ceil: bool) -> Dim:
    if divisor <= 0:
        raise TypeMismatch(f"size ({size})//{divisor}: the divisor must be positive")
    size, divisor = _unnested(size, divisor, ceil=ceil)
    if divisor == 1:
        return size
    common = math.gcd(divisor, *(c for _, c in size.terms))
    if common > 1:
        # (6*T+3)//4 = (3*T + 3//2)//2: a whole number of parts stays below or above the rest.
        terms = tuple((a, c // common) for a, c in size.terms)
        rounded = -(-size.constant // common) if ceil else size.constant // common
        return _divide(Dim(terms, rounded), divisor // common, ceil=ceil)
    # Terms whose coefficient divides leave the quotient: (4*T+2)//4 = T + 2//4.
    whole = [(a, c // divisor) for a, c in size.terms if c % divisor == 0]
    rest = [(a, c) for a, c in size.terms if c % divisor]
    quotient, remainder = divmod(size.constant, divisor)
    if not rest:
        return _collect(whole, quotient + (1 if ceil and remainder else 0))
    if whole:
        inner = _divide(_collect(rest, remainder), divisor, ceil=ceil)
        return _collect([*whole, *inner.terms], quotient + inner.constant)
    return Dim(((Quotient(Dim(tuple(rest), remainder), divisor, ceil), 1),), quotient)


def _unnested(size: Dim, divisor: int, *, ceil: bool) -> tuple[Dim, int]:
    """``(a//b + c)//d = (a + b*c)//(b*d)``, which holds for ceilings too."""
    if len(size.terms) == 1:
        ((inner, coefficient),) = size.terms
        if isinstance(inner, Quotient) and inner.ceil == ceil and coefficient == 1:
            return inner.inner + size.constant * inner.divisor, inner.divisor * divisor
    return size, divisor


def _quotient(value: int, atom: Quotient) -> int:
    return -(-value // atom.divisor) if atom.ceil else value // atom.divisor


def _evaluate_atom(atom: Atom, env: Mapping[str, int]) -> int:
    if not isinstance(atom, str):
        return _quotient(atom.inner.evaluate(env), atom)
    if atom not in env:
        raise TypeMismatch(
            f"size symbol {atom} has no value", advice=f"known: {', '.join(env) or 'none'}"
        )
    return env[atom]
