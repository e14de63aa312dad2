"""Speed of the Triton paged attentions on this GPU, beside rooflines and torch's flash attention.

    python benchmarks/gpu/attention.py                  # all forms where they apply
    python benchmarks/gpu/attention.py --only decode --sweep

Random data; each case on several pools of pages, so that no call finds its keys in the cache.
torch's kernel reads keys that lie dense, one tensor for each sequence: it pays for no pages.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from timing import Row, announce, captured_us, ceilings, run_all
from torch.nn import functional

from metainfer.backends.triton.attention import (
    PAGED_TILE,
    Attention,
    Tile,
    prefill,
    prefill_tile,
    split,
    split_tile,
)
from metainfer.backends.triton.attention_warpgroups import KEYS, ROWS, STAGES, warpgroups
from metainfer.backends.triton.launch import Launch

L2_BYTES = 60 << 20
FEW_TOKENS = 16  # new ones of a sequence up to which the split form is tried


@dataclass(frozen=True)
class Case:
    """Equal sequences: how many, tokens in the state and new ones; heads, key heads, width."""

    name: str
    sequences: int
    context: int
    new: int
    heads: int = 32
    groups: int = 8
    width: int = 128
    page: int = 64
    window: int = 0

    @property
    def moved(self) -> int:
        """Compulsory bytes."""
        seen = min(self.context, self.window + self.new) if self.window else self.context
        keys = 2 * seen * self.groups * self.width
        rows = 2 * self.new * self.heads * self.width
        return 2 * self.sequences * (keys + rows)

    @property
    def flops(self) -> int:
        """Operations of the products that the mask leaves."""
        seen = sum(
            min(self.context - self.new + i + 1, self.window or self.context)
            for i in range(self.new)
        )
        return 4 * self.sequences * self.heads * self.width * seen


CASES = [
    Case("decode 1 x 1024", 1, 1024, 1),
    Case("decode 16 x 1024", 16, 1024, 1),
    Case("decode 64 x 1024", 64, 1024, 1),
    Case("decode 64 x 1024, pages of 16", 64, 1024, 1, page=16),
    Case("decode 1 x 32768", 1, 32768, 1),
    Case("decode 16 x 8192, 8 heads of 1", 16, 8192, 1, 8, 1),
    Case("decode 16 x 4096, 4 new", 16, 4096, 4),
    Case("decode 64 x 8192, window 1024", 64, 8192, 1, window=1024),
    Case("prefill 1 x 1024", 1, 1024, 1024),
    Case("prefill 8 x 2048", 8, 2048, 2048),
    Case("prefill 8 x 2048, pages of 16", 8, 2048, 2048, page=16),
    Case("prefill 1 x 32768", 1, 32768, 32768),
    Case("prefill 8 x 2048, heads of 64", 8, 2048, 2048, 32, 8, 64),
    Case("prefill 8 x 2048, heads of 256", 8, 2048, 2048, 16, 4, 256),
    Case("prefill 1 x 64 after 32768", 1, 32768, 64),
]


def calls_of(case: Case) -> list[Attention]:
    """As many calls on different pages as fill the cache twice."""
    pages = -(-case.context // case.page)
    num_pages = case.sequences * pages
    each = 4 * num_pages * case.page * case.groups * case.width
    count = max(min(2 * L2_BYTES // each + 1, 32), 1)

    def made(seed: int) -> Attention:
        torch.manual_seed(seed)
        options = {"device": "cuda", "dtype": torch.bfloat16}
        shape = (num_pages, case.page, case.groups, case.width)
        q = torch.randn(case.sequences * case.new, case.heads, case.width, **options)
        table = torch.randperm(num_pages, device="cuda").int().view(case.sequences, pages)
        starts = torch.arange(case.sequences + 1, device="cuda", dtype=torch.int32) * case.new
        lengths = torch.full((case.sequences,), case.context, device="cuda", dtype=torch.int32)
        return Attention(
            q, torch.randn(shape, **options), torch.randn(shape, **options), starts, lengths,
            table, torch.empty_like(q), window=case.window,
        )  # fmt: skip

    return [made(seed) for seed in range(count)]


def dense(call: Attention, case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values of equal sequences, [B, heads, tokens, width]."""
    at = call.pages.long().reshape(-1)
    shape = (case.sequences, -1, case.groups, case.width)
    k, v = (t[at].reshape(shape)[:, : case.context].transpose(1, 2) for t in (call.k, call.v))
    q = call.q.reshape(case.sequences, case.new, case.heads, case.width).transpose(1, 2)
    return q, k.contiguous(), v.contiguous()


