"""Records of the library products and attentions for CPUs."""

from collections.abc import Mapping
from types import MappingProxyType

from metainfer.backends.kernel import (
    Constraint,
    Efficiency,
    Kernel,
    Registry,
    attr_is,
    device_kind,
    dtype,
    multiple_of,
    operand_count,
    weight_operand,
)
from metainfer.backends.torch import library_attention, library_linear, library_moe
from metainfer.backends.torch.call import TorchBinder
from metainfer.backends.torch.codes import has_codes
from metainfer.backends.torch.constraints import (
    all_dtypes,
    any_feature,
    body_attr,
    body_is,
    body_operands,
    format_is,
    group_divides,
    is_row_format,
    narrower,
    pad_repair,
    same_dtype,
    state_like,
)
from metainfer.backends.torch.layouts import INT4_N, INT8_K, is_int4_group
from metainfer.backends.torch.plain import PLAIN

# Rounding of bf16: what a kernel adds that rounds weights or probabilities to it once more.
BF16_STEP = 2.0**-8
CPU = device_kind("cpu")
BF16 = any_feature("avx512_bf16", "amx_bf16")
WEIGHT = weight_operand(1)
WEIGHTS = weight_operand(3)
EPYC = "an AVX2 EPYC, 2 threads: "
XEON = "a Xeon with AMX, 2 threads: "

SGEMM = Efficiency(0.9, 0.95, "f32", XEON + "54 GB/s at M=1, 253 GFLOP/s at M=512")
MKLDNN = Efficiency(0.75, 0.9, "bf16", XEON + "41 GB/s at M=1, 733 GFLOP/s at M=512")
INT8 = Efficiency(0.6, 0.4, "f32", XEON + "33 GB/s at M=1, 87-100 GFLOP/s, f32 253")
INT4 = Efficiency(0.4, 0.5, "f32", XEON + "19 GB/s at M=1, 129 GFLOP/s, f32 253")
CODES = {
    "f8e4m3": Efficiency(0.024, 0.9, "f32", EPYC + "look-up 1.3 ns a number, product 0.2"),
    "f4e2m1": Efficiency(0.0128, 0.9, "f32", EPYC + "look-up 1.3 ns a number, product 0.2"),
}
ATTENTION = Efficiency(0.35, 0.5, source=XEON + "18 GB/s with the gathers, 78-153 GFLOP/s")
LATENTS = Efficiency(0.35, 0.5, source="assumed as that of attention: its products are wider")


def register_cpu(kernels: Registry) -> None:
    """Register what CPU libraries offer for linears and attention."""
    made = (_dense_linears, _mkldnn, _quantized, _codes, _experts, _attention)
    for kernel in (k for make in made for k in make()):
        kernels.add(kernel)


def _dense_linears() -> tuple[Kernel, ...]:
    plain = TorchBinder(library_linear.linear)
    return (
        Kernel(
            "torch.linear_f32",
            "linear",
            "torch",
            requires=(CPU, dtype(0, "f32"), dtype(1, "f32"), dtype(2, "f32")),
            efficiency=SGEMM,
            binder=plain,
        ),
        Kernel(
            "torch.linear_dequantized_f32",
            "linear",
            "torch",
            requires=(CPU, dtype(0, "f32"), narrower(1), WEIGHT, dtype(2, "f32")),
            layouts={1: "torch.dense_f32"},
            efficiency=SGEMM,
            binder=plain,
        ),
        Kernel(
            "torch.linear_add_f32",
            "linear_add",
            "torch",
            requires=(
                CPU,
                all_dtypes("f32"),
                operand_count(3),
                body_is("linear", "add"),
                body_operands(0, 2),
            ),
            efficiency=SGEMM,
            in_place={0: 2},
            binder=TorchBinder(library_linear.linear_add),
        ),
        _activation("relu"),
        _activation("gelu", body_attr(1, "approximate", "none")),
    )


def _activation(name: str, *extra: Constraint) -> Kernel:
    return Kernel(
        f"torch.linear_bias_{name}_f32",
        f"linear_bias_{name}",
        "torch",
        requires=(CPU, all_dtypes("f32"), operand_count(3), body_is("linear", name), *extra),
        efficiency=SGEMM,
        # On a CPU the epilogue is a second pass over the result, in place.
        launches=2,
        extra_bytes=0.1,
        binder=TorchBinder(library_linear.linear_activation(name == "gelu")),
    )


def _mkldnn() -> tuple[Kernel, ...]:
    plain = TorchBinder(library_linear.linear_mkldnn())
    wider = format_is(1, "a block format or f32", lambda d: str(d) not in ("bf16", "f64"))
    return (
        _packed("linear", plain, dtype(1, "bf16"), same_dtype(0, 2)),
        _packed("linear_dequantized", plain, wider, same_dtype(0, 2), op="linear", error=BF16_STEP),
        *_packed_fused("add", TorchBinder(library_linear.linear_add_mkldnn)),
        *_packed_fused("relu", TorchBinder(library_linear.linear_mkldnn("relu"))),
        *_packed_fused(
            "gelu",
            TorchBinder(library_linear.linear_mkldnn("gelu")),
            body_attr(1, "approximate", "none"),
        ),
        *_packed_fused("silu", TorchBinder(library_linear.linear_mkldnn("swish"))),
    )


def _packed(
    name: str,
    run: TorchBinder,
    *extra: Constraint,
    op: str = "",
    error: float = 0.0,
    in_place: Mapping[int, int] = MappingProxyType({}),
) -> Kernel:
    """A product by weights that mkldnn packed in bf16."""
    return Kernel(
        f"torch.{name}_bf16",
        op or name,
        "torch",
        requires=(CPU, BF16, dtype(0, "bf16"), WEIGHT, *extra),
        layouts={1: "torch.mkldnn_bf16"},
        efficiency=MKLDNN,
        launches=2,
        in_place=in_place,
        error=error,
        binder=run,
    )


