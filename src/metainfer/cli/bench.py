"""`metainfer bench`: measured speed beside what the plan predicts and the roofline."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from metainfer.cli.options import (
    Json,
    Mismatch,
    OtherCheckpoint,
    PlanPath,
    Threads,
    TraceFile,
    WeightsPath,
    check_plan_path,
)
from metainfer.cli.output import print_json, print_table, progress, show_rate, show_seconds
from metainfer.ir.errors import MetainferError

if TYPE_CHECKING:
    from metainfer.cli.measure import Measurement
    from metainfer.runtime.load import LoadedModel


def bench(
    plan: PlanPath,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="length of each prompt")] = 512,
    new_tokens: Annotated[int, typer.Option(min=2, help="tokens to generate for each")] = 64,
    batch: Annotated[int, typer.Option(min=1, help="sequences at once")] = 1,
    repeat: Annotated[int, typer.Option(min=1, help="runs, after one to warm up")] = 5,
    size: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=N", help="for a module: a size that varies; may be repeated"),
    ] = None,
    trace: TraceFile = None,
    threads: Threads = 0,
    weights: WeightsPath = None,
    allow_machine_mismatch: Mismatch = False,
    allow_checkpoint_mismatch: OtherCheckpoint = False,
    as_json: Json = False,
) -> None:
    """Measure a plan: prefill and decode apart, medians, with prediction and roofline.

    Prompts are random and new in each run; every prompt is computed in full, none from a cache. A
    trace is made of one more run, which does not count.

    Example: metainfer bench plans/smollm2-cpu --prompt-tokens 512 --new-tokens 64
    """
    check_plan_path(plan)
    sizes = _read_sizes(size)
    with progress(f"bench {plan}") as show:
        show("loading")
        from metainfer.cli.measure import bench_language_model, bench_module, traced_run
        from metainfer.runtime.load import load

        model = load(
            plan, weights, allow_machine_mismatch=allow_machine_mismatch,
            allow_checkpoint_mismatch=allow_checkpoint_mismatch, num_threads=threads,
        )  # fmt: skip
        if model.is_language_model:
            if sizes:
                raise MetainferError("--size is for modules", advice="give --prompt-tokens")
            found = bench_language_model(model, prompt_tokens, new_tokens, batch, repeat, show)
        else:
            found = bench_module(model, sizes, repeat, show)
        if trace is not None:
            show("tracing one more run")
        events = traced_run(model, prompt_tokens, new_tokens, batch, sizes) if trace else []
    if as_json:
        print_json(_plain(model, found))
    else:
        _print(model, found)
    if trace is not None:
        from metainfer.cli.tracing import save_trace

        save_trace(model, events, trace)


def _read_sizes(texts: list[str] | None) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for text in texts or []:
        name, _, number = text.partition("=")
        if not name or not number.isdecimal() or int(number) < 1:
            raise MetainferError(f"--size {text} is not NAME=N", advice="for example --size B=4")
        sizes[name] = int(number)
    return sizes


def _plain(model: "LoadedModel", found: "list[Measurement]") -> dict[str, Any]:
    from dataclasses import asdict

    import torch

    return {
        "plan_hash": model.plan_hash,
        "model": model.plan.meta["model"]["name"],
        "machine": model.machine.name,
        "threads": torch.get_num_threads(),
        "measurements": [
            {**asdict(m), "median_seconds": m.median_seconds, "per_second": m.per_second}
            for m in found
        ],
    }


def _print(model: "LoadedModel", found: "list[Measurement]") -> None:
    import torch

    name = model.plan.meta["model"]["name"]
    typer.echo(
        f"{name} on {model.machine.name}, {torch.get_num_threads()} threads, plan {model.plan_hash}"
    )
    head = ("phase", "what", "measured", "range", "a step", "predicted", "roofline", "reached")
    rows = [_row(m) for m in found]
    unit = found[0].unit
    print_table(f"{unit}/s, median of {len(found[0].seconds)} runs", head, rows, left=2)


def _row(m: "Measurement") -> tuple[str, ...]:
    median = m.median_seconds
    rates = [m.count / s for s in m.seconds]
    return (
        m.phase,
        m.what,
        show_rate(m.per_second),
        f"{show_rate(min(rates))}-{show_rate(max(rates))}",
        show_seconds(median / m.steps),
        show_rate(m.count / m.predicted_seconds),
        show_rate(m.count / m.roofline_seconds),
        f"{m.roofline_seconds / median:.0%}",
    )
