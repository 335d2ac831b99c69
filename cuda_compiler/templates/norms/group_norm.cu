// GroupNorm over channels-last images [N, C, …], whose pixels lie `X::stride(2)` apart: a thread has `pack` channels, side by
// side, of some pixels. The first kernel finds mean and squares about it of each group in each chunk of an image's pixels,
// the second combines those of an image and normalizes a chunk of its pixels.

constexpr int channels = int(X::size(1));
constexpr int group_channels = channels / param::groups;
constexpr int pixels = int(X::size(2));
constexpr int packs = channels / pack;
constexpr int lines = THREADS / packs;  // pixels that a block has at a time
constexpr int chunk = (pixels + chunks - 1) / chunks;
static_assert(lines > 0 && THREADS <= 1024, "");

struct Own {
    int image;
    int channel;
    int line;
    int first;
    int end;

    __device__ __forceinline__ Own()
        : image(blockIdx.y), channel(int(threadIdx.x) % packs * pack), line(int(threadIdx.x) / packs),
          first(int(blockIdx.x) * chunk), end(smaller(first + chunk, pixels)) {}
};

#kernel groupnorm_chunks
// stats[N, chunks, groups, 2]. Squares are summed about a value of the channel, so that a large mean costs no precision.
WAITING_KERNEL(groupnorm_chunks) {
    __shared__ float sums[lines][channels];
    __shared__ float squares[lines][channels];
    const Own own;
    begin_in_turn();
    const X::type *image = x + own.image * X::stride(0);
    const float count = float(own.end - own.first);
    if (own.line < lines) {
        float about[pack];
        load_floats(about, image + own.first * X::stride(2) + own.channel);
        float sum[pack] = {};
        float square[pack] = {};
#pragma unroll 4
        for (int pixel = own.first + own.line; pixel < own.end; pixel += lines) {
            float values[pack];
            load_floats(values, image + pixel * X::stride(2) + own.channel);
#pragma unroll
            for (int i = 0; i < pack; i++) {
                const float away = values[i] - about[i];
                sum[i] += away;
                square[i] = fmaf(away, away, square[i]);
            }
        }
#pragma unroll
        for (int i = 0; i < pack; i++) {
            sums[own.line][own.channel + i] = sum[i];
            squares[own.line][own.channel + i] = square[i];
        }
    }
    __syncthreads();
    for (int channel = threadIdx.x; channel < channels; channel += THREADS) {
        float sum = 0.0f;
        float square = 0.0f;
        for (int line = 0; line < lines; line++) {
            sum += sums[line][channel];
            square += squares[line][channel];
        }
        sums[0][channel] = to_float(image[own.first * X::stride(2) + channel]) + sum / count;
        squares[0][channel] = square - sum * sum / count;
    }
    __syncthreads();
    for (int group = threadIdx.x; group < param::groups; group += THREADS) {
        float mean = 0.0f;
        for (int i = 0; i < group_channels; i++) {
            mean += sums[0][group * group_channels + i];
        }
        mean /= float(group_channels);
        float square = 0.0f;
        for (int i = 0; i < group_channels; i++) {
            const float away = sums[0][group * group_channels + i] - mean;
            square += squares[0][group * group_channels + i] + count * away * away;
        }
        const index_t at = (index_t(own.image) * chunks + blockIdx.x) * param::groups + group;
        store_pack<2>(stats + 2 * at, Pack<float, 2>{{mean, square}});
    }
}

#kernel groupnorm_apply
constexpr int sharers = 8;  // lanes that combine the chunks of a group
constexpr int turns = (chunks + sharers - 1) / sharers;

__device__ __forceinline__ float sum_of_sharers(float value) {
#pragma unroll
    for (int step = sharers / 2; step > 0; step /= 2) {
        value += __shfl_xor_sync(0xffffffffu, value, step);
    }
    return value;
}

WAITING_KERNEL(groupnorm_apply) {
    __shared__ float means[param::groups];
    __shared__ float scales[param::groups];
    const Own own;
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
        mean = sum_of_sharers(mean) / float(pixels);
#pragma unroll
        for (int turn = 0; turn < turns; turn++) {
            const int part = turn * sharers + sharer;
            const float count = part < chunks ? float(smaller(chunk, pixels - part * chunk)) : 0.0f;
            const float away = mean_of[turn] - mean;
            square += count * float(group_channels) * away * away;
        }
        square = sum_of_sharers(square);
        if (sharer == 0 && group < param::groups) {
            means[group] = mean;
            scales[group] = rsqrtf(square / (float(pixels) * float(group_channels)) + param::eps);
        }
    }
    __syncthreads();
    if (own.line >= lines) {
        return;
    }
    float mean[pack];
    float scale[pack];
    float shift[pack];
#pragma unroll
    for (int i = 0; i < pack; i++) {
        const int channel = own.channel + i;
        mean[i] = means[channel / group_channels];
        scale[i] = scales[channel / group_channels];
        shift[i] = 0.0f;
        if constexpr (Weight::present) {
            scale[i] *= to_float(weight[channel * Weight::stride(0)]);
        }
        if constexpr (Bias::present) {
            shift[i] = to_float(bias[channel * Bias::stride(0)]);
        }
    }
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
#pragma unroll
                for (int j = 0; j < pack; j++) {
                    values[j] = activate(fmaf(values[j] - mean[j], scale[j], shift[j]));
                }
                store_floats(out + own.image * Out::stride(0) + pixel * Out::stride(2) + own.channel, values);
            }
        }
    }
}
