// Sixteen-lane vectors on AVX-512 F: one register each.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace mi {

struct f32x16 {
    __m512 v;
};
struct i32x16 {
    __m512i v;
};

inline f32x16 set16(float v) { return {_mm512_set1_ps(v)}; }
inline f32x16 load16(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store16(float* p, f32x16 v) { _mm512_storeu_ps(p, v.v); }
inline f32x16 operator+(f32x16 x, f32x16 y) { return {_mm512_add_ps(x.v, y.v)}; }
inline f32x16 operator-(f32x16 x, f32x16 y) { return {_mm512_sub_ps(x.v, y.v)}; }
inline f32x16 operator*(f32x16 x, f32x16 y) { return {_mm512_mul_ps(x.v, y.v)}; }
inline f32x16 operator/(f32x16 x, f32x16 y) { return {_mm512_div_ps(x.v, y.v)}; }
inline f32x16 fma16(f32x16 x, f32x16 y, f32x16 z) { return {_mm512_fmadd_ps(x.v, y.v, z.v)}; }
// NaN in y comes through (the second operand wins), so put the data second.
inline f32x16 max16(f32x16 x, f32x16 y) { return {_mm512_max_ps(x.v, y.v)}; }
inline f32x16 min16(f32x16 x, f32x16 y) { return {_mm512_min_ps(x.v, y.v)}; }
inline f32x16 abs16(f32x16 x) { return {_mm512_abs_ps(x.v)}; }
// Lanes of yes where x < y, of no elsewhere.
inline f32x16 select_lt(f32x16 x, f32x16 y, f32x16 yes, f32x16 no) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(x.v, y.v, _CMP_LT_OQ), no.v, yes.v)};
}
inline float sum16(f32x16 v) { return _mm512_reduce_add_ps(v.v); }
inline __m256 fold(__m512 v) {
    const __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v), 1));
    return _mm256_add_ps(_mm512_castps512_ps256(v), high);
}
// The sums of four vectors, for the price of little more than one.
inline void sum16x4(f32x16 p, f32x16 q, f32x16 r, f32x16 s, float* out) {
    const __m256 pq = _mm256_hadd_ps(fold(p.v), fold(q.v));
    const __m256 rs = _mm256_hadd_ps(fold(r.v), fold(s.v));
    const __m256 all = _mm256_hadd_ps(pq, rs);
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
}
inline float largest16(f32x16 v) { return _mm512_reduce_max_ps(v.v); }
inline f32x16 load16_f16(const uint16_t* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}

inline i32x16 set16i(int v) { return {_mm512_set1_epi32(v)}; }
inline i32x16 load16i(const void* p) { return {_mm512_loadu_si512(p)}; }
inline i32x16 operator+(i32x16 x, i32x16 y) { return {_mm512_add_epi32(x.v, y.v)}; }
inline i32x16 operator-(i32x16 x, i32x16 y) { return {_mm512_sub_epi32(x.v, y.v)}; }
inline i32x16 operator&(i32x16 x, i32x16 y) { return {_mm512_and_si512(x.v, y.v)}; }
template <int N>
inline i32x16 shl(i32x16 x) {
    return {_mm512_slli_epi32(x.v, N)};
}
template <int N>
inline i32x16 shr(i32x16 x) {
    return {_mm512_srli_epi32(x.v, N)};
}
template <int N>
inline i32x16 sar(i32x16 x) {
    return {_mm512_srai_epi32(x.v, N)};
}
inline int sum16i(i32x16 v) { return _mm512_reduce_add_epi32(v.v); }
// Nearest, ties to even.
inline i32x16 to_int(f32x16 v) { return {_mm512_cvtps_epi32(v.v)}; }
inline f32x16 to_float(i32x16 v) { return {_mm512_cvtepi32_ps(v.v)}; }
inline f32x16 as_float(i32x16 v) { return {_mm512_castsi512_ps(v.v)}; }
inline f32x16 load16_bf16(const uint16_t* p) {
    i32x16 wide = {
        _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
    return as_float(shl<16>(wide));
}
inline void store16_i8(int8_t* p, i32x16 v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(v.v));
}

}  // namespace mi
