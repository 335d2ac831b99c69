// Attention of a few query rows (decoding): keys and values are streamed once, straight from their tensors, and blocks
// of keys that no row attends are not read at all.
#pragma once

#include "attention/attention.h"
#include "pool.h"
#include "scratch.h"

namespace npu {

inline constexpr int64_t kRowChunk = 16;   // query rows that pass over the keys together
inline constexpr int64_t kKeyBlock = 64;   // keys between two updates of the softmax
inline constexpr int64_t kMaxWidth = 512;  // of a query: bounds its copy on the stack
inline constexpr int64_t kPartialHead = 16;  // floats before a partial's sums: the maximum and the total, then padding

// A partial result of one row: {maximum score, total weight, ..., weighted sum of values}.
inline int64_t partial_size(const AttentionArgs& a) { return kPartialHead + round_up(a.value_width(), kLanes); }

template <class T>
inline constexpr int64_t kDotWidth = kLanes * Step<T>::kWidth;

// The dot products of one query with `count` keys (1 to kLanes), `stride` apart; lanes beyond repeat the last key. kVecs is
// the number of whole vectors per key, or 0 to take it from `width`.
template <class T, int kVecs>
NPU_INLINE Vec dot_keys(const typename Step<T>::X* q, const T* keys, int64_t stride, int64_t count, int64_t width) {
  using S = Step<T>;
  using Q = Step<typename S::X>;
  const int64_t vecs = kVecs ? kVecs : width / kDotWidth<T>, whole = vecs * kDotWidth<T>;
  Vec sums[kLanes];
  const T* key = keys;
#pragma GCC unroll 16
  for (int j = 0; j < kLanes; ++j) {
    Vec sum{};
#pragma GCC unroll 4
    for (int64_t i = 0; i < vecs; ++i)
      sum = S::multiply_add(sum, Q::load_panel(q + i * kDotWidth<T>), S::load_panel(key + i * kDotWidth<T>));
    sums[j] = sum;
    if (j + 1 < count) key += stride;
  }
  if (whole < width) {
    for (int j = 0; j < kLanes; ++j) {
      T tail[kDotWidth<T>] = {};
      std::memcpy(tail, keys + std::min<int64_t>(j, count - 1) * stride + whole, (width - whole) * sizeof(T));
      sums[j] = S::multiply_add(sums[j], Q::load_panel(q + whole), S::load_panel(tail));
    }
  }
  return sum_rows(sums);
}

template <class T>
Vec dot_keys(const typename Step<T>::X* q, const T* keys, int64_t stride, int64_t count, int64_t width) {
  if (width == 64) return dot_keys<T, 64 / kDotWidth<T>>(q, keys, stride, count, width);
  if (width == 128) return dot_keys<T, 128 / kDotWidth<T>>(q, keys, stride, count, width);
  return dot_keys<T, 0>(q, keys, stride, count, width);
}

inline constexpr int kSharingRows = 3;  // queries that share the keys that a pass loads and widens

// dot_keys of kSharingRows queries, q_size apart, with kLanes keys of whole vectors.
template <class T>
void dot_shared_keys(const typename Step<T>::X* q, int64_t q_size, const T* keys, int64_t stride, int64_t width,
                     Vec* dots) {
  using S = Step<T>;
  using Q = Step<typename S::X>;
  // As many sums as leave registers for a vector of each query and one of a key.
  constexpr int kTogether = std::min(kLanes, kRegisters == 32 ? 8 : 4);
  Vec sums[kSharingRows][kLanes];
#pragma GCC unroll 4
  for (int first = 0; first < kLanes; first += kTogether) {
    Vec sum[kSharingRows][kTogether] = {};
    const T* key = keys + first * stride;
    for (int64_t i = 0; i < width; i += kDotWidth<T>) {
      Vec query[kSharingRows];
#pragma GCC unroll 4
      for (int r = 0; r < kSharingRows; ++r) query[r] = Q::load_panel(q + r * q_size + i);
#pragma GCC unroll 8
      for (int j = 0; j < kTogether; ++j) {
        const Vec loaded = S::load_panel(key + j * stride + i);
#pragma GCC unroll 4
        for (int r = 0; r < kSharingRows; ++r) sum[r][j] = S::multiply_add(sum[r][j], query[r], loaded);
      }
    }
    for (int r = 0; r < kSharingRows; ++r)
      for (int j = 0; j < kTogether; ++j) sums[r][first + j] = sum[r][j];
  }
  for (int r = 0; r < kSharingRows; ++r) dots[r] = sum_rows(sums[r]);
}

// The dot products of `rows` queries, q_size apart, with `count` keys, as dot_keys has them.
template <class T>
void dot_rows(const typename Step<T>::X* q, int64_t q_size, int64_t rows, const T* keys, int64_t stride, int64_t count,
              int64_t width, Vec* dots) {
  int64_t r = 0;
  if (count == kLanes && width % kDotWidth<T> == 0)
    for (; r + kSharingRows <= rows; r += kSharingRows)
      dot_shared_keys<T>(q + r * q_size, q_size, keys, stride, width, dots + r);
  for (; r < rows; ++r) dots[r] = dot_keys<T>(q + r * q_size, keys, stride, count, width);
}

// For kRows rows, sums[0, 16 kVecs) += weights · values over `count` rows of values. Weights and sums of different rows
// are their strides apart; a single vector may have fewer than 16 `columns` in use.
template <int kRows, int kVecs, class T>
void add_values(float* sums, int64_t sums_stride, const float* weights, const T* values, int64_t stride, int64_t count,
                int64_t columns) {
  Vec sum[kRows][kVecs];
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVecs; ++v) sum[r][v] = load(sums + r * sums_stride + v * kLanes);
  for (int64_t j = 0; j < count; ++j, values += stride) {
    Vec value[kVecs];
    for (int v = 0; v < kVecs; ++v) value[v] = kVecs > 1 ? load(values + v * kLanes) : load_n(values, columns);
    for (int r = 0; r < kRows; ++r) {
      const Vec weight = splat(weights[r * kKeyBlock + j]);
      for (int v = 0; v < kVecs; ++v) sum[r][v] += weight * value[v];
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVecs; ++v) store(sums + r * sums_stride + v * kLanes, sum[r][v]);
}

// add_values over all columns.
template <int kRows, class T>
void add_all_values(float* sums, int64_t sums_stride, const float* weights, const T* values, int64_t stride,
                    int64_t count, int64_t width) {
  int64_t d = 0;
  for (; d + 4 * kLanes <= width; d += 4 * kLanes)
    add_values<kRows, 4>(sums + d, sums_stride, weights, values + d, stride, count, 0);
  for (; d < width; d += kLanes)
    add_values<kRows, 1>(sums + d, sums_stride, weights, values + d, stride, count, width - d);
}

// Asks for kLanes keys and values of a pool, up to `end`: the hardware does not see the next page coming.
template <class K>
void prefetch_rows(const AttentionArgs& a, int64_t batch, int64_t kv_head, int64_t key, int64_t end) {
  if (a.table == nullptr || key >= end) return;
  for (const View* rows : {&a.k, &a.v}) {
    const char* first = reinterpret_cast<const char*>(row_of<K>(a, *rows, batch, kv_head, key));
    for (int64_t j = 0; j < std::min<int64_t>(kLanes, end - key); ++j)
      for (int64_t byte = 0; byte < rows->size[3] * int64_t(sizeof(K)); byte += 64)
        __builtin_prefetch(first + j * rows->stride[2] * sizeof(K) + byte);
  }
}

// The lanes moved up by `count`, from 1 to kLanes; zeros below.
NPU_INLINE Vec moved_up(Vec lanes, int64_t count) {
  alignas(64) float moved[2 * kLanes] = {};
  store(moved + kLanes, lanes);
  return load(moved + kLanes - count);
}

// Attends rows [row, row + rows) of a key head to keys [key_begin, key_end) and writes one partial per row, or adds to
// those of a pass that ended where this one begins. `floor` as in AttentionArgs; the next pass will end at `next_end`.
template <class T, class K>
void attend_rows(const AttentionArgs& a, int64_t batch, int64_t kv_head, int64_t row, int64_t rows, int64_t key_begin,
                 int64_t key_end, float floor, float* partials, bool continues = false, int64_t next_end = 0) {
  using X = typename Step<K>::X;
  const int64_t q_size = round_up(a.width(), kDotWidth<K>), size = partial_size(a);
  alignas(64) X q[kRowChunk * kMaxWidth];
  QueryRow<T> query[kRowChunk];
  int64_t nearest = a.keys(), furthest = 0;
  for (int64_t r = 0; r < rows; ++r) {
    query[r] = query_row<T>(a, batch, kv_head, row + r);
    std::fill(q + r * q_size, q + (r + 1) * q_size, X{});
    for (int64_t d = 0; d < a.width(); d += kLanes)
      store_n(q + r * q_size + d, load_n(query[r].q + d, a.width() - d), a.width() - d);
    float* partial = partials + r * size;
    if (!continues) {
      std::fill(partial, partial + size, 0.0f);
      partial[0] = kNoWeight;
    }
    nearest = std::min(nearest, query[r].first);
    furthest = std::max(furthest, query[r].keys);
  }
  key_end = std::min(key_end, furthest);

  next_end = std::max(key_end, std::min(next_end, furthest));
  for (int64_t key = key_begin; !continues && key < std::min(key_end, key_begin + kKeyBlock); key += kLanes)
    prefetch_rows<K>(a, batch, kv_head, key, key_end);
  alignas(64) float scores[kRowChunk][kKeyBlock];
  for (int64_t block = key_begin; block < key_end; block += kKeyBlock) {
    constexpr int kGroups = kKeyBlock / kLanes;
    const int64_t end = std::min(key_end, block + kKeyBlock);
    bool alive[kGroups] = {}, any = false;
    for (int64_t r = 0; r < rows; ++r)
      for (int g = 0; g < kGroups; ++g) {
        float* bias = scores[r] + g * kLanes;
        const bool repeats = r > 0 && query[r].mask == query[r - 1].mask && query[r].keys == query[r - 1].keys &&
                             query[r].first == query[r - 1].first;
        if (repeats) {
          store(bias, load(scores[r - 1] + g * kLanes));
          continue;
        }
        const int64_t key = block + g * kLanes;
        // A range of keys may end inside a block only at the last key or where another range begins, on a block.
        const Vec value = key < end ? score_bias(a, query[r], key, floor) : splat(kNoWeight);
        store(bias, value);
        if (differs_any(value, kNoWeight)) alive[g] = any = true;
      }
    if (!any) continue;

    Vec highest[kRowChunk];
    std::fill(highest, highest + rows, splat(kNoWeight));
    for (int g = 0; g < kGroups; ++g) {
      if (!alive[g]) continue;
      const int64_t key = block + g * kLanes;
      prefetch_rows<K>(a, batch, kv_head, key + kKeyBlock, next_end);
      Vec dots[kRowChunk];
      const int64_t hidden = std::clamp<int64_t>(nearest - key, 0, kLanes);  // keys before every row's window
      dot_rows<K>(q, q_size, rows, row_of<K>(a, a.k, batch, kv_head, key) + hidden * a.k.stride[2], a.k.stride[2],
                  std::min<int64_t>(kLanes, end - key) - hidden, a.width(), dots);
      if (hidden > 0)
        for (int64_t r = 0; r < rows; ++r) dots[r] = moved_up(dots[r], hidden);
      const Vec factor = a.scale * scales_of<K>(a, a.k_scales, batch, kv_head, key);
      for (int64_t r = 0; r < rows; ++r) {
        const Vec score = capped(a, dots[r] * factor) + load(scores[r] + g * kLanes);
        store(scores[r] + g * kLanes, score);
        highest[r] = max(score, highest[r]);
      }
    }
    for (int64_t r = 0; r < rows; ++r) {
      float *partial = partials + r * size, *sums = partial + kPartialHead;
      const float before = partial[0], now = std::max(before, max_lanes(highest[r]));
      if (now > before) {
        const float shrink = std::exp(before - now);
        partial[1] *= shrink;
        for (int64_t d = 0; d < a.value_width(); d += kLanes) store(sums + d, load(sums + d) * shrink);
        partial[0] = now;
      }
      // Without any weight so far the shift must not be infinite; NaN scores still have to show up in the total.
      const float shift = now == kNoWeight ? 0.0f : now;
      Vec total{};
      for (int g = 0; g < kGroups; ++g) {
        if (!alive[g]) continue;
        const Vec weight = exp(load(scores[r] + g * kLanes) - shift);
        store(scores[r] + g * kLanes, weight * scales_of<K>(a, a.v_scales, batch, kv_head, block + g * kLanes));
        total += weight;
      }
      partial[1] += sum_lanes(total);
    }

    // Rows share the values that a pass loads and widens.
    for (int g = 0; g < kGroups; ++g) {
      if (!alive[g]) continue;
      const int64_t key = block + g * kLanes, hidden = std::clamp<int64_t>(nearest - key, 0, kLanes);
      const int64_t count = std::min<int64_t>(kLanes, end - key) - hidden;
      const K* value = row_of<K>(a, a.v, batch, kv_head, key) + hidden * a.v.stride[2];
      for (int64_t r = 0; r < rows;) {
        float* sums = partials + r * size + kPartialHead;
        const auto add = [&](auto together) {
          add_all_values<together.value>(sums, size, scores[r] + g * kLanes + hidden, value, a.v.stride[2], count,
                                         a.value_width());
          r += together.value;
        };
        switch (std::min<int64_t>(rows - r, 4)) {
          case 1: add(std::integral_constant<int, 1>()); break;
          case 2: add(std::integral_constant<int, 2>()); break;
          case 3: add(std::integral_constant<int, 3>()); break;
          default: add(std::integral_constant<int, 4>());
        }
      }
    }
  }
}

// Stores a row from its partials over `splits` ranges of keys, `stride` floats apart.
template <class T, class K>
void combine_and_store(const AttentionArgs& a, int64_t batch, int64_t kv_head, int64_t row, float* partials,
                       int64_t splits, int64_t stride) {
  float highest = kNoWeight;
  for (int64_t s = 0; s < splits; ++s) highest = std::max(highest, partials[s * stride]);
  if (highest == kNoWeight && a.mask_kind == MaskKind::additive) {
    attend_rows<T, K>(a, batch, kv_head, row, 1, 0, a.keys(), kNoWeight, partials);
    highest = partials[0];
  } else if (splits > 1 && highest > kNoWeight) {
    const int64_t size = partial_size(a);
    for (int64_t s = 0; s < splits; ++s) {
      const float* partial = partials + s * stride;
      const float factor = std::exp(partial[0] - highest);
      for (int64_t i = 1; i < size; ++i) partials[i] = (s ? partials[i] : 0.0f) + factor * partial[i];
    }
  }
  const int64_t head = kv_head * (a.heads() / a.kv_heads()) + row / a.queries();
  const float total = partials[1] + sink_weight(a, head, highest);
  store_attention(a, query_row<T>(a, batch, kv_head, row), partials + kPartialHead, total);
}

// All rows: a task is a key head, a chunk of rows and a range of keys.
template <class T, class K>
void attention_by_rows(const AttentionArgs& a) {
  const int64_t rows = a.rows(), chunks = divide_up(rows, kRowChunk), heads = a.batch() * a.kv_heads();
  const int64_t wanted = divide_up(4 * num_threads(), heads * chunks);
  const int64_t splits = std::max<int64_t>(1, std::min(wanted, a.keys() / 256));
  const int64_t range = round_up(divide_up(a.keys(), splits), kKeyBlock);
  const int64_t size = partial_size(a), stride = heads * rows * size;
  float* partials = shared_scratch().get<float>(splits * stride * sizeof(float));
  // Below some hundred kilobytes of keys and values another thread's help costs more than it brings.
  const int64_t tasks = heads * chunks * splits;
  const bool small = heads * a.keys() * (a.width() + a.value_width()) < 16384;
  parallel_for(tasks, small ? tasks : 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t head = task / (chunks * splits), row = task / splits % chunks * kRowChunk, split = task % splits;
      const int64_t count = std::min(kRowChunk, rows - row), batch = head / a.kv_heads(), kv_head = head % a.kv_heads();
      float* first = partials + split * stride + (head * rows + row) * size;
      attend_rows<T, K>(a, batch, kv_head, row, count, split * range, std::min(a.keys(), (split + 1) * range),
                     a.mask_floor, first);
      if (splits > 1) continue;
      for (int64_t r = 0; r < count; ++r)
        combine_and_store<T, K>(a, batch, kv_head, row + r, first + r * size, 1, stride);
    }
  });
  if (splits == 1) return;
  for (int64_t head = 0; head < heads; ++head)
    for (int64_t r = 0; r < rows; ++r)
      combine_and_store<T, K>(a, head / a.kv_heads(), head % a.kv_heads(), r, partials + (head * rows + r) * size, splits,
                           stride);
}

}  // namespace npu
