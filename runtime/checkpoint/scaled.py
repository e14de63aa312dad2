"""A safetensors checkpoint whose weights are codes and scales: each is presented as one tensor."""

import math
from collections.abc import Mapping
from dataclasses import replace

import ml_dtypes
import numpy as np

from metainfer.ir.dtypes import BlockArray
from metainfer.ir.errors import CheckpointError
from metainfer.runtime.checkpoint.interface import (
    Checkpoint,
    TensorInfo,
    check_range,
    find_tensor,
)
from metainfer.runtime.checkpoint.scale_rules import ScaledWeight, Settings, scaled_weights


def with_scales(base: Checkpoint, settings: Settings, origin: str) -> Checkpoint:
    """The checkpoint with codes and scales put together; itself where it has none.

    Raises: CheckpointError naming a scale that is missing or does not fit its codes.
    """
    found = scaled_weights(base.tensors, settings, origin)
    return ScaledCheckpoint(base, found, origin) if found else base


class ScaledCheckpoint:
    """Tensors of another checkpoint, some of them put together to weights of block formats.

    Raises: CheckpointError if a weight has the name of another tensor.
    """

    def __init__(self, base: Checkpoint, weights: tuple[ScaledWeight, ...], origin: str) -> None:
        self._base = base
        self._origin = origin
        self._weights = {w.name: w for w in weights}
        parts = {n for w in weights for n in (w.codes, w.scales, w.second, *w.unused)}
        self._tensors = {n: t for n, t in base.tensors.items() if n not in parts}
        for weight in weights:
            if weight.name in self._tensors:
                raise CheckpointError(
                    f"tensor {weight.name!r} is there, and its codes {weight.codes!r} too",
                    origin=origin,
                    advice="remove one of them: the folder holds two versions of the model",
                )
            codes = base.tensors[weight.codes]
            self._tensors[weight.name] = replace(
                codes, name=weight.name, shape=weight.shape, dtype=weight.format
            )

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor by name; a scaled weight lies where its codes do."""
        return self._tensors

    @property
    def metadata(self) -> Mapping[str, object]:
        """The metadata of the files."""
        return self._base.metadata

    def read(self, name: str) -> np.ndarray | BlockArray:
        """Return one tensor; a scaled weight as a BlockArray, 8-bit codes as a view of the file."""
        weight = self._weights.get(name)
        if weight is None:
            return self._base.read(find_tensor(self._tensors, name, self._origin).name)
        return self._cut(weight, 0, 0, weight.shape[0])

    def read_slice(self, name: str, dim: int, start: int, stop: int) -> np.ndarray | BlockArray:
        """Return part of one dim; ``start`` must begin a block of a scaled weight."""
        weight = self._weights.get(name)
        info = find_tensor(self._tensors, name, self._origin)
        if weight is None:
            return self._base.read_slice(name, dim, start, stop)
        front = check_range(info, dim, start, stop)
        extent = weight.format.extents(len(weight.shape))[front]
        if extent and start % extent and start != stop:
            raise CheckpointError(
                f"a slice of tensor {name!r} begins inside a block of {extent} elements",
                origin=self._origin,
                advice=f"split dim {front} at multiples of {extent}, or refine its scales first",
            )
        return self._cut(weight, front, start, stop)

    def content_hash(self) -> str:
        """Fingerprint of the files."""
        return self._base.content_hash()

    def close(self) -> None:
        """Let go of the files; arrays already read stay valid."""
        self._base.close()

    def _cut(self, weight: ScaledWeight, dim: int, start: int, stop: int) -> BlockArray:
        """Elements ``start:stop`` of a dim, ``start`` at the beginning of a block."""
        codes = _raw(self._base.read(weight.codes))
        scales = _raw(self._base.read(weight.scales)).reshape(
            weight.format.scale_shape(weight.shape)
        )
        last = len(weight.shape) - 1
        if weight.is_packed:
            codes = codes.reshape(*weight.shape[:-1], weight.shape[-1] // 2)
        lead = (slice(None),) * dim
        if weight.is_packed and dim == last:
            # Blocks are whole bytes, and ``start`` begins one.
            bytes_ = codes[..., start // 2 : -(-stop // 2)]
            codes = _unpacked(bytes_)[..., : stop - start]
        else:
            codes = codes[(*lead, slice(start, stop))]
            codes = _unpacked(codes) if weight.is_packed else codes
        extent = weight.format.extents(last + 1)[dim]
        if extent:
            scales = scales[(*lead, slice(start // extent, -(-stop // extent)))]
        scales = scales.view(weight.format.scale.numpy)
        values = codes.view(weight.format.element.numpy)
        return BlockArray(
            weight.format, values, scales, None, self._row_scales(weight, values.shape[:-1])
        )

    def _row_scales(self, weight: ScaledWeight, rows: tuple[int, ...]) -> np.ndarray | None:
        """The second scale of a tensor, for each of its rows."""
        if not weight.second:
            return None
        found = _raw(self._base.read(weight.second)).astype(np.float64).reshape(())
        scale = np.float32(1 / found if weight.divides else found)
        return np.full((*rows, 1), scale, np.float32)


def _raw(array: np.ndarray | BlockArray) -> np.ndarray:
    if isinstance(array, BlockArray):
        raise CheckpointError("codes or scales are of a block format themselves")
    return array


def _unpacked(packed: np.ndarray) -> np.ndarray:
    """Codes of e2m1, a byte each, from bytes of two: the first in the low half."""
    bytes_ = np.ascontiguousarray(packed).view(np.uint8)
    codes = np.empty((*bytes_.shape, 2), np.uint8)
    np.bitwise_and(bytes_, 15, out=codes[..., 0])
    np.right_shift(bytes_, 4, out=codes[..., 1])
    shape = (*bytes_.shape[:-1], math.prod(bytes_.shape[-1:]) * 2)
    return codes.reshape(shape).view(ml_dtypes.float4_e2m1fn)
