// Sixteen lanes of float or int32, whatever the machine has: the one vocabulary that every kernel is written in.
//
// A kernel source is compiled once for each instruction set, with one of TR_AVX512, TR_AVX2, TR_NEON or none (portable)
// defined; everything lives in namespace TR_NS so that the builds can share one library. Lane i of a vector
// is element i of the memory it was loaded from. Reductions add in one fixed order. Nothing here may be contracted
// by the compiler (-ffp-contract=off): where a fused multiply-add is meant, it is written.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(TR_AVX512) && defined(TR_EMULATE)
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>
#include <simde/x86/fma.h>
// What SIMDe 0.7 lacks, from two halves.
#undef _mm512_cvtps_epi32
#undef _mm512_cvtepi32_ps
#undef _mm512_cvtepi32_epi8
#undef _mm512_cvtph_ps
#undef _mm512_cvtepi8_epi32
#undef _mm512_cvtepu8_epi32
#undef _mm512_cvtps_ph
inline simde__m128i emulated_cvtepi32_epi8(simde__m512i a) {
    int32_t wide[16];
    int8_t narrow[16];
    std::memcpy(wide, &a, 64);
    for (int i = 0; i < 16; i++) narrow[i] = static_cast<int8_t>(wide[i]);
    simde__m128i r;
    std::memcpy(&r, narrow, 16);
    return r;
}
#define _mm512_cvtepi32_epi8 emulated_cvtepi32_epi8
#define _mm512_cvtepi8_epi32(a) \
    _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_cvtepi8_epi32(a)), _mm256_cvtepi8_epi32(_mm_srli_si128(a, 8)), 1)
#define _mm512_cvtepu8_epi32(a) \
    _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_cvtepu8_epi32(a)), _mm256_cvtepu8_epi32(_mm_srli_si128(a, 8)), 1)
#define _mm512_cvtps_ph(a, rounding) \
    _mm256_inserti128_si256(_mm256_castsi128_si256(_mm256_cvtps_ph(_mm512_castps512_ps256(a), rounding)), \
                            _mm256_cvtps_ph(_mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a), 1)), rounding), 1)
#define _mm512_cvtepi32_ps(a) \
    _mm512_castpd_ps(_mm512_insertf64x4(_mm512_castpd256_pd512(_mm256_castps_pd(_mm256_cvtepi32_ps(_mm512_castsi512_si256(a)))), \
                                        _mm256_castps_pd(_mm256_cvtepi32_ps(_mm512_extracti64x4_epi64(a, 1))), 1))
#define _mm512_cvtps_epi32(a) \
    _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_cvtps_epi32(_mm512_castps512_ps256(a))), \
                       _mm256_cvtps_epi32(_mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a), 1))), 1)
#define _mm512_cvtph_ps(a) \
    _mm512_castsi512_ps(_mm512_inserti64x4(_mm512_castsi256_si512(_mm256_castps_si256(_mm256_cvtph_ps(_mm256_castsi256_si128(a)))), \
                                           _mm256_castps_si256(_mm256_cvtph_ps(_mm256_extracti128_si256(a, 1))), 1))
#elif defined(TR_AVX512) || defined(TR_AVX2)
#include <immintrin.h>
#elif defined(TR_NEON)
#include "simd_neon.h"
#endif

namespace TR_NS {

// One number to the nearest float16, ties to even.
inline uint16_t to_f16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint32_t sign = bits >> 16 & 0x8000u;
    bits &= 0x7fffffffu;
    if (bits > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);  // NaN
    if (bits >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u); // from 65,520 on
    if (bits < 0x38800000u) return static_cast<uint16_t>(sign | static_cast<uint32_t>(std::nearbyintf(std::fabs(x) * 0x1p24f)));
    return static_cast<uint16_t>(sign | (bits - (112u << 23) + 0xfffu + (bits >> 13 & 1u)) >> 13);
}

#if defined(TR_AVX512)

struct F {
    __m512 v;
};
struct I {
    __m512i v;
};
struct Pair {
    F first, second;
};

