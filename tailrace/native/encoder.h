// Text encoders: a model's operations, recorded once and replayed over whole texts that lie one after the other.
//
// Products are of 16-bit integers: a row of activations is rounded to 13 bits (with its sign) by a scale of its own, the
// weights of an output to 12 bits by one of its own. Sums of up to KBLOCK products fit into 32 bits, so they are exact; they
// are added as floats in the order of the blocks. (With AMX they are of bf16: encoder_amx.inl.) A row's bits depend on that row
// alone, and a text's on that text.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace tailrace {

constexpr int WIDE = 16;            // floats of one vector: widths are multiples of it
constexpr int TILE = 32;            // outputs of one tile of weights
constexpr int64_t KBLOCK = 256;     // inputs whose products are summed as integers: 4095 * 2047 * 256 < 2^31
constexpr int ATTEND_QUERIES = 8;   // most queries of a head that are computed together
constexpr float MOST_X = 4095.0f, MOST_W = 2047.0f;

enum class Bend : int { None, Gelu, Tanh };

// What becomes of a tile of sums [rows][TILE]: times the scales, plus bias and residual, bent.
struct Finish {
    int64_t columns;                // of the tile that are written: TILE or WIDE
    const float *scale, *bias;      // of the tile's outputs
    const float *row_scale;         // of each row
    const float *residual;          // at the tile's first column, or null
    int64_t residual_ld;
    float *out;
    int64_t ld;
    Bend bend;
};

// One build (portable, AVX2, AVX-512, AMX) of what takes the time. AVX2 and AVX-512 give the same bits.
struct EncoderKernels {
    const char *name;
    int64_t inputs; // matrices have a multiple of so many: the last are 0
    // The weights of a tile of outputs, rounded [TILE][k], as `product` wants them.
    void (*pack)(const int16_t *rounded, int64_t k, int16_t *tile);
    // Before and after a thread's part of a run.
    void (*enter)();
    void (*leave)();
    // Rounds a row; returns the scale that turns it back. k is a multiple of WIDE. q: the row's first block of KBLOCK; the
    // next ones are `step` further each.
    float (*round_row)(const float *x, int64_t k, int16_t *q, int64_t step);
    // One tile of outputs for all rows of a panel. `tile`: as packed; k: a multiple of `inputs`; x: blocks [rows][KBLOCK], as
    // rounded, each `step` after the one before, with room for a multiple of sixteen rows; sums: room for [rows][TILE].
    void (*product)(const int16_t *tile, int64_t k, const int16_t *x, int64_t step, int64_t rows, float *sums, const Finish &f);
    void (*norm)(const float *x, const float *weight, const float *bias, float eps, int64_t width, float *out);
    // One head of one text of n tokens; `scratch` has room for attend_scratch(n, head_dim).
    void (*attend)(const float *q, const float *k, const float *v, int64_t ld, int64_t n, int64_t head_dim, float scale, float *out, int64_t ldo,
                   float *scratch);
    void (*mean)(const float *x, int64_t ld, int64_t rows, int64_t width, float *out);
    void (*unit)(float *x, int64_t width);
};
inline int64_t up_to(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }
inline int64_t attend_scratch(int64_t n, int64_t head_dim) {
    return head_dim * up_to(n, WIDE) + n * up_to(head_dim, WIDE) + ATTEND_QUERIES * up_to(n, WIDE) + WIDE;
}

const EncoderKernels *encoder_portable();
const EncoderKernels *encoder_avx2(); // x86 only, like those that follow
const EncoderKernels *encoder_avx512();
const EncoderKernels *encoder_amx(); // where the compiler knows it
// The build for kernels of this name: those that the rest of the backend runs on.
const EncoderKernels *encoder_build(const std::string &kernels);

enum class Format : int { F32, F16, BF16 };
enum class Pooled : int { Mean, First, Last };

class Encoder {
  public:
    Encoder(const EncoderKernels *kernels, int threads, int64_t longest);
    ~Encoder();

    int buffer(int64_t width);                                            // a row a token, or a text once pooled
    int vector(const float *data, int64_t count);                         // copied
    int matrix(const float *data, int64_t n, int64_t k);                  // [n][k], rounded and packed
    int table(const uint8_t *data, Format format, int64_t rows, int64_t width); // kept by the caller

