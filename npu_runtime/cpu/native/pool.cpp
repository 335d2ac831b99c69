// A persistent thread pool.
//
// Each thread has its share of a job's chunks, the same one every time, so that what it left in its caches is what it
// needs next. It claims them one by one and then those of others, so a worker that is late (asleep, or preempted by
// another process) costs its share of the work and never the whole call. That is also why a lost or slow wake-up cannot
// hang a caller: it simply claims every chunk itself.
//
// A body may throw: its chunk counts as done all the same, and the caller throws the first failure of its job. That is kept as
// text: the library of a wheel runs with C++ libraries that are older than std::exception_ptr's present symbols.
#include "pool.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <stdexcept>
#include <system_error>
#include <thread>

#include "vec.h"

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

namespace npu {
namespace {

std::atomic<int> wanted_threads{1};
std::atomic<int> keeping_awake{0};

class Pool {
 public:
  // The process's pool. It is never destroyed, so workers need no shutdown at exit; a forked child, which inherits no
  // worker thread, starts a new one at its first use.
  static Pool& get() {
    Pool* pool = current().load(std::memory_order_acquire);
    return pool ? *pool : create();
  }

  int threads() const { return threads_; }

  void run(int64_t n, int64_t grain, Body body, const void* context) {
    if (n <= 0) return;
    grain = std::max<int64_t>(grain, 1);
    // The count of chunks left shares a 64-bit word with the job's number, so it must fit 32 bits.
    while ((n + grain - 1) / grain > INT32_MAX) grain *= 2;
    const uint32_t chunks = static_cast<uint32_t>((n + grain - 1) / grain);
    if (thread_index() >= 0) return body(context, 0, n, thread_index());  // nested: this thread already is a worker
    if (chunks == 1 || threads_ == 1) return body(context, 0, n, 0);

    std::lock_guard<std::mutex> one_job_at_a_time(submit_);
    thread_index() = 0;
    body_.store(body, std::memory_order_relaxed);
    context_.store(context, std::memory_order_relaxed);
    n_.store(n, std::memory_order_relaxed);
    grain_.store(grain, std::memory_order_relaxed);
    chunks_.store(chunks, std::memory_order_relaxed);
    const uint32_t number = job_.load(std::memory_order_relaxed) + 1;
    for (int i = 0; i < threads_; ++i) shares_[i].done.store(0, std::memory_order_relaxed);
    // From the first of these on, any thread may claim a chunk and count it as done.
    for (uint32_t i = 0, first = 0; i < uint32_t(threads_); ++i) {
      const uint32_t next = first_chunk(chunks, i + 1);
      shares_[i].ticket.store(uint64_t(number) << 32 | (next - first), std::memory_order_release);
      first = next;
    }
    job_.store(number);
    job_.notify_all();

    work_on_job(0);
    for (int spins = 0; done() != chunks; ++spins) {
      if (spins < 4000) cpu_relax();
      else std::this_thread::yield();
    }
    thread_index() = -1;
    if (failed_.load(std::memory_order_relaxed)) {
      failed_.store(false, std::memory_order_relaxed);
      throw std::runtime_error(failure_);
    }
  }

 private:
  // What is left of a thread's part of the job: the job's number and, in the low half, how many chunks nobody claimed
  // yet. `done` counts the chunks, its own or others', that the thread has finished.
  struct alignas(64) Share {
    std::atomic<uint64_t> ticket{0};
    std::atomic<uint32_t> done{0};
  };

  explicit Pool(int threads) : threads_(threads), shares_(new Share[threads]) {
    try {
      for (int i = 1; i < threads; ++i) std::thread([this, i] { work(i); }).detach();
    } catch (const std::system_error&) {
      // The process may have no more threads: the others do the work of those that are missing.
    }
  }

  static std::atomic<Pool*>& current() {
    static std::atomic<Pool*> pool{nullptr};
    return pool;
  }

  static Pool& create() {
    static std::mutex* creating = new std::mutex;
    std::lock_guard<std::mutex> lock(*creating);
    if (Pool* pool = current().load()) return *pool;
#if defined(__unix__) || defined(__APPLE__)
    static bool registered = false;
    if (!registered) {
      // The parent's pool is leaked in the child on purpose: its locks may have been held at the fork.
      pthread_atfork(nullptr, nullptr, [] {
        current().store(nullptr);
        keeping_awake.store(0);
        thread_index() = -1;
        creating = new std::mutex;
      });
      registered = true;
    }
#endif
    Pool* pool = new Pool(wanted_threads.load());
    current().store(pool, std::memory_order_release);
    return *pool;
  }

