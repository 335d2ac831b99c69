"""The CUDA templates that compute: what calls become, that their sources compile, and that registers suffice.

What they compute is compared with the CPU device where there is a GPU (`test_cuda_kernels.py`).
"""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import cuda_toolchain
import pytest
import torch
from cuda_cases import LONG_ORDERS, MANY_ROWS, TILED_ATTENTION, WARPGROUP_ATTENTION, WIDE_ATTENTION, cached, linear
from metal_cases import attention as attention_cases
from metal_cases import matmul as matmul_cases
from metal_cases import sort as sort_cases
from metal_harness import Case, T, call_of, finished
from reference_kernels import reference_launch

from cuda_compiler import GPU, CUDACodegenTarget
from cuda_compiler.cuda_program import kernel_launch_of
from cuda_compiler.rules.table import expand as expand_call
from cuda_compiler.specialization.specializer import Specializer
from npu_compiler.graph.dtypes import itemsize
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.plan import BufferAllocation, ExecutionPlan
from npu_compiler.program.views import View


def expand(case: Case, dtype: str = "bfloat16", **gpu: int) -> tuple[list[KernelCall], Specializer]:
    make = Specializer(GPU(**gpu))  # type: ignore[arg-type]
    return expand_call(make, call_of(case, dtype)), make


def names(case: Case, dtype: str = "bfloat16", **gpu: int) -> list[str]:
    return [call.kernel for call in expand(case, dtype, **gpu)[0]]


# The shapes of Qwen2.5-1.5B.
QWEN_PRODUCTS = [
    linear(1, 2048, 1536, bias="compute"),
    linear(1, 1536, 1536, residual="compute"),
    linear(1, 8960, 1536, kernel="gated_matmul_vec_kernel", activation="silu"),
    linear(1, 1536, 8960, residual="compute"),
    linear(1, 151936, 1536),
    linear(4, 2048, 1536, bias="compute"),
    linear(8, 1536, 8960, residual="compute"),
]
QWEN_ATTENTION = [
    cached(1, 2048, 200),
    cached(1, 32768, 200),
    cached(4, 2048, 200, dtype="compute"),
    cached(128, 2048, 128),
    cached(512, 2048, 512, dtype="compute"),
    attention_cases.attention("prefill", 2048, 2048, 128, heads=(12, 2), causal=True),
]


DTYPES = ("bfloat16", "float16", "float32")


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "capability"), [("bfloat16", 90), ("float16", 80), ("float32", 90)])
def test_sources_compile(dtype: str, capability: int) -> None:
    sources = {}
    for case in (*QWEN_PRODUCTS[2:], *QWEN_ATTENTION[2:]):
        sources.update(expand(case, dtype, capability=capability)[1].sources)
    cuda_toolchain.compile_in_turn(sources.values(), start=DTYPES.index(dtype))


@pytest.mark.slow
@pytest.mark.parametrize("case", [QWEN_PRODUCTS[0], QWEN_ATTENTION[0], *QWEN_ATTENTION[3:]], ids=lambda case: case.name)
def test_registers_suffice(case: Case, tmp_path: Path) -> None:
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc")
    for name, text in (expand(case)[1].sources | expand(case, capability=80)[1].sources).items():
        source = tmp_path / f"{name}.cu"
        source.write_text(text)
        options = ["-std=c++17", "-arch=sm_90a", "-cubin", "--resource-usage", "-o", str(tmp_path / "out")]
        done = subprocess.run(["nvcc", *options, source], capture_output=True, text=True, check=True)
        assert set(re.findall(r"(\d+) bytes spill", done.stderr)) == {"0"}, done.stderr
        assert "serialized" not in done.stderr, "products wait for each other"


