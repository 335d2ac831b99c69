"""`generate` and `classify`: whole models, from a prompt or an image."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from npu_sim.commands.programs import AsJSON, DeviceName, Dtype, Fast, Seed, open_device, open_meanwhile
from npu_sim.console import note, print_json, progress, step

if TYPE_CHECKING:
    from npu_sim.llm import TextStream

Reply = Callable[[str], "TextStream"]


def generate(
    model: Annotated[str, typer.Argument(help="A Hugging Face id, a model folder, a .gguf file, or smollm2.")],
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="By default, a chat in the terminal, or what stdin brings.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", "-n", min=1, help="At most so many.")] = None,
    temperature: Annotated[float, typer.Option("--temperature", "-t", min=0.0, help="0 takes the likeliest.")] = 0.0,
    top_p: Annotated[float | None, typer.Option("--top-p", help="Draw from the likeliest that sum to this.")] = None,
    top_k: Annotated[int | None, typer.Option("--top-k", help="Draw from so many of the likeliest.")] = None,
    seed: Seed = None,
    cache_length: Annotated[
        int | None, typer.Option("--cache-length", min=1, help="Tokens of prompt and replies that the KV cache holds.")
    ] = None,
    system: Annotated[str | None, typer.Option("--system", help="The system message of the chat.")] = None,
    no_chat: Annotated[bool, typer.Option("--no-chat", help="Continue the text, without the chat template.")] = False,
    dtype: Dtype = None,
    device: DeviceName = None,
    fast: Fast = False,
    json: AsJSON = False,
) -> None:
    """Let a language model answer or continue a text, token by token."""
    from npu_compiler.errors import InputError

    if no_chat and system is not None:
        raise InputError("--system is a message of a chat; leave out --no-chat")
    interactive = prompt is None and sys.stdin.isatty()
    if interactive and (no_chat or json):
        raise InputError("give the text with --prompt, or on stdin")
    if prompt is None and not interactive:
        prompt = sys.stdin.read().strip()
    if prompt == "":
        raise InputError("the prompt is empty")
    opening = open_meanwhile(device, fast)
    from npu_sim.llm import LanguageModel, chat, complete, load_checkpoint, make_sampler

    sampler = make_sampler(temperature, top_k=top_k, top_p=top_p, seed=seed)
    with step(f"opening {model}"):
        checkpoint = load_checkpoint(model, dtype)
        _ = checkpoint.tokenizer  # now, while the device opens
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
            f"{stats.new_tokens} new at {stats.decode_tokens_per_second:.1f}/s"
        )


def _shown(pieces: Any, *, show: bool) -> Iterator[str]:
    """The pieces, each written to stdout as it comes, and a line's end after the last."""
    for piece in pieces:
        if show:
            sys.stdout.write(piece)
            sys.stdout.flush()
        yield piece
    if show:
        sys.stdout.write("\n")


def _ask() -> Iterator[str]:
    """What a person types, line by line, until end of input."""
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            return
        if line:
            yield line


def classify(
    image: Annotated[Path, typer.Argument(help="A photograph: JPEG, PNG, WebP, ...")],
    model: Annotated[str, typer.Option("--model", "-m", help="efficientnet-lite0, resnet18 or resnet50.")] = (
        "efficientnet-lite0"
    ),
    weights: Annotated[Path | None, typer.Option("--weights", help="Its weights, by torchvision's names.")] = None,
    top: Annotated[int, typer.Option("--top", help="How many guesses to show.")] = 5,
    dtype: Dtype = None,
    device: DeviceName = None,
    fast: Fast = False,
    json: AsJSON = False,
) -> None:
    """Say what an image shows."""
    import warnings

    from npu_sim.vision import Classifier, find_model, load_image

    find_model(model)
    picture = load_image(image)
    with step(f"preparing {model}"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        classifier = Classifier(model, device=open_device(device, fast), weights=weights, compute_dtype=dtype)
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
