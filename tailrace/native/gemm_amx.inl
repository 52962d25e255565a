// Products of quantised weights with AMX, for one row as for many. Weights are widened to bf16, sixteen outputs by 32 inputs at
// a time, activations are bf16 already, and sums stay in tiles from the first input to the last: a tile's rows do not know of
// each other, so a row has the same bits however many there are. They are not those of the builds that round activations to int8.
#pragma once

#include <immintrin.h>

#include "tiles.inl"

namespace TR_NS {

using namespace tailrace;

constexpr int ACTIVATION_BYTES = 2, STREAMS = 1;
constexpr int64_t PANEL = 512;
constexpr int TILE_ROWS = 16, BLOCK_BYTES = 64; // of a block of 32 activations in bf16, and of a pair of inputs of sixteen outputs
constexpr int WIDE_BLOCK = 16 * BLOCK_BYTES;    // of 32 inputs of sixteen outputs
constexpr int64_t FEW_TILES = 2;                // groups of sixteen rows up to which weights are widened as they are multiplied
constexpr int64_t CHUNK_BLOCKS = 48;            // blocks of weights that are widened at once for more rows

// Bits of a float16, shifted to where bf16 has its mantissa, are 2^-112 of the number, whatever that is: the bias of its exponent
// is another one. Below 2^-14 float16 has no such form, so what is widened is 2^8 of the weight (which must be less than 2^8). The
// activations' share keeps the products in range.
constexpr float WEIGHT_GAIN = 0x1p8f, ACTIVATION_GAIN = 0x1p80f, BACK = 0x1p24f;

// Tiles 0 to 3: sums, [rows][16] float. 4 and 5: activations, [rows][32] bf16. 6 and 7: weights, [16][16][2].
struct ProductConfigs {
    TileConfig of[TILE_ROWS + 1];
    constexpr ProductConfigs() {
        for (int rows = 1; rows <= TILE_ROWS; rows++)
            for (int t = 0; t < 8; t++) of[rows].set(t, t < 6 ? rows : 16, 64);
    }
};
inline constexpr ProductConfigs PRODUCT_CONFIGS;

// Block b of a row: 32 values to bf16. Of every four, the second and the third change places, as a byte's two halves of a word do
// where weights are widened.
TR_INLINE __m512i swap_inner(__m512i words) {
    alignas(64) static constexpr uint16_t ORDER[32] = {0,  2,  1,  3,  4,  6,  5,  7,  8,  10, 9,  11, 12, 14, 13, 15,
                                                       16, 18, 17, 19, 20, 22, 21, 23, 24, 26, 25, 27, 28, 30, 29, 31};
    return _mm512_permutexvar_epi16(_mm512_load_si512(ORDER), words);
}

TR_INLINE void round_block(F lo, F hi, int64_t row, int64_t b, const Quantised &out) {
    const F gain = f_set1(ACTIVATION_GAIN);
    const auto words = (__m512i)_mm512_cvtne2ps_pbh((hi * gain).v, (lo * gain).v);
    _mm512_storeu_si512(out.q + out.at(row, b) * BLOCK_BYTES, swap_inner(words));
}

void widen(const Quantised &x, int64_t row, float *out) {
    const F back = f_set1(1.0f / ACTIVATION_GAIN);
    for (int64_t b = 0; b < x.blocks(); b++, out += QBLOCK) {
        uint16_t words[QBLOCK];
        _mm512_storeu_si512(words, swap_inner(_mm512_loadu_si512(x.q + x.at(row, b) * BLOCK_BYTES)));
        f_store(out, f_load_bf16(words) * back);
        f_store(out + LANES, f_load_bf16(words + LANES) * back);
    }
}

// Scales and minima of 16 or 32 inputs as float16, each twice, times WEIGHT_GAIN where `Widener::number` has not been so already.
template <Quants Q> struct Half {
    static constexpr bool LOOKED_UP = Q.bits <= 5;
    static constexpr int ZERO = Q.min == Min::Eight ? 8 : Q.zero;
    __m512h scale, min;

    TR_INLINE static __m512h twice(__m256i halves) {
        alignas(64) static constexpr uint16_t ORDER[32] = {0, 0, 1, 1, 2,  2,  3,  3,  4,  4,  5,  5,  6,  6,  7,  7,
                                                           8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15};
        return (__m512h)_mm512_permutexvar_epi16(_mm512_load_si512(ORDER), _mm512_castsi256_si512(halves));
    }
    TR_INLINE static __m512h gained(__m512h x) { return _mm512_mul_ph(x, _mm512_set1_ph(_Float16(WEIGHT_GAIN))); }

    TR_INLINE Half(const uint8_t *span, int block) {
        const auto at = [&](int place) TR_INLINED { return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(span) + place); };
        min = _mm512_setzero_ph();
        if constexpr (Q.super) {
            F s, m;
            Scales<Q>(span).at(block, s, m);
            scale = twice(_mm512_cvtps_ph(s.v, _MM_FROUND_TO_NEAREST_INT));
            if constexpr (Q.min == Min::Stored) min = twice(_mm512_cvtps_ph(m.v, _MM_FROUND_TO_NEAREST_INT));
        } else {
            scale = twice(at(0));
            if constexpr (Q.min == Min::Stored) min = twice(at(1));
        }
        if constexpr (!LOOKED_UP) scale = gained(scale);
        if constexpr (Q.min == Min::Stored) min = gained(min);
    }
};

