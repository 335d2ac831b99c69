"""Early refusals: of what is no causal language model, and of config values that no program computes.

Model types that work are not listed here: `probe.py` and the compiler find out from the module itself, and
`tests/support/decoders.py` compares the tokens of every model type of transformers with those that transformers
generates.
"""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from npu_compiler.errors import InputError

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "proportional", "dynamic", "longrope")

_LARGEST_FILE = 2**24  # bytes
_CAUSAL = ("ForCausalLM", "LMHeadModel", "Decoder", "ForConditionalGeneration")
SENSES = ("vision", "audio", "image", "video")
# What a size in a config may be, by how its name ends; anything of such a size is built before weights are looked at.
_LIMITS = (
    (re.compile(r"n_layers?|num_(hidden_|decoder_)?layers"), 1, 2048),
    (re.compile(r"n_heads?|num_(attention|key_value|kv)_heads"), 1, 2**14),
    (re.compile(r"head_dim"), 1, 2**14),
    (re.compile(r"hidden_size|n_embd|intermediate_size|n_inner"), 1, 2**22),
    (re.compile(r"vocab_size"), 1, 2**24),
    (re.compile(r"max_position_embeddings|n_positions|n_ctx"), 1, 2**40),
    (re.compile(r"num_labels"), 0, 2**16),
)
_LARGEST = 2**53  # of any other number
HEADS = ("lm_head.weight", "embed_out.weight")
TABLES = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")


def read_config(folder: Path) -> dict[str, Any]:
    """The fields in the config.json of a folder with a causal language model, read before transformers is imported.

    Raises:
        InputError: the folder does not hold a complete causal language model of a supported kind, or its config has an
            impossible size.
    """
    fields = read_fields(folder)
    try:
        _check_kind(folder, fields)
    except InputError as error:
        raise InputError(f"{folder} {error}") from None
    return fields


def read_fields(folder: Path) -> dict[str, Any]:
    """The fields in a folder's config.json, whatever model it describes.

    Raises:
        InputError: there is no such file, it cannot be read, or it has an impossible size.
    """
    path = folder / "config.json"
    refuse_adapter(folder)
    if not path.is_file():
        raise InputError(f"{folder} has no config.json, so it is not a Hugging Face model folder")
    if path.stat().st_size > _LARGEST_FILE:
        raise InputError(f"{path} has {path.stat().st_size} bytes, which no config has")
    try:
        fields = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:  # also what is not UTF-8
        raise InputError(f"{path} cannot be used: {error}") from error
    if not isinstance(fields, dict):
        raise InputError(f"{path} cannot be used: it holds no JSON object")
    try:
        _check_sizes(fields)
    except InputError as error:
        raise InputError(f"{folder} {error}") from None
    return fields


def refuse_adapter(folder: Path) -> None:
    """Raise `InputError` for a folder that holds a LoRA adapter, whose weights would otherwise be ignored."""
    path = folder / "adapter_config.json"
    if not path.is_file():
        return
    try:
        base = json.loads(path.read_text("utf-8"))["base_model_name_or_path"]
    except (ValueError, RecursionError, LookupError, TypeError):
        base = None
    of = f" for {base!r:.80}" if isinstance(base, str) else ""
    raise InputError(
        f"{folder} holds a LoRA adapter{of}, not a whole model; open the base model and name this folder as its "
        "adapter (--adapter)"
    )


def _check_kind(folder: Path, fields: Mapping[str, Any]) -> None:
    """Raise `InputError` for a config of something else than a causal language model."""
    kind, architectures = fields.get("model_type"), fields.get("architectures")
    if not isinstance(kind, str) or not kind:
        raise InputError("names no model_type in its config.json")
    named = [name for name in architectures if isinstance(name, str)] if isinstance(architectures, list) else []
    title = f"model type '{kind:.80}'"
    if fields.get("is_encoder_decoder") is True:
        raise InputError(f"holds an encoder with a decoder ({title}); only decoders are supported")
    if fields.get("add_cross_attention"):
        raise InputError("holds a decoder that attends to an encoder (add_cross_attention), which is not supported")
    if _embeds(folder, named):
        shown = f"{named[0]:.80}, {title}" if named else title
        raise InputError(f"holds an embedding model ({shown}), which generates no text; choose a causal language model")
    if named and not any(name.endswith(_CAUSAL) for name in named):
        raise InputError(
            f"holds no causal language model ({named[0]:.80}); choose a checkpoint whose class ends with ForCausalLM"
        )


def refuse_kind(fields: Mapping[str, Any]) -> None:
    """Raise `InputError` for a model type for which transformers has no causal language model."""
    kind = fields["model_type"]
    senses = any(name.startswith(SENSES) and isinstance(part, dict) for name, part in fields.items())
    if senses or kind.endswith("_vl"):
        what = "a model of text and images or sound, of which transformers has no causal language model"
    else:
        what = "no causal language model of transformers"
    raise InputError(f"holds {what} (model type '{kind:.80}'); choose one whose class ends with ForCausalLM")


