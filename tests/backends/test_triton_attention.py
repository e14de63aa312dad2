"""Paged attention by Triton: numbers interpreted and on a GPU, fit of the cards, which form."""

import inspect
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from pass_oracle import parse_any
from torch_samples import assert_close, scalar
from triton_attention import Case, attention_op, call_of, run_form
from triton_worker import CARDS, applies, check_compiles, interpreted, refused, run_named

from metainfer.backends.kernel import Registry
from metainfer.backends.registry import installed
from metainfer.backends.torch.call import TorchCall
from metainfer.backends.torch.check import make_op, run_kernel, run_reference
from metainfer.backends.torch.tensors import to_torch
from metainfer.backends.triton.attention import PER_SM, Tile, of_call, prefill, split
from metainfer.backends.triton.attention_warpgroups import warpgroups
from metainfer.backends.triton.cross import faults_of, resources_of
from metainfer.backends.triton.records_attention import BF16_STEP
from metainfer.compiler.cost import CostModel
from metainfer.compiler.kernels import launches_of
from metainfer.hardware import load_machine
from metainfer.ir.dims import dim
from metainfer.ir.dtypes import parse_dtype
from metainfer.ir.entries import KV_FP8, entry_fields
from metainfer.ir.errors import PlanError, Unsupported
from metainfer.ir.options import Options
from metainfer.ir.step import step_value
from metainfer.ir.strategy import Strategy
from metainfer.ir.types import StateType, tensor
from metainfer.passes.layout import layout
from metainfer.passes.target import Report, Target

FORMS = ("triton.attention_prefill", "triton.attention_split")
PAGED = "triton.attention_prefill_paged"
WARPGROUPS = "triton.attention_warpgroups"
CUDA = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
MIXED = Case((70, 3, 33), (5, 3, 1))
CASES = {
    "one": Case((5,), (1,), heads=(4, 1), padding=(0, 0)),
    "one head": replace(MIXED, heads=(2, 2), widths=(32, 32)),
    "8 heads of one key head": Case((70, 3, 33), (1, 1, 1), heads=(8, 1), padding=(2, 2)),
    "9 of 3, window": Case((50, 3, 40), (9, 0, 1), heads=(9, 3), window=20),
    "96 and 80 wide": replace(MIXED, widths=(96, 80), heads=(2, 1), page=64),
    "rounded": replace(
        MIXED, heads=(6, 3), widths=(96, 80), window=20, dtype="f16", is_rounded=True
    ),
    "capped": replace(MIXED, softcap=3.0, scale=0.3, page=32, dtype="f16"),
}


def check_form(case: Case, form: str, tile: Tile, programs: int = 0) -> None:
    found = interpreted(run_form, case, form, tile, programs)
    wanted, *_ = run_reference(*attention_op(case))
    assert_close(found, wanted, scalar(case.dtype), BF16_STEP)


TWINS = ("one head", "96 and 80 wide", "capped")
NAMES = [pytest.param(n, marks=pytest.mark.thorough) if n in TWINS else n for n in CASES]


@pytest.mark.parametrize("name", NAMES)
def test_prefill(name: str) -> None:
    check_form(CASES[name], "prefill", Tile(32, 16, 4, 2))


@pytest.mark.parametrize("name", NAMES)
def test_split(name: str) -> None:
    # 3 programs: each works through several tiles, and leaves pieces at both ends.
    check_form(CASES[name], "split", Tile(16, 32, 4, 2), programs=3)


@pytest.mark.parametrize("programs", [pytest.param(1, marks=pytest.mark.thorough), 40])
def test_how_many_programs_share_the_work_changes_nothing(programs: int) -> None:
    check_form(MIXED, "split", Tile(16, 16, 4, 2), programs)


@pytest.mark.parametrize("name", [*FORMS, PAGED])
def test_kernels_of_the_registry(name: str) -> None:
    page = 64 if name == PAGED else 16
    op, data = attention_op(replace(MIXED, widths=(16, 16), page=page))
    found = interpreted(run_named, name, op, data, {})
    assert_close(found[0], run_reference(op, data)[0], scalar("bf16"), BF16_STEP)


