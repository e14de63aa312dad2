"""A plan: the compiled module of each phase as text, with everything that led to it. Pure data.

On disk a folder: ``plan.json`` (schema version, hashes, decisions), one ``stage0.<phase>.mir`` per
phase, and ``constants.npz`` for tensors that no checkpoint holds. Reading one parses text and
numbers only.
"""

import hashlib
import io
import json
import tokenize
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np

from metainfer.ir.errors import PlanError
from metainfer.ir.graph import Module
from metainfer.ir.parser import parse_module
from metainfer.ir.strategy import PHASES, Layout
from metainfer.ir.whole_folder import sweep, write_folder

SCHEMA = 1
META = "plan.json"
CONSTANTS = "constants.npz"

# What the libraries that read zip archives and arrays raise for bytes that are neither.
_DAMAGED = (
    ValueError, KeyError, EOFError, OSError, TypeError, SyntaxError, NotImplementedError,
    RuntimeError, MemoryError, OverflowError, tokenize.TokenError, zipfile.BadZipFile, zlib.error,
)  # fmt: skip
_COUNTS = ("max_tokens", "max_sequences", "max_context", "page_size", "num_pages")
_TEXTS = ("name", "kind", "argument", "checkpoint", "checkpoint_hash", "tokenizer")
_REQUIRED: dict[str, type] = {
    "model": dict,
    **{f"model.{name}": str for name in _TEXTS},
    "model.renames": dict,
    "model.inputs": list,
    "machine": dict,
    "options": dict,
    "ranks": dict,
    **{f"ranks.{name}": int for name in ("pp", "dp", "tp", "ep", "count")},
    "phases": dict,
    "capacity": dict,
    **{f"capacity.{name}": int for name in _COUNTS},
    "kernel_sources": dict,
}


@dataclass(frozen=True)
class Plan:
    """A compiled model.

    Attributes:
        meta: content of plan.json, "hash" and "files" apart.
        texts: file name -> text of a module.
        constants: tensors that no checkpoint holds, by full weight name.
    """

    meta: Mapping[str, Any]
    texts: Mapping[str, str]
    constants: Mapping[str, np.ndarray] = field(default_factory=dict[str, np.ndarray])

    @property
    def phases(self) -> tuple[str, ...]:
        """Phases in the order in which a model goes through them."""
        return tuple(p for p in PHASES if p in self.meta["phases"])

    @property
    def layout(self) -> Layout:
        """How ranks share the model."""
        return Layout(**{name: int(self.meta["ranks"][name]) for name in ("pp", "dp", "tp", "ep")})

    def entry(self, phase: str, stage: int = 0) -> Mapping[str, Any]:
        """File, strategy, decisions and predicted steps of a phase of a pipeline stage.

        Raises: PlanError if the plan has no such phase or stage.
        """
        if phase not in self.meta["phases"]:
            raise PlanError(
                f"the plan has no phase {phase!r}", advice=f"it has: {', '.join(self.phases)}"
            )
        first = self.meta["phases"][phase]
        entries = [first, *first.get("later", ())]
        if not 0 <= stage < len(entries):
            raise PlanError(f"the plan has {len(entries)} stages, none is number {stage}")
        return cast(Mapping[str, Any], entries[stage])

    def capacity(self, stage: int = 0) -> Mapping[str, Any]:
        """Memory of a rank of a stage, term by term."""
        first = self.meta["capacity"]
        return cast(Mapping[str, Any], [first, *first.get("later", ())][stage])

    def module(self, phase: str, stage: int = 0) -> Module:
        """The compiled module of a phase of a pipeline stage.

        Raises: PlanError if the plan has no such phase or stage.
        """
        file = str(self.entry(phase, stage)["file"])
        if file not in self._modules:
            self._modules[file] = parse_module(self.texts[file], origin=file)
        return self._modules[file]

    @cached_property
    def _modules(self) -> dict[str, Module]:
        return {}

    @cached_property
    def hash(self) -> str:
        """Fingerprint of everything in the plan, 16 hex digits."""
        return _plan_hash(self.meta, _file_hashes(self._files()))[:16]

    def _files(self) -> dict[str, bytes]:
        files = {name: text.encode() for name, text in self.texts.items()}
        if self.constants:
            files[CONSTANTS] = _npz(self.constants)
        return files

    def save(self, path: Path, *, overwrite: bool = False) -> None:
        """Write the folder: complete or not at all.

        What processes that were killed while writing the same folder left there is removed.
        Raises: PlanError if something else is in the way, or the disk refuses.
        """
        sweep(path)
        if path.exists() and not (overwrite and _is_plan(path)):
            raise PlanError(
                f"{path} exists already", advice="give another --out, or --force to replace a plan"
            )
        files = self._files()
        hashes = _file_hashes(files)
        meta = {**self.meta, "files": hashes, "hash": _plan_hash(self.meta, hashes)}
        files[META] = (json.dumps(meta, indent=1, sort_keys=True) + "\n").encode()
        try:
            write_folder(path, files)
        except OSError as error:
            raise PlanError(
                f"the plan could not be written to {path}: {error.strerror or error}",
                advice="nothing was left there; free space or choose another --out",
            ) from error

    @staticmethod
    def read(path: Path) -> "Plan":
        """Read a folder, checking schema and hashes. No code from it is run.

        Raises: PlanError naming the file and the difference.
        """
        meta = _read_meta(path)
        hashes = _file_table(path, meta.pop("files", None))
        claimed = meta.pop("hash", "")
        files: dict[str, bytes] = {}
        for name, wanted in hashes.items():
            files[name] = _read_checked(path, name, wanted)
        if _plan_hash(meta, hashes) != claimed:
            raise PlanError(
                f"{path / META} was changed after the plan was made",
                advice="compile again; decisions are changed with --pin and --forbid, not by hand",
            )
        constants = _read_npz(path, files.pop(CONSTANTS)) if CONSTANTS in files else {}
        texts = {name: _decoded(path / name, data) for name, data in files.items()}
        _check_meta(path, meta, texts)
        return Plan(meta, texts, constants)


