"""Programs run where PyTorch is not installed: on the native kernels and NumPy, or on NumPy alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from drawn import drawn
from ir_builder import IRBuilder
from kernel_twins import Twins
from safetensors.torch import save_file
from without_torch import run_without_torch
from zoo import ZOO
from zoo_runs import Arrays, build, check, draw, extracted, run_torch, weights_of

import npu_compiler
from npu_compiler import ConstraintError
from npu_compiler.errors import DeviceError
from npu_compiler.installing import install_command
from npu_compiler.program.kernels import KernelCall
from npu_runtime import CPUBackend, Executor, load_weights
from npu_runtime.cpu.kernels import reference_launch
from npu_runtime.weight_loader import to_numpy
from npu_sim.vision.resnet import random_images, resnet18, seed_weights

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
MODELS = ("ResNet", "MobileNet", "EfficientNet", "bert", "gpt2", "vit", "t5", "llama")

# Runs each program of a folder on each sample of its inputs, on the native kernels, and the first on NumPy alone.
RUN = """
import sys
from pathlib import Path
import numpy as np
from npu_runtime import CPUBackend, Executor, load_weights

folder, outputs = Path(sys.argv[1]), {}
samples = np.load(folder / "inputs.npz")
for backend in (CPUBackend(), CPUBackend(native=False)):
    kind = "native" if backend.native else "numpy"
    for path in sorted(folder.glob("*.npubin")):
        executor = Executor(path, backend)
        program = executor.program
        weights = load_weights(folder / "weights.safetensors", program, backend, strict=False)
        for draw in range(len(samples["0"]) if backend.native else 1):
            given = {spec.name: samples[str(i)][draw] for i, spec in enumerate(program.input_specs)}
            results = executor.run(given, weights)
            for i, spec in enumerate(program.output_specs):
                outputs[f"{kind} {path.stem} {draw} {i}"] = results[spec.name].to_numpy(spec).astype(np.float32)
assert "torch" not in sys.modules
np.savez(folder / "outputs.npz", **outputs)
"""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Run PyTorch on one thread: on a busy machine its parallel operations wait for threads without a core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def write_model(name: str, folder: Path, samples: list[list[torch.Tensor]]) -> None:
    """The zoo model's programs in all dtypes, its weights, and its inputs."""
    for dtype in DTYPES:
        npu_compiler.compile(extracted(name), options=npu_compiler.CompileOptions(compute_dtype=dtype)).save(
            folder / f"{dtype}.npubin"
        )
    save_file({key: value.clone() for key, value in weights_of(build(name)).items()}, folder / "weights.safetensors")
    stacked = {str(i): torch.stack(draws).numpy() for i, draws in enumerate(zip(*samples, strict=True))}
    np.savez(folder / "inputs.npz", **stacked)


def results_of(outputs: dict[str, np.ndarray], prefix: str) -> list[Arrays]:
    """The outputs of all samples, in order."""
    found: dict[int, dict[int, np.ndarray]] = {}
    for key, value in outputs.items():
        if key.startswith(prefix):
            draw, index = map(int, key.removeprefix(prefix).split())
            found.setdefault(draw, {})[index] = value
    return [[found[draw][index] for index in sorted(found[draw])] for draw in sorted(found)]


@pytest.mark.parametrize("name", drawn(MODELS, 1 / 2))
def test_a_process_without_pytorch_gets_pytorchs_answer(name: str, tmp_path: Path, seed: int) -> None:
    samples = draw(name, seed)
    write_model(name, tmp_path, samples)
    done = run_without_torch(RUN, tmp_path)
    assert done.returncode == 0, done.stderr
    outputs = dict(np.load(tmp_path / "outputs.npz"))
    reference = run_torch(build(name), torch.float32, samples)
    kinds = {key.split()[0] for key in outputs}
    assert "numpy" in kinds
    for dtype, torch_dtype in DTYPES.items():
        rounded = reference if dtype == "float32" else run_torch(build(name), torch_dtype, samples)
        for kind in kinds:
            ours = results_of(outputs, f"{kind} {dtype} ")
            if dtype == "float32":
                expected = reference[: len(ours)]
                for a, b in zip(sum(ours, []), sum(expected, []), strict=True):
                    np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3 * np.abs(b).max(), err_msg=f"{kind} {seed=}")
            elif kind == "native":
                check(ours, reference, rounded, seed)


