// Sixteen-lane vectors on AVX2 + FMA + F16C: two registers each.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace mi {

struct f32x16 {
    __m256 a, b;
};
struct i32x16 {
    __m256i a, b;
};

inline f32x16 set16(float v) { return {_mm256_set1_ps(v), _mm256_set1_ps(v)}; }
inline f32x16 load16(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store16(float* p, f32x16 v) {
    _mm256_storeu_ps(p, v.a);
    _mm256_storeu_ps(p + 8, v.b);
}
inline f32x16 operator+(f32x16 x, f32x16 y) {
    return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)};
}
inline f32x16 operator-(f32x16 x, f32x16 y) {
    return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)};
}
inline f32x16 operator*(f32x16 x, f32x16 y) {
    return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)};
}
inline f32x16 operator/(f32x16 x, f32x16 y) {
    return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)};
}
inline f32x16 fma16(f32x16 x, f32x16 y, f32x16 z) {
    return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
// NaN in y comes through (the second operand wins), so put the data second.
inline f32x16 max16(f32x16 x, f32x16 y) {
    return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)};
}
inline f32x16 min16(f32x16 x, f32x16 y) {
    return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)};
}
inline f32x16 abs16(f32x16 x) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
// Lanes of yes where x < y, of no elsewhere.
inline f32x16 select_lt(f32x16 x, f32x16 y, f32x16 yes, f32x16 no) {
    return {_mm256_blendv_ps(no.a, yes.a, _mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ)),
            _mm256_blendv_ps(no.b, yes.b, _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ))};
}
inline float sum8(__m256 v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
inline float sum16(f32x16 v) { return sum8(_mm256_add_ps(v.a, v.b)); }
// The sums of four vectors, for the price of little more than one.
inline void sum16x4(f32x16 p, f32x16 q, f32x16 r, f32x16 s, float* out) {
    const __m256 pq = _mm256_hadd_ps(_mm256_add_ps(p.a, p.b), _mm256_add_ps(q.a, q.b));
    const __m256 rs = _mm256_hadd_ps(_mm256_add_ps(r.a, r.b), _mm256_add_ps(s.a, s.b));
    const __m256 all = _mm256_hadd_ps(pq, rs);
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
}
inline float largest16(f32x16 v) {
    __m256 m = _mm256_max_ps(v.a, v.b);
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(m), _mm256_extractf128_ps(m, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
inline f32x16 load16_f16(const uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
            _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}

inline i32x16 set16i(int v) { return {_mm256_set1_epi32(v), _mm256_set1_epi32(v)}; }
inline i32x16 load16i(const void* p) {
    const __m256i* q = static_cast<const __m256i*>(p);
    return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
inline i32x16 operator+(i32x16 x, i32x16 y) {
    return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)};
}
inline i32x16 operator-(i32x16 x, i32x16 y) {
    return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)};
}
inline i32x16 operator&(i32x16 x, i32x16 y) {
    return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)};
}
template <int N>
inline i32x16 shl(i32x16 x) {
    return {_mm256_slli_epi32(x.a, N), _mm256_slli_epi32(x.b, N)};
}
template <int N>
inline i32x16 shr(i32x16 x) {
    return {_mm256_srli_epi32(x.a, N), _mm256_srli_epi32(x.b, N)};
}
template <int N>
inline i32x16 sar(i32x16 x) {
    return {_mm256_srai_epi32(x.a, N), _mm256_srai_epi32(x.b, N)};
}
inline int sum16i(i32x16 v) {
    __m256i t = _mm256_add_epi32(v.a, v.b);
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(t), _mm256_extracti128_si256(t, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}
// Nearest, ties to even.
inline i32x16 to_int(f32x16 v) { return {_mm256_cvtps_epi32(v.a), _mm256_cvtps_epi32(v.b)}; }
inline f32x16 to_float(i32x16 v) { return {_mm256_cvtepi32_ps(v.a), _mm256_cvtepi32_ps(v.b)}; }
inline f32x16 as_float(i32x16 v) { return {_mm256_castsi256_ps(v.a), _mm256_castsi256_ps(v.b)}; }
inline f32x16 load16_bf16(const uint16_t* p) {
    const __m128i* q = reinterpret_cast<const __m128i*>(p);
    i32x16 wide = {_mm256_cvtepu16_epi32(_mm_loadu_si128(q)),
                   _mm256_cvtepu16_epi32(_mm_loadu_si128(q + 1))};
    return as_float(shl<16>(wide));
}
inline void store16_i8(int8_t* p, i32x16 v) {
    __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(v.a, v.b), 0xd8);
    __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words),
                                    _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}

}  // namespace mi
