// Attention in bf16, where an instruction multiplies pairs of bf16: queries and weights are rounded to it as keys and values are.
// Every row is computed by itself, and pieces are the same as in attention.inl; so here too a query's result is the same bits
// alone, in a chunk, or in pieces that several threads take. It is used for head sizes that are whole tiles and for KV in
// bf16, for one query as for many: its bits are not those of the other builds.
#pragma once

namespace TR_NS {

using namespace tailrace;

constexpr int PIECE_PAGES = SPLIT / PAGE;

inline bool attends_in_bf16(int head_dim) { return head_dim % 32 == 0; }

// Where a piece's keys and values lie.
struct PieceAt {
    const uint16_t *keys[PIECE_PAGES], *values[PIECE_PAGES];
    int64_t pages = 0;
    PieceAt(const Pages &pages, int64_t first, int64_t end) {
        for (; this->pages < PIECE_PAGES && first + this->pages < end; this->pages++)
            keys[this->pages] = pages.key(first + this->pages), values[this->pages] = pages.value(first + this->pages);
    }
};

} // namespace TR_NS
#if defined(TR_AMX)
#include "attention_amx.inl"
#else
#include "attention_dot.inl"
#endif
namespace TR_NS {

// 2^x for x <= 0, to 4e-6 of it; below -126, 2^-126 and no denormal.
inline F f_exp2(F x) {
    const __m512 t = _mm512_max_ps(x.v, _mm512_set1_ps(-126.0f));
    const __m512 n = _mm512_roundscale_ps(t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const F r{_mm512_sub_ps(t, n)};
    F p = f_fma(f_set1(9.6181291e-3f), r, f_set1(5.5504109e-2f));
    p = f_fma(p, r, f_set1(2.4022651e-1f));
    p = f_fma(p, r, f_set1(6.9314718e-1f));
    p = f_fma(p, r, f_set1(1.0f));
    return {_mm512_scalef_ps(p.v, n)};
}

inline void store_bf16(uint16_t *p, F a) { _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), (__m256i)_mm512_cvtneps_pbh(a.v)); }

// The queries of one task, as tiles take them, in units of log2(e): [rows, padded to whole tiles][head_dim] bf16.
inline void gather_bf16(const AttentionArgs &a, const Sequence &s, int kv_head, int64_t first, int64_t count, uint16_t *q, int64_t *lo,
                        int64_t *hi) {
    const int group = a.heads / a.kv_heads;
    const F scale = f_set1(a.scale * 1.44269504f);
    int64_t row = 0;
    for (int64_t i = 0; i < count; i++)
        for (int g = 0; g < group; g++, row++) {
            const int64_t position = s.context + first + i;
            const float *from = a.q + (s.start + first + i) * a.ldq + int64_t(kv_head * group + g) * a.head_dim;
            for (int d = 0; d < a.head_dim; d += LANES) store_bf16(q + row * a.head_dim + d, f_load(from + d) * scale);
            hi[row] = position + 1;
            lo[row] = a.window > 0 && position + 1 > a.window ? position + 1 - a.window : 0;
        }
    for (; row % PAGE; row++) std::memset(q + row * a.head_dim, 0, sizeof(uint16_t) * size_t(a.head_dim));
}

