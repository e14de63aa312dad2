"""Speed of the CPU kernels, beside torch's F.linear in float32 and the roofline.

    python benchmarks/cpu_kernels.py            # everything
    python benchmarks/cpu_kernels.py --only decode --threads 1

Linears: microseconds (median and best), bytes of weights per second, arithmetic rate; the roofline
of one row is its bytes at the measured read bandwidth. Decode and prefill: one step of a model with
SmolLM2-135M's shapes and random weights, as one command list; its roofline is the bytes of weights
and cache read per step.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from metainfer.backends.cpu import layouts, program
from metainfer.backends.cpu.build import library
from metainfer.backends.cpu.kernels import FORMATS
from metainfer.backends.cpu.program import DimArg, ProgramBuilder
from metainfer.ir.dtypes import Block, BlockArray, parse_dtype

WIDTH, LAYERS, HEADS, KV_HEADS, HEAD, FFN, VOCAB = 576, 30, 9, 3, 64, 1536, 49152
QUERY, QKV = HEADS * HEAD, (HEADS + 2 * KV_HEADS) * HEAD
CONTEXT, PAGE = 128, 16
HEAD_FORMAT = "i8/32:f16"
# Dims of the command lists: tokens, sequences, sampled rows.
T, B, R = DimArg(0), DimArg(1), DimArg(2)
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
    "linear_f16": "f16",
    "linear_bf16": "bf16",
    "linear_w8": "i8/32:f16",
    "linear_w4": "u4/32:f16+f16",
    "linear_w8a8": "i8/32:f16",
    "linear_w4a8": "u4/32:f16+f16",
}


@dataclass(frozen=True)
class Times:
    """Microseconds of repeated runs: the median, and the best (what a quiet machine would do)."""

    median: float
    best: float


def time_runs(run: Callable[[], object], budget_s: float = 0.4) -> Times:
    """Repeat after one warm-up, at least five times."""
    run()
    times: list[float] = []
    end = time.perf_counter() + budget_s
    while len(times) < 5 or (time.perf_counter() < end and len(times) < 2000):
        before = time.perf_counter()
        run()
        times.append((time.perf_counter() - before) * 1e6)
    return Times(statistics.median(times), min(times))


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
    return blob.nbytes / time_runs(made.run, 0.8).best * 1e6


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
    columns = "us      best    GB/s  GFLOP/s  roofline us  x torch f32 (best over best)"
    print(f"{'shape':8} {'M':>4} {'kernel':12} {columns:>40}")
    for name, n, k in SHAPES:
        for m in (1, 512):
            if name != "head" or m == 1:
                bench_shape(name, m, n, k, bandwidth)


def bench_shape(name: str, m: int, n: int, k: int, bandwidth: float) -> None:
    rng = np.random.default_rng(0)
    x, w = torch.randn(m, k), torch.randn(n, k)

    def library_linear() -> torch.Tensor:
        return torch.nn.functional.linear(x, w)

    def row(kernel: str, times: Times, weight_bytes: int) -> None:
        limit = (weight_bytes + m * (n + k) * 4) / bandwidth * 1e6
        print(f"{name:8} {m:4} {kernel:12} {times.median:10.1f} {times.best:9.1f} "
              f"{weight_bytes / times.median / 1e3:7.1f} {2 * m * n * k / times.median / 1e3:8.1f} "
              f"{limit:12.1f} {base.best / times.best:12.2f}")  # fmt: skip

    with torch.inference_mode():
        base = time_runs(library_linear)
    row("torch f32", base, n * k * 4)
    for kernel, dtype in KINDS.items():
        keep = Buffers()
        blob = random_blob(dtype, n, k, rng)
        builder = ProgramBuilder()
        add_linear(builder, kernel, dtype, m, n, k, keep.floats(m, n), blob, x, keep)
        row(kernel, time_runs(builder.build().run), blob.nbytes)


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


class ModelBuilder:
    """Adds the commands of a decoder with fused qkv and gate_up, weights random."""

    def __init__(self, dtype: str, tokens: int, context: int) -> None:
        self.rng = np.random.default_rng(1)
        self.dtype, self.rows, self.context = dtype, tokens, context
        self.is_block = dtype in FORMATS
        bits = 4 if parse_dtype(dtype).bits < 8 else 8
        self.kernel = f"linear_w{bits}a8" if self.is_block else f"linear_{dtype}"
        self.keep, self.builder = Buffers(), ProgramBuilder()
        self.weight_bytes = 0
        floats = self.keep.floats
        self.norm = self.keep.keep(np.ones(WIDTH, np.float32))
        self.x, self.qkv, self.q = floats(tokens, WIDTH), floats(tokens, QKV), floats(tokens, QUERY)
        self.normed, self.attended = floats(tokens, WIDTH), floats(tokens, QUERY)
        self.gate_up, self.active = floats(tokens, 2 * FFN), floats(tokens, FFN)
        self.codes = self.keep.codes(tokens, WIDTH) if self.is_block else [0, 0, 0]
        self.wide = self.keep.codes(tokens, FFN) if self.is_block else [0, 0, 0]
        # With quantized activations the float rows before a linear are not written.
        self.normed_out = 0 if self.is_block else self.normed
        self.active_out = 0 if self.is_block else self.active

    def ints(self, *values: int) -> int:
        """Keep an i32 array."""
        return self.keep.keep(np.array(values, np.int32))

    def add_norm(self, x: int, rows: DimArg) -> None:
        pointers = [self.normed_out, x, self.norm, *self.codes]
        self.builder.add("rms_norm", pointers, [rows, WIDTH, WIDTH, WIDTH], [1e-5, 0.0])

    def add_linear(
        self, y: int, x: int, codes: list[int], n: int, k: int, rows: DimArg, residual: int = 0
    ) -> None:
        blob = random_blob(self.dtype, n, k, self.rng)
        self.weight_bytes += blob.nbytes
        head = [y, self.keep.keep(blob), 0, residual]
        ints: list[int | DimArg] = [rows, n, k, n, n if residual else 0]
        if self.is_block:
            self.builder.add(self.kernel, [*head, *codes], [*ints, FORMATS[self.dtype]])
        else:
            self.builder.add(self.kernel, [*head, x], [*ints, k])

    def add_embedding(self) -> np.ndarray:
        """Add the look-up and return the table: packed 8-bit blocks, or rows of f32."""
        tokens = self.ints(*[7] * self.rows)
        if self.is_block:
            table = random_blob(HEAD_FORMAT, VOCAB, WIDTH, self.rng)
            pointers = [self.x, self.keep.keep(table), tokens]
            self.builder.add(
                "embedding_block", pointers, [T, WIDTH, FORMATS[HEAD_FORMAT], 16], [1.0]
            )
            return table
        table = self.rng.standard_normal((VOCAB, WIDTH), np.float32)
        pointers = [self.x, self.keep.keep(table), tokens]
        self.builder.add("embedding_f32", pointers, [T, WIDTH], [1.0])
        return table

    def add_layers(self) -> None:
        angles = np.arange(self.context)[:, None] / 1e4 ** (np.arange(HEAD // 2) / (HEAD / 2))
        cosine = self.keep.keep(np.cos(angles).astype(np.float32))
        sine = self.keep.keep(np.sin(angles).astype(np.float32))
        slots = self.ints(*range(self.context - self.rows, self.context))
        num_pages = -(-self.context // PAGE)
        step = [self.ints(0, self.rows), self.ints(self.context), self.ints(*range(num_pages))]
        for _ in range(LAYERS):
            shape = (num_pages * PAGE, KV_HEADS, HEAD)
            caches = [self.keep.floats(*shape), self.keep.floats(*shape)]
            self.add_norm(self.x, T)
            self.add_linear(self.qkv, self.normed, self.codes, QKV, WIDTH, T)
            pointers = [self.q, *caches, self.qkv, cosine, sine, slots, slots, 0, 0]
            ints: list[int | DimArg] = [T, HEADS, KV_HEADS, HEAD, QKV, QUERY, HEAD]
            self.builder.add("rope_kv_write", pointers, ints, [0.0, 0.0])
            pointers = [self.attended, self.q, *caches, *step]
            ints = [T, B, HEADS, KV_HEADS, HEAD, num_pages, PAGE, 0, QUERY, QUERY]
            self.builder.add("attention_paged", pointers, ints, [HEAD**-0.5, 0.0])
            if self.is_block:
                pointers = [*self.codes, self.attended]
                self.builder.add("quantize_rows_i8", pointers, [T, QUERY, QUERY])
            self.add_linear(self.x, self.attended, self.codes, WIDTH, QUERY, T, residual=self.x)
            self.add_norm(self.x, T)
            self.add_linear(self.gate_up, self.normed, self.codes, 2 * FFN, WIDTH, T)
            pointers = [self.active_out, self.gate_up, *self.wide]
            self.builder.add("silu_mul", pointers, [T, FFN, 2 * FFN, FFN])
            self.add_linear(self.x, self.active, self.wide, WIDTH, FFN, T, residual=self.x)

    def add_head(self, table: np.ndarray) -> np.ndarray:
        """Add the last row's norm, logits and choice; return where the logits go."""
        logits, sampled = np.zeros((1, VOCAB), np.float32), self.keep.floats(1, WIDTH)
        pointers = [sampled, self.x, self.ints(self.rows - 1)]
        self.builder.add("gather_rows", pointers, [R, WIDTH, WIDTH, WIDTH])
        self.add_norm(sampled, R)
        y = self.keep.keep(logits)
        if self.is_block:
            # The head shares the 8-bit table, as in SmolLM2's GGUF.
            self.weight_bytes += table.nbytes
            ints: list[int | DimArg] = [R, VOCAB, WIDTH, VOCAB, 0, FORMATS[HEAD_FORMAT]]
            self.builder.add("linear_w8a8", [y, table.ctypes.data, 0, 0, *self.codes], ints)
        else:
            self.add_linear(y, self.normed, self.codes, VOCAB, WIDTH, R)
        self.builder.add("argmax_rows", [self.ints(0), y], [R, VOCAB, VOCAB])
        return logits

    def build(self) -> Model:
        table = self.add_embedding()
        self.add_layers()
        logits = self.add_head(table)
        return Model(self.builder.build(), self.keep, self.weight_bytes, logits)


