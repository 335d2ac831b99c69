"""Writing a quantized language model as a Hugging Face folder in the compressed-tensors format."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from npu_compiler.errors import InputError, WeightError
from npu_compiler.files import working_folder
from npu_compiler.graph.quantization import QuantizedArray, QuantizedFormat
from npu_runtime.packing import to_numpy
from npu_runtime.torch_arrays import numpy_to_tensor
from npu_sim.checkpoints.bits import COMPRESSED_CODES, SIGN
from npu_sim.llm.checkpoint import Checkpoint
from npu_sim.llm.graph import meta_model
from npu_sim.llm.tokenizer import FILES

_COPIED = (*(name for name in FILES if name != "config.json"), "generation_config.json")


def check_output(folder: Path, force: bool) -> None:
    """Check that a folder can be written, and that it is empty unless `force` is set.

    Raises:
        InputError: it is a file, its parent is not a folder that can be written, or it is not empty.
    """
    if folder.exists() and not folder.is_dir():
        raise InputError(f"cannot write '{folder}': it is a file")
    if not folder.parent.is_dir() or not os.access(folder.parent, os.W_OK | os.X_OK):
        raise InputError(f"cannot write '{folder}': '{folder.parent}' is not a folder that can be written to")
    if folder.is_dir() and any(folder.iterdir()) and not force:
        raise InputError(f"'{folder}' is not empty; give another folder, or --force to replace it")


@contextmanager
def replaced_folder(folder: Path) -> Iterator[Path]:
    """Yield a new folder, which replaces `folder` at the end of the context unless there is an error.

    Raises `OSError`.
    """
    with working_folder(folder.resolve().parent) as work:
        result = work / "model"
        result.mkdir()
        yield result
        if folder.exists():
            folder.rename(work / "before")
        result.rename(folder)


def write_model(
    folder: Path,
    checkpoint: Checkpoint,
    source: Path,
    quantized: Mapping[str, QuantizedArray],
    tuned: Mapping[str, torch.Tensor],
    linears: Sequence[str],
    dtype: str,
) -> int:
    """Write config, weights and tokenizer of a quantized model.

    Args:
        folder: An empty folder.
        checkpoint: The model, with weights that are not quantized.
        source: The folder that the model comes from, whose tokenizer files are copied; or a GGUF file.
        quantized: Parameter name → quantized weight, all in the same format.
        tuned: Parameter name → tensor that replaces the checkpoint's; empty if the model was not tuned.
        linears: The names of all linear layers' weights.
        dtype: Dtype of all other tensors: `float16`, `bfloat16` or `float32`.

    Returns:
        The number of bytes of the weights, scales and zero points included.
    """
    from huggingface_hub import save_torch_state_dict

    tensors: dict[str, torch.Tensor] = {}
    for name in checkpoint.state:
        if name in quantized:
            module = name.removesuffix(".weight")
            tensors.update({f"{module}.{part}": x for part, x in stored_parts(quantized[name]).items()})
        else:
            tensor = tuned[name] if name in tuned else numpy_to_tensor(to_numpy(checkpoint.state[name]))
            tensors[name] = _narrowed(name, tensor, dtype)
    save_torch_state_dict(tensors, folder)
    kept = [name.removesuffix(".weight") for name in linears if name not in quantized]
    _write_config(folder, checkpoint, quantization_config(_format(quantized), ["lm_head", *kept]), dtype)
    if source.is_file():
        checkpoint.tokenizer.whole.save_pretrained(folder)
        text = json.dumps({"eos_token_id": sorted(checkpoint.eos_ids)}, indent=2)
        (folder / "generation_config.json").write_text(text, encoding="utf-8")
    else:
        for name in _COPIED:
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
    return sum(tensor.nbytes for name, tensor in tensors.items() if not name.endswith(".weight_shape"))


def _narrowed(name: str, tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    narrow = tensor.to(getattr(torch, dtype)).contiguous()
    if not bool(narrow.isfinite().all()):
        raise WeightError(f"'{name}' holds values that are not finite, or too large for {dtype}")
    return narrow


def _format(quantized: Mapping[str, QuantizedArray]) -> QuantizedFormat:
    formats = {array.format for array in quantized.values()}
    if len(formats) != 1:
        raise InputError(f"{len(formats)} formats in one model")
    return formats.pop()


def _write_config(folder: Path, checkpoint: Checkpoint, quantization: Mapping[str, Any], dtype: str) -> None:
    model = meta_model(checkpoint)
    model.config.save_pretrained(folder)
    path = folder / "config.json"
    fields = json.loads(path.read_text("utf-8"))
    fields.update(architectures=[type(model).__name__], dtype=dtype, quantization_config=dict(quantization))
    path.write_text(json.dumps(fields, indent=2), encoding="utf-8")


def stored_parts(weight: QuantizedArray) -> dict[str, torch.Tensor]:
    """Return a quantized weight's tensors by the names that compressed-tensors uses within a module."""
    format, (n, k) = weight.format, weight.shape
    scales = numpy_to_tensor(weight.scales)
    if format.code_format.is_float:
        codes = torch.from_numpy(weight.codes).view(getattr(torch, format.code_format.dtype.name))
        return {"weight": codes, "weight_scale": scales}
    assert format.codes in COMPRESSED_CODES, "QuantizeOptions.check refuses others"
    unsigned = weight.codes if format.bits < 8 else weight.codes ^ SIGN
    row = -(-unsigned.shape[1] // 4) * 4
    words = np.zeros((n, row), np.uint8)
    words[:, : unsigned.shape[1]] = unsigned
    parts = {
        "weight_packed": torch.from_numpy(words.view(np.int32)),
        "weight_scale": scales,
        "weight_shape": torch.tensor([n, k]),
    }
    if weight.offsets is not None:
        zeros = weight.offsets if format.bits < 8 else weight.offsets ^ SIGN
        parts["weight_zero_point"] = torch.from_numpy(_packed_columns(zeros, format.bits))
    return parts


def _packed_columns(zeros: np.ndarray, bits: int) -> np.ndarray:
    """Pack unsigned integers [n, groups] into int32 words, `32 / bits` rows in each, the first in the low bits."""
    count = 32 // bits
    padded = np.zeros((-(-len(zeros) // count) * count, zeros.shape[1]), np.uint32)
    padded[: len(zeros)] = zeros
    fields = padded.reshape(-1, count, zeros.shape[1]) << (np.arange(count, dtype=np.uint32) * bits)[:, None]
    words: np.ndarray = np.bitwise_or.reduce(fields, axis=1)
    return words.view(np.int32)


def quantization_config(format: QuantizedFormat, ignore: Sequence[str]) -> dict[str, Any]:
    """Return the `quantization_config` of a model's config for linear layers in a format.

    Args:
        ignore: Names of the modules that are not quantized.
    """
    weights: dict[str, Any] = {
        "num_bits": format.bits,
        "type": "float" if format.code_format.is_float else "int",
        "symmetric": format.offsets == "none",
        "strategy": "group" if format.group else "channel",
        "group_size": format.group or None,
        "dynamic": False,
    }
    kind = "naive-quantized" if format.code_format.is_float else "pack-quantized"
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": kind,
        "config_groups": {"group_0": {**group, "format": kind}},
        "ignore": list(ignore),
    }
