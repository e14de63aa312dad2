"""Records of the emitted groups: single ops, and the groups that rules make."""

from metainfer.backends.kernel import (
    Constraint,
    Efficiency,
    Kernel,
    Registry,
    device_kind,
    feature,
)
from metainfer.backends.triton import pointwise
from metainfer.backends.triton.emit.formulas import ELEMENTWISE
from metainfer.backends.triton.emit.rows import HANDLERS
from metainfer.backends.triton.emit.tiles import WRITES
from metainfer.backends.triton.launch import TritonBinder

HERE: tuple[Constraint, ...] = (device_kind("gpu"), feature("triton"))

# Groups that rules make and that the emitter takes whole.
GROUPS = (
    "add_rms_norm", "add_layer_norm", "gather_rms_norm", "gelu_mul_halves", "rope_kv_write",
    "qk_norm_rope_kv_write", "norm_rope_latent_write", "route_experts", "pointwise",
)  # fmt: skip
# The same, and the op: they round to fp8 codes, which cards convert to that multiply them.
ROUNDING = (
    "quantize", "rms_norm_quantize", "add_rms_norm_quantize", "silu_mul_quantize",
    "silu_mul_halves_quantize",
)  # fmt: skip
# Made of nothing but numbers: a launch for them is never worth it on its own.
_NOT_ALONE = ("full", "iota")
_STREAM = Efficiency(0.8, 0.5, "f32", "assumed: a stream of one read and one write")


def register_pointwise(kernels: Registry) -> None:
    """Add a kernel for each op and group that the emitter knows.

    They are not asked to fit a card before they are chosen: sums over rows take some hundred bytes
    of shared memory, whatever the group. `make kernels-check` compiles those of whole plans.
    """
    for op in (*sorted({*ELEMENTWISE, *HANDLERS} - {*_NOT_ALONE}), *WRITES, *GROUPS, *ROUNDING):
        units = (feature("fp8_mma"),) if op in ROUNDING else ()
        kernels.add(
            Kernel(
                f"triton.{op}",
                op,
                "triton",
                requires=(*HERE, *units, pointwise.emittable()),
                efficiency=_STREAM,
                binder=TritonBinder(pointwise.launches),
            )
        )
