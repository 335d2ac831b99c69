"""The commands that run whole models: `generate` for language models, `classify` for vision models."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from npu_sim.commands.chat import after_prefill, chat_in_terminal, speed
from npu_sim.commands.checks import check_not_overwritten, check_text, check_weights
from npu_sim.commands.completion import vision_models
from npu_sim.commands.console import concerning, note, print_json, progress, step
from npu_sim.commands.options import AsJSON, Dtype, KVCache, LanguageModelName, Trace
from npu_sim.commands.resources import answering_early
from npu_sim.commands.settings import DeviceSettings, ModelSettings, SamplingSettings

if TYPE_CHECKING:
    from npu_runtime import Device
    from npu_sim.llm import Checkpoint, GenerationStats
    from npu_sim.llm.chat import Message, TextStream


@dataclass(frozen=True)
class PromptSettings:
    """The prompt of `generate`: its text or the interactive chat, and the limits on the number of tokens."""

    prompt: Annotated[
        str | None,
        typer.Option(
            "--prompt", "-p", metavar="TEXT", help="Prompt. Default: interactive chat, or standard input when piped."
        ),
    ] = None
    max_tokens: Annotated[
        int | None,
        typer.Option("--max-tokens", "-n", min=1, metavar="INTEGER", help="Maximum number of new tokens."),
    ] = None
    cache_length: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="INTEGER",
            help="Capacity of the KV cache in tokens. Default: 2048, or the model's maximum if less.",
        ),
    ] = None
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System message of the chat.")] = None
    no_chat: Annotated[
        bool, typer.Option("--no-chat", help="Continue the prompt as plain text, without the chat template.")
    ] = False

    def __post_init__(self) -> None:
        """Raise `InputError` if options contradict each other, the prompt is empty, or a text is not valid UTF-8."""
        from npu_compiler.errors import InputError

        if self.max_tokens is not None and self.cache_length is not None and self.max_tokens > self.cache_length:
            raise InputError(f"--max-tokens {self.max_tokens} is more than --cache-length {self.cache_length} holds")
        if self.no_chat and self.system is not None:
            raise InputError("--system needs the chat template; leave out --no-chat")
        if self.prompt == "":
            raise InputError("the prompt is empty")
        check_text(self.prompt, "the prompt")
        check_text(self.system, "the system message")

    @property
    def is_interactive(self) -> bool:
        """Whether to chat in the terminal: there is no prompt, and standard input is a terminal."""
        return self.prompt is None and sys.stdin is not None and sys.stdin.isatty()

    def messages(self, prompt: str) -> list[Message]:
        """Return a conversation of the system message, if there is one, and the prompt as the user's message."""
        messages = [{"role": "system", "content": self.system}] if self.system else []
        return [*messages, {"role": "user", "content": prompt}]


def generate(
    model: LanguageModelName,
    prompt_settings: PromptSettings,
    sampling: SamplingSettings,
    model_settings: ModelSettings,
    device_settings: DeviceSettings,
    kv_cache: KVCache = "none",
    trace: Trace = None,
    json: AsJSON = False,
) -> None:
    """Generate text with a language model."""
    from npu_compiler.errors import InputError
    from npu_runtime import Profiler
    from npu_sim.llm.loading import find_checkpoint

    interactive = prompt_settings.is_interactive
    if interactive and (prompt_settings.no_chat or json or trace):
        raise InputError("--no-chat, --json and --trace need a prompt: give it with --prompt or on standard input")
    if trace is not None and (device_settings.device or "").startswith("npu:"):
        raise InputError("--trace is of this machine's time; npu-sim simulate --trace is of a chip's")
    check_not_overwritten(trace, [Path(model)])
    adapter = model_settings.merged_adapter()
    if named := model_settings.named_adapters():
        raise InputError(f"--adapter {next(iter(named))}=…: names are for npu-sim serve; give the folder alone")
    prompt = "" if interactive else prompt_settings.prompt or _piped_prompt()
    find_checkpoint(model)
    # With a cache length of the user's own, it is first looked at whether the prompt fits, which takes the tokenizer.
    opening = device_settings.open_in_background() if prompt_settings.cache_length is None else None
    from npu_sim.llm import Conversation, LanguageModel, chat, complete, load_checkpoint

    sampler, profiler = sampling.sampler(), Profiler()
    with step(f"opening {model}"), profiler.on_host(f"open {model}"):
        settings = model_settings
        formats = settings.quantization, settings.activations, kv_cache
        checkpoint = load_checkpoint(model, settings.dtype, *formats, adapter=adapter)
        checkpoint = sampling.penalized(checkpoint)
    ids = _encoded(checkpoint, prompt, prompt_settings, settings.tensor_parallel)
    chosen = device_settings.open() if opening is None else opening.result()
    with answering_early(chosen):
        with progress(f"preparing {checkpoint.name}") as report, profiler.on_host("prepare the programs and weights"):
            network = LanguageModel(
                checkpoint,
                device=chosen,
                cache_length=prompt_settings.cache_length,
                progress=report,
                tensor_parallel=settings.tensor_parallel,
            )
            network.prepare(sampler, *([] if interactive else [len(ids)]))
        most = prompt_settings.max_tokens
        if interactive:
            conversation = Conversation(network, system=prompt_settings.system, max_new_tokens=most, sampler=sampler)
            chat_in_terminal(conversation, f"{network.device.name} ({network.device.backend.device})")
            return
        if prompt_settings.no_chat:
            stream = complete(network, prompt, max_new_tokens=most, sampler=sampler)
        else:
            stream = chat(network, prompt_settings.messages(prompt), max_new_tokens=most, sampler=sampler)
        text = _counted(stream, most) if json else "".join(_shown(stream))
        if trace is not None:
            profiler.host_spans += stream.spans
            profiler.save_trace(trace)
        if json:
            _print_generation(checkpoint.name, chosen, text, stream.stats, trace)
        else:
            _note_generation(chosen, stream.stats, trace, most)


