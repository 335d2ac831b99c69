"""LoRA adapters in PEFT's folders: merged into a checkpoint's weights, or kept apart for each sequence to choose.

An adapter adds `scaling · B · A` to the weight [out, in] of some linear layers, A [rank, in] and B [out, rank].

If an adapter is merged, programs load the sum as the weight. Several adapters that are served at once stay apart: their
matrices for a layer are stacked, A [adapters, rank, in] and B [adapters, out, rank], padded with zeros to the largest
rank, and the programs of batches add to each row's output that of its sequence's adapter (`adapter_rows`).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from npu_compiler.errors import InputError, WeightError
from npu_runtime.packing import to_numpy

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
LARGEST_RANK = 256
STACKED_A, STACKED_B = "lora_a", "lora_b"  # parameters of a linear layer in programs of batches
_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_(A|B)\.weight")
_RANK_MULTIPLE = 16  # of a padded rank: whole vectors in every kernel
_LARGEST_CONFIG = 2**20  # bytes
_MATCH_SECONDS = 1.0  # for one pattern on one name
# Fields that say how the adapter was trained or saved, or that are looked at here.
_KNOWN = {
    *("alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "ensure_weight_tying"),
    *("eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern"),
    *("layers_to_transform", "lora_alpha", "lora_dropout", "loftq_config", "megatron_config", "megatron_core"),
    *("peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern", "revision", "target_modules"),
    *("task_type", "use_rslora"),
}
_UNSUPPORTED = {
    "use_dora": "scales the rows of weights (DoRA)",
    "modules_to_save": "replaces whole modules of the base",
    "trainable_token_indices": "replaces rows of the embedding",
    "layer_replication": "repeats layers of the base",
    "target_parameters": "changes parameters of other modules than linear layers",
    "lora_bias": "has biases",
}
_INITIAL = (None, True, False, "gaussian", "eva", "orthogonal")  # the others change the base's weights too


@dataclass(frozen=True)
class Linear:
    """A linear layer of a module.

    Attributes:
        inputs, outputs: Input and output size.
        transposed: Whether its weight is [in, out], as in GPT-2.
        is_head: Whether its outputs are the logits.
        is_shared: Whether its weight is tied to that of another module.
    """

    inputs: int
    outputs: int
    transposed: bool = False
    is_head: bool = False
    is_shared: bool = False


@dataclass(frozen=True)
class LowRank:
    """Sizes of an adapter's addition to a linear layer: scaling · B [outputs, rank] · A [rank, inputs]."""

    rank: int
    scaling: float
    inputs: int
    outputs: int


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter in a folder.

    Attributes:
        layers: Path of each linear layer of the base model that it changes → its addition.
        fields: Fields of its adapter_config.json.
        tensors: The file's tensors by their names, read when they are looked up.
    """

    folder: Path
    layers: Mapping[str, LowRank]
    fields: Mapping[str, Any]
    tensors: Mapping[str, Any]

    def matrices(self, layer: str) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """A layer's A [rank, in], and scaling · B [out, rank], in float32."""
        a, b = (np.asarray(to_numpy(self.tensors[name]), np.float32) for name in _tensor_names(layer))
        return a, b * np.float32(self.layers[layer].scaling)


def read_adapter(folder: str | os.PathLike[str]) -> Adapter:
    """Open an adapter's folder: its config, and the header of its weights.

    Raises:
        InputError: the folder is incomplete, contradicts itself, or is not a LoRA adapter that is supported.
    """
    from npu_runtime.weight_loader import MappedCheckpoint

    path = Path(folder)
    fields = read_adapter_config(path)
    if not (path / WEIGHTS).is_file():
        older = "; convert its adapter_model.bin with PEFT's save_pretrained()" if any(path.glob("*.bin")) else ""
        raise InputError(f"the adapter {path} has no {WEIGHTS}{older}")
    with _naming(path):
        try:
            tensors = MappedCheckpoint(path / WEIGHTS)
        except WeightError as error:
            raise InputError(f"cannot be used: {error}") from error
        shapes = _shapes({name: tensors.shape(name) for name in tensors})
        return Adapter(
            path, {layer: _low_rank(layer, fields, *pair) for layer, pair in shapes.items()}, fields, tensors
        )


