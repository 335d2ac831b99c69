// GroupNorm over channels-last images [N, C, …], whose pixels lie `X::stride(2)` apart: a thread has `pack` channels, side by
// side, of some pixels. A block has a chunk of an image's pixels, and of these a `slice` of the channels, which is whole groups. It
// finds mean and squares about it of each group. Either a second kernel combines the chunks of an image and normalizes them, or
// the blocks of an image are a cluster, which keeps its pixels in shared memory meanwhile.

#include "common/cluster.cuh"
#include "common/copies.cuh"

constexpr int channels = int(X::size(1));
constexpr int group_channels = channels / param::groups;
constexpr int own_groups = slice / group_channels;
constexpr int pixels = int(X::size(2));
constexpr int packs = slice / pack;
constexpr int lines = THREADS / packs;  // pixels that a block has at a time
constexpr int chunk = (pixels + chunks - 1) / chunks;
static_assert(lines > 0 && THREADS <= 1024, "");

struct Own {
    int image;
    int chunk_number;
    int channel;
    int line;
    int first;
    int end;

    __device__ __forceinline__ Own(int image, int chunk_number, int slice_number)
        : image(image), chunk_number(chunk_number), channel(slice_number * slice + int(threadIdx.x) % packs * pack),
          line(int(threadIdx.x) / packs), first(chunk_number * chunk), end(smaller(first + chunk, pixels)) {}
};

// Lanes of a warp that have the same channels add up what they found before they store it.
constexpr bool folds = packs < WARP && (packs & (packs - 1)) == 0;
constexpr int rows = folds ? THREADS / WARP : lines;

struct Sums {
    float sum[rows][slice];
    float square[rows][slice];
    float about[slice];
};

// What a thread found about its channels. Squares are summed about a value of the channel, that of the block's first pixel, so
// that a large mean costs no precision.
struct Found {
    float about[pack];
    float sum[pack] = {};
    float square[pack] = {};

    __device__ __forceinline__ void add(const float (&values)[pack]) {
#pragma unroll
        for (int i = 0; i < pack; i++) {
            const float away = values[i] - about[i];
            sum[i] += away;
            square[i] = fmaf(away, away, square[i]);
        }
    }

    // Calls `emit(group, mean, square)` for each of the block's groups with the mean and the sum of squares about it.
    template <typename Emit>
    __device__ __forceinline__ void combine(Sums &sums, const Own &own, Emit emit) {
        const float count = float(own.end - own.first);
        const int at = int(threadIdx.x) % packs * pack;
        if constexpr (folds) {
#pragma unroll
            for (int step = WARP / 2; step >= packs; step /= 2) {
#pragma unroll
                for (int i = 0; i < pack; i++) {
                    sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], step);
                    square[i] += __shfl_xor_sync(0xffffffffu, square[i], step);
                }
            }
        }
        const int row = folds ? int(threadIdx.x) / WARP : own.line;
        if (folds ? int(threadIdx.x) % WARP < packs : own.line < lines) {
#pragma unroll
            for (int i = 0; i < pack; i++) {
                sums.sum[row][at + i] = sum[i];
                sums.square[row][at + i] = square[i];
            }
        }
        if (own.line == 0) {
#pragma unroll
            for (int i = 0; i < pack; i++) {
                sums.about[at + i] = about[i];
            }
        }
        __syncthreads();
        for (int channel = threadIdx.x; channel < slice; channel += THREADS) {
            float all = 0.0f;
            float squares = 0.0f;
#pragma unroll 8
            for (int each = 0; each < rows; each++) {
                all += sums.sum[each][channel];
                squares += sums.square[each][channel];
            }
            sums.sum[0][channel] = sums.about[channel] + all / count;
            sums.square[0][channel] = squares - all * all / count;
        }
        __syncthreads();
        constexpr int sharers = group_channels >= WARP ? WARP : group_channels > 8 ? 16 : 8;
        const int sharer = int(threadIdx.x) % sharers;
        for (int before = 0; before < own_groups; before += THREADS / sharers) {
            const int group = before + int(threadIdx.x) / sharers;
            const int known = smaller(group, own_groups - 1) * group_channels;
            float mean = 0.0f;
            for (int i = sharer; i < group_channels; i += sharers) {
                mean += sums.sum[0][known + i];
            }
            mean = sum_of<sharers>(mean) / float(group_channels);
            float squares = 0.0f;
            for (int i = sharer; i < group_channels; i += sharers) {
                const float away = sums.sum[0][known + i] - mean;
                squares += sums.square[0][known + i] + count * away * away;
            }
            squares = sum_of<sharers>(squares);
            if (sharer == 0 && group < own_groups) {
                emit(group, mean, squares);
            }
        }
    }

    // The sum over `sharers` lanes side by side.
    template <int sharers>
    static __device__ __forceinline__ float sum_of(float value) {
#pragma unroll
        for (int step = sharers / 2; step > 0; step /= 2) {
            value += __shfl_xor_sync(0xffffffffu, value, step);
        }
        return value;
    }
};

