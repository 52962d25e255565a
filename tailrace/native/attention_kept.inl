// Attention over pages that are not bf16 on both sides. It is that of attention.inl, same pieces and same order of sums, over
// numbers as they are kept: what they are to be multiplied with goes into the scores (a scale for each key, a minimum for each
// key times the sum of the query) and into the weights (a scale for each value; the minima, which are the same for all
// dimensions of a group, are summed apart). Of four bits that is done for each group of dimensions. Where keys are rotated,
// so is the query here; where values are, the output is turned back last.
#pragma once

namespace TR_NS {

using namespace tailrace;

// In the high half of a byte a number of four bits is sixteen times itself, and is not shifted down: that would take an
// instruction for every sixteen. Instead the query's odd dimensions are a sixteenth, and so is the output's odd half.
constexpr float SIXTEENTH = 0.0625f;
constexpr int MOST_GROUPS = MAX_HEAD_DIM / GROUP;

inline bool plain(const Kv &kv) { return kv.key == Kept::BF16 && kv.value == Kept::BF16; }

// Loads for `score`: dimensions d and d + 1 of page p's keys; `block` is where each page of the piece begins. Those of four
// bits count from the first dimension of their group.
struct Bf16Keys {
    const uint8_t *const *block;
    Pair operator()(int64_t p, int d) const { return f_load_pairs(reinterpret_cast<const uint16_t *>(block[p]) + d * PAGE); }
};
struct F16Keys {
    const uint8_t *const *block;
    Pair operator()(int64_t p, int d) const {
        const auto *k = reinterpret_cast<const uint16_t *>(block[p]) + d * PAGE;
        return {f_load_f16(k), f_load_f16(k + PAGE)};
    }
};
struct I8Keys {
    const uint8_t *const *block;
    Pair operator()(int64_t p, int d) const {
        const auto *k = reinterpret_cast<const int8_t *>(block[p]) + 2 * PAGE + d * PAGE;
        return {i_float(i_load_i8(k)), i_float(i_load_i8(k + PAGE))};
    }
};
struct I4Keys {
    const uint8_t *const *block;
    int64_t at; // of dimension 0
    Pair operator()(int64_t p, int d) const {
        const I x = i_load_u8(block[p] + at + d / 2 * PAGE);
        return {i_float(x & i_set1(0x0f)), i_float(x & i_set1(0xf0))};
    }
};
struct WideKeys { // [positions / 16][dim][16]
    const float *data;
    int dim;
    Pair operator()(int64_t p, int d) const { return {f_load(data + (p * dim + d) * PAGE), f_load(data + (p * dim + d + 1) * PAGE)}; }
};

// Loads for `weigh`: positions i and i + 1 of the j-th sixteen dimensions from d on.
struct Bf16Values {
    const uint8_t *const *block;
    int dim, d;
    Pair operator()(int64_t i, int j) const {
        return f_load_pairs(reinterpret_cast<const uint16_t *>(block[i / PAGE]) + (i % PAGE) * dim + 2 * (d + j * LANES));
    }
};
struct F16Values {
    const uint8_t *const *block;
    int dim, d;
    Pair operator()(int64_t i, int j) const {
        const auto *v = reinterpret_cast<const uint16_t *>(block[i / PAGE]) + (i % PAGE) * dim + d + j * LANES;
        return {f_load_f16(v), f_load_f16(v + dim)};
    }
};
struct I8Values {
    const uint8_t *const *block;
    int dim, d;
    Pair operator()(int64_t i, int j) const {
        const auto *v = reinterpret_cast<const int8_t *>(block[i / PAGE]) + 2 * PAGE + (i % PAGE) * dim + d + j * LANES;
        return {i_float(i_load_i8(v)), i_float(i_load_i8(v + dim))};
    }
};
struct I4Values { // of one group at most
    const uint8_t *const *block;
    int row;
    int64_t at;
    I mask[2];
    I4Values(const uint8_t *const *blocks, int head_dim, int d)
        : block(blocks), row(padded_pairs(head_dim) / 2), at(kept_header(Kept::I4, head_dim) + d / GROUP * LANES),
          mask{i_set1(d & LANES ? 0xf0 : 0x0f), i_set1(0xf0)} {}
    Pair operator()(int64_t i, int j) const {
        const uint8_t *v = block[i / PAGE] + at + (i % PAGE) * row;
        const I m = mask[j % 2];
        return {i_float(i_load_u8(v) & m), i_float(i_load_u8(v + row) & m)};
    }
};
struct WideValues { // [positions][dim]
    const float *data;
    int dim, d;
    Pair operator()(int64_t i, int j) const { return {f_load(data + i * dim + d + j * LANES), f_load(data + (i + 1) * dim + d + j * LANES)}; }
};

template <class Call> inline void with_keys(Kept kept, const uint8_t *const *block, int head_dim, int d, Call &&call) {
    switch (kept) {
    case Kept::BF16: return call(Bf16Keys{block});
    case Kept::F16: return call(F16Keys{block});
    case Kept::I8: return call(I8Keys{block});
    case Kept::I4: return call(I4Keys{block, kept_header(kept, head_dim) + d / 2 * PAGE});
    }
}
template <class Call> inline void with_values(Kept kept, const uint8_t *const *block, int head_dim, int d, Call &&call) {
    const int dim = padded_dim(head_dim);
    switch (kept) {
    case Kept::BF16: return call(Bf16Values{block, dim, d});
    case Kept::F16: return call(F16Values{block, dim, d});
    case Kept::I8: return call(I8Values{block, dim, d});
    case Kept::I4: return call(I4Values{block, head_dim, d});
    }
}

// One piece of a sequence's pages: where they are, and the same numbers widened, if many rows read them.
struct Piece {
    const AttentionArgs &a;
    int dim;
    const uint8_t *keys[SPLIT / PAGE], *values[SPLIT / PAGE];
    const float *wide_keys = nullptr, *wide_values = nullptr;