@contextlib.contextmanager
def _naming(folder: Path) -> Iterator[None]:
    """Put the adapter's folder at the start of the message of any `InputError` raised inside."""
    try:
        yield
    except InputError as error:
        raise InputError(f"the adapter {folder} {error}") from None


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """The fields of an adapter's config. Raises InputError if it is not one, or is of an unsupported kind."""
    path = folder / CONFIG
    if not path.is_file():
        raise InputError(f"{folder} has no {CONFIG}, so it is not the folder of a PEFT adapter")
    try:
        if path.stat().st_size > _LARGEST_CONFIG:
            raise ValueError(f"it has {path.stat().st_size} bytes, which no config has")
        fields = json.loads(path.read_text("utf-8"))
        if not isinstance(fields, dict):
            raise ValueError("it holds no JSON object")
    except (ValueError, RecursionError) as error:  # also what is not UTF-8
        raise InputError(f"{path} cannot be used: {error}") from error
    with _naming(folder):
        _check_fields(fields)
    return fields


def _check_fields(fields: Mapping[str, Any]) -> None:
    """Refuse a config of an unsupported kind of adapter, or with values that no adapter has. Raises InputError."""
    if fields.get("peft_type") != "LORA":
        raise InputError(f"is of the kind {fields.get('peft_type')!r:.40}; only LORA is supported")
    for name, meaning in _UNSUPPORTED.items():
        if fields.get(name):
            raise InputError(f"{meaning}, which is not supported: its config says {fields[name]!r:.80} for '{name}'")
    for name in fields.keys() - _KNOWN:
        if fields[name] not in (None, False, [], {}):
            raise InputError(f"asks for {name!r:.40} = {fields[name]!r:.40}, which is not supported")
    if (bias := fields.get("bias", "none")) != "none":
        raise InputError(f"changes biases (bias = {bias!r:.40}), which is not supported")
    if (initial := fields.get("init_lora_weights", True)) not in _INITIAL:
        raise InputError(
            f"was begun by {initial!r:.40}, which changes the base's weights too; save it with PEFT's "
            "path_initial_model_for_weight_conversion"
        )
    for name, kinds in (("rank_pattern", dict), ("alpha_pattern", dict), ("target_modules", (str, list))):
        value = fields.get(name)
        if value is not None and not isinstance(value, kinds):
            raise InputError(f"has a config that says {value!r:.40} for '{name}'")
    if not fields.get("target_modules"):
        raise InputError("names no target_modules in its config")


def _shapes(tensors: Mapping[str, tuple[int, ...]]) -> dict[str, list[tuple[int, ...]]]:
    """Layer path → the shapes of its A and B, from the shapes of the file's tensors."""
    shapes: dict[str, list[tuple[int, ...]]] = {}
    for name, shape in tensors.items():
        match = _TENSOR.fullmatch(name)
        if match is None:
            what = "of an embedding" if "lora_embedding" in name else "which is neither A nor B of a linear layer"
            raise InputError(f"holds '{name:.120}', {what}, which is not supported")
        if len(shape) != 2:
            raise InputError(f"holds '{name:.120}' of the shape {list(shape)}, which is not that of a matrix")
        shapes[match[1]] = [tensors[each] for each in _tensor_names(match[1]) if each in tensors]
        if len(shapes[match[1]]) != 2:
            missing = next(each for each in _tensor_names(match[1]) if each not in tensors)
            raise InputError(f"lacks '{missing:.120}'")
    if not shapes:
        raise InputError("holds no tensors")
    return shapes


def _tensor_names(layer: str) -> tuple[str, str]:
    return f"base_model.model.{layer}.lora_A.weight", f"base_model.model.{layer}.lora_B.weight"


def _low_rank(layer: str, fields: Mapping[str, Any], a: tuple[int, ...], b: tuple[int, ...]) -> LowRank:
    """The addition to a layer whose A and B have the shapes `a` and `b`, scaled as the config says."""
    rank, alpha = (
        _by_pattern(fields, "rank_pattern", layer, "r"),
        _by_pattern(fields, "alpha_pattern", layer, "lora_alpha"),
    )
    if type(rank) is not int or not 1 <= rank <= LARGEST_RANK:
        raise InputError(f"has the rank {rank!r:.40} for '{layer:.120}'; supported are 1 to {LARGEST_RANK}")
    if type(alpha) not in (int, float) or not math.isfinite(alpha):
        raise InputError(f"has the lora_alpha {alpha!r:.40} for '{layer:.120}', which is not a number")
    if a[0] != rank or b[1] != rank:
        raise InputError(
            f"has the rank {rank} for '{layer:.120}' by its config, but matrices of the shapes {list(a)} and {list(b)}"
        )
    scaling = alpha / (math.sqrt(rank) if fields.get("use_rslora") else rank)
    return LowRank(rank, scaling, inputs=a[1], outputs=b[0])


