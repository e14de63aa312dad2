"""Decode and prefill of SmolLM2-135M beside transformers eager bf16, in one run.

    python benchmarks/smollm2.py                 # as-shipped int4 plan, bf16 peer, two threads
    python benchmarks/smollm2.py --weights int8 --threads 1

Each figure is the median of five, interleaved with the peer's so that both see the same load. The
bound of decode is the bytes that a token must read (packed weights, and the cache) at the read
bandwidth measured in the same run; a cache that keeps part of the weights lifts it. That of prefill
is its arithmetic at the f32 product rate measured in the same run, which 8-bit products exceed.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import metainfer
from metainfer.backends.registry import installed
from metainfer.compiler.predict import predict_step
from metainfer.hardware.machine import Machine
from metainfer.models.smollm2 import config, spec
from metainfer.runtime.checkpoint import open_checkpoint
from metainfer.runtime.load import LoadedModel

PROMPT, NEW, REPEATS, CONTEXT = 512, 64, 5, 64


def peer_model(dtype: torch.dtype) -> Any:
    """transformers' LlamaForCausalLM with the same weights, dequantized."""
    from transformers import LlamaConfig, LlamaForCausalLM

    made = LlamaConfig(
        hidden_size=config.hidden, intermediate_size=config.intermediate,
        num_hidden_layers=config.layers, num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads, vocab_size=config.vocab,
        max_position_embeddings=config.max_positions, rms_norm_eps=config.eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
        tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(made)
    checkpoint = open_checkpoint(spec.locate_checkpoint())
    state = {}
    for name in model.state_dict():
        tensor = checkpoint.read(spec.checkpoint_name(name))
        values = tensor if isinstance(tensor, np.ndarray) else tensor.dequantize()
        heads = spec.unpermute_heads(name)
        if heads:
            rows = values.reshape(heads, values.shape[0] // heads // 2, 2, -1)
            values = rows.swapaxes(1, 2).reshape(values.shape)
        state[name] = torch.from_numpy(np.ascontiguousarray(values, np.float32))
    checkpoint.close()
    model.load_state_dict(state)
    return model.to(dtype).eval()


def peer_prefill(model: Any, tokens: np.ndarray) -> tuple[float, Any]:
    ids = torch.from_numpy(tokens)[None].long()
    start = time.perf_counter()
    with torch.no_grad():
        out = model(ids, use_cache=True, logits_to_keep=1)
    return time.perf_counter() - start, out


def peer_decode(model: Any, tokens: np.ndarray) -> float:
    """Seconds per token, greedy, after a prompt of CONTEXT tokens."""
    _, out = peer_prefill(model, tokens[:CONTEXT])
    cache = out.past_key_values if hasattr(out, "past_key_values") else out.cache
    key = "past_key_values" if hasattr(out, "past_key_values") else "cache"
    token = out.logits[:, -1:].argmax(-1)
    start = time.perf_counter()
    with torch.no_grad():
        for _ in range(NEW):
            out = model(token, use_cache=True, **{key: cache})
            token = out.logits[:, -1:].argmax(-1)
    return (time.perf_counter() - start) / NEW


def our_step(
    model: LoadedModel, tokens: np.ndarray, first: int
) -> tuple[str, np.ndarray, dict[str, np.ndarray]]:
    """Step record of one sequence whose tokens stand from position ``first`` on."""
    count, page = len(tokens), model.page_size
    length = first + count
    pages = np.arange(1, -(-length // page) + 1, dtype=np.int32)[None]
    positions = np.arange(first, length, dtype=np.int32)
    step = {
        "positions": positions,
        "slots": (pages[0, positions // page] * page + positions % page).astype(np.int32),
        "starts": np.array([0, count], np.int32),
        "lengths": np.array([length], np.int32),
        "pages": pages,
        "sample_rows": np.array([count - 1], np.int32),
        "num_valid": np.array([count, 1], np.int32),
    }
    return ("decode" if count == 1 else "prefill"), tokens, step


def our_prefill(model: LoadedModel, tokens: np.ndarray) -> float:
    start = time.perf_counter()
    model.run(*our_step(model, tokens, 0))
    return time.perf_counter() - start


def our_decode(model: LoadedModel, tokens: np.ndarray) -> float:
    logits = model.run(*our_step(model, tokens[:CONTEXT], 0))
    token = np.array([int(logits[0].argmax())], np.int32)
    start = time.perf_counter()
    for i in range(NEW):
        logits = model.run(*our_step(model, token, CONTEXT + i))
        token = np.array([int(logits[0].argmax())], np.int32)
    return (time.perf_counter() - start) / NEW


def read_bandwidth() -> float:
    """Bytes a second of reading 256 MiB with all threads."""
    data = torch.ones(64 * 2**20)
    return data.numel() * 4 / best(lambda: data.sum())


def product_rate() -> float:
    """f32 operations a second of a product of 1024."""
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    return 2 * 1024**3 / best(lambda: a @ b)


def best(run: Callable[[], object]) -> float:
    times = []
    for _ in range(5):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--weights", default="auto", help="formats of the plan, as in metainfer compile"
    )
    parser.add_argument("--peer", default="bf16", choices=("bf16", "f32"))
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    plan = metainfer.compile(spec, "cpu", weights=args.weights, max_tokens=PROMPT)
    ours = metainfer.load(plan, num_threads=args.threads)
    peer = peer_model(torch.bfloat16 if args.peer == "bf16" else torch.float32)
    tokens = np.random.default_rng(0).integers(20, config.vocab, PROMPT).astype(np.int32)
    our_prefill(ours, tokens), our_decode(ours, tokens), peer_prefill(peer, tokens)
    times: dict[str, list[float]] = {
        k: [] for k in ("decode", "peer decode", "prefill", "peer prefill")
    }
    for _ in range(REPEATS):
        times["decode"].append(our_decode(ours, tokens))
        times["peer decode"].append(peer_decode(peer, tokens))
        times["prefill"].append(our_prefill(ours, tokens) / PROMPT)
        times["peer prefill"].append(peer_prefill(peer, tokens)[0] / PROMPT)
    report(plan, times, args)


def work(plan: metainfer.Plan, phase: str, sizes: dict[str, int], context: int) -> dict[str, Any]:
    """Bytes and operations of a step of the plan over so many tokens of context."""
    pages = -(-context // plan.meta["capacity"]["page_size"])
    machine = Machine.from_dict(dict(plan.meta["machine"]))
    return predict_step(plan.module(phase), machine, installed(), {**sizes, "P": pages})


def report(plan: metainfer.Plan, times: dict[str, list[float]], args: argparse.Namespace) -> None:
    rate = {k: 1 / statistics.median(v) for k, v in times.items()}
    spread = {k: (1 / max(v), 1 / min(v)) for k, v in times.items()}
    decode = work(plan, "decode", {"T": 1, "B": 1, "R": 1}, CONTEXT + NEW // 2)
    prefill = work(plan, "prefill", {"T": PROMPT, "B": 1, "R": 1}, PROMPT)
    bandwidth, flops = read_bandwidth(), product_rate()
    bounds = {
        "decode": bandwidth / decode["bytes"],
        "prefill": flops / prefill["flops"] * PROMPT,
    }
    if args.json:
        print(json.dumps({"rate": rate, "bounds": bounds, "plan": plan.hash}))
        return
    print(
        f"plan {plan.hash}, peer transformers eager {args.peer}, median of {REPEATS} (least - most)"
    )
    for name in ("decode", "prefill"):
        low, high = spread[name]
        print(
            f"{name:8} {rate[name]:8.1f} ({low:.1f} - {high:.1f})"
            f"   peer {rate['peer ' + name]:8.1f}"
            f"   ratio {rate[name] / rate['peer ' + name]:5.2f}x   bound {bounds[name]:8.1f}"
            f" ({rate[name] / bounds[name]:.0%})"
        )
    print(
        f"read {bandwidth / 1e9:.1f} GB/s, f32 product {flops / 1e9:.0f} GFLOP/s, "
        f"{decode['bytes'] / 1e6:.1f} MB a token"
    )


if __name__ == "__main__":
    main()
