// What all linears share: y [M, N] = x [M, K] W [N, K]^T (+ bias) (+ residual), W in panels of 16 rows.
#pragma once
#include "runtime.h"

namespace mi {

// Arguments common to the linears. pointers: y, weight, bias (0: none), residual (0: none), then the
// activations; ints: M, N, K, y_stride, residual_stride, then x_stride or format.
struct LinearArgs {
    float* y;
    const uint8_t* weight;
    const float *bias, *residual;
    i64 M, N, K, y_stride, residual_stride;

    explicit LinearArgs(const Args& a)
        : y(a.ptr<float>(0)),
          weight(a.ptr<const uint8_t>(1)),
          bias(a.ptr<const float>(2)),
          residual(a.ptr<const float>(3)),
          M(a.ints[0]),
          N(a.ints[1]),
          K(a.ints[2]),
          y_stride(a.ints[3]),
          residual_stride(a.ints[4]) {}

    // One expert's product: no bias, no residual.
    LinearArgs(float* to, const uint8_t* weights, i64 rows, i64 outputs, i64 inputs, i64 stride)
        : y(to),
          weight(weights),
          bias(nullptr),
          residual(nullptr),
          M(rows),
          N(outputs),
          K(inputs),
          y_stride(stride),
          residual_stride(0) {}

    i64 panels() const { return ceil_div(N, 16); }
    float* out(i64 m, i64 panel) const { return y + m * y_stride + panel * 16; }
    i64 lanes(i64 panel) const { return least(16, N - panel * 16); }

    // Add what is asked for and store 16 outputs (fewer in the last panel). residual may be y.
    void finish(f32x16 acc, i64 m, i64 panel) const {
        const i64 n = lanes(panel);
        if (bias) acc = acc + load16_first(bias + panel * 16, n);
        if (residual) acc = acc + load16_first(residual + m * residual_stride + panel * 16, n);
        store16_first(out(m, panel), acc, n);
    }
};

// Rows of activations that stay in the second-level cache while panels pass by.
constexpr i64 kRowBlock = 128;

// Share (row block, panel) items over the threads as they are free; call work(m_begin, m_end, panel).
template <class Work>
inline void each_panel(Context& ctx, i64 M, i64 panels, Work work) {
    const i64 row_blocks = ceil_div(M, kRowBlock), items = row_blocks * panels;
    // About eight helpings a thread: even loads, and few atomic operations.
    const i64 grain = most(1, items / (8 * ctx.num_threads));
    for (Range part = ctx.next(items, grain); !part.empty(); part = ctx.next(items, grain)) {
        for (i64 item = part.begin; item < part.end; ++item) {
            const i64 m = item / panels * kRowBlock;
            work(m, least(M, m + kRowBlock), item % panels);
        }
    }
}

}  // namespace mi
