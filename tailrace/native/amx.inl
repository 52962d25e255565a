// Products of many rows with AMX: sixteen rows by sixteen outputs by a block of inputs are one instruction. Its sums are
// integers, so exact; scales are applied to them in the order that every other kernel keeps, so the bits are the same.
#pragma once

#include <immintrin.h>

namespace TR_NS {

using namespace tailrace;

constexpr int TILE_ROWS = 16;

// Tile 0: sums, [16][16] int32. 1: activations, [16][BLOCK] bytes. 2: weights, [BLOCK / 4][16][4] bytes.
template <int BLOCK> inline void configure_tiles() {
    struct alignas(64) {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {};
        uint8_t rows[16] = {};
    } config;
    for (int t = 0; t < 3; t++) {
        config.row_bytes[t] = t == 1 ? BLOCK : 64;
        config.rows[t] = t == 2 ? BLOCK / 4 : TILE_ROWS;
    }
    asm volatile("ldtilecfg %0" : : "m"(config));
}

// The sums of one block, in tile 0. Unsigned weights are a byte each; signed ones are the packed tile itself.
template <bool SIGNED> inline void sum_block(const int8_t *q, const uint8_t *w) {
    asm volatile("tilezero %%tmm0\n\ttileloadd (%0,%1,1), %%tmm1\n\ttileloadd (%2,%3,1), %%tmm2"
                 :
                 : "r"(q), "r"(size_t(QBLOCK)), "r"(w), "r"(size_t(64))
                 : "memory");
    if constexpr (SIGNED) asm volatile("tdpbssd %%tmm2, %%tmm1, %%tmm0" : :);
    else asm volatile("tdpbsud %%tmm2, %%tmm1, %%tmm0" : :);
}
inline void store_sums(int32_t *to) { asm volatile("tilestored %%tmm0, (%0,%1,1)" : : "r"(to), "r"(size_t(64)) : "memory"); }

// One tile of outputs for `rows` rows, sixteen at a time. `bytes`: the weights of block b, a byte each, at bytes + b * step. While a
// block is multiplied, the third before it is scaled, across the groups of rows: a core does these beside each other only
// where they lie close together in the program.
template <bool WIDE, Min MIN, int BLOCK, bool SIGNED>
void tile_amx(const Packed &w, int64_t tile, const uint8_t *bytes, size_t step, const Quantised &x, int64_t row0, int64_t rows, const Output &out) {
    constexpr int RING = 4; // blocks whose sums are kept
    alignas(64) int32_t sums[RING][TILE_ROWS * LANES];
    const int64_t blocks = w.k / BLOCK, at = x.at(row0, 0), total = (rows + TILE_ROWS - 1) / TILE_ROWS * blocks;
    const uint8_t *const scales = w.data + size_t(tile) * w.tile_bytes() + w.payload();
    const size_t scale_step = w.block_bytes();
    // Blocks follow each other in the activations, and so do groups of rows.
    const int8_t *q = x.q + at * QBLOCK;
    const float *d = x.d + at, *ds = BLOCK == QBLOCK ? x.ds + at : x.ds16 + 2 * at;
    configure_tiles<BLOCK>();
    int64_t next = 0;
    const uint8_t *weights = bytes, *const end = bytes + size_t(blocks) * step;
    const auto multiply = [&]() __attribute__((always_inline)) {
        sum_block<SIGNED>(q + next * BLOCK / QBLOCK * QBLOCK * LANES + next * BLOCK % QBLOCK, weights);
    };
    const auto store = [&]() __attribute__((always_inline)) {
        store_sums(sums[size_t(next) % RING]);
        next++;
        weights += step;
        if (weights == end) weights = bytes;
    };
    for (int i = 0; i < RING - 1 && next < total; i++) multiply(), store();
    for (int64_t r0 = 0, t = 0; r0 < rows; r0 += TILE_ROWS) {
        F acc[TILE_ROWS];
#pragma GCC unroll 16
        for (F &a : acc) a = f_zero();
        const uint8_t *p = scales;
        for (int64_t b = 0; b < blocks; b++, t++, p += scale_step) {
            const bool more = next < total;
            if (more) multiply();
            const int32_t *sum = sums[size_t(t) % RING];
            const float *dt = d + t * BLOCK / QBLOCK * LANES;
            const F s = load_scales<WIDE>(p);
#pragma GCC unroll 16
            for (int r = 0; r < TILE_ROWS; r++) acc[r] = f_fma(i_float(i_load(sum + r * LANES)), s * f_set1(dt[r]), acc[r]);
            if constexpr (MIN != Min::None) {
                const float *dst = BLOCK == QBLOCK ? ds + t * LANES : ds + t / 2 * 2 * LANES + t % 2;
                const F m = MIN == Min::Stored ? load_scales<WIDE>(p + LANES * (WIDE ? 4 : 2)) : s * f_set1(-8.0f);
#pragma GCC unroll 16
                for (int r = 0; r < TILE_ROWS; r++) acc[r] = f_fma(m, f_set1(dst[r * (QBLOCK / BLOCK)]), acc[r]);
            }
            if (more) store();
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
