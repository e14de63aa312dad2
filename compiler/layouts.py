"""Which layout: how many ranks share the model, and how. The user's, or the cheapest that fits.

A candidate is priced on the module as `quantize` left it: sharded, made local, and every op at its
roofline or as the cheapest collective. That is a bound, not a prediction: it ranks layouts, and the
plan's own figures come from the kernels chosen later.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from metainfer.backends.kernel import Registry
from metainfer.compiler.cost import CostModel
from metainfer.hardware.machine import Machine
from metainfer.ir.errors import CapacityError, MetainferError, Unsupported
from metainfer.ir.graph import Graph, Module
from metainfer.ir.ops.record import VIEW, op_def
from metainfer.ir.options import Options
from metainfer.ir.strategy import Layout, Strategy
from metainfer.passes.localize import localize
from metainfer.passes.place_experts import place_experts
from metainfer.passes.shard import shard, typical_steps
from metainfer.passes.stages import split_stages
from metainfer.passes.target import Decision, Report, Target

# Part of the budget that weights and states may take, so that activations find room.
_SHARE = 0.95
# Formats of weights that are tried where nothing fits, the wider first.
_NARROWER = ("fp8", "mxfp4")
# Tokens of state that every sequence of a full step must find room for.
_CONTEXT = 4096


@dataclass(frozen=True)
class Estimate:
    """A layout with its price.

    Attributes:
        layout: the layout.
        weight_bytes: of the fullest rank.
        state_bytes: of a full step's sequences on it, each of up to 4,096 tokens.
        seconds_per_token: decode and prefill together, at full steps; a bound.
        refused: why it cannot be, "" if it can.
    """

    layout: Layout
    weight_bytes: int = 0
    state_bytes: int = 0
    seconds_per_token: float = 0.0
    refused: str = ""


def choose_layout(
    module: Module, strategy: Strategy, options: Options, machine: Machine, costs: CostModel,
    kernels: Registry, report: Report, draft: Callable[[Module, Target], Module],
) -> Layout:  # fmt: skip
    """The layout that the options fix, or the cheapest legal one that fits.

    Args:
        module: captured and attached.
        strategy: of a phase, without a mesh.
        options: what the user fixed.
        machine: where it runs.
        costs: of one rank.
        kernels: what the passes before `shard` may ask for.
        report: gets the decision.
        draft: the passes before `shard`.

    Raises: Unsupported naming the rule that forbids what the user asked for; CapacityError if
        nothing fits.
    """
    num_experts = _num_experts(module)
    fixed = {n: getattr(options, n) for n in ("pp", "dp", "tp", "ep")}
    asked = any(fixed.values())
    found = list(_candidates(fixed, machine.num_devices, num_experts))
    legal = [c for c in found if not _broken_rule(c, module, num_experts, machine, strategy)]
    if asked and not legal:
        raise _forbidden(fixed, found, module, num_experts, machine, strategy)
    if len(legal) == 1 and asked:
        report.add(Decision("layout", "ranks", str(legal[0]), "as asked for"))
        return legal[0]
    price = _Pricer(module, strategy, options, machine, costs, kernels, draft)
    one = Layout()
    if not asked:
        alone = price(one)
        if not alone.refused:
            size = f"{_gb(alone.weight_bytes)} of weights and {_gb(alone.state_bytes)} of states"
            reason = f"{size} fit on one device; more ranks by --tp, --dp, --pp, --ep"
            report.add(Decision("layout", "ranks", str(one), reason))
            return one
        legal = [c for c in legal if c != one]
        if not legal:
            return one  # what is missing is told when memory is planned
    priced = [price(c) for c in legal]
    if all(e.refused for e in priced):
        raise _nothing_fits(priced, price)
    return _cheapest(priced, report)


def _nothing_fits(priced: Sequence[Estimate], price: "_Pricer") -> CapacityError:
    """The error with every layout's bytes, and the widest format that would fit."""
    advice = "choose narrower weights (--weights fp8, mxfp4, int4), or more devices"
    for weights in _NARROWER:
        found = price.with_weights(weights)
        fitting = [e for e in (found(one.layout) for one in priced) if not e.refused]
        if fitting:
            best = min(fitting, key=lambda e: (e.seconds_per_token, e.layout.num_ranks))
            advice = (
                f"--weights {weights} (lossy) fits: {best.layout}, {_gb(best.weight_bytes)} of "
                f"weights and {_gb(best.state_bytes)} of states on a rank; or take more devices"
            )
            break
    text = "\n".join(f"{e.layout}: {e.refused}" for e in priced)
    return CapacityError(
        "no layout of the model fits on this machine", text=text, advice=advice
    )  # fmt: skip


