// The lanes of simd.h on AArch64: sixteen are four vectors of four. Part of simd.h, which says what each name means.
//
// It compiles for plain Armv8-A and, where the compiler may use it, with the dot product extension (sdot). Both give the
// same bits, and the same as the other builds that have fused multiply-adds.
#pragma once

#include <arm_neon.h>

namespace TR_NS {

#define TR_MAP1(f, x) {f(x.a), f(x.b), f(x.c), f(x.d)}
#define TR_MAP2(f, x, y) {f(x.a, y.a), f(x.b, y.b), f(x.c, y.c), f(x.d, y.d)}
#define TR_MAP4(f, x, y, z, w) \
    {f(x.a, y.a, z.a, w.a), f(x.b, y.b, z.b, w.b), f(x.c, y.c, z.c, w.c), f(x.d, y.d, z.d, w.d)}

struct F {
    float32x4_t a, b, c, d;
};
struct I {
    int32x4_t a, b, c, d;
};
struct Pair {
    F first, second;
};

// As on x86, the second of two equals, and the second where either is not a number: vmaxq and vminq would tell zeros
// apart and keep NaNs.
inline float32x4_t greater(float32x4_t x, float32x4_t y) { return vbslq_f32(vcgtq_f32(x, y), x, y); }
inline float32x4_t lesser(float32x4_t x, float32x4_t y) { return vbslq_f32(vcltq_f32(x, y), x, y); }
inline float32x4_t select_lt(float32x4_t a, float32x4_t b, float32x4_t x, float32x4_t y) { return vbslq_f32(vcltq_f32(a, b), x, y); }

inline F f_set1(float x) {
    const float32x4_t v = vdupq_n_f32(x);
    return {v, v, v, v};
}
inline F f_load(const float *p) { return {vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}; }
inline void f_store(float *p, F x) {
    vst1q_f32(p, x.a);
    vst1q_f32(p + 4, x.b);
    vst1q_f32(p + 8, x.c);
    vst1q_f32(p + 12, x.d);
}
inline F operator+(F x, F y) { return TR_MAP2(vaddq_f32, x, y); }
inline F operator-(F x, F y) { return TR_MAP2(vsubq_f32, x, y); }
inline F operator*(F x, F y) { return TR_MAP2(vmulq_f32, x, y); }
inline F operator/(F x, F y) { return TR_MAP2(vdivq_f32, x, y); }
inline F f_fma(F x, F y, F z) {
    return {vfmaq_f32(z.a, x.a, y.a), vfmaq_f32(z.b, x.b, y.b), vfmaq_f32(z.c, x.c, y.c), vfmaq_f32(z.d, x.d, y.d)};
}
inline F f_max(F x, F y) { return TR_MAP2(greater, x, y); }
inline F f_min(F x, F y) { return TR_MAP2(lesser, x, y); }
inline F f_abs(F x) { return TR_MAP1(vabsq_f32, x); }
inline I i_set1(int32_t x) {
    const int32x4_t v = vdupq_n_s32(x);
    return {v, v, v, v};
}
inline I i_load(const int32_t *p) { return {vld1q_s32(p), vld1q_s32(p + 4), vld1q_s32(p + 8), vld1q_s32(p + 12)}; }
inline void i_store(int32_t *p, I x) {
    vst1q_s32(p, x.a);
    vst1q_s32(p + 4, x.b);
    vst1q_s32(p + 8, x.c);
    vst1q_s32(p + 12, x.d);
}
inline I operator+(I x, I y) { return TR_MAP2(vaddq_s32, x, y); }
inline I operator-(I x, I y) { return TR_MAP2(vsubq_s32, x, y); }
inline I operator*(I x, I y) { return TR_MAP2(vmulq_s32, x, y); }
inline I operator^(I x, I y) { return TR_MAP2(veorq_s32, x, y); }
inline I operator&(I x, I y) { return TR_MAP2(vandq_s32, x, y); }
template <int N> inline int32x4_t shr(int32x4_t x) { return vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(x), N)); }
template <int N> inline int32x4_t shl(int32x4_t x) { return vshlq_n_s32(x, N); }
template <int N> inline I i_shr(I x) { return TR_MAP1(shr<N>, x); }
template <int N> inline I i_shl(I x) { return TR_MAP1(shl<N>, x); }
inline I f_round(F x) { return TR_MAP1(vcvtnq_s32_f32, x); }
inline F i_float(I x) { return TR_MAP1(vcvtq_f32_s32, x); }
inline F f_bits(I x) { return TR_MAP1(vreinterpretq_f32_s32, x); }
inline I i_bits(F x) { return TR_MAP1(vreinterpretq_s32_f32, x); }
inline F f_select_lt(F a, F b, F x, F y) { return TR_MAP4(select_lt, a, b, x, y); }
inline I i_load_i8(const int8_t *p) {
    const int8x16_t x = vld1q_s8(p);
    const int16x8_t lo = vmovl_s8(vget_low_s8(x)), hi = vmovl_high_s8(x);
    return {vmovl_s16(vget_low_s16(lo)), vmovl_high_s16(lo), vmovl_s16(vget_low_s16(hi)), vmovl_high_s16(hi)};
}
inline I i_load_u8(const uint8_t *p) {
    const uint8x16_t x = vld1q_u8(p);
    const uint16x8_t lo = vmovl_u8(vget_low_u8(x)), hi = vmovl_high_u8(x);
    return {vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(lo))), vreinterpretq_s32_u32(vmovl_high_u16(lo)),
            vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(hi))), vreinterpretq_s32_u32(vmovl_high_u16(hi))};
}
inline void store_f16(uint16_t *p, float32x4_t x) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(x))); }
inline void f_store_f16(uint16_t *p, F x) { store_f16(p, x.a), store_f16(p + 4, x.b), store_f16(p + 8, x.c), store_f16(p + 12, x.d); }
inline void i_store_i8(int8_t *p, I x) {
    const int16x8_t lo = vcombine_s16(vmovn_s32(x.a), vmovn_s32(x.b)), hi = vcombine_s16(vmovn_s32(x.c), vmovn_s32(x.d));
    vst1q_s8(p, vcombine_s8(vmovn_s16(lo), vmovn_s16(hi)));
}
inline float32x4_t load_f16(const uint16_t *p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
inline F f_load_f16(const uint16_t *p) { return {load_f16(p), load_f16(p + 4), load_f16(p + 8), load_f16(p + 12)}; }
inline float32x4_t load_bf16(const uint16_t *p) { return vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(vld1_u16(p)), 16)); }
inline F f_load_bf16(const uint16_t *p) { return {load_bf16(p), load_bf16(p + 4), load_bf16(p + 8), load_bf16(p + 12)}; }
inline F f_load_split(const uint16_t *p) {
    const uint32x4_t x = vreinterpretq_u32_u16(vld1q_u16(p)), y = vreinterpretq_u32_u16(vld1q_u16(p + 8));
    const uint32x4_t high = vdupq_n_u32(0xffff0000u);
    return {vreinterpretq_f32_u32(vshlq_n_u32(x, 16)), vreinterpretq_f32_u32(vshlq_n_u32(y, 16)),
            vreinterpretq_f32_u32(vandq_u32(x, high)), vreinterpretq_f32_u32(vandq_u32(y, high))};
}
inline Pair f_load_pairs(const uint16_t *p) {
    const uint32x4_t high = vdupq_n_u32(0xffff0000u);
    const auto load = [&](int i) { return vreinterpretq_u32_u16(vld1q_u16(p + 8 * i)); };
    const auto first = [](uint32x4_t x) { return vreinterpretq_f32_u32(vshlq_n_u32(x, 16)); };
    const auto second = [&](uint32x4_t x) { return vreinterpretq_f32_u32(vandq_u32(x, high)); };
    const uint32x4_t a = load(0), b = load(1), c = load(2), d = load(3);
    return {{first(a), first(b), first(c), first(d)}, {second(a), second(b), second(c), second(d)}};
}
inline float f_sum(F x) {
    const float32x4_t t = vaddq_f32(vaddq_f32(x.a, x.c), vaddq_f32(x.b, x.d));
    const float32x2_t u = vadd_f32(vget_low_f32(t), vget_high_f32(t));
    return vget_lane_f32(u, 0) + vget_lane_f32(u, 1);
}
inline float f_hmax(F x) {
    const float32x4_t t = greater(greater(x.a, x.c), greater(x.b, x.d));
    const float32x2_t low = vget_low_f32(t), high = vget_high_f32(t);
    const float32x2_t u = vbsl_f32(vcgt_f32(low, high), low, high);
    const float v = vget_lane_f32(u, 0), w = vget_lane_f32(u, 1);
    return v > w ? v : w;
}

