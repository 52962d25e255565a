// A model's operations, recorded once and replayed for every step without the interpreter.
#pragma once

#include <array>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "kernels.h"
#include "pool.h"

namespace tailrace {

// One step, as arrays of the caller; see backends.Batch for what each means.
struct Step {
    const int32_t *tokens, *starts, *context, *tables, *wanted;
    int64_t count, sequences, table_width, group_width, wanted_count; // a row of tables has group_width pages for each group
    const float *temperature, *top_p, *min_p, *presence, *frequency, *repetition, *bias_value;
    const int32_t *top_k, *position, *forced, *logprobs, *seen_start, *seen_token, *seen_count, *bias_start, *bias_token;
    const uint64_t *seed;
    int32_t *token;          // out [wanted]
    float *logprob;          // out [wanted]
    int32_t *top_token;      // out [wanted, top_width]
    float *top_logprob;
    int64_t top_width;
    float *logits;           // out [wanted, vocab] or null
    const int32_t *mask_row; // [wanted]: the row's line of `masks`, or -1; null where no row has one
    const uint32_t *masks;   // [lines, mask_words]: a bit for each token that may be drawn
    int64_t mask_words;
    int32_t *masks_ready;    // not 0 once `masks` may be read; see Program::release
    const int32_t *adapters; // [sequences]: the adapter of each, or -1; null where no sequence has one
};

// What an adapter adds to one product of the model's: scale * B (A x), with A [rank, inputs] and B [outputs, rank].
struct LowRank {
    Packed a, b; // of floats
    float scale = 0.0f;
};

// Memory that is zero from the start, and costs nothing where it is never touched: most steps need few of a buffer's rows.
template <class T> struct Untouched {
    using value_type = T;
    Untouched() = default;
    template <class U> Untouched(const Untouched<U> &) noexcept {}
    T *allocate(size_t n) {
        if (void *p = std::calloc(n, sizeof(T))) return static_cast<T *>(p);
        throw std::bad_alloc();
    }
    void deallocate(T *p, size_t) noexcept { std::free(p); }
    template <class U> void construct(U *) noexcept {} // zero it is
    template <class U> bool operator==(const Untouched<U> &) const noexcept { return true; }
};
template <class T> using Zeros = std::vector<T, Untouched<T>>; // sized once: growing copies

class Program {
  public:
    Program(const Kernels *kernels, int threads, int64_t max_tokens, int64_t max_sequences, int64_t vocab, int64_t vocab_limit);
    ~Program();

    // Buffers hold one row a token; widths are rounded up to 32 and the padding is zero.
    int buffer(int64_t width);
    int weight(const Packed &w);
    int vector(const float *data, int64_t count); // copied, padded with zeros to 32
    int rope(const float *cos, const float *sin, int64_t positions, int64_t half); // kept by the caller
    // KV of one layer, whose pages are those of a group's column of the block tables; returns its number.
    int64_t add_pool(int64_t pages, int kv_heads, int head_dim, Kept key, Kept value, int64_t group);

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
    // silu(x @ gate) * (x @ up), rounded; the products themselves are kept nowhere. Widths are multiples of 32.
    void gate(int x, const Segment &gate, const Segment &up, int out);
    void add(int a, int b, int64_t width, int out);
    int select(int x, int64_t width); // the buffer of the wanted rows only; what follows works on those
    void sample(int logits);

    // Adapters, by number: what each adds to the products with a weight, by the weight's number (null `a`: nothing). An
    // adapter may be set, or taken away, while no step runs. What it reads is kept by the caller.
    void set_adapter(int32_t number, std::vector<LowRank> parts);
    const Packed &weight_of(int weight) const { return weights_.at(size_t(weight)); }

