"""Records of the plain compositions: one for every op, without requirements, generic."""

from dataclasses import dataclass

from metainfer.backends.kernel import Constraint, Efficiency, Kernel, Registry, dtype
from metainfer.backends.torch.call import TorchBinder
from metainfer.backends.torch.plain import PLAIN
from metainfer.backends.torch.plain_elementwise import UNARY

SOURCE = (
    "of what rms_norm and silu_mul move: 0.77 and 0.84 of an H200's bandwidth, 14 GB/s on two "
    "threads of a Xeon; attention there: 13-17 GFLOP/s of 255"
)


@dataclass(frozen=True)
class Composition:
    """What a composition costs beyond the op itself.

    Attributes:
        launches: library calls on operands narrower than f32, the widenings among them.
        traffic: bytes of intermediate results, as a fraction of the op's own.
        f32_launches: calls where nothing needs widening; 0 if that makes no difference.
        f32_traffic: traffic in that case.
        compute: fraction of the arithmetic rate.
    """

    launches: int
    traffic: float
    f32_launches: int = 0
    f32_traffic: float = 0.0
    compute: float = 0.3

    @property
    def efficiency(self) -> Efficiency:
        """Fractions of the device's rates."""
        return Efficiency(0.5, self.compute, source=SOURCE)


# Launches as the profiler counted them on an H200, copies and fills included. An attention makes
# its own for each sequence, the figure is that of one; experts eleven each, that is of 64.
UNARY_COST = Composition(3, 4.0)
BINARY_COST = Composition(4, 4.0)
COMPOSITIONS: dict[str, Composition] = {
    "where": Composition(2, 2.0),
    "cast": Composition(5, 6.0),
    "gelu": UNARY_COST,
    "div": Composition(7, 6.0),
    "floor_div": Composition(7, 6.0),
    "remainder": Composition(7, 6.0),
    "silu_mul": Composition(5, 6.0, f32_launches=3, f32_traffic=2.0),
    "gelu_mul": Composition(5, 6.0, f32_launches=3, f32_traffic=2.0),
    "silu_mul_halves": Composition(5, 6.0, f32_launches=3, f32_traffic=2.0),
    "reshape": Composition(1, 1.0),
    "transpose": Composition(1, 1.0),
    "broadcast": Composition(1, 1.0),
    "slice": Composition(1, 1.0),
    "concat": Composition(1, 0.0),
    "pad": Composition(2, 1.0),
    "gather": Composition(2, 0.0),
    "embedding": Composition(8, 6.0),
    "full": Composition(1, 0.0),
    "iota": Composition(4, 6.0),
    "constant": Composition(1, 0.0),
    "sum": Composition(3, 2.0),
    "mean": Composition(3, 2.0),
    "max": Composition(3, 2.0),
    "min": Composition(3, 2.0),
    "argmax": Composition(3, 2.0),
    "softmax": Composition(7, 6.0, f32_launches=6, f32_traffic=3.0),
    "cumsum": Composition(3, 4.0),
    "topk": Composition(10, 12.0, f32_launches=9, f32_traffic=8.0),
    "quantize": Composition(16, 12.0),
    "rms_norm": Composition(9, 10.0, f32_launches=7, f32_traffic=5.0),
    "layer_norm": Composition(13, 14.0, f32_launches=10, f32_traffic=8.0),
    "linear": Composition(13, 6.0, f32_launches=4, f32_traffic=1.0),
    "matmul": Composition(6, 4.0, f32_launches=4, f32_traffic=1.0),
    "experts": Composition(704, 4.0, f32_launches=576, f32_traffic=1.0),
    "route": Composition(14, 8.0),
    "choose_experts": Composition(34, 16.0),
    "conv2d": Composition(7, 4.0, f32_launches=4, f32_traffic=1.0),
    "rope": Composition(18, 14.0, f32_launches=16, f32_traffic=8.0),
    "sdpa": Composition(19, 8.0, f32_launches=16, f32_traffic=6.0, compute=0.06),
    "kv_write": Composition(3, 0.0),
    "attention": Composition(30, 8.0, f32_launches=27, f32_traffic=6.0, compute=0.06),
    "latent_write": Composition(3, 0.0),
    "latent_attention": Composition(30, 8.0, f32_launches=27, f32_traffic=6.0, compute=0.06),
}


def register_plain(kernels: Registry) -> None:
    """Register ``torch.<op>_plain`` for every op, and ``_plain_f32`` where f32 is cheaper.

    Registered last, so that a made kernel of equal cost comes first.
    """
    for name, run in PLAIN.items():
        composition = COMPOSITIONS.get(name, UNARY_COST if name in UNARY else BINARY_COST)
        binder = TorchBinder(run)
        if composition.f32_launches:
            kernels.add(
                Kernel(
                    f"torch.{name}_plain_f32",
                    name,
                    "torch",
                    requires=(dtype(0, "f32", "f64"), *_dense_weight(name)),
                    efficiency=composition.efficiency,
                    launches=composition.f32_launches,
                    generic=True,
                    extra_bytes=composition.f32_traffic,
                    binder=binder,
                )
            )
        kernels.add(
            Kernel(
                f"torch.{name}_plain",
                name,
                "torch",
                efficiency=composition.efficiency,
                launches=composition.launches,
                generic=True,
                extra_bytes=composition.traffic,
                binder=binder,
            )
        )


def _dense_weight(name: str) -> tuple[Constraint, ...]:
    return (dtype(1, "f32", "f64"),) if name == "linear" else ()
