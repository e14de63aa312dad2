"""`metainfer compile`: a model for a machine, as a plan."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from metainfer.cli.options import (
    ActivationFormat,
    Forbids,
    Hardware,
    Json,
    KvFormat,
    Pins,
    WeightFormat,
    read_pins,
)
from metainfer.cli.output import (
    print_json,
    print_table,
    print_wrapped,
    progress,
    show_bytes,
    show_rate,
    show_seconds,
)
from metainfer.ir.errors import PlanError

if TYPE_CHECKING:
    from metainfer.compiler.explain import PhaseSummary, Summary


def compile_model(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="a model.py, a known name, a Hugging Face folder, or a GGUF file",
        ),
    ],
    hw: Hardware = "cpu",
    out: Annotated[
        Path | None, typer.Option(help="folder to write; plans/MODEL-HW if not given")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="replace a plan that is there")] = False,
    weights: WeightFormat = "auto",
    activations: ActivationFormat = "auto",
    kv: KvFormat = "auto",
    exact: Annotated[
        bool, typer.Option("--exact", help="only kernels that add no rounding of their own")
    ] = False,
    max_tokens: Annotated[int, typer.Option(help="largest step of a prefill")] = 512,
    max_sequences: Annotated[int, typer.Option(help="sequences in a step")] = 8,
    max_context: Annotated[int, typer.Option(help="longest sequence, 0 for the model's own")] = 0,
    page_size: Annotated[int, typer.Option(help="tokens a page, 0 to let the compiler choose")] = 0,
    memory_fraction: Annotated[
        float, typer.Option(help="part of the device's memory to use")
    ] = 0.9,
    tp: Annotated[int, typer.Option(help="ranks that share every layer, 0 to let it choose")] = 0,
    dp: Annotated[int, typer.Option(help="replicas, each with its own sequences")] = 0,
    pp: Annotated[int, typer.Option(help="pipeline stages")] = 0,
    ep: Annotated[int, typer.Option(help="ranks that whole experts are spread over")] = 0,
    routing: Annotated[
        str, typer.Option(metavar="FILE", help="histogram that experts are placed by")
    ] = "",
    replicas: Annotated[int, typer.Option(help="copies of experts beside the first")] = 0,
    overlap: Annotated[
        bool, typer.Option(help="communication beside computation where that saves time")
    ] = True,
    micro_batches: Annotated[
        int, typer.Option(help="parts of a step's rows for that, 0 to let the compiler choose")
    ] = 0,
    compress_collectives: Annotated[
        str,
        typer.Option(metavar="FORMAT", help="of sums between ranks: none, fp8 (changes numbers)"),
    ] = "none",
    tuned: Annotated[
        str,
        typer.Option(metavar="FILE", help="measured times (`tune`); none: not those beside HW"),
    ] = "",
    strict: Annotated[
        bool, typer.Option("--strict", help="refuse generic kernels: exit code 3 if one is needed")
    ] = False,
    pin: Pins = None,
    forbid: Forbids = None,
    skip_pass: Annotated[
        list[str] | None, typer.Option(help="leave a pass out; may be repeated")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compile a model for a machine and write the plan.

    Example: metainfer compile models/smollm2.py --hw hardware/8xpcie.toml
    """
    begun = time.perf_counter()
    # Cheap input is checked before torch is imported.
    from metainfer.hardware.load import load_machine
    from metainfer.ir.options import Options

    options = Options(
        activations=activations, weights=weights, exact=exact, kv=kv, max_tokens=max_tokens,
        max_sequences=max_sequences, max_context=max_context, page_size=page_size,
        memory_fraction=memory_fraction, tp=tp, dp=dp, pp=pp, ep=ep, routing=routing,
        replicas=replicas, overlap=overlap, micro_batches=micro_batches,
        compress_collectives=compress_collectives, tuned=tuned, strict=strict,
        pins=read_pins(pin), forbids=tuple(forbid or ()), skip_passes=tuple(skip_pass or ()),
    )  # fmt: skip
    machine = load_machine(hw)
    if out is not None:
        _refuse_taken(out, force)
    with progress(f"compiling {model}") as show:
        show("importing torch")
        from metainfer.compiler.api import compile as compile_plan
        from metainfer.compiler.explain import summarize

        place = out or _default_place(model, machine.name, force)
        plan = compile_plan(
            model, machine, options=options, out=place, overwrite=force, progress=show
        )
    summary = summarize(plan)
    times = _times(summary, time.perf_counter() - begun)
    if as_json:
        print_json({**summary.to_dict(), "path": str(place), "seconds": times})
        return
    print_summary(summary)
    typer.echo(
        f"compiled in {times['wall']:.1f} s: torch {times['torch']:.1f} s, capture "
        f"{times['capture']:.1f} s, the compiler's own part {times['own']:.1f} s"
    )
    typer.echo(f"wrote {place}, plan {summary.plan_hash}")


