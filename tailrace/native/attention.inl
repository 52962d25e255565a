// Attention over KV pages. Positions are cut into pieces of SPLIT that begin at multiples of SPLIT; each piece has its own
// softmax, pieces are merged in ascending order. So a query's result is the same bits whether it is computed alone,
// in a chunk, or by several threads that take a piece each.
#pragma once

#include <limits>
#include <type_traits>
#include <utility>

namespace TR_NS {

using namespace tailrace;

constexpr int64_t ROWS_AT_ONCE = 6; // rows whose scores are in registers together
constexpr float NOTHING = -std::numeric_limits<float>::infinity();

// The pages of one sequence and KV head.
struct Pages {
    const AttentionArgs &a;
    const int32_t *table; // of the sequence
    int kv_head;
    int64_t key_bytes, value_bytes; // of a block
    Pages(const AttentionArgs &args, const int32_t *pages, int head)
        : a(args), table(pages), kv_head(head), key_bytes(key_block(args.kv.key, args.head_dim)), value_bytes(value_block(args.kv.value, args.head_dim)) {}
    const uint8_t *keys(int64_t page) const { return a.kv.key_at(table[page], kv_head, key_bytes); }
    const uint8_t *values(int64_t page) const { return a.kv.value_at(table[page], kv_head, value_bytes); }
    // Where they are bf16.
    const uint16_t *key(int64_t page) const { return reinterpret_cast<const uint16_t *>(keys(page)); }
    const uint16_t *value(int64_t page) const { return reinterpret_cast<const uint16_t *>(values(page)); }
    // Brings a piece closer: its pages lie apart, so the core does not see them coming.
    void fetch(int64_t piece, int64_t end) const {
        const int64_t first = piece * (SPLIT / PAGE), last = (end + PAGE - 1) / PAGE;
        for (int64_t page = first; page < last && page < first + SPLIT / PAGE; page++) {
            const uint8_t *k = keys(page), *v = values(page);
            for (int64_t i = 0; i < key_bytes; i += 64) __builtin_prefetch(k + i, 0, 3);
            for (int64_t i = 0; i < value_bytes; i += 64) __builtin_prefetch(v + i, 0, 3);
        }
    }
};

// Two vectors that a load gives: their values, or where they lie; then each is fetched when it is its turn, and takes no
// register before. Where sums fill all but a few, that is the difference between loading a vector and spilling one.
struct Wide {
    const float *first, *second;
};
// The same where they lie as pairs of bf16.
struct Pairs {
    const uint16_t *at;
};
inline F first_of(const Pair &p) { return p.first; }
inline F second_of(const Pair &p) { return p.second; }
inline F first_of(const Pairs &p) { return f_load_pairs(p.at).first; }
inline F second_of(const Pairs &p) { return f_load_pairs(p.at).second; }
inline F first_of(const Wide &p) { return f_load(p.first); }
inline F second_of(const Wide &p) { return f_load(p.second); }

#if defined(TR_AVX2)
// Adds to the sums of R rows what x gives with N vectors of sixteen pairs each: sums[r][...] += x[r][0] * first, then + x[r][1] *
// second. Of sixteen registers the sums take up to twelve, so a vector is fetched half by half, and each half twice.
template <int R, int N> TR_INLINE void add_pairs(const float *x, int64_t stride, const Pairs (&v)[N], __m256 (&sums)[R][2 * N]) {
    each<2>([&]<int SECOND>() TR_INLINED {
        __m256 rows[R];
        each<R>([&]<int r>() TR_INLINED { rows[r] = _mm256_broadcast_ss(x + r * stride + SECOND); });
        each<2 * N>([&]<int h>() TR_INLINED {
            const uint16_t *at = v[h / 2].at + h % 2 * LANES;
            asm volatile("" : "+r"(at)); // or the compiler would keep what it has loaded, in memory
            __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(at));
            if constexpr (SECOND) both = _mm256_srli_epi32(both, 16);
            const __m256 value = _mm256_castsi256_ps(_mm256_slli_epi32(both, 16)); // no mask, which would take a register
            each<R>([&]<int r>() TR_INLINED { sums[r][h] = _mm256_fmadd_ps(rows[r], value, sums[r][h]); });
        });
    });
}
#endif

