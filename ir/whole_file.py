"""Files that are written whole or not at all: a hidden neighbour is renamed into place."""

import os
import secrets
from pathlib import Path


def write_file(path: Path, data: bytes, *, lasting: bool = True) -> None:
    """Write a file; one that is there already is replaced, and readers never see half of either.

    Args:
        path: the file; its folder must be there.
        data: its bytes.
        lasting: whether it must survive a crash of the machine; what a cache holds need not.

    Raises: OSError; what was there before is there still.
    """
    neighbour = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        # Not by `tempfile`, whose files are private: this one is as public as any the user makes.
        with open(neighbour, "xb") as out:
            out.write(data)
            if lasting:
                out.flush()
                os.fsync(out.fileno())
        os.replace(neighbour, path)
    except BaseException:
        neighbour.unlink(missing_ok=True)
        raise
