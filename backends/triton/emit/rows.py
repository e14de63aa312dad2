"""Ops that read more than one element for each: norms, sums, top-k, rotary pairs, look-ups."""

from dataclasses import replace

from metainfer.backends.triton.emit.body import Body, Handler
from metainfer.backends.triton.emit.formulas import TYPES, is_float, number, rounded, scalar
from metainfer.backends.triton.emit.index import Index, axes_of, columns_of, joined
from metainfer.backends.triton.emit.tiles import Expr
from metainfer.ir.dims import dim
from metainfer.ir.dtypes import F32
from metainfer.ir.errors import Unsupported
from metainfer.ir.graph import Op, Value

LONGEST_LOOP = 64  # steps of a sum over a dim that is not the last


def _kept(body: Body, tile: Expr, column: Index, filling: str) -> str:
    """A tile with something neutral beyond the end of its rows."""
    mask = body.column_mask(column)
    return f"tl.where({mask}, {tile.text}, {filling})" if mask else tile.text


def _over_row(tile_axes: frozenset[str], column: Index) -> frozenset[str]:
    return tile_axes - {column.text}


def _row_total(body: Body, text: str, axes: frozenset[str], column: Index) -> Expr:
    return body.assign(f"tl.sum({text}, axis=1)[:, None]", _over_row(axes, column), "s")


def _row(body: Body, value: Value, lead: tuple[Index, ...]) -> tuple[Expr, Index]:
    """A value over its whole last dim, and the axis that it lies along."""
    column = body.whole(value.tensor.shape[-1])
    return _spread(body, body.value(value, (*lead, column)), column), column


def _spread(body: Body, tile: Expr, column: Index) -> Expr:
    """A tile that varies along the axis, so that sums along it count every element."""
    if column.text in tile.axes:
        return tile
    return body.assign(f"{tile.text} + 0 * {column.text}", tile.axes | column.axes)


def rms_norm(body: Body, op: Op, result: int, index: tuple[Index, ...]) -> Expr:
    """x * rsqrt(mean of squares + eps) * weight."""
    x, weight = op.operands
    scale = _rms(body, op, index[:-1])
    tile, factor = body.value(x, index), body.value(weight, index[-1:])
    text = f"{tile.text} * {scale.text} * {factor.text}"
    return body.finish(op.result, text, joined(tile.axes, scale.axes, factor.axes))


def _rms(body: Body, op: Op, lead: tuple[Index, ...]) -> Expr:
    key = ("rms", op.result.name, *lead)
    known = body.known(key)
    if known is not None:
        return known
    width = op.operands[0].tensor.shape[-1].static
    total = _squares_total(body, op, lead, body.halves(width))
    eps = number(float(str(op.attr["eps"])))
    scale = body.assign(f"tl.rsqrt({total.text} / {width} + {eps})", total.axes, "s")
    return body.remember(key, scale)


def _squares_total(
    body: Body, op: Op, lead: tuple[Index, ...], halves: tuple[Index, Index] | None
) -> Expr:
    """Sum of the squares of rows, which may be read half by half."""
    x = op.operands[0]
    if halves is None:
        row, column = _row(body, x, lead)
        body.comment(op)
        square = body.assign(f"{row.text} * {row.text}", row.axes)
        return _row_total(body, _kept(body, square, column, "0.0"), row.axes, column)
    column = halves[0]
    lower, upper = (_spread(body, body.value(x, (*lead, half)), column) for half in halves)
    body.comment(op)
    text = f"{lower.text} * {lower.text} + {upper.text} * {upper.text}"
    square = body.assign(text, joined(lower.axes, upper.axes))
    return _row_total(body, _kept(body, square, column, "0.0"), square.axes, column)


def layer_norm(body: Body, op: Op, result: int, index: tuple[Index, ...]) -> Expr:
    """(x - mean) * rsqrt(variance + eps) * weight + bias."""
    mean, scale = _moments(body, op, index[:-1])
    tile = body.value(op.operands[0], index)
    text = f"({tile.text} - {mean.text}) * {scale.text}"
    axes = [tile.axes, mean.axes, scale.axes]
    for sign, operand in zip("*+", op.operands[1:], strict=False):
        factor = body.value(operand, index[-1:])
        text += f" {sign} {factor.text}"
        axes.append(factor.axes)
    return body.finish(op.result, text, joined(*axes))


