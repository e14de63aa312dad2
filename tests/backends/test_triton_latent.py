"""Attention over latents by Triton: numbers interpreted and on a GPU, fit of the cards."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch_samples import assert_close, scalar
from triton_attention import Case, attention_op, call_of, run_form
from triton_worker import CARDS, applies, check_compiles, check_on_gpu, interpreted, run_named

from metainfer.backends.registry import installed
from metainfer.backends.torch.check import make_op, run_reference
from metainfer.backends.triton.attention import LATENT_WIDE, Attention, Tile, prefill, split
from metainfer.backends.triton.cross import faults_of, resources_of
from metainfer.backends.triton.records_attention import BF16_STEP
from metainfer.compiler.cost import CostModel
from metainfer.ir.dims import dim
from metainfer.ir.dtypes import parse_dtype
from metainfer.ir.entries import KV_FP8, entry_fields
from metainfer.ir.errors import Unsupported
from metainfer.ir.types import StateType, tensor

FORMS = tuple(
    f"triton.latent_attention_{form}" for form in ("prefill", "split16", "split32", "split16_long")
)
WIDE = ("triton.latent_attention_prefill_wide", "triton.latent_attention_split_wide")
LATENT: dict[str, Any] = {"is_latent": True, "widths": (32, 16), "scale": 0.2}
MIXED = Case((70, 3, 33), (5, 3, 1), heads=(4, 1), **LATENT)
CASES = {
    "one": Case((5,), (1,), heads=(1, 1), padding=(0, 0), **LATENT),
    "16 heads": replace(MIXED, heads=(16, 1), padding=(2, 2)),
    "40 heads, decode": Case((20, 3), (1, 1), heads=(40, 1), padding=(0, 0), **LATENT),
    "rotary of 24, pages of 64": replace(MIXED, widths=(64, 24), page=64, heads=(3, 1)),
    "codes": replace(MIXED, heads=(6, 1), is_rounded=True, dtype="f16"),
}
TWINS = ("one", "16 heads")
NAMES = [pytest.param(n, marks=pytest.mark.thorough) if n in TWINS else n for n in CASES]


def check_form(case: Case, form: str, tile: Tile, programs: int = 0) -> None:
    found = interpreted(run_form, case, form, tile, programs)
    wanted, *_ = run_reference(*attention_op(case))
    assert_close(found, wanted, scalar(case.dtype), BF16_STEP)


@pytest.mark.parametrize("name", NAMES)
def test_prefill(name: str) -> None:
    check_form(CASES[name], "prefill", Tile(32, 16, 4, 2))


@pytest.mark.parametrize("name", NAMES)
def test_split(name: str) -> None:
    # 3 programs: each works through several tiles, and leaves pieces at both ends.
    check_form(CASES[name], "split", Tile(16, 32, 4, 2), programs=3)


@pytest.mark.parametrize("name", [*FORMS, *WIDE])
def test_kernels_of_the_registry(name: str) -> None:
    op, data = attention_op(MIXED)
    found = interpreted(run_named, name, op, data, {})
    assert_close(found[0], run_reference(op, data)[0], scalar("bf16"), BF16_STEP)


def symbolic(
    heads: int, page: int, dtype: str = "bf16", widths: tuple[int, int] = (512, 64)
) -> Any:
    """The op of a decoder, sizes of the step open."""
    step = [
        tensor(scalar("i32"), dim("B") + 1),
        tensor(scalar("i32"), "B"),
        tensor(scalar("i32"), "B", "P"),
    ]
    latents = entry_fields("c", tensor(scalar("bf16"), widths[0]), parse_dtype(dtype))
    fields = (*latents, ("r", tensor(scalar("bf16"), widths[1])))
    queries = [tensor(scalar("bf16"), "T", heads, w) for w in widths]
    state = StateType("pages", fields, page_size=page)
    return make_op("latent_attention", [*queries, state, *step], {"scale": 0.1})


DECODE = {"T": 16, "B": 16, "P": 64}
PREFILL = {"T": 4096, "B": 4, "P": 64}


@pytest.mark.parametrize(
    ("heads", "page", "dtype"),
    [
        (128, 64, "bf16"),
        pytest.param(16, 16, "bf16", marks=pytest.mark.thorough),
        (128, 64, str(KV_FP8)),
    ],
)
def test_they_fit_both_cards(heads: int, page: int, dtype: str) -> None:
    op = symbolic(heads, page, dtype)
    for name in FORMS:
        check_compiles(name, op, PREFILL if "prefill" in name else DECODE)


def test_tall_products_fit_where_there_are_warpgroups() -> None:
    op = symbolic(128, 64)
    for name in WIDE:
        limits = {k: (1, n) for k, n in (PREFILL if "prefill" in name else DECODE).items()}
        assert applies(name, op, CARDS["1xh200"], limits) == []
        assert applies(name, op, CARDS["8xpcie"], limits)[0].startswith("wanted feature wgmma")


def settled(sequences: int) -> Attention:
    """A decode step over latents whose fields no launch writes, in types and shapes only."""

    def made(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def field(*shape: int) -> torch.Tensor:
        return made(*shape, dtype=torch.int32)

    return Attention(
        made(sequences, 128, 512), made(16, 64, 1, 512), made(16, 64, 1, 64), field(sequences + 1),
        field(sequences), field(sequences, 64), made(sequences, 128, 512), scale=0.05,
        q_rope=made(sequences, 128, 64), is_settled=True,
    )  # fmt: skip


def test_few_sequences_spill_no_more_than_many() -> None:
    launches = [split(settled(n), LATENT_WIDE)[0] for n in (1, 15, 16, 31)]
    card = CARDS["1xh200"]
    taken = [resources_of(launch, card) for launch in launches]
    assert max(found.spilled_bytes for found in taken) < 300
    assert [faults_of(*both, card) for both in zip(taken, launches, strict=True)] == [[]] * 4


ALL = tuple(name.rpartition(".")[2] for name in (*FORMS, *WIDE))


@pytest.mark.parametrize(
    ("card", "heads", "env", "wanted"),
    [
        # As timed.
        ("1xh200", 16, {"T": 16, "B": 16, "P": 128}, "split16_long"),
        ("1xh200", 128, {"T": 16, "B": 16, "P": 128}, "split_wide"),
        ("1xh200", 128, {"T": 8192, "B": 4, "P": 32}, "prefill_wide"),
        ("8xpcie", 16, {"T": 8192, "B": 4, "P": 32}, "prefill"),
        ("8xpcie", 128, {"T": 8192, "B": 4, "P": 32}, "prefill"),
    ],
)  # fmt: skip
def test_the_cheapest(card: str, heads: int, env: dict[str, int], wanted: str) -> None:
    found, op = installed(), symbolic(heads, 64)
    model, limits = CostModel(found.layouts), {k: (n, n) for k, n in env.items()}
    seconds = {
        name: model.kernel(found.kernels.get(f"triton.{name}"), op, CARDS[card], env).seconds
        for name in ALL
        if not applies(f"triton.{name}", op, CARDS[card], limits)
    }
    assert min(seconds, key=seconds.__getitem__) == f"latent_attention_{wanted}"


@pytest.mark.parametrize(
    ("op", "words"),
    [
        (symbolic(4, 24), "page size is a power of two >= 16, found 24"),
        (symbolic(4, 16, widths=(384, 64)), "found 384 and 64"),
        (symbolic(4, 16, widths=(512, 20)), "found 512 and 20"),
    ],
)
def test_what_they_refuse(op: Any, words: str) -> None:
    limits = {k: (1, n) for k, n in DECODE.items()}
    for name in FORMS:
        assert words in " ".join(applies(name, op, CARDS["8xpcie"], limits))


def test_long_blocks_are_of_plain_numbers() -> None:
    limits = {k: (1, n) for k, n in DECODE.items()}
    for dtype, refused in (("bf16", []), (str(KV_FP8), ["found codes"])):
        found = applies(FORMS[-1], symbolic(16, 64, dtype), CARDS["1xh200"], limits)
        assert [text.rpartition(", ")[2] for text in found] == refused


def test_what_the_launchers_refuse() -> None:
    call = call_of(*attention_op(MIXED), "cpu")
    with pytest.raises(Unsupported, match="latents of 24 numbers"):
        prefill(replace(call, q=call.q[..., :24]))
    assert call.q_rope is not None
    gaps = torch.empty(*call.q_rope.shape[:2], 32, dtype=torch.bfloat16)[..., ::2]
    with pytest.raises(Unsupported, match="rows of q_rope have gaps"):
        prefill(replace(call, q_rope=gaps))


LARGE = {
    "decode": Case((1024, 17, 5000, 900), (1, 1, 1, 1), heads=(128, 1), page=64),
    "16 heads": Case((4000, 33), (1, 1), heads=(16, 1), padding=(6, 6)),
    "prefill": Case((700, 512, 300), (700, 200, 1), heads=(16, 1)),
    "prefill, 128 heads": Case((300, 77), (300, 1), heads=(128, 1), page=64),
    "codes": Case((333, 512), (100, 1), heads=(32, 1), is_rounded=True, page=32),
}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
@pytest.mark.parametrize("case", LARGE)
@pytest.mark.parametrize("name", [*FORMS, *WIDE])
def test_on_a_gpu(name: str, case: str) -> None:
    wide = replace(LARGE[case], is_latent=True, widths=(512, 64), scale=0.05)
    check_on_gpu(name, *attention_op(wide))
