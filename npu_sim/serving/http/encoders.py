"""`/v1/embeddings`, `/v1/rerank` and `/v1/score`: hand texts to an encoder, and make replies from its results."""

from __future__ import annotations

import asyncio
import base64
import json
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response

from npu_compiler.errors import InputError, NPUError
from npu_sim.encoders.folder import EmbedderFolder
from npu_sim.encoders.text import EncodedText
from npu_sim.serving.encoder_engine import EncoderEngine, Results
from npu_sim.serving.http.body import parse_json, read_body
from npu_sim.serving.http.choices import refusal
from npu_sim.serving.http.encoder_schemas import EmbeddingRequest, RerankRequest, ScoreRequest
from npu_sim.serving.http.errors import APIError, model_not_found
from npu_sim.serving.http.limits import Limits
from npu_sim.serving.http.metrics import Metrics
from npu_sim.serving.http.replies import until_disconnect
from npu_sim.serving.http.schemas import body_of, parse
from npu_sim.serving.http.workers import Workers

if TYPE_CHECKING:
    from npu_sim.encoders import TextEncoder

EMBEDDING_PATHS = ("/v1/embeddings",)
RERANK_PATHS = ("/v1/rerank", "/v2/rerank", "/rerank")
SCORE_PATHS = ("/v1/score", "/score")


@dataclass(frozen=True)
class ServedEncoder:
    """An encoder that is served.

    Attributes:
        name: Name by which clients ask for it.
        created: Time at which it was opened, in seconds since 1970 (UTC).
    """

    name: str
    encoder: TextEncoder
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def context_length(self) -> int:
        return self.encoder.context_length


@dataclass(frozen=True)
class _Task:
    """The texts of a request to encode, and how to answer it.

    Attributes:
        write: Function from the results, one for each text, to the reply's JSON without the fields `model` and `usage`.
    """

    texts: Sequence[EncodedText]
    write: Callable[[Results], dict[str, Any]]

    @property
    def tokens(self) -> int:
        return sum(len(text.ids) for text in self.texts)


