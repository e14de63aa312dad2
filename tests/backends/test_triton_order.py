"""Groups of several tiles: reads come first, stores last, and numbers stay what they were."""

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from metainfer.backends.triton.emit.order import reads_first

LINES = [
    "    r = 1", "    # rows", "    p = tl.load(places + r)", "    at = p * 4",
    "    c = tl.load(table + at)", "    x = tl.load(numbers + r)", "    x = x + 0.5",
    "    y = x * c", "    tl.store(out + r, y)", "    s = tl.load(slots + r)",
    "    z = tl.load(numbers + r + 7)", "    tl.store(out + s, z)",
]  # fmt: skip


def test_what_waits_for_no_other_read_is_read_first() -> None:
    assert reads_first(LINES) == [
        "    r = 1", "    p = tl.load(places + r)", "    x = tl.load(numbers + r)",
        "    s = tl.load(slots + r)", "    z = tl.load(numbers + r + 7)", "    at = p * 4",
        "    c = tl.load(table + at)", "    # rows", "    x = x + 0.5", "    y = x * c",
        "    tl.store(out + r, y)", "    tl.store(out + s, z)",
    ]  # fmt: skip


@st.composite
def programs(draw: st.DrawFn) -> list[str]:
    """Statements over numbers: sums, reads, names that are rounded where they are made, stores."""
    names, lines = ["base"], list[str]()
    for number in range(draw(st.integers(1, 20))):
        first, second = (draw(st.sampled_from(names)) for _ in range(2))
        kind = draw(st.sampled_from(("sum", "read", "read", "rounded", "store")))
        if kind == "store":
            lines.append(f"    tl.store(out + {first}, {second})")
            continue
        text = f"tl.load(held + {first})" if kind == "read" else f"{first} + 3 * {second} + 1"
        lines.append(f"    v{number} = {text}")
        if kind == "rounded":
            lines.append(f"    v{number} = v{number} % 97")
        names.append(f"v{number}")
    return lines


def stored(lines: list[str]) -> list[tuple[int, int]]:
    """What statements store, in order."""
    found: list[tuple[int, int]] = []
    tl = SimpleNamespace(
        load=lambda place: place * 7 % 101,
        store=lambda place, number: found.append((place, number)),
    )
    exec("\n".join(line.strip() for line in lines), {"tl": tl, "held": 5, "out": 0, "base": 2})
    return found


@given(programs())
def test_numbers_stay_what_they_were(lines: list[str]) -> None:
    made = reads_first(lines)
    assert sorted(made) == sorted(lines)
    assert stored(made) == stored(lines)
    count = sum("tl.store" in line for line in lines)
    assert all("tl.store" in line for line in made[len(made) - count :])
