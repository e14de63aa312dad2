"""TOML files with the place of every key kept, so that errors can point.

tomllib forgets lines. `read_document` scans them beside it, and `extends` merges a base below:
tables key by key, arrays and values as a whole.
"""

import difflib
import re
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metainfer.ir.errors import HardwareError

Loc = tuple[str | int, ...]

_HEADER = re.compile(r"\s*(?P<open>\[\[?)(?P<name>[^\[\]]+)\]\]?\s*(#.*)?$")
_KEY = re.compile(r"""\s*(?P<key>(?:[\w-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[\w-]+|"[^"]*"))*)\s*=""")
_PART = re.compile(r"""[\w-]+|"[^"]*"|'[^']*'""")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"|\'[^\']*\'')


@dataclass(frozen=True)
class Place:
    """Where a key stands: file, 1-based line, and the line's text."""

    path: str
    line: int
    text: str


@dataclass(frozen=True)
class Document:
    """Merged data of a file and its bases, with the place of every key.

    Attributes:
        path: the file asked for.
        data: plain TOML values, ``extends`` resolved.
        places: where each key (and each table) was last written.
    """

    path: str
    data: dict[str, Any]
    places: dict[Loc, Place]

    def place(self, loc: Loc) -> Place:
        """Return the place of a key, or of the nearest table that holds it."""
        for end in range(len(loc), 0, -1):
            found = self.places.get(loc[:end])
            if found is not None:
                return found
        return Place(self.path, 1, "")

    def error(self, loc: Loc, what: str, advice: str = "") -> HardwareError:
        """Build the error about a key: its line with a caret, its file and line."""
        place = self.place(loc)
        text = place.text.strip()
        key = next((str(part) for part in reversed(loc) if isinstance(part, str)), "")
        at = text.find(key)
        if text and key and at >= 0:
            text += "\n" + " " * at + "^" * len(key)
        return HardwareError(what, text=text, origin=f"{place.path}:{place.line}", advice=advice)

    def under(self, loc: Loc) -> "Document":
        """Return the document of one table inside this one."""
        data: Any = self.data
        for part in loc:
            data = data[part]
        depth = len(loc)
        places = {key[depth:]: p for key, p in self.places.items() if key[:depth] == loc}
        return Document(self.path, data, places)


Finder = Callable[[str, Path], Path | None]


def read_document(
    path: Path, find: Finder, known: Callable[[Path], tuple[str, ...]], seen: tuple[Path, ...] = ()
) -> Document:
    """Read a file and the bases it extends.

    Args:
        path: the file.
        find: from the name after ``extends`` and the folder of the file to the base file, or None.
        known: names that could be extended from a folder, for advice.
        seen: files that extend this one, to find circles.

    Raises: HardwareError if a file cannot be read, is not TOML, or extends an unknown file.
    """
    own = _read_one(path)
    if "extends" not in own.data:
        return own
    name = own.data.pop("extends")
    if not isinstance(name, str):
        raise own.error(("extends",), "extends wants the name of one description, in quotes")
    base = find(name, path.parent)
    if base is None:
        names = list(known(path.parent))
        raise own.error(("extends",), f"extends unknown description {name!r}", near(name, names))
    trail = (*seen, path.resolve())
    if base.resolve() in trail:
        raise own.error(("extends",), f"{name!r} extends itself in a circle", "break the circle")
    below = read_document(base, find, known, trail)
    return overlay(below, own)


def near(word: str, words: list[str]) -> str:
    """Return advice naming the nearest word, or all of them."""
    close = difflib.get_close_matches(word, words, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"known: {', '.join(words)}" if words else ""


def overlay(below: Document, above: Document) -> Document:
    """Merge two documents: tables key by key, everything else from above."""
    places = dict(below.places)
    data = _overlay(below.data, above.data, (), places)
    places.update(above.places)
    return Document(above.path, data, places)


def _overlay(
    below: dict[str, Any], above: dict[str, Any], loc: Loc, places: dict[Loc, Place]
) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        here = (*loc, key)
        old = below.get(key)
        if isinstance(value, dict) and isinstance(old, dict):
            merged[key] = _overlay(old, value, here, places)
            continue
        merged[key] = value
        for stale in [p for p in places if p[: len(here)] == here]:
            del places[stale]
    return merged


def _read_one(path: Path) -> Document:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise HardwareError(
            f"cannot read {path}: {reason}", advice="name a TOML file or a known machine"
        ) from error
    lines = text.splitlines()
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"at line (\d+), column (\d+)", str(error))
        number = int(found[1]) if found else len(lines)
        line = lines[number - 1] if 0 < number <= len(lines) else ""
        what = str(error).split(" (at ")[0]
        advice = "check the TOML syntax of this line and the one before"
        origin = f"{path}:{number}"
        raise HardwareError(f"not TOML: {what}", text=line, origin=origin, advice=advice) from error
    return Document(str(path), data, scan_places(lines, str(path)))


def scan_places(lines: Sequence[str], path: str) -> dict[Loc, Place]:
    """Find the line of every table and key of a TOML text that is known to be valid."""
    places: dict[Loc, Place] = {}
    counts: dict[Loc, int] = {}
    table: Loc = ()
    skip_until = ""
    depth = 0
    for number, line in enumerate(lines, start=1):
        if skip_until:
            skip_until = "" if skip_until in line else skip_until
            continue
        if depth > 0:
            depth += _brackets(line)
            continue
        header = _HEADER.match(line)
        if header:
            table = _table(header, counts)
            places[table] = Place(path, number, line)
            continue
        key = _KEY.match(line)
        if key is None:
            continue
        loc = (*table, *(_parts(key["key"])))
        places[loc] = Place(path, number, line)
        rest = line[key.end() :]
        skip_until = _open_string(rest)
        depth = 0 if skip_until else _brackets(rest)
    return places


def _parts(name: str) -> tuple[str, ...]:
    return tuple(part.strip("\"'") for part in _PART.findall(name))


def _table(header: re.Match[str], counts: dict[Loc, int]) -> Loc:
    """Location of a table header; arrays of tables take the number of their latest entry."""
    parts = _parts(header["name"])
    loc: Loc = ()
    for i, part in enumerate(parts):
        loc = (*loc, part)
        last = i == len(parts) - 1
        if last and header["open"] == "[[":
            counts[loc] = counts.get(loc, -1) + 1
        if loc in counts:
            loc = (*loc, counts[loc])
    return loc


def _brackets(text: str) -> int:
    """Brackets opened less brackets closed, strings and comments left away."""
    bare = _STRING.sub("", text).split("#")[0]
    return bare.count("[") + bare.count("{") - bare.count("]") - bare.count("}")


def _open_string(rest: str) -> str:
    """Quotes of a multi-line string that begins here and does not end here, or ""."""
    for quotes in ('"""', "'''"):
        if rest.strip().startswith(quotes) and rest.count(quotes) == 1:
            return quotes
    return ""