def _by_pattern(fields: Mapping[str, Any], patterns: str, layer: str, default: str) -> Any:
    """The value of the first of a config's patterns that matches the end of a layer's path, else the default."""
    for pattern, value in (fields.get(patterns) or {}).items():
        if _matches(rf"(.*\.)?({pattern})", layer):
            return value
    return fields.get(default, 8)  # PEFT's own default


def _matches(pattern: str, name: str) -> bool:
    """Whether a config's regular expression matches a whole name. Raises InputError if that takes too long."""
    import regex

    try:
        return regex.fullmatch(pattern, name, timeout=_MATCH_SECONDS) is not None
    except (regex.error, TimeoutError, RecursionError) as error:
        raise InputError(f"has a config whose pattern {pattern!r:.80} cannot be used: {error}") from None


def check_adapter(adapter: Adapter, linears: Mapping[str, Linear], base: str) -> None:
    """Check that an adapter fits a base model and has all layers that its config names.

    Args:
        linears: Path → linear layer of the base model.
        base: Name of the base model, for messages.

    Raises:
        InputError: the base model lacks a layer of the adapter, or has it in another shape; or the adapter lacks a
            layer that its config names.
    """
    with _naming(adapter.folder):
        for layer, added in adapter.layers.items():
            linear = linears.get(layer)
            if linear is None:
                raise InputError(f"is for another base: {base} has no linear layer '{layer:.120}'")
            if linear.is_shared:
                raise InputError(
                    f"changes '{layer:.120}', whose weight {base} has elsewhere too; that is not supported"
                )
            if (added.inputs, added.outputs) != (linear.inputs, linear.outputs):
                raise InputError(
                    f"is for another base: its '{layer:.120}' has {added.inputs} inputs and {added.outputs} outputs, "
                    f"that of {base} has {linear.inputs} and {linear.outputs}"
                )
        named = [layer for layer, linear in linears.items() if _is_target(layer, linear, adapter.fields)]
        if missing := [layer for layer in named if layer not in adapter.layers]:
            raise InputError(f"lacks '{_tensor_names(missing[0])[0]:.120}'{_and_others(missing)}")
        if extra := [layer for layer in adapter.layers if layer not in named]:
            raise InputError(f"holds '{_tensor_names(extra[0])[0]:.120}', which its target_modules do not name")


def _and_others(names: list[str]) -> str:
    return f" and those of {len(names) - 1} more layers" if len(names) > 1 else ""


def _is_target(layer: str, linear: Linear, fields: Mapping[str, Any]) -> bool:
    """Whether an adapter's config names a layer to change, by PEFT's rules."""
    targets, excluded = fields["target_modules"], fields.get("exclude_modules")
    if excluded and _names(excluded, layer):
        return False
    if targets == "all-linear":
        return not linear.is_head
    if isinstance(targets, str) or layer in targets:
        return _names(targets, layer)
    numbers, patterns = fields.get("layers_to_transform"), fields.get("layers_pattern")
    if not _names(targets, layer) or numbers is None:
        return _names(targets, layer)
    wanted = [numbers] if isinstance(numbers, int) else numbers
    containers = [r"[^.]+"] if not patterns else [patterns] if isinstance(patterns, str) else patterns
    return any(_matches(rf".*\.{container}\.{number}\..*", layer) for container in containers for number in wanted)


def _names(targets: str | list[str], layer: str) -> bool:
    """Whether `targets`, a regular expression or a list of path endings, matches a layer's path."""
    if isinstance(targets, str):
        return _matches(targets, layer)
    return any(layer == target or layer.endswith(f".{target}") for target in targets)


def adapter_ranks(adapters: Iterable[Adapter]) -> dict[str, int]:
    """Path of each layer that an adapter changes → the largest rank of any adapter there, rounded up."""
    ranks: dict[str, int] = {}
    for adapter in adapters:
        for layer, added in adapter.layers.items():
            ranks[layer] = max(ranks.get(layer, 0), -(-added.rank // _RANK_MULTIPLE) * _RANK_MULTIPLE)
    return dict(sorted(ranks.items()))
