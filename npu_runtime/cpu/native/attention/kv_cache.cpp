// New rows of a KV cache of a byte an element, rounded with a scale of their own.
#include "quantized/codes.h"
#include "rows.h"

namespace npu {
namespace {

// Row i of source [B, H, N, D] goes to row index[i] of codes [B, H, S, D] and scales [B, H, S]; those out of range are
// left out.
struct QuantizedIndexCopyArgs {
  View source, codes, scales;
  const char* index;
  int64_t index_size;
  RowFormat format;
};

template <class T>
void round_row(const QuantizedIndexCopyArgs& a, const T* x, char* codes, float* scale) {
  const int64_t width = a.source.size[3];
  const RowScale scaling = row_scale(x, width, a.format);
  *scale = scaling.scale;
  for (int64_t d = 0; d < width; d += kLanes) {
    const IVec lanes = rounded_codes(x, d, width, scaling, a.format);
    if (a.format == RowFormat::int8) store_bytes(reinterpret_cast<int8_t*>(codes) + d, lanes, width - d);
    else store_bytes(reinterpret_cast<uint8_t*>(codes) + d, lanes, width - d);
  }
}

void quantized_index_copy(const QuantizedIndexCopyArgs& a) {
  const int64_t heads = a.source.size[1], count = a.source.size[2];
  for_rows(a.source.size[0] * heads * count, a.source.size[3], [&](int64_t row) {
    const int64_t batch = row / count / heads, head = row / count % heads, i = row % count;
    const int64_t id = a.index_size == 4 ? load_bits<int32_t>(a.index + 4 * i) : load_bits<int64_t>(a.index + 8 * i);
    if (id < 0 || id >= a.codes.size[2]) return;
    char* codes = a.codes.data + offset(a.codes, batch, head, id);
    float* scale = reinterpret_cast<float*>(a.scales.data) + offset(a.scales, 0, batch, head) + id;
    with_type(a.source.dtype, [&](auto* type) {
      const auto* x = reinterpret_cast<decltype(type)>(a.source.data) + offset(a.source, batch, head, i);
      round_row(a, x, codes, scale);
    });
  });
}

}  // namespace
}  // namespace npu

NPU_KERNEL(quantized_index_copy, npu::QuantizedIndexCopyArgs, npu::quantized_index_copy)
