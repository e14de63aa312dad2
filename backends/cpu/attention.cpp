// Attention over a paged cache, with online softmax (Milakov & Gimelshein 2018) over blocks of keys.
//
// Work items are (query block, key-value head, part of the keys). The query heads that share a
// key-value head are rows of one block, so that each key is read once for all of them:
// row = token * group + head. Legend: D head width, G query heads of a key-value head, R rows.
#include <cmath>
#include <cstring>
#include <limits>

#include "gemm_tile.h"
#include "runtime.h"

namespace mi {
namespace {

constexpr i64 kKeyBlock = 64;
// Query tokens of a block: long enough to use a copied block of keys many times, short enough for
// causal blocks to be even.
constexpr i64 kQueryBlock = 32;
// Up to this many rows, keys are used where they lie; beyond, they are copied into tiles first.
constexpr i64 kFewRows = 8;
// Shortest part of the keys worth a thread of its own.
constexpr i64 kMinSplit = 64;
constexpr i64 kMaxSplits = 64;
// Keys between asking for one and using it.
constexpr i64 kKeysAhead = 16;
constexpr float kLowest = -std::numeric_limits<float>::infinity();

struct Problem {
    float* out;
    const float *q, *k_cache, *v_cache;
    const int32_t *starts, *lengths, *pages;
    i64 T, B, H, kv_heads, D, max_pages, page_size, window, q_stride, out_stride, group, padded_D;
    float scale, softcap;

    // pointers: out, q, k_cache, v_cache, starts, lengths, pages; ints: T, B, H, Hkv, D, P, page_size,
    // window (0: none), q_stride, out_stride; floats: scale, softcap (0: none).
    explicit Problem(const Args& a)
        : out(a.ptr<float>(0)),
          q(a.ptr<const float>(1)),
          k_cache(a.ptr<const float>(2)),
          v_cache(a.ptr<const float>(3)),
          starts(a.ptr<const int32_t>(4)),
          lengths(a.ptr<const int32_t>(5)),
          pages(a.ptr<const int32_t>(6)),
          T(a.ints[0]),
          B(a.ints[1]),
          H(a.ints[2]),
          kv_heads(a.ints[3]),
          D(a.ints[4]),
          max_pages(a.ints[5]),
          page_size(a.ints[6]),
          window(a.ints[7]),
          q_stride(a.ints[8]),
          out_stride(a.ints[9]),
          group(H / kv_heads),
          padded_D(round_up(D, 16)),
          scale(a.floats[0]),
          softcap(a.floats[1]) {}

    i64 tokens(i64 b) const { return starts[b + 1] - starts[b]; }
    i64 blocks(i64 b) const { return ceil_div(tokens(b), kQueryBlock); }
    i64 all_blocks() const {
        i64 total = 0;
        for (i64 b = 0; b < B; ++b) total += blocks(b);
        return total;
    }
    // Where key (or value) `position` of a sequence lies in its cache.
    i64 cache_at(i64 b, i64 position, i64 kv_head) const {
        const i64 page = pages[b * max_pages + position / page_size];
        return ((page * page_size + position % page_size) * kv_heads + kv_head) * D;
    }
};

// A block of queries of one sequence and one key-value head.
struct Item {
    i64 b, kv_head, token, tokens, position;

    Item(const Problem& p, i64 index) : kv_head(index % p.kv_heads) {
        i64 block = index / p.kv_heads;
        for (b = 0; block >= p.blocks(b); ++b) block -= p.blocks(b);
        // Later blocks see more keys; taking them first evens the threads out.
        block = p.blocks(b) - 1 - block;
        token = p.starts[b] + block * kQueryBlock;
        tokens = least(kQueryBlock, p.starts[b + 1] - token);
        position = p.lengths[b] - p.tokens(b) + block * kQueryBlock;
    }
    i64 rows(const Problem& p) const { return tokens * p.group; }
    // Keys that any of the block's queries sees.
    Range keys(const Problem& p) const {
        const i64 first = p.window > 0 ? most(0, position - p.window + 1) : 0;
        return {first, most(0, position + tokens)};
    }
};

// Memory of one thread: queries, sums and outputs of a block, and a block of keys.
struct Workspace {
    float *q, *o, *scores, *keys, *values, *largest, *total;

