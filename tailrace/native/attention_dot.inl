// Products of attention in bf16 with dot products of pairs: a few (query, head) rows at once, against pages of sixteen positions.
#pragma once

namespace TR_NS {

using namespace tailrace;

struct BF16Products {
    static constexpr bool WHOLE_TILES = false;
    BF16Products() {}
};

inline void fetch_piece(const PieceAt &, int) {} // `dot_scores` and `dot_outputs` do so as they go

constexpr int DOT_ROWS = 6; // rows whose sums with four vectors are in registers together

// One pair of bf16 in every lane.
inline __m512bh pair_of(const uint16_t *p) {
    int32_t both;
    std::memcpy(&both, p, 4);
    return (__m512bh)_mm512_set1_epi32(both);
}

// A piece to come is fetched while this one is multiplied, a few lines at a time, so that memory is never asked for more than it can
// take in: its keys with this one's keys; with the values of each page of this one those of the same page of it. FETCH: whether
// there is such a piece. It may have fewer pages, or more.
template <int PAGES> struct Lines {
    const uint16_t *at[PAGES];
    Lines(const uint16_t *const *next, int64_t pages, const uint16_t *none) {
        for (int p = 0; p < PAGES; p++) at[p] = p < pages ? next[p] : none;
    }
    TR_INLINE void fetch(int64_t i) const {
        each<PAGES>([&]<int p>() TR_INLINED { __builtin_prefetch(at[p] + i, 0, 3); });
    }
};

// s[page][row][16 positions] = q . key of R rows, for P pages.
template <int R, int P, bool FETCH>
__attribute__((noinline)) void dot_scores(const uint16_t *q, int head_dim, const uint16_t *const *keys, const PieceAt *ahead, float *s) {
    const Lines<PIECE_PAGES> lines(FETCH ? ahead->keys : nullptr, FETCH ? ahead->pages : 0, keys[0]);
    __m512 sums[P][R];
    each<P * R>([&]<int i>() TR_INLINED { sums[i / R][i % R] = _mm512_setzero_ps(); });
    const uint16_t *at[P];
    each<P>([&]<int p>() TR_INLINED { at[p] = keys[p]; });
    for (int d = 0; d < head_dim; d += 2) {
        if constexpr (FETCH) lines.fetch(d * PAGE);
        __m512bh key[P];
        each<P>([&]<int p>() TR_INLINED { key[p] = (__m512bh)_mm512_loadu_si512(at[p] + d * PAGE); });
        each<R>([&]<int r>() TR_INLINED {
            const __m512bh one = pair_of(q + r * head_dim + d);
            each<P>([&]<int p>() TR_INLINED { sums[p][r] = _mm512_dpbf16_ps(sums[p][r], key[p], one); });
        });
    }
    each<P * R>([&]<int i>() TR_INLINED { _mm512_storeu_ps(s + i / R * PAGE * LANES + i % R * LANES, sums[i / R][i % R]); });
}

// o[row][16 J of dim] = weights[page][row][16 positions] . values, of R rows.
template <int R, int J, bool FETCH>
__attribute__((noinline)) void dot_outputs(const uint16_t *weights, int dim, const uint16_t *const *values, int from, int64_t pages, const PieceAt *ahead,
                                           float *o) {
    __m512 sums[J][R];
    each<J * R>([&]<int i>() TR_INLINED { sums[i / R][i % R] = _mm512_setzero_ps(); });
    for (int64_t page = 0; page < pages; page++, weights += PAGE * LANES) {
        const uint16_t *v = values[page] + 2 * from, *next = v;
        if constexpr (FETCH)
            if (page < ahead->pages) next = ahead->values[page] + 2 * from;
        for (int i = 0; i < PAGE; i += 2, v += 2 * dim) {
            __m512bh value[J];
            if constexpr (FETCH) {
                each<J>([&]<int j>() TR_INLINED { __builtin_prefetch(next + 2 * j * LANES, 0, 3); });
                next += 2 * dim;
            }
            each<J>([&]<int j>() TR_INLINED { value[j] = (__m512bh)_mm512_loadu_si512(v + 2 * j * LANES); });
            each<R>([&]<int r>() TR_INLINED {
                const __m512bh one = pair_of(weights + r * LANES + i);
                each<J>([&]<int j>() TR_INLINED { sums[j][r] = _mm512_dpbf16_ps(sums[j][r], value[j], one); });
            });
        }
    }
    each<J * R>([&]<int i>() TR_INLINED { _mm512_storeu_ps(o + i % R * dim + from + i / R * LANES, sums[i / R][i % R]); });
}

// Calls f<R, FETCH>(first row) for a few rows at a time.
template <class Call> inline void few_dots(int64_t rows, const PieceAt *ahead, Call call) {
    for (int64_t r = 0; r < rows; r += DOT_ROWS)
        with_rows<DOT_ROWS>(rows - r, [&]<int R>() {
            if (r == 0 && ahead && ahead->pages) call.template operator()<R, true>(r);
            else call.template operator()<R, false>(r);
        });
}

// s[page][16 rows][16 positions] = q . key, for a whole piece's pages.
inline void page_scores(const uint16_t *q, int64_t rows, int head_dim, const uint16_t *const *keys, int64_t pages, const PieceAt *ahead, float *s) {
    if (pages == 0) return;
    few_dots(rows, ahead, [&]<int R, bool FETCH>(int64_t r) {
        with_rows<PIECE_PAGES>(pages, [&]<int P>() { dot_scores<R, P, FETCH>(q + r * head_dim, head_dim, keys, ahead, s + r * LANES); });
    });
}

// o[16 rows][dim] = weights[page][16 rows][16 positions] . values.
inline void page_outputs(const uint16_t *weights, int64_t rows, int dim, const uint16_t *const *values, int64_t pages, const PieceAt *ahead, float *o) {
    few_dots(rows, ahead, [&]<int R, bool FETCH>(int64_t r) {
        int from = 0;
        for (; from + 4 * LANES <= dim; from += 4 * LANES) dot_outputs<R, 4, FETCH>(weights + r * LANES, dim, values, from, pages, ahead, o + r * dim);
        if (from < dim) dot_outputs<R, 2, FETCH>(weights + r * LANES, dim, values, from, pages, ahead, o + r * dim); // a head is whole pairs of vectors
    });
}

} // namespace TR_NS
