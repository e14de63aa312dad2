// Dynamic symmetric int8 of activations, blocks of 32: code = round(x * 127 / max|x|).
#pragma once
#include "simd.h"

namespace mi {

// Where a quantized row goes: codes padded with zeros to whole blocks, scales, sums of codes.
struct QuantizedRows {
    int8_t* codes;
    float* scales;
    int32_t* sums;
    i64 blocks;

    QuantizedRows(int8_t* codes, float* scales, int32_t* sums, i64 width)
        : codes(codes), scales(scales), sums(sums), blocks(ceil_div(width, 32)) {}
    bool wanted() const { return codes != nullptr; }

    void block(i64 row, i64 block, f32x16 a, f32x16 b) const {
        const float largest = largest16(max16(abs16(a), abs16(b)));
        // Below this 127 / largest overflows; such blocks are zero for every practical purpose.
        const bool is_zero = !(largest > 1e-30f);
        const f32x16 factor = set16(is_zero ? 0.0f : 127.0f / largest);
        const i32x16 codes_a = to_int(a * factor), codes_b = to_int(b * factor);
        const i64 at = row * blocks + block;
        store16_i8(codes + at * 32, codes_a);
        store16_i8(codes + at * 32 + 16, codes_b);
        scales[at] = is_zero ? 0.0f : largest / 127.0f;
        sums[at] = sum16i(codes_a + codes_b);
    }
    // Blocks [begin, end) of one row whose values lie at x; width counts the whole row.
    void row(i64 row, const float* x, i64 width, i64 begin, i64 end) const {
        for (i64 g = begin; g < end; ++g) {
            const i64 left = width - g * 32;
            const f32x16 a = load16_first(x + g * 32, left);
            const f32x16 b = left > 16 ? load16_first(x + g * 32 + 16, left - 16) : set16(0.0f);
            block(row, g, a, b);
        }
    }
};

}  // namespace mi
