"""A hand that damages plans so well that their hashes agree."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Forger:
    """A copy of a plan that can be changed and sealed again."""

    path: Path

    @property
    def meta(self) -> dict[str, Any]:
        return json.loads((self.path / "plan.json").read_text())

    def seal(self, meta: dict[str, Any] | None = None) -> Path:
        """Write plan.json with the hashes of what lies in the folder now."""
        meta = meta or self.meta
        meta.pop("hash", None)
        files = {
            name: hashlib.sha256((self.path / name).read_bytes()).hexdigest()
            for name in sorted(p.name for p in self.path.iterdir() if p.name != "plan.json")
        }
        meta.pop("files", None)
        kept = {k: v for k, v in meta.items() if k not in ("timings", "created")}
        text = json.dumps([kept, files], sort_keys=True)
        sealed = {**meta, "files": files, "hash": hashlib.sha256(text.encode()).hexdigest()}
        (self.path / "plan.json").write_text(json.dumps(sealed))
        return self.path

    def edit(self, name: str, old: str, new: str) -> None:
        text = (self.path / name).read_text()
        assert old in text
        (self.path / name).write_text(text.replace(old, new, 1))
