// The kernels of encoders, for one instruction set. A row's bits are the same whatever rows are computed beside it.
#pragma once

namespace TR_NS {

using namespace tailrace;

// Rounds sixteen values of a row at a time by a scale of the row's own.
struct Rounding {
    float scale; // which turns them back
    F inverse;

    Rounding(const float *x, int64_t k) {
        F most = f_zero();
        for (int64_t i = 0; i < k; i += WIDE) most = f_max(most, f_abs(f_load(x + i)));
        const float amax = f_hmax(most);
        scale = amax / MOST_X;
        inverse = f_set1(amax > 0.0f ? MOST_X / amax : 0.0f);
    }
    I operator()(const float *x) const { return f_round(f_load(x) * inverse); }
};

} // namespace TR_NS

#if defined(TR_AMX)
#include "encoder_amx.inl"
#endif

namespace TR_NS {

#if !defined(TR_AMX)

constexpr int64_t INPUTS = WIDE;

void enter() {}
void leave() {}

// Sixteen integers of at most 16 bits, stored as such.
inline void store_i16(int16_t *p, I a) {
#if defined(TR_AVX512)
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), _mm512_cvtepi32_epi16(a.v));
#elif defined(TR_AVX2)
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), _mm256_permute4x64_epi64(_mm256_packs_epi32(a.lo, a.hi), 0xd8));
#else
    int32_t wide[16];
    i_store(wide, a);
    for (int i = 0; i < 16; i++) p[i] = static_cast<int16_t>(wide[i]);
#endif
}

float round_row(const float *x, int64_t k, int16_t *q, int64_t step) {
    const Rounding by(x, k);
    for (int64_t i = 0; i < k; i += WIDE) store_i16(q + i / KBLOCK * step + i % KBLOCK, by(x + i));
    return by.scale;
}

// [k / 2][TILE][2].
void pack(const int16_t *rounded, int64_t k, int16_t *tile) {
    for (int64_t o = 0; o < TILE; o++)
        for (int64_t i = 0; i < k; i++) tile[i / 2 * 2 * TILE + o * 2 + i % 2] = rounded[o * k + i];
}

// Adds the products of a block of inputs of R rows to their sums, or begins them.
template <int R> __attribute__((noinline)) void sum_rows(const int16_t *tile, const int16_t *x, int64_t count, bool begins, float *sums) {
#if defined(TR_AVX512)
    __m512i a[R], b[R];
    for (int r = 0; r < R; r++) a[r] = b[r] = _mm512_setzero_si512();
    for (const int16_t *w = tile, *from = x, *end = x + count; from < end; from += 2, w += 2 * TILE) {
        const __m512i w0 = _mm512_loadu_si512(w), w1 = _mm512_loadu_si512(w + TILE);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            int32_t two;
            std::memcpy(&two, from + r * KBLOCK, 4);
            const __m512i p = _mm512_set1_epi32(two);
            a[r] = _mm512_dpwssd_epi32(a[r], p, w0);
            b[r] = _mm512_dpwssd_epi32(b[r], p, w1);
        }
    }
    for (int r = 0; r < R; r++) {
        const F first = i_float(I{a[r]}), second = i_float(I{b[r]});
        float *to = sums + r * TILE;
        f_store(to, begins ? first : f_load(to) + first);
        f_store(to + WIDE, begins ? second : f_load(to + WIDE) + second);
    }
#elif defined(TR_AVX2)
    // One after the other and by name, with the weights in registers: GCC's own choice takes a quarter longer.
    const auto pair = [](const int16_t *at) __attribute__((always_inline)) {
        int32_t two;
        std::memcpy(&two, at, 4);
        return _mm256_set1_epi32(two);
    };
