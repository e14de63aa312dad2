// Sixteen-lane vectors as plain arrays: correct everywhere, and what the others are tested against.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace mi {

struct f32x16 {
    float v[16];
};
struct i32x16 {
    int32_t v[16];
};

#define MI_EACH_LANE(TYPE, EXPR)                          \
    TYPE out;                                             \
    for (int i = 0; i < 16; ++i) out.v[i] = (EXPR);       \
    return out

inline f32x16 set16(float v) { MI_EACH_LANE(f32x16, v); }
inline f32x16 load16(const float* p) { MI_EACH_LANE(f32x16, p[i]); }
inline void store16(float* p, f32x16 v) { std::memcpy(p, v.v, sizeof v.v); }
inline f32x16 operator+(f32x16 x, f32x16 y) { MI_EACH_LANE(f32x16, x.v[i] + y.v[i]); }
inline f32x16 operator-(f32x16 x, f32x16 y) { MI_EACH_LANE(f32x16, x.v[i] - y.v[i]); }
inline f32x16 operator*(f32x16 x, f32x16 y) { MI_EACH_LANE(f32x16, x.v[i] * y.v[i]); }
inline f32x16 operator/(f32x16 x, f32x16 y) { MI_EACH_LANE(f32x16, x.v[i] / y.v[i]); }
inline f32x16 fma16(f32x16 x, f32x16 y, f32x16 z) {
    MI_EACH_LANE(f32x16, x.v[i] * y.v[i] + z.v[i]);
}
// NaN in y comes through, as with the x86 instructions.
inline f32x16 max16(f32x16 x, f32x16 y) { MI_EACH_LANE(f32x16, x.v[i] > y.v[i] ? x.v[i] : y.v[i]); }
inline f32x16 min16(f32x16 x, f32x16 y) { MI_EACH_LANE(f32x16, x.v[i] < y.v[i] ? x.v[i] : y.v[i]); }
inline f32x16 abs16(f32x16 x) { MI_EACH_LANE(f32x16, std::fabs(x.v[i])); }
// Lanes of yes where x < y, of no elsewhere.
inline f32x16 select_lt(f32x16 x, f32x16 y, f32x16 yes, f32x16 no) {
    MI_EACH_LANE(f32x16, x.v[i] < y.v[i] ? yes.v[i] : no.v[i]);
}
inline float sum16(f32x16 v) {
    float total = 0.0f;
    for (int i = 0; i < 16; ++i) total += v.v[i];
    return total;
}
inline void sum16x4(f32x16 p, f32x16 q, f32x16 r, f32x16 s, float* out) {
    out[0] = sum16(p);
    out[1] = sum16(q);
    out[2] = sum16(r);
    out[3] = sum16(s);
}
inline float largest16(f32x16 v) {
    float best = v.v[0];
    for (int i = 1; i < 16; ++i) best = v.v[i] > best ? v.v[i] : best;
    return best;
}
// IEEE half to single, subnormals, infinities and NaN included.
inline float half_to_float(uint16_t h) {
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
    const uint32_t exponent = (h >> 10) & 31u, mantissa = h & 1023u;
    if (exponent == 0) {
        const float tiny = static_cast<float>(mantissa) * 0x1p-24f;
        return sign ? -tiny : tiny;
    }
    const uint32_t wide = exponent == 31 ? 255u : exponent + 112u;
    const uint32_t bits = sign | (wide << 23) | (mantissa << 13);
    float out;
    std::memcpy(&out, &bits, sizeof out);
    return out;
}
inline f32x16 load16_f16(const uint16_t* p) { MI_EACH_LANE(f32x16, half_to_float(p[i])); }

inline i32x16 set16i(int v) { MI_EACH_LANE(i32x16, v); }
inline i32x16 load16i(const void* p) {
    i32x16 out;
    std::memcpy(out.v, p, sizeof out.v);
    return out;
}
inline i32x16 operator+(i32x16 x, i32x16 y) { MI_EACH_LANE(i32x16, x.v[i] + y.v[i]); }
inline i32x16 operator-(i32x16 x, i32x16 y) { MI_EACH_LANE(i32x16, x.v[i] - y.v[i]); }
inline i32x16 operator&(i32x16 x, i32x16 y) { MI_EACH_LANE(i32x16, x.v[i] & y.v[i]); }
template <int N>
inline i32x16 shl(i32x16 x) {
    MI_EACH_LANE(i32x16, static_cast<int32_t>(static_cast<uint32_t>(x.v[i]) << N));
}
template <int N>
inline i32x16 shr(i32x16 x) {
    MI_EACH_LANE(i32x16, static_cast<int32_t>(static_cast<uint32_t>(x.v[i]) >> N));
}
template <int N>
inline i32x16 sar(i32x16 x) {
    MI_EACH_LANE(i32x16, x.v[i] >> N);
}
inline int sum16i(i32x16 v) {
    int total = 0;
    for (int i = 0; i < 16; ++i) total += v.v[i];
    return total;
}
// Nearest, ties to even.
inline i32x16 to_int(f32x16 v) {
    MI_EACH_LANE(i32x16, static_cast<int32_t>(std::nearbyint(v.v[i])));
}
inline f32x16 to_float(i32x16 v) { MI_EACH_LANE(f32x16, static_cast<float>(v.v[i])); }
inline f32x16 as_float(i32x16 v) {
    f32x16 out;
    std::memcpy(out.v, v.v, sizeof out.v);
    return out;
}
inline f32x16 load16_bf16(const uint16_t* p) {
    i32x16 wide;
    for (int i = 0; i < 16; ++i) wide.v[i] = static_cast<int32_t>(static_cast<uint32_t>(p[i]) << 16);
    return as_float(wide);
}
inline void store16_i8(int8_t* p, i32x16 v) {
    for (int i = 0; i < 16; ++i) {
        const int c = v.v[i];
        p[i] = static_cast<int8_t>(c > 127 ? 127 : c < -128 ? -128 : c);
    }
}

}  // namespace mi
