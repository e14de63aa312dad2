"""The op `experts`: its costs count what is touched, and what does not fit is refused."""

from typing import Any

import numpy as np
import pytest
from op_samples import read_type

from metainfer.ir.errors import TypeMismatch
from metainfer.ir.graph import Op, Value, attrs_of
from metainfer.ir.ops import infer_types, op_def, op_sizes

_TYPES = ("bf16[T,64]", "i32[T,8]", "f32[T,8]", "bf16[128,32,64]", "bf16[128,32,64]",
          "bf16[128,64,32]")  # fmt: skip
_EXPERT_BYTES = 3 * 32 * 64 * 2


def costs(tokens: int, **attrs: Any) -> tuple[int, int]:
    """(flops, bytes of weights) at a number of tokens."""
    values = tuple(Value(f"%{i}", read_type(t)) for i, t in enumerate(_TYPES))
    results = tuple(Value("%r", t) for t in infer_types("experts", [v.type for v in values], attrs))
    sizes = op_sizes(Op("experts", values, results, attrs_of(attrs)), {"T": tokens})
    plain = tokens * (2 * 64 * 2 + 8 * 4 + 8 * 4)
    record = op_def("experts")
    return record.flops(sizes), record.bytes(sizes) - plain


def test_bytes_count_as_many_experts_as_random_choices_touch() -> None:
    # Tokens choose the same experts now and then: 16 tokens touch 82 of 128, not all.
    rng = np.random.default_rng(0)
    choices = rng.random((300, 64, 128)).argpartition(8, axis=2)[:, :, :8]
    for tokens in (1, 2, 5, 16, 17, 64):
        drawn = choices[:, :tokens].reshape(300, -1)
        touched = np.mean([len(np.unique(one)) for one in drawn])
        assert costs(tokens)[1] / _EXPERT_BYTES == pytest.approx(touched, abs=0.8)
    assert costs(1)[1] == 8 * _EXPERT_BYTES
    assert costs(4096)[1] == 128 * _EXPERT_BYTES


def test_one_rank_gets_its_part_of_the_choices() -> None:
    whole, part = costs(1024), costs(1024, total=1024)
    assert whole[0] == 8 * part[0]
    assert costs(1, total=1024)[1] == _EXPERT_BYTES
    assert costs(4, total=1024)[1] == 4 * _EXPERT_BYTES


def test_a_choice_outside_adds_nothing_and_a_double_one_counts_twice() -> None:
    rng = np.random.default_rng(0)
    x, gate, up = rng.standard_normal((3, 8)), rng.standard_normal((2, 4, 8)), np.ones((2, 4, 8))
    down = rng.standard_normal((2, 8, 4))
    ids = np.array([[-1, 2], [1, 1], [0, -1]])
    shares = np.array([[1.0, 1.0], [0.5, 0.25], [2.0, 3.0]])
    y = op_def("experts").reference(x, ids, shares, gate, up, down)
    assert not y[0].any()
    for row, e, share in ((1, 1, 0.75), (2, 0, 2.0)):
        inner = gate[e] @ x[row]
        inner = inner / (1 + np.exp(-inner)) * (up[e] @ x[row])
        np.testing.assert_allclose(y[row], share * (down[e] @ inner), rtol=1e-12)


@pytest.mark.parametrize(
    ("place", "text", "what"),
    [
        (0, "bf16[64]", "experts of bf16[64] chosen by i32[T,8]: wanted [T, D] and [T, K]"),
        (0, "bf16[T,32]", "experts: inner sizes differ, 32 and 64"),
        (1, "f32[T,8]", "experts: numbers of experts are integers, got f32[T,8]"),
        (2, "f32[T,4]", "experts: weights f32[T,4] for choices i32[T,8]"),
        (3, "bf16[32,64]", "experts of bf16[32,64]: wanted three dims, the first of experts"),
        (3, "f32[128,32,64]", "experts: bf16 by f32, which is no narrower"),
        (3, "i8/2x4x4:f32[128,32,64]", "experts: blocks of i8/2x4x4:f32 span experts"),
        (4, "bf16[128,16,64]", "experts: gate bf16[128,32,64], up bf16[128,16,64], "
                               "down bf16[128,64,32] do not fit"),
    ],
)  # fmt: skip
def test_operands_that_do_not_fit(place: int, text: str, what: str) -> None:
    types = [read_type(text if i == place else t) for i, t in enumerate(_TYPES)]
    with pytest.raises(TypeMismatch) as error:
        infer_types("experts", types, {})
    assert error.value.what == what


@pytest.mark.parametrize(
    ("attrs", "what"),
    [
        ({"activation": "relu"}, "experts: unknown activation 'relu'"),
        ({"total": 64}, "experts: 128 of a total of 64"),
    ],
)
def test_attributes_that_do_not_fit(attrs: dict[str, Any], what: str) -> None:
    with pytest.raises(TypeMismatch) as error:
        infer_types("experts", [read_type(t) for t in _TYPES], attrs)
    assert error.value.what == what
