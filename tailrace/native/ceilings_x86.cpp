// Multiply-adds that some x86 processors have beside those of AVX-512 that the kernels use: bf16 dot products, and AMX's
// products of tiles. They are compiled for those instructions one function at a time and called where they can run.
#include "amx_permission.h"
#include "ceilings.h"

#if defined(__x86_64__) && !defined(TR_EMULATE) && (__GNUC__ >= 11 || __clang_major__ >= 12)
#define TR_BEYOND
#include <immintrin.h>

#include <cstring>
#endif

namespace tailrace {
namespace {

#if defined(TR_BEYOND)

constexpr int CHAINS = 13; // independent sums, as many as the fp32 ceiling has
constexpr int SUMS = 4;    // tiles that are added to; two tiles of each side are multiplied crosswise
constexpr int TILE_BYTES = 1024;

__attribute__((target("avx512f,avx512bf16"))) float bf16_dot_rounds(const uint8_t *data, int64_t rounds) {
    __m512 acc[CHAINS];
    for (int c = 0; c < CHAINS; c++) acc[c] = _mm512_set1_ps(float(c));
    const __m512bh x = (__m512bh)_mm512_loadu_si512(data);
    __m512bh w = x;
    for (int64_t i = 0; i < rounds; i++) {
        asm volatile("" : "+v"(w)); // what is not known to be the same is not hoisted
        for (int c = 0; c < CHAINS; c++) acc[c] = _mm512_dpbf16_ps(acc[c], x, w);
    }
    __m512 sum = acc[0];
    for (int c = 1; c < CHAINS; c++) sum = _mm512_add_ps(sum, acc[c]);
    return _mm512_cvtss_f32(sum);
}

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {}; // of a row
    uint8_t rows[16] = {};
};

#define TR_AMX __attribute__((target("amx-tile,amx-int8,amx-bf16")))

// Tiles 0 to 3 are summed into; 4 and 5 hold rows, 6 and 7 columns: what a block of 32 x 32 outputs takes.
TR_AMX TR_INLINE void begin_tiles(const uint8_t *data) {
    TileConfig config;
    for (int t = 0; t < 8; t++) config.bytes[t] = 64, config.rows[t] = 16;
    asm volatile("" : : "r"(&config) : "memory"); // GCC's intrinsics say of their operands' first bytes only that they are read
    _tile_loadconfig(&config);
    _tile_zero(0); // macros of statements, so none goes with another in one expression
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_loadd(4, data, 64);
    _tile_loadd(5, data + TILE_BYTES, 64);
    _tile_loadd(6, data + 2 * TILE_BYTES, 64);
    _tile_loadd(7, data + 3 * TILE_BYTES, 64);
}

// A value of each sum, so that all of them must be computed.
TR_AMX TR_INLINE float end_tiles() {
    alignas(64) float sums[SUMS][TILE_BYTES / sizeof(float)];
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
    _tile_release();
    return sums[0][0] + sums[1][1] + sums[2][2] + sums[3][3];
}

TR_AMX float amx_int8_rounds(const uint8_t *data, int64_t rounds) {
    begin_tiles(data);
    for (int64_t i = 0; i < rounds; i++) {
        _tile_dpbusd(0, 4, 6);
        _tile_dpbusd(1, 4, 7);
        _tile_dpbusd(2, 5, 6);
        _tile_dpbusd(3, 5, 7);
    }
    return end_tiles();
}

TR_AMX float amx_bf16_rounds(const uint8_t *data, int64_t rounds) {
    begin_tiles(data);
    for (int64_t i = 0; i < rounds; i++) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    return end_tiles();
}

static_assert(4 * TILE_BYTES <= PEAK_DATA);

constexpr Peak BF16_DOT{"bf16_dot", "vdpbf16ps of 32", CHAINS * 32, bf16_dot_rounds};
constexpr Peak AMX[] = {
    {"amx_int8", "tdpbusd of 16 rows x 16 columns x 64", SUMS * 16 * 16 * 64, amx_int8_rounds},
    {"amx_bf16", "tdpbf16ps of 16 rows x 16 columns x 32", SUMS * 16 * 16 * 32, amx_bf16_rounds},
};

#endif

} // namespace

std::vector<Peak> peaks_of(const Kernels &k) {
    std::vector<Peak> found(k.peaks, k.peaks + k.peak_count);
#if defined(TR_BEYOND)
    if (std::strcmp(k.name, "portable") == 0 || std::strcmp(k.name, "avx2") == 0) return found;
    if (__builtin_cpu_supports("avx512bf16")) found.push_back(BF16_DOT);
    if (amx_permitted()) found.insert(found.end(), std::begin(AMX), std::end(AMX));
#endif
    return found;
}

} // namespace tailrace
