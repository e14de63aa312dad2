"""Safetensors checkpoints: values, shards, damage, expectations."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from metainfer.ir.dtypes import BF16, F4E2M1, F8E4M3, Scalar
from metainfer.ir.errors import CheckpointError
from metainfer.runtime.checkpoint import check_tensors, open_checkpoint

TORCH_TYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
]


def make(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3
    return values.abs().to(dtype) if dtype == torch.float8_e8m0fnu else values.to(dtype)


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    shapes = [(3, 4), (5,), (), (2, 0, 3), (2, 3, 4)]
    return {
        f"{dtype}".removeprefix("torch."): make(dtype, shapes[i % len(shapes)], i)
        for i, dtype in enumerate(TORCH_TYPES)
    }


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, torch.Tensor]) -> Path:
    place = tmp_path_factory.mktemp("st") / "model.safetensors"
    save_file(tensors, place, metadata={"format": "pt"})
    return place


def shards(folder: Path) -> Path:
    """Write two shards and their index; return the index."""
    save_file({"a": torch.arange(6.0).reshape(2, 3)}, folder / "m-1.safetensors")
    save_file({"b": torch.ones(4, dtype=torch.bfloat16)}, folder / "m-2.safetensors")
    index = folder / "model.safetensors.index.json"
    weight_map = {"a": "m-1.safetensors", "b": "m-2.safetensors"}
    index.write_text(json.dumps({"metadata": {"total_size": 32}, "weight_map": weight_map}))
    return index


def raw_file(folder: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    place = folder / "raw.safetensors"
    place.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return place


def test_every_type_comes_back_bit_for_bit(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    checkpoint = open_checkpoint(path)
    assert checkpoint.metadata == {"format": "pt"}
    assert set(checkpoint.tensors) == set(tensors)
    for name, wanted in tensors.items():
        found = checkpoint.read(name)
        assert isinstance(found, np.ndarray)
        assert found.shape == tuple(wanted.shape)
        info = checkpoint.tensors[name]
        assert isinstance(info.dtype, Scalar)
        assert found.dtype == info.dtype.numpy
        assert found.tobytes() == wanted.reshape(-1).view(torch.uint8).numpy().tobytes()


def test_views_of_the_file_go_to_torch_without_a_warning(path: Path) -> None:
    found = open_checkpoint(path).read("float32")
    assert isinstance(found, np.ndarray)
    tensor = torch.from_numpy(found)
    before = path.read_bytes()
    tensor.zero_()
    assert path.read_bytes() == before


def test_slices_are_views(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    checkpoint = open_checkpoint(path)
    part = checkpoint.read_slice("float8_e4m3fn", -1, 1, 3)
    assert isinstance(part, np.ndarray)
    assert part.base is not None
    wanted = tensors["float8_e4m3fn"][..., 1:3].float().numpy()
    np.testing.assert_array_equal(part.astype(np.float32), wanted)
    assert checkpoint.tensors["float8_e4m3fn"].dtype == F8E4M3


def test_four_bit_floats_unpack_low_nibble_first(tmp_path: Path) -> None:
    entry = {"dtype": "F4", "shape": [1, 4], "data_offsets": [0, 2]}
    checkpoint = open_checkpoint(raw_file(tmp_path, {"w": entry}, bytes([0x21, 0xF7])))
    found = checkpoint.read("w")
    assert isinstance(found, np.ndarray)
    assert checkpoint.tensors["w"].dtype == F4E2M1
    assert found.astype(np.float32).tolist() == [[0.5, 1.0, 6.0, -6.0]]


def test_unaligned_data_is_copied(tmp_path: Path) -> None:
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    header = json.dumps({"w": entry}).encode()
    header += b" " * (-(len(header) + 8) % 4 + 1)
    data = np.array([1.5, -2.0], np.float32)
    found = open_checkpoint(raw_file(tmp_path, header, data.tobytes())).read("w")
    assert isinstance(found, np.ndarray)
    assert found.flags.aligned
    assert found.tolist() == [1.5, -2.0]


def test_shards_read_as_one(tmp_path: Path) -> None:
    index = shards(tmp_path)
    for place in (tmp_path, index):
        checkpoint = open_checkpoint(place)
        assert checkpoint.tensors["b"].dtype == BF16
        assert checkpoint.tensors["b"].file.name == "m-2.safetensors"
        a = checkpoint.read_slice("a", 1, 1, 3)
        assert isinstance(a, np.ndarray)
        assert a.tolist() == [[1.0, 2.0], [4.0, 5.0]]
        assert checkpoint.metadata == {"total_size": 32}


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    shards(tmp_path)
    (tmp_path / "m-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"(?s)1 of 2 shards are missing.*m-2\.safetensors"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("weight_map", "what"),
    [
        ({"a": "m-1.safetensors", "b": "m-1.safetensors"}, "'b' in m-1.safetensors, but it is in"),
        ({"a": "m-1.safetensors", "c": "m-2.safetensors"}, "but it is in no shard"),
        ({"a": "../m-1.safetensors"}, "not a file of its folder"),
        ({}, "no weight_map"),
    ],
)
def test_an_index_that_lies(tmp_path: Path, weight_map: dict[str, str], what: str) -> None:
    index = shards(tmp_path)
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=what):
        open_checkpoint(tmp_path)


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    shards(tmp_path)
    save_file({"a": torch.zeros(1), "b": torch.zeros(1)}, tmp_path / "m-2.safetensors")
    with pytest.raises(CheckpointError, match=r"'a' is both in m-1.* and in m-2"):
        open_checkpoint(tmp_path)


F32_PAIR = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "data", "what"),
    [
        (b"{not json", b"", "not JSON"),
        (b"[" * 100_000, b"", "not JSON"),
        (b"[1]", b"", "not a JSON object"),
        (b'{"a": {}, "a": {}}', b"", "names 'a' twice"),
        ({"a": 3}, b"", "not described by an object"),
        ({"a": {**F32_PAIR, "dtype": "C64"}}, bytes(8), "element type 'C64'"),
        ({"a": {**F32_PAIR, "shape": [-2]}}, bytes(8), "shape is not a list of sizes"),
        ({"a": {**F32_PAIR, "shape": [True, 2]}}, bytes(8), "shape is not a list of sizes"),
        ({"a": {**F32_PAIR, "shape": [0, 2**70]}}, bytes(8), "impossible shape"),
        ({"a": {**F32_PAIR, "shape": [3]}}, bytes(8), r"has 8 bytes, but shape \[3\] of f32"),
        ({"a": {**F32_PAIR, "data_offsets": [8, 0]}}, bytes(8), "not a begin and an end"),
        ({"a": F32_PAIR, "b": {**F32_PAIR, "data_offsets": [4, 12]}}, bytes(12), "'b' overlaps"),
        ({"a": F32_PAIR, "b": {**F32_PAIR, "data_offsets": [9, 17]}}, bytes(17), "leaves a hole"),
        ({"a": F32_PAIR}, bytes(7), "end at byte"),
        ({"a": F32_PAIR}, bytes(9), "end at byte"),
        ({"__metadata__": {"a": 1}}, b"", "__metadata__"),
    ],
)
def test_damage_is_named(tmp_path: Path, header: object, data: bytes, what: str) -> None:
    with pytest.raises(CheckpointError, match=what) as caught:
        open_checkpoint(raw_file(tmp_path, header, data))
    assert "raw.safetensors" in caught.value.origin
    assert caught.value.advice


def test_a_file_cut_short_in_its_header(path: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(path.read_bytes()[:40])
    with pytest.raises(CheckpointError, match=r"claims \d+ bytes, the file has 40"):
        open_checkpoint(cut)
    cut.write_bytes(b"abc")
    with pytest.raises(CheckpointError, match="too few for a header"):
        open_checkpoint(cut)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damage_reads_or_raises_a_checkpoint_error(
    path: Path, tmp_path: Path, data: st.DataObject
) -> None:
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(0, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    end = data.draw(st.one_of(st.just(len(raw)), st.integers(0, len(raw))))
    broken = tmp_path / "fuzzed.safetensors"
    broken.write_bytes(bytes(raw[:end]))
    try:
        checkpoint = open_checkpoint(broken)
        for name in checkpoint.tensors:
            checkpoint.read(name)
        checkpoint.content_hash()
    except CheckpointError:
        return


def test_the_hash_sees_weights(tmp_path: Path) -> None:
    hashes = set()
    for value in (1.0, 1.0, 2.0):
        save_file({"w": torch.full((4, 4), value)}, tmp_path / "w.safetensors")
        hashes.add(open_checkpoint(tmp_path / "w.safetensors").content_hash())
    assert len(hashes) == 2


def test_folders_and_paths_that_are_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such checkpoint"):
        open_checkpoint(tmp_path / "absent")
    with pytest.raises(CheckpointError, match="the folder has no checkpoint"):
        open_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="not a checkpoint file"):
        open_checkpoint(tmp_path / "pytorch_model.bin")
    for name in ("x", "y"):
        save_file({name: torch.zeros(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(CheckpointError, match="2 safetensors files and no index"):
        open_checkpoint(tmp_path)


def test_expected_tensors(tmp_path: Path) -> None:
    shards(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    check_tensors(checkpoint, {"a": (2, 3), "b": (4,)})
    check_tensors(checkpoint, {"a": (2, 3), "c": (1,)}, ignore=["b", "c*"])
    with pytest.raises(CheckpointError) as caught:
        check_tensors(checkpoint, {"a": (3, 2), "bb": (4,)})
    lines = str(caught.value).splitlines()
    assert "1 missing, 1 extra, 1 misshapen" in lines[0]
    assert "  missing: bb [4] (nearest: b [4])" in lines
    assert "  extra: b [4]" in lines
    assert "  misshapen: a has [2, 3], wanted [3, 2]" in lines


def test_long_lists_are_cut(tmp_path: Path) -> None:
    shards(tmp_path)
    expected = {f"layer.{i}": (1,) for i in range(25)}
    with pytest.raises(CheckpointError, match="missing: and 15 more"):
        check_tensors(open_checkpoint(tmp_path), expected, ignore=["a", "b"])
