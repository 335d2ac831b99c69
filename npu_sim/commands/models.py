"""The commands that run whole models: `generate` for language models, `classify` for vision models."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from npu_sim.commands.console import note, print_json, progress, step
from npu_sim.commands.options import AsJSON, CPULevel, DeviceName, Dtype, Fast, NoTune, Seed
from npu_sim.commands.resources import open_device, open_in_background

if TYPE_CHECKING:
    from npu_sim.llm import TextStream

Reply = Callable[[str], "TextStream"]


def generate(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Hugging Face id, model folder, .gguf file, or smollm2.")
    ],
    prompt: Annotated[
        str | None,
        typer.Option(
            "--prompt",
            "-p",
            metavar="TEXT",
            help="Prompt. Default: interactive chat, or standard input when piped.",
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option("--max-tokens", "-n", min=1, metavar="INTEGER", help="Maximum number of new tokens."),
    ] = None,
    temperature: Annotated[
        float,
        typer.Option(
            "--temperature", "-t", min=0.0, metavar="FLOAT", help="Sampling temperature; 0 means greedy decoding."
        ),
    ] = 0.0,
    top_p: Annotated[
        float | None,
        typer.Option(
            "--top-p",
            metavar="FLOAT",
            help="Nucleus sampling: smallest set of tokens with this total probability.",
        ),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option("--top-k", metavar="INTEGER", help="Sample from this many of the most probable tokens."),
    ] = None,
    seed: Seed = None,
    cache_length: Annotated[
        int | None,
        typer.Option(
            "--cache-length",
            min=1,
            metavar="INTEGER",
            help="Capacity of the KV cache in tokens. Default: 2048, or the model's maximum if less.",
        ),
    ] = None,
    system: Annotated[str | None, typer.Option("--system", metavar="TEXT", help="System message of the chat.")] = None,
    no_chat: Annotated[
        bool, typer.Option("--no-chat", help="Continue the prompt as plain text, without the chat template.")
    ] = False,
    dtype: Dtype = None,
    device: DeviceName = None,
    cpu_level: CPULevel = None,
    fast: Fast = False,
    no_tune: NoTune = False,
    json: AsJSON = False,
) -> None:
    """Generate text with a language model."""
    from npu_compiler.errors import InputError

    if no_chat and system is not None:
        raise InputError("--system needs the chat template; leave out --no-chat")
    interactive = prompt is None and sys.stdin.isatty()
    if interactive and (no_chat or json):
        raise InputError("--no-chat and --json need a prompt: give it with --prompt or on standard input")
    if prompt is None and not interactive:
        prompt = sys.stdin.read().strip()
    if prompt == "":
        raise InputError("the prompt is empty")
    opening = open_in_background(device, fast, no_tune)
    from npu_sim.llm import LanguageModel, chat, complete, load_checkpoint, make_sampler

    sampler = make_sampler(temperature, top_k=top_k, top_p=top_p, seed=seed)
    with step(f"opening {model}"):
        checkpoint = load_checkpoint(model, dtype)
        _ = checkpoint.tokenizer  # read it now, while the device opens
    with progress(f"preparing {checkpoint.name}") as report:
        network = LanguageModel(checkpoint, device=opening.result(), cache_length=cache_length, progress=report)
        network.prepare(sampler)
    messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []

    def reply(text: str) -> TextStream:
        if no_chat:
            return complete(network, text, max_new_tokens=max_tokens, sampler=sampler)
        messages.append({"role": "user", "content": text})
        return chat(network, messages, max_new_tokens=max_tokens, sampler=sampler)

    for text in _ask() if prompt is None else [prompt]:
        stream = reply(text)
        answer = "".join(_shown(stream, show=not json))
        messages.append({"role": "assistant", "content": answer})
        stats = stream.stats
        if json:
            print_json({"model": checkpoint.name, "device": network.device.name, "text": answer, **asdict(stats)})
            continue
        note(
            f"{stats.prompt_tokens} prompt tokens at {stats.prefill_tokens_per_second:.1f}/s, "
            f"{stats.new_tokens} new tokens at {stats.decode_tokens_per_second:.1f}/s"
        )


def _shown(pieces: Any, *, show: bool) -> Iterator[str]:
    """Iterate over the pieces; with `show`, print each one to stdout, and a newline at the end."""
    for piece in pieces:
        if show:
            sys.stdout.write(piece)
            sys.stdout.flush()
        yield piece
    if show:
        sys.stdout.write("\n")


def _ask() -> Iterator[str]:
    """The lines that are not empty which the user types, until end of file."""
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            return
        if line:
            yield line


def classify(
    image: Annotated[Path, typer.Argument(metavar="IMAGE", help="Image file: JPEG, PNG, WebP, ...")],
    model: Annotated[
        str, typer.Option("--model", "-m", metavar="NAME", help="efficientnet-lite0, resnet18 or resnet50.")
    ] = ("efficientnet-lite0"),
    weights: Annotated[
        Path | None,
        typer.Option("--weights", metavar="FILE", help="Weights with torchvision's parameter names."),
    ] = None,
    top: Annotated[int, typer.Option("--top", metavar="INTEGER", help="Number of classes to show.")] = 5,
    dtype: Dtype = None,
    device: DeviceName = None,
    cpu_level: CPULevel = None,
    fast: Fast = False,
    no_tune: NoTune = False,
    json: AsJSON = False,
) -> None:
    """Classify an image into the 1000 ImageNet classes."""
    import warnings

    from npu_sim.vision import Classifier, find_model, load_image

    find_model(model)
    picture = load_image(image)
    with step(f"preparing {model}"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        classifier = Classifier(model, device=open_device(device, fast, no_tune), weights=weights, compute_dtype=dtype)
    for warning in caught:
        if issubclass(warning.category, UserWarning):
            note(f"warning: {warning.message}")
    guesses = classifier.classify(picture, top=top)
    if json:
        rows = [{"label": g.label, "probability": g.probability, "index": g.index} for g in guesses]
        print_json({"image": str(image), "model": model, "predictions": rows})
        return
    for guess in guesses:
        typer.echo(f"{guess.probability:7.2%}  {guess.label}")