def test_resnet18_without_pytorch(tmp_path: Path, seed: int) -> None:
    model = resnet18().eval()
    seed_weights(model, seed)
    images = random_images(1, seed, size=64)
    graph = npu_compiler.read_ir(_ir_of(model, images))
    npu_compiler.compile(graph, options=npu_compiler.CompileOptions(compute_dtype="float32")).save(
        tmp_path / "float32.npubin"
    )
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    np.savez(tmp_path / "inputs.npz", **{"0": images[None].numpy()})
    done = run_without_torch(RUN, tmp_path)
    assert done.returncode == 0, done.stderr
    with torch.no_grad():
        expected = model(images).numpy()
    for key, logits in np.load(tmp_path / "outputs.npz").items():
        np.testing.assert_allclose(logits, expected, atol=1e-4 * np.abs(expected).max(), err_msg=key)


def _ir_of(model: torch.nn.Module, images: torch.Tensor) -> dict[str, object]:
    from npu_sim.extract import extract_ir

    return extract_ir(model, (images,))


@pytest.mark.parametrize("name", drawn(ZOO, 1 / 3))
def test_each_kernel_of_the_zoo_does_in_numpy_what_it_does_in_pytorch(name: str, seed: int) -> None:
    backend = Twins()
    try:
        program = npu_compiler.compile(extracted(name), options=npu_compiler.CompileOptions(compute_dtype="bfloat16"))
    except ConstraintError:
        pytest.skip("the device does not run all of it")
    inputs = {spec.name: to_numpy(x) for spec, x in zip(program.input_specs, draw(name, seed)[0], strict=True)}
    Executor(program, backend).run(inputs, load_weights(weights_of(build(name)), program, backend, strict=False))
    assert backend.seen


ALL_KERNELS = """
import npu_compiler.ops
from npu_compiler.program.elementwise import ELEMENTWISE
from npu_compiler.program.kernels import KERNELS, Family
from npu_runtime.cpu.kernels import CPU_KERNELS
from npu_compiler.program.expression import parse

declared = {name for name, kernel in KERNELS.items() if kernel.family is not Family.COLLECTIVE}  # gloo is PyTorch's
assert declared == CPU_KERNELS.keys(), declared ^ CPU_KERNELS.keys()
for op in ELEMENTWISE.values():
    parse(op.expr), parse(op.integer or op.expr)
"""


def test_every_kernel_that_is_declared_has_a_reference() -> None:
    done = run_without_torch(ALL_KERNELS)
    assert done.returncode == 0, done.stderr


def test_a_kernel_that_has_none_is_named() -> None:
    call = KernelCall("my_kernel", "", (), (), {}, "node")
    with pytest.raises(DeviceError, match="the CPU device has no kernel 'my_kernel'"):
        reference_launch(call, [], [])


def test_an_index_out_of_range_is_an_error_that_names_the_node() -> None:
    g = IRBuilder()
    table, ids = g.input("table", 4, 8), g.input("ids", 3, dtype="int64")
    g.output(g("aten.index_select.default", table, dim=0, index=ids))
    executor = Executor(npu_compiler.compile(g.ir()), CPUBackend(native=False, pytorch=False))
    with pytest.raises(Exception, match="7"):
        executor.run({"table": np.zeros((4, 8), np.float32), "ids": np.array([0, 7, 1])})


# the rest of the package


def layers() -> IRBuilder:
    g = IRBuilder()
    hidden = g("aten.relu.default", g("aten.linear.default", g.input("x", 3, 8), g.weight("up.weight", 16, 8)))
    g.output(g("aten.softmax.int", g("aten.linear.default", hidden, g.weight("down.weight", 5, 16)), dim=-1))
    return g


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A small program, with its weights, its input and its result beside it."""
    folder = tmp_path / "layers"
    folder.mkdir()
    npu_compiler.compile(layers().ir(), options=npu_compiler.CompileOptions(compute_dtype="float32")).save(
        folder / "layers.npubin"
    )
    (folder / "layers.json").write_text(json.dumps(layers().ir()))
    up, down, x = torch.randn(16, 8), torch.randn(5, 16), torch.randn(3, 8)
    save_file({"up.weight": up, "down.weight": down}, folder / "weights.safetensors")
    np.save(folder / "x.npy", x.numpy())
    np.save(folder / "expected.npy", torch.softmax(torch.relu(x @ up.T) @ down.T, -1).numpy())
    return folder


ON_DEVICE = """
import sys
from pathlib import Path
import numpy as np
from npu_runtime import Device, Executor, load_weights

