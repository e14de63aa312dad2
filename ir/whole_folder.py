"""Folders that are written whole or not at all.

Files go to a hidden neighbour first, which is then renamed into place. The neighbour is locked
while its process lives; what a killed process left is swept when the same folder is written again.
"""

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

# Tails of hidden neighbours: being written, and an old folder about to be replaced.
_NEW, _OLD = "new", "old"


def write_folder(path: Path, files: Mapping[str, bytes]) -> None:
    """Write a folder of files; a folder that is there already is replaced.

    Raises: OSError; what was there before is there still.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _neighbour(path, _NEW) as temporary:
        for name, data in files.items():
            with open(temporary / name, "wb") as out:
                out.write(data)
                out.flush()
                os.fsync(out.fileno())
        os.chmod(temporary, 0o755)
        if path.exists():
            _replace(path, temporary)
        else:
            os.rename(temporary, path)


def sweep(path: Path) -> None:
    """Undo what killed processes left beside a folder.

    Half-written neighbours go. A folder that was about to be replaced comes back if nothing stands
    in its place.
    """
    if not path.parent.is_dir():
        return
    pattern = re.compile(rf"\.{re.escape(path.name)}\.({_NEW}|{_OLD})\.[a-z0-9_]+")
    for found in sorted(path.parent.iterdir()):
        match = pattern.fullmatch(found.name)
        handle = _lock_of_abandoned(found) if match else -1
        if match is None or handle < 0:
            continue
        retired = found / path.name
        if match[1] == _OLD and retired.is_dir() and not path.exists():
            os.rename(retired, path)
        shutil.rmtree(found, ignore_errors=True)
        # Not before: a process that waits for the lock must find the folder gone.
        os.close(handle)


def _replace(path: Path, by: Path) -> None:
    """Put a folder in another's place; the old one comes back if that fails."""
    with _neighbour(path, _OLD) as retired:
        os.rename(path, retired / path.name)
        try:
            os.rename(by, path)
        except BaseException:
            os.rename(retired / path.name, path)
            raise


@contextmanager
def _neighbour(path: Path, tail: str) -> Iterator[Path]:
    """A hidden folder beside another, locked while this process works with it; removed at the end.

    It stays if an old folder lies in it that could not be put back.
    """
    folder, handle = path, -1
    while handle < 0:
        folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.{tail}.", dir=path.parent))
        handle = _locked(folder)
    try:
        yield folder
    except BaseException:
        if tail == _NEW or not (folder / path.name).exists():
            shutil.rmtree(folder, ignore_errors=True)
        raise
    else:
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(handle)


def _locked(folder: Path) -> int:
    """A handle that holds the lock of a folder; -1 if a sweep took the folder away just now."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        return -1
    # Some file systems know no locks; there nothing is swept either.
    with suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_EX)
    if folder.exists():
        return handle
    os.close(handle)
    return -1


def _lock_of_abandoned(folder: Path) -> int:
    """A handle that holds the lock of a folder whose process is gone; -1 if it lives."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return -1
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return -1
    return handle
