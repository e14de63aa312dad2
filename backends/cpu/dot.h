// Integer dot products of 16 weight rows with one activation row, four elements of K a step.
//
// A step's weights are 64 bytes: lane r holds elements k..k+3 of row r, so that the activations'
// four bytes are broadcast and no sum crosses lanes. DotU4 takes codes 0..15 (eight steps, one
// block of 32, between finish calls), DotI8 signed codes.
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

struct u8x64 {
    __m512i v;
};
inline u8x64 load_u8x64(const void* p) { return {_mm512_loadu_si512(p)}; }
inline u8x64 low_nibbles(u8x64 w) { return {_mm512_and_si512(w.v, _mm512_set1_epi8(15))}; }
inline u8x64 high_nibbles(u8x64 w) {
    return {_mm512_and_si512(_mm512_srli_epi16(w.v, 4), _mm512_set1_epi8(15))};
}

struct DotU4 {
    __m512i acc = _mm512_setzero_si512();
    void step(u8x64 w, const int8_t* x) {
        acc = _mm512_dpbusd_epi32(acc, w.v, _mm512_set1_epi32(load_i32(x)));
        MI_PIN(acc);
    }
    i32x16 finish(int) const { return {acc}; }
};
// VNNI wants unsigned weights: w + 128, and 128 times the activations' sum taken off at the end.
struct DotI8 {
    __m512i acc = _mm512_setzero_si512();
    void step(u8x64 w, const int8_t* x) {
        const __m512i shifted = _mm512_xor_si512(w.v, _mm512_set1_epi8(-128));
        acc = _mm512_dpbusd_epi32(acc, shifted, _mm512_set1_epi32(load_i32(x)));
        MI_PIN(acc);
    }
    i32x16 finish(int sum) const {
        return {_mm512_sub_epi32(acc, _mm512_set1_epi32(128 * sum))};
    }
};

#elif defined(MI_AVX2)

struct u8x64 {
    __m256i a, b;
};
inline u8x64 load_u8x64(const void* p) {
    const __m256i* q = static_cast<const __m256i*>(p);
    return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
inline u8x64 low_nibbles(u8x64 w) {
    const __m256i mask = _mm256_set1_epi8(15);
    return {_mm256_and_si256(w.a, mask), _mm256_and_si256(w.b, mask)};
}
inline u8x64 high_nibbles(u8x64 w) {
    const __m256i mask = _mm256_set1_epi8(15);
    return {_mm256_and_si256(_mm256_srli_epi16(w.a, 4), mask),
            _mm256_and_si256(_mm256_srli_epi16(w.b, 4), mask)};
}
inline i32x16 join(__m256i a, __m256i b) {
#if defined(__AVX512F__)
    return {_mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1)};
#else
    return {a, b};
#endif
}

// Eight steps of two products each stay below 8 * 2 * 15 * 127 = 30480: 16 bits are enough.
struct DotU4 {
    __m256i a = _mm256_setzero_si256(), b = _mm256_setzero_si256();
    void step(u8x64 w, const int8_t* x) {
        const __m256i four = _mm256_set1_epi32(load_i32(x));
        a = _mm256_add_epi16(a, _mm256_maddubs_epi16(w.a, four));
        b = _mm256_add_epi16(b, _mm256_maddubs_epi16(w.b, four));
        MI_PIN(a);
        MI_PIN(b);
    }
    i32x16 finish(int) const {
        const __m256i ones = _mm256_set1_epi16(1);
        return join(_mm256_madd_epi16(a, ones), _mm256_madd_epi16(b, ones));
    }
};
// |w| times x with w's sign: 2 * 128 * 127 = 32512 just fits the 16 bits of a pair.
struct DotI8 {
    __m256i a = _mm256_setzero_si256(), b = _mm256_setzero_si256();
    static __m256i pair(__m256i w, __m256i four) {
        const __m256i products =
            _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(four, w));
        return _mm256_madd_epi16(products, _mm256_set1_epi16(1));
    }
    void step(u8x64 w, const int8_t* x) {
        const __m256i four = _mm256_set1_epi32(load_i32(x));
        a = _mm256_add_epi32(a, pair(w.a, four));
        b = _mm256_add_epi32(b, pair(w.b, four));
        MI_PIN(a);
        MI_PIN(b);
    }
    i32x16 finish(int) const { return join(a, b); }
};

#else

struct u8x64 {
    uint8_t v[64];
};
inline u8x64 load_u8x64(const void* p) {
    u8x64 out;
    std::memcpy(out.v, p, sizeof out.v);
    return out;
}
inline u8x64 low_nibbles(u8x64 w) {
    for (uint8_t& byte : w.v) byte &= 15;
    return w;
}
inline u8x64 high_nibbles(u8x64 w) {
    for (uint8_t& byte : w.v) byte >>= 4;
    return w;
}

struct DotI8 {
    i32x16 acc = set16i(0);
    void step(u8x64 w, const int8_t* x) {
        for (int r = 0; r < 16; ++r)
            for (int i = 0; i < 4; ++i) acc.v[r] += static_cast<int8_t>(w.v[4 * r + i]) * x[i];
    }
    i32x16 finish(int) const { return acc; }
};
// Codes below 16 are the same number with or without a sign.
using DotU4 = DotI8;

#endif

}  // namespace mi
