// y = act(x · wᵀ + bias) + residual with a weight that was packed once (see gemm.h for the layout).
#include "products/experts.h"
#include "products/tiles.h"

namespace npu {
namespace {

// A slice of K such that a panel's slice of the micro-kernel's type stays in the cache nearest to it that can hold it
// beside a block of x, while every row block of a task passes over it.
template <class W>
constexpr int64_t kSliceSteps = kSliceBytes / (kPanel * Step<W>::kWidth * sizeof(typename Step<W>::X));

// The residuals that a loop over rows handles: none; elements of the result's type that are added before the activation; or
// whatever there is.
enum class Added { nothing, alike, any };

// `first` and `second` are the numbers of columns in the panel's two vectors.
template <class Out, Activation activation, Added added>
NPU_INLINE void finish_rows(const LinearArgs& a, const float* tile, int64_t row, int64_t rows, int64_t column, int64_t first,
                            int64_t second) {
  constexpr float kOne = 1.0f;
  const float* bias = reinterpret_cast<const float*>(a.bias.data);
  const float* scale = a.row_scales ? a.row_scales + row : &kOne;
  const int64_t scale_stride = a.row_scales ? 1 : 0, out_stride = a.out.stride[2], added_stride = a.residual.stride[2];
  Out* out = reinterpret_cast<Out*>(a.out.data) + row * out_stride + column;
  int64_t added_at = row * added_stride + column;
  const auto finish_sums = [&](Vec sums, int64_t at, int64_t count) __attribute__((always_inline)) {
    if constexpr (added == Added::alike)
      return activate<activation>(sums + load_n(reinterpret_cast<const Out*>(a.residual.data) + at, count));
    if (added == Added::nothing || !a.residual.data) return activate<activation>(sums);
    const Vec more = load_any(a.residual.data, a.residual.dtype, at, count);
    return a.residual_first ? activate<activation>(sums + more) : activate<activation>(sums) + more;
  };
  const Vec low_start = bias ? load_n(bias + column, first) : Vec{};
  const Vec high_start = bias && second > 0 ? load_n(bias + column + kLanes, second) : Vec{};
  for (; rows; --rows, tile += kPanel, scale += scale_stride, out += out_stride, added_at += added_stride) {
    const Vec low = finish_sums(load(tile) * *scale + low_start, added_at, first);
    if (second <= 0) {
      store_n(out, low, first);
      continue;
    }
    const Vec high = finish_sums(load(tile + kLanes) * *scale + high_start, added_at + kLanes, second);
    if (second >= kLanes) {
      store_both(out, kLanes, low, high);
    } else {
      store(out, low);
      store_n(out + kLanes, high, second);
    }
  }
}

// Whole panels with usual residuals have no branches for each row: constants take their place.
template <class Out, Activation activation>
void finish(const LinearArgs& a, const float* tile, int64_t row, int64_t rows, int64_t column) {
  const int64_t count = a.n - column;
  const bool alike = a.residual.dtype == dtype_of<Out> && (a.residual_first || activation == Activation::none);
  if (count < kPanel || (a.residual.data && !alike))
    finish_rows<Out, activation, Added::any>(a, tile, row, rows, column, count, count - kLanes);
  else if (a.residual.data)
    finish_rows<Out, activation, Added::alike>(a, tile, row, rows, column, kLanes, kLanes);
  else
    finish_rows<Out, activation, Added::nothing>(a, tile, row, rows, column, kLanes, kLanes);
}

}  // namespace

Finish finish_for(const LinearArgs& a) {
  Finish result = nullptr;
  with_type(a.out.dtype, [&](auto* out) {
    with_activation(a.activation, [&](auto tag) {
      result = finish<std::remove_pointer_t<decltype(out)>, decltype(tag)::value>;
    });
  });
  return result;
}

void gate(const LinearArgs& a, const float* row) {
  const int64_t width = a.n / 2, size[4] = {1, 1, 1, width};
  with_activation(a.activation, [&](auto tag) {
    for_runs(size, [&](int64_t, int64_t, int64_t, int64_t begin, int64_t end) {
      for (int64_t c = begin; c < end; c += kLanes) {
        const int64_t count = std::min<int64_t>(kLanes, end - c);
        const Vec gate = activate<decltype(tag)::value>(load_n(row + c, count));
        store_any(a.out.data, a.out.dtype, c, gate * load_n(row + width + c, count), count);
      }
    });
  });
}

namespace {

// Whether many rows of x are multiplied where they are, in whole steps: interleaving them would only bring them closer
// together.
template <class W>
bool reads_in_place(const LinearArgs& a) {
  return std::is_same_v<typename Step<W>::X, W> && a.k % Step<W>::kWidth == 0;
}

// Packs up to kMaxRows rows of x, from row `begin` on.
template <class W>
void pack_x(const LinearArgs& a, int64_t begin, int64_t rows, typename Step<W>::X* packed) {
  const W* x = reinterpret_cast<const W*>(a.x.data) + begin * a.x.stride[2];
  if (rows == 1 && Step<W>::kWidth == 1) {
    for (int64_t k = 0; k < a.k; k += kLanes) store_n(packed + k, load_n(x + k, a.k - k), a.k - k);
    return;
  }
  const W* row[kMaxRows];
  for (int64_t r = 0; r < rows; ++r) row[r] = x + r * a.x.stride[2];
  pack_rows(row, rows, rows, a.k, packed);
}

// The packed form of x.
template <class W>
const typename Step<W>::X* packed_x(const LinearArgs& a, const RowBlocks& blocks, int64_t steps) {
  using X = typename Step<W>::X;
  constexpr int kWidth = Step<W>::kWidth;
  X* packed = shared_scratch().get<X>(blocks.packed_begin(blocks.count, steps) * kWidth * sizeof(X));
  const int64_t grain = std::max<int64_t>(1, 32768 / (kMaxRows * a.k));
  parallel_for(blocks.count, grain, [&](int64_t begin, int64_t end, int) {
    for (int64_t b = begin; b < end; ++b)
      pack_x<W>(a, blocks.begin(b), blocks.size(b), packed + blocks.packed_begin(b, steps) * kWidth);
  });
  return packed;
}

// Up to kMaxRows rows in each product.
template <class W>
void run_streams(Products products, int64_t steps) {
  using X = typename Step<W>::X;
  constexpr int kWidth = Step<W>::kWidth;
  const int64_t k = products.front().k;
  const auto stream = [&](const auto& x_of) {
    stream_panels(products, steps * kWidth * kPanel * sizeof(W), [&](int64_t i, const char* panel, float* sums) {
      multiply<W>(products[i].x.size[2], x_of(i), reinterpret_cast<const W*>(panel), steps, {sums}, {});
    });
  };
  // A row of whole steps is packed already.
  if (std::is_same_v<X, W> && k == steps * kWidth && most_rows(products) == 1)
    return stream([&](int64_t i) { return reinterpret_cast<const X*>(products[i].x.data); });
  char** packed = pack_products(products, (steps + kLanes) * kWidth * sizeof(X), [&](const LinearArgs& a, char* memory) {
    pack_x<W>(a, 0, a.x.size[2], reinterpret_cast<X*>(memory));
  });
  stream([&](int64_t i) { return reinterpret_cast<const X*>(packed[i]); });
}

// Whether the last columns of a product with an x that is read in place are those of a wide panel, which stays in L1.
template <class W>
bool ends_wide(const LinearArgs& a) {
  return reads_in_place<W>(a) && DirectResult<W>(a).out && a.k * kWidePanel * int64_t(sizeof(W)) <= kSliceBytes &&
         a.n > kPanel && is_wide(a.n % kPanel + kPanel);
}

// The results of rows [begin, end) in the wide panel that begins at `column`.
template <class W>
void run_wide(const LinearArgs& a, const DirectResult<W>& direct, int64_t begin, int64_t end, int64_t column) {
  const int64_t stride = a.x.stride[2];
  const W* x = reinterpret_cast<const W*>(a.x.data) + begin * stride;
  const W* panel = static_cast<const W*>(a.weight) + column * a.k;
  alignas(64) float start[kWidePanel];
  Range range = direct.begin(column, start, kWidePanel);
  range.low = direct.low, range.high = direct.high;
  const RowBlocks blocks(end - begin, kWideRows);
  for (int64_t b = 0; b < blocks.count; ++b) {
    const Part<W> part{x + blocks.begin(b) * stride, panel};
    const Results<W> results = direct.at(begin + blocks.begin(b), column);
    multiply_wide<W, W>(blocks.size(b), &part, 1, stride, a.k / Step<W>::kWidth, results, range, a.k * kPanel);
  }
}

// Many rows: a task is one panel and a range of row blocks. `packed` is null where x is read in place.
template <class W>
void run_blocked(const LinearArgs& a, const typename Step<W>::X* packed, const RowBlocks& blocks, int64_t steps) {
  using X = typename Step<W>::X;
  constexpr int kWidth = Step<W>::kWidth;
  constexpr int64_t kSlice = kSliceSteps<W>;
  const W* weight = static_cast<const W*>(a.weight);
  const bool wide = std::is_same_v<X, W> && ends_wide<W>(a);
  const int64_t panels = divide_up(a.n, kPanel) - wide;
  const int64_t for_balance = divide_up(8 * num_threads(), panels);
  const int64_t row_tasks = std::min(blocks.count, std::max(divide_up(blocks.rows, kMaxTaskRows), for_balance));
  const bool converts = !std::is_same_v<X, W>;
  const Finish finish = finish_for(a);
  const DirectResult<X> direct(a);
  parallel_for(row_tasks * panels, 1, [&](int64_t begin, int64_t end, int) {
    const int64_t tile_floats = (kMaxTaskRows + kMaxRows) * kPanel;
    float* tiles = thread_scratch().get<float>((tile_floats + (converts ? kSlice * kPanel : 0)) * sizeof(float));
    for (int64_t task = begin; task < end; ++task) {
      const int64_t panel = task % panels, row_task = task / panels;
      const int64_t first = blocks.count * row_task / row_tasks, last = blocks.count * (row_task + 1) / row_tasks;
      const int64_t columns = a.n - panel * kPanel;
      if constexpr (std::is_same_v<X, W>) {
        if (wide && panel + 1 == panels) {
          run_wide<W>(a, direct, blocks.begin(first), blocks.begin(last), panel * kPanel);
          continue;
        }
      }
      const bool is_direct = direct.out && (!packed || std::is_same_v<X, float>);
      alignas(64) float start[kPanel];
      const Range first_range = is_direct ? direct.begin(panel * kPanel, start) : Range{};
      for (int64_t s0 = 0; s0 < steps; s0 += kSlice) {
        const int64_t count = std::min(kSlice, steps - s0);
        const W* stored = weight + (panel * steps + s0) * kPanel * kWidth;
        const X* slice;
        if constexpr (std::is_same_v<X, W>) {
          slice = stored;
        } else {
          // Widened once per task, not once per row block.
          float* wide = tiles + tile_floats;
          for (int64_t i = 0; i < count * kPanel; i += kLanes) store(wide + i, load(stored + i));
          slice = wide;
        }
        const bool is_last = s0 + count == steps;
        for (int64_t b = first; b < last; ++b) {
          const int64_t row = blocks.begin(b), rows = blocks.size(b);
          float* tile = tiles + (row - blocks.begin(first)) * kPanel;
          Range range = s0 == 0 ? first_range : onto({tile});
          const auto multiply_into = [&]<class Out>(const Results<Out>& results) __attribute__((always_inline)) {
            if constexpr (std::is_same_v<Out, float>) {
              const int64_t at = (blocks.packed_begin(b, steps) + s0 * rows) * kWidth;
              if (packed) return multiply<X>(rows, packed + at, slice, count, results, range, columns);
            }
            if constexpr (std::is_same_v<X, W>) {
              const X* x = reinterpret_cast<const X*>(a.x.data) + row * a.x.stride[2] + s0 * kWidth;
              multiply_unpacked<X, Out>(rows, x, a.x.stride[2], slice, count, results, range, columns);
            }
          };
          if (is_direct && is_last) {
            range.low = direct.low, range.high = direct.high;
            multiply_into(direct.at(row, panel * kPanel));
          } else {
            multiply_into(Sums{tile});
            if (is_last) finish(a, tile, row, rows, panel * kPanel);
          }
        }
      }
    }
  });
}

}  // namespace

void linear(Products products) {
  const bool are_few = most_rows(products) <= kMaxRows;
  if (!are_few && products.size() > 1) {
    for (const LinearArgs& a : products) linear(a);
    return;
  }
  const LinearArgs& a = products.front();
  with_type(a.x.dtype, [&](auto* type) {
    using W = std::remove_pointer_t<decltype(type)>;
    const int64_t steps = divide_up(a.k, Step<W>::kWidth);
    if (are_few) return run_streams<W>(products, steps);
    if constexpr (kHasTiles && std::is_same_v<W, bf16>) {
      if (a.x.size[2] >= kTileRows && a.k % Step<W>::kWidth == 0 && tiles_allowed()) {
        const W* weight = static_cast<const W*>(a.weight);
        return run_tiles(a, steps, kMaxTaskRows, [&](int64_t panel) { return weight + panel * steps * 2 * kPanel; });
      }
    }
    const bool in_place = reads_in_place<W>(a);
    const RowBlocks blocks(a.x.size[2], in_place ? rows_together(a.x.stride[2] * int64_t(sizeof(W))) : kMaxRows);
    run_blocked<W>(a, in_place ? nullptr : packed_x<W>(a, blocks, steps), blocks, steps);
  });
}

namespace {

void gated_linear(const LinearArgs& a) {
  run_gated(a, [](const LinearArgs& product) { linear(product); });
}

struct ExpertArgs {
  LinearArgs linear;
  Routing routing;
};

void expert_linear(const ExpertArgs& a) {
  run_experts(a.linear, a.routing, [](Products products) { linear(products); });
}

struct PackArgs {
  View weight;
  void* packed;
};

void pack_weight(const PackArgs& a) {
  with_type(a.weight.dtype, [&](auto* type) {
    using W = std::remove_pointer_t<decltype(type)>;
    constexpr int kWidth = Step<W>::kWidth;
    const int64_t n = a.weight.size[2], k = a.weight.size[3];
    const int64_t panel_size = round_up(k, kWidth) * kPanel;
    parallel_for(divide_up(n, kPanel), 1, [&](int64_t begin, int64_t end, int) {
      for (int64_t p = begin; p < end; ++p) {
        const int64_t column = p * kPanel;
        const W* w = reinterpret_cast<const W*>(a.weight.data) + column * a.weight.stride[2];
        pack_panel(w, a.weight.stride[2], a.weight.stride[3], std::min(kPanel, n - column), k,
                   static_cast<W*>(a.packed) + p * panel_size);
      }
    });
  });
}

}  // namespace
}  // namespace npu

NPU_KERNEL(linear, npu::LinearArgs, npu::linear)
NPU_KERNEL(expert_linear, npu::ExpertArgs, npu::expert_linear)
NPU_KERNEL(gated_linear, npu::LinearArgs, npu::gated_linear)
NPU_KERNEL(pack_weight, npu::PackArgs, npu::pack_weight)