def _cheapest(priced: Sequence[Estimate], report: Report) -> Layout:
    usable = sorted(
        (e for e in priced if not e.refused),
        key=lambda e: (e.seconds_per_token, e.layout.num_ranks),
    )
    best = usable[0]
    others = ", ".join(f"{e.layout} {e.seconds_per_token * 1e6:.1f} us" for e in usable[1:4])
    reason = (
        f"cheapest of {len(usable)} that fit of {len(priced)}: at least "
        f"{best.seconds_per_token * 1e6:.1f} us a token in prefill and decode together, "
        f"{_gb(best.weight_bytes)} of weights and {_gb(best.state_bytes)} of states on a rank"
        + (f"; next: {others}" if others else "")
    )
    report.add(Decision("layout", "ranks", str(best.layout), reason))
    return best.layout


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f} GB"


# --- candidates --------------------------------------------------------------------------------


def _candidates(fixed: dict[str, int], num_devices: int, num_experts: int) -> Iterator[Layout]:
    """Layouts that agree with what is fixed; a fixed axis alone leaves the others at one rank."""
    free = not any(fixed.values())
    sizes = [n for n in range(1, num_devices + 1) if num_devices % n == 0]
    ep = fixed["ep"]
    if ep > 1 and not (fixed["tp"] and fixed["dp"]):
        # What is left open of dp and tp is what ep = dp * tp needs.
        for dp in [fixed["dp"]] if fixed["dp"] else range(1, ep + 1):
            for tp in [fixed["tp"]] if fixed["tp"] else range(1, ep + 1):
                if dp * tp == ep:
                    yield Layout(fixed["pp"] or 1, dp, tp, ep)
        return
    for pp in sizes if free else [fixed["pp"] or 1]:
        for dp in sizes if free else [fixed["dp"] or 1]:
            for tp in sizes if free else [fixed["tp"] or 1]:
                spreads = sorted({1, tp, dp, dp * tp}) if num_experts else [1]
                for spread in [ep] if ep else spreads:
                    if not free or pp * dp * tp <= num_devices:
                        yield Layout(pp, dp, tp, spread)


def _num_experts(module: Module) -> int:
    counts = [
        op.operands[3].tensor.shape[0].static
        for g in module.graphs
        for op in g.ops
        if op.name == "experts"
    ]
    return min(counts, default=0)


def _broken_rule(
    layout: Layout, module: Module, num_experts: int, machine: Machine, strategy: Strategy
) -> str:
    """The rule that forbids a layout, "" if none does."""
    if layout.num_ranks > machine.num_devices:
        return f"one rank a device: {layout.num_ranks} ranks, {machine.num_devices} devices"
    if layout.ep not in (1, layout.tp, layout.dp, layout.dp * layout.tp):
        return f"ep is 1, tp, dp or dp * tp: {layout.ep} with dp={layout.dp} tp={layout.tp}"
    if layout.ep > 1 and not num_experts:
        return "ep spreads experts: the model has none"
    if layout.ep > max(num_experts, 1):
        return f"a rank holds one expert at least: {num_experts} experts over {layout.ep}"
    num_calls = sum(1 for _ in module.calls())
    if layout.pp > max(num_calls, 1):
        return f"a stage holds one block at least: {num_calls} blocks, {layout.pp} stages"
    if strategy.phase == "call" and (layout.pp > 1 or layout.dp > 1):
        return "stages and replicas are those of language models: a module takes tp only"
    return ""


def _forbidden(
    fixed: dict[str, int], found: Sequence[Layout], module: Module, num_experts: int,
    machine: Machine, strategy: Strategy,
) -> Unsupported:  # fmt: skip
    asked = " ".join(f"--{n} {v}" for n, v in fixed.items() if v)
    rules = {_broken_rule(c, module, num_experts, machine, strategy) for c in found}
    return Unsupported(
        f"the layout {asked} is forbidden on {machine.name}",
        text="\n".join(f"rule: {r}" for r in sorted(rules)) or "rule: ep = dp * tp",
        advice="leave an axis out to let the compiler choose it",
    )


# --- prices ------------------------------------------------------------------------------------


