"""The documents that specify the public API, held to: every module that they name, and all their code as it stands."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
from abc import ABC
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import seed_snippets as snippets
import torch
from ir_builder import IRBuilder, Tensor
from safetensors.torch import save_file
from torch import nn
from torch_ir import extract_ir

import metal_emulator
import metal_kernels
import npu_compiler
import npu_runtime
from npu_compiler import CompiledProgram, CompileOptions, compile, is_op_supported
from npu_runtime import Backend, CPUBackend, DeviceBuffer, Executor, NPUBuffer
from npu_runtime.cpu.native.build import find_compiler
from npu_runtime.metal import backend as metal_backend
from npu_runtime.metal.device import MetalAPI

DOCUMENTS = sorted((Path(__file__).parents[3] / "shared" / "seeds").glob("*.txt"))

# Module → what the documents say it offers.
MODULES = {
    "npu_compiler": "compile partition is_op_supported",
    "npu_compiler.ir_reader": "TensorSpec IRGraph",
    "npu_compiler.constraint_checker": "",
    "npu_compiler.graph_optimizer": "WeightTransformRecipe",
    "npu_compiler.fusion_patterns": "",
    "npu_compiler.codegen": "CodegenTarget MetalCodegenTarget KernelCall BufferAllocation ExecutionPlan "
    "generate_execution_plan",
    "npu_compiler.codegen_core": "KernelCall ExecutionPlan CodegenTarget",
    "npu_compiler.codegen_ops": "HANDLED_OPS",
    "npu_compiler.codegen_fused": "",
    "npu_compiler.compiled_program": "CompiledProgram",
    "npu_compiler.op_support": "is_op_supported get_supported_ops",
    "npu_compiler.partitioner": "partition Partition TransferOp PartitionPlan",
    "npu_compiler.target_config": "TargetConfig METAL_GPU CUDA_GPU",
    "npu_runtime": "Device Executor NPUBuffer load_weights DAGExecutor MetalBackend",
    "npu_runtime.backend": "Backend DeviceBuffer",
    "npu_runtime.metal_backend": "MetalBackend",
    "npu_runtime.device": "Device",
    "npu_runtime.buffer": "NPUBuffer",
    "npu_runtime.executor": "Executor DispatchStrategy MetalDispatchStrategy",
    "npu_runtime.dag_executor": "DAGExecutor",
    "npu_runtime.cpu_fallback": "execute_cpu_partition",
    "npu_runtime.weight_loader": "load_weights",
    "npu_runtime.profiler": "Profiler",
    "npu_runtime._mps_accel": "",
    "cuda_compiler.op_classify": "",
    "cuda_compiler.op_support": "",
    "cuda_compiler.subgraph_analyzer": "",
    "cuda_compiler.cuda_codegen": "",
    "cuda_compiler.cuda_templates": "",
    "cuda_compiler.cuda_program": "CUDAProgram",
    "cuda_compiler.buffer_planner": "",
    "cuda_runtime.cuda_backend": "CUDABackend CUDABuffer",
    "cuda_runtime.cuda_executor": "CUDAExecutor",
}
SHADERS = (
    "matmul conv_bn_relu add_relu elementwise elementwise_extended softmax embedding rope tensor_ops index_copy pool "
    "common rmsnorm fused_decode_attention"
).split()
# Files that the documents name as examples of what a reader would write, or that are tests.
EXAMPLES = {"__init__", "cuda_buffer", "new_backend", "new_buffer", "new_executor"}
SUPPORTED_OPS = (
    "conv2d batch_norm relu max_pool2d adaptive_avg_pool2d matmul linear bmm add mul div neg silu pow rsqrt cos sin "
    "embedding transpose cat slice expand index_copy softmax mean reshape view alias detach to dropout"
).split()


@pytest.mark.skipif(not DOCUMENTS, reason="the documents are not beside this checkout")
def test_the_snippets_here_are_those_of_the_documents() -> None:
    text = "\n".join(document.read_text(encoding="utf-8") for document in DOCUMENTS)
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert blocks == [snippet.removeprefix("\n") for snippet in snippets.ALL]


@pytest.mark.skipif(not DOCUMENTS, reason="the documents are not beside this checkout")
def test_no_module_of_the_documents_is_left_out_here() -> None:
    text = "\n".join(document.read_text(encoding="utf-8") for document in DOCUMENTS)
    named = {name for name in re.findall(r"(\w+)\.py\b", text) if not name.startswith("test_")}
    known = {module.rpartition(".")[2] for module in MODULES}
    assert sorted(named - known - EXAMPLES) == []
    assert sorted(set(re.findall(r"(\w+)\.metal\b", text)) - set(SHADERS)) == []


@pytest.mark.parametrize("module", MODULES)
def test_a_module_offers_what_the_documents_say(module: str) -> None:
    found = importlib.import_module(module)
    assert [name for name in MODULES[module].split() if not hasattr(found, name)] == []


@pytest.mark.parametrize("name", SHADERS)
def test_a_shader_has_the_name_that_the_documents_give_it(name: str) -> None:
    assert metal_kernels.shader_source(f"{name}.metal")


@pytest.mark.parametrize("op", SUPPORTED_OPS)
def test_an_op_of_the_documents_is_supported(op: str) -> None:
    overloads = getattr(torch.ops.aten, op).overloads()
    assert any(is_op_supported(f"aten.{op}.{overload}") for overload in overloads)


# the quick start


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Linear(512, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(self.norm(self.conv(x)).relu().flatten(1))
        return result


class Mixed(Small):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cummax(super().forward(x), -1)[0] * 2


@pytest.fixture(params=["cpu", "metal"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Kind of device that `Device()` opens: the CPU, or Metal on the emulator, where `MetalBackend()` always is."""
    if find_compiler() is None:
        pytest.skip("the Metal emulator needs a C++ compiler")
    api = metal_emulator.api()
    monkeypatch.setattr(metal_backend, "load_api", lambda: MetalAPI(api.Metal, api.MPS, api.Foundation))
    monkeypatch.setattr(metal_backend, "_archive_path", lambda: tmp_path / "pipelines.metallib")
    monkeypatch.setattr(npu_runtime, "Device", partial(npu_runtime.Device, request.param))
    monkeypatch.chdir(tmp_path)
    return str(request.param)


