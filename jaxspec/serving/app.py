"""The server's routes, as an ASGI app. Read `make_app`, then `_Routes.chat_completions`."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from jaxspec.engine.request import ids_refusal
from jaxspec.options import FieldError, shown
from jaxspec.serving import chat_page
from jaxspec.serving.body import read_body
from jaxspec.serving.completions import CHAT_COMPLETION, COMPLETION, Reply, Scorer
from jaxspec.serving.disconnect import ClientDisconnected, cancel_on_disconnect
from jaxspec.serving.errors import ApiError, invalid_value
from jaxspec.serving.event_stream import EventStream
from jaxspec.serving.metrics import Metrics
from jaxspec.serving.middleware import Middleware, log_fields
from jaxspec.serving.open_engine import OpenEngine
from jaxspec.serving.parse_request import ParsedRequest, ServingModel
from jaxspec.serving.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    RequestT,
    ResponsesRequest,
    TokenizeRequest,
    parse_body,
)
from jaxspec.serving.responses import ResponsesReply, parse_responses
from jaxspec.text import chat
from jaxspec.version import __version__


def make_app(
    model: ServingModel, engine: OpenEngine, scorer: Scorer, metrics: Metrics
) -> Starlette:
    """Return the application that serves a model.

    Args:
      engine: its observer is `metrics`.
      scorer: returns the log-probabilities of a prompt; called in the engine's thread.
    """
    routes = _Routes(model, engine, scorer, metrics)
    settings = model.settings
    app = Starlette(
        routes=[
            Route("/v1/models", routes.models),
            Route("/v1/models/{model:path}", routes.model),
            Route("/v1/chat/completions", routes.chat_completions, methods=["POST"]),
            Route("/v1/completions", routes.completions, methods=["POST"]),
            Route("/v1/responses", routes.responses, methods=["POST"]),
            Route("/tokenize", routes.tokenize, methods=["POST"]),
            Route("/detokenize", routes.detokenize, methods=["POST"]),
            Route("/health", routes.health),
            Route("/version", routes.version),
            Route("/metrics", routes.metrics),
            *([] if settings.no_page else chat_page.routes()),
        ],
        exception_handlers={
            ApiError: _api_error,
            HTTPException: _http_error,
            ClientDisconnected: _client_disconnected,
        },
    )
    # A redirect would name an absolute address, which is wrong behind a proxy.
    app.router.redirect_slashes = False
    app.add_middleware(Middleware, settings=settings)
    if settings.cors_origin:  # added last, so it comes first
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origin),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    return app


class _Routes:
    def __init__(self, model: ServingModel, engine: OpenEngine, scorer: Scorer, metrics: Metrics):
        self._model, self._engine, self._metrics = model, engine, metrics
        self._server = model, engine, scorer, metrics
        self._created = int(time.time())

    # --- generating ------------------------------------------------------------------------------

    async def chat_completions(self, request: Request) -> Any:
        body = await self._read_body(request, ChatCompletionRequest)
        # A long prompt takes a while to become tokens; streams go on meanwhile.
        parsed = await asyncio.to_thread(self._model.parse_chat, body)
        reply = Reply(CHAT_COMPLETION, *self._server, body, parsed)
        return await self._send(request, reply, body, parsed)

    async def completions(self, request: Request) -> Any:
        body = await self._read_body(request, CompletionRequest)
        parsed = await asyncio.to_thread(self._model.parse_completion, body)
        reply = Reply(COMPLETION, *self._server, body, parsed)
        return await self._send(request, reply, body, parsed)

    async def responses(self, request: Request) -> Any:
        body = await self._read_body(request, ResponsesRequest)
        parsed = await asyncio.to_thread(parse_responses, self._model, body)
        reply = ResponsesReply(*self._server, body, parsed)
        return await self._send(request, reply, body, parsed)

    async def _send(
        self, request: Request, reply: Reply, body: GenerationRequest, parsed: ParsedRequest
    ) -> Any:
        """Return a stream or a whole reply. Both end if the client disconnects."""
        settings = self._model.settings
        log = log_fields(request)
        log["usage"] = reply.usage
        if settings.log_prompts:
            log["prompts"] = [self._model.tokenizer.decode(p) for p in parsed.prompts]
            log["replies"] = reply.texts
        if body.stream:
            timeout_s = settings.client_timeout
            return EventStream(reply.events(), timeout_s=timeout_s, on_close=reply.cancel)
        return JSONResponse(await cancel_on_disconnect(request, reply.whole()))

    # --- about the server ------------------------------------------------------------------------

    async def health(self, request: Request) -> Response:
        state = self._engine.state
        headers = {} if state == "ready" else {"Retry-After": "1"}
        status = 200 if state == "ready" else 503
        return JSONResponse({"status": state}, status, headers=headers)

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def metrics(self, request: Request) -> Response:
        open_engine, engine = self._engine, self._engine.engine
        text = self._metrics.text(
            open_engine.num_running,
            open_engine.num_waiting,
            engine.cache_usage,
            engine.num_preemptions,
        )
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def models(self, request: Request) -> Response:
        cards = [self._model_card(name) for name in self._model.names]
        return JSONResponse({"object": "list", "data": cards})

    async def model(self, request: Request) -> Response:
        name = request.path_params["model"]
        self._check_model(name)
        return JSONResponse(self._model_card(name))

    def _model_card(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "jaxspec",
            "root": self._model.names[0],
            "max_model_len": self._model.max_model_len,
        }

    # --- tokens ----------------------------------------------------------------------------------

    async def tokenize(self, request: Request) -> Response:
        body = await self._read_body(request, TokenizeRequest)
        return JSONResponse(await asyncio.to_thread(self._tokenize, body))

    def _tokenize(self, body: TokenizeRequest) -> dict[str, Any]:
        """Return the reply of /tokenize.

        Raises:
          ApiError: the request has no text, or a text that cannot be encoded.
        """
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "expected either prompt or messages", param="prompt")
        if body.prompt is not None:
            special = body.add_special_tokens is not False
            ids = self._model.encode(body.prompt, special=special)
        else:
            try:
                ids, _ = self._model.render_chat(
                    body.messages or [],
                    chat.choose(body.tools).tools,
                    body.chat_template_kwargs,
                    body.add_generation_prompt is not False,
                )
            except FieldError as error:
                raise invalid_value(error) from None
        reply: dict[str, Any] = {
            "count": len(ids),
            "max_model_len": self._model.max_model_len,
            "tokens": list(ids),
        }
        if body.return_token_strs:
            reply["token_strs"] = [self._model.tokenizer.backend.id_to_token(i) for i in ids]
        return reply

    async def detokenize(self, request: Request) -> Response:
        body = await self._read_body(request, DetokenizeRequest)
        if wrong := ids_refusal(body.tokens, self._model.spec.target.config.vocab_size):
            raise ApiError(400, f"tokens {wrong}", param="tokens")
        return JSONResponse({"prompt": self._model.tokenizer.decode(body.tokens)})

    # --- reading ---------------------------------------------------------------------------------

    async def _read_body(self, request: Request, kind: type[RequestT]) -> RequestT:
        """Read and parse a request's body.

        Raises:
          ApiError: the body cannot be read, or is wrong; or it names another model.
          ClientDisconnected: the client closed the connection before the end of the body.
        """
        parsed = parse_body(kind, await read_body(request, self._model.settings))
        if parsed.model is not None:
            self._check_model(parsed.model)
        return parsed

    def _check_model(self, name: str) -> None:
        names = self._model.names
        if name not in names:
            raise ApiError(
                404,
                f"the model {name!r} does not exist; this server has {', '.join(names)}",
                param="model",
                code="model_not_found",
            )


# --- errors ---------------------------------------------------------------------------------------


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    log = log_fields(request)
    log["error"] = error.message
    log |= {k: v for k, v in (("param", error.param), ("code", error.code)) if v is not None}
    return JSONResponse(error.to_json(), error.status, headers=error.headers)


async def _http_error(request: Request, error: Exception) -> Response:
    """Return the router's error, such as an unknown path, in the protocol's form."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {shown(request.url.path)}: {error.detail}"
    api_error = ApiError(error.status_code, message)
    return JSONResponse(api_error.to_json(), api_error.status, headers=error.headers)


async def _client_disconnected(request: Request, error: Exception) -> Response:
    """Return nginx's status for a client that disconnected. Only the log shows it."""
    return Response(status_code=499)
