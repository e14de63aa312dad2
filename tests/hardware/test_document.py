import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metainfer.hardware.document import Document, read_document, scan_places
from metainfer.hardware.toml_text import to_toml
from metainfer.ir.errors import HardwareError

TEXT = """\
name = "m"   # a comment with [brackets]
[memory]
capacity = "1 GB"
list = [
  "a = b",
  "[not.a.table]",
]
long = \"\"\"
fake = 1
\"\"\"
[[links]]
from = ["a"]
[[links]]
from = ["b"]
[links.deep]
key = 1
[types."a b".x]
"q.r" = 2
"""


def read(path: Path) -> Document:
    def find(name: str, folder: Path) -> Path | None:
        base = folder / f"{name}.toml"
        return base if base.is_file() else None

    return read_document(path, find, lambda folder: tuple(p.stem for p in folder.glob("*.toml")))


def test_every_key_has_its_line() -> None:
    places = {loc: place.line for loc, place in scan_places(TEXT.splitlines(), "f").items()}
    assert places[("name",)] == 1
    assert places[("memory", "capacity")] == 3
    assert places[("memory", "list")] == 4
    assert places[("links", 0, "from")] == 12
    assert places[("links", 1, "from")] == 14
    assert places[("links", 1, "deep", "key")] == 16
    assert places[("types", "a b", "x", "q.r")] == 18
    assert ("memory", "fake") not in places
    tomllib.loads(TEXT)


def test_extends_keeps_the_place_of_both_files(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text("a = 1\n[t]\nx = 1\ny = 2\n[[l]]\nn = 1\n[[l]]\nn = 2\n")
    child = tmp_path / "child.toml"
    child.write_text('extends = "base"\n[t]\ny = 3\n[[l]]\nn = 9\n')
    document = read(child)
    assert document.data == {"a": 1, "t": {"x": 1, "y": 3}, "l": [{"n": 9}]}
    assert document.place(("t", "x")).path.endswith("base.toml")
    assert document.place(("t", "y")).line == 3
    assert document.place(("l", 0, "n")).path.endswith("child.toml")
    assert ("l", 1, "n") not in document.places


def test_a_circle_and_an_unknown_base_are_errors(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('extends = "b"\n')
    (tmp_path / "b.toml").write_text('extends = "a"\n')
    (tmp_path / "c.toml").write_text('\nextends = "aa"\n')
    with pytest.raises(HardwareError, match="circle"):
        read(tmp_path / "a.toml")
    with pytest.raises(HardwareError, match="unknown description 'aa'") as caught:
        read(tmp_path / "c.toml")
    assert caught.value.origin.endswith("c.toml:2")
    assert caught.value.advice == "did you mean 'a'?"


def test_broken_toml_and_missing_files_say_where(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text("a = 1\nb = \n")
    with pytest.raises(HardwareError, match="not TOML") as caught:
        read(path)
    assert caught.value.origin == f"{path}:2"
    assert caught.value.text == "b = "
    with pytest.raises(HardwareError, match="cannot read"):
        read(tmp_path / "none.toml")
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(HardwareError, match="UTF-8"):
        read(path)


KEYS = st.text(min_size=1, max_size=5).filter(lambda s: s.isprintable())
SCALARS = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    st.integers(-(2**40), 2**40),
    st.booleans(),
    st.floats(allow_nan=False, allow_infinity=False, width=32),
)
VALUES = st.recursive(
    st.one_of(SCALARS, st.lists(SCALARS, max_size=3)),
    lambda inner: st.one_of(
        st.dictionaries(KEYS, inner, max_size=3),
        st.lists(st.dictionaries(KEYS, inner, max_size=2), min_size=1, max_size=3),
    ),
    max_leaves=8,
)


@given(st.dictionaries(KEYS, VALUES, max_size=4))
def test_written_toml_reads_back(data: dict[str, object]) -> None:
    assert tomllib.loads(to_toml(data, {"": "head\nlines"})) == data


def test_none_is_left_out_and_other_values_are_refused() -> None:
    assert to_toml({"a": None, "b": 1}) == "b = 1\n"
    with pytest.raises(TypeError):
        to_toml({"a": object()})
