"""Latent attention is attention over the keys and values that its latents stand for."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metainfer.ir.dims import dim
from metainfer.ir.dtypes import BF16, F8E4M3, F8E8M0, F32, I32
from metainfer.ir.entries import KV_FP8, check_entries, entry_fields, is_latent, is_rounded
from metainfer.ir.errors import TypeMismatch
from metainfer.ir.ops import OPS, infer_types
from metainfer.ir.ops.record import Sizes
from metainfer.ir.sharding import propagate
from metainfer.ir.types import Sharding, StateType, TensorType, tensor

HEADS, RANK, ROPE, PLAIN, VALUE, PAGE = 3, 16, 4, 8, 6, 4
LATENTS = StateType("pages", (("c", tensor(F32, RANK)), ("r", tensor(F32, ROPE))))
STEP = (
    tensor(I32, dim("B") + 1), tensor(I32, "B"), tensor(I32, "B", "P")
)  # fmt: skip


def one_sequence(new: int, length: int, rng: np.random.Generator) -> dict[str, Any]:
    """The step of one sequence over pages in random order, and all its tokens' slots."""
    count = -(-length // PAGE)
    pages = (1 + rng.permutation(count)).astype(np.int32)
    places = np.arange(length)
    return {
        "starts": np.array([0, new], np.int32),
        "lengths": np.array([length], np.int32),
        "pages": pages[None],
        "slots": (pages[places // PAGE] * PAGE + places % PAGE).astype(np.int32),
    }


@given(st.integers(1, 9), st.integers(0, 9), st.integers(0, 2**32 - 1))
def test_it_is_attention_over_what_the_latents_stand_for(new: int, before: int, seed: int) -> None:
    rng, length = np.random.default_rng(seed), new + before
    step = one_sequence(new, length, rng)
    w_k, w_v = (rng.standard_normal((HEADS, n, RANK)) for n in (PLAIN, VALUE))
    c, r = (rng.standard_normal((length, n)) for n in (RANK, ROPE))
    q, q_rope = (rng.standard_normal((new, HEADS, n)) for n in (PLAIN, ROPE))
    pages = len(step["pages"][0]) + 1
    shared = np.broadcast_to(r[:, None], (length, HEADS, ROPE))
    k = np.concatenate([np.einsum("lc,hnc->lhn", c, w_k), shared], -1)
    v = np.einsum("lc,hvc->lhv", c, w_v)
    wide = {n: np.zeros((pages, PAGE, *t.shape[1:]), np.float64) for n, t in (("k", k), ("v", v))}
    wide = OPS["kv_write"].reference(wide, k, v, step["slots"])
    held = {n: np.zeros((pages, PAGE, t.shape[1]), np.float64) for n, t in (("c", c), ("r", r))}
    held = OPS["latent_write"].reference(held, c, r, step["slots"])
    rest = (step["starts"], step["lengths"], step["pages"])
    wanted = OPS["attention"].reference(np.concatenate([q, q_rope], -1), wide, *rest, scale=0.3)
    absorbed = np.einsum("thn,hnc->thc", q, w_k)
    found = OPS["latent_attention"].reference(absorbed, q_rope, held, *rest, scale=0.3)
    np.testing.assert_allclose(np.einsum("thc,hvc->thv", found, w_v), wanted, atol=2e-4)


def test_fields_and_bytes() -> None:
    codes, scales = entry_fields("c", tensor(F32, 512), KV_FP8)
    rotary = ("r", tensor(BF16, 64))
    assert (codes, scales) == (("c", tensor(F8E4M3, 512)), ("c_scale", tensor(F8E8M0, 1)))
    rounded = StateType("pages", (codes, scales, rotary))
    check_entries(rounded)
    assert rounded.entry_bytes() == 512 + 1 + 128
    assert is_latent(rounded)
    assert is_rounded(rounded)
    assert not is_rounded(LATENTS)
    with pytest.raises(TypeMismatch, match="scales do not fit their codes"):
        check_entries(StateType("pages", (("c", tensor(F32, 512)), scales, rotary)))


@pytest.mark.parametrize(
    ("types", "words"),
    [
        ((tensor(F32, "T", 3, 8), tensor(F32, "T", 3, ROPE), LATENTS), "widths differ"),
        ((tensor(F32, "T", 3, RANK), tensor(F32, "T", 2, ROPE), LATENTS), r"wanted \[T, H, C\]"),
        (
            (tensor(F32, "T", 3, RANK), tensor(BF16, "T", 3, ROPE), LATENTS),
            "latent_attention of f32",
        ),
        (
            (tensor(F32, "T", 3, RANK), tensor(F32, "T", 3, ROPE),
             StateType("pages", (("k", tensor(F32, 3, 4)), ("v", tensor(F32, 3, 4))))),
            "holds no latents",
        ),
        (
            (tensor(F32, "T", 3, RANK), tensor(F32, "T", 3, ROPE),
             StateType("pages", (("c", tensor(F32, 1, RANK)), ("r", tensor(F32, ROPE))))),
            "one latent",
        ),
    ],
)  # fmt: skip
def test_types_that_do_not_fit(types: tuple[Any, ...], words: str) -> None:
    with pytest.raises(TypeMismatch, match=words):
        infer_types("latent_attention", [*types, *STEP], {"scale": 1.0})


def test_what_it_costs() -> None:
    """DeepSeek-V3 at a context of 1,024: 1,152 bytes and 278,528 operations a pair."""
    state = StateType("pages", (("c", tensor(BF16, 512)), ("r", tensor(BF16, 64))), page_size=16)
    q = tensor(BF16, "T", 128, 512)
    operands = (q, tensor(BF16, "T", 128, 64), state, *STEP)
    sizes = Sizes(operands, (q,), {"scale": 0.1}, {"T": 4, "B": 4, "P": 64})
    record = OPS["latent_attention"]
    assert record.flops(sizes) == 2 * 128 * (512 + 512 + 64) * 4 * 1024
    moved = 4 * 128 * (2 * 512 + 64) * 2
    assert record.bytes(sizes) == moved + 4 * 1024 * 1152


def test_heads_are_shared_out_and_latents_are_whole() -> None:
    def by_heads(width: int) -> TensorType:
        return TensorType(tensor(F32, "T", 4, width).shape, F32, Sharding.of({"tp": 1}))

    types = [by_heads(RANK), by_heads(ROPE), LATENTS, *STEP]
    attrs = {"scale": 1.0}
    made = infer_types("latent_attention", types, attrs)
    (found,) = propagate("latent_attention", types, attrs, made)
    assert isinstance(found, TensorType)
    assert found.sharding == Sharding.of({"tp": 1})
    cut = Sharding.of({"tp": 0})
    fields = tuple((n, TensorType(t.shape, t.dtype, cut)) for n, t in LATENTS.fields)
    types[2] = StateType("pages", fields)
    with pytest.raises(TypeMismatch, match="whole"):
        propagate("latent_attention", types, attrs, made)
