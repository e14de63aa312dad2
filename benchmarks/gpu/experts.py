"""Speed of the Triton experts on this GPU, beside rooflines and torch's grouped product.

    python benchmarks/gpu/experts.py                          # Qwen3-30B-A3B, all formats
    python benchmarks/gpu/experts.py --model mixtral --only bf16 --sweep

Random data and routing, another routing in each call, so that no call finds its weights in the
cache. Bytes: the weights of the experts that were really chosen, tokens in and out. torch's
grouped product does the two products on pairs that are sorted already, nothing else.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from timing import Row, announce, captured_us, ceilings

from metainfer.backends.triton.experts import Experts, Tile, Tiles, Weight, experts, tiles_for


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
}
FORMATS = {"bf16": 2.0, "e4m3": 1.0 + 4 / 128**2, "e2m1": 0.5 + 1 / 32}
TOKENS = (1, 2, 4, 16, 64, 256, 1024, 4096, 16384)
ROUTINGS = 6


def stack(num: int, outputs: int, inputs: int, form: str) -> Weight:
    """Random weights of a format."""
    if form == "bf16":
        made = torch.empty(num, outputs, inputs, device="cuda", dtype=torch.bfloat16)
        for part in made:
            part.normal_(std=inputs**-0.5)
        return Weight(made, "plain", made)
    if form == "e4m3":
        codes = torch.empty(num, outputs, inputs, device="cuda", dtype=torch.float8_e4m3fn)
        for part in codes:
            part.copy_(torch.randn(outputs, inputs, device="cuda"))
        shape = (num, -(-outputs // 128), -(-inputs // 128))
        scales = (torch.rand(shape, device="cuda") + 0.5) * inputs**-0.5
        return Weight(codes, "e4m3", scales, 128, 128)
    packed = torch.randint(0, 256, (num, outputs, inputs // 2), device="cuda", dtype=torch.uint8)
    shape = (num, outputs, inputs // 32)
    powers = torch.randint(119, 122, shape, device="cuda", dtype=torch.uint8)
    return Weight(packed, "e2m1", powers, 1, 32, True)


def widened(weight: Weight, expert: int) -> torch.Tensor:
    """One expert's weights in float32."""
    codes = weight.codes[expert]
    if weight.format == "plain":
        return codes.float()
    if weight.format == "e4m3":
        scales = weight.scales[expert].repeat_interleave(128, 0).repeat_interleave(128, 1)
        return codes.float() * scales[: codes.shape[0], : codes.shape[1]]
    table = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6], device="cuda")
    table = torch.cat([table, -table])
    both = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
    powers = torch.exp2(weight.scales[expert].float() - 127)
    return table[both.long()] * powers.repeat_interleave(32, -1)


def calls_of(model: Model, tokens: int, weights: tuple[Weight, Weight, Weight]) -> list[Experts]:
    """Calls on different tokens and routings."""

    def made(seed: int) -> Experts:
        torch.manual_seed(seed)
        x = torch.randn(tokens, model.width, device="cuda", dtype=torch.bfloat16)
        logits = torch.randn(tokens, model.experts, device="cuda")
        share, ids = logits.softmax(-1).topk(model.choices)
        return Experts(
            x, ids.int(), (share / share.sum(-1, keepdim=True)).bfloat16(), *weights,
            torch.empty_like(x),
        )  # fmt: skip

    return [made(seed) for seed in range(ROUTINGS if tokens <= 1024 else 2)]


def work_of(model: Model, call: Experts, form: str) -> tuple[float, float]:
    """Bytes and operations of a call."""
    chosen = int(call.ids.unique().numel())
    matrix = model.width * model.inner
    moved = 3 * chosen * matrix * FORMATS[form] + 4 * call.x.numel()
    return moved, 6.0 * call.pairs * matrix


def wrong_by(call: Experts) -> float:
    """Largest difference of the last token from float32, relative to the largest number."""
    x, wanted = call.x[-1].float(), torch.zeros_like(call.x[-1], dtype=torch.float32)
    for expert, share in zip(call.ids[-1].tolist(), call.weights[-1].tolist(), strict=True):
        gate, up, down = (widened(w, expert) for w in (call.gate, call.up, call.down))
        hidden = torch.nn.functional.silu(gate @ x) * (up @ x)
        wanted += share * (down @ hidden)
    return float((call.out[-1].float() - wanted).abs().max() / wanted.abs().max())


def run_all(call: Experts, tiles: Tiles) -> Callable[[], None]:
    launches = experts(call, tiles)

    def run() -> None:
        for launch in launches:
            launch.run()

    return run


def grouped(model: Model, call: Experts) -> Callable[[], object] | None:
    """torch's grouped products on sorted pairs, gate and up joined."""
    if call.gate.format != "plain" or not hasattr(torch, "_grouped_mm"):
        return None
    order = call.ids.flatten().argsort()
    ends = call.ids.flatten().bincount(minlength=model.experts).cumsum(0).int()
    rows = call.x[order // model.choices]
    both = torch.cat([call.gate.codes, call.up.codes], 1)
    hidden = torch.randn(call.pairs, model.inner, device="cuda", dtype=torch.bfloat16)
    down = call.down.codes

    def run() -> object:
        return (
            torch._grouped_mm(rows, both.transpose(1, 2), offs=ends),
            torch._grouped_mm(hidden, down.transpose(1, 2), offs=ends),
        )

    return run


def tiles_of(call: Experts, sweep: bool) -> Iterator[Tiles]:
    """The chosen tiles, the wide ones, and with --sweep variations of either product."""
    chosen = tiles_for(call)
    tried = {chosen, tiles_for(call, wide=True)}
    yield from tried
    if not sweep:
        return
    rows = chosen.gate_up.rows
    sizes = (8, 16, 32, 64) if rows <= 32 else (32, 64, 128)
    for columns in sizes:
        for depth in (64, 128, 256):
            for warps in (4, 8):
                for stages in (3, 4, 5):
                    gate_up = Tile(rows, columns, depth, warps, stages)
                    down = replace(gate_up, columns=2 * columns)
                    made = Tiles(gate_up, down, chosen.parts)
                    if made not in tried:
                        tried.add(made)
                        yield made


def name_of(tiles: Tiles) -> str:
    a, b = tiles.gate_up, tiles.down
    return (
        f"{a.rows}: {a.columns}x{a.depth} {a.num_warps}w{a.num_stages}s, "
        f"{b.columns}x{b.depth} {b.num_warps}w{b.num_stages}s /{tiles.parts}"
    )


def rows_of(model: Model, tokens: int, form: str, weights: tuple[Weight, Weight, Weight],
            sweep: bool) -> Iterator[Row]:  # fmt: skip
    calls = calls_of(model, tokens, weights)
    works = [work_of(model, call, form) for call in calls]
    moved, flops = (sum(w[i] for w in works) / len(works) for i in range(2))
    case = f"{form} {tokens} tokens"
    for tiles in tiles_of(calls[0], sweep):
        what = name_of(tiles)
        try:
            us = captured_us([run_all(call, tiles) for call in calls])
        except Exception as error:  # Triton has its own for code that does not fit
            print(f"{case:34s} {what:34s} {str(error).splitlines()[:1]}")
            continue
        off = wrong_by(calls[-1])
        yield Row(case, what + ("" if off < 0.02 else f" WRONG {off:.3f}"), us, moved, flops)
    peers = [grouped(model, call) for call in calls[:2]]
    if tokens >= 1024 and peers[0] is not None:
        us = captured_us([p for p in peers if p is not None])
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
