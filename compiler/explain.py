"""explain: what a plan decided, group by group, and why. Reads plans only; computes nothing new."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any

from metainfer.compiler.crossovers import Crossover, crossovers_of
from metainfer.compiler.schedules import ScheduleReport, is_schedule, schedule_report
from metainfer.ir.errors import PlanError
from metainfer.ir.graph import Op
from metainfer.ir.plan import Plan
from metainfer.ir.strategy import PHASES
from metainfer.ir.views import VIEW_OPS
from metainfer.passes.gains import OPERATORS

PARTLY = "partly measured"
NO_WEIGHTS = "weights"  # place of the decision that says why there are none


@dataclass(frozen=True)
class SizeRow:
    """Neighbouring sizes for which one kernel is taken.

    Units: seconds, at the smallest and the largest of the sizes compared.

    Attributes:
        kernel: the kernel.
        sizes: "T<=16", or "all sizes".
        first_seconds: predicted at the smallest size of the row.
        last_seconds: predicted at the largest.
        basis: where the figures come from; "partly measured" where they come from several places.
    """

    kernel: str
    sizes: str
    first_seconds: float
    last_seconds: float
    basis: str = "analytic"


@dataclass(frozen=True)
class Refused:
    """Kernels that were not taken for one and the same reason."""

    kernels: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class GroupReport:
    """Everything decided about one group.

    Units: seconds for one execution at the sizes that the phase is judged by.

    Attributes:
        phase: "prefill", "decode" or "call".
        graph: block (or main) that holds it.
        calls: how often a step executes it.
        kind: op name, or kind of the fused group.
        result: name of its first result.
        op: text of the op; the kind of a fused group, whose text is in the plan.
        body: names of the operators that a fused group, or an op that stands for several, holds.
        source: line of the model.
        kernel: taken at the judged sizes.
        table: kernels by size.
        crossovers: of a collective, algorithms by bytes; () for other groups.
        seconds: predicted.
        roofline_seconds: what no kernel can beat.
        bound: "memory", "compute" or "latency".
        basis: where the figures come from.
        next_best: the runner-up, or "".
        gap_seconds: how much longer the runner-up takes.
        refused: kernels that cannot be taken.
        repairs: what was changed so that the kernel applies.
        generic: whether it is a fallback.
        unforced: the kernel that would be taken without --pin and --forbid, where it is faster.
        forced_seconds: what they cost.
        saved_bytes: that it moves less than its operators, each run alone, at the judged sizes.
        saved_launches: fewer than theirs.
    """

    phase: str
    graph: str
    calls: int
    kind: str
    result: str
    op: str
    body: tuple[str, ...]
    source: str
    kernel: str
    table: tuple[SizeRow, ...]
    crossovers: tuple[Crossover, ...]
    seconds: float
    roofline_seconds: float
    bound: str
    basis: str
    next_best: str
    gap_seconds: float
    refused: tuple[Refused, ...]
    repairs: tuple[str, ...]
    generic: bool
    unforced: str
    forced_seconds: float
    saved_bytes: int
    saved_launches: int

    @property
    def num_operators(self) -> int:
        """Operators of the body that move or compute numbers: views are none."""
        return sum(name not in VIEW_OPS for name in self.body)

    @property
    def loss_seconds(self) -> float:
        """Time over the roofline in a whole step."""
        return max(self.seconds - self.roofline_seconds, 0.0) * self.calls


@dataclass(frozen=True)
class Note:
    """A decision that is not about one group's kernel: equal ones once.

    Attributes:
        phases: those in which it was made.
        place: pass or graph.
        subjects: what it is about.
        chosen: what was taken.
        reason: why.
        severity: "info", "repair" or "fallback".
    """

    phases: tuple[str, ...]
    place: str
    subjects: tuple[str, ...]
    chosen: str
    reason: str
    severity: str


@dataclass(frozen=True)
class Explanation:
    """A plan explained."""

    plan_hash: str
    groups: tuple[GroupReport, ...]
    notes: tuple[Note, ...]
    schedules: tuple[ScheduleReport, ...]
    memory: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "plan_hash": self.plan_hash,
            "groups": [asdict(g) for g in self.groups],
            "notes": [asdict(n) for n in self.notes],
            "schedules": [asdict(s) for s in self.schedules],
            "memory": dict(self.memory),
        }


def explain(plan: Plan, phase: str = "", group: str = "", stage: int = 0) -> Explanation:
    """What a plan decided.

    Args:
        plan: the plan.
        phase: only this phase; "" for all.
        group: only groups whose kind, graph.kind, result or kernel matches this shell pattern.

    Raises: PlanError if the plan has no such phase, or no group matches.
    """
    phases = _phases(plan, phase)
    reports = [g for p in phases for g in group_reports(plan, p, stage)]
    found = tuple(g for g in reports if _matches(g, group))
    if group and not found:
        kinds = sorted({g.kind for g in reports})
        raise PlanError(
            f"no group of the plan matches {group!r}", advice=f"kinds: {', '.join(kinds)}"
        )
    notes = notes_of(plan, phases, stage)
    schedules = tuple(s for p in phases for s in schedules_of(plan, p, stage))
    return Explanation(plan.hash, found, notes, schedules, plan.capacity(stage))


def schedules_of(plan: Plan, phase: str, stage: int = 0) -> tuple[ScheduleReport, ...]:
    """The blocks of a phase of a stage that run on several streams."""
    calls = calls_by_graph(plan, phase, stage)
    return tuple(
        schedule_report(phase, calls, str(decision["chosen"]), data)
        for decision, data in _decisions(plan, phase, stage)
        if is_schedule(data)
    )


def ordered_phases(plan: Plan) -> tuple[str, ...]:
    """Phases in the order in which a model goes through them, also of a plan that was read."""
    known = {name: number for number, name in enumerate(PHASES)}
    return tuple(sorted(plan.phases, key=lambda name: known.get(name, len(known))))


def _phases(plan: Plan, phase: str) -> tuple[str, ...]:
    if not phase:
        return ordered_phases(plan)
    if phase not in plan.phases:
        raise PlanError(
            f"the plan has no phase {phase!r}", advice=f"it has: {', '.join(plan.phases)}"
        )
    return (phase,)


def _matches(report: GroupReport, pattern: str) -> bool:
    if not pattern:
        return True
    names = (report.kind, f"{report.graph}.{report.kind}", report.result, report.kernel)
    return any(fnmatchcase(name, pattern) for name in names)


# --- groups ------------------------------------------------------------------------------------


def group_reports(plan: Plan, phase: str, stage: int = 0) -> tuple[GroupReport, ...]:
    """What was decided about each group of a phase of a stage, in the order of its text."""
    calls = calls_by_graph(plan, phase, stage)
    # Decisions were made before rows were cut into parts, which are named %3/0, %3/1.
    bodies = {
        (graph.name, op.results[0].name.partition("/")[0]): _operators(op)
        for graph in plan.module(phase, stage).graphs
        for op in graph.ops
        if op.body is not None or op.name in OPERATORS
    }
    return tuple(
        _report(phase, calls, bodies.get((data["graph"], data["result"]), ()), decision, data)
        for decision, data in _decisions(plan, phase, stage)
        if "table" in data
    )


def _operators(op: Op) -> tuple[str, ...]:
    """What a group holds, or an op that stands for several operators."""
    inner = op.body.ops if op.body is not None else (op,)
    return tuple(name for one in inner for name in OPERATORS.get(one.name, (one.name,)))


def calls_by_graph(plan: Plan, phase: str, stage: int = 0) -> dict[str, int]:
    """How often a step runs each graph of a stage."""
    counts = {"main": 1}
    for call in plan.module(phase, stage).calls():
        name = str(call.attr["block"])
        counts[name] = counts.get(name, 0) + 1
    return counts


def _decisions(
    plan: Plan, phase: str, stage: int = 0
) -> Iterator[tuple[Mapping[str, Any], dict[str, Any]]]:
    for decision in plan.entry(phase, stage)["decisions"]:
        yield decision, {key: value for key, value in decision["data"]}


def _report(
    phase: str, calls: Mapping[str, int], body: tuple[str, ...], decision: Mapping[str, Any],
    data: Mapping[str, Any],
) -> GroupReport:  # fmt: skip
    next_best, gap = data["next_best"] or ("", 0.0)
    unforced, unforced_seconds = data["unforced"] or ("", data["seconds"])
    saves = data.get("saves", {"bytes": 0, "launches": 0})
    kind = decision["subject"].rpartition(" ")[0]
    # A kernel may run the operators of one op after each other: it is no group then.
    body = () if kind in OPERATORS and not saves["launches"] else body
    return GroupReport(
        phase=phase,
        graph=data["graph"],
        calls=calls.get(data["graph"], 0),
        kind=kind,
        result=data["result"],
        op=data["op"].partition(" loc(")[0],
        body=body,
        source=data["source"],
        kernel=decision["chosen"],
        table=_table(data["table"], data.get("bases", ())),
        crossovers=crossovers_of(data),
        seconds=data["seconds"],
        roofline_seconds=data["roofline_seconds"],
        bound=data["bound"],
        basis=data["basis"],
        next_best=next_best,
        gap_seconds=gap,
        refused=_refused(data["refused"]),
        repairs=tuple(data["repairs"]),
        generic=data["generic"],
        unforced=unforced,
        forced_seconds=data["seconds"] - unforced_seconds,
        saved_bytes=saves["bytes"],
        saved_launches=saves["launches"],
    )


def _table(rows: Sequence[Sequence[Any]], bases: Sequence[str]) -> tuple[SizeRow, ...]:
    """Merge neighbouring sizes with one kernel; the first symbol that varies is the table's."""
    symbol = _varying([env for _, env, _ in rows])
    merged: list[SizeRow] = []
    for number, (kernel, env, seconds) in enumerate(rows):
        is_last = number == len(rows) - 1
        sizes = f"{symbol}<={env[symbol]}" if symbol else "all sizes"
        first, basis = seconds, bases[number] if bases else "analytic"
        if merged and merged[-1].kernel == kernel:
            before = merged.pop()
            first = before.first_seconds
            basis = basis if basis == before.basis else _mixed(basis, before.basis)
        if is_last:
            sizes = "larger" if merged else "all sizes"
        merged.append(SizeRow(kernel, sizes, first, seconds, basis))
    return tuple(merged)


