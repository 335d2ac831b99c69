"""The command `serve`: a language model or an encoder for many users at once, behind OpenAI's HTTP API.

docs/engine.md, "Where everything is", lists the files of the server and the engine.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from npu_sim.commands.checks import check_file, check_text
from npu_sim.commands.completion import language_models
from npu_sim.commands.console import concerning, note, progress, step
from npu_sim.commands.options import LanguageModelName, count_option, name_option
from npu_sim.commands.serve_encoder import check_encoder_options, find_encoder, open_encoder
from npu_sim.commands.serve_ray import RaySettings, remote_engine
from npu_sim.commands.serve_simulated import SimulatedModel, SimulationSettings, serve_on_chip
from npu_sim.commands.settings import DeviceSettings, ModelSettings

if TYPE_CHECKING:
    from socket import socket

    from npu_runtime import Device
    from npu_sim.encoders import CrossEncoderFolder, EmbedderFolder
    from npu_sim.llm import Checkpoint
    from npu_sim.serving.engine_setup import EngineSettings, ReplicaSettings
    from npu_sim.serving.http import Limits
    from npu_sim.serving.http.interface import EngineLike

_PACKAGES = ("fastapi", "httptools", "llguidance", "prometheus_client", "uvicorn")


def _key_file(path: Path | None) -> Path | None:
    return None if path is None else check_file(path, "API keys")


def _model_name(name: str | None) -> str | None:
    from npu_compiler.errors import InputError

    if check_text(name, "the model's name") == "":
        raise InputError("--name is empty; leave it out for the model's own")
    return name


def _seconds_option(text: str) -> Any:
    """Return a Typer option for a finite, positive time in seconds."""

    def finite(context: typer.Context, parameter: typer.CallbackParam, value: float | None) -> float | None:
        from npu_compiler.errors import InputError

        if value is not None and not 0 < value < math.inf:  # NaN passes Typer's own comparisons
            raise InputError(f"{parameter.opts[0]} must be a number of seconds above 0, not {value}")
        return value

    return typer.Option(callback=finite, metavar="SECONDS", help=text)


@dataclass(frozen=True)
class ListenSettings:
    """The address on which the server listens, the model's name, and the clients' keys."""

    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Address to listen on; 0.0.0.0 is every one.")] = (
        "127.0.0.1"
    )
    port: Annotated[
        int, typer.Option(min=0, max=65535, metavar="INTEGER", help="Port to listen on; 0 is any free one.")
    ] = 8000
    name: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            callback=_model_name,
            help="What clients call the model. Default: MODEL, without the folders above it.",
        ),
    ] = None
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            callback=_key_file,
            help="API keys: a name, a space and a key on each line. One more may be in $NPU_SIM_API_KEY.",
        ),
    ] = None
    lenient: Annotated[
        bool, typer.Option("--lenient", help="Ignore parameters of requests that are unknown or not supported.")
    ] = False


@dataclass(frozen=True)
class BatchSettings:
    """The serving engine's context length, KV cache, batch sizes and speculative decoding."""

    context_length: Annotated[
        int | None, count_option("Maximum tokens of a prompt and its reply. Default: 2048, or the model's if less.")
    ] = None
    cache_tokens: Annotated[
        int | None, count_option("Capacity of the KV cache that all requests share. Default: that of 8 contexts.")
    ] = None
    max_batch: Annotated[int, count_option("Maximum sequences generated at once.", most=128)] = 128
    prefill_tokens: Annotated[
        int | None, count_option("Maximum prompt tokens of a step. Default: what other requests hardly notice.")
    ] = None
    speculate: Annotated[
        bool, typer.Option("--speculate", help="Guess tokens from a request's own text and verify several at once.")
    ] = False
    draft: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            autocompletion=language_models,
            help="Guess tokens with this smaller model, which has the same tokenizer, and verify several at once.",
        ),
    ] = None

    def __post_init__(self) -> None:
        """Raise `InputError` if options contradict each other, such as a KV cache smaller than the context length."""
        from npu_compiler.errors import InputError

        context, cache = self.context_length, self.cache_tokens
        if cache is not None and context is not None and cache < context:
            raise InputError(f"--cache-tokens {cache} is less than --context-length {context}")
        if self.speculate and self.draft is not None:
            raise InputError("--speculate and --draft are two ways to guess tokens; leave out one of them")

    def engine_settings(self, max_waiting: int, tensor_parallel: int) -> EngineSettings:
        """Return these options as settings of the serving engine."""
        from npu_sim.serving.engine_setup import EngineSettings

        return EngineSettings(
            context_length=self.context_length,
            cache_tokens=self.cache_tokens,
            max_batch=self.max_batch,
            max_waiting=max_waiting,
            prefill_tokens=self.prefill_tokens,
            speculate=self.speculate,
            tensor_parallel=tensor_parallel,
        )