def _moments(body: Body, op: Op, lead: tuple[Index, ...]) -> tuple[Expr, Expr]:
    keys = [(part, op.result.name, *lead) for part in ("mean", "deviation")]
    known = [body.known(key) for key in keys]
    if known[0] is not None and known[1] is not None:
        return known[0], known[1]
    row, column = _row(body, op.operands[0], lead)
    body.comment(op)
    width = op.operands[0].tensor.shape[-1].static
    eps = number(float(str(op.attr["eps"])))
    total = _row_total(body, _kept(body, row, column, "0.0"), row.axes, column)
    mean = body.assign(f"{total.text} / {width}", total.axes, "s")
    off = body.assign(f"{row.text} - {mean.text}", row.axes)
    kept = body.assign(_kept(body, off, column, "0.0"), row.axes)
    squares = _row_total(body, f"{kept.text} * {kept.text}", row.axes, column)
    scale = body.assign(f"tl.rsqrt({squares.text} / {width} + {eps})", squares.axes, "s")
    return body.remember(keys[0], mean), body.remember(keys[1], scale)


def softmax(body: Body, op: Op, result: int, index: tuple[Index, ...]) -> Expr:
    """Exponentials normalised over a row; a row of -inf gives zeros."""
    x = op.operands[0]
    if int(str(op.attr.get("dim", -1))) % x.tensor.rank != x.tensor.rank - 1:
        raise Unsupported("softmax along another dim than the last", advice="transpose it first")
    lead = index[:-1]
    keys = [(part, op.result.name, *lead) for part in ("top", "total")]
    top, total = (body.known(key) for key in keys)
    if top is None or total is None:
        row, column = _row(body, x, lead)
        body.comment(op)
        kept = row
        if body.column_mask(column):
            kept = body.assign(_kept(body, row, column, 'float("-inf")'), row.axes)
        over = _over_row(row.axes, column)
        top = body.assign(f"tl.max({kept.text}, axis=1)[:, None]", over, "s")
        body.emit(f'{top.text} = tl.where({top.text} == float("-inf"), 0.0, {top.text})')
        total = _row_total(body, f"tl.exp({kept.text} - {top.text})", row.axes, column)
        body.emit(f"{total.text} = tl.where({total.text} == 0.0, 1.0, {total.text})")
        body.remember(keys[0], top)
        body.remember(keys[1], total)
    tile = body.value(x, index)
    text = f"tl.exp({tile.text} - {top.text}) / {total.text}"
    return body.finish(op.result, text, joined(tile.axes, top.axes, total.axes))


# --- reductions ---------------------------------------------------------------------------------

_NEUTRAL = {"sum": "0", "mean": "0", "max": 'float("-inf")', "min": 'float("inf")'}


def reduction(body: Body, op: Op, result: int, index: tuple[Index, ...]) -> Expr:
    """A sum, mean, maximum or minimum over one dim."""
    x = op.operands[0]
    dims = op.attr["dims"]
    if not isinstance(dims, tuple) or len(dims) != 1 or not isinstance(dims[0], int):
        raise Unsupported(f"{op.name} over {dims}", advice="reduce one dim after the other")
    if not x.tensor.dtype.is_float:
        raise Unsupported(f"{op.name} of {x.tensor.dtype}", advice="cast it to float first")
    axis = dims[0] % x.tensor.rank
    lead = index[:axis]
    rest = index[axis + 1 :] if op.attr.get("keep", False) else index[axis:]
    if axis == x.tensor.rank - 1 and not columns_of(axes_of(lead)):
        made = _reduced_row(body, op, lead)
    else:
        made = _reduced_by_steps(body, op, axis, lead, rest)
    if op.name == "mean":
        count = x.tensor.shape[axis].static
        return body.finish(op.result, f"{made.text} / {count}", made.axes)
    return body.finish(op.result, made.text, made.axes)


def _reduced_row(body: Body, op: Op, lead: tuple[Index, ...]) -> Expr:
    row, column = _row(body, op.operands[0], lead)
    body.comment(op)
    kept = _kept(body, row, column, _NEUTRAL[op.name])
    how = "sum" if op.name == "mean" else op.name
    over = _over_row(row.axes, column)
    return body.assign(f"tl.{how}({kept}, axis=1)[:, None]", over, "s")


