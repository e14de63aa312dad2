"""`metainfer bench --ladder`: what each lever of a plan brings, measured on the machine at hand."""

import gc
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from metainfer.cli.load import Load
from metainfer.cli.output import (
    print_json,
    print_table,
    print_wrapped,
    progress,
    show_rate,
    show_seconds,
)
from metainfer.ir.errors import CapacityError, MetainferError, RankError, Unsupported

if TYPE_CHECKING:
    from metainfer.cli.measure import Measurement
    from metainfer.compiler.ladder import Rung
    from metainfer.ir.plan import Plan

Show = Callable[[str], None]


class Setup(NamedTuple):
    """How plans are loaded, and where the model is."""

    model: str | None
    weights: Path | None
    threads: int
    time_limit: float
    allow_machine_mismatch: bool
    allow_checkpoint_mismatch: bool


@dataclass(frozen=True)
class Climbed:
    """One rung, measured.

    Attributes:
        rung: the rung.
        found: its measurements; () where it was not measured.
        why: why it was not: it does not apply, changes nothing, or cannot be.
        failed: whether that is since it cannot be.
    """

    rung: "Rung"
    found: "tuple[Measurement, ...]" = ()
    why: str = ""
    failed: bool = False


def climb(
    path: Path, load: Load, sizes: dict[str, int], repeat: int, setup: Setup, *, as_json: bool
) -> None:
    """Measure a plan's ladder and print it.

    Args:
        path: folder of the plan.
        load: what a language model is measured with.
        sizes: of a module, those that vary.
        repeat: runs that count, of each rung.
        setup: how plans are loaded.
        as_json: whether to print JSON.

    Raises: PlanError if this is not the plan's machine; MetainferError if the model is not to be
        found, or no rung runs; CheckpointError for weights that are not there.
    """
    with progress(f"ladder of {path}") as show:
        from metainfer.compiler.verify import reference_spec
        from metainfer.hardware.machine import Machine
        from metainfer.ir.plan import Plan
        from metainfer.runtime.load import check_machine

        plan = Plan.read(path)
        machine = Machine.from_dict(dict(plan.meta["machine"]))
        check_machine(machine, allow_mismatch=setup.allow_machine_mismatch)
        spec = reference_spec(plan, setup.model, setup.weights)
        climbed = _climbed(plan, spec, load, sizes, repeat, setup, show)
    if not any(c.found for c in climbed):
        raise MetainferError("no rung of the ladder could be measured", text=_told(climbed))
    if as_json:
        print_json(_plain(plan, climbed))
        return
    typer.echo(f"{plan.meta['model']['name']} on {machine.name}, plan {plan.hash}")
    _print(climbed)


def _climbed(
    plan: "Plan", spec: Any, load: Load, sizes: dict[str, int], repeat: int, setup: Setup,
    show: Show,
) -> list[Climbed]:  # fmt: skip
    from metainfer.compiler.ladder import compile_rung, is_same, rungs_of

    climbed: list[Climbed] = []
    last: tuple[Plan, bool] | None = None
    for rung in rungs_of(plan):
        if rung.idle:
            climbed.append(Climbed(rung, why=f"does not apply: {rung.idle}"))
            continue
        show(f"{rung.lever}: compiling")
        try:
            made = compile_rung(plan, spec, rung)
            if last is not None and is_same(made, last[0]) and rung.captures == last[1]:
                climbed.append(Climbed(rung, why="changes nothing in this plan"))
                continue
            found = _measured(made, rung, load, sizes, repeat, setup, show)
        except (CapacityError, Unsupported, RankError) as error:
            climbed.append(Climbed(rung, why=f"cannot be measured: {error.what}", failed=True))
            continue
        last = made, rung.captures
        climbed.append(Climbed(rung, tuple(found)))
    return climbed


def _measured(
    plan: "Plan", rung: "Rung", load: Load, sizes: dict[str, int], repeat: int, setup: Setup,
    show: Show,
) -> "Sequence[Measurement]":  # fmt: skip
    if plan.layout.num_ranks > 1:
        return measured_by_ranks(plan, rung.captures, load, repeat, setup)
    from metainfer.cli.measure import measure_model
    from metainfer.runtime.load import load as load_plan

    model = load_plan(
        plan, setup.weights, allow_machine_mismatch=setup.allow_machine_mismatch,
        allow_checkpoint_mismatch=setup.allow_checkpoint_mismatch, num_threads=setup.threads,
    )  # fmt: skip
    if not rung.captures:
        model.launch_by_launch()
    found = measure_model(model, load, sizes, repeat, lambda text: show(f"{rung.lever}: {text}"))
    del model
    # What the rung before holds of the device is needed for the next one.
    gc.collect()
    return found


