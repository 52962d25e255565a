// A model's operations, recorded once and replayed for every step without the interpreter.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "kernels.h"
#include "pool.h"

namespace tailrace {

// One step, as arrays of the caller; see backends.Batch for what each means.
struct Step {
    const int32_t *tokens, *starts, *context, *tables, *wanted;
    int64_t count, sequences, table_width, wanted_count;
    const float *temperature, *top_p, *min_p, *presence, *frequency, *repetition, *bias_value;
    const int32_t *top_k, *position, *forced, *logprobs, *seen_start, *seen_token, *seen_count, *bias_start, *bias_token;
    const uint64_t *seed;
    int32_t *token;          // out [wanted]
    float *logprob;          // out [wanted]
    int32_t *top_token;      // out [wanted, top_width]
    float *top_logprob;
    int64_t top_width;
    float *logits;           // out [wanted, vocab] or null
};

class Program {
  public:
    Program(const Kernels *kernels, int threads, int64_t max_tokens, int64_t max_sequences, int64_t vocab, int64_t vocab_limit);
    ~Program();

    // Buffers hold one row a token; widths are rounded up to 32 and the padding is zero.
    int buffer(int64_t width);
    int weight(const Packed &w);
    int vector(const float *data, int64_t count); // copied, padded with zeros to 32
    int rope(const float *cos, const float *sin, int64_t positions, int64_t half); // kept by the caller
    int64_t add_pool(int64_t pages, int kv_heads, int head_dim); // KV of one layer; returns its number

    struct Segment {
        int weight, out, bias; // bias: a vector or -1
        int64_t column;
    };
    void embed(int table, int out, int64_t width);
    void norm(int x, int weight, float eps, int64_t width, int out, bool quantise);
    void quantise(int x);
    void linear(int x, const std::vector<Segment> &segments, bool accumulate);
    void head_norm(int x, int64_t column, int weight, float eps, int heads, int head_dim);
    void rotate(int x, int64_t column, int rope, int heads, int head_dim);
    void attention(int q, int64_t q_column, int k, int64_t k_column, int v, int64_t v_column, int out, int64_t pool, int heads, int kv_heads,
                   int head_dim, float scale, int64_t window);
    void silu_mul(int gate, int64_t gate_column, int up, int64_t up_column, int64_t width, int out, bool quantise);
    void add(int a, int b, int64_t width, int out);
    int select(int x, int64_t width); // the buffer of the wanted rows only; what follows works on those
    void sample(int logits);

    void run(const Step &step);
    int threads() const { return threads_; }
    const char *kernels() const { return k_->name; }
    int64_t kv_bytes() const { return kv_bytes_; }
    // Nanoseconds thread 0 spent in each kind of operation since the last call, when profiling is on.
    void profile(bool on) { profiling_ = on; }
    std::vector<std::pair<std::string, int64_t>> profiled();

  private:
    enum class Code { Embed, Norm, Quantise, Linear, HeadNorm, Rotate, Store, Attend, Merge, Silu, Add, Select, Sample };
    static constexpr int CODES = 13;
    struct Op {
        Code code;
        int x = -1, y = -1, out = -1, weight = -1;
        int64_t xc = 0, yc = 0, width = 0, pool = 0, window = 0;
        size_t plan = 0;
        int heads = 0, kv_heads = 0, head_dim = 0;
        float value = 0.0f;
        bool flag = false;
        std::vector<Segment> segments{};
        int64_t tiles = 0;
    };
    struct Buffer {
        std::vector<float> data;
        int64_t ld;
        Quantised quantised;
        std::vector<int8_t> q;
        std::vector<float> d, ds, ds16;
        std::vector<int32_t> s16;
    };
    struct Unit {
        int32_t sequence, kv_head;
        int64_t first, count; // queries, or pieces [first, first + count) when split
        int64_t partial;
    };
    // How a step's attention is cut into tasks; layers of the same shape share one.
    struct AttentionPlan {
        int heads, kv_heads, head_dim;
        int64_t window;
        std::vector<Unit> units;
        std::vector<int64_t> merge_offset;
        bool split = false;
    };
    struct Rope {
        const float *cos, *sin;
        int64_t positions, half;
    };
    struct Cache {
        uint16_t *keys, *values;
    };
    // Progress of one operation within one step. `next` holds the step's number above the next task's, so that a thread
    // that wakes up late can neither take a task of, nor be fooled by, a step that it does not belong to. An operation is
    // complete when its tasks are, not when every thread has come by: a thread that the system has taken off its core
    // delays at most the task that it holds.
    struct alignas(64) Progress {
        std::atomic<uint64_t> next{0};
        std::atomic<uint32_t> tasks{0};
        std::atomic<const uint8_t *> ahead{nullptr}; // weights that will be read next, where a waiting thread may fetch them
        alignas(64) std::atomic<uint64_t> done{0}; // likewise, above the number of tasks that are complete
    };
    // Operations that go together, and the rows they work on: one, or several that each handle a row by itself.
    struct Stage {
        const Op *first, *last;
        int64_t rows, first_wanted;
    };

    float *row(int b, int64_t r) { return buffers_[size_t(b)].data.data() + r * buffers_[size_t(b)].ld; }
    void need_quantised(int b);
    Sequence sequence(int64_t s) const;
    void plan_attention(AttentionPlan &plan);
    int64_t prepare(const Op &op, int64_t rows);
    void work(const Stage &stage, int64_t task, int thread);
    void work_rows(const Op &op, int64_t from, int64_t to, int64_t first_wanted);
    void work_linear(const Op &op, int64_t task, int64_t rows, int thread);
    void work_attend(const Op &op, int64_t task, int thread);
    void work_merge(const Op &op, int64_t task);
    void work_sample(const Op &op, int64_t row, int64_t first_wanted, int thread);
    void replay(int thread, uint32_t step);
    void plan_stages();
    bool take(Progress &p, uint32_t step, uint32_t &task);
    bool finish(Progress &p, uint32_t step);
    AttentionArgs arguments(const Op &op);
    int64_t chunk_rows(int64_t rows) const;

    const Kernels *k_;
    const int threads_;
    int64_t max_tokens_, max_sequences_, slab_, vocab_, vocab_limit_;
    std::deque<Buffer> buffers_;
    std::vector<Packed> weights_;
    std::vector<std::vector<float>> vectors_;
    std::vector<Rope> ropes_;
    std::vector<Cache> caches_;
    std::vector<std::pair<void *, size_t>> mapped_;
    int64_t kv_bytes_ = 0;
    std::vector<Op> ops_;
    size_t tail_ = 0; // first operation on wanted rows
    std::vector<std::vector<float>> scratch_;
    size_t scratch_floats_ = 0;
    std::unique_ptr<Progress[]> progress_;
    size_t progress_size_ = 0;
    std::vector<Stage> stages_;
    std::atomic<size_t> stage_count_{0};
    std::atomic<uint32_t> number_{0}; // of the step
    std::atomic<int> parked_{0};
    Step step_{};
    std::vector<int64_t> owner_, position_; // of each token: its sequence and position
    std::vector<AttentionPlan> plans_;
    std::vector<float> partial_;
    bool profiling_ = false;
    int64_t profile_[CODES] = {};
    Pool pool_; // last: its threads use all of the above
};

} // namespace tailrace
