"""ONNX files read as a module, as IR and as weights; these are the functions for other packages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npu_compiler.errors import InputError, IRError, reading
from npu_compiler.installing import install_command
from npu_runtime.pytorch import require_torch

if TYPE_CHECKING:
    import torch

    from npu_sim.onnx.module import OnnxModule

SUFFIX = ".onnx"
Sizes = Mapping[str, int | Sequence[int]]


def load(
    path: str | Path,
    sizes: Sizes | None = None,
    values: Mapping[str, torch.Tensor] | None = None,
    examples: Sequence[torch.Tensor] = (),
) -> OnnxModule:
    """Read an ONNX file as a PyTorch module in eval mode.

    Args:
        path: The file; external data is read from the same folder.
        sizes: Name of a dynamic dimension → its size, and name of an input → its shape. None: all sizes are in the
            file.
        values: Name of an input that decides shapes → its value, which becomes a constant. None: no input does.
        examples: Tensors with the shapes of the inputs, in order, instead of `sizes`.

    Raises:
        IRError: the file is damaged, or IR cannot express a node; the message names it.
        InputError: the packages that read ONNX are not installed, or the examples do not match the inputs.
    """
    require_onnx()
    from npu_sim.onnx.files import read_model
    from npu_sim.onnx.importer import Importer
    from npu_sim.onnx.input_sizes import sizes_of
    from npu_sim.onnx.module import OnnxModule

    with reading(lambda reason: IRError(f"'{path}' is not an ONNX file that can be read: {reason}")):
        model = read_model(path)
        if examples:
            sizes = sizes_of(model, examples)
        module = OnnxModule(Importer(model, sizes, values).run(), Path(path).stem)
    for name, given, expected in zip(module.input_names, examples, module.examples, strict=False):
        if given.dtype != expected.dtype:
            raise InputError(f"the example of input '{name}' is {given.dtype}; the model takes {expected.dtype}")
    return module


def require_onnx() -> None:
    """Raise `InputError` if the packages that read ONNX are not installed."""
    require_torch("reading an ONNX model")
    if find_spec("onnx_ir") is None or find_spec("onnx") is None:
        raise InputError(f"reading an ONNX model needs the packages onnx and onnx-ir: {install_command('onnx')}")


def ir_of_file(path: str | Path, sizes: Sizes | None = None) -> dict[str, Any]:
    """Return the IR of an ONNX file. Errors as in `load`.

    Args:
        sizes: Sizes, as for `load`.
    """
    module = load(path, sizes)
    from npu_sim.module.trace import export, plain_ir, trace
    from npu_sim.onnx.module import identifiers

    ir = plain_ir(trace(export(module, module.examples), module.name))
    names = identifiers(module.output_names)
    return {**ir, "output_names": names} if len(names) == len(ir["graph_outputs"]) else ir


def parse_sizes(texts: Sequence[str]) -> dict[str, int | list[int]]:
    """Parse sizes such as `batch=4` and `image=1x3x224x224`. Raises `InputError` for any other text."""
    sizes: dict[str, int | list[int]] = {}
    for text in texts:
        name, _, value = text.rpartition("=")
        numbers = value.split("x")
        if not name or not all(x.isascii() and x.isdigit() for x in numbers):
            raise InputError(
                f"--shape takes a dimension's size or an input's shape, such as batch=4 or x=1x3x8, not {text}"
            )
        sizes[name] = int(value) if len(numbers) == 1 else [int(x) for x in numbers]
    return sizes


def weights_of_file(path: str | Path) -> dict[str, torch.Tensor]:
    """Return the initializers of an ONNX file, by the keys that its IR uses for them. Errors as in `load`."""
    require_onnx()
    from npu_sim.onnx.files import read_model
    from npu_sim.onnx.importer import initializers_of

    return initializers_of(read_model(path))
