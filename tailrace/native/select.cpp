// Choosing among the tokens of a row: sorting, in plain C++ shared by all kernel builds.
#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "kernels.h"

namespace tailrace {

using Item = std::pair<float, int32_t>;

// Likeliest first, lower ids first among equals.
static bool likelier(const Item &a, const Item &b) { return a.first != b.first ? a.first > b.first : a.second < b.second; }

void select_top(const float *logits, int64_t vocab, int32_t count, int32_t *token, float *logit) {
    std::vector<Item> best;
    best.reserve(size_t(count) + 1);
    for (int64_t i = 0; i < vocab; i++) {
        if (best.size() == size_t(count) && logits[i] <= best.back().first) continue;
        const Item item{logits[i], int32_t(i)};
        best.insert(std::upper_bound(best.begin(), best.end(), item, likelier), item);
        if (best.size() > size_t(count)) best.pop_back();
    }
    for (size_t i = 0; i < size_t(count); i++) {
        token[i] = i < best.size() ? best[i].second : -1;
        logit[i] = i < best.size() ? best[i].first : -std::numeric_limits<float>::infinity();
    }
}

int64_t select_kept(const float *e, int64_t vocab, float min_p, int32_t top_k, float top_p, int32_t *ids) {
    double total = 0.0;
    for (int64_t i = 0; i < vocab; i++)
        if (e[i] >= min_p) total += e[i];
    // Collect from the likeliest down until what is there is sure to decide the filters; most rows need one round.
    std::vector<Item> kept;
    for (float cut = 1e-2f;; cut = cut > 1e-12f ? cut * 1e-2f : 0.0f) {
        const float floor = std::max(cut, min_p);
        double sum = 0.0;
        kept.clear();
        for (int64_t i = 0; i < vocab; i++)
            if (e[i] >= floor) {
                kept.emplace_back(e[i], int32_t(i));
                sum += e[i];
            }
        const bool enough = top_k > 0 ? int64_t(kept.size()) >= top_k : sum >= double(top_p) * total;
        if (cut <= min_p || cut == 0.0f || enough) break;
    }
    std::sort(kept.begin(), kept.end(), likelier);
    if (top_k > 0 && int64_t(kept.size()) > top_k) kept.resize(size_t(top_k));
    if (top_p < 1.0f) {
        if (top_k > 0) {
            total = 0.0;
            for (const Item &x : kept) total += x.first;
        }
        double sum = 0.0;
        size_t n = 0;
        while (n < kept.size() && (n == 0 || sum < double(top_p) * total)) sum += kept[n++].first;
        kept.resize(n);
    }
    for (size_t i = 0; i < kept.size(); i++) ids[i] = kept[i].second;
    return int64_t(kept.size());
}

} // namespace tailrace
