"""Dividing a prompt among prefill programs of several sizes and decode steps.

The unit of cost is the time by which one more token makes a run of a prefill program longer. Measured with a model of
135 million parameters on two cores with AVX2, a token is 1.9 ms, a run of 16 tokens 40 ms, of 128 tokens 257 ms, of 512
tokens 961 ms, and a decode step 14 ms; a run of 8 tokens takes as long as one of 16.
"""

from collections.abc import Collection, Sequence

# Tokens per run. Two to eight times apart: more sizes would save little padding, and each is traced and compiled once.
# On a GPU, products of up to 64 rows are kernels of their own.
CPU_CHUNKS = (16, 128, 512)
GPU_CHUNKS = (16, 64, 128, 512)
# What a run costs besides its tokens: above all, reading the weights. A GPU waits for its memory and for launches far
# longer than it computes, so it takes few large runs.
CPU_RUN, GPU_RUN = 7, 256
# Compiling a program takes seconds, thousands of tokens' time, but only once: all later starts find it in the cache.
_COMPILING = 200


def divide(
    tokens: int, compiled: Collection[int], chunks: Sequence[int], run: int, *, may_pad: bool = True
) -> list[int]:
    """The sizes of the runs, in order, that prefill `tokens` tokens at the least cost; size 1 means a decode step.

    All runs are full except the last, whose size may exceed the tokens that are left if padding is allowed. At most one
    of the sizes is not among `compiled`.

    Args:
        compiled: The sizes whose programs have been compiled before.
        chunks: All sizes that could be compiled.
        run: Fixed cost of a run, in tokens: `CPU_RUN` or `GPU_RUN`.
        may_pad: Whether padding is allowed. It is not for recurrent states, which it would change like tokens.
    """
    ready = [size for size in chunks if size in compiled]
    plans = [(_cost(plan := _divide(tokens, ready, run, may_pad), run), plan)]
    for new in chunks:
        if new not in compiled:
            plan = _divide(tokens, [*ready, new], run, may_pad)
            plans.append((_cost(plan, run) + _COMPILING, plan))
    return min(plans, key=lambda pair: pair[0])[1]


def _cost(plan: Sequence[int], run: int) -> int:
    return sum(plan) + len(plan) * run


def _divide(tokens: int, sizes: Sequence[int], run: int, may_pad: bool) -> list[int]:
    """The cheapest division of `tokens` tokens into runs of these sizes and decode steps (size 1), larger runs first.

    Args:
        run: Cost of a run besides that of its tokens, in tokens that take as long.
        may_pad: Whether the last run may be larger than what is left.
    """
    if not sizes:
        return tokens * [1]
    largest = max(sizes)
    whole, rest = divmod(tokens, largest)
    smaller = _divide(rest, [size for size in sizes if size < largest], run, may_pad)
    if not rest or not may_pad:
        return whole * [largest] + smaller
    return whole * [largest] + min([largest], smaller, key=lambda plan: _cost(plan, run))
