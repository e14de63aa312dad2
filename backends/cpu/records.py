"""Records of the C++ kernels: what each implements, requires and costs."""

from collections.abc import Callable

from metainfer.backends.cpu import emitters, layouts
from metainfer.backends.cpu.emit import CpuBinder, CpuCall
from metainfer.backends.kernel import (
    Constraint,
    Efficiency,
    Kernel,
    Query,
    Registry,
    attr_is,
    dense,
    device_kind,
    dtype,
    operand_count,
    page_size_in,
    weight_operand,
)
from metainfer.backends.layout import Layout, LayoutRegistry
from metainfer.ir.dims import Dim, dim
from metainfer.ir.dtypes import parse_dtype
from metainfer.ir.errors import TypeMismatch
from metainfer.ir.ops.record import attr_value
from metainfer.ir.types import TensorType

CPU = device_kind("cpu")
_SOURCE = "benchmarks/cpu_kernels.py on an AVX2 EPYC, 2 cores"
# Rounding of an activation to 8 bits within its block of 32: half a step of 1/127.
A8_ERROR = 1 / 254

_STREAM = Efficiency(memory=0.6, compute=0.5, rate="f32", source=_SOURCE)


def register(kernels: Registry, registry: LayoutRegistry) -> None:
    """Add the CPU kernels and layouts."""
    for name in layouts.LAYOUTS:
        registry.add(_layout(name))
    families = (_linears, _embeddings, _rows, _experts, _attention, _pointwise)
    for kernel in (k for family in families for k in family()):
        kernels.add(kernel)


def _layout(name: str) -> Layout:
    def num_bytes(type_: TensorType) -> int:
        return layouts.layout_bytes(name, tuple(n.static for n in type_.shape))

    def unpack(blob: object, type_: TensorType) -> object:
        shape = tuple(n.static for n in type_.shape)
        return layouts.unpack(name, blob, shape)  # type: ignore[arg-type]

    return Layout(name, lambda w: layouts.pack(name, w), unpack, num_bytes)  # type: ignore[arg-type]


def f32(*operands: int) -> tuple[Constraint, ...]:
    """These operands are float32."""
    return tuple(dtype(i, "f32") for i in operands)


def _bias_is(position: int) -> Constraint:
    """A bias, where there is one, is float32."""
    return dtype(position, "f32")


# --- linears -----------------------------------------------------------------------------------


def _linears() -> list[Kernel]:
    made: list[Kernel] = []
    for name, format_, rate, error in (
        ("linear_f32", "f32", 0.85, 0.0),
        ("linear_f16", "f16", 0.8, 0.0),
        ("linear_bf16", "bf16", 0.8, 0.0),
    ):
        made += _linear_family(name, format_, Efficiency(0.85, rate, "f32", _SOURCE), error)
    for format_ in ("i8/32:f16", "i8/32:f32"):
        exact = Efficiency(0.8, 0.55, "f32", _SOURCE)
        quick = Efficiency(0.85, 0.66, "i8", _SOURCE)
        made += _linear_family("linear_w8", format_, exact, 0.0)
        made += _linear_family("linear_w8a8", format_, quick, A8_ERROR)
    for format_ in ("u4/32:f16+f16", "i4/32:f16", "u4/32:f32+f32"):
        exact = Efficiency(0.7, 0.5, "f32", _SOURCE)
        quick = Efficiency(0.75, 0.97, "i8", _SOURCE)
        made += _linear_family("linear_w4", format_, exact, 0.0)
        made += _linear_family("linear_w4a8", format_, quick, A8_ERROR)
    return made


_SUFFIX = {"i8/32:f32": "_s32", "i4/32:f16": "_sym", "u4/32:f32+f32": "_s32"}