def state(group: int, width: int, page: int, dtype: str = "bf16") -> StateType:
    held, entry = parse_dtype(dtype), tensor(scalar("bf16"), group, width)
    fields = (*entry_fields("k", entry, held), *entry_fields("v", entry, held))
    return StateType("pages", fields, page_size=page)


def symbolic(
    heads: tuple[int, int], width: int, page: int, dtype: str = "bf16", **attrs: Any
) -> Any:
    """The op of a decoder, sizes of the step open."""
    step = [
        tensor(scalar("i32"), dim("B") + 1),
        tensor(scalar("i32"), "B"),
        tensor(scalar("i32"), "B", "P"),
    ]
    q = tensor(scalar("bf16"), "T", heads[0], width)
    return make_op("attention", [q, state(heads[1], width, page, dtype), *step], attrs)


DECODE = {"T": 16, "B": 16, "P": 64}
PREFILL = {"T": 16384, "B": 8, "P": 128}


@pytest.mark.parametrize(
    ("width", "page", "dtype"),
    [
        pytest.param(96, 16, "bf16", marks=pytest.mark.thorough),
        pytest.param(128, 64, "bf16", marks=pytest.mark.thorough),
        (128, 64, str(KV_FP8)),
        (256, 32, "bf16"),
    ],
)
def test_they_fit_both_cards(width: int, page: int, dtype: str) -> None:
    op = symbolic((32, 8), width, page, dtype)
    for name, env in zip(FORMS, (PREFILL, DECODE), strict=True):
        check_compiles(name, op, env)


def test_they_fit_8_heads_of_one_key_head() -> None:
    op = symbolic((8, 1), 128, 64)
    for name, env in zip(FORMS, (PREFILL, DECODE), strict=True):
        limits = {k: (1, n) for k, n in env.items()}
        found = {c: applies(name, op, card, limits) for c, card in CARDS.items()}
        assert not any(found.values()), found


def test_blocks_of_whole_pages_fit_where_there_are_warpgroups() -> None:
    op, card = symbolic((32, 8), 128, 64), CARDS["1xh200"]
    (launch,) = launches_of(installed().kernels.get(PAGED), op, card, PREFILL, installed())
    found = resources_of(launch, card)
    assert faults_of(found, launch, card) == []
    assert all(i.startswith("wgmma") for i in found.matrix)
    # Two programs share a multiprocessor: neither memory nor registers stand in the way.
    assert 2 * found.shared_bytes <= card.smem_per_block_bytes
    assert 2 * 32 * launch.num_warps * found.registers <= 65536
    limits = {k: (1, n) for k, n in PREFILL.items()}
    assert applies(PAGED, op, CARDS["8xpcie"], limits)[0].startswith("wanted feature wgmma")


@pytest.mark.parametrize(("width", "page"), [(128, 64), (64, 128)])
def test_warpgroups_fit_where_there_are_such(width: int, page: int) -> None:
    op, card = symbolic((32, 8), width, page), CARDS["1xh200"]
    (launch,) = launches_of(installed().kernels.get(WARPGROUPS), op, card, PREFILL, installed())
    found = resources_of(launch, card)
    assert faults_of(found, launch, card) == []
    assert all(i.startswith("wgmma") for i in found.matrix)
    # The registers that three warpgroups begin with, before one leaves its own to the others.
    assert 3 * 128 * found.registers <= 65536
    limits = {k: (1, n) for k, n in PREFILL.items()}
    assert applies(WARPGROUPS, op, CARDS["8xpcie"], limits)[0].startswith("wanted feature wgmma")