@pytest.mark.parametrize(
    ("case", "wanted"),
    [
        (linear(1, 16, 64, bias="compute"), ["matvec"]),
        (linear(8, 16, 64), ["matvec"]),
        (linear(8, 16, 64, kernel="matmul_notrans_kernel"), ["matvec_notrans"]),
        (linear(9, 16, 64), ["cublas_gemm"]),
        (linear(9, 16, 64, out="float32"), ["cublas_gemm"]),
        (linear(9, 16, 64, bias="compute", residual="compute"), ["cublas_gemm"]),
        (linear(9, 12, 64, bias="compute"), ["cublas_gemm", "linear_epilogue"]),
        (linear(9, 16, 64, bias="float32"), ["cublas_gemm", "linear_epilogue"]),
        (linear(9, 16, 64, residual="float32"), ["cublas_gemm", "linear_epilogue"]),
        (linear(9, 16, 64, bias="compute", activation="relu"), ["cublas_gemm"]),
        (linear(9, 16, 64, residual="compute", activation="relu"), ["cublas_gemm", "linear_epilogue"]),
        (linear(9, 16, 64, activation="gelu_tanh"), ["cublas_gemm"]),
        (linear(9, 16, 64, activation="gelu_tanh", out="float32"), ["cublas_gemm", "linear_epilogue"]),
        (linear(9, 16, 64, activation="gelu"), ["cublas_gemm", "linear_epilogue"]),
        (linear(9, 16, 64, x="float32"), ["tiled_linear"]),
        (linear(9, 16, 0, bias="compute"), ["tiled_linear"]),
        (cached(8, 64, 9), ["attention_once"]),
        (cached(8, 256, 9), ["attention_once"]),
        (cached(8, 257, 9), ["attention_split", "attention_combine"]),
        (attention_cases.attention("windows", 49, 49, 32, heads=(8, 8), batch=4), ["attention_tiled"]),
        (cached(9, 64, 9), ["attention_once"]),
        (cached(128, 2048, 128), ["attention_once"]),
        (cached(512, 2048, 9), ["attention_survey", "attention_wgmma"]),
        (attention_cases.attention("prefill", 2048, 2048, 128, heads=(12, 2), causal=True), ["attention_wgmma"]),
        (attention_cases.attention("prefill-80", 2048, 2048, 80, heads=(12, 2), causal=True), ["attention_wgmma"]),
        (attention_cases.attention("prefill-24", 2048, 2048, 24, heads=(12, 2), causal=True), ["attention_tiled"]),
        (attention_cases.attention("batches", 1, 2048, 128, heads=(16, 16), batch=64), ["attention_once"]),
        (LONG_ORDERS[0], ["count_digits", "move_by_digit"] * 2),
        (LONG_ORDERS[-1], ["count_digits", "move_by_digit"] * 4),
        (sort_cases.CASES[0], ["argsort_kernel"]),
        (attention_cases.attention("odd", 1, 64, 20), ["attention_plain"]),
        (attention_cases.attention("wide", 1, 128, 136), ["attention_once"]),
        (attention_cases.attention("wide", 1, 256, 136), ["attention_split", "attention_combine"]),
        (
            attention_cases.attention("latent", 1, 640, 576, heads=(16, 1), value_width=512),
            ["attention_split", "attention_combine"],
        ),
        (cached(1, 2048, 200, heads=6, width=256), ["attention_split", "attention_combine"]),
        (cached(512, 2048, 9, width=256), ["attention_survey", "attention_tiled"]),
        (cached(512, 2048, 9, width=512), ["attention_survey", "attention_tiled", "attention_tiled"]),
        (attention_cases.attention("too-wide", 1, 64, 1032), ["attention_plain"]),
    ],
)
def test_forms(case: Case, wanted: list[str]) -> None:
    assert names(case) == wanted


@pytest.mark.parametrize("capability", [80, 100])
def test_gpus_without_warpgroup_products_take_tiles(capability: int) -> None:
    assert names(cached(512, 2048, 9), capability=capability) == ["attention_survey", "attention_tiled"]


@pytest.mark.parametrize("case", [*TILED_ATTENTION, cached(128, 2048, 128)], ids=lambda case: case.name)
def test_attention_fits_into_the_memory_of_a_smaller_gpu(case: Case) -> None:
    turing, _ = expand(case, capability=75, shared_memory=64 * 1024)
    assert [call.kernel for call in turing] == names(case, capability=80)
    assert all(kernel_launch_of(call).shared <= 64 * 1024 for call in turing)