def _linear_family(
    function: str, format_: str, efficiency: Efficiency, error: float
) -> list[Kernel]:
    """The plain linear and the one that adds a residual."""
    packing = layouts.layout_for(parse_dtype(format_))
    name = f"cpu.{function}{_SUFFIX.get(format_, '')}"
    workspace = _activation_bytes if error else None
    emit = emitters.linear(function)
    common = (CPU, *f32(0), dtype(1, format_), weight_operand(1), dense(0))
    shared = {
        "backend": "cpu",
        "layouts": {1: packing},
        "efficiency": efficiency,
        "error": error,
        "workspace": workspace,
        "launches": 2 if error else 1,
    }
    plain = Kernel(
        name,
        "linear",
        requires=(*common, operand_count(2, 3), dtype(2, "f32")),
        binder=CpuBinder(emit),
        **shared,  # type: ignore[arg-type]
    )
    added = Kernel(
        f"{name}_add",
        "linear_add",
        requires=(*common, dtype(2, "f32"), dense(2)),
        in_place={0: 2},
        binder=CpuBinder(emitters.linear_add(function)),
        **shared,  # type: ignore[arg-type]
    )
    return [plain, added]


def _activation_bytes(query: Query) -> int:
    """Scratch for quantized activations: codes, scales and sums (see kernels.py)."""
    type_ = query.tensor(0)
    rows = query.upper(_rows_of(type_))
    return emitters.quantized_bytes(rows, type_.shape[-1].static)


def _rows_of(type_: TensorType) -> Dim:
    rows = dim(1)
    for size in type_.shape[:-1]:
        rows = rows * size
    return rows


def _fixed_width(query: Query) -> str | None:
    shape = query.tensor(0).shape
    return None if shape and shape[-1].is_static else f"{query.tensor(0)}"


# Commands hold the width of a row as a number; only how many rows there are may vary.
FIXED_WIDTH = Constraint("rows of a fixed width", _fixed_width)


# --- embeddings and rows -----------------------------------------------------------------------


def _embeddings() -> list[Kernel]:
    made = []
    gather = Efficiency(0.5, 0.5, "f32", _SOURCE)
    for name in ("f32", "f16", "bf16"):
        made.append(
            Kernel(
                f"cpu.embedding_{name}",
                "embedding",
                "cpu",
                (CPU, dtype(0, "i32"), dtype(1, name), attr_is("dtype", "f32")),
                efficiency=gather,
                binder=CpuBinder(emitters.embedding(f"embedding_{name}")),
            )
        )
    for format_ in ("i8/32:f16", "i8/32:f32", "u4/32:f16+f16", "i4/32:f16", "u4/32:f32+f32"):
        packing = layouts.layout_for(parse_dtype(format_))
        requires = (
            CPU, dtype(0, "i32"), dtype(1, format_), weight_operand(1), attr_is("dtype", "f32"),
        )  # fmt: skip
        short = packing.removeprefix("cpu.").removesuffix("_n16")
        made.append(
            Kernel(
                f"cpu.embedding_{short}",
                "embedding",
                "cpu",
                requires,
                # The packing of the linears, so that a tied table is held once.
                layouts={1: packing},
                efficiency=gather,
                binder=CpuBinder(emitters.embedding_block),
            )
        )
    return made


def _rows() -> list[Kernel]:
    def row(name: str, op: str, emit: Callable[[CpuCall], None], *requires: Constraint) -> Kernel:
        return Kernel(
            f"cpu.{name}",
            op,
            "cpu",
            (CPU, *requires, FIXED_WIDTH, dense()),
            efficiency=_STREAM,
            binder=CpuBinder(emit),
        )

    return [
        row("rms_norm", "rms_norm", emitters.rms_norm, *f32(0, 1)),
        row("add_rms_norm", "add_rms_norm", emitters.add_rms_norm, *f32(0, 1, 2)),
        row("layer_norm", "layer_norm", emitters.layer_norm, operand_count(2, 3), *f32(0, 1, 2)),
        row("softmax", "softmax", emitters.softmax, *f32(0), attr_is("dim", -1)),
        row("gather", "gather", emitters.gather, dtype(0, "f32", "i32"), dtype(1, "i32")),
    ]


