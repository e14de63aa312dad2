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
from shapes import CONFIGS, RandomWeights, fill_random, spec_of, step_of
from timing import Share, ceilings, events_ms, shares

import metainfer
from metainfer.backends.registry import installed
from metainfer.compiler.predict import predict_step
from metainfer.ir.plan import Plan

SHOWN = 16  # kernels of a profile
RESTED = 5  # steps that are timed after a rest


def ours(args: argparse.Namespace) -> Iterator[tuple[str, int, float, dict[str, float]]]:
    """(case, tokens, milliseconds, predicted figures) of each case."""
    spec = spec_of(args.model, args.layers)
    begun = time.perf_counter()
    plan = metainfer.compile(
        spec, "1xh200", max_tokens=args.prefill_tokens, max_sequences=max(args.batch),
        max_context=max(2 * args.context, args.prefill_tokens // 8), weights=args.weights,
        activations=args.activations, overlap=args.overlap, kv=args.kv,
    )  # fmt: skip
    print(f"compiled in {time.perf_counter() - begun:.1f} s", flush=True)
    begun = time.perf_counter()
    model = metainfer.load(plan, RandomWeights(plan), allow_machine_mismatch=True)
    for state in model._storage.states.values():
        for field in state.values():
            fill_random(field)
    torch.cuda.synchronize()
    print(f"weights drawn and loaded in {time.perf_counter() - begun:.1f} s", flush=True)
    for batch in args.batch:
        tokens, step = step_of(batch, 1, args.context, model.page_size)
        name = f"decode, batch {batch}"
        yield case(model, plan, "decode", tokens, step, name, profile=args.profile)
    for batch, new in ((1, args.prefill_tokens // 16), (8, args.prefill_tokens // 8)):
        tokens, step = step_of(batch, new, new, model.page_size)
        name = f"prefill, {batch} x {new}"
        yield case(model, plan, "prefill", tokens, step, name, profile=args.profile)


def case(
    model: Any, plan: Plan, phase: str, tokens: np.ndarray, step: dict[str, Any], name: str,
    *, profile: bool,
) -> tuple[str, int, float, dict[str, float]]:  # fmt: skip
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
    graph_ms, timed = eager, run
    if phase == "decode":
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run()
            graph_ms, timed = events_ms(graph.replay), graph.replay
        except RuntimeError as error:
            print(f"{name}: not captured: {str(error).splitlines()[0]}", flush=True)
    rested = rested_ms(timed) if phase == "prefill" else 0.0
    predicted = predict_step(plan.module(phase), model.machine, installed(), env)
    work = {k: float(predicted[k]) for k in ("bytes", "flops", "seconds")}
    work["eager_ms"], work["rested_ms"] = eager, rested
    if profile:
        print_shares(*shares(timed))
    return name, len(tokens), graph_ms, work


def rested_ms(run: Callable[[], object]) -> float:
    """Median of steps with a second of rest before each: a card that has run products for seconds
    lowers its clock to stay within its power limit, as figures of step after step show.
    """
    times = []
    for _ in range(RESTED):
        time.sleep(1.0)
        times.append(events_ms(run, 1))
    return statistics.median(times)


def print_shares(found: Sequence[Share], whole: float) -> None:
    """Where the time of a step goes, by kernel."""
    total = sum(share.us for share in found)
    print(
        f"   {whole:.0f} us from the first to the last kernel, {total:.0f} in kernels", flush=True
    )
    for share in found[:SHOWN]:
        mean, added = share.us / share.count, share.added / share.count
        print(
            f"   {share.added:9.1f} us {share.count:4d} x {added:8.2f} (from its start "
            f"{mean:8.2f})  {share.kernel[:80]}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=sorted(CONFIGS), default="llama:8b")
    parser.add_argument("--layers", type=int, default=0, help="fewer layers, for a quick look")
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--activations", default="auto")
    parser.add_argument("--kv", default="auto")
    parser.add_argument("--overlap", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--profile", action="store_true", help="time of each kernel in a step")
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
        if rested := work["rested_ms"]:
            print(f"   after a second of rest {rested:.3f} ms, {tokens / rested * 1e3:,.0f} tok/s")


if __name__ == "__main__":
    main()
