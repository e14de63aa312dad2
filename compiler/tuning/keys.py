"""Keys of measured times: what a group computes, at which sizes, on which features and limits.

    linear(bf16[T,4096], @bf16[6144,4096]) : bf16[T,6144]          at T=16

Names of values, of layers and of devices are no part of a key, nor is how a weight is packed, which
the kernel decides. A group whose sizes all vary by one number calls that number T, whatever the
model does: the rows that are sampled are rows like others.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from metainfer.hardware.device import Device
from metainfer.ir.dims import Dim
from metainfer.ir.graph import Attr, Graph, Op, Value
from metainfer.ir.printer import print_attr
from metainfer.ir.types import StateType, Type

ROWS = "T"
_LIBRARIES = ("torch", "triton")
# What a size could be taken from, in search of the symbol's value that gives it.
_MOST = 1 << 24


@dataclass(frozen=True)
class GroupKey:
    """What a group computes.

    Attributes:
        text: canonical, without names.
        rows: the one size that varies, which the text calls T; None if there are none or several.
        symbols: size symbols that matter where there are several.
    """

    text: str
    rows: Dim | None
    symbols: tuple[str, ...]

    def sizes(self, env: Mapping[str, int]) -> dict[str, int]:
        """The sizes that tell one measurement of the group from another."""
        if self.rows is not None:
            return {ROWS: self.rows.evaluate(env)}
        return {name: env[name] for name in self.symbols}

    def env(self, sizes: Mapping[str, int], env: Mapping[str, int]) -> dict[str, int]:
        """Values of the symbols at which the group has these sizes; others as they are."""
        if self.rows is None:
            return {**env, **sizes}
        (symbol,) = self.rows.symbols()
        return {**env, symbol: _solved(self.rows, symbol, sizes[ROWS])}


def _solved(size: Dim, symbol: str, wanted: int) -> int:
    """The least value of a symbol for which a size that grows with it is as large as wanted."""
    low, high = 0, _MOST
    while low < high:
        middle = (low + high) // 2
        if size.evaluate({symbol: middle}) >= wanted:
            high = middle
        else:
            low = middle + 1
    return low


@lru_cache(maxsize=4096)
def key_of(op: Op) -> GroupKey:
    """The key of an op or a fused group."""
    dims = {size for size in _sizes(op) if not size.is_static}
    rows = next(iter(dims)) if len(dims) == 1 else None
    if rows is not None and len(rows.symbols()) != 1:
        rows = None
    symbols = () if rows is not None else tuple(sorted({s for d in dims for s in d.symbols()}))
    return GroupKey(_Writer(rows).group(op), rows, symbols)


def _sizes(op: Op) -> Iterator[Dim]:
    for value in (*op.operands, *op.results):
        if not isinstance(value.type, StateType):
            yield from value.tensor.shape
    for _, attr in op.attrs:
        yield from _dims_of(attr)
    for inner in op.body.ops if op.body is not None else ():
        yield from _sizes(inner)


def _dims_of(attr: Attr) -> Iterator[Dim]:
    if isinstance(attr, Dim):
        yield attr
    elif isinstance(attr, tuple):
        for inner in attr:
            yield from _dims_of(inner)


class _Writer:
    """Writes a group in a form that depends on nothing but what it computes."""

    def __init__(self, rows: Dim | None) -> None:
        self._rows = rows

    def group(self, op: Op) -> str:
        kind = f"fused[{op.attr['kind']}]" if op.body is not None else op.name
        given = ", ".join(self._operand(v) for v in op.operands)
        attrs = "" if op.body is not None else self._attrs(op)
        body = f" {{ {self._body(op.body)} }}" if op.body is not None else ""
        made = ", ".join(self._type(v.type) for v in op.results)
        return f"{kind}({given}){attrs}{body} : {made}"

    def _body(self, body: Graph) -> str:
        names = {v.name: f"x{i}" for i, v in enumerate(body.inputs)}
        lines = []
        for op in body.ops:
            for value in op.results:
                names[value.name] = f"y{len(names) - len(body.inputs)}"
            given = ", ".join(names.get(v.name, v.name) for v in op.operands)
            made = ", ".join(names[v.name] for v in op.results)
            lines.append(f"{made} = {op.name}({given}){self._attrs(op)}")
        returned = ", ".join(names[v.name] for v in body.outputs)
        return "; ".join([*lines, f"return {returned}"])

    def _attrs(self, op: Op) -> str:
        parts = [f"{name} = {print_attr(self._renamed(value))}" for name, value in op.attrs]
        return f" {{{', '.join(parts)}}}" if parts else ""

    def _renamed(self, attr: Attr) -> Attr:
        if isinstance(attr, tuple):
            return tuple(self._renamed(inner) for inner in attr)
        return Dim(((ROWS, 1),)) if self._rows is not None and attr == self._rows else attr

    def _operand(self, value: Value) -> str:
        return f"{'@' if value.is_weight else ''}{self._type(value.type)}"

    def _type(self, type_: Type) -> str:
        if isinstance(type_, StateType):
            fields = ", ".join(f"{name}: {self._type(field)}" for name, field in type_.fields)
            return f"{type_.kind}({fields}) page {type_.page_size}"
        sizes = (ROWS if self._rows is not None and n == self._rows else n for n in type_.shape)
        return f"{type_.dtype}[{','.join(map(str, sizes))}]"


def sizes_text(sizes: Mapping[str, int]) -> str:
    """Print ``B=1 P=32 T=16``; "fixed" where nothing varies."""
    return " ".join(f"{name}={size}" for name, size in sorted(sizes.items())) or "fixed"


def device_key(device: Device) -> dict[str, Any]:
    """What of a device decides times: features and limits, never its name.

    Of the memory's rate two digits count: descriptions of one card differ in the third.
    """
    return {
        "kind": device.kind,
        "features": sorted(device.features),
        "processors": device.num_sms,
        "shared_memory_bytes": device.smem_per_block_bytes,
        "memory_gb_per_s": float(f"{device.memory_bandwidth.peak / 1e9:.2g}"),
    }


def library_versions() -> dict[str, str]:
    """Versions of the libraries here that kernels are made of, or compiled with."""
    found = {}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
