"""`CUDABackend` on a GPU: memory, kernels, products, graphs, errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cuda_gpu import need_gpu
from cuda_products import GEMMS, gemm_case, view
from torch import nn
from torch_ir import extract_ir

from cuda_compiler.cuda_program import KernelLaunch, LaunchKind
from cuda_runtime import CUDABackend
from npu_compiler import CompiledProgram, DeviceError, TensorSpec, compile, partition
from npu_compiler.graph.dtypes import numpy_dtype
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.views import View
from npu_runtime import DAGExecutor, Executor, NPUBuffer, Operand, Profiler, load_weights

need_gpu()
pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CUDABackend]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NPU_SIM_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield CUDABackend()


def since(before: Counter[str], counters: Counter[str]) -> dict[str, int]:
    return {name: count - before[name] for name, count in counters.items() if count != before[name]}


def test_the_device_has_a_name_and_wrong_numbers_are_refused(backend: CUDABackend) -> None:
    assert backend.device.startswith("CUDA, ") and "GiB" in backend.device
    with pytest.raises(DeviceError, match=r"there is no GPU 99: this machine has \d+, counted from 0"):
        CUDABackend(99)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int32", "bool"])
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (3, 4, 5)])
def test_arrays_come_back_as_they_went(
    backend: CUDABackend, rng: np.random.Generator, dtype: str, shape: tuple[int, ...]
) -> None:
    data = rng.integers(0, 2, shape) if dtype == "bool" else 10 * rng.standard_normal(shape)
    data = np.asarray(data).astype(numpy_dtype(dtype))
    buffer = backend.allocate_buffer(data)
    copied = buffer.copy()
    np.testing.assert_array_equal(buffer.to_numpy(), data)
    buffer.write(np.zeros_like(data))
    np.testing.assert_array_equal(copied.to_numpy(), data)
    assert not buffer.to_numpy().any()
    assert not backend.allocate_zeros(shape, dtype).to_numpy().any()


def test_an_upload_may_be_larger_than_the_staging_memory_and_its_source_changed_at_once(
    backend: CUDABackend, rng: np.random.Generator
) -> None:
    data = rng.integers(0, 2**31, 30_000_001).astype(np.int32)
    expected = data.copy()
    buffer = backend.allocate_buffer(data)
    data[:] = 0
    np.testing.assert_array_equal(buffer.to_numpy(), expected)


def test_padding_is_added_and_removed(backend: CUDABackend, rng: np.random.Generator) -> None:
    data = rng.standard_normal((1, 3, 2, 2)).astype(np.float32)
    spec = TensorSpec("x", data.shape, "float32", "float16", (1, 8, 2, 2))
    buffer = backend.allocate_buffer(data, spec=spec)
    np.testing.assert_allclose(buffer.to_numpy(spec), data, rtol=1e-3)
    np.testing.assert_allclose(buffer.array().get(), data, rtol=1e-3)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int32", "bool"])
def test_dlpack_shares_the_memory(backend: CUDABackend, dtype: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch was built without CUDA")
    buffer = backend.allocate_buffer(np.array([[1, 0, 1], [0, 1, 1]]).astype(numpy_dtype(dtype)))
    tensor = torch.from_dlpack(buffer)
    assert str(tensor.dtype) == f"torch.{dtype}" and tensor.shape == (2, 3)
    tensor[0, 1] = 1
    torch.cuda.synchronize()
    assert buffer.to_numpy()[0, 1] == 1
    del buffer
    assert tensor.float().sum().item() == 5, "the tensor keeps the memory"


def test_running_out_of_memory_says_what_was_asked_and_what_is_free(backend: CUDABackend) -> None:
    with pytest.raises(
        DeviceError, match=r"out of memory: float32\[.*\] takes \d+\.\d\d GiB, but .* of the GPU's .* free"
    ):
        backend.allocate_zeros((2**20, 2**20), "float32")
    with pytest.raises(DeviceError, match="does not store int64"):
        backend.allocate_zeros((1,), "int64")
    assert not backend.allocate_zeros((4,), "float32").to_numpy().any()


TWICE = """
extern "C" __global__ void twice(const float *x, float *out) {
    extern __shared__ float staged[];
    staged[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    out[threadIdx.x] = 2 * staged[threadIdx.x];
}
"""


def twice(shared: int = 128, block: int = 32, source: str = "twice", **views: View) -> KernelCall:
    x, out = views.get("x", view("x", (32,))), views.get("out", view("out", (32,)))
    launch = KernelLaunch((1, 1, 1), (block, 1, 1), shared, LaunchKind.KERNEL)
    return KernelCall("twice", source, (x,), (out,), launch.params(), "n")


@pytest.mark.parametrize("shared", [128, 100_000])
def test_a_kernel_sees_the_first_elements_of_its_views(
    backend: CUDABackend, rng: np.random.Generator, shared: int
) -> None:
    data = rng.standard_normal(100).astype(np.float32)
    x, out = backend.allocate_buffer(data), backend.allocate_zeros((100,), "float32")
    call = twice(shared, x=view("x", (32,), offset=3), out=view("out", (32,), offset=5))
    backend.compile([call], {"twice": TWICE})
    backend.prepare(call, [Operand(x, call.inputs[0], 40, False)], [Operand(out, call.outputs[0], 80, False)])()
    expected = np.zeros(100, np.float32)
    expected[25:57] = 2 * data[13:45]
    np.testing.assert_array_equal(out.to_numpy(), expected)


def test_sequences_replay_as_one_graph_and_times_are_the_devices(backend: CUDABackend) -> None:
    buffers = [backend.allocate_buffer(np.full(32, value, np.float32)) for value in (1, 0, 0)]
    call = twice()
    backend.compile([call], {"twice": TWICE})
    steps = [
        backend.prepare(call, [Operand(a, call.inputs[0], 0, False)], [Operand(b, call.outputs[0], 0, False)])
        for a, b in zip(buffers, buffers[1:], strict=False)
    ]
    sequence = backend.sequence(steps, None)
    for value, made in [(1, {"launches": 2}), (3, {"captures": 1, "graph_launches": 1}), (5, {"graph_launches": 1})]:
        buffers[0].write(np.full(32, value, np.float32))
        before = backend.counters.copy()
        sequence()
        assert since(before, backend.counters) == made
        assert (buffers[2].to_numpy() == 4 * value).all()
    assert 0 < backend.timed(steps[0]) < 1
    backend.synchronize()


def test_kernels_that_cannot_be_had_are_device_errors(backend: CUDABackend) -> None:
    backend.compile([twice()], {"twice": TWICE})
    backend.compile([twice()])
    operands = [Operand(backend.allocate_zeros((32,), "float32"), view(name, (32,)), 0, False) for name in ("x", "out")]
    with pytest.raises(DeviceError, match="contains no source 'absent' for kernel 'twice'"):
        backend.compile([twice(source="absent")], {"twice": TWICE})
    with pytest.raises(DeviceError, match="two programs have different kernel sources with the name 'twice'"):
        backend.compile([twice()], {"twice": TWICE + "// another"})
    with pytest.raises(DeviceError, match=r"(?s)'broken' does not compile.*broken\.cu\(1\): error"):
        backend.compile([twice(source="broken")], {"broken": "nonsense"})
    with pytest.raises(DeviceError, match="kernel 'twice' of source 'empty' cannot be used"):
        call = twice(source="empty")
        backend.compile([call], {"empty": "// nothing"})
        backend.prepare(call, operands[:1], operands[1:])
    with pytest.raises(DeviceError, match="kernel 'twice' of source 'twice' is launched with 4096 threads a block"):
        backend.prepare(twice(block=4096), operands[:1], operands[1:])
    with pytest.raises(DeviceError, match="kernel 'twice' of source 'twice' cannot be used"):
        backend.prepare(twice(shared=2**24), operands[:1], operands[1:])


@pytest.mark.parametrize(("ta", "tb", "batch", "pad"), GEMMS)
@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("float16", "float16"), ("bfloat16", "float32")])
@pytest.mark.parametrize("activation", ["none", "relu"])
def test_products_by_cublas(
    backend: CUDABackend,
    ta: bool,
    tb: bool,
    batch: int,
    pad: int,
    dtypes: tuple[str, str],
    activation: str,
    rng: np.random.Generator,
) -> None:
    call, memory, expected = gemm_case(ta, tb, batch, 4 * pad, rng, activation, (24, 16, 8))
    kinds = [dtypes[0]] * 2 + [dtypes[1]] * (len(memory) - 2)
    views = [replace(v, dtype=kind) for v, kind in zip((*call.inputs, *call.outputs), kinds, strict=True)]
    call = replace(call, inputs=tuple(views[:-1]), outputs=(views[-1],))
    backend.compile([call])
    buffers = [
        backend.allocate_buffer(array.astype(numpy_dtype(kind))) for array, kind in zip(memory, kinds, strict=True)
    ]
    operands = [Operand(buffer, at, 0, False) for buffer, at in zip(buffers, views, strict=True)]
    sequence = backend.sequence([backend.prepare(call, operands[:-1], operands[-1:])], None)
    before = buffers[-1].to_numpy()
    for _ in range(3):
        buffers[-1].write(before)
        sequence()
        got = buffers[-1].to_numpy()
        np.testing.assert_array_equal(got.astype(np.float32), expected)


def test_what_was_tuned_is_known_to_the_next_backend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    monkeypatch.setenv("NPU_SIM_CACHE", str(tmp_path))
    call, memory, _ = gemm_case(False, True, 1, 0, rng)
    for tuned_now in (1, 0):
        fresh = CUDABackend()
        fresh.compile([call])
        assert fresh.counters["tuned"] == tuned_now
        buffers = [fresh.allocate_buffer(array) for array in memory]
        operands = [
            Operand(buffer, at, 0, False) for buffer, at in zip(buffers, (*call.inputs, *call.outputs), strict=True)
        ]
        fresh.prepare(call, operands[:-1], operands[-1:])()
        result = buffers[-1].to_numpy()
        if tuned_now:
            first = result
    np.testing.assert_array_equal(result, first)


class Block(nn.Module):
    """A convolution, products, a softmax and an in-place cache."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1)
        self.first, self.second, self.third = nn.Linear(64, 16), nn.Linear(16, 24, False), nn.Linear(24, 5)

    def forward(self, x: torch.Tensor, cache: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.relu(self.conv(x)).flatten(2).squeeze(0)
        rows = self.second(self.first(rows))
        return self.third(rows).relu().softmax(-1), cache.index_copy(0, at, rows[:2])


def block_ir() -> Any:
    with torch.device("meta"), torch.no_grad():
        inputs = (torch.empty(1, 3, 8, 8), torch.empty(6, 24), torch.empty(2, dtype=torch.int64))
        return extract_ir(Block().eval(), inputs, model_name="block")


def block_program(backend: CUDABackend | None = None) -> CompiledProgram:
    return compile(block_ir(), backend.target if backend is not None else None)


def block_inputs(rng: np.random.Generator) -> list[np.ndarray]:
    return [
        rng.standard_normal((1, 3, 8, 8)).astype(np.float32),
        rng.standard_normal((6, 24)).astype(np.float32),
        np.array([4, 1]),
    ]


def test_a_program_runs_updates_its_cache_in_place_and_settles_to_one_graph_launch(
    backend: CUDABackend, rng: np.random.Generator
) -> None:
    model, program, values = Block().eval(), block_program(backend), block_inputs(rng)
    named = dict(zip((spec.name for spec in program.input_specs), values, strict=True))
    weights = load_weights(model.state_dict(), program, backend)
    specs = {spec.name: spec for spec in program.input_specs}
    inputs = {name: NPUBuffer.from_numpy(value, backend, spec=specs[name]) for name, value in named.items()}
    executor = Executor(program, backend)
    with torch.no_grad():
        expected = model(*map(torch.from_numpy, values))
    for repeat in range(3):
        before = backend.counters.copy()
        results = list(executor.run(inputs, weights).values())
        made = since(before, backend.counters)
        assert results[1] is list(inputs.values())[1]
        for got, want in zip(results, expected, strict=True):
            np.testing.assert_allclose(got.to_numpy().astype(np.float32), want, atol=5e-3)
        assert repeat < 2 or made == {"graph_launches": 1}, "a steady run is one graph launch and nothing else"


def test_a_profile_has_every_kernel_with_the_devices_time(backend: CUDABackend, rng: np.random.Generator) -> None:
    program, profiler = block_program(backend), Profiler()
    weights = load_weights(Block().state_dict(), program, backend)
    names = (spec.name for spec in program.input_specs)
    Executor(program, backend).run(dict(zip(names, block_inputs(rng), strict=True)), weights, profiler)
    assert set(profiler.kernels) == {call.kernel for call in program.kernels}
    assert all(0 < entry.seconds < 1 for entry in profiler.kernels.values())


def test_a_partitioned_graph_runs_its_device_parts_here(backend: CUDABackend, rng: np.random.Generator) -> None:
    model, values = Block().eval(), block_inputs(rng)
    plan = partition(block_ir(), is_supported_fn=lambda op: "softmax" not in op)
    assert {part.device for part in plan.partitions} == {"npu", "cpu"}
    runner = DAGExecutor(plan, backend)
    runner.load_weights(model.state_dict())
    with torch.no_grad():
        expected = model(*map(torch.from_numpy, values))
    for _ in range(3):
        outputs = runner.execute(dict(zip(plan.graph.inputs, values, strict=True)))
        for got, want in zip(outputs.values(), expected, strict=True):
            np.testing.assert_allclose(got, want, atol=5e-3)
