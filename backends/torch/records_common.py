"""Records of the ops that are single library calls, once for CPUs and once for GPUs."""

from dataclasses import dataclass

from metainfer.backends.kernel import (
    Constraint,
    Efficiency,
    Kernel,
    Registry,
    attr_is,
    device_kind,
    dtype,
    operand_count,
)
from metainfer.backends.torch.call import TorchBinder
from metainfer.backends.torch.constraints import (
    all_dtypes,
    batches_alike,
    reduces_something,
    result_dtype,
    same_dtype,
)
from metainfer.backends.torch.library import (
    CAST,
    CAST_F8E4M3,
    FLOATS,
    IOTA,
    NORMS,
    SINGLE,
    WHERE,
)
from metainfer.backends.torch.plain import PLAIN
from metainfer.backends.torch.tensors import TORCH_DTYPES
from metainfer.ir.ops.record import OPS, REDUCTION


@dataclass(frozen=True)
class Flavour:
    """What differs between the records of CPUs and GPUs for the same library calls.

    Attributes:
        backend: prefix of the names.
        device: kind of device.
        elementwise: efficiency of one pass over the numbers.
        reduction: efficiency of reductions.
        matmul: efficiency of batched products.
        norm: efficiency of norms.
        gather: efficiency of picking rows.
        rms_norm_launches: calls that an rms_norm falls into.
        rms_norm_traffic: bytes of its intermediate results, as a fraction.
    """

    backend: str
    device: str
    elementwise: Efficiency
    reduction: Efficiency
    matmul: Efficiency
    norm: Efficiency
    gather: Efficiency
    rms_norm_launches: int
    rms_norm_traffic: float


CPU = Flavour(
    "torch",
    "cpu",
    Efficiency(
        0.8, 0.1, source="a Xeon with AMX, 2 threads: add 34 GB/s, silu 22 GFLOP/s of 255, gelu 7"
    ),
    Efficiency(0.6, 0.3, source="a Xeon with AMX, 2 threads: sum 53 GB/s, argmax 4"),
    Efficiency(0.4, 0.95, source="a Xeon with AMX, 2 threads: 285 GFLOP/s, small 17 GB/s"),
    Efficiency(0.25, 0.3, source="a Xeon with AMX, 2 threads: 10 GB/s, temporaries included"),
    Efficiency(0.8, 0.1, source="assumed as of other passes"),
    rms_norm_launches=7,
    rms_norm_traffic=4.0,
)
GPU = Flavour(
    "cuda",
    "gpu",
    Efficiency(0.85, 0.5, source="H200, 8192 x 8192 bf16: add 0.99, silu 0.87, gelu 0.81"),
    Efficiency(0.4, 0.3, source="H200, rows of 8192 bf16: sum 0.58, max 0.40, argmax 0.25"),
    Efficiency(0.6, 0.95, source="H200, batches of bf16: 0.64 of bandwidth, 679 TFLOP/s"),
    Efficiency(0.7, 0.3, source="H200, 8192 x 8192 bf16: rms 0.74, layer 0.68, the copy included"),
    Efficiency(0.5, 0.5, source="H200: 1 row of 4096 bf16 2.2 us, 16 rows 10.7; more assumed"),
    rms_norm_launches=2,
    rms_norm_traffic=1.0,
)


_SOME_DIMS = (reduces_something(),)
EXTRA: dict[str, tuple[Constraint, ...]] = {
    **{name: _SOME_DIMS for name in ("sum", "mean", "max", "min")},
    "matmul": (batches_alike(0, 1),),
}
_ANY = SINGLE["eq"][1]
_CASTS = tuple(name for name in TORCH_DTYPES if name != "f8e4m3")


def register_common(kernels: Registry, flavour: Flavour) -> None:
    """Register the single library calls of one kind of device."""
    adder = _Adder(kernels, flavour)
    for name, (run, dtypes) in SINGLE.items():
        efficiency = flavour.reduction if OPS[name].has(REDUCTION) else flavour.elementwise
        if name == "matmul":
            efficiency = flavour.matmul
        extra = EXTRA.get(name, ())
        adder.add(name, TorchBinder(run), (all_dtypes(*dtypes), *extra), efficiency)
    adder.add("where", TorchBinder(WHERE), (dtype(1, *_ANY), same_dtype(1, 2)))
    adder.add("cast", TorchBinder(CAST), (attr_is("dtype", *_CASTS),))
    # What e4m3 cannot hold becomes NaN, where the library's own cast would clip it.
    to_f8 = (attr_is("dtype", "f8e4m3"), dtype(0, *FLOATS))
    adder.add("cast", TorchBinder(CAST_F8E4M3), to_f8, launches=5, traffic=6.0, suffix="_f8e4m3")
    adder.add("iota", TorchBinder(IOTA), (attr_is("dtype", "i64", "i32", "f32"),))
    index = dtype(1, "i32", "i64")
    rows = (dtype(0, *_ANY), index)
    adder.add("gather", TorchBinder(PLAIN["gather"]), rows, flavour.gather)
    table = (dtype(0, "i32", "i64"), dtype(1, *FLOATS), result_dtype(1))
    # Rows of negative numbers are zeroed in passes of their own.
    adder.add("embedding", TorchBinder(PLAIN["embedding"]), table, launches=4, traffic=1.0)
    adder.add("full", TorchBinder(PLAIN["full"]), ())
    for name in ("kv_write", "latent_write"):
        adder.add(name, TorchBinder(PLAIN[name]), (), launches=3)
    # Sorts of all experts, of all groups and of their members: no generic form, but a slow one.
    adder.add("choose_experts", TorchBinder(PLAIN["choose_experts"]), (), launches=34, traffic=16.0)
    _norms(adder)


def _norms(adder: "_Adder") -> None:
    flavour, floats = adder.flavour, dtype(0, *FLOATS)
    adder.add(
        "rms_norm",
        TorchBinder(NORMS["rms_norm"]),
        (floats, same_dtype(0, 1)),
        flavour.norm,
        launches=flavour.rms_norm_launches,
        traffic=flavour.rms_norm_traffic,
    )
    adder.add(
        "layer_norm",
        TorchBinder(NORMS["layer_norm"]),
        (floats, same_dtype(0, 1, 2), operand_count(1, 2, 3)),
        flavour.norm,
        launches=2,
        traffic=1.0,
    )


@dataclass(frozen=True)
class _Adder:
    """Adds records of one flavour."""

    kernels: Registry
    flavour: Flavour

    def add(
        self,
        name: str,
        binder: TorchBinder,
        requires: tuple[Constraint, ...],
        efficiency: Efficiency | None = None,
        launches: int = 1,
        traffic: float = 0.0,
        suffix: str = "",
    ) -> None:
        self.kernels.add(
            Kernel(
                f"{self.flavour.backend}.{name}{suffix}",
                name,
                self.flavour.backend,
                requires=(device_kind(self.flavour.device), *requires),
                efficiency=efficiency or self.flavour.elementwise,
                launches=launches,
                extra_bytes=traffic,
                binder=binder,
            )
        )