def test_two_tiles_a_program_where_one_by_one_takes_as_many_turns() -> None:
    op, card, backends = symbolic((32, 8), 128, 64), CARDS["1xh200"], installed()
    for env, tiles, programs in (
        # Tiles are 32 tokens of one of 8 key heads; each sequence may leave one partly filled.
        (PREFILL, 2, (16384 // 64 + 8 + 1) * 8),
        ({"T": 1024, "B": 1, "P": 16}, 2, (1024 // 64 + 1 + 1) * 8),
        # All at once, one by one: no pair of them is done as early.
        ({"T": 512, "B": 1, "P": 136}, 1, (512 // 32 + 1 + 1) * 8),
        ({"T": 1, "B": 1, "P": 16}, 1, (1 + 1) * 8),
        # 3 turns of single tiles, 4 of pairs; 9 for 10, which are too many for that to matter.
        ({"T": 1280, "B": 1, "P": 20}, 1, (1280 // 32 + 1 + 1) * 8),
        ({"T": 4608, "B": 1, "P": 72}, 2, (4608 // 64 + 1 + 1) * 8),
    ):
        (launch,) = launches_of(backends.kernels.get(WARPGROUPS), op, card, env, backends)
        assert (launch.constants["TILES"], launch.grid) == (tiles, (programs,))


@pytest.mark.parametrize(
    ("width", "page", "attrs", "words"),
    [
        (96, 64, {}, "keys and values both 64 or 128 wide, found 96 and 96"),
        (64, 32, {}, "page size is a power of two >= 64, found 32"),
        (64, 64, {"window": 9}, "window is 0, found 9"),
        (64, 64, {"softcap": 2.0}, "softcap is 0.0, found 2.0"),
        (64, 64, {"dtype": str(KV_FP8)}, "keys and values are plain numbers, found codes"),
    ],
)
def test_what_warpgroups_refuse(width: int, page: int, attrs: dict[str, Any], words: str) -> None:
    assert words in " ".join(refused(WARPGROUPS, symbolic((4, 2), width, page, **attrs)))


def test_the_interpreter_knows_no_warpgroups() -> None:
    op, data = attention_op(MIXED)
    with pytest.raises(Unsupported, match="interpreter does not know Gluon"):
        interpreted(run_named, WARPGROUPS, op, data, {})


@pytest.mark.parametrize(
    ("width", "page", "dtype", "words"),
    [
        (128, 32, "bf16", "page size is a power of two >= 64, found 32"),
        (192, 64, "bf16", "width <= 128, % 8 == 0, found 192 and 192"),
        (128, 64, str(KV_FP8), "keys and values are plain numbers, found codes"),
    ],
)
def test_what_blocks_of_whole_pages_refuse(width: int, page: int, dtype: str, words: str) -> None:
    assert words in " ".join(refused(PAGED, symbolic((4, 2), width, page, dtype)))


def cheapest(
    env: Mapping[str, int], card: str, heads: tuple[int, int] = (32, 8), page: int = 16
) -> str:
    backends, op = installed(), symbolic(heads, 128, page)
    model = CostModel(backends.layouts)
    names = [*FORMS, "cuda.attention_paged"]
    if page >= 64 and CARDS[card].has("wgmma"):
        names += [PAGED, WARPGROUPS]
    kernels = [backends.kernels.get(n) for n in names]
    costs = [model.kernel(k, op, CARDS[card], env).seconds for k in kernels]
    return names[int(np.argmin(costs))]


@pytest.mark.parametrize("card", CARDS)
def test_the_cost_picks_the_form(card: str) -> None:
    assert cheapest(DECODE, card) == "triton.attention_split"
    assert cheapest({"T": 1, "B": 1, "P": 64}, card, (8, 1)) == "triton.attention_split"
    assert cheapest(PREFILL, card) == "triton.attention_prefill"
    wanted = WARPGROUPS if CARDS[card].has("wgmma") else "triton.attention_prefill"
    assert cheapest(PREFILL, card, page=64) == wanted


@pytest.mark.parametrize(
    ("op", "words"),
    [
        (symbolic((4, 2), 64, 24), "page size is a power of two >= 16, found 24"),
        (symbolic((4, 2), 64, 8), "page size is a power of two >= 16, found 8"),
        (symbolic((4, 2), 264, 16), "width <= 256, % 8 == 0, found 264 and 264"),
        (symbolic((4, 2), 64, 16, scale=-1.0), "scale >= 0, found -1.0"),
    ],
)
def test_what_they_refuse(op: Any, words: str) -> None:
    limits = {k: (1, n) for k, n in DECODE.items()}
    for name in FORMS:
        assert words in " ".join(applies(name, op, CARDS["8xpcie"], limits))


def test_what_the_launchers_refuse() -> None:
    call = call_of(*attention_op(MIXED), "cpu")
    with pytest.raises(Unsupported, match="pages of 8 tokens"):
        prefill(replace(call, k=call.k[:, :8], v=call.v[:, :8]))
    with pytest.raises(Unsupported, match="heads of 60 and 64"):
        split(replace(call, q=call.q[..., :60]))
    with pytest.raises(Unsupported, match="rows of q have gaps"):
        prefill(replace(call, q=torch.empty(9, 4, 128, dtype=torch.bfloat16)[..., ::2]))
    with pytest.raises(Unsupported, match="by warpgroups of heads of 64 and 32"):
        warpgroups(replace(call, v=call.v[..., :32]))
    with pytest.raises(Unsupported, match="with a window"):
        warpgroups(replace(call, window=5))
    with pytest.raises(Unsupported, match="pages of keys have gaps"):
        warpgroups(replace(call, k=torch.cat([call.k, call.k], -1)[..., :64]))
    with pytest.raises(PlanError, match="bytes of scratch"):
        split(replace(call, workspace=torch.empty(64, dtype=torch.uint8)))


@pytest.mark.parametrize(("hw", "page"), [("1xh200", 64), ("8xpcie", 16)])
def test_pages_hold_whole_blocks_where_that_is_faster(hw: str, page: int) -> None:
    module = parse_any("""graph f(%q: bf16[T,32,128],
        $kv: pages(k: bf16[8,128], v: bf16[8,128]) per token) {
      %0 = attention(%q, $kv, step.starts, step.lengths, step.pages) : bf16[T,32,128]
      return %0
    }""")
    strategy = Strategy("prefill", typical=(("B", 1), ("P", 32), ("R", 1)))
    kernels = Registry()
    for kernel in installed().kernels.candidates("attention"):
        kernels.add(replace(kernel, fits=None))  # nothing is compiled here
    costs = CostModel(installed().layouts)
    target = Target(load_machine(hw), strategy, Options(), kernels, costs, Report())
    made = layout(module, target)
    assert {s.state.page_size for g in made.graphs for s in g.states} == {page}


def test_launches_that_start_early_read_what_others_write_after_they_have_waited() -> None:
    """Before it they may read the fields of the step, which no launch writes."""
    written = r"\b(q|k|v|out|pieces|stats|tl\.store)\b"
    op, card = symbolic((32, 8), 128, 64), CARDS["1xh200"]
    for name in (*FORMS, PAGED):
        for launch in launches_of(installed().kernels.get(name), op, card, DECODE, installed()):
            text = inspect.getsource(launch.function.fn).split('"""')[2]
            # Where all there is of the step is its own: the first wait is of the other calls.
            *_, wait = list(re.finditer(r"early\.wait(_for_last)?\(EARLY\)", text))[:2]
            before, after = text[: wait.start()], text[wait.end() :]
            assert launch.is_early
            assert not re.search(written, before)
            assert re.search(written, after)


def test_two_programs_of_16_sequences_leave_registers_for_the_whole_launch_behind() -> None:
    op, card = symbolic((32, 8), 128, 64), CARDS["1xh200"]
    first, second = launches_of(
        installed().kernels.get("triton.attention_split"), op, card, DECODE, installed()
    )
    taken, wanted = (resources_of(launch, card) for launch in (first, second))
    assert taken.spilled_bytes == 0
    assert first.options_on(early=True)["maxnreg"] >= taken.registers
    assert "maxnreg" not in first.options_on(early=False)
    beside = -(-second.grid[0] // card.num_sms)
    warps = PER_SM * first.num_warps * taken.registers, beside * second.num_warps * wanted.registers
    assert 32 * sum(warps) <= 1 << 16


@pytest.mark.parametrize("sequences", [1, 4, 16, 64])
def test_pieces_of_a_tile_are_read_at_once_where_lengths_are_alike(sequences: int) -> None:
    op, card = symbolic((32, 8), 128, 64), CARDS["1xh200"]
    env = {"T": sequences, "B": sequences, "P": 64}
    first, second = launches_of(
        installed().kernels.get("triton.attention_split"), op, card, env, installed()
    )
    blocks = 64 * 64 // first.constants["KEYS"]  # of one of 8 key heads of a sequence
    part = -(-sequences * 8 * blocks // first.grid[0])
    assert second.constants["PARTS"] >= min(-(-blocks // part), 32)
    assert second.constants["PARTS"] * second.constants["WIDE"] <= 1024 * second.num_warps


LARGE = {
    "decode": Case((1024, 17, 5000, 900), (1, 1, 1, 1), heads=(32, 8), widths=(128, 128), page=64),
    "8 heads": Case((4000, 33), (1, 1), heads=(8, 1), widths=(128, 128), padding=(6, 6)),
    "prefill": Case((700, 512, 300), (700, 200, 1), heads=(16, 4), widths=(128, 128)),
    "pages of 64": Case((700, 512, 5), (700, 200, 5), heads=(6, 2), widths=(128, 128), page=64),
    "odd tiles": Case((5, 129, 700), (5, 129, 560), heads=(8, 2), widths=(64, 64), page=128),
    "pairs of tiles": Case((800, 290), (700, 290), heads=(32, 8), widths=(64, 64), page=64),
    "one sequence": Case((900,), (900,), (32, 8), (128, 128), page=64, padding=(0, 0)),
    "f16": Case((700, 40), (600, 40), heads=(8, 4), page=64, dtype="f16"),
    "large pages": Case((700, 3), (640, 1), heads=(4, 4), widths=(128, 128), page=256),
    "window": Case((900, 512), (300, 512), heads=(9, 3), window=128),
    "96": Case((333, 512), (100, 512), heads=(8, 8), widths=(96, 96), page=32, dtype="f16"),
    "192 and 128": Case((300, 77), (300, 1), heads=(4, 2), widths=(192, 128)),
    "256": Case((300, 1025), (300, 1), heads=(8, 4), widths=(256, 256), page=128, softcap=30.0),
}


@pytest.mark.parametrize("case", LARGE)
@pytest.mark.parametrize("name", [*FORMS, PAGED, WARPGROUPS])
@pytest.mark.parametrize("mark", [pytest.param("", marks=CUDA)])
def test_on_a_gpu(name: str, case: str, mark: str) -> None:
    backends, (op, data) = installed(), attention_op(LARGE[case])
    kernel = backends.kernels.get(name)
    if refused(name, op):
        pytest.skip("the form is for other pages or heads")
    found = run_kernel(kernel, op, data, backends.layouts, device="cuda", card=CARDS["1xh200"])
    assert_close(found[0], run_reference(op, data)[0], scalar(LARGE[case].dtype), BF16_STEP)


@pytest.mark.parametrize("own", [True, False])
def test_only_the_steps_own_fields_are_read_before_the_launch_in_front_has_ended(own: bool) -> None:
    op, data = attention_op(MIXED)
    if own:
        fields = [step_value(name) for name in ("starts", "lengths", "pages")]
        named = [replace(v, type=f.type) for v, f in zip(fields, op.operands[2:], strict=True)]
        op = replace(op, operands=(*op.operands[:2], *named))
    q, *record = (to_torch(np.array(d)) for d in (data[0], *data[2:]))
    state = cast(Mapping[str, np.ndarray], data[1])
    held = {name: to_torch(np.array(field)) for name, field in state.items()}
    attrs = {"scale": 0.0, "window": 0, "softcap": 0.0}
    call = of_call(TorchCall(op, (q, held, *record), (torch.empty(q.shape),), attrs))
    assert call.is_settled is own
    assert [launch.constants["SETTLED"] for launch in split(call)] == [own, own]
