"""Routing histograms: how often the router of each layer chose each expert.

A file is JSON, ``{"model": name, "layers": [...], "counts": [[...]]}``, or an npz of the same three
arrays. Layers are named as the checkpoint names the part that its experts' tensors have in common:
``model.layers.3.mlp.experts``.
"""

import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from metainfer.ir.errors import HistogramError
from metainfer.ir.whole_file import write_file

Array = np.ndarray[Any, np.dtype[Any]]
_KEYS = ("model", "layers", "counts")
_MOST = 2**53  # larger counts are no exact floats
_REMEDY = "record it anew: metainfer record PLAN --prompts FILE --out FILE.json"


@dataclass(frozen=True)
class RoutingHistogram:
    """Counts of chosen experts.

    Attributes:
        model: name of the model that was recorded.
        layers: names of its layers with experts, in order.
        counts: how often each expert was chosen, by layer.

    Raises: HistogramError for counts that are none, saying which.
    """

    model: str
    layers: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        """Check every count."""
        if not self.layers or not self.counts or not self.counts[0]:
            raise HistogramError("a histogram without layers or experts", advice=_REMEDY)
        if len(set(self.layers)) != len(self.layers):
            raise HistogramError("a histogram that names a layer twice", advice=_REMEDY)
        if len(self.counts) != len(self.layers):
            raise HistogramError(
                f"counts of {len(self.counts)} layers, names of {len(self.layers)}", advice=_REMEDY
            )
        for layer, row in zip(self.layers, self.counts, strict=True):
            _check_row(layer, row, len(self.counts[0]))

    @property
    def num_experts(self) -> int:
        """Experts of a layer."""
        return len(self.counts[0])

    def array(self) -> Array:
        """The counts. Shapes: -> int64 [layers, experts]."""
        return np.array(self.counts, np.int64)

    def check(self, model: str, layers: Sequence[str], experts: int) -> None:
        """Hold the histogram against a model.

        Raises: HistogramError if it is another model's.
        """
        if self.model != model:
            raise HistogramError(
                f"the histogram is of model {self.model!r}, wanted {model!r}", advice=_REMEDY
            )
        if self.num_experts != experts:
            raise HistogramError(
                f"the histogram has {self.num_experts} experts a layer, {model!r} has {experts}",
                advice=_REMEDY,
            )
        if self.layers != tuple(layers):
            lacking = [name for name in layers if name not in self.layers]
            extra = [name for name in self.layers if name not in layers]
            differing = lacking or extra or list(layers)
            raise HistogramError(
                f"the histogram has {len(self.layers)} layers with experts, {model!r} has "
                f"{len(layers)}: {differing[0]} "
                + ("is missing" if lacking else "is unknown" if extra else "stands elsewhere"),
                advice=_REMEDY,
            )

    def save(self, path: Path) -> None:
        """Write the file whole or not at all; its name says the format.

        Raises: HistogramError if the name ends otherwise, or the disk refuses.
        """
        _format_of(path)
        text = {"model": self.model, "layers": self.layers, "counts": self.counts}
        data = (json.dumps(text) + "\n").encode() if path.suffix == ".json" else self._npz()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, data)
        except OSError as error:
            raise HistogramError(
                f"the histogram could not be written to {path}: {error.strerror or error}",
                advice="nothing was left there; free space or choose another --out",
            ) from error

    def _npz(self) -> bytes:
        buffer = io.BytesIO()
        np.savez_compressed(
            buffer, model=np.array(self.model), layers=np.array(self.layers), counts=self.array()
        )
        return buffer.getvalue()

    @staticmethod
    def read(path: Path) -> "RoutingHistogram":
        """Read a file.

        Raises: HistogramError naming the file and what is wrong with it.
        """
        _format_of(path)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise HistogramError(
                f"{path} cannot be read: {error.strerror or error}", advice=_REMEDY
            ) from error
        try:
            fields = _parsed_json(data) if path.suffix == ".json" else _parsed_npz(data)
            return _histogram(fields)
        except HistogramError as error:
            raise HistogramError(error.what, origin=str(path), advice=error.advice) from None


def layer_of(weights: Sequence[str]) -> str:
    """The layer's name: what the names of its experts' weights have in common.

    ``model.layers.3.mlp.experts.*.gate_proj.weight`` and ``...down_proj.weight`` are of
    ``model.layers.3.mlp.experts``.
    """
    parts = [name.split(".") for name in weights]
    common = takewhile(lambda step: len(set(step)) == 1, zip(*parts, strict=False))
    return ".".join(takewhile(lambda part: part != "*", (step[0] for step in common)))


def _check_row(layer: str, row: Sequence[int], experts: int) -> None:
    if len(row) != experts:
        raise HistogramError(
            f"{layer} has counts of {len(row)} experts, the first layer of {experts}",
            advice=_REMEDY,
        )
    for expert, count in enumerate(row):
        # NaN fails both comparisons.
        if not 0 <= count < _MOST or count != int(count):
            raise HistogramError(
                f"{layer}, expert {expert}: {count} is no count",
                advice=f"counts are whole numbers of at least 0; {_REMEDY}",
            )
    if not any(row):
        raise HistogramError(f"{layer} has no counts at all", advice=_REMEDY)


def _format_of(path: Path) -> None:
    if path.suffix not in (".json", ".npz"):
        raise HistogramError(f"{path} is no histogram", advice="name it FILE.json or FILE.npz")


def _parsed_json(data: bytes) -> Mapping[str, Any]:
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise HistogramError(f"no JSON: {error}", advice=_REMEDY) from None
    return fields if isinstance(fields, dict) else {}


def _parsed_npz(data: bytes) -> Mapping[str, Any]:
    """Arrays as plain values; pickled objects, which could run code, are refused."""
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as archive:
            return {name: archive[name].tolist() for name in archive.files}
    except (ValueError, OSError, EOFError, KeyError, zipfile.BadZipFile, AttributeError) as error:
        raise HistogramError(f"no npz of numbers: {error}", advice=_REMEDY) from None


def _histogram(fields: Mapping[str, Any]) -> RoutingHistogram:
    missing = [key for key in _KEYS if key not in fields]
    if missing:
        raise HistogramError(f"no histogram: {missing[0]!r} is missing", advice=_REMEDY)
    model, layers, counts = (fields[key] for key in _KEYS)
    is_named = isinstance(layers, list) and all(isinstance(name, str) for name in layers)
    is_table = isinstance(counts, list) and all(isinstance(row, list) for row in counts)
    if not isinstance(model, str) or not is_named or not is_table:
        raise HistogramError(
            "no histogram: wanted a model's name, a list of layers' names, a table of counts",
            advice=_REMEDY,
        )
    for layer, row in zip(layers, counts, strict=False):
        wrong = [x for x in row if isinstance(x, bool) or not isinstance(x, int | float)]
        if wrong:
            raise HistogramError(f"{layer}: {wrong[0]!r} is no count", advice=_REMEDY)
        _check_row(layer, row, len(row))
    rows = tuple(tuple(int(x) for x in row) for row in counts)
    return RoutingHistogram(model, tuple(layers), rows)
