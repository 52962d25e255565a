// What a kernel build (portable, AVX2, AVX-512, NEON) offers to the program that replays a model's operations.
#pragma once

#include <cstddef>
#include <cstdint>

// Shared inline code must never be emitted out of line: a copy compiled for AVX-512 could be linked into the others.
#define TR_INLINE __attribute__((always_inline)) inline

namespace tailrace {

constexpr int LANES = 16;      // outputs of one weight tile; positions of one KV page
constexpr int PAGE = 16;       // tokens of one KV page
constexpr int SPLIT = 64;      // KV positions that one softmax piece covers; pieces begin at multiples of it
constexpr int MAX_ROWS = 64;   // (query, head) rows of one attention task
constexpr int MAX_HEAD_DIM = 512;
constexpr int QBLOCK = 32;     // activations that share one int8 scale

// Head size in whole lanes.
TR_INLINE int padded_dim(int head_dim) { return (head_dim + LANES - 1) / LANES * LANES; }

enum class Kind : int { Int, F32, BF16, F16 };
enum class Min : int { None, Stored, Eight }; // Eight: the zero point of Q4_0, -8 scales

// How quants lie in a tile of sixteen outputs. A tile is a row of spans, each a header of scales and the payload of its
// inputs, 32 at a time:
//
// - Half: a span is 32 inputs. Its header is sixteen float16 scales and, where minima are stored, sixteen minima.
// - Super: a span is a super-block of 256. Its header is sixteen float16 factors of the scales and, where minima are
//   stored, sixteen of the minima, negated; then for each block sixteen int8 scales and sixteen int8 minima, which those
//   factors multiply. Of two-bit quants a scale and its minimum are the low and high half of one byte.
//
// Payload: 32 inputs are eight groups of four inputs x sixteen outputs, 64 bytes each with one quant in a byte. Quants of
// fewer bits are kept in planes of 4, 2 and 1 bits, as the number of bits is written in binary, the lowest bits in the
// widest plane. Group g is in nibble g / 4 of vector g % 4 of the first, in pair g % 4 of vector g / 4 of the second, in
// bit g of the third. So it is unpacked by a shift and a mask for each plane.
struct Quants {
    int bits;   // 2 to 6: unsigned, of which `zero` is subtracted; 8: signed
    int zero;
    int block;  // inputs that share a scale: 32 or 16
    Min min;
    bool super;

    TR_INLINE constexpr bool is(const Quants &o) const {
        return bits == o.bits && zero == o.zero && block == o.block && min == o.min && super == o.super;
    }
    TR_INLINE constexpr int span() const { return super ? 256 : 32; }
    TR_INLINE constexpr int factors() const { return (min == Min::Stored ? 2 : 1) * LANES * 2; } // bytes of float16
    TR_INLINE constexpr int scales() const { return (min == Min::Stored && bits != 2 ? 2 : 1) * LANES; } // bytes of a block of a super-block
    TR_INLINE constexpr int header() const { return factors() + (super ? span() / block * scales() : 0); }
    TR_INLINE constexpr int payload() const { return bits * 64; } // bytes of 32 inputs
    TR_INLINE constexpr int span_bytes() const { return header() + span() / 32 * payload(); }
};

// By the names of the file formats that are packed so.
constexpr Quants Q4_0{4, 0, 32, Min::Eight, false}, Q4_1{4, 0, 32, Min::Stored, false}, Q5_0{5, 16, 32, Min::None, false},
    Q5_1{5, 0, 32, Min::Stored, false}, Q8_0{8, 0, 32, Min::None, false}, Q2_K{2, 0, 16, Min::Stored, true},
    Q3_K{3, 4, 16, Min::None, true}, Q4_K{4, 0, 32, Min::Stored, true}, Q5_K{5, 0, 32, Min::Stored, true},
    Q6_K{6, 32, 16, Min::None, true};

// A weight matrix [n, k] in tiles of sixteen outputs: of quants, or [k][16] floats. `n` and `k` are the padded sizes.
struct Packed {
    Kind kind = Kind::F32;
    Quants quants{};        // of Kind::Int
    int64_t n = 0, k = 0;
    const uint8_t *data = nullptr;

