// The threads of the native kernels: parallel_for(n, grain, body) and nothing else.
#pragma once

#include <cstdint>

namespace npu {

using Body = void (*)(const void* context, int64_t begin, int64_t end, int thread_index);

using FailureText = char[256];

// For a catch block: writes what the exception says.
void describe_failure(FailureText& text) noexcept;

// How many distinct values thread_index takes: size per-thread scratch with it.
int num_threads();

void run_parallel(int64_t n, int64_t grain, Body body, const void* context);

// While one exists, work is expected at any moment: the pool's threads wait for longer before they go to sleep.
class KeepAwake {
 public:
  KeepAwake();
  ~KeepAwake();
  KeepAwake(const KeepAwake&) = delete;
};

// Calls body(begin, end, thread_index) over chunks of `grain` items (the last one may be shorter) that cover [0, n),
// and returns when all are done. With one chunk, or inside another body, it runs in place on the calling thread and
// then gets all of [0, n) at once. Callers of several Python threads take turns. Where a body throws, so does the call,
// once all other bodies have returned.
template <class F>
void parallel_for(int64_t n, int64_t grain, const F& body) {
  run_parallel(
      n, grain,
      [](const void* context, int64_t begin, int64_t end, int thread) {
        (*static_cast<const F*>(context))(begin, end, thread);
      },
      &body);
}

}  // namespace npu
