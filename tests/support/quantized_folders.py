"""Hugging Face folders of random language models in each quantized format, written as their libraries write them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
Compress = Callable[[torch.Tensor, torch.Generator], Tensors]


def quantize_folder(folder: Path, config: Mapping[str, Any], compress: Compress, skip: tuple[str, ...] = ()) -> Tensors:
    """Rewrite a dense folder with the weights of its linear layers compressed.

    Args:
        config: The folder's `quantization_config`.
        compress: A weight [n, k] → its tensors by their names within the module.
        skip: Modules to leave dense, "lm_head" besides.

    Returns:
        The tensors of the folder as they are stored now.
    """
    generator = torch.Generator().manual_seed(int(torch.randint(2**31, ()).item()))
    stored: Tensors = {}
    for key, value in load_file(folder / "model.safetensors").items():
        module, _, name = key.rpartition(".")
        if value.ndim == 2 and "_proj" in module and module not in skip:
            made = compress(value.float(), generator)
            stored.update({f"{module}.{part}": tensor.contiguous() for part, tensor in made.items()})
        else:
            stored[key] = value
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    write_config(folder, config)
    return stored


def write_config(folder: Path, quantization: Mapping[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": dict(quantization)}))


def _pack(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Integers [n, m] into int32 words [n, m · bits / 32], the first in the low bits."""
    fields = values.long().reshape(len(values), -1, 32 // bits) << torch.arange(0, 32, bits)
    words = fields.sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def _codes(weight: torch.Tensor, bits: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(2**bits, weight.shape, generator=generator)


def gptq(bits: int, group: int, symmetric: bool, version: int = 1, dtype: torch.dtype = torch.float16) -> Compress:
    """Pack as AutoGPTQ's `QuantLinear.pack` (nn_modules/qlinear/qlinear_cuda.py), with random codes and zeros."""

    def compress(weight: torch.Tensor, generator: torch.Generator) -> Tensors:
        n, k = weight.shape
        groups = k // group if group > 0 else 1
        codes = _codes(weight, bits, generator)
        zeros = torch.randint(1, 2**bits, (groups, n), generator=generator)
        zeros = torch.full_like(zeros, 2 ** (bits - 1)) if symmetric else zeros
        return {
            "qweight": _pack(codes, bits).T,
            "qzeros": _pack(zeros - int(version == 1), bits),
            "scales": torch.rand(groups, n, generator=generator).add(0.1).to(dtype) / 2**bits,
            "g_idx": (torch.arange(k) // (group if group > 0 else k)).to(torch.int32),
        }

    return compress


def dequantized_gptq(parts: Tensors, bits: int, version: int) -> torch.Tensor:
    """The weight [n, k] as `QuantLinear.forward` of AutoGPTQ computes it (same file), transposed."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    mask = 2**bits - 1
    zeros = ((parts["qzeros"][:, :, None] >> shifts) & mask).reshape(parts["scales"].shape) + int(version == 1)
    codes = ((parts["qweight"][:, None, :] >> shifts[:, None]) & mask).reshape(-1, parts["qweight"].shape[1])
    group = parts["g_idx"].long()
    return (parts["scales"][group] * (codes - zeros[group])).T


def awq(group: int) -> Compress:
    """AutoAWQ's `WQLinear_GEMM.from_linear` (awq/modules/linear/gemm.py) with random codes and zero points."""
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def pack(values: torch.Tensor) -> torch.Tensor:
        return _pack(values.reshape(len(values), -1, 8)[..., order].reshape(len(values), -1), 4)

    def compress(weight: torch.Tensor, generator: torch.Generator) -> Tensors:
        n, k = weight.shape
        groups = k // group
        return {
            "qweight": pack(_codes(weight, 4, generator).T),
            "qzeros": pack(torch.randint(16, (groups, n), generator=generator)),
            "scales": (torch.rand(groups, n, generator=generator) + 0.1).half() / 16,
        }

    return compress


def dequantized_awq(parts: Tensors, group: int) -> torch.Tensor:
    """The weight [n, k] as `dequantize_gemm` of AutoAWQ computes it (awq/utils/packing_utils.py), transposed."""
    reverse = [0, 4, 1, 5, 2, 6, 3, 7]

    def unpack(words: torch.Tensor) -> torch.Tensor:
        values = (words[:, :, None] >> torch.arange(0, 32, 4, dtype=torch.int32)).to(torch.int8)
        return values[:, :, reverse].reshape(len(words), -1) & 15

    codes, zeros = unpack(parts["qweight"]), unpack(parts["qzeros"])
    scales = parts["scales"].repeat_interleave(group, dim=0)
    return ((codes - zeros.repeat_interleave(group, dim=0)) * scales).T


def block_fp8(block: tuple[int, int]) -> Compress:
    """DeepSeek's format: `weight` in float8 and `weight_scale_inv` per block, the last ones of which may be cut off."""

    def compress(weight: torch.Tensor, generator: torch.Generator) -> Tensors:
        rows, columns = (-(-size // side) for size, side in zip(weight.shape, block, strict=True))
        scales = torch.rand(rows, columns, generator=generator) + 0.1
        return {"weight": (weight * 20).to(torch.float8_e4m3fn), "weight_scale_inv": scales}

    return compress


def dequantized_fp8(parts: Tensors, block: tuple[int, int]) -> torch.Tensor:
    """The weight as `weight_dequant` of DeepSeek-V3 computes it (inference/kernel.py), in float32."""
    weight, scales = parts["weight"].float(), parts["weight_scale_inv"]
    wide = scales.repeat_interleave(block[0], dim=0).repeat_interleave(block[1], dim=1)
    return weight * wide[: weight.shape[0], : weight.shape[1]]
