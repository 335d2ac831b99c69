// What the products with packed weights share: their operands, and what is done to the sums of a panel.
#pragma once

#include <span>

#include "activation.h"
#include "pool.h"
#include "products/gemm.h"
#include "rows.h"
#include "scratch.h"

namespace npu {

struct LinearArgs {
  View x, bias, residual, out;  // bias is float32 and contiguous
  const void* weight;
  int64_t n, k;
  Activation activation;
  const float* row_scales;  // what the sums of each row are multiplied with first; null stands for 1
  int64_t residual_first;   // whether the activation applies to the residual too
};

// Bounds a task's accumulators, which wait in L2 from one slice of K to the next, and its part of the output, which is
// written a panel at a time.
inline constexpr int64_t kMaxTaskRows = 96;

// out = act(sums * row scale + bias) + residual for `rows` rows from `row` on and the panel that begins at `column`.
using Finish = void (*)(const LinearArgs&, const float* sums, int64_t row, int64_t rows, int64_t column);
Finish finish_for(const LinearArgs& a);

// Where sums that begin with the bias, to which the residual is added, and which end within the activation's limits, are
// results of type T already.
template <class T>
struct DirectResult {
  T* out = nullptr;  // null: they are not
  const float* bias;
  const T* residual;
  int64_t n, out_stride, residual_stride;
  float low = -kInfinity, high = kInfinity;

  explicit DirectResult(const LinearArgs& a)
      : bias(reinterpret_cast<const float*>(a.bias.data)),
        residual(reinterpret_cast<const T*>(a.residual.data)),
        n(a.n),
        out_stride(a.out.stride[2]),
        residual_stride(a.residual.stride[2]) {
    const bool limits = a.activation == Activation::relu || a.activation == Activation::relu6;
    if ((a.activation != Activation::none && !limits) || a.row_scales || a.out.dtype != dtype_of<T>) return;
    if (residual && (a.residual.dtype != dtype_of<T> || (limits && !a.residual_first))) return;
    out = reinterpret_cast<T*>(a.out.data);
    if (limits) low = 0.0f;
    if (a.activation == Activation::relu6) high = 6.0f;
  }
  // What the sums of the panel that begins at `column` begin with; `start` is memory for its columns.
  Range begin(int64_t column, float* start, int64_t columns = kPanel) const {
    if (!bias) return {};
    if (n - column >= columns) return {bias + column, 0, kLanes};
    for (int64_t i = 0; i < columns; i += kLanes)
      store(start + i, n - column > i ? load_n(bias + column + i, n - column - i) : Vec{});
    return {start, 0, kLanes};
  }
  Results<T> at(int64_t row, int64_t column) const {
    Results<T> results{out + row * out_stride + column, out_stride};
    if (residual) results.added = residual + row * residual_stride + column, results.added_row_stride = residual_stride;
    results.columns = n - column;
    return results;
  }
};

// Products that differ in their weights, their rows and the number of these.
using Products = std::span<const LinearArgs>;

inline int64_t most_rows(Products products) {
  int64_t most = 0;
  for (const LinearArgs& a : products) most = std::max(most, a.x.size[2]);
  return most;
}

// Each out = act(x · wᵀ + bias) + residual, or act(x · wᵀ + bias + residual), by all threads.
void linear(Products products);
inline void linear(const LinearArgs& a) { linear(Products(&a, 1)); }

// Neighbouring panels are one stream, which the hardware prefetchers follow only while one thread stays on it: with
// claims of 32 KiB a kernel reached 85% of the best read bandwidth measured (54 GB/s with two threads of a Zen 4
// server, 36 GB/s when its neighbours are busy), with 256 KiB it reaches 95 to 100%. The result is in panels.
inline int64_t stream_grain(int64_t panels, int64_t panel_bytes) {
  return divide_up(panels, std::max<int64_t>(4 * num_threads(), panels * panel_bytes >> 18));
}

// The rows of each product in another form, at most `row_bytes` for each: pack(product, memory) makes them. A product with the
// rows of the one before shares what that has.
template <class Pack>
char** pack_products(Products products, int64_t row_bytes, const Pack& pack) {
  const int64_t count = std::ssize(products), table = round_up(count * sizeof(char*), 64);
  int64_t rows = 0;
  for (const LinearArgs& a : products) rows += a.x.size[2];
  char* memory = shared_scratch().get<char>(table + rows * row_bytes);
  char** packed = reinterpret_cast<char**>(memory);
  memory += table;
  for (int64_t i = 0; i < count; ++i) {
    const View& x = products[i].x;
    const bool shares = i > 0 && x.data == products[i - 1].x.data && x.size[2] == products[i - 1].x.size[2];
    packed[i] = shares ? packed[i - 1] : memory;
    if (!shares) memory += x.size[2] * row_bytes;
  }
  for_rows(count, most_rows(products) * products.front().k, [&](int64_t i) {
    if (i == 0 || packed[i] != packed[i - 1]) pack(products[i], packed[i]);
  });
  return packed;
}

// Products of so few rows that every panel is read exactly once, from memory; the panels of all are one range of tasks.
// multiply(i, panel, sums) is the product of the rows of product i, kMaxRows at most, with a panel of its weight.
template <class Multiply>
void stream_panels(Products products, int64_t panel_bytes, const Multiply& multiply) {
  const int64_t panels = divide_up(products.front().n, kPanel), tasks = std::ssize(products) * panels;
  const Finish finish = finish_for(products.front());
  parallel_for(tasks, stream_grain(tasks, panel_bytes), [&](int64_t begin, int64_t end, int) {
    alignas(64) float sums[kMaxRows * kPanel];
    for (int64_t task = begin; task < end; ++task) {
      const int64_t i = task / panels, p = task % panels;
      const LinearArgs& a = products[i];
      multiply(i, static_cast<const char*>(a.weight) + p * panel_bytes, sums);
      finish(a, sums, 0, a.x.size[2], p * kPanel);
    }
  });
}

// out = act(row) * (the other half of row), for the 2 * N sums of a gated product.
void gate(const LinearArgs& a, const float* row);

// One row of two products, the gate's and the other's, one after the other in the weight: out = act(first) * second.
// linear(args) computes a product.
template <class Linear>
void run_gated(const LinearArgs& a, const Linear& linear) {
  float* row = result_scratch().get<float>(a.n * sizeof(float));
  LinearArgs product = a;
  product.activation = Activation::none;
  product.out = {reinterpret_cast<char*>(row), Dtype::f32, {1, 1, 1, a.n}, {a.n, a.n, a.n, 1}};
  linear(product);
  gate(a, row);
}

}  // namespace npu