// Scores of R rows against P pages: s[r][p * 16 + lane] = scale * dot(q[r], key). `load(p, d)`: dimensions d and d + 1 of a
// page's keys. `stride`: floats between rows of q.
template <int R, int P, class Load>
__attribute__((noinline)) void score(const float *q, int64_t stride, int head_dim, float scale, Load load, float *s) {
#if defined(TR_AVX2)
    if constexpr (std::is_same_v<decltype(load(0, 0)), Pairs>) {
        __m256 sums[R][2 * P];
        each<R * 2 * P>([&]<int i>() TR_INLINED { sums[i % R][i / R] = _mm256_setzero_ps(); });
        for (int d = 0; d < head_dim; d += 2) {
            Pairs k[P];
            each<P>([&]<int p>() TR_INLINED { k[p] = load(p, d); });
            add_pairs<R, P>(q + d, stride, k, sums);
        }
        each<R * 2 * P>([&]<int i>() TR_INLINED {
            _mm256_storeu_ps(s + i % R * SPLIT + i / R * 8, _mm256_mul_ps(sums[i % R][i / R], _mm256_set1_ps(scale)));
        });
        return;
    }
#endif
    F acc[R][P];
    for (int r = 0; r < R; r++)
        for (int p = 0; p < P; p++) acc[r][p] = f_zero();
    for (int d = 0; d < head_dim; d += 2) {
        decltype(load(0, d)) k[P];
        for (int p = 0; p < P; p++) k[p] = load(p, d);
        for (int r = 0; r < R; r++) {
            const F x = f_set1(q[r * stride + d]);
            for (int p = 0; p < P; p++) acc[r][p] = f_fma(x, first_of(k[p]), acc[r][p]);
        }
        for (int r = 0; r < R; r++) {
            const F x = f_set1(q[r * stride + d + 1]);
            for (int p = 0; p < P; p++) acc[r][p] = f_fma(x, second_of(k[p]), acc[r][p]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int p = 0; p < P; p++) f_store(s + r * SPLIT + p * PAGE, acc[r][p] * f_set1(scale));
}

// o[r][...] = sum over positions [begin, end) of p[r][position] * value[position], added to what is there unless they are the
// first. `load(i, j)`: positions i and i + 1; the weight of one at `end` or past it is 0, and its value is finite.
template <int R, int J, class Load>
__attribute__((noinline)) void weigh(const float *p, int64_t begin, int64_t end, Load load, float *o, int64_t stride) {
#if defined(TR_AVX2)
    if constexpr (std::is_same_v<decltype(load(0, 0)), Pairs>) {
        __m256 sums[R][2 * J];
        each<R * 2 * J>([&]<int i>() TR_INLINED {
            sums[i % R][i / R] = begin == 0 ? _mm256_setzero_ps() : _mm256_loadu_ps(o + i % R * stride + i / R * 8);
        });
        for (int64_t i = begin; i < end; i += 2) {
            Pairs v[J];
            each<J>([&]<int j>() TR_INLINED { v[j] = load(i, j); });
            add_pairs<R, J>(p + i, SPLIT, v, sums);
        }
        each<R * 2 * J>([&]<int i>() TR_INLINED { _mm256_storeu_ps(o + i % R * stride + i / R * 8, sums[i % R][i / R]); });
        return;
    }
#endif
    F acc[R][J];
    for (int r = 0; r < R; r++)
        for (int j = 0; j < J; j++) acc[r][j] = begin == 0 ? f_zero() : f_load(o + r * stride + j * LANES);
    for (int64_t i = begin; i < end; i += 2) {
        decltype(load(i, 0)) v[J];
        for (int j = 0; j < J; j++) v[j] = load(i, j);
        for (int r = 0; r < R; r++) {
            const F x = f_set1(p[r * SPLIT + i]);
            for (int j = 0; j < J; j++) acc[r][j] = f_fma(x, first_of(v[j]), acc[r][j]);
        }
        for (int r = 0; r < R; r++) {
            const F x = f_set1(p[r * SPLIT + i + 1]);
            for (int j = 0; j < J; j++) acc[r][j] = f_fma(x, second_of(v[j]), acc[r][j]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int j = 0; j < J; j++) f_store(o + r * stride + j * LANES, acc[r][j]);
}

// Turns scores of one row into weights in place; positions outside [from, to) get 0. Returns (max, sum).
inline void soften(float *s, int64_t from, int64_t to, float &max, float &sum) {
    if (from >= to) {
        max = NOTHING;
        sum = 0.0f;
        for (int i = 0; i < SPLIT; i += LANES) f_store(s + i, f_zero());
        return;
    }
    for (int64_t i = 0; i < from; i++) s[i] = NOTHING;
    for (int64_t i = to; i < SPLIT; i++) s[i] = NOTHING;
    F m = f_load(s);
    for (int i = LANES; i < SPLIT; i += LANES) m = f_max(m, f_load(s + i));
    max = f_hmax(m);
    F total = f_zero();
    for (int i = 0; i < SPLIT; i += LANES) {
        const F e = f_exp(f_load(s + i) - f_set1(max));
        f_store(s + i, e);
        total = total + e;
    }
    sum = f_sum(total);
}

// Weights of a row's running sums and of a new piece's: (e^(max - top), e^(piece_max - top)), lane-wise, and the new
// maximum. A side that holds nothing gets weight 0.
inline F merge_weights(F max, F piece_max, F &old, F &fresh) {
    const F top = f_max(f_max(max, piece_max), f_set1(-3e38f));
    old = f_exp(max - top);
    fresh = f_exp(piece_max - top);
    return top;
}

// o = o * old + piece * fresh, over a row.
inline void merge_row(float *o, float old, float fresh, const float *piece, int dim) {
    const F a = f_set1(old), b = f_set1(fresh);
    for (int d = 0; d < dim; d += LANES) f_store(o + d, f_fma(f_load(o + d), a, f_load(piece + d) * b));
}

// Running (maximum, sum, weighted values) of many rows; arrays are padded to whole lanes.
struct Running {
    float max[MAX_ROWS + LANES], sum[MAX_ROWS + LANES], old[MAX_ROWS + LANES], fresh[MAX_ROWS + LANES];

    void clear(int64_t rows, float *o, int dim) {
        for (int64_t r = 0; r < rows + LANES; r++) max[r] = NOTHING, sum[r] = 0.0f;
        std::memset(o, 0, sizeof(float) * size_t(rows * dim));
    }
    // piece_max and piece_sum are as long as max.
    void add(int64_t rows, float *o, const float *piece_max, const float *piece_sum, const float *piece, int dim) {
        for (int64_t r = 0; r < rows; r += LANES) {
            F a, b;
            f_store(max + r, merge_weights(f_load(max + r), f_load(piece_max + r), a, b));
            f_store(old + r, a);
            f_store(fresh + r, b);
            f_store(sum + r, f_fma(f_load(sum + r), a, f_load(piece_sum + r) * b));
        }
        for (int64_t r = 0; r < rows; r++)
            if (piece_max[r] != NOTHING) merge_row(o + r * dim, old[r], fresh[r], piece + r * dim, dim);
    }
};

// out[0, head_dim) = o / sum, turned back where the values are rotated; o is overwritten.
inline void finish(float *o, float sum, int head_dim, Kept value, float *out) {
    const F inverse = f_set1(1.0f / sum);
    for (int d = 0; d < head_dim; d += LANES) f_store(o + d, f_load(o + d) * inverse);
    if (values_rotated(value)) spin(o, head_dim);
    std::memcpy(out, o, sizeof(float) * size_t(head_dim));
}

// Scores of R rows against a piece's pages [first, end), `key(page, d)` as in `score`.
template <int R, class KeyLoad>
inline void score_pages(const float *q, int head_dim, int dim, float scale, int64_t first, int64_t end, KeyLoad key, float *s) {
    constexpr int P = R <= 1 ? 4 : R <= 3 ? 2 : 1;
    int64_t p = first;
    for (; p + P <= end; p += P) score<R, P>(q, dim, head_dim, scale, [&](int i, int d) { return key(p + i, d); }, s + p * PAGE);
    for (; p < end; p++) score<R, 1>(q, dim, head_dim, scale, [&](int, int d) { return key(p, d); }, s + p * PAGE);
}

// Adds the values of a piece's positions [begin, end) to the rows' outputs, `value(position, d)` as in `weigh`.
template <int R, class ValueLoad>
inline void weigh_positions(const float *s, int dim, int64_t begin, int64_t end, ValueLoad value, float *o) {
    constexpr int J = R <= 1 ? 4 : R <= 3 ? 2 : 1;
    int d = 0;
    for (; d + J * LANES <= dim; d += J * LANES)
        weigh<R, J>(s, begin, end, [&](int64_t i, int j) { return value(i, d + j * LANES); }, o + d, dim);
    for (; d < dim; d += LANES) weigh<R, 1>(s, begin, end, [&](int64_t i, int) { return value(i, d); }, o + d, dim);
}

template <int R, class KeyLoad, class ValueLoad>
inline void piece_rows(const float *q, int head_dim, int dim, float scale, int64_t pages, int64_t positions, KeyLoad key, ValueLoad value,
                       const int64_t *from, const int64_t *to, float *s, float *o, float *max, float *sum) {
    score_pages<R>(q, head_dim, dim, scale, 0, pages, key, s);
    for (int r = 0; r < R; r++) soften(s + r * SPLIT, from[r], to[r], max[r], sum[r]);
    weigh_positions<R>(s, dim, 0, positions, value, o);
}

struct PieceView {
    int64_t begin, pages, positions; // first position, pages and positions that exist
};
inline PieceView piece_view(int64_t piece, int64_t end) {
    const int64_t begin = piece * SPLIT, positions = (end - begin < SPLIT ? end - begin : SPLIT);
    return {begin, (positions + PAGE - 1) / PAGE, positions};
}

// Rows [0, rows) against one piece, a few at a time; row r sees absolute positions [lo[r], hi[r]). Calls
// rows<R>(first row, pages, positions, from, to) with what those rows see of the piece.
template <class Call>
inline void piece_runs(int64_t rows, PieceView v, const int64_t *lo, const int64_t *hi, float *max, float *sum, Call call) {
    for (int64_t r = 0; r < rows; r += ROWS_AT_ONCE) {
        const int64_t n = rows - r < ROWS_AT_ONCE ? rows - r : ROWS_AT_ONCE;
        int64_t from[ROWS_AT_ONCE], to[ROWS_AT_ONCE];
        int64_t last = 0;
        for (int64_t i = 0; i < n; i++) {
            from[i] = lo[r + i] > v.begin ? lo[r + i] - v.begin : 0;
            to[i] = hi[r + i] < v.begin + v.positions ? hi[r + i] - v.begin : v.positions;
            last = to[i] > last ? to[i] : last;
        }
        if (last <= 0) {
            for (int64_t i = 0; i < n; i++) max[r + i] = NOTHING, sum[r + i] = 0.0f;
            continue;
        }
        const int64_t pages = (last + PAGE - 1) / PAGE;
        with_rows<ROWS_AT_ONCE>(n, [&]<int R>() { call.template operator()<R>(r, pages, last, from, to); });
    }
}

// Rows of q and o are `dim` apart, the head size rounded up to whole lanes.
template <class KeyLoad, class ValueLoad>
inline void piece_all(const float *q, int64_t rows, int head_dim, int dim, float scale, PieceView v, KeyLoad key, ValueLoad value, const int64_t *lo,
                      const int64_t *hi, float *s, float *o, float *max, float *sum) {
    piece_runs(rows, v, lo, hi, max, sum, [&]<int R>(int64_t r, int64_t pages, int64_t last, const int64_t *from, const int64_t *to) {
        piece_rows<R>(q + r * dim, head_dim, dim, scale, pages, last, key, value, from, to, s, o + r * dim, max + r, sum + r);
    });
}

// R rows against the pieces [first, end) of a sequence that ends at `positions`, straight from its pages. A few of the next
// piece's pages of keys are read in turn with as many of this one's of values: memory gives more where both are read side by
// side. Row r sees positions [lo[r], hi[r]). Calls done(piece, max, sum) when a piece's outputs are in `o`. s: 2 * R * SPLIT floats.
template <int R, class Done>
inline void few_rows(const AttentionArgs &a, const Pages &pages, const float *q, int64_t first, int64_t end, int64_t positions, const int64_t *lo,
                     const int64_t *hi, float *s, float *o, Done done) {
    constexpr int64_t TURN = 2; // pages
    const int dim = padded_dim(a.head_dim);
    float *scores = s, *next = s + R * SPLIT;
    const auto read_keys = [&](int64_t piece, int64_t from, int64_t to, float *out) {
        const uint16_t *keys[SPLIT / PAGE];
        for (int64_t i = from; i < to; i++) keys[i] = pages.key(piece * (SPLIT / PAGE) + i);
        score_pages<R>(q, a.head_dim, dim, a.scale, from, to, [&](int64_t i, int d) { return Pairs{keys[i] + d * PAGE}; }, out);
    };
    read_keys(first, 0, piece_view(first, positions).pages, scores);
    for (int64_t p = first; p < end; p++, std::swap(scores, next)) {
        const PieceView v = piece_view(p, positions);
        const int64_t ahead = p + 1 < end ? piece_view(p + 1, positions).pages : 0;
        const uint16_t *values[SPLIT / PAGE];
        for (int64_t i = 0; i < v.pages; i++) values[i] = pages.value(v.begin / PAGE + i);
        float max[R], sum[R];
        for (int r = 0; r < R; r++)
            soften(scores + r * SPLIT, lo[r] > v.begin ? lo[r] - v.begin : 0, hi[r] < v.begin + v.positions ? hi[r] - v.begin : v.positions, max[r], sum[r]);
        for (int64_t i = 0; i < v.pages; i += TURN) { // no piece has more pages than the one before it
            read_keys(p + 1, i < ahead ? i : ahead, i + TURN < ahead ? i + TURN : ahead, next);
            weigh_positions<R>(scores, dim, i * PAGE, (i + TURN) * PAGE < v.positions ? (i + TURN) * PAGE : v.positions,
                               [&](int64_t j, int d) { return Pairs{values[j / PAGE] + j % PAGE * dim + 2 * d}; }, o);
        }
        done(p, max, sum);
    }
}

inline void gather_queries(const AttentionArgs &a, const Sequence &s, int kv_head, int64_t first, int64_t count, float *q, int64_t *lo,
                           int64_t *hi) {
    const int group = a.heads / a.kv_heads, dim = padded_dim(a.head_dim);
    for (int64_t i = 0; i < count; i++)
        for (int g = 0; g < group; g++) {
            const int64_t row = i * group + g, position = s.context + first + i;
            std::memcpy(q + row * dim, a.q + (s.start + first + i) * a.ldq + int64_t(kv_head * group + g) * a.head_dim,
                        sizeof(float) * size_t(a.head_dim));
            hi[row] = position + 1;
            lo[row] = a.window > 0 && position + 1 > a.window ? position + 1 - a.window : 0;
        }
}

} // namespace TR_NS
#if defined(TR_DOT_BF16)
#include "attention_bf16.inl"
#endif
#include "attention_kept.inl"
namespace TR_NS {

void attend(const AttentionArgs &a, const Sequence &s, int kv_head, int64_t first, int64_t count, float *scratch) {
    if (!plain(a.kv)) return attend_kept(a, s, kv_head, first, count, scratch);
#if defined(TR_DOT_BF16)
    if (attends_in_bf16(a.head_dim)) return attend_bf16(a, s, kv_head, first, count, scratch);
#endif
    const int group = a.heads / a.kv_heads, dim = padded_dim(a.head_dim);
    const int64_t rows = count * group;
    // scratch: widened keys and values, then queries, the piece's outputs, the running outputs, weights of a few rows
    float *keys = scratch, *values = keys + SPLIT * dim, *q = values + SPLIT * dim;
    float *piece = q + rows * dim, *result = piece + rows * dim, *weights = result + rows * dim;
    int64_t lo[MAX_ROWS], hi[MAX_ROWS];
    float piece_max[MAX_ROWS + LANES] = {}, piece_sum[MAX_ROWS + LANES] = {};
    Running running;
    gather_queries(a, s, kv_head, first, count, q, lo, hi);
    running.clear(rows, result, dim);
    const Pages pages{a, s.table, kv_head};
    const int64_t end = s.context + first + count, pieces = (end + SPLIT - 1) / SPLIT;
    if (rows <= ROWS_AT_ONCE)
        with_rows<ROWS_AT_ONCE>(rows, [&]<int R>() {
            few_rows<R>(a, pages, q, lo[0] / SPLIT, pieces, end, lo, hi, weights, piece, [&](int64_t, const float *max, const float *sum) {
                std::memcpy(piece_max, max, sizeof(float) * R);
                std::memcpy(piece_sum, sum, sizeof(float) * R);
                running.add(R, result, piece_max, piece_sum, piece, dim);
            });
        });
    for (int64_t p = lo[0] / SPLIT; rows > ROWS_AT_ONCE && p < pieces; p++) {
        const PieceView v = piece_view(p, end);
        const int64_t page0 = v.begin / PAGE;
        for (int64_t i = 0; i < v.pages; i++) { // widen once, use for all
            const uint16_t *k = pages.key(page0 + i), *x = pages.value(page0 + i);
            for (int d = 0; d < a.head_dim; d += 2) {
                const Pair both = f_load_pairs(k + d * PAGE);
                f_store(keys + (i * dim + d) * PAGE, both.first);
                f_store(keys + (i * dim + d + 1) * PAGE, both.second);
            }
            for (int j = 0; j < PAGE; j += 2)
                for (int d = 0; d < dim; d += LANES) {
                    const Pair both = f_load_pairs(x + j * dim + 2 * d);
                    f_store(values + (i * PAGE + j) * dim + d, both.first);
                    f_store(values + (i * PAGE + j + 1) * dim + d, both.second);
                }
        }
        piece_all(
            q, rows, a.head_dim, dim, a.scale, v,
            [&](int64_t i, int d) { return Wide{keys + (i * dim + d) * PAGE, keys + (i * dim + d + 1) * PAGE}; },
            [&](int64_t i, int d) { return Wide{values + i * dim + d, values + (i + 1) * dim + d}; }, lo, hi, weights, piece, piece_max, piece_sum);
        running.add(rows, result, piece_max, piece_sum, piece, dim);
    }
    for (int64_t r = 0; r < rows; r++) {
        float *out = a.out + (s.start + first + r / group) * a.ldo + int64_t(kv_head * group + r % group) * a.head_dim;
        finish(result + r * dim, running.sum[r], a.head_dim, Kept::BF16, out);
    }
}

// Partial layout: partial[(head in group) * stride + piece * (padded head size + 2)]: max, sum, outputs.
void attend_pieces(const AttentionArgs &a, const Sequence &s, int kv_head, int64_t query, int64_t from, int64_t to, float *partial,
                   int64_t stride, float *scratch) {
    if (!plain(a.kv)) return attend_pieces_kept(a, s, kv_head, query, from, to, partial, stride, scratch);
#if defined(TR_DOT_BF16)
    if (attends_in_bf16(a.head_dim)) return attend_pieces_bf16(a, s, kv_head, query, from, to, partial, stride, scratch);
#endif
    const int group = a.heads / a.kv_heads, dim = padded_dim(a.head_dim);
    float *q = scratch, *o = q + group * dim, *weights = o + group * dim;
    int64_t lo[MAX_ROWS], hi[MAX_ROWS];
    gather_queries(a, s, kv_head, query, 1, q, lo, hi);
    const Pages pages{a, s.table, kv_head};
    const auto keep = [&](int64_t p, int64_t g, float max, float sum, const float *from_o) {
        float *out = partial + g * stride + p * (dim + 2);
        out[0] = max;
        out[1] = sum;
        if (max != NOTHING) std::memcpy(out + 2, from_o, sizeof(float) * size_t(dim));
    };
    for (int64_t first = 0; first < group; first += ROWS_AT_ONCE) // the pages are in the core's cache after the first rows
        with_rows<ROWS_AT_ONCE>(group - first < ROWS_AT_ONCE ? group - first : ROWS_AT_ONCE, [&]<int R>() {
            few_rows<R>(a, pages, q + first * dim, from, to, hi[0], lo + first, hi + first, weights, o, [&](int64_t p, const float *max, const float *sum) {
                for (int r = 0; r < R; r++) keep(p, first + r, max[r], sum[r], o + r * dim);
            });
        });
}

void merge_pieces(const float *partial, int64_t from, int64_t to, int head_dim, Kept value, float *out) {
    const int dim = padded_dim(head_dim);
    float o[MAX_HEAD_DIM] = {}, piece_max[LANES] = {}, piece_sum[LANES] = {};
    Running running;
    running.clear(1, o, dim);
    for (int64_t p = from; p < to; p++) {
        const float *piece = partial + p * (dim + 2);
        piece_max[0] = piece[0];
        piece_sum[0] = piece[1];
        running.add(1, o, piece_max, piece_sum, piece + 2, dim);
    }
    finish(o, running.sum[0], head_dim, value, out);
}

} // namespace TR_NS
