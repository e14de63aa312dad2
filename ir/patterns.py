"""One side of a rewrite rule: ops over variables. ``rules.py`` explains the language."""

from collections.abc import Iterator
from dataclasses import dataclass

from metainfer.ir.dims import Dim
from metainfer.ir.dtypes import DType
from metainfer.ir.graph import Attr


@dataclass(frozen=True)
class AttrVar:
    """``$name`` where an attribute's value stands; the name is without its sigil."""

    name: str


@dataclass(frozen=True)
class DTypeVar:
    """A variable for an element type."""

    name: str


PatternAttr = Attr | AttrVar | tuple["PatternAttr", ...]


@dataclass(frozen=True)
class TypePattern:
    """Type of a tensor in a pattern.

    Attributes:
        dtype: an element type, or a variable for one.
        shape: the last sizes; symbols are variables.
        free_lead: whether any dims may stand before them (``t[*]``, ``t[..., D]``).
    """

    dtype: DType | DTypeVar
    shape: tuple[Dim, ...]
    free_lead: bool = False

    def __str__(self) -> str:
        """Print ``t[..., D]``."""
        dtype = self.dtype.name
        sizes = ",".join(map(str, self.shape))
        if not self.free_lead:
            return f"{dtype}[{sizes}]"
        return f"{dtype}[..., {sizes}]" if self.shape else f"{dtype}[*]"


@dataclass(frozen=True)
class StatePattern:
    """Type of a state in a pattern: any state."""

    def __str__(self) -> str:
        """Print ``state``."""
        return "state"


AnyPattern = TypePattern | StatePattern


@dataclass(frozen=True)
class Param:
    """A parameter of a pattern; the name has its sigil."""

    name: str
    type: AnyPattern


@dataclass(frozen=True)
class PatternOp:
    """One op of a pattern.

    Attributes:
        name: the op's name.
        operands: names of values.
        results: names of values.
        attrs: sorted pairs (name, value or variable); "kind" of a fused group is among them. An
            attribute that is not named has its default.
        result_types: one per result, or () where they are inferred.
    """

    name: str
    operands: tuple[str, ...]
    results: tuple[str, ...]
    attrs: tuple[tuple[str, PatternAttr], ...] = ()
    result_types: tuple[AnyPattern, ...] = ()


@dataclass(frozen=True)
class Pattern:
    """One side of a rule.

    Attributes:
        params: values that come from outside.
        ops: in order; every operand is defined before it is used.
        outputs: names of what the pattern gives back.
        state_outputs: names of the states that it gives back.
    """

    params: tuple[Param, ...]
    ops: tuple[PatternOp, ...]
    outputs: tuple[str, ...]
    state_outputs: tuple[str, ...] = ()

    def size_variables(self) -> frozenset[str]:
        """Symbols of all sizes in the pattern."""
        shapes = (size for type_ in self.types() for size in type_.shape)
        inside = (value for value in self.attr_leaves() if isinstance(value, Dim))
        return frozenset(name for size in (*shapes, *inside) for name in size.symbols())

    def dtype_variables(self) -> frozenset[str]:
        """Names of all variables for element types."""
        return frozenset(t.dtype.name for t in self.types() if isinstance(t.dtype, DTypeVar))

    def attr_variables(self) -> frozenset[str]:
        """Names of all variables for attributes, without their sigils."""
        return frozenset(leaf.name for leaf in self.attr_leaves() if isinstance(leaf, AttrVar))

    def types(self) -> Iterator[TypePattern]:
        """All tensor types of the pattern."""
        everything = [p.type for p in self.params]
        everything += [type_ for op in self.ops for type_ in op.result_types]
        return (type_ for type_ in everything if isinstance(type_, TypePattern))

    def attr_leaves(self) -> Iterator[Attr | AttrVar]:
        """All values of attributes, tuples opened."""
        return (leaf for op in self.ops for _, value in op.attrs for leaf in _leaves(value))


def _leaves(value: PatternAttr) -> Iterator[Attr | AttrVar]:
    if not isinstance(value, tuple):
        yield value
        return
    for item in value:
        yield from _leaves(item)
