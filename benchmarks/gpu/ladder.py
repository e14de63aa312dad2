"""What each lever brings on this GPU, for a published shape with random weights.

    python benchmarks/gpu/ladder.py --model llama:8b --layers 4
    python benchmarks/gpu/ladder.py --model qwen3_moe:30b --layers 4 --batch 16

The rungs are those of `metainfer bench --ladder`, which takes a plan and its checkpoint: plain
PyTorch kernels launch by launch, then fusion, the plan's kernels, its formats, CUDA graphs.
"""

import argparse
import gc
from typing import Any

import torch
from shapes import RandomWeights, spec_of
from timing import announce, ceilings

import metainfer
from metainfer.cli.measure import Measurement, bench_language_model
from metainfer.compiler.ladder import compile_rung, is_same, rungs_of
from metainfer.ir.errors import CapacityError, Unsupported
from metainfer.ir.plan import Plan
from metainfer.runtime.load import load


def climb(plan: Plan, spec: Any, args: argparse.Namespace) -> None:
    """Print a line for each rung that changes something."""
    last: tuple[Plan, bool] | None = None
    first: list[Measurement] = []
    for rung in rungs_of(plan):
        if rung.idle:
            print(f"{rung.lever:8s} does not apply: {rung.idle}", flush=True)
            continue
        try:
            made = compile_rung(plan, spec, rung)
            if last is not None and is_same(made, last[0]) and rung.captures == last[1]:
                print(f"{rung.lever:8s} changes nothing in this plan", flush=True)
                continue
            found = measured(made, rung.captures, args)
        except (CapacityError, Unsupported) as error:
            print(f"{rung.lever:8s} cannot be measured: {error.what}", flush=True)
            continue
        last, first = (made, rung.captures), first or found
        figures = [
            f"{m.phase} {m.per_second:10,.1f} tok/s {m.median_seconds / m.steps * 1e3:9.3f} ms a "
            f"step, {m.per_second / base.per_second:7.2f}x plain"
            for m, base in zip(found, first, strict=True)
        ]
        print(f"{rung.lever:8s} {'   '.join(figures)}", flush=True)


def measured(plan: Plan, captures: bool, args: argparse.Namespace) -> list[Measurement]:
    """Prefill and decode of a plan."""
    model = load(plan, RandomWeights(plan))
    if not captures:
        model.launch_by_launch()
    found = bench_language_model(
        model, args.prompt_tokens, args.new_tokens, args.batch, args.repeat, lambda text: None
    )
    del model
    gc.collect()
    torch.cuda.empty_cache()
    return found


def main() -> None:
    """Print the machine, then the ladder."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="llama:8b")
    parser.add_argument("--layers", type=int, default=0, help="0 for all")
    parser.add_argument("--hw", default="1xh200")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--weights", default="auto", help="format of the plan's weights")
    args = parser.parse_args()
    announce(ceilings())
    spec = spec_of(args.model, args.layers)
    plan = metainfer.compile(
        spec, args.hw, weights=args.weights, max_tokens=max(args.prompt_tokens, 2048),
        max_sequences=max(args.batch, 1), max_context=args.prompt_tokens + args.new_tokens + 1,
    )  # fmt: skip
    climb(plan, spec, args)


if __name__ == "__main__":
    main()
