"""Emitters of the C++ kernels: operands, sizes and scratch space of each as command arguments."""

from collections.abc import Callable, Mapping
from typing import Any

from metainfer.backends.cpu.emit import CpuCall
from metainfer.backends.cpu.kernels import FORMATS
from metainfer.ir.graph import Op
from metainfer.ir.ops.record import op_def

Emit = Callable[[CpuCall], None]
_BLOCK = 32
_ALIGN = 64


def quantized_bytes(rows: int, width: int) -> int:
    """Scratch of quantized activations: codes, scales, sums, each on a cache line."""
    codes, side = _quantized_parts(rows, width)
    return codes + 2 * side


def _quantized_parts(rows: int, width: int) -> tuple[int, int]:
    groups = -(-width // _BLOCK)
    return _aligned(rows * groups * _BLOCK), _aligned(rows * groups * 4)


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


# --- linears -----------------------------------------------------------------------------------


def linear(function: str) -> Emit:
    """y = x W^T (+ bias)."""
    return lambda call: _linear(call, function, bias=call.pointer(2), residual=0)


def linear_add(function: str) -> Emit:
    """y = x W^T (+ bias) + residual: the group (x, weight, residual[, bias]) of its rule."""
    return lambda call: _linear(call, function, bias=call.pointer(3), residual=call.pointer(2))


def _linear(call: CpuCall, function: str, *, bias: int, residual: int) -> None:
    x, weight = call.tensor(0), call.tensor(1)
    rows, (outs, width) = call.rows(x), (n.static for n in weight.shape)
    sizes: list[Any] = [rows, outs, width, outs, outs if residual else 0]
    pointers = [call.result(0), call.pointer(1), bias, residual]
    if function in FORMAT_FREE:
        call.builder.add(function, [*pointers, call.pointer(0)], [*sizes, width], [])
        return
    format_ = FORMATS[str(weight.dtype)]
    if not function.endswith("a8"):
        call.builder.add(function, [*pointers, call.pointer(0)], [*sizes, width, format_], [])
        return
    codes_bytes, side_bytes = _quantized_parts(call.max_rows(x), width)
    codes = call.workspace
    scales, sums = codes + codes_bytes, codes + codes_bytes + side_bytes
    quantized = [codes, scales, sums]
    call.builder.add("quantize_rows_i8", [*quantized, call.pointer(0)], [rows, width, width], [])
    call.builder.add(function, [*pointers, *quantized], [*sizes, format_], [])


FORMAT_FREE = frozenset({"linear_f32", "linear_f16", "linear_bf16"})


# --- rows --------------------------------------------------------------------------------------


def embedding(function: str) -> Emit:
    """Rows of a plain table."""

    def emit(call: CpuCall) -> None:
        rows = call.rows(call.tensor(0), 0)
        width = call.tensor(1).shape[1].static
        pointers = [call.result(0), call.pointer(1), call.pointer(0)]
        call.builder.add(function, pointers, [rows, width], [1.0])

    return emit


def embedding_block(call: CpuCall) -> None:
    """Rows of a table in a block format, packed in panels of 16."""
    table = call.tensor(1)
    rows, width = call.rows(call.tensor(0), 0), table.shape[1].static
    pointers = [call.result(0), call.pointer(1), call.pointer(0)]
    ints = [rows, width, FORMATS[str(table.dtype)], 16]
    call.builder.add("embedding_block", pointers, ints, [1.0])


def gather(call: CpuCall) -> None:
    """Rows of 4-byte elements by index."""
    x, index = call.tensor(0), call.tensor(1)
    width = call.width(x, x.rank - 1)
    pointers = [call.result(0), call.pointer(0), call.pointer(1)]
    call.builder.add("gather_rows", pointers, [call.rows(index, 0), width, width, width], [])


def rms_norm(call: CpuCall) -> None:
    """RMS norm of rows."""
    x = call.tensor(0)
    width = x.shape[-1].static
    pointers = [call.result(0), call.pointer(0), call.pointer(1), 0, 0, 0]
    ints = [call.rows(x), width, width, width]
    call.builder.add("rms_norm", pointers, ints, [float(call.attrs["eps"]), 0.0])


def add_rms_norm(call: CpuCall) -> None:
    """Residual add, then RMS norm; results (sum, normed)."""
    x = call.tensor(0)
    eps = _attr_of_body(call.op, "rms_norm", "eps")
    pointers = [
        call.result(0), call.result(1), call.pointer(0), call.pointer(1), call.pointer(2), 0, 0, 0,
    ]  # fmt: skip
    call.builder.add("add_rms_norm", pointers, [call.rows(x), x.shape[-1].static], [eps, 0.0])


def layer_norm(call: CpuCall) -> None:
    """Layer norm of rows."""
    x = call.tensor(0)
    width = x.shape[-1].static
    pointers = [call.result(0), call.pointer(0), call.pointer(1), call.pointer(2), 0, 0, 0]
    ints = [call.rows(x), width, width, width]
    call.builder.add("layer_norm", pointers, ints, [float(call.attrs["eps"])])


def softmax(call: CpuCall) -> None:
    """Softmax of rows."""
    unary("softmax_rows")(call)


def unary(function: str) -> Emit:
    """One row in, one row out; the input may be wider (gate and up side by side)."""

    def emit(call: CpuCall) -> None:
        x, y = call.tensor(0), call.op.results[0].tensor
        wide, width = x.shape[-1].static, y.shape[-1].static
        gated = function.endswith("_mul")
        pointers = [call.result(0), call.pointer(0), *([0, 0, 0] if gated else [])]
        call.builder.add(function, pointers, [call.rows(x), width, wide, width], [])

    return emit


def binary(function: str) -> Emit:
    """Two operands of equal shape, or a second one that is a single row."""

    def emit(call: CpuCall) -> None:
        x, z = call.tensor(0), call.tensor(1)
        width = x.shape[-1].static
        z_stride = width if z.shape == x.shape else 0
        pointers = [call.result(0), call.pointer(0), call.pointer(1)]
        call.builder.add(function, pointers, [call.rows(x), width, width, z_stride, width], [])

    return emit


# --- experts -----------------------------------------------------------------------------------


def topk(call: CpuCall) -> None:
    """The largest of each row and their indices."""
    x = call.tensor(0)
    width = x.shape[-1].static
    pointers = [call.result(0), call.result(1), call.pointer(0)]
    call.builder.add("topk_rows", pointers, [call.rows(x), width, int(call.attrs["k"]), width], [])


def route_experts(call: CpuCall) -> None:
    """The best scores of each row: the group (x) -> (shares, ids) of its rules."""
    x, names = call.tensor(0), {o.name for o in call.op.body.ops} if call.op.body else set()
    width, k = x.shape[-1].static, call.op.results[0].tensor.shape[-1].static
    pointers = [call.result(0), call.result(1), call.pointer(0)]
    how = [int("sigmoid" in names), int("sum" in names)]
    call.builder.add("route_rows", pointers, [call.rows(x), width, k, width, *how], [])


def route(call: CpuCall) -> None:
    """The slot of each choice: (ids, table, replicas)."""
    ids, (experts, most) = call.tensor(0), (n.static for n in call.tensor(1).shape)
    pointers = [call.result(0), *(call.pointer(i) for i in range(3))]
    sizes = [ids.shape[1].static, experts, most, int(str(ids.dtype) == "i64")]
    call.builder.add("route_slots", pointers, [call.rows(ids), *sizes], [])


def experts_parts(pairs: int, num: int, width: int, inner: int) -> tuple[int, ...]:
    """Scratch of `experts`, in bytes: from, place, groups, rows, gate and up, their product."""
    ints = (pairs, pairs, 2 * num + 2)
    floats = (pairs * width, pairs * 2 * inner, pairs * inner)
    return tuple(_aligned(4 * n) for n in (*ints, *floats))


def experts(function: str) -> Emit:
    """Rows in the order of experts, three products, the weighted sum: (x, ids, shares, weights)."""

    def emit(call: CpuCall) -> None:
        x, ids, gate = call.tensor(0), call.tensor(1), call.tensor(3)
        num, inner, width = (n.static for n in gate.shape)
        chosen, pairs = ids.shape[1].static, call.rows(ids, 0)
        sizes = experts_parts(call.max_rows(ids) * chosen, num, width, inner)
        begins = [call.workspace + sum(sizes[:i]) for i in range(len(sizes))]
        source, place, groups, rows, both, hidden = begins
        add = call.builder.add
        is_wide = int(str(ids.dtype) == "i64")
        add("experts_sort", [source, place, groups, call.pointer(1)], [pairs, chosen, num, is_wide])
        add("gather_rows", [rows, call.pointer(0), source], [pairs, width, width, width])

        def product(y: int, weight: int, a: int, outs: int, ins: int, stride: int) -> None:
            dtype = str(call.tensor(weight).dtype)
            format_ = [FORMATS[dtype]] if dtype in FORMATS else []
            ints = [num, outs, ins, stride, ins, *format_]
            add(function, [y, call.pointer(weight), groups, a], ints)

        product(both, 3, rows, inner, width, 2 * inner)
        product(both + 4 * inner, 4, rows, inner, width, 2 * inner)
        gated = "silu_mul" if call.attrs["activation"] == "silu" else "gelu_tanh_mul"
        add(gated, [hidden, both, 0, 0, 0], [pairs, inner, 2 * inner, inner])
        # Their rows are read: the results take their place.
        product(rows, 5, hidden, width, inner, width)
        pointers = [call.result(0), rows, place, call.pointer(2)]
        add("experts_sum", pointers, [call.rows(x), chosen, width])

    return emit


# --- attention ---------------------------------------------------------------------------------


def rope(call: CpuCall) -> None:
    """Rotate heads [T, H, D] by position."""
    x = call.tensor(0)
    heads, depth = (n.static for n in x.shape[1:])
    rotary = int(call.attrs["width"]) or depth
    tables = call.rope(call.attrs, rotary)
    pointers = [call.result(0), call.pointer(0), *tables, call.pointer(1)]
    stride = heads * depth
    ints = [call.rows(x, 2), heads, depth, stride, stride, rotary]
    call.builder.add("rope", pointers, ints, [])


def kv_write(call: CpuCall) -> None:
    """Keys and values into their slots: (state, k, v, slots)."""
    k = call.tensor(1)
    width = call.width(k, 2)
    caches = [call.pointer(0, "k"), call.pointer(0, "v")]
    pointers = [*caches, call.pointer(1), call.pointer(2), call.pointer(3)]
    call.builder.add("kv_write", pointers, [call.rows(k, 2), width, width, width], [])


def rope_kv_write(call: CpuCall) -> None:
    """The group (qkv, positions, state, slots) -> (q, state)."""
    _rope_kv_write(call, state=2, slots=3, norms=(0, 0), eps=0.0)


def qk_norm_rope_kv_write(call: CpuCall) -> None:
    """The group (qkv, q_norm, k_norm, positions, state, slots) -> (q, state)."""
    eps = _attr_of_body(call.op, "rms_norm", "eps")
    norms = (call.pointer(1), call.pointer(2))
    _rope_kv_write(call, state=4, slots=5, norms=norms, eps=eps)


def _rope_kv_write(
    call: CpuCall, *, state: int, slots: int, norms: tuple[int, int], eps: float
) -> None:
    qkv, q = call.tensor(0), call.op.results[0].tensor
    heads, depth = (n.static for n in q.shape[-2:])
    kv_heads = call.op.operands[state].state.field_type("k").shape[0].static
    attrs = _attrs_of_body(call.op, "rope")
    rotary = int(attrs["width"]) or depth
    tables = call.rope(attrs, rotary)
    caches = [call.pointer(state, "k"), call.pointer(state, "v")]
    pointers = [
        call.result(0), *caches, call.pointer(0), *tables,
        call.pointer(state - 1), call.pointer(slots), *norms,
    ]  # fmt: skip
    ints = [
        call.rows(qkv), heads, kv_heads, depth, qkv.shape[-1].static, heads * depth, rotary,
    ]  # fmt: skip
    call.builder.add("rope_kv_write", pointers, ints, [eps, 0.0])


def attention(call: CpuCall) -> None:
    """Paged attention: (q, state, starts, lengths, pages)."""
    q, state = call.tensor(0), call.op.operands[1].state
    heads, depth = (n.static for n in q.shape[1:])
    kv_heads = state.field_type("k").shape[0].static
    pages = call.tensor(4)
    caches = [call.pointer(1, "k"), call.pointer(1, "v")]
    pointers = [call.result(0), call.pointer(0), *caches, *(call.pointer(i) for i in (2, 3, 4))]
    width = heads * depth
    sequences, columns = (call.dims.argument(n) for n in pages.shape)
    ints = [
        call.rows(q, 2), sequences, heads, kv_heads, depth, columns, state.page_size,
        int(call.attrs["window"]), width, width,
    ]  # fmt: skip
    scale = float(call.attrs["scale"]) or depth**-0.5
    call.builder.add("attention_paged", pointers, ints, [scale, float(call.attrs["softcap"])])


def _attrs_of_body(op: Op, name: str) -> Mapping[str, Any]:
    """Attributes of the first such op in a group's body, defaults filled in."""
    body = op.body
    assert body is not None
    inner = next(o for o in body.ops if o.name == name)
    return op_def(name).complete(inner.attr)


def _attr_of_body(op: Op, name: str, attr: str) -> float:
    return float(_attrs_of_body(op, name)[attr])
