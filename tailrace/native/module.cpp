// The Python face of the native kernels. It checks every array's type and size; nothing below it does.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "builds.h"
#include "ceilings.h"
#include "kernels.h"
#include "pack.h"
#include "pool.h"
#include "program.h"

namespace nb = nanobind;
using namespace tailrace;

namespace {

template <class T> using In = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T> using In2 = nb::ndarray<const T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <class T> using Out = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T> using Out2 = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void want(bool ok, const char *what) {
    if (!ok) throw std::invalid_argument(what);
}

// (kind of multiply-add, padded n, padded k, bytes)
using Shape = std::tuple<std::string, int64_t, int64_t, int64_t>;

Shape shape_of(const std::string &format, int64_t n, int64_t k) {
    const Packed p = packed_shape(format, n, k);
    return {p.arithmetic(), p.n, p.k, int64_t(p.bytes())};
}

void pack(const std::string &format, In2<uint8_t> rows, int64_t k, int64_t from, int64_t to, Out<uint8_t> out) {
    const Packed p = packed_shape(format, int64_t(rows.shape(0)), k);
    want(out.size() == p.bytes(), "the packed size is wrong");
    want(from >= 0 && to <= p.n / LANES, "tiles past the end");
    const uint8_t *source = rows.data();
    const auto n = int64_t(rows.shape(0)), bytes = int64_t(rows.shape(1));
    uint8_t *target = out.data();
    nb::gil_scoped_release release;
    pack_tiles(format, source, n, bytes, k, p, from, to, target);
}

// Ceilings of the machine, each as (best, median) of what was measured.
using Pair = std::pair<double, double>;

void check_time(double seconds) { want(seconds > 0.0 && seconds <= 60.0, "seconds must be above 0 and at most 60"); }
void check_threads(int threads) { want(threads >= 1 && threads <= 4096, "threads must be 1 to 4096"); }

Pair measured_read_rate(const std::string &kernels, int64_t bytes, int threads, double seconds) {
    const Kernels *k = chosen(kernels);
    check_time(seconds), check_threads(threads);
    want(bytes >= 256 && bytes <= int64_t(1) << 40, "bytes must be 256 to 2^40");
    nb::gil_scoped_release release;
    const Spread s = read_rate(*k, bytes, threads, seconds);
    return {s.best, s.median};
}

// (kind, the instructions that do it)
std::vector<std::pair<std::string, std::string>> named_peaks(const std::string &kernels) {
    std::vector<std::pair<std::string, std::string>> found;
    for (const Peak &p : peaks_of(*chosen(kernels))) found.emplace_back(p.name, p.how);
    return found;
}

Pair measured_multiply_adds(const std::string &kernels, const std::string &kind, int threads, double seconds) {
    const auto peaks = peaks_of(*chosen(kernels));
    check_time(seconds), check_threads(threads);
    const auto peak = std::find_if(peaks.begin(), peaks.end(), [&](const Peak &p) { return p.name == kind; });
    if (peak == peaks.end()) throw std::invalid_argument("there is no kind of multiply-add '" + kind + "'");
    nb::gil_scoped_release release;
    const Spread s = multiply_add_rate(*peak, threads, seconds);
    return {s.best, s.median};
}

Pair measured_hand_over(bool parked, double seconds) {
    check_time(seconds);
    nb::gil_scoped_release release;
    const Spread s = hand_over(parked, seconds);
    return {s.best, s.median};
}

Pair measured_page_fault(double seconds) {
    check_time(seconds);
    nb::gil_scoped_release release;
    const Spread s = page_fault(seconds);
    return {s.best, s.median};
}

Kept kept(const std::string &name) {
    static const std::pair<const char *, Kept> all[] = {{"bf16", Kept::BF16}, {"fp16", Kept::F16}, {"int8", Kept::I8}, {"int4", Kept::I4}};
    for (const auto &[known, kept] : all)
        if (name == known) return kept;
    throw std::invalid_argument("keys and values cannot be kept as '" + name + "'");
}

class Recorder {
  public:
    Recorder(const std::string &kernels, int threads, int64_t max_tokens, int64_t max_sequences, int64_t vocab, int64_t vocab_limit)
        : program_(chosen(kernels), threads, max_tokens, max_sequences, vocab, vocab_limit), vocab_(vocab), vocab_limit_(vocab_limit), max_sequences_(max_sequences) {}

