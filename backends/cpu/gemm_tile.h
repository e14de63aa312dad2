// The float32 micro-kernel: R rows of x times 16 columns.
#pragma once
#include <type_traits>

#include "simd.h"

namespace mi {

// Rows a tile: 2 R accumulators and 2 weight registers of AVX2's 16; 32 registers on AVX-512.
#if defined(MI_AVX512)
constexpr int kGemmRows = 12;
#else
constexpr int kGemmRows = 6;
#endif

// acc[r] += sum over k of x[r, k] w[k, 0:16]. Shapes: x [R, K] with row stride ldx, w [K, 16] with ldw.
template <int R>
inline void gemm_tile(const float* x, i64 ldx, const float* w, i64 ldw, i64 K, f32x16* acc) {
    f32x16 sums[R];
    // From zero, not from acc: the rounding of a chain grows with its length and its sum.
    for (int r = 0; r < R; ++r) sums[r] = set16(0.0f);
#pragma GCC unroll 4
    for (i64 k = 0; k < K; ++k) {
        const f32x16 column = load16(w + k * ldw);
        for (int r = 0; r < R; ++r) sums[r] = fma16(set16(x[r * ldx + k]), column, sums[r]);
    }
    for (int r = 0; r < R; ++r) acc[r] = acc[r] + sums[r];
}

// Cut [m, end) into tiles of kGemmRows, 4, 2 and 1 rows; call run(constant R, first row).
template <class Run>
inline void each_tile(i64 m, i64 end, Run run) {
    for (; m + kGemmRows <= end; m += kGemmRows) run(std::integral_constant<int, kGemmRows>{}, m);
    for (; m + 4 <= end; m += 4) run(std::integral_constant<int, 4>{}, m);
    if (m + 2 <= end) run(std::integral_constant<int, 2>{}, m), m += 2;
    if (m < end) run(std::integral_constant<int, 1>{}, m);
}

}  // namespace mi
