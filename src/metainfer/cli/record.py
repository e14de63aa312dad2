"""`metainfer record`: run prompts through a plan and write which experts were chosen."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from metainfer.cli.options import (
    Json,
    Mismatch,
    OtherCheckpoint,
    PlanPath,
    Threads,
    WeightsPath,
    check_plan_path,
)
from metainfer.cli.output import print_json, print_table, progress
from metainfer.ir.errors import MetainferError

if TYPE_CHECKING:
    from metainfer.ir.histogram import RoutingHistogram
    from metainfer.runtime.load import LoadedModel
    from metainfer.runtime.record import RecordingRunner


def record(
    plan: PlanPath,
    prompts: Annotated[Path, typer.Option(metavar="FILE", help="a prompt on each line, UTF-8")],
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="where the histogram goes: .json or .npz")
    ],
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="longest answer; its tokens are counted too")
    ] = 32,
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--raw", help="as chat messages, if the model has a template"),
    ] = None,
    force: Annotated[bool, typer.Option(help="replace a histogram that is there")] = False,
    threads: Threads = 0,
    weights: WeightsPath = None,
    allow_machine_mismatch: Mismatch = False,
    allow_checkpoint_mismatch: OtherCheckpoint = False,
    as_json: Json = False,
) -> None:
    """Count how often each layer's router chooses each expert, for placing them.

    Example: metainfer record plans/qwen3_moe-cpu --prompts questions.txt --out routing.json
    """
    check_plan_path(plan)
    texts = _read_prompts(prompts)
    _check_out(out, force)
    with progress(f"record {plan}") as show:
        show("loading")
        from metainfer.runtime.load import load

        model = load(
            plan, weights, allow_machine_mismatch=allow_machine_mismatch,
            allow_checkpoint_mismatch=allow_checkpoint_mismatch, num_threads=threads,
        )  # fmt: skip
        if not model.is_language_model:
            raise MetainferError(
                "the plan is of a module, which answers no prompts",
                advice="record a language model with experts",
            )
        runner = _runner(model)
        show(f"{len(texts)} prompts")
        _answer(model, runner, texts, max_new_tokens, chat)
    found = runner.histogram(str(model.plan.meta["model"]["name"]))
    found.save(out)
    if as_json:
        print_json(_plain(model, runner, found, out))
        return
    _print(runner, found)
    typer.echo(f"wrote {out}")


def _read_prompts(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise MetainferError(
            f"the prompts at {path} cannot be read: {getattr(error, 'strerror', None) or error}",
            advice="give a text file in UTF-8 with a prompt on each line",
        ) from error
    texts = [line for line in lines if line.strip()]
    if not texts:
        raise MetainferError(f"{path} holds no prompts", advice="write one on each line")
    return texts


def _check_out(out: Path, force: bool) -> None:
    """Refuse before the prompts have run what could not be written after them."""
    if out.suffix not in (".json", ".npz"):
        raise MetainferError(f"--out {out} is no histogram", advice="name it .json or .npz")
    if out.exists() and not force:
        raise MetainferError(
            f"{out} exists already", advice="give another --out, or --force to replace it"
        )


def _runner(model: "LoadedModel") -> "RecordingRunner":
    from metainfer.runtime.record import RecordingRunner, routed_layers

    phases = model.plan.phases
    return RecordingRunner(model, {p: routed_layers(model.executor(p).flat) for p in phases})


def _answer(
    model: "LoadedModel",
    runner: "RecordingRunner",
    texts: list[str],
    max_new_tokens: int,
    chat: bool | None,
) -> None:
    """Answer all prompts, greedily; requests share steps as they do when serving."""
    from metainfer.cli.run import encode_prompt
    from metainfer.runtime.engine import Engine
    from metainfer.runtime.sampling import SamplingParams

    engine = Engine(runner, model.engine().tokenizer)
    ids = [encode_prompt(engine, text, chat, None) for text in texts]
    engine.generate(ids, SamplingParams(temperature=0.0, max_tokens=max_new_tokens))


def _print(runner: "RecordingRunner", found: "RoutingHistogram") -> None:
    counts = found.array()
    even = counts.sum(axis=1) / found.num_experts
    rows = [
        (
            layer,
            f"{int((row > 0).sum())}",
            f"{int(row.max()):,}",
            f"{int(row.argmax())}",
            f"{row.max() / mean:.2f}",
        )
        for layer, row, mean in zip(found.layers, counts, even, strict=True)
    ]
    head = ("layer", "active", "heaviest", "expert", "to even share")
    title = f"{found.model}: {runner.num_tokens:,} tokens, {found.num_experts} experts a layer"
    print_table(title, head, rows)


def _plain(
    model: "LoadedModel", runner: "RecordingRunner", found: "RoutingHistogram", out: Path
) -> dict[str, Any]:
    counts = found.array()
    return {
        "plan_hash": model.plan_hash,
        "model": found.model,
        "tokens": runner.num_tokens,
        "experts": found.num_experts,
        "layers": len(found.layers),
        "active_experts": (counts > 0).sum(axis=1).tolist(),
        "file": str(out),
    }
