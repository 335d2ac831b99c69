"""Extraction of IR from PyTorch models, and the search for models that commands name."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npu_compiler.errors import InputError, IRError
from npu_compiler.graph.dtypes import KNOWN_DTYPES
from npu_compiler.installing import install_command
from npu_runtime.pytorch import require_torch
from npu_sim.onnx.sources import SUFFIX as ONNX
from npu_sim.onnx.sources import Sizes
from npu_sim.onnx.sources import load as load_onnx

if TYPE_CHECKING:
    import torch
    from torch import nn

TASKS = {
    "text-generation": ("AutoModelForCausalLM", "logits"),
    "text-classification": ("AutoModelForSequenceClassification", "logits"),
    "token-classification": ("AutoModelForTokenClassification", "logits"),
    "fill-mask": ("AutoModelForMaskedLM", "logits"),
    "feature-extraction": ("AutoModel", "last_hidden_state"),
    "image-classification": ("AutoModelForImageClassification", "logits"),
}

_SPEC = re.compile(r"(?P<dtype>[a-z]+\d*)\[(?P<shape>[\d, ]*)\]")


def extract_ir(module: nn.Module, examples: Sequence[Any], *, name: str | None = None) -> dict[str, Any]:
    """Trace a module, in eval mode, and return its IR as JSON data. The module is not modified.

    Tensors that are not in the state dict become constants of the IR: buffers with `persistent=False`, and tensors that
    `forward()` creates from Python numbers. Outputs that `forward()` returns in a dict are named by its keys.

    Args:
        examples: Positional arguments; the IR is for inputs of the same shapes and dtypes. Tensors on the meta device
            stand for tensors of the module's device.
        name: Name of the model. Default: the module's class.

    Raises:
        IRError: PyTorch cannot export the model as one graph, or a buffer with `persistent=False` has no value because
            it is on the meta device.
    """
    require_torch("tracing a model")
    import torch

    from npu_sim.module.trace import export, plain_ir, trace

    tensors = [*module.parameters(), *module.buffers()]
    device = tensors[0].device if tensors else torch.device("cpu")
    inputs = tuple(_on_device(x, device) if isinstance(x, torch.Tensor) else x for x in examples)
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        exported = export(module, inputs)
    finally:
        for part in training:
            part.training = True
    for key in exported.graph_signature.non_persistent_buffers:
        if exported.constants[key].is_meta:
            raise IRError(
                f"buffer '{key}' is not in the state dict and has no value on the meta device; build it on the CPU"
            )
    ir = plain_ir(trace(exported, name or type(module).__name__))
    plain: dict[str, Any] = json.loads(json.dumps(ir, default=lambda array: array.tolist()))
    return plain


def _on_device(example: torch.Tensor, device: torch.device) -> torch.Tensor:
    import torch

    return torch.zeros_like(example, device=device) if example.is_meta != (device.type == "meta") else example


def write_ir(ir: dict[str, Any], path: Path) -> None:
    """Write IR to a JSON file atomically. Raises `InputError` if the file cannot be written."""
    from npu_compiler.files import write_atomically

    try:
        write_atomically(path, json.dumps(ir, indent=1).encode())
    except OSError as error:
        raise InputError(f"cannot write '{path}': {error.strerror or error}") from error


def write_weights(module: nn.Module, path: Path) -> None:
    """Write a module's state dict to a .safetensors file atomically.

    Raises:
        InputError: the module is on the meta device, or the file cannot be written.
    """
    from safetensors.torch import save_file

    if path.is_dir():
        raise InputError(f"cannot write '{path}': it is a folder")
    state = module.state_dict()
    if any(tensor.is_meta for tensor in state.values()):
        raise InputError("the model has no weights to write: its factory creates it on the meta device")
    temporary = path.with_name(f".{path.name}.partial")
    try:
        save_file({name: tensor.detach().cpu().clone().contiguous() for name, tensor in state.items()}, temporary)
        temporary.replace(path)
    except Exception as error:
        raise InputError(f"cannot write '{path}': {error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def load_model(
    source: str,
    inputs: Sequence[str] = (),
    *,
    task: str | None = None,
    tokens: int = 128,
    sizes: Sizes | None = None,
) -> tuple[nn.Module, tuple[Any, ...], str]:
    """Create a module; return it with example inputs and its name.

    Args:
        source: `package.module:factory`, `file.py:factory`, an ONNX file, or a Hugging Face folder. A factory returns a
            module, or a module and a tuple of example inputs. It can import modules from the folder of its file or, for
            `package.module:factory`, from the current folder.
        inputs: Dtypes and shapes of the example inputs, such as `float32[1,3,224,224]`. Default: the factory's own.
        task: Task of a Hugging Face folder: one of `TASKS`. None for any other source.
        tokens: Sequence length of a Hugging Face text model.
        sizes: Sizes of an ONNX model's inputs, by the names of dimensions or inputs. Default: the model's own.

    Raises:
        InputError: the source is not found, is not a module, or there are no example inputs.
    """
    check_source(source, inputs, task)
    require_torch("tracing a model")
    if Path(source).suffix == ONNX:
        model = load_onnx(source, sizes)
        return model, model.examples, model.name
    given = tuple(parse_example(text) for text in inputs)
    if Path(source).is_dir():
        assert task is not None
        module, examples = _load_hugging_face(Path(source), task, tokens)
        return module, given or examples, Path(source).resolve().name
    with _imports_from(_folder_of(source)):
        result = _find_factory(source)()
    module, examples = result if isinstance(result, tuple) else (result, ())
    from torch import nn

    if not isinstance(module, nn.Module):
        raise InputError(f"'{source}' returned a {type(module).__name__}, not a torch.nn.Module")
    if not (given or examples):
        raise InputError(
            f"'{source}' has no example inputs; describe each one with --input, as in float32[1,3,224,224]"
        )
    return module, given or tuple(examples), type(module).__name__


def check_source(source: str, inputs: Sequence[str] = (), task: str | None = None) -> None:
    """Check the arguments of `load_model`, as far as is possible without importing torch or the model's own code.

    Raises:
        InputError: as `load_model` does.
    """
    for text in inputs:
        _parse_spec(text)
    folder = Path(source)
    if folder.suffix == ONNX:
        _check_is_file(folder)
        if task is not None or inputs:
            raise InputError("an ONNX model has its own inputs and task; leave out --input and --task")
        return
    if not folder.is_dir():
        if task is not None:
            raise InputError(f"--task is for a Hugging Face folder, and '{source}' is not a folder")
        where, _ = _split_source(source)
        if where.endswith(".py"):
            _check_is_file(Path(where))
        else:
            package = where.partition(".")[0]
            with _imports_from(Path.cwd()):
                if not package or importlib.util.find_spec(package) is None:
                    raise InputError(f"cannot import '{where}': no module named '{package}'")
        return
    if task is None:
        raise InputError(f"a Hugging Face model such as '{source}' needs --task: one of {', '.join(TASKS)}")
    if task not in TASKS:
        raise InputError(f"unknown task '{task}'; choose one of {', '.join(TASKS)}")
    if not (folder / "config.json").is_file():
        raise InputError(f"'{source}' is not a Hugging Face model folder: it has no config.json")
    if importlib.util.find_spec("transformers") is None:
        raise InputError(f"Hugging Face models need the package transformers: {install_command('llm')}")


def parse_example(text: str) -> torch.Tensor:
    """Create a meta tensor from a text such as `float32[1,3,224,224]`. Raises `InputError` for any other text."""
    import torch

    dtype, shape = _parse_spec(text)
    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")


def _parse_spec(text: str) -> tuple[str, list[int]]:
    match = _SPEC.fullmatch(text.strip())
    if match is None:
        raise InputError(f"cannot parse input '{text}': write its dtype and shape, as in float32[1,3,224,224]")
    if match["dtype"] not in KNOWN_DTYPES:
        raise InputError(f"unknown dtype in input '{text}'; choose one of {', '.join(sorted(KNOWN_DTYPES))}")
    return match["dtype"], [int(size) for size in match["shape"].split(",") if size.strip()]


def _folder_of(source: str) -> Path:
    """Return the folder from which a factory can import modules: that of its .py file, else the current folder."""
    where = source.rpartition(":")[0]
    return Path(where).resolve().parent if where.endswith(".py") else Path.cwd()


@contextmanager
def _imports_from(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        with suppress(ValueError):  # the imported code may have changed the list
            sys.path.remove(str(folder))


def _split_source(source: str) -> tuple[str, str]:
    """Split `package.module:factory` or `file.py:factory` at the last colon. Raises `InputError` for any other text."""
    where, _, attribute = source.rpartition(":")
    if not where or not attribute:
        raise InputError(f"'{source}' is neither a folder nor of the form package.module:factory")
    return where, attribute


def _find_factory(source: str) -> Callable[[], Any]:
    where, attribute = _split_source(source)
    try:
        module = _import_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    except ModuleNotFoundError as error:
        raise InputError(f"cannot import '{where}': no module named '{error.name}'") from error
    factory = getattr(module, attribute, None)
    if not callable(factory):
        raise InputError(f"'{where}' has no function or class '{attribute}'")
    return factory  # type: ignore[no-any-return]


def _check_is_file(path: Path) -> None:
    if not path.is_file():
        raise InputError(f"no such file: '{path}'")


def _import_file(path: Path) -> Any:
    _check_is_file(path)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _load_hugging_face(folder: Path, task: str, tokens: int) -> tuple[nn.Module, tuple[Any, ...]]:
    import torch
    import transformers

    auto, field = TASKS[task]
    try:
        kind = getattr(transformers, auto)
        model = kind.from_pretrained(folder, dtype="auto", local_files_only=True, trust_remote_code=False).eval()
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"transformers cannot load '{folder}' for {task}: {str(error).splitlines()[0]}") from error
    wrapped = with_one_output(model, field)
    if task == "image-classification":
        size, channels = getattr(model.config, "image_size", 224), getattr(model.config, "num_channels", 3)
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        return wrapped, (torch.empty(1, channels, height, width, dtype=model.dtype, device="meta"),)
    return wrapped, (torch.zeros(1, tokens, dtype=torch.long, device="meta"),)


def with_one_output(model: nn.Module, field: str) -> nn.Module:
    """Patch a model's `forward` so that it takes only the main input and returns one field of its output.

    Returns the model. Unlike a wrapper module, this keeps the names of the parameters.
    """
    import types

    keyword = "pixel_values" if getattr(model, "main_input_name", "") == "pixel_values" else "input_ids"
    original = type(model).forward

    def forward(self: Any, value: torch.Tensor) -> Any:
        return getattr(original(self, **{keyword: value, **extra}), field)

    extra = {"use_cache": False} if hasattr(getattr(model, "config", None), "use_cache") else {}
    model.forward = types.MethodType(forward, model)
    return model
