"""What every checkpoint offers, whatever its file format, and the mapped file under it."""

import hashlib
import math
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from metainfer.ir.dtypes import BlockArray, DType
from metainfer.ir.errors import CheckpointError

AGAIN = "the file is incomplete or damaged: download or convert it again"
# numpy 1.26 stops at 32 dims, and an element count must fit a signed 64-bit byte count.
_MAX_DIMS = 32
_MAX_ELEMENTS = 1 << 56
_SAMPLED_TENSORS = 256
_SAMPLE_BYTES = 64


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor of a checkpoint lies.

    Attributes:
        name: its name in the file.
        shape: in PyTorch order, outermost dim first.
        dtype: element type or block format.
        file: the file that holds it.
        offset: bytes from the start of that file.
        nbytes: bytes it takes there.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType
    file: Path
    offset: int
    nbytes: int


class Checkpoint(Protocol):
    """A set of named tensors, read on demand from mapped files."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor by name."""
        ...

    @property
    def metadata(self) -> Mapping[str, object]:
        """What the file says besides tensors, as plain Python values."""
        ...

    def read(self, name: str) -> np.ndarray | BlockArray:
        """Return one tensor, a view of the file where its stored form allows.

        A view is a private copy-on-write page range: writing to it never reaches the file.
        Raises: CheckpointError if there is no such tensor or the checkpoint is closed.
        """
        ...

    def read_slice(self, name: str, dim: int, start: int, stop: int) -> np.ndarray | BlockArray:
        """Return elements ``start:stop`` of one dim, touching only their bytes.

        Raises: CheckpointError on an unknown name, a range outside the dim, or a start inside a
            block of a block format.
        """
        ...

    def content_hash(self) -> str:
        """Fingerprint the headers, the sizes and a few bytes of up to 256 tensors a file.

        It tells two fine-tunes of one model apart, but it is no proof of integrity.
        """
        ...

    def close(self) -> None:
        """Let go of the files; arrays already read stay valid."""
        ...


class MappedFile:
    """One file mapped into memory, with bounds that are checked.

    Raises: CheckpointError if the file cannot be opened or is empty.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # Private and unreserved: arrays are writable (torch refuses others with a warning), and
        # a file larger than memory can still be mapped.
        flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
        try:
            with path.open("rb") as handle:
                self.size = path.stat().st_size
                if self.size == 0:
                    raise CheckpointError("the file is empty", origin=str(path), advice=AGAIN)
                self._map: mmap.mmap | None = mmap.mmap(
                    handle.fileno(), self.size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE
                )
        except OSError as error:
            raise CheckpointError(
                f"cannot open the checkpoint: {error.strerror or error}", origin=str(path)
            ) from error

    @property
    def buffer(self) -> mmap.mmap:
        """The mapped bytes. Raises: CheckpointError after `close`."""
        if self._map is None:
            raise CheckpointError("the checkpoint was closed", origin=str(self.path))
        return self._map

    def view(self, offset: int, nbytes: int) -> np.ndarray:
        """Return bytes of the file as uint8, shape [nbytes]."""
        return np.frombuffer(self.buffer, dtype=np.uint8, count=nbytes, offset=offset)

    def typed(self, offset: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return an array of the file's bytes; a copy only where they are not aligned."""
        nbytes = math.prod(shape) * dtype.itemsize
        array = self.view(offset, nbytes).view(dtype).reshape(shape)
        return array if array.flags.aligned else array.copy()

    def digest(self, header_bytes: int, tensors: Sequence[TensorInfo]) -> bytes:
        """Hash the header, the size of the file and a sample of its tensors."""
        state = hashlib.sha256(self.view(0, header_bytes).data)
        state.update(self.size.to_bytes(8, "little"))
        step = max(1, math.ceil(len(tensors) / _SAMPLED_TENSORS))
        for info in tensors[::step]:
            middle = info.offset + info.nbytes // 2
            end = min(middle + _SAMPLE_BYTES, info.offset + info.nbytes)
            state.update(self.view(middle, end - middle).data)
        return state.digest()

    def close(self) -> None:
        """Drop the map; arrays that still look into it keep it alive."""
        self._map = None


def check_shape(name: str, shape: tuple[int, ...], origin: str) -> None:
    """Refuse shapes that no array can have.

    Raises: CheckpointError naming the tensor.
    """
    if len(shape) > _MAX_DIMS:
        raise CheckpointError(
            f"tensor {name!r} has {len(shape)} dims, more than {_MAX_DIMS}",
            origin=origin,
            advice=AGAIN,
        )
    if any(n < 0 for n in shape) or math.prod(n for n in shape if n) > _MAX_ELEMENTS:
        raise CheckpointError(
            f"tensor {name!r} has the impossible shape {list(shape)}", origin=origin, advice=AGAIN
        )


def find_tensor(tensors: Mapping[str, TensorInfo], name: str, origin: str) -> TensorInfo:
    """Look a tensor up. Raises: CheckpointError naming it."""
    info = tensors.get(name)
    if info is None:
        raise CheckpointError(
            f"there is no tensor {name!r} in the checkpoint",
            origin=origin,
            advice="compare the names with check_tensors",
        )
    return info


def check_range(info: TensorInfo, dim: int, start: int, stop: int) -> int:
    """Return ``dim`` counted from the front. Raises: CheckpointError if the range is outside."""
    rank = len(info.shape)
    if not -rank <= dim < rank:
        raise CheckpointError(f"tensor {info.name!r} has no dim {dim}: its shape is {info.shape}")
    front = dim % rank
    if not 0 <= start <= stop <= info.shape[front]:
        raise CheckpointError(
            f"slice {start}:{stop} is outside dim {front} of tensor {info.name!r}, "
            f"which has shape {list(info.shape)}"
        )
    return front