    int weight(const std::string &format, int64_t n, int64_t k, In<uint8_t> data) {
        Packed p = packed_shape(format, n, k);
        want(data.size() == p.bytes(), "the packed size is wrong");
        p.data = data.data();
        rows_.push_back(n);
        keep_.append(nb::cast(data));
        return program_.weight(p);
    }
    int vector(In<float> data) { return program_.vector(data.data(), int64_t(data.size())); }
    int rope(In2<float> cos, In2<float> sin) {
        want(cos.shape(0) == sin.shape(0) && cos.shape(1) == sin.shape(1), "cos and sin differ in shape");
        keep_.append(nb::cast(cos));
        keep_.append(nb::cast(sin));
        return program_.rope(cos.data(), sin.data(), int64_t(cos.shape(0)), int64_t(cos.shape(1)));
    }
    void embed(int table, int out, int64_t width) {
        table_rows_ = rows_.at(size_t(table));
        program_.embed(table, out, width);
    }
    int64_t add_pool(int64_t pages, int kv_heads, int head_dim, const std::string &key, const std::string &value, int64_t group) {
        want(pages > 0 && group >= 0 && group < 64, "a pool needs pages, and the number of its group");
        if (size_t(group) >= pages_.size()) pages_.resize(size_t(group) + 1);
        int64_t &least = pages_[size_t(group)];
        least = least == 0 ? pages : std::min(least, pages);
        return program_.add_pool(pages, kv_heads, head_dim, kept(key), kept(value), group);
    }
    void linear(int x, const std::vector<std::tuple<int, int, int64_t, int>> &segments, bool accumulate) {
        std::vector<Program::Segment> s;
        for (const auto &[weight, out, column, bias] : segments) s.push_back({weight, out, bias, column});
        program_.linear(x, s, accumulate);
    }
    void gate(int x, const std::tuple<int, int> &gate, const std::tuple<int, int> &up, int out) {
        const auto [gate_weight, gate_bias] = gate;
        const auto [up_weight, up_bias] = up;
        program_.gate(x, {gate_weight, -1, gate_bias, 0}, {up_weight, -1, up_bias, 0}, out);
    }
    int bind(int thread, const std::vector<int> &cpus) {
        want(thread > 0 && thread < program_.threads(), "only threads of the program's own can be bound");
        return program_.bind(thread, cpus);
    }
    std::vector<std::tuple<int, uintptr_t, size_t>> reads() const {
        std::vector<std::tuple<int, uintptr_t, size_t>> out;
        for (const Program::Read &r : program_.reads()) out.emplace_back(r.thread, reinterpret_cast<uintptr_t>(r.data), r.bytes);
        return out;
    }
    std::vector<std::pair<uintptr_t, size_t>> pools() const {
        std::vector<std::pair<uintptr_t, size_t>> out;
        for (const auto &[p, bytes] : program_.pools()) out.emplace_back(reinterpret_cast<uintptr_t>(p), bytes);
        return out;
    }
    // Parts: (weight, rank, scale, A [rank, inputs] and B [outputs, rank], both in tiles of bf16). No parts: takes it away.
    void set_adapter(int number, const std::vector<std::tuple<int, int64_t, float, In<uint8_t>, In<uint8_t>>> &parts) {
        std::vector<LowRank> all;
        nb::list arrays;
        for (const auto &[weight, rank, scale, a, b] : parts) {
            want(weight >= 0 && size_t(weight) < rows_.size() && rank > 0, "an adapter's part is of no weight");
            const Packed &w = program_.weight_of(weight);
            LowRank part{packed_shape("BF16", rank, w.k), packed_shape("BF16", rows_[size_t(weight)], rank), scale};
            want(a.size() == part.a.bytes() && b.size() == part.b.bytes() && part.b.n == w.n, "an adapter's packed size is wrong");
            part.a.data = a.data(), part.b.data = b.data();
            arrays.append(nb::cast(a));
            arrays.append(nb::cast(b));
            if (all.size() <= size_t(weight)) all.resize(size_t(weight) + 1);
            all[size_t(weight)] = part;
        }
        program_.set_adapter(number, std::move(all));
        adapters_[nb::int_(number)] = arrays; // what it was before is not read any more
    }
    Program &program() { return program_; }