    Piece(const AttentionArgs &args, const Pages &pages, PieceView v) : a(args), dim(padded_dim(args.head_dim)) {
        for (int64_t i = 0; i < v.pages; i++) keys[i] = pages.keys(v.begin / PAGE + i), values[i] = pages.values(v.begin / PAGE + i);
    }
    // Dimensions whose scores or outputs have a scale in common.
    int shared(Kept kept) const { return kept == Kept::I4 ? GROUP : dim; }
    // A scale or a minimum of sixteen positions.
    static F header(const uint8_t *block, int which) { return f_load_f16(reinterpret_cast<const uint16_t *>(block) + which * PAGE); }

    void widen(int64_t pages, float *key, float *value) {
        for (int from = 0; from < a.head_dim; from += shared(a.kv.key))
            with_keys(a.kv.key, keys, a.head_dim, from, [&](auto load) {
                const int count = a.head_dim - from < shared(a.kv.key) ? a.head_dim - from : shared(a.kv.key);
                for (int64_t p = 0; p < pages; p++)
                    for (int d = 0; d < count; d += 2) {
                        const Pair both = load(p, d);
                        f_store(key + (p * dim + from + d) * PAGE, both.first);
                        f_store(key + (p * dim + from + d + 1) * PAGE, both.second);
                    }
            });
        for (int d = 0; d < dim; d += LANES)
            with_values(a.kv.value, values, a.head_dim, d, [&](auto load) {
                for (int64_t i = 0; i < pages * PAGE; i += 2) {
                    const Pair both = load(i, 0);
                    f_store(value + i * dim + d, both.first);
                    f_store(value + (i + 1) * dim + d, both.second);
                }
            });
        wide_keys = key, wide_values = value;
    }

    // As `score`, of `count` dimensions from d on.
    template <int R> void dots(const float *q, int d, int count, float scale, int64_t pages, float *s) const {
        constexpr int P = R <= 1 ? 4 : R <= 3 ? 2 : 1;
        int64_t p = 0;
        if (wide_keys) {
            const auto load = [&] { return WideKeys{wide_keys + (p * dim + d) * PAGE, dim}; };
            for (; p + P <= pages; p += P) score<R, P>(q + d, dim, count, scale, load(), s + p * PAGE);
            for (; p < pages; p++) score<R, 1>(q + d, dim, count, scale, load(), s + p * PAGE);
            return;
        }
        const auto with = [&](auto call) { with_keys(a.kv.key, keys + p, a.head_dim, d, call); };
        for (; p + P <= pages; p += P) with([&](auto load) { score<R, P>(q + d, dim, count, scale, load, s + p * PAGE); });
        for (; p < pages; p++) with([&](auto load) { score<R, 1>(q + d, dim, count, scale, load, s + p * PAGE); });
    }

