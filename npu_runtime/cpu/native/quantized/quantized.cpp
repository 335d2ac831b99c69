// Products and lookups with weights in few bits (see quantized.h).
#include <stdexcept>
#include <string>

#include "products/experts.h"
#include "products/tiles.h"
#include "quantized/quantized_bytes.h"

namespace npu {
namespace {

struct QuantizedLinearArgs {
  LinearArgs linear;
  QuantizedFormat format;
  RowFormat activations;
};

// The blocks of a slice of K whose panel, `bytes` for each block, fills the half of kSliceBytes at most.
int64_t slice_blocks(const QuantizedFormat& f, int64_t block_bytes) {
  return std::clamp<int64_t>(kSliceBytes / 2 / block_bytes, 1, f.blocks());
}

// A task is a panel and a range of row blocks. For each slice of K, [first, first + count) in blocks, it calls
// unpack(panel, first, count, memory) and then, for each row block, multiply(row block, first, count, unpacked, sums) with
// what that returned, which adds to sums; `unpacked_bytes` of memory are the task's own.
template <class Unpack, class Multiply>
void run_panels(const QuantizedLinearArgs& q, const RowBlocks& rows, int64_t slice, int64_t unpacked_bytes,
                const Unpack& unpack, const Multiply& multiply) {
  const LinearArgs& a = q.linear;
  const QuantizedFormat& f = q.format;
  const int64_t panels = divide_up(a.n, kPanel), panel_bytes = f.panel_bytes();
  const int64_t for_balance = divide_up(8 * num_threads(), panels);
  const int64_t row_tasks = std::min(rows.count, std::max(divide_up(rows.rows, kMaxTaskRows), for_balance));
  const int64_t grain = rows.count == 1 ? stream_grain(panels, panel_bytes) : 1;
  const Finish finish = finish_for(a);
  parallel_for(row_tasks * panels, grain, [&](int64_t begin, int64_t end, int) {
    char* memory = thread_scratch().get<char>(unpacked_bytes + (kMaxTaskRows + kMaxRows) * kPanel * sizeof(float));
    float* sums = reinterpret_cast<float*>(memory + unpacked_bytes);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t p = task % panels, row_task = task / panels;
      const int64_t first = rows.count * row_task / row_tasks, last = rows.count * (row_task + 1) / row_tasks;
      const int64_t first_row = rows.begin(first);
      const char* panel = static_cast<const char*>(a.weight) + p * panel_bytes;
      std::fill(sums, sums + (rows.begin(last) - first_row) * kPanel, 0.0f);
      for (int64_t b0 = 0; b0 < f.blocks(); b0 += slice) {
        const int64_t count = std::min(slice, f.blocks() - b0);
        auto* unpacked = unpack(panel, b0, count, memory);
        for (int64_t b = first; b < last; ++b) {
          float* tile = sums + (rows.begin(b) - first_row) * kPanel;
          multiply(b, b0, count, unpacked, tile);
          if (b0 + count == f.blocks()) finish(a, tile, rows.begin(b), rows.size(b), p * kPanel);
        }
      }
    }
  });
}

// Where row `row` of x begins.
const char* x_row(const LinearArgs& a, int64_t row) { return a.x.data + row * a.x.stride[2] * item_size(a.x.dtype); }

// Up to kMaxStreamRows rows in each product, with codes that stay in registers.
void stream_integers(Products products, const QuantizedFormat& f) {
  static_assert(kMaxStreamRows <= kMaxRows);
  char** packed = pack_products(products, IntegerRows::bytes(f, 1), [&](const LinearArgs& a, char* memory) {
    const int64_t rows = a.x.size[2];
    for (int64_t r = 0; r < rows; ++r) make_integers(f, x_row(a, r), a.x.dtype, rows, r, IntegerRows(f, rows, memory));
  });
  stream_panels(products, f.panel_bytes(), [&](int64_t i, const char* panel, float* sums) {
    const int64_t rows = products[i].x.size[2];
    stream_rows(f, rows, IntegerRows(f, rows, packed[i]), panel, sums);
  });
}

void run_integers(const QuantizedLinearArgs& q) {
  const LinearArgs& a = q.linear;
  const QuantizedFormat& f = q.format;
  const RowBlocks rows(a.x.size[2], kMaxIntegerRows);
  IntegerRows x(f, rows.rows, shared_scratch().get<char>(IntegerRows::bytes(f, rows.rows)));
  for_rows(rows.count, kMaxIntegerRows * a.k, [&](int64_t b) {
    for (int64_t r = 0; r < rows.size(b); ++r)
      make_integers(f, x_row(a, rows.begin(b) + r), a.x.dtype, rows.size(b), r, x.from(f, rows.begin(b)));
  });
  const int64_t slice = slice_blocks(f, IntegerPanel::bytes(f, 1));
  run_panels(
      q, rows, slice, IntegerPanel::bytes(f, slice),
      [&](const char* panel, int64_t first, int64_t count, char* memory) {
        IntegerPanel unpacked(f, count, memory);
        unpack_blocks(f, panel, first, count, unpacked);
        return memory;
      },
      [&](int64_t b, int64_t first, int64_t count, char* memory, float* sums) {
        const IntegerRows block = x.from(f, rows.begin(b));
        multiply_blocks(f, rows.size(b), block, IntegerPanel(f, count, memory), first, count, sums);
      });
}

// In floats or, with W = bf16, in pairs of them.
template <class W, class From>
void run_floats(const QuantizedLinearArgs& q, const RowBlocks& rows) {
  constexpr int kWidth = Step<W>::kWidth;
  const LinearArgs& a = q.linear;
  const QuantizedFormat& f = q.format;
  const int64_t steps = a.k / kWidth;
  W* x = shared_scratch().get<W>(rows.packed_begin(rows.count, steps) * kWidth * sizeof(W));
  for_rows(rows.count, kMaxRows * a.k, [&](int64_t b) {
    const From* row[kMaxRows];
    const int64_t count = rows.size(b);
    for (int64_t r = 0; r < count; ++r)
      row[r] = reinterpret_cast<const From*>(a.x.data) + (rows.begin(b) + r) * a.x.stride[2];
    pack_rows(row, count, count, a.k, x + rows.packed_begin(b, steps) * kWidth);
  });
  const int64_t slice = slice_blocks(f, f.block * kPanel * sizeof(W));
  run_panels(
      q, rows, slice, slice * f.block * kPanel * sizeof(W),
      [&](const char* panel, int64_t first, int64_t count, char* memory) {
        dequantize_blocks(f, panel, first, count, reinterpret_cast<W*>(memory));
        return memory;
      },
      [&](int64_t b, int64_t first, int64_t count, char* memory, float* sums) {
        const int64_t last = first + count - 1;
        const int64_t begin = f.begin(first) / kWidth, end = (f.begin(last) + f.length(last)) / kWidth;
        const W* part = x + (rows.packed_begin(b, steps) + begin * rows.size(b)) * kWidth;
        multiply<W>(rows.size(b), part, reinterpret_cast<const W*>(memory), end - begin, {sums}, onto({sums}));
      });
}

// On the matrix unit, in bfloat16. Unpacking a panel takes about as long as multiplying a hundred rows with it.
void run_quantized_tiles(const QuantizedLinearArgs& q) {
  const LinearArgs& a = q.linear;
  const QuantizedFormat& f = q.format;
  run_tiles(a, a.k / 2, 8 * kMaxTaskRows, [&](int64_t p) {
    bf16* panel = thread_scratch().get<bf16>(a.k * kPanel * sizeof(bf16));
    dequantize_blocks(f, static_cast<const char*>(a.weight) + p * f.panel_bytes(), 0, f.blocks(), panel);
    return panel;
  });
}

// Rows of x rounded to bytes, one in each product, times codes as bytes.
void stream_bytes(Products products, const QuantizedFormat& f) {
  // The scale of a row stands before its bytes.
  const int64_t count = std::ssize(products), scale_bytes = 64;
  const int64_t row_bytes = scale_bytes + round_up(ByteRows::bytes(f, 1), 64);
  char** packed = pack_products(products, row_bytes, [&](const LinearArgs& a, char* memory) {
    const ByteRows x(f, 1, memory + scale_bytes);
    *reinterpret_cast<float*>(memory) = make_bytes(f, a.x.data, a.x.dtype, 1, 0, x);
  });
  LinearArgs* scaled = operand_scratch().get<LinearArgs>(count * sizeof(LinearArgs));
  for (int64_t i = 0; i < count; ++i) {
    scaled[i] = products[i];
    scaled[i].row_scales = reinterpret_cast<const float*>(packed[i]);
  }
  stream_panels(Products(scaled, count), f.panel_bytes(), [&](int64_t i, const char* panel, float* sums) {
    multiply_bytes(f, 1, ByteRows(f, 1, packed[i] + scale_bytes), panel, sums);
  });
}

// Rows of x rounded to bytes, times codes as bytes.
void run_bytes(const QuantizedLinearArgs& q) {
  const QuantizedFormat& f = q.format;
  LinearArgs a = q.linear;
  const RowBlocks rows(a.x.size[2], kMaxByteRows);
  const int64_t scale_bytes = round_up(rows.rows * sizeof(float), 64);
  char* memory = shared_scratch().get<char>(scale_bytes + ByteRows::bytes(f, rows.rows));
  float* scales = reinterpret_cast<float*>(memory);
  const ByteRows x(f, rows.rows, memory + scale_bytes);
  for_rows(rows.count, kMaxByteRows * a.k, [&](int64_t b) {
    for (int64_t r = 0, row = rows.begin(b); r < rows.size(b); ++r, ++row)
      scales[row] = make_bytes(f, x_row(a, row), a.x.dtype, rows.size(b), r, x.from(f, rows.begin(b)));
  });
  a.row_scales = scales;
  run_panels(
      {a, f, q.activations}, rows, f.blocks(), 0,
      [](const char* panel, int64_t, int64_t, char*) { return panel; },
      [&](int64_t b, int64_t, int64_t, const char* panel, float* sums) {
        multiply_bytes(f, rows.size(b), x.from(f, rows.begin(b)), panel, sums);
      });
}

void exact_linear(Products products, const QuantizedFormat& f);

// Rows of x rounded, as the numbers that their codes stand for, times anything.
template <class Number>
void run_rounded(const QuantizedLinearArgs& q) {
  LinearArgs a = q.linear;
  const int64_t rows = a.x.size[2], pitch = round_up(a.k, kLanes);
  const int64_t scale_bytes = round_up(rows * sizeof(float), 64);
  char* memory = operand_scratch().get<char>(scale_bytes + rows * pitch * sizeof(Number));
  float* scales = reinterpret_cast<float*>(memory);
  Number* numbers = reinterpret_cast<Number*>(memory + scale_bytes);
  for_rows(rows, a.k, [&](int64_t row) {
    with_type(a.x.dtype, [&](auto* type) {
      const auto* x = reinterpret_cast<const std::remove_pointer_t<decltype(type)>*>(x_row(a, row));
      const RowScale scaling = row_scale(x, a.k, q.activations);
      scales[row] = scaling.scale;
      for (int64_t k = 0; k < a.k; k += kLanes)
        store(numbers + row * pitch + k, rounded_numbers(x, k, a.k, scaling, q.activations));
    });
  });
  a.row_scales = scales;
  a.x.data = reinterpret_cast<char*>(numbers);
  a.x.dtype = std::is_same_v<Number, float> ? Dtype::f32 : Dtype::bf16;
  a.x.stride[2] = pitch;
  exact_linear(Products(&a, 1), q.format);
}

void run_products(Products products, const QuantizedFormat& f, RowFormat activations) {
  const bool bytes = are_integers(f.codes) && f.group <= kMaxByteGroup && activations == RowFormat::int8;
  if (activations == RowFormat::none) return exact_linear(products, f);
  if (bytes && most_rows(products) == 1) return stream_bytes(products, f);
  if (products.size() > 1) {
    for (const LinearArgs& a : products) run_products(Products(&a, 1), f, activations);
    return;
  }
  const QuantizedLinearArgs q{products.front(), f, activations};
  if (bytes) run_bytes(q);
  else if (q.linear.x.dtype == Dtype::f32) run_rounded<float>(q);
  else run_rounded<bf16>(q);
}

// Without rounding rows to bytes.
void exact_linear(Products products, const QuantizedFormat& f) {
  const LinearArgs& a = products.front();
  const bool integers = are_integers(f.codes) && a.x.dtype != Dtype::f32;
  if (integers && most_rows(products) <= (kHasIntegerPairs ? kMaxStreamRows : 1)) return stream_integers(products, f);
  if (products.size() > 1) {
    for (const LinearArgs& each : products) exact_linear(Products(&each, 1), f);
    return;
  }
  const QuantizedLinearArgs q{a, f, RowFormat::none};
  const RowBlocks rows(a.x.size[2]);
  if constexpr (kHasTiles) {
    const bool fits = a.x.dtype == Dtype::bf16 && rows.rows >= kTileRows && a.k % (2 * kTileSteps) == 0;
    if (fits && f.group % 2 == 0 && tiles_allowed()) return run_quantized_tiles(q);
  }
  if (integers && kHasIntegerPairs) return run_integers(q);
  with_type(a.x.dtype, [&](auto* type) {
    using From = std::remove_pointer_t<decltype(type)>;
    if constexpr (kHasPairs && std::is_same_v<From, bf16>) {
      if (f.group % 2 == 0) return run_floats<bf16, bf16>(q, rows);
    }
    run_floats<float, From>(q, rows);
  });
}

void quantized_linear(const QuantizedLinearArgs& q) {
  run_products(Products(&q.linear, 1), q.format, q.activations);
}

void quantized_gated_linear(const QuantizedLinearArgs& q) {
  run_gated(q.linear, [&](const LinearArgs& a) { run_products(Products(&a, 1), q.format, q.activations); });
}

struct QuantizedExpertArgs {
  QuantizedLinearArgs product;
  Routing routing;
};

void quantized_expert_linear(const QuantizedExpertArgs& a) {
  const QuantizedLinearArgs& q = a.product;
  run_experts(q.linear, a.routing, [&](Products products) { run_products(products, q.format, q.activations); });
}

struct QuantizedPackArgs {
  QuantizedRows rows;
  QuantizedFormat format;
  int64_t n;
  char* packed;
};

void pack_quantized(const QuantizedPackArgs& a) {
  const QuantizedFormat& f = a.format;
  const int64_t code_bytes = f.group * f.groups * f.bits() / 8;
  const int64_t scale_bytes = f.groups * item_size(f.scales), offset_bytes = f.groups * f.offset_size();
  parallel_for(divide_up(a.n, kPanel), 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t p = begin; p < end; ++p) {
      const int64_t row = p * kPanel;
      const QuantizedRows rows = {a.rows.codes + row * code_bytes, a.rows.scales + row * scale_bytes,
                                  a.rows.offsets + row * offset_bytes};
      pack_quantized_panel(f, rows, std::min(kPanel, a.n - row), a.packed + p * f.panel_bytes());
    }
  });
}

