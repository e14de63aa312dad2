"""What is shown of a kernel: the Triton functions that it launches, those only."""

import pytest

from metainfer.backends.registry import installed
from metainfer.backends.triton.launch import TritonBinder
from metainfer.compiler.kernel_cards import sources_of_kernel


@pytest.mark.parametrize(
    ("name", "functions"),
    [
        ("attention_prefill", {"attention_prefill"}),
        ("attention_warpgroups", {"attention_warpgroups"}),
        ("attention_split", {"attention_split", "attention_combine"}),
        ("linear_add_rms_norm_plain_head16", {"gemm_skinny_parts", "finish_rows"}),
        ("linear_fp8_few16", {"gemm_skinny_rounded"}),
        ("linear_silu_mul_plain_m64", {"gemm_gated"}),
        ("linear_f8e4m3_widened", {"widen_rows"}),
        ("linear_route", {"linear_route"}),
        ("choose_experts", {"choose_experts"}),
    ],
)
def test_functions_are_those_that_a_kernel_launches(name: str, functions: set[str]) -> None:
    binding, *others = sources_of_kernel(installed().kernels.get(f"triton.{name}"))
    assert binding.what.startswith("binding ")
    shown = {s.what.removeprefix("Triton function "): s for s in others}
    assert set(shown) - {"emitted functions"} == functions
    for function in functions:
        assert f"def {function}(" in shown[function].text


def test_every_kernel_of_triton_shows_what_it_launches() -> None:
    for kernel in installed().kernels.all():
        if isinstance(kernel.binder, TritonBinder):
            assert len(sources_of_kernel(kernel)) > 1, kernel.name