def _mixed(one: str, other: str) -> str:
    """What to say of figures of two origins: what both have in common, if they were measured."""
    first, second = one.partition(",")[0], other.partition(",")[0]
    return first if first == second else PARTLY


def _varying(envs: Sequence[Mapping[str, int]]) -> str:
    names = [name for name in envs[0] if len({env[name] for env in envs}) > 1]
    return "T" if "T" in names else next(iter(names), "")


def _refused(entries: Sequence[Mapping[str, Any]]) -> tuple[Refused, ...]:
    """Refusals, kernels with the same reason together."""
    by_reason: dict[str, list[str]] = {}
    for entry in entries:
        reasons = entry["refused"]
        device = [r for r in reasons if r.startswith("wanted device is")]
        # A kernel of another kind of device: what else does not fit says nothing more.
        parts = device or ([entry["ban"]] if entry["ban"] else []) + list(reasons)
        by_reason.setdefault("; ".join(parts), []).append(entry["kernel"])
    return tuple(Refused(tuple(names), reason) for reason, names in by_reason.items())


# --- other decisions ---------------------------------------------------------------------------


def notes_of(plan: Plan, phases: Sequence[str], stage: int = 0) -> tuple[Note, ...]:
    """Decisions about formats, packings, rewrites, ranks and splits; equal ones once."""
    found: dict[tuple[str, ...], tuple[list[str], list[str]]] = {}
    for phase in phases:
        for decision, data in _decisions(plan, phase, stage):
            if "table" in data or is_schedule(data):
                continue
            fields = ("place", "chosen", "reason", "severity")
            key = tuple(str(decision[name]) for name in fields)
            seen, subjects = found.setdefault(key, ([], []))
            if phase not in seen:
                seen.append(phase)
            if decision["subject"] not in subjects:
                subjects.append(decision["subject"])
    return tuple(
        Note(tuple(seen), place, tuple(subjects), chosen, reason, severity)
        for (place, chosen, reason, severity), (seen, subjects) in found.items()
    )


