"""An emitted group as a whole: the text of its function, and the function that Triton compiles."""

import hashlib
import re
import sys
from dataclasses import dataclass, replace
from functools import lru_cache
from types import ModuleType
from typing import Any

from metainfer.backends.triton.cross import cache_folder
from metainfer.backends.triton.emit.body import Body
from metainfer.backends.triton.emit.formulas import scalar
from metainfer.backends.triton.emit.order import reads_first
from metainfer.backends.triton.emit.rows import HANDLERS
from metainfer.backends.triton.emit.tiles import WRITES, Space, Store
from metainfer.ir.dtypes import F8E4M3, Block
from metainfer.ir.entries import scale_field
from metainfer.ir.errors import Unsupported
from metainfer.ir.graph import Graph, Op, Value
from metainfer.ir.printer import print_type
from metainfer.ir.types import StateType
from metainfer.ir.whole_file import write_file

_WARPS = ((4096, 4), (16384, 8))  # elements of a tile, warps that work on it
_MOST_WARPS = 16
_LINE = 100


@dataclass(frozen=True)
class Parameter:
    """One argument of an emitted function, and where a call has it.

    Attributes:
        name: in the function.
        kind: "operand", "field" (of a state), "part" (of a block format: codes, scales, offsets),
            "output", "made" (part of an output of a block format), "cos", "sin", "rows", "size" or
            "stride".
        number: which operand, output, table or space.
        detail: the field, part, size or dim.
    """

    name: str
    kind: str
    number: int = 0
    detail: Any = None


@dataclass(frozen=True)
class Emitted:
    """Source of one group.

    Attributes:
        name: of the function.
        text: of the module.
        parameters: of the function, in order.
        spaces: tiles of the results; a program takes one of each.
        chunks: whether columns are split over programs.
        tables: rope ops whose tables are passed.
        num_warps: of a program.
    """

    name: str
    text: str
    parameters: tuple[Parameter, ...]
    spaces: tuple[Space, ...]
    chunks: bool
    tables: tuple[Op, ...]
    num_warps: int

    def function(self) -> Any:
        """The ``@triton.jit`` function."""
        return getattr(module_of(self.name, self.text), self.name)


_NAME = re.compile(r"[A-Za-z_]\w*")
_MADE = re.compile(r"^ *(?:for )?(\w+) (?:=|in) ")  # names that a statement gives a value
# Kinds of parameters that point to what launches of a step may write.
_WRITTEN = ("operand", "part", "field", "output", "made")


@lru_cache(maxsize=1024)
def emit(
    graph: Graph, strided: frozenset[int], unit_last: frozenset[int],
    settled: frozenset[int] = frozenset(),
) -> Emitted:  # fmt: skip
    """Emit a group.

    Args:
        graph: its body, inputs in the order of the group's operands.
        strided: operands that are views with gaps.
        unit_last: those of them whose last dim is dense.
        settled: operands that no launch of a step writes: what is made of them alone is made
            before the launch in front has ended.

    Raises: Unsupported naming what the emitter cannot do.
    """
    stores = stores_of(graph)
    body = Body(graph, stores, strided, unit_last, HANDLERS)
    for store in stores:
        body.store(store)
    lines = without_unused([f"    {line}" for line in body.axes] + body.lines)
    if len(body.spaces) > 1 and not body.has_loops:
        lines = reads_first(lines)
    parameters = tuple(p for p in parameters_of(graph, body) if is_used(p.name, lines))
    name = re.sub(r"\W", "_", graph.name) or "group"
    name = f"{name}_" if name[0].isdigit() else name
    warps = next((w for most, w in _WARPS if body.elements <= most), _MOST_WARPS)
    others = [p for p in parameters if p.kind in _WRITTEN and p.number not in settled]
    text = _text(name, graph, parameters, waiting(lines, [p.name for p in others]))
    return Emitted(
        name, text, parameters, tuple(body.spaces), body.is_chunked, tuple(body.arguments.tables),
        warps,
    )  # fmt: skip


