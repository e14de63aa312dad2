import pytest
from hypothesis import given
from hypothesis import strategies as st

from metainfer.hardware.units import Kind, format_quantity, parse_quantity, show_quantity
from metainfer.ir.errors import HardwareError

KINDS: tuple[Kind, ...] = ("size", "bandwidth", "rate", "time", "frequency", "power")


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("56 GB/s", "bandwidth", 56e9),
        ("400 Gbit/s", "bandwidth", 50e9),
        ("99 KiB", "size", 99 * 1024),
        ("84 GB", "size", 84e9),
        ("1.5GiB", "size", 1.5 * 2**30),
        ("150.5 TFLOP/s", "rate", 150.5e12),
        ("153.5 TOP/s", "rate", 153.5e12),
        ("0.7 us", "time", 0.7),
        ("3.1 ms", "time", 3100.0),
        ("2.43 GHz", "frequency", 2.43e9),
        ("300 W", "power", 300.0),
        ("1e3 MB", "size", 1e9),
    ],
)
def test_reads(text: str, kind: Kind, value: float) -> None:
    assert parse_quantity(text, kind) == value


@pytest.mark.parametrize(
    ("text", "kind", "word"),
    [
        ("64", "bandwidth", "no unit"),
        ("64 GB", "bandwidth", "is a size, a bandwidth is needed"),
        ("50 Gb/s", "bandwidth", "bits or bytes"),
        ("50 Gbps", "bandwidth", "bits or bytes"),
        ("84 gb", "size", "unknown unit"),
        ("1,597 GB/s", "bandwidth", "not a number with a unit"),
        ("-1 GB", "size", "not a number with a unit"),
        ("nan us", "time", "not a number with a unit"),
        ("1e999 GB", "size", "not a number with a unit"),
        ("", "size", "not a number with a unit"),
    ],
)
def test_refuses(text: str, kind: Kind, word: str) -> None:
    with pytest.raises(HardwareError, match=word) as caught:
        parse_quantity(text, kind)
    assert caught.value.advice


def test_bits_or_bytes_names_both() -> None:
    with pytest.raises(HardwareError) as caught:
        parse_quantity("50 Gbps", "bandwidth")
    assert caught.value.advice == "write Gbit/s or GB/s"


@given(st.sampled_from(KINDS), st.floats(1e-3, 1e18, allow_nan=False))
def test_printing_is_exact(kind: Kind, value: float) -> None:
    exact = float(int(value)) if kind == "size" else value
    assert parse_quantity(format_quantity(exact, kind), kind) == exact


@given(st.sampled_from(KINDS), st.floats(1.0, 1e17, allow_nan=False))
def test_showing_rounds_to_four_digits(kind: Kind, value: float) -> None:
    assert parse_quantity(show_quantity(value, kind), kind) == pytest.approx(value, rel=6e-4, abs=1)