    void embed(int words, int positions, int kinds, int64_t first, int out); // kinds: or -1
    void linear(int x, int matrix, int bias, int residual, Bend bend, int out);
    void norm(int x, int weight, int bias, float eps, int out);
    void attention(int x, int64_t q, int64_t k, int64_t v, int64_t heads, int64_t head_dim, float scale, int out);
    void pool(int x, Pooled how, int out);
    void unit(int x);
    void finish(int x); // the result

    // Texts [starts[t], starts[t + 1]); writes [texts][width of the result].
    void run(const int32_t *tokens, const int32_t *kinds, const int32_t *starts, int64_t texts, float *out);

    int threads() const { return threads_; }
    int64_t longest() const { return longest_; }
    int64_t width() const { return ops_.empty() ? 0 : buffers_[size_t(ops_.back().x)].width; }
    const char *name() const { return k_->name; }
    int64_t bytes() const { return bytes_; } // of packed weights
    // Tasks that the threads have computed, ever: a run that goes on adds to it. Any thread may ask.
    uint64_t worked() const { return worked_.load(std::memory_order_relaxed); }

  private:
    enum class Code { Embed, Linear, Norm, Attention, Pool, Unit, Finish };
    struct Op {
        Code code;
        int x = -1, out = -1, a = -1, b = -1, c = -1;
        int64_t first = 0, q = 0, k = 0, v = 0, heads = 0, head_dim = 0;
        float value = 0.0f;
        Bend bend = Bend::None;
        Pooled pooled = Pooled::Mean;
    };
    struct Buffer {
        int64_t width;
        int written = -1;   // stage
        bool whole = false; // read in a later stage than it was written in
        bool panel() const { return !whole; }
    };
    struct Matrix {
        int64_t n, k, inputs; // k, and what it is padded to
        std::vector<int16_t> tiles;
        std::vector<float> scale;
    };
    struct Table {
        const uint8_t *data;
        Format format;
        int64_t rows, width;
    };
    // Operations that work on rows by themselves, a panel of rows at a time; or one that does not.
    struct Stage {
        size_t first, end;
        bool rows, pooled; // pooled: a row is a text
    };
    struct Pack { // texts that are computed together
        int64_t text, texts, token, tokens;
    };
    struct Space { // memory of a thread
        std::vector<std::vector<float>> whole, panel;
        std::vector<int16_t> rounded;
        std::vector<float> scales, sums, scratch;
    };
    struct Job {
        const int32_t *tokens, *kinds, *starts;
        float *out;
        std::vector<Pack> packs;
        bool team = false;
        std::atomic<int64_t> next{0};
        std::unique_ptr<std::atomic<int64_t>[]> taken, done; // of each pack's stages, where a team works on one
    };

    void add(Op op);
    void prepare(); // once all operations are known
    void room(Space &space, int64_t rows, int64_t longest) const;
    int64_t tasks(const Stage &stage, const Pack &pack) const;
    void work(const Stage &stage, const Pack &pack, int64_t task, Space &shared, Space &own);
    void work_rows(const Op &op, const Pack &pack, int64_t row, int64_t rows, Space &shared, Space &own);
    float *row(int buffer, int64_t at, Space &shared, Space &own) const;
    void join(int thread);
    void compute(int thread);
    void loop(int thread);

    const EncoderKernels *k_;
    const int threads_;
    const int64_t longest_;
    int64_t bytes_ = 0, most_k_ = 0, most_head_ = 0;
    std::vector<Buffer> buffers_;
    std::vector<std::vector<float>> vectors_;
    std::vector<Matrix> matrices_;
    std::vector<Table> tables_;
    std::vector<Op> ops_;
    std::vector<Stage> stages_;
    std::vector<Space> spaces_;
    Job job_;
    std::mutex lock_;
    std::condition_variable begun_, ended_;
    uint64_t epoch_ = 0;
    int active_ = 0;
    bool open_ = false, stop_ = false;
    std::atomic<uint64_t> worked_{0};
    std::vector<std::thread> workers_; // last: they use all of the above
};

} // namespace tailrace