def test_a_program_for_another_gpu_says_what_to_do() -> None:
    cuda_toolchain.architectures()
    (call,), make = expand(QWEN_ATTENTION[-1])
    text = make.sources[call.source]
    log = cuda_toolchain.compile_log(text, 80).removesuffix(text)
    assert "compile it with this device's target" in log


def test_float32_attention_does_without_tensor_cores() -> None:
    assert names(cached(1, 64, 9), "float32") == ["attention_plain"]


@pytest.mark.parametrize("case", QWEN_PRODUCTS, ids=lambda case: case.name)
def test_products_of_few_rows_fill_the_gpu(case: Case) -> None:
    (call,), _ = expand(case)
    warps = kernel_launch_of(call).grid[0] * kernel_launch_of(call).block[0] // 32
    assert warps >= 132 * 16


def test_long_caches_are_split_over_all_multiprocessors() -> None:
    split, _ = expand(cached(1, 32768, 200))[0]
    assert math.prod(kernel_launch_of(split).grid) == 264


def test_equal_geometry_shares_a_source() -> None:
    make = Specializer()
    calls = [expand_call(make, call_of(cached(1, 2048, attended), "bfloat16")) for attended in (1, 2000)]
    assert [call.source for call in calls[0]] == [call.source for call in calls[1]] == list(make.sources)
    assert len(make.temporaries) == 4


@pytest.mark.parametrize("case", [*TILED_ATTENTION, *WIDE_ATTENTION], ids=lambda case: case.name)
def test_many_queries_take_tiles(case: Case) -> None:
    assert names(case, capability=80)[-1] == "attention_tiled"


@pytest.mark.parametrize("case", WARPGROUP_ATTENTION, ids=lambda case: case.name)
def test_many_queries_take_warpgroups(case: Case) -> None:
    assert names(case)[-1] == "attention_wgmma"


def test_blocks_have_more_rows_where_there_are_enough_of_them() -> None:
    grids = {case.name: kernel_launch_of(expand(case, capability=80)[0][-1]).grid[0] for case in TILED_ATTENTION}
    assert grids["many-wide-blocks"] == 264 * 2 and grids["many-wide-causal-blocks"] == 264 * 2
    assert grids["many-causal"] == 96 * 3
    blocks = {case.name: kernel_launch_of(expand(case)[0][-1]).block[0] for case in WARPGROUP_ATTENTION}
    assert blocks["many-shared-causal"] == 3 * 128 and blocks["many-small-blocks"] == 2 * 128


def test_heads_that_share_a_mask_look_at_it_once() -> None:
    looks = {case.name: kernel_launch_of(expand(case, capability=80)[0][0]).grid for case in TILED_ATTENTION}
    assert looks["many-bool-mask"] == (3, 1, 1)
    assert looks["many-own-masks"] == (2 * 48 * 3, 1, 1)
    assert looks["many-padded-batches"] == (50 * 2, 1, 1)


def layers_of(case: Case, count: int) -> list[KernelCall]:
    """Calls that differ in all operands but the mask."""
    call = call_of(case, "bfloat16")
    *own, mask = call.inputs
    return [
        replace(
            call,
            inputs=(*(replace(view, buffer=f"{view.buffer}.{layer}") for view in own), mask),
            outputs=tuple(replace(view, buffer=f"{view.buffer}.{layer}") for view in call.outputs),
        )
        for layer in range(count)
    ]


@pytest.mark.parametrize("capability", [80, 90])
def test_layers_that_share_a_mask_look_at_it_once(capability: int) -> None:
    make = Specializer(GPU(capability=capability))
    first, second, third = (expand_call(make, call) for call in layers_of(cached(512, 2048, 9), 3))
    assert [len(first), len(second), len(third)] == [2, 1, 1]
    assert first[1].inputs[-1] == second[0].inputs[-1] == third[0].inputs[-1] == first[0].outputs[0]
    assert len(make.temporaries) == 1


