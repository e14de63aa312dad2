"""Plans that are of another version, changed by hand, damaged, or made for another machine."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_forger import Forger

import metainfer
import metainfer.backends.sources
from metainfer.ir.errors import HardwareError, MetainferError, ParseError, PlanError
from metainfer.ir.plan import Plan
from metainfer.runtime.load import load

FILES = ("plan.json", "stage0.decode.mir", "stage0.prefill.mir")
HASH_ERROR = "was changed after the plan was made"


def refusal(path: Path, kind: type[MetainferError] = PlanError) -> MetainferError:
    """The error of loading, which comes before any weight is asked for."""

    def no_weights(name: str) -> np.ndarray:
        raise AssertionError(f"{name} was read")

    with pytest.raises(kind) as caught:
        load(path, no_weights)
    assert caught.value.exit_code == 2
    assert caught.value.advice
    return caught.value


def test_the_forged_copy_is_good_until_it_is_changed(forged, made: Plan) -> None:
    assert Plan.read(forged.seal()).hash == made.hash


@pytest.mark.parametrize("schema", [0, 2, "1", None, [1]])
def test_another_schema(forged, schema: Any) -> None:
    path = forged.seal({**forged.meta, "schema": schema, "version": "9.9"})
    error = refusal(path)
    assert f"has schema {schema}, this version reads 1" in error.what
    assert "metainfer 9.9 wrote it: compile again" in error.advice


@pytest.mark.parametrize("file", FILES)
def test_every_file_is_guarded(forged, file: str) -> None:
    path = forged.path / file
    text = path.read_text()
    path.write_text(text.replace("tiny", "tini", 1))
    error = refusal(forged.path)
    assert f"{file} {HASH_ERROR}" in error.what
    assert "--pin and --forbid" in error.advice


def test_constants_are_guarded(plan: Path, made: Plan, tmp_path: Path) -> None:
    with_table = Plan(made.meta, made.texts, {"table": np.arange(12.0, dtype=np.float32)})
    with_table.save(tmp_path / "plan")
    file = tmp_path / "plan" / "constants.npz"
    data = bytearray(file.read_bytes())
    at = data.index(np.float32(7).tobytes())
    data[at : at + 4] = np.float32(8).tobytes()
    file.write_bytes(data)
    error = refusal(tmp_path / "plan")
    assert f"constants.npz {HASH_ERROR}" in error.what
    assert "sha256" in error.text


@pytest.mark.parametrize("file", FILES)
def test_files_that_are_gone(forged, file: str) -> None:
    (forged.path / file).unlink()
    assert file in refusal(forged.path).what


def test_no_plan_at_all(tmp_path: Path) -> None:
    for path in (tmp_path / "nothing", tmp_path):
        error = refusal(path)
        assert "no plan at" in error.what
        assert "metainfer compile" in error.advice


@pytest.mark.parametrize(
    "text",
    ["", "{", "null", "[]", "3", '"schema"', "{}", '{"schema": 1}', "\x00", "[" * 100_000],
)
def test_a_meta_file_that_is_none(forged, text: str) -> None:
    (forged.path / "plan.json").write_text(text)
    assert "plan.json" in refusal(forged.path).what


def _places(value: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    if len(path) == 2 or not isinstance(value, dict):
        return [path]
    return [path, *(p for k, v in value.items() for p in _places(v, (*path, k)))]


REQUIRED = [
    "model", "model.name", "model.checkpoint", "model.renames", "model.inputs", "machine",
    "phases", "capacity", "capacity.max_tokens", "capacity.page_size", "kernel_sources",
]  # fmt: skip


@pytest.mark.parametrize("wrong", [None, "absent", True, ["x"], 1.5])
@pytest.mark.parametrize("place", REQUIRED)
def test_entries_that_are_missing_or_of_another_kind(forged, place: str, wrong: Any) -> None:
    meta = forged.meta
    *outer, last = place.split(".")
    inner = meta
    for key in outer:
        inner = inner[key]
    if wrong == "absent":
        del inner[last]
    elif wrong == ["x"] and place == "model.inputs":
        inner[last] = {}
    else:
        inner[last] = wrong
    error = refusal(forged.seal(meta))
    assert f"{place} is not as it must be" in error.what


def test_phases_that_are_not_there(forged) -> None:
    meta = forged.meta
    meta["phases"]["decode"]["file"] = "stage0.other.mir"
    assert "lacks stage0.other.mir" in refusal(forged.seal(meta)).what
    meta["phases"] = {"training": meta["phases"]["decode"]}
    assert "phases is not as it must be" in refusal(forged.seal(meta)).what
    meta["phases"] = {}
    assert "phases is not as it must be" in refusal(forged.seal(meta)).what


def test_constants_that_are_no_archive(forged, made: Plan) -> None:
    for data in (b"", b"PK\x03\x04", b"\x93NUMPY\x01\x00", b"x" * 100):
        (forged.path / "constants.npz").write_bytes(data)
        assert "constants.npz holds no arrays of numbers" in refusal(forged.seal()).what


# --- other machines and kernels ------------------------------------------------------------------


def _with_device(meta: dict[str, Any], **changes: Any) -> dict[str, Any]:
    meta["machine"]["devices"][0]["device"].update(changes)
    return meta


def test_a_plan_that_counts_on_features(forged) -> None:
    features = ["amx", "avx2", "f16c", "fma"]
    error = refusal(forged.seal(_with_device(forged.meta, features=features)))
    assert "was made for cpu, and this machine differs" in error.what
    assert "rank 0: missing features amx" in error.text
    assert "--allow-machine-mismatch" in error.advice


def test_a_plan_that_counts_on_memory(forged) -> None:
    error = refusal(forged.seal(_with_device(forged.meta, memory_bytes=10**18)))
    assert "counts on 1000000000.0 GB of memory" in error.text


def test_a_mismatch_may_be_insisted_on(forged) -> None:
    path = forged.seal(_with_device(forged.meta, memory_bytes=10**18))
    assert load(path, allow_machine_mismatch=True).max_context == 32


@pytest.mark.parametrize("machine", [{}, {"devices": 3}, {"name": 5, "devices": [[]]}])
def test_a_machine_that_is_none(forged, machine: Any) -> None:
    error = refusal(forged.seal({**forged.meta, "machine": machine}), MetainferError)
    assert isinstance(error, HardwareError | PlanError)


def test_kernels_that_changed(plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metainfer.backends.sources, "fingerprint", lambda backend: "f" * 16)
    error = refusal(plan)
    assert error.what == "the kernels of cpu changed since the plan was made"
    assert "ffffffffffffffff, the plan says" in error.text
    assert "compile again" in error.advice


# --- random damage -------------------------------------------------------------------------------


@st.composite
def damages(draw: st.DrawFn) -> Callable[[bytes], bytes]:
    where = draw(st.floats(0, 1))
    piece = draw(st.binary(max_size=12))
    length = draw(st.integers(0, 40))

    def damage(data: bytes) -> bytes:
        at = int(where * len(data))
        return data[:at] + piece + data[at + length :]

    return damage


@given(file=st.sampled_from((*FILES, "constants.npz")), damage=damages(), sealed=st.booleans())
def test_any_damage_reads_or_raises_our_errors(
    made: Plan, tmp_path_factory: pytest.TempPathFactory, file: str,
    damage: Callable[[bytes], bytes], sealed: bool,
) -> None:  # fmt: skip
    """With hashes that agree too, so that what is behind them is reached."""
    path = tmp_path_factory.mktemp("damaged") / "plan"
    Plan(made.meta, made.texts, {"table": np.arange(3.0)}).save(path)
    target = path / file
    whole = target.read_bytes()
    target.write_bytes(damage(whole))
    changed = target.read_bytes() != whole
    try:
        if sealed:
            Forger(path).seal()
    except ValueError:
        sealed = False
    try:
        read = metainfer.Plan.read(path)
        for phase in read.phases:
            read.module(phase)
    except (PlanError, ParseError):
        return
    else:
        assert sealed or not changed or file == "plan.json"
    finally:
        shutil.rmtree(path.parent)


LEAF = st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.just([]) | st.just({})


@given(data=st.data())
def test_any_entry_of_another_kind_reads_or_raises_our_errors(
    made: Plan, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("damaged") / "plan"
    made.save(path)
    meta = json.loads((path / "plan.json").read_text())
    inner: Any = meta
    place = data.draw(st.sampled_from([p for p in _places(meta) if p]))
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = data.draw(LEAF)
    try:
        load(Forger(path).seal(meta), lambda name: np.zeros(0), allow_machine_mismatch=True)
    except MetainferError:
        return
    finally:
        shutil.rmtree(path.parent)
