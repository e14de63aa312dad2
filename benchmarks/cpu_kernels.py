"""Speed of the CPU kernels, beside torch's F.linear in float32 and the roofline.

    python benchmarks/cpu_kernels.py            # everything
    python benchmarks/cpu_kernels.py --only decode --threads 1

Linears: median microseconds, bytes of weights (and activations) per second, arithmetic rate; the
roofline of one row is its bytes at the measured read bandwidth. Decode: one step of a model with
SmolLM2-135M's shapes and random weights, as one command list; its roofline is the bytes of weights
and cache read per token.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from metainfer.backends.cpu import layouts, program
from metainfer.backends.cpu.build import library
from metainfer.backends.cpu.kernels import FORMATS
from metainfer.backends.cpu.program import DimArg, ProgramBuilder
from metainfer.ir.dtypes import Block, BlockArray, parse_dtype

WIDTH, LAYERS, HEADS, KV_HEADS, HEAD, FFN, VOCAB = 576, 30, 9, 3, 64, 1536, 49152
CONTEXT, PAGE = 128, 16
# Linears of the model as (name, N, K); the last is for comparison with other reports.
SHAPES = [
    ("qkv", (HEADS + 2 * KV_HEADS) * HEAD, WIDTH),
    ("out", WIDTH, WIDTH),
    ("gate_up", 2 * FFN, WIDTH),
    ("down", WIDTH, FFN),
    ("head", VOCAB, WIDTH),
    ("4096", 4096, 4096),
]
KINDS = {
    "linear_f32": "f32",
    "linear_bf16": "bf16",
    "linear_w8": "i8/32:f16",
    "linear_w4": "u4/32:f16+f16",
    "linear_w8a8": "i8/32:f16",
    "linear_w4a8": "u4/32:f16+f16",
}


def median_us(run: Callable[[], object], budget_s: float = 0.4) -> float:
    """Median of repeated runs after one warm-up, at least five."""
    run()
    times: list[float] = []
    end = time.perf_counter() + budget_s
    while len(times) < 5 or (time.perf_counter() < end and len(times) < 2000):
        before = time.perf_counter()
        run()
        times.append((time.perf_counter() - before) * 1e6)
    return statistics.median(times)


def read_bandwidth() -> float:
    """Bytes per second of one product with a bf16 matrix far larger than the caches."""
    n, k = 16384, 8192
    blob = layouts.aligned_bytes(n * k * 2)
    blob[:] = 0
    x, y = np.zeros(k, np.float32), np.zeros(n, np.float32)
    builder = ProgramBuilder()
    pointers = [y.ctypes.data, blob.ctypes.data, 0, 0, x.ctypes.data]
    builder.add("linear_bf16", pointers, [1, n, k, n, 0, k])
    made = builder.build()
    return blob.nbytes / median_us(lambda: made.run(), 0.8) * 1e6


def random_blob(dtype: str, n: int, k: int, rng: np.random.Generator) -> np.ndarray:
    """Packed random weights of a size that keeps activations finite."""
    parsed = parse_dtype(dtype)
    if not isinstance(parsed, Block):
        weight = (rng.standard_normal((n, k), np.float32) / np.sqrt(k)).astype(parsed.numpy)
        return layouts.pack(f"cpu.{dtype}_n16", weight)
    signed, bits = parsed.element.kind == "int", parsed.element.bits
    low = -(2 ** (bits - 1)) if signed else 0
    codes = rng.integers(low, low + 2**bits, (n, k), parsed.element.numpy.type)
    step = 1 / (2 ** (bits - 2) * np.sqrt(k))
    scales = np.full(parsed.scale_shape((n, k)), step, parsed.scale.numpy)
    offsets = -scales * 8 if parsed.offset else None
    return layouts.pack(layouts.layout_for(parsed), BlockArray(parsed, codes, scales, offsets))


class Buffers:
    """Zeroed arrays that live as long as the program."""

    def __init__(self) -> None:
        self.kept: list[np.ndarray] = []

    def keep(self, array: np.ndarray) -> int:
        self.kept.append(array)
        return array.ctypes.data

    def floats(self, *shape: int) -> int:
        memory = layouts.aligned_bytes(int(np.prod(shape)) * 4)
        memory[:] = 0
        return self.keep(memory)

    def codes(self, rows: int, width: int) -> list[int]:
        """Codes, scales, sums of quantized rows."""
        groups = -(-width // 32)
        return [self.floats(rows, groups * 8), self.floats(rows, groups), self.floats(rows, groups)]


def bench_linears(bandwidth: float) -> None:
    rng = np.random.default_rng(0)
    print(f"{'shape':8} {'M':>4} {'kernel':12} {'us':>10} {'GB/s':>7} {'GFLOP/s':>8} "
          f"{'roofline us':>11} {'x torch f32':>11}")  # fmt: skip
    for name, n, k in SHAPES:
        for m in (1, 512):
            if name == "head" and m > 1:
                continue
            x = torch.randn(m, k)
            w = torch.randn(n, k)
            with torch.inference_mode():
                base = median_us(lambda x=x, w=w: torch.nn.functional.linear(x, w))
            print(f"{name:8} {m:4} {'torch f32':12} {base:10.1f} {n * k * 4 / base / 1e3:7.1f} "
                  f"{2 * m * n * k / base / 1e3:8.1f}")  # fmt: skip
            for kernel, dtype in KINDS.items():
                keep = Buffers()
                blob = random_blob(dtype, n, k, rng)
                builder = ProgramBuilder()
                add_linear(builder, kernel, dtype, m, n, k, keep.floats(m, n), blob, x, keep)
                made = builder.build()
                us = median_us(lambda made=made: made.run())
                limit = (blob.nbytes + m * (n + k) * 4) / bandwidth * 1e6
                flops = 2 * m * n * k
                print(f"{name:8} {m:4} {kernel:12} {us:10.1f} {blob.nbytes / us / 1e3:7.1f} "
                      f"{flops / us / 1e3:8.1f} {limit:11.1f} {base / us:11.2f}")  # fmt: skip


def add_linear(
    builder: ProgramBuilder, kernel: str, dtype: str, m: int, n: int, k: int,
    y: int, blob: np.ndarray, x: torch.Tensor, keep: Buffers,
) -> None:  # fmt: skip
    """One linear from float rows; with quantized activations their rounding is part of the time."""
    head = [y, keep.keep(blob), 0, 0]
    tail = [FORMATS[dtype]] if dtype in FORMATS else []
    source = keep.keep(x.numpy())
    if kernel.endswith("a8"):
        codes = keep.codes(m, k)
        builder.add("quantize_rows_i8", [*codes, source], [m, k, k])
        builder.add(kernel, [*head, *codes], [m, n, k, n, 0, *tail])
        return
    builder.add(kernel, [*head, source], [m, n, k, n, 0, k, *tail])


@dataclass
class Model:
    """One step of a SmolLM2-shaped model as a command list; dims are (T, B, R)."""

    program: program.Program
    buffers: Buffers
    weight_bytes: int
    logits: np.ndarray
    tokens: np.ndarray


class ModelBuilder:
    """Adds the commands of a decoder with fused qkv and gate_up, weights random."""

    def __init__(self, dtype: str, tokens: int, context: int) -> None:
        self.rng = np.random.default_rng(1)
        self.dtype, self.T = dtype, tokens
        self.keep, self.builder = Buffers(), ProgramBuilder()
        self.weight_bytes = 0
        bits = parse_dtype(dtype).bits
        self.is_block = dtype in FORMATS
        self.kernel = f"linear_w{4 if bits < 8 else 8}a8" if self.is_block else f"linear_{dtype}"
        self.context = context

    def linear(
        self, y: int, x: int, codes: list[int], n: int, k: int, rows: DimArg, residual: int = 0
    ) -> None:
        blob = random_blob(self.dtype, n, k, self.rng)
        self.weight_bytes += blob.nbytes
        head = [y, self.keep.keep(blob), 0, residual]
        ints = [rows, n, k, n, n if residual else 0]
        if self.is_block:
            self.builder.add(self.kernel, [*head, *codes], [*ints, FORMATS[self.dtype]])
        else:
            self.builder.add(self.kernel, [*head, x], [*ints, k])

    def build(self) -> Model:
        T, B, R = DimArg(0), DimArg(1), DimArg(2)
        keep, add, rows = self.keep, self.builder.add, self.T
        q_width, qkv_width = HEADS * HEAD, (HEADS + 2 * KV_HEADS) * HEAD
        norm = keep.keep(np.ones(WIDTH, np.float32))
        angles = np.arange(self.context)[:, None] / 1e4 ** (np.arange(HEAD // 2) / (HEAD / 2))
        cosine = keep.keep(np.cos(angles).astype(np.float32))
        sine = keep.keep(np.sin(angles).astype(np.float32))
        first = self.context - rows
        positions = keep.keep(np.arange(first, self.context, dtype=np.int32))
        slots = positions
        starts = keep.keep(np.array([0, rows], np.int32))
        lengths = keep.keep(np.array([self.context], np.int32))
        num_pages = -(-self.context // PAGE)
        pages = keep.keep(np.arange(num_pages, dtype=np.int32))
        tokens = np.full(rows, 7, np.int32)
        last = keep.keep(np.array([rows - 1], np.int32))
        x, qkv, q = (
            keep.floats(rows, WIDTH),
            keep.floats(rows, qkv_width),
            keep.floats(rows, q_width),
        )
        normed, attended = keep.floats(rows, WIDTH), keep.floats(rows, q_width)
        gate_up, active = keep.floats(rows, 2 * FFN), keep.floats(rows, FFN)
        codes = keep.codes(rows, WIDTH) if self.is_block else [0, 0, 0]
        wide = keep.codes(rows, FFN) if self.is_block else [0, 0, 0]
        table = random_blob("i8/32:f16", VOCAB, WIDTH, self.rng) if self.is_block else None
        if table is not None:
            ints = [T, WIDTH, FORMATS["i8/32:f16"], 16]
            add("embedding_block", [x, keep.keep(table), keep.keep(tokens)], ints, [1.0])
        else:
            plain = keep.keep(self.rng.standard_normal((VOCAB, WIDTH), np.float32))
            add("embedding_f32", [x, plain, keep.keep(tokens)], [T, WIDTH], [1.0])
        out = 0 if self.is_block else normed
        for _ in range(LAYERS):
            shape = (num_pages * PAGE, KV_HEADS, HEAD)
            k_cache, v_cache = keep.floats(*shape), keep.floats(*shape)
            add("rms_norm", [out, x, norm, *codes], [T, WIDTH, WIDTH, WIDTH], [1e-5, 0.0])
            self.linear(qkv, normed, codes, qkv_width, WIDTH, T)
            pointers = [q, k_cache, v_cache, qkv, cosine, sine, positions, slots, 0, 0]
            ints = [T, HEADS, KV_HEADS, HEAD, qkv_width, q_width, HEAD]
            add("rope_kv_write", pointers, ints, [0.0, 0.0])
            pointers = [attended, q, k_cache, v_cache, starts, lengths, pages]
            heads = [T, B, HEADS, KV_HEADS, HEAD, num_pages, PAGE, 0, q_width, q_width]
            add("attention_paged", pointers, heads, [HEAD**-0.5, 0.0])
            if self.is_block:
                add("quantize_rows_i8", [*codes, attended], [T, q_width, q_width])
            self.linear(x, attended, codes, WIDTH, q_width, T, residual=x)
            add("rms_norm", [out, x, norm, *codes], [T, WIDTH, WIDTH, WIDTH], [1e-5, 0.0])
            self.linear(gate_up, normed, codes, 2 * FFN, WIDTH, T)
            active_out = 0 if self.is_block else active
            add("silu_mul", [active_out, gate_up, *wide], [T, FFN, 2 * FFN, FFN])
            self.linear(x, active, wide, WIDTH, FFN, T, residual=x)
        sampled, logits = keep.floats(1, WIDTH), np.zeros((1, VOCAB), np.float32)
        add("gather_rows", [sampled, x, last], [R, WIDTH, WIDTH, WIDTH])
        add("rms_norm", [out, sampled, norm, *codes], [R, WIDTH, WIDTH, WIDTH], [1e-5, 0.0])
        if table is not None:
            # The head shares the 8-bit table, as in SmolLM2's GGUF.
            self.weight_bytes += table.nbytes
            pointers = [keep.keep(logits), table.ctypes.data, 0, 0, *codes]
            add("linear_w8a8", pointers, [R, VOCAB, WIDTH, VOCAB, 0, FORMATS["i8/32:f16"]])
        else:
            self.linear(keep.keep(logits), normed, codes, VOCAB, WIDTH, R)
        best = keep.keep(np.zeros(1, np.int32))
        add("argmax_rows", [best, logits.ctypes.data], [R, VOCAB, VOCAB])
        return Model(self.builder.build(), keep, self.weight_bytes, logits, tokens)


def bench_model(
    bandwidth: float, tokens: int, context: int, dtypes: list[str], detail: bool
) -> None:
    for dtype in dtypes:
        model = ModelBuilder(dtype, tokens, context).build()
        dims = [tokens, 1, 1]
        us = median_us(lambda model=model, dims=dims: model.program.run(dims), 2.0)
        assert np.isfinite(model.logits).all()
        assert np.ptp(model.logits) > 0
        cache_bytes = 2 * context * KV_HEADS * HEAD * 4 * LAYERS
        limit = (model.weight_bytes + cache_bytes) / bandwidth * 1e6
        print(f"{dtype:14} T={tokens:<4} {us / 1e3:8.3f} ms {tokens / us * 1e6:8.1f} tok/s   "
              f"bytes limit {limit / 1e3:.3f} ms ({limit / us:.0%})")  # fmt: skip
        if detail:
            totals: dict[str, list[float]] = {}
            for kernel, spent in model.program.profile(dims):
                totals.setdefault(kernel, []).append(spent)
            for kernel, spent in sorted(totals.items(), key=lambda item: -sum(item[1])):
                print(f"    {kernel:18} {sum(spent):9.1f} us in {len(spent)} commands")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", choices=["linear", "decode", "prefill"], default=None)
    parser.add_argument("--threads", type=int, default=0, help="0: one per processor")
    parser.add_argument("--formats", default="u4/32:f16+f16,i4/32:f16,i8/32:f16,bf16,f32")
    parser.add_argument("--detail", action="store_true", help="time spent by kernel")
    options = parser.parse_args()
    program.set_num_threads(options.threads)
    torch.set_num_threads(program.num_threads())
    bandwidth = read_bandwidth()
    print(f"{library().instruction_set}, {program.num_threads()} threads, "
          f"read bandwidth {bandwidth / 1e9:.1f} GB/s")  # fmt: skip
    formats = options.formats.split(",")
    if options.only in (None, "decode"):
        bench_model(bandwidth, 1, CONTEXT, formats, options.detail)
    if options.only in (None, "prefill"):
        bench_model(bandwidth, 512, 512, formats, options.detail)
    if options.only in (None, "linear"):
        bench_linears(bandwidth)


if __name__ == "__main__":
    main()