def run(*parts: str, **names: Any) -> dict[str, Any]:
    """Run snippets one after the other over the same names."""
    for part in parts:
        exec(part, names)
    return names


def initialized(kind: type[nn.Module]) -> tuple[nn.Module, np.ndarray, np.ndarray]:
    """A model, an input, and what the model makes of it."""
    torch.manual_seed(0)
    model = kind().eval()
    x = torch.randn(1, 3, 8, 8)
    with torch.no_grad():
        return model, x.numpy(), model(x).numpy()


def test_the_quick_start_of_a_single_program(device: str) -> None:
    model, input_data, expected = initialized(Small)
    save_file(model.state_dict(), "model.safetensors")
    names = run(
        snippets.EXTRACT, model=Small().eval().to("meta"), example_input=(torch.empty(1, 3, 8, 8, device="meta"),)
    )
    Path("model_ir.json").write_text(json.dumps(names["ir"].to_dict(), default=str))
    names = run(snippets.COMPILE, snippets.EXECUTE, input_data=input_data)
    assert [spec.name for spec in names["program"].input_specs] != ["input"]
    assert isinstance(names["input_buf"], NPUBuffer) and isinstance(names["input_buf"], DeviceBuffer)
    assert all(isinstance(buffer, NPUBuffer) for buffer in names["outputs"].values())
    assert names["device"].backend.device.startswith({"cpu": "CPU", "metal": "Metal"}[device])
    np.testing.assert_allclose(names["result"], expected, atol=2e-2)
    assert names["result"].dtype == np.float32


def test_the_quick_start_of_a_partitioned_graph(device: str) -> None:
    model, input_array, expected = initialized(Mixed)
    with torch.no_grad():
        ir_dict = extract_ir(Mixed().eval().to("meta"), (torch.empty(1, 3, 8, 8, device="meta"),)).to_dict()
    weights_dict = {key: value.numpy() for key, value in model.state_dict().items()}
    names = run(snippets.EXECUTE_DAG, ir_dict=ir_dict, weights_dict=weights_dict, input_array=input_array)
    assert {part.device for part in names["plan"].partitions} == {"npu", "cpu"}
    (result,) = names["result"].values()
    np.testing.assert_allclose(result, expected, atol=4e-2)
    by_keyword = npu_compiler.partition(ir_dict, is_supported_fn=is_op_supported)
    assert str(by_keyword) == str(names["plan"])


def test_every_partition_compiles_from_its_ir_dict() -> None:
    with torch.no_grad():
        ir = extract_ir(Mixed().eval().to("meta"), (torch.empty(1, 3, 8, 8, device="meta"),)).to_dict()
    parts = [part for part in npu_compiler.partition(ir, is_op_supported).partitions if part.device == "npu"]
    assert parts and all(isinstance(compile(part.ir_dict), CompiledProgram) for part in parts)


