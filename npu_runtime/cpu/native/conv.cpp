// Convolution as a product of the weights with columns of pixels that are gathered tile by tile, never all at once.
//
// Large maps keep pixels in the vector lanes. Small ones, 7x7 say, would leave lanes idle, so there output channels
// take the lanes and each result tile is transposed on its way out.
#include "conv_epilogue.h"
#include "conv_gemm.h"
#include "pool.h"
#include "scratch.h"

namespace npu::conv {
namespace {

enum class Lanes : int64_t { pixels, channels };

// Part of one output row: `count` pixels whose first input element lies `source` into the plane.
struct Segment {
  int64_t source;
  int64_t target;
  int64_t count;
};

// Where the columns of one batch item come from: the input itself, or a zero-padded copy of it.
template <class T>
struct Planes {
  const T* data;
  int64_t pitch;
  int64_t size;
};

int64_t extent(int64_t out, int64_t stride, int64_t kernel, int64_t dilation) {
  return (out - 1) * stride + (kernel - 1) * dilation + 1;
}
int64_t padded_h(const ConvArgs& a) { return extent(a.out_h, a.stride_h, a.kernel_h, a.dilation_h); }
int64_t padded_w(const ConvArgs& a) { return extent(a.out_w, a.stride_w, a.kernel_w, a.dilation_w); }

bool reads_padding(const ConvArgs& a) {
  return a.pad_top || a.pad_left || padded_h(a) > a.in_h || padded_w(a) > a.in_w;
}

// Elements of the packed operands along the depth: one value of it each, or a pair.
template <bool kPairs>
int64_t steps(const ConvArgs& a) {
  const int64_t depth = a.in_channels * a.kernel_h * a.kernel_w;
  return kPairs ? (depth + 1) / 2 : depth;
}

template <class T, class Copy>
void copy_padded(const ConvArgs& a, const T* item, Copy* to) {
  const int64_t height = padded_h(a), width = padded_w(a);
  const int64_t inside = std::min(a.in_w, width - a.pad_left);
  parallel_for(a.groups * a.in_channels, 4, [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin * height; row < end * height; ++row) {
      Copy* target = to + row * width;
      const int64_t y = row % height - a.pad_top;
      std::fill(target, target + width, Copy{});
      if (y < 0 || y >= a.in_h) continue;
      const T* source = item + (row / height * a.in_h + y) * a.in_w;
      for (int64_t x = 0; x < inside; x += kLanes)
        store_first(target + a.pad_left + x, load_first(source + x, inside - x), inside - x);
    }
  });
}

template <class T>
int find_segments(const ConvArgs& a, const Planes<T>& planes, int64_t pixel, int64_t count, Segment* segments) {
  int found = 0;
  for (int64_t done = 0; done < count; ++found) {
    const int64_t y = (pixel + done) / a.out_w, x = (pixel + done) % a.out_w;
    const int64_t length = std::min(a.out_w - x, count - done);
    segments[found] = {y * a.stride_h * planes.pitch + x * a.stride_w, done, length};
    done += length;
  }
  return found;
}

// Writes `width` elements per (input channel, kernel row, kernel column), the order of the packed weights, or per two
// of these.
template <bool kPairs, int kStride, class T>
void pack_columns(const ConvArgs& a, const Planes<T>& planes, int64_t group, int64_t pixel, int64_t count,
                  int64_t width, float* to) {
  Segment segments[kPixelVecs * kLanes];
  const int found = find_segments(a, planes, pixel, count, segments);
  const T* plane = planes.data + group * a.in_channels * planes.size;
  const T* first = nullptr;  // of a pair that lacks its second value
  const auto write = [&](const T* corner, const T* second) __attribute__((always_inline)) {
    for (int i = 0; i < found; ++i) {
      const Segment& s = segments[i];
      for (int64_t x = 0; x < s.count; x += kLanes) {
        const int64_t from = s.source + x * a.stride_w;
        Vec v = load_strided<kStride>(corner + from, a.stride_w, s.count - x);
        if constexpr (kPairs) {
          const Vec w = second ? load_strided<kStride>(second + from, a.stride_w, s.count - x) : Vec{};
          v = bit_cast<Vec>(bit_cast<UVec>(v) >> 16 | bit_cast<UVec>(w));
        }
        store_first(to + s.target + x, v, s.count - x);
      }
    }
    to += width;
  };
  for (int64_t channel = 0; channel < a.in_channels; ++channel, plane += planes.size)
    for (int64_t ky = 0; ky < a.kernel_h; ++ky)
      for (int64_t kx = 0; kx < a.kernel_w; ++kx) {
        const T* corner = plane + ky * a.dilation_h * planes.pitch + kx * a.dilation_w;
        if (kPairs && !first) {
          first = corner;
          continue;
        }
        write(kPairs ? first : corner, corner);
        first = nullptr;
      }
  if (first) write(first, nullptr);
}

template <bool kPairs, class T>
void pack_columns(const ConvArgs& a, const Planes<T>& planes, int64_t group, int64_t pixel, int64_t count,
                  int64_t width, float* to) {
  if (a.stride_w == 1) pack_columns<kPairs, 1>(a, planes, group, pixel, count, width, to);
  else if (a.stride_w == 2) pack_columns<kPairs, 2>(a, planes, group, pixel, count, width, to);
  else pack_columns<kPairs, 0>(a, planes, group, pixel, count, width, to);
}

template <bool kPairs, class T>
void run_pixel_lanes(const ConvArgs& a, const Planes<T>& planes, int64_t item) {
  const int64_t depth = steps<kPairs>(a), pixels = a.out_h * a.out_w;
  constexpr int64_t kPanel = kPixelVecs * kLanes;
  // Threads that take turns on the same cache lines of the output slow each other down, hence blocks of whole lines.
  constexpr int64_t kPanels = 2, kBlock = kPanels * kPanel;
  const int64_t blocks = (pixels + kBlock - 1) / kBlock;
  const int64_t grain = std::max<int64_t>(1, a.groups * blocks / (8 * num_threads()));
  parallel_for(a.groups * blocks, grain, [&](int64_t begin, int64_t end, int) {
    float* columns = thread_scratch().get<float>(depth * kBlock * sizeof(float));
    float tile[kPixelRows * kPanel];
    for (int64_t task = begin; task < end; ++task) {
      const int64_t group = task / blocks, pixel = task % blocks * kBlock;
      const int64_t count = std::min(kBlock, pixels - pixel);
      for (int64_t done = 0; done < count; done += kPanel) {
        const int64_t part = std::min(kPanel, count - done), width = (part + kLanes - 1) / kLanes * kLanes;
        pack_columns<kPairs>(a, planes, group, pixel + done, part, width, columns + done * depth);
      }
      const float* weight = a.weight + group * a.weight_group_stride;
      for (int64_t channel = 0; channel < a.out_channels; channel += kPixelRows, weight += kPixelRows * depth) {
        const int64_t rows = std::min<int64_t>(kPixelRows, a.out_channels - channel);
        for (int64_t done = 0; done < count; done += kPanel) {
          const int64_t part = std::min(kPanel, count - done);
          const Multiply kernel = part > 2 * kLanes ? multiply<kPixelRows, 3, kPairs>
                                  : part > kLanes   ? multiply<kPixelRows, 2, kPairs>
                                                    : multiply<kPixelRows, 1, kPairs>;
          kernel(weight, columns + done * depth, depth, tile, kPanel, kLanes);
          finish(a, item, {tile, kPanel, rows, part, group * a.out_channels + channel, pixel + done});
        }
      }
    }
  });
}

template <bool kPairs, class T>
void run_channel_lanes(const ConvArgs& a, const Planes<T>& planes, int64_t item, float* memory) {
  const int64_t depth = steps<kPairs>(a), pixels = a.out_h * a.out_w;
  const int64_t blocks = (pixels + kChannelRows - 1) / kChannelRows;
  const auto first_pixel = [&](int64_t block) { return block * pixels / blocks; };  // blocks of even sizes
  constexpr int64_t kWide = kChannelVecs * kLanes;
  const int64_t wides = (a.out_channels + kWide - 1) / kWide;
  // A few tasks per thread even out the ends; more would only reload weights.
  const int64_t parts = std::min(blocks, std::max<int64_t>(1, 4 * num_threads() / wides));
  for (int64_t group = 0; group < a.groups; ++group) {
    parallel_for(blocks, 1, [&](int64_t begin, int64_t end, int) {
      for (int64_t block = begin; block < end; ++block) {
        const int64_t pixel = first_pixel(block), count = first_pixel(block + 1) - pixel;
        pack_columns<kPairs>(a, planes, group, pixel, count, count, memory + pixel * depth);
      }
    });
    parallel_for(wides * parts, 1, [&](int64_t begin, int64_t end, int) {
      float tile[kLanes * kWide], turned[kLanes * kWide];
      for (int64_t task = begin; task < end; ++task) {
        const int64_t channel = task / parts * kWide, part = task % parts;
        const int64_t channels = std::min(kWide, a.out_channels - channel);
        const int64_t vecs = channels > kLanes ? 2 : 1;
        const float* weight = a.weight + group * a.weight_group_stride + channel * depth;
        for (int64_t block = part * blocks / parts; block < (part + 1) * blocks / parts; ++block) {
          const int64_t pixel = first_pixel(block), count = first_pixel(block + 1) - pixel;
          channel_kernel(count, vecs, kPairs)(memory + pixel * depth, weight, depth, tile, kWide, kLanes);
          for (int64_t v = 0; v < vecs; ++v) transpose(tile + v * kLanes, kWide, turned + v * kLanes * kLanes, kLanes);
          finish(a, item, {turned, kLanes, channels, count, group * a.out_channels + channel, pixel});
        }
      }
    });
  }
}

template <bool kPairs, class T>
void run_planes(const ConvArgs& a, const Planes<T>& planes, int64_t item, float* memory) {
  if (static_cast<Lanes>(a.variant) == Lanes::pixels) run_pixel_lanes<kPairs>(a, planes, item);
  else run_channel_lanes<kPairs>(a, planes, item, memory);
}

template <bool kPairs, class T>
void run_items(const ConvArgs& a) {
  using Copy = std::conditional_t<kPairs, bf16, float>;
  const int64_t columns = static_cast<Lanes>(a.variant) == Lanes::channels ? a.out_h * a.out_w * steps<kPairs>(a) : 0;
  const bool pads = reads_padding(a);
  const int64_t plane = padded_h(a) * padded_w(a);
  const int64_t copied = pads ? a.groups * a.in_channels * plane : 0;
  float* memory = shared_scratch().get<float>(columns * sizeof(float) + copied * sizeof(Copy));
  Copy* copy = reinterpret_cast<Copy*>(memory + columns);
  for (int64_t item = 0; item < a.batch; ++item) {
    const T* x = reinterpret_cast<const T*>(a.x) + item * a.x_batch_stride;
    if (pads) {
      copy_padded(a, x, copy);
      run_planes<kPairs>(a, Planes<Copy>{copy, padded_w(a), plane}, item, memory);
    } else {
      run_planes<kPairs>(a, Planes<T>{x, a.in_w, a.in_h * a.in_w}, item, memory);
    }
  }
}

void run(const ConvArgs& a) {
  if (a.pairs) return run_items<true, bf16>(a);
  with_type(a.x_type, [&](auto* type) { run_items<false, std::remove_pointer_t<decltype(type)>>(a); });
}

}  // namespace
}  // namespace npu::conv

// Whether this machine multiplies pairs of bfloat16 in one instruction; without it pairs would only lose time.
extern "C" int64_t npu_conv2d_prefers_pairs() {
#if defined(__AVX512BF16__)
  return 1;
#else
  return 0;
#endif
}

NPU_KERNEL(conv2d, npu::conv::ConvArgs, npu::conv::run)