class _Pricer:
    """Prices layouts; what several share is made once."""

    def __init__(
        self, module: Module, strategy: Strategy, options: Options, machine: Machine,
        costs: CostModel, kernels: Registry, draft: Callable[[Module, Target], Module],
    ) -> None:  # fmt: skip
        self._module, self._draft = module, draft
        self._kernels = kernels
        self._made: dict[object, Module] = {}
        self._machine, self._options, self._strategy = machine, options, strategy
        self._costs = costs
        self._drafted = draft(module, self._target(strategy))
        self._budget = int(machine.device(0).usable_bytes * options.memory_fraction)

    def with_weights(self, weights: str) -> "_Pricer":
        """One that prices the model with weights of another format."""
        return _Pricer(
            self._module, replace(self._strategy, weights=weights),
            replace(self._options, weights=weights), self._machine, self._costs, self._kernels,
            self._draft,
        )  # fmt: skip

    def __call__(self, layout: Layout) -> Estimate:
        try:
            return self._priced(layout)
        except MetainferError as error:
            return Estimate(layout, refused=error.what)

    def _target(self, strategy: Strategy) -> Target:
        costs = replace(
            self._costs, machine=self._machine, mesh=strategy.mesh, first_rank=strategy.first_rank
        )
        options = replace(self._options, strict=False)
        return Target(self._machine, strategy, options, self._kernels, costs, Report())

    def _priced(self, layout: Layout) -> Estimate:
        seconds, heaviest, held = 0.0, 0, 0
        for number, stage in enumerate(split_stages(self._drafted, layout.pp)):
            strategy = replace(
                self._strategy, mesh=layout.mesh, experts=layout.experts,
                first_rank=number * layout.stage_ranks,
            )  # fmt: skip
            target = self._target(strategy)
            local = localize(self._sharded(stage, layout, number, target), target)
            heaviest = max(heaviest, _weight_bytes(local))
            held = max(held, _state_bytes(local, strategy))
            seconds += _seconds_per_token(local, target) / layout.dp
        # Stages work on different steps at once: a token passes all, but a step leaves each time.
        seconds /= layout.pp
        refused = ""
        if heaviest + held > self._budget * _SHARE:
            refused = f"{_gb(heaviest)} of weights and {_gb(held)} of states on a rank, "
            refused += f"of {_gb(self._budget)}"
        return Estimate(layout, heaviest, held, seconds, refused)

    def _sharded(self, stage: Module, layout: Layout, number: int, target: Target) -> Module:
        """The stage sharded over tp, the mesh being the layout's: replicas change nothing there."""
        over_tp = layout.experts if "tp" in layout.experts else ()
        # Slots stand for experts where those are placed; their number is ep's.
        key = (layout.pp, number, layout.tp, over_tp, layout.ep)
        if key not in self._made:
            mesh = Layout(tp=layout.tp).mesh
            strategy = replace(self._strategy, mesh=mesh, experts=over_tp)
            placed = place_experts(stage, target)
            self._made[key] = shard(placed, self._target(strategy))
        return replace(self._made[key], mesh=layout.mesh)


def _weight_bytes(module: Module) -> int:
    total = sum(w.tensor.bytes_at({}) for w in module.main.weights)
    for call in module.calls():
        block = module.graph(str(call.attr["block"]))
        total += sum(w.tensor.bytes_at({}) for w in block.weights)
    return total


def _state_bytes(module: Module, strategy: Strategy) -> int:
    tokens = min(strategy.max_context or _CONTEXT, _CONTEXT) * strategy.max_sequences
    total = 0
    for call in module.calls():
        for state in module.graph(str(call.attr["block"])).states:
            entries = tokens if state.state.growth == "token" else strategy.max_sequences
            total += state.state.entry_bytes() * entries
    return total


def _seconds_per_token(module: Module, target: Target) -> float:
    seconds = 0.0
    for env in typical_steps(module, target):
        step = _graph_seconds(module.main, target, env)
        per_block = {
            g.name: _graph_seconds(g, target, env) for g in module.graphs if g.name != "main"
        }
        step += sum(per_block[str(call.attr["block"])] for call in module.calls())
        seconds += step / env.get("T", 1)
    return seconds


def _graph_seconds(graph: Graph, target: Target, env: dict[str, int]) -> float:
    ops = [op for op in graph.ops if not op.is_call and not op_def(op.name).has(VIEW)]
    floor = target.device.kernel_floor_us * 1e-6
    return sum(target.costs.roofline(op, target.device, env).seconds + floor for op in ops)