# the porting guide


def methods(snippet: str) -> dict[str, dict[str, list[str]]]:
    """Class → method → its parameters, of the classes in a snippet; attribute lists, which are no code, left out."""
    code = re.sub(r"^    [a-z_]+(, [a-z_]+)+$", "", snippet, flags=re.MULTILINE)
    classes = [item for item in ast.walk(ast.parse(code)) if isinstance(item, ast.ClassDef)]
    return {
        kind.name: {
            item.name: [argument.arg for argument in item.args.args]
            for item in kind.body
            if isinstance(item, ast.FunctionDef)
        }
        for kind in classes
    }


@pytest.mark.parametrize("snippet", [snippets.CODEGEN_TARGET, snippets.BUFFER_AND_BACKEND, snippets.DISPATCH_STRATEGY])
def test_the_abstract_classes_have_the_methods_and_parameters_of_the_guide(snippet: str) -> None:
    homes = ("npu_compiler.codegen", "npu_runtime.backend", "npu_runtime.executor")
    for name, wanted in methods(snippet).items():
        kind = next(getattr(module, name) for module in map(importlib.import_module, homes) if hasattr(module, name))
        assert issubclass(kind, ABC) and wanted
        for method, parameters in wanted.items():
            assert list(inspect.signature(getattr(kind, method)).parameters)[: len(parameters)] == parameters


def test_a_buffer_has_the_attributes_and_constructors_of_the_documents() -> None:
    buffer = NPUBuffer.from_numpy(np.ones((2, 3), np.float32), CPUBackend(native=False), alloc_shape=(2, 4))
    assert (buffer.shape, buffer.alloc_shape, buffer.dtype, buffer.size_bytes) == ((2, 3), (2, 4), "float32", 32)
    assert buffer.native_handle is not None and buffer.to_numpy(spec=None).shape == (2, 3)
    assert DeviceBuffer.from_numpy(np.ones(2), CPUBackend(native=False)).to_numpy().sum() == 2
    assert NPUBuffer.zeros((2, 2), CPUBackend(native=False), alloc_shape=(2, 4)).size_bytes == 16


def test_a_backend_has_the_operations_of_the_documents() -> None:
    backend = CPUBackend(native=False)
    assert isinstance(backend, Backend) and isinstance(backend.device, str)
    program = compile(relu().ir(), backend.target)
    (spec,) = program.input_specs
    data = backend.allocate_buffer(-np.ones((2, 2), np.float32), None, spec)
    (result,) = backend.execute(program, {"x": data}, {}).values()
    backend.synchronize()
    assert not result.to_numpy().any() and not backend.allocate_zeros((2, 2), "float16", None).to_numpy().any()
    assert isinstance(backend.create_executor(program), Executor)


def relu() -> IRBuilder:
    g = IRBuilder()
    return g.output(g("aten.relu.default", g.input("x", 2, 2)))


def test_metals_dispatch_strategy_divides_every_call_of_a_program() -> None:
    from npu_compiler.target_config import METAL_GPU
    from npu_runtime.executor import DispatchStrategy, MetalDispatchStrategy

    strategy = MetalDispatchStrategy(METAL_GPU)
    assert isinstance(strategy, DispatchStrategy)
    for call in compile(relu().ir()).kernels:
        groups, threads = strategy.compute_dispatch(call, pipeline=None)
        assert len(groups) == len(threads) == 3 and all(size > 0 for size in (*groups, *threads))


def test_an_executor_takes_a_config() -> None:
    from npu_compiler.target_config import METAL_GPU, TargetConfig

    program, backend = compile(relu().ir()), CPUBackend(native=False)
    assert Executor(program, backend, config=METAL_GPU).run({"x": np.ones((2, 2), np.float32)})
    with pytest.raises(npu_compiler.DeviceError, match="compiled for 'vulkan'"):
        Executor(program, backend, config=TargetConfig(name="vulkan"))


