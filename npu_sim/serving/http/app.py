"""The HTTP application: its routes, and how errors become responses."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from npu_compiler.version import __version__
from npu_sim.serving.encoder_engine import EncoderEngine
from npu_sim.serving.http.body import parse_json, read_body
from npu_sim.serving.http.chat import ChatWriter, chat_requests
from npu_sim.serving.http.completions import CompletionWriter, completion_requests
from npu_sim.serving.http.encoders import (
    EMBEDDING_PATHS,
    RERANK_PATHS,
    SCORE_PATHS,
    EncoderService,
    ServedEncoder,
    add_encoder_routes,
)
from npu_sim.serving.http.errors import APIError, model_not_found
from npu_sim.serving.http.interface import EngineLike
from npu_sim.serving.http.keys import APIKeys
from npu_sim.serving.http.limits import Limits
from npu_sim.serving.http.metrics import Metrics
from npu_sim.serving.http.middleware import GuardMiddleware
from npu_sim.serving.http.replies import Writer, reply
from npu_sim.serving.http.response_schemas import ResponsesRequest
from npu_sim.serving.http.responses import KeptResponses, ResponseWriter
from npu_sim.serving.http.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    body_of,
    parse,
)
from npu_sim.serving.http.service import ServedModel, Service
from npu_sim.serving.http.tools import template_messages
from npu_sim.serving.request import Request as EngineRequest

_POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'"
_GENERATION_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize", "/detokenize")
_PAGE = {
    "/": ("index.html", "text/html"),
    "/page.js": ("page.js", "text/javascript"),
    "/page.css": ("page.css", "text/css"),
}


@dataclass(frozen=True)
class Application:
    """The HTTP application, for an ASGI server such as uvicorn.

    Attributes:
        guard: The ASGI application itself, which refuses or admits each request first.
    """

    guard: GuardMiddleware
    service: Service | EncoderService
    metrics: Metrics


def make_application(
    model: ServedModel,
    engine: EngineLike,
    keys: APIKeys,
    limits: Limits,
    *,
    only_loopback: bool = False,
    lenient: bool = False,
) -> Application:
    """The application that serves a model by an engine.

    Args:
        only_loopback: Whether to answer only requests whose `Host` is a name of this machine's loopback device.
        lenient: Whether to ignore parameters that are unknown or not supported, instead of refusing them.
    """
    service = Service(model, engine, limits, Metrics(engine), lenient)
    application, app = _application(service, keys, only_loopback)
    _add_generation(app, service)
    _add_responses(app, service)
    _add_tokens(app, service)
    _refuse(
        app,
        service,
        (*EMBEDDING_PATHS, *RERANK_PATHS, *SCORE_PATHS),
        "generates text, and has neither embeddings nor scores; serve an embedding model or a cross-encoder for those",
    )
    base = {**_model_facts(model), "sampling": dict(model.text.sampling)}
    _add_models(app, [base, *({**base, "id": name, "parent": model.name} for name in model.adapters)])
    _add_page(app)
    return application


def make_encoder_application(
    model: ServedEncoder,
    engine: EncoderEngine,
    keys: APIKeys,
    limits: Limits,
    *,
    only_loopback: bool = False,
    lenient: bool = False,
) -> Application:
    """The application that serves an embedding model or a cross-encoder; arguments as in `make_application`."""
    service = EncoderService(model, engine, limits, Metrics(engine), lenient)
    application, app = _application(service, keys, only_loopback)
    add_encoder_routes(app, service)
    if model.encoder.is_embedder:
        _refuse(
            app,
            service,
            (*_GENERATION_PATHS, *RERANK_PATHS, *SCORE_PATHS),
            f"is an embedding model, which answers {EMBEDDING_PATHS[0]} only",
        )
    else:
        _refuse(
            app,
            service,
            (*_GENERATION_PATHS, *EMBEDDING_PATHS),
            f"is a cross-encoder, which answers {RERANK_PATHS[0]} and {SCORE_PATHS[0]} only",
        )
    _add_models(app, [_model_facts(model)])
    return application


def _application(service: Service | EncoderService, keys: APIKeys, only_loopback: bool) -> tuple[Application, FastAPI]:
    """The application with the routes that do not depend on the kind of model, and its FastAPI object to add more.

    Args:
        only_loopback: Whether only this machine can reach the server, as for `make_application`.
    """
    app = FastAPI(title="npu-simulation", version=__version__, docs_url=None, redoc_url=None)
    guard = GuardMiddleware(app, keys, service.limits, service.metrics, only_loopback=only_loopback)
    _add_health(app, guard, service)
    app.add_exception_handler(APIError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_exception)
    return Application(guard, service, service.metrics), app


def _refuse(app: FastAPI, service: Service | EncoderService, paths: Sequence[str], reason: str) -> None:
    """Add routes whose answer is an error that says why this model does not support them.

    Args:
        reason: End of the message, after the model's name.
    """

    async def route(request: Request) -> Response:
        await read_body(request, service.limits)
        raise APIError(400, f"{service.model.name} {reason}", param="model", code="unsupported_endpoint")

    for path in paths:
        app.add_api_route(path, route, methods=["POST"], include_in_schema=False)


def _add_generation(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions", openapi_extra=body_of(ChatRequest), response_model=None)
    async def chat(request: Request) -> Response:
        def prepare(data: Any, tenant: str) -> tuple[ChatRequest, list[EngineRequest], Writer]:
            body = parse(ChatRequest, data, service.lenient)
            service.check_model(body.model)
            return body, chat_requests(service, body, tenant), ChatWriter(service, body)

        return await _generate(request, service, prepare)

    @app.post("/v1/completions", openapi_extra=body_of(CompletionRequest), response_model=None)
    async def complete(request: Request) -> Response:
        def prepare(data: Any, tenant: str) -> tuple[CompletionRequest, list[EngineRequest], Writer]:
            body = parse(CompletionRequest, data, service.lenient)
            service.check_model(body.model)
            requests = completion_requests(service, body, tenant)
            return body, requests, CompletionWriter(service, body, requests)

        return await _generate(request, service, prepare)


def _add_responses(app: FastAPI, service: Service) -> None:
    kept = KeptResponses()

    @app.post("/v1/responses", openapi_extra=body_of(ResponsesRequest), response_model=None)
    async def respond(request: Request) -> Response:
        def prepare(data: Any, tenant: str) -> tuple[ChatRequest, list[EngineRequest], Writer]:
            body = parse(ResponsesRequest, data, service.lenient)
            service.check_model(body.model)
            before = body.previous_response_id
            earlier = () if before is None else kept.find(tenant, before, "previous_response_id").messages
            asked = body.chat(earlier)
            writer = ResponseWriter(service, body, asked, earlier, kept, tenant)
            return asked, chat_requests(service, asked, tenant, "input"), writer

        return await _generate(request, service, prepare)

    @app.get("/v1/responses/{identity}")
    async def kept_response(request: Request, identity: str) -> JSONResponse:
        return JSONResponse(kept.find(request.state.call.key, identity).reply)

    @app.delete("/v1/responses/{identity}")
    async def drop_response(request: Request, identity: str) -> dict[str, Any]:
        kept.drop(request.state.call.key, identity)
        return {"id": identity, "object": "response", "deleted": True}


def _add_tokens(app: FastAPI, service: Service) -> None:
    text, context = service.model.text, service.model.context_length

    def encoded(data: Any) -> dict[str, Any]:
        body = parse(TokenizeRequest, data, service.lenient)
        service.check_model(body.model or service.model.name)
        if body.messages is None:
            service.check_text(body.prompt or "", "prompt")
            ids = text.encode(body.prompt or "", body.add_special_tokens)
        else:
            messages, tools = template_messages(body.messages, [], text.tool_format)
            ids = text.encode_chat(text.chat_text(messages, tools, {}))
        return {"tokens": ids, "count": len(ids), "max_model_len": context}

    def decoded(data: Any) -> dict[str, Any]:
        body = parse(DetokenizeRequest, data, service.lenient)
        service.check_model(body.model or service.model.name)
        if wrong := [token for token in body.tokens if token >= text.vocab_size]:
            last = text.vocab_size - 1
            raise APIError(400, f"the model has no token {wrong[0]}; ids are 0 to {last}", param="tokens")
        return {"prompt": text.decode(body.tokens)}

    def add(path: str, kind: type[TokenizeRequest] | type[DetokenizeRequest], answer: Callable[[Any], Any]) -> None:
        async def route(request: Request) -> JSONResponse:
            data = await read_body(request, service.limits)
            return JSONResponse(await service.in_thread(lambda: answer(parse_json(data))))

        app.add_api_route(path, route, methods=["POST"], openapi_extra=body_of(kind), response_model=None)

    add("/tokenize", TokenizeRequest, encoded)
    add("/detokenize", DetokenizeRequest, decoded)


async def _generate(
    request: Request,
    service: Service,
    prepare: Callable[[Any, str], tuple[ChatRequest | CompletionRequest, list[EngineRequest], Writer]],
) -> Response:
    """Generate the response to a POST request for chats or completions.

    Args:
        prepare: Function from the body's JSON and the tenant (name of the API key) to the parsed body, its requests to
            the engine, and the writer of the reply.
    """
    data, tenant = await read_body(request, service.limits), request.state.call.key
    body, requests, writer = await service.in_thread(lambda: prepare(parse_json(data), tenant))
    return await reply(
        request, lambda: service.generate(requests), writer, stream=bool(body.stream), with_usage=body.with_usage
    )


def _model_facts(model: ServedModel | ServedEncoder) -> dict[str, Any]:
    """The entry of a model in the list of `/v1/models`."""
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "npu-simulation",
        "context_length": model.context_length,
    }


def _add_models(app: FastAPI, models: Sequence[dict[str, Any]]) -> None:
    """Add the routes that list these models, which are results of `_model_facts`."""
    by_name = {facts["id"]: facts for facts in models}

    @app.get("/v1/models")
    async def all_models() -> dict[str, Any]:
        return {"object": "list", "data": list(by_name.values())}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        if name not in by_name:
            raise model_not_found(name, *by_name)
        return by_name[name]


def _add_health(app: FastAPI, guard: GuardMiddleware, service: Service | EncoderService) -> None:
    @app.get("/health")
    @app.get("/health/ready")
    async def ready() -> JSONResponse:
        failed = service.engine.failed
        status = "failed" if failed else "draining" if guard.draining else "ready"
        content = {"status": status, "model": service.model.name, **({"reason": failed} if failed else {})}
        return JSONResponse(content, 200 if status == "ready" else 503)

    @app.get("/health/live")
    async def live() -> JSONResponse:
        failed = service.engine.failed
        return JSONResponse(
            {"status": "failed", "reason": failed} if failed else {"status": "live"}, 503 if failed else 200
        )

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)


def _add_page(app: FastAPI) -> None:
    folder = files("npu_sim.serving.http") / "page"
    headers = {
        "Content-Security-Policy": _POLICY,
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
        "Referrer-Policy": "no-referrer",
    }

    def show(name: str, kind: str) -> Callable[[], Awaitable[Response]]:
        content = (folder / name).read_bytes()

        async def file() -> Response:
            return Response(content, media_type=kind, headers=headers)

        return file

    for path, (name, kind) in _PAGE.items():
        app.add_api_route(path, show(name, kind), methods=["GET"], include_in_schema=False)


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, APIError)
    request.state.call.fields["error"] = error.message
    return error.response()


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    messages = {
        404: f"there is nothing at {request.url.path}",
        405: f"{request.url.path} has no method {request.method}",
    }
    message = messages.get(error.status_code, str(error.detail))
    unread = {} if request.method in ("GET", "HEAD") else {"Connection": "close"}  # its body, if it has one
    return APIError(error.status_code, message, headers={**(error.headers or {}), **unread}).response()


async def _on_exception(request: Request, error: Exception) -> Response:
    return APIError(500, f"the server failed: {type(error).__name__}", code="internal_error").response()