def body_of(op: Op) -> Graph:
    """The body of a group, a single op as a graph of itself, names alike for equal groups."""
    if op.body is not None:
        return replace(op.body, name=str(op.attr["kind"]))
    names: dict[str, Value] = {}
    inputs = []
    for number, value in enumerate(op.operands):
        sigil = "$" if value.is_state else "%"
        inputs.append(names.setdefault(value.name, Value(f"{sigil}x{number}", value.type)))
    results = tuple(Value(f"%{i}", v.type) for i, v in enumerate(op.results))
    alone = replace(
        op, operands=tuple(inputs), results=results, source=None, choices=(), stream=0, after=()
    )
    return Graph(op.name, tuple(inputs), ops=(alone,), outputs=results)


def stores_of(graph: Graph) -> list[Store]:
    """What leaves a group.

    Raises: Unsupported for what the emitter cannot store.
    """
    producers = {v.name: o for o in graph.ops for v in o.results}
    stores, outputs = [], 0
    for value in (*graph.outputs, *graph.state_outputs):
        if value.is_state:
            stores += _state_stores(graph, value, producers)
            continue
        if isinstance(value.tensor.dtype, Block):
            stores.append(_rounding_store(value, producers, outputs))
            outputs += 1
            continue
        made = value
        # A dense view of a result is the same memory.
        while made.name in producers and producers[made.name].name == "reshape":
            made = producers[made.name].operands[0]
        if made.name not in producers:
            made = value
        stores.append(Store(made, f"y{outputs}", scalar(value.tensor.dtype)))
        outputs += 1
    return stores


def _rounding_store(value: Value, producers: dict[str, Op], number: int) -> Store:
    op = producers.get(value.name)
    if op is None or op.name != "quantize":
        raise Unsupported(
            f"the emitter makes block formats by quantize, {value.name} is made otherwise",
            advice="the group is split, or another kernel takes it",
        )
    return Store(op.operands[0], f"y{number}", F8E4M3, rounding=op)


def _state_stores(graph: Graph, value: Value, producers: dict[str, Op]) -> list[Store]:
    op = producers.get(value.name)
    inputs = {v.name: i for i, v in enumerate(graph.inputs)}
    if op is None or op.name not in WRITES or op.operands[0].name not in inputs:
        raise Unsupported(
            f"the emitter writes states by one of {', '.join(WRITES)}, {value.name} is made "
            "otherwise",
            advice="the group is split, or another kernel takes it",
        )
    number = inputs[op.operands[0].name]
    state, slots = value.state, op.operands[3]

    def stored(field: str, entry: Value) -> Store:
        target = f"x{number}_{field}"
        held = {name for name, _ in state.fields}
        scales = f"x{number}_{scale_field(field)}" if scale_field(field) in held else ""
        return Store(entry, target, scalar(state.field_type(field).dtype), slots, scales=scales)

    fields = WRITES[op.name]
    return [stored(field, entry) for field, entry in zip(fields, op.operands[1:3], strict=True)]


def parameters_of(graph: Graph, body: Body) -> list[Parameter]:
    """All that a function may take, in order."""
    made: list[Parameter] = []
    for number, value in enumerate(graph.inputs):
        if isinstance(value.type, StateType):
            names = [field for field, _ in value.type.fields]
            made += [Parameter(f"x{number}_{f}", "field", number, f) for f in names]
        elif isinstance(value.tensor.dtype, Block):
            parts = ("codes", "scales", "offsets")
            made += [Parameter(f"x{number}_{p}", "part", number, p) for p in parts]
        else:
            made.append(Parameter(f"x{number}", "operand", number))
    outputs = [v for v in graph.outputs if not v.is_state]
    for number, value in enumerate(outputs):
        if isinstance(value.tensor.dtype, Block):
            made += [Parameter(f"y{number}_{p}", "made", number, p) for p in ("codes", "scales")]
        else:
            made.append(Parameter(f"y{number}", "output", number))
    for number in range(len(body.arguments.tables)):
        made += [Parameter(f"{kind}{number}", kind, number) for kind in ("cos", "sin")]
    made += [Parameter(f"rows{s.number}", "rows", s.number) for s in body.spaces]
    made += [Parameter(n, "size", detail=size) for n, size in body.arguments.sizes.items()]
    made += [Parameter(n, "stride", *place) for n, place in body.arguments.strides.items()]
    return made


