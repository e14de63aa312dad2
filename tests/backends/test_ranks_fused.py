"""Groups that begin with a sum over ranks: every algorithm and mixture of types beside the body."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rank_passes import RANKS, Case, run_on_ranks
from torch_samples import assert_close
from triton_groups import as_op
from triton_worker import check_compiles

from metainfer.backends.ranks.algorithms import LIBRARY_ERROR
from metainfer.backends.ranks.fused import KIND, ROUNDED, SCATTERED, local_op
from metainfer.backends.registry import installed
from metainfer.backends.torch.check import run_reference
from metainfer.ir.errors import Unsupported
from metainfer.ir.graph import Op, attrs_of
from metainfer.ir.ops.collective import exchange
from metainfer.ir.parser import parse_graph

RNG = np.random.default_rng(11)
KERNELS = [k.name for k in installed().kernels.all() if k.op in (KIND, ROUNDED, SCATTERED)]
SHARED = "a gated expert of all tokens"
MIXTURES = (("bf16", "bf16"), ("bf16", "f32"), ("f32", "bf16"), ("f16", "f32"), ("f32", "f32"))


def group(stream: str, weight: str, ranks: int = RANKS, shift: str = "", kind: str = KIND) -> Op:
    norm, shifted, total, shared, inputs = "%w", "", "%0", "", ""
    if shift == SHARED:
        total, inputs = "%7", f"%s: {stream}[T,40], %g: {stream}[T,1], "
        shared = f"""%5 = sigmoid(%g) : {stream}[T,1]
      %6 = mul(%5, %s) : {stream}[T,40]
      %7 = add(%0, %6) : {stream}[T,40]"""
    elif shift:
        norm = "%9"
        shifted = f"""%8 = full() {{dtype = "{weight}", shape = (), value = 1.0}} : {weight}[]
      %9 = add(%w, %8) : {weight}[40]"""
    scattered = kind == SCATTERED
    name, dim = ("reduce_scatter", "dim = 0, ") if scattered else ("all_reduce", "")
    rows = f"{ranks}*T" if scattered else "T"
    last, rounded = "%2", ""
    if kind == ROUNDED:
        last, format_ = "%3", "f8e4m3/8:f32"
        rounded = f"""%3 = quantize(%2) {{format = "{format_}"}} : {format_}[T,40]"""
    graph = parse_graph(f"""graph g(
      %p: {stream}[{rows},40], {inputs}%r: {stream}[T,40], %w: {weight}[40]
    ) {{
      %0 = {name}(%p) {{axis = "tp", {dim}ranks = {ranks}}} : {stream}[T,40]
      {shared}
      %1 = add({total}, %r) : {stream}[T,40]
      {shifted}
      %2 = rms_norm(%1, {norm}) {{eps = 1e-6}} : {stream}[T,40]
      {rounded}
      return %1, {last}
    }}""")
    op = as_op(graph, kind)
    attrs = {"kind": kind, "axis": "tp", "ranks": ranks, "eps": 1e-6}
    if scattered:
        attrs["dim"] = 0
    return Op(op.name, op.operands, op.results, attrs_of(attrs), op.body)


def kind_of(kernel: str) -> str:
    return installed().kernels.get(kernel).op


def data_of(op: Op, tokens: int) -> list[list[np.ndarray]]:
    """Operands of each rank: parts of their own, all else alike."""
    shapes = [v.tensor.concrete({"T": tokens}) for v in op.operands]
    dtypes = [v.tensor.dtype.numpy for v in op.operands]  # type: ignore[union-attr]
    made = [RNG.uniform(-2, 2, s).astype(d) for s, d in zip(shapes, dtypes, strict=True)]
    parts = [RNG.uniform(-2, 2, shapes[0]).astype(dtypes[0]) for _ in range(RANKS)]
    return [[part, *made[1:]] for part in parts]


def wanted_of(op: Op, data: list[list[np.ndarray]], env: dict[str, int]) -> list[Any]:
    """What the body says of each rank's sum, which the reference of the collective makes."""
    assert op.body is not None
    attrs = {"axis": "tp", "ranks": RANKS, "dim": 0}
    totals = exchange(op.body.ops[0].name, [d[0] for d in data], attrs)
    return [run_reference(local_op(op, 0), [total, *data[0][1:]], env) for total in totals]


def test_every_algorithm_computes_the_body(tmp_path: Path) -> None:
    cases: list[Case] = []
    for name in KERNELS:
        # What rounds the norm differs from what does not in its last two statements.
        is_rounded = kind_of(name) == ROUNDED
        # The pass behind an exchange is that of one_shot, whose parts come another way.
        is_direct = name.endswith(("_push", "_pull"))
        for stream, weight in MIXTURES[1:2] if is_rounded or is_direct else MIXTURES:
            for shift in ("",) if is_rounded else ("", "w + 1", SHARED):
                op = group(stream, weight, shift=shift, kind=kind_of(name))
                for tokens in (5,) if is_direct else (1, 5):
                    cases.append((name, op, data_of(op, tokens), {"T": tokens}))
    found = run_on_ranks(cases, str(tmp_path / "store"))
    for number, (name, op, data, env) in enumerate(cases):
        wanted = wanted_of(op, data, env)  # type: ignore[arg-type]
        error = LIBRARY_ERROR if name.endswith("library") else 0.0
        for rank in range(RANKS):
            pairs = zip(found[rank][number], wanted[rank], op.results, strict=True)
            for got, want, value in pairs:
                assert_close(got, want, value.tensor.dtype, error)


@pytest.mark.parametrize("name", KERNELS)
def test_the_pass_compiles_for_cards_that_are_not_here(name: str) -> None:
    check_compiles(name, group("bf16", "f32", 4, kind=kind_of(name)), {"T": 48})


def test_a_body_that_begins_otherwise_is_refused() -> None:
    op = as_op(
        parse_graph("""graph g(%p: bf16[T,8], %r: bf16[T,8], %w: bf16[8]) {
      %0 = add(%p, %r) : bf16[T,8]
      %1 = rms_norm(%0, %w) {eps = 1e-6} : bf16[T,8]
      return %0, %1
    }"""),
        KIND,
    )
    with pytest.raises(Unsupported, match="begin with a sum over ranks"):
        local_op(op, 0)