    // Begins a step on the other threads and returns at once; `wait` joins them and returns when it is complete. The
    // step's arrays must live until then.
    void launch(const Step &step);
    // Says which step may follow the running one at once, without anybody asking: each of its tokens is then what the
    // running step draws in that row, put into `tokens`. Row r must not have drawn one of ends[end_start[r] ..). Whichever
    // thread completes the running step begins it, so it need not be one that has its core.
    void chain(const Step &next, int32_t *tokens, std::vector<int32_t> end_start, std::vector<int32_t> ends);
    // Says that a step's masks may be read. Until then the threads of the step that runs wait before they sample a row
    // that has one; so whoever launches a step with masks calls it, whatever happens, before `wait`.
    static void release(int32_t *masks_ready);
    // Whether steps may be chained from now on. Any thread may call it.
    void hold(bool on) { held_.store(on); }
    // Whether the chained step has been begun.
    bool wait();
    int threads() const { return threads_; }
    // For placing threads and memory (backends/cpu/nodes.py). See Pool::bind.
    int bind(int thread, const std::vector<int> &cpus) { return pool_.bind(thread, cpus); }
    struct Read {
        int thread;
        const uint8_t *data;
        size_t bytes;
    };
    std::vector<Read> reads() const; // what each thread's lanes hold of the weights, where few rows are computed
    const std::vector<std::pair<void *, size_t>> &pools() const { return mapped_; } // all KV
    const char *kernels() const { return k_->name; }
    int64_t kv_bytes() const { return kv_bytes_; }
    // One page of every layer of a group as one block: layer by layer, a page's keys and then its values, those in bf16
    // without their padding. Any thread may copy a page beside a running step, as long as no step that runs or is launched
    // meanwhile writes it (or, for `write_page`, reads it).
    int64_t page_bytes(int64_t group) const;
    void read_page(int64_t group, int64_t page, uint8_t *out) const;
    void write_page(int64_t group, int64_t page, const uint8_t *data);
    // Nanoseconds thread 0 spent in each kind of operation since the last call, when profiling is on.
    void profile(bool on) { profiling_ = on; }
    std::vector<std::pair<std::string, int64_t>> profiled();
    int64_t redone() const { return redone_.load(); }
    // Tasks that the threads have computed, ever: a step that goes on adds to it. Any thread may ask.
    uint64_t worked() const;

