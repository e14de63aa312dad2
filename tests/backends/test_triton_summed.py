"""Products of few rows, added to and normed: by parts, on absent cards, captured on a GPU."""

import ast
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from triton_groups import as_op, random
from triton_products import STORED
from triton_worker import CARDS, applies, check_compiles, check_interpreted, check_on_gpu

from metainfer.backends.kernel import Query
from metainfer.backends.registry import installed
from metainfer.backends.torch.call import TorchCall
from metainfer.backends.triton.emit.epilogue import emit_epilogue, emit_row_epilogue
from metainfer.backends.triton.fits import typed_call
from metainfer.backends.triton.summed import KIND, MOST_ROWS
from metainfer.ir.graph import Op
from metainfer.ir.parser import parse_graph

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
CODES = "f8e4m3/128x128:f32"


def normed(format_: str, columns: int, inner: int) -> Op:
    """A linear, its residual and the norm of the sum, tokens open."""
    graph = parse_graph(f"""graph g(%x: bf16[T,{inner}], %w: {format_}[{columns},{inner}],
        %r: bf16[T,{columns}], %n: bf16[{columns}]) {{
      %0 = linear(%x, %w) : bf16[T,{columns}]
      %1 = add(%0, %r) : bf16[T,{columns}]
      %2 = rms_norm(%1, %n) {{eps = 1e-5}} : bf16[T,{columns}]
      return %1, %2
    }}""")
    x, w, *rest = (op := as_op(graph, KIND)).operands
    return replace(op, operands=(x, replace(w, name="@w"), *rest))


def data_of(op: Op, rows: int) -> list[Any]:
    return [random(v.tensor, {"T": rows}) for v in op.operands]


@pytest.mark.parametrize(
    ("format_", "tile", "shape"),
    [
        # Rows, columns, inner: four parts; a head and a rest, tiles partly filled; many rows.
        ("bf16", "few16", (1, 64, 2048)), ("bf16", "head16", (19, 70, 1100)),
        ("bf16", "deep64", (70, 72, 584)), (CODES, "few16", (3, 136, 1024)),
    ],
    ids=str,
)  # fmt: skip
def test_parts_are_added_up_and_normed(
    format_: str, tile: str, shape: tuple[int, int, int]
) -> None:
    rows, columns, inner = shape
    op = normed(format_, columns, inner)
    name = f"triton.{KIND}_{STORED[format_]}_{tile}"
    check_interpreted(name, op, data_of(op, rows), {"T": rows})


@pytest.mark.parametrize(("format_", "tile"), [("bf16", "head16"), (CODES, "few64")])
def test_they_compile_for_cards_that_are_not_here(format_: str, tile: str) -> None:
    check_compiles(f"triton.{KIND}_{STORED[format_]}_{tile}", normed(format_, 576, 576), {"T": 16})


def test_what_they_leave_to_others() -> None:
    card, name = CARDS["1xh200"], f"triton.{KIND}_plain_few16"
    assert applies(name, normed("bf16", 128, 512), card, {"T": (1, MOST_ROWS)}) == []
    (many,) = applies(name, normed("bf16", 128, 512), card, {"T": (1, MOST_ROWS + 1)})
    assert f"{MOST_ROWS + 1} rows" in many
    (wide,) = applies(name, normed("bf16", 16384, 512), card, {"T": (1, 1)})
    assert "rows of 16384" in wide
    given = normed("bf16", 128, 512)
    given = replace(given, operands=(given.operands[0], replace(given.operands[1], name="%w"),
                                     *given.operands[2:]))  # fmt: skip
    reasons = applies(f"triton.{KIND}_plain_head16", given, card, {"T": (1, 1)})
    assert any("is a weight" in why for why in reasons)


@pytest.mark.parametrize(
    "name", [f"{KIND}_plain_few16", "linear_add_plain_few16", "linear_add_plain_m16"]
)
def test_a_residual_with_gaps_is_refused(name: str) -> None:
    """It is read as if it lay dense: what follows a product knows no strides."""
    op, kernel = normed("bf16", 64, 512), installed().kernels.get(f"triton.{name}")
    query = Query(op, CARDS["1xh200"], {"T": (1, 1)}, frozenset([2]))
    reasons = [str(r) for r in replace(kernel, fits=None).refusals(query)]
    assert any("operand 2 is a strided view" in reason for reason in reasons)


