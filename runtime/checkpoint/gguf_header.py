"""Reads the header of a GGUF file: lazily for arrays, because vocabularies are long.

Source: the GGUF specification (versions 2 and 3, little-endian): magic, version, tensor count,
key-value pairs, tensor records, padding to ``general.alignment``, tensor data.
"""

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from metainfer.ir.errors import CheckpointError
from metainfer.runtime.checkpoint.interface import AGAIN, MappedFile

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_ARRAY_DEPTH = 4
_MAX_TENSOR_DIMS = 4

# Value types of the specification, by number.
_SCALARS: dict[int, struct.Struct] = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_U32 = _SCALARS[4]
_U64 = _SCALARS[10]


@dataclass(frozen=True)
class TensorRecord:
    """One tensor as its header record describes it.

    Attributes:
        dims: as stored, innermost first.
        type_id: number of the storage type.
        offset: bytes from the start of the tensor data.
    """

    name: str
    dims: tuple[int, ...]
    type_id: int
    offset: int


@dataclass(frozen=True)
class _Array:
    """An array whose items are converted on first use."""

    item_type: int
    count: int
    start: int
    depth: int


class Metadata(Mapping[str, object]):
    """Key-value pairs as plain Python values; arrays are converted when first asked for."""

    def __init__(self, file: MappedFile, values: dict[str, object]) -> None:
        self._file = file
        self._values = values

    def __getitem__(self, key: str) -> object:
        """Return a value. Raises: CheckpointError if an array holds text that is not UTF-8."""
        value = self._values[key]
        if isinstance(value, _Array):
            # A cursor of its own, so that threads can convert side by side.
            value = Cursor(self._file).items(value, f"key {key!r}")
            self._values[key] = value
        return value

    def __iter__(self) -> Iterator[str]:
        """Iterate over keys in file order."""
        return iter(self._values)

    def __len__(self) -> int:
        """Return the number of keys."""
        return len(self._values)


@dataclass(frozen=True)
class GgufHeader:
    """All that precedes the tensor data, of ``data_start`` bytes (padding included)."""

    version: int
    metadata: Metadata
    tensors: tuple[TensorRecord, ...]
    alignment: int
    data_start: int


class Cursor:
    """A place in the header that moves on as values are read, never beyond the file."""

    def __init__(self, file: MappedFile) -> None:
        self._file = file
        self.at = 0

    def error(self, what: str) -> CheckpointError:
        """Make the error for damage at the present place."""
        return CheckpointError(what, origin=f"{self._file.path} at byte {self.at}", advice=AGAIN)

    def take(self, count: int, of: str) -> int:
        """Step over ``count`` bytes and return where they begin."""
        start = self.at
        if count > self._file.size - start:
            raise self.error(
                f"{of} needs {count} bytes, the file has {self._file.size - start} more"
            )
        self.at = start + count
        return start

    def scalar(self, form: struct.Struct, of: str) -> Any:
        """Read one number."""
        return form.unpack_from(self._file.buffer, self.take(form.size, of))[0]

    def string(self, of: str) -> str:
        """Read one string."""
        length = self.scalar(_U64, of)
        start = self.take(length, of)
        try:
            return self._file.buffer[start : start + length].decode()
        except UnicodeDecodeError as error:
            self.at = start
            raise self.error(f"{of} is not UTF-8 text ({error.reason})") from error

    def value(self, type_id: int, of: str, depth: int = 0) -> object:
        """Read one value; arrays are only stepped over."""
        form = _SCALARS.get(type_id)
        if form is not None:
            return self.scalar(form, of)
        if type_id == _BOOL:
            return self._bool(of)
        if type_id == _STRING:
            return self.string(of)
        if type_id == _ARRAY:
            return self._array(of, depth)
        raise self.error(f"{of} has the unknown value type {type_id}")

    def _bool(self, of: str) -> bool:
        number = self._file.buffer[self.take(1, of)]
        if number > 1:
            raise self.error(f"{of} is a truth value of {number}, not 0 or 1")
        return bool(number)

    def _array(self, of: str, depth: int) -> _Array:
        if depth >= _MAX_ARRAY_DEPTH:
            raise self.error(f"{of} nests arrays more than {_MAX_ARRAY_DEPTH} deep")
        item_type = self.scalar(_U32, of)
        count = self.scalar(_U64, of)
        array = _Array(item_type, count, self.at, depth + 1)
        self._skip(array, of)
        return array

    def _skip(self, array: _Array, of: str) -> None:
        form = _SCALARS.get(array.item_type)
        if form is not None or array.item_type == _BOOL:
            self.take(array.count * (form.size if form else 1), of)
            return
        if array.item_type == _STRING:
            self._skip_strings(array.count, of)
            return
        # A nested array takes 12 bytes at least: a count beyond that is damage, not a long loop.
        if array.count * 12 > self._file.size - self.at:
            raise self.error(f"{of} claims {array.count} items, more than the file can hold")
        for _ in range(array.count):
            self.value(array.item_type, of, array.depth)

    def _skip_strings(self, count: int, of: str) -> None:
        size = self._file.size
        if count * 8 > size - self.at:
            raise self.error(f"{of} claims {count} strings, more than the file can hold")
        # The loop runs once per token of the vocabulary, so it is kept to bare steps.
        buffer, unpack, at = self._file.buffer, _U64.unpack_from, self.at
        for _ in range(count):
            if at + 8 > size:
                raise self.error(f"{of} runs beyond the end of the file")
            at += 8 + unpack(buffer, at)[0]
        if at > size:
            raise self.error(f"{of} runs beyond the end of the file")
        self.at = at

    def items(self, array: _Array, of: str) -> list[object]:
        """Convert an array that was stepped over before."""
        self.at = array.start
        form = _SCALARS.get(array.item_type)
        if form is not None or array.item_type == _BOOL:
            dtype = np.dtype(form.format if form else "?")
            raw = self._file.view(array.start, array.count * dtype.itemsize)
            numbers: list[object] = raw.view(dtype).tolist()
            return numbers
        if array.item_type == _STRING:
            return [self.string(of) for _ in range(array.count)]
        return [self._nested(array, of) for _ in range(array.count)]

    def _nested(self, array: _Array, of: str) -> object:
        item = self.value(array.item_type, of, array.depth)
        if not isinstance(item, _Array):
            return item
        after = self.at
        values = self.items(item, of)
        self.at = after
        return values


