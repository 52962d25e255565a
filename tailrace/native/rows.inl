// Operations on one row: norm, rounding, rotation, KV writes, activation.
#pragma once

namespace TR_NS {

using namespace tailrace;

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

// Signs of the Hadamard matrix of sixteen rows: its own transpose and, over 4, its own inverse.
struct Hadamard {
    float sign[LANES][LANES] = {};
    constexpr Hadamard() {
        for (int i = 0; i < LANES; i++)
            for (int j = 0; j < LANES; j++) {
                int ones = 0;
                for (int bits = i & j; bits; bits >>= 1) ones += bits & 1;
                sign[i][j] = ones % 2 ? -1.0f : 1.0f;
            }
    }
};
constexpr Hadamard HADAMARD;

// Rotates each run of 2^i dimensions by the Hadamard matrix of that size, for the largest i that divides `n`: what lay on a
// few of them lies on all, so that few bits do for it. Once more gives back what was there. The order of sums is part of
// what it is: within sixteen dimensions one after the other, then halves against halves.
inline void spin(float *x, int n) {
    const int run = n & -n;
    const float scale = 1.0f / std::sqrt(float(run));
    if (run < LANES) {
        for (int half = 1; half < run; half *= 2)
            for (int i = 0; i < n; i++)
                if (!(i & half)) {
                    const float a = x[i], b = x[i + half];
                    x[i] = a + b;
                    x[i + half] = a - b;
                }
        for (int i = 0; i < n; i++) x[i] *= scale;
        return;
    }
    for (int i = 0; i < n; i += LANES) {
        F sum = f_zero();
        for (int j = 0; j < LANES; j++) sum = f_fma(f_set1(x[i + j]), f_load(HADAMARD.sign[j]), sum);
        f_store(x + i, sum);
    }
    for (int half = LANES; half < run; half *= 2)
        for (int i = 0; i < n; i += LANES)
            if (!(i & half)) {
                const F a = f_load(x + i), b = f_load(x + i + half);
                f_store(x + i, a + b);
                f_store(x + i + half, a - b);
            }
    for (int i = 0; i < n; i += LANES) f_store(x + i, f_load(x + i) * f_set1(scale));
}

// A vector rounded to a few bits: numbers, and for each group (of I8 the whole) what they are to be multiplied with and
// added to.
struct Small {
    int8_t q[MAX_HEAD_DIM]; // of I4 0 .. 15
    uint16_t scale[MAX_HEAD_DIM / GROUP], minimum[MAX_HEAD_DIM / GROUP]; // float16
};

inline float of_f16(uint16_t x) {
    uint16_t lanes[LANES] = {x};
    float wide[LANES];
    f_store(wide, f_load_f16(lanes));
    return wide[0];
}

constexpr float MOST_F16 = 65504.0f;

// The nearest numbers to one group's, a multiple of LANES.
inline void round_group(const float *x, int padded, bool four, uint16_t scale_f16, uint16_t minimum_f16, int8_t *q) {
    const float scale = of_f16(scale_f16);
    const F inverse = f_set1(scale > 0.0f ? 1.0f / scale : 0.0f), minimum = f_set1(of_f16(minimum_f16));
    const F least = f_set1(four ? 0.0f : -127.0f), most = f_set1(four ? 15.0f : 127.0f);
    for (int i = 0; i < padded; i += LANES) i_store_i8(q + i, f_round(f_max(least, f_min(most, (f_load(x + i) - minimum) * inverse))));
}

inline uint16_t within_f16(float x) { return to_f16(x < -MOST_F16 ? -MOST_F16 : x > MOST_F16 ? MOST_F16 : x); }

// The scale and the minimum that have the least squared error with the numbers that a group has been rounded to.
inline void fit_group(const float *x, int padded, const int8_t *q, uint16_t &scale, uint16_t &minimum) {
    const float before = of_f16(minimum), count = float(padded);
    F sum = f_zero(), square = f_zero(), over = f_zero(), product = f_zero();
    for (int i = 0; i < padded; i += LANES) {
        const F n = i_float(i_load_i8(q + i)), y = f_load(x + i) - f_set1(before);
        sum = sum + n, square = square + n * n, over = over + y, product = product + n * y;
    }
    const float n = f_sum(sum), y = f_sum(over), spread = count * f_sum(square) - n * n;
    const float found = (count * f_sum(product) - n * y) / (spread > 0.0f ? spread : 1.0f);
    if (!(found > 0.0f && found < MOST_F16)) return;
    scale = to_f16(found);
    minimum = within_f16(before + (y - of_f16(scale) * n) / count);
}

constexpr int FITS = 2; // a third takes little more off

// Rounds one group: `padded` numbers, a multiple of LANES. Four bits begin with the least and the most, and then fit scale and
// minimum to the numbers and round again, which takes an eighth off the squared error of normal values. Where one is not
// finite, neither is the scale.
inline void make_group(const float *x, int padded, bool four, int8_t *q, uint16_t &scale_out, uint16_t &minimum_out) {
    F top = f_load(x), bottom = top, none = f_zero();
    for (int i = 0; i < padded; i += LANES) {
        const F a = f_load(x + i);
        top = f_max(a, top), bottom = f_min(a, bottom);
        none = f_fma(a, f_zero(), none);
    }
    const float high = f_hmax(top), low = 0.0f - f_hmax(f_zero() - bottom);
    if (f_sum(none) != 0.0f) {
        std::memset(q, 0, size_t(padded));
        scale_out = minimum_out = 0x7e00;
        return;
    }
    const float range = four ? (high - low) / 15.0f : (high > -low ? high : -low) / 127.0f;
    scale_out = to_f16(range < MOST_F16 ? range : MOST_F16);
    minimum_out = four ? within_f16(low) : uint16_t(0);
    round_group(x, padded, four, scale_out, minimum_out, q);
    for (int i = 0; i < FITS && four; i++) {
        fit_group(x, padded, q, scale_out, minimum_out);
        round_group(x, padded, four, scale_out, minimum_out, q);
    }
}

// Rounds `n` numbers, or a rotated copy of them.
inline void make_small(const float *from, int n, Kept kept, bool rotated, Small &out) {
    float x[MAX_HEAD_DIM];
    const int padded = padded_dim(n);
    std::memcpy(x, from, sizeof(float) * size_t(n));
    if (rotated) spin(x, n);
    for (int i = n; i < padded; i++) x[i] = x[n - 1]; // changes no group's least and most
    if (kept == Kept::I8) return make_group(x, padded, false, out.q, out.scale[0], out.minimum[0]);
    for (int d = 0; d < padded; d += GROUP)
        make_group(x + d, padded - d < GROUP ? padded - d : GROUP, true, out.q + d, out.scale[d / GROUP], out.minimum[d / GROUP]);
}

// Writes position `at` of a block's header, and zero to the `behind` positions behind it.
inline void store_header(const Small &small, int at, int behind, int head_dim, Kept kept, uint8_t *block) {
    uint8_t *to = block + 2 * at;
    const auto put = [&](uint16_t x) {
        std::memcpy(to, &x, 2);
        std::memset(to + 2, 0, size_t(2 * behind));
        to += 2 * PAGE;
    };
    const int groups = kept == Kept::I4 ? groups_of(head_dim) : 1;
    for (int g = 0; g < groups; g++) {
        put(small.scale[g]);
        if (kept == Kept::I4) put(small.minimum[g]);
    }
}

// `n` numbers, a multiple of LANES or padded to one, as float16; what is finite stays so.
inline void make_f16(const float *from, int n, uint16_t *out) {
    float x[MAX_HEAD_DIM] = {};
    std::memcpy(x, from, sizeof(float) * size_t(n));
    const F least = f_set1(-MOST_F16), most = f_set1(MOST_F16);
    for (int i = 0; i < n; i += LANES) {
        const F a = f_load(x + i);
        f_store_f16(out + i, f_fma(a, f_zero(), f_max(least, f_min(most, a))));
    }
}

// Position `at` of a block of keys. `last`: the positions behind it become zero, so that a page holds nothing of those who
// had it before.
inline void store_key(const float *k, int at, bool last, int head_dim, Kept kept, uint8_t *block) {
    const int behind = last ? PAGE - 1 - at : 0;
    if (kept == Kept::BF16 || kept == Kept::F16) {
        uint16_t rounded[MAX_HEAD_DIM];
        auto *key = reinterpret_cast<uint16_t *>(block);
        if (kept == Kept::BF16) {
            key += 2 * at;
            for (int d = 0; d < head_dim; d++) rounded[d] = to_bf16(k[d]);
            for (int d = 0; d < head_dim; d += 2) std::memcpy(key + d * PAGE, rounded + d, 4);
            for (int d = 0; d < head_dim && behind; d += 2)
                for (int i = 1; i <= behind; i++) std::memset(key + d * PAGE + 2 * i, 0, 4);
            return;
        }
        key += at;
        make_f16(k, head_dim, rounded);
        for (int d = 0; d < head_dim; d++) key[d * PAGE] = rounded[d];
        for (int d = 0; d < head_dim && behind; d++) std::memset(key + d * PAGE + 1, 0, sizeof(uint16_t) * size_t(behind));
        return;
    }
    Small small;
    make_small(k, head_dim, kept, keys_rotated(kept), small);
    store_header(small, at, behind, head_dim, kept, block);
    const bool four = kept == Kept::I4;
    uint8_t *key = block + kept_header(kept, head_dim) + at;
    const int rows = four ? head_dim / 2 : head_dim;
    for (int d = 0; d < rows; d++) key[d * PAGE] = static_cast<uint8_t>(four ? small.q[2 * d] | small.q[2 * d + 1] << 4 : small.q[d]);
    for (int d = 0; d < rows && behind; d++) std::memset(key + d * PAGE + 1, 0, size_t(behind));
}

// The same of a block of values.
inline void store_value(const float *v, int at, bool last, int head_dim, Kept kept, uint8_t *block) {
    const int behind = last ? PAGE - 1 - at : 0, dim = padded_dim(head_dim);
    if (kept == Kept::BF16 || kept == Kept::F16) {
        uint16_t rounded[MAX_HEAD_DIM];
        auto *value = reinterpret_cast<uint16_t *>(block);
        if (kept == Kept::BF16) {
            for (int d = 0; d < head_dim; d++) rounded[d] = to_bf16(v[d]);
            uint16_t *pair = value + at / 2 * 2 * dim;
            for (int d = 0; d < head_dim; d++) pair[2 * d + at % 2] = rounded[d];
            if (!last) return;
            if (at % 2 == 0)
                for (int d = 0; d < head_dim; d++) pair[2 * d + 1] = 0;
            std::memset(pair + 2 * dim, 0, sizeof(uint16_t) * size_t((PAGE - 2 - at / 2 * 2) * dim));
            return;
        }
        make_f16(v, head_dim, value + at * dim);
        std::memset(value + (at + 1) * dim, 0, sizeof(uint16_t) * size_t(behind * dim));
        return;
    }
    Small small;
    make_small(v, head_dim, kept, values_rotated(kept), small);
    const bool four = kept == Kept::I4;
    const int row = four ? padded_pairs(head_dim) / 2 : dim;
    uint8_t *value = block + kept_header(kept, head_dim) + at * row;
    store_header(small, at, behind, head_dim, kept, block);
    if (four) {
        std::memset(small.q + head_dim, 0, size_t(padded_pairs(head_dim) - head_dim));
        for (int i = 0; i < row; i++)
            value[i] = static_cast<uint8_t>(small.q[i / LANES * 2 * LANES + i % LANES] | small.q[i / LANES * 2 * LANES + LANES + i % LANES] << 4);
    } else {
        std::memcpy(value, small.q, size_t(head_dim));
        std::memset(value + head_dim, 0, size_t(dim - head_dim));
    }
    std::memset(value + row, 0, size_t(behind * row));
}

void store_kv(const float *k, const float *v, int64_t slot, bool last, int kv_heads, int head_dim, const Kv &kv) {
    const int64_t page = slot / PAGE;
    const int at = int(slot % PAGE);
    const int64_t keys = key_block(kv.key, head_dim), values = value_block(kv.value, head_dim);
    for (int h = 0; h < kv_heads; h++) {
        store_key(k + h * head_dim, at, last, head_dim, kv.key, kv.key_at(page, h, keys));
        store_value(v + h * head_dim, at, last, head_dim, kv.value, kv.value_at(page, h, values));
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
