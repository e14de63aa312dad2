// Routing: the best experts of each token, tokens in the order of experts, and the weighted sum after.
// The products between are in linear_float.cpp.
#include "experts.h"

#include <cmath>
#include <limits>

#include "runtime.h"

namespace mi {
namespace {

// Whether a value comes before another in descending order; what is no number comes first.
inline bool is_better(float value, float other) {
    return value > other || (std::isnan(value) && !std::isnan(other));
}

// The k largest of x [width], descending, and where they were; ties go to the lower index.
void choose(const float* x, i64 width, i64 k, float* values, i64* index) {
    for (i64 i = 0, count = 0; i < width && k > 0; ++i) {
        if (count == k && !is_better(x[i], values[k - 1])) continue;
        i64 at = count < k ? count++ : k - 1;
        for (; at > 0 && is_better(x[i], values[at - 1]); --at) {
            values[at] = values[at - 1];
            index[at] = index[at - 1];
        }
        values[at] = x[i];
        index[at] = i;
    }
}

// pointers: values, index (i64), x; ints: rows, width, k, x_stride.
void topk_rows(const Args& a, Context& ctx) {
    const i64 width = a.ints[1], k = a.ints[2];
    each_row(a, ctx, [&](i64 t) {
        const float* x = a.ptr<const float>(2) + t * a.ints[3];
        choose(x, width, k, a.ptr<float>(0) + t * k, a.ptr<i64>(1) + t * k);
    });
}

void sigmoid_row(const float* x, i64 width, float* y) {
    for (i64 i = 0; i < width; i += 16)
        store16_first(y + i, sigmoid16(load16_first(x + i, width - i)), width - i);
}

// As softmax_rows, but a row of -inf gives zeros.
void softmax_row(const float* x, i64 width, float* y) {
    const float lowest = -std::numeric_limits<float>::infinity();
    f32x16 top = set16(lowest);
    for (i64 i = 0; i < width; i += 16) top = max16(top, load16_first(x + i, width - i, lowest));
    const float largest = largest16(top);
    if (largest == lowest) {
        for (i64 i = 0; i < width; ++i) y[i] = 0.0f;
        return;
    }
    f32x16 sums = set16(0.0f);
    for (i64 i = 0; i < width; i += 16) {
        const f32x16 e = exp16(load16_first(x + i, width - i, lowest) - set16(largest));
        store16_first(y + i, e, width - i);
        sums = sums + e;
    }
    const f32x16 factor = set16(1.0f / sum16(sums));
    for (i64 i = 0; i < width; i += 16)
        store16_first(y + i, load16_first(y + i, width - i) * factor, width - i);
}

// pointers: shares, index (i64), x; ints: rows, width, k, x_stride, is_sigmoid, is_normed. The k best
// of each row's softmax or sigmoid, divided by their sum where that is wanted.
void route_rows(const Args& a, Context& ctx) {
    const i64 width = a.ints[1], k = a.ints[2];
    float* const scores = static_cast<float*>(ctx.scratch(width * sizeof(float)));
    each_row(a, ctx, [&](i64 t) {
        const float* x = a.ptr<const float>(2) + t * a.ints[3];
        float* const shares = a.ptr<float>(0) + t * k;
        if (a.ints[4])
            sigmoid_row(x, width, scores);
        else
            softmax_row(x, width, scores);
        choose(scores, width, k, shares, a.ptr<i64>(1) + t * k);
        if (!a.ints[5]) return;
        float sum = 0.0f;
        for (i64 j = 0; j < k; ++j) sum += shares[j];
        for (i64 j = 0; j < k; ++j) shares[j] /= sum;
    });
}

// pointers: slots, ids (i32, or i64 where is_wide), table (i32 [E, M]), replicas (i32 [E]); ints: rows, k,
// E, M, is_wide. Token t takes replica t mod replicas[e] of expert e; an id outside [0, E) gives -1.
template <typename Id>
void route_slots_of(const Args& a, Context& ctx) {
    const i64 k = a.ints[1], E = a.ints[2], M = a.ints[3];
    const int32_t *const table = a.ptr<const int32_t>(2), *const replicas = a.ptr<const int32_t>(3);
    each_row(a, ctx, [&](i64 t) {
        for (i64 p = t * k; p < (t + 1) * k; ++p) {
            const i64 e = a.ptr<const Id>(1)[p];
            a.ptr<Id>(0)[p] = e < 0 || e >= E ? -1 : table[e * M + t % replicas[e]];
        }
    });
}

void route_slots(const Args& a, Context& ctx) {
    if (a.ints[4])
        route_slots_of<i64>(a, ctx);
    else
        route_slots_of<int32_t>(a, ctx);
}

// pointers: from (i32 [pairs]: token of each row in the order of experts, -1 past the last row), place
// (i32 [pairs]: row of each pair of a token and a choice, -1 if its id is none of ours), groups, ids;
// ints: pairs, k, E, is_wide (ids are i64). One thread does it: a counting sort in two short passes.
void experts_sort(const Args& a, Context& ctx) {
    if (ctx.next(1, 1).empty()) return;
    const i64 pairs = a.ints[0], k = a.ints[1], E = a.ints[2];
    int32_t *const from = a.ptr<int32_t>(0), *const place = a.ptr<int32_t>(1);
    const Groups groups(a.ptr<int32_t>(2), E);
    int32_t* const starts = groups.starts();
    const auto id = [&](i64 p) {
        const i64 e = a.ints[3] ? a.ptr<const i64>(3)[p] : a.ptr<const int32_t>(3)[p];
        return e < 0 || e >= E ? -1 : e;
    };
    for (i64 e = 0; e <= E; ++e) starts[e] = 0;
    for (i64 p = 0; p < pairs; ++p)
        if (id(p) >= 0) ++starts[id(p)];
    for (i64 e = 0, sum = 0; e <= E; ++e) {
        const i64 count = starts[e];
        starts[e] = static_cast<int32_t>(sum);
        sum += count;
    }
    // Each start moves on as rows are placed, to where the next one was: then all move back by one.
    for (i64 p = 0; p < pairs; ++p) {
        const i64 e = id(p);
        place[p] = e < 0 ? -1 : starts[e]++;
        if (e >= 0) from[place[p]] = static_cast<int32_t>(p / k);
    }
    for (i64 p = starts[E]; p < pairs; ++p) from[p] = -1;
    for (i64 e = E; e > 0; --e) starts[e] = starts[e - 1];
    starts[0] = 0;
    groups.list_hits();
}

// y[t] = sum over k of share[t, k] rows[place[t, k]]. pointers: y, rows, place, shares; ints: T, k, width.
void experts_sum(const Args& a, Context& ctx) {
    const i64 k = a.ints[1], width = a.ints[2];
    each_row(a, ctx, [&](i64 t) {
        float* const y = a.ptr<float>(0) + t * width;
        const int32_t* const place = a.ptr<const int32_t>(2) + t * k;
        const float* const share = a.ptr<const float>(3) + t * k;
        for (i64 i = 0; i < width; i += 16) {
            f32x16 sum = set16(0.0f);
            for (i64 j = 0; j < k; ++j) {
                if (place[j] < 0) continue;
                const float* row = a.ptr<const float>(1) + place[j] * width + i;
                sum = fma16(set16(share[j]), load16_first(row, width - i), sum);
            }
            store16_first(y + i, sum, width - i);
        }
    });
}

}  // namespace

const KernelEntry kExpertsKernels[] = {
    {"topk_rows", topk_rows, Share::kRows},
    {"route_rows", route_rows, Share::kRows},
    {"route_slots", route_slots, Share::kRows},
    {"experts_sort", experts_sort},
    {"experts_sum", experts_sum, Share::kRows},
    {nullptr, nullptr},
};

}  // namespace mi
