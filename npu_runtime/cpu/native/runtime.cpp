// Runs a prepared list of kernels: one call from Python for as many launches as there are.
#include "kernel.h"

extern "C" void npu_run(const npu::Launch* launches, int64_t count) {
  for (int64_t i = 0; i < count; ++i) launches[i].fn(launches[i].args);
}