def test_a_port_is_written_and_wired_up_as_the_guide_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guide leaves out what its executor does; here that is to return what it was given."""
    monkeypatch.chdir(tmp_path)
    Path("model_ir.json").write_text(json.dumps(relu().ir()))
    names = run(
        "import npu_compiler",
        "from npu_compiler.codegen import CodegenTarget",
        "from npu_compiler.target_config import TargetConfig",
        "from npu_runtime.backend import Backend, DeviceBuffer",
        snippets.TARGET_CONFIG,
        snippets.CUDA_TARGET,
        snippets.CUDA_BUFFER,
        snippets.CUDA_EXECUTOR,
    )
    assert issubclass(names["CudaBuffer"], DeviceBuffer) and names["CUDA_GPU"].matmul_tile == 32

    class CudaExecutor(names["CudaExecutor"]):  # type: ignore[misc]
        def __init__(self, program: CompiledProgram, device: str, config: Any) -> None:
            self.made_of = program, device, config

        def run(self, inputs: Any, weights: Any) -> Any:
            return inputs, weights

    names["CudaExecutor"] = CudaExecutor
    names = run(snippets.CUDA_BACKEND, **names)

    class CudaBackend(names["CudaBackend"]):  # type: ignore[misc]
        device = _device = "a GPU"

    names = run(snippets.WIRING, **{**names, "CudaBackend": CudaBackend, "inputs": {}, "weights": {}})
    assert isinstance(names["backend"], Backend) and names["outputs"] == ({}, {})
    assert names["executor"].made_of == (names["program"], "a GPU", names["CUDA_GPU"])
    assert [(call.kernel, call.source) for call in names["program"].kernels] == [("relu_kernel", "elementwise.cu")]


def test_the_guides_target_compiles_as_far_as_its_kernels_are_declared() -> None:
    """The guide names matrix products of its own; the error says what their author has to declare, and as what."""
    names = run("from npu_compiler.codegen import CodegenTarget", snippets.CUDA_TARGET)
    g = IRBuilder()
    rows = g("aten.linear.default", g.input("x", 4, 8), g.weight("w", 16, 8))
    ir = g.output(g("aten.softmax.int", g("aten.tanh.default", rows), -1)).ir()
    with pytest.raises(npu_compiler.ConstraintError) as raised:
        compile(ir, target=names["CudaCodegenTarget"]())
    (violation,) = raised.value.violations
    assert "names a kernel 'matmul_tiled' (source 'matmul.cu') that is not declared: declare_kernel()" in violation
    assert "such as those of the kernel that it replaces, matmul_kernel: x:f[m,.k] weight:f[n,k]" in violation


# the fusions


def rms_norm(g: IRBuilder, x: Tensor) -> Tensor:
    """The seven ops that the documents list: pow, mean, add, rsqrt, expand, mul, mul."""
    mean = g("aten.mean.dim", g("aten.pow.Tensor_Scalar", x, 2), [-1], True)
    scale = g("aten.rsqrt.default", g("aten.add.Tensor", mean, 1e-6))
    scale = g("aten.expand.default", scale, [2, 5, 64])
    return g("aten.mul.Tensor", g("aten.mul.Tensor", x, scale), g.weight("weight", 64))


FUSED: dict[str, tuple[str, Callable[[IRBuilder], Tensor]]] = {
    "add, relu": (
        "add_relu_kernel",
        lambda g: g("aten.relu.default", g("aten.add.Tensor", g.input("x", 4, 4), g.input("y", 4, 4))),
    ),
    "pow, mean, add, rsqrt, expand, mul, mul": ("rmsnorm_kernel", lambda g: rms_norm(g, g.input("x", 2, 5, 64))),
    "silu, mul": (
        "silu_mul_kernel",
        lambda g: g("aten.mul.Tensor", g("aten.silu.default", g.input("x", 4, 4)), g.input("y", 4, 4)),
    ),
    "add, softmax": (
        "masked_softmax_kernel",
        lambda g: g("aten.softmax.int", g("aten.add.Tensor", g.input("x", 1, 2, 4, 4), g.input("m", 1, 1, 4, 4)), -1),
    ),
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("ops", FUSED)
def test_ops_that_the_documents_fuse_become_that_one_kernel(ops: str, dtype: str) -> None:
    kernel, build = FUSED[ops]
    g = IRBuilder()
    program = compile(g.output(build(g)).ir(), options=CompileOptions(compute_dtype=dtype))
    assert [call.kernel for call in program.kernels] == [kernel]


def test_convolution_batch_norm_and_relu_become_that_one_kernel() -> None:
    with torch.no_grad():
        ir = extract_ir(
            nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()).eval().to("meta"),
            (torch.empty(1, 32, 8, 8, device="meta"),),
        )
    assert [call.kernel for call in compile(ir).kernels] == ["conv2d_kernel"]
