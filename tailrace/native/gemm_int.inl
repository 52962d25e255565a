// Products of quantised weights with activations rounded to int8. Integer dot products are exact, and the blocks of a row are
// added in ascending order whatever number of rows is computed beside it.
#pragma once

namespace TR_NS {

using namespace tailrace;

void enter() {}
void leave() {}

constexpr int ACTIVATION_BYTES = 1;
constexpr int64_t PANEL = 128;
#if defined(TR_AVX512)
constexpr int INT_ROWS = 8;
#if defined(TR_DOT_BF16)
#define TR_PANELS // measured on Zen 5 only, which unpacks beside its products; where one port does both, it would cost
constexpr int PANEL_ROWS = 6, PANEL_TILES = 2; // whose sums are in registers together, where there are many rows
#endif
#else
constexpr int INT_ROWS = 4;
#endif

constexpr int UNPACK_ROWS = 3 * INT_ROWS; // up to so many, unpacking a tile again and again is cheaper than to keep it unpacked or to take two at once
#if defined(TR_AVX2)
constexpr int STREAMS = 3, STREAM_PREFETCH = 256; // runs of tiles that one row is multiplied with side by side, and bytes ahead in each
#else
constexpr int STREAMS = 1, STREAM_PREFETCH = PREFETCH; // on Zen 5 with AVX-512 three are no quicker
#endif

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

void widen(const Quantised &x, int64_t row, float *out) {
    for (int64_t b = 0; b < x.blocks(); b++, out += QBLOCK) {
        const int64_t at = x.at(row, b);
        const int8_t *q = x.q + at * QBLOCK;
        const F d = f_set1(x.d[at]);
        f_store(out, i_float(i_load_i8(q)) * d);
        f_store(out + LANES, i_float(i_load_i8(q + LANES)) * d);
    }
}

// The quants of a tile, a byte each: [k / 4 groups of inputs][16 outputs][4 inputs], as `Quants` says them.
template <Quants Q> TR_INLINE void unpack(const Packed &w, int64_t tile, uint8_t *__restrict bytes) {
    const uint8_t *span = w.data + size_t(tile) * w.tile_bytes(), *end = span + w.tile_bytes();
    for (; span < end; span += Q.span_bytes())
        for (const uint8_t *p = span + Q.header(); p < span + Q.span_bytes(); p += Q.payload(), bytes += 512)
            each<8>([&]<int G>() TR_INLINED { w_store(bytes + 64 * G, group<Q.bits, G>(p)); });
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

template <Quants Q> void tile_int(const Packed &w, int64_t tile, const Quantised &x, int64_t row0, int64_t rows, const Output &out, uint8_t *scratch) {
    int64_t r = 0;
    if constexpr (Q.bits != 8)
        if (rows - r > UNPACK_ROWS) {
            unpack<Q>(w, tile, scratch);
            for (; r < rows; r += INT_ROWS)
                with_rows<INT_ROWS>(rows - r, [&]<int R>() { rows_int<Q, R, true>(w, tile, scratch, x, row0 + r, out, r); });
        }
    for (; r < rows; r += INT_ROWS)
        with_rows<INT_ROWS>(rows - r, [&]<int R>() { rows_int<Q, R, false>(w, tile, nullptr, x, row0 + r, out, r); });
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

} // namespace TR_NS
