"""Arguments that several verbs share, and how texts become options of a compilation."""

from pathlib import Path
from typing import Annotated

import typer

from metainfer.ir.errors import MetainferError, PlanError
from metainfer.ir.options import ACTIVATIONS, KV, WEIGHTS

PlanPath = Annotated[Path, typer.Argument(metavar="PLAN", help="folder of a plan")]
Json = Annotated[bool, typer.Option("--json", help="print JSON for machines")]
Hardware = Annotated[
    str, typer.Option("--hw", metavar="HW", help="a machine's file, or a known name (`hw list`)")
]
Threads = Annotated[int, typer.Option(min=0, help="processor threads, 0 for all")]
Nproc = Annotated[
    int | None,
    typer.Option("--nproc", min=1, help="start so many ranks, as many as the plan is for"),
]
TimeLimit = Annotated[
    float,
    typer.Option(
        "--time-limit", min=0.1, metavar="SECONDS", help="how long ranks wait for each other"
    ),
]
WeightsPath = Annotated[
    Path | None, typer.Option("--weights", help="checkpoint, instead of the one the plan names")
]
Mismatch = Annotated[
    bool, typer.Option(help="run although this machine lacks what the plan counts on")
]
OtherCheckpoint = Annotated[
    bool,
    typer.Option(
        "--allow-checkpoint-mismatch",
        help="take other weights of the same model than the plan was compiled with",
    ),
]
TraceFile = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        metavar="FILE.json",
        envvar="METAINFER_TRACE",
        help="write measured beside predicted times, for Perfetto",
    ),
]
WeightFormat = Annotated[
    str, typer.Option("--weights", metavar="FORMAT", help=f"of weights: {', '.join(WEIGHTS)}")
]
ActivationFormat = Annotated[
    str, typer.Option(metavar="FORMAT", help=f"between ops: {', '.join(ACTIVATIONS)}")
]
KvFormat = Annotated[
    str, typer.Option("--kv", metavar="FORMAT", help=f"of cached keys and values: {', '.join(KV)}")
]
Pins = Annotated[
    list[str] | None,
    typer.Option("--pin", metavar="GROUP=KERNEL", help="take this kernel; may be repeated"),
]
Forbids = Annotated[
    list[str] | None,
    typer.Option("--forbid", metavar="KERNEL", help="never take it; may be repeated"),
]


def read_pins(texts: list[str] | None) -> tuple[tuple[str, str], ...]:
    """Pairs (group, kernel).

    Raises: MetainferError for a text that is no GROUP=KERNEL, or a group pinned twice.
    """
    pins: dict[str, str] = {}
    for text in texts or []:
        group, equals, kernel = text.partition("=")
        if not (group and equals and kernel):
            raise MetainferError(
                f"--pin {text} is not GROUP=KERNEL",
                advice="for example --pin linear=cpu.linear_w4; `metainfer explain` names both",
            )
        if group in pins:
            raise MetainferError(f"--pin {group} is given twice", advice="drop one of them")
        pins[group] = kernel
    return tuple(pins.items())


def check_plan_path(path: Path) -> None:
    """Refuse what is no plan before torch is imported for it.

    Raises: PlanError that says how to compile, if a model was given.
    """
    if (path / "plan.json").is_file():
        return
    looks_like_model = path.suffix in (".py", ".gguf") or (path / "config.json").is_file()
    if looks_like_model or (not path.exists() and "/" not in str(path)):
        what = "is a model" if looks_like_model else "is no folder of a plan"
        raise PlanError(
            f"{path} {what}: this verb takes a plan",
            advice=f"compile first: metainfer compile {path} --hw cpu --out PLAN",
        )
    raise PlanError(
        f"no plan at {path}", advice="make one: metainfer compile MODEL --hw HW --out PLAN"
    )
