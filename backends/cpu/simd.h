// Sixteen-lane vectors, the same names on AVX-512, AVX2 and plain C++; and the maths on top of them.
#pragma once

#if defined(METAINFER_SCALAR) || !defined(__AVX2__) || !defined(__FMA__) || !defined(__F16C__)
#define MI_SCALAR 1
#include "simd_scalar.h"
#elif defined(__AVX512F__)
#include "simd_avx512.h"
#define MI_AVX512 1
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define MI_VNNI 1
#else
#define MI_AVX2 1
#endif
#else
#define MI_AVX2 1
#include "simd_avx2.h"
#endif

#if defined(MI_SCALAR)
#define MI_PAUSE() ((void)0)
#else
#define MI_PAUSE() _mm_pause()
#endif

// Weights are read once and in order; asking two pages' worth of lines ahead hides page borders
// that the hardware's prefetcher stops at.
#define MI_PREFETCH(p) __builtin_prefetch((p), 0, 3)

// Inline all calls in a function's body.
#define MI_FLATTEN __attribute__((flatten))
#define MI_INLINE inline __attribute__((always_inline))

namespace mi {

using i64 = int64_t;

inline i64 ceil_div(i64 a, i64 b) { return (a + b - 1) / b; }
inline i64 round_up(i64 a, i64 b) { return ceil_div(a, b) * b; }
inline i64 least(i64 a, i64 b) { return a < b ? a : b; }
inline i64 most(i64 a, i64 b) { return a > b ? a : b; }

// The first n lanes (0 < n <= 16); the others are filled, or left as they are in memory.
MI_INLINE f32x16 load16_first(const float* p, i64 n, float fill = 0.0f) {
    if (n >= 16) return load16(p);
    float lanes[16];
    for (i64 i = 0; i < 16; ++i) lanes[i] = i < n ? p[i] : fill;
    return load16(lanes);
}
MI_INLINE void store16_first(float* p, f32x16 v, i64 n) {
    if (n >= 16) return store16(p, v);
    float lanes[16];
    store16(lanes, v);
    for (i64 i = 0; i < n; ++i) p[i] = lanes[i];
}

// e^x = 2^n e^r with n = round(x / ln 2), |r| <= ln(2) / 2, and the Taylor series of e^r to degree 7
// (truncation 5e-9). 2^n is applied in two halves, so that subnormal results and infinity are right.
MI_INLINE f32x16 exp16(f32x16 x) {
    x = min16(set16(89.0f), max16(set16(-104.0f), x));
    const i32x16 n = to_int(x * set16(1.44269504088896f));
    const f32x16 nf = to_float(n);
    f32x16 r = fma16(nf, set16(-0.693145751953125f), x);
    r = fma16(nf, set16(-1.42860682030941723e-6f), r);
    f32x16 p = set16(1.0f / 5040.0f);
    p = fma16(p, r, set16(1.0f / 720.0f));
    p = fma16(p, r, set16(1.0f / 120.0f));
    p = fma16(p, r, set16(1.0f / 24.0f));
    p = fma16(p, r, set16(1.0f / 6.0f));
    p = fma16(p, r, set16(0.5f));
    p = fma16(p, r, set16(1.0f));
    p = fma16(p, r, set16(1.0f));
    const i32x16 half = sar<1>(n);
    const i32x16 bias = set16i(127);
    p = p * as_float(shl<23>(half + bias));
    return p * as_float(shl<23>(n - half + bias));
}
MI_INLINE f32x16 sigmoid16(f32x16 x) {
    return set16(1.0f) / (set16(1.0f) + exp16(set16(0.0f) - x));
}
MI_INLINE f32x16 silu16(f32x16 x) { return x * sigmoid16(x); }
MI_INLINE f32x16 tanh16(f32x16 x) {
    const f32x16 two = set16(2.0f);
    return set16(1.0f) - two / (set16(1.0f) + exp16(two * x));
}
MI_INLINE f32x16 gelu_tanh16(f32x16 x) {
    const f32x16 cube = x * x * x;
    const f32x16 inner = set16(0.7978845608028654f) * fma16(set16(0.044715f), cube, x);
    return set16(0.5f) * x * (set16(1.0f) + tanh16(inner));
}

// erf(t) = 1 - e^(-t P(t)) for t >= 0, P of degree 6 fitted here to |error| < 8e-8 on [0, 4]; beyond
// 4 the result is 1 to float32. Odd in t.
MI_INLINE f32x16 erf16(f32x16 x) {
    const f32x16 t = min16(set16(4.0f), abs16(x));
    f32x16 p = set16(-6.94681298e-05f);
    p = fma16(p, t, set16(0.000319939898f));
    p = fma16(p, t, set16(0.00159578338f));
    p = fma16(p, t, set16(-0.0204149181f));
    p = fma16(p, t, set16(0.103253741f));
    p = fma16(p, t, set16(0.636536912f));
    p = fma16(p, t, set16(1.12838381f));
    const f32x16 zero = set16(0.0f);
    const f32x16 size = set16(1.0f) - exp16(zero - t * p);
    return select_lt(x, zero, zero - size, size);
}
MI_INLINE f32x16 gelu_erf16(f32x16 x) {
    return set16(0.5f) * x * (set16(1.0f) + erf16(x * set16(0.7071067811865476f)));
}

inline float dot(const float* x, const float* y, i64 n) {
    f32x16 a = set16(0.0f), b = a;
    i64 i = 0;
    for (; i + 32 <= n; i += 32) {
        a = fma16(load16(x + i), load16(y + i), a);
        b = fma16(load16(x + i + 16), load16(y + i + 16), b);
    }
    for (; i + 16 <= n; i += 16) a = fma16(load16(x + i), load16(y + i), a);
    float total = sum16(a + b);
    for (; i < n; ++i) total += x[i] * y[i];
    return total;
}

}  // namespace mi
