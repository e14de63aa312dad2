"""Emitted groups: numbers in Triton's interpreter, code for cards that are not here, refusals."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch_samples import Case, build
from triton_groups import (
    GROUPS,
    SINGLE,
    WIDTHS,
    as_op,
    check_group,
    group,
    group_data,
    latent_group,
    random,
    writing_group,
)
from triton_worker import check_compiles, check_interpreted, refused

from metainfer.backends.torch.check import make_op
from metainfer.backends.triton.emit.source import body_of, emit, waiting
from metainfer.backends.triton.pointwise import settled_of
from metainfer.ir.dtypes import BF16, I32, parse_dtype
from metainfer.ir.graph import Op, Value
from metainfer.ir.parser import parse_graph
from metainfer.ir.types import tensor

NONE: frozenset[int] = frozenset()
# What the emitter leaves to libraries.
REFUSED = {
    ("sum", (0, -1)), ("sum", ()), ("max", (1, 2)), ("sum", "i32"), ("sum", "bool"),
    ("max", "i32"), ("max", (0, 1)), ("div", "i32"), ("topk", "i32"),
}  # fmt: skip


def ids(value: Any) -> str:
    return value if isinstance(value, str) else str(value[0])


@pytest.mark.parametrize(("case", "float_type"), SINGLE, ids=ids)
def test_single_ops(case: Case, float_type: str) -> None:
    op, data = build(case, float_type)
    found = refused(f"triton.{op.name}", op)
    if found:
        dims, dtype = op.attr.get("dims"), str(op.operands[0].tensor.dtype)
        assert {(op.name, dims), (op.name, dtype)} & REFUSED, found
        return
    check_interpreted(f"triton.{op.name}", op, data)


@pytest.mark.parametrize("size", WIDTHS)
@pytest.mark.parametrize("kind", GROUPS)
def test_groups(kind: str, size: str) -> None:
    for dtype, tokens in (("bf16", 5), ("f32", 1)):
        op = group(kind, dtype, WIDTHS[size])
        check_group(op, group_data(op, tokens), {"T": tokens})


@pytest.mark.parametrize("part", ["T-4*(T//8)", "4*(T//8)"])
@pytest.mark.parametrize("kind", GROUPS)
def test_groups_of_a_part_of_the_rows(kind: str, part: str) -> None:
    # What overlap makes of long steps: no single size tells the number of tokens.
    op = group(kind, "f32", 16, rows=part)
    check_group(op, group_data(op, 13), {"T": 13})


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("kind", ["rope_kv_write", "qk_norm_rope_kv_write"])
def test_keys_and_values_are_written(kind: str, interleaved: bool) -> None:
    for tokens, width in ((5, 16), (1, 6)):
        op, data = writing_group(kind, tokens, width, interleaved)
        check_group(as_in_a_plan(op), data, {"T": tokens})


def as_in_a_plan(op: Op) -> Op:
    """Positions and slots are fields of the step, what is no tensor of tokens is a weight."""

    def named(value: Value) -> Value:
        if value.is_state or value.name == "%x":
            return value
        fields = {"%p": "step.positions", "%slots": "step.slots"}
        return replace(value, name=fields.get(value.name, f"@{value.name[1:]}"))

    return replace(op, operands=tuple(map(named, op.operands)))


@pytest.mark.parametrize("kind", ["rope_kv_write", "qk_norm_rope_kv_write"])
def test_what_no_launch_writes_is_read_before_the_launch_in_front_has_ended(kind: str) -> None:
    op = as_in_a_plan(writing_group(kind, 5, 16, False)[0])
    assert op.body is not None
    settled = settled_of(op)
    given = [f"x{i}" for i in range(len(op.operands)) if not op.operands[i].is_state]
    before, after = emit(body_of(op), NONE, NONE, settled).text.split("early.wait_for_last(EARLY)")
    body = before.split("early.let_next(EARLY)")[1]
    loaded = set(re.findall(r"tl\.load\((\w+)", body))
    assert loaded == {"cos0", "sin0", *(x for x in given if int(x[1:]) in settled)}
    assert set(re.findall(r"tl\.load\((\w+)", after)) == {"x0"}
    assert "early.wait(EARLY)" in emit(body_of(op), NONE, NONE).text


def test_a_name_that_a_loop_changes_is_read_after_the_wait() -> None:
    lines = [
        "    a = tl.load(w)", "    t = 0.0", "    n = a + 1", "    for k in range(4):",
        "        t = t + tl.load(x + k)", "    u = t + n", "    n = u", "    n = 3", "    y = n",
        "    tl.store(z, y)",
    ]  # fmt: skip
    made = waiting(lines, ["x", "z"])
    at = made.index("    early.wait_for_last(EARLY)")
    assert made[:at] == ["    early.let_next(EARLY)", *lines[:3]]
    assert made[at + 1 :] == lines[3:]
    assert waiting(lines[1:], ["x", "z"])[0] == "    early.wait(EARLY)"


@pytest.mark.parametrize("kind", ["rope_kv_write", "qk_norm_rope_kv_write"])
def test_keys_and_values_are_rounded_where_they_are_written(kind: str) -> None:
    op, data = writing_group(kind, 5, 24, False, is_rounded=True)
    check_group(op, data, {"T": 5})


@pytest.mark.parametrize("is_rounded", [False, True])
def test_kv_write_alone(is_rounded: bool) -> None:
    op, data = writing_group("rope_kv_write", 3, 8, False, is_rounded=is_rounded)
    state = op.operands[2]
    entry = tensor(BF16, 3, 2, 8)
    types = [state.type, entry, entry, tensor(I32, 3)]
    alone = make_op("kv_write", types, {})
    check_interpreted(
        "triton.kv_write", alone, [data[2], *(random(entry, {}) for _ in "kv"), data[3]]
    )


@pytest.mark.parametrize("is_rounded", [False, True])
def test_latents_are_written(is_rounded: bool) -> None:
    for tokens, widths in ((5, (32, 6)), (1, (24, 8))):
        op, data = latent_group(
            tokens, interleaved=tokens > 1, is_rounded=is_rounded, widths=widths
        )
        check_group(op, data, {"T": tokens})


TABLES = ("bf16", "f32", "i8/32:f16", "i8/row:f32", "f8e4m3/16x16:f32", "f8e4m3/32:f8e8m0",
          "u8/32:f32+f32")  # fmt: skip


@pytest.mark.parametrize("table", TABLES)
def test_embedding(table: str) -> None:
    types = [tensor(I32, 2, 3), tensor(parse_dtype(table), 20, 70)]
    op = make_op("embedding", types, {"dtype": "bf16"}, [1])
    ids_ = np.array([[3, -1, 19], [0, 7, -1]], np.int32)
    check_interpreted("triton.embedding", op, [ids_, random(types[1], {})])


def test_views_with_gaps_are_read_where_they_lie() -> None:
    graph = parse_graph("""graph g(%x: f32[T,3,40], %y: f32[3,T,40]) {
      %0 = transpose(%x) {perm = (1, 0, 2)} : f32[3,T,40]
      %1 = add(%0, %y) : f32[3,T,40]
      return %1
    }""")
    inner = as_op(graph, "pointwise")
    whole, part = random(tensor(I32, 5, 3, 80), {}), random(tensor(I32, 3, 5, 40), {})
    data = [whole.astype(np.float32)[:, :, 40:], part.astype(np.float32)]
    assert not data[0].flags.c_contiguous
    check_group(inner, data, {"T": 5})
    text = emit(body_of(inner), frozenset([0]), frozenset([0])).text
    assert "stride0_0" in text
    assert "stride0_2" not in text


@pytest.mark.parametrize("kind", GROUPS)
def test_groups_compile_for_cards_that_are_not_here(kind: str) -> None:
    op = replace(group(kind, "bf16", 256), attrs=(("kind", "pointwise"),))
    check_compiles("triton.pointwise", op, {"T": 48})


def test_wide_rows_and_writes_compile() -> None:
    op, _ = writing_group("qk_norm_rope_kv_write", 4, 128, False, is_rounded=True)
    check_compiles("triton.qk_norm_rope_kv_write", op, {"T": 4})
    op, _ = latent_group(4, is_rounded=True, widths=(512, 64))
    check_compiles("triton.norm_rope_latent_write", op, {"T": 4})
    wide = make_op("rms_norm", [tensor(BF16, "T", 16384), tensor(BF16, 16384)], {"eps": 1e-5})
    check_compiles("triton.rms_norm", wide, {"T": 4})


# --- text ---------------------------------------------------------------------------------


def test_the_text_shows_the_operations_that_it_came_from() -> None:
    text = emit(body_of(group("add_rms_norm", "bf16", 37)), NONE, NONE).text
    assert (
        text
        == '''"""add_rms_norm: emitted from the operations in the comments."""

import triton
import triton.language as tl

from metainfer.backends.triton.templates import early


# x0: bf16[T,37]
# x1: bf16[T,37]
# x2: bf16[37]
# y0: bf16[T,37]
# y1: bf16[T,37]
@triton.jit(do_not_specialize=["rows0"])
def add_rms_norm(x0, x1, x2, y0, y1, rows0, EARLY: tl.constexpr):
    early.wait(EARLY)
    c37 = tl.arange(0, 64)[None, :]
    c37_in = c37 < 37
    # rows of [T,37]
    r0 = tl.program_id(0).to(tl.int64) * 16 + tl.arange(0, 16)[:, None]
    r0_in = r0 < rows0
    v0 = tl.load(x0 + r0 * 37 + c37, mask=r0_in & c37_in, other=0.0).to(tl.float32)
    v1 = tl.load(x1 + r0 * 37 + c37, mask=r0_in & c37_in, other=0.0).to(tl.float32)
    # %0 = add(%x, %r) : bf16[T,37]
    v2 = v0 + v1
    v2 = v2.to(tl.bfloat16).to(tl.float32)
    tl.store(y0 + r0 * 37 + c37, v2.to(tl.bfloat16), mask=r0_in & c37_in)
    # %1 = rms_norm(%0, %w) {eps = 1e-05} : bf16[T,37]
    v3 = v2 * v2
    s4 = tl.sum(tl.where(c37_in, v3, 0.0), axis=1)[:, None]
    s5 = tl.rsqrt(s4 / 37 + 1e-05)
    v6 = tl.load(x2 + c37, mask=c37_in, other=0.0).to(tl.float32)
    v7 = v2 * s5 * v6
    v7 = v7.to(tl.bfloat16).to(tl.float32)
    tl.store(y1 + r0 * 37 + c37, v7.to(tl.bfloat16), mask=r0_in & c37_in)
'''
    )


def test_emitted_text_is_formatted(tmp_path: Path) -> None:
    ops = [*(group(kind, "bf16", 37) for kind in GROUPS)]
    ops += [writing_group(k, 2, 64, False)[0] for k in ("rope_kv_write", "qk_norm_rope_kv_write")]
    for number, op in enumerate(ops):
        (tmp_path / f"{number}.py").write_text(emit(body_of(op), NONE, NONE).text)
    command = [sys.executable, "-m", "ruff", "format", "--isolated", "--line-length", "100"]
    done = subprocess.run(
        [*command, "--diff", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def test_equal_groups_of_two_layers_are_one_text() -> None:
    first = make_op("silu", [tensor(BF16, "T", 64)], {})
    names = {"%0": "%812", "%r0": "%813"}
    second = replace(
        first,
        operands=tuple(replace(v, name=names[v.name]) for v in first.operands),
        results=tuple(replace(v, name=names[v.name]) for v in first.results),
    )
    assert first != second
    assert emit(body_of(first), NONE, NONE) is emit(body_of(second), NONE, NONE)


def test_names_of_a_plan_do_not_become_code() -> None:
    graph = parse_graph("""graph g(%x: f32[T,4]) {
      %"a\\"\\"\\"\\nimport os" = exp(%x) : f32[T,4]
      %1 = silu(%"a\\"\\"\\"\\nimport os") : f32[T,4]
      return %1
    }""")
    op = replace(as_op(graph, "x"), attrs=(("kind", 'p"""\nimport os\n'),))
    text = emit(body_of(op), NONE, NONE).text
    assert not [line for line in text.splitlines() if line.startswith("import os")]
    compile(text, "emitted", "exec")


# --- refusals -----------------------------------------------------------------------------

BODIES = {
    "needs another row": """graph g(%x: f32[T,8], %w: f32[4]) {
      %0 = reshape(%x) {shape = (dim(T), 2, 4)} : f32[T,2,4]
      %1 = rms_norm(%0, %w) {eps = 1e-5} : f32[T,2,4]
      %2 = reshape(%1) {shape = (dim(T), 8)} : f32[T,8]
      %3 = silu(%2) : f32[T,8]
      return %3
    }""",
    "does not know cumsum": """graph g(%x: f32[T,8]) {
      %0 = cumsum(%x) {dim = 1} : f32[T,8]
      return %0
    }""",
    "a tile holds 32768": """graph g(%x: f32[T,40000]) {
      %0 = softmax(%x) : f32[T,40000]
      return %0
    }""",
    "does not compute with f64": """graph g(%x: f64[T,8]) {
      %0 = silu(%x) : f64[T,8]
      return %0
    }""",
    "symbolic where a number": """graph g(%x: f32[4,T]) {
      %0 = softmax(%x) : f32[4,T]
      return %0
    }""",
    "another dim than the last": """graph g(%x: f32[T,8]) {
      %0 = softmax(%x) {dim = 0} : f32[T,8]
      return %0
    }""",
    "that do not lie in one row": """graph g(%x: f32[100,T]) {
      %0 = sum(%x) {dims = (0,)} : f32[T]
      return %0
    }""",
    "does not know pow": """graph g(%x: f32[T,8]) {
      %0 = pow(%x, %x) : f32[T,8]
      return %0
    }""",
}


@pytest.mark.parametrize("reason", BODIES)
def test_refusals_say_what_is_missing(reason: str) -> None:
    op: Op = as_op(parse_graph(BODIES[reason]), "pointwise")
    (found,) = refused("triton.pointwise", op)
    assert reason in found
