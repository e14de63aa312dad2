"""The same shapes as models.py by transformers under torch.compile: a peer for the same machine.

Decode steps read a static cache of the given context and are captured as one CUDA graph where that
succeeds, prefill is one forward pass without a cache that returns the last tokens' logits.

    python benchmarks/gpu/torch_compile.py --model llama:8b --batch 1 16

Inductor takes one to two minutes to compile a batch size.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from shapes import CONFIGS
from timing import ceilings, events_ms

from metainfer.models.decoder_config import DecoderConfig


def hf_config(config: DecoderConfig) -> Any:
    """The same architecture as transformers calls it."""
    common: dict[str, Any] = {
        "hidden_size": config.hidden, "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads, "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim, "intermediate_size": config.intermediate,
        "vocab_size": config.vocab, "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.eps, "tie_word_embeddings": False, "use_cache": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope.theta},
    }  # fmt: skip
    if config.experts is None:
        return transformers.LlamaConfig(**common)
    moe = config.experts
    return transformers.Qwen3MoeConfig(
        **common, num_experts=moe.num, num_experts_per_tok=moe.chosen,
        moe_intermediate_size=moe.intermediate, norm_topk_prob=True,
    )  # fmt: skip


def model_of(name: str, layers: int, device: str) -> Any:
    """A model of random bf16 weights."""
    config = hf_config(CONFIGS[name])
    if layers:
        config.num_hidden_layers = layers
    torch.manual_seed(0)
    with torch.device(device):
        kwargs = {"experts_implementation": "grouped_mm"} if "moe" in name else {}
        made = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa", **kwargs
        )
    return made.eval()


def decode_of(model: Any, batch: int, context: int, forward: Any) -> Callable[[], Any]:
    """One decode step of every sequence, the last of ``context`` tokens."""
    device = model.device
    cache = transformers.StaticCache(config=model.config, max_cache_len=context + 64)
    tokens = torch.randint(0, 1000, (batch, context), device=device)
    at = torch.arange(context - 1, device=device)
    model(
        input_ids=tokens[:, :-1], past_key_values=cache, cache_position=at, use_cache=True,
        logits_to_keep=1,
    )  # fmt: skip
    last, place = tokens[:, -1:].clone(), torch.tensor([context - 1], device=device)

    def step() -> Any:
        return forward(
            input_ids=last, past_key_values=cache, cache_position=place,
            position_ids=place.expand(batch, 1), use_cache=True,
        )  # fmt: skip

    return step


def timed(name: str, run: Callable[[], Any], *, captured: bool) -> tuple[float, str]:
    """Median milliseconds, and how it was run."""
    begun = time.perf_counter()
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    print(f"{name}: compiled in {time.perf_counter() - begun:.0f} s", flush=True)
    if captured:
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run()
            return events_ms(graph.replay), "one CUDA graph"
        except RuntimeError as error:
            print(f"{name}: not captured: {str(error).splitlines()[0]}", flush=True)
    return events_ms(run, 5), "launch by launch"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=sorted(CONFIGS), default="llama:8b")
    parser.add_argument("--layers", type=int, default=0, help="fewer layers, for a quick look")
    parser.add_argument("--mode", default="max-autotune-no-cudagraphs", help="of torch.compile")
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 16])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--prompts", type=int, default=8)
    args = parser.parse_args()
    tops = ceilings()
    print(f"memory {tops.bandwidth / 1e12:.2f} TB/s, bf16 product {tops.bf16 / 1e12:.0f} TFLOP/s")
    with torch.inference_mode():
        model = model_of(args.model, args.layers, "cuda")
        count = sum(p.numel() for p in model.parameters())
        print(
            f"transformers {transformers.__version__}, {count / 1e9:.2f} G parameters", flush=True
        )
        for batch in args.batch:
            torch._dynamo.reset()
            forward = torch.compile(model.forward, dynamic=False, mode=args.mode)
            step = decode_of(model, batch, args.context, forward)
            name = f"decode, batch {batch}"
            ms, how = timed(name, step, captured=True)
            print(f"{args.model} {name}: {ms:.3f} ms ({how})", flush=True)
        torch._dynamo.reset()
        forward = torch.compile(model.forward, dynamic=False, mode=args.mode)
        ids = torch.randint(0, 1000, (args.prompts, args.prompt), device="cuda")
        name = f"prefill, {args.prompts} x {args.prompt}"
        ms, how = timed(
            name, lambda: forward(input_ids=ids, use_cache=False, logits_to_keep=1), captured=False
        )
        print(f"{args.model} {name}: {ms:.1f} ms, {ids.numel() / ms * 1e3:,.0f} tok/s ({how})")


if __name__ == "__main__":
    main()
