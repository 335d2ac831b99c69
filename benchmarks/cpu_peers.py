"""The contenders of the CPU benchmark for a network: ours, PyTorch, ONNX Runtime and OpenVINO, on the same weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks.cpu_machine import Floor, Rates
from benchmarks.figures import OURS
from benchmarks.peers import compiled
from benchmarks.timing import Timer, wall_time

if TYPE_CHECKING:
    from npu_compiler import CompiledProgram

DTYPES = ("bfloat16", "float16", "float32")
NEEDED = {
    "ONNX Runtime": ("onnxruntime", "onnx", "onnxscript"),
    "OpenVINO": ("openvino", "onnx", "onnxscript"),
    "llama.cpp": ("xllamacpp", "gguf"),
}

Array = NDArray[Any]


@dataclass(frozen=True)
class Contender:
    """One way to compute a task.

    Attributes:
        seconds: Runs it once; returns the seconds that it took.
        output: Runs it once; returns the result in float32.
    """

    seconds: Timer
    output: Callable[[], Array]


Factory = Callable[[], Contender]


def prepare(factories: Mapping[str, Factory], wanted: Callable[[str], bool]) -> dict[str, tuple[Contender, Array]]:
    """Make the wanted contenders, each with its output.

    One whose packages are not installed, or that cannot run the task, is left out with a printed word.
    """
    made: dict[str, tuple[Contender, Array]] = {}
    for name, factory in factories.items():
        if not wanted(name):
            continue
        packages = next((packages for peer, packages in NEEDED.items() if name.startswith(peer)), ())
        if missing := [package for package in packages if find_spec(package) is None]:
            print(f"{name} is left out: {', '.join(missing)} not installed (the extra 'peers')", flush=True)
            continue
        try:
            contender = factory()
            made[name] = contender, contender.output()
        except Exception as error:  # of any of five libraries; the others can still be compared
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            print(f"{name} is left out: {reason[:300]}", flush=True)
    return made


class NetworkContenders:
    """The contenders for one network and one input.

    Args:
        folder: Where exported files may be written.
    """

    def __init__(self, module: nn.Module, x: Tensor, threads: int, folder: Path) -> None:
        self.module, self.x, self.threads, self.folder = module, x, threads, folder

    def factories(self) -> dict[str, Factory]:
        """By the contender's name."""
        return {
            **{f"{OURS} {dtype}": partial(self.ours, dtype) for dtype in DTYPES},
            "PyTorch eager float32": self.eager,
            "torch.compile float32": self.compiled,
            "ONNX Runtime float32": self.onnx_runtime,
            "OpenVINO float32": partial(self.openvino, "f32"),
            "OpenVINO default": partial(self.openvino, None),
        }

    def reference(self) -> Array:
        with torch.no_grad():
            return _numpy(self.module(self.x))

    @cached_property
    def ir(self) -> dict[str, Any]:
        from npu_sim.extract import extract_ir

        return extract_ir(self.module, (self.x,))

    def program(self, compute_dtype: str) -> CompiledProgram:
        """Ours."""
        import npu_compiler

        return npu_compiler.compile(self.ir, compute_dtype=compute_dtype)

    def state(self) -> dict[str, Tensor]:
        both = (*self.module.named_parameters(remove_duplicate=False), *self.module.named_buffers())
        return {name: value.detach() for name, value in both}

    def floor(self, rates: Rates) -> Floor:
        return rates.multiplying(sum(call.flops for call in self.program("float32").kernels))

    def ours(self, compute_dtype: str) -> Contender:
        from npu_runtime import Device, Executor, NPUBuffer, load_weights

        program, device = self.program(compute_dtype), Device("cpu")
        executor, weights = Executor(program, device), load_weights(self.state(), program, device, strict=False)
        (spec,), (result,) = program.input_specs, program.output_specs
        inputs = {spec.name: NPUBuffer.from_numpy(self.x.numpy(), device, spec=spec)}
        return Contender(
            wall_time(lambda: executor.run(inputs, weights)),
            lambda: np.asarray(executor.run(inputs, weights)[result.name].to_numpy(spec=result), np.float32),
        )

    def eager(self) -> Contender:
        return torch_contender(lambda: self.module(self.x))

    def compiled(self) -> Contender:
        call = compiled(self.module, (self.x,), mode="default", freezing=True)
        return torch_contender(lambda: call(self.x))

    @cached_property
    def onnx_file(self) -> Path:
        path = self.folder / "model.onnx"
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(self.module, (self.x,), path, input_names=["x"], dynamo=True, verbose=False)
        return path

    def onnx_runtime(self) -> Contender:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self.threads
        session = onnxruntime.InferenceSession(self.onnx_file, options, providers=["CPUExecutionProvider"])
        inputs = {"x": self.x.numpy()}

        def run() -> Array:
            found: Array = session.run(None, inputs)[0]
            return found

        return Contender(wall_time(run), run)

    def openvino(self, precision: str | None) -> Contender:
        """OpenVINO at the given inference precision, or at the one that it chooses for this CPU.

        Raises:
            ValueError: its choice is float32, which is timed anyway.
        """
        import openvino

        settings = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": self.threads}
        if precision is not None:
            settings["INFERENCE_PRECISION_HINT"] = precision
        core = openvino.Core()
        model = core.compile_model(core.read_model(self.onnx_file), "CPU", settings)
        chosen = model.get_property("INFERENCE_PRECISION_HINT")
        if precision is None and chosen == openvino.Type.f32:
            raise ValueError("it is float32 on this CPU")
        request, inputs = model.create_infer_request(), {"x": self.x.numpy()}

        def run() -> Array:
            found: Array = request.infer(inputs, share_inputs=True, share_outputs=True)[0]
            return found

        return Contender(wall_time(run), lambda: np.array(run(), np.float32))


def torch_contender(call: Callable[[], Tensor]) -> Contender:
    @torch.no_grad()
    def run() -> Tensor:
        return call()

    return Contender(wall_time(run), lambda: _numpy(run()))


def _numpy(x: Tensor) -> Array:
    found: Array = x.detach().float().numpy().copy()
    return found
