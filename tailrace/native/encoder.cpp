#include "encoder.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "amx_permission.h"

namespace tailrace {
namespace {

constexpr int64_t PACK = 128;  // tokens of texts that a thread takes together
constexpr int64_t PANEL = 32;  // rows that go through all operations of a stage while they are in the core's cache
constexpr int SPIN = 4000;

float half(uint16_t h) {
    const uint32_t sign = uint32_t(h & 0x8000u) << 16, exponent = h >> 10 & 31u, fraction = h & 1023u;
    float f;
    if (exponent == 0) {
        f = std::ldexp(float(fraction), -24);
        return sign ? -f : f;
    }
    const uint32_t bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | fraction << 13;
    std::memcpy(&f, &bits, 4);
    return f;
}

void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

} // namespace

const EncoderKernels *encoder_build(const std::string &kernels) {
#if defined(TR_HAVE_X86)
#if defined(TR_HAVE_AMX)
    if (kernels == "amx" && amx_permitted()) return encoder_amx();
#endif
#if !defined(TR_EMULATE)
    if (kernels == "amx" || kernels.starts_with("avx512")) return encoder_avx512();
#endif
    if (kernels != "portable") return encoder_avx2();
#endif
    return encoder_portable(); // whatever the machine, "portable" among them
}

Encoder::Encoder(const EncoderKernels *kernels, int threads, int64_t longest)
    : k_(kernels), threads_(std::max(1, threads)), longest_(longest), spaces_(size_t(threads_)) {
    for (int t = 1; t < threads_; t++) workers_.emplace_back([this, t] { loop(t); });
}

Encoder::~Encoder() {
    {
        const std::lock_guard guard(lock_);
        stop_ = true;
    }
    begun_.notify_all();
    for (auto &worker : workers_) worker.join();
}

int Encoder::buffer(int64_t width) {
    buffers_.push_back({width, -1, false});
    return int(buffers_.size()) - 1;
}

int Encoder::vector(const float *data, int64_t count) {
    auto &v = vectors_.emplace_back(size_t(up_to(count, TILE)), 0.0f);
    std::copy(data, data + count, v.begin());
    return int(vectors_.size()) - 1;
}

int Encoder::matrix(const float *data, int64_t n, int64_t k) {
    if (k % WIDE) throw std::invalid_argument("a matrix must have a multiple of 16 inputs");
    const int64_t padded = up_to(n, TILE), inputs = up_to(k, k_->inputs);
    Matrix &m = matrices_.emplace_back(Matrix{padded, k, inputs, std::vector<int16_t>(size_t(padded * inputs)), std::vector<float>(size_t(padded))});
    std::vector<int16_t> rounded(size_t(TILE * inputs));
    for (int64_t first = 0; first < n; first += TILE) {
        std::fill(rounded.begin(), rounded.end(), int16_t(0));
        for (int64_t o = first; o < std::min(n, first + TILE); o++) {
            const float *row = data + o * k;
            float most = 0.0f;
            for (int64_t i = 0; i < k; i++) most = std::max(most, std::fabs(row[i]));
            const float inverse = most > 0.0f ? MOST_W / most : 0.0f;
            m.scale[size_t(o)] = most / MOST_W;
            for (int64_t i = 0; i < k; i++) rounded[size_t((o - first) * inputs + i)] = int16_t(std::nearbyintf(row[i] * inverse));
        }
        k_->pack(rounded.data(), inputs, m.tiles.data() + first * inputs);
    }
    bytes_ += padded * inputs * 2;
    most_k_ = std::max(most_k_, k);
    return int(matrices_.size()) - 1;
}

int Encoder::table(const uint8_t *data, Format format, int64_t rows, int64_t width) {
    tables_.push_back({data, format, rows, width});
    return int(tables_.size()) - 1;
}

void Encoder::add(Op op) {
    if (!stages_.empty()) throw std::logic_error("the operations are complete");
    ops_.push_back(op);
}

void Encoder::embed(int words, int positions, int kinds, int64_t first, int out) {
    Op op{Code::Embed};
    op.a = words, op.b = positions, op.c = kinds, op.first = first, op.out = out;
    add(op);
}

void Encoder::linear(int x, int matrix, int bias, int residual, Bend bend, int out) {
    Op op{Code::Linear};
    op.x = x, op.a = matrix, op.b = bias, op.c = residual, op.bend = bend, op.out = out;
    const Matrix &m = matrices_.at(size_t(matrix));
    if (m.k != buffers_.at(size_t(x)).width || m.n != up_to(buffers_.at(size_t(out)).width, TILE)) throw std::invalid_argument("a matrix does not fit");
    if (int64_t(vectors_.at(size_t(bias)).size()) < m.n) throw std::invalid_argument("a bias is too short");
    if (residual >= 0 && (buffers_.at(size_t(residual)).width != buffers_[size_t(out)].width || bend != Bend::None)) throw std::invalid_argument("a residual does not fit");
    add(op);
}

void Encoder::norm(int x, int weight, int bias, float eps, int out) {
    Op op{Code::Norm};
    op.x = x, op.a = weight, op.b = bias, op.value = eps, op.out = out;
    const int64_t width = buffers_.at(size_t(x)).width;
    if (width % WIDE || int64_t(vectors_.at(size_t(weight)).size()) < width || int64_t(vectors_.at(size_t(bias)).size()) < width)
        throw std::invalid_argument("a norm must have a multiple of 16 values");
    add(op);
}

void Encoder::attention(int x, int64_t q, int64_t k, int64_t v, int64_t heads, int64_t head_dim, float scale, int out) {
    Op op{Code::Attention};
    op.x = x, op.q = q, op.k = k, op.v = v, op.heads = heads, op.head_dim = head_dim, op.value = scale, op.out = out;
    const int64_t width = heads * head_dim;
    if (std::max({q, k, v}) + width > buffers_.at(size_t(x)).width || width > buffers_.at(size_t(out)).width) throw std::invalid_argument("attention does not fit");
    most_head_ = std::max(most_head_, head_dim);
    add(op);
}

void Encoder::pool(int x, Pooled how, int out) {
    Op op{Code::Pool};
    op.x = x, op.pooled = how, op.out = out;
    if (buffers_.at(size_t(x)).width % WIDE) throw std::invalid_argument("pooling needs a multiple of 16 values");
    add(op);
}

void Encoder::unit(int x) {
    Op op{Code::Unit};
    op.x = op.out = x;
    if (buffers_.at(size_t(x)).width % WIDE) throw std::invalid_argument("a unit vector must have a multiple of 16 values");
    add(op);
}

void Encoder::finish(int x) {
    Op op{Code::Finish};
    op.x = x;
    add(op);
    prepare();
}

// Cuts the operations into stages, and finds which buffers live within one.
void Encoder::prepare() {
    bool pooled = false;
    for (size_t i = 0; i < ops_.size(); i++) {
        const Code code = ops_[i].code;
        const bool rows = code != Code::Attention && code != Code::Pool;
        if (stages_.empty() || !rows || !stages_.back().rows) stages_.push_back({i, i, rows, pooled});
        stages_.back().end = i + 1;
        pooled = pooled || code == Code::Pool;
        const int stage = int(stages_.size()) - 1;
        const Op &op = ops_[i];
        for (const int b : {op.x, code == Code::Linear ? op.c : -1}) {
            if (b < 0) continue;
            Buffer &buffer = buffers_[size_t(b)];
            buffer.whole = buffer.whole || buffer.written != stage;
        }
        if (op.out >= 0) buffers_[size_t(op.out)].written = stage;
    }
    for (Space &space : spaces_) {
        space.whole.resize(buffers_.size());
        space.panel.resize(buffers_.size());
    }
}

// Makes room for packs of so many rows, and texts of so many tokens.
void Encoder::room(Space &space, int64_t rows, int64_t longest) const {
    for (size_t b = 0; b < buffers_.size(); b++) {
        const Buffer &buffer = buffers_[b];
        auto &memory = buffer.panel() ? space.panel[b] : space.whole[b];
        const size_t size = size_t((buffer.panel() ? PANEL : rows) * up_to(buffer.width, WIDE));
        if (memory.size() < size) memory.resize(size);
    }
    space.rounded.resize(size_t(PANEL * up_to(most_k_, KBLOCK)));
    space.scales.resize(size_t(PANEL));
    space.sums.resize(size_t(PANEL * TILE));
    const size_t scratch = size_t(attend_scratch(longest, most_head_));
    if (space.scratch.size() < scratch) space.scratch.resize(scratch);
}

int64_t Encoder::tasks(const Stage &stage, const Pack &pack) const {
    const Op &op = ops_[stage.first];
    if (op.code == Code::Attention) return pack.texts * op.heads;
    if (op.code == Code::Pool) return 1;
    return ((stage.pooled ? pack.texts : pack.tokens) + PANEL - 1) / PANEL;
}

float *Encoder::row(int buffer, int64_t at, Space &shared, Space &own) const {
    const Buffer &b = buffers_[size_t(buffer)];
    const int64_t ld = up_to(b.width, WIDE);
    return b.panel() ? own.panel[size_t(buffer)].data() : shared.whole[size_t(buffer)].data() + at * ld;
}

void Encoder::work(const Stage &stage, const Pack &pack, int64_t task, Space &shared, Space &own) {
    worked_.fetch_add(1, std::memory_order_relaxed);
    const Op &op = ops_[stage.first];
    const int32_t *starts = job_.starts + pack.text;
    if (op.code == Code::Attention) {
        const int64_t text = task / op.heads, head = task % op.heads * op.head_dim;
        const int64_t begin = starts[text] - pack.token, n = starts[text + 1] - starts[text];
        const int64_t ld = up_to(buffers_[size_t(op.x)].width, WIDE), ldo = up_to(buffers_[size_t(op.out)].width, WIDE);
        const float *x = row(op.x, begin, shared, own) + head;
        k_->attend(x + op.q, x + op.k, x + op.v, ld, n, op.head_dim, op.value, row(op.out, begin, shared, own) + head, ldo, own.scratch.data());
    } else if (op.code == Code::Pool) {
        const int64_t width = buffers_[size_t(op.x)].width, ld = up_to(width, WIDE);
        for (int64_t t = 0; t < pack.texts; t++) {
            const int64_t begin = starts[t] - pack.token, n = starts[t + 1] - starts[t];
            float *out = row(op.out, t, shared, own);
            if (op.pooled == Pooled::Mean) k_->mean(row(op.x, begin, shared, own), ld, n, width, out);
            else std::memcpy(out, row(op.x, op.pooled == Pooled::First ? begin : begin + n - 1, shared, own), size_t(width) * sizeof(float));
        }
    } else {
        const int64_t all = stage.pooled ? pack.texts : pack.tokens, at = task * PANEL;
        for (size_t i = stage.first; i < stage.end; i++) work_rows(ops_[i], pack, at, std::min(PANEL, all - at), shared, own);
    }
}

// One operation on rows [at, at + rows) of a pack.
void Encoder::work_rows(const Op &op, const Pack &pack, int64_t at, int64_t rows, Space &shared, Space &own) {
    const int64_t width = buffers_[size_t(op.code == Code::Embed ? op.out : op.x)].width, ld = up_to(width, WIDE);
    switch (op.code) {
    case Code::Embed: {
        const int32_t *starts = job_.starts + pack.text;
        const auto add = [&](const Table &t, int64_t index, float *out, bool fresh) {
            for (int64_t i = 0; i < t.width; i++) {
                float value;
                if (t.format == Format::F32) std::memcpy(&value, t.data + (index * t.width + i) * 4, 4);
                else {
                    uint16_t bits;
                    std::memcpy(&bits, t.data + (index * t.width + i) * 2, 2);
                    const uint32_t wide = uint32_t(bits) << 16;
                    if (t.format == Format::BF16) std::memcpy(&value, &wide, 4);
                    else value = half(bits);
                }
                out[i] = fresh ? value : out[i] + value;
            }
        };
        float *out = row(op.out, at, shared, own);
        int64_t text = std::upper_bound(starts, starts + pack.texts + 1, int32_t(pack.token + at)) - starts - 1;
        for (int64_t r = 0; r < rows; r++, out += ld) {
            const int64_t token = pack.token + at + r;
            while (token >= starts[text + 1]) text++;
            add(tables_[size_t(op.a)], job_.tokens[token], out, true);
            add(tables_[size_t(op.b)], op.first + token - starts[text], out, false);
            if (op.c >= 0) add(tables_[size_t(op.c)], job_.kinds[token], out, false);
        }
        break;
    }
    case Code::Linear: {
        const Matrix &m = matrices_[size_t(op.a)];
        const float *x = row(op.x, at, shared, own);
        for (int64_t r = 0; r < rows; r++) own.scales[size_t(r)] = k_->round_row(x + r * ld, m.k, own.rounded.data() + r * KBLOCK, PANEL * KBLOCK);
        Finish f{};
        f.row_scale = own.scales.data();
        f.ld = up_to(buffers_[size_t(op.out)].width, WIDE);
        f.residual_ld = f.ld;
        f.bend = op.bend;
        float *out = row(op.out, at, shared, own);
        const float *residual = op.c >= 0 ? row(op.c, at, shared, own) : nullptr;
        for (int64_t o = 0; o < f.ld; o += TILE) {
            f.columns = std::min<int64_t>(TILE, f.ld - o);
            f.scale = m.scale.data() + o, f.bias = vectors_[size_t(op.b)].data() + o;
            f.out = out + o, f.residual = residual ? residual + o : nullptr;
            k_->product(m.tiles.data() + o * m.inputs, m.inputs, own.rounded.data(), PANEL * KBLOCK, rows, own.sums.data(), f);
        }
        break;
    }
    case Code::Norm: {
        const float *x = row(op.x, at, shared, own);
        float *out = row(op.out, at, shared, own);
        for (int64_t r = 0; r < rows; r++)
            k_->norm(x + r * ld, vectors_[size_t(op.a)].data(), vectors_[size_t(op.b)].data(), op.value, width, out + r * ld);
        break;
    }
    case Code::Unit:
        for (int64_t r = 0; r < rows; r++) k_->unit(row(op.x, at, shared, own) + r * ld, width);
        break;
    case Code::Finish:
        for (int64_t r = 0; r < rows; r++)
            std::memcpy(job_.out + (pack.text + at + r) * width, row(op.x, at, shared, own) + r * ld, size_t(width) * sizeof(float));
        break;
    default: break;
    }
}

// Where there are packs enough, a thread takes one after the other and computes it alone; else all work on one, stage by
// stage. Either way each row is computed by the same operations in the same order.
void Encoder::join(int thread) {
    k_->enter();
    compute(thread);
    k_->leave();
}

void Encoder::compute(int thread) {
    Job &job = job_;
    Space &own = spaces_[size_t(thread)];
    if (!job.team) {
        for (int64_t p; (p = job.next.fetch_add(1)) < int64_t(job.packs.size());)
            for (const Stage &stage : stages_)
                for (int64_t i = 0, n = tasks(stage, job.packs[size_t(p)]); i < n; i++) work(stage, job.packs[size_t(p)], i, own, own);
        return;
    }
    for (size_t p = 0; p < job.packs.size(); p++)
        for (size_t s = 0; s < stages_.size(); s++) {
            const int64_t n = tasks(stages_[s], job.packs[p]);
            auto &taken = job.taken[p * stages_.size() + s], &done = job.done[p * stages_.size() + s];
            for (int64_t i; (i = taken.fetch_add(1)) < n;) {
                work(stages_[s], job.packs[p], i, spaces_[0], own);
                if (done.fetch_add(1) + 1 == n) done.notify_all();
            }
            int64_t now = done.load();
            for (int turn = 0; turn < SPIN && now != n; turn++, now = done.load()) pause();
            for (; now != n; now = done.load()) done.wait(now);
        }
}

void Encoder::loop(int thread) {
    uint64_t seen = 0;
    std::unique_lock guard(lock_);
    for (;;) {
        begun_.wait(guard, [&] { return stop_ || epoch_ != seen; });
        if (stop_) return;
        seen = epoch_;
        if (!open_) continue; // it came too late
        active_++;
        guard.unlock();
        join(thread);
        guard.lock();
        if (--active_ == 0) ended_.notify_all();
    }
}

void Encoder::run(const int32_t *tokens, const int32_t *kinds, const int32_t *starts, int64_t texts, float *out) {
    if (stages_.empty()) throw std::logic_error("the operations are not complete");
    Job &job = job_;
    job.tokens = tokens, job.kinds = kinds, job.starts = starts, job.out = out;
    job.packs.clear();
    int64_t rows = 0, longest = 0;
    for (int64_t t = 0; t < texts; t++) {
        const int64_t n = starts[t + 1] - starts[t];
        longest = std::max(longest, n);
        if (job.packs.empty() || job.packs.back().tokens + n > PACK) job.packs.push_back({t, 0, starts[t], 0});
        job.packs.back().texts++, job.packs.back().tokens += n;
        rows = std::max(rows, job.packs.back().tokens);
    }
    for (Space &space : spaces_) room(space, rows, longest);
    job.team = threads_ > 1 && int64_t(job.packs.size()) < threads_;
    job.next.store(0);
    if (job.team) {
        const size_t count = job.packs.size() * stages_.size();
        job.taken = std::make_unique<std::atomic<int64_t>[]>(count), job.done = std::make_unique<std::atomic<int64_t>[]>(count);
    }
    {
        const std::lock_guard guard(lock_);
        open_ = true;
        epoch_++;
    }
    begun_.notify_all();
    join(0);
    std::unique_lock guard(lock_);
    open_ = false;
    ended_.wait(guard, [&] { return active_ == 0; });
}

} // namespace tailrace
