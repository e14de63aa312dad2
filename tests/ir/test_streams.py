"""Streams and waits: what the verifier demands of them, and that storage follows their order."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metainfer.ir.arena import overlaid, plan_arena
from metainfer.ir.dtypes import F32
from metainfer.ir.errors import TypeMismatch
from metainfer.ir.flatten import flatten
from metainfer.ir.graph import Graph, Module, Op, Value
from metainfer.ir.naming import canonical_names
from metainfer.ir.parser import parse_graph, parse_module
from metainfer.ir.printer import print_graph, print_module
from metainfer.ir.streams import num_streams, order_of
from metainfer.ir.types import Mesh, Symbol, tensor
from metainfer.ir.verify import verify_graph, verify_module
from metainfer.ir.views import moving_values, strided_values

MESH = Mesh((("tp", 2),))


def checked(lines: str, inputs: str = "%x: f32[T,8]", leave: str = "return %3") -> Graph:
    """A graph of the lines, verified."""
    graph = parse_graph(f"graph f({inputs}) {{\n{lines}\n{leave}\n}}")
    verify_graph(graph, mesh=MESH)
    return graph


def refused(message: str, lines: str, **rest: str) -> TypeMismatch:
    with pytest.raises(TypeMismatch, match=message) as caught:
        checked(lines, **rest)
    assert caught.value.advice
    return caught.value


SHARED_AND_ROUTED = """
  %0 = silu(%x) : f32[T,8]
  %1 = tanh(%x) : f32[T,8] stream 2 after %x
  %2 = exp(%0) : f32[T,8]
  %3 = add(%1, %2) : f32[T,8] after %1
