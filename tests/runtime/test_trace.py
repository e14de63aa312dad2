import json
from pathlib import Path
from typing import Any

import pytest

from metainfer.ir.errors import MetainferError
from metainfer.runtime.trace import (
    Trace,
    TraceCounter,
    TraceEvent,
    summarize,
    summary_table,
    write_trace,
)

EVENTS = (
    TraceEvent("linear", "layer 0", "q8", 10.0, 30.0, 20.0, 60_000, 120_000),
    TraceEvent("linear", "layer 1", "q8", 45.0, 20.0, 30.0, 60_000, 120_000),
    TraceEvent("attention", "layer 0", "paged", 40.0, 5.0, 10.0, 1_000, 4_000),
    TraceEvent("sample_rows", "main", "torch", 70.0, 45.0, None, 0, 0),
)
TRACE = Trace("abc123", EVENTS, (TraceCounter("retries", 50.0, 2),), {"machine": "cpu"})


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_a_file_has_measured_beside_predicted(tmp_path: Path) -> None:
    found = read(write_trace(tmp_path / "t.json", TRACE))
    assert found["otherData"] == {"plan_hash": "abc123", "machine": "cpu"}
    slices = [e for e in found["traceEvents"] if e["ph"] == "X"]
    lanes = {
        cat: [(e["name"], e["ts"], e["dur"], e["tid"]) for e in slices if e["cat"] == cat]
        for cat in ("measured", "predicted")
    }
    assert lanes["measured"] == [
        ("linear", 10, 30, 0),
        ("attention", 40, 5, 0),
        ("linear", 45, 20, 0),
        ("sample_rows", 70, 45, 0),
    ]
    # None overlaps the one before, although the second linear began before it.
    assert lanes["predicted"] == [
        ("linear", 10, 20, 1),
        ("attention", 40, 10, 1),
        ("linear", 50, 30, 1),
    ]
    assert slices[0]["args"] == {
        "place": "layer 0", "kernel": "q8", "measured_us": 30, "predicted_us": 20,
        "bytes": 60_000, "flops": 120_000,
    }  # fmt: skip
    counters = [e for e in found["traceEvents"] if e["ph"] == "C"]
    assert [(c["name"], c["ts"], c["args"]) for c in counters] == [("retries", 50, {"value": 2})]
    names = [e["args"]["name"] for e in found["traceEvents"] if e["name"] == "thread_name"]
    assert names == ["measured", "predicted"]


def test_tracks_are_processes(tmp_path: Path) -> None:
    events = tuple(TraceEvent("op", "", "k", 0, 1, 2, 0, 0, track=f"rank {r}") for r in (1, 0))
    found = read(write_trace(tmp_path / "t.json", Trace("h", events)))
    processes = [e for e in found["traceEvents"] if e["name"] == "process_name"]
    assert [(e["pid"], e["args"]["name"]) for e in processes] == [(0, "rank 0"), (1, "rank 1")]
    assert sorted((e["pid"], e["ts"]) for e in found["traceEvents"] if e["ph"] == "X") == [
        (0, 0), (0, 0), (1, 0), (1, 0),
    ]  # fmt: skip


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.json", TRACE)
    before = path.read_bytes()
    for value in (float("nan"), object()):
        bad = Trace("abc123", EVENTS, (), {"value": value})
        with pytest.raises(MetainferError, match="not plain data"):
            write_trace(path, bad)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["t.json"]


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(MetainferError, match="cannot be written") as caught:
        write_trace(tmp_path / "none" / "t.json", TRACE)
    assert "none" in str(caught.value)
    (tmp_path / "folder").mkdir()
    with pytest.raises(MetainferError, match="cannot be written"):
        write_trace(tmp_path / "folder", TRACE)
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


def test_metadata_cannot_claim_another_plan(tmp_path: Path) -> None:
    with pytest.raises(MetainferError, match="plan_hash"):
        write_trace(tmp_path / "t.json", Trace("a", (), metadata={"plan_hash": "b"}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("start_us", -1.0),
        ("measured_us", float("nan")),
        ("predicted_us", float("inf")),
        ("bytes", -1),
    ],
)
def test_impossible_numbers_are_refused(field: str, value: float) -> None:
    numbers = {"start_us": 0.0, "measured_us": 1.0, "predicted_us": 1.0, "bytes": 0, "flops": 0}
    with pytest.raises(MetainferError, match=f"{field} of 'linear'"):
        TraceEvent("linear", "layer 0", "q8", **{**numbers, field: value})  # type: ignore[arg-type]


def test_sums_by_name() -> None:
    rows = summarize(EVENTS)
    assert [(r.name, r.count, r.measured_us, r.share) for r in rows] == [
        ("linear", 2, 50.0, 0.5),
        ("sample_rows", 1, 45.0, 0.45),
        ("attention", 1, 5.0, 0.05),
    ]
    assert [r.ratio for r in rows] == [1.0, None, 0.5]
    assert rows[0].gbps == pytest.approx(120_000 / 50e-6 / 1e9)
    assert rows[0].gflops == pytest.approx(240_000 / 50e-6 / 1e9)


def test_events_without_a_prediction_do_not_bend_the_ratio() -> None:
    events = (*EVENTS[:1], TraceEvent("linear", "", "q8", 0, 1000.0, None, 0, 0))
    (row,) = summarize(events)
    assert row.measured_us == 1030.0
    assert row.ratio == 1.5


def test_the_table() -> None:
    lines = summary_table(TRACE).splitlines()
    assert lines[0] == "plan abc123"
    assert len({len(line) for line in lines[1:]}) == 1
    assert lines[2].split() == ["linear", "2", "50.0", "50.0%", "50.0", "1.00", "2.40", "4.80"]
    assert lines[3].split()[4:6] == ["-", "-"]
    assert lines[-1].split()[:6] == ["total", "4", "100.0", "100.0%", "60.0", "0.92"]
    assert summary_table(Trace("h", ())).splitlines()[-1].split()[:3] == ["total", "0", "0.0"]
