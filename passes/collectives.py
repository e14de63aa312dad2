"""collectives: for every collective an algorithm by size, as a table like any kernel's.

    before: %3 = all_reduce(%2) {axis = "tp", ranks = 8} : bf16[T,4096]
    after:  %3 = all_reduce(%2) {axis = "tp", ranks = 8} : bf16[T,4096]
              by {T <= 16: ranks.all_reduce_two_shot, else: ranks.all_reduce_library}

Algorithms are kernels (`backends.ranks`), priced from the machine's topology or from its measured
tables; `--pin`, `--forbid` and the machine's policy apply to them. All ranks run one text, so they
meet in one order and switch algorithms at the same sizes.
"""

from dataclasses import replace

from metainfer.ir.graph import Graph, Module
from metainfer.ir.ops.collective import MEETING
from metainfer.passes.select import choose_kernels
from metainfer.passes.target import Target


def collectives(module: Module, target: Target) -> Module:
    """Choose algorithms for all collectives.

    Raises: Unsupported if a collective has no algorithm that the machine allows.
    """
    for graph in module.graphs:
        if any(op.name in MEETING for op in graph.ops):
            module = module.with_graph(_chosen(graph, module, target))
    return module


def _chosen(graph: Graph, module: Module, target: Target) -> Graph:
    limits = module.limits()
    ops = [
        choose_kernels(op, graph, target, limits) if op.name in MEETING else op for op in graph.ops
    ]
    return replace(graph, ops=tuple(ops))