inline F f_set1(float x) { return {_mm512_set1_ps(x)}; }
inline F f_load(const float *p) { return {_mm512_loadu_ps(p)}; }
inline void f_store(float *p, F a) { _mm512_storeu_ps(p, a.v); }
inline F operator+(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F operator-(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F operator*(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F operator/(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F f_fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F f_max(F a, F b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F f_min(F a, F b) { return {_mm512_min_ps(a.v, b.v)}; }
inline F f_abs(F a) { return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(a.v), _mm512_set1_epi32(0x7fffffff)))}; }
inline I i_set1(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline I i_load(const int32_t *p) { return {_mm512_loadu_si512(p)}; }
inline void i_store(int32_t *p, I a) { _mm512_storeu_si512(p, a.v); }
inline I operator+(I a, I b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline I operator-(I a, I b) { return {_mm512_sub_epi32(a.v, b.v)}; }
inline I operator*(I a, I b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
inline I operator^(I a, I b) { return {_mm512_xor_si512(a.v, b.v)}; }
inline I operator&(I a, I b) { return {_mm512_and_si512(a.v, b.v)}; }
template <int N> inline I i_shr(I a) { return {_mm512_srli_epi32(a.v, N)}; }
template <int N> inline I i_shl(I a) { return {_mm512_slli_epi32(a.v, N)}; }
inline I f_round(F a) { return {_mm512_cvtps_epi32(a.v)}; }
inline F i_float(I a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline F f_bits(I a) { return {_mm512_castsi512_ps(a.v)}; }
inline I i_bits(F a) { return {_mm512_castps_si512(a.v)}; }
// Lane-wise a < b ? x : y.
inline F f_select_lt(F a, F b, F x, F y) { return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), y.v, x.v)}; }
inline I i_load_i8(const int8_t *p) { return {_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)))}; }
inline I i_load_u8(const uint8_t *p) { return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)))}; }
inline void i_store_i8(int8_t *p, I a) { _mm_storeu_si128(reinterpret_cast<__m128i *>(p), _mm512_cvtepi32_epi8(a.v)); }
// To the nearest float16, ties to even.
inline void f_store_f16(uint16_t *p, F a) { _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT)); }
inline F f_load_f16(const uint16_t *p) { return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)))}; }
inline F f_load_bf16(const uint16_t *p) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p))), 16))};
}
// Sixteen bf16 in split order: word 2i is lane i, word 2i+1 is lane i+8. One operation a half instead of two.
inline F f_load_split(const uint16_t *p) {
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p));
    const __m256i lo = _mm256_slli_epi32(x, 16);
    const __m256i hi = _mm256_and_si256(x, _mm256_set1_epi32(static_cast<int>(0xffff0000u)));
    return {_mm512_castsi512_ps(_mm512_inserti64x4(_mm512_castsi256_si512(lo), hi, 1))};
}
// Sixteen pairs of bf16: word 2i is lane i of the first, word 2i + 1 of the second.
inline Pair f_load_pairs(const uint16_t *p) {
    const __m512i x = _mm512_loadu_si512(p);
    return {{_mm512_castsi512_ps(_mm512_slli_epi32(x, 16))},
            {_mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(static_cast<int>(0xffff0000u))))}};
}
inline float f_sum(F a) {
    const __m256 s = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a.v), 1)));
    __m128 t = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    t = _mm_add_ps(t, _mm_movehl_ps(t, t));
    return _mm_cvtss_f32(_mm_add_ss(t, _mm_shuffle_ps(t, t, 1)));
}
inline float f_hmax(F a) {
    const __m256 s = _mm256_max_ps(_mm512_castps512_ps256(a.v), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a.v), 1)));
    __m128 t = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    t = _mm_max_ps(t, _mm_movehl_ps(t, t));
    return _mm_cvtss_f32(_mm_max_ss(t, _mm_shuffle_ps(t, t, 1)));
}

// Dot products of 8-bit activations with small weights. A group is four consecutive inputs of sixteen outputs:
// 64 bytes, output-major. `A` is the four activations, the same in every lane.
struct A {
    __m512i v;
};
inline A a_load(const int8_t *p) {
    int32_t x;
    std::memcpy(&x, p, 4);
    return {_mm512_set1_epi32(x)};
}
struct W {
    __m512i v;
};
inline W w_load(const uint8_t *p) { return {_mm512_loadu_si512(p)}; }
inline void w_store(uint8_t *p, W w) { _mm512_storeu_si512(p, w.v); }
inline W operator|(W x, W y) { return {_mm512_or_si512(x.v, y.v)}; }
// Bits FROM to FROM + COUNT of every byte, moved to bit TO; the others are zero.
template <int FROM, int TO, int COUNT> inline W w_bits(W w) {
    const __m512i mask = _mm512_set1_epi8(static_cast<char>(((1 << COUNT) - 1) << TO));
    if constexpr (FROM > TO) return {_mm512_and_si512(_mm512_srli_epi16(w.v, FROM - TO), mask)};
    else if constexpr (FROM < TO) return {_mm512_and_si512(_mm512_slli_epi16(w.v, TO - FROM), mask)};
    else return {_mm512_and_si512(w.v, mask)};
}

