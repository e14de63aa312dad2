"""A safetensors file, or a folder of them with an index, as a checkpoint.

The header is parsed here, not by the `safetensors` package: that one tells neither the place of a
tensor nor what exactly is wrong with a damaged file, and copies what it reads.

Source: the safetensors format: u64 header length, JSON header, then the data without holes.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

from metainfer.ir.dtypes import (
    BF16,
    BOOL,
    F4E2M1,
    F8E4M3,
    F8E5M2,
    F8E8M0,
    F16,
    F32,
    F64,
    I8,
    I16,
    I32,
    I64,
    U8,
    Scalar,
)
from metainfer.ir.errors import CheckpointError
from metainfer.runtime.checkpoint.interface import (
    AGAIN,
    MappedFile,
    TensorInfo,
    check_range,
    check_shape,
    find_tensor,
)

_DTYPES: dict[str, Scalar] = {
    "BOOL": BOOL,
    "U8": U8,
    "I8": I8,
    "I16": I16,
    "I32": I32,
    "I64": I64,
    "F16": F16,
    "BF16": BF16,
    "F32": F32,
    "F64": F64,
    "F8_E4M3": F8E4M3,
    "F8_E5M2": F8E5M2,
    "F8_E8M0": F8E8M0,
    "F4": F4E2M1,
}
# The limit of the format's own reader.
_MAX_HEADER_BYTES = 100_000_000
_LENGTH_BYTES = 8


class SafetensorsFile:
    """One safetensors file.

    Raises: CheckpointError if the file is damaged or has elements of an unknown type.
    """

    def __init__(self, path: Path) -> None:
        self._file = MappedFile(path)
        self._header_bytes, header = _read_header(self._file)
        self._metadata = _metadata(header.pop("__metadata__", {}), path)
        self._tensors = {
            name: _tensor(name, entry, self._header_bytes, path) for name, entry in header.items()
        }
        _check_cover(list(self._tensors.values()), self._header_bytes, self._file)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor by name."""
        return self._tensors

    @property
    def metadata(self) -> Mapping[str, object]:
        """The free text pairs of the header."""
        return self._metadata

    def read(self, name: str) -> np.ndarray:
        """Return one tensor as a view of the file (4-bit floats are unpacked to a byte each)."""
        info = find_tensor(self._tensors, name, str(self._file.path))
        if info.dtype is F4E2M1:
            return _unpack_f4(self._file.view(info.offset, info.nbytes), info.shape)
        # Every other entry of _DTYPES is a whole number of bytes with a numpy twin.
        assert isinstance(info.dtype, Scalar)
        return self._file.typed(info.offset, info.shape, info.dtype.numpy)

    def read_slice(self, name: str, dim: int, start: int, stop: int) -> np.ndarray:
        """Return part of one dim as a view."""
        info = find_tensor(self._tensors, name, str(self._file.path))
        front = check_range(info, dim, start, stop)
        part: np.ndarray = self.read(name)[(slice(None),) * front + (slice(start, stop),)]
        return part

    def content_hash(self) -> str:
        """Fingerprint the header, the size and a sample of the tensors."""
        digest = self._file.digest(self._header_bytes, list(self._tensors.values()))
        return hashlib.sha256(digest).hexdigest()

    def close(self) -> None:
        """Let go of the file; arrays already read stay valid."""
        self._file.close()


