"""Groups that begin with an all-reduce: every algorithm and mixture of types beside the body."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rank_passes import RANKS, Case, run_on_ranks
from torch_samples import assert_close, scalar
from triton_groups import as_op
from triton_worker import check_compiles

from metainfer.backends.ranks.algorithms import ALGORITHMS, LIBRARY_ERROR
from metainfer.backends.ranks.fused import KIND, local_op
from metainfer.backends.torch.check import run_reference
from metainfer.ir.errors import Unsupported
from metainfer.ir.graph import Op, attrs_of
from metainfer.ir.ops.collective import exchange
from metainfer.ir.parser import parse_graph

RNG = np.random.default_rng(11)
MIXTURES = (("bf16", "bf16"), ("bf16", "f32"), ("f32", "bf16"), ("f16", "f32"), ("f32", "f32"))


def group(stream: str, weight: str, ranks: int = RANKS, shift: str = "") -> Op:
    norm = "%w" if not shift else "%9"
    shifted = (
        f"""%8 = full() {{dtype = "{weight}", shape = (), value = 1.0}} : {weight}[]
      %9 = add(%w, %8) : {weight}[40]"""
        if shift
        else ""
    )
    graph = parse_graph(f"""graph g(%p: {stream}[T,40], %r: {stream}[T,40], %w: {weight}[40]) {{
      %0 = all_reduce(%p) {{axis = "tp", ranks = {ranks}}} : {stream}[T,40]
      %1 = add(%0, %r) : {stream}[T,40]
      {shifted}
      %2 = rms_norm(%1, {norm}) {{eps = 1e-6}} : {stream}[T,40]
      return %1, %2
    }}""")
    op = as_op(graph, KIND)
    attrs = {"kind": KIND, "axis": "tp", "ranks": ranks, "eps": 1e-6}
    return Op(op.name, op.operands, op.results, attrs_of(attrs), op.body)


def data_of(op: Op, tokens: int) -> list[list[np.ndarray]]:
    """Operands of each rank: parts of their own, all else alike."""
    shapes = [v.tensor.concrete({"T": tokens}) for v in op.operands]
    dtypes = [v.tensor.dtype.numpy for v in op.operands]  # type: ignore[union-attr]
    made = [RNG.uniform(-2, 2, s).astype(d) for s, d in zip(shapes, dtypes, strict=True)]
    parts = [RNG.uniform(-2, 2, shapes[0]).astype(dtypes[0]) for _ in range(RANKS)]
    return [[part, *made[1:]] for part in parts]


def wanted_of(op: Op, data: list[list[np.ndarray]], env: dict[str, int]) -> Any:
    """What the body says of the sum, which the reference of the collective makes."""
    total = exchange("all_reduce", [d[0] for d in data], {"axis": "tp", "ranks": RANKS})[0]
    return run_reference(local_op(op, 0), [total, *data[0][1:]], env)


def test_every_algorithm_computes_the_body(tmp_path: Path) -> None:
    cases: list[Case] = []
    for algorithm in ALGORITHMS["all_reduce"]:
        for stream, weight in MIXTURES:
            for shift in ("", "w + 1"):
                op = group(stream, weight, shift=shift)
                for tokens in (1, 5):
                    name = f"ranks.{KIND}_{algorithm}"
                    cases.append((name, op, data_of(op, tokens), {"T": tokens}))
    found = run_on_ranks(cases, str(tmp_path / "store"))
    for number, (name, op, data, env) in enumerate(cases):
        wanted = wanted_of(op, data, env)  # type: ignore[arg-type]
        error = LIBRARY_ERROR if name.endswith("library") else 0.0
        for rank in range(RANKS):
            for got, want, value in zip(found[rank][number], wanted, op.results, strict=True):
                assert_close(got, want, scalar(value.tensor.dtype.name), error)


@pytest.mark.parametrize("algorithm", ALGORITHMS["all_reduce"])
def test_the_pass_compiles_for_cards_that_are_not_here(algorithm: str) -> None:
    check_compiles(f"ranks.{KIND}_{algorithm}", group("bf16", "f32", 4), {"T": 48})


def test_a_body_that_begins_otherwise_is_refused() -> None:
    op = as_op(
        parse_graph("""graph g(%p: bf16[T,8], %r: bf16[T,8], %w: bf16[8]) {
      %0 = add(%p, %r) : bf16[T,8]
      %1 = rms_norm(%0, %w) {eps = 1e-6} : bf16[T,8]
      return %0, %1
    }"""),
        KIND,
    )
    with pytest.raises(Unsupported, match="begin with an all-reduce"):
        local_op(op, 0)
