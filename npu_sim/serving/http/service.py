"""`Service`: the model and the engine for all routes, with the checks that turn a body into requests to the engine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from npu_sim.serving.http.choices import Choices
from npu_sim.serving.http.errors import APIError, model_not_found
from npu_sim.serving.http.interface import EngineLike
from npu_sim.serving.http.limits import Limits
from npu_sim.serving.http.metrics import Metrics
from npu_sim.serving.http.text import ModelText
from npu_sim.serving.http.workers import Workers
from npu_sim.serving.request import Request


@dataclass(frozen=True)
class ServedModel:
    """A model that is served.

    Attributes:
        name: Name by which clients ask for it.
        adapters: Names of LoRA adapters, by which clients may ask for the model with that adapter.
        context_length: Maximum number of tokens of a prompt and its reply.
        created: Time at which it was opened, in seconds since 1970 (UTC).
    """

    name: str
    text: ModelText
    context_length: int
    adapters: tuple[str, ...] = ()
    created: int = field(default_factory=lambda: int(time.time()))


class Service(Workers):
    """The model, the engine and the limits, which all routes share.

    Args:
        engine: Runs the model.
        lenient: Whether to ignore parameters that are unknown or not supported, instead of refusing them.
    """

    def __init__(
        self, model: ServedModel, engine: EngineLike, limits: Limits, metrics: Metrics, lenient: bool = False
    ) -> None:
        super().__init__()
        self.model = model
        self.engine = engine
        self.limits = limits
        self.lenient = lenient
        self.metrics = metrics

    def adapter(self, name: str) -> str | None:
        """The LoRA adapter that a request's `model` names; None if it names the base model.

        The name has been checked before.
        """
        return name if name in self.model.adapters else None

    def check_model(self, name: str) -> None:
        names = (self.model.name, *self.model.adapters)
        if name not in names:
            raise model_not_found(name, *names)

    def check_text(self, text: str, param: str) -> None:
        """Refuse a prompt that is too long however it is tokenized: tokenizing a million characters takes seconds.

        Args:
            param: Name of the parameter with the prompt, for errors.

        Raises:
            APIError: the prompt does not fit the context.
        """
        most = self.model.context_length * self.model.text.longest_token
        if len(text) > most:
            message = f"the prompt has {len(text)} characters, but the context of {self.model.context_length} tokens"
            raise APIError(400, f"{message} holds {most} at most", param=param, code="context_length_exceeded")

    def check_lengths(self, prompt: Sequence[int], new_tokens: int | None, param: str) -> int:
        """Check the lengths of a prompt and its reply; return the maximum number of new tokens.

        Args:
            param: Name of the parameter with the prompt, for errors.
            new_tokens: Maximum number of new tokens that the request asks for. None: as many as the limits allow.

        Raises:
            APIError: prompt and reply do not fit the context, or are beyond this server's limits.
        """
        context, limits = self.model.context_length, self.limits
        if not prompt:
            raise APIError(400, "the prompt is empty", param=param)
        if limits.prompt_tokens is not None and len(prompt) > limits.prompt_tokens:
            message = f"the prompt has {len(prompt)} tokens, but this server takes {limits.prompt_tokens}"
            raise APIError(400, message, param=param, code="prompt_too_long")
        room = context - len(prompt)
        if room < (1 if new_tokens is None else new_tokens):
            reply = f" and the reply up to {new_tokens}" if new_tokens else ""
            message = f"the prompt has {len(prompt)} tokens{reply}, but the context holds {context}"
            raise APIError(400, message, param=param, code="context_length_exceeded")
        if new_tokens is None:
            return room if limits.new_tokens is None else min(room, limits.new_tokens)
        if limits.new_tokens is not None and new_tokens > limits.new_tokens:
            message = f"this server generates at most {limits.new_tokens} tokens, not {new_tokens}"
            raise APIError(400, message, param="max_tokens")
        return new_tokens

    def generate(self, requests: Sequence[Request]) -> Choices:
        """Hand requests to the engine. Raises `APIError` if it refuses one of them."""
        if len(requests) > self.limits.requests:
            message = f"this asks for {len(requests)} replies, but the server handles {self.limits.requests} at once"
            raise APIError(400, message, param="n")
        return Choices(self.engine, requests)
