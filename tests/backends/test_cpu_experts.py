"""Routing and the experts' products on the CPU against the references."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from route_cases import CASES, routed

from metainfer.backends.cpu import layouts, program
from metainfer.backends.cpu.build import Library, available, library
from metainfer.backends.cpu.emit import CpuBinder, CpuCall, ProgramDims
from metainfer.backends.cpu.program import ProgramBuilder
from metainfer.backends.kernel import Kernel, Query, Registry
from metainfer.backends.layout import LayoutRegistry
from metainfer.backends.torch.check import difference, make_op, run_reference
from metainfer.hardware.load import load_machine
from metainfer.ir.dtypes import Block, parse_dtype, quantize
from metainfer.ir.graph import Op
from metainfer.ir.ops import op_def
from metainfer.ir.types import tensor

pytestmark = pytest.mark.skipif(not available()[0], reason="no C++ compiler")

from metainfer.backends.cpu.records import register  # noqa: E402

KERNELS = Registry()
register(KERNELS, LayoutRegistry())
FORMATS = {
    "f32": "cpu.experts_f32",
    "bf16": "cpu.experts_bf16",
    "i8/32:f16": "cpu.experts_w8",
    "i8/32:f32": "cpu.experts_w8_s32",
    "u4/32:f16+f16": "cpu.experts_w4",
    "i4/32:f16": "cpu.experts_w4_sym",
    "u4/32:f32+f32": "cpu.experts_w4_s32",
}


@pytest.fixture(params=["native-1", "native-2", "scalar-2"])
def kernels(request: pytest.FixtureRequest) -> Iterator[Library]:
    kind, threads = request.param.split("-")
    loaded = library(scalar=kind == "scalar")
    program.set_num_threads(int(threads), loaded)
    yield loaded
    program.set_num_threads(0, loaded)


def address(array: np.ndarray) -> int:
    return array.ctypes.data


def run(kernel: Kernel, op: Op, data: Sequence[Any], loaded: Library) -> list[np.ndarray]:
    """Results of an op by its commands, on buffers and scratch full of NaN."""
    packed = [
        layouts.pack(kernel.layouts[i], d) if i in kernel.layouts else np.ascontiguousarray(d)
        for i, d in enumerate(data)
    ]
    results = []
    for value in op.results:
        made = np.zeros(value.tensor.concrete({}), value.tensor.dtype.numpy)  # type: ignore[union-attr]
        results.append(np.full_like(made, np.nan if made.dtype.kind == "f" else -7))
    size = kernel.workspace(Query(op, load_machine("cpu").device(0), {})) if kernel.workspace else 0
    scratch = layouts.aligned_bytes(size + 64)
    scratch[:] = 255
    builder, dims = ProgramBuilder(loaded), ProgramDims()
    assert isinstance(kernel.binder, CpuBinder)
    call = CpuCall(
        op, op_def(op.name).complete(op.attr), builder, dims,
        operand=lambda i, field: address(packed[i]), result=lambda i: address(results[i]),
        workspace=address(scratch), rope=lambda attrs, width: (0, 0),
        max_rows=lambda type_: int(np.prod([n.static for n in type_.shape[:-1]])),
    )  # fmt: skip
    kernel.binder.emit(call)
    builder.build().run(dims.evaluate({}))
    assert (scratch[size:] == 255).all()
    return results


def experts_case(
    format: str, tokens: int, chosen: int, num: int, inner: int, width: int, **attrs: Any
) -> tuple[Op, list[Any]]:
    rng = np.random.default_rng(tokens * 100 + inner)
    dtype = parse_dtype(format)
    ids = rng.integers(-1, num + 1, (tokens, chosen)).astype(attrs.pop("ids", "int64"))
    data: list[Any] = [
        rng.standard_normal((tokens, width)).astype(np.float32),
        ids,
        rng.random((tokens, chosen)).astype(np.float32),
    ]
    for shape in ((num, inner, width), (num, inner, width), (num, width, inner)):
        values = (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)
        held = quantize(values, dtype) if isinstance(dtype, Block) else values.astype(dtype.numpy)
        data.append(held)
    index = parse_dtype("i64" if ids.dtype == np.int64 else "i32")
    types = [
        tensor(parse_dtype("f32"), tokens, width),
        tensor(index, tokens, chosen),
        tensor(parse_dtype("f32"), tokens, chosen),
        *(tensor(dtype, *d.shape) for d in data[3:]),
    ]
    return make_op("experts", types, attrs, (3, 4, 5)), data


@pytest.mark.parametrize("format", FORMATS)
def test_experts(kernels: Library, format: str) -> None:
    kernel = KERNELS.get(FORMATS[format])
    # One token, few rows and many rows of an expert, more than a block of rows; odd sizes.
    for tokens, chosen, num, inner, width in (
        (1, 2, 8, 32, 64), (7, 3, 5, 40, 33), (60, 2, 3, 48, 96), (150, 1, 1, 19, 70),
    ):  # fmt: skip
        op, data = experts_case(format, tokens, chosen, num, inner, width)
        (found,) = run(kernel, op, data, kernels)
        assert difference(found, run_reference(op, data)[0]) < 2e-5


def test_narrow_ids_and_the_other_activation(kernels: Library) -> None:
    op, data = experts_case("f32", 9, 2, 4, 32, 48, activation="gelu_tanh", ids="int32")
    (found,) = run(KERNELS.get("cpu.experts_f32"), op, data, kernels)
    assert difference(found, run_reference(op, data)[0]) < 2e-5


def test_a_step_without_any_expert_of_this_rank_is_zero(kernels: Library) -> None:
    op, data = experts_case("bf16", 5, 2, 4, 32, 48)
    data[1][:] = -1
    (found,) = run(KERNELS.get("cpu.experts_bf16"), op, data, kernels)
    assert not found.any()


@settings(deadline=None)
@given(tokens=st.integers(1, 9), width=st.integers(1, 40), seed=st.integers(0, 99), data=st.data())
def test_topk(tokens: int, width: int, seed: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(0, width))
    rng = np.random.default_rng(seed)
    # Few distinct values: ties; now and then what is no number or no finite one.
    x = rng.integers(0, 5, (tokens, width)).astype(np.float32)
    x[rng.random(x.shape) < 0.05] = np.nan
    x[rng.random(x.shape) < 0.05] = -np.inf
    op = make_op("topk", [tensor(parse_dtype("f32"), tokens, width)], {"k": k})
    values, index = run(KERNELS.get("cpu.topk"), op, [x], library())
    wanted_values, wanted_index = op_def("topk").reference(x, k=k)
    np.testing.assert_array_equal(index, wanted_index)
    np.testing.assert_array_equal(values, wanted_values)


@pytest.mark.parametrize("name", CASES)
def test_route(kernels: Library, name: str) -> None:
    op, data = routed(CASES[name])
    (found,) = run(KERNELS.get("cpu.route"), op, data, kernels)
    np.testing.assert_array_equal(found, run_reference(op, data)[0])
