// Operations on one row: norm, rounding to int8, rotation, KV writes, activation.
#pragma once

namespace TR_NS {

using namespace tailrace;

// Block b of a row: 32 values to int8, with their scale and sums.
inline void round_block(F lo, F hi, int64_t row, int64_t b, const Quantised &out) {
    const int64_t at = out.at(row, b);
    int8_t *q = out.q + at * QBLOCK;
    const float amax = f_hmax(f_max(f_abs(lo), f_abs(hi)));
    const float d = amax / 127.0f;
    const F inverse = f_set1(amax > 0.0f ? 127.0f / amax : 0.0f);
    const F limit = f_set1(127.0f), low = f_set1(-127.0f);
    const I a = f_round(f_max(low, f_min(limit, lo * inverse)));
    const I c = f_round(f_max(low, f_min(limit, hi * inverse)));
    i_store_i8(q, a);
    i_store_i8(q + LANES, c);
    const int32_t sa = i_sum(a), sc = i_sum(c);
    out.d[at] = d;
    out.ds[at] = d * float(sa + sc);
    out.ds16[at * 2] = d * float(sa);
    out.ds16[at * 2 + 1] = d * float(sc);
    out.s16[at * 2] = sa;
    out.s16[at * 2 + 1] = sc;
}

void quantise(const float *x, int64_t row, const Quantised &out) {
    x += row * out.k;
    for (int64_t b = 0; b < out.blocks(); b++, x += QBLOCK) round_block(f_load(x), f_load(x + LANES), row, b, out);
}

void rms_norm(const float *x, const float *weight, float eps, int64_t width, float *out) {
    F square = f_zero();
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) {
        const F v = f_load(x + i);
        square = f_fma(v, v, square);
    }
    float total = f_sum(square);
    for (; i < width; i++) total += x[i] * x[i];
    const float inverse = 1.0f / std::sqrt(total / float(width) + eps);
    for (i = 0; i + LANES <= width; i += LANES) f_store(out + i, f_load(weight + i) * (f_load(x + i) * f_set1(inverse)));
    for (; i < width; i++) out[i] = weight[i] * (x[i] * inverse);
}

void rotate(float *x, const float *cos, const float *sin, int64_t half, int64_t) {
    float *y = x + half;
    int64_t i = 0;
    for (; i + LANES <= half; i += LANES) {
        const F a = f_load(x + i), b = f_load(y + i), c = f_load(cos + i), s = f_load(sin + i);
        f_store(x + i, a * c - b * s);
        f_store(y + i, b * c + a * s);
    }
    for (; i < half; i++) {
        const float a = x[i], b = y[i];
        x[i] = a * cos[i] - b * sin[i];
        y[i] = b * cos[i] + a * sin[i];
    }
}

inline uint16_t to_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u); // NaN stays NaN
    return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// `last`: the slots of the page behind this one become zero, so that a page holds nothing of those who had it before.
void store_kv(const float *k, const float *v, int64_t slot, bool last, int kv_heads, int head_dim, uint16_t *keys, uint16_t *values) {
    const int64_t page = slot / PAGE;
    const int in_page = int(slot % PAGE), dim = padded_dim(head_dim);
    uint16_t rounded[MAX_HEAD_DIM];
    for (int h = 0; h < kv_heads; h++) {
        uint16_t *key = keys + (page * kv_heads + h) * head_dim * PAGE + 2 * in_page;
        uint16_t *value = values + (page * kv_heads + h) * dim * PAGE;
        for (int d = 0; d < head_dim; d++) rounded[d] = to_bf16(k[h * head_dim + d]);
        for (int d = 0; d < head_dim; d += 2) std::memcpy(key + d * PAGE, rounded + d, 4);
        for (int d = 0; d < head_dim; d++) rounded[d] = to_bf16(v[h * head_dim + d]);
        uint16_t *pair = value + in_page / 2 * 2 * dim;
        for (int d = 0; d < head_dim; d++) pair[2 * d + in_page % 2] = rounded[d];
        if (!last) continue;
        if (in_page % 2 == 0)
            for (int d = 0; d < head_dim; d++) pair[2 * d + 1] = 0;
        std::memset(pair + 2 * dim, 0, sizeof(uint16_t) * size_t((PAGE - 2 - in_page / 2 * 2) * dim));
        for (int d = 0; d < head_dim; d += 2)
            for (int i = 1; i < PAGE - in_page; i++) std::memset(key + d * PAGE + 2 * i, 0, 4);
    }
}

// silu(gate) * up
inline F gated(F g, F up) {
    const F one = f_set1(1.0f);
    const F e = f_exp(f_zero() - f_abs(g)); // never overflows
    // sigmoid(g) is 1 / (1 + e) for g >= 0 and e / (1 + e) below
    const F sigmoid = f_select_lt(g, f_zero(), e, one) / (one + e);
    return g * sigmoid * up;
}

void silu_mul(const float *gate, const float *up, int64_t width, float *out) {
    for (int64_t i = 0; i < width; i += LANES) f_store(out + i, gated(f_load(gate + i), f_load(up + i)));
}

void gate_block(const float *gate, const float *up, int64_t rows, int64_t row0, int64_t block, const Quantised &out) {
    for (int64_t r = 0; r < rows; r++) {
        const F lo = gated(f_load(gate + r * LANES), f_load(up + r * LANES));
        const F hi = gated(f_load(gate + (rows + r) * LANES), f_load(up + (rows + r) * LANES));
        round_block(lo, hi, row0 + r, block, out);
    }
}

} // namespace TR_NS