// Unsigned weights of at most 15: up to eight groups may be added before `finish`.
struct DotSmall {
    __m512i acc = _mm512_setzero_si512();
    inline void add(W w, A a) { acc = _mm512_dpbusd_epi32(acc, w.v, a.v); }
    inline I finish(int32_t) const { return {acc}; }
};
// Unsigned weights of at most 63, two groups at a time.
struct DotMedium : DotSmall {
    inline void add(W w0, A a0, W w1, A a1) { DotSmall::add(w0, a0), DotSmall::add(w1, a1); }
};
// Signed 8-bit weights; `prepare` once a group, for any number of rows. `finish` takes the sum of the activations.
struct WS {
    __m512i v;
};
inline WS ws_prepare(W w) { return {_mm512_xor_si512(w.v, _mm512_set1_epi8(static_cast<char>(0x80)))}; }
struct DotSigned {
    __m512i acc = _mm512_setzero_si512();
    inline void add(WS w, A a) { acc = _mm512_dpbusd_epi32(acc, w.v, a.v); }
    inline I finish(int32_t sum) const { return {_mm512_sub_epi32(acc, _mm512_set1_epi32(128 * sum))}; }
};

#elif defined(TR_AVX2)

struct F {
    __m256 lo, hi;
};
struct I {
    __m256i lo, hi;
};
struct Pair {
    F first, second;
};

inline F f_set1(float x) {
    const __m256 v = _mm256_set1_ps(x);
    return {v, v};
}
inline F f_load(const float *p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void f_store(float *p, F a) {
    _mm256_storeu_ps(p, a.lo);
    _mm256_storeu_ps(p + 8, a.hi);
}
inline F operator+(F a, F b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline F operator-(F a, F b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline F operator*(F a, F b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline F operator/(F a, F b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline F f_fma(F a, F b, F c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
inline F f_max(F a, F b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline F f_min(F a, F b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline F f_abs(F a) {
    const __m256 m = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    return {_mm256_and_ps(a.lo, m), _mm256_and_ps(a.hi, m)};
}
inline I i_set1(int32_t x) {
    const __m256i v = _mm256_set1_epi32(x);
    return {v, v};
}
inline I i_load(const int32_t *p) {
    return {_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)), _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p + 8))};
}
inline void i_store(int32_t *p, I a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), a.lo);
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(p + 8), a.hi);
}
inline I operator+(I a, I b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
inline I operator-(I a, I b) { return {_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)}; }
inline I operator*(I a, I b) { return {_mm256_mullo_epi32(a.lo, b.lo), _mm256_mullo_epi32(a.hi, b.hi)}; }
inline I operator^(I a, I b) { return {_mm256_xor_si256(a.lo, b.lo), _mm256_xor_si256(a.hi, b.hi)}; }
inline I operator&(I a, I b) { return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)}; }
template <int N> inline I i_shr(I a) { return {_mm256_srli_epi32(a.lo, N), _mm256_srli_epi32(a.hi, N)}; }
template <int N> inline I i_shl(I a) { return {_mm256_slli_epi32(a.lo, N), _mm256_slli_epi32(a.hi, N)}; }
inline I f_round(F a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }
inline F i_float(I a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
inline F f_bits(I a) { return {_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)}; }
inline I i_bits(F a) { return {_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi)}; }
inline F f_select_lt(F a, F b, F x, F y) {
    return {_mm256_blendv_ps(y.lo, x.lo, _mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ)),
            _mm256_blendv_ps(y.hi, x.hi, _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ))};
}
inline I i_load_i8(const int8_t *p) {
    return {_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p))),
            _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p + 8)))};
}
inline I i_load_u8(const uint8_t *p) {
    return {_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p))),
            _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p + 8)))};
}
inline void f_store_f16(uint16_t *p, F a) {
    _mm_storeu_si128(reinterpret_cast<__m128i *>(p), _mm256_cvtps_ph(a.lo, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128(reinterpret_cast<__m128i *>(p + 8), _mm256_cvtps_ph(a.hi, _MM_FROUND_TO_NEAREST_INT));
}
// Values must lie within int8.
inline void i_store_i8(int8_t *p, I a) {
    const __m256i w = _mm256_permute4x64_epi64(_mm256_packs_epi32(a.lo, a.hi), 0xd8);
    _mm_storeu_si128(reinterpret_cast<__m128i *>(p), _mm_packs_epi16(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1)));
}
inline F f_load_f16(const uint16_t *p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))),
            _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p + 8)))};
}
inline F f_load_bf16(const uint16_t *p) {
    const __m256i a = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
    const __m256i b = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p + 8)));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16))};
}
inline F f_load_split(const uint16_t *p) {
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(x, 16)),
            _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(static_cast<int>(0xffff0000u))))};
}
inline Pair f_load_pairs(const uint16_t *p) {
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)), y = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p + 16));
    const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
    return {{_mm256_castsi256_ps(_mm256_slli_epi32(x, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(y, 16))},
            {_mm256_castsi256_ps(_mm256_and_si256(x, high)), _mm256_castsi256_ps(_mm256_and_si256(y, high))}};
}
inline float f_sum(F a) {
    const __m256 s = _mm256_add_ps(a.lo, a.hi);
    __m128 t = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    t = _mm_add_ps(t, _mm_movehl_ps(t, t));
    return _mm_cvtss_f32(_mm_add_ss(t, _mm_shuffle_ps(t, t, 1)));
}
inline float f_hmax(F a) {
    const __m256 s = _mm256_max_ps(a.lo, a.hi);
    __m128 t = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    t = _mm_max_ps(t, _mm_movehl_ps(t, t));
    return _mm_cvtss_f32(_mm_max_ss(t, _mm_shuffle_ps(t, t, 1)));
}

