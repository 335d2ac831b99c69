"""ONNX files for the rest of the project: as a module, as IR, and as weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from npu_compiler.errors import IRError
from npu_sim.module.trace import export, plain_ir, trace
from npu_sim.onnx.files import read_model
from npu_sim.onnx.importer import Importer
from npu_sim.onnx.module import OnnxModule, identifiers

Sizes = Mapping[str, int | Sequence[int]]


def load(path: str | Path, sizes: Sizes | None = None, values: Mapping[str, torch.Tensor] | None = None) -> OnnxModule:
    """Read an ONNX file as a PyTorch module in eval mode.

    Args:
        path: The file; external data is read from beside it.
        sizes: Name of a dynamic dimension → its size, and name of an input → its shape.
        values: Name of an input → its value, with which the input is a constant: for inputs that decide shapes.

    Raises:
        IRError: the file is damaged, or says what has no form in IR; one sentence names the node.
    """
    return OnnxModule(Importer(read_model(path), sizes, values).run(), Path(path).stem)


def ir_of_file(path: str | Path, sizes: Sizes | None = None) -> dict[str, Any]:
    """The IR of an ONNX file. Errors as in `load`."""
    return ir_of_module(load(path, sizes))


def ir_of_module(module: OnnxModule) -> dict[str, Any]:
    """The IR of an ONNX model, with its outputs by their own names."""
    ir = plain_ir(trace(export(module, module.examples), module.name))
    names = identifiers(module.output_names)
    if len(names) == len(ir["graph_outputs"]):
        ir["output_names"] = names
    return ir


def weights_of_file(path: str | Path, sizes: Sizes | None = None) -> dict[str, torch.Tensor]:
    """The weights of an ONNX file by their keys in its IR. Errors as in `load`."""
    traced = trace(export(module := load(path, sizes), module.examples), module.name)
    return dict(traced.weights)


def check_no_arguments(given: bool) -> None:
    """Refuse what goes with a PyTorch module only."""
    if given:
        raise IRError("an ONNX model has static shapes; give dynamic_shapes and buckets for a PyTorch module only")