def _reduced_by_steps(
    body: Body, op: Op, axis: int, lead: tuple[Index, ...], rest: tuple[Index, ...]
) -> Expr:
    x = op.operands[0]
    count = x.tensor.shape[axis].static
    if not 0 < count <= LONGEST_LOOP:
        raise Unsupported(
            f"{op.name} over {count} numbers that do not lie in one row",
            advice="the group is split, or another kernel takes it",
        )
    total = body.value(x, (*lead, Index("0"), *rest))
    body.comment(op)
    made = body.assign(total.text, total.axes, "s")
    if count == 1:
        return made
    step = body.fresh("k")
    with body.loop(step, count - 1):
        at = body.name_index(f"{step} + 1", frozenset())
        term = body.value(x, (*lead, at, *rest))
        text = {
            "max": f"tl.maximum({made.text}, {term.text})",
            "min": f"tl.minimum({made.text}, {term.text})",
        }.get(op.name, f"{made.text} + {term.text}")
        body.emit(f"{made.text} = {text}")
    return made


def argmax(body: Body, op: Op, result: int, index: tuple[Index, ...]) -> Expr:
    """Index of the largest element of a row; ties go to the lower one."""
    x = op.operands[0]
    if int(str(op.attr["dim"])) % x.tensor.rank != x.tensor.rank - 1:
        raise Unsupported("argmax along another dim than the last", advice="transpose it first")
    row, column = _row(body, x, index)
    body.comment(op)
    _make_sure_float(x)
    kept = _kept(body, row, column, 'float("-inf")')
    over = _over_row(row.axes, column)
    return body.finish(op.result, f"tl.argmax({kept}, axis=1)[:, None]", over)


def _make_sure_float(value: Value) -> None:
    if not value.tensor.dtype.is_float:
        raise Unsupported(f"the largest of {value.tensor.dtype}", advice="cast it to float first")


def topk(body: Body, op: Op, result: int, index: tuple[Index, ...]) -> Expr:
    """Largest k of a row, one after the other; ties go to the lower index."""
    x, lead, place = op.operands[0], index[:-1], index[-1]
    keys = [("topk", op.results[0].name, n, *index) for n in (0, 1)]
    known = body.known(keys[result])
    if known is not None:
        return known
    row, column = _row(body, x, lead)
    body.comment(op)
    over = _over_row(row.axes, column)
    made_axes = joined(over, place.axes)
    width = x.tensor.shape[-1].static
    _make_sure_float(x)
    free = body.assign(f"({column.text} < {width}) & ({row.text} == {row.text})", row.axes)
    # Whole numbers in the order of the floats: a row that fills a warp takes one instruction.
    order = body.assign(f"functions.ranked({row.text})", row.axes)
    values, places = body.zeros(made_axes, "tl.float32"), body.zeros(made_axes, "tl.int32")
    step = body.fresh("k")
    with body.loop(step, int(str(op.attr["k"]))):
        left = body.assign(f"tl.where({free.text}, {order.text}, functions.LOWEST_RANK)", row.axes)
        best = body.assign(f"tl.max({left.text}, axis=1)[:, None]", over)
        first = f"tl.where({free.text} & ({order.text} == {best.text}), {column.text}, {width - 1})"
        at = body.assign(f"tl.min({first}, axis=1)[:, None]", over)
        found = f"functions.unranked({best.text})"
        body.emit(f"{values.text} = tl.where({place.text} == {step}, {found}, {values.text})")
        body.emit(f"{places.text} = tl.where({place.text} == {step}, {at.text}, {places.text})")
        body.emit(f"{free.text} = {free.text} & ({column.text} != {at.text})")
    narrow = rounded(values.text, scalar(op.results[0].tensor.dtype))
    if narrow:
        body.emit(f"{values.text} = {narrow}")
    body.emit(f"{places.text} = {places.text}.to(tl.int64)")
    pair = (values, places)
    for key, made in zip(keys, pair, strict=True):
        body.remember(key, made)
    return pair[result]


# --- look-ups -----------------------------------------------------------------------------------


def gather(body: Body, op: Op, result: int, index: tuple[Index, ...]) -> Expr:
    """Rows of the first dim."""
    x, rows = op.operands
    rank = rows.tensor.rank
    place = body.value(rows, index[:rank])
    body.comment(op)
    at = body.name_index(f"{place.text}.to(tl.int64)", place.axes)
    return body.value(x, (at, *index[rank:]))


