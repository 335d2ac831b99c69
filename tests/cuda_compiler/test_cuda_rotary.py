"""Rotary embedding and the update of the KV cache as one kernel: where they are one, and that it does what both do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import cuda_gpu
import cuda_toolchain
import numpy as np
import pytest
import torch
from cuda_llms import CONFIGS, paged_plan_of
from cuda_llms import plan_of as plan_of_a_model
from drawn import drawn
from metal_harness import finished
from reference_kernels import reference_launch

from cuda_compiler import CUDACodegenTarget
from cuda_compiler.resident.kernel import RESIDENT
from npu_compiler.graph.dtypes import numpy_dtype
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.plan import BufferAllocation, ExecutionPlan
from npu_compiler.program.views import View, contiguous_strides, numel
from npu_runtime.torch_arrays import numpy_to_tensor


@dataclass(frozen=True)
class Step:
    """A rotation of `heads` heads, of which `kv_heads` from `first_key` on are keys, and the update of a cache.

    Attributes:
        places: The rows of the cache that are replaced, one for each token.
        joined: Queries, keys and values lie side by side, token by token, as one product makes them.
        shown: Range of the rotation's heads that another call reads.
    """

    places: Sequence[int]
    heads: int = 5
    kv_heads: int = 2
    first_key: int = 3
    width: int = 16
    batch: int = 1
    rows: int = 40
    table: str = "compute"
    joined: bool = True
    token_order: bool = False
    checked: bool = True
    shown: tuple[int, int] = (0, 3)


STEPS = {
    "prefill": Step(range(7, 27)),
    "one token": Step([39]),
    "keys alone": Step(range(5), heads=2, first_key=0, shown=(0, 0), joined=False),
    "keys first": Step(range(5), first_key=0, shown=(2, 5)),
    "wide heads": Step(range(33), heads=14, first_key=12, width=128, shown=(0, 12)),
    "odd pairs": Step(range(9), width=6, joined=False),
    "two prompts": Step([4, 9, 2], batch=2, joined=False),
    "two prompts, joined": Step([4, 9, 2], batch=2),
    "float32 angles": Step(range(12), table="float32"),
    "cache in the order of tokens": Step(range(12), token_order=True),
    "places outside": Step([3, -1, 0, 40, 39, 2**31 - 1], checked=False),
}
DTYPES = ("bfloat16", "float16", "float32")


def plan_of(step: Step, dtype: str, target: Any = None) -> ExecutionPlan:
    """The calls on buffers `x`, `new_values`, …; as the target leaves them, if one is given."""
    batch, heads, tokens, width = step.batch, step.heads, len(step.places), step.width
    table = dtype if step.table == "compute" else step.table
    sizes = {"index": tokens}

    def tensor(name: str, shape: Sequence[int], kind: str, order: Sequence[int] = (0, 1, 2, 3)) -> View:
        """Return a view of a new buffer whose dimensions lie in memory in the given order."""
        sizes[name] = numel(shape)
        strides = contiguous_strides([shape[dim] for dim in order])
        return View(name, tuple(shape), tuple(strides[list(order).index(dim)] for dim in range(len(shape))), 0, kind)

    cache_order = (0, 2, 1, 3) if step.token_order else (0, 1, 2, 3)
    if step.joined:
        whole = tensor("x", (batch, heads + step.kv_heads, tokens, width), dtype, (0, 2, 1, 3))
        x, source = whole.slice(1, 0, heads), whole.slice(1, heads, heads + step.kv_heads)
    else:
        x = tensor("x", (batch, heads, tokens, width), dtype)
        source = tensor("new_values", (batch, step.kv_heads, tokens, width), dtype)
    angles = [tensor(name, (batch, 1, tokens, width), table).expand(x.shape) for name in ("cos", "sin")]
    turned = tensor("turned", x.shape, dtype)
    keys, values = (
        tensor(name, (batch, step.kv_heads, step.rows, width), dtype, cache_order) for name in ("keys", "values")
    )
    index = View("index", (tokens,), (1,), 0, "int32")
    rope = KernelCall("rope_kernel", "", (x, *angles), (turned,), {"rotary_dim": width}, "rope")
    new_keys = turned.slice(1, step.first_key, step.first_key + step.kv_heads)
    update = KernelCall(
        "index_copy_pair_kernel",
        "",
        (index, new_keys, source),
        (keys, values),
        {"dim": 2, "checked": int(step.checked)},
        "update",
    )
    views = {view.buffer: view for call in (rope, update) for view in (*call.inputs, *call.outputs)}
    buffers = {
        name: BufferAllocation(name, "output" if name == "turned" else "input", (sizes[name],), view.dtype)
        for name, view in views.items()
    }
    shown = {"queries": turned.slice(1, *step.shown)} if step.shown[1] else {}
    plan = ExecutionPlan([], [rope, update], buffers, [], [], shown, {}, {}, {})
    return plan if target is None else finished(plan, target)


def kernels(plan: ExecutionPlan) -> list[str]:
    return [call.kernel for call in plan.calls]


@pytest.mark.parametrize("name", STEPS)
def test_a_rotation_and_the_update_behind_it_are_one_kernel(name: str) -> None:
    assert kernels(plan_of(STEPS[name], "bfloat16", CUDACodegenTarget())) == ["rotary_update"]


@pytest.mark.parametrize("shown", [(0, 5), (3, 4)], ids=["all", "a key"])
def test_keys_that_somebody_else_reads_are_stored_for_them(shown: tuple[int, int]) -> None:
    step = replace(STEPS["prefill"], shown=shown)
    assert kernels(plan_of(step, "bfloat16", CUDACodegenTarget())) == ["rope_kernel", "index_copy_pair_kernel"]


def test_values_that_the_rotation_makes_are_copied_after_it() -> None:
    plan = plan_of(replace(STEPS["keys first"], joined=False, kv_heads=1), "bfloat16")
    rope, update = plan.calls
    turned = rope.outputs[0]
    plan.calls[1] = replace(update, inputs=(*update.inputs[:2], turned.slice(1, 1, 2)))
    assert kernels(finished(plan, CUDACodegenTarget())) == ["rope_kernel", "index_copy_pair_kernel"]


@pytest.mark.parametrize("name", drawn(CONFIGS, 1 / 2))
def test_a_prefill_has_no_launch_for_its_caches(name: str) -> None:
    found = kernels(plan_of_a_model(name, 40))
    assert "index_copy_pair_kernel" not in found
    assert found.count("rotary_update") == CONFIGS[name].num_hidden_layers


@pytest.mark.parametrize(("tokens", "updates"), [(2, 0), (32, CONFIGS["qwen2"].num_hidden_layers)])
def test_a_step_over_a_paged_cache_has_none_either(tokens: int, updates: int) -> None:
    """A step of a few tokens is a resident kernel, which updates the cache itself."""
    found = kernels(paged_plan_of("qwen2", tokens))
    assert "index_copy_pair_kernel" not in found and "rope_kernel" not in found
    assert found.count("rotary_update") == updates and found.count(RESIDENT) == (0 if updates else 1)


@pytest.mark.parametrize("dtype", drawn(DTYPES, 1 / 3))
def test_it_compiles(dtype: str) -> None:
    sources: dict[str, str] = {}
    for step in STEPS.values():
        sources |= plan_of(step, dtype, CUDACodegenTarget()).sources
    cuda_toolchain.compile_in_turn(sources.values(), start=DTYPES.index(dtype))


@pytest.mark.gpu
@pytest.mark.skipif(bool(cuda_gpu.PROBLEM), reason=cuda_gpu.PROBLEM)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", STEPS)
def test_it_does_what_the_two_calls_do(name: str, dtype: str, seed: int) -> None:
    step, rng, (backend,) = STEPS[name], np.random.default_rng(seed), cuda_gpu.cuda_backends()
    plain, plan = plan_of(step, dtype), plan_of(step, dtype, backend.target)
    data = {
        buffer.name: rng.standard_normal(buffer.alloc_shape).astype(numpy_dtype(buffer.dtype))
        for buffer in plain.buffers.values()
    }
    data["index"] = np.array(step.places, np.int32)
    data["turned"][:] = np.nan
    expected = {key: numpy_to_tensor(array.copy()) for key, array in data.items()}

    def window(view: View) -> torch.Tensor:
        return expected[view.buffer].as_strided(view.shape, view.strides, view.offset)

    rope, update = plain.calls
    reference_launch(rope, [*map(window, rope.inputs)], [*map(window, rope.outputs)])()
    rows = [row for row, place in enumerate(step.places) if 0 <= place < step.rows]
    found_rows = torch.tensor([step.places[row] for row in rows])
    for source, cache in zip(update.inputs[1:], update.outputs, strict=True):
        window(cache)[:, :, found_rows] = window(source)[:, :, rows]

    memory = {key: backend.allocate_buffer(array) for key, array in data.items()}
    (launch,) = cuda_gpu.prepared(backend, plan.calls, plan.sources, memory)
    results = []
    for _ in range(2):
        for key in ("turned", "keys", "values"):
            memory[key].write(data[key])
        launch()
        results.append({key: buffer.to_numpy().astype(np.float32) for key, buffer in memory.items()})
    stored = expected["turned"].as_strided(rope.outputs[0].shape, rope.outputs[0].strides)
    stored[:, step.first_key : step.first_key + step.kv_heads] = torch.nan
    epsilon = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 1e-5}[dtype]
    for key, array in results[0].items():
        np.testing.assert_array_equal(array, results[1][key], key)
        wanted = expected[key].float().numpy()
        np.testing.assert_allclose(array, wanted, epsilon, epsilon * 1e-1, err_msg=key)