folder, device = Path(sys.argv[1]), Device(sys.argv[2])
executor = Executor(folder / "layers.npubin", device)
weights = load_weights(folder / "weights.safetensors", executor.program, device)
result = executor.run({"x": np.load(folder / "x.npy")}, weights)["softmax"]
np.testing.assert_allclose(result.to_numpy(), np.load(folder / "expected.npy"), atol=1e-5)
if sys.argv[2] == "cpu":
    np.testing.assert_array_equal(np.from_dlpack(result), result.to_numpy())
print(device)
"""


@pytest.mark.parametrize("device", ("cpu", "metal-emulator"))
def test_devices_run_without_pytorch(device: str, program: Path) -> None:
    done = run_without_torch(ON_DEVICE, program, device)
    assert done.returncode == 0, done.stderr


def test_without_pytorch_and_a_compiler_numpy_runs_it_and_says_so(program: Path, tmp_path: Path) -> None:
    nowhere = {"PATH": str(tmp_path), "CXX": "", "NPU_SIM_CACHE": str(tmp_path / "cache")}
    done = run_without_torch(ON_DEVICE, program, "cpu", env=nowhere)
    assert done.returncode == 0, done.stderr
    assert "threads, NumPy kernels" in done.stdout
    assert "the native CPU kernels are not built" in done.stderr and "NumPy's kernels run" in done.stderr


COMMAND = "from npu_sim.cli import main\nsys.argv[0] = 'npu-sim'\nmain()"


def test_the_command_runs_programs_without_pytorch(program: Path, tmp_path: Path) -> None:
    assert "describe" in run_without_torch(COMMAND, "--help").stdout
    file = program / "layers.npubin"
    assert "matmul_kernel" in run_without_torch(COMMAND, "describe", file).stdout
    out = tmp_path / "out.npz"
    arguments = ["-w", program / "weights.safetensors", "-i", f"x={program / 'x.npy'}", "-o", out]
    done = run_without_torch(COMMAND, "run", file, "--device", "cpu", *arguments)
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(np.load(out)["softmax"], np.load(program / "expected.npy"), atol=1e-5)


def test_what_traces_says_what_to_install(program: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def make():\n    import torch\n    return torch.nn.Linear(2, 2)\n")
    source = f"{tmp_path / 'mine.py'}:make"
    done = run_without_torch(COMMAND, "extract", source, "-i", "float32[1,2]", "-o", tmp_path / "ir.json")
    message = f"tracing a model needs PyTorch: {install_command('torch')}"
    assert done.returncode == 2 and done.stderr.strip() == f"error: {message}"
    done = run_without_torch(COMMAND, "verify", program / "layers.json", "-w", program / "weights.safetensors")
    assert done.returncode == 2 and f"needs torch, which is not installed: {install_command('torch')}" in done.stderr


PARTITIONED = """
import sys
from npu_compiler import InputError, partition
from npu_runtime import CPUBackend, DAGExecutor

weights = {"up.weight": [[0.0] * 8] * 16, "down.weight": [[0.0] * 16] * 5}
DAGExecutor(partition(sys.argv[1]), CPUBackend()).load_weights(weights)
try:
    DAGExecutor(partition(sys.argv[1], lambda op: "softmax" not in op), CPUBackend()).load_weights(weights)
except InputError as error:
    print(error)
"""


def test_only_partitions_for_the_cpu_need_pytorch(program: Path) -> None:
    done = run_without_torch(PARTITIONED, program / "layers.json")
    assert done.returncode == 0, done.stderr
    assert f"on the CPU needs PyTorch: {install_command('torch')}" in done.stdout