    // The arrays are used until `wait` returns: their owner keeps them. None is converted, so they are the owner's own.
    Step step_of(In<int32_t> tokens, In<int32_t> starts, In<int32_t> context, In2<int32_t> tables, In<int32_t> wanted, nb::dict sampling,
                nb::object adapters, Out<int32_t> token, Out<float> logprob, Out2<int32_t> top_token, Out2<float> top_logprob, nb::object logits) {
        Step s{};
        s.count = int64_t(tokens.size());
        s.sequences = int64_t(context.size());
        s.wanted_count = int64_t(wanted.size());
        s.table_width = int64_t(tables.shape(1));
        s.group_width = s.table_width / std::max<int64_t>(1, int64_t(pages_.size()));
        s.tokens = tokens.data(), s.starts = starts.data(), s.context = context.data(), s.tables = tables.data(), s.wanted = wanted.data();
        check(s, tables);
        take(sampling, "temperature", s.temperature, s.wanted_count), take(sampling, "top_p", s.top_p, s.wanted_count);
        take(sampling, "min_p", s.min_p, s.wanted_count), take(sampling, "presence", s.presence, s.wanted_count);
        take(sampling, "frequency", s.frequency, s.wanted_count), take(sampling, "repetition", s.repetition, s.wanted_count);
        take(sampling, "top_k", s.top_k, s.wanted_count), take(sampling, "position", s.position, s.wanted_count);
        take(sampling, "forced", s.forced, s.wanted_count), take(sampling, "logprobs", s.logprobs, s.wanted_count);
        take(sampling, "seed", s.seed, s.wanted_count);
        sparse(sampling, "seen_start", "seen_token", "seen_count", s.wanted_count, s.seen_start, s.seen_token, s.seen_count);
        sparse(sampling, "bias_start", "bias_token", "bias_value", s.wanted_count, s.bias_start, s.bias_token, s.bias_value);
        masks(sampling, s);
        if (!adapters.is_none()) {
            const auto of = nb::cast<In<int32_t>>(adapters, false);
            want(int64_t(of.size()) == s.sequences, "adapters must have one entry a sequence");
            s.adapters = of.data();
        }
        want(int64_t(token.size()) == s.wanted_count && int64_t(logprob.size()) == s.wanted_count, "outputs must have one entry a wanted row");
        want(int64_t(top_token.shape(0)) == s.wanted_count && int64_t(top_logprob.shape(0)) == s.wanted_count &&
                 top_token.shape(1) == top_logprob.shape(1),
             "top outputs must have one row a wanted row");
        s.top_width = int64_t(top_token.shape(1));
        for (int64_t i = 0; i < s.wanted_count; i++) {
            want(s.logprobs[i] <= s.top_width, "more log-probabilities asked for than there is room for");
            want(s.forced[i] < vocab_, "a forced token is past the vocabulary");
        }
        s.token = token.data(), s.logprob = logprob.data(), s.top_token = top_token.data(), s.top_logprob = top_logprob.data();
        if (!logits.is_none()) {
            auto l = nb::cast<Out2<float>>(logits, false);
            want(int64_t(l.shape(0)) == s.wanted_count && int64_t(l.shape(1)) == vocab_, "logits have the wrong shape");
            s.logits = l.data();
        }
        return s;
    }
    template <class... Args> void launch(Args... args) { program_.launch(step_of(args...)); }
    void chain(Out<int32_t> tokens, In<int32_t> starts, In<int32_t> context, In2<int32_t> tables, In<int32_t> wanted, nb::dict sampling,
               nb::object adapters, Out<int32_t> token, Out<float> logprob, Out2<int32_t> top_token, Out2<float> top_logprob, In<int32_t> end_start,
               In<int32_t> ends) {
        const Step s = step_of(In<int32_t>(tokens), starts, context, tables, wanted, sampling, adapters, token, logprob, top_token, top_logprob, nb::none());
        want(int64_t(end_start.size()) == s.wanted_count + 1 && end_start.data()[0] == 0 && end_start.data()[s.wanted_count] == int32_t(ends.size()),
             "ends must have a run for each row");
        for (int64_t i = 0; i < s.wanted_count; i++) want(end_start.data()[i] <= end_start.data()[i + 1], "ends must have a run for each row");
        program_.chain(s, tokens.data(), {end_start.data(), end_start.data() + end_start.size()}, {ends.data(), ends.data() + ends.size()});
    }
    bool wait() {
        nb::gil_scoped_release release;
        return program_.wait();
    }
    void read_page(int64_t page, Out<uint8_t> out, int64_t group) {
        check_page(group, page, int64_t(out.size()));
        uint8_t *data = out.data();
        nb::gil_scoped_release release;
        program_.read_page(group, page, data);
    }
    void write_page(int64_t page, In<uint8_t> data, int64_t group) {
        check_page(group, page, int64_t(data.size()));
        const uint8_t *source = data.data();
        nb::gil_scoped_release release;
        program_.write_page(group, page, source);
    }

