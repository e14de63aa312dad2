"""Quantities with units, as hardware files write them: "56 GB/s", "99 KiB", "0.7 us".

A quantity is a number, one space (or none) and a unit. A bare number is an error, and so is a unit
of another kind: most wrong hardware files are wrong by a unit. GB is 10^9 bytes, GiB is 2^30.
Bits are spelled out (``Gbit/s``), because ``Gb/s`` and ``GB/s`` are read for each other.

Base units, in which values are held: bytes, bytes/s, FLOP/s, microseconds, hertz, watts.
"""

import difflib
import re
from fractions import Fraction
from typing import Literal

from metainfer.ir.errors import HardwareError

Kind = Literal["size", "bandwidth", "rate", "time", "frequency", "power"]

_DECIMAL = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def _scaled(stem: str, *tables: dict[str, int]) -> dict[str, Fraction]:
    return {f"{prefix}{stem}": Fraction(f) for table in tables for prefix, f in table.items()}


_UNITS: dict[Kind, dict[str, Fraction]] = {
    "size": _scaled("B", _DECIMAL, _BINARY),
    "bandwidth": _scaled("B/s", _DECIMAL, _BINARY)
    | {unit: factor / 8 for unit, factor in _scaled("bit/s", _DECIMAL).items()},
    "rate": _scaled("FLOP/s", _DECIMAL) | _scaled("OP/s", _DECIMAL),
    "time": {
        "ns": Fraction(1, 1000),
        "us": Fraction(1),
        "ms": Fraction(1000),
        "s": Fraction(10**6),
    },
    "frequency": {"Hz": Fraction(1), "kHz": Fraction(10**3)}
    | {f"{prefix}Hz": Fraction(_DECIMAL[prefix]) for prefix in ("M", "G")},
    "power": {"mW": Fraction(1, 1000), "W": Fraction(1), "kW": Fraction(10**3)},
}
# What a value is printed in; other units are only read.
_PRINTED: dict[Kind, tuple[str, ...]] = {
    "size": ("TiB", "GiB", "MiB", "KiB", "GB", "MB", "KB", "B"),
    "bandwidth": ("TB/s", "GB/s", "MB/s", "KB/s", "B/s"),
    "rate": ("PFLOP/s", "TFLOP/s", "GFLOP/s", "MFLOP/s", "KFLOP/s", "FLOP/s"),
    "time": ("s", "ms", "us", "ns"),
    "frequency": ("GHz", "MHz", "kHz", "Hz"),
    "power": ("kW", "W", "mW"),
}
_EXAMPLE: dict[Kind, str] = {
    "size": "84 GB (10^9) or 99 KiB (2^10)",
    "bandwidth": "56 GB/s (one direction)",
    "rate": "150.5 TFLOP/s",
    "time": "0.7 us",
    "frequency": "2.43 GHz",
    "power": "300 W",
}
_QUANTITY = re.compile(r"(?P<number>\d+(?:\.\d+)?(?:e[+-]?\d{1,2})?) ?(?P<unit>[A-Za-z/]*)")


def parse_quantity(text: str, kind: Kind) -> float:
    """Read a quantity of one kind and return it in the base unit of that kind.

    Units: size -> bytes (whole), bandwidth -> bytes/s, rate -> FLOP/s, time -> microseconds,
    frequency -> Hz, power -> W.
    Raises: HardwareError for a bare number, an unknown unit, or a unit of another kind.
    """
    match = _QUANTITY.fullmatch(text.strip())
    if match is None:
        raise HardwareError(
            f"{text!r} is not a number with a unit",
            advice=f"write a {kind} as in {_EXAMPLE[kind]!r}, without thousands separators",
        )
    if not match["unit"]:
        raise HardwareError(
            f"{text!r} has no unit", advice=f"write a {kind} as in {_EXAMPLE[kind]!r}"
        )
    factor = _UNITS[kind].get(match["unit"])
    if factor is None:
        raise _unit_error(text, match["unit"], kind)
    value = Fraction(match["number"]) * factor
    return float(round(value)) if kind == "size" else float(value)


def parse_bytes(text: str) -> int:
    """Read a size and return whole bytes.

    Raises: HardwareError as `parse_quantity`.
    """
    return int(parse_quantity(text, "size"))


def _unit_error(text: str, unit: str, kind: Kind) -> HardwareError:
    """Say whether the unit is of another kind, ambiguous, or unknown, and what is near."""
    for other, table in _UNITS.items():
        if unit in table:
            return HardwareError(
                f"{text!r} is a {other}, a {kind} is needed",
                advice=f"write a {kind} as in {_EXAMPLE[kind]!r}",
            )
    if re.fullmatch(r"[KMGT]?(b/s|bps|Bps)", unit):
        return HardwareError(
            f"{unit!r} in {text!r} can be read as bits or bytes",
            advice=f"write {unit[:-3] if unit.endswith('ps') else unit[0]}bit/s or "
            f"{unit[:-3] if unit.endswith('ps') else unit[0]}B/s",
        )
    near = difflib.get_close_matches(unit, list(_UNITS[kind]), n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return HardwareError(
        f"unknown unit {unit!r} in {text!r}",
        advice=f"{hint}a {kind} is written as in {_EXAMPLE[kind]!r}",
    )


def format_quantity(value: float, kind: Kind) -> str:
    """Print a value exactly: `parse_quantity` gives back the same number.

    Units: value in the base unit of the kind.
    """
    exact = Fraction(value)
    for unit in _PRINTED[kind]:
        number = exact / _UNITS[kind][unit]
        if number < 1:
            continue
        short = f"{float(number):.4g}" if number < 1000 else f"{float(number):.0f}"
        if "e" not in short and Fraction(float(Fraction(short) * _UNITS[kind][unit])) == exact:
            return f"{short} {unit}"
    base = next(unit for unit, factor in _UNITS[kind].items() if factor == 1)
    if kind == "size":
        return f"{int(value)} {base}"
    return f"{value!r} {base}"


def show_quantity(value: float, kind: Kind) -> str:
    """Print a value for a reader, rounded to four digits, in the largest fitting unit."""
    for unit in _PRINTED[kind]:
        number = float(Fraction(value) / _UNITS[kind][unit])
        if number >= 1:
            return f"{number:.4g} {unit}" if number < 10_000 else f"{number:.0f} {unit}"
    return f"{value:.4g} {next(u for u, f in _UNITS[kind].items() if f == 1)}"