def _default_place(model: str, machine: str, force: bool) -> Path:
    from metainfer.compiler.sources import resolve_model

    place = Path("plans") / f"{resolve_model(model).name}-{machine}"
    _refuse_taken(place, force)
    return place


def _refuse_taken(place: Path, force: bool) -> None:
    """Refuse before the work what writing would refuse after it."""
    if place.exists() and not (force and (place / "plan.json").is_file()):
        raise PlanError(
            f"{place} exists already", advice="give another --out, or --force to replace a plan"
        )


def _times(summary: "Summary", wall: float) -> dict[str, float]:
    total, capture = summary.timings["total"], summary.timings["capture"]
    return {
        "wall": wall,
        "torch": max(wall - total, 0.0),
        "capture": capture,
        "own": total - capture,
    }


def print_summary(summary: "Summary") -> None:
    """Print a plan in one page: formats, predicted steps, memory, what was not ideal."""
    typer.echo(f"{summary.model} ({summary.kind}) for {summary.machine}: {summary.devices}")
    print_wrapped(f"ranks: {summary.ranks}")
    if summary.no_weights:
        print_wrapped(summary.no_weights)
    formats = "; ".join(f"{name} {what}" for name, what in summary.formats.items())
    print_wrapped(f"formats: {formats}")
    rows = [_step_row(phase, step) for phase in summary.phases for step in phase.steps]
    head = ("phase", "sizes", "predicted", "tok/s", "roofline", "of roofline", "groups")
    print_table("Predicted steps", head, rows, left=2)
    print_memory(summary.memory)
    for phase in summary.phases:
        typer.echo(_remark(phase))


def _step_row(phase: "PhaseSummary", step: Any) -> tuple[str, ...]:
    sizes, seconds, least = step["sizes"], step["seconds"], step["roofline_seconds"]
    tokens = sizes.get("T")
    return (
        phase.name,
        " ".join(f"{name}={size}" for name, size in sizes.items()) + _each(step["replicas"]),
        show_seconds(seconds),
        show_rate(tokens * step["replicas"] / seconds) if tokens else "",
        show_seconds(least),
        f"{least / seconds:.0%}",
        str(step["groups"]),
    )


def _each(replicas: int) -> str:
    return f" x {replicas}" if replicas > 1 else ""


def print_memory(memory: Any) -> None:
    """Print the account of a device's memory, term by term."""
    rows = [(t["name"], show_bytes(t["bytes"]), t["detail"]) for t in memory["terms"]]
    rows.append(("total", show_bytes(memory["total_bytes"]), _budget(memory)))
    print_table("Memory of a device", ("term", "bytes", "detail"), rows)
    if memory["page_size"]:
        typer.echo(
            f"holds {memory['max_sequences']} sequences at once, {memory['full_sequences']} of "
            f"them of the full {memory['max_context']} tokens"
        )


def _budget(memory: Any) -> str:
    return f"of {show_bytes(memory['budget_bytes'])} that the plan may use"


def _remark(phase: "PhaseSummary") -> str:
    if not phase.fallbacks and not phase.repairs:
        return f"{phase.name}: no fallback, no repair"
    lost = f", about {show_seconds(phase.fallback_seconds)} a step" if phase.fallbacks else ""
    return f"{phase.name}: {phase.fallbacks} fallbacks{lost}; {phase.repairs} repairs"