def embedding(body: Body, op: Op, result: int, index: tuple[Index, ...]) -> Expr:
    """Rows of a table; negative ones are zero."""
    rows, table = op.operands
    place = body.value(rows, index[:-1])
    body.comment(op)
    at = body.name_index(f"{place.text}.to(tl.int64)", place.axes)
    guarded = replace(at, guards=(f"({at.text} >= 0)",))
    found = body.value(table, (guarded, index[-1]))
    if scalar(op.result.tensor.dtype) == table.tensor.dtype:
        return found
    return body.finish(op.result, found.text, found.axes)


def route(body: Body, op: Op, result: int, index: tuple[Index, ...]) -> Expr:
    """The slot that serves a token's choice: replicas of an expert take turns by token."""
    ids, table, replicas = op.operands
    expert = body.value(ids, index)
    body.comment(op)
    known = f"({expert.text} >= 0) & ({expert.text} < {table.tensor.shape[0].static})"
    inside = body.assign(known, expert.axes)
    at = body.name_index(f"{expert.text}.to(tl.int64)", expert.axes)
    guarded = replace(at, guards=(inside.text,))
    count = body.value(replicas, (guarded,))
    # What is masked away has no replicas: the remainder needs one.
    turn = f"{index[0].text} % tl.maximum({count.text}, 1)"
    place = body.name_index(turn, joined(index[0].axes, count.axes))
    slot = body.value(table, (guarded, place))
    return body.finish(op.result, f"tl.where({inside.text}, {slot.text}, -1)", slot.axes)


def concat(body: Body, op: Op, result: int, index: tuple[Index, ...]) -> Expr:
    """Each part where it stands, the rest masked away."""
    rank = op.result.tensor.rank
    axis = int(str(op.attr["dim"])) % rank
    entry = index[axis]
    start, made, axes = dim(0), "", frozenset[str]()
    for operand in op.operands:
        size = operand.tensor.shape[axis]
        first, last = body.arguments.size(start), body.arguments.size(start + size)
        at = body.name_index(f"{entry.text} - {first}", entry.axes)
        inside = f"({entry.text} >= {first}) & ({entry.text} < {last})"
        guarded = Index(at.text, at.axes, (*entry.guards, inside))
        part = body.value(operand, (*index[:axis], guarded, *index[axis + 1 :]))
        made = part.text if not made else f"tl.where({entry.text} < {first}, {made}, {part.text})"
        axes = joined(axes, part.axes, entry.axes)
        start = start + size
        if operand is not op.operands[0]:
            made = body.assign(made, axes).text
    return Expr(made, axes)


# --- the rest -----------------------------------------------------------------------------------


def rope(body: Body, op: Op, result: int, index: tuple[Index, ...]) -> Expr:
    """Pairs of a head turned by the angle of its position."""
    x, positions = op.operands
    head = x.tensor.shape[-1].static
    width = int(str(op.attr.get("width", 0))) or head
    place = index[-1]
    half = width // 2
    interleaved = bool(op.attr.get("interleaved", False))
    position = body.value(positions, index[:-2])
    table = body.table(op)
    row = body.name_index(f"{position.text}.to(tl.int64) * {half}", position.axes)
    halves = body.halves(width)
    if halves is not None and place in halves and width == head and not interleaved:
        return _turned_half(body, op, index, row, halves)
    if interleaved and width == head and body.is_whole(place, head):
        return _turned_pairs(body, op, index, row)
    if interleaved:
        is_first, pair = f"{place.text} % 2 == 0", f"({place.text} // 2) % {half}"
        other = f"{place.text} ^ 1"
    else:
        is_first, pair = f"{place.text} < {half}", f"{place.text} % {half}"
        other = f"tl.where({place.text} < {half}, {place.text} + {half}, {place.text} - {half})"
    if width < head:
        other = f"tl.where({place.text} < {width}, {other}, {place.text})"
    partner = body.name_index(other, place.axes)
    at = Index(f"{row.text} + {pair}", joined(row.axes, place.axes), place.guards)
    cos, sin = (body.read(f"{kind}{table}", F32, at) for kind in ("cos", "sin"))
    tile = body.value(x, index)
    second = body.value(x, (*index[:-1], Index(partner.text, partner.axes, place.guards)))
    body.comment(op)
    axes = joined(tile.axes, second.axes, cos.axes)
    signed = body.assign(f"tl.where({is_first}, -{second.text}, {second.text})", axes)
    text = f"{tile.text} * {cos.text} + {signed.text} * {sin.text}"
    if width < head:
        turned = body.assign(text, axes)
        text = f"tl.where({place.text} < {width}, {turned.text}, {tile.text})"
    return body.finish(op.result, text, axes)


