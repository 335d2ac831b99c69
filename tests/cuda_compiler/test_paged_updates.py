"""Attention over a paged cache that begins while the update of the cache right before it still runs."""

from __future__ import annotations

from dataclasses import replace

import cuda_gpu
import cuda_toolchain
import numpy as np
import pytest
import torch
from drawn import drawn
from metal_harness import finished
from reference_kernels import reference_launch

from cuda_compiler import GPU, CUDACodegenTarget
from cuda_runtime.launches import GraphSequence
from npu_compiler.graph.dtypes import numpy_dtype
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.plan import BufferAllocation, ExecutionPlan
from npu_compiler.program.views import View
from npu_runtime.torch_arrays import numpy_to_tensor

HEADS, KV_HEADS, WIDTH = 12, 2, 128
# Tokens of each sequence in the cache, and of this step.
STEPS = {
    "decode": [(1100, 1), (3, 1), (47, 1), (700, 1), (0, 1), (1500, 1), (16, 1), (31, 1), (1040, 1)],
    "one token": [(900, 1)],
    "drafts": [(1100, 4), (14, 7), (500, 1), (130, 9)],
    "a prompt's piece": [(100, 150), (800, 1)],
    "a long piece": [(100, 300)],
    "many sequences": [(97 * number % 1000, 1) for number in range(90)],
}
DTYPES = ("bfloat16", "float16")


