"""Products of up to 128 rows, with the norm before and the gate behind: which calls are one kernel, what it makes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import cuda_gpu
import cuda_toolchain
import numpy as np
import pytest
from drawn import drawn
from metal_harness import finished
from reference_kernels import reference_launch

from cuda_compiler import GPU, CUDACodegenTarget
from cuda_compiler.rules.linear_wgmma import divided_codes, suits_warpgroups
from cuda_compiler.rules.matmul import operands
from cuda_compiler.specialization.specializer import Specializer
from npu_compiler.graph.dtypes import dtype_name, numpy_dtype
from npu_compiler.graph.model import TensorSpec
from npu_compiler.graph.quantization import QuantizedFormat, quantize
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.plan import BufferAllocation, ExecutionPlan
from npu_compiler.program.views import View
from npu_runtime.torch_arrays import numpy_to_tensor


@dataclass(frozen=True)
class Layer:
    """A product of `m` rows with a weight [n, k], and what is around it.

    Attributes:
        gate: The element-wise op behind it, which multiplies its activated first half with the second one.
        format: Format of the weight, where it is in few bits.
    """

    m: int
    n: int
    k: int
    normed: bool = False
    gate: str = ""
    bias: bool = False
    residual: bool = False
    activation: str = "none"
    format: QuantizedFormat | None = None

    @property
    def joined(self) -> list[str]:
        """Kernels launched for the layer in bfloat16 on a GPU of compute capability 9.0."""
        has_many_columns = self.n > 40_000  # for a warpgroup to hold the sums of a multiprocessor's share
        few = self.m <= 8 or has_many_columns if self.format is None else not self.suits_warpgroups
        product = "streamed" if few else "linear_wgmma"
        return [*["rmsnorm_kernel"] * (self.normed and self.m > 32), product]

    @property
    def suits_warpgroups(self) -> bool:
        """Whether 128 terms have whole groups, minimums are in bfloat16, and rows are many or long."""
        assert self.format is not None
        group = self.format.group or self.k
        if self.m <= 16 and self.k <= 4096:
            return False
        return (
            self.k % 128 == 0 and group != 96 and (self.format.offsets != "minimum" or self.format.scales == "bfloat16")
        )

    @property
    def launches(self) -> list[str]:
        norm, product = ["rmsnorm_kernel"] * self.normed, "quantized_matmul_kernel" if self.format else "matmul_kernel"
        return [*norm, product, *([f"{self.gate}_broadcast_kernel"] * bool(self.gate))]

    def weight(self, rng: np.random.Generator, dtype: str) -> dict[str, Any]:
        """The parts of the weight, random, by the names of their buffers."""
        drawn = rng.standard_normal((self.n, self.k), dtype=np.float32) * self.k**-0.5
        if self.format is None:
            return {"weight": drawn.astype(numpy_dtype(dtype))}
        stored = quantize(drawn, self.format)
        parts = {"data": stored.codes, "scales": stored.scales, "offset": stored.offsets}
        return {name: part for name, part in parts.items() if part is not None}


LAYERS = {
    "norm, product, bias": Layer(16, 2048, 1536, normed=True, bias=True),
    "product, residual": Layer(8, 1536, 1536, residual=True),
    "norm, gate": Layer(12, 4096, 512, normed=True, gate="silu_mul"),
    "gate alone, other activation": Layer(16, 2064, 320, gate="gelu_tanh_mul"),
    "long rows": Layer(9, 320, 8960, residual=True),
    "activation": Layer(5, 1000, 768, bias=True, activation="relu"),
    "many columns": Layer(16, 40_008, 64, normed=True),
    "terms that fill no step": Layer(3, 3080, 376, normed=True, bias=True),
    "two rows": Layer(2, 1024, 1024),
    "codes with minimums, norm, gate": Layer(
        8, 3072, 576, normed=True, gate="silu_mul", format=QuantizedFormat("int4", 32, "float16", "minimum")
    ),
    "codes with zero points, long rows": Layer(
        5, 320, 8960, residual=True, format=QuantizedFormat("int4", 128, "bfloat16", "zero_point")
    ),
    "symmetric codes, norm, bias": Layer(16, 2048, 1536, normed=True, bias=True, format=QuantizedFormat("int4", 128)),
    "groups that warps share": Layer(3, 1536, 2304, residual=True, format=QuantizedFormat("int4", 96, "float32")),
    "bytes, a scale for a row": Layer(2, 1000, 4096, activation="relu", format=QuantizedFormat("int8")),
    "bytes with minimums": Layer(9, 40, 8960, residual=True, format=QuantizedFormat("int8", 32, "bfloat16", "minimum")),
    "bytes with zero points, an odd number of groups": Layer(
        4, 264, 96, bias=True, format=QuantizedFormat("int8", 32, "float16", "zero_point")
    ),
    "float8, gate": Layer(6, 2064, 320, gate="gelu_tanh_mul", format=QuantizedFormat("float8_e4m3", 64, "float32")),
    "float8, long rows": Layer(12, 320, 14336, format=QuantizedFormat("float8_e4m3")),
    "4-bit floats, gate": Layer(5, 2064, 640, gate="silu_mul", format=QuantizedFormat("float4_e2m1", 32, "bfloat16")),
    "a minimum for a row": Layer(7, 576, 1536, residual=True, format=QuantizedFormat("int4", 0, "float32", "minimum")),
    "32 rows, norm, bias": Layer(32, 2048, 1536, normed=True, bias=True),
    "32 rows, norm, gate": Layer(32, 17_920, 1536, normed=True, gate="silu_mul"),
    "32 rows, long rows": Layer(32, 1536, 8960, residual=True),
    "17 rows, terms that fill no step": Layer(17, 3080, 376, normed=True, residual=True, activation="gelu"),
    "60 rows, gate and its bias": Layer(60, 8200, 576, bias=True, gate="gelu_tanh_mul"),
    "64 rows, norm": Layer(64, 6144, 4096, normed=True),
    "33 rows, residual": Layer(33, 576, 1536, residual=True),
    "64 rows, many gates": Layer(64, 28_672, 4096, normed=True, gate="silu_mul"),
    "24 rows, norm, gate": Layer(24, 3072, 576, normed=True, gate="silu_mul"),
    "codes, 32 rows, norm, gate": Layer(
        32, 6144, 1536, normed=True, gate="silu_mul", format=QuantizedFormat("int4", 128, "bfloat16")
    ),
    "codes, 128 rows, gate": Layer(128, 3072, 1536, gate="silu_mul", format=QuantizedFormat("int4", 128, "bfloat16")),
    "codes, 40 rows, scales in float32": Layer(40, 1536, 1536, residual=True, format=QuantizedFormat("int4", 128)),
    "codes, 96 rows, scales in float16": Layer(
        96, 3072, 896, gate="silu_mul", format=QuantizedFormat("int4", 32, "float16", "zero_point")
    ),
    "codes, 8 rows, norm, bias": Layer(
        8, 2048, 1536, normed=True, bias=True, format=QuantizedFormat("int4", 128, "bfloat16")
    ),
    "codes with zero points, 100 rows, long rows": Layer(
        100, 1536, 8960, residual=True, format=QuantizedFormat("int4", 128, "bfloat16", "zero_point")
    ),
    "codes with minimums, 17 rows": Layer(
        17, 1000, 1024, normed=True, residual=True, format=QuantizedFormat("int4", 32, "bfloat16", "minimum")
    ),
    "codes, 64 rows, groups of 64": Layer(64, 2044, 896, bias=True, format=QuantizedFormat("int4", 64, "bfloat16")),
    "codes, 72 rows, groups of 256": Layer(
        72, 1152, 1024, activation="relu", format=QuantizedFormat("int4", 256, "bfloat16", "zero_point")
    ),
    "codes, 33 rows, a scale for a row": Layer(
        33, 4864, 896, format=QuantizedFormat("int4", 0, "float32", "zero_point")
    ),
    "bytes, 40 rows, groups": Layer(40, 896, 4864, format=QuantizedFormat("int8", 32, "bfloat16", "zero_point")),
    "bytes, 120 rows, gate": Layer(120, 9728, 896, gate="silu_mul", format=QuantizedFormat("int8")),
    "float8, 24 rows, norm": Layer(24, 1152, 896, normed=True, bias=True, format=QuantizedFormat("float8_e4m3")),
    "4-bit floats, 128 rows": Layer(128, 1032, 640, format=QuantizedFormat("float4_e2m1", 32, "bfloat16")),
    "codes of a table, 2 rows": Layer(2, 1536, 1536, format=QuantizedFormat("iq4_nl", 32, "bfloat16")),
}
DTYPES = ("bfloat16", "float16")
TARGET = CUDACodegenTarget()


def plan_of(layer: Layer, dtype: str, target: CUDACodegenTarget | None = None) -> ExecutionPlan:
    """The calls on buffers `x`, `weight`, …; as the target leaves them, if one is given."""
    m, n, k = layer.m, layer.n, layer.k
    width = n // 2 if layer.gate else n

    def rows(name: str, columns: int) -> View:
        return View(name, (m, columns), (columns, 1), 0, dtype)

    def vector(name: str, size: int) -> View:
        return View(name, (size,), (1,), 0, dtype)

    row = replace(layer, n=1).weight(np.random.default_rng(0), dtype)  # every part has a row for each of the n
    parts = {name: (part.shape[1], dtype_name(part.dtype)) for name, part in row.items()}
    weight = [View(name, (n, size), (size, 1), 0, held) for name, (size, held) in parts.items()]
    x, out = rows("x", k), rows("out", width)
    calls, kinds = [], {"x": "input", "out": "output", "residual": "input", **dict.fromkeys(parts, "weight")}
    if layer.normed:
        params = {"rows": m, "width": k, "eps": 1e-6, "weight_offset": 0.0, "has_weight": 1}
        calls.append(KernelCall("rmsnorm_kernel", "", (x, vector("gain", k)), (rows("y", k),), params, "norm"))
    addends = [vector("bias", n)] * layer.bias + [rows("residual", n)] * layer.residual
    params = {"m": m, "n": n, "k": k, "has_bias": int(layer.bias), "has_residual": int(layer.residual)}
    params["activation"] = layer.activation  # type: ignore[assignment]
    if layer.format is not None:
        params |= {"codes": layer.format.codes, "offsets": layer.format.offsets, "groups": parts["scales"][0]}  # type: ignore[dict-item]
        params["has_offset"] = int("offset" in parts)
    product = rows("h", n) if layer.gate else out
    source = rows("y", k) if layer.normed else x
    kernel = layer.launches[int(layer.normed)]
    calls.append(KernelCall(kernel, "", (source, *weight, *addends), (product,), params, "product"))
    if layer.gate:
        halves = tuple(product.slice(1, first, first + width).unsqueeze(0) for first in (0, width))
        kernel = f"{layer.gate}_broadcast_kernel"
        calls.append(KernelCall(kernel, "", halves, (out.unsqueeze(0),), {"scalars": [None, None]}, "gate"))
    views = {view.buffer: view for call in calls for view in (*call.inputs, *call.outputs)}
    sizes = {"h": m * n, "out": m * width}
    kinds |= dict.fromkeys(("gain", "bias"), "weight")
    buffers = {
        name: BufferAllocation(name, kinds.get(name, "arena"), (sizes.get(name, view.numel),), view.dtype)  # type: ignore[arg-type]
        for name, view in views.items()
    }
    plan = ExecutionPlan([], calls, buffers, [], [], {"out": out}, {}, {}, {})
    return plan if target is None else finished(plan, target)


def kernels(plan: ExecutionPlan) -> list[str]:
    return [call.kernel for call in plan.calls]


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_one_kernel_in_bfloat16_or_two_with_a_norm_of_many_rows(name: str) -> None:
    assert kernels(plan_of(LAYERS[name], "bfloat16")) == LAYERS[name].launches
    assert kernels(plan_of(LAYERS[name], "bfloat16", TARGET)) == LAYERS[name].joined


def test_only_gpus_of_compute_capability_9_0_have_products_by_warpgroups() -> None:
    target = CUDACodegenTarget(GPU(capability=100, shared_memory=TARGET.gpu.shared_memory))
    assert kernels(plan_of(LAYERS["norm, product, bias"], "bfloat16", target)) == ["streamed"]
    assert "linear_wgmma" not in kernels(plan_of(LAYERS["32 rows, long rows"], "bfloat16", target))


def test_a_norm_in_float16_stays_as_rows_times_gains_could_overflow() -> None:
    assert kernels(plan_of(LAYERS["norm, gate"], "float16", TARGET)) == ["rmsnorm_kernel", "linear_wgmma"]


@pytest.mark.parametrize(
    "layer",
    [
        Layer(65, 2048, 1536),
        Layer(32, 151_936, 1536),
        Layer(32, 2044, 1536),
        Layer(32, 2048, 1536, format=QuantizedFormat("int4", 32, "float16", "minimum")),
        Layer(129, 2048, 1536, format=QuantizedFormat("int4", 32, "bfloat16")),
        Layer(2, 8192, 1536),
        Layer(1, 2048, 1536),
        Layer(8, 128, 128),
        Layer(8, 2048, 1532),
        Layer(8, 2048, 1536, format=QuantizedFormat("int4", 16)),
        Layer(8, 2042, 1536, format=QuantizedFormat("int4", 32)),
    ],
    ids=str,
)
def test_other_products_are_left_to_other_kernels(layer: Layer) -> None:
    assert {"streamed", "linear_wgmma"}.isdisjoint(kernels(plan_of(layer, "bfloat16", TARGET)))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("n", "k"), [(1536, 1536), (1536, 8960), (8960, 1536), (40, 8960), (151_936, 896), (3584, 18_944)]
)
@pytest.mark.parametrize("m", [2, 8, 31, 64, 128])
def test_blocks_for_codes_cover_a_product_and_fit(m: int, n: int, k: int, gated: bool) -> None:
    parts, memory = 2 if gated else 1, TARGET.gpu.shared_memory
    division = divided_codes(m, n, k, gated, memory, row=64, sides=4)
    assert division is not None
    assert (division.clusters - 1) * division.width < n <= division.clusters * division.width
    assert division.width * parts <= 256 and division.splits <= k // 128
    assert division.resident * (division.shared + 1024) <= memory + 1024
    assert division.threads == -(-division.width * parts // 64) * 128 + 128


def test_rows_of_whole_packs_are_not_enough_where_the_terms_are_not() -> None:
    call = plan_of(Layer(32, 2048, 1536), "bfloat16").calls[0]
    assert suits_warpgroups(Specializer(), call, operands(call))
    views = tuple(view.slice(1, 0, 1532) for view in call.inputs)
    call = replace(call, inputs=views, params={**call.params, "k": 1532})
    assert not suits_warpgroups(Specializer(), call, operands(call))


def test_gpus_without_clusters_have_other_kernels() -> None:
    found = kernels(
        plan_of(LAYERS["norm, gate"], "bfloat16", CUDACodegenTarget(GPU(capability=86, shared_memory=100 * 1024)))
    )
    assert found[0] == "rmsnorm_kernel" and {"streamed", "linear_wgmma"}.isdisjoint(found)


@pytest.mark.parametrize("between", ["y", "h"])
def test_what_somebody_else_reads_is_stored(between: str) -> None:
    plan = plan_of(LAYERS["norm, gate"], "bfloat16")
    (shown,) = {view for call in plan.calls for view in call.outputs if view.buffer == between}
    plan = finished(replace(plan, output_views={**plan.output_views, "more": shown}), TARGET)
    assert kernels(plan) == {"y": ["rmsnorm_kernel", "linear_wgmma"], "h": ["linear_wgmma", "silu_mul_kernel"]}[between]


@pytest.mark.parametrize("name", ["product, residual", "32 rows, long rows"])
def test_a_weight_that_is_an_input_is_not_read_ahead(name: str) -> None:
    plan = plan_of(LAYERS[name], "bfloat16")
    buffers = {**plan.buffers, "weight": replace(plan.buffers["weight"], kind="input")}
    texts = [finished(made, TARGET).sources for made in (plan, replace(plan, buffers=buffers))]
    assert [["bool ahead = true" in text for text in found.values()] for found in texts] == [[True], [False]]


@pytest.mark.parametrize("dtype", [DTYPES[0], *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in DTYPES[1:])])
@pytest.mark.parametrize("name", drawn(LAYERS, 1 / 8))
def test_it_compiles(name: str, dtype: str) -> None:
    other = CUDACodegenTarget(GPU(capability=100, shared_memory=TARGET.gpu.shared_memory))
    sources = {
        key: text for target in (TARGET, other) for key, text in plan_of(LAYERS[name], dtype, target).sources.items()
    }
    cuda_toolchain.compile_in_turn(sources.values(), start=DTYPES.index(dtype) + list(LAYERS).index(name))


@pytest.mark.gpu
@pytest.mark.skipif(bool(cuda_gpu.PROBLEM), reason=cuda_gpu.PROBLEM)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LAYERS)
def test_it_does_what_the_calls_do(name: str, dtype: str, seed: int) -> None:
    layer, rng, (backend,) = LAYERS[name], np.random.default_rng(seed), cuda_gpu.cuda_backends()
    plain, plan = plan_of(layer, dtype), plan_of(layer, dtype, backend.target)
    data: dict[str, Any] = {}
    for key, buffer in {**plan.buffers, **plain.buffers}.items():
        data[key] = rng.standard_normal(buffer.alloc_shape).astype(numpy_dtype(buffer.dtype))
    data |= {name: part.reshape(-1) for name, part in layer.weight(rng, dtype).items()}
    expected = {key: numpy_to_tensor(array) for key, array in data.items()}
    expected |= {key: value.float() for key, value in expected.items() if plain.buffers[key].dtype == dtype}
    for call in plain.calls:
        views = [
            [expected[v.buffer].as_strided(v.shape, v.strides, v.offset) for v in side]
            for side in (call.inputs, call.outputs)
        ]
        reference_launch(call, *views)()

    specs = {key: TensorSpec(key, array.shape, dtype_name(array.dtype)) for key, array in data.items()}
    memory = {key: backend.allocate_buffer(array, spec=specs[key]) for key, array in data.items()}
    launches, results = cuda_gpu.prepared(backend, plan.calls, plan.sources, memory), []
    for _ in range(2):
        memory["out"].write(np.full_like(data["out"], np.nan))
        for launch in launches:
            launch()
        results.append(memory["out"].to_numpy().astype(np.float32))
    np.testing.assert_array_equal(*results)
    epsilon = {"bfloat16": 2.0**-7, "float16": 2.0**-10}[dtype]
    wanted = expected["out"].numpy()
    np.testing.assert_allclose(results[0], wanted, 2 * epsilon, 2 * epsilon * float(np.abs(wanted).max()) / 4)
