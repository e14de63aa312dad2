"""The file of measured times: JSON that people read, diff and commit.

    {"schema": 1,
     "sections": [
      {"device": {"kind": "gpu", "processors": 132, ...}, "libraries": {"torch": "2.11.0", ...},
       "sources": {"triton": "71fe..."}, "measured_on": "NVIDIA H200",
       "groups": {
        "linear(bf16[T,4096], @bf16[6144,4096]) : bf16[T,6144]": {
         "triton.linear_plain_m16": {"T=1": 13.42, "T=16": 14.1},
         "cuda.linear_bf16": {"T=1": "failed: ..."}}}}]}

Times are microseconds of one call inside a captured graph (a GPU) or a bound program (a CPU).
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from metainfer.ir.errors import TuningError
from metainfer.ir.whole_file import write_file

SCHEMA = 1
FAILED = "failed: "
_SIZES = re.compile(r"fixed|\w+=\d+( \w+=\d+)*")
_FIELDS: Mapping[str, type] = {
    "device": dict, "libraries": dict, "sources": dict, "measured_on": str, "groups": dict,
}  # fmt: skip

# By kernel, then by sizes as `keys.sizes_text` prints them: microseconds, or why there are none.
Figures = dict[str, dict[str, float | str]]


@dataclass(frozen=True)
class Section:
    """What was measured on one kind of device with one set of libraries.

    Attributes:
        device: `keys.device_key` of it.
        libraries: versions by name.
        sources: fingerprint of each backend whose kernels were measured.
        measured_on: what the device is called; for readers alone.
        groups: figures by the text of the group.
    """

    device: Mapping[str, Any]
    libraries: Mapping[str, str]
    sources: dict[str, str] = field(default_factory=dict[str, str])
    measured_on: str = ""
    groups: dict[str, Figures] = field(default_factory=dict[str, Figures])

    @property
    def num_figures(self) -> int:
        """Measurements, failed ones included."""
        return sum(len(sizes) for kernels in self.groups.values() for sizes in kernels.values())

    def to_dict(self) -> dict[str, Any]:
        """Plain data, in the order in which it is read best."""
        return {
            "device": dict(self.device), "libraries": dict(self.libraries),
            "sources": self.sources, "measured_on": self.measured_on, "groups": self.groups,
        }  # fmt: skip


def read_sections(path: Path) -> list[Section]:
    """Read a file.

    Raises: TuningError naming the line, and the key where it has one.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise TuningError(
            f"the tuned file {path} cannot be read: {reason}",
            advice="make one: metainfer tune PLAN --out FILE",
        ) from error
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        line = f":{error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise TuningError(
            f"the tuned file is no JSON: {error}", origin=f"{path}{line}", advice=_ADVICE
        ) from error
    return sections_of(data, text, str(path))


_ADVICE = "repair that line, or remove the file and tune again"


def sections_of(data: Any, text: str = "", origin: str = "") -> list[Section]:
    """Sections from plain data.

    Args:
        data: what JSON gave.
        text: of the file, to find lines in.
        origin: the file.

    Raises: TuningError naming the key and its line.
    """
    reader = _Reader(text, origin)
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        found = data.get("schema") if isinstance(data, dict) else type(data).__name__
        raise reader.wrong(("schema",), f"schema {SCHEMA} is read", found)
    listed = data.get("sections")
    if not isinstance(listed, list):
        raise reader.wrong(("sections",), "a list is wanted", listed)
    return [reader.section(index, entry) for index, entry in enumerate(listed)]


class _Reader:
    """Checks plain data; knows on which line a key stands."""

    def __init__(self, text: str, origin: str) -> None:
        self._text, self._origin = text, origin

    def wrong(self, keys: Sequence[str | int], wanted: str, found: Any) -> TuningError:
        at = 0
        for key in keys:
            if isinstance(key, str):
                at = max(self._text.find(json.dumps(key), at), at)
            else:
                # Sections begin with their device.
                for _ in range(key + 1):
                    at = max(self._text.find('"device"', at + 1), at)
        line = f":{self._text.count(chr(10), 0, at) + 1}" if self._text else ""
        place = "".join(f"[{k}]" if isinstance(k, int) else f".{k}" for k in keys)[1:]
        return TuningError(
            f"the tuned file is damaged at {place}: {wanted}, found {found!r}"[:300],
            origin=f"{self._origin}{line}",
            advice=_ADVICE,
        )

    def section(self, index: int, entry: Any) -> Section:
        place: tuple[str | int, ...] = ("sections", index)
        if not isinstance(entry, dict):
            raise self.wrong(place, "an object is wanted", entry)
        for name, kind in _FIELDS.items():
            if not isinstance(entry.get(name), kind):
                raise self.wrong((*place, name), f"a {kind.__name__} is wanted", entry.get(name))
        for name in ("libraries", "sources"):
            for key, value in entry[name].items():
                if not isinstance(value, str):
                    raise self.wrong((*place, name, key), "text is wanted", value)
        for group, kernels in entry["groups"].items():
            self._figures((*place, "groups", group), kernels)
        return Section(**{name: entry[name] for name in _FIELDS})

    def _figures(self, place: tuple[str | int, ...], kernels: Any) -> None:
        if not isinstance(kernels, dict):
            raise self.wrong(place, "an object of kernels is wanted", kernels)
        for kernel, sizes in kernels.items():
            if not isinstance(sizes, dict):
                raise self.wrong((*place, kernel), "an object of sizes is wanted", sizes)
            for size, figure in sizes.items():
                here = (*place, kernel, size)
                if not _SIZES.fullmatch(size):
                    raise self.wrong(here, "sizes such as T=16 are wanted", size)
                if isinstance(figure, str) and figure.startswith(FAILED):
                    continue
                is_number = isinstance(figure, int | float) and not isinstance(figure, bool)
                if not is_number or not 0 < float(figure) < math.inf:
                    raise self.wrong(here, "microseconds above 0 are wanted", figure)


def write_sections(path: Path, sections: Sequence[Section]) -> None:
    """Write a file whole, one measured size list a line.

    Raises: TuningError if the disk refuses.
    """
    data = {"schema": SCHEMA, "sections": [s.to_dict() for s in sections]}
    try:
        # A process that is killed loses nothing by this; that the machine may fail costs a sync.
        write_file(path, (_print(data, 0) + "\n").encode(), lasting=False)
    except OSError as error:
        raise TuningError(
            f"the tuned file {path} cannot be written: {error.strerror or error}",
            advice="name another by --out",
        ) from error


def _print(value: Any, depth: int) -> str:
    """JSON with an object of numbers and texts on one line, others one key a line."""
    if isinstance(value, dict) and any(isinstance(v, dict | list) for v in value.values()):
        inner = [f"{json.dumps(k)}: {_print(v, depth + 1)}" for k, v in value.items()]
        return _lines("{", inner, "}", depth)
    if isinstance(value, list) and any(isinstance(v, dict | list) for v in value):
        return _lines("[", [_print(v, depth + 1) for v in value], "]", depth)
    return json.dumps(value, ensure_ascii=False)


def _lines(begin: str, inner: Sequence[str], end: str, depth: int) -> str:
    pad = " " * (depth + 1)
    return f"{begin}\n{pad}" + f",\n{pad}".join(inner) + f"\n{' ' * depth}{end}"
