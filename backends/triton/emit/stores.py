"""How tiles leave a group that are more than numbers: entries of paged states, rounded rows."""

from collections.abc import Sequence
from typing import Protocol

from metainfer.backends.triton.emit.formulas import TYPES
from metainfer.backends.triton.emit.index import Index, Views, plus, times
from metainfer.backends.triton.emit.tiles import Expr, Space, Store, group_of
from metainfer.ir.dims import Dim
from metainfer.ir.graph import Op, Value


class Statements(Protocol):
    """What stores ask of the body of a function (`emit.body.Body`)."""

    @property
    def views(self) -> Views:
        """Indices of views."""
        ...

    @property
    def is_chunked(self) -> bool:
        """Whether columns are split over programs."""
        ...

    def emit(self, line: str) -> None:
        """Append a statement."""
        ...

    def comment(self, op: Op) -> None:
        """Append what an operation is."""
        ...

    def fresh(self, prefix: str) -> str:
        """A name that is not taken."""
        ...

    def value(self, value: Value, index: tuple[Index, ...]) -> Expr:
        """A value at indices."""
        ...

    def assign(self, text: str, axes: frozenset[str], prefix: str = "v") -> Expr:
        """Name what a text computes."""
        ...

    def name_index(self, text: str, axes: frozenset[str]) -> Index:
        """Name an index."""
        ...

    def mask(self, axes: frozenset[str], guards: Sequence[str] = ()) -> str:
        """Where a tile lies inside."""
        ...

    def column_mask(self, axis: Index) -> str:
        """Where a column lies inside."""
        ...

    def extent(self, column: Index) -> int:
        """Numbers of a tile along the columns."""
        ...


def store_entries(
    body: Statements, store: Store, slots: Value, space: Space, index: tuple[Index, ...], made: Expr
) -> None:
    """Store entries of a paged state at their slots, rounded by rows where they have scales."""
    slot = body.value(slots, index[:1])
    body.emit(f"# entries to {store.target}")
    shape, column, dtype = store.value.tensor.shape, index[-1], store.dtype.name
    text = made.text if dtype in ("f32", "bool") else f"{made.text}.to({TYPES[dtype]})"
    if store.scales:
        tile = _whole_tile(body, space, column, made)
        text, scales = body.fresh("q"), body.fresh("s")
        body.emit(f"{text}, {scales} = rounding.round_rows_to_powers({tile.text})")
        at = _slot_offset(body, slot, shape[:-1], index[:-1])
        condition = body.mask(frozenset([space.row]))
        body.emit(f"tl.store({store.scales} + {at}, {scales}, mask={condition})")
    at = _slot_offset(body, slot, shape, index)
    condition = body.mask(frozenset([space.row]) | column.axes)
    body.emit(f"tl.store({store.target} + {at}, {text}, mask={condition})")


def _slot_offset(
    body: Statements, slot: Expr, shape: tuple[Dim, ...], index: tuple[Index, ...]
) -> str:
    """Text of the place of an entry's numbers from the first page on."""
    rest = plus(
        *(
            times(entry.text, body.views.product(shape[axis + 1 :]))
            for axis, entry in enumerate(index)
            if axis
        )
    )
    inner = body.views.product(shape[1:])
    return plus(body.name_index(f"{slot.text}.to(tl.int64) * {inner}", slot.axes).text, rest)


def store_rounded(
    body: Statements, store: Store, rounding: Op, space: Space, column: Index, made: Expr
) -> None:
    """Round a tile to codes and scales, and store both."""
    width, group = space.width.static, group_of(rounding)
    tile = _whole_tile(body, space, column, made)
    body.comment(rounding)
    codes, scales = body.fresh("q"), body.fresh("s")
    how = f"round_groups({tile.text}, {group})" if group else f"round_rows({tile.text})"
    body.emit(f"{codes}, {scales} = rounding.{how}")
    place = plus(times(space.row, str(width)), column.text)
    condition = body.mask(frozenset([space.row, column.text]))
    body.emit(f"tl.store({store.target}_codes + {place}, {codes}, mask={condition})")
    at, condition = space.row, body.mask(frozenset([space.row]))
    if group:
        count, held = width // group, body.extent(column) // group
        first = f"tl.program_id(1) * {held} + " if body.is_chunked else ""
        number = body.assign(f"{first}tl.arange(0, {held})[None, :]", frozenset(), "g")
        at = plus(times(space.row, str(count)), number.text)
        condition = f"{condition} & ({number.text} < {count})"
    body.emit(f"tl.store({store.target}_scales + {at}, {scales}, mask={condition})")


def _whole_tile(body: Statements, space: Space, column: Index, made: Expr) -> Expr:
    """A tile of whole rows that are to be rounded, zeros past their end."""
    # A broadcast, no sum: zeros keep their signs.
    whole = f"tl.broadcast_to({made.text}, [{space.rows}, {body.extent(column)}])"
    tile = body.assign(whole, frozenset([space.row, column.text]))
    inside = body.column_mask(column)
    if inside:
        # Past the end of a row there may be anything: it must raise no scale.
        body.emit(f"{tile.text} = tl.where({inside}, {tile.text}, 0.0)")
    return tile