// Looks up rows of a weight that is not packed. `numbers` has what each code stands for. An id out of range gives zeros
// where the ids have been checked, else the kernel fails.
struct QuantizedEmbeddingArgs {
  QuantizedRows rows;
  QuantizedFormat format;
  const float* numbers;
  const char* ids;
  char* out;
  Dtype out_type;
  int64_t id_size, count, limit, checked;
};

void quantized_embedding(const QuantizedEmbeddingArgs& a) {
  const QuantizedFormat& f = a.format;
  const int64_t k = f.groups * f.group, bits = f.bits(), mask = (1 << bits) - 1;
  for_rows(a.count, k, [&](int64_t i) {
    const int64_t id = a.id_size == 4 ? load_bits<int32_t>(a.ids + 4 * i) : load_bits<int64_t>(a.ids + 8 * i);
    const bool in_range = id >= 0 && id < a.limit;
    if (!in_range && !a.checked) throw std::out_of_range("index " + std::to_string(id) + " is out of range");
    float* row = thread_scratch().get<float>(round_up(k, kLanes) * sizeof(float));
    if (!in_range) std::fill(row, row + k, 0.0f);
    for (int64_t g = 0; in_range && g < f.groups; ++g) {
      const int64_t at = id * f.groups + g;
      const float scale = load_any(a.rows.scales, f.scales, at, 1)[0];
      float minimum = 0, zero = 0;
      if (f.offsets == Offsets::minimum) minimum = load_any(a.rows.offsets, f.scales, at, 1)[0];
      if (f.offsets == Offsets::zero_point) zero = a.numbers[uint8_t(a.rows.offsets[at])];
      for (int64_t c = g * f.group; c < (g + 1) * f.group; ++c) {
        const int64_t bit = (id * k + c) * bits;
        row[c] = (a.numbers[a.rows.codes[bit / 8] >> bit % 8 & mask] - zero) * scale + minimum;
      }
    }
    for (int64_t c = 0; c < k; c += kLanes) store_any(a.out, a.out_type, i * k + c, load(row + c), k - c);
  });
}

}  // namespace
}  // namespace npu

NPU_KERNEL(quantized_linear, npu::QuantizedLinearArgs, npu::quantized_linear)
NPU_KERNEL(quantized_expert_linear, npu::QuantizedExpertArgs, npu::quantized_expert_linear)
NPU_KERNEL(quantized_gated_linear, npu::QuantizedLinearArgs, npu::quantized_gated_linear)
NPU_KERNEL(pack_quantized, npu::QuantizedPackArgs, npu::pack_quantized)
NPU_KERNEL(quantized_embedding, npu::QuantizedEmbeddingArgs, npu::quantized_embedding)
