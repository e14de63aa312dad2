"""How a CPU kernel turns one op into commands of a program."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from metainfer.backends.cpu.program import DimArg, ProgramBuilder
from metainfer.ir.dims import Dim, dim
from metainfer.ir.graph import Op
from metainfer.ir.types import TensorType

IntArg = int | DimArg


@dataclass
class ProgramDims:
    """Sizes that a program reads at each run: products of symbolic sizes, numbered."""

    factors: list[tuple[Dim, ...]] = field(default_factory=list[tuple[Dim, ...]])

    def argument(self, *sizes: Dim) -> IntArg:
        """A product of sizes as an argument: a literal if all are static."""
        literal = 1
        symbolic: list[Dim] = []
        for size in sizes:
            if size.is_static:
                literal *= size.constant
            else:
                symbolic.append(size)
        if not symbolic:
            return literal
        key = tuple(symbolic)
        if key not in self.factors:
            self.factors.append(key)
        return DimArg(self.factors.index(key), scale=literal)

    def evaluate(self, env: Mapping[str, int]) -> list[int]:
        """Values for one run."""
        values = []
        for factors in self.factors:
            product = 1
            for size in factors:
                product *= size.evaluate(env)
            values.append(product)
        return values


@dataclass(frozen=True)
class CpuCall:
    """One op while a program is built.

    Attributes:
        op: the group.
        attrs: attributes with defaults filled in.
        builder: takes the commands.
        dims: numbers symbolic sizes.
        operand: address of an operand; a state's needs its field's name.
        result: address of a result.
        workspace: address of scratch space.
        rope: (theta and scaling as attributes, rotated width) -> addresses of cosines and sines.
        max_rows: upper bound of a row count, for laying out the scratch space.
    """

    op: Op
    attrs: Mapping[str, Any]
    builder: ProgramBuilder
    dims: ProgramDims
    operand: Callable[[int, str], int]
    result: Callable[[int], int]
    workspace: int
    rope: Callable[[Mapping[str, Any], int], tuple[int, int]]
    max_rows: Callable[[TensorType], int]

    def pointer(self, operand: int, field: str = "") -> int:
        """Address of an operand, 0 where it is absent."""
        return self.operand(operand, field) if operand < len(self.op.operands) else 0

    def tensor(self, operand: int) -> TensorType:
        """Type of an operand."""
        return self.op.operands[operand].tensor

    def rows(self, type_: TensorType, trailing: int = 1) -> IntArg:
        """Product of all dims but the last ``trailing``."""
        return self.dims.argument(dim(1), *type_.shape[: type_.rank - trailing])

    def width(self, type_: TensorType, trailing: int = 1) -> int:
        """Product of the last ``trailing`` dims, which are static."""
        total = 1
        for size in type_.shape[type_.rank - trailing :]:
            total *= size.static
        return total


@dataclass(frozen=True)
class CpuBinder:
    """What a CPU kernel's record carries: appends its commands to the program."""

    emit: Callable[[CpuCall], None]
