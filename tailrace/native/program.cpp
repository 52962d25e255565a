#include "program.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>

namespace tailrace {
namespace {

constexpr int SPIN = 2000;           // turns of waiting before a thread parks
constexpr int AHEAD = 512;           // cache lines of the next weights that a waiting thread fetches
constexpr int64_t FEW_ROWS = 4;      // rows up to which a step is bound by memory
constexpr int64_t SLAB = 64;         // wanted rows whose logits are held at once
constexpr int64_t QUERY_ROWS = 48;   // (query, head) rows of one attention task
constexpr int64_t PIECES_A_TASK = 2; // KV pieces of one task where a few sequences decode alone

int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

int64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

} // namespace

Program::Program(const Kernels *kernels, int threads, int64_t max_tokens, int64_t max_sequences, int64_t vocab, int64_t vocab_limit)
    : k_(kernels), threads_(std::max(1, threads)), max_tokens_(max_tokens), max_sequences_(max_sequences), slab_(std::min(SLAB, max_tokens)),
      vocab_(vocab), vocab_limit_(std::min(vocab, vocab_limit)), scratch_(size_t(threads_)), owner_(size_t(max_tokens)),
      position_(size_t(max_tokens)), pool_(threads_, [this](int thread) { replay(thread, number_.load()); }) {}

Program::~Program() {
    for (auto &[p, n] : mapped_) munmap(p, n);
}

int Program::buffer(int64_t width) {
    Buffer &b = buffers_.emplace_back();
    b.ld = round_up(width, QBLOCK);
    const int64_t rows = tail_ == 0 ? max_tokens_ : slab_;
    b.data.assign(size_t(rows * b.ld), 0.0f);
    return int(buffers_.size()) - 1;
}

void Program::need_quantised(int index) {
    Buffer &b = buffers_.at(size_t(index));
    if (b.quantised.q) return;
    const size_t rows = b.data.size() / size_t(b.ld), blocks = size_t(b.ld / QBLOCK);
    b.q.resize(b.data.size());
    b.d.resize(rows * blocks);
    b.ds.resize(rows * blocks);
    b.ds16.resize(rows * blocks * 2);
    b.s16.resize(rows * blocks * 2);
    b.quantised = {b.q.data(), b.d.data(), b.ds.data(), b.ds16.data(), b.s16.data(), b.ld};
}

int Program::weight(const Packed &w) {
    weights_.push_back(w);
    scratch_floats_ = std::max(scratch_floats_, size_t(w.k) * LANES / 4);
    return int(weights_.size()) - 1;
}

int Program::vector(const float *data, int64_t count) {
    auto &v = vectors_.emplace_back(size_t(round_up(count, QBLOCK)), 0.0f);
    std::copy(data, data + count, v.begin());
    return int(vectors_.size()) - 1;
}

int Program::rope(const float *cos, const float *sin, int64_t positions, int64_t half) {
    ropes_.push_back({cos, sin, positions, half});
    return int(ropes_.size()) - 1;
}

int64_t Program::add_pool(int64_t pages, int kv_heads, int head_dim) {
    const size_t head = size_t(pages) * size_t(kv_heads) * PAGE * sizeof(uint16_t);
    const size_t keys = head * size_t(head_dim), both = keys + head * size_t(padded_dim(head_dim));
    void *p = mmap(nullptr, both, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    mapped_.emplace_back(p, both);
    kv_bytes_ += int64_t(both);
    caches_.push_back({static_cast<uint16_t *>(p), static_cast<uint16_t *>(p) + keys / sizeof(uint16_t)});
    return int64_t(caches_.size()) - 1;
}

void Program::embed(int table, int out, int64_t width) {
    Op op{Code::Embed};
    op.weight = table, op.out = out, op.width = width;
    ops_.push_back(op);
}

void Program::norm(int x, int weight, float eps, int64_t width, int out, bool quantise) {
    Op op{Code::Norm};
    op.x = x, op.weight = weight, op.value = eps, op.width = width, op.out = out, op.flag = quantise;
    if (quantise) need_quantised(out);
    ops_.push_back(op);
}

void Program::quantise(int x) {
    Op op{Code::Quantise};
    op.x = x;
    need_quantised(x);
    ops_.push_back(op);
}

void Program::linear(int x, const std::vector<Segment> &segments, bool accumulate) {
    Op op{Code::Linear};
    op.x = x, op.segments = segments, op.flag = accumulate;
    for (const Segment &s : segments) {
        const Packed &w = weights_.at(size_t(s.weight));
        if (w.k > buffers_.at(size_t(x)).ld) throw std::invalid_argument("a weight is wider than its input");
        if (s.column + w.n > buffers_.at(size_t(s.out)).ld) throw std::invalid_argument("a weight is taller than its output");
        if (w.integer() && (!buffers_[size_t(x)].quantised.q || w.k != buffers_[size_t(x)].ld))
            throw std::invalid_argument("an integer weight needs rounded input of its own width");
        op.tiles += w.n / LANES;
    }
    ops_.push_back(op);
}

void Program::head_norm(int x, int64_t column, int weight, float eps, int heads, int head_dim) {
    Op op{Code::HeadNorm};
    op.x = x, op.xc = column, op.weight = weight, op.value = eps, op.heads = heads, op.head_dim = head_dim;
    ops_.push_back(op);
}

void Program::rotate(int x, int64_t column, int rope, int heads, int head_dim) {
    Op op{Code::Rotate};
    op.x = x, op.xc = column, op.weight = rope, op.heads = heads, op.head_dim = head_dim;
    ops_.push_back(op);
}

void Program::attention(int q, int64_t q_column, int k, int64_t k_column, int v, int64_t v_column, int out, int64_t pool, int heads,
                        int kv_heads, int head_dim, float scale, int64_t window) {
    if (head_dim > MAX_HEAD_DIM || heads % kv_heads || heads / kv_heads > MAX_ROWS) throw std::invalid_argument("attention shape has no kernel");
    Op store{Code::Store};
    store.x = k, store.xc = k_column, store.y = v, store.yc = v_column, store.pool = pool, store.kv_heads = kv_heads, store.head_dim = head_dim;
    ops_.push_back(store);
    Op op{Code::Attend};
    op.x = q, op.xc = q_column, op.out = out, op.pool = pool, op.heads = heads, op.kv_heads = kv_heads, op.head_dim = head_dim;
    op.value = scale, op.window = window;
    while (op.plan < plans_.size() && (plans_[op.plan].heads != heads || plans_[op.plan].kv_heads != kv_heads ||
                                       plans_[op.plan].head_dim != head_dim || plans_[op.plan].window != window))
        op.plan++;
    if (op.plan == plans_.size()) plans_.push_back({heads, kv_heads, head_dim, window, {}, {}, false});
    ops_.push_back(op);
    op.code = Code::Merge;
    ops_.push_back(op);
    const int64_t group = heads / kv_heads;
    scratch_floats_ = std::max(scratch_floats_, attention_scratch(std::max(group, QUERY_ROWS), head_dim));
}

void Program::silu_mul(int gate, int64_t gate_column, int up, int64_t up_column, int64_t width, int out, bool quantise) {
    Op op{Code::Silu};
    op.x = gate, op.xc = gate_column, op.y = up, op.yc = up_column, op.width = width, op.out = out, op.flag = quantise;
    if (quantise) need_quantised(out);
    ops_.push_back(op);
}

void Program::add(int a, int b, int64_t width, int out) {
    Op op{Code::Add};
    op.x = a, op.y = b, op.width = width, op.out = out;
    ops_.push_back(op);
}

int Program::select(int x, int64_t width) {
    Op op{Code::Select};
    op.x = x, op.width = width;
    if (tail_ == 0) tail_ = ops_.size();
    op.out = buffer(width); // after tail_ is set: buffers of wanted rows are small
    ops_.push_back(op);
    return op.out;
}

void Program::sample(int logits) {
    Op op{Code::Sample};
    op.x = logits;
    scratch_floats_ = std::max(scratch_floats_, size_t(buffers_.at(size_t(logits)).ld) * 3);
    ops_.push_back(op);
}

Sequence Program::sequence(int64_t s) const {
    return {step_.starts[s], step_.starts[s + 1] - step_.starts[s], step_.context[s], step_.tables + s * step_.table_width};
}

// Tasks of the step's attention: runs of queries; or, where a few sequences decode alone, runs of KV pieces, so that
// every thread has work. Both give the same bits.
void Program::plan_attention(AttentionPlan &plan) {
    plan.units.clear();
    plan.merge_offset.clear();
    const int64_t group = plan.heads / plan.kv_heads, per_task = std::max<int64_t>(1, QUERY_ROWS / group);
    plan.split = step_.count == step_.sequences && step_.sequences * plan.kv_heads < 3 * threads_;
    int64_t offset = 0;
    for (int64_t s = 0; s < step_.sequences; s++) {
        const Sequence q = sequence(s);
        const int64_t end = q.context + q.count, pieces = (end + SPLIT - 1) / SPLIT;
        const int64_t lo = plan.window > 0 && end > plan.window ? (end - plan.window) / SPLIT : 0;
        for (int h = 0; h < plan.kv_heads; h++) {
            if (plan.split) {
                plan.merge_offset.push_back(offset);
                for (int64_t p = lo; p < pieces; p += PIECES_A_TASK)
                    plan.units.push_back({int32_t(s), h, p, std::min(PIECES_A_TASK, pieces - p), offset});
                offset += group * pieces * (padded_dim(plan.head_dim) + 2);
            } else {
                for (int64_t f = 0; f < q.count; f += per_task) plan.units.push_back({int32_t(s), h, f, std::min(per_task, q.count - f), 0});
            }
        }
    }
    if (plan.split && partial_.size() < size_t(offset)) partial_.resize(size_t(offset));
    if (!plan.split) std::reverse(plan.units.begin(), plan.units.end()); // the longest contexts of a chunk first
}

int64_t Program::chunk_rows(int64_t rows) const { return std::max<int64_t>(1, std::min<int64_t>(8, rows / (threads_ * 4))); }

// Number of tasks of an operation over `rows` rows.
int64_t Program::prepare(const Op &op, int64_t rows) {
    switch (op.code) {
    case Code::Linear: {
        const int64_t chunk = std::max<int64_t>(1, std::min<int64_t>(16, op.tiles / (threads_ * 8)));
        return (op.tiles + chunk - 1) / chunk;
    }
    case Code::Attend: return int64_t(plans_[op.plan].units.size());
    case Code::Merge: return plans_[op.plan].split ? step_.sequences * op.kv_heads : 0;
    case Code::Sample: return rows;
    default: {
        const int64_t chunk = chunk_rows(rows);
        return (rows + chunk - 1) / chunk;
    }
    }
}

AttentionArgs Program::arguments(const Op &op) {
    const Cache &c = caches_[size_t(op.pool)];
    const Buffer &q = buffers_[size_t(op.x)], &out = buffers_[size_t(op.out)];
    return {q.data.data() + op.xc, q.ld, const_cast<float *>(out.data.data()), out.ld, op.heads, op.kv_heads, op.head_dim, op.value, op.window,
            c.keys, c.values};
}

void Program::work_linear(const Op &op, int64_t task, int64_t rows, int thread) {
    const int64_t chunk = std::max<int64_t>(1, std::min<int64_t>(16, op.tiles / (threads_ * 8)));
    const Buffer &x = buffers_[size_t(op.x)];
    const int64_t from = task * chunk, to = std::min(op.tiles, from + chunk);
    int64_t base = 0;
    for (const Segment &s : op.segments) {
        const Packed &w = weights_[size_t(s.weight)];
        const int64_t tiles = w.n / LANES;
        for (int64_t t = std::max(from, base); t < std::min(to, base + tiles); t++) {
            Buffer &o = buffers_[size_t(s.out)];
            const Output out{o.data.data() + s.column, o.ld, s.bias >= 0 ? vectors_[size_t(s.bias)].data() : nullptr, op.flag};
            if (w.integer())
                k_->gemm_int(w, t - base, x.quantised, 0, rows, out, reinterpret_cast<uint8_t *>(scratch_[size_t(thread)].data()));
            else k_->gemm_float(w, t - base, x.data.data(), x.ld, 0, rows, out);
        }
        base += tiles;
    }
}

void Program::work_attend(const Op &op, int64_t task, int thread) {
    const AttentionPlan &plan = plans_[op.plan];
    const Unit &u = plan.units[size_t(task)];
    const AttentionArgs a = arguments(op);
    const Sequence s = sequence(u.sequence);
    float *scratch = scratch_[size_t(thread)].data();
    if (!plan.split) {
        k_->attend(a, s, u.kv_head, u.first, u.count, scratch);
        return;
    }
    const int64_t pieces = (s.context + s.count + SPLIT - 1) / SPLIT;
    k_->attend_pieces(a, s, u.kv_head, 0, u.first, u.first + u.count, partial_.data() + u.partial, pieces * (padded_dim(op.head_dim) + 2), scratch);
}

void Program::work_merge(const Op &op, int64_t task) {
    const int64_t s = task / op.kv_heads, h = task % op.kv_heads, group = op.heads / op.kv_heads;
    const Sequence q = sequence(s);
    const int64_t end = q.context + 1, pieces = (end + SPLIT - 1) / SPLIT, stride = pieces * (padded_dim(op.head_dim) + 2);
    const int64_t lo = op.window > 0 && end > op.window ? (end - op.window) / SPLIT : 0;
    for (int64_t g = 0; g < group; g++)
        k_->merge_pieces(partial_.data() + plans_[op.plan].merge_offset[size_t(task)] + g * stride, lo, pieces, op.head_dim,
                         row(op.out, q.start) + (h * group + g) * op.head_dim);
}

void Program::work_sample(const Op &op, int64_t r, int64_t first_wanted, int thread) {
    const int64_t w = first_wanted + r;
    float *logits = row(op.x, r);
    if (step_.logits) std::memcpy(step_.logits + w * vocab_, logits, sizeof(float) * size_t(vocab_));
    const int32_t seen = step_.seen_start[w], bias = step_.bias_start[w];
    SampleArgs a{logits,
                 vocab_limit_,
                 buffers_[size_t(op.x)].ld,
                 step_.temperature[w],
                 step_.top_p[w],
                 step_.min_p[w],
                 step_.presence[w],
                 step_.frequency[w],
                 step_.repetition[w],
                 step_.top_k[w],
                 step_.position[w],
                 step_.forced[w],
                 step_.logprobs[w],
                 step_.seed[w],
                 step_.seen_token + seen,
                 step_.seen_count + seen,
                 step_.seen_start[w + 1] - seen,
                 step_.bias_token + bias,
                 step_.bias_value + bias,
                 step_.bias_start[w + 1] - bias,
                 step_.top_token + w * step_.top_width,
                 step_.top_logprob + w * step_.top_width};
    const Sampled s = k_->sample(a, scratch_[size_t(thread)].data());
    step_.token[w] = s.token;
    step_.logprob[w] = s.logprob;
}

void Program::work(const Stage &s, int64_t task, int thread) {
    switch (s.first->code) {
    case Code::Linear: return work_linear(*s.first, task, s.rows, thread);
    case Code::Attend: return work_attend(*s.first, task, thread);
    case Code::Merge: return work_merge(*s.first, task);
    case Code::Sample: return work_sample(*s.first, task, s.first_wanted, thread);
    default: break;
    }
    const int64_t chunk = chunk_rows(s.rows), from = task * chunk, to = std::min(s.rows, from + chunk);
    for (const Op *op = s.first; op <= s.last; op++) work_rows(*op, from, to, s.first_wanted);
}

// Rows [from, to) of an operation that handles each row by itself.
void Program::work_rows(const Op &op, int64_t from, int64_t to, int64_t first_wanted) {
    for (int64_t r = from; r < to; r++) {
        switch (op.code) {
        case Code::Embed: k_->embed(weights_[size_t(op.weight)], step_.tokens[r], row(op.out, r), op.width); break;
        case Code::Norm:
            k_->rms_norm(row(op.x, r), vectors_[size_t(op.weight)].data(), op.value, op.width, row(op.out, r));
            if (op.flag) k_->quantise(buffers_[size_t(op.out)].data.data(), r, buffers_[size_t(op.out)].quantised);
            break;
        case Code::Quantise: k_->quantise(buffers_[size_t(op.x)].data.data(), r, buffers_[size_t(op.x)].quantised); break;
        case Code::HeadNorm:
            for (int h = 0; h < op.heads; h++) {
                float *v = row(op.x, r) + op.xc + int64_t(h) * op.head_dim;
                k_->rms_norm(v, vectors_[size_t(op.weight)].data(), op.value, op.head_dim, v);
            }
            break;
        case Code::Rotate: {
            const Rope &rope = ropes_[size_t(op.weight)];
            const int64_t at = position_[size_t(r)] * rope.half;
            for (int h = 0; h < op.heads; h++)
                k_->rotate(row(op.x, r) + op.xc + int64_t(h) * op.head_dim, rope.cos + at, rope.sin + at, rope.half, op.head_dim);
            break;
        }
        case Code::Store: {
            const Cache &c = caches_[size_t(op.pool)];
            const int64_t position = position_[size_t(r)];
            const int32_t page = step_.tables[owner_[size_t(r)] * step_.table_width + position / PAGE];
            k_->store_kv(row(op.x, r) + op.xc, row(op.y, r) + op.yc, int64_t(page) * PAGE + position % PAGE, op.kv_heads, op.head_dim, c.keys,
                         c.values);
            break;
        }
        case Code::Silu:
            k_->silu_mul(row(op.x, r) + op.xc, row(op.y, r) + op.yc, round_up(op.width, LANES), row(op.out, r));
            if (op.flag) k_->quantise(buffers_[size_t(op.out)].data.data(), r, buffers_[size_t(op.out)].quantised);
            break;
        case Code::Add: {
            const float *a = row(op.x, r), *b = row(op.y, r);
            float *o = row(op.out, r);
            for (int64_t i = 0; i < op.width; i++) o[i] = a[i] + b[i];
            break;
        }
        case Code::Select: std::memcpy(row(op.out, r), row(op.x, step_.wanted[first_wanted + r]), sizeof(float) * size_t(op.width)); break;
        default: break;
        }
    }
}

// Takes the operation's next task, unless there is none or the step is over.
bool Program::take(Progress &p, uint32_t step, uint32_t &task) {
    uint64_t next = p.next.load(std::memory_order_acquire);
    do {
        task = static_cast<uint32_t>(next);
        if (next >> 32 != step || task >= p.tasks.load(std::memory_order_relaxed)) return false;
    } while (!p.next.compare_exchange_weak(next, next + 1, std::memory_order_acq_rel, std::memory_order_acquire));
    return true;
}

// Waits until the operation is complete; false where the step is over already. Where few rows are computed, memory is what
// takes the time, so whoever waits brings the next weights closer.
bool Program::finish(Progress &p, uint32_t step) {
    const uint64_t complete = uint64_t(step) << 32 | p.tasks.load(std::memory_order_relaxed);
    const uint8_t *ahead = p.ahead.load(std::memory_order_relaxed);
    uint64_t done = p.done.load(std::memory_order_acquire);
    for (int i = 0; i < SPIN && done != complete && done >> 32 == step; i++) {
        if (ahead && i < AHEAD) __builtin_prefetch(ahead + 64 * i, 0, 2);
        relax();
        done = p.done.load(std::memory_order_acquire);
    }
    if (done != complete && done >> 32 == step) {
        parked_.fetch_add(1);
        while ((done = p.done.load()) != complete && done >> 32 == step) p.done.wait(done);
        parked_.fetch_sub(1);
    }
    return done == complete;
}

// Every thread walks the same list: it takes tasks of an operation until none is left, and goes on when all are complete.
void Program::replay(int thread, uint32_t step) {
    const size_t count = stage_count_.load();
    for (size_t i = 0; i < count; i++) {
        Progress &p = progress_[i];
        const int64_t begin = profiling_ && thread == 0 ? now_ns() : 0;
        uint32_t task;
        while (take(p, step, task)) {
            work(stages_[i], task, thread);
            const uint64_t done = p.done.fetch_add(1) + 1;
            if (static_cast<uint32_t>(done) == p.tasks.load(std::memory_order_relaxed) && parked_.load() > 0) p.done.notify_all();
        }
        if (p.next.load(std::memory_order_acquire) >> 32 != step || !finish(p, step)) return;
        if (begin) profile_[int(stages_[i].first->code)] += now_ns() - begin;
    }
}

// Lists the operations of this step that have work, with fresh progress.
void Program::plan_stages() {
    if (!progress_) {
        const size_t slabs = size_t((max_tokens_ + slab_ - 1) / slab_), most = tail_ + slabs * (ops_.size() - tail_);
        progress_ = std::make_unique<Progress[]>(most);
        stages_.resize(most); // once: a late thread may still look at it
    }
    const uint64_t number = uint64_t(number_.load() + 1) << 32;
    size_t count = 0;
    const auto by_row = [](const Op &op) {
        return op.code != Code::Linear && op.code != Code::Attend && op.code != Code::Merge && op.code != Code::Sample;
    };
    const auto add = [&](const Op &op, int64_t rows, int64_t first_wanted) {
        const int64_t tasks = prepare(op, rows);
        if (tasks == 0) return;
        if (count > 0 && by_row(op) && stages_[count - 1].last + 1 == &op && by_row(*stages_[count - 1].last) &&
            (op.code != Code::Select || stages_[count - 1].first->code == Code::Select)) {
            stages_[count - 1].last = &op;
            return;
        }
        stages_[count] = {&op, &op, rows, first_wanted};
        Progress &p = progress_[count++];
        p.tasks.store(static_cast<uint32_t>(tasks));
        p.done.store(number);
        p.next.store(number);
    };
    for (size_t i = 0; i < tail_; i++) add(ops_[i], step_.count, 0);
    for (int64_t w = 0; w < step_.wanted_count; w += slab_)
        for (size_t i = tail_; i < ops_.size(); i++) add(ops_[i], std::min(slab_, step_.wanted_count - w), w);
    // What a thread that waits at a stage may fetch: the next matrix's first tiles. Nothing where many rows share them.
    const uint8_t *ahead = nullptr;
    for (size_t i = count; i-- > 0;) {
        progress_[i].ahead.store(step_.count <= FEW_ROWS ? ahead : nullptr, std::memory_order_relaxed);
        if (stages_[i].first->code == Code::Linear) ahead = weights_[size_t(stages_[i].first->segments[0].weight)].data;
    }
    stage_count_.store(count);
}

void Program::run(const Step &step) {
    if (step.count < 1 || step.count > max_tokens_) throw std::invalid_argument("a step must have 1 to max_tokens tokens");
    step_ = step;
    for (int64_t s = 0; s < step.sequences; s++)
        for (int64_t t = step.starts[s]; t < step.starts[s + 1]; t++) {
            owner_[size_t(t)] = s;
            position_[size_t(t)] = step.context[s] + t - step.starts[s];
        }
    for (const Rope &r : ropes_)
        for (int64_t s = 0; s < step.sequences; s++)
            if (step.context[s] + step.starts[s + 1] - step.starts[s] > r.positions) throw std::invalid_argument("a position is past the served context");
    for (auto &s : scratch_)
        if (s.size() < scratch_floats_ + LANES) s.resize(scratch_floats_ + LANES);
    for (AttentionPlan &plan : plans_) plan_attention(plan);
    plan_stages();
    const uint32_t number = number_.fetch_add(1) + 1;
    pool_.start();
    replay(0, number);
}

std::vector<std::pair<std::string, int64_t>> Program::profiled() {
    static const char *names[CODES] = {"embed", "norm", "quantise", "linear", "head_norm", "rotate", "store", "attend", "merge", "silu", "add", "select", "sample"};
    std::vector<std::pair<std::string, int64_t>> out;
    for (int i = 0; i < CODES; i++) {
        out.emplace_back(names[i], profile_[i]);
        profile_[i] = 0;
    }
    return out;
}

} // namespace tailrace
