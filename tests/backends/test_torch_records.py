"""Contracts of the torch kernels: what they refuse, in which words, and what repairs it."""

from typing import Any

import numpy as np
import pytest
from torch.utils._python_dispatch import TorchDispatchMode
from torch_samples import KERNELS, LAYOUTS, RNG, build, floats, fused, paged, scalar, weight

from metainfer.backends.kernel import Kernel, Query, Registry, attr_is
from metainfer.backends.layout import LayoutRegistry
from metainfer.backends.torch.call import TorchBinder
from metainfer.backends.torch.check import make_call, make_op
from metainfer.backends.torch.plain import LOAD_OPS
from metainfer.backends.torch.records import register
from metainfer.hardware.load import load_machine
from metainfer.ir.dims import dim
from metainfer.ir.dtypes import parse_dtype
from metainfer.ir.graph import Op
from metainfer.ir.ops import OPS
from metainfer.ir.ops.collective import OWN
from metainfer.ir.ops.record import COLLECTIVE
from metainfer.ir.types import tensor

CPU = load_machine("cpu").device(0)
H200 = load_machine("1xh200").device(0)
LIMITS = {"T": (1, 64)}


def linear(x: str, format: str, n: int, k: int, *, is_weight: bool = True, bias: str = "") -> Op:
    types = [tensor(parse_dtype(x), "T", k), tensor(parse_dtype(format), n, k)]
    if bias:
        types.append(tensor(parse_dtype(bias), n))
    return make_op("linear", types, {}, weights=[1] if is_weight else [])


def texts(name: str, op: Op, device: Any) -> list[str]:
    return [str(r) for r in KERNELS.get(name).refusals(Query(op, device, LIMITS))]


@pytest.mark.parametrize("device", [CPU, H200], ids=["cpu", "gpu"])
def test_every_op_has_a_candidate(device: Any) -> None:
    for name, record in OPS.items():
        if name in LOAD_OPS or record.has(COLLECTIVE) or name in OWN:
            continue
        kernels = KERNELS.candidates(name)
        assert any(k.generic and not k.requires for k in kernels), name


def test_records_are_complete() -> None:
    for kernel in KERNELS.all():
        assert isinstance(kernel.binder, TorchBinder), kernel.name
        assert kernel.name.startswith(f"{kernel.backend}."), kernel.name
        assert kernel.launches >= 1
        assert kernel.efficiency.source
        fixed = {r.fixes for r in kernel.repairs}
        assert fixed <= {c.text for c in kernel.requires}, kernel.name
        if kernel.backend == "cuda":
            assert kernel.requires[0].text == "device is a gpu"


def test_registering_twice_is_an_error() -> None:
    kernels, layouts = Registry(), LayoutRegistry()
    register(kernels, layouts)
    with pytest.raises(ValueError, match="registered twice"):
        register(kernels, layouts)


def test_gpu_kernels_are_refused_on_a_cpu() -> None:
    op = linear("bf16", "bf16", 8, 16)
    assert texts("cuda.linear_bf16", op, CPU) == [
        "wanted device is a gpu, found a cpu",
        "wanted feature cuda, found x86_v3 lacks it",
        "wanted feature bf16_mma, found x86_v3 lacks it",
    ]
    for kernel in KERNELS.all():
        if kernel.backend == "cuda":
            query = Query(any_op(kernel), CPU, LIMITS)
            assert "wanted device is a gpu, found a cpu" in map(str, kernel.refusals(query))


def any_op(kernel: Kernel) -> Op:
    """Some op for a kernel: its first requirement does not look at it."""
    x = tensor(parse_dtype("bf16"), 2, 4, 8, 16)
    kv, *_ = paged("bf16", [3], [1])
    if kernel.op == "attention":
        fields = [tensor(scalar("i32"), 2), tensor(scalar("i32"), 1), tensor(scalar("i32"), 1, 1)]
        return make_op("attention", [tensor(scalar("bf16"), 1, 4, 8), kv, *fields], {})
    if kernel.op.startswith("linear"):
        return fused("linear_add", (2,), False, "add", {}, "bf16")[0]
    return make_op("where", [tensor(scalar("bool"), 2, 4, 8, 16), x, x], {})