def surveyed(prologue: list[KernelCall], calls: list[KernelCall], constant: str = "") -> ExecutionPlan:
    """Return the plan of a program in which `constant` is the name of a buffer that never changes."""
    buffers = {
        view.buffer: BufferAllocation(
            view.buffer, "constant" if view.buffer == constant else kind, (math.prod(view.shape),), view.dtype
        )
        for kind, side in (("input", "inputs"), ("output", "outputs"))
        for call in (*prologue, *calls)
        for view in getattr(call, side)
    }
    return finished(ExecutionPlan(prologue, calls, buffers, [], [], {}, {}, {}, {}), CUDACodegenTarget())


def surveys_of(prologue: list[KernelCall], calls: list[KernelCall]) -> tuple[int, int]:
    """Return the number of mask surveys in the prologue and in the calls of a program."""
    plan = surveyed(prologue, calls)
    first, rest = ([call.kernel for call in made].count("attention_survey") for made in (plan.prologue, plan.calls))
    return first, rest


@pytest.mark.parametrize(("queries", "keys", "looks"), [(512, 2048, 1), (197, 197, 0)])
def test_a_mask_of_weights_is_looked_at_once_for_all_runs(queries: int, keys: int, looks: int) -> None:
    """A bias that a run computes for each head is looked at only where there are many keys."""
    bias = T((1, 12, queries, keys), "float32")
    case = attention_cases.attention("bias", queries, keys, 64, heads=(12, 12), mask=bias, batch=16)
    calls = layers_of(case, 3)
    mask = calls[0].inputs[-1].buffer
    plan = surveyed([], calls, constant=mask)
    (survey,) = plan.prologue
    assert (survey.kernel, [view.buffer for view in survey.inputs]) == ("attention_survey", [mask])
    assert plan.buffers[survey.outputs[0].buffer].kind == "persistent"
    assert [call.inputs[-1] for call in plan.calls] == [survey.outputs[0]] * 3
    cuda_toolchain.compile_sources([plan.sources[survey.source]])
    assert surveys_of([], calls) == (0, looks)


def test_a_mask_that_is_written_is_looked_at_again() -> None:
    first, second, third = layers_of(cached(512, 2048, 9), 3)
    mask = View(first.inputs[-1].buffer, (512 * 2048,), (1,), 0, "bool")
    params = {"scalars": [None]}
    copies = {
        name: KernelCall(
            "copy_kernel", "", (replace(mask, buffer="another"),), (replace(mask, buffer=name),), params, "copy"
        )
        for name in (mask.buffer, "a third")
    }
    assert surveys_of([], [first, copies["a third"], second, third]) == (0, 1)
    assert surveys_of([], [first, second, copies[mask.buffer], third]) == (0, 2)


def test_what_the_prologue_saw_of_a_mask_does_not_last() -> None:
    first, second, third = layers_of(cached(512, 2048, 9), 3)
    assert surveys_of([first], [second, third]) == (1, 1)


def test_another_geometry_of_the_same_mask_is_looked_at_by_itself() -> None:
    make = Specializer()
    (call,) = layers_of(cached(512, 2048, 9), 1)
    assert len(expand_call(make, call)) == 2
    for causal, width in ((1, 128), (0, 24)):
        *_, mask = call.inputs
        inputs = tuple(replace(view, shape=(*view.shape[:3], width)) for view in call.inputs[:3])
        outputs = tuple(replace(view, shape=(*view.shape[:3], width)) for view in call.outputs)
        other = replace(call, inputs=(*inputs, mask), outputs=outputs, params={**call.params, "causal": causal})
        assert len(expand_call(make, other)) == 2, "causality and the size of the tiles are in the verdicts"


def test_partials_are_temporaries() -> None:
    (split, combine), make = expand(cached(1, 2048, 5))
    assert split.outputs == combine.inputs
    assert {view.buffer for view in split.outputs} == set(make.temporaries)
    assert make.temporaries[split.outputs[0].buffer].alloc_shape == (1, 2, 6, 32, 128)


def strided(
    memory: dict[str, torch.Tensor], view: View, shape: tuple[int, ...], strides: Sequence[int]
) -> torch.Tensor:
    return memory[view.buffer].as_strided(shape, tuple(strides), view.offset)


