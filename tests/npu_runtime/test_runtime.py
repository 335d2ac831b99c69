"""The runtime: quick starts, what happens at init and what in a run, buffers, a toy device, weights, profiles."""

from __future__ import annotations

import inspect
import json
import os
import threading
from collections import Counter
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import toy_device
from cuda_gpu import cuda_backends
from ir_builder import IRBuilder
from metal_harness import open_metal
from perfetto_trace import PerfettoTrace
from safetensors.torch import save_file
from torch import nn
from torch_ir import extract_ir
from toy_device import ToyBackend

from npu_compiler import CompiledProgram, CompileOptions, DeviceError, TensorSpec, compile, partition
from npu_runtime import (
    Backend,
    CPUBackend,
    DAGExecutor,
    Device,
    DeviceBuffer,
    Executor,
    NPUBuffer,
    Profiler,
    available_devices,
    load_weights,
    register_device,
)
from npu_runtime.device import PLUGINS

BACKEND = CPUBackend(native=False)
GPUS = cuda_backends()
EVERY_BACKEND = pytest.mark.parametrize(
    "backend",
    [BACKEND, ToyBackend(), open_metal(mps=True)[0], *(pytest.param(gpu, marks=pytest.mark.gpu) for gpu in GPUS)],
    ids=["cpu", "toy", "metal", *("cuda" for _ in GPUS)],
)


def small_cnn() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 5)
    ).eval()


def cnn_ir(name: str = "input") -> Any:
    with torch.device("meta"), torch.no_grad():
        ir = extract_ir(small_cnn(), (torch.empty(1, 3, 8, 8),), model_name="my_model").to_dict()
    return json.loads(json.dumps(ir, default=str).replace('"input"', f'"{name}"'))


def expected(model: nn.Module, x: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.from_numpy(x)).numpy()  # type: ignore[no-any-return]


# quick starts