def test_cpu_kernels_are_refused_on_a_gpu() -> None:
    op = linear("f32", "f32", 8, 16)
    assert texts("torch.linear_f32", op, H200) == ["wanted device is a cpu, found a gpu"]


def test_wrong_types_are_named() -> None:
    op = linear("bf16", "bf16", 8, 16)
    assert texts("torch.linear_f32", op, CPU) == [
        "wanted operand 0 is f32, found bf16",
        "wanted operand 1 is f32, found bf16",
    ]
    assert texts("cuda.linear_f16", op, H200) == ["wanted operands are f16, all alike, found bf16"]
    assert texts("torch.linear_int8", linear("bf16", "i8/32:f16", 8, 32), CPU) == [
        "wanted operand 1 is i8/row, found i8/32:f16"
    ]
    assert texts("torch.linear_int8", linear("bf16", "i8/row:f32", 8, 32, bias="f32"), CPU) == [
        "wanted operand 2 has the type of operand 0, found f32 in operand 2, bf16 in operand 0"
    ]


def test_what_is_no_weight_cannot_be_packed() -> None:
    op = linear("bf16", "i8/row:f32", 8, 32, is_weight=False)
    assert texts("torch.linear_int8", op, CPU) == ["wanted operand 1 is a weight, found %1"]


REPAIRS = [
    ("torch.linear_int8", "i8/row:f32", "cpu", 8, 65, "K % 32 == 0", "65", 31 / 65),
    ("torch.linear_int4", "i4/32:f16", "cpu", 20, 64, "N % 16 == 0", "20", 12 / 20),
    ("torch.linear_int4", "i4/64:f16", "cpu", 32, 100, "K % group == 0", "K = 100, group 64", 0.28),
    ("cuda.linear_fp8", "f8e4m3/row:f32", "h200", 30, 64, "N % 16 == 0", "30", 2 / 30),
    ("cuda.linear_fp8", "f8e4m3/row:f32", "h200", 32, 100, "K % 16 == 0", "100", 0.12),
]


@pytest.mark.parametrize(
    ("name", "format", "device", "n", "k", "text", "found", "waste"), REPAIRS, ids=lambda p: str(p)
)
def test_pads(
    name: str, format: str, device: str, n: int, k: int, text: str, found: str, waste: float
) -> None:
    kernel, op = KERNELS.get(name), linear("bf16", format, n, k)
    query = Query(op, CPU if device == "cpu" else H200, LIMITS)
    (refusal,) = kernel.refusals(query)
    assert str(refusal) == f"wanted {text}, found {found}"
    repairs = kernel.repairs_for([refusal])
    assert repairs is not None
    (repair,) = repairs
    assert repair.text.startswith(f"pad {text[0]} to ")
    assert repair.waste(query) == pytest.approx(waste)


def test_gpu_kernels_apply_on_a_gpu() -> None:
    assert not texts("cuda.linear_bf16", linear("bf16", "bf16", 30, 50, bias="bf16"), H200)
    assert not texts("cuda.linear_dequantized_bf16", linear("bf16", "u4/32:f16+f16", 8, 64), H200)
    assert not texts("cuda.linear_fp8", linear("bf16", "f8e4m3/row:f32", 32, 64), H200)
    gelu, _ = fused("linear_bias_gelu", (4,), True, "gelu", {"approximate": "tanh"}, "bf16")
    assert not texts("cuda.linear_bias_gelu_bf16", gelu, H200)
    exact, _ = fused("linear_bias_gelu", (4,), True, "gelu", {}, "bf16")
    assert texts("cuda.linear_bias_gelu_bf16", exact, H200) == [
        "wanted approximate is tanh, found none"
    ]


def test_a_device_without_fp8_is_refused() -> None:
    op = linear("bf16", "f8e4m3/row:f32", 32, 64)
    assert "wanted feature fp8_mma, found x86_v3 lacks it" in texts("cuda.linear_fp8", op, CPU)


def sdpa(shape_q: tuple[Any, ...], shape_k: tuple[Any, ...], **attrs: Any) -> Op:
    bf16 = scalar("bf16")
    types = [tensor(bf16, *shape_q), tensor(bf16, *shape_k), tensor(bf16, *shape_k)]
    return make_op("sdpa", types, attrs)