@dataclass(frozen=True)
class LimitSettings:
    """The server's limits on requests and connections, and its timeouts."""

    max_requests: Annotated[int, count_option("Maximum requests at once, the queue included.")] = 256
    max_requests_per_key: Annotated[int | None, count_option("Maximum requests at once with one API key.")] = None
    max_requests_per_minute: Annotated[int | None, count_option("Maximum requests a minute with one API key.")] = None
    max_connections: Annotated[int, count_option("Maximum open connections.")] = 4096
    max_body_bytes: Annotated[int, count_option("Maximum size of a request's body.")] = 4 << 20
    max_prompt_tokens: Annotated[int | None, count_option("Maximum tokens of a prompt.")] = None
    max_new_tokens: Annotated[int | None, count_option("Maximum new tokens of a reply.")] = None
    request_timeout: Annotated[
        float | None, _seconds_option("Maximum time of a request, queueing included. Default: none.")
    ] = None
    header_timeout: Annotated[
        float, _seconds_option("Maximum time for a request's head, and of an idle connection.")
    ] = 10.0
    body_timeout: Annotated[float, _seconds_option("Maximum time for a request's body.")] = 30.0
    write_timeout: Annotated[float, _seconds_option("Maximum time in which a client takes nothing of its output.")] = (
        30.0
    )
    drain_timeout: Annotated[float, _seconds_option("Time for requests under way to end after SIGTERM or Ctrl-C.")] = (
        30.0
    )

    def limits(self) -> Limits:
        """Return these options as limits of the HTTP server, except for `drain_timeout`, which is not one of them."""
        from npu_sim.serving.http import Limits

        given = {name.removeprefix("max_").replace("timeout", "seconds"): value for name, value in vars(self).items()}
        del given["drain_seconds"]
        return Limits(**given)


def serve(
    model: LanguageModelName,
    listening: ListenSettings,
    batching: BatchSettings,
    limiting: LimitSettings,
    log_level: Annotated[
        str,
        name_option(
            what="log level",
            names="npu_sim.commands.checks:LOG_LEVELS",
            metavar="LEVEL",
            text="Least level of the logs, JSON lines on stderr: debug, info, warning or error.",
        ),
    ] = "info",
    *,
    model_settings: ModelSettings,
    device_settings: DeviceSettings,
    on_ray: RaySettings,
    simulation: SimulationSettings,
) -> None:
    """Serve a language model over HTTP, as OpenAI's API does; or simulate that on a chip (--simulate)."""
    from npu_compiler.errors import InputError

    simulation.check(_unfit(batching, model_settings, device_settings, on_ray))
    if simulation.simulate is not None:
        _simulate(
            SimulatedModel(model, model_settings.dtype, model_settings.quantization), simulation, batching, limiting
        )
        return
    _check_packages()
    if (encoder := find_encoder(model)) is not None:
        unfit = {
            **_unfit(batching, model_settings, device_settings, on_ray),
            "--cache-tokens": batching.cache_tokens is not None,
            "--prefill-tokens": batching.prefill_tokens is not None,
            "--max-new-tokens": limiting.max_new_tokens is not None,
        }
        check_encoder_options(encoder, {option: given for option, given in unfit.items() if option != "--device"})
        _serve_encoder(encoder, listening, batching, limiting, log_level, model_settings, device_settings)
        return
    _check_serving(model, batching, limiting)
    on_ray.check(device_settings.device)
    from npu_sim.llm.loading import SHORTHANDS
    from npu_sim.serving.http import ModelText, ServedModel, make_application, read_keys, run_server
    from npu_sim.serving.http.logs import start_logging

    limits, keys = limiting.limits(), read_keys(listening.api_key_file)
    listener, loopback = _listener(listening, limits, bool(keys))
    checkpoint, small = _checkpoints(model, model_settings, batching.draft)
    text = ModelText(checkpoint)
    called = listening.name or (model if model in SHORTHANDS else checkpoint.name)
    if called in checkpoint.adapters:
        raise InputError(f"--adapter: the name {called!r} is that of the base; choose another, or another --name")
    settings = batching.engine_settings(limits.requests, model_settings.tensor_parallel)
    with ExitStack() as stack:
        engine: EngineLike
        if on_ray.ray:
            replica = _replica_settings(model, batching.draft, model_settings, device_settings, settings)
            capacity, drain = limits.requests + batching.max_batch, limiting.drain_timeout
            engine, facts = stack.enter_context(
                remote_engine(called, replica, on_ray, capacity=capacity, drain_seconds=drain)
            )
            context, place = facts.context_length, f"{facts.device} in {on_ray.described}"
        else:
            device = device_settings.open()
            engine, context = _local_engine(stack, checkpoint, small, device, settings)
            place = f"{device.name} ({device.backend.device})"
        served = ServedModel(called, text, context, tuple(checkpoint.adapters))
        local = loopback and not keys
        application = make_application(served, engine, keys, limits, only_loopback=local, lenient=listening.lenient)
        start_logging(log_level)

        def announce(url: str) -> None:
            if checkpoint.sampling:
                said = ", ".join(f"{name} {value:g}" for name, value in checkpoint.sampling.items())
                note(f"requests that name no sampling settings get those of generation_config.json: {said}")
            names = " and ".join((served.name, *served.adapters))
            note(f"{names} on {place} is served at {url}; Ctrl-C ends it when its requests have ended")

        run_server(application, limits, listener, drain_seconds=limiting.drain_timeout, ready=announce)


