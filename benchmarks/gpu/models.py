"""Whole models on one GPU: decode steps and prefill beside rooflines.

Weights are random with a spread, keys and values random too. Decode steps are captured as CUDA
graphs where the plan allows; the time is that of a replay, by CUDA events.

    python benchmarks/gpu/models.py --model qwen3_moe:30b --batch 1 16 64
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from timing import ceilings

import metainfer
from metainfer.backends.registry import installed
from metainfer.compiler.check import checkpoint_types
from metainfer.compiler.predict import predict_step
from metainfer.ir.dtypes import Scalar
from metainfer.ir.plan import Plan
from metainfer.ir.rope import Rope
from metainfer.ir.types import TensorType
from metainfer.models.decoder import decoder_spec
from metainfer.models.decoder_config import DecoderConfig
from metainfer.models.qwen3_moe import config_30b
from metainfer.models.spec import ModelSpec

LLAMA_8B = DecoderConfig(
    hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128, intermediate=14336, vocab=128256,
    max_positions=8192, eps=1e-5, rope=Rope(theta=5e5),
)  # fmt: skip
CONFIGS = {"llama:8b": LLAMA_8B, "qwen3_moe:30b": config_30b}
_BLOCK = 1 << 24  # numbers drawn; larger tensors repeat them
REPEATS = 20


def spec_of(name: str, layers: int) -> ModelSpec:
    import dataclasses

    config = CONFIGS[name]
    if layers:
        config = dataclasses.replace(config, layers=layers)
    return decoder_spec(name.replace(":", "_"), config, dtype="bf16")


class RandomWeights:
    """Normal numbers of the size that a trained model's have, by the fan-in of each weight."""

    def __init__(self, plan: Plan) -> None:
        self._types: dict[str, TensorType] = {}
        for phase in plan.phases:
            for stage in range(plan.layout.pp):
                self._types.update(checkpoint_types(plan.module(phase, stage)))
        self._normal = np.random.default_rng(0).standard_normal(_BLOCK).astype(np.float32)
        self._blocks: dict[tuple[int, str], np.ndarray] = {}

    def __call__(self, name: str) -> np.ndarray:
        type_ = self._types[name]
        shape = tuple(n.static for n in type_.shape)
        assert isinstance(type_.dtype, Scalar)
        if len(shape) == 1:
            return np.ones(shape, type_.dtype.numpy)
        key = (shape[-1], type_.dtype.name)
        if key not in self._blocks:
            self._blocks[key] = (self._normal / np.sqrt(shape[-1])).astype(type_.dtype.numpy)
        return np.resize(self._blocks[key], shape)


def step_of(batch: int, new: int, context: int, page: int) -> tuple[np.ndarray, dict[str, Any]]:
    """Each of ``batch`` sequences gets ``new`` tokens and then has ``context``."""
    most = -(-context // page)
    pages = 1 + np.arange(batch * most).reshape(batch, most)
    at = np.arange(context - new, context)
    slots = np.concatenate([pages[b, at // page] * page + at % page for b in range(batch)])
    starts = np.arange(batch + 1) * new
    fields = {
        "positions": np.tile(at, batch), "slots": slots, "starts": starts,
        "lengths": np.full(batch, context), "pages": pages, "sample_rows": starts[1:] - 1,
        "num_valid": np.array([batch * new, batch]),
    }  # fmt: skip
    tokens = np.random.default_rng(1).integers(0, 1000, batch * new)
    return tokens.astype(np.int32), {k: v.astype(np.int32) for k, v in fields.items()}


def events_ms(run: Callable[[], None], repeats: int = REPEATS) -> float:
    """Median milliseconds by CUDA events."""
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def ours(args: argparse.Namespace) -> Iterator[tuple[str, int, float, dict[str, float]]]:
    """(case, tokens, milliseconds, predicted figures) of each case."""
    spec = spec_of(args.model, args.layers)
    begun = time.perf_counter()
    plan = metainfer.compile(
        spec, "1xh200", max_tokens=args.prefill_tokens, max_sequences=max(args.batch),
        max_context=max(2 * args.context, args.prefill_tokens // 8), weights=args.weights,
    )  # fmt: skip
    print(f"compiled in {time.perf_counter() - begun:.1f} s", flush=True)
    begun = time.perf_counter()
    model = metainfer.load(plan, RandomWeights(plan), allow_machine_mismatch=True)
    for state in model._storage.states.values():
        for field in state.values():
            field.normal_()
    torch.cuda.synchronize()
    print(f"weights drawn and loaded in {time.perf_counter() - begun:.1f} s", flush=True)
    for batch in args.batch:
        tokens, step = step_of(batch, 1, args.context, model.page_size)
        yield case(model, plan, "decode", tokens, step, f"decode, batch {batch}")
    for batch, new in ((1, args.prefill_tokens // 16), (8, args.prefill_tokens // 8)):
        tokens, step = step_of(batch, new, new, model.page_size)
        yield case(model, plan, "prefill", tokens, step, f"prefill, {batch} x {new}")


def case(
    model: Any, plan: Plan, phase: str, tokens: np.ndarray, step: dict[str, Any], name: str
) -> tuple[str, int, float, dict[str, float]]:
    executor, env = model._prepare(phase, tokens, step)
    calls = executor.launches(env)
    # The input lies in the arena, where a step's later values overwrite it.
    given, held = torch.from_numpy(tokens).cuda(), executor.input(0, env)

    def run() -> None:
        held.copy_(given)
        for call in calls:
            call()

    for _ in range(3):
        run()
    torch.cuda.synchronize()
    eager = events_ms(run, 5)
    graph_ms = eager
    if phase == "decode":
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run()
            graph_ms = events_ms(graph.replay)
        except RuntimeError as error:
            print(f"{name}: not captured: {str(error).splitlines()[0]}", flush=True)
    predicted = predict_step(plan.module(phase), model.machine, installed(), env)
    work = {k: float(predicted[k]) for k in ("bytes", "flops", "seconds")}
    work["eager_ms"] = eager
    if phase == "decode" or len(step["lengths"]) == 8:
        _, measured, _ = model.trace(phase, tokens, step)
        slowest(measured)
    return name, len(tokens), graph_ms, work


def slowest(measured: Sequence[Any]) -> None:
    """Where the host's time of a step goes, by kernel (launch by launch, not captured)."""
    sums: dict[str, float] = {}
    for m in measured:
        sums[m.kernel] = sums.get(m.kernel, 0.0) + m.duration_us
    top = sorted(sums.items(), key=lambda item: -item[1])[:8]
    print("   host us by kernel: " + ", ".join(f"{k} {v:.0f}" for k, v in top), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=sorted(CONFIGS), default="llama:8b")
    parser.add_argument("--layers", type=int, default=0, help="fewer layers, for a quick look")
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--prefill-tokens", type=int, default=8 * 2048)
    args = parser.parse_args()
    tops = ceilings()
    print(f"memory {tops.bandwidth / 1e12:.2f} TB/s, bf16 product {tops.bf16 / 1e12:.0f} TFLOP/s")
    for name, tokens, ms, work in ours(args):
        bound = tops.roofline_us(work["bytes"], work["flops"]) / 1e3
        print(
            f"{args.model} {name}: {ms:.3f} ms (launch by launch {work['eager_ms']:.3f}), "
            f"{tokens / ms * 1e3:,.0f} tok/s; roofline {bound:.3f} ms = {bound / ms:.0%}; "
            f"predicted {work['seconds'] * 1e3:.3f} ms",
            flush=True,
        )


if __name__ == "__main__":
    main()