def flash(call: Attention, case: Case) -> Callable[[], torch.Tensor] | None:
    """torch's attention where its masks say the same: decode of one token, or whole prompts."""
    if case.window or case.new not in (1, case.context):
        return None
    q, k, v = dense(call, case)
    return lambda: functional.scaled_dot_product_attention(
        q, k, v, is_causal=case.new > 1, enable_gqa=True
    )


def wrong_by(call: Attention, case: Case) -> float:
    """Largest difference of the last token of the last sequence from float32."""
    q, k, v = (t[-1].float() for t in dense(call, case))
    seen = min(case.window or case.context, case.context)
    k, v = (t[:, -seen:].repeat_interleave(case.heads // case.groups, 0) for t in (k, v))
    scores = torch.einsum("hd,hld->hl", q[:, -1], k) * case.width**-0.5
    wanted = torch.einsum("hl,hld->hd", scores.softmax(-1), v)
    return float((call.out[-1].float() - wanted).abs().max())


def tiles_of(case: Case, call: Attention, form: str, sweep: bool) -> Iterator[Tile]:
    chosen = prefill_tile(call) if form == "prefill" else split_tile(call)
    yield chosen
    if form == "prefill" and case.page >= PAGED_TILE.keys and case.width <= 128:
        yield PAGED_TILE
    if not sweep:
        return
    if form == "split":
        for keys in (32, 64, 128):
            for stages in (2, 3, 4):
                for per_sm in (1, 2, 3, 4):
                    tile = replace(chosen, keys=keys, num_stages=stages, per_sm=per_sm)
                    if tile != chosen:
                        yield tile
        return
    for rows, warps in ((64, 4), (128, 4), (128, 8), (256, 8)):
        for keys in (32, 64, 128):
            for stages in (2, 3, 4):
                tile = Tile(rows, keys, warps, stages)
                if tile != chosen:
                    yield tile


def forms_of(
    case: Case, call: Attention, sweep: bool
) -> Iterator[tuple[str, Callable[[Attention], list[Launch]]]]:
    """What to measure: a name, and the launches of a call."""
    forms = ["split"] if case.new <= 64 else []
    forms += ["prefill"] if case.new > FEW_TOKENS else []
    for form in forms:
        for tile in tiles_of(case, call, form, sweep):
            what = f"{form} {tile.rows}x{tile.keys} {tile.num_warps}w {tile.num_stages}s"
            what += f" {tile.per_sm}/sm" if form == "split" else ""
            yield what, partial(prefill if form == "prefill" else split, tile=tile)
    if "prefill" in forms and case.width in STAGES and not case.window:
        yield f"warpgroups {ROWS}x{KEYS}", warpgroups


def rows_of(case: Case, sweep: bool) -> Iterator[Row]:
    calls = calls_of(case)
    for what, build in forms_of(case, calls[0], sweep):
        try:
            us = captured_us([run_all(build(call)) for call in calls])
        except Exception as error:  # Triton has its own for code that does not fit
            print(f"{case.name:34s} {what:34s} {str(error).splitlines()[:1]}")
            continue
        off = wrong_by(calls[-1], case)
        yield Row(case.name, what + ("" if off < 0.02 else f" WRONG {off:.3f}"),
                  us, case.moved, case.flops)  # fmt: skip
    peers = [flash(call, case) for call in calls]
    if peers[0] is not None:
        us = captured_us([p for p in peers if p is not None])
        yield Row(case.name, "torch sdpa, dense keys", us, case.moved, case.flops)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--sweep", action="store_true", help="try other tiles too")
    args = parser.parse_args()
    found = ceilings()
    announce(found)
    for case in CASES:
        if args.only in case.name:
            for row in rows_of(case, args.sweep):
                print(row.text(found), flush=True)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