def test_causal_means_the_same_only_where_square() -> None:
    square = sdpa((2, 4, "T", 64), (2, 4, "T", 64), causal=True)
    assert not texts("cuda.sdpa_flash", square, H200)
    wide = sdpa((2, 4, "T", 64), (2, 4, dim("T") + 8, 64), causal=True)
    assert texts("cuda.sdpa_flash", wide, H200) == [
        "wanted causal only if square, found T queries, T+8 keys"
    ]
    odd = sdpa((2, 4, "T", 60), (2, 4, "T", 60))
    assert texts("cuda.sdpa_flash", odd, H200) == [
        "wanted widths equal, <= 256, % 8 == 0, found 60 and 60 and 60"
    ]


def attention(dtype: str, width: int, state: str = "", **attrs: Any) -> Op:
    kv, _, *step = paged(state or dtype, [9], [3], width)
    fields = [tensor(scalar("i32"), *a.shape) for a in step]
    return make_op("attention", [tensor(scalar(dtype), 3, 4, width), kv, *fields], attrs)


def test_paged_attention_requirements() -> None:
    name = "cuda.attention_paged"
    assert not texts(name, attention("bf16", 64, window=5), H200)
    assert texts(name, attention("bf16", 12), H200) == [
        "wanted key and value width equal, <= 256, % 8 == 0, found 12 and 12"
    ]
    assert texts(name, attention("f32", 64), H200) == ["wanted operand 0 is bf16 or f16, found f32"]
    assert texts(name, attention("bf16", 64, softcap=30.0), H200) == [
        "wanted softcap is 0.0, found 30.0"
    ]
    assert texts("torch.attention_sdpa", attention("f32", 64, state="bf16"), CPU) == [
        "wanted state 1 has the type of operand 0 or is rounded to fp8 codes, found bf16"
    ]


def test_sums_over_no_dims_stay_plain() -> None:
    op, _ = build(("sum", [floats(3, 4)], {"dims": ()}))
    assert texts("torch.sum", op, CPU) == ["wanted dims are named, found no dims"]


def test_embedding_rounds_nothing_by_itself() -> None:
    op, _ = build(
        ("embedding", [("i32", RNG.integers(0, 4, 3)), weight("bf16", 4, 8)], {"dtype": "f32"})
    )
    assert texts("torch.embedding", op, CPU) == [
        "wanted result has the type of operand 1, found f32 from bf16"
    ]


class _Counted(TorchDispatchMode):
    """Counts operations that make or change tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.count += not (func.is_view or func.namespace != "aten")
        return made


def test_embedding_is_priced_with_all_its_launches() -> None:
    """Rows of negative numbers are zeroed: on a GPU four launches, where the made kernel is one."""
    ids = ("i32", np.array([3, -1, 0], np.int32))
    op, data = build(("embedding", [ids, weight("bf16", 4, 8)], {"dtype": "bf16"}))
    kernel = KERNELS.get("torch.embedding")
    call = make_call(op, data, LAYOUTS, kernel.layouts, {}, "cpu", 0)
    with _Counted() as seen:
        kernel.binder.run(call)
    assert seen.count == kernel.launches == KERNELS.get("cuda.embedding").launches
    assert call.outputs[0][1].count_nonzero() == 0


def test_an_absent_attribute_has_the_default_of_its_op() -> None:
    """Not the first value that the kernel takes: `gelu` without an attribute is the exact one."""
    floats_ = [tensor(parse_dtype("f32"), "T", 8)]
    plain = Query(make_op("gelu", floats_, {}), CPU, LIMITS)
    tanh = Query(make_op("gelu", floats_, {"approximate": "tanh"}), CPU, LIMITS)
    only_tanh = attr_is("approximate", "tanh", "other")
    assert (only_tanh.check(plain), only_tanh.check(tanh)) == ("none", None)
    both = attr_is("approximate", "tanh", "none")
    assert (both.check(plain), both.check(tanh)) == (None, None)


def test_an_attribute_that_an_op_lacks_is_a_refusal() -> None:
    query = Query(make_op("silu", [tensor(parse_dtype("f32"), "T", 8)], {}), CPU, LIMITS)
    kernel = Kernel("test.silu", "silu", "test", (attr_is("approximate", "none"),))
    (refusal,) = kernel.refusals(query)
    assert "silu has no attribute 'approximate'" in refusal.found
