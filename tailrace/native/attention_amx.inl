// Products of attention in bf16 with AMX: sixteen (query, head) rows at once, however few there are, against pages of sixteen
// positions.
#pragma once

namespace TR_NS {

using namespace tailrace;

// Tiles 0 to 3: sums, [16][16] float. 4: queries, [16][32] bf16. 5: keys, [16][16][2]. 6: weights, [16][16]. 7: values, [8][16][2].
struct AttentionConfig : TileConfig {
    constexpr AttentionConfig() {
        for (int t = 0; t < 8; t++) set(t, t == 7 ? 8 : 16, t == 6 ? 32 : 64);
    }
};
inline constexpr AttentionConfig ATTENTION_CONFIG;

struct BF16Products {
    static constexpr bool WHOLE_TILES = true; // rows that there are not are computed too
    BF16Products() { configure(ATTENTION_CONFIG); }
};

#define TR_LOAD(T, p, stride) asm volatile("tileloadd (%0,%1,1), %%tmm" #T : : "r"(p), "r"(size_t(stride)) : "memory")
#define TR_FOUR(OP) OP(0) OP(1) OP(2) OP(3)

// Brings a whole piece closer: its pages lie apart, so the core does not see them coming.
inline void fetch_piece(const PieceAt &piece, int head_dim) {
    for (int64_t page = 0; page < piece.pages; page++)
        for (const uint16_t *block : {piece.keys[page], piece.values[page]})
            for (int64_t i = 0; i < head_dim * PAGE; i += 32) __builtin_prefetch(block + i, 0, 3);
}

// s[page][16 rows][16 positions] = q . key, for a whole piece's pages; those past `pages` are left alone.
inline void page_scores(const uint16_t *q, int64_t, int head_dim, const uint16_t *const *keys, int64_t pages, const PieceAt *, float *s) {
#define TR_OP(P)               \
    if (P < pages) {           \
        TR_LOAD(5, keys[P] + d * PAGE, 64); \
        space();               \
        asm volatile("tdpbf16ps %%tmm5, %%tmm4, %%tmm" #P : :); \
        space();               \
    }
    asm volatile("tilezero %%tmm0\n\ttilezero %%tmm1\n\ttilezero %%tmm2\n\ttilezero %%tmm3" : :);
    for (int d = 0; d < head_dim; d += 32) {
        TR_LOAD(4, q + d, sizeof(uint16_t) * size_t(head_dim));
        space();
        TR_FOUR(TR_OP)
    }
#undef TR_OP
#define TR_OP(P) \
    if (P < pages) asm volatile("tilestored %%tmm" #P ", (%0,%1,1)" : : "r"(s + P * PAGE * LANES), "r"(size_t(64)) : "memory");
    TR_FOUR(TR_OP)
#undef TR_OP
}

// o[16 rows][dim] = weights[page][16 rows][16 positions] . values.
inline void page_outputs(const uint16_t *weights, int64_t, int dim, const uint16_t *const *values, int64_t pages, const PieceAt *, float *o) {
    for (int from = 0; from < dim; from += 4 * LANES) {
        asm volatile("tilezero %%tmm0\n\ttilezero %%tmm1\n\ttilezero %%tmm2\n\ttilezero %%tmm3" : :);
        for (int64_t page = 0; page < pages; page++) {
            const uint16_t *v = values[page] + 2 * from;
            TR_LOAD(6, weights + page * PAGE * LANES, 32);
            space();
#define TR_OP(J)                                                 \
    if (from + J * LANES < dim) {                                \
        TR_LOAD(7, v + 2 * J * LANES, 4 * dim);                  \
        space();                                                 \
        asm volatile("tdpbf16ps %%tmm7, %%tmm6, %%tmm" #J : :);  \
        space();                                                 \
    }
            TR_FOUR(TR_OP)
#undef TR_OP
        }
#define TR_OP(J) \
    if (from + J * LANES < dim) \
        asm volatile("tilestored %%tmm" #J ", (%0,%1,1)" : : "r"(o + from + J * LANES), "r"(sizeof(float) * size_t(dim)) : "memory");
        TR_FOUR(TR_OP)
#undef TR_OP
    }
}
#undef TR_FOUR
#undef TR_LOAD

} // namespace TR_NS
