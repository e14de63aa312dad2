"""The nouns of an emitted group: tiles, what is stored from them, arguments beside operands."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from metainfer.backends.triton.emit.index import ROW
from metainfer.ir.dims import Dim, product
from metainfer.ir.dtypes import F8E4M3, F32, Block, Scalar
from metainfer.ir.entries import ENTRIES, LATENT, ROTARY
from metainfer.ir.errors import Unsupported
from metainfer.ir.graph import Attr, Op, Value
from metainfer.ir.ops.record import REDUCTION, op_def
from metainfer.ir.views import VIEW_OPS

LARGEST_GROUP = 1024  # numbers of a row that share a scale
# Ops that write entries of a paged state: the fields of their operands.
WRITES: dict[str, tuple[str, ...]] = {"kv_write": ENTRIES, "latent_write": (LATENT, ROTARY)}
_ELEMENTS = 1024  # of a tile with several rows
# The same where the halves of rows are turned: of 1,024 to 8,192 the best compromise for 1 to
# 16,384 tokens of Llama-3.1-8B and Qwen3-30B-A3B (H200, 2026-11-30).
_TURNED_ELEMENTS = 2048
_WHOLE_ROWS = ("rms_norm", "layer_norm", "softmax", "argmax", "topk")


@dataclass(frozen=True)
class Expr:
    """A computed tile: a variable's name, and the axes along which it varies."""

    text: str
    axes: frozenset[str]


@dataclass(frozen=True)
class Space:
    """Tiles that results of one shape are stored from.

    Attributes:
        number: which one.
        lead: dims along the rows.
        width: dim along the columns.
        rows: rows of a tile.
        columns: columns of a tile.
        widest: columns of the widest tile that its numbers are computed from, if more.
    """

    number: int
    lead: tuple[Dim, ...]
    width: Dim
    rows: int
    columns: int
    widest: int = 1

    @property
    def row(self) -> str:
        """Name of the row axis, and of the variable that holds the rows."""
        return f"{ROW}{self.number}"


@dataclass(frozen=True)
class Store:
    """A value that leaves the group.

    Attributes:
        value: what is stored, of the shape that it is computed in.
        target: pointer argument.
        dtype: element type in memory.
        slots: for a paged state: the value that holds each token's slot.
        rounding: the quantize by which codes and scales of the value are stored instead.
        scales: for a paged state of rounded entries: pointer argument of their scales.
    """

    value: Value
    target: str
    dtype: Scalar
    slots: Value | None = None
    rounding: Op | None = None
    scales: str = ""

    @property
    def needs_rows(self) -> bool:
        """Whether whole rows are rounded together."""
        return bool(self.scales) or (self.rounding is not None and not group_of(self.rounding))


@dataclass
class Arguments:
    """Arguments of the emitted function besides the operands, in order of first use.

    Attributes:
        sizes: symbolic sizes by name.
        strides: (operand, dim) by name, of operands that are views with gaps.
        tables: rope ops whose tables are read; ``cos<i>`` and ``sin<i>``.
    """

    sizes: dict[str, Dim] = field(default_factory=dict[str, Dim])
    strides: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    tables: list[Op] = field(default_factory=list[Op])

    def size(self, size: Dim) -> str:
        """Text of a size: a number, or an argument."""
        if size.is_static:
            return str(size.constant)
        for name, known in self.sizes.items():
            if known == size:
                return name
        text = str(size)
        plain = text.isidentifier() and text.isascii()
        name = f"size_{text}" if plain else f"size_{len(self.sizes)}"
        self.sizes[name] = size
        return name


def rotary(op: Op) -> tuple[dict[str, Attr], int]:
    """Attributes and width of the tables of a rope op."""
    attrs = op_def("rope").complete(op.attr)
    width = attrs["width"]
    assert isinstance(width, int)
    return attrs, width or op.operands[0].tensor.shape[-1].static


def group_of(rounding: Op) -> int:
    """Numbers of a row that share a scale after a quantize, 0 for a whole row.

    Raises: Unsupported for other formats than e4m3 codes with f32 scales of rows, or of parts of
        them that a tile holds whole.
    """
    format_, width = rounding.result.tensor.dtype, rounding.result.tensor.shape[-1].static
    group = format_.block[-1] if isinstance(format_, Block) else 0
    if format_ == Block(F8E4M3, (group,), F32):
        if group == 0 or group >= width:
            return 0
        if width % group == 0 and power_of_two(group) == group <= LARGEST_GROUP:
            return group
    raise Unsupported(f"rounding of rows of {width} to {format_}", advice="another kernel takes it")


def heads_of(lead: tuple[Dim, ...]) -> int:
    """Rows of a token, where the rows of a tile begin with one."""
    return product(n for n in lead if n.is_static).constant


def rows_of(lead: tuple[Dim, ...], columns: int, most_heads: int) -> int:
    """Rows of a tile; of heads that are turned, a program takes those of the same tokens.

    Args:
        lead: dims of the rows.
        columns: of the tile, or of a wider one that its rows are read from.
        most_heads: rows of a token of the results that are turned; 0 where none is.
    """
    if not most_heads:
        return max(1, _ELEMENTS // columns)
    most = _TURNED_ELEMENTS // columns
    return max(1, min(power_of_two(-(-heads_of(lead) * most // most_heads)), most))


def power_of_two(size: int) -> int:
    """The next power of two, at least 1."""
    return 1 << max(size - 1, 0).bit_length()


def is_turned(store: Store, producers: Mapping[str, tuple[Op, int]]) -> bool:
    """Whether a result's rows are pairs of numbers, one of each half, turned together.

    Both halves of a tile are then read once, in order: a tile of whole rows would read the partner
    of each number for itself, from another place of the row.
    """
    made = producers.get(store.value.name)
    if made is None or made[0].name != "rope" or store.needs_rows:
        return False
    attrs, width = rotary(made[0])
    return not attrs["interleaved"] and width == store.value.tensor.shape[-1].static


def row_width(op: Op) -> int:
    """Columns of a tile over the rows that an op reads, 1 where they are symbolic."""
    size = op.operands[0].tensor.shape[-1]
    return power_of_two(size.constant) if size.is_static else 1


def widest_row(value: Value, producers: Mapping[str, tuple[Op, int]]) -> int:
    """Columns of the widest tile among those that a value is computed from, 1 if of none."""
    found, seen, left = 1, set[str](), [value]
    while left:
        name = left.pop().name
        if name in seen or name not in producers:
            continue
        seen.add(name)
        op = producers[name][0]
        found = max(found, row_width(op) if needs_rows(op) else 1)
        left += op.operands
    return found


def needs_rows(op: Op) -> bool:
    """Whether an op reads its row as a whole."""
    if op.name in _WHOLE_ROWS:
        return True
    if op.name not in VIEW_OPS and op.name not in WRITES and op_def(op.name).has(REDUCTION):
        dims, rank = op.attr["dims"], op.operands[0].tensor.rank
        assert isinstance(dims, tuple)
        return any(int(d) % rank == rank - 1 for d in dims if isinstance(d, int))
    return False