# --- summary -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class PhaseSummary:
    """One phase in figures.

    Units: seconds.

    Attributes:
        name: of the phase.
        steps: predicted steps: sizes, seconds, roofline_seconds, bytes, flops, groups.
        fallbacks: groups with a generic kernel, and what ranks could not share.
        fallback_seconds: what the groups take over their roofline in a step.
        repairs: groups that were repaired or split.
    """

    name: str
    steps: tuple[Mapping[str, Any], ...]
    fallbacks: int
    fallback_seconds: float
    repairs: int


@dataclass(frozen=True)
class Summary:
    """A plan in one page.

    Attributes:
        no_weights: why the plan was made without a checkpoint; "" if it was not.
        ranks: how ranks share the model ("pp=2 tp=4: 8 of 8 devices").
        memory: of a rank of the fullest stage.
    """

    plan_hash: str
    model: str
    kind: str
    machine: str
    devices: str
    no_weights: str
    formats: Mapping[str, str]
    ranks: str
    phases: tuple[PhaseSummary, ...]
    memory: Mapping[str, Any]
    timings: Mapping[str, float]

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def summarize(plan: Plan) -> Summary:
    """Sum a plan up."""
    meta = plan.meta
    machine = meta["machine"]
    first = meta["phases"][ordered_phases(plan)[0]]["strategy"]
    formats = {"activations": _activations(plan, first), "weights": _weight_formats(plan)}
    if meta["model"]["kind"] == "causal_lm":
        formats["kv"] = first["kv"]
    return Summary(
        plan_hash=plan.hash,
        model=meta["model"]["name"],
        kind=meta["model"]["kind"],
        machine=machine["name"],
        devices=_devices(machine),
        no_weights=_no_weights(plan),
        formats=formats,
        ranks=f"{plan.layout}: {plan.layout.num_ranks} of {len(machine['devices'])} devices",
        phases=tuple(_phase_summary(plan, phase) for phase in ordered_phases(plan)),
        memory=max(_capacities(plan), key=lambda c: int(c["total_bytes"])),
        timings=meta["timings"],
    )