def _embeds(folder: Path, architectures: Iterable[str]) -> bool:
    """Whether a folder holds an embedding model: one of sentence-transformers, or a model without an output head."""
    return ((folder / "modules.json").is_file() or any(name.endswith("Model") for name in architectures)) and not any(
        name.endswith(_CAUSAL) for name in architectures
    )


def _check_sizes(fields: Mapping[str, Any]) -> None:
    """Raise `InputError` for a number in a config that is too large, or a size outside its range."""
    for name, value in _numbers("", fields):
        if isinstance(value, float) and value != value or abs(value) > _LARGEST:
            raise InputError(f"has a config.json that says {value!r:.40} for '{name}'")
    for name, value in fields.items():
        for pattern, low, high in _LIMITS:
            if value is None or not pattern.fullmatch(name):
                continue
            each = value if isinstance(value, list) and "intermediate" in name else [value]
            if any(type(size) is not int or not low <= size <= high for size in each):
                said = f"has a config.json that says {value!r:.40} for '{name}'"
                raise InputError(f"{said}, which is a whole number from {low} to {high}")


def _numbers(name: str, value: Any) -> Iterable[tuple[str, float]]:
    """Each number in JSON data with the name of the field in which it stands."""
    pending = [(name, value)]
    while pending:
        name, value = pending.pop()
        if isinstance(value, dict):
            pending += value.items()
        elif isinstance(value, list):
            pending += ((name, part) for part in value)
        elif type(value) in (int, float):
            yield name, value


def check_fields(fields: Mapping[str, Any]) -> None:
    """Refuse config values that transformers computes differently from our programs.

    Args:
        fields: Fields of the config, as transformers has read it.

    Raises:
        InputError: the config has an unsupported kind of RoPE scaling, or a factor that is not above 0.
    """
    for rope in _ropes(fields.get("rope_parameters")):
        kind = rope.get("rope_type", "default")
        if kind not in ROPE_TYPES:
            raise InputError(f"RoPE scaling '{kind!s:.40}' is not supported; supported are {', '.join(ROPE_TYPES)}")
        _check_positive(rope, "factor", "rope_theta")
    _check_positive(fields, "logits_scaling")  # which divides


def _check_positive(fields: Mapping[str, Any], *names: str) -> None:
    for name in names:
        value = fields.get(name)
        if value is not None and not (type(value) in (int, float) and value > 0):
            raise InputError(f"its config.json says {value!r:.40} for '{name}', which is a number above 0")


def _ropes(parameters: Any) -> list[Mapping[str, Any]]:
    """The settings of rotary embeddings: one set for all layers, or one for each kind of layer."""
    if not isinstance(parameters, Mapping):
        return []
    parts = [value for value in parameters.values() if isinstance(value, Mapping)]
    return parts or [parameters]


def longest_context(fields: Mapping[str, Any], trained: int) -> int | None:
    """The longest context in which the config's rotary frequencies are the same for every token; None: no limit.

    Beyond the limit, the frequencies of "dynamic" and "longrope" scaling depend on the length of the sequence, so that
    cached keys would be wrong.

    Args:
        fields: Fields of the config, as transformers has read it.
        trained: The context length that the model was trained for.
    """
    original = "original_max_position_embeddings"
    lengths = [
        trained if rope.get("rope_type") == "dynamic" else rope.get(original) or fields.get(original)
        for rope in _ropes(fields.get("rope_parameters"))
        if rope.get("rope_type") in ("dynamic", "longrope")
    ]
    return min((length for length in lengths if type(length) is int), default=None)


def check_tensors(fields: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse a config that does not fit the tensors, before anything of its sizes is allocated.

    Raises:
        InputError: the config says another vocabulary size than the tensors have, or more layers.
    """
    layers = {
        int(number) for name in shapes for number in re.findall(r"\.(?:layers?|h|blocks?)\.(\d{1,9})\.", f".{name}")
    }
    said, stored = fields.get("num_hidden_layers"), max(layers, default=-1) + 1
    others = [value for name, value in fields.items() if "_layers" in name and name != "num_hidden_layers"]
    if isinstance(said, int) and said > stored and stored not in others:  # layers may be used more than once
        raise InputError(f"its config says {said} layers, but its files hold {stored}")
    vocabulary = fields.get("vocab_size")
    for name, shape in shapes.items():
        if (
            f".{name}".endswith(tuple(f".{table}" for table in TABLES))
            and len(shape) == 2
            and isinstance(vocabulary, int)
            and shape[0] < vocabulary  # tables may be padded
        ):
            raise InputError(f"its config says a vocabulary of {vocabulary} tokens, but '{name}' has {shape[0]}")
