"""collectives: for every collective an algorithm by size, as a table like any kernel's.

    before: %3 = all_reduce(%2) {axis = "tp", ranks = 8} : bf16[T,4096]
    after:  %3 = all_reduce(%2) {axis = "tp", ranks = 8} : bf16[T,4096]
              by {T <= 16: ranks.all_reduce_two_shot, else: ranks.all_reduce_library}

Algorithms are kernels (`backends.ranks`): those of the communication library (a ring, if nobody
measured it), exchanges over it that are summed in rank order, pushes to and pulls from the memory
of peers, islands, and codes of fp8 where the user asks for them. They are priced from the machine's
topology or from its measured tables (`hardware.collective_cost`), and refused with the pair of
devices that is in the way; `--pin`, `--forbid` and the machine's policy apply to them. All ranks
run one text, so they meet in one order and switch algorithms at the same sizes. A group that holds
a collective is split where its parts are cheaper, like any other.
"""

from dataclasses import replace

from metainfer.ir.graph import Graph, Module, Op
from metainfer.ir.streams import meets
from metainfer.passes.select import covered
from metainfer.passes.target import Target


def collectives(module: Module, target: Target) -> Module:
    """Choose algorithms for all collectives.

    Raises: Unsupported if a collective has no algorithm that the machine allows.
    """
    for graph in module.graphs:
        if any(meets(op) for op in graph.ops):
            module = module.with_graph(_chosen(graph, module, target))
    return module


def _chosen(graph: Graph, module: Module, target: Target) -> Graph:
    limits = module.limits()
    ops: list[Op] = []
    for op in graph.ops:
        ops += covered(op, graph, target, limits) if meets(op) else [op]
    return replace(graph, ops=tuple(ops))
