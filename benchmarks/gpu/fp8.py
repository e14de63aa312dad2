"""Speed of fp8 activations on this GPU: products of codes by codes, and what rounds to codes.

    python benchmarks/gpu/fp8.py                   # products of known models, all tiles, the rest
    python benchmarks/gpu/fp8.py --rows 1 16 --weights f8e4m3/128x128:f32 --only products

Beside each other: the product of codes by codes (tile by tile), those that widen the weight's codes
to bf16 (in registers, or in scratch before a library product), torch's product of bf16 weights, and
its products of codes with a scale a row or a block; the gated product with its rounding, and its
parts; norms and SwiGLU with their rounding. The roofline counts each operand once, at the bf16
rate of this card.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from timing import Row, announce, captured_us, ceilings

from metainfer.backends.kernel import Kernel, Query
from metainfer.backends.registry import installed
from metainfer.backends.torch.call import TorchCall
from metainfer.backends.torch.codes import Codes
from metainfer.backends.torch.tensors import BlockTensors
from metainfer.backends.triton.fits import typed_call
from metainfer.backends.triton.words import Words
from metainfer.hardware.load import load_machine
from metainfer.ir.graph import Op, Value, attrs_of
from metainfer.ir.parser import parse_graph

Run = Callable[[], object]
ROWS = (1, 16, 64, 256, 1024, 4096)
COPIES = 4  # of a product's data, so that none is found in the cache
GROUP, BLOCKS = "f8e4m3/128:f32", "f8e4m3/128x128:f32"
# Outputs, inputs: of layers of Llama-3.1-8B, Qwen3-30B-A3B and DeepSeek-V3.
PRODUCTS = (
    (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336),
    (5120, 2048), (2048, 4096),
    (2112, 7168), (24576, 1536), (32768, 512), (7168, 16384), (7168, 2048), (4096, 7168),
)  # fmt: skip
INTERMEDIATE, HIDDEN = 14336, 4096


def op_of(text: str, kind: str) -> Op:
    """A group from the text of its body; operands named w are weights."""
    graph = parse_graph(text)
    weights = {"%w": "@w"}
    inputs = tuple(Value(weights.get(v.name, v.name), v.type) for v in graph.inputs)
    if not kind:
        (op,) = graph.ops
        return Op(op.name, inputs, op.results, op.attrs)
    return Op("fused", inputs, graph.outputs, attrs_of({"kind": kind}), graph)


def product(x: str, weight: str, columns: int, inner: int) -> Op:
    asked = ' {dtype = "bf16"}' if x == GROUP else ""
    return op_of(
        f"""graph g(%x: {x}[T,{inner}], %w: {weight}[{columns},{inner}]) {{
          %0 = linear(%x, %w){asked} : bf16[T,{columns}]
          return %0
        }}""",
        "",
    )


def gated(rounded: bool) -> Op:
    tail = f'%2 = quantize(%1) {{format = "{GROUP}"}} : {GROUP}[T,{INTERMEDIATE}]'
    return op_of(
        f"""graph g(%x: {GROUP}[T,{HIDDEN}], %w: {BLOCKS}[{2 * INTERMEDIATE},{HIDDEN}]) {{
          %0 = linear(%x, %w) {{dtype = "bf16"}} : bf16[T,{2 * INTERMEDIATE}]
          %1 = silu_mul_halves(%0) : bf16[T,{INTERMEDIATE}]
          {tail if rounded else ""}
          return {"%2" if rounded else "%1"}
        }}""",
        "linear_silu_mul_quantize" if rounded else "linear_silu_mul",
    )


def passes() -> Iterator[tuple[str, Op]]:
    """What makes codes, and the same without the rounding."""
    width, wide = HIDDEN, INTERMEDIATE
    codes = f'quantize(%1) {{format = "{GROUP}"}} : {GROUP}[T,'
    norm = f"%1 = rms_norm(%0, %n) {{eps = 1e-5}} : bf16[T,{width}]"
    head = f"graph g(%x: bf16[T,{width}], %r: bf16[T,{width}], %n: bf16[{width}]) {{"
    added = f"{head} %0 = add(%x, %r) : bf16[T,{width}] {norm}"
    yield "add_rms_norm", op_of(f"{added} return %0, %1 }}", "add_rms_norm")
    rounded = f"{added} %2 = {codes}{width}] return %0, %2 }}"
    yield "add_rms_norm_quantize", op_of(rounded, "add_rms_norm_quantize")
    halves = f"graph g(%x: bf16[T,{2 * wide}]) {{ %1 = silu_mul_halves(%x) : bf16[T,{wide}]"
    yield "silu_mul_halves", op_of(f"{halves} return %1 }}", "")
    made = f"{halves} %2 = {codes}{wide}] return %2 }}"
    yield "silu_mul_halves_quantize", op_of(made, "silu_mul_halves_quantize")
    alone = f"graph g(%1: bf16[T,{wide}]) {{ %2 = {codes}{wide}] return %2 }}"
    yield "quantize", op_of(alone, "")


def filled(data: Any) -> Any:
    """Data on the GPU for what a typed call has without contents."""
    if isinstance(data, BlockTensors):
        return BlockTensors(data.format, filled(data.codes), filled(data.scales))
    if isinstance(data, Words):
        return filled_words(data)
    if isinstance(data, Codes):
        codes = torch.randint(0, 120, data.codes.shape, dtype=torch.uint8, device="cuda")
        return Codes(data.format, codes, filled(data.scales), data.shape)
    made = torch.empty(data.shape, dtype=data.dtype, device="cuda")
    if data.dtype == torch.float8_e4m3fn:
        return made.copy_(torch.randn(data.shape, device="cuda"))
    return made.uniform_(0.5, 1.5) if data.dtype == torch.float32 else made.normal_()


def filled_words(data: Words) -> Words:
    """Random codes with scales near 1."""
    if data.format.element.name == "f8e4m3":
        shape = (*data.codes.shape[:-1], data.codes.shape[-1] // 4)
        codes = torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, device="cuda")
        # Without the highest bit of exponents: none is then a code of no number.
        codes = (codes & ~0x44004400).view(torch.uint8)
        return replace(data, codes=codes, scales=filled(data.scales))
    codes = torch.randint(-(2**31), 2**31, data.codes.shape, dtype=torch.int32, device="cuda")
    if data.scales.dtype != torch.int32:
        offsets = None if data.offsets is None else filled(data.offsets)
        return replace(data, codes=codes, scales=filled(data.scales), offsets=offsets)
    near = (72, 88) if data.row_scales is not None else (119, 122)
    shape = (*data.scales.shape, 4)
    scales = torch.randint(*near, shape, dtype=torch.uint8, device="cuda").view(torch.int32)
    rows = None if data.row_scales is None else filled(data.row_scales)
    return replace(data, codes=codes, scales=scales[..., 0], row_scales=rows)


def calls_of(kernel: Kernel, op: Op, rows: int) -> list[TorchCall]:
    found, size = [], 0
    if kernel.workspace is not None:
        size = kernel.workspace(Query(op, load_machine("1xh200").device(0), {"T": (rows, rows)}))
    for _ in range(COPIES):
        scratch = torch.zeros(size, dtype=torch.uint8, device="cuda")
        typed = typed_call(op, {"T": rows}, kernel.layouts, installed().layouts)
        inputs, outputs = tuple(map(filled, typed.inputs)), tuple(map(filled, typed.outputs))
        found.append(TorchCall(op, inputs, outputs, typed.attrs, scratch))
    return found


_LIBRARY = ("cuda.linear_bf16", "cuda.linear_fp8_blocks")


def candidates(op: Op, kind: str, rows: int) -> Iterator[Kernel]:
    card = load_machine("1xh200").device(0)
    query = Query(op, card, {"T": (rows, rows)})
    for kernel in installed().kernels.candidates(kind):
        ours = kernel.backend == "triton" or kernel.name in _LIBRARY
        if ours and not kernel.refusals(query):
            yield kernel


def work_of(op: Op, rows: int) -> tuple[float, float]:
    """Bytes across the border of a group, and operations of its product."""
    values = {v.name: v for v in (*op.operands, *op.results)}
    moved = sum(v.tensor.bytes_at({"T": rows}) for v in values.values())
    weight = next((v for v in op.operands if v.is_weight), None)
    return moved, 2.0 * rows * (weight.tensor.num_elements().static if weight else 0)


def timed(case: str, op: Op, kind: str, rows: int) -> Iterator[Row]:
    for kernel in candidates(op, kind, rows):
        runs = [kernel.binder.bind(c) if hasattr(kernel.binder, "bind")
                else (lambda c=c, run=kernel.binder.run: run(c))
                for c in calls_of(kernel, op, rows)]  # fmt: skip
        yield Row(case, kernel.name, captured_us(runs), *work_of(op, rows))


def library(columns: int, inner: int, rows: int) -> Iterator[tuple[str, list[Run]]]:
    """torch's products of codes by codes: a scale a row, and blocks of 128 as ours."""

    def codes(count: int) -> torch.Tensor:
        return torch.randn(count, inner, device="cuda").to(torch.float8_e4m3fn)

    def scales(*shape: int) -> torch.Tensor:
        return torch.rand(shape, device="cuda") + 0.5

    # The library wants those of the tokens column by column.
    of_groups = scales(inner // 128, rows).t()
    forms = {
        "row": (scales(rows, 1), scales(1, columns)),
        "blocks": (of_groups, scales(-(-columns // 128), inner // 128).t()),
    }
    pairs = [(codes(rows), codes(columns).t()) for _ in range(COPIES)]
    for name, (left, right) in forms.items():
        yield (
            name,
            [
                partial(torch._scaled_mm, x, w, left, right, out_dtype=torch.bfloat16)
                for x, w in pairs
            ],
        )


def products(rows: int, weights: Sequence[str]) -> Iterator[Row]:
    """Products by kernel, beside the library's."""
    for columns, inner in PRODUCTS:
        for weight in (*weights, "bf16"):
            for x in (GROUP, "bf16") if weight == BLOCKS else ("bf16",):
                op = product(x, weight, columns, inner)
                case = f"{columns}x{inner} T={rows} {x.split('/')[0]} x {weight.split(':')[0]}"
                yield from timed(case, op, "linear", rows)
        op = product(GROUP, BLOCKS, columns, inner)
        for name, runs in library(columns, inner, rows):
            case = f"{columns}x{inner} T={rows} f8e4m3 x f8e4m3"
            try:
                us = captured_us(runs)
            except (RuntimeError, ValueError) as error:
                print(f"{case:34s} torch._scaled_mm {name}: {str(error).splitlines()[0]}")
                continue
            yield Row(case, f"torch._scaled_mm {name}", us, *work_of(op, rows))


def report(rows: Sequence[int], weights: Sequence[str], only: str) -> Iterator[Row]:
    """All cases, one after the other."""
    for count in rows:
        yield from products(count, weights)
        if only == "products":
            continue
        for rounded in (False, True):
            op = gated(rounded)
            yield from timed(f"gated T={count}", op, str(op.attr["kind"]), count)
        for name, op in passes():
            yield from timed(f"{name} T={count}", op, name, count)


def main() -> None:
    """Print a line for each kernel and number of rows."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--weights", nargs="+", default=[BLOCKS], help="formats of weights")
    parser.add_argument("--only", choices=("", "products"), default="")
    args = parser.parse_args()
    found = ceilings()
    announce(found)
    for row in report(args.rows, args.weights, args.only):
        print(row.text(found), flush=True)


if __name__ == "__main__":
    main()
