// What the products of a resident kernel have in common: how a block goes through its units, and what follows the sums. With a call's
// `choices` the block first chooses experts, whose results it then multiplies with the factors of the choice.
// Expects `Scratch` with `stage_x`, `HeldColumns` and `for_chunks`, `Sums` of a unit, whether units are taken in pairs, and
// with `long_columns` whether `for_chunks` is so much code that it is there once, for pairs and for single units.

// What multiplies a part of x with a unit, or with a pair of them: one's products run while the other's wait for their
// operands (I3).
struct Units {
    Ring &ring;
    Sums &first;
    Sums &second;
    bool pair;

    template <typename Columns>
    __device__ __forceinline__ void operator()(const Columns &columns) const {
        if (pair) {
            const Ring second_slot = ring.after_current();
            const char *const slot = ring.wait();
            const char *const other = second_slot.wait();
            first.add(slot, columns);
            second.add(other, columns);
            ring.release();
        } else {
            first.add(ring.wait(), columns);
        }
        ring.release();
    }
};

// Which result of a batch is a thread's.
struct Result {
    int turn;  // number of its unit in the batch
    int index;  // in its unit
    int row;
    int column;

    __device__ __forceinline__ Result(int number, int start)
        : turn(number / (own_rows * rows)), index(number % own_rows), row(number / own_rows % rows),
          column((start + turn * gridDim.x + blockIdx.x) * own_rows + index) {}
};

PREFETCH {
    // All blocks read them, so one block's prefetch is enough.
    if (blockIdx.x == 0) {
        if constexpr (Gain::present) {
            prefetch_l2(gain, depth * sizeof(Gain::type));
        }
        if constexpr (Base_gain::present) {
            prefetch_l2(base_gain, depth * sizeof(Base_gain::type));
        }
        if constexpr (Bias::present && !of_experts) {
            prefetch_l2(bias, (gated ? 2 : 1) * param::n * sizeof(Bias::type));
        }
    }
}

#where choices
#include "sorting/choice.cuh"

// The choice of experts by the ratings of the step before, by one warp of the block. Factors are rounded where the program keeps
// them in 16 bits.
__device__ __forceinline__ void choose_experts(const ChosenExperts &chosen, const Grid &grid, const Ratings::type *ratings) {
    constexpr int width = int(Ratings::size(1));
    constexpr int held = (width + WARP - 1) / WARP;
    float values[held];
    for (bool missing = true; missing;) {
        missing = false;
#pragma unroll
        for (int i = 0; i < held; i++) {
            const int number = i * WARP + int(threadIdx.x % WARP);
            values[i] = -INFINITY_F;
            if (number < width) {
                Ratings::type rating;
                if constexpr (rated_by_mailbox) {
                    missing |= !grid.receive_one(rating, number);
                } else {
                    rating = ratings[number];
                }
                values[i] = to_float(rating);
            }
        }
    }
    const Choice own = choice_of_row<width, expert_choices, softmax_before, softmax_after, divides>(values);
    chosen.publish(grid.step, own.number, rounds_factors ? to_float(from<Out::type>(own.weight)) : own.weight);
}
#end

#if CHOICES > 0
// What is added to a result of experts: the biases of the expert that it belongs to, or the weighted sum of those of all chosen
// ones.
__device__ __forceinline__ Addends addends_of_experts(
    const ChosenExperts &chosen, const Bias::type *biases, const Residual::type *residuals, const Result &own
) {
    Addends result;
    if constexpr (Residual::present) {
        result.residual = to_float(residuals[own.row * Residual::stride(0) + own.column * Residual::stride(1)]);
    }
    if constexpr (Bias::present && expert_units == 0) {
#pragma unroll
        for (int i = 0; i < row_experts; i++) {
            const float bias = to_float(biases[chosen.expert(i) * int(param::n) + own.column]);
            result.bias = fmaf(chosen.factor(i), bias, result.bias);
        }
    } else if constexpr (Bias::present) {
        constexpr int matrix_rows = expert_units * own_rows;
        const int number = own.column / matrix_rows;
        const int first = chosen.expert(number) * matrix_rows * (gated ? 2 : 1);
        const int column = own.column - number * matrix_rows;
        result.bias = to_float(biases[first + row_of_result(column)]);
        result.up_bias = gated ? to_float(biases[first + gated_row_of_result(column, matrix_rows)]) : 0.0f;
    }
    return result;
}
#endif