def measured_by_ranks(
    plan: "Plan", captures: bool, load: Load, repeat: int, setup: Setup
) -> "Sequence[Measurement]":
    """Measure a plan of a language model by `metainfer bench` in processes of its own.

    Raises: RankError with what that said if it fails.
    """
    with tempfile.TemporaryDirectory(prefix="metainfer-rung-") as folder:
        place = Path(folder) / "plan"
        plan.save(place)
        ranks = plan.layout.num_ranks
        command = [
            sys.executable, "-m", "metainfer", "bench", str(place), "--json",
            "--prompt-tokens", str(load.prompt_tokens), "--new-tokens", str(load.new_tokens),
            "--batch", str(load.batch), "--repeat", str(repeat),
            "--threads", str(setup.threads), "--time-limit", str(setup.time_limit),
            "--graphs" if captures else "--no-graphs",
            *(("--nproc", str(ranks)) if ranks > 1 else ()),
            *(("--weights", str(setup.weights)) if setup.weights else ()),
            *(("--allow-machine-mismatch",) if setup.allow_machine_mismatch else ()),
            *(("--allow-checkpoint-mismatch",) if setup.allow_checkpoint_mismatch else ()),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it said nothing"]
        raise RankError(f"its ranks ended with code {done.returncode}: {lines[0]}")
    return _read(json.loads(done.stdout))


def _read(data: Any) -> "list[Measurement]":
    """Measurements from what `bench --json` printed."""
    from dataclasses import fields

    from metainfer.cli.measure import Measurement

    names = [f.name for f in fields(Measurement)]
    found = []
    for m in data["measurements"]:
        values: dict[str, Any] = {name: m[name] for name in names}
        found.append(Measurement(**{**values, "seconds": tuple(m["seconds"])}))
    return found


# --- printing ------------------------------------------------------------------------------------


def _print(climbed: Sequence[Climbed]) -> None:
    measured = [c for c in climbed if c.found]
    phases = [m.phase for m in measured[0].found]
    columns = [c for phase in phases for c in (f"{phase}/s", "a step", "brings", "in all")]
    rows = []
    for number, c in enumerate(measured):
        row = [c.rung.lever]
        for index, m in enumerate(c.found):
            before = measured[max(number - 1, 0)].found[index]
            first = measured[0].found[index]
            row += [
                show_rate(m.per_second), show_seconds(m.median_seconds / m.steps),
                _times(m, before) if number else "", _times(m, first),
            ]  # fmt: skip
        rows.append(tuple(row))
    what = "; ".join(m.what for m in measured[0].found)
    print_table(
        f"{what}, median of {len(measured[0].found[0].seconds)} runs", ("with", *columns), rows
    )
    for c in climbed:
        reason = f": {c.why}" if c.why else f": {c.rung.what}"
        print_wrapped(f"{c.rung.lever}{reason}", indent=2)


def _times(m: "Measurement", other: "Measurement") -> str:
    return f"{m.per_second / other.per_second:.2f}x"


def _told(climbed: Sequence[Climbed]) -> str:
    return "\n".join(f"{c.rung.lever}: {c.why}" for c in climbed)


def _plain(plan: "Plan", climbed: Sequence[Climbed]) -> dict[str, Any]:
    first = next(c.found for c in climbed if c.found)
    return {
        "plan_hash": plan.hash,
        "model": plan.meta["model"]["name"],
        "rungs": [
            {
                "lever": c.rung.lever, "what": c.rung.what, "why_not": c.why, "failed": c.failed,
                "measurements": [
                    {
                        "phase": m.phase, "what": m.what, "unit": m.unit,
                        "per_second": m.per_second, "seconds_a_step": m.median_seconds / m.steps,
                        "of_plain": m.per_second / base.per_second,
                    }
                    for m, base in zip(c.found, first, strict=False)
                ],
            }
            for c in climbed
        ],
    }  # fmt: skip
