#include "ceilings.h"

#include <sched.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <exception>
#include <functional>
#include <new>
#include <thread>

#include "pool.h"

namespace tailrace {
namespace {

constexpr double ROUND = 2e-3;       // seconds that a round should take: much more than a barrier, less than a time slice
constexpr size_t FEWEST = 5;         // rounds, however long they take
constexpr int64_t SLICE = 4 << 20;   // bytes of a large working set that are read at a time, so that rounds stay short
constexpr int SPIN = 20000;          // turns before a waiting thread lets others run
constexpr int64_t AHEAD = 4096;      // bytes, as the kernels fetch weights
constexpr int64_t ABREAST = -1;
constexpr int TRIPS = 50;            // hand-overs of one round
constexpr double PAUSE = 100e-6;     // seconds after which a thread that waits on a futex should be asleep
constexpr double LONGEST_PAUSE = 20e-3;
constexpr int64_t FRESH = 8 << 20;   // bytes touched in a round of page faults

using Clock = std::chrono::steady_clock;

double since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

Spread spread(std::vector<double> samples) {
    std::sort(samples.begin(), samples.end());
    return {samples.front(), samples[samples.size() / 2]};
}

// Waits by spinning, but not through a whole time slice that another thread may need.
template <class Done> void wait_until(Done done) {
    for (int64_t i = 0; !done(); i++) {
        relax();
        if (i > SPIN) std::this_thread::yield();
    }
}

// Keeps the calling thread on a core of its own, where each of `threads` threads can have one of all that are allowed; a
// busy machine may else have two of them take turns on one. With fewer, the system knows best which cores are apart.
void settle(int thread, int threads) {
#if defined(__linux__)
    cpu_set_t allowed;
    if (sched_getaffinity(getpid(), sizeof allowed, &allowed) != 0 || CPU_COUNT(&allowed) != threads) return;
    int left = thread;
    for (int core = 0; core < CPU_SETSIZE; core++)
        if (CPU_ISSET(core, &allowed) && left-- == 0) {
            cpu_set_t own;
            CPU_ZERO(&own);
            CPU_SET(core, &own);
            sched_setaffinity(0, sizeof own, &own); // 0 is this thread; a refusal is no harm
            return;
        }
#else
    (void)thread, (void)threads;
#endif
}

// Calls on a thread that is settled, and leaves the caller where it was.
template <class Call> auto apart(int threads, Call call) {
    decltype(call()) result{};
    std::exception_ptr failed;
    std::thread([&] {
        settle(0, threads);
        try {
            result = call();
        } catch (...) {
            failed = std::current_exception();
        }
    }).join();
    if (failed) std::rethrow_exception(failed);
    return result;
}

// Memory that is its own, aligned to pages and not touched yet.
class Fresh {
  public:
    explicit Fresh(int64_t bytes) : bytes_(size_t(bytes)) {
        void *p = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (p == MAP_FAILED) throw std::bad_alloc();
        data_ = static_cast<uint8_t *>(p);
    }
    ~Fresh() {
        if (data_) munmap(data_, bytes_);
    }
    Fresh(Fresh &&other) noexcept : data_(other.data_), bytes_(other.bytes_) { other.data_ = nullptr; }
    Fresh(const Fresh &) = delete;
    Fresh &operator=(const Fresh &) = delete;
    uint8_t *data() const { return data_; }
    size_t bytes() const { return bytes_; }

  private:
    uint8_t *data_;
    size_t bytes_;
};

// Threads that do the same at the same time; the caller is the first of them.
class Crew {
  public:
    Crew(int threads, std::function<void(int)> work) : threads_(threads), work_(std::move(work)) {
        try {
            for (int t = 1; t < threads_; t++) workers_.emplace_back([this, t] { loop(t); });
        } catch (...) {
            end();
            throw;
        }
    }
    ~Crew() { end(); }
    Crew(const Crew &) = delete;
    Crew &operator=(const Crew &) = delete;

