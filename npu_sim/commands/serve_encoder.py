"""The part of the command `serve` that opens embedding models and cross-encoders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from npu_sim.commands.console import note, progress, step
from npu_sim.commands.settings import DeviceSettings, ModelSettings

if TYPE_CHECKING:
    from npu_sim.encoders import CrossEncoderFolder, EmbedderFolder, TextEncoder


def find_encoder(model: str) -> EmbedderFolder | CrossEncoderFolder | None:
    """Read the embedding model or cross-encoder of that name; None if the name is that of a model that generates text.

    A Hugging Face id is downloaded if it is not in the cache.

    Raises:
        InputError: the model is not found, or uses something that is not supported.
    """
    from npu_sim.encoders import read_encoder
    from npu_sim.llm.loading import checkpoint_path, find_checkpoint

    if Path(model).is_dir():
        return read_encoder(Path(model))
    if find_checkpoint(model) is not None:
        return None
    folder = read_encoder(checkpoint_path(model))
    return None if folder is None else replace(folder, name=model)


def weight_format(quantization: str) -> str | None:
    """The format of `--quantization` for an encoder's weights; None: they stay as the checkpoint has them."""
    return None if quantization in ("checkpoint", "none") else quantization


def check_encoder_options(folder: EmbedderFolder | CrossEncoderFolder, unfit: Mapping[str, bool]) -> None:
    """Raise `InputError` if an option was given that only models that generate text have.

    Args:
        folder: The embedding model or cross-encoder to be served.
        unfit: Such options → whether they were given.
    """
    from npu_compiler.errors import InputError
    from npu_sim.encoders import EmbedderFolder

    kind = "an embedding model" if isinstance(folder, EmbedderFolder) else "a cross-encoder"
    if given := [option for option, was in unfit.items() if was]:
        raise InputError(f"{given[0]} is for models that generate text; {folder.name} is {kind}")


def open_encoder(
    folder: EmbedderFolder | CrossEncoderFolder,
    model: ModelSettings,
    device: DeviceSettings,
    context_length: int | None,
    max_batch: int,
) -> tuple[TextEncoder, str]:
    """Open and compile an encoder; return it with the name of its device.

    Args:
        context_length: Maximum number of tokens of a text. None: the model's own.

    Raises:
        InputError: the encoder cannot be opened or compiled.
    """
    from npu_sim.encoders import EmbedderFolder, TextEncoder

    opened = device.open()
    with step(f"opening and compiling {folder.name}"):
        encoder = TextEncoder(
            folder,
            device=opened,
            dtype=model.dtype,
            quantization=weight_format(model.quantization),
            context_length=context_length,
            max_batch=max_batch,
        )
    with progress(f"preparing the programs of {folder.name}") as report:
        encoder.prepare(report)
    if isinstance(folder, EmbedderFolder):
        made = "normalized embeddings" if folder.normalized else "embeddings"
        note(f"{made} of {encoder.dimensions} dimensions, pooled by {' and '.join(folder.poolings)}")
    return encoder, f"{opened.name} ({opened.backend.device})"
