// Matrix products. A row of the result depends on its own activations and the weights alone: its sums are made in the same order
// whatever number of rows is computed beside it. Here: what all products share, and those of weights in float.
#pragma once

#include <type_traits>
#include <utility>

namespace TR_NS {

using namespace tailrace;

#if defined(TR_AVX512)
constexpr int FLOAT_ROWS = 6;
#else
constexpr int FLOAT_ROWS = 3;
#endif

constexpr int PREFETCH = 4096; // bytes ahead of the block that is multiplied, where weights are read once

// Of lambdas in a kernel: inlined before anything else is done, or the arrays that they refer to stay in memory.
#define TR_INLINED __attribute__((always_inline))

// Calls f<0>() to f<N - 1>().
template <int N, class Call> TR_INLINE void each(Call &&call) {
    [&]<int... I>(std::integer_sequence<int, I...>) TR_INLINED { (call.template operator()<I>(), ...); }(std::make_integer_sequence<int, N>{});
}

inline void write_out(const Output &out, int64_t row, F acc) {
    float *p = out.data + row * out.ld;
    if (out.bias) acc = acc + f_load(out.bias);
    if (out.accumulate) acc = f_load(p) + acc;
    f_store(p, acc);
}

void place(const float *from, int64_t rows, const Output &out) {
    for (int64_t r = 0; r < rows; r++) write_out(out, r, f_load(from + r * LANES));
}

// Scales and minima of a span's blocks, one for each of the sixteen outputs. A minimum is added to what a scale has
// multiplied, so it is zero where there is none.
template <Quants Q> struct Scales {
    const uint8_t *header;
    F factor = f_zero(), min_factor = f_zero(); // as stored, in float32

    inline explicit Scales(const uint8_t *span) : header(span) {
        factor = f_load_f16(reinterpret_cast<const uint16_t *>(header));
        if constexpr (Q.min == Min::Stored) min_factor = f_load_f16(reinterpret_cast<const uint16_t *>(header + 2 * LANES));
    }
    inline void at(int block, F &scale, F &min) const {
        min = f_zero();
        if constexpr (Q.super) {
            const uint8_t *p = header + Q.factors() + block * Q.scales();
            const I s = i_load_i8(reinterpret_cast<const int8_t *>(p));
            if constexpr (Q.bits == 2) {
                scale = factor * i_float(s & i_set1(15)), min = min_factor * i_float(i_shr<4>(s) & i_set1(15));
            } else {
                scale = factor * i_float(s);
                if constexpr (Q.min == Min::Stored) min = min_factor * i_float(i_load_i8(reinterpret_cast<const int8_t *>(p + LANES)));
            }
        } else {
            scale = factor, min = min_factor;
            if constexpr (Q.min == Min::Eight) min = scale * f_set1(-8.0f);
        }
    }
};

// Group G of a payload of 32 inputs, a quant in each byte.
template <int BITS, int G> inline W group(const uint8_t *payload) {
    constexpr int PAIRS = (BITS & 4) * 64, BIT = PAIRS + (BITS & 2) * 64; // where the planes of 2 bits and of 1 bit begin
    if constexpr (BITS == 8) {
        return w_load(payload + 64 * G);
    } else if constexpr (BITS & 1) { // the highest bit is in the plane that comes last
        return group<BITS - 1, G>(payload) | w_bits<G, BITS - 1, 1>(w_load(payload + BIT));
    } else if constexpr (BITS == 6) {
        return group<4, G>(payload) | w_bits<G % 4 * 2, 4, 2>(w_load(payload + PAIRS + 64 * (G / 4)));
    } else if constexpr (BITS == 4) {
        return w_bits<G / 4 * 4, 0, 4>(w_load(payload + 64 * (G % 4)));
    } else {
        return w_bits<G % 4 * 2, 0, 2>(w_load(payload + 64 * (G / 4)));
    }
}

template <int LINES> inline void prefetch(const uint8_t *p) {
    for (int line = 0; line < LINES; line++) __builtin_prefetch(p + 64 * line, 0, 3);
}

// Calls f<R>() for R = rows, one of 1..MAX.
template <int MAX, class Call> inline void with_rows(int64_t rows, Call &&call) {
    if constexpr (MAX > 1) {
        if (rows < MAX) return with_rows<MAX - 1>(rows, call);
    }
    call.template operator()<MAX>();
}

// Calls f<Q>() for the quants of a matrix.
template <class Call> inline void with_quants(const Quants &quants, Call &&call) {
    const auto try_all = [&]<Quants... Q>() { ((quants.is(Q) && (call.template operator()<Q>(), true)) || ...); };
    try_all.template operator()<Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K>();
}

template <Kind KIND> inline F load_weights(const uint8_t *tile, int64_t k) {
    if constexpr (KIND == Kind::F32) return f_load(reinterpret_cast<const float *>(tile) + k * LANES);
    else if constexpr (KIND == Kind::BF16) return f_load_split(reinterpret_cast<const uint16_t *>(tile) + k * LANES);
    else return f_load_f16(reinterpret_cast<const uint16_t *>(tile) + k * LANES);
}

// Two sums, over even and odd inputs: enough independent chains for one row, and the same result for any number of rows.
template <Kind KIND, int R>
void rows_float(const Packed &w, int64_t tile, const float *x, int64_t ldx, int64_t row, const Output &out, int64_t to) {
    const uint8_t *p = w.data + size_t(tile) * w.tile_bytes();
    F even[R], odd[R];
    for (int r = 0; r < R; r++) even[r] = odd[r] = f_zero();
    const float *xr = x + row * ldx;
    for (int64_t k = 0; k < w.k; k += 2) {
        const F a = load_weights<KIND>(p, k);
        for (int r = 0; r < R; r++) even[r] = f_fma(f_set1(xr[r * ldx + k]), a, even[r]);
        const F b = load_weights<KIND>(p, k + 1);
        for (int r = 0; r < R; r++) odd[r] = f_fma(f_set1(xr[r * ldx + k + 1]), b, odd[r]);
    }
    for (int r = 0; r < R; r++) write_out(out, to + r, even[r] + odd[r]);
}

template <Kind KIND>
void tile_float(const Packed &w, int64_t tile, const float *x, int64_t ldx, int64_t row0, int64_t rows, const Output &out) {
    for (int64_t r = 0; r < rows; r += FLOAT_ROWS)
        with_rows<FLOAT_ROWS>(rows - r, [&]<int R>() { rows_float<KIND, R>(w, tile, x, ldx, row0 + r, out, r); });
}

void gemm_float(const Packed &w, int64_t tile, const float *x, int64_t ldx, int64_t row0, int64_t rows, const Output &out) {
    if (w.kind == Kind::F32) tile_float<Kind::F32>(w, tile, x, ldx, row0, rows, out);
    else if (w.kind == Kind::BF16) tile_float<Kind::BF16>(w, tile, x, ldx, row0, rows, out);
    else tile_float<Kind::F16>(w, tile, x, ldx, row0, rows, out);
}

void add_low(int64_t k, int64_t count, const uint8_t *const *tiles, const float *x, float *const *out) {
    for (int64_t i = 0; i < count; i++) {
        F even = f_zero(), odd = f_zero();
        for (int64_t j = 0; j < k; j += 2) {
            even = f_fma(f_set1(x[j]), load_weights<Kind::BF16>(tiles[i], j), even);
            odd = f_fma(f_set1(x[j + 1]), load_weights<Kind::BF16>(tiles[i], j + 1), odd);
        }
        f_store(out[i], f_load(out[i]) + (even + odd));
    }
}

inline float lane_of(F v, int lane) {
    float values[LANES];
    f_store(values, v);
    return values[lane];
}

// One output of a tile, as the file's format dequantises it: scale * q, then + minimum.
template <Quants Q> void embed_int(const uint8_t *span, int lane, float *out, int64_t width) {
    for (int64_t first = 0; first < width; first += Q.span(), span += Q.span_bytes()) {
        const Scales<Q> scales(span);
        for (int i = 0; i < Q.span(); i += 32) {
            uint8_t bytes[512];
            each<8>([&]<int G>() TR_INLINED { w_store(bytes + 64 * G, group<Q.bits, G>(span + Q.header() + i / 32 * Q.payload())); });
            for (int j = 0; j < 32; j += Q.block) {
                F scale, min;
                scales.at((i + j) / Q.block, scale, min);
                const float s = lane_of(scale, lane), m = Q.min == Min::Stored ? lane_of(min, lane) : 0.0f;
                for (int l = j; l < j + Q.block; l++) {
                    const uint8_t byte = bytes[l / 4 * 64 + lane * 4 + l % 4];
                    const int q = Q.bits == 8 ? int(int8_t(byte)) : int(byte) - (Q.min == Min::Eight ? 8 : Q.zero);
                    out[first + i + l] = s * float(q) + m;
                }
            }
        }
    }
}

// One row of a packed table.
void embed(const Packed &w, int64_t token, float *out, int64_t width) {
    const uint8_t *p = w.data + size_t(token / LANES) * w.tile_bytes();
    const int lane = int(token % LANES);
    if (w.integer()) {
        with_quants(w.quants, [&]<Quants Q>() { embed_int<Q>(p, lane, out, width); });
        return;
    }
    for (int64_t k = 0; k < width; k++) {
        if (w.kind == Kind::F32) out[k] = lane_of(load_weights<Kind::F32>(p, k), lane);
        else if (w.kind == Kind::BF16) out[k] = lane_of(load_weights<Kind::BF16>(p, k), lane);
        else out[k] = lane_of(load_weights<Kind::F16>(p, k), lane);
    }
}

} // namespace TR_NS
#if defined(TR_AMX)
#include "gemm_amx.inl"
#else
#include "gemm_int.inl"
#endif
