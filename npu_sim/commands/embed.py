"""The command `embed`: texts in, vectors of an embedding model out."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer

from npu_sim.commands.checks import check_file, check_not_overwritten, check_output
from npu_sim.commands.console import note, progress, step
from npu_sim.commands.options import Dtype, LanguageModelName, Quantization
from npu_sim.commands.serve_encoder import find_encoder, weight_format
from npu_sim.commands.settings import DeviceSettings

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from npu_sim.encoders import EncodedText, TextEncoder


def _text_file(path: Path | None) -> Path | None:
    return None if path is None else check_file(path, "texts")


def embed(
    *,
    model: LanguageModelName,
    texts: Annotated[
        Path | None,
        typer.Argument(metavar="[TEXTS]", callback=_text_file, help="Text file, a text a line. Default: stdin."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            callback=check_output,
            help="File of float32 rows if it ends in .npy, else of JSON lines.",
        ),
    ] = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt-name", metavar="NAME", help="Name of one of the model's prompts.")
    ] = None,
    dimensions: Annotated[
        int | None, typer.Option(min=1, metavar="INTEGER", help="Leading elements of each vector to keep.")
    ] = None,
    truncate: Annotated[bool, typer.Option("--truncate", help="Cut texts that are too long for the model.")] = False,
    dtype: Dtype = None,
    quantization: Quantization = "checkpoint",
    device_settings: DeviceSettings,
) -> None:
    """Embed texts, one a line, with an embedding model: a vector for each, as JSON lines or a .npy file."""
    from npu_compiler.errors import InputError
    from npu_sim.encoders import EmbedderFolder

    check_not_overwritten(output, [texts])
    folder = find_encoder(model)
    if not isinstance(folder, EmbedderFolder):
        kind = "a model that generates text" if folder is None else "a cross-encoder"
        raise InputError(f"{model} is {kind}; embed takes an embedding model, such as sentence-transformers' folders")
    before = folder.prompt(prompt)
    lines = (sys.stdin.read() if texts is None else texts.read_text("utf-8")).splitlines()
    if not lines:
        raise InputError("there are no texts to embed; give a file with a text a line, or pipe one in")
    from npu_sim.encoders import TextEncoder  # which imports PyTorch

    with step(f"opening and compiling {folder.name}"):
        opened, formats = device_settings.open(), weight_format(quantization)
        encoder = TextEncoder(folder, device=opened, dtype=dtype, quantization=formats)
    if dimensions is not None and dimensions > encoder.width:
        raise InputError(f"{folder.name} has embeddings of {encoder.width} dimensions, not {dimensions}")
    encoded = encoder.text.encode(lines, before, encoder.context_length if truncate else None)
    for number, text in enumerate(encoded, 1):
        if len(text.ids) > encoder.context_length:
            most = f"the model takes {encoder.context_length}"
            raise InputError(f"text {number} has {len(text.ids)} tokens, but {most}; --truncate cuts it")
    vectors = encoder.shortened(_embedded(encoder, encoded), dimensions or encoder.dimensions)
    _write(vectors, output)


def _embedded(encoder: TextEncoder, texts: list[EncodedText]) -> NDArray[np.float32]:
    """Return the embeddings of texts; those that are padded to the same length share runs."""
    vectors = np.empty((len(texts), encoder.width), np.float32)
    order = sorted(range(len(texts)), key=lambda place: encoder.length_of(texts[place]))
    with progress("embedding") as report:
        done = 0
        while done < len(order):
            length = encoder.length_of(texts[order[done]])
            rows = encoder.most_rows(length)
            batch = [place for place in order[done : done + rows] if encoder.length_of(texts[place]) == length]
            vectors[batch] = encoder.run([texts[place] for place in batch])
            done += len(batch)
            report(done, len(order))
    return vectors


def _write(vectors: NDArray[np.float32], output: Path | None) -> None:
    """Write vectors: an array to a file that ends in .npy, else a line of JSON each, to a file or stdout."""
    from npu_compiler.files import atomic_file

    if output is None:
        for line in _lines(vectors):
            typer.echo(line)
        return
    with atomic_file(output) as file:
        if output.suffix == ".npy":
            np.save(file, vectors)
        else:
            file.writelines(f"{line}\n".encode() for line in _lines(vectors))
    note(f"wrote {len(vectors)} vectors of {vectors.shape[1]} dimensions to {output}")


def _lines(vectors: NDArray[np.float32]) -> Iterator[str]:
    for index, vector in enumerate(vectors):
        yield json.dumps({"index": index, "embedding": vector.tolist()})
