// Working memory of kernels. It belongs to the thread, grows to what the largest kernel needs and is then only reused:
// a graph of hundreds of launches keeps one buffer instead of hundreds, and threads never share one by accident.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace npu {

// Asks for 2 MiB pages: walking 4 KiB pages costs a streaming kernel several percent of the memory bandwidth.
inline void advise_huge_pages(void* data, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  const uintptr_t page = 4096;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + page - 1) & ~(page - 1);
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) & ~(page - 1);
  if (end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)data, (void)bytes;
#endif
}

class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  ~Scratch() { std::free(data_); }

  // At least `bytes`, aligned to 64; what an earlier call returned is invalid afterwards. Throws std::bad_alloc.
  template <class T>
  T* get(int64_t bytes) {
    if (uint64_t(bytes) > uint64_t(capacity_)) grow(bytes);
    return static_cast<T*>(data_);
  }

 private:
  static constexpr int64_t kMostBytes = int64_t(1) << 46;  // of any process's address space

  void grow(int64_t bytes) {
    if (bytes < 0 || bytes > kMostBytes) throw std::bad_alloc();
    const int64_t alignment = bytes >= (4 << 20) ? 2 << 20 : 64;
    const int64_t rounded = (bytes + alignment - 1) / alignment * alignment;
    std::free(data_);
    capacity_ = 0;
    data_ = std::aligned_alloc(alignment, rounded);
    if (data_ == nullptr) throw std::bad_alloc();
    capacity_ = rounded;
    if (alignment > 64) advise_huge_pages(data_, rounded);
  }

  void* data_ = nullptr;
  int64_t capacity_ = 0;
};

// For what the calling thread prepares and all threads then read.
inline Scratch& shared_scratch() {
  static thread_local Scratch scratch;
  return scratch;
}

// For the intermediate result of a kernel that calls another: the inner one has shared_scratch to itself.
inline Scratch& result_scratch() {
  static thread_local Scratch scratch;
  return scratch;
}

// For an operand that a kernel makes of its own before it calls another.
inline Scratch& operand_scratch() {
  static thread_local Scratch scratch;
  return scratch;
}

// For what each thread needs inside a parallel_for body.
inline Scratch& thread_scratch() {
  static thread_local Scratch scratch;
  return scratch;
}

}  // namespace npu