def multiply_as_cublas(call: KernelCall, memory: dict[str, torch.Tensor]) -> None:
    """out = act(alpha · a · b + residual + bias), from the parameters and the views' first elements alone."""
    p = call.params
    (a, b, *addends), out = call.inputs, call.outputs[0]
    sides = []
    for name, view, shape in (("a", a, (p["m"], p["k"])), ("b", b, (p["k"], p["n"]))):
        steps = (1, p[f"ld{name}"]) if p[f"trans_{name}"] else (p[f"ld{name}"], 1)
        sides.append(strided(memory, view, (p["batch"], *shape), (p[f"stride_{name}"], *steps)))
    target = strided(memory, out, (p["batch"], p["m"], p["n"]), (p["stride_c"], p["ldc"], 1))
    result = p["alpha"] * (sides[0] @ sides[1])
    if p["has_bias"]:
        result += strided(memory, addends.pop(0), (p["n"],), (1,))
    if p["has_residual"]:
        result += strided(memory, addends.pop(0), (p["batch"], p["m"], p["n"]), (p["stride_r"], p["ldr"], 1))
    target.copy_(result.relu() if p["activation"] == "relu" else result)


def random_memory(views: Sequence[View]) -> dict[str, torch.Tensor]:
    def elements(view: View) -> int:
        return 1 + view.offset + sum((n - 1) * s for n, s in zip(view.shape, view.strides, strict=True))

    generator = torch.Generator().manual_seed(7)
    return {view.buffer: torch.randn(elements(view), generator=generator) for view in views if 0 not in view.shape}


PRODUCTS = [*matmul_cases.TILED, *matmul_cases.BATCHED, *MANY_ROWS]


@pytest.mark.parametrize(
    "case", [case for case in PRODUCTS if names(case, "float32") == ["cublas_gemm"]], ids=lambda case: case.id
)
def test_cublas_parameters_mean_the_product(case: Case) -> None:
    call = call_of(case, "float32")
    (product,) = expand_call(Specializer(), call)
    memory = random_memory((*call.inputs, *call.outputs))
    expected = {name: data.clone() for name, data in memory.items()}
    views = [[strided(expected, v, v.shape, v.strides) for v in side] for side in (call.inputs, call.outputs)]
    reference_launch(call, *views)()
    multiply_as_cublas(product, memory)
    for name, data in expected.items():
        torch.testing.assert_close(memory[name], data, rtol=1e-5, atol=1e-5)


def test_cublas_gets_no_integers() -> None:
    integers = [case for case in PRODUCTS if "integers" in case.name]
    assert integers
    assert "cublas_gemm" not in {name for case in integers for name in names(case)}


def test_results_are_rounded_once() -> None:
    (product, epilogue), make = expand(linear(33, 70, 40, bias="compute", activation="silu"))
    assert product.outputs[0].dtype == "float32"
    assert make.temporaries[product.outputs[0].buffer].size_bytes == 33 * 70 * itemsize("float32")
    assert product.outputs[0] in epilogue.inputs


def test_residuals_that_repeat_a_row_are_not_for_cublas() -> None:
    case = linear(9, 16, 64, residual="compute")
    inputs = [*case.inputs[:2], replace(case.inputs[2], strides=(0, 1))]
    assert names(replace(case, inputs=inputs)) == ["cublas_gemm", "linear_epilogue"]


@pytest.mark.parametrize(
    ("shape", "warpgroups", "turns"),
    [
        ((16, 4096, 4096, 8, 40), 3, True),
        ((16, 257, 257, 12, 64), 3, True),
        ((32, 197, 197, 12, 64), 2, False),
        ((1, 2048, 2048, 12, 128), 2, True),
    ],
    ids=str,
)
def test_narrow_heads_have_three_warpgroups_and_many_keys_turns(
    shape: tuple[int, int, int, int, int], warpgroups: int, turns: bool
) -> None:
    batch, queries, keys, heads, width = shape
    case = attention_cases.attention("many", queries, keys, width, heads=(heads, heads), batch=batch)
    (call,), make = expand(case)
    assert call.kernel == "attention_wgmma"
    assert kernel_launch_of(call).block[0] == 128 * (warpgroups + 1)
    assert f"constexpr bool takes_turns = {str(turns).lower()};" in make.sources[call.source]