    static i64 floats(i64 rows, i64 D) {
        return 2 * rows * D + (rows + 2 * D) * kKeyBlock + 2 * round_up(rows, 16);
    }
    Workspace(float* memory, i64 rows, i64 D)
        : q(memory),
          o(q + rows * D),
          scores(o + rows * D),
          keys(scores + rows * kKeyBlock),
          values(keys + D * kKeyBlock),
          largest(values + D * kKeyBlock),
          total(largest + round_up(rows, 16)) {}
};

void load_queries(const Problem& p, const Item& item, const Workspace& w) {
    const i64 D = p.padded_D;
    for (i64 r = 0; r < item.rows(p); ++r) {
        const i64 t = item.token + r / p.group, h = item.kv_head * p.group + r % p.group;
        const float* q = p.q + t * p.q_stride + h * p.D;
        for (i64 i = 0; i < D; ++i) w.q[r * D + i] = i < p.D ? q[i] * p.scale : 0.0f;
        w.largest[r] = kLowest;
        w.total[r] = 0.0f;
    }
    std::memset(w.o, 0, static_cast<size_t>(item.rows(p) * D) * sizeof(float));
}

// Turn the scores of one block of keys into weights, row by row, and scale what was summed before.
void soften(const Problem& p, const Item& item, const Workspace& w, i64 first_key, i64 count) {
    for (i64 r = 0; r < item.rows(p); ++r) {
        float* s = w.scores + r * kKeyBlock;
        const i64 position = item.position + r / p.group;
        const i64 end = least(count, position + 1 - first_key);
        const i64 begin = p.window > 0 ? most(0, position - p.window + 1 - first_key) : 0;
        if (p.softcap > 0.0f) {
            const f32x16 cap = set16(p.softcap), inverse = set16(1.0f / p.softcap);
            for (i64 i = 0; i < kKeyBlock; i += 16) store16(s + i, cap * tanh16(load16(s + i) * inverse));
        }
        for (i64 i = 0; i < least(begin, kKeyBlock); ++i) s[i] = kLowest;
        for (i64 i = most(end, 0); i < kKeyBlock; ++i) s[i] = kLowest;
        f32x16 top = set16(w.largest[r]);
        for (i64 i = 0; i < kKeyBlock; i += 16) top = max16(top, load16(s + i));
        const float largest = largest16(top);
        if (largest == kLowest) {
            // Nothing seen yet: exp(-inf + inf) would be NaN.
            std::memset(s, 0, kKeyBlock * sizeof(float));
            continue;
        }
        f32x16 sums = set16(0.0f);
        for (i64 i = 0; i < kKeyBlock; i += 16) {
            const f32x16 e = exp16(load16(s + i) - set16(largest));
            store16(s + i, e);
            sums = sums + e;
        }
        const float keep = std::exp(w.largest[r] - largest);
        w.total[r] = w.total[r] * keep + sum16(sums);
        w.largest[r] = largest;
        if (keep == 1.0f) continue;
        float* o = w.o + r * p.padded_D;
        for (i64 i = 0; i < p.padded_D; i += 16) store16(o + i, load16(o + i) * set16(keep));
    }
}

// Ask for one head's key or value ahead of its use: rows of other heads lie between them, which the
// hardware's prefetcher does not follow.
inline void fetch(const float* row, i64 D) {
    for (i64 i = 0; i < D; i += 16) MI_PREFETCH(row + i);
}

// Scores of all rows with four keys at a time.
void score_in_place(const Problem& p, const Item& item, const Workspace& w, i64 key, i64 count) {
    const i64 rows = item.rows(p), D = p.padded_D, whole = p.D / 16 * 16;
    const auto k_row = [&](i64 j) {
        return p.k_cache + p.cache_at(item.b, key + least(j, count - 1), item.kv_head);
    };
    for (i64 j = 0; j < count; j += 4) {
        const float *k0 = k_row(j), *k1 = k_row(j + 1), *k2 = k_row(j + 2), *k3 = k_row(j + 3);
        for (i64 ahead = 0; ahead < 4; ++ahead) fetch(k_row(j + kKeysAhead + ahead), p.D);
        for (i64 r = 0; r < rows; ++r) {
            const float* q = w.q + r * D;
            f32x16 s0 = set16(0.0f), s1 = s0, s2 = s0, s3 = s0;
            for (i64 i = 0; i < whole; i += 16) {
                const f32x16 part = load16(q + i);
                s0 = fma16(part, load16(k0 + i), s0);
                s1 = fma16(part, load16(k1 + i), s1);
                s2 = fma16(part, load16(k2 + i), s2);
                s3 = fma16(part, load16(k3 + i), s3);
            }
            float* s = w.scores + r * kKeyBlock + j;
            sum16x4(s0, s1, s2, s3, s);
            for (i64 i = whole; i < p.D; ++i) {
                s[0] += q[i] * k0[i];
                s[1] += q[i] * k1[i];
                s[2] += q[i] * k2[i];
                s[3] += q[i] * k3[i];
            }
        }
    }
}

// o += weights times values, R chunks of 16 elements of D in registers at a time.
template <int R>
inline void add_values(const float* const* rows, const float* weights, i64 count, i64 at, float* o) {
    f32x16 acc[R];
    for (int c = 0; c < R; ++c) acc[c] = load16(o + at + 16 * c);
    for (i64 j = 0; j < count; ++j) {
        const f32x16 weight = set16(weights[j]);
        for (int c = 0; c < R; ++c) acc[c] = fma16(weight, load16(rows[j] + at + 16 * c), acc[c]);
    }
    for (int c = 0; c < R; ++c) store16(o + at + 16 * c, acc[c]);
}

// Few rows: keys and values are used where they lie.
void attend_in_place(const Problem& p, const Item& item, const Workspace& w, i64 key, i64 count) {
    const i64 D = p.padded_D;
    const float* values[kKeyBlock];
    for (i64 j = 0; j < count; ++j) {
        values[j] = p.v_cache + p.cache_at(item.b, key + j, item.kv_head);
        fetch(values[j], p.D);
    }
    score_in_place(p, item, w, key, count);
    soften(p, item, w, key, count);
    for (i64 r = 0; r < item.rows(p); ++r) {
        const float* weights = w.scores + r * kKeyBlock;
        float* o = w.o + r * D;
        i64 i = 0;
        for (; i + 64 <= p.D; i += 64) add_values<4>(values, weights, count, i, o);
        for (; i + 16 <= p.D; i += 16) add_values<1>(values, weights, count, i, o);
        for (; i < p.D; ++i)
            for (i64 j = 0; j < count; ++j) o[i] += weights[j] * values[j][i];
    }
}

// Keys become columns, [D][64], so that scores need no sum across lanes.
void copy_keys(const Problem& p, const Item& item, const Workspace& w, i64 key, i64 count) {
    const i64 D = p.padded_D;
    if (count < kKeyBlock || D > p.D) {
        std::memset(w.keys, 0, static_cast<size_t>(D * kKeyBlock) * sizeof(float));
        std::memset(w.values, 0, static_cast<size_t>(D * kKeyBlock) * sizeof(float));
    }
    for (i64 j = 0; j < count; ++j) {
        const i64 at = p.cache_at(item.b, key + j, item.kv_head);
        for (i64 i = 0; i < p.D; ++i) w.keys[i * kKeyBlock + j] = p.k_cache[at + i];
        std::memcpy(w.values + j * D, p.v_cache + at, static_cast<size_t>(p.D) * sizeof(float));
    }
}

// Many rows: two products of tiles, scores = q keys and o += weights values.
void attend_in_tiles(const Problem& p, const Item& item, const Workspace& w, i64 key, i64 count) {
    const i64 rows = item.rows(p), D = p.padded_D;
    copy_keys(p, item, w, key, count);
    for (i64 j = 0; j < round_up(count, 16); j += 16) {
        each_tile(0, rows, [&](auto constant, i64 r) {
            constexpr int R = decltype(constant)::value;
            f32x16 acc[R];
            for (int i = 0; i < R; ++i) acc[i] = set16(0.0f);
            gemm_tile<R>(w.q + r * D, D, w.keys + j, kKeyBlock, D, acc);
            for (int i = 0; i < R; ++i) store16(w.scores + (r + i) * kKeyBlock + j, acc[i]);
        });
    }
    soften(p, item, w, key, count);
    for (i64 d = 0; d < D; d += 16) {
        each_tile(0, rows, [&](auto constant, i64 r) {
            constexpr int R = decltype(constant)::value;
            f32x16 acc[R];
            for (int i = 0; i < R; ++i) acc[i] = load16(w.o + (r + i) * D + d);
            gemm_tile<R>(w.scores + r * kKeyBlock, kKeyBlock, w.values + d, D, count, acc);
            for (int i = 0; i < R; ++i) store16(w.o + (r + i) * D + d, acc[i]);
        });
    }
}

void attend(const Problem& p, const Item& item, const Workspace& w, Range keys) {
    load_queries(p, item, w);
    const bool is_small = item.rows(p) <= kFewRows;
    for (i64 key = keys.begin; key < keys.end; key += kKeyBlock) {
        const i64 count = least(kKeyBlock, keys.end - key);
        if (is_small) attend_in_place(p, item, w, key, count);
        else attend_in_tiles(p, item, w, key, count);
    }
}

float* out_row(const Problem& p, const Item& item, i64 r) {
    const i64 t = item.token + r / p.group, h = item.kv_head * p.group + r % p.group;
    return p.out + t * p.out_stride + h * p.D;
}

void store_outputs(const Problem& p, const Item& item, const Workspace& w) {
    for (i64 r = 0; r < item.rows(p); ++r) {
        // A row that sees no key (padding) is zero.
        const f32x16 factor = set16(w.total[r] > 0.0f ? 1.0f / w.total[r] : 0.0f);
        float* out = out_row(p, item, r);
        for (i64 i = 0; i < p.D; i += 16)
            store16_first(out + i, load16(w.o + r * p.padded_D + i) * factor, p.D - i);
    }
}

// Put the parts of one item together: each has its own largest score, total and outputs.
void merge(const Problem& p, const Item& item, float* const* parts, i64 splits) {
    const i64 rows = item.rows(p);
    const Workspace first(parts[0], rows, p.padded_D);
    for (i64 s = 1; s < splits; ++s) {
        const Workspace w(parts[s], rows, p.padded_D);
        for (i64 r = 0; r < rows; ++r) {
            const float largest = std::fmax(first.largest[r], w.largest[r]);
            if (largest == kLowest) continue;
            const float keep = std::exp(first.largest[r] - largest);
            const float gain = std::exp(w.largest[r] - largest);
            first.total[r] = first.total[r] * keep + w.total[r] * gain;
            first.largest[r] = largest;
            float *o = first.o + r * p.padded_D, *other = w.o + r * p.padded_D;
            for (i64 i = 0; i < p.padded_D; i += 16)
                store16(o + i, fma16(load16(other + i), set16(gain), load16(o + i) * set16(keep)));
        }
    }
    store_outputs(p, item, first);
}

// Parts to cut each item's keys into, so that few long sequences keep every thread busy.
i64 choose_splits(const Problem& p, i64 items, int threads) {
    if (items == 0 || items >= 4 * threads || threads == 1) return 1;
    i64 longest = 0;
    for (i64 b = 0; b < p.B; ++b) longest = most(longest, p.lengths[b]);
    if (p.window > 0) longest = least(longest, p.window + kQueryBlock);
    return most(1, least(kMaxSplits, least(longest / kMinSplit, ceil_div(4 * threads, items))));
}

// How a call is cut up: items, parts of each item's keys, and floats of a workspace.
struct Cut {
    i64 items, splits, floats;

