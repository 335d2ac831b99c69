"""Random LoRA adapters of PEFT as files, and the merged models by PEFT's own arithmetic."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def save_adapter(
    folder: Path, base: Path, targets: Sequence[str] = LINEARS, rank: int = 4, seed: int = 0, **fields: Any
) -> Path:
    """An adapter for a model's folder that changes the layers with these last names.

    Args:
        fields: Further fields of the config, which may give some layers other ranks (`rank_pattern`).
    """
    folder.mkdir()
    random, tensors = np.random.default_rng(seed), {}
    for name, weight in sorted(load_file(base / "model.safetensors").items()):
        layer = name.removesuffix(".weight")
        if layer.split(".")[-1] in targets:
            own = [
                r for pattern, r in fields.get("rank_pattern", {}).items() if re.fullmatch(rf"(.*\.)?{pattern}", layer)
            ]
            r, (outputs, inputs) = (own or [rank])[0], weight.shape
            a, b = random.standard_normal((r, inputs)), random.standard_normal((outputs, r)) / np.sqrt(r)
            tensors[f"base_model.model.{layer}.lora_A.weight"] = (a / 8).astype(np.float32)
            tensors[f"base_model.model.{layer}.lora_B.weight"] = b.astype(np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 8,
        "target_modules": list(targets),
        "bias": "none",
        **fields,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def merged_weights(base: Path, adapter: Path) -> dict[str, np.ndarray]:
    """W + scaling · B · A in float64, for all weights of the base."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    weights, added = load_file(base / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    merged = {}
    for name, weight in weights.items():
        layer = name.removesuffix(".weight")
        a = added.get(f"base_model.model.{layer}.lora_A.weight")
        if a is None:
            merged[name] = weight
            continue
        b = added[f"base_model.model.{layer}.lora_B.weight"].astype(np.float64)
        alphas = config.get("alpha_pattern", {}).items()
        alpha = next((x for pattern, x in alphas if re.fullmatch(rf"(.*\.)?{pattern}", layer)), config["lora_alpha"])
        scaling = alpha / (len(a) ** 0.5 if config.get("use_rslora") else len(a))
        merged[name] = (weight + scaling * (b @ a)).astype(np.float32)
    return merged


def save_merged(folder: Path, base: Path, adapter: Path) -> Path:
    """The model of `merged_weights` as a folder."""
    shutil.copytree(base, folder)
    save_file(merged_weights(base, adapter), folder / "model.safetensors", {"format": "pt"})
    return folder
