"""A GGUF file as a checkpoint."""

import hashlib
import math
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import numpy as np

from metainfer.ir.dtypes import BlockArray, Scalar
from metainfer.ir.errors import CheckpointError
from metainfer.runtime.checkpoint.gguf_blocks import STORAGE_TYPES, UNREADABLE_TYPES, StorageType
from metainfer.runtime.checkpoint.gguf_header import GgufHeader, TensorRecord, read_header
from metainfer.runtime.checkpoint.interface import (
    AGAIN,
    MappedFile,
    TensorInfo,
    check_range,
    check_shape,
    find_tensor,
)


class GgufCheckpoint:
    """One GGUF file; quantized tensors come as BlockArray in their stored precision.

    Raises: CheckpointError if the file is damaged, or has a tensor of a type that cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._file = MappedFile(path)
        self._header = read_header(self._file)
        _refuse_splits(self._header, path)
        self._types: dict[str, StorageType] = {}
        self._tensors: dict[str, TensorInfo] = {}
        for record in self._header.tensors:
            self._add(record)
        _check_overlap(list(self._tensors.values()), path)

    def _add(self, record: TensorRecord) -> None:
        origin = str(self._file.path)
        if record.name in self._tensors:
            raise CheckpointError(
                f"tensor {record.name!r} appears twice", origin=origin, advice=AGAIN
            )
        stored = _storage_type(record, origin)
        # GGUF lists the innermost dim first.
        shape = tuple(reversed(record.dims))
        check_shape(record.name, shape, origin)
        if stored.block_elements > 1 and (not shape or shape[-1] % stored.block_elements):
            raise CheckpointError(
                f"tensor {record.name!r} of type {stored.name} has shape {list(shape)}: "
                f"its last dim is not a multiple of {stored.block_elements}",
                origin=origin,
                advice=AGAIN,
            )
        nbytes = math.prod(shape) // stored.block_elements * stored.block_bytes
        offset = self._header.data_start + record.offset
        if record.offset % self._header.alignment:
            raise CheckpointError(
                f"tensor {record.name!r} begins at {record.offset}, "
                f"not a multiple of the alignment {self._header.alignment}",
                origin=origin,
                advice=AGAIN,
            )
        if offset + nbytes > self._file.size:
            raise CheckpointError(
                f"tensor {record.name!r} ends at byte {offset + nbytes}, "
                f"but the file has only {self._file.size}",
                origin=origin,
                advice=AGAIN,
            )
        self._types[record.name] = stored
        self._tensors[record.name] = TensorInfo(
            record.name, shape, stored.dtype, self._file.path, offset, nbytes
        )

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor by name."""
        return self._tensors

    @property
    def metadata(self) -> Mapping[str, object]:
        """Key-value pairs of the header; long arrays are converted when first read."""
        return self._header.metadata

    def read(self, name: str) -> np.ndarray | BlockArray:
        """Return one tensor: a view of the file, or a BlockArray unpacked from it."""
        info = find_tensor(self._tensors, name, str(self._file.path))
        stored = self._types[name]
        if stored.unpack is None:
            return self._plain(info)
        return stored.unpack(self._blocks(info))

    def read_slice(self, name: str, dim: int, start: int, stop: int) -> np.ndarray | BlockArray:
        """Return part of one dim; along the last one, ``start`` must begin a block."""
        info = find_tensor(self._tensors, name, str(self._file.path))
        front = check_range(info, dim, start, stop)
        stored = self._types[name]
        lead = (slice(None),) * front
        if stored.unpack is None:
            part: np.ndarray = self._plain(info)[(*lead, slice(start, stop))]
            return part
        blocks = self._blocks(info)
        if front < len(info.shape) - 1:
            return stored.unpack(blocks[(*lead, slice(start, stop))])
        first, last = start // stored.block_elements, -(-stop // stored.block_elements)
        array = stored.unpack(blocks[(*lead, slice(first, last))])
        skipped = first * stored.block_elements
        return _cut(array, info, start - skipped, stop - skipped)

    def content_hash(self) -> str:
        """Fingerprint the header, the size and a sample of the tensors."""
        digest = self._file.digest(self._header.data_start, list(self._tensors.values()))
        return hashlib.sha256(digest).hexdigest()

    def close(self) -> None:
        """Let go of the file; arrays already read stay valid."""
        self._file.close()

    def _plain(self, info: TensorInfo) -> np.ndarray:
        # Storage types without blocks are scalars of whole bytes, so they have a numpy twin.
        assert isinstance(info.dtype, Scalar)
        return self._file.typed(info.offset, info.shape, info.dtype.numpy)

    def _blocks(self, info: TensorInfo) -> np.ndarray:
        """Return raw blocks, uint8 [*lead, blocks of a row, bytes of a block]."""
        stored = self._types[info.name]
        per_row = info.shape[-1] // stored.block_elements
        raw = self._file.view(info.offset, info.nbytes)
        return raw.reshape(*info.shape[:-1], per_row, stored.block_bytes)


def _storage_type(record: TensorRecord, origin: str) -> StorageType:
    stored = STORAGE_TYPES.get(record.type_id)
    if stored is not None:
        return stored
    called = UNREADABLE_TYPES.get(record.type_id, f"number {record.type_id}")
    known = ", ".join(t.name for t in STORAGE_TYPES.values())
    raise CheckpointError(
        f"tensor {record.name!r} is stored as type {called}, which cannot be read",
        origin=origin,
        advice=f"convert the model to one of: {known}",
    )


def _refuse_splits(header: GgufHeader, path: Path) -> None:
    count = header.metadata.get("split.count", 1)
    if isinstance(count, int) and count > 1:
        raise CheckpointError(
            f"this is one of {count} parts of a split GGUF file",
            origin=str(path),
            advice="join the parts with `llama-gguf-split --merge` first",
        )


def _check_overlap(tensors: list[TensorInfo], path: Path) -> None:
    ordered = sorted(tensors, key=lambda info: info.offset)
    for before, after in pairwise(ordered):
        if before.offset + before.nbytes > after.offset and after.nbytes:
            raise CheckpointError(
                f"tensors {before.name!r} and {after.name!r} overlap",
                origin=str(path),
                advice=AGAIN,
            )


def _cut(array: BlockArray, info: TensorInfo, start: int, stop: int) -> BlockArray:
    """Keep columns ``start:stop`` of an unpacked array."""
    extent = array.format.block[-1]
    if start % extent and start != stop:
        raise CheckpointError(
            f"a slice of tensor {info.name!r} begins inside a block of {extent} elements",
            advice=f"split its last dim at multiples of {extent}, or dequantize it first",
        )
    first, last = start // extent, -(-stop // extent)
    return BlockArray(
        array.format,
        array.codes[..., start:stop],
        array.scales[..., first:last],
        None if array.offsets is None else array.offsets[..., first:last],
    )