struct W {
    int8x16_t a, b, c, d;
};
inline int8x16_t load_bytes(const uint8_t *p) { return vreinterpretq_s8_u8(vld1q_u8(p)); }
inline W w_load(const uint8_t *p) { return {load_bytes(p), load_bytes(p + 16), load_bytes(p + 32), load_bytes(p + 48)}; }
inline void w_store(uint8_t *p, W w) {
    vst1q_u8(p, vreinterpretq_u8_s8(w.a));
    vst1q_u8(p + 16, vreinterpretq_u8_s8(w.b));
    vst1q_u8(p + 32, vreinterpretq_u8_s8(w.c));
    vst1q_u8(p + 48, vreinterpretq_u8_s8(w.d));
}
inline W operator|(W x, W y) { return TR_MAP2(vorrq_s8, x, y); }
template <int FROM, int TO, int COUNT> inline int8x16_t bits(int8x16_t x) {
    if constexpr (FROM > TO) x = vreinterpretq_s8_u8(vshrq_n_u8(vreinterpretq_u8_s8(x), FROM - TO));
    else if constexpr (FROM < TO) x = vshlq_n_s8(x, TO - FROM);
    return vandq_s8(x, vdupq_n_s8(static_cast<int8_t>(((1 << COUNT) - 1) << TO)));
}
template <int FROM, int TO, int COUNT> inline W w_bits(W w) {
    return {bits<FROM, TO, COUNT>(w.a), bits<FROM, TO, COUNT>(w.b), bits<FROM, TO, COUNT>(w.c), bits<FROM, TO, COUNT>(w.d)};
}

