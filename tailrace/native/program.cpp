#include "program.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <limits>
#include <stdexcept>

namespace tailrace {
namespace {

constexpr int SPIN = 2000;           // turns of waiting before a thread parks
constexpr int AHEAD = 512;           // cache lines of the next weights that a waiting thread fetches
constexpr int64_t FEW_ROWS = 4;      // rows up to which a step is bound by memory
constexpr int64_t ASIDE_ROWS = 32;   // rows up to which products are computed aside
constexpr int64_t MOST_TILES = 16;   // tiles of one task of a product
constexpr int64_t MOST_SPREAD = 4 * (MOST_TILES + 4); // tiles of one task that is spread, where runs are uneven
constexpr int64_t PATIENCE = 15000;   // nanoseconds, besides two tasks' time, before a waiting thread takes over a task
constexpr int64_t SLAB = 64;         // wanted rows whose logits are held at once
constexpr int64_t QUERY_ROWS = 48;   // (query, head) rows of one attention task
constexpr int64_t LITTLE_PIECES = 16; // KV pieces, over all sequences, that one thread merges while the others wait
constexpr int64_t PIECES_A_TASK = 2; // KV pieces of one task where a few sequences decode alone
constexpr int64_t SHRINK_ROWS = 32;  // rows of one task that multiplies with an adapter's A
constexpr int64_t WIDENED_ROWS = 6;  // rows of rounded activations that it turns into floats at a time

int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

int64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

} // namespace

Program::Program(const Kernels *kernels, int threads, int64_t max_tokens, int64_t max_sequences, int64_t vocab, int64_t vocab_limit)
    : k_(kernels), threads_(std::max(1, threads)), max_tokens_(max_tokens), max_sequences_(max_sequences), slab_(std::min(SLAB, max_tokens)),
      vocab_(vocab), vocab_limit_(std::min(vocab, vocab_limit)), scratch_(size_t(threads_)), aside_(size_t(threads_)),
      worked_(std::make_unique<Count[]>(size_t(threads_))), owner_(size_t(max_tokens)), position_(size_t(max_tokens)),
      pool_(threads_, [this](int thread) { replay(thread, number_.load()); }) {}

Program::~Program() {
    for (auto &[p, n] : mapped_) munmap(p, n);
}

int Program::buffer(int64_t width) {
    Buffer &b = buffers_.emplace_back();
    b.ld = round_up(width, QBLOCK);
    const int64_t rows = tail_ == 0 ? max_tokens_ : slab_;
    b.data.resize(size_t(rows * b.ld));
    return int(buffers_.size()) - 1;
}

void Program::need_quantised(int index) {
    Buffer &b = buffers_.at(size_t(index));
    if (b.quantised.q) return;
    const int64_t rows = int64_t(b.data.size()) / b.ld, blocks = b.ld / QBLOCK * round_up(rows, group_of(rows));
    b.q.resize(size_t(blocks * QBLOCK * k_->activation_bytes));
    if (k_->activation_bytes == 1) {
        b.d.resize(size_t(blocks));
        b.ds.resize(size_t(blocks));
        b.ds16.resize(size_t(blocks * 2));
        b.s16.resize(size_t(blocks * 2));
    }
    b.quantised = {b.q.data(), b.d.data(), b.ds.data(), b.ds16.data(), b.s16.data(), b.ld, 1};
}

int Program::weight(const Packed &w) {
    weights_.push_back(w);
    scratch_floats_ = std::max(scratch_floats_, product_scratch(w.k, k_->panel));
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

int64_t Program::add_pool(int64_t pages, int kv_heads, int head_dim, Kept key, Kept value, int64_t group) {
    const size_t blocks = size_t(pages) * size_t(kv_heads), keys = blocks * size_t(key_block(key, head_dim));
    const size_t both = keys + blocks * size_t(value_block(value, head_dim));
    void *p = mmap(nullptr, both, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    mapped_.emplace_back(p, both);
    kv_bytes_ += int64_t(both);
    caches_.push_back({{key, value, static_cast<uint8_t *>(p), static_cast<uint8_t *>(p) + keys, pages}, kv_heads, head_dim, group});
    return int64_t(caches_.size()) - 1;
}

int64_t Program::page_bytes(int64_t group) const {
    int64_t bytes = 0;
    for (const Cache &c : caches_) {
        if (c.group != group) continue;
        const int64_t value = c.kv.value == Kept::BF16 ? int64_t(sizeof(uint16_t)) * PAGE * c.head_dim : value_block(c.kv.value, c.head_dim);
        bytes += c.kv_heads * (key_block(c.kv.key, c.head_dim) + value);
    }
    return bytes;
}

// Calls copy(where it lies, bytes) for each part of a group's page that lies in one piece, in the order of the block.
template <class Copy> void Program::each_part(int64_t group, int64_t page, Copy copy) const {
    for (const Cache &c : caches_) {
        if (c.group != group) continue;
        const int64_t keys = key_block(c.kv.key, c.head_dim), block = value_block(c.kv.value, c.head_dim), padded = padded_dim(c.head_dim);
        for (int h = 0; h < c.kv_heads; h++) copy(c.kv.key_at(page, h, keys), size_t(keys));
        for (int h = 0; h < c.kv_heads; h++) {
            uint8_t *values = c.kv.value_at(page, h, block);
            if (c.kv.value != Kept::BF16 || padded == c.head_dim) {
                copy(values, size_t(block));
                continue;
            }
            for (int64_t pair = 0; pair < PAGE / 2; pair++) copy(values + pair * 4 * padded, sizeof(uint16_t) * 2 * size_t(c.head_dim));
        }
    }
}

void Program::read_page(int64_t group, int64_t page, uint8_t *out) const {
    each_part(group, page, [&](const uint8_t *part, size_t bytes) {
        std::memcpy(out, part, bytes);
        out += bytes;
    });
}

void Program::write_page(int64_t group, int64_t page, const uint8_t *data) {
    each_part(group, page, [&](uint8_t *part, size_t bytes) {
        std::memcpy(part, data, bytes);
        data += bytes;
    });
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

// Before a product: what the adapters of its rows make of its input.
void Program::shrink(int x, const std::vector<Segment> &segments) {
    Op op{Code::Shrink};
    op.x = x, op.segments = segments;
    most_segments_ = std::max(most_segments_, int64_t(segments.size()));
    for (const Segment &s : segments) scratch_floats_ = std::max(scratch_floats_, size_t(weights_.at(size_t(s.weight)).k * WIDENED_ROWS));
    ops_.push_back(op);
}

void Program::linear(int x, const std::vector<Segment> &segments, bool accumulate) {
    shrink(x, segments);
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
    if (head_dim > MAX_HEAD_DIM || head_dim % 2 || heads % kv_heads || heads / kv_heads > MAX_ROWS) throw std::invalid_argument("attention shape has no kernel");
    Op store{Code::Store};
    store.x = k, store.xc = k_column, store.y = v, store.yc = v_column, store.pool = pool, store.kv_heads = kv_heads, store.head_dim = head_dim;
    ops_.push_back(store);
    Op op{Code::Attend};
    op.x = q, op.xc = q_column, op.out = out, op.pool = pool, op.heads = heads, op.kv_heads = kv_heads, op.head_dim = head_dim;
    op.value = scale, op.window = window;
    while (op.plan < plans_.size() && (plans_[op.plan].heads != heads || plans_[op.plan].kv_heads != kv_heads ||
                                       plans_[op.plan].head_dim != head_dim || plans_[op.plan].window != window))
        op.plan++;
    if (op.plan == plans_.size()) plans_.push_back({heads, kv_heads, head_dim, window, {}, {}, 0, false});
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

void Program::gate(int x, const Segment &gate, const Segment &up, int out) {
    Op op{Code::Gate};
    op.x = x, op.out = out, op.segments = {gate, up};
    need_quantised(out);
    const Packed &g = weights_.at(size_t(gate.weight)), &u = weights_.at(size_t(up.weight));
    if (g.n != u.n || g.n % QBLOCK || g.n != buffers_.at(size_t(out)).ld) throw std::invalid_argument("gate and up must have the output's width");
    for (const Packed *w : {&g, &u})
        if (w->k > buffers_.at(size_t(x)).ld || (w->integer() && (!buffers_[size_t(x)].quantised.q || w->k != buffers_[size_t(x)].ld)))
            throw std::invalid_argument("gate and up must have the input's width, rounded where they are integer");
    op.tiles = g.n / QBLOCK;
    shrink(x, op.segments);
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
    scratch_floats_ = std::max(scratch_floats_, size_t(buffers_.at(size_t(logits)).ld) * 4); // of the kernel, and a masked row
    ops_.push_back(op);
}

Sequence Program::sequence(int64_t s, int64_t group) const {
    return {step_.starts[s], step_.starts[s + 1] - step_.starts[s], step_.context[s], step_.tables + s * step_.table_width + group * step_.group_width};
}

// Tasks of the step's attention: runs of queries; or, where a few sequences decode alone, runs of KV pieces, so that
// every thread has work. Both give the same bits.
void Program::plan_attention(AttentionPlan &plan) {
    plan.units.clear();
    plan.merge_offset.clear();
    plan.most_pieces = 0;
    const int64_t group = plan.heads / plan.kv_heads, per_task = std::max<int64_t>(1, QUERY_ROWS / group);
    plan.split = step_.count == step_.sequences && step_.sequences * plan.kv_heads < 3 * threads_;
    int64_t offset = 0;
    for (int64_t s = 0; s < step_.sequences; s++) {
        const Sequence q = sequence(s);
        const int64_t end = q.context + q.count, pieces = (end + SPLIT - 1) / SPLIT;
        const int64_t lo = plan.window > 0 && end > plan.window ? (end - plan.window) / SPLIT : 0;
        plan.most_pieces = std::max(plan.most_pieces, pieces - lo);
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

int64_t Program::chunk_tiles(const Op &op) const {
    const int64_t most = op.code == Code::Gate ? MOST_TILES / 4 : MOST_TILES;
    return std::max<int64_t>(1, std::min<int64_t>(most, op.tiles / (threads_ * 8)));
}

// Number of tasks of an operation over `rows` rows.
int64_t Program::prepare(const Op &op, int64_t rows) {
    switch (op.code) {
    case Code::Linear:
    case Code::Gate: {
        const int64_t chunk = chunk_tiles(op);
        return (op.tiles + chunk - 1) / chunk * ((rows + k_->panel - 1) / k_->panel);
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

// Panel by panel, so that all threads work on the same rows.
Program::Share Program::share(const Op &op, int64_t rows, int64_t task) const {
    const int64_t chunk = chunk_tiles(op), chunks = (op.tiles + chunk - 1) / chunk;
    const int64_t from = task % chunks * chunk, row = task / chunks * k_->panel;
    return {from, std::min(op.tiles, from + chunk), row, std::min(k_->panel, rows - row)};
}

AttentionArgs Program::arguments(const Op &op) {
    const Cache &c = caches_[size_t(op.pool)];
    const Buffer &q = buffers_[size_t(op.x)], &out = buffers_[size_t(op.out)];
    return {q.data.data() + op.xc, q.ld, const_cast<float *>(out.data.data()), out.ld, op.heads, op.kv_heads, op.head_dim, op.value, op.window,
            c.kv};
}

// A buffer's rounded form in a stage over so many rows: whoever writes it and whoever reads it has the same rows.
Quantised Program::rounded(int buffer, int64_t rows) const {
    Quantised q = buffers_[size_t(buffer)].quantised;
    q.group = group_of(rows);
    return q;
}

void Program::product(const Packed &w, int64_t tile, int64_t tiles, const Input &x, const Share &share, const Output &out, int thread) {
    auto *scratch = reinterpret_cast<uint8_t *>(scratch_[size_t(thread)].data());
    if (w.integer()) return k_->gemm_int(w, tile, tiles, x.rounded, share.row, share.rows, out, scratch);
    for (int64_t t = 0; t < tiles; t++) k_->gemm_float(w, tile + t, x.data, x.ld, share.row, share.rows, out.of(t));
}

Output Program::target(const Op &op, const Segment &s, int64_t tile, int64_t at) {
    const float *bias = s.bias >= 0 ? vectors_[size_t(s.bias)].data() + tile * LANES : nullptr;
    return {row(s.out, at) + s.column + tile * LANES, buffers_[size_t(s.out)].ld, bias, op.flag};
}

// Where a tile of an operation's matrices lies, counted through them.
const uint8_t *Program::tile_at(const Op &op, int64_t tile) const {
    for (const Segment &s : op.segments) {
        const Packed &w = weights_[size_t(s.weight)];
        if (tile < w.n / LANES) return w.data + size_t(tile) * w.tile_bytes();
        tile -= w.n / LANES;
    }
    return nullptr;
}

// Whether the tasks of a product are spread (see `spread`): one row, and matrices that one kernel can read side by side.
bool Program::may_spread(const Op &op, int64_t rows) const {
    const Packed &first = weights_[size_t(op.segments[0].weight)];
    if (rows != 1 || k_->streams < 2 || !first.integer()) return false;
    return std::all_of(op.segments.begin(), op.segments.end(), [&](const Segment &s) {
        const Packed &w = weights_[size_t(s.weight)];
        return w.integer() && w.quants.is(first.quants) && w.k == first.k;
    });
}

// Runs of units (tiles, or blocks of a gate's) that are read side by side. A gate has two matrices, so each of them fewer.
int64_t Program::streams(const Op &op) const { return op.code == Code::Gate ? (k_->streams + 1) / 2 : k_->streams; }

// A lane's units in one of its runs.
std::pair<int64_t, int64_t> Program::run_of(const Stage &stage, uint32_t lane, int64_t stream) const {
    const Op &op = *stage.first;
    const int64_t chunk = chunk_tiles(op), from = stage.begin(lane) * chunk, to = std::min(op.tiles, stage.begin(lane + 1) * chunk);
    const int64_t count = to - from, runs = streams(op);
    return {from + count * stream / runs, from + count * (stream + 1) / runs};
}

// The units of a task, of each of its lane's runs in turn: memory gives more where several runs are read side by side, and
// task by task they go on where they were.
int64_t Program::spread(const Stage &stage, uint32_t task, int64_t *units) const {
    const uint32_t lane = stage.lane_of(task), begin = stage.begin(lane), tasks = stage.begin(lane + 1) - begin, number = task - begin;
    const int64_t runs = streams(*stage.first);
    int64_t from[4], to[4], count = 0, longest = 0;
    for (int64_t s = 0; s < runs; s++) {
        const auto [first, end] = run_of(stage, lane, s);
        from[s] = first + (end - first) * number / tasks;
        to[s] = first + (end - first) * (number + 1) / tasks;
        longest = std::max(longest, to[s] - from[s]);
    }
    for (int64_t i = 0; i < longest; i++)
        for (int64_t s = 0; s < runs; s++)
            if (from[s] + i < to[s]) units[count++] = from[s] + i;
    return count;
}

// Where the thread's lane of a product begins to read.
Program::Starts Program::first_weights(size_t i, int thread) const {
    const Stage &stage = stages_[i];
    const Op &op = *stage.first;
    const uint32_t lane = uint32_t(thread) % stage.lanes;
    if (op.code == Code::Shrink) {
        const Shrink &u = shrinks_[stage.shrinks + stage.begin(lane)];
        const Packed &a = low_rank(u.adapter, op.segments[u.segment])->a;
        return {a.data + size_t(u.tile) * a.tile_bytes()};
    }
    const int64_t tiles = op.code == Code::Gate ? 2 : 1;
    if (!stage.spread) return {tile_at(op, share(op, stage.rows, stage.begin(lane)).from * tiles)};
    Starts starts{};
    size_t count = 0;
    for (int64_t s = 0; s < streams(op); s++) {
        const int64_t unit = run_of(stage, lane, s).first;
        for (const Segment &matrix : op.segments) {
            if (op.code == Code::Gate) starts[count++] = weights_[size_t(matrix.weight)].data + size_t(unit * 2) * weights_[size_t(matrix.weight)].tile_bytes();
            else if (&matrix == &op.segments[0]) starts[count++] = tile_at(op, unit);
        }
    }
    return starts;
}

std::vector<Program::Read> Program::reads() const {
    std::vector<Read> out;
    for (const Op &op : ops_) {
        if (op.code != Code::Linear && op.code != Code::Gate) continue;
        const int64_t chunk = chunk_tiles(op), tasks = (op.tiles + chunk - 1) / chunk;
        const auto lanes = uint32_t(std::min<int64_t>(tasks, threads_));
        const Stage stage{&op, &op, 1, 0, uint32_t(tasks), lanes};
        for (uint32_t lane = 0; lane < lanes; lane++) {
            int64_t from = stage.begin(lane) * chunk, to = std::min(op.tiles, stage.begin(lane + 1) * chunk);
            if (op.code == Code::Gate) from *= 2, to *= 2; // both matrices have these tiles
            for (const Segment &s : op.segments) {
                const Packed &w = weights_[size_t(s.weight)];
                const int64_t tiles = w.n / LANES, begin = std::clamp<int64_t>(from, 0, tiles), end = std::clamp<int64_t>(to, 0, tiles);
                if (begin < end) out.push_back({int(lane), w.data + size_t(begin) * w.tile_bytes(), size_t(end - begin) * w.tile_bytes()});
                if (op.code == Code::Linear) from -= tiles, to -= tiles;
            }
        }
    }
    return out;
}

Program::Input Program::input(int buffer, int64_t rows) const {
    const Buffer &b = buffers_[size_t(buffer)];
    return {b.data.data(), b.ld, rounded(buffer, rows)};
}

// False where another thread has put the task's result in place.
bool Program::work_linear(const Stage &stage, Progress &p, int64_t task, uint32_t step, int thread) {
    const Op &op = *stage.first;
    const Input x = input(op.x, stage.rows);
    const Share share = this->share(op, stage.rows, task);
    float *aside = aside_[size_t(thread)].data();
    const auto adapted = [&](const Segment &s, int64_t tile, int64_t tiles) {
        for (int64_t t = tile; t < tile + tiles; t++) {
            const Output to = target(op, s, t, share.row);
            adapt(stage, size_t(&s - op.segments.data()), t, share.row, share.rows, to.data, to.ld);
        }
    };
    const auto each_run = [&](auto &&call) { // of tiles, one for each matrix
        int64_t base = 0;
        for (const Segment &s : op.segments) {
            const Packed &w = weights_[size_t(s.weight)];
            const int64_t tiles = w.n / LANES, from = std::max(share.from, base), to = std::min(share.to, base + tiles);
            if (from < to) call(s, w, from - base, to - from, aside + (from - share.from) * share.rows * LANES);
            base += tiles;
        }
    };
    if (stage.adapts)
        each_run([&](const Segment &s, const Packed &, int64_t tile, int64_t tiles, float *) {
            for (int64_t t = 0; t < tiles; t++) fetch_low(stage, size_t(&s - op.segments.data()), tile + t);
        });
    if (!stage.aside) {
        each_run([&](const Segment &s, const Packed &w, int64_t tile, int64_t tiles, float *) {
            product(w, tile, tiles, x, share, target(op, s, tile, share.row), thread);
            adapted(s, tile, tiles);
        });
        return true;
    }
    const int64_t apart = share.rows * LANES;
    each_run([&](const Segment &, const Packed &w, int64_t tile, int64_t tiles, float *out) {
        product(w, tile, tiles, x, share, {out, LANES, nullptr, false, apart}, thread);
    });
    if (!claim(p, task, step)) return false;
    each_run([&](const Segment &s, const Packed &, int64_t tile, int64_t tiles, float *from) {
        for (int64_t t = 0; t < tiles; t++) k_->place(from + t * apart, share.rows, target(op, s, tile + t, share.row));
        adapted(s, tile, tiles);
    });
    return true;
}

bool Program::work_gate(const Stage &stage, Progress &p, int64_t task, uint32_t step, int thread) {
    const Op &op = *stage.first;
    const Input x = input(op.x, stage.rows);
    const Quantised out = rounded(op.out, stage.rows);
    const Share share = this->share(op, stage.rows, task);
    const int64_t tile_floats = share.rows * LANES;
    float *aside = aside_[size_t(thread)].data();
    const auto tiles_of = [&](int64_t i, int64_t tile, int64_t tiles, float *at) { // i: gate or up
        const Segment &s = op.segments[size_t(i)];
        const float *bias = s.bias >= 0 ? vectors_[size_t(s.bias)].data() + tile * LANES : nullptr;
        product(weights_[size_t(s.weight)], tile, tiles, x, share, {at, LANES, bias, false, tile_floats}, thread);
    };
    for (int64_t i = 0; stage.adapts && i < 4 * (share.to - share.from); i++) fetch_low(stage, size_t(i % 2), share.from * 2 + i / 2);
    if (!stage.aside) {
        for (int64_t block = share.from; block < share.to; block++) {
            for (int64_t i = 0; i < 2; i++) tiles_of(i, block * 2, 2, aside + 2 * i * tile_floats);
            for (int64_t i = 0; i < 4; i++) adapt(stage, size_t(i / 2), block * 2 + i % 2, share.row, share.rows, aside + i * tile_floats, LANES);
            k_->gate_block(aside, aside + 2 * tile_floats, share.rows, share.row, block, out);
        }
        return true;
    }
    // each matrix in one run, since memory likes that
    const int64_t tiles = (share.to - share.from) * 2;
    float *up = aside + tiles * tile_floats;
    const Packed &next = weights_[size_t(op.segments[1].weight)];
    for (size_t line = 0; line < 64; line++) __builtin_prefetch(next.data + size_t(share.from) * 2 * next.tile_bytes() + line * 64, 0, 2);
    for (int64_t i = 0; i < 2; i++) tiles_of(i, share.from * 2, tiles, aside + tiles * i * tile_floats);
    if (!claim(p, task, step)) return false;
    for (int64_t i = 0; i < 2 * tiles; i++)
        adapt(stage, size_t(i / tiles), share.from * 2 + i % tiles, share.row, share.rows, aside + i * tile_floats, LANES);
    for (int64_t block = share.from; block < share.to; block++, aside += 2 * tile_floats, up += 2 * tile_floats)
        k_->gate_block(aside, up, share.rows, share.row, block, out);
    return true;
}

// One row's product whose task's tiles are spread. False where another thread has put the result in place.
bool Program::work_spread(const Stage &stage, Progress &p, uint32_t task, uint32_t step, int thread) {
    const Op &op = *stage.first;
    const Input x = input(op.x, 1);
    float *aside = aside_[size_t(thread)].data(), *out[MOST_SPREAD];
    const uint8_t *tiles[MOST_SPREAD];
    int64_t units[MOST_SPREAD];
    const int64_t count = spread(stage, task, units);
    const Packed &w = weights_[size_t(op.segments[0].weight)];
    if (op.code == Code::Gate) {
        const int64_t runs = streams(op), side = 2 * runs;
        int64_t n = 0;
        for (int64_t i = 0; stage.adapts && i < 4 * count; i++) fetch_low(stage, size_t(i % 2), units[i / 4] * 2 + i / 2 % 2);
        for (int64_t i = 0; i < count; i += runs) // the gates' and the ups' tiles of as many blocks as there are runs
            for (int64_t half = 0; half < 2; half++)
                for (int64_t m = 0; m < 2; m++)
                    for (int64_t b = i; b < std::min(i + runs, count); b++) {
                        tiles[n] = weights_[size_t(op.segments[size_t(m)].weight)].data + size_t(units[b] * 2 + half) * w.tile_bytes();
                        out[n++] = aside + (b * 4 + m * 2 + half) * LANES;
                    }
        k_->row_int(w, n, side, tiles, x.rounded, 0, out);
        if (!claim(p, task, step)) return false;
        const Quantised to = rounded(op.out, 1);
        for (int64_t b = 0; b < count; b++) {
            float *block = aside + b * 4 * LANES;
            for (int64_t m = 0; m < 2; m++)
                if (const int bias = op.segments[size_t(m)].bias; bias >= 0)
                    for (int64_t i = 0; i < 2 * LANES; i++) block[m * 2 * LANES + i] += vectors_[size_t(bias)][size_t(units[b] * 2 * LANES + i)];
        }
        for (int64_t m = 0; stage.adapts && m < 2; m++) {
            int64_t numbers[MOST_SPREAD];
            for (int64_t i = 0; i < 2 * count; i++) numbers[i] = units[i / 2] * 2 + i % 2, out[i] = aside + (i / 2 * 4 + m * 2 + i % 2) * LANES;
            adapt_row(stage, size_t(m), 2 * count, numbers, out);
        }
        for (int64_t b = 0; b < count; b++) {
            float *block = aside + b * 4 * LANES;
            k_->gate_block(block, block + 2 * LANES, 1, 0, units[b], to);
        }
        return true;
    }
    for (int64_t i = 0; i < count; i++) tiles[i] = tile_at(op, units[i]), out[i] = aside + i * LANES;
    const auto each_tile = [&](auto &&call) {
        for (int64_t i = 0; i < count; i++) {
            int64_t tile = units[i];
            size_t segment = 0;
            for (int64_t n; tile >= (n = weights_[size_t(op.segments[segment].weight)].n / LANES); segment++) tile -= n;
            call(i, segment, tile);
        }
    };
    if (stage.adapts) each_tile([&](int64_t, size_t segment, int64_t tile) { fetch_low(stage, segment, tile); });
    k_->row_int(w, count, streams(op), tiles, x.rounded, 0, out);
    if (!claim(p, task, step)) return false;
    each_tile([&](int64_t i, size_t segment, int64_t tile) { k_->place(out[i], 1, target(op, op.segments[segment], tile, 0)); });
    for (size_t s = 0; stage.adapts && s < op.segments.size(); s++) {
        int64_t numbers[MOST_SPREAD], n = 0;
        each_tile([&](int64_t, size_t segment, int64_t tile) {
            if (segment == s) numbers[n] = tile, out[n++] = target(op, op.segments[s], tile, 0).data;
        });
        adapt_row(stage, s, n, numbers, out);
    }
    return true;
}

void Program::set_adapter(int32_t number, std::vector<LowRank> parts) {
    if (flying_) throw std::logic_error("adapters change between steps");
    if (number < 0) throw std::invalid_argument("an adapter's number is negative");
    if (size_t(number) >= adapters_.size()) adapters_.resize(size_t(number) + 1);
    for (const LowRank &part : parts)
        if (part.a.data) low_rank_ = std::max(low_rank_, part.a.n);
    low_.resize(size_t(max_tokens_ * most_segments_ * low_rank_));
    adapters_[size_t(number)] = std::move(parts);
    adapters_version_++;
}

// What an adapter adds to the product with a matrix; null: nothing.
const LowRank *Program::low_rank(int32_t adapter, const Segment &s) const {
    const std::vector<LowRank> &parts = adapters_[size_t(adapter)];
    return size_t(s.weight) < parts.size() && parts[size_t(s.weight)].a.data ? &parts[size_t(s.weight)] : nullptr;
}

// Which rows of the step, and of each slab of its wanted rows, have which adapter.
void Program::plan_runs() {
    runs_.clear();
    run_starts_.assign(1, 0);
    if (!step_.adapters) return;
    const auto add = [&](int64_t at, int64_t rows, int32_t adapter) {
        Run *last = runs_.size() > run_starts_.back() ? &runs_.back() : nullptr;
        if (last && last->adapter == adapter && last->row + last->rows == at) last->rows += rows;
        else if (adapter >= 0) runs_.push_back({at, rows, adapter});
    };
    for (int64_t s = 0; s < step_.sequences; s++) add(step_.starts[s], step_.starts[s + 1] - step_.starts[s], step_.adapters[s]);
    run_starts_.push_back(runs_.size());
    for (int64_t w = 0; w < step_.wanted_count; w++) {
        if (w > 0 && w % slab_ == 0) run_starts_.push_back(runs_.size());
        add(w % slab_, 1, step_.adapters[owner_[size_t(step_.wanted[w])]]);
    }
    run_starts_.push_back(runs_.size());
}

// The tasks of Shrink over a group's rows; returns how many they are.
size_t Program::plan_shrinks(const Op &op, size_t group) {
    const size_t before = shrinks_.size();
    for (size_t i = run_starts_[group]; i < run_starts_[group + 1]; i++)
        for (uint32_t s = 0; s < op.segments.size(); s++)
            if (const LowRank *part = low_rank(runs_[i].adapter, op.segments[s]))
                for (int64_t r = 0; r < runs_[i].rows; r += SHRINK_ROWS)
                    for (int64_t tile = 0; tile < part->a.n / LANES; tile++)
                        shrinks_.push_back({runs_[i].adapter, s, tile, runs_[i].row + r, std::min(SHRINK_ROWS, runs_[i].rows - r)});
    return shrinks_.size() - before;
}

// What a product's tasks fetch before they compute: of the first adapter, since few steps have several.
void Program::plan_adapters(Stage &stage) const {
    for (size_t i = run_starts_[stage.group]; i < run_starts_[stage.group + 1]; i++)
        for (size_t s = 0; s < stage.first->segments.size(); s++)
            if (const LowRank *part = low_rank(runs_[i].adapter, stage.first->segments[s])) {
                stage.adapts = true;
                if (s < stage.low.size() && !stage.low[s].data) stage.low[s] = {part->b.data, part->b.tile_bytes()};
            }
}

// Sixteen numbers of scale * A x for some rows, of the input that the product itself reads: where that is rounded, so is x.
void Program::work_shrink(const Stage &stage, int64_t task, int thread) {
    const Op &op = *stage.first;
    const Shrink &u = shrinks_[stage.shrinks + size_t(task)];
    const Segment &segment = op.segments[u.segment];
    const LowRank &part = *low_rank(u.adapter, segment);
    const int64_t ld = most_segments_ * low_rank_;
    float *low = low_.data() + u.row * ld + u.segment * low_rank_ + u.tile * LANES;
    const Output out{low, ld, nullptr, false};
    if (!weights_[size_t(segment.weight)].integer()) {
        k_->gemm_float(part.a, u.tile, buffers_[size_t(op.x)].data.data(), buffers_[size_t(op.x)].ld, u.row, u.rows, out);
    } else {
        const Quantised x = rounded(op.x, stage.rows);
        float *wide = scratch_[size_t(thread)].data();
        for (int64_t r = 0; r < u.rows; r += WIDENED_ROWS) {
            const int64_t rows = std::min(WIDENED_ROWS, u.rows - r);
            for (int64_t i = 0; i < rows; i++) k_->widen(x, u.row + r + i, wide + i * x.k);
            k_->gemm_float(part.a, u.tile, wide, x.k, 0, rows, {low + r * ld, ld, nullptr, false});
        }
    }
    for (int64_t r = 0; r < u.rows; r++)
        for (int64_t i = 0; i < LANES; i++) low[r * ld + i] *= part.scale;
}

// Adds to a tile of a product, at `out` from the stage's row `row` on, what the adapters of these rows give: after all
// else that is added there, so that the order is the same however the product was computed.
// Before a task's tiles are multiplied: brings closer what `adapt` will read of the first adapter, which lies in small pieces.
void Program::fetch_low(const Stage &stage, size_t segment, int64_t tile) const {
    if (segment >= stage.low.size() || !stage.low[segment].data) return;
    const uint8_t *data = stage.low[segment].data + size_t(tile) * stage.low[segment].tile_bytes;
    for (size_t at = 0; at < stage.low[segment].tile_bytes; at += 64) __builtin_prefetch(data + at, 0, 3);
}

void Program::adapt(const Stage &stage, size_t segment, int64_t tile, int64_t row, int64_t rows, float *out, int64_t ld) {
    if (!stage.adapts) return;
    const int64_t low_ld = most_segments_ * low_rank_;
    for (size_t i = run_starts_[stage.group]; i < run_starts_[stage.group + 1]; i++) {
        const Run &run = runs_[i];
        const int64_t from = std::max(row, run.row), to = std::min(row + rows, run.row + run.rows);
        const LowRank *part = from < to ? low_rank(run.adapter, stage.first->segments[segment]) : nullptr;
        if (part) k_->gemm_float(part->b, tile, low_.data() + int64_t(segment) * low_rank_, low_ld, from, to - from, {out + (from - row) * ld, ld, nullptr, true});
    }
}

// The same of a step of one row, for several tiles of a matrix at once.
void Program::adapt_row(const Stage &stage, size_t segment, int64_t count, const int64_t *tiles, float *const *out) {
    const LowRank *part = low_rank(runs_[run_starts_[stage.group]].adapter, stage.first->segments[segment]);
    if (!part) return;
    const uint8_t *data[MOST_SPREAD];
    for (int64_t i = 0; i < count; i++) data[i] = part->b.data + size_t(tiles[i]) * part->b.tile_bytes();
    k_->add_low(part->b.k, count, data, low_.data() + int64_t(segment) * low_rank_, out);
}

void Program::work_attend(const Op &op, int64_t task, int thread) {
    const AttentionPlan &plan = plans_[op.plan];
    const Unit &u = plan.units[size_t(task)];
    AttentionArgs a = arguments(op);
    const Sequence s = sequence(u.sequence, caches_[size_t(op.pool)].group);
    float *scratch = scratch_[size_t(thread)].data();
    if (size_t(task) + 1 < plan.units.size()) {
        const Unit &next = plan.units[size_t(task) + 1];
        const Sequence n = sequence(next.sequence, caches_[size_t(op.pool)].group);
        const int64_t end = n.context + (plan.split ? n.count : next.first + next.count);
        const int64_t position = plan.split ? next.first * SPLIT : op.window > 0 ? std::max<int64_t>(0, n.context + next.first + 1 - op.window) : 0;
        a.ahead = {n.table, next.kv_head, position / SPLIT * (SPLIT / PAGE), (end + PAGE - 1) / PAGE};
    }
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
    const Kept value = caches_[size_t(op.pool)].kv.value;
    for (int64_t g = 0; g < group; g++)
        k_->merge_pieces(partial_.data() + plans_[op.plan].merge_offset[size_t(task)] + g * stride, lo, pieces, op.head_dim, value,
                         row(op.out, q.start) + (h * group + g) * op.head_dim);
}

// What the mask leaves out can no longer be drawn.
static void apply_mask(const uint32_t *bits, int64_t vocab, float *logits) {
    const float nothing = -std::numeric_limits<float>::infinity();
    for (int64_t at = 0; at < vocab; at += 32, bits++) {
        const uint32_t word = *bits;
        if (word == ~uint32_t(0)) continue;
        const int64_t count = std::min<int64_t>(32, vocab - at);
        for (int64_t i = 0; i < count; i++)
            if (!(word >> i & 1)) logits[at + i] = nothing;
    }
}

void Program::release(int32_t *masks_ready) {
    std::atomic_ref<int32_t> ready(*masks_ready);
    ready.store(1, std::memory_order_release);
    ready.notify_all();
}

// The tokens that a row may draw, or null; waits until they are known. They are worked out beside the step, so there is
// next to never anything to wait for.
const uint32_t *Program::mask(int64_t w) const {
    if (!step_.mask_row || step_.mask_row[w] < 0) return nullptr;
    std::atomic_ref<int32_t> ready(*step_.masks_ready);
    for (int i = 0; i < SPIN && !ready.load(std::memory_order_acquire); i++) relax();
    while (!ready.load(std::memory_order_acquire)) ready.wait(0);
    return step_.masks + step_.mask_row[w] * step_.mask_words;
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
    float *scratch = scratch_[size_t(thread)].data();
    Sampled s;
    if (const uint32_t *bits = a.forced < 0 ? mask(w) : nullptr) {
        if (a.logprobs < 0) {
            apply_mask(bits, vocab_limit_, logits);
            s = k_->sample(a, scratch);
        } else { // log-probabilities are those of the raw logits
            SampleArgs masked = a;
            masked.logits = scratch + 3 * a.padded, masked.logprobs = -1;
            std::memcpy(masked.logits, logits, sizeof(float) * size_t(a.padded));
            apply_mask(bits, vocab_limit_, masked.logits);
            const int32_t token = k_->sample(masked, scratch).token;
            a.forced = std::max(token, 0);
            s = k_->sample(a, scratch);
            if (token < 0) s = {token, 0.0f};
        }
    } else s = k_->sample(a, scratch);
    step_.token[w] = s.token;
    step_.logprob[w] = s.logprob;
}

// False where the task was computed for nothing: another thread had done so.
bool Program::work(const Stage &s, Progress &p, int64_t task, uint32_t step, int thread) {
    switch (s.first->code) {
    case Code::Linear: return s.spread ? work_spread(s, p, uint32_t(task), step, thread) : work_linear(s, p, task, step, thread);
    case Code::Gate: return s.spread ? work_spread(s, p, uint32_t(task), step, thread) : work_gate(s, p, task, step, thread);
    case Code::Attend: work_attend(*s.first, task, thread); return true;
    case Code::Merge: work_merge(*s.first, task); return true;
    case Code::Sample: work_sample(*s.first, task, s.first_wanted, thread); return true;
    case Code::Shrink: work_shrink(s, task, thread); return true;
    default: break;
    }
    const int64_t chunk = chunk_rows(s.rows), from = task * chunk, to = std::min(s.rows, from + chunk);
    for (const Op *op = s.first; op <= s.last; op++) work_rows(*op, from, to, s.rows, s.first_wanted);
    return true;
}

void Program::work_after(const Stage &stage) {
    for (size_t i = stage.after; i < stage.after_end; i++) {
        const After &a = after_[i];
        if (a.op->code != Code::Merge) work_rows(*a.op, 0, a.rows, a.rows, a.first_wanted);
        else
            for (int64_t task = 0; task < step_.sequences * a.op->kv_heads; task++) work_merge(*a.op, task);
    }
}

// Rows [from, to) of `rows` of an operation that handles each row by itself.
void Program::work_rows(const Op &op, int64_t from, int64_t to, int64_t rows, int64_t first_wanted) {
    const auto round = [&](int buffer, int64_t r) { k_->quantise(buffers_[size_t(buffer)].data.data(), r, rounded(buffer, rows)); };
    for (int64_t r = from; r < to; r++) {
        switch (op.code) {
        case Code::Embed: k_->embed(weights_[size_t(op.weight)], step_.tokens[r], row(op.out, r), op.width); break;
        case Code::Norm:
            k_->rms_norm(row(op.x, r), vectors_[size_t(op.weight)].data(), op.value, op.width, row(op.out, r));
            if (op.flag) round(op.out, r);
            break;
        case Code::Quantise: round(op.x, r); break;
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
            const int64_t owner = owner_[size_t(r)], slot = position % PAGE;
            const int32_t page = step_.tables[owner * step_.table_width + c.group * step_.group_width + position / PAGE];
            // The last row of a sequence leaves its page clean; where it is the only one, whoever wrote the slot before did.
            const bool last = r + 1 == step_.starts[owner + 1] && (slot == 0 || r > step_.starts[owner]);
            k_->store_kv(row(op.x, r) + op.xc, row(op.y, r) + op.yc, int64_t(page) * PAGE + slot, last, op.kv_heads, op.head_dim, c.kv);
            break;
        }
        case Code::Silu:
            k_->silu_mul(row(op.x, r) + op.xc, row(op.y, r) + op.yc, round_up(op.width, LANES), row(op.out, r));
            if (op.flag) round(op.out, r);
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

// One more, in this step, of what the counter counts; begins at nothing where the step is new to it. Returns the count
// before, or `limit` where that is reached or the step is over.
TR_INLINE uint32_t count_one(std::atomic<uint64_t> &counter, uint32_t step, uint32_t limit) {
    uint64_t now = counter.load(std::memory_order_acquire);
    for (;;) {
        const auto of = static_cast<uint32_t>(now >> 32);
        const uint32_t count = of == step ? static_cast<uint32_t>(now) : 0;
        if (static_cast<int32_t>(of - step) > 0 || count >= limit) return limit;
        if (counter.compare_exchange_weak(now, uint64_t(step) << 32 | (count + 1), std::memory_order_acq_rel, std::memory_order_acquire)) return count;
    }
}

// Takes the thread's next task, or one of another's; false where there is none left, or the step is over.
bool Program::take(const Stage &stage, Progress &p, uint32_t step, int thread, uint32_t &task) {
    for (uint32_t i = 0; i < stage.lanes; i++) {
        const uint32_t lane = (uint32_t(thread) + i) % stage.lanes, begin = stage.begin(lane), size = stage.begin(lane + 1) - begin;
        const uint32_t taken = count_one(p.lanes[lane].next, step, size);
        if (taken == size) continue;
        task = begin + taken;
        return true;
    }
    return false;
}

// Whether this thread is the first to have computed the task, and so puts it in place. A task of a step that is over was
// claimed in it, or in a later one.
bool Program::claim(Progress &p, int64_t task, uint32_t step) {
    uint32_t last = p.claims[task].load(std::memory_order_acquire);
    return static_cast<int32_t>(last - step) < 0 && p.claims[task].compare_exchange_strong(last, step, std::memory_order_acq_rel);
}

// A task is complete; with a lane's last one the lane is, with the last lane the stage, and what follows it is done.
void Program::complete(const Stage &stage, Progress &p, uint32_t task, uint32_t step) {
    const uint32_t lane = stage.lane_of(task), size = stage.begin(lane + 1) - stage.begin(lane);
    if (count_one(p.lanes[lane].done, step, size) + 1 != size) return;
    if (count_one(p.done, step, stage.lanes) + 1 != stage.lanes) return;
    if (stage.after != stage.after_end || stage.closing) {
        work_after(stage);
        if (stage.closing) end(step);
        count_one(p.done, step, stage.lanes + 1);
    }
    if (parked_.load() > 0) p.done.notify_all();
}

// Waits until the stage is complete; false where the step is over already. Where few rows are computed, memory is what
// takes the time, so whoever waits brings the next weights closer. Tasks that others hold for longer than `patience`
// nanoseconds are computed again, where that is possible: their threads may not be running.
bool Program::finish(const Stage &stage, Progress &p, uint32_t step, int thread, int64_t patience) {
    const uint64_t complete = (uint64_t(step) << 32 | stage.lanes) + (stage.after != stage.after_end || stage.closing);
    const Starts ahead = stage.ahead < 0 ? Starts{} : ahead_[size_t(stage.ahead) * size_t(threads_) + size_t(thread)];
    const auto runs = int(std::find(ahead.begin(), ahead.end(), nullptr) - ahead.begin());
    const auto over = [&](uint64_t done) { return static_cast<int32_t>(static_cast<uint32_t>(done >> 32) - step) > 0; };
    int64_t deadline = stage.aside ? now_ns() + patience : 0;
    uint64_t done = p.done.load(std::memory_order_acquire);
    // Never parks before the deadline: how long a turn takes is the processor's affair.
    for (int i = 0; (i < SPIN || deadline) && done != complete && !over(done); i++) {
        if (runs && i < AHEAD) __builtin_prefetch(ahead[size_t(i % runs)] + 64 * (i / runs), 0, 2);
        relax();
        if (deadline && i % 16 == 15 && now_ns() > deadline) {
            deadline = 0;
            for (uint32_t task = 0; task < stage.tasks; task++)
                if (static_cast<int32_t>(p.claims[task].load(std::memory_order_acquire) - step) < 0 && work(stage, p, task, step, thread)) {
                    redone_.fetch_add(1, std::memory_order_relaxed);
                    this->complete(stage, p, task, step);
                }
        }
        done = p.done.load(std::memory_order_acquire);
    }
    if (done != complete && !over(done)) {
        parked_.fetch_add(1);
        while ((done = p.done.load()) != complete && !over(done)) p.done.wait(done);
        parked_.fetch_sub(1);
    }
    return done == complete;
}

// A thread's own memory is first touched by itself, so it lies on its node.
void Program::touch_own(int thread) {
    auto &scratch = scratch_[size_t(thread)], &aside = aside_[size_t(thread)];
    if (scratch.size() < scratch_floats_ + LANES) scratch.resize(scratch_floats_ + LANES);
    if (aside.size() < aside_floats_) aside.resize(aside_floats_);
}

// Every thread walks the same list: it takes tasks of a stage until none is left, and goes on when all are complete.
void Program::replay(int thread, uint32_t step) {
    touch_own(thread);
    const struct Part {
        const Kernels &k;
        explicit Part(const Kernels &kernels) : k(kernels) { k.enter(); }
        ~Part() { k.leave(); }
    } part(*k_);
    const uint32_t version = version_.load();
    if (number_.load() != step) return; // it is over
    const size_t count = stage_count_.load();
    for (size_t i = 0; i < count; i++) {
        Progress &p = progress_[i];
        const Stage stage = stages_[i];
        std::atomic_thread_fence(std::memory_order_acquire);
        if (version_.load(std::memory_order_relaxed) != version || version % 2) return; // the step is over; this is another's
        const bool timed = profiling_ && thread == 0;
        const int64_t begin = stage.aside || timed ? now_ns() : 0;
        int64_t own = 0;
        uint32_t task;
        while (take(stage, p, step, thread, task)) {
            own++;
            worked_[size_t(thread)].tasks.fetch_add(1, std::memory_order_relaxed);
            if (work(stage, p, task, step, thread)) complete(stage, p, task, step);
        }
        const int64_t patience = PATIENCE + (own > 0 && begin ? 2 * (now_ns() - begin) / own : 0);
        if (!finish(stage, p, step, thread, patience)) return;
        if (timed) profile_[int(stage.first->code)] += now_ns() - begin;
    }
}

// Makes room for the most stages and tasks that any step can have: once, since a late thread may still look at it.
void Program::size_stages() {
    const size_t slabs = size_t((max_tokens_ + slab_ - 1) / slab_), most = tail_ + slabs * (ops_.size() - tail_);
    progress_ = std::make_unique<Progress[]>(most);
    stages_.resize(most);
    after_.resize(most);
    int64_t tasks = 0;
    for (const Op &op : ops_)
        if (op.code == Code::Linear || op.code == Code::Gate) tasks = std::max(tasks, prepare(op, std::min(ASIDE_ROWS, max_tokens_)));
    claims_ = std::make_unique<std::atomic<uint32_t>[]>(size_t(tasks) * most);
    ahead_.resize(most * size_t(threads_));
    lanes_ = std::make_unique<Lane[]>(size_t(threads_) * most);
    for (size_t i = 0; i < most; i++) {
        progress_[i].claims = claims_.get() + size_t(tasks) * i;
        progress_[i].lanes = lanes_.get() + size_t(threads_) * i;
    }
    const int64_t rows = std::min(std::max(ASIDE_ROWS * MOST_TILES, k_->panel * 4), max_tokens_ * MOST_TILES);
    aside_floats_ = size_t(std::max(rows, MOST_SPREAD) * LANES);
}

// Lists the operations of the next step that have work, and makes it the current one. Most steps are like the one before,
// and find the list as it is. Else the step's number changes within the window in which the version is odd: whoever finds
// an even version, and then the number of his step, holds that step's list.
void Program::plan_stages() {
    if (!progress_) size_stages();
    std::vector<int64_t> asked{step_.count, step_.sequences, step_.wanted_count};
    for (const AttentionPlan &plan : plans_) asked.insert(asked.end(), {int64_t(plan.units.size()), plan.split, plan.most_pieces});
    if (!runs_.empty()) asked.push_back(adapters_version_);
    for (const Run &run : runs_) asked.insert(asked.end(), {run.row, run.rows, run.adapter});
    if (asked == planned_) {
        number_.fetch_add(1);
        return;
    }
    planned_ = asked;
    version_.fetch_add(1);
    std::atomic_thread_fence(std::memory_order_release);
    number_.fetch_add(1);
    shrinks_.clear();
    size_t count = 0, after = 0;
    const auto is_product = [](const Op &op) { return op.code == Code::Linear || op.code == Code::Gate; };
    const auto by_row = [&](const Op &op) {
        return !is_product(op) && op.code != Code::Attend && op.code != Code::Merge && op.code != Code::Sample && op.code != Code::Shrink;
    };
    // Whether an operation is so little work that whoever completes the stage before it does it too.
    const auto little = [&](const Op &op, int64_t rows) {
        if (op.code == Code::Merge) return step_.sequences * plans_[op.plan].most_pieces <= LITTLE_PIECES;
        return by_row(op) && rows <= FEW_ROWS;
    };
    const auto add = [&](const Op &op, int64_t rows, int64_t first_wanted, size_t group) {
        if (op.code == Code::Shrink && runs_.empty()) return;
        const size_t shrinks = shrinks_.size();
        const int64_t tasks = op.code == Code::Shrink ? int64_t(plan_shrinks(op, group)) : prepare(op, rows);
        if (tasks == 0) return;
        if (count > 0) {
            Stage &before = stages_[count - 1];
            if (!by_row(*before.first) && before.first->code != Code::Sample && little(op, rows)) {
                after_[after++] = {&op, rows, first_wanted};
                before.after_end = after;
                return;
            }
            if (by_row(op) && before.last + 1 == &op && by_row(*before.last) && (op.code != Code::Select || before.first->code == Code::Select)) {
                before.last = &op;
                return;
            }
        }
        const bool aside = is_product(op) && rows <= ASIDE_ROWS && threads_ > 1;
        const auto n = static_cast<uint32_t>(tasks);
        Stage &stage = stages_[count++];
        stage = {&op, &op, rows, first_wanted, n, std::min(n, uint32_t(threads_)), after, after, -1, aside && may_spread(op, rows), aside, false, group, shrinks};
        if (is_product(op) && !runs_.empty()) plan_adapters(stage);
    };
    for (size_t i = 0; i < tail_; i++) add(ops_[i], step_.count, 0, 0);
    for (int64_t w = 0; w < step_.wanted_count; w += slab_)
        for (size_t i = tail_; i < ops_.size(); i++) add(ops_[i], std::min(slab_, step_.wanted_count - w), w, size_t(1 + w / slab_));
    // What a thread that waits at a stage may fetch: the next weights of its lane. Nothing where many rows share them.
    int64_t ahead = -1;
    for (size_t i = count; i-- > 0;) {
        stages_[i].ahead = step_.count <= FEW_ROWS ? ahead : -1;
        if (!is_product(*stages_[i].first) && stages_[i].first->code != Code::Shrink) continue;
        ahead = int64_t(i);
        for (int t = 0; t < threads_; t++) ahead_[i * size_t(threads_) + size_t(t)] = first_weights(i, t);
    }
    stages_[count - 1].closing = true;
    stage_count_.store(count);
    version_.fetch_add(1);
}

void Program::launch(const Step &step) {
    if (flying_) throw std::logic_error("a step runs already");
    check(step);
    begin(step);
    flying_ = true;
    waited_ = number_.load();
}

void Program::check(const Step &step) const {
    if (step.count < 1 || step.count > max_tokens_) throw std::invalid_argument("a step must have 1 to max_tokens tokens");
    for (const Rope &r : ropes_)
        for (int64_t s = 0; s < step.sequences; s++)
            if (step.context[s] + step.starts[s + 1] - step.starts[s] > r.positions) throw std::invalid_argument("a position is past the served context");
    for (int64_t s = 0; step.adapters && s < step.sequences; s++)
        if (step.adapters[s] >= 0 && (size_t(step.adapters[s]) >= adapters_.size() || adapters_[size_t(step.adapters[s])].empty()))
            throw std::invalid_argument("a sequence has an adapter that is not there");
}

// Only of steps that have been checked: nobody would hear of an exception on another thread.
void Program::begin(const Step &step) {
    step_ = step;
    for (int64_t s = 0; s < step.sequences; s++)
        for (int64_t t = step.starts[s]; t < step.starts[s + 1]; t++) {
            owner_[size_t(t)] = s;
            position_[size_t(t)] = step.context[s] + t - step.starts[s];
        }
    for (AttentionPlan &plan : plans_) plan_attention(plan);
    plan_runs();
    plan_stages();
    pool_.start();
}

void Program::chain(const Step &next, int32_t *tokens, std::vector<int32_t> end_start, std::vector<int32_t> ends) {
    if (!flying_) throw std::logic_error("no step runs");
    if (next.count != next.sequences) throw std::invalid_argument("only steps of one token a row follow each other");
    check(next);
    const std::lock_guard lock(turn_);
    if (next.count != step_.wanted_count) throw std::invalid_argument("a step that follows has the rows that were drawn");
    next_ = next;
    next_tokens_ = tokens;
    end_start_ = std::move(end_start);
    ends_ = std::move(ends);
    armed_ = true;
    if (ended_ == waited_) follow(waited_); // it was quicker than the caller
}

// The step is complete: begins the armed one, if that may follow. On the thread that completed it.
void Program::end(uint32_t step) {
    const std::lock_guard lock(turn_);
    ended_ = step;
    follow(step);
}

void Program::follow(uint32_t step) {
    const bool on = goes_on();
    armed_ = false;
    if (!on) return;
    std::copy(step_.token, step_.token + step_.wanted_count, next_tokens_);
    begin(next_);
    chained_ = step + 1;
}

// Whether the armed step may follow the one that has ended.
bool Program::goes_on() const {
    if (!armed_ || held_.load()) return false;
    for (int64_t r = 0; r < step_.wanted_count; r++) {
        if (step_.token[r] < 0) return false;
        for (int32_t i = end_start_[size_t(r)]; i < end_start_[size_t(r) + 1]; i++)
            if (step_.token[r] == ends_[size_t(i)]) return false;
    }
    return true;
}

uint64_t Program::worked() const {
    uint64_t sum = 0;
    for (int t = 0; t < threads_; t++) sum += worked_[size_t(t)].tasks.load(std::memory_order_relaxed);
    return sum;
}

bool Program::wait() {
    if (!flying_) throw std::logic_error("no step runs");
    const uint32_t step = waited_;
    replay(0, step);
    const std::lock_guard lock(turn_); // of a step that follows, the thread that begins it may still be at that
    flying_ = chained_ == step + 1;
    waited_ = step + 1;
    return flying_;
}

std::vector<std::pair<std::string, int64_t>> Program::profiled() {
    static const char *names[CODES] = {"embed", "norm", "quantise", "linear", "gate", "head_norm", "rotate", "store", "attend", "merge", "silu", "add", "select", "sample", "shrink"};
    std::vector<std::pair<std::string, int64_t>> out;
    for (int i = 0; i < CODES; i++) {
        out.emplace_back(names[i], profile_[i]);
        profile_[i] = 0;
    }
    return out;
}

} // namespace tailrace