# --- experts -----------------------------------------------------------------------------------


def _scores_first(query: Query) -> str | None:
    ops = query.op.body.ops if query.op.body else ()
    names = [o.name for o in ops]
    shapes = (["topk"], ["topk", "sum", "div"])
    if names[:1] in (["softmax"], ["sigmoid"]) and names[1:] in shapes:
        return None
    return ", ".join(names)


SCORES_FIRST = Constraint("softmax or sigmoid, topk and no more than a division", _scores_first)


def _experts() -> list[Kernel]:
    made = [
        Kernel(
            "cpu.topk",
            "topk",
            "cpu",
            (CPU, *f32(0), FIXED_WIDTH, dense(0)),
            efficiency=_STREAM,
            binder=CpuBinder(emitters.topk),
        ),
        Kernel(
            "cpu.route_experts",
            "route_experts",
            "cpu",
            (CPU, *f32(0), SCORES_FIRST, FIXED_WIDTH, dense(0)),
            efficiency=_STREAM,
            binder=CpuBinder(emitters.route_experts),
        ),
        Kernel(
            "cpu.route",
            "route",
            "cpu",
            (CPU, dtype(0, "i32", "i64"), dtype(1, "i32"), dtype(2, "i32"), FIXED_WIDTH, dense()),
            efficiency=_STREAM,
            binder=CpuBinder(emitters.route),
        ),
    ]
    for function, format_, compute in (
        ("experts_f32", "f32", 0.85),
        ("experts_bf16", "bf16", 0.8),
        ("experts_w8", "i8/32:f16", 0.55),
        ("experts_w8", "i8/32:f32", 0.55),
        ("experts_w4", "u4/32:f16+f16", 0.5),
        ("experts_w4", "i4/32:f16", 0.5),
        ("experts_w4", "u4/32:f32+f32", 0.5),
    ):
        weights = tuple(c for i in (3, 4, 5) for c in (dtype(i, format_), weight_operand(i)))
        packing = layouts.layout_for(parse_dtype(format_))
        made.append(
            Kernel(
                f"cpu.{function}{_SUFFIX.get(format_, '')}",
                "experts",
                "cpu",
                (CPU, *f32(0, 2), dtype(1, "i32", "i64"), *weights, dense(0, 1, 2)),
                layouts={3: packing, 4: packing, 5: packing},
                efficiency=Efficiency(0.8, compute, "f32", _SOURCE),
                workspace=_experts_bytes,
                launches=7,
                binder=CpuBinder(emitters.experts(function)),
            )
        )
    return made


def _experts_bytes(query: Query) -> int:
    """Scratch for rows in the order of experts, and what is made of them."""
    ids, gate = query.tensor(1), query.tensor(3)
    num, inner, width = (n.static for n in gate.shape)
    pairs = query.upper(ids.shape[0]) * ids.shape[1].static
    return sum(emitters.experts_parts(pairs, num, width, inner))


# --- attention ---------------------------------------------------------------------------------


def _caches_f32(operand: int) -> Constraint:
    def check(query: Query) -> str | None:
        state = query.op.operands[operand].state
        types = {str(t.dtype) for _, t in state.fields}
        return None if types == {"f32"} else ", ".join(sorted(types))

    return Constraint("cached keys and values are f32", check)


def _half_split(query: Query) -> str | None:
    body = query.op.body
    ropes = [o for o in body.ops if o.name == "rope"] if body else [query.op]
    bad = [o for o in ropes if attr_value(o, "interleaved")]
    return "interleaved pairs" if bad else None


HALF_SPLIT = Constraint("half-split rotary pairs", _half_split)


def _equal_widths(query: Query) -> str | None:
    state = query.op.operands[1].state
    k, v = state.field_type("k"), state.field_type("v")
    return None if k.shape == v.shape else f"k {k}, v {v}"


