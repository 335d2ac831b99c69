"""Opening Hugging Face model folders: config.json, *.safetensors and a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from npu_compiler.errors import InputError, WeightError
from npu_compiler.graph.dtypes import FLOAT_DTYPES
from npu_compiler.graph.quantization import QuantizedArray
from npu_runtime.cache_folder import source_digest
from npu_sim.cache import cached_facts
from npu_sim.checkpoints import quantized_tensors
from npu_sim.llm.checkpoint import Checkpoint, StoredConfig, as_input_error, stored_fields
from npu_sim.llm.families import HEADS, TABLES, check_fields, check_tensors, read_config, refuse_kind
from npu_sim.llm.generation_config import read_generation
from npu_sim.llm.packages import require_packages
from npu_sim.llm.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from npu_runtime.weight_loader import MappedCheckpoint


def load_folder(folder: Path, name: str, dtype: str | None) -> Checkpoint:
    """Open a model folder.

    Args:
        name: Used in messages and file names.
        dtype: The compute dtype. None: the checkpoint's own if it has 16 bits, else float16.

    Raises:
        InputError: the folder is incomplete, cannot be read, holds an unsupported model, or is quantized in an
            unsupported way.
        WeightError: the tensors do not fit the config's quantization.
    """
    config, generation = _config(folder, name)
    tensors = _mapped_tensors(folder)
    state: Mapping[str, Any] = tensors
    formats = None
    if config.quantization_config:
        try:
            quantized = quantized_tensors(tensors, config.quantization_config)
        except (InputError, WeightError) as error:
            raise type(error)(f"cannot use the quantized model {name}: {error}") from error
        state, formats = quantized, quantized.formats
    try:
        check_tensors(config.to_dict(), {key: tensors.shape(key) for key in tensors})
    except InputError as error:
        raise InputError(f"cannot use {name}: {error}") from None
    if config.to_dict().get("tie_word_embeddings") and _has_another_head(state):
        config = config.changed(tie_word_embeddings=False)
    return Checkpoint(
        name=name,
        config=config,
        state=state,
        dtype=dtype or _compute_dtype(config.dtype or _first_dtype(tensors)),
        load_tokenizer=lambda: load_tokenizer(folder),
        quantization=formats,
        **generation,
    )


def load_config(folder: Path, name: str, dtype: str | None) -> Checkpoint:
    """A model folder's checkpoint without its weights. Arguments as in `load_folder`.

    Raises:
        InputError: there is no config, it cannot be read, or only the weights would tell how they are quantized.
    """
    config, generation = _config(folder, name)
    if config.quantization_config:
        raise InputError(f"{folder} is quantized, which cannot be read without its *.safetensors files")
    return Checkpoint(
        name=name,
        config=config,
        state={},
        dtype=dtype or _compute_dtype(config.dtype),
        load_tokenizer=lambda: load_tokenizer(folder),
        **generation,
    )


def _config(folder: Path, name: str) -> tuple[StoredConfig, dict[str, Any]]:
    """A folder's config, and the fields of `Checkpoint` that its generation config sets."""
    fields = read_config(folder)
    require_packages(f"opening {name}", "transformers", "tokenizers", "jinja2")
    key = _facts_key(folder, ("config.json", "generation_config.json"))
    facts = cached_facts("config", key, lambda: _find_facts(folder), ("transformers",))
    if not facts["is_causal"]:
        try:
            refuse_kind(fields)
        except InputError as error:
            raise InputError(f"{folder} {error}") from None
    try:
        check_fields(facts["config"])
    except InputError as error:
        raise InputError(f"cannot use {name}: {error}") from None
    generation = facts["generation"]
    settings = {
        "eos_ids": frozenset(generation["eos_ids"]),
        "repetition_penalty": generation["repetition_penalty"],
        "sampling": generation["sampling"],
        "unsupported": tuple(generation["unsupported"]),
    }
    return StoredConfig(facts["config"], lambda: _read_config(folder)), settings


def _has_another_head(state: Mapping[str, Any]) -> bool:
    """Whether the file has output embeddings that differ from its input embeddings, so that they must not be tied."""
    tables, heads = ([name for name in state if name.endswith(names)] for names in (TABLES, HEADS))
    if not tables or not heads:
        return False
    table, head = state[tables[0]], state[heads[0]]
    if isinstance(table, QuantizedArray) or isinstance(head, QuantizedArray):
        return True
    if table.shape != head.shape or table.dtype != head.dtype:
        return True
    return not np.array_equal(table.view(np.uint8), head.view(np.uint8))


def _compute_dtype(stored: object) -> str:
    """The dtype of a checkpoint if it has 16 bits, else float16."""
    name = str(stored).removeprefix("torch.")
    return name if name in ("bfloat16", "float16") else "float16"


def _first_dtype(tensors: Mapping[str, Any]) -> str:
    """The dtype of the first floating-point tensor."""
    return next((x.dtype.name for x in tensors.values() if x.dtype.name in FLOAT_DTYPES), "float16")


def _facts_key(folder: Path, files: Sequence[str]) -> list[Any]:
    """A cache key that changes whenever transformers might read a folder's files differently."""
    texts = [path.read_text("utf-8", "replace") if path.is_file() else None for path in map(folder.joinpath, files)]
    return [texts, source_digest("npu_sim.llm")]


def _find_facts(folder: Path) -> dict[str, Any]:
    """Return the config's fields and the generation settings that transformers reads from a folder, as JSON data."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config = _read_config(folder)
    return {
        "is_causal": config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "config": stored_fields(config),
        "generation": read_generation(folder, config),
    }


def _read_config(folder: Path) -> Any:
    from transformers import AutoConfig

    with as_input_error(f"{folder / 'config.json'} cannot be used"):
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def _mapped_tensors(folder: Path) -> MappedCheckpoint:
    """The safetensors files of a folder, memory-mapped: model.safetensors alone where there is one, as in transformers.

    Rotary frequencies, which old checkpoints include, are left out: the model computes them.
    """
    from npu_runtime.weight_loader import MappedCheckpoint

    if not any(folder.glob("*.safetensors")):
        raise InputError(f"{folder} holds no *.safetensors files; convert older formats with save_pretrained()")
    with as_input_error(f"a file of {folder} is not a readable safetensors file"):
        whole = folder / "model.safetensors"
        tensors = MappedCheckpoint(whole if whole.is_file() else folder)
        return tensors.without(lambda key: key.endswith("rotary_emb.inv_freq"))
