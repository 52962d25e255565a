// What this build's instructions give at most: loops of nothing but the multiply-adds that the kernels are made of, and a
// loop that only reads. Operands are in registers; where a kind has to be loaded to be widened, they are in L1.
#pragma once

namespace TR_NS {

using namespace tailrace;

// Makes the compiler forget what it knows of a value, so that nothing is hoisted out of a loop or left out.
#if defined(TR_AVX512) && !defined(TR_EMULATE)
constexpr int CHAINS = 12; // independent sums: enough for the longest latency
constexpr int SIGNED_CHAINS = 12;
inline void opaque(F &a) { asm volatile("" : "+v"(a.v)); }
inline void opaque(W &a) { asm volatile("" : "+v"(a.v)); }
inline void opaque(A &a) { asm volatile("" : "+v"(a.v)); }
#elif defined(TR_AVX2)
constexpr int CHAINS = 4; // two registers each, of sixteen
constexpr int SIGNED_CHAINS = 2;
inline void opaque(F &a) { asm volatile("" : "+x"(a.lo), "+x"(a.hi)); }
inline void opaque(W &a) { asm volatile("" : "+x"(a.lo), "+x"(a.hi)); }
inline void opaque(A &a) { asm volatile("" : "+x"(a.v)); }
#else
constexpr int CHAINS = 2;
constexpr int SIGNED_CHAINS = 2;
template <class T> inline void opaque(T &a) { asm volatile("" : "+m"(a)); }
#endif
inline void opaque(const uint8_t *&p) { asm volatile("" : "+r"(p)); }

// Loads two vectors of sixteen inputs and multiplies each with R rows, as the float kernels do.
template <int R, class Load> float widened_rounds(const uint8_t *data, int64_t rounds, Load load) {
    F even[R], odd[R]; // begin with different values: what is the same would be computed once
    for (int r = 0; r < R; r++) even[r] = f_set1(float(r)), odd[r] = f_set1(float(-r));
    const volatile float small = 1e-3f;
    const F x = f_set1(small);
    for (int64_t i = 0; i < rounds; i++) {
        const uint8_t *p = data + (i % 32) * 64;
        opaque(p);
        const F a = load(reinterpret_cast<const uint16_t *>(p));
        for (int r = 0; r < R; r++) even[r] = f_fma(x, a, even[r]);
        const F b = load(reinterpret_cast<const uint16_t *>(p + 32));
        for (int r = 0; r < R; r++) odd[r] = f_fma(x, b, odd[r]);
    }
    F sum = f_zero();
    for (int r = 0; r < R; r++) sum = sum + even[r] + odd[r];
    return f_sum(sum);
}

float bf16_rounds(const uint8_t *data, int64_t rounds) {
    return widened_rounds<FLOAT_ROWS>(data, rounds, [](const uint16_t *p) { return f_load_split(p); });
}
float fp16_rounds(const uint8_t *data, int64_t rounds) {
    return widened_rounds<FLOAT_ROWS>(data, rounds, [](const uint16_t *p) { return f_load_f16(p); });
}

float fp32_rounds(const uint8_t *, int64_t rounds) {
    const volatile float small = 1e-3f;
    F acc[CHAINS + 1], w = f_set1(small);
    const F x = f_set1(small);
    for (int c = 0; c <= CHAINS; c++) acc[c] = f_set1(float(c));
    for (int64_t i = 0; i < rounds; i++) {
        opaque(w);
        for (int c = 0; c <= CHAINS; c++) acc[c] = f_fma(x, w, acc[c]);
    }
    F sum = f_zero();
    for (int c = 0; c <= CHAINS; c++) sum = sum + acc[c];
    return f_sum(sum);
}

// The dot products of the integer kernels over blocks of eight groups, without the scales that follow each block.
template <class Dot, int C, class Add> float dot_rounds(const uint8_t *data, int64_t rounds, int groups, Add add) {
    W w = w_load(data);
    A a[C];
    for (int c = 0; c < C; c++) {
        a[c] = a_load(reinterpret_cast<const int8_t *>(data) + 4 * c);
        opaque(a[c]);
    }
    I sum = i_set1(0);
    for (int64_t i = 0; i < rounds; i++) {
        Dot dot[C];
        for (int g = 0; g < 8; g += groups) {
            opaque(w);
            add(dot, w, a);
        }
        for (int c = 0; c < C; c++) sum = sum + dot[c].finish(0);
    }
    return float(i_sum(sum));
}

float small_rounds(const uint8_t *data, int64_t rounds) {
    return dot_rounds<DotSmall, CHAINS>(data, rounds, 1, [](auto &dot, W w, const auto &a) {
        for (int c = 0; c < CHAINS; c++) dot[c].add(w, a[c]);
    });
}
float medium_rounds(const uint8_t *data, int64_t rounds) {
    return dot_rounds<DotMedium, SIGNED_CHAINS>(data, rounds, 2, [](auto &dot, W w, const auto &a) {
        W other = w;
        opaque(other);
        for (int c = 0; c < SIGNED_CHAINS; c++) dot[c].add(w, a[c], other, a[c]);
    });
}
float signed_rounds(const uint8_t *data, int64_t rounds) {
    return dot_rounds<DotSigned, SIGNED_CHAINS>(data, rounds, 1, [](auto &dot, W w, const auto &a) {
        const WS ready = ws_prepare(w);
        for (int c = 0; c < SIGNED_CHAINS; c++) dot[c].add(ready, a[c]);
    });
}

#if defined(TR_AVX512)
#if defined(TR_EMULATE)
#define TR_HOW(text) text ", emulated"
#else
#define TR_HOW(text) text
#endif
#if defined(TR_DOT_BF16)
#define TR_BF16 "vpslld and vpand widen once for 6 rows, then vfmadd of 16 (only attention multiplies pairs of bf16)"
#else
#define TR_BF16 TR_HOW("vpslld and vpand widen once for 6 rows, then vfmadd of 16 (this build uses no bf16 dot product)")
#endif
#define TR_FP16 TR_HOW("vcvtph2ps widens once for 6 rows, then vfmadd of 16")
#define TR_FP32 TR_HOW("vfmadd of 16")
#define TR_SMALL TR_HOW("vpdpbusd of 64")
#define TR_MEDIUM TR_HOW("vpdpbusd of 64")
#define TR_SIGNED TR_HOW("vpxor once for 12 rows, then vpdpbusd of 64")
#elif defined(TR_AVX2)
#define TR_BF16 "vpslld and vpand widen once for 3 rows, then vfmadd of 8 (AVX2 has no bf16 dot product)"
#define TR_FP16 "vcvtph2ps widens once for 3 rows, then vfmadd of 8"
#define TR_FP32 "vfmadd of 8"
#define TR_SMALL "vpmaddubsw and vpaddw of 32, vpmaddwd and vpaddd every eight (unsigned weights of at most 15)"
#define TR_MEDIUM "two vpmaddubsw, vpaddw, vpmaddwd and vpaddd of 32 (unsigned weights of at most 63)"
#define TR_SIGNED "vpabsb once for 2 rows, then vpsignb, vpmaddubsw, vpmaddwd and vpaddd of 32"
#else
#define TR_BF16 "plain C++: a shift, a multiply and an add"
#define TR_FP16 "plain C++: conversion by integer operations, a multiply and an add"
#define TR_FP32 "plain C++: a multiply and an add"
#define TR_SMALL "plain C++: bytes widened to int32, a multiply and an add"
#define TR_MEDIUM "plain C++: bytes widened to int32, a multiply and an add"
#define TR_SIGNED "plain C++: bytes widened to int32, a multiply and an add"
#endif

constexpr Peak PEAKS[] = {
    {"fp32", TR_FP32, (CHAINS + 1) * LANES, fp32_rounds},
    {"bf16", TR_BF16, 2 * FLOAT_ROWS * LANES, bf16_rounds},
    {"fp16", TR_FP16, 2 * FLOAT_ROWS * LANES, fp16_rounds},
    {"int8_by_int4", TR_SMALL, CHAINS * 32 * LANES, small_rounds},
    {"int8_by_int6", TR_MEDIUM, SIGNED_CHAINS * 32 * LANES, medium_rounds},
    {"int8_by_int8", TR_SIGNED, SIGNED_CHAINS * 32 * LANES, signed_rounds},
};
constexpr int PEAK_COUNT = sizeof(PEAKS) / sizeof(PEAKS[0]);

#undef TR_BF16
#undef TR_FP16
#undef TR_FP32
#undef TR_SMALL
#undef TR_MEDIUM
#undef TR_SIGNED
#undef TR_HOW

// Reads whole runs of 256 bytes, `times` over; fetches `ahead` bytes before they are needed where that is not 0.
template <bool AHEAD> int32_t read_runs(const uint8_t *data, int64_t bytes, int64_t times, int64_t ahead) {
    I acc[4];
    for (auto &a : acc) a = i_set1(0);
    for (int64_t t = 0; t < times; t++) {
        const uint8_t *p = data;
        opaque(p);
        for (int64_t b = 0; b + 256 <= bytes; b += 256) {
            if constexpr (AHEAD)
                for (int line = 0; line < 4; line++) __builtin_prefetch(p + b + ahead + 64 * line, 0, 3);
            for (int j = 0; j < 4; j++) acc[j] = acc[j] + i_load(reinterpret_cast<const int32_t *>(p + b + 64 * j));
        }
    }
    return i_sum(acc[0] + acc[1] + acc[2] + acc[3]);
}

// The same of four runs side by side.
int32_t read_abreast(const uint8_t *data, int64_t bytes, int64_t times) {
    const int64_t run = bytes / 4;
    I acc[4];
    for (auto &a : acc) a = i_set1(0);
    for (int64_t t = 0; t < times; t++) {
        const uint8_t *p = data;
        opaque(p);
        for (int64_t b = 0; b + 64 <= run; b += 64)
            for (int j = 0; j < 4; j++) acc[j] = acc[j] + i_load(reinterpret_cast<const int32_t *>(p + j * run + b));
    }
    return i_sum(acc[0] + acc[1] + acc[2] + acc[3]);
}

int32_t read_all(const uint8_t *data, int64_t bytes, int64_t times, int64_t ahead) {
    if (ahead < 0) return read_abreast(data, bytes, times);
    return ahead == 0 ? read_runs<false>(data, bytes, times, 0) : read_runs<true>(data, bytes, times, ahead);
}

} // namespace TR_NS