def is_used(name: str, lines: list[str]) -> bool:
    """Whether a statement reads a name."""
    pattern = re.compile(rf"\b{name}\b")
    return any(pattern.search(line.split("  #")[0]) for line in lines if "# " not in line[:8])


def without_unused(lines: list[str]) -> list[str]:
    """Leave indices out that nothing reads."""
    kept = list(lines)
    for line in lines:
        found = re.fullmatch(r" +((?:r\d+_\d+|c\w+|i\d+)) = .*", line)
        if found and not is_used(found[1], [other for other in kept if other is not line]):
            kept.remove(line)
    return kept


def waiting(lines: list[str], others: list[str]) -> list[str]:
    """Statements with the wait for the launch in front among them.

    Args:
        lines: statements; those of loops are left where they are.
        others: parameters that the launch in front may still write: what reads them comes after.
    """
    before, after, late = list[str](), list[str](), set(others)
    for line in lines:
        alone = re.fullmatch(r"    (\w+) = (.*)", line)
        if alone and late.isdisjoint({alone[1], *_NAME.findall(alone[2])}):
            before.append(line)
            continue
        after.append(line)
        late.update(_MADE.findall(line))
    if not any("tl.load" in line for line in before):
        return ["    early.wait(EARLY)", *lines]
    return ["    early.let_next(EARLY)", *before, "    early.wait_for_last(EARLY)", *after]


def _text(name: str, graph: Graph, parameters: tuple[Parameter, ...], lines: list[str]) -> str:
    numbers = [p.name for p in parameters if p.kind in ("rows", "size")]
    head = "@triton.jit"
    if numbers:
        # One form for all numbers of rows: a plan's sizes vary from step to step.
        head += f"(do_not_specialize={numbers!r})".replace("'", '"')
    named = [*(p.name for p in parameters), "EARLY: tl.constexpr"]
    signature = f"def {name}({', '.join(named)}):"
    if len(signature) > _LINE:
        listed = "".join(f"    {n},\n" for n in named)
        signature = f"def {name}(\n{listed}):"
    imports = ["import triton", "import triton.language as tl", *templates_of(lines)]
    comments = [
        f"# {p.name}: {_described(p, graph)}" for p in parameters if p.kind in ("operand", "output")
    ]
    return "\n".join(
        [
            f'"""{plain_text(graph.name)}: emitted from the operations in the comments."""',
            "", *imports, "", "", *comments, head, signature, *lines, "",
        ]
    )  # fmt: skip


def templates_of(lines: list[str]) -> list[str]:
    """Lines that import what statements call of the templates."""
    used = [n for n in ("early", "functions", "rounding") if any(f"{n}." in line for line in lines)]
    if not used:
        return []
    return ["", f"from metainfer.backends.triton.templates import {', '.join(used)}"]


def _described(parameter: Parameter, graph: Graph) -> str:
    values = graph.inputs
    if parameter.kind == "output":
        values = tuple(v for v in graph.outputs if not v.is_state)
    return plain_text(print_type(values[parameter.number].type))


def plain_text(text: str) -> str:
    """Text that can stand in a comment or a docstring."""
    return re.sub(r'[^ -~]|"|\\', "?", text)


@lru_cache(maxsize=1024)
def module_of(name: str, text: str) -> ModuleType:
    """Run emitted text; it lies in a file, since Triton reads the source of its functions."""
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    path = cache_folder() / "sources" / f"{name}_{digest}.py"
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, text.encode(), lasting=False)
    module = ModuleType(f"metainfer_emitted.{name}_{digest}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    # The text that was made here, never what a file holds.
    exec(compile(text, str(path), "exec"), module.__dict__)
    return module
