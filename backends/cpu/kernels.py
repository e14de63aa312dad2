"""What every C++ kernel takes, as data: the builder checks calls against this table.

Conventions: activations are float32 rows; strides count elements; a name that ends in ``?`` is a
pointer that may be 0 (absent). Quantized activations are three arrays over blocks of 32 along the
row, the last block padded with zero codes: codes i8 [rows, 32 G], scales f32 [rows, G], sums of
codes i32 [rows, G] with G = ceil(width / 32). Indices, positions, slots, starts, lengths, pages and
tokens are i32. Weights are blobs made by ``layouts.pack``.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Signature:
    """Names of a kernel's arguments, in order.

    Attributes:
        pointers: addresses; a trailing ``?`` marks one that may be 0.
        ints: integers, each a literal or affine in one dim of the run.
        floats: literals.
        formats: values that the int named ``format`` may take; empty where there is none.
        doc: one line saying what is computed.
    """

    pointers: tuple[str, ...]
    ints: tuple[str, ...]
    floats: tuple[str, ...]
    doc: str
    formats: tuple[int, ...] = ()


# Block formats of weights by the number that kernels take (formats.h: FormatId).
FORMATS: dict[str, int] = {
    "i8/32:f16": 0,
    "i8/32:f32": 1,
    "u4/32:f16+f16": 2,
    "i4/32:f16": 3,
    "u4/32:f32+f32": 4,
}


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _kernel(
    pointers: str, ints: str, floats: str, doc: str, formats: tuple[int, ...] = ()
) -> Signature:
    return Signature(_names(pointers), _names(ints), _names(floats), doc, formats)


_UNARY = "rows width x_stride y_stride"
_BINARY = "rows width x_stride z_stride y_stride"
_LINEAR = "M N K y_stride residual_stride"
_EXPERTS = "E N K y_stride x_stride"
_CODES = "codes? scales? sums?"
_EIGHT, _FOUR = (0, 1), (2, 3, 4)

KERNELS: dict[str, Signature] = {
    # Moving rows.
    "copy_rows": _kernel("y x", _UNARY, "", "y = x, elements of 4 bytes"),
    "gather_rows": _kernel(
        "y x index", _UNARY, "", "y[t] = x[index[t]], elements of 4 bytes; index < 0: zeros"
    ),
    "embedding_f32": _kernel(
        "y table tokens", "rows width", "factor", "y[t] = factor table[tokens[t]]; token < 0: zeros"
    ),
    "embedding_f16": _kernel("y table tokens", "rows width", "factor", "the same from f16"),
    "embedding_bf16": _kernel("y table tokens", "rows width", "factor", "the same from bf16"),
    "embedding_block": _kernel(
        "y table tokens",
        "rows width format panel_rows",
        "factor",
        "the same from a blob packed as _n1 (panel_rows 1) or _n16 (16: shared with a linear)",
        (0, 1, 2, 3, 4),
    ),
    # Normalisation, with an int8 form of the result where codes, scales, sums are given.
    "rms_norm": _kernel(
        f"y? x weight {_CODES}",
        _UNARY,
        "eps weight_shift",
        "y = x / rms(x) (weight + weight_shift)",
    ),
    "add_rms_norm": _kernel(
        f"sum y? x residual weight {_CODES}",
        "rows width",
        "eps weight_shift",
        "sum = x + residual; y = rms_norm(sum); all rows contiguous; sum may be x or residual",
    ),
    "layer_norm": _kernel(
        f"y? x weight bias? {_CODES}", _UNARY, "eps", "y = (x - mean) / std weight + bias"
    ),
    "quantize_rows_i8": _kernel(
        "codes scales sums x",
        "rows width x_stride",
        "",
        "scale = max|x| / 127, code = round(x 127 / max|x|) of each 32; sums of codes",
    ),
    # Linears: y [M, N] = x [M, K] W [N, K]^T + bias + residual; residual may be y.
    "linear_f32": _kernel("y weight bias? residual? x", f"{_LINEAR} x_stride", "", "f32 weights"),
    "linear_f16": _kernel("y weight bias? residual? x", f"{_LINEAR} x_stride", "", "f16 weights"),
    "linear_bf16": _kernel("y weight bias? residual? x", f"{_LINEAR} x_stride", "", "bf16 weights"),
    "linear_w8": _kernel(
        "y weight bias? residual? x",
        f"{_LINEAR} x_stride format",
        "",
        "8-bit block weights, f32 activations",
        _EIGHT,
    ),
    "linear_w4": _kernel(
        "y weight bias? residual? x",
        f"{_LINEAR} x_stride format",
        "",
        "4-bit block weights, f32 activations",
        _FOUR,
    ),
    "linear_w8a8": _kernel(
        "y weight bias? residual? codes scales sums",
        f"{_LINEAR} format",
        "",
        "8-bit block weights, quantized activations",
        _EIGHT,
    ),
    "linear_w4a8": _kernel(
        "y weight bias? residual? codes scales sums",
        f"{_LINEAR} format",
        "",
        "4-bit block weights, quantized activations",
        _FOUR,
    ),
    # Experts: rows in the order of experts times their expert's weights; groups is i32 [2 E + 2]
    # (experts.h). Weights are the experts' blobs one behind the other.
    "topk_rows": _kernel(
        "values index x",
        "rows width k x_stride",
        "",
        "the k largest of each row, descending, and where they were (i64); ties to the lower",
    ),
    "route_rows": _kernel(
        "shares index x",
        "rows width k x_stride is_sigmoid is_normed",
        "",
        "the k best of each row's softmax or sigmoid, and where they were (i64); normed: of sum 1",
    ),
    "route_slots": _kernel(
        "slots ids table replicas",
        "rows k E M is_wide",
        "",
        "slot of each choice, table[e, t mod replicas[e]]; -1 where the id is none of E",
    ),
    "experts_sort": _kernel(
        "from place groups ids",
        "pairs k E is_wide",
        "",
        "token of each row, -1 past the last; row of each pair, -1 where its id is none of E",
    ),
    "experts_f32": _kernel("y weight groups x", _EXPERTS, "", "f32 weights"),
    "experts_bf16": _kernel("y weight groups x", _EXPERTS, "", "bf16 weights"),
    "experts_w8": _kernel(
        "y weight groups x", f"{_EXPERTS} format", "", "8-bit block weights", _EIGHT
    ),
    "experts_w4": _kernel(
        "y weight groups x", f"{_EXPERTS} format", "", "4-bit block weights", _FOUR
    ),
    "experts_sum": _kernel(
        "y rows place shares", "T k width", "", "y[t] = sum of share[t, k] rows[place[t, k]]"
    ),
    # Positions and the paged cache: caches f32 [slots, Hkv, D]; slot < 0 (a padded row) is skipped.
    "rope_kv_write": _kernel(
        "q_out k_cache v_cache qkv cosine sine positions slots q_norm? k_norm?",
        "T H Hkv D qkv_stride q_out_stride rotary",
        "eps weight_shift",
        "half-split RoPE of q and k (after RMS norms of heads), k and v into the caches;"
        " tables f32 [positions, rotary / 2]",
    ),
    "rope": _kernel(
        "y x cosine sine positions",
        "T H D x_stride y_stride rotary",
        "",
        "half-split RoPE; y may be x; position < 0: zeros",
    ),
    "kv_write": _kernel(
        "k_cache v_cache k v slots", "T width k_stride v_stride", "", "rows into the caches"
    ),
    "attention_paged": _kernel(
        "out q k_cache v_cache starts lengths pages",
        "T B H Hkv D P page_size window q_stride out_stride",
        "scale softcap",
        "causal attention of each sequence's last tokens; window 0, softcap 0: none;"
        " starts [B + 1], lengths [B] after this step, pages [B, P]; other rows of out are zeroed",
    ),
    # Pointwise and row-wise.
    "silu": _kernel("y x", _UNARY, "", "x sigmoid(x)"),
    "gelu_tanh": _kernel("y x", _UNARY, "", "GELU by tanh"),
    "gelu_erf": _kernel("y x", _UNARY, "", "GELU by erf"),
    "exp": _kernel("y x", _UNARY, "", "e^x"),
    "scale": _kernel("y x", _UNARY, "factor", "factor x"),
    "add": _kernel("y x z", _BINARY, "", "x + z; z_stride 0: one row for all"),
    "mul": _kernel("y x z", _BINARY, "", "x z; z_stride 0: one row for all"),
    "silu_mul": _kernel(f"y? x {_CODES}", _UNARY, "", "silu(x[:, :F]) x[:, F:], width F"),
    "gelu_tanh_mul": _kernel(f"y? x {_CODES}", _UNARY, "", "the same with GELU by tanh"),
    "gelu_erf_mul": _kernel(f"y? x {_CODES}", _UNARY, "", "the same with GELU by erf"),
    "softmax_rows": _kernel("y x", _UNARY, "", "softmax of each row; y may be x"),
    "argmax_rows": _kernel(
        "index x", "rows width x_stride", "", "index of the largest, ties to the lower"
    ),
}