#define TR_ADD(sum, p, w) \
    asm("vpmaddwd %[b], %[a], %[t]\n\tvpaddd %[t], %[s], %[s]" : [s] "+x"(sum), [t] "=&x"(t) : [a] "x"(p), [b] "x"(w))
    const __m256i zero = _mm256_setzero_si256();
    __m256i a0 = zero, a1 = zero, a2 = zero, a3 = zero, b0 = zero, b1 = zero, b2 = zero, b3 = zero, t;
    const auto *w = reinterpret_cast<const __m256i *>(tile);
    const int16_t *end = x + count;
    for (const int16_t *from = x; from < end; from += 2, w += 4) {
        const __m256i w0 = _mm256_loadu_si256(w), w1 = _mm256_loadu_si256(w + 1), w2 = _mm256_loadu_si256(w + 2), w3 = _mm256_loadu_si256(w + 3);
        const __m256i p = pair(from);
        TR_ADD(a0, p, w0);
        TR_ADD(a1, p, w1);
        TR_ADD(a2, p, w2);
        TR_ADD(a3, p, w3);
        if constexpr (R == 2) {
            const __m256i q = pair(from + KBLOCK);
            TR_ADD(b0, q, w0);
            TR_ADD(b1, q, w1);
            TR_ADD(b2, q, w2);
            TR_ADD(b3, q, w3);
        }
    }
#undef TR_ADD
    const auto put = [&](int64_t at, __m256i lo, __m256i hi) {
        const F s = i_float(I{lo, hi});
        f_store(sums + at, begins ? s : f_load(sums + at) + s);
    };
    put(0, a0, a1), put(WIDE, a2, a3);
    if constexpr (R == 2) put(TILE, b0, b1), put(TILE + WIDE, b2, b3);
#else
    for (int r = 0; r < R; r++) {
        int32_t total[TILE] = {};
        for (int64_t i = 0; i < count; i += 2)
            for (int o = 0; o < TILE; o++)
                total[o] += int32_t(tile[i * TILE + 2 * o]) * x[r * KBLOCK + i] + int32_t(tile[i * TILE + 2 * o + 1]) * x[r * KBLOCK + i + 1];
        for (int h = 0; h < TILE; h += WIDE) {
            const F s = i_float(i_load(total + h));
            f_store(sums + r * TILE + h, begins ? s : f_load(sums + r * TILE + h) + s);
        }
    }
#endif
}

void multiply(const int16_t *tile, int64_t k, const int16_t *x, int64_t step, int64_t rows, float *sums) {
#if defined(TR_AVX512)
    constexpr int R = 8;
#else
    constexpr int R = 2;
#endif
    for (int64_t from = 0; from < k; from += KBLOCK, tile += KBLOCK * TILE, x += step) {
        const int64_t count = from + KBLOCK < k ? KBLOCK : k - from;
        int64_t r = 0;
        for (; r + R <= rows; r += R) sum_rows<R>(tile, x + r * KBLOCK, count, from == 0, sums + r * TILE);
        for (; r < rows; r++) sum_rows<1>(tile, x + r * KBLOCK, count, from == 0, sums + r * TILE);
    }
}

#endif

// erf(x) by Abramowitz and Stegun 7.1.26 (absolute error below 1.5e-7), so x / 2 * (1 + erf(x / sqrt(2))).
inline F gelu(F x) {
    const F a = f_abs(x) * f_set1(0.70710678f), one = f_set1(1.0f);
    const F t = one / f_fma(a, f_set1(0.3275911f), one);
    F p = f_set1(1.061405429f);
    p = f_fma(p, t, f_set1(-1.453152027f));
    p = f_fma(p, t, f_set1(1.421413741f));
    p = f_fma(p, t, f_set1(-0.284496736f));
    p = f_fma(p, t, f_set1(0.254829592f));
    const F rest = p * t * f_exp(f_zero() - a * a); // 1 - erf(a)
    const F half = x * f_set1(0.5f);
    return f_select_lt(x, f_zero(), half * rest, x - half * rest);
}

inline F bent_tanh(F x) {
    const F e = f_exp(f_zero() - f_abs(x) * f_set1(2.0f)), one = f_set1(1.0f);
    const F t = (one - e) / (one + e);
    return f_select_lt(x, f_zero(), f_zero() - t, t);
}