#if defined(__ARM_FEATURE_DOTPROD)

// Kept in one lane, which sdot takes its second operand from: spreading them would cost an operation for every four sdots.
struct A {
    int8x8_t v;
};
inline A a_load(const int8_t *p) {
    uint32_t x;
    std::memcpy(&x, p, 4);
    return {vcreate_s8(x)};
}
inline int32x4_t dot(int32x4_t acc, int8x16_t w, A a) { return vdotq_lane_s32(acc, w, a.v, 0); }

#else

struct A {
    int8x16_t v;
};
inline A a_load(const int8_t *p) {
    int32_t x;
    std::memcpy(&x, p, 4);
    return {vreinterpretq_s8_s32(vdupq_n_s32(x))};
}
// |w| <= 128 and |a| <= 127, so a pair of products is at most 32,512 and fits sixteen bits.
inline int32x4_t dot(int32x4_t acc, int8x16_t w, A a) {
    const int16x8_t low = vmull_s8(vget_low_s8(w), vget_low_s8(a.v)), high = vmull_high_s8(w, a.v);
    return vpadalq_s16(acc, vpaddq_s16(low, high));
}

#endif

// Weights of up to six bits are small signed ones as well, so one dot product serves all kinds.
using WS = W;
inline WS ws_prepare(W w) { return w; }
struct Dot {
    int32x4_t a = vdupq_n_s32(0), b = a, c = a, d = a;
    inline void add(W w, A x) {
        a = dot(a, w.a, x);
        b = dot(b, w.b, x);
        c = dot(c, w.c, x);
        d = dot(d, w.d, x);
    }
    inline void add(W w0, A x0, W w1, A x1) { add(w0, x0), add(w1, x1); }
    inline I finish(int32_t) const { return {a, b, c, d}; }
};
using DotSmall = Dot;
using DotMedium = Dot;
using DotSigned = Dot;

#undef TR_MAP1
#undef TR_MAP2
#undef TR_MAP4

} // namespace TR_NS