def _serve_encoder(
    folder: EmbedderFolder | CrossEncoderFolder,
    listening: ListenSettings,
    batching: BatchSettings,
    limiting: LimitSettings,
    log_level: str,
    model_settings: ModelSettings,
    device_settings: DeviceSettings,
) -> None:
    """Run an HTTP server for an embedding model or a cross-encoder until it is stopped."""
    from npu_sim.serving.encoder_engine import EncoderEngine
    from npu_sim.serving.http import ServedEncoder, make_encoder_application, read_keys, run_server
    from npu_sim.serving.http.logs import start_logging

    limits, keys = limiting.limits(), read_keys(listening.api_key_file)
    listener, loopback = _listener(listening, limits, bool(keys))
    encoder, place = open_encoder(folder, model_settings, device_settings, batching.context_length, batching.max_batch)
    served = ServedEncoder(listening.name or folder.name, encoder)
    application = make_encoder_application(
        served, EncoderEngine(encoder), keys, limits, only_loopback=loopback and not keys, lenient=listening.lenient
    )
    start_logging(log_level)

    def announce(url: str) -> None:
        note(f"{served.name} on {place} is served at {url}; Ctrl-C ends it when its requests have ended")

    run_server(application, limits, listener, drain_seconds=limiting.drain_timeout, ready=announce)


def _unfit(
    batching: BatchSettings, model: ModelSettings, device: DeviceSettings, on_ray: RaySettings
) -> dict[str, bool]:
    """Map each option that cannot be combined with a simulated chip to whether the user gave it."""
    return {
        "--speculate": batching.speculate,
        "--draft": batching.draft is not None,
        "--activations": model.activations != "checkpoint",
        "--tensor-parallel": model.tensor_parallel != 1,
        "--adapter": bool(model.adapter),
        "--device": device.device is not None,
        "--ray": on_ray.ray,
    }


def _simulate(
    model: SimulatedModel, simulation: SimulationSettings, batching: BatchSettings, limiting: LimitSettings
) -> None:
    """Simulate how a chip would serve requests with a language model, and print the result."""
    assert simulation.simulate is not None
    settings = {
        "context_length": batching.context_length,
        "cache_tokens": batching.cache_tokens,
        "max_batch": batching.max_batch,
        "prefill_tokens": batching.prefill_tokens,
        "max_requests": limiting.max_requests,
    }
    requests = simulation.read_requests()
    csv, json = simulation.csv, simulation.json
    serve_on_chip(model, simulation.simulate, requests, settings, option="--simulate", csv=csv, json=json)


def _check_packages() -> None:
    """Raise `InputError` if a package that serving needs is not installed."""
    from npu_compiler.errors import InputError
    from npu_compiler.installing import install_command

    if missing := [package for package in _PACKAGES if find_spec(package) is None]:
        raise InputError(f"serving needs {' and '.join(missing)}, which is not installed: {install_command('serve')}")


