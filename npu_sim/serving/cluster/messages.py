"""Messages between the HTTP server's process and the replicas of a model."""

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
    """A request in the form in which it is sent to a replica.

    Attributes:
        request: The request without its token filter, which cannot be sent to another process.
        rules: The text of the token filter's grammar. None: the request has no filter.
    """

    request: Request
    rules: str | None = None

    @classmethod
    def of(cls, request: Request) -> RemoteRequest:
        """Make the message for a request.

        Raises `InputError` if its token filter is not one of the server's grammars.
        """
        grammar = request.token_filter
        if grammar is not None and not isinstance(grammar, GrammarFilter):
            raise InputError(f"a {type(grammar).__name__} cannot be sent to a replica; a grammar can")
        return cls(replace(request, token_filter=None), None if grammar is None else grammar.rules)

    @cached_property
    def digests(self) -> tuple[bytes, ...]:
        """Hashes of the prompt's full blocks, as the replica's prefix cache computes them."""
        digest, digests = first_digest(self.request.tenant, self.request.adapter), []
        prompt = self.request.prompt
        for start in range(0, len(prompt) - BLOCK + 1, BLOCK):
            digest = next_digest(digest, prompt[start : start + BLOCK])
            digests.append(digest)
        return tuple(digests)


@dataclass(frozen=True)
class Output:
    """An update of a request, and its token counts up to this update."""

    update: Update
    usage: Usage


@dataclass(frozen=True)
class ReplicaFacts:
    """Facts about the model that replicas run, which the HTTP server needs.

    Attributes:
        context_length: Maximum number of tokens of a prompt and its reply.
        device: Description of a replica's device.
        key: Text that identifies the replicas' settings; see `replicas_key`.
    """

    context_length: int
    device: str
    key: str


@dataclass(frozen=True)
class ReplicaStats:
    """The counts of one replica's engine.

    Attributes:
        replica: Id of the replica.
        pid: Process id on the replica's machine.
    """

    replica: str
    pid: int
    stats: EngineStats
