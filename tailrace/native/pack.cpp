#include "pack.h"

#include <cstring>
#include <stdexcept>

namespace tailrace {
namespace {

// One file block of a row, decoded: quants without their zero point subtracted; factors (scale and minimum) as the file's
// halves, and, in super-blocks, the scales and minima that they multiply.
struct Decoded {
    int8_t q[256];
    const uint8_t *factor, *min_factor;
    int8_t scale[16], min[16];
};

void nibbles(const uint8_t *qs, int8_t *q) {
    for (int j = 0; j < 16; j++) {
        q[j] = int8_t(qs[j] & 15);
        q[j + 16] = int8_t(qs[j] >> 4);
    }
}

void fifth_bits(const uint8_t *qh, int8_t *q) {
    uint32_t bits;
    std::memcpy(&bits, qh, 4);
    for (int j = 0; j < 32; j++) q[j] = int8_t(q[j] | int((bits >> j) & 1u) << 4);
}

// Six-bit scale and minimum of sub-block j of Q4_K and Q5_K.
void k4_scale(const uint8_t *s, int j, int8_t &scale, int8_t &min) {
    if (j < 4) {
        scale = s[j] & 63;
        min = s[j + 4] & 63;
    } else {
        scale = int8_t((s[j + 4] & 15) | (s[j - 4] >> 6) << 4);
        min = int8_t((s[j + 4] >> 4) | (s[j] >> 6) << 4);
    }
}

void decode_q2k(const uint8_t *p, Decoded &o) {
    const uint8_t *scales = p, *qs = p + 16;
    o.factor = p + 80, o.min_factor = p + 82;
    for (int i = 0; i < 16; i++) {
        o.scale[i] = scales[i] & 15;
        o.min[i] = scales[i] >> 4;
    }
    for (int i = 0; i < 256; i++) o.q[i] = int8_t((qs[(i / 128) * 32 + i % 32] >> (2 * ((i / 32) % 4))) & 3);
}

void decode_q3k(const uint8_t *p, Decoded &o) {
    const uint8_t *hmask = p, *qs = p + 32, *s = p + 96;
    o.factor = p + 108;
    for (int i = 0; i < 16; i++) {
        const int low = i < 8 ? s[i] & 15 : s[i - 8] >> 4;
        const int high = (s[8 + i % 4] >> (2 * (i / 4))) & 3;
        o.scale[i] = int8_t((low | high << 4) - 32);
    }
    for (int i = 0; i < 256; i++) {
        const int low = (qs[(i / 128) * 32 + i % 32] >> (2 * ((i / 32) % 4))) & 3;
        o.q[i] = int8_t(low | ((hmask[i % 32] >> (i / 32)) & 1) << 2);
    }
}

void decode_q45k(const uint8_t *p, Decoded &o, bool five) {
    const uint8_t *qh = p + 16, *qs = p + (five ? 48 : 16);
    o.factor = p, o.min_factor = p + 2;
    for (int j = 0; j < 8; j++) {
        k4_scale(p + 4, j, o.scale[j], o.min[j]);
        for (int l = 0; l < 32; l++) {
            const uint8_t byte = qs[(j / 2) * 32 + l];
            int q = j % 2 ? byte >> 4 : byte & 15;
            if (five) q |= ((qh[l] >> j) & 1) << 4;
            o.q[j * 32 + l] = int8_t(q);
        }
    }
}

void decode_q6k(const uint8_t *p, Decoded &o) {
    const uint8_t *ql = p, *qh = p + 128;
    o.factor = p + 208;
    std::memcpy(o.scale, p + 192, 16);
    for (int i = 0; i < 256; i++) {
        const int n = i / 128, quarter = (i / 32) % 4, l = i % 32;
        const uint8_t low = ql[n * 64 + (quarter % 2) * 32 + l];
        o.q[i] = int8_t((quarter < 2 ? low & 15 : low >> 4) | ((qh[n * 32 + l] >> (2 * quarter)) & 3) << 4);
    }
}

struct Layout {
    const char *name;
    int values, bytes; // of a file block
    Kind kind;
    Quants quants;
};

constexpr Layout LAYOUTS[] = {
    {"F32", 1, 4, Kind::F32, {}},          {"BF16", 1, 2, Kind::BF16, {}},        {"F16", 1, 2, Kind::F16, {}},
    {"Q4_0", 32, 18, Kind::Int, Q4_0},     {"Q4_1", 32, 20, Kind::Int, Q4_1},     {"Q5_0", 32, 22, Kind::Int, Q5_0},
    {"Q5_1", 32, 24, Kind::Int, Q5_1},     {"Q8_0", 32, 34, Kind::Int, Q8_0},     {"Q2_K", 256, 84, Kind::Int, Q2_K},
    {"Q3_K", 256, 110, Kind::Int, Q3_K},   {"Q4_K", 256, 144, Kind::Int, Q4_K},   {"Q5_K", 256, 176, Kind::Int, Q5_K},
    {"Q6_K", 256, 210, Kind::Int, Q6_K},
};

const Layout &layout(const std::string &format) {
    for (const Layout &l : LAYOUTS)
        if (format == l.name) return l;
    throw std::invalid_argument("no kernel for weights in format " + format);
}

void decode(const Layout &l, const uint8_t *p, Decoded &o) {
    const std::string name = l.name;
    o.factor = p, o.min_factor = p + 2;
    if (name == "Q4_0") nibbles(p + 2, o.q);
    else if (name == "Q4_1") nibbles(p + 4, o.q);
    else if (name == "Q5_0") nibbles(p + 6, o.q), fifth_bits(p + 2, o.q);
    else if (name == "Q5_1") nibbles(p + 8, o.q), fifth_bits(p + 4, o.q);
    else if (name == "Q8_0") std::memcpy(o.q, p + 2, 32);
    else if (name == "Q2_K") decode_q2k(p, o);
    else if (name == "Q3_K") decode_q3k(p, o);
    else if (name == "Q4_K") decode_q45k(p, o, false);
    else if (name == "Q5_K") decode_q45k(p, o, true);
    else decode_q6k(p, o);
}

// Writes the quants of 32 inputs of one output into the planes of a payload; see `Quants`.
template <int BITS> void place_quants(const int8_t *q, int lane, uint8_t *payload) {
    constexpr int PAIRS = (BITS & 4) * 64, BIT = PAIRS + (BITS & 2) * 64; // where the planes of 2 bits and of 1 bit begin
    for (int i = 0; i < 4; i++) { // of each group
        uint8_t *p = payload + lane * 4 + i;
        const auto bits = [&](int group, int from, int count) { return uint8_t(q[group * 4 + i]) >> from & ((1 << count) - 1); };
        if constexpr (BITS == 8)
            for (int g = 0; g < 8; g++) p[g * 64] = uint8_t(bits(g, 0, 8));
        if constexpr (BITS & 4)
            for (int v = 0; v < 4; v++) p[v * 64] = uint8_t(bits(v, 0, 4) | bits(v + 4, 0, 4) << 4);
        if constexpr (BITS & 2)
            for (int v = 0; v < 2; v++) {
                int pairs = 0;
                for (int g = 0; g < 4; g++) pairs |= bits(v * 4 + g, BITS & 4, 2) << (g * 2);
                p[PAIRS + v * 64] = uint8_t(pairs);
            }
        if constexpr (BITS & 1) {
            int all = 0;
            for (int g = 0; g < 8; g++) all |= bits(g, BITS - 1, 1) << g;
            p[BIT] = uint8_t(all);
        }
    }
}

void place_quants(int bits, const int8_t *q, int lane, uint8_t *payload) {
    switch (bits) {
    case 2: return place_quants<2>(q, lane, payload);
    case 3: return place_quants<3>(q, lane, payload);
    case 4: return place_quants<4>(q, lane, payload);
    case 5: return place_quants<5>(q, lane, payload);
    case 6: return place_quants<6>(q, lane, payload);
    default: return place_quants<8>(q, lane, payload);
    }
}

// Writes one decoded file block of one output (lane) into a span.
void place(const Quants &quants, const Decoded &o, int lane, uint8_t *span) {
    std::memcpy(span + lane * 2, o.factor, 2);
    if (quants.min == Min::Stored) {
        std::memcpy(span + LANES * 2 + lane * 2, o.min_factor, 2);
        if (quants.super) span[LANES * 2 + lane * 2 + 1] ^= 0x80; // negated
    }
    if (quants.super)
        for (int b = 0; b < quants.span() / quants.block; b++) {
            uint8_t *scale = span + quants.factors() + b * quants.scales() + lane;
            *scale = uint8_t(o.scale[b]);
            if (quants.min == Min::Stored) {
                if (quants.bits == 2) *scale |= uint8_t(o.min[b] << 4);
                else scale[LANES] = uint8_t(o.min[b]);
            }
        }
    for (int i = 0; i < quants.span() / 32; i++) place_quants(quants.bits, o.q + i * 32, lane, span + quants.header() + i * quants.payload());
}

int split_lane(int lane) { return lane < 8 ? 2 * lane : 2 * (lane - 8) + 1; }

void pack_float(const Packed &shape, const uint8_t *row, int64_t k, int lane, uint8_t *tile) {
    const int width = shape.kind == Kind::F32 ? 4 : 2;
    const int place = shape.kind == Kind::BF16 ? split_lane(lane) : lane;
    for (int64_t i = 0; i < k; i++) std::memcpy(tile + (i * LANES + place) * width, row + i * width, size_t(width));
}

} // namespace

const char *Packed::arithmetic() const {
    switch (kind) {
    case Kind::Int: return quants.bits == 8 ? "int8_by_int8" : quants.bits > 4 ? "int8_by_int6" : "int8_by_int4";
    case Kind::F32: return "fp32";
    case Kind::BF16: return "bf16";
    default: return "fp16";
    }
}

Packed packed_shape(const std::string &format, int64_t n, int64_t k) {
    const Layout &l = layout(format);
    if (k % l.values) throw std::invalid_argument("rows of " + std::to_string(k) + " values do not fit blocks of format " + format);
    Packed p;
    p.kind = l.kind;
    p.quants = l.quants;
    p.n = (n + LANES - 1) / LANES * LANES;
    p.k = p.integer() ? k : (k + LANES - 1) / LANES * LANES;
    return p;
}

void pack_tiles(const std::string &format, const uint8_t *source, int64_t rows, int64_t row_bytes, int64_t k, const Packed &shape,
                int64_t from, int64_t to, uint8_t *out) {
    const Layout &l = layout(format);
    for (int64_t t = from; t < to; t++) {
        uint8_t *tile = out + size_t(t) * shape.tile_bytes();
        std::memset(tile, 0, shape.tile_bytes());
        for (int lane = 0; lane < LANES && t * LANES + lane < rows; lane++) {
            const uint8_t *row = source + (t * LANES + lane) * row_bytes;
            if (!shape.integer()) {
                pack_float(shape, row, k, lane, tile);
                continue;
            }
            Decoded o;
            for (int64_t b = 0; b < k / l.values; b++) {
                decode(l, row + b * l.bytes, o);
                place(shape.quants, o, lane, tile + b * shape.quants.span_bytes());
            }
        }
    }
}

} // namespace tailrace
