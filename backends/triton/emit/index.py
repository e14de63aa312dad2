"""Where in a tensor a tile lies: one index per dim, and how views change them.

An index is the name of a Triton variable (or a number) that holds the positions along one dim:
``[ROWS, 1]`` along rows, ``[1, COLUMNS]`` along columns, or both. Views move no number; they only
change which indices their operand is read at.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from metainfer.ir.dims import Dim, dim
from metainfer.ir.errors import Unsupported
from metainfer.ir.graph import Op

ROW = "r"  # first letter of the names of row axes; columns are "c"


@dataclass(frozen=True)
class Index:
    """Positions along one dim.

    Attributes:
        text: a variable's name, or a number.
        axes: axes of the tile along which it varies.
        guards: conditions without which it may lie outside of the tensor.
    """

    text: str
    axes: frozenset[str] = frozenset()
    guards: tuple[str, ...] = ()


ZERO = Index("0")
Name = Callable[[str, frozenset[str]], Index]  # gives an expression a name
Size = Callable[[Dim], str]


def times(text: str, factor: str) -> str:
    """The text of a product, short where it can be."""
    if "0" in (text, factor):
        return "0"
    if factor == "1":
        return text
    return factor if text == "1" else f"{text} * {factor}"


def plus(*terms: str) -> str:
    """The text of a sum, zeros left out."""
    kept = [t for t in terms if t != "0"]
    return " + ".join(kept) or "0"


def axes_of(indices: Sequence[Index]) -> frozenset[str]:
    """Axes along which any of some indices varies."""
    return frozenset().union(*(i.axes for i in indices))


def guards_of(indices: Sequence[Index]) -> tuple[str, ...]:
    """Conditions of some indices, each once."""
    return tuple(dict.fromkeys(g for i in indices for g in i.guards))


def columns_of(axes: frozenset[str]) -> frozenset[str]:
    """The column axes among some axes."""
    return frozenset(a for a in axes if not a.startswith(ROW))


def joined(*parts: frozenset[str]) -> frozenset[str]:
    """Axes of what is computed from several tiles.

    Raises: Unsupported for tiles along two different column axes.
    """
    axes = frozenset[str]().union(*parts)
    if len(columns_of(axes)) > 1:
        raise Unsupported(
            "one row of the group needs another row as a whole",
            advice="the group is split, or another kernel takes it",
        )
    return axes


class Views:
    """Indices of a view's operand from those of its result."""

    def __init__(self, name: Name, size: Size) -> None:
        self._name = name
        self._size = size

    def operand_index(self, op: Op, index: tuple[Index, ...]) -> tuple[Index, ...]:
        """Indices at which the operand of a view is read."""
        if op.name == "reshape":
            return self.reshaped(op.operands[0].tensor.shape, op.result.tensor.shape, index)
        if op.name == "transpose":
            return self._transposed(op, index)
        if op.name == "broadcast":
            return broadcast(op.operands[0].tensor.shape, index)
        return self._sliced(op, index)

    def reshaped(
        self, old: Sequence[Dim], new: Sequence[Dim], index: Sequence[Index]
    ) -> tuple[Index, ...]:
        """Indices by another shape of equally many elements."""
        first = 0
        while first < min(len(old), len(new)) and old[first] == new[first]:
            first += 1
        last = 0
        while last < min(len(old), len(new)) - first and old[-1 - last] == new[-1 - last]:
            last += 1
        middle_new = list(new[first : len(new) - last])
        middle_old = list(old[first : len(old) - last])
        inner = list(index[first : len(new) - last])
        made = self._split(self._linear(middle_new, inner), inner, middle_old)
        return (*index[:first], *made, *index[len(new) - last :])

    def _linear(self, shape: Sequence[Dim], index: Sequence[Index]) -> str:
        terms = []
        for number, entry in enumerate(index):
            terms.append(times(entry.text, self.product(shape[number + 1 :])))
        return plus(*terms)

    def product(self, sizes: Sequence[Dim]) -> str:
        """Text of a product of sizes."""
        number = 1
        factors = []
        for size in sizes:
            if size.is_static:
                number *= size.constant
            else:
                factors.append(self._size(size))
        if number != 1 or not factors:
            factors.insert(0, str(number))
        return factors[0] if len(factors) == 1 else f"({' * '.join(factors)})"

    def _split(self, linear: str, index: Sequence[Index], shape: Sequence[Dim]) -> list[Index]:
        axes, guards = axes_of(index), guards_of(index)
        made = []
        for number, size in enumerate(shape):
            if size == dim(1):
                made.append(ZERO)
                continue
            rest = self.product(shape[number + 1 :])
            text = linear if rest == "1" else f"({linear}) // {rest}"
            if any(s != dim(1) for s in shape[:number]):
                text = f"({text}) % {self._size(size)}"
            named = self._name(text, axes)
            made.append(Index(named.text, named.axes, guards))
        return made

    def _transposed(self, op: Op, index: tuple[Index, ...]) -> tuple[Index, ...]:
        perm = op.attr["perm"]
        assert isinstance(perm, tuple)
        placed = dict(zip(perm, index, strict=True))
        return tuple(placed[i] for i in range(len(index)))

    def _sliced(self, op: Op, index: tuple[Index, ...]) -> tuple[Index, ...]:
        rank = len(index)
        axis = op.attr["dim"]
        assert isinstance(axis, int)
        axis %= rank
        start, step = op.attr["start"], op.attr.get("step", 1)
        assert isinstance(start, int | Dim)
        entry = index[axis]
        text = plus(times(entry.text, str(step)), self._size(dim(start)))
        moved = self._name(text, entry.axes)
        changed = Index(moved.text, moved.axes, entry.guards)
        return (*index[:axis], changed, *index[axis + 1 :])


def broadcast(shape: Sequence[Dim], index: Sequence[Index]) -> tuple[Index, ...]:
    """Indices of an operand that is broadcast: dims of size 1 are read at 0."""
    own = index[len(index) - len(shape) :]
    return tuple(ZERO if size == dim(1) else entry for size, entry in zip(shape, own, strict=True))