// Up to sixteen rows against one piece, while what is read next is fetched, if anything: their maxima, in natural units as pieces
// elsewhere have them, sums, and outputs [16][dim].
inline void piece_bf16(const AttentionArgs &a, const Pages &pages, const uint16_t *q, int64_t rows, int64_t piece, const int64_t *lo,
                       const int64_t *hi, const PieceAt *ahead, float *max, float *sum, float *o) {
    alignas(64) float s[PIECE_PAGES * PAGE * LANES];
    alignas(64) uint16_t weights[PIECE_PAGES * PAGE * LANES];
    const int64_t begin = piece * SPLIT;
    int64_t last = 0;
    for (int64_t r = 0; r < rows; r++) last = hi[r] > last ? hi[r] : last;
    last = last - begin < SPLIT ? last - begin : SPLIT;
    const int64_t count = last <= 0 ? 0 : (last + PAGE - 1) / PAGE;
    const PieceAt at(pages, begin / PAGE, begin / PAGE + count);
    page_scores(q, rows, a.head_dim, at.keys, count, ahead, s);
    for (int64_t r = 0; r < rows; r++) {
        const int64_t from = lo[r] - begin, to = hi[r] - begin;
        if (from >= SPLIT || to <= 0) {
            max[r] = NOTHING;
            sum[r] = 0.0f;
            for (int p = 0; p < PIECE_PAGES; p++) std::memset(weights + p * PAGE * LANES + r * LANES, 0, 2 * LANES);
            continue;
        }
        F x[PIECE_PAGES], total;
        if (from <= 0 && to >= SPLIT) { // all of it is seen
            for (int p = 0; p < PIECE_PAGES; p++) x[p] = f_load(s + p * PAGE * LANES + r * LANES);
            const F top = f_set1(f_hmax(f_max(f_max(x[0], x[1]), f_max(x[2], x[3]))));
            for (int p = 0; p < PIECE_PAGES; p++) x[p] = f_exp2(x[p] - top);
            max[r] = _mm512_cvtss_f32(top.v) * 0.693147181f;
        } else {
            __mmask16 seen[PIECE_PAGES];
            const __m512 none = _mm512_set1_ps(NOTHING);
            for (int p = 0; p < PIECE_PAGES; p++) {
                const int64_t f = from - p * PAGE, t = to - p * PAGE;
                const uint32_t below = t <= 0 ? 0 : t >= PAGE ? 0xffff : (1u << t) - 1, under = f <= 0 ? 0 : f >= PAGE ? 0xffff : (1u << f) - 1;
                seen[p] = static_cast<__mmask16>(below & ~under);
                x[p] = {_mm512_mask_loadu_ps(none, seen[p], s + p * PAGE * LANES + r * LANES)};
            }
            const F top = f_set1(f_hmax(f_max(f_max(x[0], x[1]), f_max(x[2], x[3]))));
            for (int p = 0; p < PIECE_PAGES; p++) x[p] = {_mm512_maskz_mov_ps(seen[p], f_exp2(x[p] - top).v)};
            max[r] = _mm512_cvtss_f32(top.v) * 0.693147181f;
        }
        total = (x[0] + x[1]) + (x[2] + x[3]);
        for (int p = 0; p < PIECE_PAGES; p++) store_bf16(weights + p * PAGE * LANES + r * LANES, x[p]);
        sum[r] = f_sum(total);
    }
    for (int64_t r = rows; r < PAGE && BF16Products::WHOLE_TILES; r++)
        for (int p = 0; p < PIECE_PAGES; p++) std::memset(weights + p * PAGE * LANES + r * LANES, 0, 2 * LANES);
    page_outputs(weights, rows, a.head_dim, at.values, count, ahead, o);
}

// A piece of a sequence that ends at `end`; none from `pieces` on.
inline PieceAt piece_at(const Pages &pages, int64_t piece, int64_t pieces, int64_t end) {
    return {pages, piece * PIECE_PAGES, piece < pieces ? (end + PAGE - 1) / PAGE : 0};
}

// What is read after the piece before `piece`: that piece, or, where the task ends with `pieces`, what comes behind it.
inline PieceAt piece_ahead(const AttentionArgs &a, const Pages &pages, int64_t piece, int64_t pieces, int64_t end) {
    if (piece < pieces || !a.ahead.table) return piece_at(pages, piece, pieces, end);
    return {Pages{a, a.ahead.table, a.ahead.kv_head}, a.ahead.page, a.ahead.end};
}

inline float *aligned(float *p) { return reinterpret_cast<float *>((reinterpret_cast<uintptr_t>(p) + 63) / 64 * 64); }

