// From a row of logits to a token. Gumbel-max over the kept tokens: the noise of a token depends on (seed, position, token)
// alone, so the draw does not depend on what else is in the batch, nor on which tokens were filtered.
#pragma once

#include <limits>

namespace TR_NS {

using namespace tailrace;

// Gumbel noise of sixteen tokens: -log(-log(u)), u uniform in (0, 1) from a counter-based hash.
inline F gumbel(I token, uint32_t k0, uint32_t k1, uint32_t position) {
    const auto word = [](uint32_t x) { return i_set1(static_cast<int32_t>(x)); };
    const I a = word(k0 ^ (position * 0x9E3779B9u)), b = word(k1 + position * 0x85EBCA6Bu);
    I h = token * word(0xCC9E2D51u) + a;
    h = h ^ i_shr<16>(h);
    h = h * word(0x7FEB352Du);
    h = h ^ i_shr<15>(h);
    h = h + b;
    h = h * word(0x846CA68Bu);
    h = h ^ i_shr<16>(h);
    h = h ^ a;
    h = h * word(0x9E3779B1u);
    h = h ^ i_shr<15>(h);
    // 23 bits, so that the half is exact: with 24 the largest would round to 1, whose noise is infinite
    const F u = (i_float(i_shr<9>(h)) + f_set1(0.5f)) * f_set1(0x1p-23f);
    return f_zero() - f_log(f_zero() - f_log(u));
}

inline float row_max(const float *z, int64_t padded) {
    F m = f_load(z);
    for (int64_t i = LANES; i < padded; i += LANES) m = f_max(m, f_load(z + i));
    return f_hmax(m);
}

// Lowest index of the maximum; -1 where nothing is above -infinity (all banned, or not a number).
inline int32_t argmax(const float *z, int64_t padded) {
    const float m = row_max(z, padded);
    if (!(m > -std::numeric_limits<float>::infinity())) return -1;
    for (int64_t i = 0; i < padded; i++)
        if (z[i] == m) return static_cast<int32_t>(i);
    return -1;
}

inline void penalise(const SampleArgs &a, float *z) {
    for (int64_t i = 0; i < a.seen; i++) {
        const int32_t t = a.seen_token[i], count = a.seen_count[i];
        if (t < 0 || t >= a.vocab) continue;
        float l = z[t];
        l = l > 0.0f ? l / a.repetition : l * a.repetition;
        if (count > 0) l -= a.presence + a.frequency * float(count);
        z[t] = l;
    }
    for (int64_t i = 0; i < a.biases; i++)
        if (a.bias_token[i] >= 0 && a.bias_token[i] < a.vocab) z[a.bias_token[i]] += a.bias_value[i];
}

inline int32_t draw(const SampleArgs &a, const float *z, float *work) {
    const float max = row_max(z, a.padded);
    if (!(max > -std::numeric_limits<float>::infinity()) || !(max < std::numeric_limits<float>::infinity())) return -1;
    const uint32_t k0 = static_cast<uint32_t>(a.seed), k1 = static_cast<uint32_t>(a.seed >> 32), position = static_cast<uint32_t>(a.position);
    int32_t ids[LANES];
    for (int i = 0; i < LANES; i++) ids[i] = i;
    const I lane = i_load(ids);
    const F m = f_set1(max), t = f_set1(a.temperature);
    if (a.top_k <= 0 && a.top_p >= 1.0f && a.min_p <= 0.0f) {
        for (int64_t i = 0; i < a.padded; i += LANES)
            f_store(work + i, (f_load(z + i) - m) / t + gumbel(lane + i_set1(int32_t(i)), k0, k1, position));
        return argmax(work, a.padded);
    }
    for (int64_t i = 0; i < a.padded; i += LANES) f_store(work + i, f_exp((f_load(z + i) - m) / t));
    auto *ids_kept = reinterpret_cast<int32_t *>(work + a.padded);
    const int64_t count = select_kept(work, a.vocab, a.min_p, a.top_k, a.top_p, ids_kept);
    int32_t best = -1;
    float best_value = -std::numeric_limits<float>::infinity();
    for (int64_t i = 0; i < count; i += LANES) {
        float value[LANES];
        for (int j = 0; j < LANES; j++) {
            ids[j] = ids_kept[i + j < count ? i + j : count - 1];
            value[j] = z[ids[j]];
        }
        f_store(value, (f_load(value) - m) / t + gumbel(i_load(ids), k0, k1, position));
        for (int j = 0; j < LANES && i + j < count; j++)
            if (value[j] > best_value || (value[j] == best_value && ids[j] < best)) {
                best_value = value[j];
                best = ids[j];
            }
    }
    return best;
}

// scratch: 3 * padded floats.
Sampled sample(const SampleArgs &a, float *scratch) {
    const float nothing = -std::numeric_limits<float>::infinity();
    for (int64_t i = a.vocab; i < a.padded; i++) a.logits[i] = nothing;
    float lse = 0.0f;
    if (a.logprobs >= 0 || a.forced >= 0) {
        const float m = row_max(a.logits, a.padded);
        F total = f_zero();
        for (int64_t i = 0; i < a.padded; i += LANES) total = total + f_exp(f_load(a.logits + i) - f_set1(m));
        lse = m + std::log(f_sum(total));
        if (a.logprobs > 0) {
            select_top(a.logits, a.vocab, a.logprobs, a.top_token, a.top_logprob);
            for (int32_t i = 0; i < a.logprobs; i++) a.top_logprob[i] -= lse;
        }
    }
    if (a.forced >= 0) return {a.forced, a.logits[a.forced] - lse};
    const float *z = a.logits;
    if (a.seen > 0 || a.biases > 0) {
        std::memcpy(scratch, a.logits, sizeof(float) * size_t(a.padded));
        penalise(a, scratch);
        z = scratch;
    }
    const int32_t token = a.temperature <= 0.0f ? argmax(z, a.padded) : draw(a, z, scratch + a.padded);
    return {token, token >= 0 && a.logprobs >= 0 ? a.logits[token] - lse : 0.0f};
}

} // namespace TR_NS
