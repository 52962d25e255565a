// Threads that stay. They are told that there is work, do what they find, and park after a short spin.
//
// Nobody waits for a thread: the caller of `start` works too, and whoever wakes up late finds the work done. What is to
// be done, and when it is complete, is the job's own affair (see Program::replay).
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

class Pool {
  public:
    // `job(thread)` is called on threads 1..threads-1 after each `start`; calls of different starts may be skipped.
    Pool(int threads, std::function<void(int)> job);
    ~Pool();
    Pool(const Pool &) = delete;
    Pool &operator=(const Pool &) = delete;

    int threads() const { return threads_; }
    // Wakes the threads and returns at once.
    void start();
    // Keeps a thread, but not thread 0, on these CPUs. Returns 0, or what the system has against it (errno).
    int bind(int thread, const std::vector<int> &cpus);

  private:
    void loop(int thread);

    const int threads_;
    const std::function<void(int)> job_;
    std::atomic<uint32_t> epoch_{0};
    std::atomic<bool> stop_{false};
    std::vector<std::thread> workers_;
};

} // namespace tailrace