@pytest.mark.parametrize("strided", [(), (2,)])
@pytest.mark.parametrize("lead", ["T", "2,3"])
def test_emitted_statements_read_what_was_made_before_them(
    lead: str, strided: tuple[int, ...]
) -> None:
    """Also where reads were moved to the front: addresses and rows come before them."""
    graph = parse_graph(f"""graph g(%x: bf16[{lead},72], %w: bf16[40,72],
        %r: bf16[{"1,3" if "," in lead else lead},40], %n: bf16[40]) {{
      %0 = linear(%x, %w) : bf16[{lead},40]
      %1 = add(%0, %r) : bf16[{lead},40]
      %2 = rms_norm(%1, %n) {{eps = 1e-5}} : bf16[{lead},40]
      return %1, %2
    }}""")
    sums = replace(graph, ops=graph.ops[:2], outputs=graph.outputs[:1])
    texts = [
        emit_row_epilogue(graph, frozenset(strided)).text,
        emit_epilogue(sums, frozenset(strided), reads_first=True).text,
    ]
    for function in (f for text in texts for f in ast.parse(text).body):
        if isinstance(function, ast.FunctionDef):
            made = {a.arg for a in function.args.args} | {"tl", "functions"}
            for statement in function.body:
                names = [n for n in ast.walk(statement) if isinstance(n, ast.Name)]
                assert {n.id for n in names if isinstance(n.ctx, ast.Load)} <= made
                made |= {n.id for n in names if isinstance(n.ctx, ast.Store)}


@pytest.mark.parametrize("tile", ["few16", "head16", "deep64"])
@pytest.mark.parametrize("rows", [1, 17, MOST_ROWS])
def test_the_plans_scratch_holds_the_parts(tile: str, rows: int) -> None:
    op, kernel = normed("bf16", 4096, 4096), installed().kernels.get(f"triton.{KIND}_plain_{tile}")
    call = typed_call(op, {"T": rows}, {}, installed().layouts)
    made, _ = kernel.binder.launches(call)
    assert kernel.workspace is not None
    there = kernel.workspace(Query(op, CARDS["1xh200"], {"T": (1, MOST_ROWS)}))
    partial = made.arguments["partial"]
    assert partial.numel() * partial.element_size() <= there


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("rows", [1, 16, 64, 130])
@pytest.mark.parametrize(
    ("format_", "tile"),
    [("bf16", "few16"), ("bf16", "head16"), ("bf16", "deep16"), ("bf16", "deep64"),
     (CODES, "few16")],
)  # fmt: skip
def test_on_a_gpu(format_: str, tile: str, rows: int) -> None:
    op = normed(format_, 4096, 2048)
    check_on_gpu(f"triton.{KIND}_{STORED[format_]}_{tile}", op, data_of(op, rows), {"T": rows})


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("rows", [1, 16])
def test_a_captured_chain_gives_what_single_launches_give(rows: int) -> None:
    """Early launches read heads while those in front still write what they then wait for."""
    op = normed("bf16", 4096, 4096)
    kernel = installed().kernels.get(f"triton.{KIND}_plain_head16")
    x, w, r, n = (
        torch.from_numpy(np.asarray(d).view(np.int16)).view(torch.bfloat16).cuda()
        for d in data_of(op, rows)
    )
    w *= 4096**-0.5

    def step(given: torch.Tensor) -> torch.Tensor:
        outputs = (torch.empty_like(r), torch.empty_like(r))
        kernel.binder.bind(TorchCall(op, (given, w, r, n), outputs, {}, None, None, {"T": rows}))()
        return outputs[1]

    wanted = [x]
    for _ in range(4):
        wanted.append(step(wanted[-1]))
        torch.cuda.synchronize()
    runs, values = [], [torch.full_like(x, float("nan")) for _ in range(5)]
    for before, after in pairwise(values):
        outputs = (torch.empty_like(r), after)
        call = TorchCall(op, (before, w, r, n), outputs, {}, None, None, {"T": rows})
        runs.append(kernel.binder.bind(call))
        runs[-1]()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    for _ in range(20):
        for value in values[1:]:
            value.fill_(float("nan"))
        values[0].copy_(x)
        graph.replay()
        assert all(torch.equal(v, w_) for v, w_ in zip(values, wanted, strict=True))
