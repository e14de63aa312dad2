"""`metainfer bench`: measured speed beside what the plan predicts and the roofline."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from metainfer.cli.load import Load
from metainfer.cli.options import (
    Json,
    Mismatch,
    Nproc,
    OtherCheckpoint,
    PlanPath,
    Threads,
    TimeLimit,
    TraceFile,
    WeightsPath,
    check_plan_path,
)
from metainfer.cli.output import (
    print_json,
    print_table,
    progress,
    show_notes,
    show_rate,
    show_seconds,
)
from metainfer.cli.ranks import as_rank, start_ranks, starts_ranks
from metainfer.ir.errors import MetainferError

if TYPE_CHECKING:
    from metainfer.cli.measure import Measurement
    from metainfer.runtime.load import LoadedModel
    from metainfer.runtime.trace import TraceEvent


def bench(
    ctx: typer.Context,
    plan: PlanPath,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="length of each prompt")] = 512,
    new_tokens: Annotated[int, typer.Option(min=2, help="tokens to generate for each")] = 64,
    batch: Annotated[int, typer.Option(min=1, help="sequences at once")] = 1,
    repeat: Annotated[int, typer.Option(min=1, help="runs, after one to warm up")] = 5,
    size: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=N", help="for a module: a size that varies; may be repeated"),
    ] = None,
    graphs: Annotated[
        bool, typer.Option(help="replay decode steps on a GPU as CUDA graphs")
    ] = True,
    ladder: Annotated[
        bool, typer.Option("--ladder", help="measure the plan without its levers, then with each")
    ] = False,
    model_argument: Annotated[
        str | None,
        typer.Option("--model", help="for --ladder: the model again, if it is a Python file"),
    ] = None,
    trace: TraceFile = None,
    threads: Threads = 0,
    nproc: Nproc = None,
    time_limit: TimeLimit = 60.0,
    weights: WeightsPath = None,
    allow_machine_mismatch: Mismatch = False,
    allow_checkpoint_mismatch: OtherCheckpoint = False,
    as_json: Json = False,
) -> None:
    """Measure a plan: prefill and decode apart, medians, with prediction and roofline.

    Prompts are random and new in each run; every prompt is computed in full, none from a cache. A
    trace is made of one more run, which does not count. The ladder compiles the model again: as
    plain PyTorch would run it, then with fusion, the plan's kernels, its formats, CUDA graphs and
    overlap, one after the other.

    Example: metainfer bench plans/smollm2-cpu --prompt-tokens 512 --new-tokens 64
    """
    check_plan_path(plan)
    sizes = _read_sizes(size)
    given = Load(prompt_tokens, new_tokens, batch)
    if ladder:
        from metainfer.cli.ladder import Setup, climb

        setup = Setup(
            model_argument,
            weights,
            threads,
            time_limit,
            allow_machine_mismatch,
            allow_checkpoint_mismatch,
        )
        climb(plan, given, sizes, repeat, setup, as_json=as_json)
        return
    if starts_ranks(plan, nproc):
        start_ranks(ctx, plan)
        return
    with as_rank(), progress(f"bench {plan}") as show:
        show("loading")
        from metainfer.cli.measure import measure_model
        from metainfer.runtime.load import load

        model = load(
            plan, weights, allow_machine_mismatch=allow_machine_mismatch,
            allow_checkpoint_mismatch=allow_checkpoint_mismatch, num_threads=threads,
            time_limit_s=time_limit,
        )  # fmt: skip
        if not graphs:
            model.launch_by_launch()
        with model:
            show_notes(model.notes)
            model.follow()
            if not model.is_leader:
                return
            found = measure_model(model, given, sizes, repeat, show)
            events = _traced(model, given, sizes, show) if trace is not None else []
            show_notes(model.run_notes)
    if as_json:
        print_json(_plain(model, found))
    else:
        _print(model, found)
    if trace is not None:
        from metainfer.cli.tracing import save_trace

        save_trace(model, events, trace)


def _traced(
    model: "LoadedModel", load: Load, sizes: dict[str, int], show: Callable[[str], None]
) -> "list[TraceEvent]":
    from metainfer.cli.measure import traced_run

    show("tracing one more run")
    return traced_run(model, *load, sizes)


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
        "ranks": model.plan.layout.num_ranks,
        "threads": torch.get_num_threads(),
        "measurements": [
            {**asdict(m), "median_seconds": m.median_seconds, "per_second": m.per_second}
            for m in found
        ],
    }


def _print(model: "LoadedModel", found: "list[Measurement]") -> None:
    import torch

    name, layout = model.plan.meta["model"]["name"], model.plan.layout
    ranks = f", {layout.num_ranks} ranks ({layout}) of" if layout.num_ranks > 1 else ","
    typer.echo(
        f"{name} on {model.machine.name}{ranks} {torch.get_num_threads()} threads, "
        f"plan {model.plan_hash}"
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