"""


def test_a_read_across_streams_wants_a_wait() -> None:
    graph = checked(SHARED_AND_ROUTED)
    assert num_streams(graph.ops) == 3
    error = refused("reads %1, which stream 2 makes", SHARED_AND_ROUTED.replace(" after %1", ""))
    assert "after %1" in error.advice


def test_waits_are_text() -> None:
    graph = checked(SHARED_AND_ROUTED)
    text = print_graph(graph)
    assert "stream 2 after %x" in text
    assert parse_graph(text) == graph
    renamed = canonical_names(
        replace(graph, ops=tuple(_renamed(op) for op in graph.ops), outputs=(_value("%v3"),))
    )
    assert renamed.ops == graph.ops


def _value(name: str) -> Value:
    return Value(name, tensor(F32, "T", 8))


def _renamed(op: Op) -> Op:
    def new(name: str) -> str:
        return name if name == "%x" else f"%v{name[1:]}"

    return replace(
        op,
        operands=tuple(_value(new(v.name)) for v in op.operands),
        results=tuple(_value(new(v.name)) for v in op.results),
        after=tuple(map(new, op.after)),
    )


def test_a_wait_for_nothing_is_refused() -> None:
    with pytest.raises(TypeMismatch, match=r"waits for step\.slots"):
        checked("  %3 = silu(%x) : f32[T,8] after step.slots")


def test_an_input_is_the_main_streams() -> None:
    inputs = "%x: f32[T,8], %y: f32[T,8]"
    lines = SHARED_AND_ROUTED.replace("after %x", "after %y")
    refused("reads %x, an input", lines, inputs=inputs)
    # What the main stream has done, it did with its inputs made.
    checked(SHARED_AND_ROUTED.replace("after %x", "after %0"), inputs=inputs)


def test_a_side_stream_is_forked_from_the_main_one() -> None:
    # A graph that is captured would begin on a stream that the capture knows nothing of.
    made = '{dtype = "f32", shape = (dim(T), 8), value = 1.0}'
    lines = f"""
      %1 = full() {made} : f32[T,8] stream 1
      %2 = silu(%x) : f32[T,8]
      %3 = add(%1, %2) : f32[T,8] after %1
    """
    refused("stream 1 begins without a wait", lines)
    checked(lines.replace("stream 1", "stream 1 after %x"))


def test_a_side_stream_is_joined_at_the_end() -> None:
    # B65: "capturing stream has unjoined work".
    lines = """
      %3 = silu(%x) : f32[T,8]
      %4 = tanh(%x) : f32[T,8] stream 1 after %x
    """
    refused("stream 1 is not joined at the end", lines)
    refused("stream 1 is not joined at the end", lines, leave="return %3, %4")


def test_a_side_stream_is_joined_at_a_call() -> None:
    def module(wait: str) -> Module:
        text = f"""
        module m {{
          dim T in [1, 8]
          block b(%x: f32[T,8]) {{
            %0 = silu(%x) : f32[T,8]
            return %0
          }}
          main(%x: f32[T,8]) {{
            %0 = tanh(%x) : f32[T,8] stream 1 after %x
            %1 = silu(%x) : f32[T,8] {wait}
            %2 = call b(%1) : f32[T,8]
            %3 = add(%0, %2) : f32[T,8] after %0
            return %3
          }}
        }}
        """
        return parse_module(text)

    with pytest.raises(TypeMismatch, match="stream 1 is not joined at this call"):
        verify_module(module(""))
    verify_module(module("after %0"))


MEET = '{axis = "tp", ranks = 2}'


def test_ranks_meet_in_one_order() -> None:
    # B63: two streams that issue collectives may meet in another order on another rank.
    lines = f"""
      %0 = all_reduce(%x) {MEET} : f32[T,8]
      %1 = all_reduce(%x) {MEET} : f32[T,8] stream 1 after %x
      %3 = add(%0, %1) : f32[T,8] after %1
    """
    refused("have no order: ranks may meet", lines)
    checked(lines.replace("stream 1 after %x", "stream 1 after %x, %0"))
    checked(
        lines.replace("[T,8]\n", "[T,8] stream 1 after %x\n", 1).replace("after %1", "after %1")
    )


def test_ranks_meet_in_one_order_within_fused_groups_too() -> None:
    group = f"""fused[sum_silu](%x) : f32[T,8] STREAM body (%a: f32[T,8]) {{
        %0 = all_reduce(%a) {MEET} : f32[T,8]
        %1 = silu(%0) : f32[T,8]
        return %1
      }}"""
    lines = f"""
      %0 = {group.replace("STREAM", "")}
      %1 = {group.replace("STREAM", "stream 1 after %x")}
      %3 = add(%0, %1) : f32[T,8] after %1
    """
    refused("have no order: ranks may meet", lines)


def test_a_state_is_not_written_while_another_stream_reads_it() -> None:
    text = """
    module m {
      dim T in [1, 8]
      step
      main(%q: f32[T,2,4], %k: f32[T,1,4]) {
        states {
          $kv : pages(k: f32[1,4], v: f32[1,4]) per token page 16
        }
        %0 = attention(%q, $kv, step.starts, step.lengths, step.pages) : f32[T,2,4] stream 1 WAIT
        %1 = kv_write($kv, %k, %k, step.slots) : pages(k: f32[1,4], v: f32[1,4]) per token page 16
        %2 = silu(%q) : f32[T,2,4] after %0
        return %0, %2 states %1
      }
    }
    """.replace("WAIT", "after %q")
    with pytest.raises(TypeMismatch, match=r"writes over \$kv while stream 1 may still read it"):
        verify_module(parse_module(text))
    ordered = text.replace("page 16\n        %2", "page 16 after %0\n        %2")
    verify_module(parse_module(ordered))


def test_views_and_calls_run_on_no_stream() -> None:
    refused("runs on no stream of its own", "  %3 = slice(%x) {dim = 0, start = 0, stop = 1} : "
            "f32[1,8] stream 1 after %x")  # fmt: skip


def test_views_show_what_another_stream_makes() -> None:
    lines = """
      %0 = silu(%x) : f32[T,8] stream 1 after %x
      %1 = reshape(%0) {shape = (dim(8*T),)} : f32[8*T]
      %3 = tanh(%1) : f32[8*T] WAIT
    """
    refused("reads %1, which stream 1 makes", lines.replace("WAIT", ""))
    checked(lines.replace("WAIT", "after %0"))
    checked(lines.replace("WAIT", "after %1"))


# --- order and storage -------------------------------------------------------------------------


@st.composite
def programs(draw: st.DrawFn) -> Module:
    """Random ops on three streams with whatever waits are drawn: reads wait, others may."""
    x = Value("%in", tensor(F32, "T", 4))
    values, streams, ops = [x], {"%in": 0}, list[Op]()
    for number in range(draw(st.integers(2, 14))):
        stream = draw(st.sampled_from([0, 0, 1, 2]))
        read = draw(st.lists(st.sampled_from(values[-4:]), min_size=1, max_size=2, unique=True))
        after = {v.name for v in read if streams[v.name] != stream or v is x}
        after |= {draw(st.sampled_from(values)).name} if draw(st.booleans()) else set()
        made = Value(f"%{number}", tensor(F32, "T", draw(st.sampled_from([4, 4, 12]))))
        attrs = (("dim", 1),)
        parts = tuple(read) * (3 if made.tensor.shape[1].static == 12 else 1)
        wide = sum(v.tensor.shape[1].static for v in parts)
        made = Value(made.name, tensor(F32, "T", wide))
        ops.append(Op("concat", parts, (made,), attrs, stream=stream, after=tuple(sorted(after))))
        values.append(made)
        streams[made.name] = stream
    outputs = (values[-1],)
    return Module(
        "m", (Symbol("T", 1, 5),), graphs=(Graph("main", (x,), ops=tuple(ops), outputs=outputs),)
    )


def _reachable(ops: list[Op]) -> list[set[int]]:
    """What has ended before each op: what it waits for, its stream's earlier ops, and theirs."""
    makers = {v.name: i for i, op in enumerate(ops) for v in op.results}
    found: list[set[int]] = []
    for number, op in enumerate(ops):
        before = {i for i in range(number) if ops[i].stream == op.stream}
        before |= {makers[name] for name in op.after if name in makers}
        found.append(before.union(*(found[i] for i in before)))
    return found