struct A {
    __m256i v;
};
inline A a_load(const int8_t *p) {
    int32_t x;
    std::memcpy(&x, p, 4);
    return {_mm256_set1_epi32(x)};
}
struct W {
    __m256i lo, hi;
};
inline W w_load(const uint8_t *p) {
    return {_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)), _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p + 32))};
}
inline void w_store(uint8_t *p, W w) {
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), w.lo);
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(p + 32), w.hi);
}
inline W operator|(W x, W y) { return {_mm256_or_si256(x.lo, y.lo), _mm256_or_si256(x.hi, y.hi)}; }
template <int FROM, int TO, int COUNT> inline W w_bits(W w) {
    const __m256i mask = _mm256_set1_epi8(static_cast<char>(((1 << COUNT) - 1) << TO));
    if constexpr (FROM > TO) w = {_mm256_srli_epi16(w.lo, FROM - TO), _mm256_srli_epi16(w.hi, FROM - TO)};
    else if constexpr (FROM < TO) w = {_mm256_slli_epi16(w.lo, TO - FROM), _mm256_slli_epi16(w.hi, TO - FROM)};
    return {_mm256_and_si256(w.lo, mask), _mm256_and_si256(w.hi, mask)};
}

// A pair of products is at most 2 * 15 * 127 = 3,810, so eight of them fit sixteen bits.
struct DotSmall {
    __m256i lo = _mm256_setzero_si256(), hi = _mm256_setzero_si256();
    inline void add(W w, A a) {
        lo = _mm256_add_epi16(lo, _mm256_maddubs_epi16(w.lo, a.v));
        hi = _mm256_add_epi16(hi, _mm256_maddubs_epi16(w.hi, a.v));
        // Left alone, GCC turns the chain of adds into a tree and spills every product to memory.
        asm("" : "+x"(lo), "+x"(hi));
    }
    inline I finish(int32_t) const {
        const __m256i one = _mm256_set1_epi16(1);
        return {_mm256_madd_epi16(lo, one), _mm256_madd_epi16(hi, one)};
    }
};
// A pair of products is at most 2 * 63 * 127 = 16,002, so two of them fit sixteen bits.
struct DotMedium {
    __m256i lo = _mm256_setzero_si256(), hi = _mm256_setzero_si256();
    inline void add(W w0, A a0, W w1, A a1) {
        const __m256i one = _mm256_set1_epi16(1);
        lo = _mm256_add_epi32(lo, _mm256_madd_epi16(_mm256_add_epi16(_mm256_maddubs_epi16(w0.lo, a0.v), _mm256_maddubs_epi16(w1.lo, a1.v)), one));
        hi = _mm256_add_epi32(hi, _mm256_madd_epi16(_mm256_add_epi16(_mm256_maddubs_epi16(w0.hi, a0.v), _mm256_maddubs_epi16(w1.hi, a1.v)), one));
        asm("" : "+x"(lo), "+x"(hi));
    }
    inline I finish(int32_t) const { return {lo, hi}; }
};
// |w| * (a with w's sign): |w| <= 128 is unsigned and |a| <= 127, so a pair is at most 32,512 and cannot saturate.
struct WS {
    __m256i lo, hi, abs_lo, abs_hi;
};
inline WS ws_prepare(W w) { return {w.lo, w.hi, _mm256_abs_epi8(w.lo), _mm256_abs_epi8(w.hi)}; }
struct DotSigned {
    __m256i lo = _mm256_setzero_si256(), hi = _mm256_setzero_si256();
    inline void add(WS w, A a) {
        const __m256i one = _mm256_set1_epi16(1);
        lo = _mm256_add_epi32(lo, _mm256_madd_epi16(_mm256_maddubs_epi16(w.abs_lo, _mm256_sign_epi8(a.v, w.lo)), one));
        hi = _mm256_add_epi32(hi, _mm256_madd_epi16(_mm256_maddubs_epi16(w.abs_hi, _mm256_sign_epi8(a.v, w.hi)), one));
        asm("" : "+x"(lo), "+x"(hi));
    }
    inline I finish(int32_t) const { return {lo, hi}; }
};

