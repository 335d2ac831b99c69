// Runs a prepared list of kernels: one call from Python for as many launches as there are.
#include <cstdio>
#include <exception>
#include <new>

#include "pool.h"
#include "products/gemm.h"

namespace {

thread_local npu::FailureText failure;  // of the thread's latest kernel that failed

}  // namespace

void npu::describe_failure(FailureText& text) noexcept {
  try {
    throw;
  } catch (const std::bad_alloc&) {
    std::snprintf(text, sizeof(text), "out of memory");
  } catch (const std::exception& error) {
    std::snprintf(text, sizeof(text), "%s", error.what());
  } catch (...) {
    std::snprintf(text, sizeof(text), "unknown error");
  }
}

int64_t npu::keep_failure() noexcept {
  describe_failure(failure);
  return 1;
}

extern "C" const char* npu_failure() { return failure; }

// Returns 0, or the number of the launch that failed, counted from 1; those after it did not run.
extern "C" int64_t npu_run(const npu::Launch* launches, int64_t count) {
  const npu::KeepAwake awake;
  for (int64_t i = 0; i < count; ++i)
    if (launches[i].fn(launches[i].args)) return i + 1;
  return 0;
}

// The sizes that packed operands follow, and the level of the instruction set.
extern "C" int64_t npu_lanes() { return npu::kLanes; }
extern "C" int64_t npu_max_rows() { return npu::kMaxRows; }
extern "C" int64_t npu_has_pairs() { return npu::kHasPairs; }
extern "C" int64_t npu_has_byte_quads() { return npu::kHasByteQuads; }
extern "C" int64_t npu_has_tiles() { return npu::tiles_allowed(); }
extern "C" const char* npu_level() { return npu::level_name(); }
