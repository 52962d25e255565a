// What this machine's memory gives: the ceiling that decoding is held against.
#include "ceilings.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

namespace tailrace {

double read_rate(int64_t bytes, int threads, int rounds) {
    const int64_t words = bytes / 8 / threads;
    std::vector<std::vector<uint64_t>> data(static_cast<size_t>(threads), std::vector<uint64_t>(static_cast<size_t>(words), 1));
    double best = 0.0;
    for (int round = 0; round < rounds; round++) {
        std::vector<uint64_t> sums(static_cast<size_t>(threads) * 16);
        std::vector<std::thread> workers;
        const auto begin = std::chrono::steady_clock::now();
        for (int t = 0; t < threads; t++)
            workers.emplace_back([&, t] {
                const uint64_t *p = data[static_cast<size_t>(t)].data();
                uint64_t s[8] = {};
                for (int64_t i = 0; i + 8 <= words; i += 8)
                    for (int j = 0; j < 8; j++) s[j] += p[i + j];
                for (uint64_t x : s) sums[static_cast<size_t>(t) * 16] += x;
            });
        for (auto &w : workers) w.join();
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
        volatile uint64_t sink = 0; // the sums must be computed
        for (uint64_t x : sums) sink = sink + x;
        best = std::max(best, static_cast<double>(words) * 8.0 * threads / took.count());
    }
    return best;
}

} // namespace tailrace
