// Matrix products. A row of the result depends on its own activations and the weights alone: integer dot products are
// exact, and the blocks of a row are added in ascending order whatever number of rows is computed beside it.
#pragma once

#include <type_traits>
#include <utility>

namespace TR_NS {

using namespace tailrace;

#if defined(TR_AVX512)
constexpr int INT_ROWS = 8, FLOAT_ROWS = 6;
#if defined(TR_DOT_BF16) && !defined(TR_AMX)
#define TR_PANELS // measured on Zen 5 only, which unpacks beside its products; where one port does both, it would cost
constexpr int PANEL_ROWS = 6, PANEL_TILES = 2; // whose sums are in registers together, where there are many rows
#endif
#else
constexpr int INT_ROWS = 4, FLOAT_ROWS = 3;
#endif

constexpr int UNPACK_ROWS = 3 * INT_ROWS; // up to so many, unpacking a tile again and again is cheaper than to keep it unpacked or to take two at once
constexpr int PREFETCH = 4096; // bytes ahead of the block that is multiplied, where weights are read once
#if defined(TR_AVX2)
constexpr int STREAMS = 3, STREAM_PREFETCH = 256; // runs of tiles that one row is multiplied with side by side, and bytes ahead in each
#else
constexpr int STREAMS = 1, STREAM_PREFETCH = PREFETCH; // on Zen 5 with AVX-512 three are no quicker
#endif

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

// The quants of a tile, a byte each: [k / 4 groups of inputs][16 outputs][4 inputs]. `finish` turns a group as `Quants` says it
// (unsigned and with the zero point still in it, or, where it has 8 bits, signed) into what is written.
template <Quants Q, class Finish> TR_INLINE void unpack(const Packed &w, int64_t tile, uint8_t *__restrict bytes, Finish finish) {
    const uint8_t *span = w.data + size_t(tile) * w.tile_bytes(), *end = span + w.tile_bytes();
    for (; span < end; span += Q.span_bytes())
        for (const uint8_t *p = span + Q.header(); p < span + Q.span_bytes(); p += Q.payload(), bytes += 512)
            each<8>([&]<int G>() TR_INLINED { w_store(bytes + 64 * G, finish(group<Q.bits, G>(p))); });
}

template <int BITS> using DotOf = std::conditional_t<BITS == 8, DotSigned, std::conditional_t<(BITS <= 4), DotSmall, DotMedium>>;

// Sums of the products of 16 or 32 inputs with R rows, exact: `p` is their payload or, UNPACKED, their groups in bytes; `at` their
// place in the activations q. FIRST: the first group of the eight.
template <Quants Q, int FIRST, bool UNPACKED, int R>
TR_INLINE void dot_block(const uint8_t *p, const int8_t *const (&q)[R], const int32_t *const (&s16)[R], int64_t at, I (&sums)[R]) {
    constexpr int GROUPS = Q.block / 4;
    const auto weights = [&]<int G>() TR_INLINED {
        if constexpr (UNPACKED) return w_load(p + 64 * G);
        else return group<Q.bits, G>(p);
    };
    const auto activations = [&](int r, int g) TR_INLINED { return a_load(q[r] + at * QBLOCK + 4 * g); };
    const auto total = [&](int r) TR_INLINED { return GROUPS == 8 ? s16[r][2 * at] + s16[r][2 * at + 1] : s16[r][2 * at + FIRST / 4]; };
    DotOf<Q.bits> dot[R];
    if constexpr (Q.bits == 8) {
        each<GROUPS>([&]<int G>() TR_INLINED {
            const WS w = ws_prepare(weights.template operator()<FIRST + G>());
            for (int r = 0; r < R; r++) dot[r].add(w, activations(r, FIRST + G));
        });
    } else if constexpr (Q.bits <= 4) {
        // low nibbles first, then high ones: fewer vectors alive at a time than a byte's two halves together
        each<GROUPS>([&]<int G>() TR_INLINED {
            const W w = weights.template operator()<FIRST + G>();
            for (int r = 0; r < R; r++) dot[r].add(w, activations(r, FIRST + G));
        });
    } else {
        each<GROUPS / 2>([&]<int PAIR>() TR_INLINED {
            constexpr int G = FIRST + 2 * PAIR;
            const W w0 = weights.template operator()<G>(), w1 = weights.template operator()<G + 1>();
            for (int r = 0; r < R; r++) dot[r].add(w0, activations(r, G), w1, activations(r, G + 1));
        });
    }
    for (int r = 0; r < R; r++) sums[r] = dot[r].finish(total(r));
    if constexpr (Q.zero)
        for (int r = 0; r < R; r++) sums[r] = sums[r] - i_set1(Q.zero * total(r));
}

template <int LINES> inline void prefetch(const uint8_t *p) {
    for (int line = 0; line < LINES; line++) __builtin_prefetch(p + 64 * line, 0, 3);
}

// R rows, written from row `to` of the output on. UNPACKED: `bytes` holds the tile's quants as `unpack` leaves them.
template <Quants Q, int R, bool UNPACKED>
__attribute__((noinline)) void rows_int(const Packed &w, int64_t tile, const uint8_t *bytes, const Quantised &x, int64_t row, const Output &out, int64_t to) {
    const uint8_t *span = w.data + size_t(tile) * w.tile_bytes();
    const int8_t *q[R];
    const float *d[R], *ds[R];
    const int32_t *s16[R];
    F acc[R];
    for (int r = 0; r < R; r++) {
        const int64_t at = x.at(row + r, 0);
        q[r] = x.q + at * QBLOCK;
        d[r] = x.d + at;
        ds[r] = Q.block == QBLOCK ? x.ds + at : x.ds16 + 2 * at;
        s16[r] = x.s16 + 2 * at;
        acc[r] = f_zero();
    }
    for (int64_t first = 0; first < w.k; first += Q.span(), span += Q.span_bytes()) {
        const Scales<Q> scales(span);
        if constexpr (!UNPACKED) prefetch<(Q.header() + 63) / 64>(span + PREFETCH);
        for (int i = 0; i < Q.span() / 32; i++) {
            const int64_t b = first / 32 + i, at = b * x.group;
            const uint8_t *p = UNPACKED ? bytes + b * 512 : span + Q.header() + i * Q.payload();
            if constexpr (!UNPACKED) prefetch<Q.payload() / 64>(p + PREFETCH);
            each<32 / Q.block>([&]<int HALF>() TR_INLINED {
                constexpr int BLOCKS = 32 / Q.block;
                F scale, min;
                I sums[R];
                scales.at(i * BLOCKS + HALF, scale, min);
                dot_block<Q, HALF * 4, UNPACKED, R>(p, q, s16, at, sums);
                for (int r = 0; r < R; r++) acc[r] = f_fma(i_float(sums[r]), scale * f_set1(d[r][at]), acc[r]);
                if constexpr (Q.min != Min::None)
                    for (int r = 0; r < R; r++) acc[r] = f_fma(min, f_set1(ds[r][at * BLOCKS + HALF]), acc[r]);
            });
        }
    }
    for (int r = 0; r < R; r++) write_out(out, to + r, acc[r]);
}

#if defined(TR_PANELS)
// R rows and two tiles, `tile` and the one `other` behind it: what is loaded of the one or the other is used more than once, and there are sums enough to
// keep the multipliers busy. `fetch`: the weights come from memory. The same operations in the same order as in `rows_int`.
template <Quants Q, int R>
__attribute__((noinline)) void panel_int(const Packed &w, int64_t tile, int64_t other, bool fetch, const Quantised &x, int64_t row, const Output &out,
                                         int64_t to) {
    constexpr int T = PANEL_TILES, BLOCKS = 32 / Q.block, GROUPS = Q.block / 4;
    const int64_t place = x.at(row, 0), apart = other * int64_t(w.tile_bytes());
    int64_t rows[R]; // where their blocks lie, from the first one's
    F acc[T][R];
    each<R>([&]<int r>() TR_INLINED {
        rows[r] = x.at(row + r, 0) - place;
        each<T>([&]<int t>() TR_INLINED { acc[t][r] = f_zero(); });
    });
    const float *d = x.d + place, *ds = Q.block == QBLOCK ? x.ds + place : x.ds16 + 2 * place;
    const int8_t *q = x.q + place * QBLOCK;
    const int32_t *s16 = x.s16 + 2 * place;
    const uint8_t *span = w.data + size_t(tile) * w.tile_bytes();
    for (const uint8_t *end = span + w.tile_bytes(); span < end; span += Q.span_bytes()) {
        const Scales<Q> scales[T] = {Scales<Q>(span), Scales<Q>(span + apart)};
        const uint8_t *payload = span + Q.header();
        if (fetch) each<T>([&]<int t>() TR_INLINED { prefetch<(Q.header() + 63) / 64>(span + t * apart + PREFETCH); });
        for (int i = 0; i < Q.span() / 32; i++, payload += Q.payload(), d += x.group, ds += BLOCKS * x.group, q += QBLOCK * x.group, s16 += 2 * x.group) {
            if (fetch) each<T>([&]<int t>() TR_INLINED { prefetch<Q.payload() / 64>(payload + t * apart + PREFETCH); });
            each<BLOCKS>([&]<int HALF>() TR_INLINED {
                const auto total = [&](int r) TR_INLINED { return BLOCKS == 1 ? s16[2 * rows[r]] + s16[2 * rows[r] + 1] : s16[2 * rows[r] + HALF]; };
                __m512i sums[T][R];
                each<T * R>([&]<int j>() TR_INLINED { sums[j % T][j / T] = _mm512_setzero_si512(); });
                each<GROUPS>([&]<int g>() TR_INLINED {
                    constexpr int G = HALF * GROUPS + g;
                    __m512i quants[T];
                    each<T>([&]<int t>() TR_INLINED {
                        quants[t] = group<Q.bits, G>(payload + t * apart).v;
                        if constexpr (Q.bits == 8) quants[t] = ws_prepare({quants[t]}).v;
                    });
                    each<R>([&]<int r>() TR_INLINED {
                        const A a = a_load(q + rows[r] * QBLOCK + 4 * G);
                        each<T>([&]<int t>() TR_INLINED { sums[t][r] = _mm512_dpbusd_epi32(sums[t][r], quants[t], a.v); });
                    });
                });
                each<T>([&]<int t>() TR_INLINED {
                    F scale, min;
                    scales[t].at(i * BLOCKS + HALF, scale, min);
                    each<R>([&]<int r>() TR_INLINED {
                        I sum{sums[t][r]};
                        if constexpr (Q.bits == 8) sum = sum - i_set1(128 * total(r));
                        if constexpr (Q.zero) sum = sum - i_set1(Q.zero * total(r));
                        acc[t][r] = f_fma(i_float(sum), scale * f_set1(d[rows[r]]), acc[t][r]);
                        if constexpr (Q.min != Min::None) acc[t][r] = f_fma(min, f_set1(ds[rows[r] * BLOCKS + HALF]), acc[t][r]);
                    });
                });
            });
        }
    }
    each<T>([&]<int t>() TR_INLINED {
        const Output at = out.of(t * other);
        each<R>([&]<int r>() TR_INLINED { write_out(at, to + r, acc[t][r]); });
    });
}
#endif

// One row and T tiles side by side: memory gives more where several runs of it are read at once. The same operations in the same
// order as in `rows_int`.
template <Quants Q, int T>
__attribute__((noinline)) void tiles_int(int64_t k, const uint8_t *const *tiles, const Quantised &x, int64_t row, float *const *out) {
    constexpr int BLOCKS = 32 / Q.block;
    const int64_t at = x.at(row, 0);
    const int8_t *const q[1] = {x.q + at * QBLOCK};
    const int32_t *const s16[1] = {x.s16 + 2 * at};
    const float *d = x.d + at, *ds = Q.block == QBLOCK ? x.ds + at : x.ds16 + 2 * at;
    const uint8_t *span[T];
    F acc[T];
    each<T>([&]<int t>() TR_INLINED { span[t] = tiles[t], acc[t] = f_zero(); });
    for (int64_t first = 0; first < k; first += Q.span())
        each<T>([&]<int t>() TR_INLINED {
            const Scales<Q> scales(span[t]);
            prefetch<(Q.header() + 63) / 64>(span[t] + STREAM_PREFETCH);
            for (int i = 0; i < Q.span() / 32; i++) {
                const int64_t b = (first / 32 + i) * x.group;
                const uint8_t *p = span[t] + Q.header() + i * Q.payload();
                prefetch<Q.payload() / 64>(p + STREAM_PREFETCH);
                each<BLOCKS>([&]<int HALF>() TR_INLINED {
                    F scale, min;
                    I sums[1];
                    scales.at(i * BLOCKS + HALF, scale, min);
                    dot_block<Q, HALF * 4, false, 1>(p, q, s16, b, sums);
                    acc[t] = f_fma(i_float(sums[0]), scale * f_set1(d[b]), acc[t]);
                    if constexpr (Q.min != Min::None) acc[t] = f_fma(min, f_set1(ds[b * BLOCKS + HALF]), acc[t]);
                });
            }
            span[t] += Q.span_bytes();
        });
    each<T>([&]<int t>() TR_INLINED { f_store(out[t], acc[t]); });
}

// Calls f<R>() for R = rows, one of 1..MAX.
template <int MAX, class Call> inline void with_rows(int64_t rows, Call &&call) {
    if constexpr (MAX > 1) {
        if (rows < MAX) return with_rows<MAX - 1>(rows, call);
    }
    call.template operator()<MAX>();
}

} // namespace TR_NS
#if defined(TR_AMX)
#include "amx.inl"
#endif
namespace TR_NS {

template <Quants Q> void tile_int(const Packed &w, int64_t tile, const Quantised &x, int64_t row0, int64_t rows, const Output &out, uint8_t *scratch) {
    int64_t r = 0;
#if defined(TR_AMX)
    r = rows_for_amx(x, row0, rows);
    if (r > 0) tile_amx<Q>(w, tile, x, row0, r, out, scratch);
#endif
    if constexpr (Q.bits != 8)
        if (rows - r > UNPACK_ROWS) {
            unpack<Q>(w, tile, scratch, [](W quants) { return quants; });
            for (; r < rows; r += INT_ROWS)
                with_rows<INT_ROWS>(rows - r, [&]<int R>() { rows_int<Q, R, true>(w, tile, scratch, x, row0 + r, out, r); });
        }
    for (; r < rows; r += INT_ROWS)
        with_rows<INT_ROWS>(rows - r, [&]<int R>() { rows_int<Q, R, false>(w, tile, nullptr, x, row0 + r, out, r); });
}

// Calls f<Q>() for the quants of a matrix.
template <class Call> inline void with_quants(const Quants &quants, Call &&call) {
    const auto try_all = [&]<Quants... Q>() { ((quants.is(Q) && (call.template operator()<Q>(), true)) || ...); };
    try_all.template operator()<Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K>();
}

void gemm_int(const Packed &w, int64_t tile, int64_t tiles, const Quantised &x, int64_t row0, int64_t rows, const Output &out, uint8_t *scratch) {
    with_quants(w.quants, [&]<Quants Q>() {
        int64_t t = 0;
#if defined(TR_PANELS)
        const int64_t half = rows > UNPACK_ROWS ? tiles / PANEL_TILES : 0;
        for (; t < half; t++)
            for (int64_t r = 0, runs = (rows + PANEL_ROWS - 1) / PANEL_ROWS; r < rows; runs--) {
                const int64_t n = (rows - r + runs - 1) / runs; // as even as can be: few rows keep the multipliers less busy
                with_rows<PANEL_ROWS>(n, [&]<int R>() { panel_int<Q, R>(w, tile + t, half, r == 0, x, row0 + r, out.of(t), r); });
                r += n;
            }
        t = half * PANEL_TILES;
#endif
        for (; t < tiles; t++) tile_int<Q>(w, tile + t, x, row0, rows, out.of(t), scratch);
    });
}

void row_int(const Packed &w, int64_t count, int64_t side, const uint8_t *const *tiles, const Quantised &x, int64_t row, float *const *out) {
    constexpr int MOST = STREAMS > 1 ? STREAMS + 1 : 1;
    with_quants(w.quants, [&]<Quants Q>() {
        for (int64_t i = 0; i < count; i += side)
            with_rows<MOST>(count - i < side ? count - i : side, [&]<int T>() { tiles_int<Q, T>(w.k, tiles + i, x, row, out + i); });
    });
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
