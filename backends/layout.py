"""Packings of weights: how a kernel wants the bytes, each with its exact inverse.

The layout "" is plain row-major. Packing changes the order of numbers, never their values; a layout
that widens (dequantizes a block format for a library product) is exact too, and its inverse gives
the widened values.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from metainfer.ir.dtypes import BlockArray
from metainfer.ir.errors import PlanError
from metainfer.ir.types import TensorType

Weight = np.ndarray[Any, np.dtype[Any]] | BlockArray


@dataclass(frozen=True)
class Layout:
    """One packing.

    Attributes:
        name: "<backend>.<name>".
        pack: weight -> what the kernel reads (a torch tensor, or bytes).
        unpack: packed form and type -> the weight's float32 values (or its BlockArray).
        num_bytes: resident bytes for a type.
        typed: type -> the packed form as tensors of torch's ``meta`` device; None where no kernel
            that is compiled by itself reads the layout.
    """

    name: str
    pack: Callable[[Weight], Any]
    unpack: Callable[[Any, TensorType], Weight]
    num_bytes: Callable[[TensorType], int]
    typed: Callable[[TensorType], Any] | None = None


class LayoutRegistry:
    """Layouts by name."""

    def __init__(self) -> None:
        self._layouts: dict[str, Layout] = {}

    def add(self, layout: Layout) -> Layout:
        """Register a layout.

        Raises: ValueError if the name is taken.
        """
        if layout.name in self._layouts:
            raise ValueError(f"layout {layout.name!r} is registered twice")
        self._layouts[layout.name] = layout
        return layout

    def get(self, name: str) -> Layout:
        """A layout by name.

        Raises: PlanError if it is unknown.
        """
        found = self._layouts.get(name)
        if found is None:
            raise PlanError(
                f"unknown layout {name!r}",
                advice=f"known: {', '.join(self._layouts)}; is its backend installed?",
            )
        return found

    def all(self) -> tuple[Layout, ...]:
        """All layouts."""
        return tuple(self._layouts.values())