    // Scores of R rows against all pages, [R][SPLIT]; `total` has each row's sums of the query, a group after the other.
    template <int R> void scores(const float *q, const float *total, int64_t pages, float *s) const {
        const Kept kept = a.kv.key;
        if (kept == Kept::BF16 || kept == Kept::F16) return dots<R>(q, 0, a.head_dim, a.scale, pages, s);
        if (kept == Kept::I8) {
            dots<R>(q, 0, a.head_dim, 1.0f, pages, s);
            for (int64_t p = 0; p < pages; p++) {
                const F scale = header(keys[p], 0);
                for (int r = 0; r < R; r++) f_store(s + r * SPLIT + p * PAGE, f_load(s + r * SPLIT + p * PAGE) * scale * f_set1(a.scale));
            }
            return;
        }
        float part[R * SPLIT];
        const int groups = groups_of(a.head_dim);
        for (int g = 0; g < groups; g++) {
            const int d = g * GROUP;
            dots<R>(q, d, a.head_dim - d < GROUP ? a.head_dim - d : GROUP, 1.0f, pages, part);
            for (int64_t p = 0; p < pages; p++) {
                const F scale = header(keys[p], 2 * g), minimum = header(keys[p], 2 * g + 1);
                for (int r = 0; r < R; r++) {
                    float *to = s + r * SPLIT + p * PAGE;
                    F x = f_fma(f_load(part + r * SPLIT + p * PAGE), scale, g == 0 ? f_zero() : f_load(to));
                    x = f_fma(minimum, f_set1(total[r * MOST_GROUPS + g]), x);
                    f_store(to, g + 1 == groups ? x * f_set1(a.scale) : x);
                }
            }
        }
    }

    // As `weigh`, of dimensions [from, end).
    template <int R> void sums(const float *s, int from, int end, int64_t positions, float *o) const {
        constexpr int J = R <= 1 ? 4 : R <= 3 ? 2 : 1;
        int d = from;
        if (wide_values) {
            for (; d + J * LANES <= end; d += J * LANES) weigh<R, J>(s, 0, positions, WideValues{wide_values, dim, d}, o + d, dim);
            for (; d < end; d += LANES) weigh<R, 1>(s, 0, positions, WideValues{wide_values, dim, d}, o + d, dim);
            return;
        }
        const auto with = [&](auto call) { with_values(a.kv.value, values, a.head_dim, d, call); };
        for (; d + J * LANES <= end; d += J * LANES) with([&](auto load) { weigh<R, J>(s, 0, positions, load, o + d, dim); });
        if constexpr (J > 2)
            for (; d + 2 * LANES <= end; d += 2 * LANES) with([&](auto load) { weigh<R, 2>(s, 0, positions, load, o + d, dim); });
        for (; d < end; d += LANES) with([&](auto load) { weigh<R, 1>(s, 0, positions, load, o + d, dim); });
    }

    // Outputs of R rows whose weights are s; those are overwritten.
    template <int R> void outputs(float *s, int64_t pages, int64_t positions, float *o) const {
        const Kept kept = a.kv.value;
        if (kept == Kept::BF16 || kept == Kept::F16) return sums<R>(s, 0, dim, positions, o);
        if (kept == Kept::I8) {
            for (int64_t p = 0; p < pages; p++) {
                const F scale = header(values[p], 0);
                for (int r = 0; r < R; r++) f_store(s + r * SPLIT + p * PAGE, f_load(s + r * SPLIT + p * PAGE) * scale);
            }
            return sums<R>(s, 0, dim, positions, o);
        }
        float scaled[R * SPLIT];
        for (int d = 0; d < dim; d += GROUP) {
            const int end = dim - d < GROUP ? dim : d + GROUP, g = d / GROUP;
            F minima[R];
            for (int r = 0; r < R; r++) minima[r] = f_zero();
            for (int64_t p = 0; p < pages; p++) {
                const F scale = header(values[p], 2 * g), minimum = header(values[p], 2 * g + 1);
                for (int r = 0; r < R; r++) {
                    const F x = f_load(s + r * SPLIT + p * PAGE);
                    minima[r] = f_fma(minimum, x, minima[r]);
                    f_store(scaled + r * SPLIT + p * PAGE, x * scale);
                }
            }
            sums<R>(scaled, d, end, positions, o);
            for (int r = 0; r < R; r++) {
                const F added = f_set1(f_sum(minima[r]));
                float *to = o + r * dim + d;
                f_store(to, f_load(to) + added);
                if (end - d > LANES) f_store(to + LANES, f_fma(f_load(to + LANES), f_set1(SIXTEENTH), added));
            }
        }
    }

