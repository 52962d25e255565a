// What this machine gives at most: the ceilings that the kernels are held against. Each is measured for about `seconds` in
// short rounds. Threads are kept on cores of their own where there is one for each and none is left.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"

namespace tailrace {

// Of all rounds: the best, which is the ceiling, and the median, which says how far a usual moment is from it.
struct Spread {
    double best, median;
};

// The kinds of multiply-add that a build is made of; and for builds of AVX-512, what else this processor has.
std::vector<Peak> peaks_of(const Kernels &k);

// Bytes per second that `threads` threads read together, each its own `bytes` of memory, over and over; in huge pages,
// where the system gives them.
Spread read_rate(const Kernels &k, int64_t bytes, int threads, double seconds);

// Multiply-adds per second of one kind on `threads` threads together.
Spread multiply_add_rate(const Peak &peak, int threads, double seconds);

// Seconds from handing work to another thread until its answer is seen. The other one spins; or, where `parked`, sleeps
// on a futex and has to be woken.
Spread hand_over(bool parked, double seconds);

// Seconds to touch one page of fresh anonymous memory. Huge pages are declined.
Spread page_fault(double seconds);

} // namespace tailrace