  private:
    enum class Code { Embed, Norm, Quantise, Linear, Gate, HeadNorm, Rotate, Store, Attend, Merge, Silu, Add, Select, Sample, Shrink };
    static constexpr int CODES = 15;
    struct Op {
        Code code;
        int x = -1, y = -1, out = -1, weight = -1;
        int64_t xc = 0, yc = 0, width = 0, pool = 0, window = 0;
        size_t plan = 0;
        int heads = 0, kv_heads = 0, head_dim = 0;
        float value = 0.0f;
        bool flag = false;
        std::vector<Segment> segments{};
        int64_t tiles = 0; // of the weights; of Gate: blocks of 32 columns
    };
    struct Buffer {
        Zeros<float> data;
        int64_t ld;
        Quantised quantised;
        Zeros<int8_t> q;
        Zeros<float> d, ds, ds16;
        Zeros<int32_t> s16;
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
        int64_t most_pieces = 0; // of one sequence
        bool split = false;
    };
    struct Rope {
        const float *cos, *sin;
        int64_t positions, half;
    };
    struct Cache {
        Kv kv;
        int kv_heads, head_dim;
        int64_t group;
    };
    // Rows in a row of a step, or of a slab of its wanted rows, that have the same adapter.
    struct Run {
        int64_t row, rows;
        int32_t adapter;
    };
    // One task of Shrink: some rows of one run, and sixteen of the adapter's ranks for one of the product's matrices.
    struct Shrink {
        int32_t adapter;
        uint32_t segment;
        int64_t tile, row, rows;
    };
    struct Tiles {
        const uint8_t *data = nullptr;
        size_t tile_bytes = 0;
    };
    // Operations that go together, and the rows they work on: one, or several that each handle a row by itself. Those
    // in `after` follow when it is complete, on the thread that completes it: too little work to be shared.
    struct Stage {
        const Op *first, *last;
        int64_t rows, first_wanted;
        uint32_t tasks = 0, lanes = 0;
        size_t after = 0, after_end = 0;
        int64_t ahead = -1; // the stage whose weights are read next, where a waiting thread may fetch them
        bool spread = false; // a task's tiles are of several runs of its lane's, see `spread`
        bool aside = false; // tasks are computed aside, and put in place by whoever is first to claim them
        bool closing = false; // the step is complete with it
        size_t group = 0; // its rows' runs: those of the step, or of a slab of wanted rows
        size_t shrinks = 0; // of Shrink: its first task
        bool adapts = false; // of a product: some of its rows have an adapter that adds to it
        std::array<Tiles, 3> low{}; // B of the first of those adapters, for each of its matrices, to be fetched
        TR_INLINE uint32_t begin(uint32_t lane) const { return uint32_t(uint64_t(tasks) * lane / lanes); }
        TR_INLINE uint32_t lane_of(uint32_t task) const { return uint32_t((uint64_t(task + 1) * lanes - 1) / tasks); }
    };
    struct After {
        const Op *op;
        int64_t rows, first_wanted;
    };
    // A stage's tasks are dealt out in runs, a lane for each thread, so that threads meet only where one has finished its
    // run and takes from another's. Counters hold the number of the step above the count: whoever comes first in a step
    // begins the count anew, and a thread that wakes up late can neither take a task of, nor be fooled by, a step that it
    // does not belong to.
    struct alignas(64) Lane {
        std::atomic<uint64_t> next{0}, done{0}; // tasks taken, and tasks complete
    };
    // A stage is complete when its lanes are, not when every thread has come by. Where tasks are computed aside, a thread
    // that the system has taken off its core does not delay even the task that it holds: others compute it again, and the
    // first to claim it (`claims`: the step in which it was last claimed) puts it in place.
    struct alignas(64) Progress {
        std::atomic<uint64_t> done{0}; // lanes that are complete, and one more for what follows them
        std::atomic<uint32_t> *claims = nullptr;
        Lane *lanes = nullptr;
    };
    // A product's activations.
    struct Input {
        const float *data;
        int64_t ld;
        Quantised rounded;
    };
    using Starts = std::array<const uint8_t *, 4>; // where runs of weights begin; null: there are fewer
    // What one task of a product covers.
    struct Share {
        int64_t from, to, row, rows;
    };

