"""Messages between a front and the replicas of a model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from npu_compiler.errors import InputError
from npu_sim.llm.engine.blocks import first_digest, next_digest
from npu_sim.llm.engine.stats import EngineStats
from npu_sim.serving.engine_setup import BLOCK
from npu_sim.serving.http.grammar import GrammarFilter
from npu_sim.serving.request import Request, Update, Usage


@dataclass(frozen=True)
class RemoteRequest:
    """A request on its way to a replica.

    Attributes:
        request: The request without its token filter, which belongs to this process.
        rules: The grammar of that filter.
    """

    request: Request
    rules: str | None = None

    @classmethod
    def of(cls, request: Request) -> RemoteRequest:
        """Raise `InputError` for a token filter that is no grammar of the server's."""
        grammar = request.token_filter
        if grammar is not None and not isinstance(grammar, GrammarFilter):
            raise InputError(f"a {type(grammar).__name__} cannot be sent to a replica; a grammar can")
        return cls(replace(request, token_filter=None), None if grammar is None else grammar.rules)

    @cached_property
    def digests(self) -> tuple[bytes, ...]:
        """Digests of the prompt's full blocks, as the replica's prefix cache names them."""
        digest, digests = first_digest(self.request.tenant, self.request.adapter), []
        prompt = self.request.prompt
        for start in range(0, len(prompt) - BLOCK + 1, BLOCK):
            digest = next_digest(digest, prompt[start : start + BLOCK])
            digests.append(digest)
        return tuple(digests)


@dataclass(frozen=True)
class Output:
    """An update, and the token counts up to it."""

    update: Update
    usage: Usage


@dataclass(frozen=True)
class ReplicaFacts:
    """Facts that a front needs of the model that replicas run.

    Attributes:
        context_length: Maximum number of tokens of a prompt and its reply.
        device: The device of a replica, in words.
        key: The settings that it was started with, as one text.
    """

    context_length: int
    device: str
    key: str


@dataclass(frozen=True)
class ReplicaStats:
    """The counts of one replica.

    Attributes:
        replica: Id of the replica.
        pid: Process id on its machine.
    """

    replica: str
    pid: int
    stats: EngineStats