def _packed_fused(follows: str, run: TorchBinder, *extra: Constraint) -> tuple[Kernel, ...]:
    """The product and one op after it, without and with a bias."""
    shared = (all_dtypes("bf16"), body_is("linear", follows), *extra)
    # The library makes its own result before it is stored.
    over = {0: 2} if follows == "add" else {}
    return (
        _packed(f"linear_{follows}", run, *shared, body_operands(0, 2), in_place=over),
        _packed(f"linear_bias_{follows}", run, *shared, body_operands(0, 3)),
    )


def _quantized() -> tuple[Kernel, ...]:
    inner = multiple_of(1, 1, INT8_K, "K")
    outer = multiple_of(1, 0, INT4_N, "N")
    group = group_divides(1, 1, "K")
    return (
        Kernel(
            "torch.linear_int8",
            "linear",
            "torch",
            requires=(
                CPU,
                dtype(0, "bf16"),
                format_is(1, "i8/row", is_row_format("i8")),
                WEIGHT,
                same_dtype(0, 2),
                inner,
            ),
            repairs=(pad_repair(inner, "K", (1, 1), INT8_K),),
            layouts={1: "torch.int8pack"},
            efficiency=INT8,
            launches=2,
            # Sums and scales are rounded to bf16 before they meet.
            error=BF16_STEP,
            binder=TorchBinder(library_linear.linear_int8),
        ),
        Kernel(
            "torch.linear_int4",
            "linear",
            "torch",
            requires=(
                CPU,
                dtype(0, "bf16"),
                format_is(1, "i4 or u4+offset in groups of 32, 64, 128 or 256", is_int4_group),
                WEIGHT,
                same_dtype(0, 2),
                outer,
                group,
            ),
            repairs=(
                pad_repair(outer, "N", (1, 0), INT4_N),
                pad_repair(group, "K", (1, 1)),
            ),
            layouts={1: "torch.int4pack"},
            efficiency=INT4,
            launches=2,
            # Each weight is rounded to bf16 as it is widened.
            error=BF16_STEP,
            binder=TorchBinder(library_linear.linear_int4),
        ),
    )


def _codes() -> tuple[Kernel, ...]:
    """Weights that stay in their codes and are widened at each call: least memory."""
    made = []
    for element, efficiency in CODES.items():
        codes = format_is(1, f"{element} codes without offsets", has_codes(element))
        made.append(
            Kernel(
                f"torch.linear_codes_{element}",
                "linear",
                "torch",
                requires=(CPU, dtype(0, "f32"), codes, WEIGHT, dtype(2, "f32")),
                layouts={1: "torch.codes"},
                efficiency=efficiency,
                launches=8,
                binder=TorchBinder(library_linear.linear_codes),
            )
        )
    return tuple(made)


def _experts() -> tuple[Kernel, ...]:
    """Experts whose weights no C++ kernel reads: widened when loaded, or at each call."""
    run, here = TorchBinder(library_moe.experts), (CPU, dtype(0, "f32"), dtype(2, "f32"))
    weights = (WEIGHTS, same_dtype(3, 4, 5))
    made = [
        Kernel(
            "torch.experts_dequantized_f32",
            "experts",
            "torch",
            requires=(*here, narrower(3), *weights),
            layouts=dict.fromkeys((3, 4, 5), "torch.dense_f32"),
            efficiency=SGEMM,
            launches=16,
            binder=run,
        )
    ]
    for element, efficiency in CODES.items():
        codes = format_is(3, f"{element} codes without offsets", has_codes(element))
        made.append(
            Kernel(
                f"torch.experts_codes_{element}",
                "experts",
                "torch",
                requires=(*here, codes, *weights),
                layouts=dict.fromkeys((3, 4, 5), "torch.codes"),
                efficiency=efficiency,
                launches=24,
                binder=run,
            )
        )
    return tuple(made)


def _attention() -> tuple[Kernel, ...]:
    dense = TorchBinder(library_attention.sdpa)
    paged = TorchBinder(library_attention.attention_sdpa)
    no_cap = attr_is("softcap", 0.0)

    def pair(name: str, op: str, binder: TorchBinder, *extra: Constraint) -> tuple[Kernel, ...]:
        made = []
        for suffix, types, error in (("", ("f32",), 0.0), ("_bf16", ("bf16", "f16"), BF16_STEP)):
            made.append(
                Kernel(
                    f"torch.{name}{suffix}",
                    op,
                    "torch",
                    requires=(CPU, dtype(0, *types), *extra),
                    efficiency=ATTENTION,
                    # For each sequence: two gathers, the mask, the product, the copy.
                    launches=8 if op == "attention" else 2,
                    # Probabilities are rounded to the type of the values.
                    error=error,
                    extra_bytes=2.0 if op == "attention" else 0.5,
                    binder=binder,
                )
            )
        return tuple(made)

    return (
        *pair("sdpa", "sdpa", dense, operand_count(3), same_dtype(0, 1, 2)),
        *pair("attention_sdpa", "attention", paged, no_cap, state_like(1, 0)),
        Kernel(
            "torch.latent_attention_rows",
            "latent_attention",
            "torch",
            requires=(CPU, dtype(0, "f32", "bf16", "f16"), state_like(2, 0)),
            efficiency=LATENTS,
            # For each sequence: two gathers, the mask, two products of the scores, softmax, values.
            launches=16,
            extra_bytes=2.0,
            binder=TorchBinder(PLAIN["latent_attention"]),
        ),
    )