    Cut(const Problem& p, int threads)
        : items(p.all_blocks() * p.kv_heads),
          splits(choose_splits(p, items, threads)),
          floats(round_up(Workspace::floats(kQueryBlock * p.group, p.padded_D), 16)) {}
};

size_t attention_bytes(const Args& a, int num_threads) {
    const Cut cut(Problem(a), num_threads);
    return cut.splits == 1 ? 0 : static_cast<size_t>(cut.items * cut.splits * cut.floats) * sizeof(float);
}

// Keys of part s of the item's, in whole blocks.
Range part_of_keys(Range keys, i64 s, i64 splits) {
    const i64 blocks = ceil_div(keys.end - keys.begin, kKeyBlock);
    return {keys.begin + blocks * s / splits * kKeyBlock,
            least(keys.end, keys.begin + blocks * (s + 1) / splits * kKeyBlock)};
}

// Phase 0 attends, phase 1 merges the parts of items whose keys were split.
void attention_paged(const Args& a, Context& ctx) {
    const Problem p(a);
    const Cut cut(p, ctx.num_threads);
    float* const parts = static_cast<float*>(ctx.shared);
    if (ctx.phase == 1) {
        if (cut.splits == 1) return;
        for (Range r = ctx.next(cut.items, 1); !r.empty(); r = ctx.next(cut.items, 1)) {
            float* workspaces[kMaxSplits];
            for (i64 s = 0; s < cut.splits; ++s)
                workspaces[s] = parts + (r.begin * cut.splits + s) * cut.floats;
            merge(p, Item(p, r.begin), workspaces, cut.splits);
        }
        return;
    }
    float* const own =
        static_cast<float*>(ctx.scratch(static_cast<size_t>(cut.floats) * sizeof(float)));
    // Rows that belong to no sequence are padding; each is one more piece of work.
    const i64 work = cut.items * cut.splits, padding = p.T - p.starts[p.B];
    for (Range r = ctx.next(work + padding, 1); !r.empty(); r = ctx.next(work + padding, 1)) {
        if (r.begin >= work) {
            const i64 t = p.starts[p.B] + r.begin - work;
            std::memset(p.out + t * p.out_stride, 0, static_cast<size_t>(p.H * p.D) * sizeof(float));
            continue;
        }
        const Item item(p, r.begin / cut.splits);
        const Workspace w(cut.splits == 1 ? own : parts + r.begin * cut.floats, item.rows(p), p.padded_D);
        attend(p, item, w, part_of_keys(item.keys(p), r.begin % cut.splits, cut.splits));
        if (cut.splits == 1) store_outputs(p, item, w);
    }
}

}  // namespace

const KernelEntry kAttentionKernels[] = {
    {"attention_paged", attention_paged, Share::kParts, 2, attention_bytes},
    {nullptr, nullptr},
};

}  // namespace mi
