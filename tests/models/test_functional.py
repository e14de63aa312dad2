import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from metainfer.ir.ops import OPS
from metainfer.models import functional

SAME_AS_RECORD = ("rms_norm", "rope", "silu_mul", "gelu_mul")
ALL = (*SAME_AS_RECORD, "experts", "attention", "sample_rows")


def custom_op(name: str) -> Any:
    return getattr(torch.ops.metainfer, name).default


def reference(name: str, *operands: np.ndarray, **attrs: Any) -> np.ndarray:
    return np.asarray(OPS[name].reference(*operands, **attrs))


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


@pytest.mark.parametrize("name", [*SAME_AS_RECORD, "choose_experts"])
def test_signature_is_that_of_the_record(name: str) -> None:
    record = OPS[name]
    parameters = inspect.signature(getattr(functional, name)).parameters
    assert list(parameters) == [o.name for o in record.operands] + [a.name for a in record.attrs]
    for attr in record.attrs:
        assert parameters[attr.name].default == attr.default, attr.name
        assert parameters[attr.name].annotation == attr.annotation, attr.name
    schema = custom_op(name)._schema
    assert [a.name for a in schema.arguments] == list(parameters)


def test_experts_has_the_operands_and_the_activation_of_the_record() -> None:
    record = OPS["experts"]
    parameters = inspect.signature(functional.experts).parameters
    assert list(parameters) == [*(o.name for o in record.operands), "activation"]
    assert parameters["activation"].default == record.complete({})["activation"]


def test_attention_has_the_attributes_of_the_record() -> None:
    parameters = inspect.signature(functional.attention).parameters
    for attr in OPS["attention"].attrs:
        assert parameters[attr.name].default == attr.default
    assert list(parameters) == ["q", "k", "v", *(a.name for a in OPS["attention"].attrs)]


@pytest.mark.parametrize("name", ALL)
def test_functions_are_the_custom_ops_and_keep_their_docstring(name: str) -> None:
    function = getattr(functional, name)
    assert function._opoverload is custom_op(name)
    assert "Shapes:" in (function.__doc__ or "")


@settings(deadline=None)
@given(
    tokens=st.integers(1, 6),
    heads=st.integers(1, 3),
    pairs=st.integers(1, 4),
    kept=st.integers(0, 3),
    interleaved=st.booleans(),
    scaling=st.sampled_from(["", "linear", "llama3", "yarn"]),
)
def test_rope_is_the_reference(
    tokens: int, heads: int, pairs: int, kept: int, interleaved: bool, scaling: str
) -> None:
    x = random(tokens, heads, 2 * pairs + kept)
    positions = torch.arange(tokens, dtype=torch.int32) * 37
    attrs: dict[str, Any] = {
        "width": 2 * pairs,
        "interleaved": interleaved,
        "scaling": scaling,
        "factor": 4.0,
        "original_max": 64,
    }
    got = functional.rope(x, positions, **attrs).numpy()
    wanted = reference("rope", x.numpy(), positions.numpy(), **attrs)
    np.testing.assert_allclose(got, wanted, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "attrs"),
    [
        ("rms_norm", {"eps": 1e-3}),
        ("silu_mul", {}),
        ("gelu_mul", {"approximate": "none"}),
        ("gelu_mul", {"approximate": "tanh"}),
    ],
)
def test_norm_and_gates_are_the_references(name: str, attrs: dict[str, Any]) -> None:
    x = random(5, 8)
    y = random(8, seed=1) if name == "rms_norm" else random(5, 8, seed=1)
    got = getattr(functional, name)(x, y, **attrs).numpy()
    np.testing.assert_allclose(got, reference(name, x.numpy(), y.numpy(), **attrs), atol=1e-6)


def expert_operands(tokens: int, chosen: int, num: int) -> list[torch.Tensor]:
    ids = np.random.default_rng(tokens).integers(-1, num, (tokens, chosen))
    weights = [random(num, *s, seed=i) for i, s in enumerate([(12, 8), (12, 8), (8, 12)])]
    return [random(tokens, 8), torch.from_numpy(ids), random(tokens, chosen, seed=3), *weights]


@settings(deadline=None)
@given(
    tokens=st.integers(1, 6),
    chosen=st.integers(1, 3),
    num=st.integers(1, 4),
    activation=st.sampled_from(["silu", "gelu_tanh"]),
)
def test_experts_are_the_reference(tokens: int, chosen: int, num: int, activation: str) -> None:
    operands = expert_operands(tokens, chosen, num)
    got = functional.experts(*operands, activation=activation).numpy()
    wanted = reference("experts", *(o.numpy() for o in operands), activation=activation)
    np.testing.assert_allclose(got, wanted, atol=1e-4)


