"""A serving engine without a model that replies by a script, and a server around it in a thread."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import openai

from npu_compiler.errors import NPUError
from npu_sim.llm import Checkpoint, StreamDecoder
from npu_sim.llm.engine.stats import EngineStats, Observations
from npu_sim.llm.tokenizer import load_tokenizer
from npu_sim.serving.engine import EngineClosedError, QueueFullError
from npu_sim.serving.http.app import Application, make_application
from npu_sim.serving.http.keys import APIKeys
from npu_sim.serving.http.limits import Limits
from npu_sim.serving.http.server import Server, listen
from npu_sim.serving.http.service import ServedModel
from npu_sim.serving.http.text import ModelText
from npu_sim.serving.request import Request, TokenLogprobs, Update, Usage

NAME = "tiny"
CONTEXT = 2048
PLAIN = """
{%- for message in messages %}<|im|>{{ message.role }}
{{ message.content }}</s>{% endfor %}
{%- if add_generation_prompt %}<|im|>assistant
{% endif %}"""
HERMES = """
{%- if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools> by <tool_call>{% endif %}
{%- for message in messages %}<|im|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}</s>{% endfor %}
{%- if add_generation_prompt %}<|im|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"""
LLAMA = """
{%- if tools %}Reply with {"name": function name, "parameters": arguments}: {{ tools | tojson }}{% endif %}
{%- for message in messages %}<|im|>{{ message.role }}
{{ message.content }}</s>{% endfor %}"""


def text_checkpoint(folder: Path, template: str = PLAIN) -> Checkpoint:
    """A checkpoint that has a byte-level tokenizer of 303 tokens and no weights."""
    from tiny_llms import save_tokenizer

    save_tokenizer(folder, template)
    return open_checkpoint(folder)


def open_checkpoint(folder: Path) -> Checkpoint:
    """Open the checkpoint that `text_checkpoint` made in a folder."""
    tokenizer = load_tokenizer(folder)
    eos = frozenset({tokenizer.eos_token_id})
    return Checkpoint(NAME, SimpleNamespace(vocab_size=304), {}, "float32", lambda: tokenizer, eos)


@dataclass(frozen=True)
class Script:
    """The engine's reaction to a request.

    Attributes:
        text: The reply, again and again if it is to be endless.
        delay: Seconds before each token.
        error: Ends the request after `text`.
    """

    text: str = "Hello, world!"
    endless: bool = False
    delay: float = 0.0
    error: str | None = None


class FakeEngine:
    """Takes requests from any thread and replies by a script.

    Args:
        script: The reaction to each request.
        capacity: Maximum number of requests at once; more are refused.

    Attributes:
        requests: All that were taken.
        active: The requests that have not ended.
    """

    def __init__(self, tokenizer: Any, script: Callable[[Request], Script] | Script, capacity: int = 1000) -> None:
        self.tokenizer = tokenizer
        self.requests: list[Request] = []
        self.active: set[FakeHandle] = set()
        self.closed = False
        self.failed: str | None = None
        self._draining = False
        self._script = script
        self._capacity = capacity

    def submit(self, request: Request) -> FakeHandle:
        if self.failed:
            raise EngineClosedError(self.failed)
        if self._draining or self.closed or len(self.active) >= self._capacity:
            raise QueueFullError("the queue is full")
        script = self._script if isinstance(self._script, Script) else self._script(request)
        handle = FakeHandle(self, request, script)
        self.requests.append(request)
        self.active.add(handle)
        return handle

    def stats(self) -> EngineStats:
        nothing = Observations().histogram()
        return EngineStats(
            waiting=0,
            running=len(self.active),
            batch_size=len(self.active),
            steps=0,
            prompt_tokens=sum(len(request.prompt) for request in self.requests),
            cached_tokens=0,
            new_tokens=0,
            drafted_tokens=0,
            accepted_tokens=0,
            blocks_free=1000 - len(self.active),
            blocks_used=len(self.active),
            blocks_cached=0,
            rows_empty=0,
            preemptions=0,
            finished={"stop": len(self.requests) - len(self.active)},
            queue_seconds=nothing,
            first_token_seconds=nothing,
            between_tokens_seconds=nothing,
            step_seconds=nothing,
        )

    def drain(self, timeout: float | None = None) -> bool:
        self._draining = True
        until = time.monotonic() + (1e9 if timeout is None else timeout)
        while self.active and not self.closed and time.monotonic() < until:
            time.sleep(0.005)
        return not self.active

    def close(self) -> None:
        self.closed = True


@dataclass(eq=False)
class FakeHandle:
    """A request's updates; one token each."""

    engine: FakeEngine
    request: Request
    script: Script
    cancelled: bool = False
    new: int = 0
    _decoder: StreamDecoder = field(init=False)

    def __post_init__(self) -> None:
        self._decoder = StreamDecoder(self.engine.tokenizer)

    @property
    def usage(self) -> Usage:
        return Usage(len(self.request.prompt), 0, self.new)

    def cancel(self) -> None:
        self.cancelled = True
        self.engine.active.discard(self)

    def __iter__(self) -> Iterator[Update]:
        raise NotImplementedError

    async def __aiter__(self) -> AsyncIterator[Update]:
        try:
            async for update in self._updates():
                yield update
        except NPUError as error:  # of the grammar
            yield Update(finish_reason="error", error=str(error))
        finally:
            self.engine.active.discard(self)

    async def _updates(self) -> AsyncIterator[Update]:
        shown = ""
        if self.request.prompt_logprobs is not None:
            top = self.request.prompt_logprobs
            yield Update(prompt_logprobs=tuple(self._logprobs(token, top) for token in self.request.prompt[1:]))
        if self.request.max_new_tokens == 0:
            yield Update(finish_reason="length")
            return
        for token in self._tokens():
            await asyncio.sleep(self.script.delay)
            if self.engine.closed or self.cancelled:
                yield Update(finish_reason="cancelled")
                return
            self.new += 1
            before, shown = shown, shown + self._decoder.push(token)
            logprobs = () if self.request.logprobs is None else (self._logprobs(token, self.request.logprobs),)
            if found := [shown.find(stop) for stop in self.request.stop if stop in shown]:
                yield Update((token,), shown[len(before) : min(found)], logprobs, "stop")
                return
            yield Update((token,), shown[len(before) :], logprobs)
            if self.new == self.request.max_new_tokens:
                yield Update((), self._decoder.flush(), finish_reason="length")
                return
        if self.script.error is not None:
            yield Update(finish_reason="error", error=self.script.error)
        else:
            yield Update((), self._decoder.flush(), finish_reason="stop")

    def _tokens(self) -> Iterator[int]:
        rules = self.request.token_filter
        if rules is None:
            ids = self.engine.tokenizer.encode(self.script.text, add_special_tokens=False)
            while True:
                yield from ids
                if not self.script.endless:
                    return
        end = self.engine.tokenizer.eos_token_id
        rng = np.random.default_rng(self.request.sampling.seed or 0)
        while True:
            allowed = np.flatnonzero(rules.allowed()).tolist()
            if end in allowed:
                return
            token = self._closing(allowed) or int(rng.choice(allowed))
            rules.advance(token)
            yield token

    def _closing(self, allowed: Sequence[int]) -> int | None:
        """A token that ends a string, so that the text ends some time."""
        for text in ('"', "}"):
            token = self.engine.tokenizer.encode(text, add_special_tokens=False)[0]
            if token in allowed:
                return int(token)
        return None

    def _logprobs(self, token: int, top: int) -> TokenLogprobs:
        return TokenLogprobs(token, -0.5, tuple((token + rank, -0.5 - rank) for rank in range(top)))