def _check_serving(model: str, batching: BatchSettings, limiting: LimitSettings) -> None:
    """Raise `InputError` if limits contradict the engine's settings, or the model or draft model is not found."""
    from npu_compiler.errors import InputError
    from npu_sim.llm.loading import find_checkpoint

    new, context = limiting.max_new_tokens, batching.context_length
    if new is not None and context is not None and new > context:
        raise InputError(f"--max-new-tokens {new} is more than --context-length {context}")
    find_checkpoint(model)
    if batching.draft is not None:
        with concerning("--draft"):
            find_checkpoint(batching.draft)


def _listener(listening: ListenSettings, limits: Limits, has_keys: bool) -> tuple[socket, bool]:
    """Open the listening socket; return it, and whether only this machine can reach it.

    Prints warnings if the system allows fewer connections, or if others can use the server without a key.
    """
    from npu_sim.serving.http import allow_connections, listen

    if (allowed := allow_connections(limits.connections)) < limits.connections:
        note(f"warning: this system allows {allowed} connections, not {limits.connections}; see ulimit -n")
    listener = listen(listening.host, listening.port)
    loopback = listener.getsockname()[0] in ("127.0.0.1", "::1")
    if not has_keys and not loopback:
        note(
            f"warning: anyone who reaches {listening.host} can use this server; --api-key-file lets in only those "
            "with a key"
        )
    return listener, loopback


def _checkpoints(model: str, settings: ModelSettings, draft: str | None) -> tuple[Checkpoint, Checkpoint | None]:
    """Open the checkpoints of the model and of the draft model for speculative decoding (None if there is none).

    Raises:
        InputError: one cannot be opened, the model cannot be divided among the ranks, or the tokenizers differ.
    """
    from npu_sim.llm import check_ranks, load_checkpoint
    from npu_sim.serving.engine_setup import check_same_tokens

    with step(f"opening {model}"):
        merged, named = settings.merged_adapter(), settings.named_adapters()
        formats = settings.quantization, settings.activations
        checkpoint = load_checkpoint(model, settings.dtype, *formats, adapter=merged, adapters=named)
        check_ranks(checkpoint, settings.tensor_parallel)
    if draft is None:
        return checkpoint, None
    with step(f"opening {draft}"), concerning("--draft"):
        small = load_checkpoint(draft, settings.dtype)
        check_same_tokens(small, checkpoint)
    return checkpoint, small


def _local_engine(
    stack: ExitStack, checkpoint: Checkpoint, small: Checkpoint | None, device: Device, settings: EngineSettings
) -> tuple[EngineLike, int]:
    """Start an engine in this process; return it and the maximum number of tokens of a request, prompt included.

    Args:
        stack: Exit stack that closes the models.
        small: Checkpoint of the draft model. None: no draft model.
    """
    from npu_sim.serving.engine_setup import most_tokens, open_drafts, open_model, prepare_steps, start_engine

    with concerning("--context-length"), progress(f"preparing {checkpoint.name}") as report:
        network = open_model(checkpoint, device, settings, report)
    stack.callback(network.close)
    drafts = None
    if small is not None:
        with concerning("--draft"), progress(f"preparing {small.name}") as report:
            drafts = open_drafts(small, network, report)
        stack.callback(drafts.close)
    note("preparing programs for batches of every size; the first start with a model compiles them, for minutes")
    for each in (network,) if drafts is None else (network, drafts):
        with progress(f"preparing the programs of {each.checkpoint.name}") as report:
            prepare_steps(each, report)
    return start_engine(network, settings, drafts), most_tokens(network)


def _replica_settings(
    model: str,
    draft: str | None,
    model_settings: ModelSettings,
    device_settings: DeviceSettings,
    engine: EngineSettings,
) -> ReplicaSettings:
    """Return the settings with which each replica on a Ray cluster opens the model."""
    from npu_sim.serving.engine_setup import ReplicaSettings

    return ReplicaSettings(
        _absolute(model),
        model_settings.dtype,
        model_settings.quantization,
        model_settings.activations,
        device_settings.device,
        not device_settings.no_tune,
        engine,
        None if draft is None else _absolute(draft),
        device_settings.cpu_level,
        None if (merged := model_settings.merged_adapter()) is None else _absolute(merged),
        tuple((name, _absolute(folder)) for name, folder in model_settings.named_adapters().items()),
    )


def _absolute(model: str) -> str:
    """Make the path of a local model absolute, for a process in another folder; other names stay as they are."""
    return str(Path(model).resolve()) if Path(model).exists() else model
