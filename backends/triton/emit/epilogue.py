"""What follows a product while it is in registers, as a function for a template.

A group of a linear, or of experts, and elementwise ops after it: the template hands its float32
tile to ``epilogue(acc, operands, r0, c0, r0_in, c0_in)`` and stores what comes back. A linear's
bias is added before the product is rounded, as the op's own definition has it.

Where the tile is a whole row (of experts), ops over rows may follow, norms and the rounding to fp8
codes: ``epilogue(acc, operands, r0, r0_in)`` then stores the results itself. So it does where the
tile is several whole rows, of a router's scores.

Where the template has time before its sums are there, ``reads(operands, r0, c0, r0_in, c0_in)``
reads what waits for none of them, and ``epilogue`` is handed it after the operands.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from metainfer.backends.triton.emit.body import Body
from metainfer.backends.triton.emit.index import Index, broadcast, joined
from metainfer.backends.triton.emit.rows import HANDLERS
from metainfer.backends.triton.emit.source import (
    Parameter,
    is_used,
    module_of,
    parameters_of,
    plain_text,
    stores_of,
    templates_of,
    without_unused,
)
from metainfer.backends.triton.emit.tiles import Expr, Space, power_of_two
from metainfer.ir.errors import Unsupported
from metainfer.ir.graph import Graph, Op
from metainfer.ir.printer import print_type

_NAME, _READS = "epilogue", "reads"
# Products that templates compute, and how many operands are the template's own.
_OWN = {"linear": 2, "experts": 6}
_NOTHING: frozenset[int] = frozenset()
# A read outside loops, and names of what is made on the way.
_LOAD = re.compile(r"    \w+ = (tl\.load\(.*)")
_MADE = re.compile(r"\b(?:[ipsv]\d+|r\d+_\d+)\b")


@dataclass(frozen=True)
class Epilogue:
    """Source of one epilogue.

    Attributes:
        text: of the module.
        parameters: what ``operands`` holds, in order.
    """

    text: str
    parameters: tuple[Parameter, ...]

    def function(self) -> Any:
        """The ``@triton.jit`` function."""
        return getattr(module_of(_NAME, self.text), _NAME)

    def reads(self) -> Any:
        """The ``@triton.jit`` function of what is read first, of an epilogue that is handed it."""
        return getattr(module_of(_NAME, self.text), _READS)


@lru_cache(maxsize=1024)
def emit_epilogue(
    graph: Graph,
    strided: frozenset[int] = _NOTHING,
    unit_last: frozenset[int] = _NOTHING,
    *,
    reads_first: bool = False,
) -> Epilogue:
    """Emit what a group does after its product.

    Args:
        graph: its body; the product is of the first inputs.
        strided: operands that are views with gaps.
        unit_last: those of them whose last dim is dense.
        reads_first: whether what waits for no sum is read by a function of its own.

    Raises: Unsupported if the group does anything else.
    """
    product = _product(graph, most=1)
    shape = product.result.tensor.shape
    space = Space(0, shape[:-1], shape[-1], 1, 1)
    body = Body(graph, (), strided, unit_last, {})
    index = body.enter(space)
    body.handlers[product.name] = _made(index)
    made = body.value(graph.outputs[0], index)
    lines = [*without_unused(body.lines), f"    return {made.text}"]
    places = "r0, c0, r0_in, c0_in"
    if not reads_first:
        return _epilogue(graph, product, body, {f"{_NAME}(acc, operands, {places})": lines})
    first = [line for line in lines if _is_free(line)]
    names = [line.split()[0] for line in first]
    # An empty tuple has no type that Triton could give it.
    reading = [*first, f"    return ({', '.join(names or ['r0_in'])},)"]
    handed = [f"    {name} = found[{i}]" for i, name in enumerate(names)]
    rest = [line for line in lines if not _is_free(line)]
    functions = {
        f"{_READS}(operands, {places})": reading,
        f"{_NAME}(acc, operands, found, {places})": [*handed, *rest],
    }
    return _epilogue(graph, product, body, functions)


@lru_cache(maxsize=1024)
def emit_row_epilogue(
    graph: Graph, strided: frozenset[int] = _NOTHING, unit_last: frozenset[int] = _NOTHING
) -> Epilogue:
    """Emit what a group does after its product, for a tile of one whole row.

    Args:
        graph: its body; the product is of the first inputs.
        strided: operands that are views with gaps.
        unit_last: those of them whose last dim is dense.

    Raises: Unsupported if the group does anything else.
    """
    product = _product(graph, most=2)
    shape = product.result.tensor.shape
    space = Space(0, shape[:-1], shape[-1], 1, power_of_two(shape[-1].static))
    body = Body(graph, (), strided, unit_last, HANDLERS)
    lead = body.enter_row(space)
    body.handlers = {**HANDLERS, product.name: _made((*lead, body.whole(space.width)))}
    for store in stores_of(graph):
        body.store(store)
    axes = [f"    {line}" for line in body.axes]
    lines = without_unused([*axes, *_loads_first(body.lines)])
    return _epilogue(graph, product, body, {f"{_NAME}(acc, operands, r0, r0_in)": lines})


@lru_cache(maxsize=1024)
def emit_choice_epilogue(graph: Graph, rows: int) -> Epilogue:
    """Emit what a group makes of whole rows of its product: results narrower than they are.

    Args:
        graph: its body; the product is of the first inputs.
        rows: of a tile.

    Raises: Unsupported if the group does anything else.
    """
    product = _own_product(graph)
    made = {v.tensor.shape for v in graph.outputs}
    if len(made) != 1:
        raise Unsupported(
            "results of several shapes are made of a router's scores",
            advice="the group is split, or another kernel takes it",
        )
    (shape,) = made
    space = Space(0, shape[:-1], shape[-1], rows, power_of_two(shape[-1].static))
    body = Body(graph, (), _NOTHING, _NOTHING, HANDLERS)
    lead = body.enter_row(space)
    whole = body.whole(product.result.tensor.shape[-1])
    body.handlers = {**HANDLERS, product.name: _made((*lead, whole))}
    for store in stores_of(graph):
        body.store(store)
    lines = without_unused([*(f"    {line}" for line in body.axes), *body.lines])
    return _epilogue(graph, product, body, {f"{_NAME}(acc, operands, r0, r0_in)": lines})


def _loads_first(lines: list[str]) -> list[str]:
    """Reads that wait for nothing come first: they are on their way while the row is summed."""

    return [*filter(_is_free, lines), *(line for line in lines if not _is_free(line))]


def _is_free(line: str) -> bool:
    """Whether a statement is a read that waits for nothing made before it."""
    found = _LOAD.match(line)
    return found is not None and _MADE.search(found[1]) is None


def _epilogue(graph: Graph, product: Op, body: Body, functions: dict[str, list[str]]) -> Epilogue:
    """A module of functions: heads, and the statements that follow each."""
    every = [line for lines in functions.values() for line in lines]
    parameters = tuple(p for p in parameters_of(graph, body) if is_used(p.name, every))
    shown = ", ".join(plain_text(print_type(v.type)) for v in product.operands)
    parts = [
        f'"""{plain_text(graph.name)}: what follows the product of {shown}."""',
        "", "import triton", "import triton.language as tl", *templates_of(every),
    ]  # fmt: skip
    for head, lines in functions.items():
        taken = [
            f"    {p.name} = operands[{i}]"
            for i, p in enumerate(parameters)
            if is_used(p.name, lines)
        ]
        parts += ["", "", "@triton.jit", f"def {head}:", *taken, *lines]
    return Epilogue("\n".join([*parts, ""]), parameters)


def _product(graph: Graph, most: int) -> Op:
    """The group's product.

    Raises: Unsupported if there is not exactly one, of the first inputs, stored as one result or
        as several of its shape.
    """
    found = _own_product(graph)
    shapes = {v.tensor.shape for v in (*graph.outputs, found.result)}
    if not 1 <= len(graph.outputs) <= most or len(shapes) != 1:
        raise _not_one_product()
    return found


def _own_product(graph: Graph) -> Op:
    """The one product of a group, of its first inputs.

    Raises: Unsupported if there is not exactly one.
    """
    found = [o for o in graph.ops if o.name in _OWN]
    own = _OWN[found[0].name] if found else 0
    inputs = [v.name for v in graph.inputs]
    if len(found) != 1 or [v.name for v in found[0].operands[:own]] != inputs[:own]:
        raise _not_one_product()
    return found[0]


def _not_one_product() -> Unsupported:
    return Unsupported(
        "the group is not one product of its first operands and what follows it",
        advice="the group is split, or another kernel takes it",
    )


def _made(place: tuple[Index, ...]) -> Any:
    def product(body: Body, op: Op, result: int, index: tuple[Index, ...]) -> Expr:
        # A dim of size 1 is read at 0 by what is elementwise.
        if index not in (place, broadcast(op.result.tensor.shape, place)):
            raise Unsupported(
                "the product is needed at another place than it stands at",
                advice="the group is split, or another kernel takes it",
            )
        text, axes = "acc", joined(*(i.axes for i in place), frozenset(["r0"]))
        if len(op.operands) > _OWN[op.name]:
            bias = body.value(op.operands[2], index[-1:])
            text = f"acc + {bias.text}"
        body.comment(op)
        return body.finish(op.result, text, axes)

    return product
