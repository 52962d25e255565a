// The Python face of the encoders' kernels. It checks every array's type and size; nothing below it does.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <stdexcept>
#include <string>

#include "encoder.h"

namespace nb = nanobind;
using namespace tailrace;

namespace {

template <class T> using In = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T> using In2 = nb::ndarray<const T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Out2 = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void want(bool ok, const char *what) {
    if (!ok) throw std::invalid_argument(what);
}

template <class T> T named(const std::string &name, std::initializer_list<const char *> names) {
    int at = 0;
    for (const char *one : names) {
        if (name == one) return T(at);
        at++;
    }
    throw std::invalid_argument("'" + name + "' is not known here");
}

// Its name is not that of a class in module.cpp: the two extensions share one list of types.
class EncoderRecorder {
  public:
    EncoderRecorder(const std::string &kernels, int threads, int64_t longest) : encoder_(encoder_build(kernels), threads, longest) {
        want(threads >= 1 && threads <= 4096 && longest >= 1 && longest < int64_t(1) << 24, "threads or the longest text are out of range");
    }
    Encoder &encoder() { return encoder_; }

    int table(In2<uint8_t> data, const std::string &format, int64_t width) {
        const auto kind = named<Format>(format, {"F32", "F16", "BF16"});
        want(int64_t(data.shape(1)) == width * (kind == Format::F32 ? 4 : 2), "a table's rows have the wrong size");
        keep_.append(nb::cast(data));
        tables_.push_back({int64_t(data.shape(0)), width});
        return encoder_.table(data.data(), kind, int64_t(data.shape(0)), width);
    }
    int buffer(int64_t width) {
        want(width > 0, "a buffer needs a width");
        widths_.push_back(width);
        return encoder_.buffer(width);
    }
    void embed(int words, int positions, int kinds, int64_t first, int out) {
        for (int t : {words, positions, kinds}) want(t < 0 || tables_.at(size_t(t)).second == widths_.at(size_t(out)), "a table has another width");
        want(words >= 0 && positions >= 0 && first >= 0, "words and positions are needed");
        words_ = tables_[size_t(words)].first, positions_ = tables_[size_t(positions)].first - first;
        kinds_ = kinds < 0 ? 1 : tables_[size_t(kinds)].first;
        encoder_.embed(words, positions, kinds, first, out);
    }
    void run(In<int32_t> tokens, In<int32_t> kinds, In<int32_t> starts, Out2 out) {
        const auto texts = int64_t(starts.size()) - 1, count = int64_t(tokens.size());
        want(texts > 0 && starts.data()[0] == 0 && starts.data()[texts] == count && int64_t(kinds.size()) == count, "starts must cover the tokens");
        for (int64_t t = 0; t < texts; t++) {
            const int64_t n = int64_t(starts.data()[t + 1]) - starts.data()[t];
            want(n > 0 && n <= encoder_.longest() && n <= positions_, "a text is empty or too long");
        }
        for (int64_t i = 0; i < count; i++) {
            want(tokens.data()[i] >= 0 && tokens.data()[i] < words_, "a token is past the table");
            want(kinds.data()[i] >= 0 && kinds.data()[i] < kinds_, "a segment is past the table");
        }
        want(int64_t(out.shape(0)) == texts && int64_t(out.shape(1)) == encoder_.width(), "the output has the wrong shape");
        const int32_t *t = tokens.data(), *k = kinds.data(), *s = starts.data();
        float *o = out.data();
        nb::gil_scoped_release release;
        encoder_.run(t, k, s, texts, o);
    }

  private:
    nb::list keep_;
    Encoder encoder_;
    std::vector<std::pair<int64_t, int64_t>> tables_;
    std::vector<int64_t> widths_;
    int64_t words_ = 0, positions_ = 0, kinds_ = 0;
};

} // namespace

NB_MODULE(_encoder, m) {
    nb::class_<EncoderRecorder>(m, "Encoder")
        .def(nb::init<const std::string &, int, int64_t>(), nb::arg("kernels"), nb::arg("threads"), nb::arg("longest"))
        .def("buffer", &EncoderRecorder::buffer)
        .def("vector", [](EncoderRecorder &r, In<float> data) { return r.encoder().vector(data.data(), int64_t(data.size())); })
        .def("matrix", [](EncoderRecorder &r, In2<float> data) { return r.encoder().matrix(data.data(), int64_t(data.shape(0)), int64_t(data.shape(1))); })
        .def("table", &EncoderRecorder::table)
        .def("embed", &EncoderRecorder::embed)
        .def("linear", [](EncoderRecorder &r, int x, int matrix, int bias, int residual, const std::string &bend,
                          int out) { r.encoder().linear(x, matrix, bias, residual, named<Bend>(bend, {"", "gelu", "tanh"}), out); })
        .def("norm", [](EncoderRecorder &r, int x, int weight, int bias, float eps, int out) { r.encoder().norm(x, weight, bias, eps, out); })
        .def("attention", [](EncoderRecorder &r, int x, int64_t q, int64_t k, int64_t v, int64_t heads, int64_t head_dim, float scale,
                             int out) { r.encoder().attention(x, q, k, v, heads, head_dim, scale, out); })
        .def("pool", [](EncoderRecorder &r, int x, const std::string &how, int out) { r.encoder().pool(x, named<Pooled>(how, {"mean", "cls", "last"}), out); })
        .def("unit", [](EncoderRecorder &r, int x) { r.encoder().unit(x); })
        .def("finish", [](EncoderRecorder &r, int x) { r.encoder().finish(x); })
        .def("run", &EncoderRecorder::run, nb::arg("tokens").noconvert(), nb::arg("kinds").noconvert(), nb::arg("starts").noconvert(), nb::arg("out").noconvert())
        .def_prop_ro("kernels", [](EncoderRecorder &r) { return std::string(r.encoder().name()); })
        .def_prop_ro("threads", [](EncoderRecorder &r) { return r.encoder().threads(); })
        .def_prop_ro("worked", [](EncoderRecorder &r) { return r.encoder().worked(); })
        .def_prop_ro("nbytes", [](EncoderRecorder &r) { return r.encoder().bytes(); });
}
