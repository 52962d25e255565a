// Matrix products. A row of the result depends on its own activations and the weights alone: integer dot products are
// exact, and the blocks of a row are added in ascending order whatever number of rows is computed beside it.
#pragma once

namespace TR_NS {

using namespace tailrace;

#if defined(TR_AVX512)
constexpr int INT_ROWS = 8, FLOAT_ROWS = 6;
#else
constexpr int INT_ROWS = 4, FLOAT_ROWS = 3;
#endif

constexpr int PREFETCH = 4096; // bytes ahead of the block that is multiplied, where weights are read once

template <bool WIDE> inline F load_scales(const uint8_t *p) {
    if constexpr (WIDE) return f_load(reinterpret_cast<const float *>(p));
    else return f_load_f16(reinterpret_cast<const uint16_t *>(p));
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

template <bool WIDE, Min MIN, int R>
inline void add_block(F (&acc)[R], const I (&sums)[R], const uint8_t *scales, const float *const (&d)[R], const float *const (&ds)[R],
                      int64_t db, int64_t dsb) {
    constexpr int BYTES = LANES * (WIDE ? 4 : 2);
    const F s = load_scales<WIDE>(scales);
    for (int r = 0; r < R; r++) acc[r] = f_fma(i_float(sums[r]), s * f_set1(d[r][db]), acc[r]);
    if constexpr (MIN != Min::None) {
        const F m = MIN == Min::Stored ? load_scales<WIDE>(scales + BYTES) : s * f_set1(-8.0f);
        for (int r = 0; r < R; r++) acc[r] = f_fma(m, f_set1(ds[r][dsb]), acc[r]);
    }
}

// R rows of four-bit weights, written from row `to` of the output on. UNPACKED: `groups` holds the tile's groups, a byte each; else they are taken from nibbles.
template <bool WIDE, Min MIN, int R, bool UNPACKED>
__attribute__((noinline)) void rows_i4(const Packed &w, int64_t tile, const uint8_t *groups, const Quantised &x, int64_t row, const Output &out, int64_t to) {
    const int64_t blocks = w.k / 32;
    const size_t step = w.block_bytes();
    const uint8_t *p = w.data + size_t(tile) * w.tile_bytes();
    const int8_t *q[R];
    const float *d[R], *ds[R];
    F acc[R];
    for (int r = 0; r < R; r++) {
        const int64_t at = x.at(row + r, 0);
        q[r] = x.q + at * QBLOCK;
        d[r] = x.d + at;
        ds[r] = x.ds + at;
        acc[r] = f_zero();
    }
    for (int64_t b = 0; b < blocks; b++, p += step) {
        DotSmall dot[R];
        if constexpr (!UNPACKED)
            for (int line = 0; line < 5; line++) __builtin_prefetch(p + PREFETCH + 64 * line, 0, 3);
        // low nibbles first, then high ones: fewer vectors alive at a time than a byte's two halves together
        for (int g = 0; g < 8; g++) {
            W w;
            if constexpr (UNPACKED) w = w_load(groups + size_t(b) * 512 + 64 * g);
            else w = g < 4 ? w_low(w_load(p + 64 * g)) : w_high(w_load(p + 64 * (g - 4)));
            for (int r = 0; r < R; r++) dot[r].add(w, a_load(q[r] + b * x.group * QBLOCK + 4 * g));
        }
        I sums[R];
        for (int r = 0; r < R; r++) sums[r] = dot[r].finish(0);
        add_block<WIDE, MIN, R>(acc, sums, p + 256, d, ds, b * x.group, b * x.group);
    }
    for (int r = 0; r < R; r++) write_out(out, to + r, acc[r]);
}

template <bool WIDE, Min MIN, int BLOCK, int R>
__attribute__((noinline)) void rows_i8(const Packed &w, int64_t tile, const Quantised &x, int64_t row, const Output &out, int64_t to) {
    const int64_t blocks = w.k / BLOCK;
    const size_t step = w.block_bytes();
    const uint8_t *p = w.data + size_t(tile) * w.tile_bytes();
    const int8_t *q[R];
    const float *d[R], *ds[R];
    const int32_t *s16[R];
    F acc[R];
    for (int r = 0; r < R; r++) {
        const int64_t at = x.at(row + r, 0);
        q[r] = x.q + at * QBLOCK;
        d[r] = x.d + at;
        ds[r] = BLOCK == 32 ? x.ds + at : x.ds16 + 2 * at;
        s16[r] = x.s16 + 2 * at;
        acc[r] = f_zero();
    }
    for (int64_t b = 0; b < blocks; b++, p += step) {
        if constexpr (R == 1)
            for (int line = 0; line < BLOCK / 4 + 1; line++) __builtin_prefetch(p + PREFETCH + 64 * line, 0, 3);
        const int64_t at = b * BLOCK / QBLOCK * x.group, half = b * BLOCK % QBLOCK / 16;
        DotSigned dot[R];
        for (int g = 0; g < BLOCK / 4; g++) {
            const WS ws = ws_prepare(w_load(p + 64 * g));
            for (int r = 0; r < R; r++) dot[r].add(ws, a_load(q[r] + at * QBLOCK + half * 16 + 4 * g));
        }
        I sums[R];
        for (int r = 0; r < R; r++) {
            const int32_t sum = BLOCK == 32 ? s16[r][2 * at] + s16[r][2 * at + 1] : s16[r][2 * at + half];
            sums[r] = dot[r].finish(sum);
        }
        add_block<WIDE, MIN, R>(acc, sums, p + w.payload(), d, ds, at, BLOCK == 32 ? at : 2 * at + half);
    }
    for (int r = 0; r < R; r++) write_out(out, to + r, acc[r]);
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

template <bool WIDE, Min MIN>
void tile_i4(const Packed &w, int64_t tile, const Quantised &x, int64_t row0, int64_t rows, const Output &out, uint8_t *scratch) {
    if (rows <= INT_ROWS) { // unpacking on the way is cheaper than keeping the nibbles unpacked
        with_rows<INT_ROWS>(rows, [&]<int R>() { rows_i4<WIDE, MIN, R, false>(w, tile, nullptr, x, row0, out, 0); });
        return;
    }
    const uint8_t *p = w.data + size_t(tile) * w.tile_bytes();
    for (int64_t b = 0; b < w.k / 32; b++, p += w.block_bytes())
        for (int g = 0; g < 4; g++) {
            const W both = w_load(p + 64 * g);
            w_store(scratch + size_t(b) * 512 + 64 * g, w_low(both));
            w_store(scratch + size_t(b) * 512 + 256 + 64 * g, w_high(both));
        }
    int64_t r = 0;
#if defined(TR_AMX)
    r = rows_for_amx(x, row0, rows);
    if (r > 0) tile_amx<WIDE, MIN, QBLOCK, false>(w, tile, scratch, 512, x, row0, r, out);
#endif
    for (; r < rows; r += INT_ROWS)
        with_rows<INT_ROWS>(rows - r, [&]<int R>() { rows_i4<WIDE, MIN, R, true>(w, tile, scratch, x, row0 + r, out, r); });
}

template <bool WIDE, Min MIN, int BLOCK>
void tile_i8(const Packed &w, int64_t tile, const Quantised &x, int64_t row0, int64_t rows, const Output &out) {
    int64_t r = 0;
#if defined(TR_AMX)
    r = rows_for_amx(x, row0, rows);
    if (r > 0) tile_amx<WIDE, MIN, BLOCK, true>(w, tile, w.data + size_t(tile) * w.tile_bytes(), w.block_bytes(), x, row0, r, out);
#endif
    for (; r < rows; r += INT_ROWS)
        with_rows<INT_ROWS>(rows - r, [&]<int R>() { rows_i8<WIDE, MIN, BLOCK, R>(w, tile, x, row0 + r, out, r); });
}

void gemm_int(const Packed &w, int64_t tile, const Quantised &x, int64_t row0, int64_t rows, const Output &out, uint8_t *scratch) {
    if (w.kind == Kind::I4) {
        if (w.wide) tile_i4<true, Min::Stored>(w, tile, x, row0, rows, out, scratch);
        else if (w.min == Min::Stored) tile_i4<false, Min::Stored>(w, tile, x, row0, rows, out, scratch);
        else tile_i4<false, Min::Eight>(w, tile, x, row0, rows, out, scratch);
    } else if (w.block == 16) {
        if (w.min == Min::Stored) tile_i8<true, Min::Stored, 16>(w, tile, x, row0, rows, out);
        else tile_i8<true, Min::None, 16>(w, tile, x, row0, rows, out);
    } else if (w.wide) {
        tile_i8<true, Min::Stored, 32>(w, tile, x, row0, rows, out);
    } else if (w.min == Min::Stored) {
        tile_i8<false, Min::Stored, 32>(w, tile, x, row0, rows, out);
    } else {
        tile_i8<false, Min::None, 32>(w, tile, x, row0, rows, out);
    }
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

inline float scalar_scale(const uint8_t *p, bool wide, int lane) {
    float v[LANES];
    f_store(v, wide ? load_scales<true>(p) : load_scales<false>(p));
    return v[lane];
}

// One row of a packed table, as the file's format dequantises it: scale * q, then + minimum.
void embed(const Packed &w, int64_t token, float *out, int64_t width) {
    const uint8_t *p = w.data + size_t(token / LANES) * w.tile_bytes();
    const int lane = int(token % LANES);
    if (!w.integer()) {
        for (int64_t k = 0; k < width; k++) {
            float v[LANES];
            if (w.kind == Kind::F32) f_store(v, load_weights<Kind::F32>(p, k));
            else if (w.kind == Kind::BF16) f_store(v, load_weights<Kind::BF16>(p, k));
            else f_store(v, load_weights<Kind::F16>(p, k));
            out[k] = v[lane];
        }
        return;
    }
    for (int64_t b = 0; b < width / w.block; b++, p += w.block_bytes()) {
        const uint8_t *scales = p + w.payload();
        const float s = scalar_scale(scales, w.wide, lane);
        const float m = w.min == Min::Stored ? scalar_scale(scales + LANES * (w.wide ? 4 : 2), w.wide, lane) : 0.0f;
        for (int i = 0; i < w.block; i++) {
            int q;
            if (w.kind == Kind::I4) {
                const uint8_t byte = p[((i / 4) % 4) * 64 + lane * 4 + i % 4];
                q = (i < 16 ? byte & 15 : byte >> 4) - (w.min == Min::Eight ? 8 : 0);
            } else {
                q = static_cast<int8_t>(p[(i / 4) * 64 + lane * 4 + i % 4]);
            }
            out[b * w.block + i] = s * float(q) + m;
        }
    }
}

} // namespace TR_NS
