"""One group: the loads, ops and stores that make its results, tile by tile.

Every result is stored from tiles of [ROWS, COLUMNS]: its last dim lies along the columns, all
others together along the rows. A value is asked for at indices and asks its operands in turn, down
to the group's operands, which are loaded there: so views cost nothing, and a result may read
another part of a row than the one that it stands in.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from metainfer.backends.triton.emit.formulas import (
    ELEMENTWISE,
    TYPES,
    formula,
    rounded,
    scalar,
)
from metainfer.backends.triton.emit.index import (
    ROW,
    ZERO,
    Index,
    Views,
    axes_of,
    broadcast,
    guards_of,
    joined,
    plus,
    times,
)
from metainfer.backends.triton.emit.stores import store_entries, store_rounded
from metainfer.backends.triton.emit.tiles import (
    Arguments,
    Expr,
    Space,
    Store,
    heads_of,
    is_turned,
    needs_rows,
    power_of_two,
    rotary,
    rows_of,
    widest_row,
)
from metainfer.ir.dims import Dim, dim, product
from metainfer.ir.dtypes import Block, Scalar
from metainfer.ir.errors import Unsupported
from metainfer.ir.graph import Graph, Op, Value
from metainfer.ir.printer import print_op
from metainfer.ir.views import VIEW_OPS

COLUMN = "c0"  # name of the column axis of an epilogue's tile
WIDEST = 32768  # columns of one tile
CHUNK = 1024  # columns of a tile where no row is needed as a whole
_COMMENT_WIDTH = 88
_STATEMENT_WIDTH = 84


Handler = Callable[["Body", Op, int, tuple[Index, ...]], Expr]


class Body:
    """Emits the statements of one group.

    Args:
        graph: the group's body; its inputs are the operands in order.
        stores: what leaves it.
        strided: operands that are views with gaps.
        unit_last: those of them whose last dim is dense.
        handlers: what emits ops that are neither views nor elementwise.
    """

    def __init__(
        self,
        graph: Graph,
        stores: Sequence[Store],
        strided: frozenset[int],
        unit_last: frozenset[int],
        handlers: dict[str, Handler],
    ) -> None:
        self.graph = graph
        self.arguments = Arguments()
        self.spaces: list[Space] = []
        self.axes: list[str] = []  # definitions of column axes, at the top
        self.lines: list[str] = []
        self.has_loops = False
        self.views = Views(self.name_index, self.arguments.size)
        self._operands = {v.name: i for i, v in enumerate(graph.inputs)}
        self._producers = {v.name: (o, i) for o in graph.ops for i, v in enumerate(o.results)}
        self._strided, self._unit_last = strided, unit_last
        self.handlers = handlers
        self._memo: list[dict[tuple[object, ...], Expr]] = [{}]
        self._masks: dict[str, str] = {}
        self._extents: dict[str, int] = {}
        self._lead: dict[str, tuple[Index, ...]] = {}  # row axis -> the indices it splits into
        self._halves: dict[int, tuple[Index, Index]] = {}  # width -> columns of both halves
        self._count = 0
        self._depth = 1
        over_rows = any(s.needs_rows for s in stores) or any(map(needs_rows, graph.ops))
        self.is_chunked = not over_rows and any(self._is_wide(s) for s in stores)
        self._widest: dict[tuple[tuple[Dim, ...], Dim], int] = {}  # of the tiles behind a space's
        for one in stores:
            place, width = self._place(one), widest_row(one.value, self._producers)
            self._widest[place] = max(self._widest.get(place, 1), width)
        pairs = [] if self.is_chunked else [s for s in stores if is_turned(s, self._producers)]
        self._most_heads = max((heads_of(s.value.tensor.shape[:-1]) for s in pairs), default=0)

    def _place(self, store: Store) -> tuple[tuple[Dim, ...], Dim]:
        """Dims of a result along the rows, and along the columns."""
        shape = store.value.tensor.shape
        tall = not shape or self._drops_rows(store.value)
        return (shape, dim(1)) if tall else (shape[:-1], shape[-1])

    def _is_wide(self, store: Store) -> bool:
        width = self._place(store)[1]
        return not width.is_static or width.constant > CHUNK

    @property
    def elements(self) -> int:
        """Elements of the largest tile that a program holds at once."""
        return max(s.rows * max(s.columns, s.widest) for s in self.spaces)

    # --- statements ------------------------------------------------------------------------------

    def emit(self, line: str) -> None:
        """Append a statement."""
        self.lines.append("    " * self._depth + line)

    def comment(self, op: Op) -> None:
        """Append the op that the next statements compute."""
        text = print_op(replace(op, source=None, choices=(), stream=0, after=()))
        short = text if len(text) <= _COMMENT_WIDTH else text[: _COMMENT_WIDTH - 3] + "..."
        self.emit(f"# {short}")

    def assign(self, text: str, axes: frozenset[str], prefix: str = "v") -> Expr:
        """Give an expression a name."""
        name = f"{prefix}{self._count}"
        self._count += 1
        self.emit(f"{name} = {text}")
        return Expr(name, axes)

    def name_index(self, text: str, axes: frozenset[str]) -> Index:
        """An index by an expression, named unless it is a name or number already."""
        if text.isidentifier() or text.isdigit():
            return Index(text, axes)
        key = ("index", text)
        known = self.known(key)
        if known is None:
            known = self.remember(key, self.assign(text, axes, "i"))
        return Index(known.text, axes)

    def remember(self, key: tuple[object, ...], made: Expr) -> Expr:
        """Keep a result for as long as its variable is defined."""
        self._memo[-1][key] = made
        return made

    def known(self, key: tuple[object, ...]) -> Expr | None:
        """A result that was kept, if its variable is defined here."""
        return next((scope[key] for scope in reversed(self._memo) if key in scope), None)

    @contextmanager
    def loop(self, name: str, count: int) -> Iterator[None]:
        """Statements of a loop over ``count`` numbers."""
        self.emit(f"for {name} in range({count}):")
        self.has_loops = True
        self._depth += 1
        self._memo.append({})
        yield
        self._memo.pop()
        self._depth -= 1

    def fresh(self, prefix: str) -> str:
        """A name that is not taken."""
        self._count += 1
        return f"{prefix}{self._count - 1}"

    # --- axes ---------------------------------------------------------------------------------

    def mask(self, axes: frozenset[str], guards: Sequence[str] = ()) -> str:
        """Where a tile lies inside: conditions joined, "" where it always does."""
        parts = [self._masks[a] for a in sorted(axes, reverse=True) if self._masks[a]]
        return " & ".join([*parts, *guards])

    def whole(self, width: Dim) -> Index:
        """The column axis over a whole dim.

        Raises: Unsupported if the dim is symbolic or too wide for one tile.
        """
        size = width.static
        if size > WIDEST:
            raise Unsupported(
                f"rows of {size} numbers, a tile holds {WIDEST}",
                advice="the group is split, or another kernel takes it",
            )
        return self._columns(f"c{size}", str(size), power_of_two(size))

    def _columns(self, name: str, size: str, extent: int, chunk: bool = False) -> Index:
        if name not in self._masks:
            start = f"tl.program_id(1) * {extent} + " if chunk else ""
            self.axes.append(f"{name} = {start}tl.arange(0, {extent})[None, :]")
            # Chunks are as many as the widest result has: a narrower one ends before.
            ends = chunk or size != str(extent)
            self._masks[name] = f"{name}_in" if ends else ""
            self._extents[name] = extent
            if ends:
                self.axes.append(f"{name}_in = {name} < {size}")
        return Index(name, frozenset([name]))

    def is_whole(self, axis: Index, size: int) -> bool:
        """Whether an index is the column axis over a whole dim."""
        return not self.is_chunked and not axis.guards and axis.text == f"c{size}"

    def column_mask(self, axis: Index) -> str:
        """Condition of a column axis, "" where the tile ends with the dim."""
        return self._masks[axis.text]

    def _space(self, place: tuple[tuple[Dim, ...], Dim]) -> Space:
        lead, width = place
        for known in self.spaces:
            if (known.lead, known.width) == (lead, width):
                return known
        whole = power_of_two(width.constant) if width.is_static else CHUNK
        columns = min(whole, CHUNK) if self.is_chunked else whole
        widest = self._widest[place]
        rows = rows_of(lead, max(columns, widest), self._most_heads)
        space = Space(len(self.spaces), lead, width, rows, columns, widest)
        self.spaces.append(space)
        return space

    def _row_index(self, space: Space) -> tuple[Index, ...]:
        """Define a space's rows, and the index of each of their dims."""
        row = space.row
        if row in self._masks:
            return self._lead[row]
        shape = ",".join(map(str, (*space.lead, space.width)))
        self.emit(f"# rows of [{shape}]")
        self.emit(
            f"{row} = tl.program_id(0).to(tl.int64) * {space.rows} "
            f"+ tl.arange(0, {space.rows})[:, None]"
        )
        self.emit(f"{row}_in = {row} < rows{space.number}")
        self._masks[row] = f"{row}_in"
        self._extents[row] = space.rows
        return self._split_rows(space)

    def _split_rows(self, space: Space) -> tuple[Index, ...]:
        row, axes = space.row, frozenset([space.row])
        if len(space.lead) <= 1:
            self._lead[row] = tuple(Index(row, axes) for _ in space.lead)
            return self._lead[row]
        made = []
        for number, size in enumerate(space.lead):
            name = f"{row}_{number}"
            rest = self.views.product(space.lead[number + 1 :])
            text = row if rest == "1" else f"{row} // {rest}"
            if number and rest != "1":
                text = f"({text})"
            if number:
                text = f"{text} % {self.arguments.size(size)}"
            if number and size.is_static:
                # Sums along it need no 64 bits.
                text = f"({text}).to(tl.int32)"
            self.emit(f"{name} = {text}")
            made.append(Index(name, axes))
        self._lead[row] = tuple(made)
        return self._lead[row]

    def zeros(self, axes: frozenset[str], type_: str) -> Expr:
        """A tile of zeros along some axes, for results of a loop."""
        row = next((self._extents[a] for a in axes if a.startswith(ROW)), 1)
        column = next((self._extents[a] for a in axes if not a.startswith(ROW)), 1)
        return self.assign(f"tl.zeros([{row}, {column}], {type_})", axes)

    def table(self, op: Op) -> int:
        """Number of the rotary tables that an op reads: ops of equal parameters share them."""
        wanted = rotary(op)
        for number, known in enumerate(self.arguments.tables):
            if rotary(known) == wanted:
                return number
        self.arguments.tables.append(op)
        return len(self.arguments.tables) - 1

    # --- values -------------------------------------------------------------------------------

    def value(self, value: Value, index: tuple[Index, ...]) -> Expr:
        """A value at indices, one for each of its dims.

        Raises: Unsupported if the emitter cannot compute it.
        """
        key = (value.name, *((i.text, i.guards) for i in index))
        known = self.known(key)
        if known is not None:
            return known
        return self.remember(key, self._computed(value, index))

    def _computed(self, value: Value, index: tuple[Index, ...]) -> Expr:
        if value.name in self._operands:
            return self._load(self._operands[value.name], value, index)
        if value.name not in self._producers:
            raise Unsupported(
                f"{value.name} is neither made nor passed to the group",
                advice="the group's body must name all that it reads as operands",
            )
        op, result = self._producers[value.name]
        if op.name in VIEW_OPS:
            return self.value(op.operands[0], self.views.operand_index(op, index))
        if op.name in ELEMENTWISE:
            return self._elementwise(op, index)
        if op.name in self.handlers:
            return self.handlers[op.name](self, op, result, index)
        raise Unsupported(
            f"the emitter does not know {op.name}",
            advice="add it in backends/triton/emit/rows.py, or leave it to another kernel",
        )

    def _elementwise(self, op: Op, index: tuple[Index, ...]) -> Expr:
        operands = [self.value(v, broadcast(v.tensor.shape, index)) for v in op.operands]
        self.comment(op)
        return self.finish(
            op.result,
            formula(op, [e.text for e in operands]),
            joined(*(e.axes for e in operands)),
        )

    def finish(self, value: Value, text: str, axes: frozenset[str]) -> Expr:
        """Name a result and round it to its type, as the border of its op does."""
        dtype = scalar(value.tensor.dtype)
        made = self.assign(text, axes)
        narrow = rounded(made.text, dtype)
        if narrow:
            self.emit(f"{made.text} = {narrow}")
        elif not dtype.is_float and dtype.name not in ("bool", "i32"):
            self.emit(f"{made.text} = {made.text}.to({TYPES[dtype.name]})")
        return made

    def _load(self, number: int, value: Value, index: tuple[Index, ...]) -> Expr:
        type_ = value.tensor
        axes, guards = axes_of(index), guards_of(index)
        joined(axes)
        codes = type_.dtype.element if isinstance(type_.dtype, Block) else type_.dtype
        name = f"x{number}" if not isinstance(type_.dtype, Block) else f"x{number}_codes"
        offset = self._offset(number, value, index)
        made = self.read(name, scalar(codes), Index(offset, axes, guards))
        if not isinstance(type_.dtype, Block):
            return made
        return self._dequantized(number, value, index, made)

    def read(self, pointer: str, dtype: Scalar, offset: Index) -> Expr:
        """Load from a pointer argument; floats are widened."""
        address = pointer if offset.text == "0" else f"{pointer} + {offset.text}"
        condition = self.mask(offset.axes, offset.guards)
        other = "0.0" if dtype.is_float and dtype.name != "f8e8m0" else "0"
        masked = f", mask={condition}, other={other}" if condition else ""
        widen = ".to(tl.float32)" if dtype.is_float and dtype.name != "f32" else ""
        if dtype.name == "f8e8m0":
            bits = self.assign(f"tl.load({address}{masked})", offset.axes)
            return self.assign(f"functions.e8m0({bits.text})", offset.axes)
        text = f"tl.load({address}{masked})"
        if len(text) + len(widen) < _STATEMENT_WIDTH:
            return self.assign(text + widen, offset.axes)
        place = self.assign(address, offset.axes, "p")
        made = self.assign(f"tl.load({place.text}{masked})", offset.axes)
        if widen:
            self.emit(f"{made.text} = {made.text}{widen}")
        return made

    def _dequantized(
        self, number: int, value: Value, index: tuple[Index, ...], codes: Expr
    ) -> Expr:
        format_ = value.tensor.dtype
        assert isinstance(format_, Block)
        if format_.element.bits != 8:
            raise Unsupported(
                f"the emitter does not read {format_}", advice="dequantize the operand first"
            )
        shape = tuple(n.static for n in value.tensor.shape)
        blocks = format_.scale_shape(shape)
        lead = len(shape) - len(format_.block)
        at = list(index)
        for axis, extent in enumerate(format_.block, start=lead):
            at[axis] = (
                self.name_index(f"{index[axis].text} // {extent}", index[axis].axes)
                if extent
                else ZERO
            )
        strides = [product(map(dim, blocks[i + 1 :])).constant for i in range(len(blocks))]
        offset = plus(*(times(i.text, str(s)) for i, s in zip(at, strides, strict=True)))
        place = Index(offset, axes_of(at), guards_of(index))
        scale = self.read(f"x{number}_scales", format_.scale, place)
        text = f"{codes.text}.to(tl.float32) * {scale.text}"
        if format_.offset is not None:
            shift = self.read(f"x{number}_offsets", scalar(format_.offset), place)
            text += f" + {shift.text}"
        return self.assign(text, joined(codes.axes, scale.axes))

    def _offset(self, number: int, value: Value, index: tuple[Index, ...]) -> str:
        """Text of the elements between the operand's start and the tile."""
        shape = value.tensor.shape
        if number in self._strided:
            return self._strided_offset(number, index)
        terms, first = [], 0
        for space in self.spaces:
            lead = self._lead.get(space.row, ())
            count = len(lead)
            if count > 1 and index[:count] == lead and tuple(shape[:count]) == space.lead:
                terms.append(times(space.row, self.views.product(shape[count:])))
                first = count
                break
        for axis in range(first, len(shape)):
            terms.append(times(index[axis].text, self.views.product(shape[axis + 1 :])))
        return plus(*terms)

    def _strided_offset(self, number: int, index: tuple[Index, ...]) -> str:
        terms = []
        for axis, entry in enumerate(index):
            if axis == len(index) - 1 and number in self._unit_last:
                terms.append(entry.text)
                continue
            name = f"stride{number}_{axis}"
            if entry.text != "0":
                self.arguments.strides[name] = (number, axis)
            terms.append(times(entry.text, name))
        return plus(*terms)

    def enter(self, space: Space) -> tuple[Index, ...]:
        """Take a tile whose rows ``r0`` and columns ``c0`` are arguments; its indices."""
        self._masks[COLUMN] = f"{COLUMN}_in"
        return (*self.enter_row(space), Index(COLUMN, frozenset([COLUMN])))

    def enter_row(self, space: Space) -> tuple[Index, ...]:
        """Take whole rows ``r0`` that are an argument; the indices of their dims."""
        self.spaces.append(space)
        self._masks[space.row] = f"{space.row}_in"
        self._extents[space.row] = space.rows
        self.is_chunked = False
        return self._split_rows(space)

    # --- results ------------------------------------------------------------------------------

    def _drops_rows(self, value: Value) -> bool:
        """Whether a value has one number for what was a row: its last dim is one of rows then."""
        if value.name not in self._producers:
            return False
        op, _ = self._producers[value.name]
        if op.name in ELEMENTWISE:
            return any(self._drops_rows(v) for v in op.operands)
        return needs_rows(op) and value.tensor.rank < op.operands[0].tensor.rank

    def store(self, store: Store) -> None:
        """Compute a value and store it."""
        space = self._space(self._place(store))
        lead, tall = self._row_index(space), len(space.lead) == store.value.tensor.rank
        for column in self._store_columns(store, space):
            self._store_part(store, space, lead if tall else (*lead, column), column)

    def _store_columns(self, store: Store, space: Space) -> tuple[Index, ...]:
        """Columns that a result is stored from, one tile after the other."""
        if self.is_chunked:
            size = self.arguments.size(space.width)
            name = f"c{size.removeprefix('size_')}"
            return (self._columns(name, size, space.columns, chunk=True),)
        if is_turned(store, self._producers):
            return self._split(space.width.static)
        return (self.whole(space.width),)

    def _store_part(
        self, store: Store, space: Space, index: tuple[Index, ...], column: Index
    ) -> None:
        made = self.value(store.value, index)
        if store.rounding is not None:
            store_rounded(self, store, store.rounding, space, column, made)
            return
        if store.slots is not None:
            store_entries(self, store, store.slots, space, index, made)
            return
        offset = plus(times(space.row, self.arguments.size(space.width)), column.text)
        narrow = "" if store.dtype.name in ("f32", "bool") else f".to({TYPES[store.dtype.name]})"
        text = made.text + narrow
        condition = self.mask(frozenset([space.row]) | column.axes)
        self.emit(f"tl.store({store.target} + {offset}, {text}, mask={condition})")

    # --- halves of rows -----------------------------------------------------------------------

    def _split(self, width: int) -> tuple[Index, Index]:
        """Columns of both halves of rows of a width."""
        if width not in self._halves:
            lower = self.whole(dim(width // 2))
            upper = self.name_index(f"{lower.text} + {width // 2}", lower.axes)
            self._halves[width] = (lower, upper)
        return self._halves[width]

    def halves(self, width: int) -> tuple[Index, Index] | None:
        """Columns of both halves of rows of a width, if rows are read that way."""
        return self._halves.get(width)

    def extent(self, column: Index) -> int:
        """Numbers of a tile along the columns."""
        return self._extents[column.text]
