// Products of rows with the matrices of the experts that they are routed to: one for each expert that has rows, so that its
// weight is read once and those of the others never.
#pragma once

#include <cstring>

#include "products/linear_args.h"
#include "rows.h"

namespace npu {

struct Routing {
  const int32_t* experts;  // of each row of the output; a row of any other number is 0
  int64_t count;           // of experts
  int64_t weight_bytes;    // from one expert's packed weight to the next
};

// out[m] = x[m * R / M] * weight[experts[m]]T + bias[experts[m]]. linear(products) computes those of all experts; the rows of
// each are brought together first where one has several.
template <class Linear>
void run_experts(const LinearArgs& a, const Routing& routing, const Linear& linear) {
  const int64_t rows = a.out.size[2], shared = rows / a.x.size[2];
  const int64_t x_bytes = a.k * item_size(a.x.dtype), out_bytes = a.n * item_size(a.out.dtype);
  const auto x_row = [&](int64_t m) { return a.x.data + m / shared * a.x.stride[2] * item_size(a.x.dtype); };
  const auto out_row = [&](int64_t m) { return a.out.data + m * a.out.stride[2] * item_size(a.out.dtype); };

  const int64_t x_size = round_up(rows * x_bytes, 64), out_size = round_up(rows * out_bytes, 64);
  const int64_t products_size = std::min(routing.count, rows) * sizeof(LinearArgs);
  char* memory =
      result_scratch().get<char>(x_size + out_size + products_size + (routing.count + 1 + rows) * sizeof(int64_t));
  LinearArgs* const products = reinterpret_cast<LinearArgs*>(memory + x_size + out_size);
  // Expert `count` has the rows of none.
  int64_t* end = reinterpret_cast<int64_t*>(memory + x_size + out_size + products_size);
  int64_t* order = end + routing.count + 1;
  std::fill(end, order, 0);
  const auto expert_of = [&](int64_t m) {
    const int64_t expert = routing.experts[m];
    return expert < 0 || expert >= routing.count ? routing.count : expert;
  };
  for (int64_t m = 0; m < rows; ++m) ++end[expert_of(m)];
  int64_t most = 0;
  for (int64_t e = 0; e < routing.count; ++e) most = std::max(most, end[e]);
  for (int64_t e = 1; e <= routing.count; ++e) end[e] += end[e - 1];
  for (int64_t m = rows; m-- > 0;) order[--end[expert_of(m)]] = m;  // now where each expert's rows begin
  const auto begin_of = [&](int64_t e) { return e <= routing.count ? end[e] : rows; };
  for (int64_t i = begin_of(routing.count); i < rows; ++i) std::memset(out_row(order[i]), 0, out_bytes);

  const int64_t routed = begin_of(routing.count);
  const bool gathers = most > 1;
  char *const gathered = memory, *const results = memory + x_size;
  if (gathers)
    for_rows(routed, a.k, [&](int64_t i) { std::memcpy(gathered + i * x_bytes, x_row(order[i]), x_bytes); });
  int64_t used = 0;
  for (int64_t e = 0; e < routing.count; ++e) {
    const int64_t first = begin_of(e), count = begin_of(e + 1) - first;
    if (count == 0) continue;
    LinearArgs& product = products[used++] = a;
    product.weight = static_cast<const char*>(a.weight) + e * routing.weight_bytes;
    if (a.bias.data) product.bias.data = a.bias.data + e * a.n * int64_t(sizeof(float));
    product.x.size[2] = product.out.size[2] = count;
    product.x.data = gathers ? gathered + first * x_bytes : x_row(order[first]);
    product.out.data = gathers ? results + first * out_bytes : out_row(order[first]);
    if (gathers) product.x.stride[2] = a.k, product.out.stride[2] = a.n;
  }
  if (used > 0) linear(Products(products, used));
  if (gathers)
    for_rows(routed, a.n, [&](int64_t i) { std::memcpy(out_row(order[i]), results + i * out_bytes, out_bytes); });
}

}  // namespace npu
