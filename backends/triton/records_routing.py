"""Record of the choice of experts by corrected scores."""

from metainfer.backends.kernel import (
    Constraint,
    Efficiency,
    Kernel,
    Query,
    Registry,
    dense,
    device_kind,
    dtype,
    feature,
)
from metainfer.backends.triton.launch import TritonBinder
from metainfer.backends.triton.routing import MOST_EXPERTS, choose_experts, tile_of
from metainfer.ir.ops.record import attr_value


def register_routing(kernels: Registry) -> None:
    """Add the kernel that chooses a token's experts in one launch."""
    kernels.add(
        Kernel(
            "triton.choose_experts",
            "choose_experts",
            "triton",
            requires=(
                device_kind("gpu"),
                feature("triton"),
                dtype(0, "f32", "bf16", "f16"),
                dtype(1, "f32", "bf16", "f16"),
                dense(0, 1),
                fits_a_tile(),
            ),
            efficiency=Efficiency(0.5, 0.1, "f32", "assumed: a row of scores is little work"),
            binder=TritonBinder(choose_experts),
        )
    )


def fits_a_tile() -> Constraint:
    """Groups and their members, padded to powers of two, are no more than a tile."""

    def check(query: Query) -> str | None:
        groups = attr_value(query.op, "groups")
        assert isinstance(groups, int)
        size = tile_of(query.tensor(0).shape[1].static, groups)
        return None if size <= MOST_EXPERTS else f"{size}"

    return Constraint(f"experts, groups padded, <= {MOST_EXPERTS}", check)