  private:
    void check_page(int64_t group, int64_t page, int64_t bytes) const {
        want(group >= 0 && size_t(group) < pages_.size(), "there is no such group of pages");
        want(page >= 0 && page < pages_[size_t(group)], "a page is past the pool");
        want(bytes == program_.page_bytes(group), "a page's data has the wrong size");
    }
    // The kernels index memory by what is in these arrays, so everything is checked here, once a step.
    void check(const Step &s, const In2<int32_t> &tables) {
        want(s.count > 0, "a step needs tokens");
        want(s.sequences > 0 && s.sequences <= max_sequences_, "too many sequences in a step");
        want(int64_t(tables.shape(0)) == s.sequences, "tables must have one row a sequence");
        want(pages_.empty() || s.table_width % int64_t(pages_.size()) == 0, "tables must be as wide for each group of pages");
        want(s.starts[0] == 0 && s.starts[s.sequences] == s.count, "starts must cover the tokens");
        for (int64_t i = 0; i < s.sequences; i++) {
            want(s.starts[i] < s.starts[i + 1], "a sequence needs tokens");
            want(s.context[i] >= 0, "a context is negative");
            const int64_t pages = (int64_t(s.context[i]) + s.starts[i + 1] - s.starts[i] + PAGE - 1) / PAGE;
            want(pages <= s.group_width, "a block table is too short");
            for (size_t g = 0; g < pages_.size(); g++) {
                const int32_t *table = s.tables + i * s.table_width + int64_t(g) * s.group_width;
                const int64_t most = pages_[g];
                for (int64_t p = 0; p < pages; p++) want(table[p] >= 0 && (table[p] < most || most == 0), "a page is past the pool");
            }
        }
        for (int64_t i = 0; i < s.count; i++) want(s.tokens[i] >= 0 && s.tokens[i] < table_rows_, "a token is past the embedding table");
        for (int64_t i = 0; i < s.wanted_count; i++)
            want(s.wanted[i] >= 0 && s.wanted[i] < s.count && (i == 0 || s.wanted[i] > s.wanted[i - 1]), "wanted rows must ascend within the step");
    }
    template <class T> int64_t take(const nb::dict &d, const char *name, const T *&out, int64_t size) {
        auto a = nb::cast<In<T>>(d[name], false);
        if (size >= 0) want(int64_t(a.size()) == size, name);
        out = a.data();
        return int64_t(a.size());
    }
    void masks(const nb::dict &sampling, Step &s) {
        const nb::object masks = sampling["masks"];
        if (masks.is_none()) return;
        const auto row = nb::cast<In<int32_t>>(masks.attr("row"), false);
        const auto bits = nb::cast<In2<uint32_t>>(masks.attr("bits"), false);
        const auto ready = nb::cast<Out<int32_t>>(masks.attr("ready"), false);
        want(int64_t(row.size()) == s.wanted_count && ready.size() == 1, "masks must say for each wanted row which is its own");
        want(int64_t(bits.shape(1)) * 32 >= vocab_limit_, "a mask must have a bit for each token");
        for (int64_t i = 0; i < s.wanted_count; i++) want(row.data()[i] < int64_t(bits.shape(0)), "a row's mask is past the masks");
        s.mask_row = row.data(), s.masks = bits.data(), s.mask_words = int64_t(bits.shape(1)), s.masks_ready = ready.data();
    }
    template <class V>
    void sparse(const nb::dict &d, const char *start, const char *token, const char *value, int64_t rows, const int32_t *&starts,
                const int32_t *&tokens, const V *&values) {
        take(d, start, starts, rows + 1);
        const int64_t n = take(d, token, tokens, -1);
        take(d, value, values, n);
        want(starts[0] == 0 && starts[rows] == n, start);
        for (int64_t i = 0; i < rows; i++) want(starts[i] <= starts[i + 1], start);
    }

