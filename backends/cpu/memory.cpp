// Kernels that move rows: gathers, embeddings, rotary positions and writes into the paged cache.
#include <cmath>
#include <cstring>

#include "formats.h"
#include "runtime.h"

namespace mi {
namespace {

// pointers: y, x; ints: rows, width, x_stride, y_stride (in 4-byte elements).
void copy_rows(const Args& a, Context& ctx) {
    each_row(a, ctx, [&](i64 t) {
        std::memcpy(a.ptr<float>(0) + t * a.ints[3], a.ptr<const float>(1) + t * a.ints[2],
                    static_cast<size_t>(a.ints[1]) * 4);
    });
}

// y[t] = x[index[t]]. pointers: y, x, index (i32); ints: rows, width, x_stride, y_stride. A negative
// index gives zeros.
void gather_rows(const Args& a, Context& ctx) {
    const size_t bytes = static_cast<size_t>(a.ints[1]) * 4;
    each_row(a, ctx, [&](i64 t) {
        const i64 from = a.ptr<const int32_t>(2)[t];
        float* y = a.ptr<float>(0) + t * a.ints[3];
        if (from < 0) std::memset(y, 0, bytes);
        else std::memcpy(y, a.ptr<const float>(1) + from * a.ints[2], bytes);
    });
}

// Rows of a table by token. pointers: y, table, tokens (i32); ints: rows, width; floats: factor.
// A negative token (a padded row) gives zeros.
template <class Load>
inline void embed(const Args& a, Context& ctx, Load load) {
    const i64 width = a.ints[1];
    const f32x16 factor = set16(a.floats[0]);
    each_row(a, ctx, [&](i64 t) {
        float* y = a.ptr<float>(0) + t * width;
        const i64 token = a.ptr<const int32_t>(2)[t];
        if (token < 0) {
            std::memset(y, 0, static_cast<size_t>(width) * 4);
            return;
        }
        for (i64 i = 0; i < width; i += 16)
            store16_first(y + i, load(token * width + i, width - i) * factor, width - i);
    });
}

void embedding_f32(const Args& a, Context& ctx) {
    const float* table = a.ptr<const float>(1);
    embed(a, ctx, [&](i64 at, i64 n) { return load16_first(table + at, n); });
}
template <class Widen>
inline void embed_halves(const Args& a, Context& ctx, Widen widen) {
    const uint16_t* table = a.ptr<const uint16_t>(1);
    embed(a, ctx, [&](i64 at, i64 n) {
        uint16_t lanes[16] = {};
        std::memcpy(lanes, table + at, static_cast<size_t>(least(n, 16)) * 2);
        return widen(lanes);
    });
}
void embedding_f16(const Args& a, Context& ctx) { embed_halves(a, ctx, load16_f16); }
void embedding_bf16(const Args& a, Context& ctx) { embed_halves(a, ctx, load16_bf16); }

float scale_at(const uint8_t* block, i64 index, bool is_f16) {
    if (!is_f16) {
        float value;
        std::memcpy(&value, block + 4 * index, 4);
        return value;
    }
    uint16_t halves[16] = {};
    std::memcpy(halves, block + 2 * index, 2);
    float lanes[16];
    store16(lanes, load16_f16(halves));
    return lanes[0];
}

// One block of 32 elements of row r of a panel of n rows (formats.h; n = 1: a row-major table).
template <class F>
void dequantize_block(const uint8_t* block, i64 n, i64 r, float* out) {
    constexpr i64 scale_bytes = F::side_bytes / 16;
    const float scale = scale_at(block, r, scale_bytes == 2);
    const float offset = F::has_offset ? scale_at(block + n * scale_bytes, r, scale_bytes == 2) : 0.0f;
    const uint8_t* codes = block + n * scale_bytes * (F::has_offset ? 2 : 1);
    for (i64 k = 0; k < 32; ++k) {
        const i64 within = F::bits == 4 ? k % 16 : k;
        const uint8_t byte = codes[4 * (within / 4 * n + r) + within % 4];
        int code;
        if constexpr (F::bits == 8) code = static_cast<int8_t>(byte);
        else code = (k < 16 ? byte & 15 : byte >> 4) - F::zero;
        out[k] = static_cast<float>(code) * scale + offset;
    }
}

template <class F>
void embed_blocks(const Args& a, Context& ctx) {
    const i64 width = a.ints[1], n = a.ints[3], blocks = ceil_div(width, 32);
    const i64 block_bytes = F::block_bytes * n / 16;
    each_row(a, ctx, [&](i64 t) {
        const i64 token = a.ptr<const int32_t>(2)[t];
        const uint8_t* panel = a.ptr<const uint8_t>(1) + most(token, 0) / n * blocks * block_bytes;
        // A row of a panel is scattered over its lines: ask for all before using the first.
        for (i64 at = 0; at < blocks * block_bytes; at += 64) MI_PREFETCH(panel + at);
        for (i64 g = 0; g < blocks; ++g) {
            float values[32] = {};
            if (token >= 0) dequantize_block<F>(panel + g * block_bytes, n, token % n, values);
            float* y = a.ptr<float>(0) + t * width + g * 32;
            for (i64 i = 0; i < least(32, width - g * 32); ++i) y[i] = values[i] * a.floats[0];
        }
    });
}

// pointers: y, table, tokens; ints: rows, width, format, panel_rows (1, or 16: the same blob as a
// linear's weight, so that tied embeddings need no second copy); floats: factor.
void embedding_block(const Args& a, Context& ctx) {
    switch (a.ints[2]) {
        case kI8F16: return embed_blocks<I8F16>(a, ctx);
        case kI8F32: return embed_blocks<I8F32>(a, ctx);
        case kU4F16: return embed_blocks<U4F16>(a, ctx);
        case kI4F16: return embed_blocks<I4F16>(a, ctx);
        case kU4F32: return embed_blocks<U4F32>(a, ctx);
    }
}

// Half-split rotation of the first `rotary` of D elements; the others are copied. y may be x.
// Shapes: x, y [D]; cosine, sine [rotary / 2].
void rotate(const float* x, float* y, const float* cosine, const float* sine, i64 rotary, i64 D) {
    const i64 half = rotary / 2;
    i64 i = 0;
    for (; i + 16 <= half; i += 16) {
        const f32x16 first = load16(x + i), second = load16(x + half + i);
        const f32x16 c = load16(cosine + i), s = load16(sine + i);
        store16(y + i, first * c - second * s);
        store16(y + half + i, fma16(second, c, first * s));
    }
    for (; i < half; ++i) {
        const float first = x[i], second = x[half + i];
        y[i] = first * cosine[i] - second * sine[i];
        y[half + i] = second * cosine[i] + first * sine[i];
    }
    if (y != x) std::memcpy(y + rotary, x + rotary, static_cast<size_t>(D - rotary) * 4);
}

// y = x / rms(x) * (weight + shift). Shapes: [D].
void norm_head(const float* x, float* y, const float* weight, float eps, float shift, i64 D) {
    const float factor = 1.0f / std::sqrt(dot(x, x, D) / static_cast<float>(D) + eps);
    for (i64 i = 0; i < D; ++i) y[i] = x[i] * factor * (weight[i] + shift);
}

// pointers: q_out, k_cache, v_cache, qkv, cosine, sine, positions, slots, q_norm (0: none), k_norm
// (0: none); ints: T, H, Hkv, D, qkv_stride, q_out_stride, rotary; floats: eps, weight_shift.
// A row with slot < 0 is padding: nothing of it is read, its q is zero.
void rope_kv_write(const Args& a, Context& ctx) {
    const i64 T = a.ints[0], H = a.ints[1], kv_heads = a.ints[2], D = a.ints[3], rotary = a.ints[6];
    const i64 heads = H + 2 * kv_heads, half = rotary / 2;
    const float eps = a.floats[0], shift = a.floats[1];
    const size_t head_bytes = static_cast<size_t>(D) * 4;
    float* const normed = static_cast<float*>(ctx.scratch(head_bytes));
    const auto head = [&](i64 t, i64 h) {
        const i64 slot = a.ptr<const int32_t>(7)[t];
        float* const q_out = a.ptr<float>(0) + t * a.ints[5] + h * D;
        if (slot < 0) {
            if (h < H) std::memset(q_out, 0, head_bytes);
            return;
        }
        const float* x = a.ptr<const float>(3) + t * a.ints[4] + h * D;
        if (h >= H + kv_heads) {
            const i64 kv_head = h - H - kv_heads;
            std::memcpy(a.ptr<float>(2) + (slot * kv_heads + kv_head) * D, x, head_bytes);
            return;
        }
        const bool is_q = h < H;
        float* const y = is_q ? q_out : a.ptr<float>(1) + (slot * kv_heads + h - H) * D;
        if (const float* weight = a.ptr<const float>(is_q ? 8 : 9)) {
            norm_head(x, normed, weight, eps, shift, D);
            x = normed;
        }
        const i64 row = a.ptr<const int32_t>(6)[t] * half;
        rotate(x, y, a.ptr<const float>(4) + row, a.ptr<const float>(5) + row, rotary, D);
    };
    ctx.share(T * heads, heads, [&](i64 begin, i64 end) {
        for (i64 at = begin; at < end; ++at) head(at / heads, at % heads);
    });
}

// pointers: y, x, cosine, sine, positions; ints: T, H, D, x_stride, y_stride, rotary. y may be x. A row
// with a negative position is padding: zeros.
void rope(const Args& a, Context& ctx) {
    const i64 H = a.ints[1], D = a.ints[2], half = a.ints[5] / 2;
    each_row(a, ctx, [&](i64 t) {
        const i64 position = a.ptr<const int32_t>(4)[t];
        for (i64 h = 0; h < H; ++h) {
            float* y = a.ptr<float>(0) + t * a.ints[4] + h * D;
            const float* x = a.ptr<const float>(1) + t * a.ints[3] + h * D;
            const float *c = a.ptr<const float>(2), *s = a.ptr<const float>(3);
            if (position < 0) std::memset(y, 0, static_cast<size_t>(D) * 4);
            else rotate(x, y, c + position * half, s + position * half, a.ints[5], D);
        }
    });
}

// pointers: k_cache, v_cache, k, v, slots; ints: T, width (Hkv * D), k_stride, v_stride.
void kv_write(const Args& a, Context& ctx) {
    const i64 width = a.ints[1];
    each_row(a, ctx, [&](i64 t) {
        const i64 slot = a.ptr<const int32_t>(4)[t];
        if (slot < 0) return;
        const size_t bytes = static_cast<size_t>(width) * 4;
        std::memcpy(a.ptr<float>(0) + slot * width, a.ptr<const float>(2) + t * a.ints[2], bytes);
        std::memcpy(a.ptr<float>(1) + slot * width, a.ptr<const float>(3) + t * a.ints[3], bytes);
    });
}

}  // namespace

const KernelEntry kMemoryKernels[] = {
    {"copy_rows", copy_rows, Share::kRows},
    {"gather_rows", gather_rows, Share::kRows},
    {"embedding_f32", embedding_f32, Share::kRows},
    {"embedding_f16", embedding_f16, Share::kRows},
    {"embedding_bf16", embedding_bf16, Share::kRows},
    {"embedding_block", embedding_block, Share::kRows},
    {"rope_kv_write", rope_kv_write, Share::kRows},
    {"rope", rope, Share::kRows},
    {"kv_write", kv_write, Share::kRows},
    {nullptr, nullptr},
};

}  // namespace mi
