// Every kernel of every build that this machine can run, held against the portable build: the same bits where only
// integers or single operations decide, within bounds of rounding where a fused multiply-add may differ from two
// operations. What is computed beside a row must not change its bits, and all builds that fuse must agree in every bit.
//
//   kernels_test [--expect NAMES] [--digest FILE]
//
// --expect: fail unless exactly these builds can run here ("dotprod neon portable"), best first. --digest: write a hash of
// all results of the portable build and one of the others', to be compared with those of another architecture.
#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "builds.h"
#include "kernels.h"
#include "pack.h"

using namespace tailrace;

// Every member is tested below; a new one must be too. Those that only measure (`peaks` and what follows) are not.
static_assert(offsetof(Kernels, peaks) == sizeof(const char *) + 19 * sizeof(void (*)()) + 3 * sizeof(void *)); // the last are numbers, padded

namespace {

constexpr double ROUNDING = 0x1p-24; // relative error of one operation

int failures = 0;
std::string place; // what is being tested

__attribute__((format(printf, 1, 2))) void fail(const char *format, ...) {
    if (++failures > 20) return;
    std::va_list list;
    va_start(list, format);
    std::printf("FAILED %s: ", place.c_str());
    std::vprintf(format, list);
    std::printf("\n");
    va_end(list);
}

// splitmix64: the same numbers on every machine.
struct Random {
    uint64_t state;
    uint64_t next() {
        uint64_t z = state += 0x9E3779B97F4A7C15ull;
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
        return z ^ (z >> 31);
    }
    int64_t below(int64_t n) { return int64_t(next() % uint64_t(n)); }
    int64_t between(int64_t low, int64_t high) { return low + below(high - low + 1); }
    float uniform() { return float(next() >> 40) * 0x1p-24f; }
    float normal() { // near enough
        float s = -6.0f;
        for (int i = 0; i < 12; i++) s += uniform();
        return s;
    }
    std::vector<float> normals(int64_t n, float scale = 1.0f) {
        std::vector<float> v(static_cast<size_t>(n));
        for (float &x : v) x = normal() * scale;
        return v;
    }
};

// FNV-1a over the results of one build.
struct Digest {
    uint64_t hash = 0xcbf29ce484222325ull;
    void bytes(const void *p, size_t n) {
        for (size_t i = 0; i < n; i++) hash = (hash ^ static_cast<const uint8_t *>(p)[i]) * 0x100000001b3ull;
    }
    template <class T> void add(const std::vector<T> &v) { bytes(v.data(), v.size() * sizeof(T)); }
};

// The build that is tested, and the portable one; `digests` follow the results of each.
struct Pair {
    const Kernels &k, &plain;
    Digest &digest, &plain_digest;
    template <class T> void note(const std::vector<T> &found, const std::vector<T> &truth) {
        digest.add(found);
        plain_digest.add(truth);
    }
};

template <class T> void same(const char *what, const std::vector<T> &found, const std::vector<T> &truth) {
    for (size_t i = 0; i < truth.size(); i++)
        if (std::memcmp(&found[i], &truth[i], sizeof(T)) != 0)
            return fail("%s[%zu] is %.9g, not %.9g", what, i, double(found[i]), double(truth[i]));
}

void near(const char *what, size_t i, double found, double truth, double bound) {
    if (!(std::fabs(found - truth) <= bound)) fail("%s[%zu] is %.9g, not %.9g: off by %.3g, more than %.3g", what, i, found, truth, found - truth, bound);
}

uint16_t half(float x) { // exact for the powers of two, and small sums of them, that are used here
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if (x == 0.0f) return 0;
    return uint16_t((bits >> 16 & 0x8000) | ((bits >> 23 & 255) - 112) << 10 | (bits >> 13 & 1023));
}

float bf16(uint16_t x) {
    const uint32_t bits = uint32_t(x) << 16;
    float v;
    std::memcpy(&v, &bits, 4);
    return v;
}

// A packed matrix with random weights, and what is in it.
struct Matrix {
    Packed w;
    std::vector<uint8_t> bytes;

    // Scales and minima are powers of two where `exact`, so that sums of products with integers have no rounding.
    Matrix(const char *format, int64_t n, int64_t k, Random &random, bool exact) {
        w = packed_shape(format, n, k);
        bytes.resize(w.bytes());
        for (uint8_t &x : bytes) x = uint8_t(random.next());
        for (int64_t t = 0; t < w.n / LANES; t++) {
            uint8_t *tile = bytes.data() + size_t(t) * w.tile_bytes();
            if (w.integer()) {
                for (int64_t b = 0; b < k / w.quants.span(); b++) fill_header(tile + b * w.quants.span_bytes(), random, exact);
            } else {
                for (int64_t i = 0; i < k * LANES; i++) {
                    const float value = exact ? float(random.between(-31, 31)) : random.normal();
                    if (w.kind == Kind::F32) std::memcpy(tile + i * 4, &value, 4);
                    else if (w.kind == Kind::F16) put(tile, i, half(half_of(value)));
                    else put(tile, i, uint16_t(bits_of(value) >> 16));
                }
            }
        }
        w.data = bytes.data();
    }

    // Scale, minimum and quant of input k of output n; for floats the value, in `scale`.
    void at(int64_t n, int64_t k, float &scale, float &min, int &q) const {
        const uint8_t *p = w.data + size_t(n / LANES) * w.tile_bytes();
        const int lane = int(n % LANES);
        min = 0.0f, q = 1;
        if (!w.integer()) {
            if (w.kind == Kind::F32) scale = read<float>(p, k * LANES + lane);
            else if (w.kind == Kind::F16) scale = float_of(read<uint16_t>(p, k * LANES + lane));
            else scale = bf16(read<uint16_t>(p, k * LANES + (lane < 8 ? 2 * lane : 2 * lane - 15)));
            return;
        }
        const Quants &u = w.quants;
        p += k / u.span() * u.span_bytes();
        k %= u.span();
        scale = float_of(read<uint16_t>(p, lane));
        if (u.min == Min::Stored) min = float_of(read<uint16_t>(p, LANES + lane));
        if (u.min == Min::Eight) min = -8.0f * scale;
        if (u.super) {
            const uint8_t *levels = p + u.factors() + k / u.block * u.scales() + lane;
            scale *= float(u.bits == 2 ? *levels & 15 : int8_t(*levels));
            if (u.min == Min::Stored) min *= float(u.bits == 2 ? *levels >> 4 : int8_t(levels[LANES]));
        }
        q = quant(p + u.header() + k / 32 * u.payload(), int(k % 32), lane) - u.zero;
    }

    // The planes, from the highest bits of a quant to its lowest.
    int quant(const uint8_t *payload, int i, int lane) const {
        const int bits = w.quants.bits, group = i / 4, byte = lane * 4 + i % 4;
        if (bits == 8) return int8_t(payload[group * 64 + byte]);
        const uint8_t *plane = payload + bits * 64;
        int q = 0;
        if (bits % 2) plane -= 64, q = plane[byte] >> group & 1;
        if (bits / 2 % 2) plane -= 128, q = q * 4 + (plane[group / 4 * 64 + byte] >> (group % 4 * 2) & 3);
        if (bits / 4 % 2) plane -= 256, q = q * 16 + (plane[group % 4 * 64 + byte] >> (group / 4 * 4) & 15);
        return q;
    }

    static float float_of(uint16_t h) {
        const int exponent = (h >> 10) & 31, mantissa = h & 1023;
        const float v = exponent ? std::ldexp(float(mantissa + 1024), exponent - 25) : std::ldexp(float(mantissa), -24);
        return h & 0x8000 ? -v : v;
    }

