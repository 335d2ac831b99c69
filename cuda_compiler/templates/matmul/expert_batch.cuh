// What a warp multiplies at a time in a product by experts: some pieces of 16 rows of an expert's matrix, and of up to `held` rows of x.
// Expects `Half`, `held`, `splits` and `unrolled`.

constexpr int fragments = held / 8;
constexpr int pieces = (int(param::k) + 31) / 32;  // of 32 terms, eight for each of four lanes
constexpr bool is_whole = pieces % (splits * unrolled) == 0 && param::k % 32 == 0;

// Some pieces of two rows of the weight and of the rows of x. Lane 4g + p has rows g and g + 8 of the weight and row g of each eight
// rows of x, and of a piece's terms eight from 8p on: in whichever order the tensor cores take them, it is the same for both.
struct Batch {
    Words weights[unrolled][2];
    Words x[unrolled][fragments];

    __device__ __forceinline__ static bool exists(int at) { return is_whole || at < int(param::k); }

    __device__ __forceinline__ void load_weights(const Half *const (&from)[2], int first) {
#pragma unroll
        for (int i = 0; i < unrolled; i++) {
            const int at = 32 * (first + i) + 8 * (threadIdx.x % 4);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                weights[i][half] = Words{};
                if (exists(at)) {
                    const auto read = stream_pack<8>(from[half] + at);
                    weights[i][half] = *reinterpret_cast<const Words *>(&read);
                }
            }
        }
    }

    __device__ __forceinline__ void load_x(const Half *const (&from)[fragments], int first) {
#pragma unroll
        for (int i = 0; i < unrolled; i++) {
            const int at = 32 * (first + i) + 8 * (threadIdx.x % 4);
#pragma unroll
            for (int fragment = 0; fragment < fragments; fragment++) {
                x[i][fragment] = load_words(from[fragment] + at, from[fragment] != nullptr && exists(at));
            }
        }
    }

    __device__ __forceinline__ void multiply_into(float (&sums)[fragments][4]) const {
#pragma unroll
        for (int i = 0; i < unrolled; i++) {
            const Words &top = weights[i][0], &bottom = weights[i][1];
#pragma unroll
            for (int j = 0; j < 4; j += 2) {
#pragma unroll
                for (int fragment = 0; fragment < fragments; fragment++) {
                    const Words &own = x[i][fragment];
                    multiply(
                        sums[fragment], top.at[j], bottom.at[j], top.at[j + 1], bottom.at[j + 1], own.at[j], own.at[j + 1]
                    );
                }
            }
        }
    }
};