#elif !defined(TR_NEON) // portable: the compiler's own vectors of four, which it has for any machine

#define TR_LANES for (int i = 0; i < 16; i++)
#define TR_QUARTERS for (int i = 0; i < 4; i++)

typedef float F4 __attribute__((vector_size(16)));
typedef int32_t I4 __attribute__((vector_size(16)));
typedef uint32_t U4 __attribute__((vector_size(16)));
typedef uint16_t H8 __attribute__((vector_size(16)));

struct F {
    F4 v[4];
};
struct I {
    I4 v[4];
};
struct Pair {
    F first, second;
};

inline F f_set1(float x) {
    F r;
    TR_QUARTERS r.v[i] = F4{x, x, x, x};
    return r;
}
inline F f_load(const float *p) {
    F r;
    std::memcpy(r.v, p, 64);
    return r;
}
inline void f_store(float *p, F a) { std::memcpy(p, a.v, 64); }
inline I i_load(const int32_t *p) {
    I r;
    std::memcpy(r.v, p, 64);
    return r;
}
inline void i_store(int32_t *p, I a) { std::memcpy(p, a.v, 64); }
#define TR_BINARY(type, name, expr)       \
    inline type name(type a, type b) {    \
        type r;                           \
        TR_QUARTERS r.v[i] = (expr);      \
        return r;                         \
    }
