"""Checkpoints that were cut or changed: refused by name when compiling, or when loading."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from metainfer.cli.app import app
from metainfer.models.smollm2 import spec as smollm2

SMALL = ("--max-tokens", "16", "--max-sequences", "2", "--max-context", "32")
WEIGHTS = "model.safetensors"


def header_of(file: Path) -> dict[str, object]:
    data = file.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + size])


def with_header(file: Path, change: Callable[[dict], None]) -> None:
    """Rewrite the header, keeping the data."""
    data = file.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])


@pytest.mark.parametrize("kept", [0.0, 1e-4, 0.01, 0.5, 0.9999])
def test_a_safetensors_file_that_was_cut(refused, damaged: Path, tmp_path, kept: float) -> None:
    file = damaged / WEIGHTS
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * kept)])
    found = refused("compile", damaged, *SMALL, "--out", tmp_path / "p")
    assert str(file) in found.text
    assert "download or convert it again" in found.advice


NAME = "model.norm.weight"


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h[NAME].update(dtype="F31"),
        lambda h: h[NAME].update(shape=[-48]),
        lambda h: h[NAME].update(shape=[2**62, 2**62]),
        lambda h: h[NAME].update(data_offsets=[0, 2**60]),
        lambda h: h[NAME].update(data_offsets=[100, 0]),
        lambda h: h[NAME].pop("shape"),
        lambda h: h.update({NAME: 3}),
    ],
    ids=["dtype", "negative", "huge", "outside", "backwards", "shapeless", "number"],
)
def test_a_safetensors_header_that_lies(refused, damaged: Path, tmp_path, change) -> None:
    with_header(damaged / WEIGHTS, change)
    found = refused("compile", damaged, *SMALL, "--out", tmp_path / "p")
    assert NAME in found.text or WEIGHTS in found.text


@pytest.mark.parametrize("start", [b"", b"PK\x03\x04", b"<!DOCTYPE html>", b"\xff" * 16])
def test_something_else_under_the_name(refused, damaged: Path, tmp_path, start: bytes) -> None:
    (damaged / WEIGHTS).write_bytes(start + b"0" * 100 if start else b"")
    found = refused("compile", damaged, *SMALL, "--out", tmp_path / "p")
    assert WEIGHTS in found.text


def in_two_shards(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    parts = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(sorted(tensors))}
    for part in sorted(set(parts.values())):
        save_file({n: t for n, t in tensors.items() if parts[n] == part}, folder / part)
    index = {"metadata": {}, "weight_map": parts}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_a_shard_that_is_missing(refused, damaged: Path, tmp_path: Path) -> None:
    in_two_shards(damaged)
    arguments = ("compile", damaged, *SMALL, "--out")
    whole = CliRunner().invoke(app, [*map(str, arguments), str(tmp_path / "whole")])
    assert whole.exit_code == 0, whole.output
    (damaged / "part-1.safetensors").unlink()
    assert "part-1.safetensors" in refused(*arguments, tmp_path / "p").text


def test_an_index_without_any_shard_compiles_and_says_so(damaged: Path, tmp_path: Path) -> None:
    """A folder downloaded without its weights: a plan can be made, but not in silence."""
    in_two_shards(damaged)
    shards = [damaged / f"part-{i}.safetensors" for i in (0, 1)]
    kept = [shard.read_bytes() for shard in shards]
    for shard in shards:
        shard.unlink()
    out = tmp_path / "p"
    result = CliRunner().invoke(app, ["compile", str(damaged), *SMALL, "--out", str(out)])
    assert result.exit_code == 0, result.output
    said = " ".join(result.stdout.split())
    assert "no weights on this machine, the plan is made from the model's shapes" in said
    assert "names part-0.safetensors, part-1.safetensors: none of them is there" in said
    explained = CliRunner().invoke(app, ["explain", str(out)])
    assert "none of them is there" in " ".join(explained.stdout.split())
    # Once the shards are there the plan runs with them.
    for shard, data in zip(shards, kept, strict=True):
        shard.write_bytes(data)
    arguments = ["run", str(out), "abc", "--max-new-tokens", "1"]
    assert CliRunner().invoke(app, arguments).exit_code == 0


def test_a_folder_without_weights_compiles_and_says_so(damaged: Path, tmp_path: Path) -> None:
    (damaged / WEIGHTS).unlink()
    arguments = ["compile", str(damaged), *SMALL, "--out", str(tmp_path / "p"), "--json"]
    result = CliRunner().invoke(app, arguments)
    assert "model 'damaged' has no checkpoint" in json.loads(result.stdout)["no_weights"]


def test_weights_that_changed_after_compiling(refused, damaged: Path, tmp_path: Path) -> None:
    out = tmp_path / "p"
    assert (
        CliRunner().invoke(app, ["compile", str(damaged), *SMALL, "--out", str(out)]).exit_code == 0
    )
    data = bytearray((damaged / WEIGHTS).read_bytes())
    (damaged / WEIGHTS).write_bytes(data[:-1000])
    found = refused("run", out, "abc")
    assert str(damaged) in found.text


@pytest.mark.parametrize("kept", [0.0, 1e-7, 1e-3, 0.01, 0.5, 0.999999])
def test_a_gguf_file_that_was_cut(refused, tmp_path: Path, kept: float) -> None:
    """The real file: its metadata takes the first 2%."""
    source = smollm2.locate_checkpoint()
    file = tmp_path / "cut.gguf"
    size = source.stat().st_size
    with source.open("rb") as data, file.open("wb") as out:
        out.write(data.read(int(min(kept, 0.01) * size)))
        # The rest as a hole: what is missing is the end.
        out.truncate(int(kept * size))
    found = refused("compile", file, *SMALL, "--out", tmp_path / "p")
    assert str(file) in found.text
    file.unlink()


@pytest.mark.parametrize("seed", range(12))
def test_a_gguf_file_with_flipped_bytes_in_its_header(tmp_path: Path, seed: int) -> None:
    """Each flip is refused with a message, or harmless; none is a fault of ours."""
    rng = np.random.default_rng(seed)
    file = tmp_path / "flipped.gguf"
    shutil.copyfile(smollm2.locate_checkpoint(), file)
    with file.open("r+b") as data:
        # The first kilobyte has counts, keys and sizes.
        for at in rng.integers(4, 1000, 3):
            data.seek(int(at))
            old = data.read(1)[0]
            data.seek(int(at))
            data.write(bytes([old ^ int(rng.integers(1, 256))]))
    result = CliRunner().invoke(app, ["compile", str(file), *SMALL, "--out", str(tmp_path / "p")])
    file.unlink()
    assert result.exit_code in (0, 2, 3), result.output
    if result.exit_code:
        assert result.stderr.startswith("error: ")
        assert list(tmp_path.iterdir()) == []
