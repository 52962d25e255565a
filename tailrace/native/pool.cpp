#include "pool.h"

namespace tailrace {

Pool::Pool(int threads) : threads_(threads < 1 ? 1 : threads), barrier_(threads_), end_(threads_) {
    for (int t = 1; t < threads_; t++) workers_.emplace_back([this, t] { loop(t); });
}

Pool::~Pool() {
    stop_.store(true);
    epoch_.fetch_add(1);
    epoch_.notify_all();
    for (auto &w : workers_) w.join();
}

void Pool::run(const std::function<void(int)> &job) {
    job_ = &job;
    epoch_.fetch_add(1, std::memory_order_seq_cst);
    epoch_.notify_all();
    job(0);
    end_.wait();
}

void Pool::loop(int thread) {
    uint32_t seen = 0;
    for (;;) {
        for (int i = 0; i < 4000 && epoch_.load(std::memory_order_acquire) == seen; i++) relax();
        while (epoch_.load(std::memory_order_seq_cst) == seen) epoch_.wait(seen, std::memory_order_seq_cst);
        seen++;
        if (stop_.load()) return;
        (*job_)(thread);
        end_.wait();
    }
}

} // namespace tailrace
