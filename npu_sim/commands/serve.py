"""`serve`: a language model for many users at once, behind OpenAI's HTTP API."""

from __future__ import annotations

import math
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, overload

import typer

from npu_sim.commands.checks import check_device_options, check_file, check_log_level, check_text
from npu_sim.commands.completion import language_models, log_levels
from npu_sim.commands.console import concerning, note, progress, step
from npu_sim.commands.options import (
    Activations,
    CPULevel,
    DeviceName,
    Dtype,
    Fast,
    LanguageModelName,
    NoTune,
    Quantization,
    TensorParallel,
)
from npu_sim.commands.resources import open_device
from npu_sim.commands.serve_ray import RayOptions, remote_engine

if TYPE_CHECKING:
    from npu_sim.serving.http.interface import EngineLike

_PACKAGES = ("fastapi", "httptools", "llguidance", "prometheus_client", "uvicorn")


def _key_file(path: Path | None) -> Path | None:
    return None if path is None else check_file(path, "API keys")


def _count(option: str, text: str) -> typer.models.OptionInfo:
    """An option that is a number of things, at least one."""
    return typer.Option(option, min=1, metavar="INTEGER", help=text)  # type: ignore[no-any-return]


def _seconds(option: str, text: str) -> typer.models.OptionInfo:
    def finite(value: float | None) -> float | None:
        from npu_compiler.errors import InputError

        if value is not None and not 0 < value < math.inf:  # NaN passes Typer's own comparisons
            raise InputError(f"{option} must be a number of seconds above 0, not {value}")
        return value

    return typer.Option(option, callback=finite, metavar="SECONDS", help=text)  # type: ignore[no-any-return]


