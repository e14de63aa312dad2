"""Speed of attention over latents (DeepSeek-V2 and V3) on this GPU, beside its roofline.

    python benchmarks/gpu/latents.py                    # every form where it applies
    python benchmarks/gpu/latents.py --only decode --sweep

Random data; each case on several pools of pages, so that no call finds its latents in the cache.
Numbers are held against float32 products over the same pages.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from timing import Row, announce, captured_us, ceilings, run_all

from metainfer.backends.triton.attention import (
    LATENT_LONG,
    LATENT_TILE,
    LATENT_WIDE,
    LATENT_WIDE_PREFILL,
    Attention,
    Tile,
    prefill,
    split,
)

L2_BYTES = 60 << 20
RANK, ROPE, SCALE = 512, 64, 0.1352
FEW_TOKENS = 16  # new ones of a sequence up to which the split form is tried


@dataclass(frozen=True)
class Case:
    """Equal sequences: how many, tokens in the state, new ones, heads."""

    name: str
    sequences: int
    context: int
    new: int
    heads: int = 128
    page: int = 64

    @property
    def moved(self) -> int:
        """Compulsory bytes."""
        rows = self.new * self.heads * (2 * RANK + ROPE)
        return 2 * self.sequences * (self.context * (RANK + ROPE) + rows)

    @property
    def flops(self) -> int:
        """Operations of the products that the mask leaves."""
        seen = sum(self.context - self.new + i + 1 for i in range(self.new))
        return 2 * self.sequences * self.heads * (2 * RANK + ROPE) * seen


CASES = [
    *(Case(f"decode {b} x {c}", b, c, 1) for c in (1024, 8192) for b in (1, 16, 64)),
    Case("decode 16 x 8192, 16 heads", 16, 8192, 1, 16),
    Case("decode 16 x 8192, pages of 16", 16, 8192, 1, page=16),
    Case("prefill 1 x 1024", 1, 1024, 1024),
    Case("prefill 4 x 2048", 4, 2048, 2048),
]
SWEEP = [
    Tile(64, 32, 8, 3, 1), Tile(64, 64, 8, 2, 1), Tile(64, 32, 8, 2, 1), Tile(64, 16, 8, 2, 1),
    Tile(32, 32, 8, 2, 1), Tile(32, 64, 8, 2, 1), Tile(16, 32, 8, 2, 2),
]  # fmt: skip


def calls_of(case: Case) -> list[Attention]:
    """As many calls on different pages as fill the cache twice."""
    pages = -(-case.context // case.page)
    num_pages = case.sequences * pages
    each = 2 * num_pages * case.page * (RANK + ROPE)
    count = max(min(2 * L2_BYTES // each + 1, 16), 1)

    def made(seed: int) -> Attention:
        torch.manual_seed(seed)
        options = {"device": "cuda", "dtype": torch.bfloat16}
        rows = case.sequences * case.new
        q, rope = (torch.randn(rows, case.heads, w, **options) / 4 for w in (RANK, ROPE))
        table = torch.randperm(num_pages, device="cuda").int().view(case.sequences, pages)
        starts = torch.arange(case.sequences + 1, device="cuda", dtype=torch.int32) * case.new
        lengths = torch.full((case.sequences,), case.context, device="cuda", dtype=torch.int32)
        held = [torch.randn(num_pages, case.page, 1, w, **options) for w in (RANK, ROPE)]
        return Attention(
            q, held[0], held[1], starts, lengths, table, torch.empty_like(q), SCALE, q_rope=rope
        )

    return [made(seed) for seed in range(count)]


def wrong_by(call: Attention, case: Case) -> float:
    """Largest difference of the last token of each sequence, relative to the largest result."""
    assert call.q_rope is not None
    off, most = 0.0, 0.0
    for b in range(min(case.sequences, 4)):
        table = call.pages[b].long()
        c, r = (t[table].flatten(0, 2)[: case.context].float() for t in (call.k, call.v))
        row = (b + 1) * case.new - 1
        scores = (call.q[row].float() @ c.T + call.q_rope[row].float() @ r.T) * SCALE
        wanted = scores.softmax(-1) @ c
        off = max(off, float((call.out[row].float() - wanted).abs().max()))
        most = max(most, float(wanted.abs().max()))
    return off / most


def tiles_of(case: Case, sweep: bool) -> Iterator[tuple[str, Tile]]:
    """Forms and tiles to try."""
    if case.new <= FEW_TOKENS:
        narrow = replace(LATENT_TILE, rows=16, per_sm=2)
        known = [LATENT_WIDE, LATENT_LONG, LATENT_TILE, narrow]
        yield from (("split", tile) for tile in dict.fromkeys([*known, *(SWEEP * sweep)]))
        return
    known = [LATENT_WIDE_PREFILL, LATENT_TILE]
    yield from (("prefill", tile) for tile in dict.fromkeys([*known, *(SWEEP[:5] * sweep)]))


def rows_of(case: Case, sweep: bool) -> Iterator[Row]:
    """Measure one case."""
    calls = calls_of(case)
    for form, tile in tiles_of(case, sweep):
        what = f"{form} {tile.rows}x{tile.keys} {tile.num_warps}w {tile.num_stages}s"
        build = prefill if form == "prefill" else split
        try:
            us = captured_us([run_all(build(call, tile)) for call in calls])
        except Exception as error:  # Triton has its own for code that does not fit
            print(f"{case.name:34s} {what:34s} {str(error).splitlines()[:1]}")
            continue
        off = wrong_by(calls[-1], case)
        yield Row(case.name, what + ("" if off < 0.02 else f" WRONG {off:.3f}"),
                  us, case.moved, case.flops)  # fmt: skip


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
