"""Experts apart from what is added to their sum, so that what makes it may run beside them.

    before: %3 = linear(%2, @down)
            %4 = fused[experts_add](%x, %ids, %shares, @gate, @up, @down, %3, %r) ...
    after:  %4.routed = experts(%x, %ids, %shares, @gate, @up, @down)
            %3 = linear(%2, @down)                                        beside them
            %4 = fused[pointwise](%4.routed, %3, %r) ...

A group reads all its operands before it begins: an expert of all tokens that the routed ones' last
launch adds can only run before them. Apart, it costs one pass over the tokens more. `overlap` tries
both and takes what is predicted to be shorter.
"""

from dataclasses import replace

from metainfer.ir.graph import Graph, Op, Value, attrs_of

KIND = "pointwise"


def opened(graph: Graph) -> Graph | None:
    """The graph with its groups of experts opened; None if there are none.

    What is new has no kernels yet.
    """
    if not any(_is_group(op) for op in graph.ops):
        return None
    ops: list[Op] = []
    for op in graph.ops:
        ops += _parts(op) if _is_group(op) else [op]
    return replace(graph, ops=tuple(ops))


def _is_group(op: Op) -> bool:
    return op.body is not None and len(op.body.ops) > 1 and op.body.ops[0].name == "experts"


def _parts(op: Op) -> list[Op]:
    body = op.body
    assert body is not None
    first, rest = body.ops[0], body.ops[1:]
    outer = dict(zip((v.name for v in body.inputs), op.operands, strict=True))
    routed = Value(f"{op.results[0].name}.routed", first.result.type)
    experts = replace(
        first, operands=tuple(outer[v.name] for v in first.operands), results=(routed,),
        source=op.source,
    )  # fmt: skip
    read = {v.name for o in rest for v in o.operands}
    inputs = tuple(v for v in body.inputs if v.name in read)
    operands = (routed, *(outer[v.name] for v in inputs))
    inner = replace(body, inputs=(first.result, *inputs), ops=rest)
    added = Op(
        "fused", operands, op.results, attrs_of({"kind": KIND}), body=inner, source=op.source
    )
    return [experts, added]