def _attention() -> list[Kernel]:
    arithmetic = Efficiency(0.6, 0.5, "f32", _SOURCE)
    pages = page_size_in(1, 1, 2, 4, 8, 16, 32, 64, 128)
    fused = (CPU, *f32(0), HALF_SPLIT, dense(0))
    return [
        Kernel(
            "cpu.attention_paged",
            "attention",
            "cpu",
            (
                CPU,
                *f32(0),
                _caches_f32(1),
                pages,
                dense(0),
                Constraint("keys and values of one shape", _equal_widths),
            ),
            efficiency=arithmetic,
            binder=CpuBinder(emitters.attention),
        ),
        Kernel(
            "cpu.rope_kv_write",
            "rope_kv_write",
            "cpu",
            (*fused, _caches_f32(2)),
            efficiency=_STREAM,
            binder=CpuBinder(emitters.rope_kv_write),
        ),
        Kernel(
            "cpu.qk_norm_rope_kv_write",
            "qk_norm_rope_kv_write",
            "cpu",
            (*fused, _caches_f32(4)),
            efficiency=_STREAM,
            binder=CpuBinder(emitters.qk_norm_rope_kv_write),
        ),
        Kernel(
            "cpu.rope",
            "rope",
            "cpu",
            (*fused, dtype(1, "i32"), _three_dims(0)),
            efficiency=_STREAM,
            binder=CpuBinder(emitters.rope),
        ),
        Kernel(
            "cpu.kv_write",
            "kv_write",
            "cpu",
            (CPU, *f32(1, 2), _caches_f32(0), dense(1, 2)),
            efficiency=_STREAM,
            binder=CpuBinder(emitters.kv_write),
        ),
    ]


def _three_dims(operand: int) -> Constraint:
    def check(query: Query) -> str | None:
        rank = query.tensor(operand).rank
        return None if rank == 3 else f"rank {rank}"

    return Constraint("tokens, heads, width", check)


# --- pointwise ---------------------------------------------------------------------------------


def _same_or_row(query: Query) -> str | None:
    x, z = query.tensor(0), query.tensor(1)
    if x.shape == z.shape or z.shape == x.shape[-1:]:
        return None
    return f"{x} and {z}"


def _pointwise() -> list[Kernel]:
    made = []
    for function, op, requires in (
        ("silu", "silu", ()),
        ("exp", "exp", ()),
        ("gelu_erf", "gelu", (attr_is("approximate", "none"),)),
        ("gelu_tanh", "gelu", (attr_is("approximate", "tanh"),)),
        ("silu_mul", "silu_mul_halves", ()),
        ("gelu_erf_mul", "gelu_mul_halves", (_gelu_of_body("none"),)),
        ("gelu_tanh_mul", "gelu_mul_halves", (_gelu_of_body("tanh"),)),
    ):
        made.append(
            Kernel(
                f"cpu.{function}",
                op,
                "cpu",
                (CPU, *f32(0), *requires, FIXED_WIDTH, dense(0)),
                efficiency=_STREAM,
                binder=CpuBinder(emitters.unary(function)),
            )
        )
    shapes = Constraint("equal shapes, or one row for all", _same_or_row)
    for function in ("add", "mul"):
        made.append(
            Kernel(
                f"cpu.{function}",
                function,
                "cpu",
                (CPU, *f32(0, 1), FIXED_WIDTH, shapes, dense(0, 1)),
                efficiency=_STREAM,
                binder=CpuBinder(emitters.binary(function)),
            )
        )
    return made


def _gelu_of_body(approximate: str) -> Constraint:
    def check(query: Query) -> str | None:
        body = query.op.body
        inner = [o for o in body.ops if o.name in ("gelu", "gelu_mul")] if body else []
        if not inner:
            raise TypeMismatch("a gelu_mul_halves group without a gelu in its body")
        found = attr_value(inner[0], "approximate")
        return None if found == approximate else str(found)

    return Constraint(f"approximate is {approximate}", check)
