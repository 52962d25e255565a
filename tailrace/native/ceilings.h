#pragma once

#include <cstdint>

namespace tailrace {

// Bytes per second that `threads` threads read together, each its own share of `bytes`; the best of `rounds`.
double read_rate(int64_t bytes, int threads, int rounds);

} // namespace tailrace