    TR_INLINE bool integer() const { return kind == Kind::Int; }
    // The kind of multiply-add that it is made for, by the name of its `Peak`.
    const char *arithmetic() const;
    TR_INLINE size_t tile_bytes() const {
        if (integer()) return size_t(k / quants.span()) * size_t(quants.span_bytes());
        return size_t(k) * LANES * (kind == Kind::F32 ? 4 : 2);
    }
    TR_INLINE size_t bytes() const { return size_t(n / LANES) * tile_bytes(); }
};

// Activations [rows, k], rounded in blocks of 32, to what the products of the build take. Most: int8, value = q * d. `ds` is d *
// sum(q) of the block, `ds16` of each half; `s16` the integer sums of each half. With AMX: `q` is bf16, and there is nothing else.
// Blocks lie in the order of `at`: row by row; or, where there are many rows, the same block of sixteen rows together, as matrix
// instructions take them.
struct Quantised {
    int8_t *q = nullptr;
    float *d = nullptr, *ds = nullptr, *ds16 = nullptr;
    int32_t *s16 = nullptr;
    int64_t k = 0;     // multiple of 32
    int64_t group = 1; // rows whose blocks lie together: 1 or 16
    TR_INLINE int64_t blocks() const { return k / QBLOCK; }
    // Of block b of a row; that of block b + 1 is `group` further.
    TR_INLINE int64_t at(int64_t row, int64_t b) const { return (row / group * blocks() + b) * group + row % group; }
};
constexpr int64_t GROUPED_ROWS = 12; // rows from which blocks lie in groups: from there on matrix instructions win
TR_INLINE int64_t group_of(int64_t rows) { return rows >= GROUPED_ROWS ? LANES : 1; }

struct Output {
    float *data;          // [rows, ld], at the first row and the first tile's first column
    int64_t ld;
    const float *bias;    // sixteen for each tile, or null
    bool accumulate;      // add to what is there (residual)
    int64_t next = LANES; // floats from one tile's first column to the next one's
    TR_INLINE Output of(int64_t tile) const { return {data + tile * next, ld, bias ? bias + tile * LANES : nullptr, accumulate, next}; }
};

// How the keys or the values of a layer are kept: as they are in 16 bits, or rounded to a number of bits with a scale for
// each token and head. A block is what one head has in one page:
//
// - BF16: keys [head_dim / 2][16 positions][2 dimensions], values [8][padded_dim][2 positions]: pairs, as matrix
//   instructions take them.
// - F16: keys [head_dim][16 positions], values [16 positions][padded_dim].
// - I8: sixteen float16 scales, one a position; then int8 in the order of F16. x = q * scale, q in -127 .. 127. Keys are
//   rotated (see `spin`), values are not.
// - I4: of a rotated vector, numbers of four bits in groups of GROUP dimensions, x = q * scale + minimum. For
//   each group sixteen float16 scales and sixteen float16 minima; then keys [head_dim / 2][16 positions], the even
//   dimension in the low half of a byte and the odd one in the high half; values [16 positions][padded_pairs / 2],
//   dimension 32 i + j in the low half of byte 16 i + j and 32 i + 16 + j in its high half. No byte has numbers of two
//   positions, since threads write positions side by side.
enum class Kept : int { BF16, F16, I8, I4 };

// Whether what is kept is a rotated vector: queries are rotated where keys are, and outputs turned back where values are.
TR_INLINE bool keys_rotated(Kept kept) { return kept == Kept::I8 || kept == Kept::I4; }
TR_INLINE bool values_rotated(Kept kept) { return kept == Kept::I4; }

constexpr int GROUP = 2 * LANES; // dimensions that share a scale and a minimum of I4
TR_INLINE int groups_of(int head_dim) { return (head_dim + GROUP - 1) / GROUP; }

// Head size in whole pairs of lanes.
TR_INLINE int padded_pairs(int head_dim) { return groups_of(head_dim) * GROUP; }

// Bytes of scales (and minima) before a block's numbers.
TR_INLINE int64_t kept_header(Kept kept, int head_dim) {
    return kept == Kept::I8 ? 2 * PAGE : kept == Kept::I4 ? 4 * PAGE * groups_of(head_dim) : 0;
}

// Bytes of a block.
TR_INLINE int64_t key_block(Kept kept, int head_dim) {
    return kept_header(kept, head_dim) + int64_t(PAGE) * (kept == Kept::I4 ? head_dim / 2 : kept == Kept::I8 ? head_dim : 2 * head_dim);
}
TR_INLINE int64_t value_block(Kept kept, int head_dim) {
    const int row = kept == Kept::I4 ? padded_pairs(head_dim) / 2 : padded_dim(head_dim) * (kept == Kept::I8 ? 1 : 2);
    return kept_header(kept, head_dim) + int64_t(PAGE) * row;
}

// The KV pool of one layer: blocks [kv_heads][pages], so that pages in a row are one run of memory for each head.
struct Kv {
    Kept key, value;
    uint8_t *keys, *values;
    int64_t pages;
    TR_INLINE uint8_t *key_at(int64_t page, int kv_head, int64_t block) const { return keys + (kv_head * pages + page) * block; }
    TR_INLINE uint8_t *value_at(int64_t page, int kv_head, int64_t block) const { return values + (kv_head * pages + page) * block; }
};

// What a thread that attends will most likely read next: a sequence's pages [page, end) of one head.
struct Ahead {
    const int32_t *table = nullptr; // null: nothing that is known
    int kv_head = 0;
    int64_t page = 0, end = 0;
};

// One attention layer over one step's batch.
struct AttentionArgs {
    const float *q;      // [tokens, ldq]
    int64_t ldq;
    float *out;          // [tokens, ldo]
    int64_t ldo;
    int heads, kv_heads, head_dim;
    float scale;
    int64_t window;      // 0: full
    Kv kv;               // head_dim is even
    Ahead ahead{};       // a hint
};
struct Sequence {
    int64_t start, count;    // flat tokens
    int64_t context;         // position of the first
    const int32_t *table;
};

struct SampleArgs {
    float *logits;           // [ld], the row; penalties and bias are applied in place
    int64_t vocab;           // ids at or past it are never drawn
    int64_t padded;          // floats in the row (multiple of 16)
    float temperature, top_p, min_p, presence, frequency, repetition;
    int32_t top_k, position, forced, logprobs;
    uint64_t seed;
    const int32_t *seen_token, *seen_count;
    int64_t seen;
    const int32_t *bias_token;
    const float *bias_value;
    int64_t biases;
    int32_t *top_token;      // [logprobs]
    float *top_logprob;
};
struct Sampled {
    int32_t token;
    float logprob;
};

// The tokens that min-p, top-k and top-p keep, likeliest first (lower ids first among equals); e[i] is exp((z - max) / T),
// so its largest value is 1. Writes their ids and returns how many; `ids` has room for the vocabulary.
int64_t select_kept(const float *e, int64_t vocab, float min_p, int32_t top_k, float top_p, int32_t *ids);
// The `count` likeliest of raw logits into token and logit, padded with -1 and -infinity.
void select_top(const float *logits, int64_t vocab, int32_t count, int32_t *token, float *logit);

// A kind of multiply-add: what it is called, which instructions do it in this build, and a loop of nothing else.
struct Peak {
    const char *name, *how;
    int64_t per_round;       // multiply-adds
    float (*run)(const uint8_t *data, int64_t rounds); // data: PEAK_DATA bytes; the result keeps the work alive
};
constexpr size_t PEAK_DATA = 4096;

struct Kernels {
    const char *name;
    void (*enter)();         // before and...
    void (*leave)();         // ...after a thread's part of a step, if it has other work as well
    int activation_bytes;    // of a rounded one: 1 int8, 2 bf16
    int64_t panel;           // rows of one task of a product: their activations stay in the core's cache
    // `tiles` tiles from `tile` on. scratch: `product_scratch` floats
    void (*gemm_int)(const Packed &w, int64_t tile, int64_t tiles, const Quantised &x, int64_t row0, int64_t rows, const Output &out,
                     uint8_t *scratch);
    // One row and `count` tiles of matrices like w, `side` at a time (at most `streams` and one): out[i] gets the sixteen of tile i.
    void (*row_int)(const Packed &w, int64_t count, int64_t side, const uint8_t *const *tiles, const Quantised &x, int64_t row, float *const *out);
    int streams; // runs of tiles that one row is best multiplied with side by side; 1: one after the other
    void (*gemm_float)(const Packed &w, int64_t tile, const float *x, int64_t ldx, int64_t row0, int64_t rows, const Output &out);
    // The same of one row and `count` tiles of a matrix in bf16, with few inputs: adds tile i's sixteen to out[i].
    void (*add_low)(int64_t k, int64_t count, const uint8_t *const *tiles, const float *x, float *const *out);
    void (*embed)(const Packed &table, int64_t token, float *out, int64_t width);
    void (*quantise)(const float *x, int64_t row, const Quantised &out);
    void (*widen)(const Quantised &x, int64_t row, float *out); // a row as floats again
    // What a product of one tile is turned into where it was computed aside: [rows][16] to its place, as `Output` says.
    void (*place)(const float *from, int64_t rows, const Output &out);
    // silu(gate) * up for a block of 32 columns, rounded: two tiles [2][rows][16] of each, rows [row0, row0 + rows) of out.
    void (*gate_block)(const float *gate, const float *up, int64_t rows, int64_t row0, int64_t block, const Quantised &out);
    void (*rms_norm)(const float *x, const float *weight, float eps, int64_t width, float *out);
    void (*rotate)(float *x, const float *cos, const float *sin, int64_t half, int64_t head_dim);
    void (*store_kv)(const float *k, const float *v, int64_t slot, bool last, int kv_heads, int head_dim, const Kv &kv);
    void (*silu_mul)(const float *gate, const float *up, int64_t width, float *out);
    // Rows are (query, head of the group) of one KV head; queries [first, first + count) of the sequence.
    void (*attend)(const AttentionArgs &a, const Sequence &s, int kv_head, int64_t first, int64_t count, float *scratch);
    // One query, KV pieces [from, to): writes (max, sum, head_dim outputs) for each head of the group and each piece.
    void (*attend_pieces)(const AttentionArgs &a, const Sequence &s, int kv_head, int64_t query, int64_t from, int64_t to, float *partial,
                          int64_t stride, float *scratch);
    // `value`: how the layer's values are kept.
    void (*merge_pieces)(const float *partial, int64_t from, int64_t to, int head_dim, Kept value, float *out);
    Sampled (*sample)(const SampleArgs &a, float *scratch); // scratch: 3 * padded floats
    const Peak *peaks;       // see ceilings.h
    int peak_count;
    // A multiple of 256 bytes, `times` over, fetched so many bytes before they are needed; `ahead` < 0: four runs of them side by side.
    int32_t (*read_all)(const uint8_t *data, int64_t bytes, int64_t times, int64_t ahead);
};

// Floats of scratch for a product with `k` inputs: the quants of one tile, a byte each; or the sums of so many rows and two tiles.
TR_INLINE size_t product_scratch(int64_t k, int64_t rows) { return size_t(k * LANES / 4 > rows * 2 * LANES ? k * LANES / 4 : rows * 2 * LANES); }

// Floats of scratch for `attend` with this many rows (queries x heads of a group).
TR_INLINE size_t attention_scratch(int64_t rows, int head_dim) {
    const size_t dim = size_t(padded_dim(head_dim));
    return 2 * SPLIT * dim + size_t(rows) * 3 * dim + 2 * 6 * SPLIT;
}

const Kernels *kernels_portable();
const Kernels *kernels_avx2();    // x86 only
const Kernels *kernels_avx512();
const Kernels *kernels_avx512bf16();
const Kernels *kernels_amx();
const Kernels *kernels_neon();    // AArch64 only
const Kernels *kernels_dotprod();

} // namespace tailrace