@dataclass(frozen=True)
class Served:
    """A server in a thread.

    Attributes:
        url: The server's address, without a path.
    """

    url: str
    engine: FakeEngine
    application: Application
    stop: Callable[[], None]

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def metric(self, name: str) -> float:
        """A metric by its name and labels; 0 if there is none."""
        lines = [line.rpartition(" ") for line in self.application.metrics.text().decode().splitlines()]
        return next((float(value) for found, _, value in lines if found == name), 0.0)

    def wait_until(self, condition: Callable[[], bool], seconds: float = 10.0) -> None:
        """Wait for a condition, and fail if it does not come."""
        until = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < until, "the server did not get there"
            time.sleep(0.01)


@contextmanager
def served(
    checkpoint: Any,
    script: Callable[[Request], Script] | Script = Script(),
    *,
    engine: Any = None,
    keys: dict[str, str] | None = None,
    capacity: int = 1000,
    drain_seconds: float = 5.0,
    **limits: Any,
) -> Iterator[Served]:
    """A server with a checkpoint's tokenizer, on a free port of this machine.

    Args:
        engine: Default: a `FakeEngine`.
    """
    engine = engine or FakeEngine(checkpoint.tokenizer, script, capacity)
    bounds = replace(Limits(), **limits)
    model = ServedModel(NAME, ModelText(checkpoint), CONTEXT, tuple(checkpoint.adapters))
    application = make_application(model, engine, APIKeys(keys or {}), bounds, only_loopback=True)
    with running(application, bounds, drain_seconds) as (url, stop):
        yield Served(url, engine, application, stop)


@contextmanager
def running(
    application: Application, limits: Limits, drain_seconds: float = 5.0
) -> Iterator[tuple[str, Callable[[], None]]]:
    """An application on a free port of this machine: its address, and a function that begins its end."""
    listener = listen("127.0.0.1", 0)
    server = Server(application, limits, drain_seconds)
    loop = asyncio.new_event_loop()

    def run() -> None:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(server.serve([listener]))
        loop.close()

    def stop() -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(server.stop)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", stop
    finally:
        for _ in range(2):  # twice: at once
            stop()
            time.sleep(0.05)
        thread.join(60)
        application.service.close()
        assert not thread.is_alive()


def client_of(server: Served, key: str = "none", **options: Any) -> openai.OpenAI:
    """OpenAI's own client of a server, with an API key; a request is tried once."""
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=30, **options)