#kernel groupnorm_chunks
// stats[N, chunks, groups, 2].
WAITING_KERNEL(groupnorm_chunks) {
    __shared__ Sums sums;
    const Own own(blockIdx.y, blockIdx.x, 0);
    begin_in_turn();
    const X::type *data = x + own.image * X::stride(0) + own.channel;
    Found found;
    load_floats(found.about, data + own.first * X::stride(2));
    if (own.line < lines) {
#pragma unroll 4
        for (int pixel = own.first + own.line; pixel < own.end; pixel += lines) {
            float values[pack];
            load_floats(values, data + pixel * X::stride(2));
            found.add(values);
        }
    }
    found.combine(sums, own, [&](int group, float mean, float square) {
        const index_t at = (index_t(own.image) * chunks + own.chunk_number) * param::groups + group;
        store_pack<2>(stats + 2 * at, Pack<float, 2>{{mean, square}});
    });
}

#kernel groupnorm_apply groupnorm_cluster
// The factors of a thread's channels.
struct Factors {
    float mean[pack];
    float scale[pack];
    float shift[pack];

    template <typename W, typename B>
    __device__ __forceinline__ Factors(const Own &own, const float *means, const float *scales, const W *weight, const B *bias) {
#pragma unroll
        for (int i = 0; i < pack; i++) {
            const int channel = own.channel + i;
            const int group = channel % slice / group_channels;
            mean[i] = means[group];
            scale[i] = scales[group];
            shift[i] = 0.0f;
            if constexpr (Weight::present) {
                scale[i] *= to_float(weight[channel * Weight::stride(0)]);
            }
            if constexpr (Bias::present) {
                shift[i] = to_float(bias[channel * Bias::stride(0)]);
            }
        }
    }

    __device__ __forceinline__ void apply(float (&values)[pack]) const {
#pragma unroll
        for (int i = 0; i < pack; i++) {
            values[i] = activate(fmaf(values[i] - mean[i], scale[i], shift[i]));
        }
    }
};

#kernel groupnorm_cluster
// Copies of a thread's packs are on their way in parts, so that it adds up those that are there.
constexpr int turns = (chunk + lines - 1) / lines;
constexpr int parts = turns < 4 ? 1 : 4;
constexpr int part_turns = (turns + parts - 1) / parts;

struct Memory {
    Words held[turns][THREADS];
    Sums sums;
    float stats[own_groups][2];
    float means[own_groups];
    float scales[own_groups];
};

template <int part>
__device__ __forceinline__ void add_arriving(Found &found, const Words *held, const Own &own) {
    wait_for_copies<parts - 1 - part>();
#pragma unroll 4
    for (int turn = part * part_turns; turn < smaller((part + 1) * part_turns, turns); turn++) {
        if (own.line < lines && own.first + turn * lines + own.line < own.end) {
            float values[pack];
            load_floats(values, reinterpret_cast<const X::type *>(held + turn * THREADS));
            found.add(values);
        }
    }
    if constexpr (part + 1 < parts) {
        add_arriving<part + 1>(found, held, own);
    }
}

__device__ __forceinline__ void meet() {
    if constexpr (chunks > 1) {
        cluster_barrier();
    } else {
        __syncthreads();
    }
}

// What a block of the cluster found, which lies there where `own` lies here.
__device__ __forceinline__ float found_by(unsigned block, const float &own) {
    if constexpr (chunks > 1) {
        return read_from(block, &own);
    }
    return own;
}