def _activations(plan: Plan, strategy: Mapping[str, Any]) -> str:
    """Their type between ops, and the formats that products read them in."""
    ops = [op for g in plan.module(ordered_phases(plan)[0]).graphs for op in g.ops]
    inner = [o for op in ops for o in (op.body.ops if op.body is not None else (op,))]
    rounded = sorted({str(op.attr["format"]) for op in inner if op.name == "quantize"})
    plain = str(strategy["activations"])
    return f"{plain}, {' and '.join(rounded)} in products" if rounded else plain


def _devices(machine: Mapping[str, Any]) -> str:
    from metainfer.hardware.machine import Machine

    loaded = Machine.from_dict(dict(machine))
    return f"{loaded.num_devices} x {loaded.device(0).title}"


def _no_weights(plan: Plan) -> str:
    decisions = (d for phase in ordered_phases(plan) for d, _ in _decisions(plan, phase))
    return next((str(d["reason"]) for d in decisions if d["place"] == NO_WEIGHTS), "")


def _weight_formats(plan: Plan) -> str:
    """Formats of the weights that linears and embeddings read, with the number of tensors."""
    phase = ordered_phases(plan)[0]
    module = plan.module(phase)
    calls = calls_by_graph(plan, phase)
    counts: dict[str, int] = {}
    for graph in module.graphs:
        for weight in graph.weights:
            if len(weight.tensor.shape) > 1:
                name = str(weight.tensor.dtype)
                counts[name] = counts.get(name, 0) + calls.get(graph.name, 0)
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    return ", ".join(f"{count} x {name}" for name, count in ordered)


def _capacities(plan: Plan) -> list[Mapping[str, Any]]:
    return [plan.capacity(stage) for stage in range(plan.layout.pp)]


def _whole_steps(plan: Plan, phase: str) -> tuple[dict[str, Any], ...]:
    """Predicted steps through all stages; every replica computes one at the same time."""
    stages = [plan.entry(phase, stage)["predicted"] for stage in range(plan.layout.pp)]
    return tuple(_whole_step(parts, plan.layout.dp) for parts in zip(*stages, strict=True))


def _whole_step(parts: Sequence[Mapping[str, Any]], replicas: int) -> dict[str, Any]:
    sums = {key: sum(p[key] for p in parts) for key in parts[0] if key != "sizes"}
    return {**sums, "sizes": parts[0]["sizes"], "replicas": replicas}


def _phase_summary(plan: Plan, phase: str) -> PhaseSummary:
    stages = range(plan.layout.pp)
    groups = [g for stage in stages for g in group_reports(plan, phase, stage)]
    fallbacks = [g for g in groups if g.generic]
    notes = [n for stage in stages for n in notes_of(plan, (phase,), stage)]
    splits = [n for n in notes if n.severity == "repair"]
    shared = [n for n in notes if n.severity == "fallback"]
    return PhaseSummary(
        name=phase,
        steps=_whole_steps(plan, phase),
        fallbacks=sum(g.calls for g in fallbacks) + len(shared),
        fallback_seconds=sum(g.loss_seconds for g in fallbacks),
        repairs=sum(g.calls for g in groups if g.repairs) + len(splits),
    )