class SafetensorsFolder:
    """Shards named by an index file.

    Raises: CheckpointError if a shard is missing or damaged, or index and shards disagree.
    """

    def __init__(self, index: Path) -> None:
        self._index = index
        weight_map, self._metadata = _read_index(index)
        shards = sorted(set(weight_map.values()))
        missing = [name for name in shards if not (index.parent / name).is_file()]
        if missing:
            raise CheckpointError(
                f"{len(missing)} of {len(shards)} shards are missing",
                text="\n".join(missing),
                origin=str(index),
                advice="download the missing files into the folder of the index",
            )
        self._shards = {name: SafetensorsFile(index.parent / name) for name in shards}
        self._home: dict[str, SafetensorsFile] = {}
        self._tensors: dict[str, TensorInfo] = {}
        for shard in self._shards.values():
            self._add(shard)
        self._check_index(weight_map)

    def _add(self, shard: SafetensorsFile) -> None:
        for name, info in shard.tensors.items():
            if name in self._tensors:
                raise CheckpointError(
                    f"tensor {name!r} is both in {self._tensors[name].file.name} "
                    f"and in {info.file.name}",
                    origin=str(self._index),
                    advice="remove shards of other versions from the folder, or download it again",
                )
            self._tensors[name] = info
            self._home[name] = shard

    def _check_index(self, weight_map: Mapping[str, str]) -> None:
        for name, file in weight_map.items():
            info = self._tensors.get(name)
            if info is None or info.file.name != file:
                found = "in no shard" if info is None else f"in {info.file.name}"
                raise CheckpointError(
                    f"the index puts tensor {name!r} in {file}, but it is {found}",
                    origin=str(self._index),
                    advice="index and shards are of different versions: download them again",
                )

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor of every shard by name."""
        return self._tensors

    @property
    def metadata(self) -> Mapping[str, object]:
        """The metadata of the index."""
        return self._metadata

    def read(self, name: str) -> np.ndarray:
        """Return one tensor as a view of its shard."""
        find_tensor(self._tensors, name, str(self._index))
        return self._home[name].read(name)

    def read_slice(self, name: str, dim: int, start: int, stop: int) -> np.ndarray:
        """Return part of one dim as a view of its shard."""
        find_tensor(self._tensors, name, str(self._index))
        return self._home[name].read_slice(name, dim, start, stop)

    def content_hash(self) -> str:
        """Fingerprint all shards with their names."""
        state = hashlib.sha256()
        for name, shard in self._shards.items():
            state.update(f"{name}:{shard.content_hash()}\n".encode())
        return state.hexdigest()

    def close(self) -> None:
        """Let go of all shards."""
        for shard in self._shards.values():
            shard.close()


def shards_of(index: Path) -> tuple[str, ...]:
    """Names of the files that an index puts tensors in.

    Raises: CheckpointError if it is no index.
    """
    return tuple(sorted(set(_read_index(index)[0].values())))


def _load_json(text: bytes, origin: str, of: str) -> dict[str, object]:
    """Parse an object without repeated keys."""

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise CheckpointError(f"{of} names {twice!r} twice", origin=origin, advice=AGAIN)
        return found

    try:
        value = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{of} is not JSON: {error}", origin=origin, advice=AGAIN) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{of} is not a JSON object", origin=origin, advice=AGAIN)
    return value


def _read_header(file: MappedFile) -> tuple[int, dict[str, object]]:
    """Return the bytes before the data, and the parsed header."""
    origin = str(file.path)
    if file.size < _LENGTH_BYTES:
        raise CheckpointError(
            f"the file has {file.size} bytes, too few for a header", origin=origin, advice=AGAIN
        )
    length = int.from_bytes(file.buffer[:_LENGTH_BYTES], "little")
    if length > _MAX_HEADER_BYTES or length > file.size - _LENGTH_BYTES:
        raise CheckpointError(
            f"the header claims {length} bytes, the file has {file.size}: "
            "it is cut short or not a safetensors file",
            origin=origin,
            advice=AGAIN,
        )
    end = _LENGTH_BYTES + length
    return end, _load_json(file.buffer[_LENGTH_BYTES:end], origin, "the header")


def _metadata(value: object, path: Path) -> Mapping[str, object]:
    if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
        raise CheckpointError(
            "__metadata__ of the header is not a map of texts", origin=str(path), advice=AGAIN
        )
    return value


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _sizes(entry: Mapping[str, object], key: str, name: str, path: Path) -> tuple[int, ...]:
    value = entry.get(key)
    if not isinstance(value, list) or not all(_is_size(n) for n in value):
        raise CheckpointError(
            f"tensor {name!r}: {key} is not a list of sizes", origin=str(path), advice=AGAIN
        )
    return tuple(value)


def _tensor(name: str, entry: object, data_start: int, path: Path) -> TensorInfo:
    origin = str(path)
    if not isinstance(entry, dict):
        raise CheckpointError(
            f"tensor {name!r} is not described by an object", origin=origin, advice=AGAIN
        )
    dtype = _dtype(name, entry.get("dtype"), origin)
    shape = _sizes(entry, "shape", name, path)
    check_shape(name, shape, origin)
    offsets = _sizes(entry, "data_offsets", name, path)
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(
            f"tensor {name!r}: data_offsets {list(offsets)} are not a begin and an end",
            origin=origin,
            advice=AGAIN,
        )
    begin, end = offsets
    if end - begin != dtype.size_bytes(shape):
        raise CheckpointError(
            f"tensor {name!r} has {end - begin} bytes, but shape {list(shape)} of {dtype} "
            f"takes {dtype.size_bytes(shape)}",
            origin=origin,
            advice=AGAIN,
        )
    return TensorInfo(name, shape, dtype, path, data_start + begin, end - begin)


def _dtype(name: str, written: object, origin: str) -> Scalar:
    dtype = _DTYPES.get(written) if isinstance(written, str) else None
    if dtype is None:
        raise CheckpointError(
            f"tensor {name!r} has the element type {written!r}, which cannot be read",
            origin=origin,
            advice=f"convert the model to one of: {', '.join(_DTYPES)}",
        )
    return dtype


def _check_cover(tensors: list[TensorInfo], data_start: int, file: MappedFile) -> None:
    """Require that tensors follow one another without overlap or hole to the end of the file."""
    origin = str(file.path)
    at, before = data_start, "the header"
    for info in sorted(tensors, key=lambda info: (info.offset, info.nbytes)):
        if info.offset != at:
            relation = "overlaps" if info.offset < at else "leaves a hole after"
            raise CheckpointError(
                f"tensor {info.name!r} {relation} {before}", origin=origin, advice=AGAIN
            )
        at, before = info.offset + info.nbytes, repr(info.name)
    if at != file.size:
        raise CheckpointError(
            f"the tensors end at byte {at}, but the file has {file.size} bytes",
            origin=origin,
            advice=AGAIN,
        )


def _unpack_f4(packed: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Spread two codes of a byte, the low nibble first."""
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(-1)
    return codes[: math.prod(shape)].view(ml_dtypes.float4_e2m1fn).reshape(shape)


def _read_index(index: Path) -> tuple[dict[str, str], Mapping[str, object]]:
    """Return tensor -> shard and the metadata of an index file."""
    origin = str(index)
    try:
        content = _load_json(index.read_bytes(), origin, "the index")
    except OSError as error:
        raise CheckpointError(
            f"cannot read the index: {error.strerror or error}", origin=origin
        ) from error
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError("the index has no weight_map", origin=origin, advice=AGAIN)
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(
                f"the index puts tensor {name!r} in {file!r}, not a file of its folder",
                origin=origin,
                advice=AGAIN,
            )
    metadata = content.get("metadata", {})
    return weight_map, metadata if isinstance(metadata, dict) else {}