def _encoded(checkpoint: Checkpoint, prompt: str, settings: PromptSettings, ranks: int) -> list[int]:
    """Return the token ids of the prompt; they are computed while the device opens.

    Raises:
        InputError: the tokens do not fit the KV cache, or the model cannot be divided among this number of ranks.
    """
    from npu_sim.llm import cache_capacity, check_fits, check_ranks, encode_chat

    tokenizer = checkpoint.tokenizer
    with concerning("--cache-length"):
        capacity = cache_capacity(checkpoint, settings.cache_length)
    with concerning("--tensor-parallel"):
        check_ranks(checkpoint, ranks)
    ids = tokenizer.encode(prompt) if settings.no_chat else encode_chat(checkpoint, settings.messages(prompt))
    check_fits(ids, capacity)
    return ids


def _print_generation(model: str, device: Device, text: str, stats: GenerationStats, trace: Path | None) -> None:
    from npu_sim.devices import simulated

    print_json(
        {
            "model": model,
            "device": device.name,
            "text": text,
            **asdict(stats),
            "prefill_tokens_per_second": stats.prefill_tokens_per_second,
            "decode_tokens_per_second": stats.decode_tokens_per_second,
            **({"chip": chip.chip.name} if (chip := simulated(device)) else {}),
            "trace": None if trace is None else str(trace),
        }
    )


def _note_generation(device: Device, stats: GenerationStats, trace: Path | None, most: int | None) -> None:
    from npu_sim.devices import simulated
    from npu_sim.llm import filled_cache

    note(speed(stats))
    if chip := simulated(device):
        first, rate = 1e3 * stats.first_token_seconds, stats.decode_tokens_per_second
        note(f"simulated on chip {chip.chip.name}: first token after {first:.4g} ms, then {rate:.4g} per second")
    if trace is not None:
        note(f"trace written to {trace}; ui.perfetto.dev opens it")
    if filled_cache(stats, most):
        note("the text ends here because the KV cache is full; a larger --cache-length holds more")


def _piped_prompt() -> str:
    """Read standard input as text without surrounding white space. Raises `InputError` if it is empty or not UTF-8."""
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
    """Pass on the pieces of a text, and print each one to stdout, with a newline at the end."""
    for piece in after_prefill(pieces):
        sys.stdout.write(piece)
        sys.stdout.flush()
        yield piece
    sys.stdout.write("\n")


def _counted(stream: TextStream, most: int | None) -> str:
    """Return the whole text of a generation, with a progress bar that counts its tokens.

    Args:
        most: Maximum number of new tokens. None: unknown.
    """
    text = ""
    with progress("generating") as report:
        for piece in stream:
            text += piece
            report(stream.stats.new_tokens, most)
    return text


def classify(
    image: Annotated[Path, typer.Argument(metavar="IMAGE", help="Image file: JPEG, PNG, WebP, ...")],
    *,
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
            metavar="FILE",
            callback=check_weights,
            help="Weights with torchvision's parameter names, or a folder from npu-sim quantize-network.",
        ),
    ] = None,
    top: Annotated[int, typer.Option(min=1, max=1000, metavar="INTEGER", help="Number of classes to show.")] = 5,
    dtype: Dtype = None,
    device_settings: DeviceSettings,
    json: AsJSON = False,
) -> None:
    """Classify an image into the 1000 ImageNet classes."""
    from npu_sim.devices import simulated
    from npu_sim.vision import Classifier, find_model, load_image

    find_model(model)
    picture = load_image(image)
    with step(f"preparing {model}"):
        chosen = device_settings.open()
    with answering_early(chosen):
        with step(f"preparing {model}"):
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


def models(as_json: AsJSON = False) -> None:
    """List the language models that run: model types, formats and limits, as tests have found them."""
    from npu_sim.llm.families import ROPE_TYPES
    from npu_sim.llm.gguf_architectures import ARCHITECTURES
    from npu_sim.llm.gguf_blocks import quantized_encodings
    from npu_sim.llm.loading import ACTIVATIONS, DTYPES, KV_CACHES, QUANTIZATIONS
    from npu_sim.llm.model_types import tried_types

    types = list(tried_types())
    formats = {
        "gguf": tuple(ARCHITECTURES),
        "gguf-types": quantized_encodings(),
        "dtype": DTYPES,
        "quantization": QUANTIZATIONS,
        "activations": ACTIVATIONS,
        "kv-cache": KV_CACHES,
        "rope": ROPE_TYPES,
    }
    if as_json:
        print_json({"model_types": [asdict(kind) for kind in types], **{name: list(x) for name, x in formats.items()}})
        return
    groups = {
        "generate and serve": [kind.name for kind in types if kind.generate and kind.serve],
        "generate only": [kind.name for kind in types if kind.generate and not kind.serve],
        "serve only": [kind.name for kind in types if kind.serve and not kind.generate],
    }
    for title, names in groups.items():
        if names:
            print(f"{title} ({len(names)} of {len(types)} model types): {', '.join(names)}\n")
    for kind in types:
        if not (kind.generate or kind.serve):
            print(f"refused: {kind.name}: {kind.reason}")
    print()
    for name, choices in formats.items():
        print(f"{name}: {', '.join(choices)}")