template <Bend BEND, bool RESIDUAL> inline void finish_rows(const float *sums, int64_t rows, const Finish &f) {
    for (int64_t c = 0; c < f.columns; c += WIDE) {
        const F scale = f_load(f.scale + c), bias = f_load(f.bias + c);
        for (int64_t r = 0; r < rows; r++) {
            F y = f_fma(f_load(sums + r * TILE + c), scale * f_set1(f.row_scale[r]), bias);
            if constexpr (RESIDUAL) y = y + f_load(f.residual + r * f.residual_ld + c);
            if constexpr (BEND == Bend::Gelu) y = gelu(y);
            if constexpr (BEND == Bend::Tanh) y = bent_tanh(y);
            f_store(f.out + r * f.ld + c, y);
        }
    }
}

void product(const int16_t *tile, int64_t k, const int16_t *x, int64_t step, int64_t rows, float *sums, const Finish &f) {
    multiply(tile, k, x, step, rows, sums);
    if (f.bend == Bend::Gelu) finish_rows<Bend::Gelu, false>(sums, rows, f);
    else if (f.bend == Bend::Tanh) finish_rows<Bend::Tanh, false>(sums, rows, f);
    else if (f.residual) finish_rows<Bend::None, true>(sums, rows, f);
    else finish_rows<Bend::None, false>(sums, rows, f);
}

void norm(const float *x, const float *weight, const float *bias, float eps, int64_t width, float *out) {
    F sum = f_zero(), square = f_zero();
    for (int64_t i = 0; i < width; i += WIDE) sum = sum + f_load(x + i);
    const F mean = f_set1(f_sum(sum) / float(width));
    for (int64_t i = 0; i < width; i += WIDE) {
        const F d = f_load(x + i) - mean;
        square = f_fma(d, d, square);
    }
    const F inverse = f_set1(1.0f / std::sqrt(f_sum(square) / float(width) + eps));
    for (int64_t i = 0; i < width; i += WIDE)
        f_store(out + i, f_fma((f_load(x + i) - mean) * inverse, f_load(weight + i), f_load(bias + i)));
}

#if defined(TR_AVX512)
constexpr int QUERIES = ATTEND_QUERIES, ACROSS = 2; // that are computed together, and vectors of keys or of values beside each other
#else
constexpr int QUERIES = ATTEND_QUERIES / 2, ACROSS = 1;
#endif

// s[r][c] is the sum over i < count of a[r * lda + i] and the c-th vector of b[i * ldb].
template <int R, int C> inline void sum_products(const float *a, int64_t lda, const float *b, int64_t ldb, int64_t count, F (&s)[R][C]) {
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) s[r][c] = f_zero();
    for (int64_t i = 0; i < count; i++) {
        F v[C];
        for (int c = 0; c < C; c++) v[c] = f_load(b + i * ldb + c * WIDE);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const F x = f_set1(a[r * lda + i]);
            for (int c = 0; c < C; c++) s[r][c] = f_fma(x, v[c], s[r][c]);
        }
    }
}