// Scratch of one task: queries, one piece's outputs, the running outputs.
struct ScratchBF16 {
    uint16_t *q;
    float *piece, *result;
    ScratchBF16(float *scratch, int64_t rows, int head_dim) {
        const int64_t padded = (rows + PAGE - 1) / PAGE * PAGE;
        float *p = aligned(scratch);
        q = reinterpret_cast<uint16_t *>(p);
        piece = p + padded * head_dim / 2;
        result = piece + PAGE * head_dim;
    }
};

void attend_bf16(const AttentionArgs &a, const Sequence &s, int kv_head, int64_t first, int64_t count, float *scratch) {
    const int group = a.heads / a.kv_heads, dim = a.head_dim;
    const int64_t rows = count * group, end = s.context + first + count;
    const ScratchBF16 t(scratch, rows, dim);
    int64_t lo[MAX_ROWS], hi[MAX_ROWS];
    gather_bf16(a, s, kv_head, first, count, t.q, lo, hi);
    const Pages pages{a, s.table, kv_head};
    Running running[MAX_ROWS / PAGE];
    for (int64_t r = 0; r < rows; r += PAGE) running[r / PAGE].clear(rows - r < PAGE ? rows - r : PAGE, t.result + r * dim, dim);
    const BF16Products products;
    const bool few = rows <= PAGE; // they read memory rather than the cache
    float piece_max[2 * LANES] = {}, piece_sum[2 * LANES] = {};
    const int64_t pieces = (end + SPLIT - 1) / SPLIT;
    if (few) fetch_piece(piece_at(pages, lo[0] / SPLIT, pieces, end), dim);
    for (int64_t p = lo[0] / SPLIT; p < pieces; p++) {
        const PieceAt ahead = piece_ahead(a, pages, p + 1, pieces, end);
        if (few) fetch_piece(piece_at(pages, p + 1, pieces, end), dim);
        for (int64_t r = 0; r < rows; r += PAGE) {
            const int64_t n = rows - r < PAGE ? rows - r : PAGE;
            piece_bf16(a, pages, t.q + r * dim, n, p, lo + r, hi + r, r == 0 ? &ahead : nullptr, piece_max, piece_sum, t.piece);
            running[r / PAGE].add(n, t.result + r * dim, piece_max, piece_sum, t.piece, dim);
        }
    }
    for (int64_t r = 0; r < rows; r++) {
        float *out = a.out + (s.start + first + r / group) * a.ldo + int64_t(kv_head * group + r % group) * dim;
        finish(t.result + r * dim, running[r / PAGE].sum[r % PAGE], dim, Kept::BF16, out);
    }
}

void attend_pieces_bf16(const AttentionArgs &a, const Sequence &s, int kv_head, int64_t query, int64_t from, int64_t to, float *partial,
                         int64_t stride, float *scratch) {
    const int group = a.heads / a.kv_heads, dim = a.head_dim;
    const ScratchBF16 t(scratch, group, dim);
    int64_t lo[MAX_ROWS], hi[MAX_ROWS];
    float max[LANES], sum[LANES];
    gather_bf16(a, s, kv_head, query, 1, t.q, lo, hi);
    const Pages pages{a, s.table, kv_head};
    const BF16Products products;
    fetch_piece(piece_at(pages, from, to, hi[0]), dim);
    for (int64_t p = from; p < to; p++) {
        const PieceAt ahead = piece_ahead(a, pages, p + 1, to, hi[0]);
        fetch_piece(piece_at(pages, p + 1, to, hi[0]), dim);
        for (int64_t r = 0; r < group; r += PAGE) {
            const int64_t n = group - r < PAGE ? group - r : PAGE;
            piece_bf16(a, pages, t.q + r * dim, n, p, lo + r, hi + r, r == 0 ? &ahead : nullptr, max, sum, t.piece);
            for (int64_t g = 0; g < n; g++) {
                float *out = partial + (r + g) * stride + p * (dim + 2);
                out[0] = max[g];
                out[1] = sum[g];
                if (max[g] != NOTHING) std::memcpy(out + 2, t.piece + g * dim, sizeof(float) * size_t(dim));
            }
        }
    }
}

} // namespace TR_NS
