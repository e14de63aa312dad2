"""Tensors that stand for many: ``experts.*.up_proj.weight`` is the tensors of experts 0, 1, 2 ...

A checkpoint holds one tensor for each expert. A weight whose name holds "*" is all of them, stacked
along a new dim 0; a slice along that dim reads only the tensors that lie in it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from metainfer.ir.dtypes import BlockArray, DType
from metainfer.ir.errors import CheckpointError
from metainfer.ir.ops.collective import rows_of
from metainfer.runtime.checkpoint.interface import Checkpoint, TensorInfo

Array = np.ndarray[Any, np.dtype[Any]]


def is_stacked(name: str) -> bool:
    """Whether a name stands for numbered tensors."""
    return "*" in name


def member(name: str, number: int) -> str:
    """Name of one of the tensors that a stacked name stands for."""
    return name.replace("*", str(number))


def expand(expected: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Names and shapes with stacked ones replaced by their members.

    Raises: CheckpointError if a stacked tensor is declared without its first dim.
    """
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in expected.items():
        if not is_stacked(name):
            found[name] = shape
            continue
        if not shape:
            raise CheckpointError(f"{name} stands for several tensors, but has no dims")
        found.update((member(name, n), shape[1:]) for n in range(shape[0]))
    return found


@dataclass(frozen=True)
class TensorSource:
    """A checkpoint's tensors by name, stacked ones among them.

    Attributes:
        checkpoint: where they lie.
    """

    checkpoint: Checkpoint

    def find(self, name: str) -> tuple[tuple[int, ...], DType] | None:
        """Shape and format of a tensor, None if there is none of the name.

        Raises: CheckpointError if members of a stacked one are missing or unlike each other.
        """
        tensors = self.checkpoint.tensors
        if not is_stacked(name):
            info = tensors.get(name)
            return None if info is None else (info.shape, info.dtype)
        found = self._members(name)
        if not found:
            return None
        return (len(found), *found[0].shape), found[0].dtype

    def read(self, name: str) -> Array | BlockArray:
        """A tensor; a stacked one is a copy.

        Raises: CheckpointError naming what is missing.
        """
        if not is_stacked(name):
            return self.checkpoint.read(name)
        (count, *_), _ = self.known(name)
        return stack([self.checkpoint.read(member(name, n)) for n in range(count)])

    def read_slice(self, name: str, dim: int, start: int, stop: int) -> Array | BlockArray:
        """Elements ``start:stop`` of one dim, touching only their bytes.

        Raises: CheckpointError if the range lies outside, or what is missing.
        """
        return self.read_region(name, {dim: (start, stop)})

    def read_region(self, name: str, region: Mapping[int, tuple[int, int]]) -> Array | BlockArray:
        """A region: ``start, stop`` by dim, the others whole; only its bytes are touched.

        Raises: CheckpointError if a range lies outside, or what is missing.
        """
        if not is_stacked(name):
            return self._region(name, region)
        shape, _ = self.known(name)
        rank = len(shape)
        found = {dim % rank: bounds for dim, bounds in region.items() if -rank <= dim < rank}
        start, stop = found.pop(0, (0, shape[0]))
        if not 0 <= start < stop <= shape[0] or len(found) + 1 < len(region):
            raise CheckpointError(f"slice {start}:{stop} of the {shape[0]} tensors {name!r}")
        inner = {dim - 1: bounds for dim, bounds in found.items()}
        return stack([self._region(member(name, n), inner) for n in range(start, stop)])

    def _region(self, name: str, region: Mapping[int, tuple[int, int]]) -> Array | BlockArray:
        """A region of a tensor of the checkpoint: the first dim by the file, the rest is views."""
        if not region:
            return self.checkpoint.read(name)
        (dim, (start, stop)), *rest = region.items()
        found = self.checkpoint.read_slice(name, dim, start, stop)
        for more, bounds in rest:
            found = rows_of(found, more, *bounds)
        return found

    def known(self, name: str) -> tuple[tuple[int, ...], DType]:
        """Shape and format of a tensor that must be there.

        Raises: CheckpointError naming what is missing.
        """
        found = self.find(name)
        if found is None:
            raise CheckpointError(
                f"there is no tensor {name.replace('*', '0')!r} in the checkpoint",
                advice="compare the names with check_tensors",
            )
        return found

    def _members(self, name: str) -> list[TensorInfo]:
        numbers = self._families.get(name, [])
        missing = next((n for n in range(len(numbers)) if n != numbers[n]), None)
        if missing is not None:
            raise CheckpointError(
                f"{member(name, missing)} is missing, {member(name, numbers[-1])} is there",
                advice="the checkpoint is incomplete: download it again",
            )
        found = [self.checkpoint.tensors[member(name, n)] for n in numbers]
        for info in found:
            if (info.shape, info.dtype) != (found[0].shape, found[0].dtype):
                raise CheckpointError(
                    f"{info.name} is {info.dtype}{list(info.shape)}, "
                    f"{found[0].name} is {found[0].dtype}{list(found[0].shape)}",
                    origin=str(info.file),
                    advice="tensors that are stacked must be alike: convert the checkpoint again",
                )
        return found

    @cached_property
    def _families(self) -> dict[str, list[int]]:
        """Numbers that stand in the place of the star, ascending, by stacked name."""
        found: dict[str, list[int]] = {}
        for name in self.checkpoint.tensors:
            words = name.split(".")
            for place, word in enumerate(words):
                if word.isdigit() and str(int(word)) == word:
                    pattern = ".".join([*words[:place], "*", *words[place + 1 :]])
                    found.setdefault(pattern, []).append(int(word))
        return {pattern: sorted(numbers) for pattern, numbers in found.items()}


def stack(parts: Sequence[Array | BlockArray]) -> Array | BlockArray:
    """Tensors of one shape and format, one behind the other along a new dim 0."""
    blocks = [p for p in parts if isinstance(p, BlockArray)]
    if not blocks:
        return np.stack([np.asarray(p) for p in parts])
    return BlockArray.joined(blocks, np.stack)