@settings(deadline=None)
@given(
    tokens=st.integers(1, 5),
    groups=st.sampled_from([1, 2, 4]),
    k=st.integers(1, 3),
    renormalise=st.booleans(),
)
def test_chosen_experts_are_the_reference(
    tokens: int, groups: int, k: int, renormalise: bool
) -> None:
    logits, correction = random(tokens, 12), random(12, seed=1)
    attrs: dict[str, Any] = {
        "k": k, "groups": groups, "chosen_groups": max(groups // 2, 1), "scaling": 2.5,
        "renormalise": renormalise,
    }  # fmt: skip
    shares, ids = functional.choose_experts(logits, correction, **attrs)
    wanted = OPS["choose_experts"].reference(logits.numpy(), correction.numpy(), **attrs)
    np.testing.assert_array_equal(ids.numpy(), wanted[1])
    np.testing.assert_allclose(shares.numpy(), wanted[0], rtol=1e-5)


@settings(deadline=None)
@given(
    tokens=st.integers(1, 9),
    groups=st.integers(1, 3),
    kv_heads=st.integers(1, 2),
    window=st.integers(0, 5),
    softcap=st.sampled_from([0.0, 2.0]),
    scale=st.sampled_from([0.0, 0.7]),
)
def test_attention_is_the_reference_over_one_page(
    tokens: int, groups: int, kv_heads: int, window: int, softcap: float, scale: float
) -> None:
    q = random(tokens, groups * kv_heads, 4)
    k, v = random(tokens, kv_heads, 4, seed=1), random(tokens, kv_heads, 3, seed=2)
    attrs = {"scale": scale, "window": window, "softcap": softcap}
    state = {"k": k.numpy()[None], "v": v.numpy()[None]}
    wanted = OPS["attention"].reference(
        q.numpy(), state, np.array([0, tokens]), np.array([tokens]), np.array([[0]]), **attrs
    )
    got = functional.attention(q, k, v, **attrs)
    np.testing.assert_allclose(got.numpy(), wanted, atol=1e-5)


def test_window_counts_the_token_itself() -> None:
    q, k = torch.zeros(4, 1, 2), torch.zeros(4, 1, 2)
    v = torch.arange(4.0).reshape(4, 1, 1)
    assert functional.attention(q, k, v, window=1).flatten().tolist() == [0, 1, 2, 3]
    assert functional.attention(q, k, v, window=2).flatten().tolist() == [0, 0.5, 1.5, 2.5]


Convert = Callable[[torch.Tensor], torch.Tensor]
CALLS: dict[str, Callable[[Convert], torch.Tensor]] = {
    "rms_norm": lambda to: functional.rms_norm(to(random(3, 64)), to(random(64, seed=1)), 1e-5),
    "silu_mul": lambda to: functional.silu_mul(to(random(3, 8)), to(random(3, 8, seed=1))),
    "gelu_mul": lambda to: functional.gelu_mul(to(random(3, 8)), to(random(3, 8, seed=1))),
    "rope": lambda to: functional.rope(to(random(3, 2, 8)), torch.tensor([5, 900, 70])),
    "attention": lambda to: functional.attention(
        to(random(5, 4, 8)), to(random(5, 2, 8, seed=1)), to(random(5, 2, 8, seed=2))
    ),
    "experts": lambda to: functional.experts(
        *(to(t) if t.is_floating_point() else t for t in expert_operands(5, 2, 3))
    ),
    "sample_rows": lambda to: functional.sample_rows(to(random(3, 8))),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ALL)
def test_narrow_types_are_rounded_once_at_the_end(name: str, dtype: torch.dtype) -> None:
    got = CALLS[name](lambda x: x.to(dtype))
    exact = CALLS[name](lambda x: x.to(dtype).float())
    assert got.is_contiguous()
    assert torch.equal(got, exact.to(dtype))


@pytest.mark.parametrize("name", ALL)
def test_float64_stays_wide(name: str) -> None:
    got = CALLS[name](lambda x: x.double())
    assert got.dtype == torch.float64
    torch.testing.assert_close(got.float(), CALLS[name](lambda x: x), atol=1e-6, rtol=1e-5)


def test_float32_accumulation_in_bf16() -> None:
    # 256 equal squares: a bfloat16 sum would stop growing at 256 * its spacing.
    x = torch.full((1, 4096), 3.0, dtype=torch.bfloat16)
    got = functional.rms_norm(x, torch.ones(4096, dtype=torch.bfloat16), 0.0)
    assert torch.equal(got, torch.ones_like(got))


@pytest.mark.parametrize("name", ALL)
def test_custom_ops_pass_torchs_own_checks(name: str) -> None:
    operands: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
        "rms_norm": ((random(3, 2, 8).transpose(0, 1), random(8), 1e-5), {}),
        "silu_mul": ((random(3, 8), random(3, 8)), {}),
        "gelu_mul": ((random(3, 8), random(3, 8)), {"approximate": "tanh"}),
        "rope": ((random(3, 2, 8), torch.arange(3)), {"theta": 500.0, "width": 4}),
        "attention": ((random(5, 4, 8), random(5, 2, 8), random(5, 2, 6)), {"window": 3}),
        "experts": (tuple(expert_operands(5, 2, 3)), {"activation": "gelu_tanh"}),
        "sample_rows": ((random(8, 3).T,), {}),
    }
    args, kwargs = operands[name]
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(custom_op(name), args, kwargs, test_utils=checks)


class EveryOp(torch.nn.Module):
    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        normed = functional.rms_norm(x, torch.ones(8), 1e-5)
        q = functional.rope(normed, positions, theta=500.0, scaling="linear", factor=2.0)
        mixed = functional.attention(q, q[:, :1].contiguous(), q[:, :1].contiguous(), window=3)
        gated = functional.gelu_mul(functional.silu_mul(mixed, x), x, approximate="tanh")
        return functional.sample_rows(gated)


def test_ops_stay_whole_when_exported_and_run_at_other_sizes() -> None:
    tokens = torch.export.Dim("T", min=1, max=64)
    exported = torch.export.export(
        EveryOp(),
        (random(7, 2, 8), torch.arange(7)),
        dynamic_shapes=({0: tokens}, {0: tokens}),
        strict=False,
    )
    targets = [str(n.target) for n in exported.graph.nodes if "metainfer" in str(n.target)]
    assert targets == [f"metainfer.{name}.default" for name in (
        "rms_norm", "rope", "attention", "silu_mul", "gelu_mul", "sample_rows",
    )]  # fmt: skip
    for size in (1, 2, 12):
        x, positions = random(size, 2, 8, seed=size), torch.arange(size)
        assert torch.equal(exported.module()(x, positions), EveryOp()(x, positions))
