"""Speed of the Triton experts on this GPU, beside rooflines and torch's grouped product.

    python benchmarks/gpu/experts.py                          # Qwen3-30B-A3B, all formats
    python benchmarks/gpu/experts.py --model mixtral --only bf16 --sweep
    python benchmarks/gpu/experts.py --model wide_256 --only mxfp4 --tokens 1 16 256 4096

Random data and routing, another routing in each call, so that no call finds its weights in the
cache. Bytes: the weights of the experts that were really chosen, tokens in and out. torch's
grouped product does the two products on pairs that are sorted already, nothing else; codes are
widened for it first, by the kernel that does so for products of many rows.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from timing import Row, announce, captured_us, ceilings, run_all

from metainfer.backends.triton import words
from metainfer.backends.triton.experts import Experts, Tile, Tiles, experts, tiles_for
from metainfer.backends.triton.experts_weight import weight_of
from metainfer.backends.triton.widened import widening
from metainfer.backends.triton.words import Words
from metainfer.ir.dtypes import parse_dtype
from metainfer.ir.types import tensor

Stacks = tuple[torch.Tensor | Words, torch.Tensor | Words, torch.Tensor | Words]


@dataclass(frozen=True)
class Model:
    """Experts of a model: how many, chosen by a token, width, inner width."""

    experts: int
    choices: int
    width: int
    inner: int


MODELS = {
    "qwen3_30b": Model(128, 8, 2048, 768),
    "qwen3_235b_of_8": Model(16, 8, 4096, 1536),
    "mixtral": Model(8, 2, 4096, 14336),
    "wide_256": Model(256, 6, 4096, 2048),
}
# Their bytes a number, and their text.
FORMATS = {"bf16": 2.0, "fp8": 1.0 + 4 / 128**2, "mxfp4": 0.5 + 1 / 32, "nvfp4": 0.5 + 1 / 16}
TEXTS = {"fp8": "f8e4m3/128x128:f32", "mxfp4": "f4e2m1/32:f8e8m0", "nvfp4": "f4e2m1/16:f8e4m3*f32"}
TOKENS = (1, 2, 4, 16, 64, 256, 1024, 4096, 16384)
ROUTINGS = 6


def stack(num: int, outputs: int, inputs: int, form: str) -> torch.Tensor | Words:
    """Random weights of a format."""
    if form == "bf16":
        made = torch.empty(num, outputs, inputs, device="cuda", dtype=torch.bfloat16)
        for part in made:
            part.normal_(std=inputs**-0.5)
        return made
    typed = words.typed(tensor(parse_dtype(TEXTS[form]), num, outputs, inputs))
    if form == "fp8":
        codes = torch.empty(typed.codes.shape, device="cuda", dtype=torch.float8_e4m3fn)
        for part in codes:
            part.copy_(torch.randn(part.shape, device="cuda"))
        scales = (torch.rand(typed.scales.shape, device="cuda") + 0.5) * inputs**-0.5
        return Words(typed.format, codes.view(torch.uint8), scales, None, inputs)
    codes = torch.randint(-(2**31), 2**31, typed.codes.shape, device="cuda", dtype=torch.int32)
    # Powers of two near 2^-7, and of NVFP4 scales near 1 with one for each row beside them.
    low, high = (119, 122) if form == "mxfp4" else (72, 88)
    shape = (*typed.scales.shape, 4)
    scales = torch.randint(low, high, shape, device="cuda", dtype=torch.uint8).view(torch.int32)
    rows = None
    if typed.row_scales is not None:
        rows = torch.full(typed.row_scales.shape, 2.0**-8, device="cuda")
    return Words(typed.format, codes, scales[..., 0], rows, inputs)


def widened(weight: torch.Tensor | Words, expert: int) -> torch.Tensor:
    """One expert's weights in float32, by torch's own operations."""
    if isinstance(weight, torch.Tensor):
        return weight[expert].float()
    # A stack of one: codes of a matrix lie otherwise.
    one = slice(expert, expert + 1)
    rows = None if weight.row_scales is None else weight.row_scales[one]
    part = Words(weight.format, weight.codes[one], weight.scales[one], rows, weight.width)
    return words.plain_of(part).dequantize()[0]


def calls_of(model: Model, tokens: int, weights: Stacks) -> list[Experts]:
    """Calls on different tokens and routings."""
    read = tuple(map(weight_of, weights))

    def made(seed: int) -> Experts:
        torch.manual_seed(seed)
        x = torch.randn(tokens, model.width, device="cuda", dtype=torch.bfloat16)
        logits = torch.randn(tokens, model.experts, device="cuda")
        share, ids = logits.softmax(-1).topk(model.choices)
        return Experts(
            x, ids.int(), (share / share.sum(-1, keepdim=True)).bfloat16(), *read,
            torch.empty_like(x),
        )  # fmt: skip

    return [made(seed) for seed in range(ROUTINGS if tokens <= 1024 else 2)]


def work_of(model: Model, call: Experts, form: str) -> tuple[float, float]:
    """Bytes and operations of a call."""
    chosen = int(call.ids.unique().numel())
    matrix = model.width * model.inner
    moved = 3 * chosen * matrix * FORMATS[form] + 4 * call.x.numel()
    return moved, 6.0 * call.pairs * matrix


def wrong_by(call: Experts, weights: Stacks) -> float:
    """Largest difference of the last token from float32, relative to the largest number."""
    x, wanted = call.x[-1].float(), torch.zeros_like(call.x[-1], dtype=torch.float32)
    for expert, share in zip(call.ids[-1].tolist(), call.weights[-1].tolist(), strict=True):
        gate, up, down = (widened(w, expert) for w in weights)
        hidden = torch.nn.functional.silu(gate @ x) * (up @ x)
        wanted += share * (down @ hidden)
    return float((call.out[-1].float() - wanted).abs().max() / wanted.abs().max())


def grouped(model: Model, call: Experts, weights: Stacks) -> Callable[[], object] | None:
    """torch's grouped products on sorted pairs, gate and up joined; codes are widened first."""
    if not hasattr(torch, "_grouped_mm"):
        return None
    order = call.ids.flatten().argsort()
    ends = call.ids.flatten().bincount(minlength=model.experts).cumsum(0).int()
    rows = call.x[order // model.choices]
    hidden = torch.randn(call.pairs, model.inner, device="cuda", dtype=torch.bfloat16)
    widenings, (gate, up, down) = [], weights
    shape = (model.experts, 2, model.inner, model.width)
    both = torch.empty(shape, device="cuda", dtype=torch.bfloat16)
    if isinstance(gate, torch.Tensor):
        both[:, 0], both[:, 1] = gate, up
    else:
        # Where the halves lie does not matter for the time.
        halves = both.view(2, model.experts * model.inner, model.width)
        wide = torch.empty(down.shape, device="cuda", dtype=torch.bfloat16)
        numbers = wide.view(-1, model.inner)
        for weight, out in ((gate, halves[0]), (up, halves[1]), (down, numbers)):
            flat = flattened(weight)
            widenings.append(widening(flat, out, 0, out.shape[0]))
        down = wide
    joined = both.view(model.experts, 2 * model.inner, model.width)

    def run() -> object:
        for launch in widenings:
            launch.run()
        return (
            torch._grouped_mm(rows, joined.transpose(1, 2), offs=ends),
            torch._grouped_mm(hidden, down.transpose(1, 2), offs=ends),
        )

    return run


def flattened(weight: Words) -> Words:
    """A stack as one matrix. NOTE: words lie otherwise then; the time is the same."""
    codes = weight.codes.flatten(0, 1)
    if weight.format.element.name == "f8e4m3":
        return Words(weight.format, codes, weight.scales.flatten(0, 1), None, weight.width)
    experts_, halves, chunks, outputs = weight.scales.shape
    scales = weight.scales.reshape(halves, chunks, experts_ * outputs)
    rows = None if weight.row_scales is None else weight.row_scales.flatten(0, 1)
    return Words(weight.format, codes, scales, rows, weight.width)


def tiles_of(call: Experts, sweep: bool) -> Iterator[Tiles]:
    """The chosen tiles, the wide ones, and with --sweep variations of either product."""
    chosen, wide = tiles_for(call), tiles_for(call, wide=True)
    yield from dict.fromkeys((chosen, wide))
    if not sweep:
        return
    tried = {chosen, wide}
    rows = chosen.gate_up.rows
    sizes = (16, 32, 64) if rows <= 32 else (32, 64, 128)
    for columns in sizes:
        for depth in (64, 128, 256):
            for warps in (4, 8):
                for stages in (3, 4, 5):
                    is_turned = 2 * columns >= 64 and chosen.gate_up.is_turned
                    gate_up = Tile(rows, columns, depth, warps, stages, is_turned)
                    down = replace(gate_up, columns=2 * columns)
                    made = Tiles(gate_up, down, chosen.parts)
                    if made not in tried:
                        tried.add(made)
                        yield made


def name_of(tiles: Tiles) -> str:
    a, b = tiles.gate_up, tiles.down
    rows = f"{a.rows}t" if a.is_turned else str(a.rows)
    return (
        f"{rows}: {a.columns}x{a.depth} {a.num_warps}w{a.num_stages}s, "
        f"{b.columns}x{b.depth} {b.num_warps}w{b.num_stages}s /{tiles.parts}"
    )


def rows_of(model: Model, tokens: int, form: str, weights: Stacks, sweep: bool) -> Iterator[Row]:
    """Lines of one format and number of tokens."""
    calls = calls_of(model, tokens, weights)
    works = [work_of(model, call, form) for call in calls]
    moved, flops = (sum(w[i] for w in works) / len(works) for i in range(2))
    case = f"{form} {tokens} tokens"
    for tiles in tiles_of(calls[0], sweep):
        what = name_of(tiles)
        try:
            us = captured_us([run_all(experts(call, tiles)) for call in calls])
        except Exception as error:  # Triton has its own for code that does not fit
            print(f"{case:34s} {what:34s} {str(error).splitlines()[:1]}")
            continue
        off = wrong_by(calls[-1], weights)
        yield Row(case, what + ("" if off < 0.02 else f" WRONG {off:.3f}"), us, moved, flops)
    peer = grouped(model, calls[0], weights)
    if peer is not None:
        us = captured_us([peer])
        yield Row(case, "torch grouped_mm, products alone", us, moved, flops)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="qwen3_30b")
    parser.add_argument("--only", default="", help="one format")
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS)
    parser.add_argument("--sweep", action="store_true", help="try other tiles too")
    args = parser.parse_args()
    model, found = MODELS[args.model], ceilings()
    announce(found)
    for form in FORMATS:
        if args.only not in ("", form):
            continue
        e, d, f = model.experts, model.width, model.inner
        weights = (stack(e, f, d, form), stack(e, f, d, form), stack(e, d, f, form))
        for tokens in args.tokens:
            for row in rows_of(model, tokens, form, weights, args.sweep):
                print(row.text(found), flush=True)
        del weights
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
