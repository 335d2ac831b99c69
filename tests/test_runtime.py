"""The runtime: buffers, weights, and an executor that does everything costly once."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from toy_device import ToyBackend

from npu_compiler import CompiledProgram, InputError, TensorSpec, WeightError, compile
from npu_runtime import CPUBackend, Device, Executor, NPUBuffer, Profiler, load_weights
from npu_sim.extract import extract_ir

MODEL = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(512, 5))
IMAGE = torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def program() -> CompiledProgram:
    return compile(extract_ir(MODEL.eval(), (IMAGE,)))


def test_a_buffer_pads_and_casts_on_the_way_in_and_back_on_the_way_out() -> None:
    spec = TensorSpec("x", (1, 3, 2, 2), "float32", alloc_shape=(1, 32, 2, 2), storage="bfloat16")
    data = np.arange(12, dtype=np.float32).reshape(1, 3, 2, 2)
    buffer = NPUBuffer.from_numpy(data, Device("cpu"), spec=spec)
    assert (buffer.shape, buffer.alloc_shape, buffer.size_bytes) == ((1, 3, 2, 2), (1, 32, 2, 2), 256)
    assert buffer.to_numpy().dtype == ml_dtypes.bfloat16 and buffer.to_numpy(spec=spec).dtype == np.float32
    np.testing.assert_array_equal(buffer.to_numpy(spec=spec), data)
    assert not NPUBuffer.zeros((2, 2), Device("cpu")).to_numpy().any()


def test_a_program_runs_with_weights_from_a_file(program: CompiledProgram, tmp_path: Path) -> None:
    save_file(MODEL.state_dict(), tmp_path / "model.safetensors")
    device = Device("cpu")
    weights = load_weights(tmp_path / "model.safetensors", program, device)
    (source,), (result,) = program.input_specs, program.output_specs
    image = NPUBuffer.from_numpy(IMAGE.numpy(), device, spec=source)
    outputs = Executor(program, device).run(inputs={source.name: image}, weights=weights)
    with torch.no_grad():
        np.testing.assert_allclose(outputs[result.name].to_numpy(spec=result), MODEL(IMAGE).numpy(), atol=1e-2)


def test_only_the_first_run_prepares_and_allocates(program: CompiledProgram) -> None:
    backend = ToyBackend()
    executor, weights = Executor(program, backend), load_weights(MODEL.state_dict(), program, backend)
    image = NPUBuffer.from_numpy(IMAGE.numpy(), backend, spec=program.input_specs[0])
    executor.run({program.input_specs[0].name: image}, weights)
    before = backend.counters.copy()
    for _ in range(3):
        executor.run({program.input_specs[0].name: image}, weights)
    assert backend.counters - before == {"launched": 3 * len(program.kernels)}


def test_a_profiler_times_every_kernel(program: CompiledProgram) -> None:
    backend, profiler = CPUBackend(), Profiler()
    executor, weights = Executor(program, backend), load_weights(MODEL.state_dict(), program, backend)
    executor.run({program.input_specs[0].name: IMAGE.numpy()}, weights, profiler=profiler)
    assert all(call.kernel in profiler.report() for call in program.kernels)


def test_what_does_not_fit_is_one_clear_sentence(program: CompiledProgram) -> None:
    with pytest.raises(WeightError, match="4.bias"):
        load_weights({key: x for key, x in MODEL.state_dict().items() if key != "4.bias"}, program, CPUBackend())
    weights = load_weights(MODEL.state_dict(), program, backend := CPUBackend())
    with pytest.raises(InputError, match=program.input_specs[0].name):
        Executor(program, backend).run({program.input_specs[0].name: np.zeros((1, 3, 9, 9), np.float32)}, weights)