PHASE(product) {
    Scratch &scratch = *reinterpret_cast<Scratch *>(shared);  // I12
    const int warp = this_thread() / WARP;
#if CHOICES > 0
    const ChosenExperts chosen(ring.choice_place());
#endif
#where choices
    grid.wait<rated_by_mailbox>();  // I11
    if (warp == 0) {
        choose_experts(chosen, grid, ratings);  // I26
    }
#elsewhere
    grid.wait<from_mailbox>();  // I11
#end
    const auto addends_of = [&](const Result &own) {
#if CHOICES > 0
        if constexpr (of_experts) {
            return addends_of_experts(chosen, bias, residual, own);
        }
#endif
        return Addends(bias, residual, own.row, own.column);
    };
    const Result first_own(this_thread(), 0);
    const bool has_own = first_own.turn < batch && first_own.column < int(param::n);
    constexpr bool adds_chosen = Bias::present && expert_units > 0;
    Addends addends;  // read before the sums are complete, and even before x is there (I19)
    if (!adds_chosen && has_own) {
        addends = addends_of(first_own);
    }
    const Input input{x, gain, base, base_gain, const_cast<Whole::type *>(whole)};
    stage_x(grid, scratch, input);
    const HeldColumns held_columns(grid, scratch, input);
#where choices
    if constexpr (adds_chosen) {
        chosen.wait(grid.step);
        if (has_own) {
            addends = addends_of(first_own);
        }
    }
#end
    if (is_long && threadIdx.x == 0) {
        ring.raise_limit();
    }
    int buffer = 0;
    for (int start = 0; start < units; start += batch * gridDim.x, buffer ^= 1) {
        float(&sums_of)[batch][sum_rows][rows] = scratch.sums[buffer][warp];
        int unit = start + blockIdx.x;
        int turn = 0;
        const auto take = [&](bool pair) {
            Sums first(unit), second(unit + gridDim.x);
            for_chunks(scratch, held_columns, Units{ring, first, second, pair});
            first.store(sums_of[turn]);
            if (pair) {
                second.store(sums_of[turn + 1]);
            }
        };
        if constexpr (units_together == 2 && !long_columns) {
            for (; turn < batch && unit + int(gridDim.x) < units; turn += 2, unit += 2 * gridDim.x) {
                take(true);
            }
        }
        constexpr int step = long_columns ? units_together : 1;
#pragma unroll 1
        for (; turn < batch && unit < units; turn += step, unit += step * gridDim.x) {
            take(step == 2 && unit + int(gridDim.x) < units);
        }
        if (is_long && threadIdx.x == 0 && start + batch * int(gridDim.x) >= units) {
            ring.lower_limit();
        }
        // After this the sums of the previous batch may be overwritten (I18).
        sync_block();
        static_assert(batch % units_together == 0, "pairs of units do not extend over two batches (I3)");
        static_assert(batch * own_rows * rows <= THREADS, "a thread has one result of a batch");
        const Result own(this_thread(), start);
        if (own.turn < batch && own.column < int(param::n)) {
            const float scale = scale_of_sums(scratch);
            const auto &sums = scratch.sums[buffer];
            float sum = sum_of_warps([&](int other) { return sums[other][own.turn][row_of_result(own.index)][own.row]; });
            float up = 0.0f;
            if constexpr (gated) {
                const int row = gated_row_of_result(own.index, own_rows);
                up = sum_of_warps([&](int other) { return sums[other][own.turn][row][own.row]; });
            }
            if constexpr (scales_sums) {
                sum *= scale;
                up *= scale;
            }
#ifdef EXCHANGED
            if constexpr (ranks > 1) {
                grid.wait_for_all();  // I23
                const unsigned long long *memory = reinterpret_cast<const unsigned long long *>(peers);
                sum = grid.sum_of_ranks<ranks>(memory, own.row * int(param::n) + own.column, sum);
            }
#endif
            if (start > 0) {
                addends = addends_of(own);
            }
#where choices
            const float factor = chosen.factor(own.column / (expert_units * own_rows));
            const Out::type result = from<Out::type>(to_float(addends.result(sum, up)) * factor);
#elsewhere
            const Out::type result = addends.result(sum, up);
#end
            const index_t target = own.row * Out::stride(0) + own.column * Out::stride(1);
            if constexpr (to_mailbox) {
                grid.send(target, result);
            }
            out[target] = result;
        }
    }
#ifdef EXCHANGED
    if constexpr (ranks > 1) {
        grid.end_exchange();
    }
#endif
}
