"""Loading a plan runs no code from it, though its hashes agree.

Every place that can carry text or bytes is given something that would leave a file if anything
evaluated, imported, unpickled or executed it.
"""

import importlib
import io
import json
import os
import pickle
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plan_forger import Forger

from metainfer.ir.errors import MetainferError, PlanError
from metainfer.ir.parser import parse_module
from metainfer.ir.plan import Plan
from metainfer.ir.printer import print_module
from metainfer.runtime.load import load
from metainfer.runtime.sampling import SamplingParams


class Bomb:
    """Leaves a file when it is unpickled."""

    def __init__(self, sentinel: Path) -> None:
        self.sentinel = sentinel

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return Path.touch, (self.sentinel,)


@pytest.fixture
def sentinel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file that planted code would make; commands that name it are stopped as well."""
    path = tmp_path / "sentinel"

    def guard(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def guarded(*arguments: Any, **options: Any) -> Any:
            assert "sentinel" not in str(arguments), f"a plan reached {name}{arguments}"
            return real(*arguments, **options)

        monkeypatch.setattr(owner, name, guarded)

    guard(os, "system")
    guard(subprocess, "Popen")
    guard(importlib, "import_module")
    yield path
    assert not path.exists()


def snippets(sentinel: Path) -> list[str]:
    return [
        f"__import__('pathlib').Path({str(sentinel)!r}).touch()",
        f"{{0.__class__.__init__.__globals__}} $(touch {sentinel}) `touch {sentinel}`",
        f"'; open({str(sentinel)!r}, 'w'); '",
        f"!!python/object/apply:os.system ['touch {sentinel}']",
    ]


def attempt(path: Path, weights: Any = None) -> MetainferError | None:
    """Load and run; the error if it is one of ours. Others escape."""
    try:
        model = load(path, weights, allow_machine_mismatch=True)
        model.engine().generate([[1, 2, 3]], SamplingParams(max_tokens=2, temperature=0.0))
    except MetainferError as error:
        return error
    return None


def test_the_bomb_would_go_off(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Bomb(tmp_path / "x")))
    assert (tmp_path / "x").exists()


def test_a_whole_plan_loads_and_runs(plan: Path, sentinel: Path) -> None:
    assert attempt(plan) is None


# --- constants -----------------------------------------------------------------------------------


def _archive(name: str, data: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(name, data)
    return buffer.getvalue()


def _pickled_array(sentinel: Path) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.array([Bomb(sentinel)], dtype=object), allow_pickle=True)
    return buffer.getvalue()


def _header(sentinel: Path) -> bytes:
    """An array file whose header is an expression, not a literal."""
    text = f"{{'descr': __import__('pathlib').Path({str(sentinel)!r}).touch(), 'shape': ()}}\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


def test_constants_with_pickles_are_refused(forged: Forger, sentinel: Path) -> None:
    array, plain = _pickled_array(sentinel), pickle.dumps(Bomb(sentinel))
    files = [
        _archive("table.npy", array),
        _archive("table", array),
        _archive("table.npy", plain),
        _archive("table.npy", _header(sentinel)),
        array,
        plain,
    ]
    for data in files:
        (forged.path / "constants.npz").write_bytes(data)
        error = attempt(forged.seal())
        assert isinstance(error, PlanError)
        assert "constants.npz holds no arrays of numbers" in error.what


def test_names_in_constants_lead_nowhere(forged: Forger, sentinel: Path, listing) -> None:
    buffer = io.BytesIO()
    np.save(buffer, np.zeros(3))
    before = listing(sentinel.parent)
    for name in ("../sentinel.npy", "../sentinel", f"{sentinel}.npy", str(sentinel)):
        (forged.path / "constants.npz").write_bytes(_archive(name, buffer.getvalue()))
        assert attempt(forged.seal()) is None
        assert listing(sentinel.parent) == before


def test_a_checkpoint_that_is_a_pickle_is_refused(forged: Forger, sentinel: Path) -> None:
    folder = forged.path.parent / "weights"
    folder.mkdir()
    data = pickle.dumps(Bomb(sentinel))
    for name in ("pytorch_model.bin", "model.pt", "model.safetensors", "model.gguf"):
        (folder / name).write_bytes(data)
        for place in (folder / name, folder):
            meta = forged.meta
            meta["model"]["checkpoint"] = str(place)
            error = attempt(forged.seal(meta))
            assert error is not None
            assert error.advice
        (folder / name).unlink()


# --- names of files ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["../outside.mir", "/etc/hostname", "..", ".", "", "a/../../outside.mir", "a\x00b"]
)
def test_files_outside_are_not_read(forged: Forger, sentinel: Path, name: str) -> None:
    (forged.path.parent / "outside.mir").write_text("module m {\n}\n")
    meta = forged.meta
    meta["phases"]["decode"]["file"] = name
    forged.seal(meta)
    sealed = forged.meta
    sealed["files"][name] = "0" * 64
    (forged.path / "plan.json").write_text(json.dumps(sealed))
    error = attempt(forged.path)
    assert isinstance(error, PlanError)
    assert "names a file outside itself" in error.what or "cannot be read" in error.what


def test_links_out_of_the_plan_are_not_followed(forged: Forger, sentinel: Path) -> None:
    inside = forged.path / "stage0.decode.mir"
    outside = forged.path.parent / "outside.mir"
    inside.rename(outside)
    inside.symlink_to(outside)
    error = attempt(forged.path)
    assert isinstance(error, PlanError)
    assert "names a file outside itself: 'stage0.decode.mir'" in error.what


def test_python_files_in_a_plan_are_not_imported(forged: Forger, sentinel: Path) -> None:
    code = f"open({str(sentinel)!r}, 'w')\n"
    for name in ("__init__.py", "conftest.py", "stage0.py", "kernels.py", "sitecustomize.py"):
        (forged.path / name).write_text(code)
    assert attempt(forged.seal()) is None
    (forged.path / "stage0.decode.mir").write_text(code)
    assert attempt(forged.seal()) is not None


# --- text ----------------------------------------------------------------------------------------


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, str):
        yield path
    if not isinstance(value, dict | list):
        return
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _leaves(inner, (*path, key))


def test_every_text_of_the_meta_file(forged: Forger, tiny: Path, sentinel: Path) -> None:
    """Each text in turn, with the weights given, so that loading goes as far as it can."""
    meta = forged.meta
    names = [p for p in _leaves(meta) if p[0] not in ("files", "hash")]
    # Decisions are alike: the first of each phase stands for all.
    places = [p for p in names if "decisions" not in p or p[p.index("decisions") + 1] == 0]
    places = [p for p in places if "predicted" not in p]
    assert len(places) > 60
    outcomes = []
    for number, place in enumerate(places):
        changed = json.loads(json.dumps(meta))
        inner = changed
        for key in place[:-1]:
            inner = inner[key]
        inner[place[-1]] = snippets(sentinel)[number % 4]
        outcomes.append(attempt(forged.seal(changed), tiny))
    assert any(outcomes)
    assert not all(outcomes)
    assert not sentinel.exists()


def test_weights_that_a_plan_points_to_are_data(forged: Forger, sentinel: Path) -> None:
    whole = json.dumps(forged.meta)
    for snippet in snippets(sentinel):
        for field in ("checkpoint", "tokenizer", "argument", "name"):
            meta = json.loads(whole)
            meta["model"][field] = snippet
            error = attempt(forged.seal(meta))
            assert (error is not None) == (field == "checkpoint"), (field, error)


def test_a_python_file_as_argument_is_not_run(forged: Forger, sentinel: Path) -> None:
    file = forged.path.parent / "model.py"
    file.write_text(f"open({str(sentinel)!r}, 'w')\n")
    for field in ("checkpoint", "tokenizer", "argument"):
        meta = forged.meta
        meta["model"][field] = str(file)
        attempt(forged.seal(meta))
        assert not sentinel.exists()


@pytest.mark.parametrize(
    "kernel", ["os.system", "../x", "builtins.eval", "cpu.__class__", "torch.hub.load", "cpu."]
)
def test_kernels_come_from_the_registry_only(forged: Forger, sentinel: Path, kernel: str) -> None:
    forged.edit("stage0.decode.mir", "cpu.embedding_f32", kernel)
    error = attempt(forged.seal())
    assert error is not None
    assert "unknown kernel" in error.what or "line" in error.origin, str(error)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("cpu.rms_norm", "cpu.linear_f32", "it implements linear, the group is rms_norm"),
        ("cpu.linear_f32}", "cpu.rms_norm}", "it implements rms_norm, the group is linear"),
        ("cpu.linear_f32}", "torch.linear_f32}", "wanted operand 1 as plain, found cpu.f32_n16"),
    ],
)
def test_kernels_of_other_groups_are_refused(
    forged: Forger, sentinel: Path, old: str, new: str, words: str
) -> None:
    """A kernel that is given what it does not expect would write where it must not."""
    forged.edit("stage0.decode.mir", old, new)
    error = attempt(forged.seal())
    assert isinstance(error, PlanError)
    assert words in str(error)
    assert "main" in error.what


EDITS = [
    ("eps = 1e-06", "eps = {code}"),
    ("eps = 1e-06", 'eps = "{code}"'),
    ("rms_norm(", "os.system("),
    ("rms_norm(", "__import__("),
    ("fused[rope_kv_write]", "fused[{code}]"),
    ('layout = "cpu.f32_n16"', 'layout = "{code}"'),
    ('as "cpu.f32_n16"', 'as "{code}"'),
    ("dim T in [1, 2]", "dim T in [1, {code}]"),
    ("dim(T)", "dim({code})"),
    ("start = 0", "start = {code}"),
    ("f32[300,48]", "{code}[300,48]"),
    ("f32[300,48]", "f32[300,{code}]"),
    ('loc("models/decoder.py"', 'loc("{code}"'),
    ("@model.norm.weight", '@"{code}"'),
    ("module tiny", "module {code}"),
    ("step\n", "import os\n"),
]


@pytest.mark.parametrize(("old", "new"), EDITS, ids=[f"{i}" for i in range(len(EDITS))])
def test_every_place_of_the_text(forged: Forger, sentinel: Path, old: str, new: str) -> None:
    whole = (forged.path / "stage0.decode.mir").read_text()
    for snippet in snippets(sentinel):
        (forged.path / "stage0.decode.mir").write_text(whole)
        code = snippet.replace('"', "'").replace("\\", "")
        forged.edit("stage0.decode.mir", old, new.replace("{code}", code))
        error = attempt(forged.seal())
        assert error is not None or old.startswith("loc("), new
        if error is not None:
            assert error.exit_code in (2, 3)


def test_texts_survive_printing_unevaluated(made: Plan, sentinel: Path) -> None:
    """A planted location is the same text after a round trip."""
    for snippet in snippets(sentinel):
        code = snippet.replace('"', "'")
        text = made.texts["stage0.decode.mir"].replace("models/decoder.py", code)
        assert code in print_module(parse_module(text, origin="planted"))
