// Pointwise kernels, softmax and argmax over rows.
#include <cmath>
#include <limits>

#include "quantize.h"
#include "runtime.h"

namespace mi {
namespace {

// Blocks of 32 worth telling another thread about.
constexpr i64 kGrain = 16;

// Call visit(row, first, last) over this thread's share of rows x width, cut at multiples of 32.
template <class Visit>
MI_INLINE void each_span(Context& ctx, i64 rows, i64 width, Visit visit) {
    const i64 blocks = ceil_div(width, 32);
    ctx.share(rows * blocks, kGrain, [&](i64 at, i64 end) {
        while (at < end) {
            const i64 row = at / blocks, first = at % blocks;
            const i64 last = least(blocks, first + end - at);
            visit(row, first * 32, least(last * 32, width));
            at += last - first;
        }
    });
}

// y[i] = op(x[i]) on [first, last), 16 at a time; op works on lanes.
template <class Op>
MI_INLINE void map_span(float* y, i64 first, i64 last, Op op) {
    for (i64 i = first; i < last; i += 16) store16_first(y + i, op(i, last - i), last - i);
}

// pointers: y, x; ints: rows, width, x_stride, y_stride.
template <class Op>
MI_INLINE void unary(const Args& a, Context& ctx, Op op) {
    each_span(ctx, a.ints[0], a.ints[1], [&](i64 row, i64 first, i64 last) {
        const float* x = a.ptr<const float>(1) + row * a.ints[2];
        map_span(a.ptr<float>(0) + row * a.ints[3], first, last,
                 [&](i64 i, i64 n) { return op(load16_first(x + i, n)); });
    });
}

// pointers: y, x, z; ints: rows, width, x_stride, z_stride, y_stride (z_stride 0: one row for all).
template <class Op>
MI_INLINE void binary(const Args& a, Context& ctx, Op op) {
    each_span(ctx, a.ints[0], a.ints[1], [&](i64 row, i64 first, i64 last) {
        const float* x = a.ptr<const float>(1) + row * a.ints[2];
        const float* z = a.ptr<const float>(2) + row * a.ints[3];
        map_span(a.ptr<float>(0) + row * a.ints[4], first, last, [&](i64 i, i64 n) {
            return op(load16_first(x + i, n), load16_first(z + i, n));
        });
    });
}

// Gated activation: y = op(gate) * up with x = [gate, up]. pointers: y (0: only codes), x, codes,
// scales, sums; ints: rows, width (of y), x_stride, y_stride.
template <class Op>
MI_INLINE void gated(const Args& a, Context& ctx, Op op) {
    const i64 width = a.ints[1];
    const QuantizedRows q(a.ptr<int8_t>(2), a.ptr<float>(3), a.ptr<int32_t>(4), width);
    float* const y = a.ptr<float>(0);
    each_span(ctx, a.ints[0], width, [&](i64 row, i64 first, i64 last) {
        const float* gate = a.ptr<const float>(1) + row * a.ints[2];
        const float* up = gate + width;
        for (i64 i = first; i < last; i += 32) {
            f32x16 half[2] = {set16(0.0f), set16(0.0f)};
            for (int h = 0; h < 2 && i + 16 * h < last; ++h) {
                const i64 at = i + 16 * h, n = last - at;
                half[h] = op(load16_first(gate + at, n)) * load16_first(up + at, n);
                if (y) store16_first(y + row * a.ints[3] + at, half[h], n);
            }
            if (q.wanted()) q.block(row, i / 32, half[0], half[1]);
        }
    });
}

// Lambdas, as a pointer to a function would not be inlined.
void silu(const Args& a, Context& ctx) {
    unary(a, ctx, [](f32x16 x) { return silu16(x); });
}
void gelu_tanh(const Args& a, Context& ctx) {
    unary(a, ctx, [](f32x16 x) { return gelu_tanh16(x); });
}
void gelu_erf(const Args& a, Context& ctx) {
    unary(a, ctx, [](f32x16 x) { return gelu_erf16(x); });
}
void exp_rows(const Args& a, Context& ctx) {
    unary(a, ctx, [](f32x16 x) { return exp16(x); });
}
// floats: factor.
void scale(const Args& a, Context& ctx) {
    const f32x16 factor = set16(a.floats[0]);
    unary(a, ctx, [&](f32x16 x) { return x * factor; });
}
void add(const Args& a, Context& ctx) {
    binary(a, ctx, [](f32x16 x, f32x16 z) { return x + z; });
}
void mul(const Args& a, Context& ctx) {
    binary(a, ctx, [](f32x16 x, f32x16 z) { return x * z; });
}
void silu_mul(const Args& a, Context& ctx) {
    gated(a, ctx, [](f32x16 x) { return silu16(x); });
}
void gelu_tanh_mul(const Args& a, Context& ctx) {
    gated(a, ctx, [](f32x16 x) { return gelu_tanh16(x); });
}
void gelu_erf_mul(const Args& a, Context& ctx) {
    gated(a, ctx, [](f32x16 x) { return gelu_erf16(x); });
}

// pointers: y, x; ints: rows, width, x_stride, y_stride. y may be x. A row of -inf gives NaN.
void softmax_rows(const Args& a, Context& ctx) {
    const i64 width = a.ints[1];
    const float lowest = -std::numeric_limits<float>::infinity();
    each_row(a, ctx, [&](i64 t) {
        const float* x = a.ptr<const float>(1) + t * a.ints[2];
        float* y = a.ptr<float>(0) + t * a.ints[3];
        f32x16 top = set16(lowest);
        for (i64 i = 0; i < width; i += 16) top = max16(top, load16_first(x + i, width - i, lowest));
        const f32x16 largest = set16(largest16(top));
        f32x16 sums = set16(0.0f);
        for (i64 i = 0; i < width; i += 16) {
            const f32x16 e = exp16(load16_first(x + i, width - i, lowest) - largest);
            store16_first(y + i, e, width - i);
            sums = sums + e;
        }
        const f32x16 factor = set16(1.0f / sum16(sums));
        for (i64 i = 0; i < width; i += 16)
            store16_first(y + i, load16_first(y + i, width - i) * factor, width - i);
    });
}

// The first index of the largest value of [begin, end).
i64 argmax(const float* x, i64 begin, i64 end) {
    const float lowest = -std::numeric_limits<float>::infinity();
    f32x16 top = set16(lowest);
    for (i64 i = begin; i < end; i += 16) top = max16(top, load16_first(x + i, end - i, lowest));
    const float largest = largest16(top);
    for (i64 i = begin; i < end; ++i)
        if (x[i] == largest) return i;
    return begin;
}

// Columns that one thread searches at a time.
constexpr i64 kArgmaxSpan = 8192;

size_t argmax_bytes(const Args& a, int) {
    return static_cast<size_t>(a.ints[0] * ceil_div(a.ints[1], kArgmaxSpan)) * sizeof(i64);
}

// pointers: index (i32), x; ints: rows, width, x_stride. Ties go to the lower index. Phase 0 searches
// spans of rows, so that one row of a large vocabulary keeps all threads busy; phase 1 compares.
void argmax_rows(const Args& a, Context& ctx) {
    const i64 rows = a.ints[0], width = a.ints[1], spans = ceil_div(width, kArgmaxSpan);
    i64* const best = static_cast<i64*>(ctx.shared);
    const auto row = [&](i64 t) { return a.ptr<const float>(1) + t * a.ints[2]; };
    if (ctx.phase == 0) {
        return ctx.share(rows * spans, 1, [&](i64 begin, i64 end) {
            for (i64 at = begin; at < end; ++at) {
                const i64 first = at % spans * kArgmaxSpan;
                best[at] = argmax(row(at / spans), first, least(width, first + kArgmaxSpan));
            }
        });
    }
    each_row(a, ctx, [&](i64 t) {
        const float* x = row(t);
        i64 winner = best[t * spans];
        for (i64 s = 1; s < spans; ++s)
            if (x[best[t * spans + s]] > x[winner]) winner = best[t * spans + s];
        a.ptr<int32_t>(0)[t] = static_cast<int32_t>(winner);
    });
}

}  // namespace

const KernelEntry kElementwiseKernels[] = {
    {"silu", silu},
    {"gelu_tanh", gelu_tanh},
    {"gelu_erf", gelu_erf},
    {"exp", exp_rows},
    {"scale", scale},
    {"add", add},
    {"mul", mul},
    {"silu_mul", silu_mul},
    {"gelu_tanh_mul", gelu_tanh_mul},
    {"gelu_erf_mul", gelu_erf_mul},
    {"softmax_rows", softmax_rows, Share::kRows},
    {"argmax_rows", argmax_rows, Share::kParts, 2, argmax_bytes},
    {nullptr, nullptr},
};

}  // namespace mi
