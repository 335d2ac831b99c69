"""The commands that run whole models: `generate` for language models, `classify` for vision models."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from npu_sim.commands.chat import after_prefill, chat_in_terminal, speed
from npu_sim.commands.checks import check_device_options, check_not_overwritten, check_text, check_weights
from npu_sim.commands.completion import vision_models
from npu_sim.commands.console import concerning, note, print_json, progress, step
from npu_sim.commands.options import (
    Activations,
    AsJSON,
    CPULevel,
    DeviceName,
    Dtype,
    Fast,
    KVCache,
    LanguageModelName,
    NoTune,
    Quantization,
    RepetitionPenalty,
    Seed,
    Temperature,
    TensorParallel,
    TopP,
    Trace,
)
from npu_sim.commands.resources import open_device, open_in_background

if TYPE_CHECKING:
    from npu_sim.llm.chat import TextStream


def generate(
    model: LanguageModelName,
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
    temperature: Temperature = 0.0,
    top_p: TopP = None,
    top_k: Annotated[
        int | None,
        typer.Option("--top-k", min=1, metavar="INTEGER", help="Sample from this many of the most probable tokens."),
    ] = None,
    seed: Seed = None,
    repetition_penalty: RepetitionPenalty = None,
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
    quantization: Quantization = "checkpoint",
    activations: Activations = "checkpoint",
    kv_cache: KVCache = "none",
    tensor_parallel: TensorParallel = 1,
    device: DeviceName = None,
    cpu_level: CPULevel = None,
    fast: Fast = False,
    no_tune: NoTune = False,
    trace: Trace = None,
    json: AsJSON = False,
) -> None:
    """Generate text with a language model."""
    from npu_compiler.errors import InputError
    from npu_runtime import Profiler
    from npu_sim.llm.loading import find_checkpoint

    check_device_options(device, cpu_level, fast, no_tune)
    if temperature == 0 and (top_k is not None or top_p is not None):
        raise InputError("--top-k and --top-p are for sampling; give a --temperature above 0")
    if max_tokens is not None and cache_length is not None and max_tokens > cache_length:
        raise InputError(f"--max-tokens {max_tokens} is more than --cache-length {cache_length} holds")
    if no_chat and system is not None:
        raise InputError("--system needs the chat template; leave out --no-chat")
    interactive = prompt is None and sys.stdin is not None and sys.stdin.isatty()
    if interactive and (no_chat or json or trace):
        raise InputError("--no-chat, --json and --trace need a prompt: give it with --prompt or on standard input")
    if trace is not None and device is not None and device.startswith("npu:"):
        raise InputError("--trace is of this machine's time; npu-sim simulate --trace is of a chip's")
    check_not_overwritten(trace, [Path(model)])
    if prompt is None and not interactive:
        prompt = _piped_prompt()
    if prompt == "":
        raise InputError("the prompt is empty")
    check_text(prompt, "the prompt")
    check_text(system, "the system message")
    find_checkpoint(model)
    # With a cache length of the user's own, it is first looked at whether the prompt fits, which takes the tokenizer.
    opening = open_in_background(device, fast, no_tune) if cache_length is None else None
    from npu_sim.devices import simulated
    from npu_sim.llm import (
        Conversation,
        LanguageModel,
        cache_capacity,
        chat,
        check_fits,
        check_ranks,
        complete,
        encode_chat,
        filled_cache,
        load_checkpoint,
        make_sampler,
    )

    sampler = make_sampler(temperature, top_k=top_k, top_p=top_p, seed=seed)
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": prompt or ""})
    profiler = Profiler()
    with step(f"opening {model}"), profiler.on_host(f"open {model}"):
        checkpoint = load_checkpoint(model, dtype, quantization, activations, kv_cache)
        if repetition_penalty is not None:
            checkpoint = replace(checkpoint, repetition_penalty=repetition_penalty)
        tokenizer = checkpoint.tokenizer  # read it now, while the device opens
    with concerning("--cache-length"):
        capacity = cache_capacity(checkpoint, cache_length)
    with concerning("--tensor-parallel"):
        check_ranks(checkpoint, tensor_parallel)
    ids = tokenizer.encode(prompt) if no_chat else encode_chat(checkpoint, messages)
    check_fits(ids, capacity)
    chosen = open_device(device, fast, no_tune) if opening is None else opening.result()
    preparing = f"preparing {checkpoint.name}"
    with progress(preparing) as report, profiler.on_host("prepare the programs and weights"):
        network = LanguageModel(
            checkpoint,
            device=chosen,
            cache_length=cache_length,
            progress=report,
            tensor_parallel=tensor_parallel,
        )
        network.prepare(sampler, *([] if interactive else [len(ids)]))
    if prompt is None:
        conversation = Conversation(network, system=system, max_new_tokens=max_tokens, sampler=sampler)
        chat_in_terminal(conversation, f"{network.device.name} ({network.device.backend.device})")
        return
    if no_chat:
        stream = complete(network, prompt, max_new_tokens=max_tokens, sampler=sampler)
    else:
        stream = chat(network, messages, max_new_tokens=max_tokens, sampler=sampler)
    text = _counted(stream, max_tokens) if json else "".join(_shown(stream))
    if trace is not None:
        profiler.host_spans += stream.spans
        profiler.save_trace(trace)
    if json:
        print_json(
            {
                "model": checkpoint.name,
                "device": chosen.name,
                "text": text,
                **asdict(stream.stats),
                "prefill_tokens_per_second": stream.stats.prefill_tokens_per_second,
                "decode_tokens_per_second": stream.stats.decode_tokens_per_second,
                **({"chip": chip.chip.name} if (chip := simulated(chosen)) else {}),
                "trace": None if trace is None else str(trace),
            }
        )
    else:
        note(speed(stream.stats))
        if chip := simulated(chosen):
            first, rate = 1e3 * stream.stats.first_token_seconds, stream.stats.decode_tokens_per_second
            note(f"simulated on chip {chip.chip.name}: first token after {first:.4g} ms, then {rate:.4g} per second")
        if trace is not None:
            note(f"trace written to {trace}; ui.perfetto.dev opens it")
        if filled_cache(stream.stats, max_tokens):
            note("the text ends here because the KV cache is full; a larger --cache-length holds more")


def _piped_prompt() -> str:
    """Standard input as text, without the white space around it."""
    from npu_compiler.errors import InputError

    data = b"" if sys.stdin is None else sys.stdin.buffer.read()
    try:
        prompt = data.decode().strip()
    except UnicodeDecodeError as error:
        raise InputError(f"standard input is not UTF-8 text: byte {error.start} is {data[error.start]:#04x}") from None
    if not prompt:
        raise InputError("standard input is empty; write the prompt there or give it with --prompt")
    return prompt


def _shown(pieces: Iterator[str]) -> Iterator[str]:
    """Iterate over the pieces, and print each one to stdout, and a newline at the end."""
    for piece in after_prefill(pieces):
        sys.stdout.write(piece)
        sys.stdout.flush()
        yield piece
    sys.stdout.write("\n")


def _counted(stream: TextStream, most: int | None) -> str:
    """The text of a generation, with a bar that counts its tokens."""
    text = ""
    with progress("generating") as report:
        for piece in stream:
            text += piece
            report(stream.stats.new_tokens, most)
    return text


def classify(
    image: Annotated[Path, typer.Argument(metavar="IMAGE", help="Image file: JPEG, PNG, WebP, ...")],
    model: Annotated[
        str,
        typer.Option(
            "--model",
            "-m",
            metavar="NAME",
            autocompletion=vision_models,
            help="efficientnet-lite0, resnet18 or resnet50.",
        ),
    ] = "efficientnet-lite0",
    weights: Annotated[
        Path | None,
        typer.Option(
            "--weights",
            metavar="FILE",
            callback=check_weights,
            help="Weights with torchvision's parameter names, or a folder from npu-sim quantize.",
        ),
    ] = None,
    top: Annotated[
        int, typer.Option("--top", min=1, max=1000, metavar="INTEGER", help="Number of classes to show.")
    ] = 5,
    dtype: Dtype = None,
    device: DeviceName = None,
    cpu_level: CPULevel = None,
    fast: Fast = False,
    no_tune: NoTune = False,
    json: AsJSON = False,
) -> None:
    """Classify an image into the 1000 ImageNet classes."""
    from npu_sim.devices import simulated
    from npu_sim.vision import Classifier, find_model, load_image

    check_device_options(device, cpu_level, fast, no_tune)
    find_model(model)
    picture = load_image(image)
    with step(f"preparing {model}"):
        chosen = open_device(device, fast, no_tune)
        classifier = Classifier(model, device=chosen, weights=weights, compute_dtype=dtype)
    with step(f"classifying {image}"):
        guesses = classifier.classify(picture, top=top)
    chip = simulated(chosen)
    if json:
        rows = [{"label": g.label, "probability": g.probability, "index": g.index} for g in guesses]
        time = {} if chip is None else {"chip": chip.chip.name, "simulated_seconds": chip.simulated_seconds}
        print_json({"image": str(image), "model": model, "predictions": rows, **time})
        return
    for guess in guesses:
        typer.echo(f"{guess.probability:7.2%}  {guess.label}")
    if chip is not None:
        note(f"simulated: {1e3 * chip.simulated_seconds:.4g} ms on chip {chip.chip.name}")
