#include "pack.h"

#include <cmath>
#include <cstring>
#include <stdexcept>

namespace tailrace {
namespace {

float from_half(const uint8_t *p) {
    uint16_t h;
    std::memcpy(&h, p, 2);
    const int exponent = (h >> 10) & 31, mantissa = h & 1023;
    float v = exponent == 0 ? std::ldexp(float(mantissa), -24)
              : exponent == 31 ? (mantissa ? NAN : INFINITY)
                               : std::ldexp(float(mantissa + 1024), exponent - 25);
    return h & 0x8000 ? -v : v;
}

// One block of a row, decoded: `count` quants; a scale and a minimum for each `step` of them. Where the scales are the
// file's own halves, `half` points at them.
struct Decoded {
    int8_t q[256];
    float scale[16], min[16];
    const uint8_t *half = nullptr;
};

void nibbles(const uint8_t *qs, int8_t *q) {
    for (int j = 0; j < 16; j++) {
        q[j] = int8_t(qs[j] & 15);
        q[j + 16] = int8_t(qs[j] >> 4);
    }
}

void fifth_bits(const uint8_t *qh, int8_t *q, int zero) {
    uint32_t bits;
    std::memcpy(&bits, qh, 4);
    for (int j = 0; j < 32; j++) q[j] = int8_t((q[j] | int((bits >> j) & 1u) << 4) - zero);
}

// Six-bit scale and minimum of sub-block j of Q4_K and Q5_K.
void k4_scale(const uint8_t *s, int j, int &scale, int &min) {
    if (j < 4) {
        scale = s[j] & 63;
        min = s[j + 4] & 63;
    } else {
        scale = (s[j + 4] & 15) | (s[j - 4] >> 6) << 4;
        min = (s[j + 4] >> 4) | (s[j] >> 6) << 4;
    }
}

void decode_q2k(const uint8_t *p, Decoded &o) {
    const uint8_t *scales = p, *qs = p + 16;
    const float d = from_half(p + 80), dmin = from_half(p + 82);
    for (int i = 0; i < 16; i++) {
        o.scale[i] = d * float(scales[i] & 15);
        o.min[i] = -(dmin * float(scales[i] >> 4));
    }
    for (int i = 0; i < 256; i++) o.q[i] = int8_t((qs[(i / 128) * 32 + i % 32] >> (2 * ((i / 32) % 4))) & 3);
}

void decode_q3k(const uint8_t *p, Decoded &o) {
    const uint8_t *hmask = p, *qs = p + 32, *s = p + 96;
    const float d = from_half(p + 108);
    for (int i = 0; i < 16; i++) {
        const int low = i < 8 ? s[i] & 15 : s[i - 8] >> 4;
        const int high = (s[8 + i % 4] >> (2 * (i / 4))) & 3;
        o.scale[i] = d * float((low | high << 4) - 32);
    }
    for (int i = 0; i < 256; i++) {
        const int low = (qs[(i / 128) * 32 + i % 32] >> (2 * ((i / 32) % 4))) & 3;
        o.q[i] = int8_t(low - ((hmask[i % 32] >> (i / 32)) & 1 ? 0 : 4));
    }
}

void decode_q45k(const uint8_t *p, Decoded &o, bool five) {
    const float d = from_half(p), dmin = from_half(p + 2);
    const uint8_t *qh = p + 16, *qs = p + (five ? 48 : 16);
    for (int j = 0; j < 8; j++) {
        int scale, min;
        k4_scale(p + 4, j, scale, min);
        o.scale[j] = d * float(scale);
        o.min[j] = -(dmin * float(min));
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
    const auto *scales = reinterpret_cast<const int8_t *>(p + 192);
    const float d = from_half(p + 208);
    for (int i = 0; i < 16; i++) o.scale[i] = d * float(scales[i]);
    for (int i = 0; i < 256; i++) {
        const int n = i / 128, quarter = (i / 32) % 4, l = i % 32;
        const uint8_t low = ql[n * 64 + (quarter % 2) * 32 + l];
        const int q = (quarter < 2 ? low & 15 : low >> 4) | ((qh[n * 32 + l] >> (2 * quarter)) & 3) << 4;
        o.q[i] = int8_t(q - 32);
    }
}

struct Layout {
    const char *name;
    int values, bytes; // of a file block
    Kind kind;
    int block;
    Min min;
    bool wide;
};

constexpr Layout LAYOUTS[] = {
    {"F32", 1, 4, Kind::F32, 1, Min::None, false},        {"BF16", 1, 2, Kind::BF16, 1, Min::None, false},
    {"F16", 1, 2, Kind::F16, 1, Min::None, false},        {"Q4_0", 32, 18, Kind::I4, 32, Min::Eight, false},
    {"Q4_1", 32, 20, Kind::I4, 32, Min::Stored, false},   {"Q5_0", 32, 22, Kind::I8, 32, Min::None, false},
    {"Q5_1", 32, 24, Kind::I8, 32, Min::Stored, false},   {"Q8_0", 32, 34, Kind::I8, 32, Min::None, false},
    {"Q2_K", 256, 84, Kind::I8, 16, Min::Stored, true},   {"Q3_K", 256, 110, Kind::I8, 16, Min::None, true},
    {"Q4_K", 256, 144, Kind::I4, 32, Min::Stored, true},  {"Q5_K", 256, 176, Kind::I8, 32, Min::Stored, true},
    {"Q6_K", 256, 210, Kind::I8, 16, Min::None, true},
};

const Layout &layout(const std::string &format) {
    for (const Layout &l : LAYOUTS)
        if (format == l.name) return l;
    throw std::invalid_argument("no kernel for weights in format " + format);
}

void decode(const Layout &l, const uint8_t *p, Decoded &o) {
    const std::string name = l.name;
    o.half = nullptr;
    if (name == "Q4_0") nibbles(p + 2, o.q), o.half = p;
    else if (name == "Q4_1") nibbles(p + 4, o.q), o.half = p;
    else if (name == "Q5_0") nibbles(p + 6, o.q), fifth_bits(p + 2, o.q, 16), o.half = p;
    else if (name == "Q5_1") nibbles(p + 8, o.q), fifth_bits(p + 4, o.q, 0), o.half = p;
    else if (name == "Q8_0") std::memcpy(o.q, p + 2, 32), o.half = p;
    else if (name == "Q2_K") decode_q2k(p, o);
    else if (name == "Q3_K") decode_q3k(p, o);
    else if (name == "Q4_K") decode_q45k(p, o, false);
    else if (name == "Q5_K") decode_q45k(p, o, true);
    else decode_q6k(p, o);
}

// Writes one decoded file block of one output (lane) into a tile; `first` is the tile block it begins at.
void place(const Packed &shape, const Decoded &o, int values, int lane, uint8_t *tile, int64_t first) {
    const int width = shape.wide ? 4 : 2;
    for (int b = 0; b < values / shape.block; b++) {
        uint8_t *block = tile + size_t(first + b) * shape.block_bytes();
        const int8_t *q = o.q + b * shape.block;
        for (int i = 0; i < shape.block; i++) {
            if (shape.kind == Kind::I8) block[(i / 4) * 64 + lane * 4 + i % 4] = uint8_t(q[i]);
            else if (i < 16) block[(i / 4) * 64 + lane * 4 + i % 4] = uint8_t(q[i] | q[i + 16] << 4);
        }
        uint8_t *scale = block + shape.payload() + lane * width, *min = scale + LANES * width;
        if (o.half) {
            std::memcpy(scale, o.half, 2);
            if (shape.min == Min::Stored) std::memcpy(min, o.half + 2, 2);
        } else {
            std::memcpy(scale, &o.scale[b], 4);
            if (shape.min == Min::Stored) std::memcpy(min, &o.min[b], 4);
        }
    }
}

int split_lane(int lane) { return lane < 8 ? 2 * lane : 2 * (lane - 8) + 1; }

void pack_float(const Packed &shape, const uint8_t *row, int64_t k, int lane, uint8_t *tile) {
    const int width = shape.kind == Kind::F32 ? 4 : 2;
    const int place = shape.kind == Kind::BF16 ? split_lane(lane) : lane;
    for (int64_t i = 0; i < k; i++) std::memcpy(tile + (i * LANES + place) * width, row + i * width, size_t(width));
}

} // namespace

Packed packed_shape(const std::string &format, int64_t n, int64_t k) {
    const Layout &l = layout(format);
    if (k % l.values) throw std::invalid_argument("rows of " + std::to_string(k) + " values do not fit blocks of format " + format);
    Packed p;
    p.kind = l.kind;
    p.min = l.min;
    p.block = l.block;
    p.wide = l.wide;
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
                place(shape, o, l.values, lane, tile, b * l.values / shape.block);
            }
        }
    }
}

} // namespace tailrace