    // Seconds from the start until the last one is done.
    double round() {
        wait_until([&] { return waiting_.load() == threads_ - 1; });
        done_.store(0);
        waiting_.store(0);
        const auto begin = Clock::now();
        epoch_.fetch_add(1);
        work_(0);
        wait_until([&] { return done_.load(std::memory_order_acquire) == threads_ - 1; });
        return since(begin);
    }

  private:
    void loop(int thread) {
        settle(thread, threads_);
        for (uint32_t seen = 0;; seen++) {
            waiting_.fetch_add(1);
            wait_until([&] { return epoch_.load(std::memory_order_acquire) != seen; });
            if (stop_.load()) return;
            work_(thread);
            done_.fetch_add(1);
        }
    }
    void end() {
        stop_.store(true);
        epoch_.fetch_add(1);
        for (auto &w : workers_) w.join();
    }

    const int threads_;
    const std::function<void(int)> work_;
    std::atomic<uint32_t> epoch_{0};
    alignas(64) std::atomic<int> waiting_{0};
    alignas(64) std::atomic<int> done_{0};
    std::atomic<bool> stop_{false};
    std::vector<std::thread> workers_;
};

// Work per second of `threads` threads. `work(thread, times)` does `amount` of it `times` over; so often that one thread
// alone takes about a round's time. What others leave of this machine may never let all threads run at once for long, so
// the length of a round is not found with all of them.
template <class Work> Spread rate(int threads, double amount, double seconds, Work work) {
    int64_t times = 1;
    work(0, 1); // first touches
    for (double best = 0.0; best < ROUND / 2; times *= best < ROUND / 16 ? 8 : best < ROUND / 2 ? 2 : 1) {
        best = 1e9;
        for (int i = 0; i < 3 && best > ROUND / 2; i++) {
            const auto begin = Clock::now();
            work(0, times);
            best = std::min(best, since(begin));
        }
    }
    Crew crew(threads, [&](int thread) { work(thread, times); });
    crew.round(); // first touches of the others
    std::vector<double> took;
    for (const auto begin = Clock::now(); took.size() < FEWEST || since(begin) < seconds;) took.push_back(crew.round());
    const Spread s = spread(std::move(took));
    const double all = amount * double(times) * threads;
    return {all / s.best, all / s.median};
}

std::atomic<uint64_t> sink; // results go here, so that they must be computed

} // namespace

Spread read_rate(const Kernels &k, int64_t bytes, int threads, double seconds) {
    const int64_t unit = bytes > SLICE ? SLICE : 256, slice = std::min(SLICE, bytes = (bytes + unit - 1) / unit * unit);
    struct alignas(64) Reader {
        Fresh own;
        int64_t at = 0; // where it goes on
        bool touched = false;
    };
    std::vector<Reader> readers;
    for (int t = 0; t < threads; t++) readers.push_back({Fresh(bytes)});
    return apart(threads, [&] {
        Spread best{0.0, 0.0};
        for (const int64_t ahead : {int64_t(0), AHEAD, ABREAST}) { // which is fastest depends on the machine
            const Spread s = rate(threads, double(slice), seconds / 3, [&](int thread, int64_t times) {
                Reader &r = readers[size_t(thread)];
                if (!r.touched) { // by its reader: its pages are near it; huge ones, as weights have
#if defined(MADV_HUGEPAGE)
                    madvise(r.own.data(), r.own.bytes(), MADV_HUGEPAGE); // refused where there are none: as well
#endif
                    std::memset(r.own.data(), 1, r.own.bytes());
                    r.touched = true;
                }
                uint64_t sum = 0;
                if (slice == bytes) sum = uint64_t(k.read_all(r.own.data(), bytes, times, ahead));
                else
                    for (; times > 0; times--, r.at = (r.at + slice) % bytes) sum += uint64_t(k.read_all(r.own.data() + r.at, slice, 1, ahead));
                sink.fetch_add(sum, std::memory_order_relaxed);
            });
            if (s.best > best.best) best = s;
        }
        return best;
    });
}

Spread multiply_add_rate(const Peak &peak, int threads, double seconds) {
    constexpr int64_t ROUNDS = 4096;
    alignas(64) uint8_t data[PEAK_DATA];
    for (size_t i = 0; i < PEAK_DATA; i += 2) data[i] = 1, data[i + 1] = 0x3c; // small normal numbers in every format
    const auto work = [&](int, int64_t times) {
        const float result = peak.run(data, ROUNDS * times);
        uint32_t bits;
        std::memcpy(&bits, &result, 4);
        sink.fetch_add(bits, std::memory_order_relaxed);
    };
    return apart(threads, [&] { return rate(threads, double(peak.per_round) * ROUNDS, seconds, work); });
}

namespace {

Spread hand_over_settled(bool parked, double seconds) {
    struct alignas(64) Line {
        std::atomic<uint32_t> value{0};
    } ask, answer, slept;
    std::atomic<bool> stop{false};
    const auto sleeps = [] {
        rusage usage{};
#if defined(RUSAGE_THREAD)
        getrusage(RUSAGE_THREAD, &usage);
#endif
        return usage.ru_nvcsw;
    };
    std::thread other([&] {
        settle(1, 2);
        long before = sleeps();
        for (uint32_t seen = 0;; seen++) {
            if (parked) ask.value.wait(seen);
            else wait_until([&] { return ask.value.load(std::memory_order_acquire) != seen; });
            answer.value.store(seen + 1, std::memory_order_release);
            if (stop.load()) return;
            if (!parked) continue;
            const long now = sleeps();
            slept.value.store(now != before ? 2 * seen + 2 : 2 * seen + 1);
            before = now;
        }
    });
    uint32_t number = 0;
    const auto trip = [&] {
        const uint32_t next = ++number;
        ask.value.store(next, std::memory_order_release);
        if (parked) ask.value.notify_one();
        wait_until([&] { return answer.value.load(std::memory_order_acquire) == next; });
    };
    std::vector<double> took;
    double pause = PAUSE;
    const auto begin = Clock::now();
    while (took.size() < FEWEST || since(begin) < seconds) {
        if (parked) {
            const auto paused = Clock::now();
            wait_until([&] { return since(paused) > pause; });
        }
        const auto start = Clock::now();
        for (int i = 0; i < (parked ? 1 : TRIPS); i++) trip();
        const double one = since(start) / (parked ? 1 : TRIPS);
        bool fair = true;
        if (parked) {
            wait_until([&] { return (slept.value.load() + 1) / 2 == number; });
            fair = slept.value.load() == 2 * number;
        }
        // a thread that was still on its way to sleep is given more time; where nothing tells, all count
        if (fair || pause > LONGEST_PAUSE) took.push_back(one);
        else pause *= 2;
    }
    stop.store(true);
    trip();
    other.join();
    return spread(std::move(took));
}

} // namespace

Spread hand_over(bool parked, double seconds) {
    return apart(2, [&] { return hand_over_settled(parked, seconds); });
}

Spread page_fault(double seconds) {
    const int64_t page = sysconf(_SC_PAGESIZE);
    std::vector<double> took;
    const auto begin = Clock::now();
    while (took.size() < FEWEST || since(begin) < seconds) {
        const Fresh memory(FRESH);
#if defined(MADV_NOHUGEPAGE)
        madvise(memory.data(), memory.bytes(), MADV_NOHUGEPAGE); // refused where there are no huge pages: as well
#endif
        volatile uint8_t *p = memory.data();
        const auto start = Clock::now();
        for (int64_t i = 0; i < FRESH; i += page) p[i] = 1;
        took.push_back(since(start) / double(FRESH / page));
    }
    return spread(std::move(took));
}

} // namespace tailrace
