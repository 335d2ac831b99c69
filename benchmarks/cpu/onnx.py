"""ONNX Runtime and OpenVINO as contenders: both run what `torch.onnx` exports."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.cpu.contender import Array, Contender
from benchmarks.timing import wall_time


@torch.no_grad()
def export(module: nn.Module, inputs: Sequence[Tensor], path: Path) -> dict[str, Array]:
    """Export a module to ONNX for inputs of these shapes; return the inputs by their names in the file."""
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it warns of ops of torchvision, which no model here has
    names = [f"x{index}" for index in range(len(inputs))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(module, tuple(inputs), path, input_names=names, dynamo=True, verbose=False)
    return {name: x.numpy() for name, x in zip(names, inputs, strict=True)}


def onnx_runtime(path: Path, inputs: Mapping[str, Array], threads: int) -> Contender:
    """Return ONNX Runtime on a file as a contender; its output is the first output of the graph."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def run() -> Array:
        found: Array = session.run(None, inputs)[0]
        return found

    return Contender(wall_time(run), run)


def openvino(path: Path, inputs: Mapping[str, Array], threads: int, precision: str) -> Contender:
    """Return OpenVINO on a file as a contender.

    Args:
        precision: OpenVINO's name of a precision, or `default` for the one that it chooses for this CPU.

    Raises:
        ValueError: `precision` is `default` and OpenVINO chooses float32, which is timed anyway.
    """
    import openvino as vino

    settings = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": threads}
    if precision != "default":
        settings["INFERENCE_PRECISION_HINT"] = precision
    core = vino.Core()
    model = core.compile_model(core.read_model(path), "CPU", settings)
    if precision == "default" and model.get_property("INFERENCE_PRECISION_HINT") == vino.Type.f32:
        raise ValueError("it is float32 on this CPU")
    request = model.create_infer_request()

    def run() -> Array:
        found: Array = request.infer(inputs, share_inputs=True, share_outputs=True)[0]
        return found

    return Contender(wall_time(run), lambda: np.array(run(), np.float32))