WAITING_KERNEL(groupnorm_cluster) {
    extern __shared__ __align__(16) char memory[];
    Memory &block = *reinterpret_cast<Memory *>(memory);
    Words *const held = block.held[0] + threadIdx.x;
    const Own own(blockIdx.y, blockIdx.z, blockIdx.x);
    begin_in_turn();
    const X::type *data = x + own.image * X::stride(0) + own.channel;
#pragma unroll
    for (int part = 0; part < parts; part++) {
#pragma unroll 4
        for (int turn = part * part_turns; turn < smaller((part + 1) * part_turns, turns); turn++) {
            const int pixel = own.first + turn * lines + own.line;
            if (own.line < lines && pixel < own.end) {
                copy_words(held + turn * THREADS, reinterpret_cast<const Words *>(data + pixel * X::stride(2)), true);
            }
        }
        end_of_copies();
    }
    Found found;
    load_floats(found.about, data + own.first * X::stride(2));
    add_arriving<0>(found, held, own);
    found.combine(block.sums, own, [&](int group, float mean, float square) {
        block.stats[group][0] = mean;
        block.stats[group][1] = square;
    });
    meet();
    for (int group = threadIdx.x; group < own_groups; group += THREADS) {
        float mean_of[chunks];
        float mean = 0.0f;
        float square = 0.0f;
#pragma unroll
        for (int other = 0; other < chunks; other++) {
            mean_of[other] = found_by(other, block.stats[group][0]);
            square += found_by(other, block.stats[group][1]);
            mean += float(smaller(chunk, pixels - other * chunk)) * mean_of[other];
        }
        mean /= float(pixels);
#pragma unroll
        for (int other = 0; other < chunks; other++) {
            const float away = mean_of[other] - mean;
            square += float(smaller(chunk, pixels - other * chunk)) * float(group_channels) * away * away;
        }
        block.means[group] = mean;
        block.scales[group] = rsqrtf(square / (float(pixels) * float(group_channels)) + param::eps);
    }
    meet();  // nobody ends while others read its statistics, and the block's factors are there
    if (own.line >= lines) {
        return;
    }
    const Factors factors(own, block.means, block.scales, weight, bias);
    Out::type *target = out + own.image * Out::stride(0) + own.channel;
#pragma unroll 4
    for (int turn = 0; turn < turns; turn++) {
        const int pixel = own.first + turn * lines + own.line;
        if (pixel < own.end) {
            float values[pack];
            load_floats(values, reinterpret_cast<const X::type *>(held + turn * THREADS));
            factors.apply(values);
            store_floats(target + pixel * Out::stride(2), values);
        }
    }
}

#kernel groupnorm_apply
constexpr int sharers = 8;  // lanes that combine the chunks of a group
constexpr int turns = (chunks + sharers - 1) / sharers;

WAITING_KERNEL(groupnorm_apply) {
    __shared__ float means[param::groups];
    __shared__ float scales[param::groups];
    const Own own(blockIdx.y, blockIdx.x, 0);
    begin_in_turn();
    const int sharer = threadIdx.x % sharers;
    constexpr int at_once = THREADS / sharers;
    for (int first = 0; first < param::groups; first += at_once) {
        const int group = first + int(threadIdx.x) / sharers;
        const int known = smaller(group, param::groups - 1);
        float mean_of[turns];
        float square = 0.0f;
        float mean = 0.0f;
#pragma unroll
        for (int turn = 0; turn < turns; turn++) {
            const int part = turn * sharers + sharer;
            const index_t at = (index_t(own.image) * chunks + smaller(part, chunks - 1)) * param::groups + known;
            const Pack<float, 2> found = load_pack<2>(stats + 2 * at);
            const bool exists = part < chunks;
            const float count = exists ? float(smaller(chunk, pixels - part * chunk)) : 0.0f;
            mean_of[turn] = found.item[0];
            mean += count * found.item[0];
            square += exists ? found.item[1] : 0.0f;
        }
        mean = Found::sum_of<sharers>(mean) / float(pixels);
#pragma unroll
        for (int turn = 0; turn < turns; turn++) {
            const int part = turn * sharers + sharer;
            const float count = part < chunks ? float(smaller(chunk, pixels - part * chunk)) : 0.0f;
            const float away = mean_of[turn] - mean;
            square += count * float(group_channels) * away * away;
        }
        square = Found::sum_of<sharers>(square);
        if (sharer == 0 && group < param::groups) {
            means[group] = mean;
            scales[group] = rsqrtf(square / (float(pixels) * float(group_channels)) + param::eps);
        }
    }
    __syncthreads();
    if (own.line >= lines) {
        return;
    }
    const Factors factors(own, means, scales, weight, bias);
    // Several pixels are on their way at a time: compilers move no load ahead of a store.
    constexpr int together = 4;
    const X::type *data = x + own.image * X::stride(0) + own.channel;
    for (int first = own.first + own.line; first < own.end; first += together * lines) {
        Pack<X::type, pack> loaded[together];
#pragma unroll
        for (int i = 0; i < together; i++) {
            loaded[i] = load_pack<pack>(data + smaller(first + i * lines, own.end - 1) * X::stride(2));
        }
#pragma unroll
        for (int i = 0; i < together; i++) {
            const int pixel = first + i * lines;
            if (pixel < own.end) {
                float values[pack];
                to_floats(values, loaded[i]);
                factors.apply(values);
                store_floats(out + own.image * Out::stride(0) + pixel * Out::stride(2) + own.channel, values);
            }
        }
    }
}
