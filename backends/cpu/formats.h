// The block-quantized weight formats, in panels of 16 rows with blocks of 32 along K.
//
// A block of a panel: 16 scales, then 16 offsets if the format has them, then codes.
// 8-bit codes: byte 4 * (16 c + r) + i is element 4 c + i of row r, c in 0..7.
// 4-bit codes: byte 4 * (16 c + r) + i holds element 4 c + i in its low half and 16 + 4 c + i in
// its high half, c in 0..3. Signed 4-bit codes are stored plus 8. layouts.py packs this.
#pragma once
#include <type_traits>

#include "simd.h"

namespace mi {

// Numbers that Python passes (kernels.py: FORMATS).
enum FormatId { kI8F16 = 0, kI8F32 = 1, kU4F16 = 2, kI4F16 = 3, kU4F32 = 4, kNumFormats = 5 };

inline f32x16 load16_scale(const uint16_t* p) { return load16_f16(p); }
inline f32x16 load16_scale(const float* p) { return load16(p); }

template <int kBits, class Scale, bool kHasOffset, int kZero>
struct BlockFormat {
    static constexpr int bits = kBits;
    static constexpr bool has_offset = kHasOffset;
    // The code that stands for zero: taken off after the integer sum.
    static constexpr int zero = kZero;
    static constexpr i64 side_bytes = 16 * sizeof(Scale);
    static constexpr i64 codes_at = side_bytes * (kHasOffset ? 2 : 1);
    static constexpr i64 block_bytes = codes_at + 16 * 32 * kBits / 8;

    static f32x16 scale(const uint8_t* block) {
        return load16_scale(reinterpret_cast<const Scale*>(block));
    }
    static f32x16 offset(const uint8_t* block) {
        return load16_scale(reinterpret_cast<const Scale*>(block + side_bytes));
    }
};

using I8F16 = BlockFormat<8, uint16_t, false, 0>;
using I8F32 = BlockFormat<8, float, false, 0>;
using U4F16 = BlockFormat<4, uint16_t, true, 0>;
using I4F16 = BlockFormat<4, uint16_t, false, 8>;
using U4F32 = BlockFormat<4, float, true, 0>;

template <int N>
using Constant = std::integral_constant<int, N>;

// Call use(k, codes as floats, Constant<k % 4>) for the 32 elements of K of a block, all 16 rows at
// once. The constant lets callers deal the elements out to independent sums.
template <class Format, class Use>
inline void each_code(const uint8_t* block, Use use) {
    const uint8_t* codes = block + Format::codes_at;
    if constexpr (Format::bits == 8) {
#pragma GCC unroll 1
        for (int c = 0; c < 8; ++c) {
            const i32x16 four = load16i(codes + 64 * c);
            use(4 * c, to_float(sar<24>(shl<24>(four))), Constant<0>{});
            use(4 * c + 1, to_float(sar<24>(shl<16>(four))), Constant<1>{});
            use(4 * c + 2, to_float(sar<24>(shl<8>(four))), Constant<2>{});
            use(4 * c + 3, to_float(sar<24>(four)), Constant<3>{});
        }
    } else {
        const i32x16 mask = set16i(15);
        const f32x16 zero = set16(static_cast<float>(Format::zero));
        const auto code = [&](i32x16 v) {
            const f32x16 f = to_float(v & mask);
            return Format::zero ? f - zero : f;
        };
#pragma GCC unroll 1
        for (int c = 0; c < 4; ++c) {
            const i32x16 eight = load16i(codes + 64 * c);
            use(4 * c, code(eight), Constant<0>{});
            use(16 + 4 * c, code(shr<4>(eight)), Constant<0>{});
            use(4 * c + 1, code(shr<8>(eight)), Constant<1>{});
            use(16 + 4 * c + 1, code(shr<12>(eight)), Constant<1>{});
            use(4 * c + 2, code(shr<16>(eight)), Constant<2>{});
            use(16 + 4 * c + 2, code(shr<20>(eight)), Constant<2>{});
            use(4 * c + 3, code(shr<24>(eight)), Constant<3>{});
            use(16 + 4 * c + 3, code(shr<28>(eight)), Constant<3>{});
        }
    }
}

}  // namespace mi