def bench_model(
    bandwidth: float, tokens: int, context: int, dtypes: list[str], detail: bool
) -> None:
    for dtype in dtypes:
        model = ModelBuilder(dtype, tokens, context).build()
        run = model.program.run
        times = time_runs(partial(run, [tokens, 1, 1]), 2.0)
        assert np.isfinite(model.logits).all()
        assert np.ptp(model.logits) > 0
        cache_bytes = 2 * context * KV_HEADS * HEAD * 4 * LAYERS
        limit = (model.weight_bytes + cache_bytes) / bandwidth * 1e3
        print(f"{dtype:14} T={tokens:<4} median {times.median / 1e3:8.3f} ms, best "
              f"{times.best / 1e3:8.3f} ms: {tokens / times.median * 1e6:7.1f} tok/s (best "
              f"{tokens / times.best * 1e6:7.1f}); bytes alone {limit:.3f} ms")  # fmt: skip
        if detail:
            print_by_kernel(model.program.profile([tokens, 1, 1]))


def print_by_kernel(times: list[tuple[str, float]]) -> None:
    names = {name for name, _ in times}
    totals = {name: [us for other, us in times if other == name] for name in names}
    for name, each in sorted(totals.items(), key=lambda item: -sum(item[1])):
        print(f"    {name:18} {sum(each):9.1f} us in {len(each)} commands")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", choices=["linear", "decode", "prefill"], default=None)
    parser.add_argument("--threads", type=int, default=0, help="0: one per processor")
    parser.add_argument("--formats", default="u4/32:f16+f16,i4/32:f16,i8/32:f16,bf16,f16,f32")
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
