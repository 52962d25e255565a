// Threads that stay: they take work in small pieces, meet at barriers, and park after a short spin.
//
// A thread that the system takes off its core delays at most the piece that it holds; the others take the rest.
// The caller of `run` is thread 0. One `run` at a time.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace tailrace {

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

class Barrier {
  public:
    explicit Barrier(int parties) : parties_(parties) {}
    void wait() {
        if (parties_ == 1) return;
        const uint32_t phase = phase_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == parties_) {
            arrived_.store(0, std::memory_order_relaxed);
            phase_.store(phase + 1, std::memory_order_seq_cst);
            if (parked_.load(std::memory_order_seq_cst) > 0) phase_.notify_all();
            return;
        }
        for (int i = 0; i < SPIN; i++) {
            if (phase_.load(std::memory_order_acquire) != phase) return;
            relax();
        }
        parked_.fetch_add(1, std::memory_order_seq_cst);
        while (phase_.load(std::memory_order_seq_cst) == phase) phase_.wait(phase, std::memory_order_seq_cst);
        parked_.fetch_sub(1, std::memory_order_seq_cst);
    }

  private:
    static constexpr int SPIN = 2000; // a few tens of microseconds
    const int parties_;
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint32_t> phase_{0};
    std::atomic<int> parked_{0};
};

class Pool {
  public:
    explicit Pool(int threads);
    ~Pool();
    Pool(const Pool &) = delete;
    Pool &operator=(const Pool &) = delete;

    int threads() const { return threads_; }
    Barrier &barrier() { return barrier_; }
    // Calls job(thread) on every thread and returns when all have ended.
    void run(const std::function<void(int)> &job);

  private:
    void loop(int thread);

    const int threads_;
    Barrier barrier_, end_;
    std::atomic<uint32_t> epoch_{0};
    std::atomic<bool> stop_{false};
    const std::function<void(int)> *job_ = nullptr;
    std::vector<std::thread> workers_;
};

} // namespace tailrace
