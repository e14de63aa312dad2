"""What a hardware file may say: one pydantic model per table of the TOML.

Models hold values as written, units resolved; metainfer.hardware.load checks them against each
other and builds the frozen values of machine.py. Keys outside these models are errors.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

from metainfer.hardware.units import Kind, parse_quantity
from metainfer.ir.errors import HardwareError

Basis = Literal["measured here", "measured elsewhere", "datasheet", "assumed"]


class QuantityError(ValueError):
    """A quantity that cannot be read; carries its advice through pydantic."""

    def __init__(self, what: str, advice: str) -> None:
        self.advice = advice
        super().__init__(what)


def _reader(kind: Kind, *, zero: bool) -> BeforeValidator:
    """Build the validator that reads a quantity string of one kind."""

    def read(value: Any) -> float:
        if not isinstance(value, str):
            raise QuantityError(
                f"{value!r} has no unit", f"write the {kind} in quotes with its unit"
            )
        try:
            number = parse_quantity(value, kind)
        except HardwareError as error:
            raise QuantityError(error.what, error.advice) from error
        if number == 0 and not zero:
            raise QuantityError(f"{value!r} is nothing", "leave the key out if it is not known")
        return int(number) if kind == "size" else number

    return BeforeValidator(read)


Size = Annotated[int, _reader("size", zero=False)]
SizeOrNone = Annotated[int, _reader("size", zero=True)]
BytesPerSecond = Annotated[float, _reader("bandwidth", zero=False)]
FlopsPerSecond = Annotated[float, _reader("rate", zero=False)]
Microseconds = Annotated[float, _reader("time", zero=True)]
Hertz = Annotated[float, _reader("frequency", zero=False)]
Watts = Annotated[float, _reader("power", zero=False)]
Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
Count = Annotated[int, Field(ge=1)]


def _read_speed(value: Any) -> tuple[str, float]:
    """Read a point of a curve, which may be a time or a rate."""
    if not isinstance(value, str):
        raise QuantityError(f"{value!r} has no unit", "write a time or a rate: '27.3 us'")
    kind: Kind = "rate" if value.rstrip().endswith("P/s") else "time"
    try:
        number = parse_quantity(value, kind)
    except HardwareError as error:
        raise QuantityError(error.what, error.advice) from error
    if number == 0:
        raise QuantityError(f"{value!r} is nothing", "leave the point out if it is not known")
    return kind, number


Speed = Annotated[tuple[str, float], BeforeValidator(_read_speed)]


class Table(BaseModel):
    """Base of all tables: no unknown keys, no conversions."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, populate_by_name=False)


class MemoryTable(Table):
    """[memory] of a device."""

    capacity: Size
    reserved: SizeOrNone
    peak_bandwidth: BytesPerSecond
    sustained_bandwidth: BytesPerSecond
    source: Text


class ComputeTable(Table):
    """[compute] of a device: its units and limits. A limit that is not known is left out."""

    sms: Count
    warps_per_sm: Annotated[int, Field(ge=0)] = 0
    smem_per_block: SizeOrNone = 0
    smem_per_sm: SizeOrNone = 0
    l2: SizeOrNone = 0
    features: list[Text]
    source: Text


class LaunchTable(Table):
    """[launch] of a device: what a kernel costs beside its work."""

    latency: Microseconds
    kernel_floor: Microseconds
    source: Text


class BoardTable(Table):
    """[board] of a device; informative."""

    power: Watts | None = None
    clock: Hertz | None = None
    source: Text


class RateTable(Table):
    """[rates.X] of a device."""

    peak: FlopsPerSecond
    sustained: FlopsPerSecond
    source: Text


class CurveTable(Table):
    """[[curves]] of a device: a product measured by number of rows."""

    kind: Literal["gemm", "grouped_gemm", "fused_moe"]
    dtype: Text
    n: Count
    k: Count
    groups: Count = 1
    rows: Annotated[list[Count], Field(min_length=1)]
    values: Annotated[list[Speed], Field(min_length=1)]
    basis: Basis
    source: Text


class LibraryTable(Table):
    """[[libraries]] of a device."""

    name: Text
    version: str = ""
    min_version: str = ""
    absent: bool = False
    source: Text