class EncoderService(Workers):
    """The encoder, its engine and the limits, which all routes share.

    Args:
        lenient: Whether to ignore parameters that are unknown or not supported, instead of refusing them.
    """

    def __init__(
        self, model: ServedEncoder, engine: EncoderEngine, limits: Limits, metrics: Metrics, lenient: bool = False
    ) -> None:
        super().__init__()
        self.model, self.engine, self.limits, self.metrics, self.lenient = model, engine, limits, metrics, lenient

    def embedding(self, data: Any) -> _Task:
        """The task of a request for embeddings, from the body's JSON. Raises `APIError` if it is wrong."""
        body = parse(EmbeddingRequest, data, self.lenient)
        self._check_model(body.model)
        encoder, inputs = self.model.encoder, body.inputs
        most = encoder.width
        if body.dimensions is not None and body.dimensions > most:
            message = f"{self.model.name} has embeddings of {most} dimensions, not {body.dimensions}"
            raise APIError(400, message, param="dimensions")
        prompt = self._prompt(body.prompt_name)
        truncate = self._truncation(body.truncate_prompt_tokens)
        if isinstance(inputs[0], str):
            texts = encoder.text.encode(inputs, prompt, truncate)
        elif body.prompt_name is not None:
            raise APIError(400, "'prompt_name' is for texts; token ids are taken as they are", param="prompt_name")
        else:
            texts = [EncodedText(self._known(ids)[:truncate]) for ids in inputs]
        self._check_lengths(texts, "input", several=not isinstance(body.input, str))
        dimensions = body.dimensions or encoder.dimensions

        def write(results: Results) -> dict[str, Any]:
            vectors = encoder.shortened(results, dimensions)
            shown = [_base64(vector) if body.encoding_format == "base64" else vector.tolist() for vector in vectors]
            data = [{"object": "embedding", "index": index, "embedding": item} for index, item in enumerate(shown)]
            return {"object": "list", "data": data}

        return _Task(texts, write)

    def ranking(self, data: Any) -> _Task:
        """The task of a request to rank documents, from the body's JSON. Raises `APIError` if it is wrong."""
        body = parse(RerankRequest, data, self.lenient)
        documents = body.texts
        texts = self._pairs(body, [(body.query, text) for text in documents], "documents")
        with_documents = body.return_documents is not False

        def write(results: Results) -> dict[str, Any]:
            scores = results[:, 0].tolist()
            best = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n]
            ranked = [
                {
                    "index": index,
                    "relevance_score": scores[index],
                    **({"document": {"text": documents[index]}} if with_documents else {}),
                }
                for index in best
            ]
            return {"id": f"rerank-{uuid.uuid4().hex}", "results": ranked}

        return _Task(texts, write)

    def scoring(self, data: Any) -> _Task:
        """The task of a request for scores of pairs, from the body's JSON. Raises `APIError` if it is wrong."""
        body = parse(ScoreRequest, data, self.lenient)
        texts = self._pairs(body, body.pairs, "text_2")

        def write(results: Results) -> dict[str, Any]:
            scores = results[:, 0].tolist()
            data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
            return {"id": f"score-{uuid.uuid4().hex}", "object": "list", "created": int(time.time()), "data": data}

        return _Task(texts, write)

    async def answer(self, request: Request, read: Callable[[Any], _Task]) -> Response:
        """Compute the response to a POST request.

        Args:
            read: Function from the body's JSON to the task.
        """
        data = await read_body(request, self.limits)
        task = await self.in_thread(lambda: read(parse_json(data)))
        request.state.call.fields["prompt_tokens"] = task.tokens
        try:
            results = await until_disconnect(request, self._results(task))
        except NPUError as error:
            raise refusal(error) from error
        # Thousands of vectors take a while to be written, in which other requests should go on.
        usage = {"prompt_tokens": task.tokens, "total_tokens": task.tokens}
        content = await self.in_thread(
            lambda: json.dumps({**task.write(results), "model": self.model.name, "usage": usage}).encode()
        )
        return Response(content, media_type="application/json")

    async def _results(self, task: _Task) -> Results:
        seconds = self.limits.request_seconds
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.wrap_future(self.engine.submit(task.texts))
        except TimeoutError:
            raise APIError(504, f"the request took longer than {seconds:g} s", code="timeout") from None

    def _pairs(
        self, body: RerankRequest | ScoreRequest, pairs: Sequence[tuple[str, str]], param: str
    ) -> list[EncodedText]:
        self._check_model(body.model)
        texts = self.model.encoder.text.encode_pairs(pairs, self._truncation(body.truncate_prompt_tokens))
        self._check_lengths(texts, param, several=True)
        return texts

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self.model.name):
            raise model_not_found(f"{name}", self.model.name)

    def _prompt(self, name: str | None) -> str:
        """The text of the prompt with that name, which is put before each text.

        None stands for the model's default prompt. Raises `APIError` for an unknown name.
        """
        folder = self.model.encoder.folder
        assert isinstance(folder, EmbedderFolder)
        try:
            return replace(folder, name=self.model.name).prompt(name)
        except InputError as error:
            raise APIError(400, str(error), param="prompt_name") from error

    def _truncation(self, wanted: int | None) -> int | None:
        most = self.model.encoder.context_length
        return wanted if wanted is None else most if wanted == -1 else min(wanted, most)

    def _known(self, ids: Sequence[int]) -> tuple[int, ...]:
        """The token ids that a client has sent. Raises `APIError` if the model lacks one of them."""
        last = self.model.encoder.vocab_size - 1
        if wrong := [token for token in ids if not 0 <= token <= last]:
            raise APIError(400, f"the model has no token {wrong[0]}; ids are 0 to {last}", param="input")
        return tuple(ids)

    def _check_lengths(self, texts: Sequence[EncodedText], param: str, *, several: bool) -> None:
        most, limit = self.model.encoder.context_length, self.limits.prompt_tokens
        taken = most if limit is None else min(most, limit)
        for place, text in enumerate(texts):
            if len(text.ids) > taken:
                where = f"{param}.{place}" if several else param
                message = f"'{where}' has {len(text.ids)} tokens, but {self.model.name} takes at most {taken}"
                raise APIError(
                    400,
                    f"{message}; shorten it, or cut it with 'truncate_prompt_tokens'",
                    param=where,
                    code="context_length_exceeded",
                )


def _base64(vector: Results) -> str:
    """A vector in base64, as OpenAI's clients read it: little-endian float32."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


def add_encoder_routes(app: FastAPI, service: EncoderService) -> None:
    """Add the routes of an embedding model or of a cross-encoder, whichever the service has."""

    def add(paths: Sequence[str], kind: Any, read: Callable[[Any], _Task]) -> None:
        async def route(request: Request) -> Response:
            return await service.answer(request, read)

        for path in paths:
            app.add_api_route(path, route, methods=["POST"], openapi_extra=body_of(kind), response_model=None)

    if service.model.encoder.is_embedder:
        add(EMBEDDING_PATHS, EmbeddingRequest, service.embedding)
    else:
        add(RERANK_PATHS, RerankRequest, service.ranking)
        add(SCORE_PATHS, ScoreRequest, service.scoring)