// Turns quants into bf16.
template <Quants Q> struct Widener {
    using H = Half<Q>;
    // Numbers of up to five bits, times WEIGHT_GAIN; twice where they are fewer, since words of more bits look them up.
    struct Numbers {
        alignas(64) _Float16 of[32];
        constexpr Numbers() : of{} {
            for (int i = 0; i < 32; i++) of[i] = _Float16(float(i % (1 << (Q.bits < 5 ? Q.bits : 5)) - H::ZERO) * WEIGHT_GAIN);
        }
    };
    static constexpr Numbers NUMBERS{};
    __m512i table = _mm512_load_si512(NUMBERS.of);

    // Of group G, inputs 0 and 2 of each output, or 1 and 3.
    template <int G, bool ODD> TR_INLINE __m512h number(const uint8_t *payload) const {
        if constexpr (Q.bits == 4) {
            constexpr int SHIFT = G / 4 * 4 + ODD * 8;
            __m512i words = _mm512_loadu_si512(payload + 64 * (G % 4));
            if constexpr (SHIFT > 0) words = _mm512_srli_epi16(words, SHIFT);
            return (__m512h)_mm512_permutexvar_epi16(words, table);
        } else {
            const __m512i bytes = group<Q.bits, G>(payload).v;
            if constexpr (H::LOOKED_UP) return (__m512h)_mm512_permutexvar_epi16(ODD ? _mm512_srli_epi16(bytes, 8) : bytes, table);
            const __m512i high = ODD ? bytes : _mm512_slli_epi16(bytes, 8);
            if constexpr (Q.bits == 8) return _mm512_cvtepi16_ph(_mm512_srai_epi16(high, 8));
            else return _mm512_cvtepi16_ph(_mm512_sub_epi16(_mm512_srli_epi16(high, 8), _mm512_set1_epi16(H::ZERO)));
        }
    }

    // 32 inputs of sixteen outputs, those of a span from `i` times 32 on, to [16 pairs of inputs][16][2]. After each quarter of it
    // after<QUARTER>() is called.
    template <class After> TR_INLINE void operator()(const uint8_t *span, int i, uint8_t *__restrict out, After &&after) const {
        const __m512i eighth = _mm512_set1_epi16(1 << 12), form = _mm512_set1_epi16(short(0x8fff));
        const uint8_t *payload = span + Q.header() + i * Q.payload();
        constexpr int HALVES = 32 / Q.block;
        const auto quarter = [&]<int QUARTER>(const H &half) TR_INLINED {
            each<2>([&]<int J>() TR_INLINED {
                each<2>([&]<int ODD>() TR_INLINED {
                    constexpr int G = QUARTER * 2 + J;
                    __m512h x = number<G, ODD != 0>(payload);
                    if constexpr (Q.min == Min::Stored) x = _mm512_fmadd_ph(x, half.scale, half.min);
                    else x = _mm512_mul_ph(x, half.scale);
                    // nearest with three bits fewer; of a negative one the bits above are ones
                    const __m512i bits = _mm512_and_si512(_mm512_mulhrs_epi16((__m512i)x, eighth), form);
                    _mm512_store_si512(out + (2 * G + ODD) * BLOCK_BYTES, bits);
                });
            });
            after.template operator()<QUARTER>();
        };
        const H half(span, i * HALVES);
        quarter.template operator()<0>(half), quarter.template operator()<1>(half);
        const H other = HALVES == 2 ? H(span, i * HALVES + 1) : half;
        quarter.template operator()<2>(other), quarter.template operator()<3>(other);
    }
};