    void rows(const float *q, const float *total, int64_t count, PieceView v, const int64_t *lo, const int64_t *hi, float *s, float *o, float *max,
              float *sum) const {
        piece_runs(count, v, lo, hi, max, sum, [&]<int R>(int64_t r, int64_t pages, int64_t last, const int64_t *from, const int64_t *to) {
            scores<R>(q + r * dim, total + r * MOST_GROUPS, pages, s);
            for (int i = 0; i < R; i++) soften(s + i * SPLIT, from[i], to[i], max[r + i], sum[r + i]);
            outputs<R>(s, pages, last, o + r * dim);
        });
    }
};

// What `Piece` wants of the queries: rotated where keys are; and where those are of four bits the sums of groups, and odd
// dimensions a sixteenth.
inline void prepare_queries(const AttentionArgs &a, int64_t rows, float *q, float *total) {
    if (!keys_rotated(a.kv.key)) return;
    const int dim = padded_dim(a.head_dim);
    float odd[LANES];
    for (int i = 0; i < LANES; i++) odd[i] = i % 2 ? SIXTEENTH : 1.0f;
    for (int64_t r = 0; r < rows; r++, q += dim) {
        spin(q, a.head_dim);
        for (int d = a.head_dim; d < dim; d++) q[d] = 0.0f;
        if (a.kv.key != Kept::I4) continue;
        for (int d = 0; d < dim; d += GROUP) {
            F sum = f_zero();
            for (int i = d; i < dim && i < d + GROUP; i += LANES) {
                const F x = f_load(q + i);
                sum = sum + x;
                f_store(q + i, x * f_load(odd));
            }
            total[r * MOST_GROUPS + d / GROUP] = f_sum(sum);
        }
    }
}

void attend_kept(const AttentionArgs &a, const Sequence &s, int kv_head, int64_t first, int64_t count, float *scratch) {
    const int group = a.heads / a.kv_heads, dim = padded_dim(a.head_dim);
    const int64_t rows = count * group;
    // scratch as `attend` has it
    float *keys = scratch, *values = keys + SPLIT * dim, *q = values + SPLIT * dim;
    float *piece = q + rows * dim, *result = piece + rows * dim, *weights = result + rows * dim;
    int64_t lo[MAX_ROWS], hi[MAX_ROWS];
    float piece_max[MAX_ROWS + LANES] = {}, piece_sum[MAX_ROWS + LANES] = {}, total[MAX_ROWS * MOST_GROUPS];
    Running running;
    gather_queries(a, s, kv_head, first, count, q, lo, hi);
    prepare_queries(a, rows, q, total);
    running.clear(rows, result, dim);
    const Pages pages{a, s.table, kv_head};
    const int64_t end = s.context + first + count;
    if (rows <= ROWS_AT_ONCE) pages.fetch(lo[0] / SPLIT, end);
    for (int64_t p = lo[0] / SPLIT; p * SPLIT < end; p++) {
        const PieceView v = piece_view(p, end);
        if (rows <= ROWS_AT_ONCE) pages.fetch(p + 1, end);
        Piece kept(a, pages, v);
        if (rows > ROWS_AT_ONCE) kept.widen(v.pages, keys, values); // once, used for all
        kept.rows(q, total, rows, v, lo, hi, weights, piece, piece_max, piece_sum);
        running.add(rows, result, piece_max, piece_sum, piece, dim);
    }
    for (int64_t r = 0; r < rows; r++) {
        float *out = a.out + (s.start + first + r / group) * a.ldo + int64_t(kv_head * group + r % group) * a.head_dim;
        finish(result + r * dim, running.sum[r], a.head_dim, a.kv.value, out);
    }
}

void attend_pieces_kept(const AttentionArgs &a, const Sequence &s, int kv_head, int64_t query, int64_t from, int64_t to, float *partial,
                        int64_t stride, float *scratch) {
    const int group = a.heads / a.kv_heads, dim = padded_dim(a.head_dim);
    float *q = scratch, *o = q + group * dim, *weights = o + group * dim;
    int64_t lo[MAX_ROWS], hi[MAX_ROWS];
    float max[MAX_ROWS], sum[MAX_ROWS], total[MAX_ROWS * MOST_GROUPS];
    gather_queries(a, s, kv_head, query, 1, q, lo, hi);
    prepare_queries(a, group, q, total);
    const Pages pages{a, s.table, kv_head};
    pages.fetch(from, hi[0]);
    for (int64_t p = from; p < to; p++) {
        const PieceView v = piece_view(p, hi[0]);
        if (p + 1 < to) pages.fetch(p + 1, hi[0]);
        Piece(a, pages, v).rows(q, total, group, v, lo, hi, weights, o, max, sum);
        for (int g = 0; g < group; g++) {
            float *out = partial + g * stride + p * (dim + 2);
            out[0] = max[g];
            out[1] = sum[g];
            if (max[g] != NOTHING) std::memcpy(out + 2, o + g * dim, sizeof(float) * size_t(dim));
        }
    }
}

} // namespace TR_NS