def plan_of(
    name: str, dtype: str, block_size: int = 16, window: int = 0
) -> tuple[ExecutionPlan, dict[str, np.ndarray]]:
    """An update and the attention behind it, and the integers that say where."""
    lengths, rng = STEPS[name], np.random.default_rng(0)
    counts = [-(-sum(each) // block_size) for each in lengths]
    blocks = rng.permutation(sum(counts)).astype(np.int32)
    tables = np.zeros((len(lengths), max(counts)), np.int32)
    sequences, positions = [], []
    for sequence, (known, new) in enumerate(lengths):
        tables[sequence, : counts[sequence]], blocks = np.split(blocks, [counts[sequence]])
        sequences += new * [sequence]
        positions += range(known, known + new)
    where = {"tables": tables, "sequences": np.array(sequences, np.int32), "positions": np.array(positions, np.int32)}
    places = where["positions"]
    where["index"] = tables[where["sequences"], places // block_size] * block_size + places % block_size

    def view(name: str, *shape: int, kind: str = dtype) -> View:
        strides = [int(np.prod(shape[dim + 1 :])) for dim in range(len(shape))]
        return View(name, shape, tuple(strides), 0, kind)

    tokens, rows = len(positions), sum(counts) * block_size
    q, out = (view(name, tokens, HEADS, WIDTH) for name in ("q", "out"))
    new = [view(name, tokens, KV_HEADS, WIDTH) for name in ("new_keys", "new_values")]
    pools = [view(name, rows, KV_HEADS, WIDTH) for name in ("keys", "values")]
    index, *rest = (
        view(name, *where[name].shape, kind="int32") for name in ("index", "tables", "sequences", "positions")
    )
    update = KernelCall("index_copy_pair_kernel", "", (index, *new), (*pools,), {"dim": 0, "checked": 1}, "update")
    params = {"scale": WIDTH**-0.5, "block_size": block_size, "window": window, "soft_cap": 0.0, "has_sinks": 0}
    attention = KernelCall("paged_attention_kernel", "", (q, *pools, *rest), (out,), params, "attention")
    views = {view.buffer: view for call in (update, attention) for view in (*call.inputs, *call.outputs)}
    buffers = {
        name: BufferAllocation(name, "output" if name == "out" else "input", view.shape, view.dtype)
        for name, view in views.items()
    }
    return ExecutionPlan([], [update, attention], buffers, [], [], {"out": out}, {}, {}, {}), where


def reads_index(call: KernelCall) -> bool:
    return "index" in [view.buffer for view in call.inputs]


@pytest.mark.parametrize("name", STEPS)
def test_attention_is_told_which_rows_the_update_writes(name: str) -> None:
    """Pieces of many tokens are not told: they are mostly of one prompt and attend to the rows written."""
    update, attention = finished(plan_of(name, "bfloat16")[0], CUDACodegenTarget()).calls
    assert reads_index(update) and reads_index(attention) == (name != "a long piece")


def test_older_gpus_wait_for_the_update() -> None:
    made = finished(plan_of("decode", "bfloat16")[0], CUDACodegenTarget(GPU(capability=80))).calls
    assert [reads_index(call) for call in made] == [True, False, False]


def test_what_else_the_call_before_writes_is_waited_for() -> None:
    plan, _ = plan_of("decode", "bfloat16")
    update, attention = plan.calls
    pools, tokens = update.outputs, attention.inputs[0].shape[0]
    keys = pools[0]
    positions = View(keys.buffer, (tokens,), (1,), 0, "int32")
    elsewhere = replace(update, outputs=(keys, update.inputs[2]))
    shifted = [
        replace(view, shape=(view.shape[0] - 16, *view.shape[1:]), offset=16 * view.strides[0]) for view in pools
    ]
    for calls in (
        [update, replace(attention, inputs=(attention.inputs[0], *shifted, *attention.inputs[3:]))],
        [attention, update],
        [elsewhere, attention],
        [update, replace(attention, inputs=(*attention.inputs[:5], positions))],
    ):
        made = finished(replace(plan, calls=calls), CUDACodegenTarget()).calls
        assert not any(reads_index(call) for call in made if call.kernel.startswith("paged"))


@pytest.mark.parametrize(
    ("kernel", "written", "starts"),
    [
        ("index_copy_pair_kernel", ("a", "b"), True),
        ("index_copy_pair_kernel", ("a", "tables"), False),
        ("index_copy_pair_kernel", ("keys", "b"), False),
        ("neg_kernel", ("a",), False),  # which could become part of another kernel
        (None, (), False),
    ],
)
def test_attention_starts_before_the_update_unless_it_may_read_what_runs_then(
    kernel: str | None, written: tuple[str, ...], starts: bool
) -> None:
    """The call that runs meanwhile is the one before the rotation that is part of the update."""
    plan, _ = plan_of("decode", "bfloat16")
    update, attention = plan.calls
    index, _, values = update.inputs
    tokens, heads = index.shape[0], HEADS + KV_HEADS

    def shown(first: int, count: int) -> View:
        return View("turned", (tokens, count, WIDTH), (heads * WIDTH, WIDTH, 1), first * WIDTH, "bfloat16")

    turned = View("turned", (1, heads, tokens, WIDTH), (0, WIDTH, heads * WIDTH, 1), 0, "bfloat16")
    angles = [View(name, turned.shape, (0, 0, WIDTH, 1), 0, "bfloat16") for name in ("cos", "sin")]
    x = replace(turned, buffer="x")
    rope = KernelCall("rope_kernel", "", (x, *angles), (turned,), {"rotary_dim": WIDTH}, "rope")
    update = replace(update, inputs=(index, shown(HEADS, KV_HEADS), values))
    attention = replace(attention, inputs=(shown(0, HEADS), *attention.inputs[1:]))
    calls = [rope, update, attention]
    if kernel == "neg_kernel":
        calls.insert(0, KernelCall(kernel, "", (values,), (replace(values, buffer="a"),), {"scalars": ()}, "before"))
    elif kernel is not None:
        targets = tuple(replace(update.outputs[0], buffer=name) for name in written)
        calls.insert(0, replace(update, inputs=(index, values, values), outputs=targets))
    sizes = {"x": x.numel, "turned": x.numel, "cos": tokens * WIDTH, "sin": tokens * WIDTH}
    sizes |= dict.fromkeys("ab", update.outputs[0].numel)
    buffers = {name: BufferAllocation(name, "input", (size,), "bfloat16") for name, size in sizes.items()}
    made = finished(replace(plan, calls=calls, buffers={**plan.buffers, **buffers}), CUDACodegenTarget())
    assert [call.kernel for call in made.calls[-2:]] == ["rotary_update", "paged_shared"]
    assert reads_index(made.calls[-1])
    assert f"constexpr bool starts_next = {str(starts).lower()};" in made.sources[made.calls[-2].source]


@pytest.mark.parametrize("dtype", drawn(DTYPES, 1 / 2))
@pytest.mark.parametrize("name", drawn(STEPS, 1 / 3))
def test_it_compiles(name: str, dtype: str) -> None:
    sources = finished(plan_of(name, dtype)[0], CUDACodegenTarget()).sources
    cuda_toolchain.compile_in_turn(sources.values(), DTYPES.index(dtype) + list(STEPS).index(name))


@pytest.mark.gpu
@pytest.mark.skipif(bool(cuda_gpu.PROBLEM), reason=cuda_gpu.PROBLEM)
@pytest.mark.parametrize(("block_size", "window"), [(16, 0), (8, 0), (16, 100)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", STEPS)
def test_it_reads_no_row_before_that_is_written(name: str, dtype: str, block_size: int, window: int, seed: int) -> None:
    """Rows that the update writes are NaN before. In a graph, attention's blocks are there before the update ends."""
    rng, (backend,) = np.random.default_rng(seed), cuda_gpu.cuda_backends()
    plan, where = plan_of(name, dtype, block_size, window)
    data = {
        buffer.name: rng.standard_normal(buffer.alloc_shape).astype(numpy_dtype(buffer.dtype))
        for buffer in plan.buffers.values()
    } | where
    for pool in ("keys", "values"):
        data[pool][where["index"]] = np.nan
    expected = {key: numpy_to_tensor(array.copy()) for key, array in data.items()}

    def windows(views: tuple[View, ...]) -> list[torch.Tensor]:
        return [expected[view.buffer].as_strided(view.shape, view.strides, view.offset) for view in views]

    for call in plan.calls:
        reference_launch(call, windows(call.inputs), windows(call.outputs))()
    made = finished(plan, backend.target)
    memory = {key: backend.allocate_buffer(array) for key, array in data.items()}
    run = GraphSequence(backend._device, cuda_gpu.prepared(backend, made.calls, made.sources, memory))
    results = []
    for _ in range(20):
        for pool in ("keys", "values"):
            memory[pool].write(data[pool])
        run()
        results.append(memory["out"].to_numpy().astype(np.float32))
    epsilon = {"bfloat16": 2.0**-7, "float16": 2.0**-10}[dtype]
    np.testing.assert_allclose(results[0], expected["out"].float().numpy(), epsilon, epsilon)
    for each in results[1:]:
        np.testing.assert_array_equal(each, results[0])