  private:
    template <class T> static T read(const uint8_t *p, int64_t i) {
        T v;
        std::memcpy(&v, p + i * int64_t(sizeof(T)), sizeof(T));
        return v;
    }
    static void put(uint8_t *p, int64_t i, uint16_t v) { std::memcpy(p + i * 2, &v, 2); }
    static uint32_t bits_of(float x) {
        uint32_t bits;
        std::memcpy(&bits, &x, 4);
        return bits;
    }
    // Cut to a half's ten bits, and kept normal.
    static float half_of(float x) {
        const uint32_t bits = bits_of(x) & 0xffffe000u;
        std::memcpy(&x, &bits, 4);
        return std::fabs(x) < 0x1p-14f ? std::copysign(0x1p-14f, x) : x;
    }
    void fill_header(uint8_t *p, Random &random, bool exact) const {
        for (int i = 0; i < w.quants.factors() / 2; i++) {
            const float sign = random.below(2) ? 1.0f : -1.0f;
            put(p, i, half(exact ? sign * float(1 << random.below(2)) / 64.0f : half_of(random.normal() * 0.02f)));
        }
        if (exact)
            for (int i = w.quants.factors(); i < w.quants.header(); i++) p[i] = uint8_t(w.quants.bits == 2 ? 0x11 << random.below(2) : 1 - 2 * random.below(2));
    }
};

// Rows of rounded activations.
struct Rounded {
    std::vector<int8_t> q;
    std::vector<float> d, ds, ds16;
    std::vector<int32_t> s16;
    Quantised view;
    Rounded(int64_t rows, int64_t k, int64_t group = 1, int bytes = 1)
        : q(size_t((rows + group - 1) / group * group * k * bytes)), d(q.size() / QBLOCK), ds(d.size()), ds16(d.size() * 2), s16(d.size() * 2),
          view{q.data(), d.data(), ds.data(), ds16.data(), s16.data(), k, group} {}
    Rounded(const Rounded &) = delete;
    // Any activations, and scales that are powers of two.
    void fill(Random &random) {
        for (int8_t &x : q) x = int8_t(random.between(-127, 127));
        for (size_t b = 0; b < d.size(); b++) {
            d[b] = float(1 << random.below(2)) / 32.0f;
            for (size_t h = 0; h < 2; h++) {
                s16[2 * b + h] = 0;
                for (size_t i = 0; i < 16; i++) s16[2 * b + h] += q[b * 32 + h * 16 + i];
                ds16[2 * b + h] = d[b] * float(s16[2 * b + h]);
            }
            ds[b] = d[b] * float(s16[2 * b] + s16[2 * b + 1]);
        }
    }
};

void test_quantise(Pair p) {
    Random random{1};
    const int64_t rows = 40, k = 160;
    std::vector<float> x;
    for (int64_t r = 0; r < rows; r++) {
        auto row = random.normals(k, std::ldexp(1.0f, int(random.between(-60, 60))));
        if (r % 4 == 1) // a scale of one, and ties
            for (size_t i = 0; i < row.size(); i++) row[i] = i % QBLOCK == 5 ? 127.0f : float(random.between(-126, 126)) + 0.5f;
        if (r % 4 == 2) std::fill(row.begin(), row.begin() + QBLOCK, r % 8 == 2 ? 0.0f : -0.0f);
        x.insert(x.end(), row.begin(), row.end());
    }
    Rounded found(rows, k), truth(rows, k);
    for (int64_t r = 0; r < rows; r++) p.k.quantise(x.data(), r, found.view), p.plain.quantise(x.data(), r, truth.view);
    same("q", found.q, truth.q), same("d", found.d, truth.d), same("ds", found.ds, truth.ds);
    same("ds16", found.ds16, truth.ds16), same("s16", found.s16, truth.s16);
    p.note(found.q, truth.q), p.note(found.ds, truth.ds), p.note(found.ds16, truth.ds16);
    for (size_t i = 0; i < x.size(); i++) near("q", i, double(truth.q[i]) * truth.d[i / QBLOCK], x[i], 0.500001 * truth.d[i / QBLOCK]);
}

void test_widen(Pair p) {
    Random random{11};
    for (int64_t group : {int64_t(1), int64_t(LANES)}) {
        const int64_t rows = 20, k = 96;
        Rounded x(rows, k, group);
        x.fill(random);
        std::vector<float> found(k), truth(k);
        for (int64_t r = 0; r < rows; r++) {
            p.k.widen(x.view, r, found.data()), p.plain.widen(x.view, r, truth.data());
            same("row", found, truth), p.note(found, truth);
            for (int64_t i = 0; i < k; i++) {
                const int64_t at = x.view.at(r, i / QBLOCK);
                near("row", size_t(i), found[size_t(i)], double(x.q[size_t(at * QBLOCK + i % QBLOCK)]) * x.d[size_t(at)], 0.0);
            }
        }
    }
}

// Where a product of one tile goes within a matrix of results.
Output output(std::vector<float> &out, int64_t row0, int64_t tile, int64_t ld, const std::vector<float> *bias, bool accumulate) {
    return {out.data() + row0 * ld + tile * LANES, ld, bias ? bias->data() + tile * LANES : nullptr, accumulate};
}

// One product in all its ways; `run(kernels, tile, row0, rows, output)` computes a tile, `oracle(row, n, magnitude)` gives the
// true value and the sum of what it is made of, and takes `terms` additions.
template <class Run, class Oracle>
void product(Pair p, Random &random, const Packed &w, int64_t row0, int64_t rows, bool exact, Run run, Oracle oracle, double terms) {
    const int64_t all = row0 + rows, ld = w.n + 16 * random.below(2);
    std::vector<float> start = random.normals(all * ld), bias = random.normals(w.n);
    if (exact)
        for (auto *v : {&start, &bias})
            for (float &x : *v) x = float(random.between(-64, 64));
    for (const bool more : {false, true}) {
        const std::vector<float> *b = more ? &bias : nullptr;
        auto found = start, truth = start, alone = start, aside = start;
        for (int64_t t = 0; t < w.n / LANES; t++) {
            run(p.k, t, row0, rows, output(found, row0, t, ld, b, more));
            run(p.plain, t, row0, rows, output(truth, row0, t, ld, b, more));
            for (int64_t r = row0; r < all; r++) run(p.k, t, r, 1, output(alone, r, t, ld, b, more));
            std::vector<float> product(size_t(rows * LANES));
            run(p.k, t, row0, rows, {product.data(), LANES, nullptr, false});
            p.k.place(product.data(), rows, output(aside, row0, t, ld, b, more));
        }
        same("a row alone", alone, found);
        same("computed aside", aside, found);
        if (exact) same("exact", found, truth);
        p.note(found, truth);
        for (int64_t r = 0; r < all; r++)
            for (int64_t n = 0; n < ld; n++) {
                const size_t i = size_t(r * ld + n);
                if (r < row0 || n >= w.n) {
                    if (found[i] != start[i]) fail("wrote outside its place, at row %d column %d", int(r), int(n));
                    continue;
                }
                double size = 0.0, value = oracle(r, n, size);
                if (more) value += double(bias[size_t(n)]) + start[i], size += std::fabs(bias[size_t(n)]) + std::fabs(start[i]);
                const double bound = (terms + 4) * ROUNDING * size;
                near("found", i, found[i], value, bound), near("portable", i, truth[i], value, bound);
            }
    }
}

// Output `column` of row `r` as the kernels compute it: integer sums of a block's products, scaled and added in order.
float fused(const Matrix &m, const Rounded &x, int64_t r, int64_t column, int64_t k) {
    const int block = m.w.quants.block;
    float sum = 0.0f;
    for (int64_t b = 0; b < k / block; b++) {
        int32_t dot = 0;
        float scale = 0.0f, min = 0.0f;
        int q;
        for (int64_t i = b * block; i < (b + 1) * block; i++) {
            m.at(column, i, scale, min, q);
            dot += q * x.q[size_t(x.view.at(r, i / QBLOCK) * QBLOCK + i % QBLOCK)];
        }
        const auto at = size_t(x.view.at(r, b * block / QBLOCK));
        sum = std::fma(float(dot), scale * x.d[at], sum);
        if (m.w.quants.min != Min::None) sum = std::fma(min, block == 32 ? x.ds[at] : x.ds16[2 * at + size_t(b % 2)], sum);
    }
    return sum;
}

// One row and tiles in any order, some of them more than once, however many side by side: the bits of one tile after the other.
void check_row_int(const Kernels &k, const Matrix &m, const Quantised &x, int64_t row, Random &random) {
    const int64_t all = m.w.n / LANES, count = random.between(1, 3 * all);
    std::vector<const uint8_t *> tiles;
    std::vector<float> found(size_t(count * LANES)), wanted(found);
    std::vector<float *> out;
    for (int64_t i = 0; i < count; i++) {
        const int64_t tile = random.below(all);
        tiles.push_back(m.w.data + size_t(tile) * m.w.tile_bytes());
        out.push_back(found.data() + i * LANES);
        k.gemm_int(m.w, tile, 1, x, row, 1, {wanted.data() + i * LANES, LANES, nullptr, false}, nullptr);
    }
    for (int64_t side = 1; side <= (k.streams > 1 ? k.streams + 1 : 1); side++) {
        k.row_int(m.w, count, side, tiles.data(), x, row, out.data());
        same("side by side", found, wanted);
    }
}

// Several tiles at once, their results one beside the other or each by itself: the bits of one tile after the other.
void check_tiles_int(const Kernels &k, const Matrix &m, const Quantised &x, int64_t row, int64_t rows, Random &random, uint8_t *scratch) {
    const int64_t all = m.w.n / LANES, from = random.below(all), tiles = random.between(1, all - from);
    const std::vector<float> before = random.normals(tiles * rows * LANES), bias = random.normals(tiles * LANES);
    for (const bool together : {false, true}) {
        const int64_t ld = together ? tiles * LANES : LANES, next = together ? LANES : rows * LANES;
        std::vector<float> found = before, wanted = before;
        k.gemm_int(m.w, from, tiles, x, row, rows, {found.data(), ld, bias.data(), true, next}, scratch);
        for (int64_t t = 0; t < tiles; t++)
            k.gemm_int(m.w, from + t, 1, x, row, rows, {wanted.data() + t * next, ld, bias.data() + t * LANES, true}, scratch);
        same(together ? "tiles together" : "tiles apart", found, wanted);
    }
}

void test_gemm_int(Pair p) {
    Random random{2};
    for (const char *format : {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"})
        for (const int64_t rows : {1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 15, 16, 17, 24, 27, 34, 44})
            for (const bool exact : {true, false}) {
                place = std::string(p.k.name) + " gemm_int " + format + " rows " + std::to_string(rows) + (exact ? " exact" : "");
                const int64_t k = packed_shape(format, 16, 256).quants.super ? 256 * random.between(1, 2) : 32 * random.between(1, 5);
                const int64_t n = random.between(1, 40);
                const Matrix m(format, n, k, random, exact);
                const int64_t group = group_of(rows), row0 = group * random.below(3), all = row0 + rows;
                Rounded x(all, k, group);
                if (exact) x.fill(random);
                else
                    for (int64_t r = 0; r < all; r++) p.plain.quantise(random.normals(all * k).data(), r, x.view);
                std::vector<uint8_t> scratch(size_t(16 * k));
                const auto run = [&](const Kernels &kernels, int64_t tile, int64_t row0, int64_t count, const Output &out) {
                    kernels.gemm_int(m.w, tile, 1, x.view, row0, count, out, scratch.data());
                };
                if (rows == 1) check_row_int(p.k, m, x.view, row0, random);
                const Matrix wide(format, LANES * random.between(2, 17), k, random, exact);
                check_tiles_int(p.k, wide, x.view, row0, rows, random, scratch.data());
                const auto oracle = [&](int64_t r, int64_t column, double &size) {
                    double sum = 0.0;
                    for (int64_t b = 0; b < k / 16; b++) { // the smallest piece with a scale
                        double dot = 0.0, total = 0.0;
                        float scale, min;
                        int q;
                        for (int64_t i = b * 16; i < b * 16 + 16; i++) {
                            m.at(column, i, scale, min, q);
                            const int a = x.q[size_t(x.view.at(r, i / QBLOCK) * QBLOCK + i % QBLOCK)];
                            dot += double(q * a), total += a;
                        }
                        const double d = x.d[size_t(x.view.at(r, b * 16 / QBLOCK))];
                        sum += d * (scale * dot + min * total), size += d * (std::fabs(scale * dot) + std::fabs(min * total));
                    }
                    return sum;
                };
                product(p, random, m.w, row0, rows, exact, run, oracle, 2.0 * double(k) / m.w.quants.block);
                if (std::string(p.k.name) == "portable") continue;
                std::vector<float> found(size_t(rows * LANES)), truth = found;
                run(p.k, 0, row0, rows, {found.data(), LANES, nullptr, false});
                for (size_t i = 0; i < truth.size(); i++) truth[i] = fused(m, x, row0 + int64_t(i) / LANES, int64_t(i) % LANES, k);
                same("to the bit", found, truth);
            }
}

// Of builds whose activations are bf16, as the instructions that sum them define it.
//
// An activation is kept times 2^80, a weight is multiplied as 2^-104 of itself (so is a product 2^-24 of what it stands for). Of
// every four inputs the second and the third change places.
constexpr float ACTIVATION_GAIN = 0x1p80f;
int64_t swapped(int64_t i) { return i / 4 * 4 + i % 2 * 2 + i / 2 % 2; }

// The nearest bf16, ties to even.
uint16_t to_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Bits of the nearest float16, ties to even; infinite from 65,520 on.
uint16_t to_half(double x) {
    const double size = std::fmin(std::fabs(x), 0x1p16);
    int exponent = -14;
    if (size >= 0x1p-14) std::frexp(size, &exponent), exponent--;
    const auto steps = int(std::nearbyint(std::ldexp(size, 10 - exponent))); // a carry goes on into the exponent
    return uint16_t((x < 0 ? 0x8000 : 0) | (steps + ((exponent + 14) << 10)));
}

// What is multiplied for input i of an output.
float widened(const Matrix &m, int64_t n, int64_t i) {
    float scale, min;
    int q;
    m.at(n, i, scale, min, q);
    const Quants &u = m.w.quants;
    if (u.min == Min::Eight) min = 0.0f, q -= 8;
    const double kept_scale = Matrix::float_of(to_half(scale)), kept_min = Matrix::float_of(to_half(min));
    const double weight = double(q) * kept_scale + kept_min;
    const uint16_t bits = to_half(256.0 * weight), size = uint16_t(((bits & 0x7fff) + 4) >> 3);
    const float found = size < 0x80 ? 0.0f : bf16(uint16_t((bits & 0x8000) | size));
    const double truth = std::fmax(-256.0, std::fmin(256.0, double(q) * scale + min)), bound = 0x1p-8 * std::fabs(truth) + 0x1p-10 * (std::fabs(double(q) * scale) + std::fabs(min)) + 0x1p-22;
    near("widened", size_t(i), std::ldexp(double(found), 104), truth, bound);
    return found;
}

void test_round_bf16(Pair p) {
    Random random{12};
    for (int64_t group : {int64_t(1), int64_t(LANES)}) {
        const int64_t rows = 20, k = 96;
        Rounded found(rows, k, group, 2);
        std::vector<float> x;
        for (int64_t r = 0; r < rows; r++)
            for (const float v : random.normals(k, std::ldexp(1.0f, int(random.between(-100, 40))))) x.push_back(r % 4 == 1 ? std::ldexp(float(random.between(-1023, 1023)), -9) : v);
        std::fill(x.begin(), x.begin() + QBLOCK, -0.0f);
        for (int64_t r = 0; r < rows; r++) p.k.quantise(x.data(), r, found.view);
        for (int64_t r = 0; r < rows; r++) {
            std::vector<float> row(static_cast<size_t>(k));
            p.k.widen(found.view, r, row.data());
            for (int64_t i = 0; i < k; i++) {
                uint16_t bits;
                std::memcpy(&bits, found.q.data() + (found.view.at(r, i / QBLOCK) * QBLOCK + swapped(i % QBLOCK)) * 2, 2);
                const uint16_t wanted = to_bf16(x[size_t(r * k + i)] * ACTIVATION_GAIN);
                if (bits != wanted) fail("activation %d of row %d is %04x, not %04x", int(i), int(r), unsigned(bits), unsigned(wanted));
                if (row[size_t(i)] != bf16(wanted) / ACTIVATION_GAIN) fail("activation %d of row %d comes back as %g", int(i), int(r), double(row[size_t(i)]));
            }
        }
    }
}

// Output `column` of row `r`: of each block of 32 inputs the even places are added up from the first to the last, the odd ones
// beside them, then both together and on to what there is, every sum rounded and none kept that is below the normal numbers.
float tiled(const std::vector<float> &weights, const std::vector<float> &x) {
    const auto flushed = [](float v) { return std::fabs(v) < 0x1p-126f ? std::copysign(0.0f, v) : v; };
    float sum = 0.0f;
    for (size_t b = 0; b < x.size(); b += QBLOCK) {
        float part[2] = {0.0f, 0.0f};
        for (size_t place = 0; place < size_t(QBLOCK); place++) {
            const size_t i = b + size_t(swapped(int64_t(place)));
            part[place % 2] = flushed(std::fma(x[i], weights[i], part[place % 2]));
        }
        sum = flushed(sum + flushed(part[0] + part[1]));
    }
    return sum * 0x1p24f;
}

void test_gemm_bf16(Pair p) {
    Random random{13};
    const int64_t counts[] = {1, 2, 3, 5, 8, 11, 12, 15, 16, 17, 31, 32, 33, 48, 50, 64, 80, 130};
    for (const char *format : {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"})
        for (const int64_t rows : counts) {
            place = std::string(p.k.name) + " gemm_int " + format + " rows " + std::to_string(rows);
            const bool super = packed_shape(format, 16, 256).quants.super, deep = random.below(8) == 0; // more than is widened at once
            const int64_t k = deep ? 256 * random.between(7, 13) : super ? 256 * random.between(1, 2) : 32 * random.between(1, 9);
            const Matrix m(format, random.between(1, 70), k, random, false);
            const int64_t group = group_of(rows), row0 = group * random.below(3), all = row0 + rows;
            Rounded x(all, k, group, 2);
            const std::vector<float> values = random.normals(all * k);
            for (int64_t r = 0; r < all; r++) p.k.quantise(values.data(), r, x.view);
            std::vector<float> scratch(product_scratch(k, (rows + 63) / 64 * 64));
            const auto run = [&](const Kernels &kernels, int64_t tile, int64_t from, int64_t count, const Output &out) {
                kernels.gemm_int(m.w, tile, 1, x.view, from, count, out, reinterpret_cast<uint8_t *>(scratch.data()));
            };
            check_row_int(p.k, m, x.view, row0, random);
            check_tiles_int(p.k, m, x.view, row0, rows, random, reinterpret_cast<uint8_t *>(scratch.data()));
            std::vector<std::vector<float>> weights, kept(static_cast<size_t>(all));
            for (int64_t n = 0; n < m.w.n; n++) {
                std::vector<float> &column = weights.emplace_back();
                for (int64_t i = 0; i < k; i++) column.push_back(widened(m, n, i));
            }
            for (int64_t r = 0; r < all; r++)
                for (int64_t i = 0; i < k; i++) kept[size_t(r)].push_back(bf16(to_bf16(values[size_t(r * k + i)] * ACTIVATION_GAIN)));
            const auto oracle = [&](int64_t r, int64_t column, double &size) {
                double sum = 0.0;
                for (int64_t i = 0; i < k; i++) {
                    const double value = std::ldexp(double(weights[size_t(column)][size_t(i)]) * kept[size_t(r)][size_t(i)], 24);
                    sum += value, size += std::fabs(value);
                }
                return sum;
            };
            Digest ignored;
            product({p.k, p.k, ignored, ignored}, random, m.w, row0, rows, false, run, oracle, 16.0 + double(k) / QBLOCK);
            std::vector<float> found(size_t(rows * LANES)), truth = found;
            run(p.k, 0, row0, rows, {found.data(), LANES, nullptr, false});
            for (size_t i = 0; i < truth.size(); i++) truth[i] = tiled(weights[i % LANES], kept[size_t(row0) + i / LANES]);
            same("to the bit", found, truth);
        }
}

void test_gemm_float(Pair p) {
    Random random{3};
    for (const char *format : {"F32", "BF16", "F16"})
        for (int64_t rows = 1; rows <= 9; rows++)
            for (const bool exact : {true, false}) {
                place = std::string(p.k.name) + " gemm_float " + format + " rows " + std::to_string(rows) + (exact ? " exact" : "");
                const int64_t k = 16 * random.between(1, 6), n = random.between(1, 40), ldx = k + random.below(20);
                const Matrix m(format, n, k, random, exact);
                auto x = random.normals((rows + 2) * ldx);
                if (exact)
                    for (float &v : x) v = float(random.between(-31, 31));
                const auto run = [&](const Kernels &kernels, int64_t tile, int64_t row0, int64_t count, const Output &out) {
                    kernels.gemm_float(m.w, tile, x.data(), ldx, row0, count, out);
                };
                const auto oracle = [&](int64_t r, int64_t column, double &size) {
                    double sum = 0.0;
                    for (int64_t i = 0; i < k; i++) {
                        float weight, min;
                        int q;
                        m.at(column, i, weight, min, q);
                        const double value = double(weight) * x[size_t(r * ldx + i)];
                        sum += value, size += std::fabs(value);
                    }
                    return sum;
                };
                product(p, random, m.w, random.below(3), rows, exact, run, oracle, double(k) / 2);
                if (std::string(format) != "BF16" || rows > 1) continue;
                std::vector<float> found = random.normals(m.w.n), truth = found;
                std::vector<const uint8_t *> tiles;
                std::vector<float *> out;
                for (int64_t tile = 0; tile < m.w.n / LANES; tile++) {
                    tiles.push_back(m.w.data + size_t(tile) * m.w.tile_bytes()), out.push_back(found.data() + tile * LANES);
                    p.k.gemm_float(m.w, tile, x.data(), ldx, 0, 1, {truth.data() + tile * LANES, LANES, nullptr, true});
                }
                p.k.add_low(m.w.k, int64_t(tiles.size()), tiles.data(), x.data(), out.data());
                same("added", found, truth);
            }
}

void test_embed(Pair p) {
    Random random{4};
    for (const char *format : {"F32", "BF16", "F16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"}) {
        place = std::string(p.k.name) + " embed " + format;
        const int64_t k = packed_shape(format, 16, 256).quants.super ? 512 : 96, n = 35;
        const Matrix m(format, n, k, random, false);
        for (const int64_t token : {0, 7, 16, 34}) {
            std::vector<float> found(static_cast<size_t>(k)), truth = found;
            p.k.embed(m.w, token, found.data(), k);
            p.plain.embed(m.w, token, truth.data(), k);
            same("value", found, truth);
            p.note(found, truth);
            for (int64_t i = 0; i < k; i++) {
                float scale, min;
                int q;
                m.at(token, i, scale, min, q);
                const double product = double(scale) * q;
                near("value", size_t(i), found[size_t(i)], product + double(min), 2 * ROUNDING * (std::fabs(product) + std::fabs(min)));
            }
        }
    }
    place = std::string(p.k.name) + " embed, every half";
    std::vector<uint16_t> halves(65536);
    for (size_t i = 0; i < halves.size(); i++) halves[i] = uint16_t((i & 0x7c00) == 0x7c00 ? i & 0xfc00 : i); // no NaNs
    Packed w = packed_shape("F16", LANES, int64_t(halves.size()) / LANES);
    w.data = reinterpret_cast<const uint8_t *>(halves.data());
    for (int64_t lane = 0; lane < LANES; lane++) {
        std::vector<float> found(static_cast<size_t>(w.k)), truth = found;
        p.k.embed(w, lane, found.data(), w.k);
        p.plain.embed(w, lane, truth.data(), w.k);
        same("value", found, truth);
    }
}

void test_rms_norm(Pair p) {
    Random random{5};
    for (int64_t width = 1; width <= 100; width += random.between(1, 4))
        for (const bool exact : {true, false}) {
            place = std::string(p.k.name) + " rms_norm " + std::to_string(width) + (exact ? " exact" : "");
            auto x = random.normals(width, 3.0f);
            if (exact)
                for (float &v : x) v = float(random.between(-63, 63));
            const auto weight = random.normals(width);
            const float eps = exact ? 0x1p-10f : 1e-5f;
            std::vector<float> found(static_cast<size_t>(width)), truth = found;
            p.k.rms_norm(x.data(), weight.data(), eps, width, found.data());
            p.plain.rms_norm(x.data(), weight.data(), eps, width, truth.data());
            if (exact) same("value", found, truth);
            p.note(found, truth);
            double total = 0.0;
            for (const float v : x) total += double(v) * v;
            const double inverse = 1.0 / std::sqrt(total / double(width) + double(eps));
            for (size_t i = 0; i < x.size(); i++) {
                const double value = double(weight[i]) * x[i] * inverse, bound = (double(width) / 16 + 24) * ROUNDING * std::fabs(value);
                near("found", i, found[i], value, bound), near("portable", i, truth[i], value, bound);
            }
        }
}

void test_rotate(Pair p) {
    Random random{6};
    for (int64_t half = 1; half <= 65; half += random.between(1, 3)) {
        place = std::string(p.k.name) + " rotate " + std::to_string(half);
        const auto start = random.normals(2 * half + 3), cos = random.normals(half), sin = random.normals(half);
        auto found = start, truth = start;
        p.k.rotate(found.data(), cos.data(), sin.data(), half, 2 * half);
        p.plain.rotate(truth.data(), cos.data(), sin.data(), half, 2 * half);
        same("value", found, truth);
        p.note(found, truth);
        for (size_t i = 0; i < size_t(half); i++) {
            const double a = start[i], b = start[i + size_t(half)], c = cos[i], s = sin[i], bound = 2 * ROUNDING * (std::fabs(a) + std::fabs(b)) * 6;
            near("first", i, found[i], a * c - b * s, bound), near("second", i, found[i + size_t(half)], b * c + a * s, bound);
        }
    }
}

void test_silu_mul(Pair p) {
    Random random{7};
    for (int64_t width = 16; width <= 208; width += 16) {
        place = std::string(p.k.name) + " silu_mul " + std::to_string(width);
        auto gate = random.normals(width, width % 32 ? 2.0f : 25.0f);
        const auto up = random.normals(width);
        const float ends[] = {0.0f, -0.0f, 87.0f, -87.0f, 87.4f, -87.4f, 1e-30f, -1e-30f, 1e37f, -1e37f, 87.33654f, -87.33654f};
        if (width == 208) std::copy(std::begin(ends), std::end(ends), gate.begin() + 11);
        std::vector<float> found(static_cast<size_t>(width)), truth = found;
        p.k.silu_mul(gate.data(), up.data(), width, found.data());
        p.plain.silu_mul(gate.data(), up.data(), width, truth.data());
        p.note(found, truth);
        for (size_t i = 0; i < gate.size(); i++) {
            const double value = double(gate[i]) / (1.0 + std::exp(-double(gate[i]))) * up[i];
            const double bound = 8 * ROUNDING * std::fabs(value) + 1e-36 * std::fabs(double(gate[i]) * up[i]); // 0 below -87.3
            near("found", i, found[i], value, bound), near("portable", i, truth[i], value, bound);
        }
    }
}

void test_gate_block(Pair p) {
    Random random{10};
    for (int64_t rows = 1; rows <= 9; rows++) {
        place = std::string(p.k.name) + " gate_block rows " + std::to_string(rows);
        const int64_t row0 = random.below(3), k = 96, block = random.below(3);
        const auto gate = random.normals(2 * rows * LANES, 3.0f), up = random.normals(2 * rows * LANES);
        const int bytes = p.k.activation_bytes;
        Rounded found(row0 + rows, k, 1, bytes), truth(row0 + rows, k), apart(row0 + rows, k, 1, bytes);
        p.k.gate_block(gate.data(), up.data(), rows, row0, block, found.view);
        p.plain.gate_block(gate.data(), up.data(), rows, row0, block, truth.view);
        for (int64_t r = 0; r < rows; r++) { // the same as silu_mul, then quantise
            std::vector<float> g(static_cast<size_t>(k)), u = g, values = g;
            for (int64_t i = 0; i < QBLOCK; i++) {
                g[size_t(block * QBLOCK + i)] = gate[size_t((i / LANES * rows + r) * LANES + i % LANES)];
                u[size_t(block * QBLOCK + i)] = up[size_t((i / LANES * rows + r) * LANES + i % LANES)];
            }
            p.k.silu_mul(g.data(), u.data(), k, values.data());
            values.insert(values.begin(), size_t((row0 + r) * k), 0.0f);
            p.k.quantise(values.data(), row0 + r, apart.view);
        }
        same("q", found.q, apart.q);
        if (bytes > 1) continue;
        same("d", found.d, apart.d), same("ds", found.ds, apart.ds);
        same("ds16", found.ds16, apart.ds16), same("s16", found.s16, apart.s16);
        p.note(found.q, truth.q), p.note(found.ds, truth.ds), p.note(found.ds16, truth.ds16);
        for (size_t b = 0; b < truth.d.size(); b++) near("d", b, found.d[b], truth.d[b], 16 * ROUNDING * truth.d[b]);
        for (size_t i = 0; i < truth.q.size(); i++) near("q", i, found.q[i], truth.q[i], 1.0); // a tie may round either way
    }
}

// A float16, as a number.
double f16(const uint8_t *at) {
    uint16_t x;
    std::memcpy(&x, at, 2);
    const int exponent = x >> 10 & 31, mantissa = x & 1023;
    const double size = exponent == 0 ? std::ldexp(mantissa, -24) : exponent == 31 ? (mantissa ? NAN : INFINITY) : std::ldexp(1024 + mantissa, exponent - 25);
    return x & 0x8000 ? -size : size;
}

// Each run of dimensions by the Hadamard matrix of its size.
std::vector<double> turned(const std::vector<double> &x) {
    const size_t n = x.size(), run = n & (~n + 1);
    std::vector<double> y(n, 0.0);
    for (size_t i = 0; i < n; i++)
        for (size_t j = i / run * run; j < i / run * run + run; j++)
            y[i] += (__builtin_popcountll((i % run) & (j % run)) % 2 ? -x[j] : x[j]) / std::sqrt(double(run));
    return y;
}

// A pool of KV pages that has been written by a kernel, and what was asked to be in it.
struct Cache {
    int kv_heads, head_dim;
    Kept kept_key, kept_value;
    std::vector<int32_t> table;
    std::vector<uint8_t> keys, values;
    Cache(int kv_heads, int head_dim, Kept key, Kept value, int64_t positions, Random &random)
        : kv_heads(kv_heads), head_dim(head_dim), kept_key(key), kept_value(value) {
        const int64_t pages = (positions + PAGE - 1) / PAGE;
        for (int64_t i = 0; i < pages; i++) table.push_back(int32_t(i));
        for (size_t i = table.size(); i > 1; i--) std::swap(table[i - 1], table[size_t(random.below(int64_t(i)))]);
        // whatever those who had the pages before left there: not a number
        keys.resize(size_t(pages * kv_heads * key_block(key, head_dim)));
        values.resize(size_t(pages * kv_heads * value_block(value, head_dim)));
        for (size_t i = 0; i < keys.size(); i++) keys[i] = i % 2 ? 0x7f : 0xff;
        for (size_t i = 0; i < values.size(); i++) values[i] = i % 2 ? 0x7f : 0xff;
    }
    Kv kv() { return {kept_key, kept_value, keys.data(), values.data(), pages()}; }
    int64_t pages() const { return int64_t(table.size()); }
    int64_t slot(int64_t position) const { return int64_t(table[size_t(position / PAGE)]) * PAGE + position % PAGE; }
    // The scale of dimension d at a position in the page, and its minimum.
    double scale(Kept kept, const uint8_t *block, int at, int d, double &minimum) const {
        minimum = kept == Kept::I4 ? f16(block + (2 * (d / GROUP) + 1) * 2 * PAGE + 2 * at) : 0.0;
        return f16(block + (kept == Kept::I4 ? 2 * (d / GROUP) : 0) * 2 * PAGE + 2 * at);
    }
    std::vector<double> key(int64_t position, int head) const {
        const int64_t s = slot(position);
        const int at = int(s % PAGE);
        const uint8_t *block = keys.data() + (head * pages() + s / PAGE) * key_block(kept_key, head_dim), *data = block + kept_header(kept_key, head_dim);
        std::vector<double> x(static_cast<size_t>(head_dim));
        for (int d = 0; d < head_dim; d++) {
            double minimum;
            uint16_t word;
            switch (kept_key) {
            case Kept::BF16: std::memcpy(&word, block + 2 * (d / 2 * 2 * PAGE + at * 2 + d % 2), 2), x[size_t(d)] = bf16(word); break;
            case Kept::F16: x[size_t(d)] = f16(block + 2 * (d * PAGE + at)); break;
            case Kept::I8: x[size_t(d)] = scale(kept_key, block, at, d, minimum) * int8_t(data[d * PAGE + at]); break;
            case Kept::I4:
                x[size_t(d)] = scale(kept_key, block, at, d, minimum) * (data[d / 2 * PAGE + at] >> (d % 2 * 4) & 15);
                x[size_t(d)] += minimum;
            }
        }
        return keys_rotated(kept_key) ? turned(x) : x;
    }
    std::vector<double> value(int64_t position, int head) const {
        const int64_t s = slot(position), dim = padded_dim(head_dim);
        const int at = int(s % PAGE);
        const uint8_t *block = values.data() + (head * pages() + s / PAGE) * value_block(kept_value, head_dim);
        const uint8_t *data = block + kept_header(kept_value, head_dim);
        std::vector<double> x(static_cast<size_t>(head_dim));
        for (int d = 0; d < head_dim; d++) {
            double minimum;
            uint16_t word;
            switch (kept_value) {
            case Kept::BF16: std::memcpy(&word, block + 2 * (at / 2 * 2 * dim + 2 * d + at % 2), 2), x[size_t(d)] = bf16(word); break;
            case Kept::F16: x[size_t(d)] = f16(block + 2 * (at * dim + d)); break;
            case Kept::I8: x[size_t(d)] = scale(kept_value, block, at, d, minimum) * int8_t(data[at * dim + d]); break;
            case Kept::I4:
                x[size_t(d)] = scale(kept_value, block, at, d, minimum) *
                               (data[at * padded_pairs(head_dim) / 2 + d / GROUP * LANES + d % LANES] >> (d / LANES % 2 * 4) & 15);
                x[size_t(d)] += minimum;
            }
        }
        return values_rotated(kept_value) ? turned(x) : x;
    }
};

// Whether a vector is what was stored, as near as it can be kept.
void kept_near(const char *what, Kept kept, bool rotated, const std::vector<double> &found, const float *x) {
    double largest = 0.0, size = 0.0, error = 0.0;
    for (size_t d = 0; d < found.size(); d++) largest = std::max(largest, std::fabs(double(x[d]))), size += double(x[d]) * x[d];
    for (size_t d = 0; d < found.size(); d++) {
        const double bound = kept == Kept::BF16 ? 0x1p-8 * std::fabs(x[d]) : kept == Kept::F16 ? 0x1p-11 * std::fabs(x[d]) + 0x1p-24 : largest * 0.51 / 127;
        if (!rotated) near(what, d, found[d], x[d], bound);
        error += (found[d] - x[d]) * (found[d] - x[d]);
    }
    // a step is at most 1 / 127 (2 / 15) of the vector's length, and rounding is off by half of one in each dimension
    const double step = kept == Kept::I4 ? 2.0 / 15.0 : 1.0 / 127.0;
    if (rotated) near(what, 0, std::sqrt(error), 0.0, 0.52 * step * std::sqrt(size) * std::sqrt(double(found.size())));
    if (kept == Kept::I4 && found.size() >= 64) near(what, 1, std::sqrt(error), 0.0, 0.15 * std::sqrt(size));
}

const char *name_of(Kept kept) {
    const char *names[] = {"bf16", "fp16", "int8", "int4"};
    return names[int(kept)];
}

// Attention of consecutive queries of one sequence: stores, whole chunks, single queries, and pieces that are merged.
void attention(Pair p, Random &random, int kv_heads, int group, int head_dim, int64_t context, int64_t count, int64_t window,
               Kept kept_key = Kept::BF16, Kept kept_value = Kept::BF16) {
    const int heads = kv_heads * group, dim = padded_dim(head_dim);
    place = std::string(p.k.name) + " attention heads " + std::to_string(kv_heads) + "x" + std::to_string(group) + " of " + std::to_string(head_dim) +
            ", " + std::to_string(count) + " queries at " + std::to_string(context) + ", window " + std::to_string(window) + ", keys " +
            name_of(kept_key) + ", values " + name_of(kept_value);
    const int64_t end = context + count, before = random.below(3), ldq = heads * head_dim + 5, ldo = heads * head_dim + 7;
    Cache cache(kv_heads, head_dim, kept_key, kept_value, end, random), plain_cache = cache;
    double largest = 0.0;
    std::vector<std::vector<double>> keys, values; // [position][head]
    for (int64_t i = 0; i < end; i++) {
        const auto k = random.normals(kv_heads * head_dim), v = random.normals(kv_heads * head_dim);
        p.k.store_kv(k.data(), v.data(), cache.slot(i), i + 1 == end, kv_heads, head_dim, cache.kv());
        p.plain.store_kv(k.data(), v.data(), cache.slot(i), i + 1 == end, kv_heads, head_dim, plain_cache.kv());
        for (int h = 0; h < kv_heads; h++) {
            keys.push_back(cache.key(i, h)), values.push_back(cache.value(i, h));
            kept_near("key", kept_key, keys_rotated(kept_key), keys.back(), k.data() + h * head_dim);
            kept_near("value", kept_value, values_rotated(kept_value), values.back(), v.data() + h * head_dim);
        }
        for (float x : v) largest = std::max(largest, std::fabs(double(x)));
    }
    same("keys", cache.keys, plain_cache.keys), same("values", cache.values, plain_cache.values);
    for (int64_t i = end; i % PAGE; i++) // nothing is left behind the last position
        for (int h = 0; h < kv_heads; h++) {
            for (double x : cache.key(i, h)) near("key behind", size_t(i), x, 0.0, 0.0);
            for (double x : cache.value(i, h)) near("value behind", size_t(i), x, 0.0, 0.0);
        }
    const auto q = random.normals((before + count) * ldq);
    const float scale = 1.0f / 8.0f;
    const Sequence sequence{before, count, context, cache.table.data()};
    std::vector<float> scratch(attention_scratch(count * group, head_dim)), found(size_t((before + count) * ldo), 7.0f);
    auto truth = found, alone = found, merged = found;
    const auto arguments = [&](std::vector<float> &out) {
        return AttentionArgs{q.data(), ldq, out.data(), ldo, heads, kv_heads, head_dim, scale, window, cache.kv()};
    };
    const std::vector<int32_t> next(cache.table.begin(), cache.table.begin() + random.between(1, int64_t(cache.table.size())));
    for (int h = 0; h < kv_heads; h++) {
        p.k.attend(arguments(found), sequence, h, 0, count, scratch.data());
        p.plain.attend(arguments(truth), sequence, h, 0, count, scratch.data());
        for (int64_t i = 0; i < count; i++) {
            AttentionArgs hinted = arguments(alone); // what is read next is a hint: it changes no bit
            hinted.ahead = {next.data(), kv_heads - 1, random.below(int64_t(next.size())), int64_t(next.size())};
            p.k.attend(hinted, sequence, h, i, 1, scratch.data());
            const int64_t position = context + i, pieces = position / SPLIT + 1, middle = random.between(0, pieces), stride = pieces * (dim + 2);
            const int64_t first = window > 0 && position + 1 > window ? (position + 1 - window) / SPLIT : 0;
            std::vector<float> partial(size_t(group * stride));
            for (const auto &[from, to] : {std::pair{first, std::max(first, middle)}, std::pair{std::max(first, middle), pieces}})
                p.k.attend_pieces(arguments(merged), sequence, h, i, from, to, partial.data(), stride, scratch.data());
            for (int g = 0; g < group; g++)
                p.k.merge_pieces(partial.data() + g * stride, first, pieces, head_dim, kept_value,
                                 merged.data() + (before + i) * ldo + (h * group + g) * head_dim);
        }
    }
    same("a query alone", alone, found);
    same("merged pieces", merged, found);
    // These take queries and weights as bf16: other bits, a wider bound, and not for the digest.
    const std::string name = p.k.name;
    const bool rounded = (name == "amx" || name == "avx512bf16") && head_dim % 32 == 0 && kept_key == Kept::BF16 && kept_value == Kept::BF16;
    auto noted = found;
    if (rounded)
        for (int h = 0; h < kv_heads; h++) chosen("avx512")->attend(arguments(noted), sequence, h, 0, count, scratch.data());
    p.note(cache.keys, plain_cache.keys), p.note(cache.values, plain_cache.values), p.note(noted, truth);
    for (size_t i = 0; i < found.size(); i++) {
        const int64_t row = int64_t(i) / ldo - before, column = int64_t(i) % ldo;
        if (row < 0 || column >= heads * head_dim) {
            if (found[i] != 7.0f) fail("wrote outside its place");
            continue;
        }
        if (column % head_dim) continue; // a head at a time
        const int head = int(column) / head_dim, kv = head / group;
        const int64_t hi = context + row, lo = window > 0 && hi + 1 > window ? hi + 1 - window : 0;
        std::vector<double> score, out(static_cast<size_t>(head_dim));
        double top = -1e300, size = 0.0, sum = 0.0;
        for (int64_t t = lo; t <= hi; t++) {
            double s = 0.0, magnitude = 0.0;
            for (int d = 0; d < head_dim; d++) {
                const double term = double(q[size_t((before + row) * ldq + head * head_dim + d)]) * keys[size_t(t * kv_heads + kv)][size_t(d)] * double(scale);
                s += term, magnitude += std::fabs(term);
            }
            score.push_back(s), top = std::max(top, s), size = std::max(size, magnitude);
        }
        for (double &s : score) s = std::exp(s - top), sum += s;
        for (int64_t t = lo; t <= hi; t++)
            for (int d = 0; d < head_dim; d++) out[size_t(d)] += score[size_t(t - lo)] / sum * values[size_t(t * kv_heads + kv)][size_t(d)];
        // Scores are off by head_dim roundings of their terms, which e^x makes relative; then sums over positions.
        // Numbers of four bits are sums of larger terms than what they stand for.
        const double larger = kept_key == Kept::I4 || kept_value == Kept::I4 ? 16.0 : 1.0;
        const double bound = (2.0 * (head_dim + 4) * size + 2.0 * SPLIT + double(end) / SPLIT + 20) * ROUNDING * largest * larger;
        const double wide = bound + (rounded ? (2.0 * size + 2.0) * 0x1p-9 * largest : 0.0);
        for (size_t d = 0; d < out.size(); d++) near("found", i + d, found[i + d], out[d], wide), near("portable", i + d, truth[i + d], out[d], bound);
    }
}

void test_attention(Pair p) {
    Random random{8};
    for (const int head_dim : {16, 20, 32, 64, 80, 96, 128, 160, 256})
        for (const int group : {1, 3, 4, 20}) {
            const int64_t most = 48 / group, many = random.between(1, most), few = random.between(1, std::min<int64_t>(most, 9)); // in this order on every machine
            const int64_t context = random.between(40, 260), window = random.between(1, 100);
            attention(p, random, 2, group, head_dim, 0, most, 0);
            attention(p, random, 1, group, head_dim, context, many, 0);
            attention(p, random, 1, group, head_dim, context, few, window);
        }
    const std::pair<Kept, Kept> kinds[] = {{Kept::F16, Kept::F16}, {Kept::I8, Kept::I8},  {Kept::I4, Kept::I4},
                                           {Kept::I8, Kept::I4},   {Kept::BF16, Kept::I8}, {Kept::I4, Kept::BF16}};
    for (const auto &[key, value] : kinds)
        for (const int head_dim : {16, 20, 64, 80, 96, 128})
            for (const int group : {1, 3, 8}) {
                const int64_t many = random.between(1, 48 / group), few = random.between(1, 5);
                const int64_t context = random.between(0, 200), window = random.between(1, 100);
                attention(p, random, 1, group, head_dim, context, many, 0, key, value);
                attention(p, random, 2, group, head_dim, context, few, window, key, value);
            }
}

struct Drawn {
    std::vector<int32_t> tokens; // the token, then the likeliest
    std::vector<float> logprobs, logits;
};

Drawn draw(const Kernels &k, SampleArgs a, const std::vector<float> &row) {
    Drawn r{std::vector<int32_t>(size_t(1 + std::max(0, a.logprobs))), std::vector<float>(size_t(1 + std::max(0, a.logprobs))), row};
    std::vector<float> scratch(size_t(3 * a.padded));
    a.logits = r.logits.data(), a.top_token = r.tokens.data() + 1, a.top_logprob = r.logprobs.data() + 1;
    const Sampled s = k.sample(a, scratch.data());
    r.tokens[0] = s.token, r.logprobs[0] = s.logprob;
    return r;
}

void test_sample(Pair p) {
    Random random{9};
    for (int i = 0; i < 600; i++) {
        place = std::string(p.k.name) + " sample " + std::to_string(i);
        SampleArgs a{};
        a.vocab = random.between(1, 700);
        a.padded = (a.vocab + random.below(40) + 15) / 16 * 16;
        auto logits = random.normals(a.padded, 3.0f);
        if (i % 3 == 0) // ties
            for (float &x : logits) x = std::round(x * 2.0f);
        if (i % 50 == 7) std::fill(logits.begin(), logits.end(), -INFINITY);
        if (i % 50 == 8) std::fill(logits.begin(), logits.end(), NAN);
        if (i % 50 == 9 && a.vocab > 2 * LANES) logits[size_t(random.below(LANES))] = NAN; // the largest number is what counts
        if (i % 11 == 5)
            for (size_t t = 0; t < logits.size(); t += 3) logits[t] = -INFINITY;
        a.temperature = i % 4 == 0 ? 0.0f : 0.2f + random.uniform() * 1.5f;
        a.top_k = random.below(2) ? 0 : int32_t(random.between(1, 60));
        a.top_p = random.below(2) ? 1.0f : 0.05f + 0.95f * random.uniform();
        a.min_p = random.below(3) ? 0.0f : 0.3f * random.uniform();
        a.repetition = 1.0f;
        a.position = int32_t(random.below(100000)), a.seed = random.next();
        a.forced = i % 13 == 6 ? int32_t(random.below(a.vocab)) : -1;
        a.logprobs = i % 5 ? int32_t(random.between(-1, 9)) : -1;
        std::vector<int32_t> seen, counts, biased;
        std::vector<float> bias;
        if (i % 3 == 1) {
            a.presence = random.normal(), a.frequency = random.normal(), a.repetition = 1.0f + random.uniform();
            for (int j = 0; j < 20; j++) seen.push_back(int32_t(random.below(a.vocab))), counts.push_back(int32_t(random.below(4)));
            for (int j = 0; j < 5; j++) biased.push_back(int32_t(random.below(a.vocab))), bias.push_back(10.0f * random.normal());
        }
        a.seen_token = seen.data(), a.seen_count = counts.data(), a.seen = int64_t(seen.size());
        a.bias_token = biased.data(), a.bias_value = bias.data(), a.biases = int64_t(biased.size());
        const Drawn found = draw(p.k, a, logits), truth = draw(p.plain, a, logits);
        same("token", found.tokens, truth.tokens);
        same("logits", found.logits, truth.logits);
        p.note(found.tokens, truth.tokens); // probabilities go through the system's logarithm
        for (size_t j = 0; j < truth.logprobs.size(); j++) {
            const double x = found.logprobs[j], y = truth.logprobs[j];
            if (std::isfinite(y)) near("logprob", j, x, y, 16 * ROUNDING * (16.0 + std::fabs(y)));
            else if (std::isnan(x) != std::isnan(y) || (!std::isnan(y) && x != y)) fail("logprob is %g, not %g", x, y);
        }
        if (a.temperature > 0.0f || a.forced >= 0 || a.seen || i % 50 == 8 || i % 50 == 9) continue;
        const auto best = std::max_element(logits.begin(), logits.begin() + a.vocab); // the first one
        const int32_t greedy = *best > -INFINITY ? int32_t(best - logits.begin()) : -1;
        if (found.tokens[0] != greedy) fail("token %d is not the likeliest, %d", found.tokens[0], greedy);
    }
}

void test_all(Pair p) {
    const auto test = [&](const char *name, void (*run)(Pair)) {
        place = std::string(p.k.name) + " " + name;
        run(p);
    };
    if (p.k.activation_bytes > 1) { // other bits, and not for the digest, which has those of the build below it
        test("rounding", test_round_bf16), test("gemm_int", test_gemm_bf16), test("gate_block", test_gate_block);
    }
    const Pair rounded{p.k.activation_bytes > 1 ? *chosen("avx512") : p.k, p.plain, p.digest, p.plain_digest};
    const auto test_rounded = [&](const char *name, void (*run)(Pair)) {
        place = std::string(rounded.k.name) + " " + name;
        run(rounded);
    };
    test_rounded("quantise", test_quantise), test_rounded("widen", test_widen), test_rounded("gemm_int", test_gemm_int);
    test("gemm_float", test_gemm_float), test("embed", test_embed);
    test("rms_norm", test_rms_norm), test("rotate", test_rotate), test("silu_mul", test_silu_mul);
    test_rounded("gate_block", test_gate_block), test("attention", test_attention), test("sample", test_sample);
}

} // namespace

int main(int count, char **arguments) {
    const std::vector<std::string> names = available();
    std::string list;
    for (const auto &name : names) list += (list.empty() ? "" : " ") + name;
    const char *expected = nullptr, *file = nullptr;
    for (int i = 1; i < count; i += 2) {
        const std::string option = arguments[i];
        if (i + 1 == count || (option != "--expect" && option != "--digest")) {
            std::fprintf(stderr, "usage: kernels_test [--expect NAMES] [--digest FILE]\n");
            return 2;
        }
        (option == "--expect" ? expected : file) = arguments[i + 1];
    }
    if (expected && list != expected) {
        std::printf("FAILED: this machine runs '%s', not '%s'\n", list.c_str(), expected);
        return 1;
    }
    Digest plain, fused;
    for (size_t i = 0; i < names.size(); i++) {
        Digest digest, again;
        test_all({*chosen(names[i]), *kernels_portable(), digest, again});
        place = names[i];
        if (names[i] == "portable" && names.size() > 1 && again.hash != plain.hash) fail("gave other bits the second time");
        if (names[i] != "portable" && i > 0 && digest.hash != fused.hash) fail("gave other bits than %s", names[0].c_str());
        if (names[i] != "portable") fused = digest;
        plain = again;
        std::printf("%-8s %016llx  %d failures\n", names[i].c_str(), static_cast<unsigned long long>(digest.hash), failures);
    }
    if (file) {
        std::FILE *f = std::fopen(file, "w");
        if (!f) {
            std::perror(file);
            return 2;
        }
        std::fprintf(f, "portable %016llx\nfused %016llx\n", static_cast<unsigned long long>(plain.hash), static_cast<unsigned long long>(fused.hash));
        std::fclose(f);
    }
    return failures != 0;
}