TR_BINARY(F, operator+, a.v[i] + b.v[i])
TR_BINARY(F, operator-, a.v[i] - b.v[i])
TR_BINARY(F, operator*, a.v[i] * b.v[i])
TR_BINARY(F, operator/, a.v[i] / b.v[i])
TR_BINARY(F, f_max, a.v[i] > b.v[i] ? a.v[i] : b.v[i])
TR_BINARY(F, f_min, a.v[i] < b.v[i] ? a.v[i] : b.v[i])
TR_BINARY(I, operator+, I4(U4(a.v[i]) + U4(b.v[i])))
TR_BINARY(I, operator-, I4(U4(a.v[i]) - U4(b.v[i])))
TR_BINARY(I, operator*, I4(U4(a.v[i]) * U4(b.v[i])))
TR_BINARY(I, operator^, a.v[i] ^ b.v[i])
TR_BINARY(I, operator&, a.v[i] & b.v[i])
#undef TR_BINARY
inline F f_fma(F a, F b, F c) {
    F r;
    TR_QUARTERS r.v[i] = a.v[i] * b.v[i] + c.v[i];
    return r;
}
inline I i_set1(int32_t x) {
    I r;
    TR_QUARTERS r.v[i] = I4{x, x, x, x};
    return r;
}
template <int N> inline I i_shr(I a) {
    TR_QUARTERS a.v[i] = I4(U4(a.v[i]) >> N);
    return a;
}
template <int N> inline I i_shl(I a) {
    TR_QUARTERS a.v[i] = I4(U4(a.v[i]) << N);
    return a;
}
inline F i_float(I a) {
    F r;
    TR_QUARTERS r.v[i] = __builtin_convertvector(a.v[i], F4);
    return r;
}
inline F f_bits(I a) {
    F r;
    TR_QUARTERS r.v[i] = F4(a.v[i]);
    return r;
}
inline I i_bits(F a) {
    I r;
    TR_QUARTERS r.v[i] = I4(a.v[i]);
    return r;
}
inline F f_abs(F a) { return f_bits(i_bits(a) & i_set1(0x7fffffff)); }
inline F f_select_lt(F a, F b, F x, F y) {
    TR_QUARTERS x.v[i] = a.v[i] < b.v[i] ? x.v[i] : y.v[i];
    return x;
}
inline I f_round(F a) {
    float from[16];
    int32_t to[16];
    f_store(from, a);
    TR_LANES to[i] = static_cast<int32_t>(std::nearbyintf(from[i]));
    return i_load(to);
}
inline I i_load_i8(const int8_t *p) {
    int32_t to[16];
    TR_LANES to[i] = p[i];
    return i_load(to);
}
inline I i_load_u8(const uint8_t *p) {
    int32_t to[16];
    TR_LANES to[i] = p[i];
    return i_load(to);
}
inline void i_store_i8(int8_t *p, I a) {
    int32_t from[16];
    i_store(from, a);
    TR_LANES p[i] = static_cast<int8_t>(from[i]);
}
inline float half_to_float(uint16_t h) {
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
    uint32_t exponent = (h >> 10) & 0x1fu, mantissa = h & 0x3ffu, bits;
    if (exponent == 0) {
        const float value = static_cast<float>(mantissa) * 0x1p-24f;
        std::memcpy(&bits, &value, 4);
        bits |= sign;
    } else {
        bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | (mantissa << 13);
    }
    float r;
    std::memcpy(&r, &bits, 4);
    return r;
}
inline F f_load_f16(const uint16_t *p) {
    float to[16];
    TR_LANES to[i] = half_to_float(p[i]);
    return f_load(to);
}
inline void f_store_f16(uint16_t *p, F a) {
    float from[16];
    f_store(from, a);
    TR_LANES p[i] = to_f16(from[i]);
}
inline F f_load_bf16(const uint16_t *p) {
    int32_t to[16];
    TR_LANES to[i] = static_cast<int32_t>(static_cast<uint32_t>(p[i]) << 16);
    return f_bits(i_load(to));
}
inline F f_load_split(const uint16_t *p) {
    int32_t to[16];
    TR_LANES to[i] = static_cast<int32_t>(static_cast<uint32_t>(p[2 * (i % 8) + i / 8]) << 16);
    return f_bits(i_load(to));
}
inline Pair f_load_pairs(const uint16_t *p) {
    int32_t first[16], second[16];
    TR_LANES first[i] = static_cast<int32_t>(static_cast<uint32_t>(p[2 * i]) << 16);
    TR_LANES second[i] = static_cast<int32_t>(static_cast<uint32_t>(p[2 * i + 1]) << 16);
    return {f_bits(i_load(first)), f_bits(i_load(second))};
}
inline float f_sum(F a) {
    const F4 pair = a.v[0] + a.v[2], other = a.v[1] + a.v[3], s = pair + other;
    return (s[0] + s[2]) + (s[1] + s[3]);
}
inline float f_hmax(F a) {
    float v[16];
    f_store(v, a);
    float m = v[0];
    for (float x : v) m = x > m ? x : m;
    return m;
}

