"""Routing histograms as files: what is written reads back, what is none is refused by name."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from metainfer.ir.errors import HistogramError, TypeMismatch
from metainfer.ir.histogram import RoutingHistogram, layer_of
from metainfer.ir.synthetic_router import active_experts, draw_choices, even, zipf

GOOD = RoutingHistogram("m", ("l.0.experts", "l.1.experts"), ((3, 0, 5), (1, 1, 2)))
COUNTS = st.integers(1, 5).flatmap(
    lambda n: st.lists(
        st.lists(st.integers(0, 2**52), min_size=n, max_size=n).filter(any), min_size=1, max_size=4
    )
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(max_size=8), COUNTS, st.sampled_from(["json", "npz"]))
def test_what_is_written_reads_back(
    tmp_path: Path, model: str, counts: list[list[int]], suffix: str
) -> None:
    # Numpy's texts end where their zeros begin.
    model = model.rstrip("\0")
    rows = tuple(map(tuple, counts))
    made = RoutingHistogram(model, tuple(f"l.{i}" for i in range(len(rows))), rows)
    file = tmp_path / f"h.{suffix}"
    made.save(file)
    assert RoutingHistogram.read(file) == made
    assert [p.name for p in tmp_path.iterdir() if p.suffix not in (".json", ".npz")] == []


def damaged(**fields: Any) -> dict[str, Any]:
    good = {"model": "m", "layers": ["a", "b"], "counts": [[1, 2], [3, 4]]}
    return {k: v for k, v in {**good, **fields}.items() if v is not None}


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        (damaged(counts=[[1, 2], [3, -4]]), "b, expert 1: -4 is no count"),
        (damaged(counts=[[1, float("nan")], [3, 4]]), "a, expert 1: nan is no count"),
        (damaged(counts=[[1, float("inf")], [3, 4]]), "a, expert 1: inf is no count"),
        (damaged(counts=[[1, 2.5], [3, 4]]), r"a, expert 1: 2\.5 is no count"),
        (damaged(counts=[[1, 2**60], [3, 4]]), "a, expert 1: 1152921504606846976 is no count"),
        (damaged(counts=[[1, True], [3, 4]]), "a: True is no count"),
        (damaged(counts=[[1, "x"], [3, 4]]), "a: 'x' is no count"),
        (damaged(counts=[[0, 0], [3, 4]]), "a has no counts at all"),
        (damaged(counts=[[1, 2], [3]]), "b has counts of 1 experts, the first layer of 2"),
        (damaged(counts=[[1, 2]]), "counts of 1 layers, names of 2"),
        (damaged(counts=[]), "without layers or experts"),
        (damaged(layers=[], counts=[]), "without layers or experts"),
        (damaged(layers=["a", "a"]), "names a layer twice"),
        (damaged(layers=[1, 2]), "wanted a model's name"),
        (damaged(counts=3), "wanted a model's name"),
        (damaged(model=None), "'model' is missing"),
        ([1, 2], "'model' is missing"),
    ],
)
def test_what_is_no_histogram_is_refused(fields: Any, match: str, tmp_path: Path) -> None:
    file = tmp_path / "h.json"
    file.write_text(json.dumps(fields))
    with pytest.raises(HistogramError, match=match) as caught:
        RoutingHistogram.read(file)
    assert caught.value.origin == str(file)
    assert "metainfer record" in caught.value.advice


@pytest.mark.parametrize("suffix", ["json", "npz"])
def test_truncated_files_are_refused(suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"h.{suffix}"
    GOOD.save(file)
    whole = file.read_bytes()
    for size in (0, 1, len(whole) // 2, len(whole) - 2):
        file.write_bytes(whole[:size])
        with pytest.raises(HistogramError, match=r"no JSON|no npz|no histogram"):
            RoutingHistogram.read(file)


def test_planted_objects_are_not_unpickled(tmp_path: Path) -> None:
    file = tmp_path / "h.npz"
    np.savez(file, model=np.array("m"), layers=np.array(["a"]), counts=np.array([[print]], object))
    with pytest.raises(HistogramError, match="no npz of numbers"):
        RoutingHistogram.read(file)


def test_counts_of_whole_floats_are_counts(tmp_path: Path) -> None:
    file = tmp_path / "h.npz"
    np.savez(file, model=np.array("m"), layers=np.array(["a"]), counts=np.array([[1.0, 2.0]]))
    assert RoutingHistogram.read(file).counts == ((1, 2),)


def test_missing_files_and_other_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(HistogramError, match="cannot be read: No such file"):
        RoutingHistogram.read(tmp_path / "h.json")
    for call in (RoutingHistogram.read, GOOD.save):
        with pytest.raises(HistogramError, match=r"name it FILE.json or FILE.npz"):
            call(tmp_path / "h.csv")


def test_a_failed_write_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "h.json"
    GOOD.save(file)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(HistogramError, match="No space left"):
        RoutingHistogram("other", ("a",), ((1,),)).save(file)
    assert RoutingHistogram.read(file) == GOOD
    assert [p.name for p in tmp_path.iterdir()] == ["h.json"]


@pytest.mark.parametrize(
    ("model", "layers", "experts", "match"),
    [
        ("n", GOOD.layers, 3, "is of model 'm', wanted 'n'"),
        ("m", GOOD.layers, 4, "has 3 experts a layer, 'm' has 4"),
        ("m", (*GOOD.layers, "l.2.experts"), 3, "has 2 layers .* 3: l.2.experts is missing"),
        ("m", GOOD.layers[:1], 3, "has 2 layers .* 1: l.1.experts is unknown"),
        ("m", GOOD.layers[::-1], 3, "l.1.experts stands elsewhere"),
    ],
)
def test_histograms_of_other_models_are_refused(
    model: str, layers: tuple[str, ...], experts: int, match: str
) -> None:
    GOOD.check("m", GOOD.layers, 3)
    with pytest.raises(HistogramError, match=match):
        GOOD.check(model, layers, experts)


def test_layers_are_named_by_what_their_weights_share() -> None:
    names = [f"model.layers.3.mlp.experts.*.{n}_proj.weight" for n in ("gate", "up", "down")]
    assert layer_of(names) == "model.layers.3.mlp.experts"
    assert layer_of(["a.experts.gate_up", "a.experts.down"]) == "a.experts"


def test_draws_follow_the_histogram_without_repeating_an_expert() -> None:
    shares = zipf(32, 1.0, seed=3)
    ids = draw_choices(shares, 4000, 4, seed=5)
    assert (np.diff(np.sort(ids, axis=1), axis=1) > 0).all()
    counts = np.bincount(ids.ravel(), minlength=32)
    assert np.corrcoef(np.argsort(np.argsort(shares)), np.argsort(np.argsort(counts)))[0, 1] > 0.95
    flat = np.bincount(draw_choices(even(32), 4000, 4).ravel(), minlength=32)
    assert flat.min() > 0.8 * flat.mean()


def test_every_rank_of_an_even_router_is_busy() -> None:
    """Not the fault of routers that deal experts out in turn from the same one on all ranks."""
    slots = np.arange(256).reshape(8, 32)
    active = active_experts(draw_choices(even(256), 256, 8), slots.tolist())
    assert active.min() >= 30
    assert (
        active_experts(np.array([[0, 33], [-1, 33]]), slots.tolist()).tolist() == [1, 1] + [0] * 6
    )


def test_more_choices_than_experts_with_counts_are_refused() -> None:
    with pytest.raises(TypeMismatch, match="3 choices of 2 experts"):
        draw_choices(np.array([1.0, 0, 2]), 4, 3)