def test_quick_start_3a(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.chdir(tmp_path)
    model = small_cnn()
    save_file(model.state_dict(), "model.safetensors")
    input_data = np.random.randn(1, 3, 8, 8).astype(np.float32)
    ir = cnn_ir()
    source, target = ir["graph_inputs"][0]["name"], ir["graph_outputs"][0]["name"]
    text = json.dumps(ir)
    for old, new in ((source, "input"), (target, "output")):
        text = text.replace(f'"{old}"', f'"{new}"')
    Path("model_ir.json").write_text(text)

    import npu_compiler

    program = npu_compiler.compile("model_ir.json")
    program.save("model.npubin")

    from npu_compiler.compiled_program import CompiledProgram
    from npu_runtime import Device, Executor, NPUBuffer, load_weights

    device = Device()
    program = CompiledProgram.load("model.npubin")
    executor = Executor(program, device)
    weights = load_weights("model.safetensors", program, device)

    input_buf = NPUBuffer.from_numpy(input_data, device, spec=program.input_specs[0])
    outputs = executor.run(inputs={"input": input_buf}, weights=weights)
    result = outputs["output"].to_numpy(spec=program.output_specs[0])

    np.testing.assert_allclose(result, expected(model, input_data), atol=1e-2)
    assert result.dtype == np.float32


def test_quick_start_3b(seed: int) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = small_cnn()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cummax(self.body(x), dim=-1)[0] * 2

    model = Model().eval()
    with torch.no_grad():
        ir_dict = extract_ir(Model().eval().to("meta"), (torch.empty(1, 3, 8, 8, device="meta"),)).to_dict()
    weights_dict = {key: value.numpy() for key, value in model.state_dict().items()}
    input_array = np.random.randn(1, 3, 8, 8).astype(np.float32)

    from npu_compiler import partition, is_op_supported  # noqa: I001
    from npu_runtime import DAGExecutor
    from npu_runtime import CPUBackend as MetalBackend

    plan = partition(ir_dict, is_op_supported)
    backend = MetalBackend()
    dag = DAGExecutor(plan, backend)
    dag.load_weights(weights_dict)
    result = dag.execute(inputs={"x": input_array})

    assert [part.device for part in plan.partitions] == ["npu", "cpu", "npu"]
    (value,) = result.values()
    np.testing.assert_allclose(value, expected(model, input_array), atol=1e-2)


# init against run


def layers(count: int = 3) -> IRBuilder:
    """Linears over x, each with y added; a constant makes a prologue."""
    g = IRBuilder()
    x, y = g.input("x", 2, 8), g.input("y", 2, 8)
    offset = g("aten.exp.default", g.constant("c", np.zeros(8, np.float32)))
    for index in range(count):
        x = g("aten.softmax.int", g("aten.linear.default", x, g.weight(f"w{index}", 8, 8)), -1)
    return g.output(g("aten.mul.Tensor", g("aten.add.Tensor", x, y), offset, name="out"))


def state(count: int = 3, scale: float = 1.0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {f"w{index}": scale * rng.normal(size=(8, 8)).astype(np.float32) for index in range(count)}


def buffers(program: CompiledProgram, backend: Backend, seed: int) -> dict[str, DeviceBuffer]:
    rng = np.random.default_rng(seed)
    return {
        spec.name: NPUBuffer.from_numpy(rng.normal(size=spec.shape), backend, spec=spec) for spec in program.input_specs
    }


def delta(executor: Executor, before: Counter[str]) -> dict[str, int]:
    return {key: value - before[key] for key, value in executor.counters.items() if value != before[key]}


def test_a_later_run_allocates_nothing_and_prepares_nothing() -> None:
    backend = ToyBackend()
    program = compile(layers().ir(), backend.target)
    executor, weights = Executor(program, backend), load_weights(state(), program, backend)
    inputs = buffers(program, backend, 0)
    first = executor.run(inputs, weights)["out"].to_numpy()
    assert executor.counters["prepared"] == len(program.kernels) + len(program.plan.prologue)
    before, asked = executor.counters.copy(), backend.counters.copy()
    for _ in range(3):
        np.testing.assert_array_equal(executor.run(inputs, weights)["out"].to_numpy(), first)
    assert delta(executor, before) == {"runs": 3}
    assert backend.counters - asked == Counter(launched=3 * len(program.kernels))


@EVERY_BACKEND
def test_an_input_that_first_comes_in_another_buffer_has_only_its_users_prepared_again(backend: Backend) -> None:
    program = compile(layers().ir(), backend.target)
    executor, weights = Executor(program, backend), load_weights(state(), program, backend)
    inputs, other = buffers(program, backend, 0), buffers(program, backend, 1)
    executor.run(inputs, weights)
    users = [call for call in program.kernels if any(view.buffer == "y" for view in call.inputs)]
    before = executor.counters.copy()
    mixed = executor.run({**inputs, "y": other["y"]}, weights)["out"].to_numpy()
    assert 0 < len(users) < len(program.kernels)
    assert delta(executor, before) == {"runs": 1, "buffers": 1, "prepared": len(users), "sequences": 1}
    fresh = Executor(program, backend).run({**inputs, "y": other["y"]}, weights)["out"].to_numpy()
    np.testing.assert_array_equal(mixed, fresh)


@EVERY_BACKEND
def test_new_content_in_the_same_buffer_needs_no_preparation(backend: Backend) -> None:
    program = compile(layers().ir(), backend.target, CompileOptions(compute_dtype="float32"))
    executor, weights = Executor(program, backend), load_weights(state(), program, backend)
    inputs = buffers(program, backend, 0)
    first = executor.run(inputs, weights)["out"].to_numpy()
    before = executor.counters.copy()
    inputs["y"].write(inputs["y"].to_numpy() + 1)
    np.testing.assert_allclose(executor.run(inputs, weights)["out"].to_numpy(), first + 1, rtol=1e-5)
    assert delta(executor, before) == {"runs": 1}


@EVERY_BACKEND
def test_other_weights_are_taken_up_even_in_the_same_dict_and_equal_ones_cost_nothing(backend: Backend) -> None:
    program = compile(layers().ir(), backend.target)
    executor = Executor(program, backend)
    weights, other = (load_weights(state(scale=scale), program, backend) for scale in (1.0, 3.0))
    inputs = buffers(program, backend, 0)
    first = executor.run(inputs, weights)["out"].to_numpy()
    before = executor.counters.copy()
    executor.run(inputs, dict(weights))
    assert delta(executor, before) == {"runs": 1}
    changed = executor.run(inputs, other)["out"].to_numpy()
    assert np.abs(changed - first).max() > 1e-3
    weights.update(other)
    np.testing.assert_array_equal(executor.run(inputs, weights)["out"].to_numpy(), changed)


@EVERY_BACKEND
def test_a_program_without_weights_runs_its_prologue_once(backend: Backend) -> None:
    program = compile(layers(0).ir(), backend.target)
    assert program.plan.prologue and not program.weight_specs
    executor, inputs = Executor(program, backend), buffers(program, backend, 0)
    executor.run(inputs)
    before = executor.counters.copy()
    executor.run(inputs)
    executor.run(inputs, {})
    assert delta(executor, before) == {"runs": 2}


@pytest.mark.parametrize(
    "backend",
    [CPUBackend(), BACKEND, *(pytest.param(gpu, marks=pytest.mark.gpu) for gpu in GPUS)],
    ids=["native", "cpu", *("cuda" for _ in GPUS)],
)
def test_a_weight_that_is_written_counts_from_the_next_run_on(backend: Backend) -> None:
    g = IRBuilder()
    g.output(g("aten.linear.default", g("aten.relu.default", g.input("x", 32, 64)), g.weight("w", 64, 64)))
    program = compile(g.ir(), backend.target, CompileOptions(compute_dtype="float32"))
    weights = load_weights({"w": np.ones((64, 64), np.float32)}, program, backend)
    executor, (name,), output = Executor(program, backend), weights, program.output_specs[0].name
    bound = {"x": NPUBuffer.from_numpy(np.ones((32, 64), np.float32), backend)}

    def found(executor: Executor) -> set[float]:
        return set(executor.run(bound, weights)[output].to_numpy().flat)

    assert found(executor) == {64.0}
    weights[name].write(np.full((64, 64), 2.0, np.float32))
    assert [found(runner) for runner in (executor, Executor(program, backend), executor)] == [{128.0}] * 3


@EVERY_BACKEND
def test_executors_share_weights_and_take_turns_with_donated_caches(backend: Backend) -> None:
    g = IRBuilder()
    cache, at, x = g.input("cache", 4, 8), g.input("at", 1, dtype="int64"), g.input("x", 1, 8)
    row = g("aten.linear.default", x, g.weight("w0", 8, 8))
    g.output(g("aten.index_copy.default", cache, 0, at, row, name="new"))
    program = compile(g.ir(), backend.target, CompileOptions(compute_dtype="float32"))
    assert program.plan.donations == {"new": "cache"}
    weights, rows = load_weights(state(1), program, backend), np.eye(8, dtype=np.float32)
    executors = [Executor(program, backend) for _ in range(2)]
    caches = [NPUBuffer.zeros((4, 8), backend, "float32") for _ in range(2)]
    wanted = np.zeros((2, 4, 8), np.float32)
    for turn, (runner, chosen) in enumerate([(0, 0), (0, 1), (1, 0), (0, 0), (1, 1)]):
        position, data = turn % 4, rows[turn : turn + 1]
        made = executors[runner].run({"cache": caches[chosen], "at": np.array([position]), "x": data}, weights)
        assert made["new"] is caches[chosen]
        wanted[chosen, position] = data[0] @ state(1)["w0"].T
        for buffer, content in zip(caches, wanted, strict=True):
            np.testing.assert_allclose(buffer.to_numpy(), content, rtol=1e-5)


# the backend interface


def test_every_device_that_a_package_registers_can_be_loaded() -> None:
    found = entry_points(group=PLUGINS)
    assert {"metal-emulator", "metal-emulator-fast", "cuda"} <= found.names
    assert all(callable(point.load()) for point in found)


def test_a_toy_device_in_under_150_lines_runs_a_model_through_the_same_executor(seed: int) -> None:
    assert len(inspect.getsource(toy_device).splitlines()) < 150
    model, x = small_cnn(), np.random.randn(1, 3, 8, 8).astype(np.float32)
    program = compile(cnn_ir())
    results = []
    for backend in (ToyBackend(), BACKEND):
        weights = load_weights(model.state_dict(), program, backend)
        outputs = backend.execute(
            program, {program.input_specs[0].name: backend.allocate_buffer(x, spec=program.input_specs[0])}, weights
        )
        results.append(next(iter(outputs.values())).to_numpy(program.output_specs[0]))
    np.testing.assert_array_equal(*results)
    np.testing.assert_allclose(results[0], expected(model, x), atol=1e-2)


def test_the_abstract_classes_cannot_be_made() -> None:
    with pytest.raises(TypeError, match="abstract"):
        Backend()  # type: ignore[abstract]
    with pytest.raises(TypeError, match="abstract"):
        DeviceBuffer((1,), None, "float16", None)  # type: ignore[abstract]


# buffers


@EVERY_BACKEND
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int32", "bool"])
def test_an_array_comes_back_as_it_went(backend: Backend, dtype: str) -> None:
    numpy_dtype = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    data = (np.arange(12).reshape(3, 4) % 2).astype(numpy_dtype)
    buffer = NPUBuffer.from_numpy(data, backend)
    assert (buffer.shape, buffer.dtype, buffer.size_bytes) == ((3, 4), dtype, data.nbytes)
    result = buffer.to_numpy()
    assert result.dtype == data.dtype
    np.testing.assert_array_equal(result, data)
    data[:] = 0
    result[:] = 1
    assert buffer.to_numpy().astype(np.float32).sum() == 6


@EVERY_BACKEND
@pytest.mark.parametrize(
    ("given", "stored"),
    [("int64", "int32"), ("int16", "int32"), ("int8", "int32"), ("uint8", "int32"), ("float64", "float32")],
)
def test_wide_dtypes_are_narrowed(backend: Backend, given: str, stored: str) -> None:
    buffer = NPUBuffer.from_numpy(np.arange(5, dtype=given), backend)
    assert buffer.dtype == stored
    np.testing.assert_array_equal(buffer.to_numpy(), np.arange(5))


@EVERY_BACKEND
def test_a_spec_casts_pads_and_undoes_both(backend: Backend) -> None:
    spec = TensorSpec("x", (1, 3, 2, 2), "float32", "bfloat16", (1, 32, 2, 2))
    data = np.linspace(-2, 2, 12, dtype=np.float32).reshape(spec.shape)
    buffer = NPUBuffer.from_numpy(data, backend, spec=spec)
    assert (buffer.shape, buffer.alloc_shape, buffer.dtype, buffer.size_bytes) == (
        spec.shape,
        (1, 32, 2, 2),
        "bfloat16",
        256,
    )
    assert buffer.to_numpy().dtype == ml_dtypes.bfloat16 and buffer.to_numpy(spec).dtype == np.float32
    np.testing.assert_allclose(buffer.to_numpy(spec), data, rtol=1e-2)
    np.testing.assert_array_equal(buffer._download()[:, 3:].astype(np.float32), 0)


@EVERY_BACKEND
def test_finite_values_beyond_a_16_bit_range_stay_finite(backend: Backend) -> None:
    spec = TensorSpec("x", (3,), "float32", "float16")
    data = np.array([np.finfo(np.float32).max, -np.inf, -1e9], np.float32)
    assert NPUBuffer.from_numpy(data, backend, spec=spec).to_numpy().tolist() == [65504.0, -np.inf, -65504.0]


@EVERY_BACKEND
def test_views_scalars_empty_and_read_only_arrays_upload(backend: Backend) -> None:
    base = np.arange(12, dtype=np.float32).reshape(3, 4)
    base.flags.writeable = False
    for data in (
        base.T,
        base[::2, ::-1],
        np.float32(3.0),
        np.zeros((0, 4), np.float32),
        np.broadcast_to(base[0], (2, 4)),
    ):
        buffer = NPUBuffer.from_numpy(np.asarray(data), backend)
        np.testing.assert_array_equal(buffer.to_numpy(), data)


@EVERY_BACKEND
def test_zeros_copies_and_writes(backend: Backend) -> None:
    buffer = NPUBuffer.zeros((2, 3), backend, "float16", alloc_shape=(2, 4))
    assert not buffer.to_numpy().any() and buffer.to_numpy().shape == (2, 3) and buffer.size_bytes == 16
    kept = buffer.copy()
    buffer.write(np.ones((2, 3)))
    assert buffer.to_numpy().sum() == 6 and kept.to_numpy().sum() == 0


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int32"])
def test_dlpack_shares_the_memory_without_the_padding(dtype: str) -> None:
    buffer = NPUBuffer.zeros((2, 3), BACKEND, dtype, alloc_shape=(2, 4))
    tensor = torch.from_dlpack(buffer)  # type: ignore[arg-type]
    assert tensor.shape == (2, 3) and tensor.dtype == getattr(torch, dtype)
    tensor.fill_(7)
    assert buffer.to_numpy().astype(np.float32).sum() == 42
    if dtype != "bfloat16":
        assert np.from_dlpack(buffer).sum() == 42  # type: ignore[arg-type]


# devices


def test_devices_by_name() -> None:
    assert "cpu" in available_devices()
    assert isinstance(Device("cpu").backend, CPUBackend) and isinstance(Device().backend, Backend)
    assert repr(Device("cpu")).startswith("Device('cpu': CPU, ")
    with pytest.raises(DeviceError, match="unknown device 'tpu'; choose one of .*cpu"):
        Device("tpu")


def test_a_registered_device_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from npu_runtime import device

    monkeypatch.setattr(device, "_FACTORIES", dict(device._FACTORIES))
    register_device("toy", ToyBackend)
    assert "toy" in available_devices()
    assert NPUBuffer.zeros((2,), Device("toy")).native_handle.nbytes == 4


# weights


@pytest.fixture
def checkpoint(tmp_path: Path) -> dict[str, torch.Tensor]:
    """State, also saved as one file and as a folder of two shards."""
    tensors = {key: torch.from_numpy(value) for key, value in state().items()}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "shards").mkdir()
    save_file({"w0": tensors["w0"]}, tmp_path / "shards" / "model-00001-of-00002.safetensors")
    save_file({key: tensors[key] for key in ("w1", "w2")}, tmp_path / "shards" / "model-00002-of-00002.safetensors")
    return tensors


def test_weights_load_alike_from_a_file_a_folder_and_mappings(
    tmp_path: Path, checkpoint: dict[str, torch.Tensor], backend: Backend
) -> None:
    program = compile(layers().ir(), backend.target)
    arrays = {key: value.numpy() for key, value in checkpoint.items()}
    sources: list[Any] = [
        tmp_path / "model.safetensors",
        str(tmp_path / "model.safetensors"),
        tmp_path / "shards",
        checkpoint,
        arrays,
    ]
    for source in sources:
        loaded = load_weights(source, program, backend)
        assert loaded.keys() == program.weight_specs.keys()
        for name, weight in program.weight_specs.items():
            wanted = arrays[next(weight.recipe.keys())].astype(np.float16)
            np.testing.assert_array_equal(loaded[name].to_numpy(), wanted)


def test_progress_reaches_the_total_with_and_without_a_cache(backend: Backend) -> None:
    program, cache = compile(layers().ir(), backend.target), dict[str, DeviceBuffer]()
    seen: list[list[tuple[int, int]]] = [[], []]
    first = load_weights(state(), program, backend, progress=lambda *step: seen[0].append(step), cache=cache)
    second = load_weights(state(), program, backend, progress=lambda *step: seen[1].append(step), cache=cache)
    assert seen == [[(1, 3), (2, 3), (3, 3)]] * 2
    assert all(first[name] is second[name] for name in first)


def test_keys_that_the_model_does_not_need_are_let_pass_only_when_asked(backend: Backend) -> None:
    program = compile(layers().ir(), backend.target)
    with pytest.raises(Exception, match="unknown: 'extra'"):
        load_weights({**state(), "extra": np.ones(1)}, program, backend)
    assert load_weights({**state(), "extra": np.ones(1)}, program, backend, strict=False)


def test_a_weight_that_the_program_folded_away_is_known(backend: Backend) -> None:
    model = small_cnn()
    assert "1.num_batches_tracked" in model.state_dict()
    load_weights(model.state_dict(), compile(cnn_ir(), backend.target), backend)


# profiles


@EVERY_BACKEND
def test_a_profile_as_table_and_json(backend: Backend) -> None:
    program, profiler = compile(layers().ir(), backend.target), Profiler()
    executor, weights = Executor(program, backend), load_weights(state(), program, backend)
    plain = executor.run(buffers(program, backend, 0), weights)["out"].to_numpy()
    for _ in range(2):
        profiled = executor.run(buffers(program, backend, 0), weights, profiler)["out"].to_numpy()
    np.testing.assert_array_equal(profiled, plain)
    data = json.loads(json.dumps(profiler.to_dict()))
    counts = Counter(call.kernel for call in program.kernels)
    assert data["runs"] == 2 and data["total_ms"] > 0
    assert {row["name"]: row["calls"] for row in data["kernels"]} == counts
    assert {row["name"] for row in data["transfers"]} == {"device → device"}  # of inputs in other buffers than before
    assert sum(row["share"] for row in (*data["kernels"], *data["transfers"])) == pytest.approx(1)
    assert [row["ms"] for row in data["kernels"]] == sorted((row["ms"] for row in data["kernels"]), reverse=True)
    lines = profiler.report().split("\n")
    assert lines[0].split() == ["kernel", "ms/run", "calls", "share"] and lines[-1].startswith("total (with profiling)")
    assert len(lines) == len(counts) + 1 + 2


def test_an_empty_profile_prints() -> None:
    assert Profiler().to_dict() == {"runs": 0, "total_ms": 0.0, "kernels": [], "transfers": []}
    assert len(Profiler().report().split("\n")) == 2


@EVERY_BACKEND
def test_a_plans_profile_knows_transfers_and_cpu_partitions(backend: Backend) -> None:
    plan = partition(layers().ir(), lambda op: "softmax" not in op)
    dag, profiler = DAGExecutor(plan, backend), Profiler()
    dag.load_weights(state())
    dag.execute({"x": np.ones((2, 8), np.float32), "y": np.ones((2, 8), np.float32)}, profiler)
    data = profiler.to_dict()
    assert sum(row["name"].startswith("cpu partition") for row in data["kernels"]) == 3
    assert {row["name"] for row in data["transfers"]} == {"host → device", "device → host"}
    assert all(row["bytes"] > 0 and row["calls"] > 0 for row in data["transfers"])
    assert data["runs"] == 1 and "host → device" in profiler.report()


@EVERY_BACKEND
def test_perfetto_reads_the_trace_of_a_partitioned_run_on_every_device(backend: Backend, tmp_path: Path) -> None:
    plan = partition(layers().ir(), lambda op: "softmax" not in op)
    dag, profiler = DAGExecutor(plan, backend), Profiler()
    dag.load_weights(state())
    for _ in range(2):
        dag.execute({"x": np.ones((2, 8), np.float32), "y": np.ones((2, 8), np.float32)}, profiler)
    profiler.save_trace(tmp_path / "trace.json")
    trace = PerfettoTrace(tmp_path / "trace.json")
    assert trace.problems() == []
    joined = "slice join thread_track on track_id = thread_track.id join thread using(utid) join process using(upid)"
    tracks = dict(trace.rows(f"select process.name || ': ' || thread.name, count(*) from {joined} group by 1"))
    assert tracks == {
        f"{backend.device}: kernels": len(profiler.calls),
        "host: runs": len(profiler.host_spans),
        "host: transfers": len(profiler.transfer_spans),
    }
    assert len(profiler.calls) == 2 * sum(len(executor.program.kernels) for executor in dag.executors.values())


def test_native_kernels_can_be_switched_off_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "NPU_SIM_NATIVE", "0")
    assert not CPUBackend().native and CPUBackend(native=True).native
    assert CPUBackend().device.endswith("threads, torch kernels")


def test_the_cpu_device_opens_while_its_kernels_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = threading.Event()
    monkeypatch.setattr("npu_runtime.cpu.backend.native_available", lambda: compiled.wait(60))
    backend = CPUBackend(native=True)
    compiled.set()
    assert backend.native
