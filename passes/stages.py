"""Pipeline stages: one module becomes several, each with a run of the calls of main."""

from collections.abc import Sequence
from dataclasses import replace

from metainfer.ir.errors import Unsupported
from metainfer.ir.graph import Graph, Module, Op, Value
from metainfer.passes.weights import load_of


def split_stages(module: Module, stages: int) -> tuple[Module, ...]:
    """Cut main into stages of about equal weight bytes; values that cross a cut are passed on.

    Stage k takes what stage k-1 returns, in order; only the first takes the model's inputs, and
    only the last returns its outputs. A weight that two stages read is held by both.

    Raises: Unsupported if there are fewer calls than stages, or main's inputs are read late.
    """
    if stages == 1:
        return (module,)
    main = module.main
    calls = [i for i, op in enumerate(main.ops) if op.is_call]
    if len(calls) < stages:
        raise Unsupported(
            f"{module.name} has {len(calls)} blocks, too few for {stages} stages",
            text="rule: a stage holds one block at least",
            advice=f"choose --pp {max(len(calls), 1)} or less",
        )
    cuts = _cuts(module, calls, stages)
    parts = [main.ops[a:b] for a, b in zip([0, *cuts], [*cuts, len(main.ops)], strict=True)]
    inputs = main.inputs
    made = []
    for number, ops in enumerate(parts):
        later = [op for part in parts[number + 1 :] for op in part]
        outputs = _crossing(inputs, ops, later) if later else main.outputs
        made.append(_stage(module, number, inputs, ops, outputs))
        inputs = outputs
    return tuple(made)


def _cuts(module: Module, calls: Sequence[int], stages: int) -> list[int]:
    """Numbers of the calls at which the later stages begin: each takes its share of the bytes."""
    sizes = [_call_bytes(module, module.main.ops[i]) for i in calls]
    total, passed = sum(sizes), 0
    cuts: list[int] = []
    for number, size in enumerate(sizes):
        due = total * (len(cuts) + 1) / stages
        left, open_stages = len(sizes) - number, stages - 1 - len(cuts)
        # A layer goes to the later stage if less than half of it would be due before the cut.
        is_due = passed + size / 2 >= due and number > 0
        if open_stages and (is_due or left == open_stages):
            cuts.append(calls[number])
        passed += size
    return cuts


def _call_bytes(module: Module, call: Op) -> int:
    block = module.graph(str(call.attr["block"]))
    return sum(v.tensor.bytes_at({}) for v in load_of(module, block.name).weights) or 1


def _crossing(inputs: Sequence[Value], ops: Sequence[Op], later: Sequence[Op]) -> tuple[Value, ...]:
    here = {v.name: v for v in (*inputs, *(r for op in ops for r in op.results))}
    read = dict.fromkeys(v.name for op in later for v in op.operands)
    return tuple(here[name] for name in read if name in here)


def _stage(
    module: Module, number: int, inputs: Sequence[Value], ops: Sequence[Op],
    outputs: Sequence[Value],
) -> Module:  # fmt: skip
    read = {v.name for op in ops for v in op.operands} | {v.name for v in outputs}
    main = module.main
    weights = tuple(w for w in main.weights if w.name in read)
    graph = replace(
        main, inputs=tuple(inputs), weights=weights, ops=tuple(ops), outputs=tuple(outputs)
    )
    blocks = {str(op.attr["block"]) for op in ops if op.is_call}
    loads = tuple(_load(load, main, weights) for load in module.loads)
    return replace(
        module,
        name=f"{module.name}_stage{number}",
        graphs=(*(g for g in module.graphs if g.name in blocks), graph),
        loads=tuple(load for load in loads if load.name in {*blocks, "main"}),
    )


def _load(load: Graph, main: Graph, weights: Sequence[Value]) -> Graph:
    """Main's load graph for some of its weights; a block's as it is."""
    if load.name != "main":
        return load
    kept = {w.name for w in weights}
    outputs = [v for w, v in zip(main.weights, load.outputs, strict=True) if w.name in kept]
    needed = {v.name for v in outputs}
    ops = []
    for op in reversed(load.ops):
        if any(v.name in needed for v in op.results):
            needed |= {v.name for v in op.operands}
            ops.append(op)
    sources = tuple(w for w in load.weights if w.name in needed)
    return replace(load, weights=sources, ops=tuple(reversed(ops)), outputs=tuple(outputs))
