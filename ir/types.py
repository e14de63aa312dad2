"""Types of values: tensors with their sharding and packing, and states that live across steps."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from metainfer.ir.dims import Dim, dim, product
from metainfer.ir.dtypes import DType
from metainfer.ir.errors import TypeMismatch

PARTIAL = "partial"


@dataclass(frozen=True)
class Sharding:
    """How a tensor lies over the axes of the mesh.

    Attributes:
        axes: sorted pairs (axis, placement); a placement is the sharded dim's number, or "partial"
            for a pending sum. Axes not named hold replicas.
    """

    axes: tuple[tuple[str, int | str], ...] = ()

    def __str__(self) -> str:
        """Print ``(tp=S1, ep=partial)``, or nothing where everything is replicated."""
        if not self.axes:
            return ""
        inner = ", ".join(f"{a}={'S' + str(p) if isinstance(p, int) else p}" for a, p in self.axes)
        return f"({inner})"

    @staticmethod
    def of(placements: Mapping[str, int | str]) -> "Sharding":
        """Build from axis -> dim number or "partial"."""
        return Sharding(tuple(sorted(placements.items())))

    def placement(self, axis: str) -> int | str | None:
        """The placement over an axis, None for replicas."""
        return dict(self.axes).get(axis)


REPLICATED = Sharding()


@dataclass(frozen=True)
class TensorType:
    """Shape, element type, sharding and packing of a tensor.

    Attributes:
        shape: global sizes.
        dtype: scalar or block format.
        sharding: placement over mesh axes; replicated by default.
        layout: name of the packing that a kernel wants ("" is plain row-major).
    """

    shape: tuple[Dim, ...]
    dtype: DType
    sharding: Sharding = REPLICATED
    layout: str = ""

    def __str__(self) -> str:
        """Print ``bf16[T,576] @ (tp=S1) as "cpu.u4g32_n8"``."""
        text = f"{self.dtype}[{','.join(map(str, self.shape))}]"
        if self.sharding.axes:
            text += f" @ {self.sharding}"
        return f'{text} as "{self.layout}"' if self.layout else text

    @property
    def rank(self) -> int:
        """Number of dims."""
        return len(self.shape)

    def num_elements(self) -> Dim:
        """Product of the sizes."""
        return product(self.shape)

    def concrete(self, env: Mapping[str, int]) -> tuple[int, ...]:
        """Shape for given values of the symbols."""
        return tuple(size.evaluate(env) for size in self.shape)

    def bytes_at(self, env: Mapping[str, int]) -> int:
        """Bytes of the dense tensor for given values of the symbols."""
        return self.dtype.size_bytes(self.concrete(env))

    def most_bytes(self, limits: Mapping[str, tuple[int, int]]) -> int:
        """Bytes of the dense tensor at most, within inclusive bounds of the symbols."""
        return self.dtype.size_bytes(tuple(size.bounds(limits)[1] for size in self.shape))

    def with_shape(self, shape: tuple[Dim, ...]) -> "TensorType":
        """The same type with another shape."""
        return replace(self, shape=shape)

    def with_dtype(self, dtype: DType) -> "TensorType":
        """The same type with another element type."""
        return replace(self, dtype=dtype)


def tensor(dtype: DType, *shape: Dim | int | str) -> TensorType:
    """Make a plain tensor type: ``tensor(F32, "T", 576)``."""
    return TensorType(tuple(dim(size) for size in shape), dtype)


@dataclass(frozen=True)
class StateType:
    """What lives across steps: named fields, and how the state grows.

    Attributes:
        kind: "pages" (grows with tokens, paged), "ring" (bounded window) or "slot" (bounded, one
            per sequence).
        fields: (name, type of one entry), entry shapes without the token or sequence dim.
        growth: "token" or "sequence".
        page_size: tokens per page, 0 until the layout pass chose one.
    """

    kind: str
    fields: tuple[tuple[str, TensorType], ...]
    growth: str = "token"
    page_size: int = 0

    def __post_init__(self) -> None:
        """Check kind and growth.

        Raises: TypeMismatch if either is unknown.
        """
        if self.kind not in ("pages", "ring", "slot"):
            raise TypeMismatch(
                f"unknown kind of state {self.kind!r}", advice="known: pages, ring, slot"
            )
        if self.growth not in ("token", "sequence"):
            raise TypeMismatch(f"a state grows per token or per sequence, not per {self.growth!r}")

    def __str__(self) -> str:
        """Print ``pages(k: f32[3,64], v: f32[3,64]) per token page 16``."""
        inner = ", ".join(f"{name}: {type_}" for name, type_ in self.fields)
        page = f" page {self.page_size}" if self.page_size else ""
        return f"{self.kind}({inner}) per {self.growth}{page}"

    def field_type(self, name: str) -> TensorType:
        """Type of one entry of a field.

        Raises: TypeMismatch if there is no such field.
        """
        for field_name, type_ in self.fields:
            if field_name == name:
                return type_
        raise TypeMismatch(f"state has no field {name!r}: {self}")

    def entry_bytes(self) -> int:
        """Bytes of one entry (one token's, or one sequence's)."""
        return sum(type_.bytes_at({}) for _, type_ in self.fields)


Type = TensorType | StateType


@dataclass(frozen=True)
class Symbol:
    """A size symbol with inclusive bounds."""

    name: str
    low: int
    high: int


@dataclass(frozen=True)
class Mesh:
    """Named axes over the ranks, outermost first; empty for one rank."""

    axes: tuple[tuple[str, int], ...] = field(default=())

    def __str__(self) -> str:
        """Print ``(pp=2, tp=4)``."""
        return "(" + ", ".join(f"{name}={size}" for name, size in self.axes) + ")"

    @property
    def num_ranks(self) -> int:
        """Product of the axis sizes."""
        total = 1
        for _, size in self.axes:
            total *= size
        return total