    nb::list keep_; // arrays that the program reads: outlives its threads
    nb::dict adapters_; // likewise, by the adapter's number
    Program program_;
    int64_t vocab_, vocab_limit_, max_sequences_, table_rows_ = 0;
    std::vector<int64_t> pages_; // of each group
    std::vector<int64_t> rows_;
};

} // namespace

NB_MODULE(_kernels, m) {
    m.def("available", &available);
    m.def("read_rate", &measured_read_rate, nb::arg("kernels"), nb::arg("nbytes"), nb::arg("threads"), nb::arg("seconds"));
    m.def("peaks", &named_peaks, nb::arg("kernels"));
    m.def("multiply_add_rate", &measured_multiply_adds, nb::arg("kernels"), nb::arg("kind"), nb::arg("threads"), nb::arg("seconds"));
    m.def("hand_over", &measured_hand_over, nb::arg("parked"), nb::arg("seconds"));
    m.def("page_fault", &measured_page_fault, nb::arg("seconds"));
    m.def("packed_shape", &shape_of, nb::arg("format"), nb::arg("n"), nb::arg("k"));
    m.def("pack", &pack, nb::arg("format"), nb::arg("rows"), nb::arg("k"), nb::arg("first_tile"), nb::arg("end_tile"), nb::arg("out"));
    nb::class_<Recorder>(m, "Program", nb::is_weak_referenceable())
        .def(nb::init<const std::string &, int, int64_t, int64_t, int64_t, int64_t>(), nb::arg("kernels"), nb::arg("threads"),
             nb::arg("max_tokens"), nb::arg("max_sequences"), nb::arg("vocab"), nb::arg("vocab_limit"))
        .def("buffer", [](Recorder &r, int64_t width) { return r.program().buffer(width); })
        .def("weight", &Recorder::weight)
        .def("vector", &Recorder::vector)
        .def("rope", &Recorder::rope)
        .def("add_pool", &Recorder::add_pool)
        .def("embed", &Recorder::embed)
        .def("norm", [](Recorder &r, int x, int w, float eps, int64_t width, int out, bool q) { r.program().norm(x, w, eps, width, out, q); })
        .def("quantise", [](Recorder &r, int x) { r.program().quantise(x); })
        .def("linear", &Recorder::linear)
        .def("head_norm", [](Recorder &r, int x, int64_t column, int w, float eps, int heads,
                             int dim) { r.program().head_norm(x, column, w, eps, heads, dim); })
        .def("rotate", [](Recorder &r, int x, int64_t column, int rope, int heads, int dim) { r.program().rotate(x, column, rope, heads, dim); })
        .def("attention", [](Recorder &r, int q, int64_t qc, int k, int64_t kc, int v, int64_t vc, int out, int64_t pool, int heads, int kv_heads,
                             int dim, float scale,
                             int64_t window) { r.program().attention(q, qc, k, kc, v, vc, out, pool, heads, kv_heads, dim, scale, window); })
        .def("silu_mul", [](Recorder &r, int gate, int64_t gc, int up, int64_t uc, int64_t width, int out,
                            bool q) { r.program().silu_mul(gate, gc, up, uc, width, out, q); })
        .def("add", [](Recorder &r, int a, int b, int64_t width, int out) { r.program().add(a, b, width, out); })
        .def("select", [](Recorder &r, int x, int64_t width) { return r.program().select(x, width); })
        .def("sample", [](Recorder &r, int logits) { r.program().sample(logits); })
        .def("gate", &Recorder::gate)
        .def("set_adapter", &Recorder::set_adapter)
        .def("launch", &Recorder::launch<In<int32_t>, In<int32_t>, In<int32_t>, In2<int32_t>, In<int32_t>, nb::dict, nb::object, Out<int32_t>, Out<float>,
                                         Out2<int32_t>, Out2<float>, nb::object>, nb::arg("tokens").noconvert(), nb::arg("starts").noconvert(), nb::arg("context").noconvert(),
             nb::arg("tables").noconvert(), nb::arg("wanted").noconvert(), nb::arg("sampling"), nb::arg("adapters").none(),
             nb::arg("token").noconvert(), nb::arg("logprob").noconvert(), nb::arg("top_token").noconvert(), nb::arg("top_logprob").noconvert(), nb::arg("logits").none())
        .def("chain", &Recorder::chain, nb::arg("tokens").noconvert(), nb::arg("starts").noconvert(), nb::arg("context").noconvert(),
             nb::arg("tables").noconvert(), nb::arg("wanted").noconvert(), nb::arg("sampling"), nb::arg("adapters").none(),
             nb::arg("token").noconvert(), nb::arg("logprob").noconvert(), nb::arg("top_token").noconvert(), nb::arg("top_logprob").noconvert(),
             nb::arg("end_start").noconvert(), nb::arg("ends").noconvert())
        .def_static("release", [](Out<int32_t> masks_ready) {
            want(masks_ready.size() == 1, "there is one flag");
            Program::release(masks_ready.data());
        }, nb::arg("masks_ready").noconvert())
        .def("hold", [](Recorder &r, bool on) { r.program().hold(on); })
        .def("wait", &Recorder::wait)
        .def("read_page", &Recorder::read_page, nb::arg("page"), nb::arg("out").noconvert(), nb::arg("group"))
        .def("write_page", &Recorder::write_page, nb::arg("page"), nb::arg("data").noconvert(), nb::arg("group"))
        .def("page_bytes", [](Recorder &r, int64_t group) { return r.program().page_bytes(group); })
        .def("bind", &Recorder::bind)
        .def("reads", &Recorder::reads)
        .def("pools", &Recorder::pools)
        .def_prop_ro("redone", [](Recorder &r) { return r.program().redone(); })
        .def_prop_ro("worked", [](Recorder &r) { return r.program().worked(); })
        .def("profile", [](Recorder &r, bool on) { r.program().profile(on); })
        .def("profiled", [](Recorder &r) { return r.program().profiled(); })
        .def_prop_ro("threads", [](Recorder &r) { return r.program().threads(); })
        .def_prop_ro("kernels", [](Recorder &r) { return std::string(r.program().kernels()); })
        .def_prop_ro("kv_bytes", [](Recorder &r) { return r.program().kv_bytes(); });
}
