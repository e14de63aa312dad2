// Normalisations over rows, with an optional int8 copy of the result for the linear that follows.
#include <cmath>

#include "quantize.h"
#include "runtime.h"

namespace mi {
namespace {

// y = x * factor * (weight + shift), then its int8 form. Shapes: x, weight, y [width].
void scale_row(const float* x, float factor, const float* weight, float shift, float* y, i64 width) {
    const f32x16 f = set16(factor), s = set16(shift);
    i64 i = 0;
    for (; i + 16 <= width; i += 16)
        store16(y + i, load16(x + i) * f * (load16(weight + i) + s));
    for (; i < width; ++i) y[i] = x[i] * factor * (weight[i] + shift);
}

float rms_factor(const float* x, i64 width, float eps) {
    return 1.0f / std::sqrt(dot(x, x, width) / static_cast<float>(width) + eps);
}

// pointers: y, x, weight, codes, scales, sums; ints: rows, width, x_stride, y_stride;
// floats: eps, weight_shift.
void rms_norm(const Args& a, Context& ctx) {
    const i64 width = a.ints[1], x_stride = a.ints[2], y_stride = a.ints[3];
    const QuantizedRows q(a.ptr<int8_t>(3), a.ptr<float>(4), a.ptr<int32_t>(5), width);
    float* const y = a.ptr<float>(0);
    float* const own = y ? nullptr : static_cast<float*>(ctx.scratch(width * sizeof(float)));
    each_row(a, ctx, [&](i64 t) {
        const float* x = a.ptr<const float>(1) + t * x_stride;
        float* out = y ? y + t * y_stride : own;
        const float factor = rms_factor(x, width, a.floats[0]);
        scale_row(x, factor, a.ptr<const float>(2), a.floats[1], out, width);
        if (q.wanted()) q.row(t, out, width, 0, q.blocks);
    });
}

// pointers: sum, y, x, residual, weight, codes, scales, sums; ints: rows, width (all contiguous);
// floats: eps, weight_shift. sum may be x or residual.
void add_rms_norm(const Args& a, Context& ctx) {
    const i64 width = a.ints[1];
    const QuantizedRows q(a.ptr<int8_t>(5), a.ptr<float>(6), a.ptr<int32_t>(7), width);
    float* const y = a.ptr<float>(1);
    float* const own = y ? nullptr : static_cast<float*>(ctx.scratch(width * sizeof(float)));
    each_row(a, ctx, [&](i64 t) {
        float* sum = a.ptr<float>(0) + t * width;
        const float* x = a.ptr<const float>(2) + t * width;
        const float* r = a.ptr<const float>(3) + t * width;
        i64 i = 0;
        for (; i + 16 <= width; i += 16) store16(sum + i, load16(x + i) + load16(r + i));
        for (; i < width; ++i) sum[i] = x[i] + r[i];
        float* out = y ? y + t * width : own;
        const float factor = rms_factor(sum, width, a.floats[0]);
        scale_row(sum, factor, a.ptr<const float>(4), a.floats[1], out, width);
        if (q.wanted()) q.row(t, out, width, 0, q.blocks);
    });
}

// pointers: y, x, weight, bias (0: none), codes, scales, sums; ints: rows, width, x_stride, y_stride;
// floats: eps. Mean first, then the variance of the differences: no cancellation.
void layer_norm(const Args& a, Context& ctx) {
    const i64 width = a.ints[1], x_stride = a.ints[2], y_stride = a.ints[3];
    const QuantizedRows q(a.ptr<int8_t>(4), a.ptr<float>(5), a.ptr<int32_t>(6), width);
    float* const y = a.ptr<float>(0);
    const float *weight = a.ptr<const float>(2), *bias = a.ptr<const float>(3);
    float* const own = static_cast<float*>(ctx.scratch(width * sizeof(float)));
    each_row(a, ctx, [&](i64 t) {
        const float* x = a.ptr<const float>(1) + t * x_stride;
        float* out = y ? y + t * y_stride : own;
        f32x16 lanes = set16(0.0f);
        i64 i = 0;
        for (; i + 16 <= width; i += 16) lanes = lanes + load16(x + i);
        float total = sum16(lanes);
        for (; i < width; ++i) total += x[i];
        const float mean = total / static_cast<float>(width);
        for (i = 0; i + 16 <= width; i += 16) store16(own + i, load16(x + i) - set16(mean));
        for (; i < width; ++i) own[i] = x[i] - mean;
        const float factor = rms_factor(own, width, a.floats[0]);
        scale_row(own, factor, weight, 0.0f, out, width);
        if (bias) {
            for (i = 0; i + 16 <= width; i += 16) store16(out + i, load16(out + i) + load16(bias + i));
            for (; i < width; ++i) out[i] += bias[i];
        }
        if (q.wanted()) q.row(t, out, width, 0, q.blocks);
    });
}

// pointers: codes, scales, sums, x; ints: rows, width, x_stride.
void quantize_rows_i8(const Args& a, Context& ctx) {
    const i64 width = a.ints[1], x_stride = a.ints[2];
    const QuantizedRows q(a.ptr<int8_t>(0), a.ptr<float>(1), a.ptr<int32_t>(2), width);
    ctx.share(a.ints[0] * q.blocks, 64, [&](i64 at, i64 end) {
        while (at < end) {
            const i64 t = at / q.blocks, first = at % q.blocks;
            const i64 last = least(q.blocks, first + end - at);
            q.row(t, a.ptr<const float>(3) + t * x_stride, width, first, last);
            at += last - first;
        }
    });
}

}  // namespace

const KernelEntry kNormKernels[] = {
    {"rms_norm", rms_norm, Share::kRows},
    {"add_rms_norm", add_rms_norm, Share::kRows},
    {"layer_norm", layer_norm, Share::kRows},
    {"quantize_rows_i8", quantize_rows_i8},
    {nullptr, nullptr},
};

}  // namespace mi
