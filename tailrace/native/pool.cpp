#include "pool.h"

#include <pthread.h>
#include <sched.h>

#include <cerrno>
#include <utility>

namespace tailrace {

constexpr int SPIN = 4000; // some tens of microseconds

Pool::Pool(int threads, std::function<void(int)> job) : threads_(threads < 1 ? 1 : threads), job_(std::move(job)) {
    for (int t = 1; t < threads_; t++) workers_.emplace_back([this, t] { loop(t); });
}

Pool::~Pool() {
    stop_.store(true);
    start();
    for (auto &w : workers_) w.join();
}

void Pool::start() {
    epoch_.fetch_add(1);
    epoch_.notify_all();
}

int Pool::bind(int thread, const std::vector<int> &cpus) {
#ifdef __linux__
    cpu_set_t set;
    CPU_ZERO(&set);
    for (int cpu : cpus)
        if (cpu >= 0 && cpu < CPU_SETSIZE) CPU_SET(cpu, &set);
    return pthread_setaffinity_np(workers_.at(size_t(thread - 1)).native_handle(), sizeof set, &set);
#else
    return (void)thread, (void)cpus, ENOSYS;
#endif
}

void Pool::loop(int thread) {
    uint32_t seen = 0;
    for (;;) {
        uint32_t now = epoch_.load();
        for (int i = 0; i < SPIN && now == seen; i++) {
            relax();
            now = epoch_.load(std::memory_order_acquire);
        }
        while (now == seen) {
            epoch_.wait(seen);
            now = epoch_.load();
        }
        seen = now;
        if (stop_.load()) return;
        job_(thread);
    }
}

} // namespace tailrace
