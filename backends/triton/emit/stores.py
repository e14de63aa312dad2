"""How tiles leave a group that are more than numbers: entries of paged states, rounded rows."""

from typing import TYPE_CHECKING

from metainfer.backends.triton.emit.formulas import TYPES
from metainfer.backends.triton.emit.index import Index, plus, times
from metainfer.backends.triton.emit.tiles import Expr, Space, Store, group_of
from metainfer.ir.dims import Dim
from metainfer.ir.graph import Op, Value

if TYPE_CHECKING:
    from metainfer.backends.triton.emit.body import Body


def store_entries(
    body: "Body", store: Store, slots: Value, space: Space, index: tuple[Index, ...], made: Expr
) -> None:
    """Store entries of a paged state at their slots, rounded by rows where they have scales."""
    slot = body.value(slots, index[:1])
    body.emit(f"# kv_write to {store.target}")
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
    condition = body.mask(frozenset([space.row, column.text]))
    body.emit(f"tl.store({store.target} + {at}, {text}, mask={condition})")


def _slot_offset(body: "Body", slot: Expr, shape: tuple[Dim, ...], index: tuple[Index, ...]) -> str:
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
    body: "Body", store: Store, rounding: Op, space: Space, column: Index, made: Expr
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


def _whole_tile(body: "Body", space: Space, column: Index, made: Expr) -> Expr:
    """A tile of whole rows that are to be rounded, zeros past their end."""
    # A broadcast, no sum: zeros keep their signs.
    whole = f"tl.broadcast_to({made.text}, [{space.rows}, {body.extent(column)}])"
    tile = body.assign(whole, frozenset([space.row, column.text]))
    inside = body.column_mask(column)
    if inside:
        # Past the end of a row there may be anything: it must raise no scale.
        body.emit(f"{tile.text} = tl.where({inside}, {tile.text}, 0.0)")
    return tile