  // Which of the pool's threads this is while it runs a body, else -1.
  static int& thread_index() {
    static thread_local int index = -1;
    return index;
  }

  // The first chunk of a thread's share.
  uint32_t first_chunk(uint64_t chunks, int thread) const {
    return static_cast<uint32_t>((chunks * thread + threads_ - 1) / threads_);
  }

  uint32_t done() const {
    uint32_t sum = 0;
    for (int i = 0; i < threads_; ++i) sum += shares_[i].done.load(std::memory_order_acquire);
    return sum;
  }

  // Claims one chunk of a share and runs it; false when none is left. A job's fields change only once all its chunks are
  // done, and its number is part of the ticket, so a successful exchange proves that the fields read before belong to it.
  bool claim_and_run(int owner, int index) {
    uint64_t ticket = shares_[owner].ticket.load(std::memory_order_acquire);
    for (;;) {
      const uint32_t left = static_cast<uint32_t>(ticket);
      if (left == 0) return false;
      const Body body = body_.load(std::memory_order_relaxed);
      const void* context = context_.load(std::memory_order_relaxed);
      const int64_t n = n_.load(std::memory_order_relaxed), grain = grain_.load(std::memory_order_relaxed);
      const uint32_t chunks = chunks_.load(std::memory_order_relaxed);
      if (!shares_[owner].ticket.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel)) continue;
      const int64_t begin = (first_chunk(chunks, owner + 1) - left) * grain;
      try {
        body(context, begin, std::min(n, begin + grain), index);
      } catch (...) {
        // The first to fail writes `failure_`, before it counts its chunk as done; the caller reads it when all are.
        if (!failed_.exchange(true, std::memory_order_relaxed)) describe_failure(failure_);
      }
      shares_[index].done.fetch_add(1, std::memory_order_release);
      return true;
    }
  }

  void work_on_job(int index) {
    for (int i = 0; i < threads_; ++i) {
      while (claim_and_run((index + i) % threads_, index)) {
      }
    }
  }

  void work(int index) {
    thread_index() = index;
    uint32_t seen = 0;
    for (;;) {
      wait_for_job(seen);
      seen = job_.load(std::memory_order_acquire);
      work_on_job(index);
    }
  }

  // Spins before it sleeps: waking a sleeper costs ~5-50 us, and the kernels of a sequence follow each other faster.
  // Within a sequence it spins for longer, and lets other processes have the core meanwhile.
  void wait_for_job(uint32_t seen) {
    using clock = std::chrono::steady_clock;
    const auto start = clock::now();
    for (;;) {
      for (int i = 0; i < 32; ++i) {
        if (job_.load(std::memory_order_acquire) != seen) return;
        cpu_relax();
      }
      const auto waited = clock::now() - start;
      if (waited < std::chrono::microseconds(50)) continue;
      if (waited > std::chrono::microseconds(500) || keeping_awake.load(std::memory_order_relaxed) == 0) break;
      std::this_thread::yield();
    }
    job_.wait(seen, std::memory_order_acquire);
  }

  const int threads_;
  Share* const shares_;
  std::mutex submit_;
  alignas(64) std::atomic<uint32_t> job_{0};
  std::atomic<Body> body_{nullptr};
  std::atomic<const void*> context_{nullptr};
  std::atomic<int64_t> n_{0}, grain_{1};
  std::atomic<uint32_t> chunks_{0};
  std::atomic<bool> failed_{false};
  FailureText failure_;
};

}  // namespace

KeepAwake::KeepAwake() { keeping_awake.fetch_add(1, std::memory_order_relaxed); }
KeepAwake::~KeepAwake() { keeping_awake.fetch_sub(1, std::memory_order_relaxed); }

int num_threads() { return Pool::get().threads(); }

void run_parallel(int64_t n, int64_t grain, Body body, const void* context) {
  Pool::get().run(n, grain, body, context);
}

}  // namespace npu

// The number of threads of a pool that has yet to start.
extern "C" void npu_set_threads(int64_t threads) {
  npu::wanted_threads.store(static_cast<int>(std::clamp<int64_t>(threads, 1, 1024)));
}
