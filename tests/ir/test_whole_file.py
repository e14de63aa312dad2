"""Files that are there whole or not at all."""

import os
import stat
from pathlib import Path

import pytest

from metainfer.ir.whole_file import write_file


@pytest.mark.parametrize("lasting", [True, False])
def test_a_file_is_written_and_replaced(tmp_path: Path, lasting: bool) -> None:
    path = tmp_path / "a.json"
    for data in (b"first", b"second and longer", b""):
        write_file(path, data, lasting=lasting)
        assert path.read_bytes() == data
    assert os.listdir(tmp_path) == ["a.json"]


def test_it_is_as_public_as_any_file(tmp_path: Path) -> None:
    write_file(tmp_path / "ours", b"x")
    (tmp_path / "plain").write_bytes(b"x")
    modes = [stat.S_IMODE((tmp_path / n).stat().st_mode) for n in ("ours", "plain")]
    assert modes[0] == modes[1]


@pytest.mark.parametrize("failing", ["replace", "fsync"])
def test_a_failure_leaves_what_was_there(
    tmp_path: Path, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    write_file(path, b"old")

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, failing, refuse)
    with pytest.raises(OSError, match="No space"):
        write_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]