    float *row(int b, int64_t r) { return buffers_[size_t(b)].data.data() + r * buffers_[size_t(b)].ld; }
    void need_quantised(int b);
    Sequence sequence(int64_t s, int64_t group = 0) const;
    void plan_attention(AttentionPlan &plan);
    int64_t prepare(const Op &op, int64_t rows);
    bool work(const Stage &stage, Progress &p, int64_t task, uint32_t step, int thread);
    void work_rows(const Op &op, int64_t from, int64_t to, int64_t rows, int64_t first_wanted);
    bool work_linear(const Stage &stage, Progress &p, int64_t task, uint32_t step, int thread);
    bool work_gate(const Stage &stage, Progress &p, int64_t task, uint32_t step, int thread);
    void work_after(const Stage &stage);
    Quantised rounded(int buffer, int64_t rows) const;
    Input input(int buffer, int64_t rows) const;
    void product(const Packed &w, int64_t tile, int64_t tiles, const Input &x, const Share &share, const Output &out, int thread);
    int64_t chunk_tiles(const Op &op) const;
    Share share(const Op &op, int64_t rows, int64_t task) const;
    Starts first_weights(size_t stage, int thread) const;
    void fetch_low(const Stage &stage, size_t segment, int64_t tile) const;
    bool may_spread(const Op &op, int64_t rows) const;
    int64_t streams(const Op &op) const;
    std::pair<int64_t, int64_t> run_of(const Stage &stage, uint32_t lane, int64_t stream) const;
    int64_t spread(const Stage &stage, uint32_t task, int64_t *units) const;
    const uint8_t *tile_at(const Op &op, int64_t tile) const;
    bool work_spread(const Stage &stage, Progress &p, uint32_t task, uint32_t step, int thread);
    const LowRank *low_rank(int32_t adapter, const Segment &s) const;
    void plan_runs();
    size_t plan_shrinks(const Op &op, size_t group);
    void plan_adapters(Stage &stage) const;
    void work_shrink(const Stage &stage, int64_t task, int thread);
    void adapt(const Stage &stage, size_t segment, int64_t tile, int64_t row, int64_t rows, float *out, int64_t ld);
    void adapt_row(const Stage &stage, size_t segment, int64_t count, const int64_t *tiles, float *const *out);
    void shrink(int x, const std::vector<Segment> &segments);
    Output target(const Op &op, const Segment &s, int64_t tile, int64_t row);
    void work_attend(const Op &op, int64_t task, int thread);
    void work_merge(const Op &op, int64_t task);
    void work_sample(const Op &op, int64_t row, int64_t first_wanted, int thread);
    const uint32_t *mask(int64_t wanted) const;
    void touch_own(int thread);
    void replay(int thread, uint32_t step);
    void check(const Step &step) const;
    void begin(const Step &step);
    void end(uint32_t step);
    void follow(uint32_t step);
    bool goes_on() const;
    void plan_stages();
    void size_stages();
    bool take(const Stage &stage, Progress &p, uint32_t step, int thread, uint32_t &task);
    bool claim(Progress &p, int64_t task, uint32_t step);
    void complete(const Stage &stage, Progress &p, uint32_t task, uint32_t step);
    bool finish(const Stage &stage, Progress &p, uint32_t step, int thread, int64_t patience);
    AttentionArgs arguments(const Op &op);
    int64_t chunk_rows(int64_t rows) const;
    template <class Copy> void each_part(int64_t group, int64_t page, Copy copy) const;

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
    std::vector<std::vector<float>> scratch_, aside_; // of each thread
    size_t scratch_floats_ = 0, aside_floats_ = 0;
    std::unique_ptr<Progress[]> progress_;
    std::unique_ptr<std::atomic<uint32_t>[]> claims_;
    std::unique_ptr<Lane[]> lanes_;
    std::vector<int64_t> planned_;         // what the stages were planned for
    std::atomic<uint32_t> version_{0};     // of the stages; odd while they change
    std::vector<Stage> stages_;
    std::vector<After> after_;
    std::vector<Starts> ahead_; // of each stage that is a product, and each thread: where its lane begins to read
    std::atomic<size_t> stage_count_{0};
    std::atomic<uint32_t> number_{0}; // of the step
    std::atomic<int> parked_{0};
    struct alignas(64) Count {
        std::atomic<uint64_t> tasks{0};
    };
    std::unique_ptr<Count[]> worked_; // of each thread, which alone writes its own
    std::atomic<int64_t> redone_{0}; // tasks that were taken over from a thread that did not come back in time
    std::mutex turn_;                      // held while one step ends and another may begin
    bool flying_ = false, armed_ = false;
    uint32_t waited_ = 0, ended_ = 0, chained_ = 0; // numbers of the steps that is waited for, has ended, was chained last
    std::atomic<bool> held_{false};
    Step next_{};                          // where `armed_`
    int32_t *next_tokens_ = nullptr;
    std::vector<int32_t> end_start_, ends_;
    Step step_{};
    std::vector<int64_t> owner_, position_; // of each token: its sequence and position
    std::vector<AttentionPlan> plans_;
    std::vector<float> partial_;
    std::vector<std::vector<LowRank>> adapters_; // by number, and by the weight's
    int64_t adapters_version_ = 0;
    std::vector<Run> runs_;             // of the step, then of each slab
    std::vector<size_t> run_starts_{0}; // where those of each group begin; and the end
    std::vector<Shrink> shrinks_;
    std::vector<float> low_;            // A x of each row: for each of a product's matrices `low_rank_` numbers
    int64_t low_rank_ = 0, most_segments_ = 0;
    bool profiling_ = false;
    int64_t profile_[CODES] = {};
    Pool pool_; // last: its threads use all of the above
};

} // namespace tailrace