// Lines into the second cache: the first has no room for what is so far ahead.
template <int LINES> TR_INLINE void fetch(const uint8_t *p) {
    for (int line = 0; line < LINES; line++) __builtin_prefetch(p + 64 * line, 0, 2);
}

// Where a run of rows lies in the activations: block b of the first one's sixteen rows is at q + b * next, each row `apart` further.
struct RowsAt {
    const int8_t *q;
    int64_t next, apart;
    RowsAt(const Quantised &x, int64_t row) : q(x.q + x.at(row, 0) * BLOCK_BYTES), next(x.group * BLOCK_BYTES), apart(x.group == 1 ? x.blocks() * BLOCK_BYTES : BLOCK_BYTES) {}
};

inline void write_sums(const float *sums, const Output &out, int64_t row, int64_t rows) {
    const F back = f_set1(BACK);
    for (int64_t r = 0; r < rows; r++) write_out(out, row + r, f_load(sums + r * LANES) * back);
}

// `tiles` tiles, SIDE at a time, for up to sixteen rows of as many as the tiles are configured for, or (GROUPS 2) up to sixteen
// more. Each block is multiplied with once, soon after it has been widened.
//
// Instructions that write a tile stand apart, some widening between them, for the reason of `space`.
template <Quants Q, int GROUPS, int SIDE>
void few_rows(const uint8_t *weights, int64_t blocks, int64_t tiles, const Quantised &x, int64_t row, int64_t rows, const Output &out, int64_t to) {
    constexpr int LEAD = 2 / SIDE, RING = 2 * LEAD; // blocks that are widened before they are multiplied, and that lie there
    alignas(64) uint8_t wide[RING][SIDE][WIDE_BLOCK];
    alignas(64) float sums[2][SIDE][GROUPS][TILE_ROWS * LANES];
    constexpr int A_SPAN = Q.span() / 32;
    const Widener<Q> widener;
    const RowsAt at[2] = {RowsAt(x, row), RowsAt(x, GROUPS == 2 ? row + TILE_ROWS : row)};
    const int64_t tile_bytes = blocks / A_SPAN * Q.span_bytes(), total = tiles / SIDE * blocks;
    const uint8_t *span = weights;  // of the block that is widened next
    int64_t ahead = 0, block = 0;   // its number, of all and in its tile
    const auto widen = [&]<int S>(auto &&after) TR_INLINED {
        const int i = int(block % A_SPAN);
        const uint8_t *p = span + S * tile_bytes, *next = p + SIDE * tile_bytes;
        if (i == 0) fetch<(Q.header() + 63) / 64>(next);
        fetch<Q.payload() / 64>(next + Q.header() + i * Q.payload());
        widener(p, i, wide[ahead % RING][S], after);
    };
    const auto step = [&]() TR_INLINED {
        ahead++;
        if (++block % A_SPAN == 0) span += Q.span_bytes();
        if (block == blocks) block = 0, span += (SIDE - 1) * tile_bytes;
    };
    const auto load_rows = [&]<int G>(int64_t b) TR_INLINED { tile_load<4 + G>(at[G].q + b * at[G].next, at[G].apart); };
    const auto write = [&](int64_t tile) {
        for (int s = 0; s < SIDE; s++)
            for (int g = 0; g < GROUPS; g++)
                write_sums(sums[tile / SIDE % 2][s][g], out.of(tile + s), to + g * TILE_ROWS, g + 1 < GROUPS ? TILE_ROWS : rows - g * TILE_ROWS);
    };
    while (ahead < LEAD && ahead < total) {
        each<SIDE>([&]<int S>() TR_INLINED { widen.template operator()<S>([]<int>() TR_INLINED {}); });
        step();
    }
    each<GROUPS>([&]<int G>() TR_INLINED { load_rows.template operator()<G>(0); });
    for (int64_t tile = 0, n = 0; tile < tiles; tile += SIDE) {
        each<SIDE * GROUPS>([&]<int T>() TR_INLINED { tile_zero<T>(); });
        for (int64_t b = 0; b < blocks; b++, n++) {
            const bool more = ahead < total;
            each<SIDE>([&]<int S>() TR_INLINED {
                tile_load<6 + S>(wide[n % RING][S], 64);
                const auto multiply = [&]<int QUARTER>() TR_INLINED {
                    each<GROUPS>([&]<int G>() TR_INLINED {
                        if constexpr (QUARTER == 2 - GROUPS + G) tile_dot<S * GROUPS + G, 4 + G, 6 + S>();
                        if constexpr (QUARTER == 2 + G && S == SIDE - 1) load_rows.template operator()<G>(b + 1 < blocks ? b + 1 : 0);
                    });
                };
                if (more) widen.template operator()<S>(multiply);
                else each<4>(multiply);
            });
            if (more) step();
        }
        each<SIDE * GROUPS>([&]<int T>() TR_INLINED { tile_store<T>(sums[tile / SIDE % 2][T / GROUPS][T % GROUPS]); });
        if (tile > 0) write(tile - SIDE); // when these have landed
    }
    write(tiles - SIDE);
}

