"""Buffers that are live at once never overlap; views share storage."""

from hypothesis import given
from hypothesis import strategies as st

from metainfer.ir.arena import ALIGNMENT_BYTES, Arena, overlaid, plan_arena
from metainfer.ir.dtypes import F32
from metainfer.ir.flatten import FlatModule, flatten
from metainfer.ir.graph import Graph, Module, Value
from metainfer.ir.ops.record import Builder
from metainfer.ir.parser import parse_module
from metainfer.ir.types import Symbol, tensor
from metainfer.ir.views import strided_values

WIDTHS = (1, 3, 16, 64)


@st.composite
def programs(draw: st.DrawFn) -> Module:
    """Random chains of elementwise ops, views and joins over values of several widths."""
    builder = Builder()
    values = [Value("%in", tensor(F32, "T", draw(st.sampled_from(WIDTHS))))]
    for _ in range(draw(st.integers(1, 25))):
        x = draw(st.sampled_from(values))
        kind = draw(st.sampled_from(("silu", "join", "slice", "reshape", "transpose")))
        last = x.tensor.shape[-1]
        width = last.static if last.is_static else 0
        if not width or x.tensor.rank != 2 or kind == "silu":
            values.append(builder.emit("silu", x))
        elif kind == "join":
            values.append(builder.emit("concat", x, x, dim=1))
        elif kind == "slice":
            values.append(builder.emit("slice", x, dim=1, start=0, stop=max(width // 2, 1)))
        elif kind == "reshape":
            flat = builder.emit("reshape", x, shape=(x.tensor.num_elements(),))
            values.append(builder.emit("silu", flat))
        else:
            values.append(builder.emit("transpose", x, perm=(1, 0)))
    outputs = tuple(
        draw(st.lists(st.sampled_from(values[1:]), min_size=1, max_size=3, unique=True))
    )
    main = Graph("main", (values[0],), ops=tuple(builder.ops), outputs=outputs)
    return Module("m", (Symbol("T", 1, 7),), graphs=(main,))


def placed(lines: str, leave: str) -> dict[str, str]:
    """What takes whose place in a graph of adds, each of which may take that of its second."""
    module = parse_module(f"""module m {{
      dim T in [1, 8]
      main(%x: f32[T,8], %y: f32[T,8]) {{
        %0 = silu(%x) : f32[T,8]
        %1 = silu(%y) : f32[T,8]
        {lines}
        return {leave}
      }}
    }}""")
    flat = flatten(module)
    found = overlaid(flat, [{0: 1} if i.op.name == "add" else {} for i in flat.ops])
    arena = plan_arena(flat, module.limits(), in_place=found)
    for result, operand in found.items():
        assert arena.buffers[result].offset == arena.buffers[operand].offset
    assert dict(arena.in_place) == found
    return found


ADD = "%2 = add(%0, %1) : f32[T,8]"


def test_a_result_takes_the_place_of_an_operand_that_is_done_with() -> None:
    assert placed(ADD, "%2") == {"%2": "%1"}
    again = f"{ADD} %3 = silu(%0) : f32[T,8] %4 = add(%3, %2) : f32[T,8]"
    assert placed(again, "%4") == {"%2": "%1", "%4": "%2"}
    flat = "%2 = reshape(%1) {shape = (dim(8*T),)} : f32[8*T]"
    back = f"{flat} %3 = silu(%0) : f32[T,8] %4 = reshape(%2) {{shape = (dim(T), 8)}} : f32[T,8]"
    assert placed(f"{back} %5 = add(%3, %4) : f32[T,8]", "%5") == {"%5": "%1"}


def test_it_does_not_where_somebody_reads_on() -> None:
    reads = (
        (ADD, "%2, %1"),
        (f"{ADD} %3 = silu(%1) : f32[T,8]", "%2, %3"),
        (f"%3 = reshape(%1) {{shape = (dim(8*T),)}} : f32[8*T] {ADD}", "%2, %3"),
        ("%2 = add(%1, %1) : f32[T,8]", "%2"),
        ("%2 = add(%0, %x) : f32[T,8]", "%2"),  # an input
        ("%2 = slice(%1) {dim = 0, start = 0, stop = 1} : f32[1,8] "
         "%3 = slice(%0) {dim = 0, start = 0, stop = 1} : f32[1,8] "
         "%4 = add(%3, %2) : f32[1,8]", "%4"),
        ("%2 = slice(%1) {dim = 0, start = 0, stop = 1} : f32[1,8] "
         "%3 = add(%0, %2) : f32[T,8]", "%3"),
        ("%2 = tanh(%1) : f32[T,8] stream 1 after %1 %3 = add(%0, %1) : f32[T,8] "
         "%4 = concat(%2, %3) {dim = 1} : f32[T,16] after %2", "%4"),
    )  # fmt: skip
    for lines, leave in reads:
        assert "%1" not in placed(lines, leave).values(), lines
    waits = "%2 = tanh(%1) : f32[T,8] stream 1 after %1 %3 = add(%0, %1) : f32[T,8] after %2"
    assert placed(waits, "%3") == {"%3": "%1"}


def spans(arena: Arena, flat: FlatModule) -> list[tuple[int, int, int, int]]:
    return [(b.offset, b.offset + b.size, b.first, b.last) for b in arena.buffers.values()]


@given(programs(), st.integers(0, 300))
def test_no_two_live_buffers_overlap(module: Module, workspace: int) -> None:
    flat = flatten(module)
    arena = plan_arena(flat, module.limits(), workspace)
    found = spans(arena, flat)
    for i, (a, b, first, last) in enumerate(found):
        assert a % ALIGNMENT_BYTES == 0
        assert b <= arena.workspace_offset
        for c, d, other_first, other_last in found[i + 1 :]:
            if first <= other_last and other_first <= last:
                assert b <= c or d <= a
    assert arena.size == arena.workspace_offset + arena.workspace_size
    assert arena.workspace_size >= workspace


@given(programs())
def test_every_read_falls_into_the_life_of_its_storage(module: Module) -> None:
    flat = flatten(module)
    arena = plan_arena(flat, module.limits())
    end = len(flat.ops)
    for number, item in enumerate(flat.ops):
        for value in item.op.operands:
            buffer = arena.buffers[arena.owner[value.name]]
            assert buffer.first <= number <= buffer.last
    for value in flat.outputs:
        assert arena.buffers[arena.owner[value.name]].last == end


def test_a_reshape_of_a_view_with_gaps_owns_its_storage() -> None:
    builder = Builder()
    x = Value("%x", tensor(F32, "T", 8))
    part = builder.emit("slice", x, dim=1, start=0, stop=4)
    heads = builder.emit("reshape", part, shape=(x.tensor.shape[0], 2, 2))
    flat_copy = builder.emit("reshape", part, shape=(part.tensor.num_elements(),))
    main = Graph("main", (x,), ops=tuple(builder.ops), outputs=(heads, flat_copy))
    module = Module("m", (Symbol("T", 1, 7),), graphs=(main,))
    flat = flatten(module)
    names = [item.op.result.name for item in flat.ops]
    arena = plan_arena(flat, module.limits())
    assert arena.owner[names[1]] == "%x"
    assert arena.owner[names[2]] == names[2]
    assert strided_values(i.op for i in flat.ops) == {names[0], names[1]}


def test_reuse_saves_memory() -> None:
    builder = Builder()
    value = x = Value("%x", tensor(F32, "T", 64))
    for _ in range(20):
        value = builder.emit("silu", value)
    main = Graph("main", (x,), ops=tuple(builder.ops), outputs=(value,))
    module = Module("m", (Symbol("T", 1, 4),), graphs=(main,))
    assert plan_arena(flatten(module), module.limits()).size == 2 * 4 * 64 * 4


def test_inputs_whose_names_are_numbers_keep_storage_of_their_own() -> None:
    """Results are numbered anew in the flat list, past the names that inputs have."""
    builder = Builder(start=3)
    inputs = tuple(Value(name, tensor(F32, "T", 8)) for name in ("%0", "%2", "%1"))
    total = builder.emit("add", builder.emit("add", inputs[0], inputs[1]), inputs[2])
    main = Graph("main", inputs, ops=tuple(builder.ops), outputs=(total,))
    module = Module("m", (Symbol("T", 1, 7),), graphs=(main,))
    flat = flatten(module)
    assert [item.op.result.name for item in flat.ops] == ["%3", "%4"]
    buffers = plan_arena(flat, module.limits()).buffers
    assert buffers["%0"].offset != buffers["%3"].offset != buffers["%1"].offset
