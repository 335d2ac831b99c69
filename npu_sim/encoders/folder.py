"""Folders of embedding models and cross-encoders: the files that sentence-transformers adds to a transformers model.

Only small JSON files are read here, so that errors in them are reported before weights are loaded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from npu_compiler.errors import InputError
from npu_sim.llm.families import read_fields

# Name of a pooling in 1_Pooling/config.json → ours, in the order in which sentence-transformers joins several.
POOLINGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
# Function of a cross-encoder's only logit, by the name of its class in PyTorch.
ACTIVATIONS = ("Identity", "Sigmoid")
_CLASSIFIER = "ForSequenceClassification"


@dataclass(frozen=True)
class DenseLayer:
    """A linear layer after the pooling, in a folder of its own.

    Attributes:
        activation: Name of its activation's class in `torch.nn`.
    """

    folder: Path
    inputs: int
    outputs: int
    bias: bool
    activation: str


@dataclass(frozen=True)
class EncoderFolder:
    """The settings of a model that encodes texts, from its folder.

    Attributes:
        name: Used in messages and by clients.
        transformer: The folder with config.json, weights and tokenizer.
        max_length: Maximum tokens of a text in sentence-transformers' settings. None: the model's own maximum.
        lower_case: Whether texts are converted to lower case before they are tokenized.
    """

    name: str
    transformer: Path
    max_length: int | None = None
    lower_case: bool = False


@dataclass(frozen=True)
class EmbedderFolder(EncoderFolder):
    """The settings of an embedding model, which makes a vector of each text.

    Attributes:
        poolings: Ways to combine the vectors of a text's tokens into one, among the values of `POOLINGS`; several
            results are concatenated.
        dense: Linear layers after the pooling, in order.
        normalized: Whether vectors are divided by their length at the end.
        dimensions: Number of leading elements of a vector that are kept. None: all.
        prompts: Name of a prompt → text that is put before each text to embed.
        default_prompt: Name of the prompt for texts for which none is chosen. None: such texts have no prompt.
        pools_prompt: Whether pooling includes the prompt's tokens.
    """

    poolings: tuple[str, ...] = ("mean",)
    dense: tuple[DenseLayer, ...] = ()
    normalized: bool = False
    dimensions: int | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    pools_prompt: bool = True

    def prompt(self, name: str | None) -> str:
        """The text of the prompt with that name, which is put before each text.

        None stands for the model's default prompt. Raises `InputError` for an unknown name.
        """
        chosen = self.default_prompt if name is None else name
        if chosen is None:
            return ""
        if chosen not in self.prompts:
            known = f"its prompts are {', '.join(self.prompts)}" if self.prompts else "it has none"
            raise InputError(f"{self.name} has no prompt '{chosen}'; {known}")
        return self.prompts[chosen]


@dataclass(frozen=True)
class CrossEncoderFolder(EncoderFolder):
    """The settings of a cross-encoder, which scores pairs of texts.

    Attributes:
        activation: Name of the function that turns the logit into the score, one of `ACTIVATIONS`.
    """

    activation: str = "Sigmoid"


def read_encoder(folder: Path) -> EmbedderFolder | CrossEncoderFolder | None:
    """The embedding model or cross-encoder that a folder describes; None for a folder of another model.

    Raises:
        InputError: the folder holds such a model, but with modules or settings that are not supported.
    """
    if not folder.is_dir() or not ((folder / "modules.json").is_file() or (folder / "config.json").is_file()):
        return None
    modules = folder / "modules.json"
    fields = read_fields(folder) if (folder / "config.json").is_file() else {}
    named = fields.get("architectures")
    architectures = [name for name in named if isinstance(name, str)] if isinstance(named, list) else []
    if any(name.endswith(_CLASSIFIER) for name in architectures):
        return _cross_encoder(folder, fields)
    if modules.is_file():
        return _embedder(folder)
    if architectures and all(name.endswith("Model") for name in architectures):
        return EmbedderFolder(folder.resolve().name, folder, **_transformer_settings(folder), **_prompts(folder))
    return None


def _cross_encoder(folder: Path, fields: Mapping[str, Any]) -> CrossEncoderFolder:
    labels = fields.get("id2label")
    count = len(labels) if isinstance(labels, dict) else fields.get("num_labels", 2)
    if count != 1:
        raise InputError(f"{folder} holds a classifier of {count} labels; a cross-encoder, which ranks texts, has one")
    own = fields.get("sentence_transformers")
    named = own.get("activation_fn") if isinstance(own, dict) else None
    named = named or fields.get("sbert_ce_default_activation_function") or "Sigmoid"
    activation = str(named).rpartition(".")[2]
    if activation not in ACTIVATIONS:
        raise InputError(f"{folder} scores by {named!s:.80}, which is not supported; {' and '.join(ACTIVATIONS)} are")
    settings = _transformer_settings(folder)
    return CrossEncoderFolder(folder.resolve().name, folder, **settings, activation=activation)


def _embedder(folder: Path) -> EmbedderFolder:
    """The settings of an embedding model, from the modules that its modules.json lists."""
    modules = _read(folder / "modules.json", list)
    kinds = [_module(folder, item) for item in modules]
    wanted = [kind for kind, _ in kinds[:2]]
    if wanted != ["Transformer", "Pooling"]:
        raise InputError(f"{folder / 'modules.json'} begins with {_listed(wanted)}, not with Transformer and Pooling")
    (_, transformer), (_, pooling), *rest = kinds
    dense, normalized = [], False
    for kind, place in rest:
        if kind == "Dense" and not normalized:
            dense.append(_dense(place))
        elif kind == "Normalize":
            normalized = True
        elif kind != "Dropout":
            raise InputError(f"{folder / 'modules.json'} has the module {kind:.80} there, which is not supported")
    return EmbedderFolder(
        folder.resolve().name,
        transformer,
        **_transformer_settings(transformer),
        **_pooling(pooling / "config.json"),
        **_prompts(folder),
        dense=tuple(dense),
        normalized=normalized,
    )


def _module(folder: Path, item: Any) -> tuple[str, Path]:
    """The class name and the folder of an entry in modules.json."""
    kind, path = (item.get("type"), item.get("path")) if isinstance(item, dict) else (None, None)
    if not isinstance(kind, str) or not isinstance(path, str):
        raise InputError(f"{folder / 'modules.json'} has an entry without a type and a path: {item!r:.80}")
    place = folder / path
    if not place.resolve().is_relative_to(folder.resolve()):
        raise InputError(f"{folder / 'modules.json'} names {path!r:.80}, which is outside the folder")
    return kind.rpartition(".")[2], place


def _listed(kinds: list[str]) -> str:
    return " and ".join(f"{kind:.80}" for kind in kinds) or "nothing"


def _transformer_settings(folder: Path) -> dict[str, Any]:
    """The fields of `EncoderFolder` for the maximum length of texts and for lower case."""
    path = folder / "sentence_bert_config.json"
    if not path.is_file():
        return {}
    settings = _read(path, dict)
    length = settings.get("max_seq_length")
    if length is not None and (type(length) is not int or length < 1):
        raise InputError(f"{path} says {length!r:.40} for 'max_seq_length', which is a whole number above 0")
    return {"max_length": length, "lower_case": settings.get("do_lower_case") is True}


def _pooling(path: Path) -> dict[str, Any]:
    settings = _read(path, dict)
    if isinstance(named := settings.get("pooling_mode"), str):
        settings |= {name: True for name, pooling in POOLINGS.items() if pooling == named}
    poolings = tuple(pooling for name, pooling in POOLINGS.items() if settings.get(name) is True)
    if not poolings:
        raise InputError(f"{path} names no pooling; the known ones are {', '.join(POOLINGS.values())}")
    return {"poolings": poolings, "pools_prompt": settings.get("include_prompt") is not False}


def _dense(folder: Path) -> DenseLayer:
    settings = _read(folder / "config.json", dict)
    inputs, outputs = settings.get("in_features"), settings.get("out_features")
    if not all(type(size) is int and 0 < size < 2**20 for size in (inputs, outputs)):
        raise InputError(f"{folder / 'config.json'} says {inputs!r:.40} inputs and {outputs!r:.40} outputs")
    activation = str(settings.get("activation_function", "Tanh")).rpartition(".")[2]
    return DenseLayer(folder, inputs, outputs, settings.get("bias") is not False, activation)


def _prompts(folder: Path) -> dict[str, Any]:
    path = folder / "config_sentence_transformers.json"
    settings = _read(path, dict) if path.is_file() else {}
    prompts = settings.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise InputError(f"{path} holds 'prompts' that are no texts")
    default, dimensions = settings.get("default_prompt_name"), settings.get("truncate_dim")
    if default is not None and default not in prompts:
        raise InputError(f"{path} says 'default_prompt_name' {default!r:.40}, which is none of its prompts")
    if dimensions is not None and (type(dimensions) is not int or dimensions < 1):
        raise InputError(f"{path} says {dimensions!r:.40} for 'truncate_dim', which is a whole number above 0")
    return {"prompts": prompts, "default_prompt": default, "dimensions": dimensions}


def _read(path: Path, kind: type) -> Any:
    """The list or dict (`kind`) in a JSON file. Raises InputError if the file holds anything else."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} cannot be used: {error}") from error
    if not isinstance(value, kind):
        raise InputError(f"{path} cannot be used: it holds no JSON {'array' if kind is list else 'object'}")
    return value
