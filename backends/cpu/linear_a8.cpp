// Linears with quantized weights and int8 activations (see quantize.h): integer dot products.
#include "dot.h"
#include "formats.h"
#include "linear.h"

namespace mi {
namespace {

struct Activations {
    const int8_t* codes;
    const float* scales;
    const int32_t* sums;
    i64 blocks;
};

// Weights of the next blocks are asked for this far ahead.
constexpr i64 kAheadBytes = 6144;

// Rows [m, m + R) times one panel. Per block: integer dots, then
// acc += scale_w scale_x (dot - zero sum_x) + offset_w scale_x sum_x.
template <class F, int R>
inline void tile(const LinearArgs& l, const Activations& x, const uint8_t* panel_data, i64 m,
                 i64 panel) {
    f32x16 acc[R];
    for (int r = 0; r < R; ++r) acc[r] = set16(0.0f);
    const int8_t* codes = x.codes + m * x.blocks * 32;
    const i64 stride = x.blocks * 32;
    for (i64 g = 0; g < x.blocks; ++g, codes += 32) {
        const uint8_t* block = panel_data + g * F::block_bytes;
        const uint8_t* w = block + F::codes_at;
        for (i64 line = 0; line < F::block_bytes; line += 64) MI_PREFETCH(block + kAheadBytes + line);
        const i64 first = m * x.blocks + g;
        i32x16 dots[R];
        if constexpr (F::bits == 4) dot_u4<R>(w, codes, stride, dots);
        else dot_i8<R>(w, codes, stride, x.sums + first, x.blocks, dots);
        const f32x16 scale = F::scale(block);
        for (int r = 0; r < R; ++r) {
            const i64 at = first + r * x.blocks;
            const int sum = x.sums[at];
            const f32x16 scale_x = set16(x.scales[at]);
            if (F::zero) dots[r] = dots[r] - set16i(F::zero * sum);
            acc[r] = fma16(to_float(dots[r]), scale * scale_x, acc[r]);
            if (F::has_offset)
                acc[r] = fma16(F::offset(block), set16(x.scales[at] * static_cast<float>(sum)), acc[r]);
        }
    }
    for (int r = 0; r < R; ++r) l.finish(acc[r], m + r, panel);
}

// Rows a tile: bounded by registers (16 on AVX2, 32 on AVX-512).
#if defined(MI_VNNI)
constexpr int kTileRows = 8;
#else
constexpr int kTileRows = 4;
#endif

template <class F>
void linear(const Args& a, Context& ctx) {
    const LinearArgs l(a);
    const Activations x{a.ptr<const int8_t>(4), a.ptr<const float>(5), a.ptr<const int32_t>(6),
                        ceil_div(l.K, 32)};
    const i64 panel_bytes = x.blocks * F::block_bytes;
    each_panel(ctx, l.M, l.panels(), [&](i64 m, i64 end, i64 panel) {
        const uint8_t* data = l.weight + panel * panel_bytes;
        for (; m + kTileRows <= end; m += kTileRows) tile<F, kTileRows>(l, x, data, m, panel);
        if (kTileRows > 4 && m + 4 <= end) tile<F, 4>(l, x, data, m, panel), m += 4;
        if (m + 2 <= end) tile<F, 2>(l, x, data, m, panel), m += 2;
        if (m < end) tile<F, 1>(l, x, data, m, panel);
    });
}

// pointers: y, weight, bias, residual, codes, scales, sums;
// ints: M, N, K, y_stride, residual_stride, format.
void linear_w8a8(const Args& a, Context& ctx) {
    if (a.ints[5] == kI8F16) return linear<I8F16>(a, ctx);
    if (a.ints[5] == kI8F32) return linear<I8F32>(a, ctx);
}

void linear_w4a8(const Args& a, Context& ctx) {
    if (a.ints[5] == kU4F16) return linear<U4F16>(a, ctx);
    if (a.ints[5] == kI4F16) return linear<I4F16>(a, ctx);
    if (a.ints[5] == kU4F32) return linear<U4F32>(a, ctx);
}

}  // namespace

const KernelEntry kLinearA8Kernels[] = {
    {"linear_w8a8", linear_w8a8},
    {"linear_w4a8", linear_w4a8},
    {nullptr, nullptr},
};

}  // namespace mi