def _is_plan(path: Path) -> bool:
    return (path / META).is_file()


def _plan_hash(meta: Mapping[str, Any], hashes: Mapping[str, str]) -> str:
    # NOTE: timings of the compilation differ from run to run; equal inputs must give equal hashes.
    kept = {k: v for k, v in meta.items() if k not in ("timings", "created")}
    text = json.dumps([kept, dict(hashes)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _file_hashes(files: Mapping[str, bytes]) -> dict[str, str]:
    return {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}


def _npz(arrays: Mapping[str, np.ndarray]) -> bytes:
    # np.savez stamps the time into the archive; equal plans must be equal bytes.
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in sorted(arrays):
            entry = io.BytesIO()
            np.save(entry, arrays[name], allow_pickle=False)
            archive.writestr(zipfile.ZipInfo(f"{name}.npy"), entry.getvalue())
    return buffer.getvalue()


def _read_npz(path: Path, data: bytes) -> dict[str, np.ndarray]:
    """Arrays of numbers: pickled objects, which could run code, are refused."""
    arrays: dict[str, np.ndarray] = {}
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for name in archive.namelist():
                entry = io.BytesIO(archive.read(name))
                arrays[name.removesuffix(".npy")] = np.lib.format.read_array(
                    entry, allow_pickle=False
                )
    except _DAMAGED as error:
        raise PlanError(
            f"{path / CONSTANTS} holds no arrays of numbers: {error}", advice="compile again"
        ) from error
    return arrays


def _decoded(file: Path, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise PlanError(f"{file} is no text: {error}", advice="compile again") from error


def _file_table(path: Path, table: Any) -> dict[str, str]:
    if isinstance(table, dict) and all(isinstance(v, str) for v in table.values()):
        return cast(dict[str, str], table)
    raise _misses(path, "files")


def _check_meta(path: Path, meta: Mapping[str, Any], texts: Mapping[str, str]) -> None:
    """Require all that readers of a plan take for given."""
    for place, kind in _REQUIRED.items():
        found: Any = meta
        for key in place.split("."):
            found = found.get(key) if isinstance(found, dict) else None
        if not isinstance(found, kind) or isinstance(found, bool):
            raise _misses(path, place)
    phases = meta["phases"]
    if not phases or not set(phases) <= set(PHASES):
        raise _misses(path, "phases")
    for phase, entry in phases.items():
        if not isinstance(entry, dict) or not isinstance(entry.get("file"), str):
            raise _misses(path, f"phases.{phase}.file")
        later = entry.get("later", [])
        if not isinstance(later, list) or not all(isinstance(e, dict) for e in later):
            raise _misses(path, f"phases.{phase}.later")
        if len(later) != meta["ranks"]["pp"] - 1:
            raise _misses(path, "ranks.pp")
        for file in (entry["file"], *(e.get("file") for e in later)):
            if file not in texts:
                raise PlanError(f"the plan at {path} lacks {file}", advice="compile again")


def _misses(path: Path, place: str) -> PlanError:
    return PlanError(
        f"{path / META} is no plan: {place} is not as it must be", advice="compile again"
    )


def _read_meta(path: Path) -> dict[str, Any]:
    file = path / META
    if not file.is_file():
        raise PlanError(
            f"no plan at {path}: {META} is missing",
            advice="metainfer compile MODEL --hw HW --out PATH",
        )
    try:
        meta = json.loads(file.read_text())
    except (ValueError, OSError, RecursionError) as error:
        raise PlanError(f"{file} cannot be read: {error}", advice="compile again") from error
    if not isinstance(meta, dict) or "schema" not in meta:
        raise PlanError(f"{file} is no plan: it states no schema", advice="compile again")
    if meta["schema"] != SCHEMA:
        raise PlanError(
            f"{file} has schema {meta['schema']}, this version reads {SCHEMA}",
            advice=f"metainfer {meta.get('version', '?')} wrote it: compile again with this one",
        )
    return cast(dict[str, Any], meta)


def _read_checked(path: Path, name: str, wanted: str) -> bytes:
    if Path(name).name != name or name == ".." or "\0" in name or (path / name).is_symlink():
        raise PlanError(
            f"the plan at {path} names a file outside itself: {name!r}", advice="compile again"
        )
    try:
        data = (path / name).read_bytes()
    except (OSError, ValueError) as error:
        raise PlanError(
            f"{path / name} cannot be read: {getattr(error, 'strerror', None) or error}",
            advice="compile again",
        ) from error
    found = hashlib.sha256(data).hexdigest()
    if found != wanted:
        raise PlanError(
            f"{path / name} was changed after the plan was made",
            text=f"sha256 {found[:16]}..., the plan says {wanted[:16]}...",
            advice="compile again; decisions are changed with --pin and --forbid, not by hand",
        )
    return data
