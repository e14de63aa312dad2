"""Figures of the kernels that tests compile, kept beside them: to compile them takes half the time.

Figures go by a hash of all that they depend on (`metainfer.backends.triton.cross`): a kernel whose
text or tile changed is compiled again, and with --thorough all are but those whose figures come
with the package. Files only: this is imported where nothing of Triton is. Holds no tests.
"""

import json
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from metainfer.ir.whole_file import write_file

FOLDER = Path(__file__).with_name("figures")
FIELDS = ("shared_bytes", "registers", "spilled_bytes", "matrix")


def file() -> Path:
    """Where the figures of the installed Triton are, if there are any."""
    try:
        return FOLDER / f"{version('triton')}.json"
    except PackageNotFoundError:
        return FOLDER / "none.json"


def cache() -> Path:
    """Where the compiler looks for figures before it compiles."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "metainfer" / "triton" / "resources"


def unpack(source: Path, target: Path) -> None:
    """Put the figures of a file where the compiler looks; what is there already stays."""
    if not source.exists():
        return
    target.mkdir(parents=True, exist_ok=True)
    there = set(os.listdir(target))
    for digest, values in json.loads(source.read_text()).items():
        if (name := f"{digest}.json") not in there:
            data = json.dumps(dict(zip(FIELDS, values, strict=True)))
            write_file(target / name, data.encode(), lasting=False)


def pack(source: Path, target: Path) -> int:
    """Write the figures in a folder to one file, sorted; returns how many they are."""
    lines = []
    for path in sorted(source.glob("*.json")):
        found = json.loads(path.read_text())
        lines.append(f"{json.dumps(path.stem)}: {json.dumps([found[f] for f in FIELDS])}")
    write_file(target, ("{\n" + ",\n".join(lines) + "\n}\n").encode())
    return len(lines)
