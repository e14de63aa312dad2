// Linears with float32 activations and accumulation: weights f32, f16, bf16, and 8- or 4-bit blocks that
// are expanded in registers (few rows) or into a cached panel (many rows).
#include "experts.h"
#include "formats.h"
#include "gemm_tile.h"
#include "linear.h"

namespace mi {
namespace {

// Up to this many rows the weights are expanded for each tile anew; beyond, once for all rows.
constexpr i64 kFewRows = 8;
// Elements of K whose expanded panel (16 floats each) stays in the first-level cache.
constexpr i64 kDepth = 256;
constexpr i64 kAheadBytes = 6144;

// Each weight type has expand (a slice of a panel as f32 [count][16]) and tile (acc [R] = R rows of x
// times a panel). Tiles keep several sums a row, as one chain of additions would wait on its latency.

// Products in one chain of additions (even): the rounding of a chain grows with its length.
constexpr i64 kChain = 64;

// acc = the sum of W's short chains over a panel.
template <class W, int R>
inline void sum_chains(const uint8_t* panel, const float* x, i64 ldx, i64 K, f32x16* acc) {
    for (int r = 0; r < R; ++r) acc[r] = set16(0.0f);
    for (i64 k = 0; k < K; k += kChain, panel += W::panel_bytes(kChain)) {
        f32x16 sums[R];
        W::template chain<R>(panel, x + k, ldx, least(kChain, K - k), sums);
        for (int r = 0; r < R; ++r) acc[r] = acc[r] + sums[r];
    }
}

// How the elements of F32Weights and F16Weights are held and widened.
struct Single {
    using type = float;
    static f32x16 load(const float* w) { return load16(w); }
};
struct Half {
    using type = uint16_t;
    static f32x16 load(const uint16_t* w) { return load16_f16(w); }
};

// Weight panels [K][16] of numbers that one instruction widens.
template <class N>
struct PlainWeights {
    using type = typename N::type;
    static constexpr i64 kAhead = kAheadBytes / static_cast<i64>(sizeof(type));
    static i64 panel_bytes(i64 K) { return K * 16 * static_cast<i64>(sizeof(type)); }
    static const float* expand(const uint8_t* panel, i64 k, i64 count, float* out) {
        const type* w = reinterpret_cast<const type*>(panel) + k * 16;
        if constexpr (sizeof(type) == sizeof(float)) return reinterpret_cast<const float*>(w);
        for (i64 i = 0; i < count; ++i) store16(out + i * 16, N::load(w + i * 16));
        return out;
    }
    template <int R>
    static void tile(const uint8_t* panel, const float* x, i64 ldx, i64 K, f32x16* acc) {
        sum_chains<PlainWeights, R>(panel, x, ldx, K, acc);
    }
    template <int R>
    static void chain(const uint8_t* panel, const float* x, i64 ldx, i64 K, f32x16* sums) {
        const type* w = reinterpret_cast<const type*>(panel);
        f32x16 evens[R], odds[R];
        for (int r = 0; r < R; ++r) evens[r] = odds[r] = set16(0.0f);
        i64 k = 0;
        for (; k + 2 <= K; k += 2, w += 32) {
            MI_PREFETCH(w + kAhead);
            if (sizeof(type) == sizeof(float)) MI_PREFETCH(w + kAhead + 16);
            const f32x16 first = N::load(w), second = N::load(w + 16);
            for (int r = 0; r < R; ++r) {
                evens[r] = fma16(set16(x[r * ldx + k]), first, evens[r]);
                odds[r] = fma16(set16(x[r * ldx + k + 1]), second, odds[r]);
            }
        }
        if (k < K) {
            const f32x16 last = N::load(w);
            for (int r = 0; r < R; ++r) evens[r] = fma16(set16(x[r * ldx + k]), last, evens[r]);
        }
        for (int r = 0; r < R; ++r) sums[r] = evens[r] + odds[r];
    }
};
using F32Weights = PlainWeights<Single>;
using F16Weights = PlainWeights<Half>;

// Weight panels [ceil(K / 2)][16][2] of bf16: a row's two neighbours share 32 bits, so that each is
// one shift or mask away from float32.
struct Bf16Weights {
    static i64 panel_bytes(i64 K) { return ceil_div(K, 2) * 64; }
    static f32x16 even(i32x16 pair) { return as_float(shl<16>(pair)); }
    static f32x16 odd(i32x16 pair) { return as_float(pair & set16i(~0xffff)); }
    static const float* expand(const uint8_t* panel, i64 k, i64 count, float* out) {
        panel += k * 32;
        for (i64 i = 0; i < count; i += 2, panel += 64) {
            const i32x16 pair = load16i(panel);
            store16(out + i * 16, even(pair));
            store16(out + i * 16 + 16, odd(pair));
        }
        return out;
    }
    template <int R>
    static void tile(const uint8_t* panel, const float* x, i64 ldx, i64 K, f32x16* acc) {
        sum_chains<Bf16Weights, R>(panel, x, ldx, K, acc);
    }
    template <int R>
    static void chain(const uint8_t* panel, const float* x, i64 ldx, i64 K, f32x16* out) {
        i64 k = 0;
        // Four rows are chains enough, and two sums of each would not fit the registers of AVX2.
        constexpr int chains = R < 4 ? 2 : 1;
        f32x16 sums[chains][R];
        for (auto& part : sums)
            for (f32x16& sum : part) sum = set16(0.0f);
        for (; k + 2 <= K; k += 2, panel += 64) {
            MI_PREFETCH(panel + kAheadBytes);
            const i32x16 pair = load16i(panel);
            const f32x16 first = even(pair), second = odd(pair);
            for (int r = 0; r < R; ++r) {
                f32x16& sum = sums[0][r];
                f32x16& other = sums[chains - 1][r];
                sum = fma16(set16(x[r * ldx + k]), first, sum);
                other = fma16(set16(x[r * ldx + k + 1]), second, other);
            }
        }
        for (int r = 0; r < R; ++r) out[r] = chains == 1 ? sums[0][r] : sums[0][r] + sums[chains - 1][r];
        if (k == K) return;
        const f32x16 last = even(load16i(panel));
        for (int r = 0; r < R; ++r) out[r] = fma16(set16(x[r * ldx + k]), last, out[r]);
    }
};

template <class F>
struct BlockWeights {
    static i64 panel_bytes(i64 K) { return ceil_div(K, 32) * F::block_bytes; }
    static const float* expand(const uint8_t* panel, i64 k, i64 count, float* out) {
        for (i64 g = k / 32; g < ceil_div(k + count, 32); ++g, out += 32 * 16) {
            const uint8_t* block = panel + g * F::block_bytes;
            const f32x16 scale = F::scale(block);
            const f32x16 offset = F::has_offset ? F::offset(block) : set16(0.0f);
            each_code<F>(block, [&](int i, f32x16 code, auto) {
                store16(out + i * 16, F::has_offset ? fma16(code, scale, offset) : code * scale);
            });
        }
        return out - ceil_div(count, 32) * 32 * 16;
    }
    // One block: codes times x first, the scale once at the end. acc += .
    // (Flattened: a sum that a call may see has to go through memory.)
    template <int R>
    MI_FLATTEN static void block_tile(const uint8_t* block, const float* x, i64 ldx, f32x16* acc) {
        constexpr int chains = R >= 4 ? 1 : 4 / R;
        f32x16 parts[chains][R], sums[R];
        for (auto& part : parts)
            for (f32x16& sum : part) sum = set16(0.0f);
        each_code<F>(block, [&](int i, f32x16 code, auto chain) {
            f32x16* part = parts[decltype(chain)::value % chains];
            for (int r = 0; r < R; ++r) part[r] = fma16(set16(x[r * ldx + i]), code, part[r]);
        });
        for (int r = 0; r < R; ++r) {
            sums[r] = parts[0][r];
            for (int c = 1; c < chains; ++c) sums[r] = sums[r] + parts[c][r];
        }
        const f32x16 scale = F::scale(block);
        for (int r = 0; r < R; ++r) acc[r] = fma16(scale, sums[r], acc[r]);
        if (!F::has_offset) return;
        const f32x16 offset = F::offset(block);
        for (int r = 0; r < R; ++r) {
            const float* row = x + r * ldx;
            acc[r] = fma16(offset, set16(sum16(load16(row) + load16(row + 16))), acc[r]);
        }
    }
    template <int R>
    static void tile(const uint8_t* panel, const float* x, i64 ldx, i64 K, f32x16* acc) {
        for (int r = 0; r < R; ++r) acc[r] = set16(0.0f);
        for (i64 k = 0; k < K; k += 32, panel += F::block_bytes) {
            for (i64 line = 0; line < F::block_bytes; line += 64) MI_PREFETCH(panel + kAheadBytes + line);
            if (K - k >= 32) {
                block_tile<R>(panel, x + k, ldx, acc);
                continue;
            }
            // The packed weights end with a whole block: give them zeros to meet.
            float padded[R][32] = {};
            for (int r = 0; r < R; ++r)
                for (i64 i = 0; i < K - k; ++i) padded[r][i] = x[r * ldx + k + i];
            block_tile<R>(panel, padded[0], 32, acc);
        }
    }
};

template <class W, int R>
inline void direct(const LinearArgs& l, const uint8_t* data, const float* x, i64 ldx, i64 m, i64 panel) {
    f32x16 acc[R];
    W::template tile<R>(data, x + m * ldx, ldx, l.K, acc);
    for (int r = 0; r < R; ++r) l.finish(acc[r], m + r, panel);
}

// Rows [m, end) times one panel, its weights expanded for each tile anew.
template <class W>
inline void few_rows(const LinearArgs& l, const float* x, i64 ldx, i64 m, i64 end, i64 panel) {
    const uint8_t* data = l.weight + panel * W::panel_bytes(l.K);
    for (; m + 4 <= end; m += 4) direct<W, 4>(l, data, x, ldx, m, panel);
    if (m + 2 <= end) direct<W, 2>(l, data, x, ldx, m, panel), m += 2;
    if (m < end) direct<W, 1>(l, data, x, ldx, m, panel);
}

// What many_rows needs to know of a weight type.
struct Panels {
    i64 bytes;
    const float* (*expand)(const uint8_t* panel, i64 k, i64 count, float* out);
};

// Floats of the expanded panel and the partial sums of many_rows.
constexpr size_t kManyBytes = (kDepth + kRowBlock) * 64;

// The same micro-kernel for every weight type, on a panel expanded kDepth at a time, for at most
// kRowBlock rows; partial sums wait in a small tile of [rows][16].
void many_rows(const LinearArgs& l, const float* x, i64 ldx, const Panels& panels, float* expanded,
               i64 begin, i64 end, i64 panel) {
    float* const sums = expanded + kDepth * 16;
    const uint8_t* data = l.weight + panel * panels.bytes;
    for (i64 k = 0; k < l.K; k += kDepth) {
        const i64 depth = least(kDepth, l.K - k);
        const bool is_first = k == 0, is_last = k + depth == l.K;
        const float* w = panels.expand(data, k, depth, expanded);
        each_tile(begin, end, [&](auto rows, i64 m) {
            constexpr int R = decltype(rows)::value;
            float* const partial = sums + (m - begin) * 16;
            f32x16 acc[R];
            for (int r = 0; r < R; ++r) acc[r] = is_first ? set16(0.0f) : load16(partial + 16 * r);
            gemm_tile<R>(x + m * ldx + k, ldx, w, 16, depth, acc);
            for (int r = 0; r < R; ++r) {
                if (is_last) l.finish(acc[r], m + r, panel);
                else store16(partial + 16 * r, acc[r]);
            }
        });
    }
}

// pointers: y, weight, bias, residual, x; ints: M, N, K, y_stride, residual_stride, x_stride, [format].
template <class W>
void linear(const Args& a, Context& ctx) {
    const LinearArgs l(a);
    const float* x = a.ptr<const float>(4);
    const i64 ldx = a.ints[5];
    if (l.M <= kFewRows) {
        return each_panel(ctx, l.M, l.panels(), [&](i64 m, i64 end, i64 panel) {
            few_rows<W>(l, x, ldx, m, end, panel);
        });
    }
    const Panels panels{W::panel_bytes(l.K), W::expand};
    float* const expanded = static_cast<float*>(ctx.scratch(kManyBytes));
    each_panel(ctx, l.M, l.panels(), [&](i64 m, i64 end, i64 panel) {
        many_rows(l, x, ldx, panels, expanded, m, end, panel);
    });
}

// Each expert's rows of x times its own weights. pointers: y, weight (the experts' blobs one behind the
// other), groups (see experts.h), x; ints: E, N, K, y_stride, x_stride, [format].
template <class W>
void experts(const Args& a, Context& ctx) {
    const i64 N = a.ints[1], K = a.ints[2], y_stride = a.ints[3], ldx = a.ints[4];
    const Groups groups(a.ptr<int32_t>(2), a.ints[0]);
    const Panels panels{W::panel_bytes(K), W::expand};
    const i64 per_expert = ceil_div(N, 16), items = groups.num_hit() * per_expert;
    float* const expanded = static_cast<float*>(ctx.scratch(kManyBytes));
    // Experts have unequal numbers of rows: small helpings make even loads.
    const i64 grain = most(1, items / (32 * ctx.num_threads));
    for (Range part = ctx.next(items, grain); !part.empty(); part = ctx.next(items, grain)) {
        for (i64 item = part.begin; item < part.end; ++item) {
            const i64 e = groups.hit(item / per_expert), panel = item % per_expert;
            const i64 first = groups.begin(e), rows = groups.begin(e + 1) - first;
            const LinearArgs l(a.ptr<float>(0) + first * y_stride,
                               a.ptr<const uint8_t>(1) + e * per_expert * panels.bytes, rows, N, K,
                               y_stride);
            const float* x = a.ptr<const float>(3) + first * ldx;
            if (rows <= kFewRows) few_rows<W>(l, x, ldx, 0, rows, panel);
            else
                for (i64 m = 0; m < rows; m += kRowBlock)
                    many_rows(l, x, ldx, panels, expanded, m, least(rows, m + kRowBlock), panel);
        }
    }
}

void linear_f32(const Args& a, Context& ctx) { linear<F32Weights>(a, ctx); }
void linear_f16(const Args& a, Context& ctx) { linear<F16Weights>(a, ctx); }
void linear_bf16(const Args& a, Context& ctx) { linear<Bf16Weights>(a, ctx); }
void linear_w8(const Args& a, Context& ctx) {
    if (a.ints[6] == kI8F16) return linear<BlockWeights<I8F16>>(a, ctx);
    if (a.ints[6] == kI8F32) return linear<BlockWeights<I8F32>>(a, ctx);
}
void linear_w4(const Args& a, Context& ctx) {
    if (a.ints[6] == kU4F16) return linear<BlockWeights<U4F16>>(a, ctx);
    if (a.ints[6] == kI4F16) return linear<BlockWeights<I4F16>>(a, ctx);
    if (a.ints[6] == kU4F32) return linear<BlockWeights<U4F32>>(a, ctx);
}

void experts_f32(const Args& a, Context& ctx) { experts<F32Weights>(a, ctx); }
void experts_bf16(const Args& a, Context& ctx) { experts<Bf16Weights>(a, ctx); }
void experts_w8(const Args& a, Context& ctx) {
    if (a.ints[5] == kI8F16) return experts<BlockWeights<I8F16>>(a, ctx);
    if (a.ints[5] == kI8F32) return experts<BlockWeights<I8F32>>(a, ctx);
}
void experts_w4(const Args& a, Context& ctx) {
    if (a.ints[5] == kU4F16) return experts<BlockWeights<U4F16>>(a, ctx);
    if (a.ints[5] == kI4F16) return experts<BlockWeights<I4F16>>(a, ctx);
    if (a.ints[5] == kU4F32) return experts<BlockWeights<U4F32>>(a, ctx);
}

}  // namespace

const KernelEntry kLinearFloatKernels[] = {
    {"linear_f32", linear_f32},
    {"linear_f16", linear_f16},
    {"linear_bf16", linear_bf16},
    {"linear_w8", linear_w8},
    {"linear_w4", linear_w4},
    {"experts_f32", experts_f32},
    {"experts_bf16", experts_bf16},
    {"experts_w8", experts_w8},
    {"experts_w4", experts_w4},
    {nullptr, nullptr},
};

}  // namespace mi
