// Integer dot products of a block: 16 weight rows, 32 elements of K, R rows of int8 activations.
//
// Four elements of K of each weight row share a 32-bit lane (formats.h), so that the activations' four
// bytes are broadcast and no sum crosses lanes. dot_u4 takes codes 0..15 in halves of bytes, dot_i8
// signed bytes. Shapes: w [256 or 512 bytes], x [R, 32] with a row stride, sums [R] of x's codes with
// a stride of their own, out [R].
#pragma once
#include "simd.h"

namespace mi {

inline int32_t load_i32(const int8_t* p) {
    int32_t v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

// Keeps an accumulator in its register: GCC would otherwise reorder the integer additions into a tree
// and spill all the products that it then has to hold (half the speed at many rows).
#if defined(MI_SCALAR)
#define MI_PIN(v) ((void)0)
#else
#define MI_PIN(v) asm("" : "+v"(v))
#endif

#if defined(MI_VNNI)

template <int R>
MI_INLINE void dot_u4(const uint8_t* w, const int8_t* x, i64 stride, i32x16* out) {
    __m512i acc[R];
    for (int r = 0; r < R; ++r) acc[r] = _mm512_setzero_si512();
    const __m512i mask = _mm512_set1_epi8(15);
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
        const __m512i both = _mm512_loadu_si512(w + 64 * c);
        const __m512i low = _mm512_and_si512(both, mask);
        const __m512i high = _mm512_and_si512(_mm512_srli_epi16(both, 4), mask);
        for (int r = 0; r < R; ++r) {
            const int8_t* four = x + r * stride + 4 * c;
            acc[r] = _mm512_dpbusd_epi32(acc[r], low, _mm512_set1_epi32(load_i32(four)));
            acc[r] = _mm512_dpbusd_epi32(acc[r], high, _mm512_set1_epi32(load_i32(four + 16)));
            MI_PIN(acc[r]);
        }
    }
    for (int r = 0; r < R; ++r) out[r] = {acc[r]};
}

// VNNI wants unsigned weights: w + 128, and 128 times the activations' sum taken off.
template <int R>
MI_INLINE void dot_i8(const uint8_t* w, const int8_t* x, i64 stride, const int32_t* sums, i64 sum_stride,
                      i32x16* out) {
    __m512i acc[R];
    for (int r = 0; r < R; ++r) acc[r] = _mm512_set1_epi32(-128 * sums[r * sum_stride]);
    const __m512i sign = _mm512_set1_epi8(-128);
#pragma GCC unroll 8
    for (int c = 0; c < 8; ++c) {
        const __m512i shifted = _mm512_xor_si512(_mm512_loadu_si512(w + 64 * c), sign);
        for (int r = 0; r < R; ++r) {
            const __m512i four = _mm512_set1_epi32(load_i32(x + r * stride + 4 * c));
            acc[r] = _mm512_dpbusd_epi32(acc[r], shifted, four);
            MI_PIN(acc[r]);
        }
    }
    for (int r = 0; r < R; ++r) out[r] = {acc[r]};
}

#elif defined(MI_AVX2)

inline __m256i load_bytes(const uint8_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
inline i32x16 join(__m256i a, __m256i b) {
#if defined(__AVX512F__)
    return {_mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1)};
#else
    return {a, b};
#endif
}
// acc += w x in 16-bit pairs: codes below 16 times eight steps stay within 8 * 2 * 15 * 127 = 30480.
MI_INLINE void add_pairs(__m256i& acc, __m256i w, __m256i x) {
    acc = _mm256_add_epi16(acc, _mm256_maddubs_epi16(w, x));
    MI_PIN(acc);
}

template <int R>
MI_INLINE void dot_u4(const uint8_t* w, const int8_t* x, i64 stride, i32x16* out) {
    __m256i a[R], b[R];
    for (int r = 0; r < R; ++r) a[r] = b[r] = _mm256_setzero_si256();
    const __m256i mask = _mm256_set1_epi8(15);
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
        const __m256i both_a = load_bytes(w + 64 * c), both_b = load_bytes(w + 64 * c + 32);
        __m256i code_a = _mm256_and_si256(both_a, mask), code_b = _mm256_and_si256(both_b, mask);
        for (int r = 0; r < R; ++r) {
            const __m256i four = _mm256_set1_epi32(load_i32(x + r * stride + 4 * c));
            add_pairs(a[r], code_a, four);
            add_pairs(b[r], code_b, four);
        }
        code_a = _mm256_and_si256(_mm256_srli_epi16(both_a, 4), mask);
        code_b = _mm256_and_si256(_mm256_srli_epi16(both_b, 4), mask);
        for (int r = 0; r < R; ++r) {
            const __m256i four = _mm256_set1_epi32(load_i32(x + r * stride + 16 + 4 * c));
            add_pairs(a[r], code_a, four);
            add_pairs(b[r], code_b, four);
        }
    }
    const __m256i ones = _mm256_set1_epi16(1);
    for (int r = 0; r < R; ++r)
        out[r] = join(_mm256_madd_epi16(a[r], ones), _mm256_madd_epi16(b[r], ones));
}

// acc += w x with signed w: |w| times x with w's sign; 2 * 128 * 127 = 32512 just fits a 16-bit pair.
// (Splitting w into halves of bytes and adding 16-bit pairs, as above, was slower by a fifth on Zen 3.)
MI_INLINE void add_signed(__m256i& acc, __m256i w, __m256i size, __m256i x) {
    const __m256i pairs = _mm256_maddubs_epi16(size, _mm256_sign_epi8(x, w));
    acc = _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    MI_PIN(acc);
}

template <int R>
MI_INLINE void dot_i8(const uint8_t* w, const int8_t* x, i64 stride, const int32_t*, i64, i32x16* out) {
    __m256i a[R], b[R];
    for (int r = 0; r < R; ++r) a[r] = b[r] = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int c = 0; c < 8; ++c) {
        const __m256i w_a = load_bytes(w + 64 * c), w_b = load_bytes(w + 64 * c + 32);
        const __m256i size_a = _mm256_abs_epi8(w_a), size_b = _mm256_abs_epi8(w_b);
        for (int r = 0; r < R; ++r) {
            const __m256i four = _mm256_set1_epi32(load_i32(x + r * stride + 4 * c));
            add_signed(a[r], w_a, size_a, four);
            add_signed(b[r], w_b, size_b, four);
        }
    }
    for (int r = 0; r < R; ++r) out[r] = join(a[r], b[r]);
}

#else

template <int R>
void dot_u4(const uint8_t* w, const int8_t* x, i64 stride, i32x16* out) {
    for (int r = 0; r < R; ++r) {
        out[r] = set16i(0);
        for (int n = 0; n < 16; ++n)
            for (int k = 0; k < 16; ++k) {
                const int byte = w[4 * (16 * (k / 4) + n) + k % 4];
                out[r].v[n] += (byte & 15) * x[r * stride + k] + (byte >> 4) * x[r * stride + 16 + k];
            }
    }
}

template <int R>
void dot_i8(const uint8_t* w, const int8_t* x, i64 stride, const int32_t*, i64, i32x16* out) {
    for (int r = 0; r < R; ++r) {
        out[r] = set16i(0);
        for (int n = 0; n < 16; ++n)
            for (int k = 0; k < 32; ++k)
                out[r].v[n] += static_cast<int8_t>(w[4 * (16 * (k / 4) + n) + k % 4]) * x[r * stride + k];
    }
}

#endif

}  // namespace mi
