"""Models of timm and transformers by name, and drawn at random, of different families."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.written import WRITTEN
from benchmarks.zoo import ENTRIES, TOKENS, Entry, Only, timm_model

LIBRARIES = ("timm", "transformers")
PREFIX = "transformers."  # of the names of model types, which are names of models of timm too
MOST_PARAMETERS = {"timm": 100_000_000, "transformers": 130_000_000}
LARGEST_IMAGE = 256  # pixels of a side
SEQUENCE, SAMPLES, FRAMES = 128, 80_000, 1024  # tokens, samples of 5 s, and frames of a spectrogram


def entry_of(name: str) -> Entry:
    """Return the entry of this name, or one for a model of timm or `transformers.` and a model type.

    Raises:
        ValueError: the model type accepts no input that the rules on names give.
    """
    if entry := ENTRIES.get(name) or WRITTEN.get(name):
        return entry
    if name.startswith(PREFIX):
        return _transformers_entry(name)
    return Entry(name, timm_model(name), (_described(name).default_cfg["input_size"],), 16)


def model_names() -> set[str]:
    """Return the names that `entry_of` knows besides those of entries, of the libraries that are installed."""
    names = set(WRITTEN)
    if find_spec("timm"):
        import timm

        names |= set(timm.list_models())
    if find_spec("transformers"):
        from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

        names |= {PREFIX + model_type for model_type in MODEL_MAPPING_NAMES}
    return names


def drawn(library: str, seed: int, count: int) -> list[str]:
    """Return names of models drawn at random from a library, each of another family.

    A family is a module of timm, and of transformers what has the same layers in the same number. Each model has at
    most 100 (of transformers 130) million parameters and images of at most 256 × 256 pixels.
    """
    names = _drawn_timm(Random(seed)) if library == "timm" else _drawn_transformers(Random(seed))
    return [name for name, _ in zip(names, range(count), strict=False)]


def _drawn_timm(random: Random) -> Iterator[str]:
    import timm

    for family in random.sample(modules := timm.list_modules(), len(modules)):
        names = timm.list_models(module=family)
        for name in random.sample(names, min(4, len(names))):
            try:
                model = _described(name)
            except RuntimeError:  # its constructor reads values, which tensors without memory lack
                continue
            if max(model.default_cfg["input_size"]) <= LARGEST_IMAGE and _size(model) <= MOST_PARAMETERS["timm"]:
                yield name
                break


def _described(name: str) -> Any:
    """A model of timm without the memory of its weights, for its sizes."""
    with torch.device("meta"):
        return timm_model(name)()


def _size(model: nn.Module) -> int:
    return sum(each.numel() for each in model.parameters())


def _drawn_transformers(random: Random) -> Iterator[str]:
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    families = list[Counter[str]]()
    for model_type in random.sample(kinds := sorted(MODEL_MAPPING_NAMES), len(kinds)):
        try:
            with torch.device("meta"):
                model = _model(model_type)
            if _size(model) > MOST_PARAMETERS["transformers"]:
                continue
            family = Counter(type(each).__name__ for each in model.modules() if not list(each.children()))
            if family not in families:
                entry_of(PREFIX + model_type)
                families.append(family)
                yield PREFIX + model_type
        except Exception:  # of any of several hundred classes, some of which need a package or another kind of input
            continue


def _model(model_type: str) -> Any:
    """A model of transformers with its library's default configuration."""
    from transformers import AutoModel
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return AutoModel.from_config(CONFIG_MAPPING[model_type]())


def _transformers_entry(name: str) -> Entry:
    model_type = name.removeprefix(PREFIX)
    with torch.device("meta"):
        model = _model(model_type).eval()
    arguments, settings = _arguments(model)
    vocabulary = min(TOKENS, _vocabulary(model.config)) if arguments[0] == "input_ids" else 0

    def make(output: str) -> nn.Module:
        return Only(_model(model_type), output, *arguments, **settings)

    for shape in _shapes(arguments[0], model.config):
        entry = Entry(name, lambda: model, (shape,), 16, vocabulary)
        try:
            output = _output(model(**dict.fromkeys(arguments, entry.inputs(2, 0, "meta")[0]), **settings))
        except Exception:  # the next shape may fit
            continue
        return replace(entry, make=partial(make, output))
    raise ValueError(f"{name} accepts none of the inputs that the rules give")


def _arguments(model: Any) -> tuple[list[str], dict[str, Any]]:
    """Return the keywords that get the input, and those that get constants."""
    parameters = inspect.signature(model.forward).parameters
    arguments = [model.main_input_name]
    if arguments[0] == "input_ids" and "decoder_input_ids" in parameters:
        arguments.append("decoder_input_ids")
    return arguments, {"use_cache": False} if "use_cache" in parameters else {}


def _vocabulary(config: Any) -> int:
    return int(getattr(config, "vocab_size", None) or TOKENS)


def _shapes(argument: str, config: Any) -> Iterator[tuple[int, ...]]:
    """Yield shapes of one element of the batch that may fit an argument of this name, the likeliest first."""
    if argument == "input_ids":
        yield (SEQUENCE,)
    if argument == "pixel_values":
        channels = getattr(config, "num_channels", 3)
        side = getattr(config, "image_size", None) or 224
        height, width = side if isinstance(side, (list, tuple)) else (side, side)
        if max(height, width) > LARGEST_IMAGE:
            height = width = 224
        frames = getattr(config, "num_frames", None)
        if frames:
            yield frames, channels, height, width
        yield channels, height, width
    if argument in ("input_values", "input_features"):
        bins = getattr(config, "num_mel_bins", None) or getattr(config, "input_feat_per_channel", None) or 80
        yield (SAMPLES,)
        yield 1, SAMPLES
        yield FRAMES, bins
        yield bins, 3000


def _output(result: Any) -> str:
    """Return the name of the first tensor of floating point in a model's result."""
    return next(str(name) for name, value in result.items() if isinstance(value, Tensor) and value.is_floating_point())