// R queries of one head. `keys`: [head_dim][padded]; `values`: [n][wide].
template <int R>
inline void attend_rows(const float *q, int64_t ld, const float *keys, const float *values, int64_t n, int64_t head_dim, float scale, float *out,
                        int64_t ldo, float *scores) {
    const int64_t padded = up_to(n, WIDE), wide = up_to(head_dim, WIDE);
    const auto score = [&]<int C>(int64_t j) {
        F s[R][C];
        sum_products<R, C>(q, ld, keys + j, padded, head_dim, s);
        for (int r = 0; r < R; r++)
            for (int c = 0; c < C; c++) f_store(scores + r * padded + j + c * WIDE, s[r][c] * f_set1(scale));
    };
    int64_t j = 0;
    for (; j + ACROSS * WIDE <= padded; j += ACROSS * WIDE) score.template operator()<ACROSS>(j);
    for (; j < padded; j += WIDE) score.template operator()<1>(j);
    float inverse[R];
    for (int r = 0; r < R; r++) {
        float *row = scores + r * padded;
        for (int64_t i = n; i < padded; i++) row[i] = -1e30f;
        F most = f_load(row), sum = f_zero();
        for (int64_t i = WIDE; i < padded; i += WIDE) most = f_max(most, f_load(row + i));
        most = f_set1(f_hmax(most));
        for (int64_t i = 0; i < padded; i += WIDE) {
            const F e = f_exp(f_load(row + i) - most);
            f_store(row + i, e);
            sum = sum + e;
        }
        inverse[r] = 1.0f / f_sum(sum);
    }
    const auto mix = [&]<int C>(int64_t from) {
        F o[R][C];
        sum_products<R, C>(scores, padded, values + from, wide, n, o);
        for (int r = 0; r < R; r++) {
            float mixed[C * WIDE];
            for (int c = 0; c < C; c++) f_store(mixed + c * WIDE, o[r][c] * f_set1(inverse[r]));
            const int64_t count = head_dim - from < C * WIDE ? head_dim - from : C * WIDE;
            std::memcpy(out + r * ldo + from, mixed, size_t(count) * sizeof(float));
        }
    };
    int64_t c = 0;
    for (; c + ACROSS * WIDE <= wide; c += ACROSS * WIDE) mix.template operator()<ACROSS>(c);
    for (; c < wide; c += WIDE) mix.template operator()<1>(c);
}

void attend(const float *q, const float *k, const float *v, int64_t ld, int64_t n, int64_t head_dim, float scale, float *out, int64_t ldo,
            float *scratch) {
    const int64_t padded = up_to(n, WIDE), wide = up_to(head_dim, WIDE);
    float *keys = scratch, *values = keys + head_dim * padded, *scores = values + n * wide;
    for (int64_t d = 0; d < head_dim; d++) {
        float *to = keys + d * padded;
        for (int64_t j = 0; j < n; j++) to[j] = k[j * ld + d];
        for (int64_t j = n; j < padded; j++) to[j] = 0.0f;
    }
    for (int64_t j = 0; j < n; j++) {
        std::memcpy(values + j * wide, v + j * ld, size_t(head_dim) * sizeof(float));
        for (int64_t d = head_dim; d < wide; d++) values[j * wide + d] = 0.0f;
    }
    int64_t r = 0;
    for (; r + QUERIES <= n; r += QUERIES) attend_rows<QUERIES>(q + r * ld, ld, keys, values, n, head_dim, scale, out + r * ldo, ldo, scores);
    for (; r < n; r++) attend_rows<1>(q + r * ld, ld, keys, values, n, head_dim, scale, out + r * ldo, ldo, scores);
}

void mean(const float *x, int64_t ld, int64_t rows, int64_t width, float *out) {
    const F inverse = f_set1(1.0f / float(rows));
    for (int64_t i = 0; i < width; i += WIDE) {
        F sum = f_zero();
        for (int64_t r = 0; r < rows; r++) sum = sum + f_load(x + r * ld + i);
        f_store(out + i, sum * inverse);
    }
}

void unit(float *x, int64_t width) {
    F square = f_zero();
    for (int64_t i = 0; i < width; i += WIDE) square = f_fma(f_load(x + i), f_load(x + i), square);
    const float length = std::sqrt(f_sum(square));
    const F inverse = f_set1(1.0f / (length > 1e-12f ? length : 1e-12f));
    for (int64_t i = 0; i < width; i += WIDE) f_store(x + i, f_load(x + i) * inverse);
}

} // namespace TR_NS

namespace tailrace {

const EncoderKernels *TR_TABLE() {
    static const EncoderKernels table{TR_NAME, TR_NS::INPUTS, TR_NS::pack, TR_NS::enter, TR_NS::leave, TR_NS::round_row, TR_NS::product, TR_NS::norm, TR_NS::attend, TR_NS::mean, TR_NS::unit};
    return &table;
}

} // namespace tailrace
