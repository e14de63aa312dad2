"""The ladder of a plan: the same model without any of its levers, and with one more at each rung.

It starts as plain PyTorch would: library kernels, one launch for each op, weights in the type of
the activations, launch by launch. What the last rung makes is the plan itself.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from metainfer.backends.registry import installed
from metainfer.compiler.api import compile as compile_plan
from metainfer.hardware.machine import Machine
from metainfer.ir.errors import MetainferError
from metainfer.ir.options import Options
from metainfer.ir.plan import Plan
from metainfer.models.spec import ModelSpec

PLAIN = "plain"
# What turns several ops into one; without them each op is one launch.
_FUSING = ("merge_linears", "seam", "fuse")
_LIBRARIES = ("torch", "cuda")


@dataclass(frozen=True)
class Rung:
    """One step of the ladder.

    Attributes:
        lever: what is switched on: "plain", "fusion", "kernels", "formats", "graphs", "overlap".
        what: the same in words.
        options: of the compilation, with this lever and those before it.
        captures: whether decode steps are replayed as graphs.
        idle: why the lever does not apply to the plan; "" if it does.
    """

    lever: str
    what: str
    options: Options
    captures: bool
    idle: str = ""


def rungs_of(plan: Plan) -> tuple[Rung, ...]:
    """The rungs of a plan, from the plain start to the plan itself."""
    machine = Machine.from_dict(dict(plan.meta["machine"]))
    is_gpu = machine.device(0).kind == "gpu"
    own = _as_laid_out(plan)
    options, captures = _plain(plan, own), False
    rungs = [Rung(PLAIN, _plain_text(options), options, captures)]
    for lever, what, fields, idle in _levers(plan, own, options, is_gpu=is_gpu):
        options = replace(options, **{name: getattr(own, name) for name in fields})
        captures = captures or (lever == "graphs" and is_gpu)
        rungs.append(Rung(lever, what, options, captures, idle))
    return tuple(rungs)


def _as_laid_out(plan: Plan) -> Options:
    """The plan's options, with the layout of ranks that it came to."""
    layout = plan.layout
    asked = Options.from_dict(dict(plan.meta["options"]))
    return replace(
        asked, pp=layout.pp, dp=layout.dp, tp=layout.tp, ep=layout.ep, strict=False,
        page_size=int(plan.meta["capacity"]["page_size"]),
    )  # fmt: skip


def _plain(plan: Plan, own: Options) -> Options:
    """Nothing but library kernels on numbers that nobody rounded."""
    first = plan.meta["phases"][plan.phases[0]]["strategy"]["activations"]
    wide = "bf16" if first == "bf16" else "f32"
    others = tuple(k.name for k in installed().kernels.all() if _is_ours(k.backend))
    return replace(
        own, activations=wide, weights=wide, kv=wide, overlap=False, micro_batches=0,
        compress_collectives="none", tuned="none", pins=(),
        forbids=tuple(dict.fromkeys((*own.forbids, *others))),
        skip_passes=tuple(dict.fromkeys((*own.skip_passes, *_FUSING))),
    )  # fmt: skip


def _is_ours(backend: str) -> bool:
    """Whether a kernel is neither a library's nor a collective, for which there is no other."""
    return backend not in (*_LIBRARIES, "ranks")


def _plain_text(options: Options) -> str:
    return f"PyTorch's kernels, {options.weights} weights, each op a launch"


def _levers(
    plan: Plan, own: Options, plain: Options, *, is_gpu: bool
) -> Iterator[tuple[str, str, tuple[str, ...], str]]:
    """(lever, in words, options that it gives back, why it does not apply)."""
    yield "fusion", "several ops in one launch", ("skip_passes",), ""
    yield "kernels", "the kernels of the plan", ("forbids", "pins", "tuned"), ""
    narrow = ("activations", "weights", "kv", "compress_collectives")
    yield "formats", _formats(plan), narrow, ""
    idle = "" if is_gpu else "a CPU runs its bound programs as they are"
    if not idle and "decode" not in plan.phases:
        idle = "only decode steps are captured"
    yield "graphs", "decode steps replayed as CUDA graphs", (), idle
    idle = "" if own.overlap else "the plan was compiled with --no-overlap"
    if plan.layout.num_ranks == 1:
        idle = "one rank communicates with nobody"
    yield "overlap", "communication beside computation", ("overlap", "micro_batches"), idle


def _formats(plan: Plan) -> str:
    from metainfer.compiler.explain import summarize

    formats: Mapping[str, str] = summarize(plan).formats
    return "; ".join(f"{name} {text}" for name, text in formats.items())


def compile_rung(plan: Plan, spec: ModelSpec, rung: Rung) -> Plan:
    """The plan of a rung, for the plan's own machine.

    Raises: MetainferError if the model cannot be compiled so: wide weights may not fit.
    """
    machine = Machine.from_dict(dict(plan.meta["machine"]))
    made = compile_plan(spec, machine, options=rung.options)
    if rung.lever == PLAIN and made.phases != plan.phases:
        raise MetainferError(
            f"the model has the phases {', '.join(made.phases)}, the plan {', '.join(plan.phases)}",
            advice="give the model that the plan was made from: --model MODEL",
        )
    return made


def is_same(one: Plan, other: Plan) -> bool:
    """Whether two plans run the same text."""
    return dict(one.texts) == dict(other.texts)
