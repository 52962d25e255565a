// Products of encoders with AMX, in bf16: activations as they are, and the weights' integers, whose scale comes afterwards. Sums stay in
// tiles from the first input to the last, so a row has the same bits however many there are; they are not those of the other builds.
#pragma once

#include "tiles.inl"

namespace TR_NS {

using namespace tailrace;

constexpr int64_t CHUNK = 32, INPUTS = CHUNK;   // inputs of a tile
constexpr int64_t TILE_ROWS = 16, LINE = 64;    // rows of a tile, and bytes of one
constexpr int64_t PART = TILE_ROWS * LINE;      // bytes of a tile of weights
constexpr int64_t AHEAD = 4;                    // chunks of weights that are on their way

// Tiles 0 to 3: sums, of one sixteen rows and the next by one sixteen outputs and the next. 4 and 5: activations. 6 and 7: weights.
struct EncoderConfig : TileConfig {
    constexpr EncoderConfig() {
        for (int t = 0; t < 8; t++) set(t, TILE_ROWS, LINE);
    }
};
inline constexpr EncoderConfig ENCODER_CONFIG;

float round_row(const float *x, int64_t k, int16_t *q, int64_t step) {
    const auto at = [&](int64_t i) { return q + i / KBLOCK * step + i % KBLOCK; };
    for (int64_t i = 0; i < k; i += WIDE)
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(at(i)), (__m256i)_mm512_cvtneps_pbh(f_load(x + i).v));
    if (k % CHUNK) std::memset(at(k), 0, WIDE * sizeof(int16_t));
    return 1.0f;
}

// [k / 32][two of sixteen outputs][16 pairs of inputs][16 outputs][2].
void pack(const int16_t *rounded, int64_t k, int16_t *tile) {
    for (int64_t o = 0; o < TILE; o++)
        for (int64_t i = 0; i < k; i++) {
            const float value = rounded[o * k + i];
            uint32_t bits;
            std::memcpy(&bits, &value, 4);
            bits += 0x7fff + (bits >> 16 & 1); // to the nearest, ties to even
            tile[(i / CHUNK * 2 + o / WIDE) * PART / 2 + i % CHUNK / 2 * 2 * WIDE + o % WIDE * 2 + i % 2] = int16_t(bits >> 16);
        }
}

// Asks for a quarter of the weights that are AHEAD: between instructions that write a tile, which are to stand apart.
template <int QUARTER> TR_INLINE void ask(const int8_t *weights) {
#pragma GCC unroll 8
    for (int64_t l = QUARTER * PART / 2; l < (QUARTER + 1) * PART / 2; l += LINE) __builtin_prefetch(weights + AHEAD * 2 * PART + l, 0, 3);
}

// Sixteen rows, or twice as many, by a tile of outputs.
template <bool TWO> void multiply_rows(const int8_t *weights, int64_t k, const int8_t *x, int64_t step, float *sums) {
    constexpr int64_t LD = KBLOCK * 2;
    tile_zero<0>();
    tile_zero<1>();
    tile_zero<2>();
    tile_zero<3>();
    for (int64_t i = 0; i < k; i += CHUNK, weights += 2 * PART) {
        const int8_t *from = x + i / KBLOCK * 2 * step + i % KBLOCK * 2;
        tile_load<4>(from, LD);
        ask<0>(weights);
        tile_load<6>(weights, LINE);
        ask<1>(weights);
        tile_dot<0, 4, 6>();
        space();
        tile_load<7>(weights + PART, LINE);
        ask<2>(weights);
        tile_dot<1, 4, 7>();
        ask<3>(weights);
        if constexpr (TWO) {
            tile_load<5>(from + TILE_ROWS * LD, LD);
            space();
            tile_dot<2, 5, 6>();
            space();
            tile_dot<3, 5, 7>();
            space();
        }
    }
    constexpr int64_t ld = TILE * sizeof(float);
    tile_store<0>(sums, ld);
    tile_store<1>(sums + WIDE, ld);
    if constexpr (TWO) {
        tile_store<2>(sums + TILE_ROWS * TILE, ld);
        tile_store<3>(sums + TILE_ROWS * TILE + WIDE, ld);
    }
}

void multiply(const int16_t *tile, int64_t k, const int16_t *x, int64_t step, int64_t rows, float *sums) {
    configure(ENCODER_CONFIG);
    const auto *w = reinterpret_cast<const int8_t *>(tile);
    for (int64_t r = 0; r < rows; r += 2 * TILE_ROWS) {
        const auto *from = reinterpret_cast<const int8_t *>(x + r * KBLOCK);
        if (rows - r > TILE_ROWS) multiply_rows<true>(w, k, from, step, sums + r * TILE);
        else multiply_rows<false>(w, k, from, step, sums + r * TILE);
    }
}

} // namespace TR_NS
