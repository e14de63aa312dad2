"""Schedules in explain and in a timeline file: those of a plan whose rows are cut into parts."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import metainfer
from metainfer.cli.app import app
from metainfer.compiler.explain import explain
from metainfer.ir.errors import MetainferError
from metainfer.ir.options import OptionError, Options
from metainfer.ir.plan import Plan
from metainfer.models.decoder import decoder_spec
from metainfer.models.decoder_config import DecoderConfig
from metainfer.runtime.trace import PredictedEvent, PredictedTrace, write_trace

CONFIG = DecoderConfig(
    hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, intermediate=64, vocab=64,
    max_positions=64,
)  # fmt: skip


def compiled(out: Path | None = None, **options: Any) -> Plan:
    return metainfer.compile(
        decoder_spec("small", CONFIG), "2xcpu", tp=2, max_tokens=16, max_sequences=2, page_size=16,
        out=out, **options,
    )  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("plans") / "parts"
    compiled(place, micro_batches=2)
    return place


def test_a_schedule_is_explained(place: Path) -> None:
    plan = Plan.read(place)
    found = explain(plan).schedules
    assert {(s.phase, s.calls) for s in found} == {("prefill", 2), ("decode", 2)}
    for schedule in found:
        assert "in 2 parts" in schedule.chosen
        assert 0 < schedule.hidden_seconds <= schedule.meeting_seconds < schedule.seconds
        assert {s.name for s in schedule.streams} == {"main", "communication"}
        busy = {s.name: s.busy_seconds for s in schedule.streams}
        assert busy["communication"] == pytest.approx(schedule.meeting_seconds)
        assert max(busy.values()) <= schedule.seconds <= sum(busy.values()) + 1e-9
        block = plan.module(schedule.phase).graph(schedule.graph)
        made = [op.results[0].name for op in block.ops]
        assert set(schedule.critical_path) <= set(made)
        assert "measured over gloo" in schedule.source
    # The decision is told once: as a schedule.
    assert not [n for n in explain(plan).notes if "in 2 parts" in n.chosen]


def test_predictions_count_what_is_hidden(place: Path) -> None:
    for phase in ("prefill", "decode"):
        for step in Plan.read(place).meta["phases"][phase]["predicted"]:
            assert step["hidden_seconds"] <= step["meeting_seconds"]
            # What ranks exchange beside computation goes at half its speed on a CPU.
            assert step["seconds"] >= step["serial_seconds"] - step["hidden_seconds"] - 1e-9


def test_the_command_prints_and_writes_the_schedule(place: Path, tmp_path: Path) -> None:
    file = tmp_path / "line.json"
    result = CliRunner().invoke(app, ["explain", str(place), "--timeline", str(file)])
    assert result.exit_code == 0
    assert "of communication" in result.stdout
    assert "path     %" in result.stdout
    written = json.loads(file.read_text())
    assert written["otherData"]["plan_hash"] == Plan.read(place).hash
    names = {r["args"]["name"] for r in written["traceEvents"] if r["name"] == "thread_name"}
    assert names == {"main", "communication"}
    slices = [r for r in written["traceEvents"] if r["ph"] == "X"]
    assert {r["name"] for r in slices} >= {"linear", "attention"}
    for thread in {r["tid"] for r in slices}:
        own = sorted((r["ts"], r["ts"] + r["dur"]) for r in slices if r["tid"] == thread)
        assert all(a[1] <= b[0] + 1e-6 for a, b in pairwise(own))
    # Something runs on both at once.
    spans = {t: [(r["ts"], r["ts"] + r["dur"]) for r in slices if r["tid"] == t] for t in (0, 1)}
    assert any(a < d and c < b for a, b in spans[0] for c, d in spans[1])


def test_no_overlap_leaves_one_stream() -> None:
    plan = compiled(overlap=False, micro_batches=2)
    assert not explain(plan).schedules
    assert not [op for g in plan.module("prefill").graphs for op in g.ops if op.stream or op.after]


def test_the_option_is_checked() -> None:
    with pytest.raises(OptionError, match="micro_batches = -1 is negative"):
        Options(micro_batches=-1)


def test_a_timeline_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    event = PredictedEvent("linear", "prefill, main", "k", "main", 0.0, 1.0, 1.0)
    with pytest.raises(MetainferError, match="cannot be written"):
        write_trace(tmp_path / "no" / "line.json", PredictedTrace("h", (event,)))
