"""From `metainfer run` of a compiled plan to the first token, kernels cached and cold.

Writes a Hugging Face folder of a published shape with random weights (apart: not timed), compiles
it, then starts `metainfer run` as a user does and waits for the first byte of the answer. Cold: no
compiled kernel is on disk; cached: those of the run before. The weights' files have just been
written, so that the system still holds them in memory.

    python benchmarks/gpu/startup.py --model llama:8b
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from shapes import CONFIGS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from metainfer.models.decoder_config import DecoderConfig

PROMPT = "What is the capital of France, and why?"


def hf_keys(config: DecoderConfig) -> dict[str, object]:
    """config.json of a Llama."""
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16",
        "hidden_size": config.hidden, "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads, "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim, "intermediate_size": config.intermediate,
        "vocab_size": config.vocab, "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.eps, "rope_theta": config.rope.theta, "hidden_act": "silu",
        "tie_word_embeddings": False,
    }  # fmt: skip


def write_weights(config: DecoderConfig, folder: Path, device: str) -> int:
    """A file for each layer and one for the rest; returns their bytes."""
    heads, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    hidden, inner = config.hidden, config.intermediate
    layer = {
        "self_attn.q_proj": (heads, hidden), "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden), "self_attn.o_proj": (hidden, heads),
        "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner), "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }  # fmt: skip
    files = {
        f"layer{i}": {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
        for i in range(config.layers)
    }
    files["rest"] = {
        "model.embed_tokens.weight": (config.vocab, hidden), "model.norm.weight": (hidden,),
        "lm_head.weight": (config.vocab, hidden),
    }  # fmt: skip
    torch.manual_seed(0)
    index, written = dict[str, str](), 0
    for name, tensors in files.items():
        made = {key: draw(shape, device).cpu() for key, shape in tensors.items()}
        save_file(made, folder / f"{name}.safetensors")
        index |= dict.fromkeys(made, f"{name}.safetensors")
        written += sum(t.numel() * t.element_size() for t in made.values())
    text = json.dumps({"metadata": {"total_size": written}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)
    return written


def draw(shape: tuple[int, ...], device: str) -> torch.Tensor:
    """Normal numbers by the fan-in; norms are ones."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    drawn = torch.randn(shape, device=device, dtype=torch.bfloat16)
    return drawn / math.sqrt(shape[1])


def write_tokenizer(vocab: int, folder: Path) -> None:
    """A token for each byte; the rest of the vocabulary has names only."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = alphabet + [f"<{n}>" for n in range(vocab - len(alphabet))]
    tokenizer = Tokenizer(models.BPE({name: n for n, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def first_byte_s(plan: Path, cache: Path) -> tuple[float, float, str]:
    """Seconds to the first byte of the answer and to the end, and what was said beside it."""
    env = {**os.environ, "TRITON_CACHE_DIR": str(cache), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "metainfer", "run", str(plan), PROMPT, "--raw"]
    begun = time.perf_counter()
    with tempfile.TemporaryFile() as said:
        with subprocess.Popen(
            [*command, "--max-new-tokens", "16"], env=env, stdout=subprocess.PIPE, stderr=said
        ) as run:
            assert run.stdout is not None
            first = run.stdout.read(1)
            at = time.perf_counter() - begun
            run.stdout.read()
        whole = time.perf_counter() - begun
        said.seek(0)
        text = said.read().decode(errors="replace").strip()
    if run.returncode or not first:
        raise SystemExit(f"metainfer run failed ({run.returncode}):\n{text}")
    return at, whole, text.splitlines()[-1] if text else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=("llama:8b", "llama:70b"), default="llama:8b")
    parser.add_argument("--layers", type=int, default=0, help="fewer layers, for a quick look")
    parser.add_argument("--hw", default="1xh200")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "startup")
    parser.add_argument("--repeat", type=int, default=2, help="runs with cached kernels")
    args = parser.parse_args()
    config = CONFIGS[args.model]
    if args.layers:
        from dataclasses import replace

        config = replace(config, layers=args.layers)
    shutil.rmtree(args.folder, ignore_errors=True)
    weights, plan, cache = (args.folder / name for name in ("weights", "plan", "cache"))
    weights.mkdir(parents=True)
    (weights / "config.json").write_text(json.dumps(hf_keys(config)))
    write_tokenizer(config.vocab, weights)
    begun = time.perf_counter()
    written = write_weights(config, weights, "cuda" if torch.cuda.is_available() else "cpu")
    print(f"{written / 1e9:.1f} GB of weights written in {time.perf_counter() - begun:.1f} s")
    begun = time.perf_counter()
    subprocess.run(
        [
            sys.executable, "-m", "metainfer", "compile", str(weights), "--hw", args.hw, "--out",
            str(plan), "--max-context", "2048", "--max-sequences", "16",
        ],
        check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    print(f"compiled in {time.perf_counter() - begun:.1f} s")
    for kind in ("cold", *["cached"] * args.repeat):
        at, whole, text = first_byte_s(plan, cache)
        print(f"{kind}: first byte after {at:.1f} s, done after {whole:.1f} s; {text}", flush=True)
    shutil.rmtree(args.folder)


if __name__ == "__main__":
    main()
