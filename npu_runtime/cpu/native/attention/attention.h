// What the two attention kernels share: the operands, what a mask means, and the state of an online softmax.
#pragma once

#include "quantized/codes.h"

namespace npu {

enum class MaskKind : int64_t { none = 0, boolean = 1, additive = 2 };

struct AttentionOperands {
  View q, k, v, mask, out;  // [B, H, M, D], [B, KV, S, D], [B, KV, S, Dv], [B, H, M, S], [B, H, M, Dv]
  MaskKind mask_kind;
  int64_t causal;
  float scale;
  float soft_cap;  // c: scores s become c tanh(s / c); 0: they stay as they are
  // Additive masks spell "do not attend" as -inf or as their type's lowest value, and a key is not even read when its
  // mask is at or below this floor. A row of nothing but such keys is computed with what the mask says, as softmax
  // defines it; only -inf then means no weight, and a row without any weight is zero, as in torch.
  float mask_floor;
  // Keys and values may be codes, with a scale for each of them: [1, B, KV, S]. The types T and K below are those of the
  // queries and of what is stored.
  RowFormat format;
  View k_scales, v_scales;
  View sinks;  // [1, 1, 1, H]: one more score of each head's softmax, which belongs to no key; no data: none
};

// What attention reads besides: keys and values may lie in blocks of a pool, in an order that a table gives, the first
// query may stand behind others that a causal mask lets it see, and each query may see a window of the last keys alone.
struct AttentionArgs : AttentionOperands {
  int64_t first_query = 0;         // the key beside which query 0 stands
  int64_t window = 0;              // number of keys that a query sees if `causal`, its own among them; 0: all
  const int32_t* table = nullptr;  // key i is row i % block_size of block table[i / block_size]
  int64_t block_size = 0, blocks = 0;

  int64_t batch() const { return q.size[0]; }
  int64_t heads() const { return q.size[1]; }
  int64_t queries() const { return q.size[2]; }
  int64_t width() const { return q.size[3]; }
  int64_t kv_heads() const { return k.size[1]; }
  int64_t keys() const { return k.size[2]; }
  int64_t value_width() const { return v.size[3]; }
  // The heads that share a key head are treated as more rows of one query matrix: row g * M + i.
  int64_t rows() const { return heads() / kv_heads() * queries(); }
};

inline constexpr float kNoWeight = -kInfinity;

// One query row: where its data is and which keys it may see.
template <class T>
struct QueryRow {
  const T* q;
  char* out;
  const char* mask;
  int64_t keys;
  int64_t first;  // the keys before are outside of its window
};

// Where the row of a key begins in keys or values. The kLanes keys from a multiple of kLanes on follow each other.
template <class K>
const K* row_of(const AttentionArgs& a, const View& rows, int64_t batch, int64_t kv_head, int64_t key) {
  if (a.table) {
    const int64_t block = std::clamp<int64_t>(a.table[key / a.block_size], 0, a.blocks - 1);
    key = block * a.block_size + key % a.block_size;
  }
  return reinterpret_cast<const K*>(rows.data) + offset(rows, batch, kv_head, key);
}

// The scales of codes [key, key + kLanes) of a key head, zeros beyond the last; 1 where the keys are no codes.
template <class K>
NPU_INLINE Vec scales_of(const AttentionArgs& a, const View& scales, int64_t batch, int64_t kv_head, int64_t key) {
  if constexpr (!kIsCode<K>) return splat(1.0f);
  const float* first = reinterpret_cast<const float*>(scales.data) + offset(scales, 0, batch, kv_head);
  return load_n(first + key, std::max<int64_t>(a.keys() - key, 0));
}

inline int64_t mask_item_size(const AttentionArgs& a) {
  return a.mask_kind == MaskKind::boolean ? 1 : item_size(a.mask.dtype);
}

template <class T>
QueryRow<T> query_row(const AttentionArgs& a, int64_t batch, int64_t kv_head, int64_t row) {
  const int64_t head = kv_head * (a.heads() / a.kv_heads()) + row / a.queries(), i = row % a.queries();
  return {
      reinterpret_cast<const T*>(a.q.data) + offset(a.q, batch, head, i),
      a.out.data + offset(a.out, batch, head, i) * item_size(a.out.dtype),
      a.mask.data ? a.mask.data + offset(a.mask, batch, head, i) * mask_item_size(a) : nullptr,
      a.causal ? std::min(a.keys(), a.first_query + i + 1) : a.keys(),
      a.window ? std::max<int64_t>(0, a.first_query + i + 1 - a.window) : 0,
  };
}

// Scores s as they count: c tanh(s / c), between -c and c, if there is a soft cap c.
NPU_INLINE Vec capped(const AttentionArgs& a, Vec scores) {
  if (a.soft_cap == 0) return scores;
  return a.soft_cap - 2 * a.soft_cap / (exp(scores * (2 / a.soft_cap)) + 1.0f);
}

// What is added to the scores of keys [key, key + kLanes): kNoWeight for those that the row does not attend.
template <class T>
NPU_INLINE Vec score_bias(const AttentionArgs& a, const QueryRow<T>& row, int64_t key, float floor) {
  const int64_t count = row.keys - key;
  Vec bias{};
  if (count > 0) {
    const bool repeats = a.mask.stride[3] == 0;  // one element stands for all keys
    if (a.mask_kind == MaskKind::boolean) {
      const uint8_t* mask = reinterpret_cast<const uint8_t*>(row.mask);
      const IVec seen = repeats ? splat_bits(*mask) : load_bytes(mask + key, count);
      bias = seen != 0 ? Vec{} : splat(kNoWeight);
    } else if (a.mask_kind == MaskKind::additive) {
      bias = repeats ? splat(load_any(row.mask, a.mask.dtype, 0, 1)[0]) : load_any(row.mask, a.mask.dtype, key, count);
      bias = bias <= floor ? splat(kNoWeight) : bias;
    }
  }
  if (count < kLanes) bias = lane_numbers() < float(std::max<int64_t>(count, 0)) ? bias : splat(kNoWeight);
  if (key < row.first) bias = lane_numbers() < float(std::min<int64_t>(row.first - key, kLanes)) ? splat(kNoWeight) : bias;
  return bias;
}

// Whether some lane is anything but `value`; NaN is.
NPU_INLINE bool differs_any(Vec lanes, float value) { return any(lanes != splat(value)); }

// The weight of a head's sink, if there is one, where the weight of a key is exp(score - highest). None where no key has
// any: a row without keys is zero with a sink, too.
inline float sink_weight(const AttentionArgs& a, int64_t head, float highest) {
  if (!a.sinks.data || highest == kNoWeight) return 0;
  const char* sink = a.sinks.data + head * a.sinks.stride[3] * item_size(a.sinks.dtype);
  return std::exp(load_any(sink, a.sinks.dtype, 0, 1)[0] - highest);
}

template <class T>
void store_attention(const AttentionArgs& a, const QueryRow<T>& row, const float* sums, float total) {
  const float factor = total > 0 || total != total ? 1.0f / total : 0.0f;
  for (int64_t d = 0; d < a.value_width(); d += kLanes)
    store_any(row.out, a.out.dtype, d, load(sums + d) * factor, a.value_width() - d);
}

}  // namespace npu
