// What every kernel file shares: the operand description that Python fills in, and the way a kernel is exported.
//
// A prepared kernel is a function and the address of an argument block that outlives it; nothing is looked up, checked
// or allocated when it runs.
#pragma once

#include <cstdint>

namespace npu {

enum class Dtype : int64_t { f32 = 0, bf16 = 1, f16 = 2 };

inline int64_t item_size(Dtype dtype) { return dtype == Dtype::f32 ? 4 : 2; }

// A strided operand of up to four dimensions; strides count elements. Missing leading dimensions have size 1. An
// operand that was left out has data == nullptr.
struct View {
  char* data;
  Dtype dtype;
  int64_t size[4];
  int64_t stride[4];
};

// Where row (i, j, k) of an operand begins, in elements.
inline int64_t offset(const View& view, int64_t i, int64_t j, int64_t k) {
  return i * view.stride[0] + j * view.stride[1] + k * view.stride[2];
}

// A kernel returns 0, or 1 where it failed: no C++ exception reaches Python.
struct Launch {
  int64_t (*fn)(const void* args);
  const void* args;
};

// For a catch block: keeps what the exception says for npu_failure(), and returns 1.
int64_t keep_failure() noexcept;

}  // namespace npu

// Exports run(const Args&) to Python as npu_<name>, with the block's size so that the two declarations are compared
// when the library is loaded.
#define NPU_KERNEL(name, Args, run)                                  \
  extern "C" int64_t npu_##name(const void* args) noexcept try {     \
    run(*static_cast<const Args*>(args));                            \
    return 0;                                                        \
  } catch (...) {                                                    \
    return npu::keep_failure();                                      \
  }                                                                  \
  extern "C" int64_t npu_##name##_args_size() { return sizeof(Args); }
