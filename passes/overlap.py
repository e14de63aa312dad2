"""overlap: communication beside computation, on streams of their own.

    before: %1 = linear(%0, @w) : bf16[T,64]
            %2 = all_reduce(%1) {axis = "tp", ranks = 8} : bf16[T,64]
            %3 = silu(%2) : bf16[T,64]
            %4 = linear(%3, @v) : bf16[T,64]
    after:  ... %2/0 = all_reduce(%1/0) ... stream 1 after %1/0
                %1/1 = linear(%0/1, @w) ...
                %2/1 = all_reduce(%1/1) ... stream 1 after %1/1
                %3/0 = silu(%2/0) ... after %2/0

A block alone is mostly one chain, in which nothing can run beside a collective. So the rows of a
run of ops are cut into parts (`passes.row_parts`): from one product and its collective to all that
follows attention, a micro-batch. Each form is scheduled by the cost model (`passes.list_schedule`);
the shortest is taken where it gains enough, and said to be with its gain. An expert of all tokens
may run beside the routed ones, on a third stream, and leaves their group for it where that pays
(`passes.open_experts`).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from metainfer.ir.graph import Graph, Module, Op
from metainfer.ir.streams import meets, roots_of
from metainfer.ir.timeline import Task, simulate
from metainfer.passes.candidates import leading_symbol, needs_kernel, sample_sizes
from metainfer.passes.list_schedule import Schedule, schedule
from metainfer.passes.open_experts import opened
from metainfer.passes.overlap_prices import Pricing
from metainfer.passes.overlap_report import report_kept, report_overlapped
from metainfer.passes.row_parts import Parts, row_ops, split
from metainfer.passes.select import choose_kernels, group_subject
from metainfer.passes.step_tasks import tasks_of
from metainfer.passes.stream_order import on_streams
from metainfer.passes.target import Report, Target

_COUNTS = (2, 4)  # parts that are tried: the first for every region,
_FURTHER = 4  # the others for so many of the best
_LEAST_GRAIN = 16
# Forms that promise less are not worth the second stream: a cost model is not that exact.
_LEAST_GAIN = 0.02


@dataclass(frozen=True)
class Form:
    """One way to run a block.

    Attributes:
        ops: what it runs, in an order that respects what each reads.
        tasks: of the ops, at the sizes that the block is judged at.
        numbers: task of each op, -1 for views.
        found: their schedule.
        region: numbers of the block's ops whose rows are cut.
        parts: how; None where they are whole.
    """

    ops: tuple[Op, ...]
    tasks: tuple[Task, ...]
    numbers: tuple[int, ...]
    found: Schedule
    region: frozenset[int] = frozenset()
    parts: Parts | None = None


def overlap(module: Module, target: Target) -> Module:
    """Put the ops of blocks on streams where that saves time."""
    if not target.options.overlap:
        return module
    for graph in module.graphs:
        if not any(op.is_call for op in graph.ops):
            module = module.with_graph(_Search(graph, module, target).run())
    return module


class _Search:
    """The forms of one block."""

    def __init__(self, graph: Graph, module: Module, target: Target) -> None:
        self.graph, self.target, self._module = graph, target, module
        self.limits = module.limits()
        self.symbol = leading_symbol(self.limits)
        self.env = sample_sizes(target, self.limits)[-1]
        self.pricing = Pricing(target, self.limits)
        self.movable = _beside_experts(graph)
        self._joins: dict[tuple[object, ...], Op] = {}

    def run(self) -> Graph:
        """The graph on streams, or as it is where that gains nothing."""
        apart = self._apart()
        if not any(meets(op) for op in self.graph.ops) and not self.movable and apart is None:
            return self.graph
        whole = self._form(self.graph.ops, self.env)
        serial = sum(t.seconds for t in whole.tasks)
        best, forced = self._best()
        other = apart._best()[0] if apart is not None else None
        shortest = min(f.found.seconds for f in (best, other) if f is not None)
        if not forced and shortest > serial * (1 - _LEAST_GAIN):
            report_kept(self.graph, self.target, self.env, serial, shortest)
            return self.graph
        if apart is None or other is None or shortest == best.found.seconds:
            return self._taken(best, serial)
        apart._report_new(self.graph)
        return apart._taken(other, serial, is_apart=True)

    def _best(self) -> tuple[Form, bool]:
        """The form of the shortest schedule, and whether it must be taken: parts are asked for."""
        forms = list(self._forms())
        forced = self.target.options.micro_batches > 1 and len(forms) > 1
        return min(forms[1:] if forced else forms, key=lambda f: f.found.seconds), forced

    # --- experts apart ----------------------------------------------------------------------

    def _apart(self) -> "_Search | None":
        """The same block with experts apart from what is added, if that lets more run beside."""
        graph = opened(self.graph)
        if graph is None or len(_beside_experts(graph)) <= len(self.movable):
            return None
        quiet = replace(self.target, report=Report())
        ops = tuple(self._with_kernel(op, graph, quiet) for op in graph.ops)
        return _Search(replace(graph, ops=ops), self._module, self.target)

    def _with_kernel(self, op: Op, graph: Graph, target: Target) -> Op:
        if op.choices or not needs_kernel(op):
            return op
        return choose_kernels(op, graph, target, self.limits)

    def _report_new(self, before: Graph) -> None:
        """Say what the parts of opened groups run, in place of what was said of the groups."""
        known = {op.results[0].name: op for op in before.ops if op.results}
        for op in self.graph.ops:
            old = known.get(op.results[0].name) if op.results else None
            if old == op or not needs_kernel(op):
                continue
            if old is not None:
                self.target.report.drop(f"select {before.name}", group_subject(old))
            choose_kernels(replace(op, choices=()), self.graph, self.target, self.limits)

    # --- forms -----------------------------------------------------------------------------

    def _forms(self) -> Iterator[Form]:
        """The block whole, with the rows of each region cut once, and the best of those further."""
        yield self._form(self.graph.ops, self.env)
        if self.symbol is None:
            return
        asked = self.target.options.micro_batches
        first, *more = (asked,) if asked else _COUNTS
        found = list(self._cuts(self._regions(self.symbol), first))
        yield from found
        best = sorted(found, key=lambda f: f.found.seconds)[:_FURTHER]
        for count in more:
            yield from self._cuts((f.region for f in best), count)

    def _cuts(self, regions: Iterable[frozenset[int]], count: int) -> Iterator[Form]:
        """Forms with the rows of each region in so many parts."""
        asked, rows = self.target.options.micro_batches, self.env[str(self.symbol)]
        if count < 2 or (rows < count * _LEAST_GRAIN and not asked):
            return
        parts = Parts(str(self.symbol), count, 1 if asked else rows // count)
        for region in regions:
            form = self._cut(region, parts, self.env)
            if form is not None:
                yield form

    def _regions(self, symbol: str) -> Iterator[frozenset[int]]:
        """Runs of ops with independent rows, from a product to a collective or the end."""
        ops, allowed = self.graph.ops, row_ops(self.graph, symbol)
        meeting = [i for i, op in enumerate(ops) if i in allowed and meets(op)]
        if not meeting:
            return
        firsts = {i for i in allowed if i - 1 not in allowed} | {self._maker(i) for i in meeting}
        lasts = {*meeting, max(allowed)}
        seen: set[frozenset[int]] = set()
        for first in sorted(firsts):
            for last in sorted(lasts):
                region = frozenset(i for i in allowed if first <= i <= last)
                if region not in seen and region & set(meeting):
                    seen.add(region)
                    yield region

    def _maker(self, number: int) -> int:
        """Number of the op that makes what another reads, views passed over."""
        roots, ops = roots_of(self.graph.ops), self.graph.ops
        name = ops[number].operands[0].name
        name = roots.get(name, name)
        makers = {v.name: i for i, op in enumerate(ops) for v in op.results}
        return makers.get(name, number)

    def _cut(self, region: frozenset[int], parts: Parts, env: Mapping[str, int]) -> Form | None:
        cpu = any(
            self.target.kernels.get(c.kernel).backend == "cpu"
            for i in region
            for c in self.graph.ops[i].choices
        )
        ops = split(self.graph, region, parts, copied=cpu)
        return None if ops is None else self._form(ops, env, region, parts)

    def _form(
        self, ops: Sequence[Op], env: Mapping[str, int], region: frozenset[int] = frozenset(),
        parts: Parts | None = None, *, improve: bool = False,
    ) -> Form:  # fmt: skip
        ops = tuple(self._joined(op) for op in ops)
        tasks, numbers = tasks_of(ops, self.pricing.at(env), env)
        movable = [n for op, n in zip(ops, numbers, strict=True) if self._may_move(op)]
        sharing = self.pricing.sharing
        turns = [_part_of(t, parts) for t in tasks]
        found = schedule(tasks, sharing, movable, turns, improve=improve)
        return Form(ops, tuple(tasks), tuple(numbers), found, region, parts)

    def _may_move(self, op: Op) -> bool:
        return op.results[0].name.partition("/")[0] in self.movable

    def _joined(self, op: Op) -> Op:
        """A join of parts with its kernel."""
        if op.choices or not needs_kernel(op):
            return op
        key = (op.attrs, tuple(v.type for v in op.operands))
        if key not in self._joins:
            quiet = replace(self.target, report=Report())
            self._joins[key] = choose_kernels(op, self.graph, quiet, self.limits)
        return replace(op, choices=self._joins[key].choices)

    # --- the one that is taken --------------------------------------------------------------

    def _taken(self, best: Form, serial: float, *, is_apart: bool = False) -> Graph:
        if best.parts is not None and not self.target.options.micro_batches:
            best = self._with_grain(best, best.parts)
        best = self._form(best.ops, self.env, best.region, best.parts, improve=True)
        made = on_streams(self.graph, best.ops, best.numbers, best.found)
        tasks, _ = tasks_of(made.ops, self.pricing.at(self.env), self.env)
        timeline = simulate(tasks, self.pricing.sharing)
        cut = [self.graph.ops[i] for i in sorted(best.region)]
        report_overlapped(
            self.graph, self.target, self.env, serial, timeline, cut, best.parts,
            self.pricing.sharing, is_apart=is_apart,
        )  # fmt: skip
        return made

    def _with_grain(self, best: Form, parts: Parts) -> Form:
        """The form with the smallest grain at which a step of two grains gains already."""
        rows, grain = self.env[parts.symbol], _LEAST_GRAIN
        while parts.count * grain * 2 <= rows:
            smaller = replace(parts, grain=grain)
            env = {**self.env, parts.symbol: smaller.least_rows}
            form = self._cut(best.region, smaller, env)
            whole, _ = tasks_of(self.graph.ops, self.pricing.at(env), env)
            serial = sum(t.seconds for t in whole)
            if form is not None and form.found.seconds <= serial * (1 - _LEAST_GAIN):
                return self._cut(best.region, smaller, self.env) or best
            grain *= 2
        return best


def _beside_experts(graph: Graph) -> frozenset[str]:
    """First results of the computations that neither feed routed experts nor read from them."""
    ops = graph.ops
    routed = [i for i, op in enumerate(ops) if _runs_experts(op)]
    if not routed:
        return frozenset()
    makers = {v.name: i for i, op in enumerate(ops) for v in op.results}
    before: list[set[int]] = []
    for op in ops:
        direct = {makers[v.name] for v in op.operands if v.name in makers}
        before.append(direct.union(*(before[i] for i in direct)))
    apart = [
        i
        for i, op in enumerate(ops)
        if i not in routed
        and needs_kernel(op)
        and not meets(op)
        and all(i not in before[r] and r not in before[i] for r in routed)
    ]
    return frozenset(ops[i].results[0].name for i in apart if not _is_rows_of_states(ops[i]))


def _part_of(task: Task, parts: Parts | None) -> int:
    """Which part of the rows a task works on: a part goes on before the next one begins."""
    part = task.name.rpartition("/")[2]
    return int(part) if parts is not None and part.isdigit() and "/" in task.name else 0


def _runs_experts(op: Op) -> bool:
    inner = op.body.ops if op.body is not None else (op,)
    return any(o.name == "experts" for o in inner)


def _is_rows_of_states(op: Op) -> bool:
    return any(v.is_state for v in (*op.operands, *op.results))