struct A {
    int8_t v[4];
};
inline A a_load(const int8_t *p) {
    A r;
    std::memcpy(r.v, p, 4);
    return r;
}
struct W {
    H8 v[4];
};
inline W w_load(const uint8_t *p) {
    W r;
    std::memcpy(r.v, p, 64);
    return r;
}
inline void w_store(uint8_t *p, W w) { std::memcpy(p, w.v, 64); }
inline W operator|(W x, W y) {
    TR_QUARTERS x.v[i] |= y.v[i];
    return x;
}
template <int FROM, int TO, int COUNT> inline W w_bits(W w) {
    constexpr uint16_t byte = ((1 << COUNT) - 1) << TO, mask = byte << 8 | byte;
    if constexpr (FROM > TO) TR_QUARTERS w.v[i] >>= FROM - TO;
    else if constexpr (FROM < TO) TR_QUARTERS w.v[i] <<= TO - FROM;
    TR_QUARTERS w.v[i] &= mask;
    return w;
}
// Sums of products are functions of their own: inlined, they are most of what there is to compile, and no quicker.
struct DotSmall {
    int32_t acc[16] = {};
    __attribute__((noinline)) void add(const W &w, A a) {
        uint8_t v[64];
        w_store(v, w);
        TR_LANES for (int k = 0; k < 4; k++) acc[i] += v[4 * i + k] * a.v[k];
    }
    inline I finish(int32_t) const { return i_load(acc); }
};
struct DotMedium : DotSmall {
    inline void add(const W &w0, A a0, const W &w1, A a1) { DotSmall::add(w0, a0), DotSmall::add(w1, a1); }
};
using WS = W;
inline WS ws_prepare(W w) { return w; }
struct DotSigned {
    int32_t acc[16] = {};
    __attribute__((noinline)) void add(const WS &w, A a) {
        int8_t v[64];
        std::memcpy(v, w.v, 64);
        TR_LANES for (int k = 0; k < 4; k++) acc[i] += v[4 * i + k] * a.v[k];
    }
    inline I finish(int32_t) const { return i_load(acc); }
};
#undef TR_LANES
#undef TR_QUARTERS

#endif

inline int32_t i_sum(I a) {
#if defined(TR_AVX512) && !defined(TR_EMULATE)
    return _mm512_reduce_add_epi32(a.v);
#elif defined(TR_AVX2)
    const __m256i pair = _mm256_add_epi32(a.lo, a.hi);
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(pair), _mm256_extracti128_si256(pair, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
#else
    int32_t v[16], s = 0;
    i_store(v, a);
    for (int32_t x : v) s += x;
    return s;
#endif
}
inline F f_zero() { return f_set1(0.0f); }

// e^x for x <= 0 (about 1 ulp); exact 0 below -87.3, where -infinity lands too.
inline F f_exp(F x) {
    const F low = f_set1(-87.33654f);
    const F t = f_max(x, low);
    const I whole = f_round(t * f_set1(1.44269504f));
    const F n = i_float(whole);
    F r = f_fma(n, f_set1(-0.693359375f), t);
    r = f_fma(n, f_set1(2.12194440e-4f), r);
    F p = f_set1(1.9875691500e-4f);
    p = f_fma(p, r, f_set1(1.3981999507e-3f));
    p = f_fma(p, r, f_set1(8.3334519073e-3f));
    p = f_fma(p, r, f_set1(4.1665795894e-2f));
    p = f_fma(p, r, f_set1(1.6666665459e-1f));
    p = f_fma(p, r, f_set1(5.0000001201e-1f));
    p = f_fma(p * r, r, r + f_set1(1.0f));
    const F scale = f_bits(i_shl<23>(whole + i_set1(127)));
    return f_select_lt(x, low, f_zero(), p * scale);
}

// Natural logarithm of a positive, normal x (about 1 ulp).
inline F f_log(F x) {
    const I bits = i_bits(x);
    // x = 2^e * m with m in [sqrt(1/2), sqrt(2))
    const I shifted = bits - i_set1(0x3f3504f3);
    I e = i_shr<23>(shifted);
    e = (e ^ i_set1(0x100)) - i_set1(0x100); // sign of the nine-bit field
    const F m = f_bits(bits - i_shl<23>(e)) - f_set1(1.0f);
    const F z = m * m;
    F p = f_set1(7.0376836292e-2f);
    p = f_fma(p, m, f_set1(-1.1514610310e-1f));
    p = f_fma(p, m, f_set1(1.1676998740e-1f));
    p = f_fma(p, m, f_set1(-1.2420140846e-1f));
    p = f_fma(p, m, f_set1(1.4249322787e-1f));
    p = f_fma(p, m, f_set1(-1.6668057665e-1f));
    p = f_fma(p, m, f_set1(2.0000714765e-1f));
    p = f_fma(p, m, f_set1(-2.4999993993e-1f));
    p = f_fma(p, m, f_set1(3.3333331174e-1f));
    p = p * m * z;
    const F ef = i_float(e);
    p = f_fma(ef, f_set1(-2.12194440e-4f), p);
    p = f_fma(z, f_set1(-0.5f), p);
    return f_fma(ef, f_set1(0.693359375f), m + p);
}

} // namespace TR_NS
