"""`MetalBackend` on the emulator: what happens at init and what in a run, command buffers, MPS, memory, errors."""

from __future__ import annotations

import platform
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import metal_cases.matmul
import metal_harness
import numpy as np
import pytest
import torch
from ir_builder import IRBuilder
from metal_harness import open_metal
from torch import nn
from torch_ir import extract_ir

import metal_emulator
from npu_compiler import METAL_GPU, CompiledProgram, CompileOptions, DeviceError, compile, partition
from npu_compiler.graph.dtypes import numpy_dtype
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.views import View, contiguous_strides
from npu_runtime import DAGExecutor, Device, Executor, MetalBackend, NPUBuffer, Operand, Profiler, load_weights
from npu_runtime.metal.binding import bind, collapse_views
from npu_runtime.metal.device import MetalAPI, MetalDevice
from npu_runtime.metal.mps_accel import addend_of, as_product, epilogue_of


class Block(nn.Module):
    """A convolution, products for MPS (plain, with a bias, with an epilogue), a softmax and an in-place cache."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.first, self.second, self.third = nn.Linear(64, 16), nn.Linear(16, 24, False), nn.Linear(24, 5)

    def forward(self, x: torch.Tensor, cache: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.relu(self.conv(x)).flatten(2).squeeze(0)
        rows = self.second(self.first(rows))
        return self.third(rows).relu().softmax(-1), cache.index_copy(0, at, rows[:2])


SHAPES = {"x": (1, 3, 8, 8), "cache": (6, 24), "at": (2,)}


@pytest.fixture(scope="module")
def backend() -> MetalBackend:
    return open_metal(mps=True)[0]


@pytest.fixture(scope="module")
def model() -> Block:
    torch.manual_seed(0)
    return Block().eval()


@pytest.fixture(scope="module")
def program(model: Block) -> CompiledProgram:
    with torch.device("meta"), torch.no_grad():
        inputs = (torch.empty(SHAPES["x"]), torch.empty(SHAPES["cache"]), torch.empty(SHAPES["at"], dtype=torch.int64))
        return compile(extract_ir(Block().eval(), inputs, model_name="block"))


def bound(program: CompiledProgram, backend: MetalBackend, rng: np.random.Generator) -> dict[str, Any]:
    values = {
        "x": rng.standard_normal(SHAPES["x"]),
        "cache": rng.standard_normal(SHAPES["cache"]),
        "at": np.array([4, 1]),
    }
    named = zip(program.input_specs, values.values(), strict=True)
    return {spec.name: NPUBuffer.from_numpy(value, backend, spec=spec) for spec, value in named}


def made_by(backend: MetalBackend, run: Any) -> Counter[str]:
    before = Counter(backend.counters)
    run()
    return Counter({name: count - before[name] for name, count in backend.counters.items() if count != before[name]})


def test_a_program_runs_and_updates_its_cache_in_place(
    model: Block, program: CompiledProgram, backend: MetalBackend, rng: np.random.Generator
) -> None:
    inputs = bound(program, backend, rng)
    weights = load_weights(model.state_dict(), program, backend)
    x, cache, at = (torch.from_numpy(buffer.to_numpy().astype(np.float32)) for buffer in inputs.values())
    outputs = list(Executor(program, backend).run(inputs, weights).values())
    with torch.no_grad():
        expected = model(x, cache, at.long())
    np.testing.assert_allclose(outputs[0].to_numpy(), expected[0], atol=5e-3)
    np.testing.assert_allclose(outputs[1].to_numpy(), expected[1], atol=5e-3)
    assert outputs[1] is list(inputs.values())[1]


def test_a_later_run_makes_packs_and_compiles_nothing(
    model: Block, program: CompiledProgram, backend: MetalBackend, rng: np.random.Generator
) -> None:
    inputs, weights = bound(program, backend, rng), load_weights(model.state_dict(), program, backend)
    executor = Executor(program, backend)
    assert not made_by(backend, lambda: executor.run(inputs, weights)).keys() & {"libraries", "pipelines", "packed"}
    groups = _mps_groups(program)
    steady = made_by(backend, lambda: executor.run(inputs, weights))
    by_mps = [call for call in program.kernels if as_product(call) is not None]
    products = len(by_mps)
    addends, epilogues = (sum(part(call) is not None for call in by_mps) for part in (addend_of, epilogue_of))
    assert (products, addends, epilogues) == (3, 1, 1)
    assert steady.keys() == {"command_buffers", "encoders", "dispatches", "mps_products"}
    assert steady["command_buffers"] == 1
    assert steady["dispatches"] == len(program.kernels) - products + addends + epilogues
    assert steady["mps_products"] == products
    assert steady["encoders"] <= 1 + groups, "an encoder is ended for MPS only"


def _mps_groups(program: CompiledProgram) -> int:
    """Runs of neighbouring calls that MPS makes."""
    by_mps = []
    for call in program.kernels:
        if as_product(call) is None:
            by_mps += [False]
        else:
            by_mps += [False] * (addend_of(call) is not None) + [True] + [False] * (epilogue_of(call) is not None)
    return sum(now and not before for before, now in zip([False, *by_mps], by_mps, strict=False))


def test_another_executor_of_the_same_program_finds_its_pipelines(
    program: CompiledProgram, backend: MetalBackend
) -> None:
    Executor(program, backend)
    assert "pipelines" not in made_by(backend, lambda: Executor(program, backend))


def test_command_buffers_hold_at_most_a_batch(model: Block, program: CompiledProgram, rng: np.random.Generator) -> None:
    small, _ = open_metal(mps=True)
    small.config = replace(METAL_GPU, max_dispatches_per_batch=3)
    inputs, weights = bound(program, small, rng), load_weights(model.state_dict(), program, small)
    executor = Executor(program, small)
    executor.run(inputs, weights)
    steady = made_by(small, lambda: executor.run(inputs, weights))
    assert steady["command_buffers"] == -(-(steady["dispatches"] + steady["mps_products"]) // 3)


def test_a_profile_has_the_gpus_own_times(
    model: Block, program: CompiledProgram, backend: MetalBackend, rng: np.random.Generator
) -> None:
    inputs, weights = bound(program, backend, rng), load_weights(model.state_dict(), program, backend)
    profiler = Profiler()
    Executor(program, backend).run(inputs, weights, profiler)
    assert set(profiler.kernels) == {call.kernel for call in program.kernels}
    spent = sum(entry.seconds for entry in profiler.kernels.values())
    assert 0 < spent <= profiler.total


def test_memory_is_refused_before_it_is_asked_for() -> None:
    small = MetalBackend(metal_emulator.api(memory=1_000_000))
    NPUBuffer.zeros((1000,), small)
    refused = r"out of memory: cannot allocate float16\[1000, 1000\]: 2000000 bytes asked for, \d+ of 1000000 free"
    with pytest.raises(DeviceError, match=refused):
        NPUBuffer.zeros((1000, 1000), small)


def test_a_fault_on_the_device_is_a_device_error_with_its_report() -> None:
    backend = MetalBackend(metal_emulator.api())
    view = View("table", (5, 8), (8, 1), 0, "float16")
    call = KernelCall(
        "embedding_kernel",
        "embedding.metal",
        (view, View("ids", (1,), (1,), 0, "int32")),
        (View("out", (1, 8), (8, 1), 0, "float16"),),
        {"rows": 5, "width": 8, "checked": 1},
        "lookup",
    )
    buffers = [
        backend.allocate_buffer(np.ones((5, 8), np.float16)),
        backend.allocate_buffer(np.array([4000])),
        NPUBuffer.zeros((1, 8), backend),
    ]
    operands = [Operand(b, v, 0, False) for b, v in zip(buffers, (*call.inputs, *call.outputs), strict=True)]
    with pytest.raises(DeviceError, match=r"embedding_kernel.*table"):
        backend.prepare(call, operands[:2], operands[2:])()


def test_an_unknown_kernel_is_named(backend: MetalBackend) -> None:
    view = View("x", (4,), (1,), 0, "float16")
    with pytest.raises(DeviceError, match="the Metal device has no kernel 'fft_kernel'"):
        backend.compile([KernelCall("fft_kernel", "fft.metal", (view,), (view,), {}, "node")])


@pytest.mark.parametrize("params", [{}, {"scale": "a"}, {"scale": [1.0, 2.0]}])
def test_parameters_that_do_not_fit_the_kernel_are_refused(params: dict[str, Any]) -> None:
    view = View("x", (4,), (1,), 0, "float16")
    with pytest.raises(DeviceError, match=r"'softmax_kernel' \(node 'node'\) has unusable parameters"):
        bind(KernelCall("softmax_kernel", "softmax.metal", (view,), (view,), params, "node"))


def test_what_32_bits_cannot_address_is_refused() -> None:
    huge = View("x", (2**17, 2**16), (2**16, 1), 0, "float16")
    call = KernelCall("softmax_kernel", "softmax.metal", (huge,), (huge,), {"scale": 1.0}, "node")
    with pytest.raises(DeviceError, match="spans 8589934592 elements; Metal kernels address 4294967296"):
        bind(call)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int32", "bool"])
def test_buffers_come_back_as_they_went_in(backend: MetalBackend, rng: np.random.Generator, dtype: str) -> None:
    data = rng.integers(0, 2, (3, 5)).astype(numpy_dtype(dtype))
    buffer = NPUBuffer.from_numpy(data, backend)
    assert buffer.dtype == dtype and (buffer.to_numpy() == data).all()
    copied = buffer.copy()
    buffer.write(np.zeros((3, 5), data.dtype))
    assert (copied.to_numpy() == data).all() and not buffer.to_numpy().any()
    shared = torch.from_dlpack(copied)
    assert (shared.float().numpy() == data.astype(np.float32)).all()


def test_the_device_is_there_by_name() -> None:
    assert isinstance(Device("metal-emulator").backend, MetalBackend)


@pytest.mark.skipif(platform.system() == "Darwin", reason="here Metal is to be had")
def test_elsewhere_than_on_a_mac_metal_says_what_it_needs() -> None:
    with pytest.raises(DeviceError, match="Metal needs macOS and pyobjc"):
        MetalBackend()


def test_a_partitioned_graph_runs_its_device_part_on_metal(backend: MetalBackend, rng: np.random.Generator) -> None:
    class Mixed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.inv(torch.relu(x) + 3 * torch.eye(4, device=x.device)) * 2

    plan = partition(extract_ir(Mixed(), (torch.empty(4, 4, device="meta"),), model_name="mixed").to_dict())
    dag = DAGExecutor(plan, backend)
    dag.load_weights({})
    x = rng.standard_normal((4, 4)).astype(np.float32)
    (result,) = dag.execute({plan.graph.inputs[0]: x}).values()
    np.testing.assert_allclose(result, Mixed()(torch.from_numpy(x)), rtol=2e-2, atol=2e-2)


def test_pipelines_are_found_on_disk_by_the_next_process(tmp_path: Path) -> None:
    archive = tmp_path / "pipelines" / "archive.metallib"
    view = View("x", (3, 8), (8, 1), 0, "float16")
    binding = bind(KernelCall("softmax_kernel", "softmax.metal", (view,), (view,), {"scale": 1.0}, "node"))

    def start() -> metal_emulator.Emulator:
        api = metal_emulator.api()
        device = MetalDevice(MetalAPI(api.Metal, api.MPS, api.Foundation), METAL_GPU, archive)
        device.pipeline("softmax.metal", "softmax_kernel", "float16", binding.constants, {})
        device.save_archive()
        return api.emulator

    assert start().archive_hits == 0 and archive.exists()
    assert start().archive_hits == 1
    archive.write_bytes(b"from another system version")
    assert start().archive_hits == 0
    assert start().archive_hits == 1
    assert [path.name for path in archive.parent.iterdir()] == [archive.name]


def test_collapsing_keeps_every_element() -> None:
    view = View("x", (2, 1, 3, 4), (12, 7, 4, 1), 5, "float16")
    other = View("y", (2, 1, 3, 4), (1, 0, 8, 2), 0, "float16")
    assert [v.shape for v in collapse_views([view])] == [(24,)]
    merged = collapse_views([view, other])
    assert [v.shape for v in merged] == [(2, 12), (2, 12)]
    assert [v.strides for v in merged] == [(12, 1), (1, 2)] and merged[0].offset == 5


@pytest.mark.parametrize(("dtype", "rounding"), [("float16", 2**-10), ("bfloat16", 2**-7)])
def test_mps_makes_the_same_products_as_our_kernels(dtype: str, rounding: float) -> None:
    """Results agree up to one rounding: MPS stores the product before the epilogue reads it."""
    backend, _ = open_metal(mps=True)
    for case in metal_cases.matmul.CASES:
        metal_harness.run_case(replace(case, atol=rounding), backend, dtype, 1)
    assert backend.counters["mps_products"] >= 12


@pytest.mark.parametrize("transpose", ["", "a", "b", "ab"])
def test_batched_products_go_to_mps_in_either_layout(transpose: str) -> None:
    def side(name: str, rows: int, columns: int) -> View:
        plain = View(name, (6, rows, columns), (rows * columns, columns, 1), 0, "float16")
        return View(name, (6, rows, columns), (rows * columns, 1, rows), 0, "float16") if name in transpose else plain

    out = View("out", (6, 5, 7), contiguous_strides((6, 5, 7)), 0, "float16")
    params = {"m": 5, "n": 7, "k": 3, "batch": 6, "transpose_b": 0, "scale": 0.5}
    call = KernelCall("batched_matmul_kernel", "matmul.metal", (side("a", 5, 3), side("b", 3, 7)), (out,), params, "n")
    product = as_product(call)
    assert product is not None
    assert (product.transpose_left, product.transpose_right) == ("a" in transpose, "b" in transpose)
    case = metal_harness.Case(
        call.kernel,
        f"mps-{transpose}",
        [metal_harness.T(v.shape, strides=v.strides) for v in call.inputs],
        [metal_harness.T(out.shape)],
        params,
    )
    metal_harness.run_case(case, open_metal(mps=True)[0], "float16", 1)


@pytest.mark.parametrize("shape", [(32,), (16, 32)], ids=["bias", "residual"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_product_by_mps_and_what_is_added_are_rounded_once(
    backend: MetalBackend, seed: int, dtype: str, shape: tuple[int, ...]
) -> None:
    g = IRBuilder()
    x, w, y = g.input("x", 16, 8), g.weight("w", 32, 8), g.input("y", *shape)
    if len(shape) == 1:
        g.output(g("aten.linear.default", x, w, y, name="out"))
    else:
        g.output(g("aten.add.Tensor", g("aten.linear.default", x, w), y, name="out"))
    program = compile(g.ir(), options=CompileOptions(compute_dtype=dtype))
    assert len(program.kernels) == 1
    values = [torch.randn(size).to(getattr(torch, dtype)).float() for size in ((16, 8), shape, (32, 8))]
    weights = load_weights({"w": values[2]}, program, backend)
    feeds = dict(zip("xy", (value.numpy() for value in values), strict=False))
    ours = Executor(program, backend).run(feeds, weights)["out"].to_numpy().astype(np.float32)
    once = (values[0] @ values[2].T + values[1]).to(getattr(torch, dtype)).float().numpy()
    assert (ours == once).mean() > 0.99


def test_heads_that_share_rows_are_not_for_mps() -> None:
    """MPS wants its matrices whole rows apart."""
    heads, out = View("a", (6, 5, 3), (3, 18, 1), 0, "float16"), View("out", (6, 5, 5), (25, 5, 1), 0, "float16")
    params = {"m": 5, "n": 5, "k": 3, "batch": 6, "transpose_b": 1, "scale": 1.0}
    b = View("b", (6, 3, 5), (15, 5, 1), 0, "float16")
    assert as_product(KernelCall("batched_matmul_kernel", "matmul.metal", (heads, b), (out,), params, "n")) is None
    apart = replace(heads, strides=(90, 18, 1))
    assert as_product(KernelCall("batched_matmul_kernel", "matmul.metal", (apart, b), (out,), params, "n")) is not None


def test_a_shared_side_is_not_for_mps() -> None:
    shared = View("b", (6, 3, 7), (0, 7, 1), 0, "float16")
    a, out = (View(n, (6, *s), contiguous_strides((6, *s)), 0, "float16") for n, s in (("a", (5, 3)), ("out", (5, 7))))
    params = {"m": 5, "n": 7, "k": 3, "batch": 6, "transpose_b": 0, "scale": 1.0}
    assert as_product(KernelCall("batched_matmul_kernel", "matmul.metal", (a, shared), (out,), params, "n")) is None


def test_float32_programs_run_too(backend: MetalBackend, rng: np.random.Generator) -> None:
    g = IRBuilder()
    g.output(g("aten.softmax.int", g.input("x", 3, 10), -1))
    program = compile(g.ir(), options=CompileOptions(compute_dtype="float32"))
    data = rng.standard_normal((3, 10)).astype(np.float32)
    (result,) = Executor(program, backend).run({program.input_specs[0].name: data}).values()
    np.testing.assert_allclose(result.to_numpy(), torch.from_numpy(data).softmax(-1), rtol=1e-5)
