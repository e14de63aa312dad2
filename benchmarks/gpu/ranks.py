"""Whole models on several GPUs: decode steps and prefill of several layouts, overlap on and off.

Times are wall clock on rank 0, from tokens on the host to logits on the host; weights are random.
Beside them stand the compiler's prediction and the roofline of all GPUs together.

    NCCL_P2P_DISABLE=1 python -m torch.distributed.run --nproc-per-node 2 benchmarks/gpu/ranks.py \
        --model qwen3_moe:30b --layout tp2 tp2-ep2 pp2
"""

import argparse
import os
import re
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from shapes import CONFIGS, RandomWeights, fill_random, spec_of, step_of
from timing import ceilings

import metainfer
from metainfer.backends.registry import installed
from metainfer.compiler.predict import predict_step
from metainfer.ir.plan import Plan
from metainfer.runtime.ranked import RankedModel

REPEATS = 15


def layout_of(text: str) -> dict[str, Any]:
    """``tp2-ep2`` as options of compile."""
    return {name: int(size) for name, size in re.findall(r"([a-z]+)(\d+)", text)}


def plan_of(args: argparse.Namespace, layout: str, *, overlap: bool) -> Plan:
    """Rank 0 compiles, the others read what it wrote."""
    where: list[str] = [""]
    if dist.get_rank() == 0:
        begun = time.perf_counter()
        where = [tempfile.mkdtemp()]
        metainfer.compile(
            spec_of(args.model, args.layers), args.hw, max_tokens=args.prefill_tokens,
            max_sequences=max(args.batch), max_context=max(2 * args.context, args.prompt),
            overlap=overlap, out=Path(where[0]) / "plan", **layout_of(layout),
        )  # fmt: skip
        print(f"compiled in {time.perf_counter() - begun:.1f} s", flush=True)
    dist.broadcast_object_list(where, src=0, device=torch.device("cpu"))
    return Plan.read(Path(where[0]) / "plan")


def seconds_of(model: RankedModel, phase: str, batch: int, new: int, context: int) -> float:
    """Median seconds of a step on all replicas, each of which has its part of the batch."""
    replicas = model.num_replicas
    given = step_of(max(batch // replicas, 1), new, context, model.page_size)
    idle = max(replicas - batch, 0)
    steps = [given] * (replicas - idle) + [None] * idle
    times = []
    for number in range(REPEATS + 2):
        begun = time.perf_counter()
        model.run_together(phase, steps)
        if number >= 2:
            times.append(time.perf_counter() - begun)
    return statistics.median(times)


def predicted(plan: Plan, model: RankedModel, phase: str, env: dict[str, int]) -> dict[str, float]:
    """Sums over stages: one step passes through them one behind the other."""
    sums: dict[str, float] = {}
    for stage in range(plan.layout.pp):
        first = stage * plan.layout.stage_ranks
        found = predict_step(plan.module(phase, stage), model.machine, installed(), env, first)
        for name in ("seconds", "bytes", "flops", "meeting_seconds", "hidden_seconds"):
            sums[name] = sums.get(name, 0.0) + found[name]
    return sums


def report(args: argparse.Namespace, plan: Plan, model: RankedModel, name: str, tops: Any) -> None:
    """One line for each workload, on rank 0."""
    cases = [("decode", batch, 1, args.context) for batch in args.batch]
    cases.append(("prefill", args.prefill_tokens // args.prompt, args.prompt, args.prompt))
    for phase, batch, new, context in cases:
        seconds = seconds_of(model, phase, batch, new, context)
        print(*model.run_notes, end="", flush=True)
        each = max(batch // model.num_replicas, 1)
        env = {"T": each * new, "B": each, "P": -(-context // model.page_size), "R": each}
        found = predicted(plan, model, phase, env)
        # A stage's cards work one behind the other, those of a mesh at once.
        bound = tops.roofline_us(found["bytes"], found["flops"]) * 1e-6
        print(
            f"{args.model} {name} {phase} {batch} x {new}: {seconds * 1e3:.2f} ms, "
            f"{batch * new / seconds:,.0f} tok/s; predicted {found['seconds'] * 1e3:.2f} ms "
            f"(meeting {found['meeting_seconds'] * 1e3:.2f}, hidden "
            f"{found['hidden_seconds'] * 1e3:.2f}); roofline {bound * 1e3:.2f} ms = "
            f"{bound / seconds:.0%}",
            flush=True,
        )


def measure(args: argparse.Namespace, layout: str, tops: Any, *, overlap: bool) -> None:
    plan = plan_of(args, layout, overlap=overlap)
    begun = time.perf_counter()
    with metainfer.load(plan, RandomWeights(plan), allow_machine_mismatch=True) as model:
        assert isinstance(model, RankedModel)
        for state in model._storage.states.values():
            for field in state.values():
                fill_random(field)
        if model.is_leader:
            print(f"loaded in {time.perf_counter() - begun:.1f} s", *model.notes, flush=True)
            name = layout if overlap else f"{layout}, no overlap"
            report(args, plan, model, name, tops)
        else:
            model.follow()
    torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=sorted(CONFIGS), default="qwen3_moe:30b")
    parser.add_argument("--layers", type=int, default=0, help="fewer layers")
    parser.add_argument("--hw", default="2xh200-nop2p")
    parser.add_argument("--layout", nargs="+", default=["tp2", "tp2-ep2", "pp2"])
    parser.add_argument("--overlap", nargs="+", choices=["on", "off"], default=["on", "off"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--prefill-tokens", type=int, default=8 * 2048)
    args = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    tops = ceilings()
    torch.cuda.empty_cache()
    # One process group for all plans: loading does not make, or end, another.
    dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timedelta(minutes=5))
    if dist.get_rank() == 0:
        print(f"memory {tops.bandwidth / 1e12:.2f} TB/s, bf16 {tops.bf16 / 1e12:.0f} TFLOP/s")
    for layout in args.layout:
        for overlap in args.overlap:
            measure(args, layout, tops, overlap=overlap == "on")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
