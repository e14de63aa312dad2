"""How long a product takes that is cut into tiles: some hang over, processors are left idle."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from metainfer.backends.kernel import Effort
from metainfer.hardware.device import Device
from metainfer.ir.graph import Op


def product_sizes(op: Op, env: Mapping[str, int]) -> tuple[int, int, int]:
    """Rows, columns and inner size of the product that an op is or begins with.

    What follows it may have other columns, or other dims.
    """
    rows = math.prod(op.operands[0].tensor.concrete(env)[:-1])
    columns, inner = (n.static for n in op.operands[1].tensor.shape)
    return rows, columns, inner


@dataclass(frozen=True)
class Pace:
    """What one program of a product does, and how fast.

    Attributes:
        rows: of a tile of the result.
        columns: of a tile of the result.
        alone: fraction of its processor's rate that a program reaches.
        resident: programs that a processor runs at once, none slower for it.
        ends: so many more numbers of its sum a program seems to take to begin and to end.
        source: where these figures come from.
    """

    rows: int
    columns: int
    alone: float
    resident: int
    ends: int
    source: str

    def effort(self, compute: float) -> Effort:
        """Arithmetic over that of the product alone.

        Args:
            compute: fraction of the rate that all processors together reach at most.
        """

        def factor(op: Op, device: Device, env: Mapping[str, int]) -> float:
            rows, columns, inner = product_sizes(op, env)
            programs = -(-rows // self.rows) * -(-columns // self.columns)
            if programs == 0 or device.num_sms == 0:
                return 1.0
            whole = programs * self.rows * self.columns / (rows * columns)
            waves = -(-programs // (device.num_sms * self.resident))
            # A wave takes no less than one of its programs.
            idle = waves * device.num_sms / programs * compute / self.alone
            return whole * max(1.0, idle) * (inner + self.ends) / inner

        return factor


@dataclass(frozen=True)
class Wait:
    """How long a program of few rows takes that waits for memory at each step of its sum.

    Units: nanoseconds for each number of a sum; those of memory's latency, whatever the rate of the
    arithmetic is.

    Attributes:
        rows: of a tile of the result.
        columns: of a tile of the result.
        each_ns: for one number of a sum.
        resident: programs that a processor runs at once, none slower for it.
        ends: so many more numbers of its sum a program seems to take to begin and to end.
        source: where these figures come from.
    """

    rows: int
    columns: int
    each_ns: float
    resident: int
    ends: int
    source: str

    def effort(self, rate: str, compute: float, parts: Callable[[int, int], int]) -> Effort:
        """Arithmetic over that of the product alone.

        Args:
            rate: name of the arithmetic's rate.
            compute: fraction of it that all processors together reach at most.
            parts: programs that share the sums of a tile, by tiles and inner size.
        """

        def factor(op: Op, device: Device, env: Mapping[str, int]) -> float:
            rows, columns, inner = product_sizes(op, env)
            tiles = -(-rows // self.rows) * -(-columns // self.columns)
            if tiles == 0 or device.num_sms == 0:
                return 1.0
            split = parts(tiles, inner)
            whole = tiles * self.rows * self.columns / (rows * columns)
            waves = -(-tiles * split // (device.num_sms * self.resident))
            seconds = waves * (inner / split + self.ends) * self.each_ns * 1e-9
            alone = 2.0 * rows * columns * inner / (device.rate(rate).sustained * compute)
            return max(whole, seconds / alone)

        return factor
