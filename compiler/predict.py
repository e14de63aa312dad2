"""Predicted times of a compiled phase: per group and in sum, at the sizes that users ask about."""

from collections.abc import Mapping
from typing import Any

from metainfer.backends.kernel import Query
from metainfer.backends.registry import Backends
from metainfer.compiler.cost import CostModel
from metainfer.hardware.device import Device
from metainfer.ir.flatten import flatten
from metainfer.ir.graph import Choice, Module, Op
from metainfer.ir.strategy import Strategy


def choice_at(op: Op, env: Mapping[str, int]) -> Choice:
    """The row of a kernel table that applies at concrete sizes."""
    for choice in op.choices:
        if not choice.symbol or env[choice.symbol] <= choice.limit:
            return choice
    return op.choices[-1]


def phase_sizes(module: Module, strategy: Strategy, tokens: int) -> dict[str, int]:
    """Values of the symbols for a step of so many tokens."""
    env = {s.name: s.high for s in module.symbols}
    env.update((k, v) for k, v in strategy.typical if k in env)
    if "T" in env:
        env["T"] = tokens
    if strategy.phase == "decode":
        env.update({s: tokens for s in ("B", "R") if s in env})
    return env


def predict(
    module: Module, device: Device, backends: Backends, strategy: Strategy
) -> list[dict[str, Any]]:
    """Predicted step times at the smallest and largest step of the phase.

    Units: seconds; bytes and operations are sums over the step.
    """
    high = dict(module.limits()).get("T", (1, 1))[1]
    rows = []
    for tokens in sorted({1, high}):
        env = phase_sizes(module, strategy, tokens)
        rows.append(_step(module, device, backends, env))
    return rows


def _step(
    module: Module, device: Device, backends: Backends, env: Mapping[str, int]
) -> dict[str, Any]:
    model = CostModel(backends.layouts)
    total = {"seconds": 0.0, "bytes": 0, "flops": 0, "groups": 0}
    cache: dict[Any, Any] = {}
    for item in flatten(module).ops:
        op = item.op
        if not op.choices:
            continue
        kernel = backends.kernels.get(choice_at(op, env).kernel)
        key = (kernel.name, op.attrs, tuple(v.type for v in (*op.operands, *op.results)))
        if key not in cache:
            refusals = kernel.refusals(Query(op, device, module.limits()))
            repairs = kernel.repairs_for(refusals) or ()
            waste = sum(r.waste(Query(op, device, module.limits())) for r in repairs)
            cache[key] = model.kernel(kernel, op, device, env, waste)
        cost = cache[key]
        total["seconds"] += cost.seconds
        total["bytes"] += cost.bytes
        total["flops"] += cost.flops
        total["groups"] += 1
    return {"sizes": dict(env), **total}