def _turned_half(
    body: Body, op: Op, index: tuple[Index, ...], row: Index, halves: tuple[Index, Index]
) -> Expr:
    """One half of turned rows, of numbers that are read for both halves."""
    table, lower = body.table(op), halves[0]
    at = Index(f"{row.text} + {lower.text}", joined(row.axes, lower.axes))
    cos, sin = (_table_part(body, f"{kind}{table}", at) for kind in ("cos", "sin"))
    first, second = (body.value(op.operands[0], (*index[:-1], half)) for half in halves)
    body.comment(op)
    text = f"{first.text} * {cos.text} - {second.text} * {sin.text}"
    if index[-1] != lower:
        text = f"{second.text} * {cos.text} + {first.text} * {sin.text}"
    return body.finish(op.result, text, joined(first.axes, second.axes, cos.axes))


def _turned_pairs(body: Body, op: Op, index: tuple[Index, ...], row: Index) -> Expr:
    """Turned rows whose pairs stand side by side: each takes its partner from the registers."""
    table, place = body.table(op), index[-1]
    tile = _spread(body, body.value(op.operands[0], index), place)
    column = body.whole(dim(op.result.tensor.shape[-1].static // 2))
    at = Index(f"{row.text} + {column.text}", joined(row.axes, column.axes))
    parts = [_table_part(body, f"{kind}{table}", at) for kind in ("cos", "sin")]
    body.comment(op)
    axes = row.axes | place.axes
    cos, sin = (body.assign(f"functions.twice({part.text})", axes) for part in parts)
    second = body.assign(f"functions.partners({tile.text})", tile.axes)
    signed = f"tl.where({place.text} % 2 == 0, -{second.text}, {second.text})"
    text = f"{tile.text} * {cos.text} + {signed} * {sin.text}"
    return body.finish(op.result, text, joined(tile.axes, axes))


def _table_part(body: Body, pointer: str, at: Index) -> Expr:
    """Numbers of a rotary table, read once."""
    key = (pointer, at.text)
    known = body.known(key)
    return known if known is not None else body.remember(key, body.read(pointer, F32, at))


def full(body: Body, op: Op, result: int, index: tuple[Index, ...]) -> Expr:
    """One number everywhere."""
    value, dtype = op.attr["value"], scalar(op.result.tensor.dtype)
    assert isinstance(value, int | float)
    held = "tl.float32" if is_float(dtype.name) else TYPES[dtype.name]
    text = f"tl.full([1, 1], {number(value)}, {held})"
    return body.finish(op.result, text, frozenset())


def iota(body: Body, op: Op, result: int, index: tuple[Index, ...]) -> Expr:
    """start, start + step, ..."""
    start, step = op.attr.get("start", 0), op.attr.get("step", 1)
    dtype = scalar(op.result.tensor.dtype)
    held = "tl.float32" if is_float(dtype.name) else TYPES[dtype.name]
    text = f"({index[0].text} * {step} + {start}).to({held})"
    return body.finish(op.result, text, index[0].axes)


def silu_mul_halves(body: Body, op: Op, result: int, index: tuple[Index, ...]) -> Expr:
    """The gate in the first half of a row, what it multiplies in the second."""
    x, place = op.operands[0], index[-1]
    half = op.result.tensor.shape[-1].static
    second = body.name_index(f"{place.text} + {half}", place.axes)
    gate = body.value(x, index)
    up = body.value(x, (*index[:-1], Index(second.text, second.axes, place.guards)))
    body.comment(op)
    text = f"functions.silu({gate.text}) * {up.text}"
    return body.finish(op.result, text, joined(gate.axes, up.axes))


HANDLERS: dict[str, Handler] = {
    "rms_norm": rms_norm,
    "layer_norm": layer_norm,
    "softmax": softmax,
    **dict.fromkeys(("sum", "mean", "max", "min"), reduction),
    "argmax": argmax,
    "topk": topk,
    "gather": gather,
    "embedding": embedding,
    "route": route,
    "concat": concat,
    "rope": rope,
    "silu_mul_halves": silu_mul_halves,
    "full": full,
    "iota": iota,
}
