// Products of many rows with AMX: sixteen rows by sixteen outputs by a block of inputs are one instruction. Its sums are
// integers, so exact; scales are applied to them in the order that every other kernel keeps, so the bits are the same.
#pragma once

#include <immintrin.h>

namespace TR_NS {

using namespace tailrace;

constexpr int TILE_ROWS = 16;

// How many rows of how many bytes each tile has.
struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    inline void set(int tile, int count, int bytes) {
        rows[tile] = uint8_t(count);
        row_bytes[tile] = uint16_t(bytes);
    }
    inline void load() const { asm volatile("ldtilecfg %0" : : "m"(*this)); }
};

// Tile 0: sums, [16][16] int32. 1: activations, [16][BLOCK] bytes. 2: weights, [BLOCK / 4][16][4] bytes.
template <int BLOCK> inline void configure_product() {
    TileConfig config;
    config.set(0, TILE_ROWS, 64);
    config.set(1, TILE_ROWS, BLOCK);
    config.set(2, BLOCK / 4, 64);
    config.load();
}

// The sums of one block, in tile 0.
inline void sum_block(const int8_t *q, const uint8_t *w) {
    asm volatile("tilezero %%tmm0\n\ttileloadd (%0,%1,1), %%tmm1\n\ttileloadd (%2,%3,1), %%tmm2"
                 :
                 : "r"(q), "r"(size_t(QBLOCK)), "r"(w), "r"(size_t(64))
                 : "memory");
    asm volatile("tdpbssd %%tmm2, %%tmm1, %%tmm0" : :);
}
inline void store_sums(int32_t *to) { asm volatile("tilestored %%tmm0, (%0,%1,1)" : : "r"(to), "r"(size_t(64)) : "memory"); }

// One tile of outputs for `rows` rows, sixteen at a time. Weights are signed bytes: quants of 8 bits where they lie, others in
// `scratch`, their zero point subtracted. While a block is multiplied, the third before it is scaled, across the groups of rows: a
// core does these beside each other only where they lie close together in the program.
template <Quants Q> void tile_amx(const Packed &w, int64_t tile, const Quantised &x, int64_t row0, int64_t rows, const Output &out, uint8_t *scratch) {
    constexpr int BLOCK = Q.block, RING = 4; // blocks whose sums are kept
    constexpr bool IN_PLACE = Q.bits == 8;
    constexpr size_t STEP = IN_PLACE ? Q.span_bytes() : BLOCK * LANES; // from a block's weights to the next one's
    static_assert(!IN_PLACE || Q.span() == BLOCK);
    alignas(64) int32_t sums[RING][TILE_ROWS * LANES];
    const int64_t blocks = w.k / BLOCK, at = x.at(row0, 0), total = (rows + TILE_ROWS - 1) / TILE_ROWS * blocks;
    const uint8_t *const first = w.data + size_t(tile) * w.tile_bytes(), *const bytes = IN_PLACE ? first + Q.header() : scratch;
    if constexpr (!IN_PLACE) unpack<Q>(w, tile, scratch, [](W quants) -> W { return {_mm512_sub_epi8(quants.v, _mm512_set1_epi8(Q.zero))}; });
    // Blocks follow each other in the activations, and so do groups of rows.
    const int8_t *q = x.q + at * QBLOCK;
    const float *d = x.d + at, *ds = BLOCK == QBLOCK ? x.ds + at : x.ds16 + 2 * at;
    // Meanwhile the next tile is fetched, some lines with each block.
    const uint8_t *const behind = first + w.tile_bytes();
    const int64_t lines = (int64_t(w.tile_bytes()) / 64 + total - 1) / total;
    configure_product<BLOCK>();
    int64_t next = 0;
    const uint8_t *weights = bytes, *const end = bytes + size_t(blocks) * STEP;
    const auto multiply = [&]() __attribute__((always_inline)) {
        sum_block(q + next * BLOCK / QBLOCK * QBLOCK * LANES + next * BLOCK % QBLOCK, weights);
    };
    const auto store = [&]() __attribute__((always_inline)) {
        store_sums(sums[size_t(next) % RING]);
        next++;
        weights += STEP;
        if (weights == end) weights = bytes;
    };
    for (int i = 0; i < RING - 1 && next < total; i++) multiply(), store();
    for (int64_t r0 = 0, t = 0; r0 < rows; r0 += TILE_ROWS) {
        F acc[TILE_ROWS];
#pragma GCC unroll 16
        for (F &a : acc) a = f_zero();
        for (const uint8_t *span = first; span < first + w.tile_bytes(); span += Q.span_bytes()) {
            const Scales<Q> scales(span);
            for (int b = 0; b < Q.span() / BLOCK; b++, t++) {
                const bool more = next < total;
                if (more) multiply();
                for (int64_t line = t * lines; line < (t + 1) * lines; line++) __builtin_prefetch(behind + 64 * line, 0, 2);
                const int32_t *sum = sums[size_t(t) % RING];
                const float *dt = d + t * BLOCK / QBLOCK * LANES;
                F scale, min;
                scales.at(b, scale, min);
#pragma GCC unroll 16
                for (int r = 0; r < TILE_ROWS; r++) acc[r] = f_fma(i_float(i_load(sum + r * LANES)), scale * f_set1(dt[r]), acc[r]);
                if constexpr (Q.min != Min::None) {
                    const float *dst = BLOCK == QBLOCK ? ds + t * LANES : ds + t / 2 * 2 * LANES + t % 2;
#pragma GCC unroll 16
                    for (int r = 0; r < TILE_ROWS; r++) acc[r] = f_fma(min, f_set1(dst[r * (QBLOCK / BLOCK)]), acc[r]);
                }
                if (more) store();
            }
        }
#pragma GCC unroll 16
        for (int r = 0; r < TILE_ROWS; r++) // unrolled, as all loops over `acc`: else it would lie in memory
            if (r0 + r < rows) write_out(out, r0 + r, acc[r]);
    }
    asm volatile("tilerelease");
}

// How many of these rows of the activations are for AMX. They begin a group of sixteen, which is there even where it is not full.
inline int64_t rows_for_amx(const Quantised &x, int64_t row0, int64_t rows) {
    if (x.group != TILE_ROWS || row0 % TILE_ROWS) return 0;
    const int64_t rest = rows % TILE_ROWS;
    return rest < GROUPED_ROWS ? rows - rest : rows;
}

} // namespace TR_NS
