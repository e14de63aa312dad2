"""Linears that read the same input become one linear, and slices of its result."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from metainfer.ir.dims import dim
from metainfer.ir.dtypes import Block
from metainfer.ir.errors import TypeMismatch
from metainfer.ir.graph import Graph, Module, Op, Value, attrs_of
from metainfer.ir.naming import canonical_names
from metainfer.ir.ops.record import infer_types
from metainfer.ir.refine import row_blocks
from metainfer.ir.sharding import propagate
from metainfer.ir.types import TensorType
from metainfer.passes.gains import Gain, bytes_of, sizes_text, typical_sizes
from metainfer.passes.target import Decision, Target
from metainfer.passes.weight_items import reaches_topk
from metainfer.passes.weights import LoadEditor


@dataclass(frozen=True)
class _Group:
    """Linears that become one, and the names of its weight and bias ("" if it has none)."""

    members: tuple[Op, ...]
    weight: str
    bias: str


def merge_linears(module: Module, target: Target) -> Module:
    """Read an input once for all linears that read it.

    Weights are joined by rows in the load graph; their formats are known, since `quantize` ran
    before; one scale for all rows is repeated to one a row. Linears stay apart, with a line in the
    report, where formats differ, where only some have a bias, or where a weight is read elsewhere
    too.

    Before::

        graph f(%x: f32[T,8], @a.q_proj.weight: f32[16,8], @a.k_proj.weight: f32[4,8]) {
          %0 = linear(%x, @a.q_proj.weight) : f32[T,16]
          %1 = linear(%x, @a.k_proj.weight) : f32[T,4]
          return %0, %1
        }

    After::

        module f {
          dim T in [1, 512]
          load main {
            weights {
              @a.q_proj.weight : f32[16,8]
              @a.k_proj.weight : f32[4,8]
            }
            %0 = concat_rows(@a.q_proj.weight, @a.k_proj.weight) : f32[20,8]
            return %0
          }
          main(%x: f32[T,8]) {
            weights {
              @a.qk_proj.weight : f32[20,8]
            }
            %0 = linear(%x, @a.qk_proj.weight) : f32[T,20]
            %1 = slice(%0) {dim = 1, start = 0, stop = 16} : f32[T,16]
            %2 = slice(%0) {dim = 1, start = 16, stop = 20} : f32[T,4]
            return %1, %2
          }
        }
    """
    for graph in module.graphs:
        candidates = _candidates(graph, target)
        if candidates:
            _report(module, graph, candidates, target)
            module = _merge(module, graph, _named(graph, candidates))
    return module


def _candidates(graph: Graph, target: Target) -> list[tuple[Op, ...]]:
    """Groups of linears that can be one, in program order."""
    by_input: dict[str, list[Op]] = {}
    for op in graph.ops:
        if op.name == "linear":
            by_input.setdefault(op.operands[0].name, []).append(op)
    uses = graph.uses()
    found = []
    sets: Iterable[list[Op]] = by_input.values()
    if target.device.kind == "cpu":
        # What chooses experts there reads rows that lie densely.
        sets = [[op for op in members if not reaches_topk(graph, op)] for members in sets]
    for members in _apart(sets, uses):
        reason = _obstacle(graph, members, uses)
        if reason:
            names = " ".join(op.operands[1].name for op in members)
            subject = f"{graph.name}: {names}"
            target.report.add(Decision("merge_linears", subject, "kept apart", reason))
            continue
        found.append(_in_order_of_reading(members, uses))
    return found


def _apart(sets: Iterable[list[Op]], uses: dict[str, list[Op]]) -> Iterator[list[Op]]:
    """Linears of one input that become one: those whose results one op reads, and the others.

    A gate and its up stay a product that is their own, beside a router of the same tokens: what
    follows takes it whole.
    """
    for members in sets:
        by_reader: dict[str, list[Op]] = {}
        for op in members:
            readers = uses.get(op.result.name, [])
            lone = readers[0].results[0].name if len(readers) == 1 and readers[0].results else ""
            by_reader.setdefault(lone, []).append(op)
        pairs = [found for lone, found in by_reader.items() if lone and len(found) > 1]
        rest = [op for op in members if not any(op in pair for pair in pairs)]
        yield from (found for found in (*pairs, rest) if len(found) > 1)


def _in_order_of_reading(members: list[Op], uses: dict[str, list[Op]]) -> tuple[Op, ...]:
    """Two linears that one op reads, in the order in which it does: a gate before its up."""
    readers = [uses.get(op.result.name, []) for op in members]
    if len(members) == 2 and readers[0] == readers[1] and len(readers[0]) == 1:
        names = [v.name for v in readers[0][0].operands]
        members = sorted(members, key=lambda op: names.index(op.result.name))
    return tuple(members)


def _obstacle(graph: Graph, members: Sequence[Op], uses: dict[str, list[Op]]) -> str:
    """Why the linears must stay apart, "" if they need not."""
    params = [v for op in members for v in op.operands[1:]]
    computed = next((v.name for v in params if not v.is_weight), "")
    if computed:
        return f"{computed} is computed in the step"
    names = [v.name for v in params]
    shared = [n for n in names if len(uses[n]) > 1 or n in graph.returned() or names.count(n) > 1]
    if shared:
        return f"{shared[0]} is read elsewhere too"
    if len({len(op.operands) for op in members}) > 1:
        return "only some have a bias"
    for place, what in ((1, "weights"), (2, "biases")):
        types = [_by_rows(op.operands[place].tensor) for op in members if len(op.operands) > place]
        reason = _unlike(types, what)
        if reason:
            return reason
    return ""


def _by_rows(type_: TensorType) -> TensorType:
    """The type with a scale for each row where it has one for all: what rows are joined as."""
    dtype = type_.dtype
    if not isinstance(dtype, Block) or len(dtype.block) < type_.rank or dtype.block[0]:
        return type_
    return type_.with_dtype(row_blocks(dtype, type_.concrete({}), 1))


def _unlike(types: Sequence[TensorType], what: str) -> str:
    """Why tensors cannot be joined by rows, "" if they can."""
    formats = sorted({str(t.dtype) for t in types})
    if len(formats) > 1:
        return f"formats of {what} differ: {', '.join(formats)}"
    if len({(t.sharding, t.layout) for t in types}) > 1:
        return f"shardings or packings of {what} differ"
    if types and not all(t.shape[0].is_static for t in types):
        return f"{what} have a symbolic number of rows"
    if not types:
        return ""
    try:
        propagate("concat_rows", types, {}, infer_types("concat_rows", types, {}))
    except TypeMismatch as error:
        return error.what
    return ""


def _report(module: Module, graph: Graph, groups: Sequence[tuple[Op, ...]], target: Target) -> None:
    env = typical_sizes(module, target)
    for members in groups:
        fewer = len(members) - 1
        gain = Gain(fewer * bytes_of(members[0].operands[0], env), fewer)
        subject = f"{graph.name}: {' '.join(op.operands[1].name for op in members)}"
        data = (("bytes", gain.bytes), ("launches", gain.launches))
        reason = gain.text(target, sizes_text(env))
        target.report.add(Decision("merge_linears", subject, "one linear", reason, data=data))


# --- names -------------------------------------------------------------------------------------


def _named(graph: Graph, candidates: Sequence[tuple[Op, ...]]) -> list[_Group]:
    taken = {w.name for w in graph.weights}
    groups = []
    for members in candidates:
        names = []
        for place in (1, 2):
            if len(members[0].operands) <= place:
                names.append("")
                continue
            names.append(_free(joined_name([op.operands[place].name for op in members]), taken))
            taken.add(names[-1])
        groups.append(_Group(members, *names))
    return groups


def _free(name: str, taken: set[str]) -> str:
    free, number = name, 1
    while free in taken:
        number += 1
        free = f"{name}_{number}"
    return free


def joined_name(names: Sequence[str]) -> str:
    """A name for weights put together: what they share, around what each has of its own.

    ``@a.q_proj.weight, @a.k_proj.weight`` -> ``@a.qk_proj.weight``;
    ``@m.gate.weight, @m.up.weight`` -> ``@m.gate_up.weight``.
    """
    parts = [name[1:].split(".") for name in names]
    lead = _num_shared(parts)
    tail = _num_shared([p[lead:][::-1] for p in parts])
    own = [".".join(p[lead : len(p) - tail]) for p in parts]
    if not all(own):
        return "@" + "_".join(name[1:] for name in names)
    suffix = _common_suffix(own)
    stems = [word.removesuffix(suffix) for word in own]
    between = "" if all(len(stem) == 1 for stem in stems) else "_"
    middle = between.join(stems) + suffix
    shared_tail = parts[0][len(parts[0]) - tail :]
    return "@" + ".".join([*parts[0][:lead], middle, *shared_tail])


def _num_shared(rows: Sequence[Sequence[str]]) -> int:
    """How many leading items all rows share."""
    columns = zip(*rows, strict=False)
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))


def _common_suffix(words: Sequence[str]) -> str:
    """What all words end in, from an underscore on ("_proj"), "" if nothing."""
    shared = _num_shared([word[::-1] for word in words])
    ending = words[0][len(words[0]) - shared :]
    suffix = ending[ending.index("_") :] if "_" in ending else ""
    return suffix if all(len(word) > len(suffix) for word in words) else ""


# --- rewriting ---------------------------------------------------------------------------------


def _merge(module: Module, graph: Graph, groups: Sequence[_Group]) -> Module:
    editor = LoadEditor(module, graph.name)
    params: dict[str, tuple[Value, ...]] = {}
    for group in groups:
        made = []
        for place, name in ((1, group.weight), (2, group.bias)):
            if name:
                rows = [_row_wise(editor, op.operands[place].name) for op in group.members]
                made.append(editor.add(name, editor.emit("concat_rows", *rows)))
        params[group.weight] = tuple(made)
    module = editor.finish(lambda g: replace(g, ops=tuple(_rewritten(g, groups, params))))
    load = module.load(graph.name)
    assert load is not None  # the editor has just made it
    named = canonical_names(module.graph(graph.name))
    return module.with_graph(named).with_load(canonical_names(load))


def _row_wise(editor: LoadEditor, weight: str) -> Value:
    """A weight as its rows can be joined: one scale for all of them is repeated, exactly."""
    made = editor.made(weight)
    wanted = _by_rows(made.tensor).dtype
    if wanted == made.tensor.dtype:
        return made
    return editor.emit("refine_scales", made, format=str(wanted))


def _rewritten(
    graph: Graph, groups: Sequence[_Group], params: dict[str, tuple[Value, ...]]
) -> list[Op]:
    replaced = {op.result.name: group for group in groups for op in group.members}
    begun: set[str] = set()
    ops: list[Op] = []
    for op in graph.ops:
        group = replaced.get(op.results[0].name) if op.results else None
        if group is None:
            ops.append(op)
        elif group.weight not in begun:
            begun.add(group.weight)
            ops += _merged_ops(group, params[group.weight])
    return ops


def _merged_ops(group: _Group, params: tuple[Value, ...]) -> list[Op]:
    """The one linear, and a slice for each of the old ones, under their names."""
    first = group.members[0]
    x, result = first.operands[0], first.result.tensor
    axis = result.rank - 1
    whole = result.with_shape((*result.shape[:-1], params[0].tensor.shape[0]))
    wide = Value(f"{first.result.name}:all", whole)
    ops = [replace(first, operands=(x, *params), results=(wide,))]
    at = dim(0)
    for op in group.members:
        stop = at + op.result.tensor.shape[-1]
        attrs = attrs_of({"dim": axis, "start": at.static, "stop": stop.static})
        ops.append(Op("slice", (wide,), op.results, attrs, source=op.source))
        at = stop
    return ops