def read_header(file: MappedFile) -> GgufHeader:
    """Parse the header of a mapped GGUF file.

    Raises: CheckpointError naming the file, the place and what is wrong there.
    """
    cursor = Cursor(file)
    version = _read_version(cursor, file)
    num_tensors = cursor.scalar(_U64, "the tensor count")
    num_pairs = cursor.scalar(_U64, "the count of metadata pairs")
    metadata = _read_metadata(file, cursor, num_pairs)
    alignment = _alignment(metadata, file.path)
    records = _read_records(cursor, num_tensors)
    end = cursor.at
    data_start = end + -end % alignment
    if records and data_start > file.size:
        raise cursor.error("the file ends before its tensor data")
    return GgufHeader(version, metadata, records, alignment, min(data_start, file.size))


def _read_version(cursor: Cursor, file: MappedFile) -> int:
    start = cursor.take(4, "the magic number")
    magic = file.buffer[start : start + 4]
    if magic != _MAGIC:
        raise CheckpointError(
            f"not a GGUF file: it begins with {magic!r}, not {_MAGIC!r}",
            origin=str(file.path),
            advice="check the path, or download it again",
        )
    version: int = cursor.scalar(_U32, "the version")
    if version in _VERSIONS:
        return version
    if int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS:
        raise CheckpointError(
            "a big-endian GGUF file",
            origin=str(file.path),
            advice="convert it to little-endian with gguf-convert-endian",
        )
    raise CheckpointError(
        f"GGUF version {version} is not known, only {', '.join(map(str, _VERSIONS))}",
        origin=str(file.path),
        advice="convert the model again with a current converter",
    )


def _read_metadata(file: MappedFile, cursor: Cursor, num_pairs: int) -> Metadata:
    values: dict[str, object] = {}
    for number in range(num_pairs):
        key = cursor.string(f"key {number} of {num_pairs}")
        if key in values:
            raise cursor.error(f"key {key!r} appears twice")
        type_id = cursor.scalar(_U32, f"the type of {key!r}")
        values[key] = cursor.value(type_id, f"key {key!r}")
    return Metadata(file, values)


def _alignment(metadata: Metadata, path: Path) -> int:
    value = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0 or value & (value - 1):
        raise CheckpointError(
            f"general.alignment is {value!r}, not a power of two", origin=str(path), advice=AGAIN
        )
    return value


def _read_records(cursor: Cursor, num_tensors: int) -> tuple[TensorRecord, ...]:
    records: list[TensorRecord] = []
    for number in range(num_tensors):
        of = f"record {number} of {num_tensors} tensors"
        name = cursor.string(of)
        num_dims = cursor.scalar(_U32, of)
        if num_dims > _MAX_TENSOR_DIMS:
            raise cursor.error(f"tensor {name!r} has {num_dims} dims, more than {_MAX_TENSOR_DIMS}")
        dims = tuple(cursor.scalar(_U64, of) for _ in range(num_dims))
        type_id = cursor.scalar(_U32, of)
        records.append(TensorRecord(name, dims, type_id, cursor.scalar(_U64, of)))
    return tuple(records)