// The same of any number of tiles.
template <Quants Q, int GROUPS>
void few_rows(const Packed &w, int64_t tile, int64_t tiles, const Quantised &x, int64_t row, int64_t rows, const Output &out, int64_t to) {
    const uint8_t *weights = w.data + size_t(tile) * w.tile_bytes();
    const int64_t even = tiles - tiles % 2;
    if (even > 0) few_rows<Q, GROUPS, 2>(weights, w.k / 32, even, x, row, rows, out, to);
    if (even < tiles) few_rows<Q, GROUPS, 1>(weights + size_t(even) * w.tile_bytes(), w.k / 32, 1, x, row, rows, out.of(even), to);
}

// Two tiles side by side, or (TILES 1) one, for many rows that begin a group of sixteen. Weights are widened a chunk of inputs at
// a time; between chunks, sums are kept as they are.
template <Quants Q, int TILES>
__attribute__((noinline)) void many_rows(const Packed &w, int64_t tile, const Quantised &x, int64_t row, int64_t rows, const Output &out, float *kept) {
    alignas(64) uint8_t wide[TILES][CHUNK_BLOCKS * WIDE_BLOCK];
    alignas(64) float sums[2][4][TILE_ROWS * LANES];
    constexpr int A_SPAN = Q.span() / 32, SIDE = 4 / TILES; // groups of sixteen rows side by side
    const Widener<Q> widener;
    const int64_t blocks = w.k / 32, chunks = (blocks + CHUNK_BLOCKS - 1) / CHUNK_BLOCKS, groups = (rows + TILE_ROWS - 1) / TILE_ROWS;
    const size_t bytes = w.tile_bytes();
    const uint8_t *weights = w.data + size_t(tile) * bytes, *const behind = weights + TILES * bytes;
    const RowsAt at(x, row);
    const int64_t group_bytes = blocks * LANES * BLOCK_BYTES, steps = (groups + SIDE - 1) / SIDE * blocks;
    const int64_t lines = (int64_t(TILES * bytes) / 64 + steps - 1) / steps; // of the next tiles, fetched with each step
    int64_t step = 0;
    for (int64_t c = 0; c < chunks; c++) {
        const int64_t from = blocks * c / chunks, to = blocks * (c + 1) / chunks;
        for (int t = 0; t < TILES; t++)
            for (int64_t b = from; b < to; b++) widener(weights + size_t(t) * bytes + size_t(b / A_SPAN) * Q.span_bytes(), int(b % A_SPAN), wide[t] + (b - from) * WIDE_BLOCK, []<int>() TR_INLINED {});
        const auto write = [&](int64_t g, const float (&sum)[4][TILE_ROWS * LANES]) {
            for (int i = 0; i < 4; i++) {
                const int64_t r = (g + i / TILES) * TILE_ROWS;
                if (r < rows) write_sums(sum[i], out.of(i % TILES), r, rows - r < TILE_ROWS ? rows - r : TILE_ROWS);
            }
        };
        int64_t before = -1; // whose sums are written while the next ones are added up
        for (int64_t g = 0, n = 0; g < groups; g += SIDE, n++) {
            float *keep = kept + g * TILES * TILE_ROWS * LANES;
            // groups that there are not are those before them once more
            const int64_t last = groups - g < SIDE ? groups - g - 1 : SIDE - 1;
            const int8_t *q[SIDE];
            for (int64_t i = 0; i < SIDE; i++) q[i] = at.q + (g + (i < last ? i : last)) * group_bytes + from * at.next;
            if (c == 0) {
                tile_zero<0>();
                tile_zero<1>();
                tile_zero<2>();
                tile_zero<3>();
            } else {
                tile_load<0>(keep, 64);
                tile_load<1>(keep + TILE_ROWS * LANES, 64);
                tile_load<2>(keep + 2 * TILE_ROWS * LANES, 64);
                tile_load<3>(keep + 3 * TILE_ROWS * LANES, 64);
            }
            for (int64_t b = 0; b < to - from; b++, step++) {
                for (int64_t line = step * lines; line < (step + 1) * lines; line++) __builtin_prefetch(behind + 64 * line, 0, 2);
                const int64_t a = b * WIDE_BLOCK; // also of the activations
                if constexpr (TILES == 2) {
                    tile_load<4>(q[0] + a, BLOCK_BYTES), space();
                    tile_load<6>(wide[0] + a, 64), space();
                    tile_dot<0, 4, 6>(), space();
                    tile_load<5>(q[1] + a, BLOCK_BYTES), space();
                    tile_dot<2, 5, 6>(), space();
                    tile_load<7>(wide[1] + a, 64), space();
                    tile_dot<1, 4, 7>(), space();
                    tile_dot<3, 5, 7>(), space();
                } else {
                    tile_load<6>(wide[0] + a, 64), space();
                    tile_load<4>(q[0] + a, BLOCK_BYTES), space();
                    tile_dot<0, 4, 6>(), space();
                    tile_load<5>(q[1] + a, BLOCK_BYTES), space();
                    tile_dot<1, 5, 6>(), space();
                    tile_load<4>(q[2] + a, BLOCK_BYTES), space();
                    tile_dot<2, 4, 6>(), space();
                    tile_load<5>(q[3] + a, BLOCK_BYTES), space();
                    tile_dot<3, 5, 6>(), space();
                }
            }
            auto &sum = sums[n % 2];
            float *put = c + 1 < chunks ? keep : sum[0];
            tile_store<0>(put);
            tile_store<1>(put + TILE_ROWS * LANES);
            tile_store<2>(put + 2 * TILE_ROWS * LANES);
            tile_store<3>(put + 3 * TILE_ROWS * LANES);
            if (c + 1 < chunks) continue;
            if (before >= 0) write(before, sums[(n + 1) % 2]);
            before = g;
        }
        if (before >= 0) write(before, sums[(groups + SIDE - 1) / SIDE % 2 ^ 1]);
    }
}