class PolicyTable(Table):
    """[[policy]] of a device or a machine."""

    subject: Literal["kernel", "rule", "collective", "library"]
    name: Text
    stance: Literal["prefer", "forbid"]
    phase: Literal["prefill", "decode", "any"] = "any"
    reason: Text


class DeviceFile(Table):
    """devices/NAME.toml, or [types.NAME] of a machine file."""

    name: Text
    title: Text
    kind: Literal["cpu", "gpu"]
    capability: str = ""
    product_names: list[Text] = []
    memory: MemoryTable
    compute: ComputeTable
    launch: LaunchTable
    board: BoardTable | None = None
    rates: dict[str, RateTable]
    libraries: list[LibraryTable] = []
    curves: list[CurveTable] = []
    policy: list[PolicyTable] = []


class NodeTable(Table):
    """[[nodes]]: a host."""

    name: Text
    memory: Size | None = None
    source: Text


class SocketTable(Table):
    """[[sockets]] of a host."""

    name: Text
    node: Text
    numa: Annotated[int, Field(ge=0)] = 0
    cores: Annotated[int, Field(ge=0)] = 0
    memory_bandwidth: BytesPerSecond | None = None


class RootTable(Table):
    """[[roots]]: a PCIe root complex of a socket."""

    name: Text
    socket: Text


class CollapseTable(Table):
    """posted_write_collapse of a switch."""

    writers: Count
    roots: Count
    total: BytesPerSecond
    source: Text


class SwitchTable(Table):
    """[[switches]]; one without a node is of the network."""

    name: Text
    node: str = ""
    kind: Literal["pcie", "nvlink", "network"]
    posted_write_collapse: CollapseTable | None = None


class NicTable(Table):
    """[[nics]] of a host."""

    name: Text
    node: Text


class DevicesTable(Table):
    """[[devices]]: some devices of one type in one host, in rank order."""

    names: Annotated[list[Text], Field(min_length=1)]
    type: Text
    node: Text


class LinkTable(Table):
    """[[links]]: one link from each of ``from`` to ``to``; bandwidths are of one direction."""

    origins: Annotated[list[Text], Field(min_length=1, alias="from")]
    to: Text
    kind: Literal["pcie", "nvlink", "xgmi", "upi", "infiniband", "ethernet", "memory"]
    generation: Annotated[int, Field(ge=1)] | None = None
    width: Count | None = None
    line_rate: BytesPerSecond | None = None
    read: BytesPerSecond
    write: BytesPerSecond
    total: BytesPerSecond | None = None
    both_ways: BytesPerSecond | None = None
    read_latency: Microseconds
    write_latency: Microseconds
    p2p: bool
    basis: Basis
    source: Text


class HostTable(Table):
    """[host]: the way through host memory."""

    staging_bandwidth: BytesPerSecond
    staging_latency: Microseconds
    dma_total: BytesPerSecond
    source: Text


class CollectiveTable(Table):
    """[[collectives]]: sizes and times, or latency and bandwidth."""

    op: Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"]
    algorithm: Text
    ranks: Annotated[int, Field(ge=2)]
    sizes: list[Size] = []
    times: list[Microseconds] = []
    latency: Microseconds | None = None
    bandwidth: BytesPerSecond | None = None
    basis: Literal["measured here", "measured elsewhere", "assumed"]
    source: Text


class CommunicatorTable(Table):
    """[[communicator]]: one option of the communication library."""

    name: Text
    value: Text
    reason: Text


class MachineFile(Table):
    """NAME.toml; ``types`` is read apart, as device files."""

    name: Text
    title: Text
    source: Text
    types: dict[str, Any] = {}
    nodes: Annotated[list[NodeTable], Field(min_length=1)]
    sockets: list[SocketTable] = []
    roots: list[RootTable] = []
    switches: list[SwitchTable] = []
    nics: list[NicTable] = []
    devices: Annotated[list[DevicesTable], Field(min_length=1)]
    links: list[LinkTable] = []
    host: HostTable | None = None
    collectives: list[CollectiveTable] = []
    communicator: list[CommunicatorTable] = []
    policy: list[PolicyTable] = []