def serve(
    model: LanguageModelName,
    host: Annotated[
        str, typer.Option("--host", metavar="ADDRESS", help="Address to listen on; 0.0.0.0 is every one.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, metavar="INTEGER", help="Port to listen on; 0 is any free one.")
    ] = 8000,
    name: Annotated[
        str | None,
        typer.Option(
            "--name", metavar="TEXT", help="What clients call the model. Default: MODEL, without the folders above it."
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            "--api-key-file",
            metavar="FILE",
            callback=_key_file,
            help="API keys: a name, a space and a key on each line. One more may be in $NPU_SIM_API_KEY.",
        ),
    ] = None,
    context_length: Annotated[
        int | None,
        _count("--context-length", "Maximum tokens of a prompt and its reply. Default: 2048, or the model's if less."),
    ] = None,
    cache_tokens: Annotated[
        int | None,
        _count("--cache-tokens", "Capacity of the KV cache that all requests share. Default: that of 8 contexts."),
    ] = None,
    max_batch: Annotated[
        int,
        typer.Option("--max-batch", min=1, max=128, metavar="INTEGER", help="Maximum sequences generated at once."),
    ] = 128,
    prefill_tokens: Annotated[
        int | None,
        _count("--prefill-tokens", "Maximum prompt tokens of a step. Default: what other requests hardly notice."),
    ] = None,
    speculate: Annotated[
        bool, typer.Option("--speculate", help="Guess tokens from a request's own text and verify several at once.")
    ] = False,
    draft: Annotated[
        str | None,
        typer.Option(
            "--draft",
            metavar="MODEL",
            autocompletion=language_models,
            help="Guess tokens with this smaller model, which has the same tokenizer, and verify several at once.",
        ),
    ] = None,
    max_requests: Annotated[int, _count("--max-requests", "Maximum requests at once, the queue included.")] = 256,
    max_requests_per_key: Annotated[
        int | None, _count("--max-requests-per-key", "Maximum requests at once with one API key.")
    ] = None,
    max_requests_per_minute: Annotated[
        int | None, _count("--max-requests-per-minute", "Maximum requests a minute with one API key.")
    ] = None,
    max_connections: Annotated[int, _count("--max-connections", "Maximum open connections.")] = 4096,
    max_body_bytes: Annotated[int, _count("--max-body-bytes", "Maximum size of a request's body.")] = 4 << 20,
    max_prompt_tokens: Annotated[int | None, _count("--max-prompt-tokens", "Maximum tokens of a prompt.")] = None,
    max_new_tokens: Annotated[int | None, _count("--max-new-tokens", "Maximum new tokens of a reply.")] = None,
    request_timeout: Annotated[
        float | None, _seconds("--request-timeout", "Maximum time of a request, queueing included. Default: none.")
    ] = None,
    header_timeout: Annotated[
        float, _seconds("--header-timeout", "Maximum time for a request's head, and of an idle connection.")
    ] = 10.0,
    body_timeout: Annotated[float, _seconds("--body-timeout", "Maximum time for a request's body.")] = 30.0,
    write_timeout: Annotated[
        float, _seconds("--write-timeout", "Maximum time in which a client takes nothing of its output.")
    ] = 30.0,
    drain_timeout: Annotated[
        float, _seconds("--drain-timeout", "Time for requests under way to end after SIGTERM or Ctrl-C.")
    ] = 30.0,
    log_level: Annotated[
        str,
        typer.Option(
            "--log-level",
            metavar="LEVEL",
            callback=check_log_level,
            autocompletion=log_levels,
            help="Least level of the logs, JSON lines on stderr: debug, info, warning or error.",
        ),
    ] = "info",
    dtype: Dtype = None,
    quantization: Quantization = "checkpoint",
    activations: Activations = "checkpoint",
    device: DeviceName = None,
    cpu_level: CPULevel = None,
    fast: Fast = False,
    no_tune: NoTune = False,
    tensor_parallel: TensorParallel = 1,
    ray: Annotated[
        bool,
        typer.Option("--ray", help="Run the model in replicas on a Ray cluster; without --ray-address, a local one."),
    ] = False,
    ray_address: Annotated[
        str | None,
        typer.Option(
            "--ray-address", metavar="ADDRESS", help="The Ray cluster to join, such as auto or 10.0.0.1:6379."
        ),
    ] = None,
    replicas: Annotated[int | None, _count("--replicas", "Fixed number of replicas. Default: 1.")] = None,
    min_replicas: Annotated[
        int | None, _count("--min-replicas", "Least number of replicas; it follows the number of requests.")
    ] = None,
    max_replicas: Annotated[int | None, _count("--max-replicas", "Greatest number of replicas.")] = None,
    replica_cpus: Annotated[
        int | None,
        _count("--replica-cpus", "CPU cores of each rank of a replica. Default: all, evenly; 1 with --ray-address."),
    ] = None,
) -> None:
    """Serve a language model over HTTP, as OpenAI's API does."""
    from npu_compiler.errors import InputError
    from npu_sim.llm.loading import find_checkpoint

    check_device_options(device, cpu_level, fast, no_tune)
    if max_new_tokens is not None and context_length is not None and max_new_tokens > context_length:
        raise InputError(f"--max-new-tokens {max_new_tokens} is more than --context-length {context_length}")
    if cache_tokens is not None and context_length is not None and cache_tokens < context_length:
        raise InputError(f"--cache-tokens {cache_tokens} is less than --context-length {context_length}")
    if check_text(name, "the model's name") == "":
        raise InputError("--name is empty; leave it out for the model's own")
    if speculate and draft is not None:
        raise InputError("--speculate and --draft are two ways to guess tokens; leave out one of them")
    on_ray = RayOptions(ray, ray_address, replicas, min_replicas, max_replicas, replica_cpus)
    on_ray.check(device)
    find_checkpoint(model)
    if draft is not None:
        with concerning("--draft"):
            find_checkpoint(draft)
    if missing := [package for package in _PACKAGES if find_spec(package) is None]:
        raise InputError(
            f"serving needs {' and '.join(missing)}, which is not installed: pip install 'npu-simulation[serve]'"
        )
    from npu_sim.llm import load_checkpoint
    from npu_sim.llm.checkpoint import check_ranks
    from npu_sim.llm.loading import SHORTHANDS
    from npu_sim.serving.engine_setup import (
        EngineSettings,
        ReplicaSettings,
        check_same_tokens,
        most_tokens,
        open_drafts,
        open_model,
        prepare_steps,
        start_engine,
    )
    from npu_sim.serving.http import (
        Limits,
        ModelText,
        ServedModel,
        allow_connections,
        listen,
        make_application,
        read_keys,
        run_server,
    )
    from npu_sim.serving.http.logs import start_logging

    limits = Limits(
        body_bytes=max_body_bytes,
        connections=max_connections,
        requests=max_requests,
        requests_per_key=max_requests_per_key,
        requests_per_minute=max_requests_per_minute,
        prompt_tokens=max_prompt_tokens,
        new_tokens=max_new_tokens,
        header_seconds=header_timeout,
        body_seconds=body_timeout,
        write_seconds=write_timeout,
        request_seconds=request_timeout,
    )
    settings = EngineSettings(
        context_length, cache_tokens, max_batch, max_requests, prefill_tokens, speculate, tensor_parallel
    )
    keys = read_keys(api_key_file)
    if (allowed := allow_connections(max_connections)) < max_connections:
        note(f"warning: this system allows {allowed} connections, not {max_connections}; see ulimit -n")
    listener = listen(host, port)
    loopback = listener.getsockname()[0] in ("127.0.0.1", "::1")
    if not keys and not loopback:
        note(f"warning: anyone who reaches {host} can use this server; --api-key-file lets in only those with a key")
    with step(f"opening {model}"):
        checkpoint = load_checkpoint(model, dtype, quantization, activations)
        check_ranks(checkpoint, tensor_parallel)
        text = ModelText(checkpoint)
    small = None
    if draft is not None:
        with step(f"opening {draft}"), concerning("--draft"):
            small = load_checkpoint(draft, dtype)
            check_same_tokens(small, checkpoint)
    called = name or (model if model in SHORTHANDS else checkpoint.name)
    with ExitStack() as stack:
        engine: EngineLike
        if ray:
            named = "metal-emulator-fast" if fast else device
            asked = ReplicaSettings(
                _anywhere(model),
                dtype,
                quantization,
                activations,
                named,
                not no_tune,
                settings,
                _anywhere(draft),
                cpu_level,
            )
            engine, facts = stack.enter_context(
                remote_engine(called, asked, on_ray, capacity=max_requests + max_batch, drain_seconds=drain_timeout)
            )
            context, place = facts.context_length, f"{facts.device} in {on_ray.described}"
        else:
            chosen = open_device(device, fast, no_tune)
            with concerning("--context-length"), progress(f"preparing {checkpoint.name}") as report:
                network = open_model(checkpoint, chosen, settings, report)
            stack.callback(network.close)
            drafts = None
            if small is not None:
                with concerning("--draft"), progress(f"preparing {small.name}") as report:
                    drafts = open_drafts(small, network, report)
                stack.callback(drafts.close)
            note(
                "preparing programs for batches of every size; the first start with a model compiles them, for minutes"
            )
            for one in (network,) if drafts is None else (network, drafts):
                with progress(f"preparing the programs of {one.checkpoint.name}") as report:
                    prepare_steps(one, report)
            engine = start_engine(network, settings, drafts)
            context, place = most_tokens(network), f"{chosen.name} ({chosen.backend.device})"
        served = ServedModel(called, text, context)
        application = make_application(served, engine, keys, limits, only_loopback=loopback and not keys)
        start_logging(log_level)

        def announce(url: str) -> None:
            note(f"{served.name} on {place} is served at {url}; Ctrl-C ends it when its requests have ended")

        run_server(application, limits, listener, drain_seconds=drain_timeout, ready=announce)


@overload
def _anywhere(model: str) -> str: ...
@overload
def _anywhere(model: None) -> None: ...
def _anywhere(model: str | None) -> str | None:
    """What names the model for a process that works in another folder."""
    return str(Path(model).resolve()) if model is not None and Path(model).exists() else model