// All tiles for rows that lie in one group, or (of ungrouped ones) for up to sixteen.
template <Quants Q> void group_rows(const Packed &w, int64_t tile, int64_t tiles, const Quantised &x, int64_t row, int64_t rows, const Output &out, int64_t to) {
    configure(PRODUCT_CONFIGS.of[rows]);
    few_rows<Q, 1>(w, tile, tiles, x, row, rows, out, to);
}

template <Quants Q> void product(const Packed &w, int64_t tile, int64_t tiles, const Quantised &x, int64_t row0, int64_t rows, const Output &out, float *kept) {
    if (x.group == 1 || row0 % TILE_ROWS) { // few, or not where a group begins
        for (int64_t r = 0; r < rows;) {
            const int64_t room = x.group == 1 ? TILE_ROWS : TILE_ROWS - (row0 + r) % TILE_ROWS, count = rows - r < room ? rows - r : room;
            group_rows<Q>(w, tile, tiles, x, row0 + r, count, out, r);
            r += count;
        }
    } else if (rows <= TILE_ROWS) {
        group_rows<Q>(w, tile, tiles, x, row0, rows, out, 0);
    } else {
        configure(PRODUCT_CONFIGS.of[TILE_ROWS]); // of a group that is not full, what lies behind its rows is multiplied too
        if (rows <= FEW_TILES * TILE_ROWS) {
            few_rows<Q, 2>(w, tile, tiles, x, row0, rows, out, 0);
        } else {
            int64_t t = 0;
            for (; t + 2 <= tiles; t += 2) many_rows<Q, 2>(w, tile + t, x, row0, rows, out.of(t), kept);
            if (t < tiles) many_rows<Q, 1>(w, tile + t, x, row0, rows, out.of(t), kept);
        }
    }
}

void gemm_int(const Packed &w, int64_t tile, int64_t tiles, const Quantised &x, int64_t row0, int64_t rows, const Output &out, uint8_t *scratch) {
    with_quants(w.quants, [&]<Quants Q>() { product<Q>(w, tile, tiles, x, row0, rows, out, reinterpret_cast<float *>(scratch)); });
}

void row_int(const Packed &w, int64_t count, int64_t, const uint8_t *const *tiles, const Quantised &x, int64_t row, float *const *out) {
    with_quants(w.quants, [&]<Quants Q>() {
        configure(PRODUCT_CONFIGS.of[1]);
        for (int64_t i = 0; i < count; i++) few_rows<Q, 1, 1>(tiles[i], w.k / 32, 1, x, row, 1, {out[i], LANES, nullptr, false}, 0);
    });
}

} // namespace TR_NS
