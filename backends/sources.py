"""Fingerprints of the kernels' sources: a plan names those that it was made for."""

import hashlib
from pathlib import Path

from metainfer.ir.errors import PlanError

# What decides a backend's numbers: its compiled sources, or the library it calls.
_FOLDERS = {"cpu": "cpu", "torch": "torch", "cuda": "torch", "triton": "triton", "ranks": "ranks"}


def fingerprint(backend: str) -> str:
    """Hash of a backend's source files, 16 hex digits; "" for backends of other packages."""
    folder = _FOLDERS.get(backend)
    if folder is None:
        return ""
    digest = hashlib.sha256()
    root = Path(__file__).parent / folder
    for path in sorted(root.rglob("*")):
        if path.suffix in (".cpp", ".h", ".py"):
            name = path.relative_to(root).as_posix()
            digest.update(name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def check_fingerprints(planned: dict[str, str]) -> None:
    """Refuse a plan whose kernels changed since it was made.

    Raises: PlanError naming the backends.
    """
    changed = [b for b, wanted in planned.items() if fingerprint(b) != wanted]
    if changed:
        raise PlanError(
            f"the kernels of {', '.join(changed)} changed since the plan was made",
            text="\n".join(f"{b}: {fingerprint(b)}, the plan says {planned[b]}" for b in changed),
            advice="compile again with the installed version",
        )
