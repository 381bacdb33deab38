"""The server's routes, as an ASGI application. Read `make_app`, then `_Routes`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import jaxspec
from jaxspec.engine.request import ids_refusal
from jaxspec.options import FieldError, shown
from jaxspec.serving import chat_page, completions
from jaxspec.serving.errors import ApiError, wrong_value
from jaxspec.serving.event_stream import ClientDisconnected, EventStream, cancel_on_disconnect
from jaxspec.serving.metrics import Metrics
from jaxspec.serving.middleware import Door, log_fields
from jaxspec.serving.open_engine import OpenEngine
from jaxspec.serving.parse_request import ParsedRequest, ServingModel
from jaxspec.serving.prompt_logprobs import PromptScores
from jaxspec.serving.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    RequestT,
    TokenizeRequest,
    read,
)
from jaxspec.serving.responses import ResponsesReply, ResponsesRequest, parse_responses
from jaxspec.text import chat

Scorer = Callable[[tuple[int, ...]], PromptScores]


def make_app(
    served: ServingModel, opened: OpenEngine, scorer: Scorer, metrics: Metrics
) -> Starlette:
    """Return the application that serves a model.

    Args:
      opened: the engine; `metrics` is its observer.
      scorer: gives the log-probabilities of prompts; called in the engine's thread.
    """
    routes = _Routes(served, opened, scorer, metrics)
    origins = list(served.settings.cors_origin)
    cors = Middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=["X-Request-Id", "Retry-After"],
    )
    return Starlette(
        routes=[
            Route("/v1/models", routes.models),
            Route("/v1/models/{model:path}", routes.model),
            Route("/v1/chat/completions", routes.chat, methods=["POST"]),
            Route("/v1/completions", routes.completions, methods=["POST"]),
            Route("/v1/responses", routes.responses, methods=["POST"]),
            Route("/tokenize", routes.tokenize, methods=["POST"]),
            Route("/detokenize", routes.detokenize, methods=["POST"]),
            Route("/health", routes.health),
            Route("/version", routes.version),
            Route("/metrics", routes.metrics),
            *([] if served.settings.no_page else chat_page.routes()),
        ],
        middleware=[*([cors] if origins else []), Middleware(Door, settings=served.settings)],
        exception_handlers={
            ApiError: _refuse,
            HTTPException: _refuse_http,
            ClientDisconnected: _nobody_there,
        },
    )


class _Routes:
    def __init__(self, served: ServingModel, opened: OpenEngine, scorer: Scorer, metrics: Metrics):
        self._served, self._opened, self._metrics = served, opened, metrics
        self._scorer = scorer
        self._created = int(time.time())

    # --- about the server ------------------------------------------------------------------------

    async def health(self, request: Request) -> Response:
        state = self._opened.state
        headers = {} if state == "ready" else {"Retry-After": "1"}
        status = 200 if state == "ready" else 503
        return JSONResponse({"status": state}, status, headers=headers)

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": jaxspec.__version__})

    async def metrics(self, request: Request) -> Response:
        opened = self._opened
        slots = opened.engine.batch_size
        text = self._metrics.text(opened.num_running, opened.num_waiting, slots)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card(n) for n in self._served.names]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["model"]
        self._check_model(name)
        return JSONResponse(self._card(name))

    def _card(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "jaxspec",
            "root": self._served.names[0],
            "max_model_len": self._served.max_model_len,
        }

    # --- generating ------------------------------------------------------------------------------

    async def completions(self, request: Request) -> Any:
        asked = await self._read(request, CompletionRequest)
        # A long prompt takes a while to become tokens; streams go on meanwhile.
        wish = await asyncio.to_thread(self._served.completion, asked)
        return await self._generate(request, completions.TEXT, asked, wish)

    async def chat(self, request: Request) -> Any:
        asked = await self._read(request, ChatCompletionRequest)
        wish = await asyncio.to_thread(self._served.chat, asked)
        return await self._generate(request, completions.CHAT, asked, wish)

    async def responses(self, request: Request) -> Any:
        asked = await self._read(request, ResponsesRequest)
        wish = await asyncio.to_thread(parse_responses, self._served, asked)
        reply = ResponsesReply(self._served, self._opened, self._scorer, asked, wish)
        return await self._send(request, reply, asked, wish)

    async def _generate(
        self, request: Request, kind: completions.Kind, asked: Any, wish: ParsedRequest
    ) -> Any:
        reply = completions.Reply(kind, self._served, self._opened, self._scorer, asked, wish)
        return await self._send(request, reply, asked, wish)

    async def _send(
        self,
        request: Request,
        reply: completions.Reply,
        asked: GenerationRequest,
        wish: ParsedRequest,
    ) -> Any:
        settings = self._served.settings
        log = log_fields(request)
        log["usage"] = reply.usage
        if settings.log_prompts:
            log["prompts"] = [self._served.tokenizer.decode(p) for p in wish.prompts]
            log["replies"] = reply.texts
        if asked.stream:
            timeout_s = settings.client_timeout
            return EventStream(reply.events(), timeout_s=timeout_s, end=reply.cancel)
        return JSONResponse(await cancel_on_disconnect(request, reply.whole()))

    # --- tokens ----------------------------------------------------------------------------------

    async def tokenize(self, request: Request) -> Response:
        asked = await self._read(request, TokenizeRequest)
        return JSONResponse(await asyncio.to_thread(self._tokens, asked))

    def _tokens(self, asked: TokenizeRequest) -> dict[str, Any]:
        """Return the reply of /tokenize.

        Raises:
          ApiError: there is no text, or it cannot be read.
        """
        if (asked.prompt is None) == (asked.messages is None):
            raise ApiError(400, "expected either prompt or messages", param="prompt")
        if asked.prompt is not None:
            special = asked.add_special_tokens is not False
            ids = self._served.encode(asked.prompt, special=special)
        else:
            try:
                ids = self._served.conversation(
                    asked.messages or [],
                    chat.choose(asked.tools).tools,
                    asked.chat_template_kwargs,
                    asked.add_generation_prompt is not False,
                )
            except FieldError as error:
                raise wrong_value(error) from None
        made: dict[str, Any] = {
            "count": len(ids),
            "max_model_len": self._served.max_model_len,
            "tokens": list(ids),
        }
        if asked.return_token_strs:
            made["token_strs"] = [self._served.tokenizer.backend.id_to_token(i) for i in ids]
        return made

    async def detokenize(self, request: Request) -> Response:
        asked = await self._read(request, DetokenizeRequest)
        if wrong := ids_refusal(asked.tokens, self._served.spec.target.config.vocab_size):
            raise ApiError(400, f"tokens {wrong}", param="tokens")
        return JSONResponse({"prompt": self._served.tokenizer.decode(asked.tokens)})

    # --- reading ---------------------------------------------------------------------------------

    async def _read(self, request: Request, kind: type[RequestT]) -> RequestT:
        """Return a request's body.

        Raises:
          ApiError: it is too large, too slow, or wrong; or it names another model.
        """
        settings = self._served.settings
        most = settings.max_body_mib * 2**20
        body = bytearray()
        try:
            async with asyncio.timeout(settings.client_timeout):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > most:
                        said = f"the body has more than {settings.max_body_mib} MiB"
                        raise ApiError(413, said, headers={"Connection": "close"})
        except ClientDisconnect:
            raise ClientDisconnected from None
        except TimeoutError:
            said = f"the body did not come in {settings.client_timeout:g} s"
            raise ApiError(408, said, headers={"Connection": "close"}) from None
        asked = read(kind, bytes(body))
        if asked.model is not None:
            self._check_model(asked.model)
        return asked

    def _check_model(self, name: str) -> None:
        if name not in self._served.names:
            raise ApiError(
                404,
                f"the model {name!r} does not exist; this server has {', '.join(self._served.names)}",
                param="model",
                code="model_not_found",
            )


# --- errors ------------------------------------------------------------------------------------------


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    log = log_fields(request)
    log["error"] = error.message
    log |= {k: v for k, v in (("param", error.param), ("code", error.code)) if v is not None}
    return JSONResponse(error.to_json(), error.status, headers=error.headers)


async def _refuse_http(request: Request, error: Exception) -> Response:
    """Put what the router refuses, such as an unknown path, into the protocol's form."""
    assert isinstance(error, HTTPException)
    said = ApiError(
        error.status_code, f"{request.method} {shown(request.url.path)}: {error.detail}"
    )
    return JSONResponse(said.to_json(), said.status, headers=error.headers)


async def _nobody_there(request: Request, error: Exception) -> Response:
    """Return what nobody will read; the status is what logs of other servers call it."""
    return Response(status_code=499)