@given(programs())
def test_order_is_what_waits_and_streams_reach(module: Module) -> None:
    ops = [item.op for item in flatten(module).ops]
    order, before = order_of(ops), _reachable(ops)
    releases = order.releases()
    for second in range(len(ops)):
        for first in range(len(ops)):
            assert order.precedes(first, second) == (first in before[second])
        later = [q for q in range(len(ops)) if q >= releases[second]]
        assert all(second in before[q] for q in later)
        # It is the first such number: the op before it may run beside.
        assert releases[second] == second + 1 or second not in before[releases[second] - 1]


@given(programs(), st.lists(st.sampled_from([{}, {0: 0}, {0: 0}]), min_size=14, max_size=14))
def test_storage_is_reused_only_by_what_begins_after_its_last_use(
    module: Module, allowed: list[dict[int, int]]
) -> None:
    # B84: an output was freed and taken again while another stream still read it.
    flat = flatten(module)
    ops = [item.op for item in flat.ops]
    over = overlaid(flat, allowed[: len(ops)])
    arena, before = plan_arena(flat, module.limits(), in_place=over), _reachable(ops)
    uses: dict[str, list[int]] = {}
    for number, op in enumerate(ops):
        for value in (*op.operands, *op.results):
            uses.setdefault(arena.owner[value.name], []).append(number)
    for name, buffer in arena.buffers.items():
        for other, taken in arena.buffers.items():
            apart = buffer.offset + buffer.size <= taken.offset or (
                taken.offset + taken.size <= buffer.offset
            )
            if name == other or apart or taken.first < 0 or buffer.first > taken.first:
                continue
            for use in uses[name]:
                if use == taken.first and over.get(other) == name:
                    continue  # the op that is allowed to write where it reads
                assert use in before[taken.first], (name, other, use)
    for result, operand in over.items():
        assert arena.buffers[result].offset == arena.buffers[operand].offset
        assert allowed[arena.buffers[result].first]


def test_each_stream_has_scratch_space_of_its_own() -> None:
    module = Module(
        "m", (Symbol("T", 1, 4),), graphs=(replace(checked(SHARED_AND_ROUTED), name="main"),)
    )
    arena = plan_arena(flatten(module), module.limits(), workspace=1000)
    starts = [arena.workspace_of(s) for s in range(3)]
    assert [b - a for a, b in pairwise(starts)] == [1024, 1024]
    assert arena.size == starts[-1] + 1024


def test_a_flat_module_waits_by_flat_names() -> None:
    text = """
    module m {
      dim T in [1, 8]
      block b(%x: f32[T,8]) {
        %0 = silu(%x) : f32[T,8] stream 1 after %x
        %1 = tanh(%x) : f32[T,8]
        %2 = add(%0, %1) : f32[T,8] after %0
        return %2
      }
      main(%x: f32[T,8]) {
        %0 = call b(%x) : f32[T,8]
        %1 = call b(%0) : f32[T,8]
        return %1
      }
    }
    """
    module = parse_module(text)
    verify_module(module)
    assert parse_module(print_module(module)) == module
    waits = [item.op.after for item in flatten(module).ops]
    assert waits == [("%x",), (), ("%0",), ("%2",), (), ("%3",)]


def test_rows_from_a_symbolic_place_move_but_have_no_gaps() -> None:
    graph = parse_graph("""
    graph f(%x: f32[T,8]) {
      %0 = slice(%x) {dim = 0, start = dim(T//2), stop = dim(T)} : f32[T-T//2,8]
      %1 = reshape(%0) {shape = (dim(8*T-8*(T//2)),)} : f32[8*T-8*(T//2)]
      %2 = slice(%x) {dim = 1, start = 0, stop = 4} : f32[T,4]
      return %1, %2
    }
    """)
    assert moving_values(graph.ops) == {"%0", "%1"}
    assert strided_values(graph.ops) == {"%2"}
