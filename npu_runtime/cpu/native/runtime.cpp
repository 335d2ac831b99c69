// Runs a prepared list of kernels: one call from Python for as many launches as there are.
#include "gemm.h"
#include "pool.h"

extern "C" void npu_run(const npu::Launch* launches, int64_t count) {
  const npu::KeepAwake awake;
  for (int64_t i = 0; i < count; ++i) launches[i].fn(launches[i].args);
}

// The sizes that packed operands follow, and the level of the instruction set.
extern "C" int64_t npu_lanes() { return npu::kLanes; }
extern "C" int64_t npu_max_rows() { return npu::kMaxRows; }
extern "C" int64_t npu_has_pairs() { return npu::kHasPairs; }
extern "C" int64_t npu_has_tiles() { return npu::tiles_allowed(); }
extern "C" const char* npu_level() { return npu::level_name(); }
