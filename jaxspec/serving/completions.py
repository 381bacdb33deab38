"""Replies of the generating routes, in one piece or as a stream of events.

Read `Reply`: `__init__` submits to the engine, `whole` and `events` make the reply. A `ReplyFormat`
has all that distinguishes the routes. /v1/responses has a subclass of `Reply` in `responses`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from jaxspec.engine.request import Completion
from jaxspec.options import FieldError
from jaxspec.serving.errors import ApiError, internal_error, invalid_value, not_accepted
from jaxspec.serving.event_stream import DONE, encode_event, merge
from jaxspec.serving.handle import Handle, RequestOutput
from jaxspec.serving.metrics import Metrics
from jaxspec.serving.open_engine import NotAccepted, OpenEngine
from jaxspec.serving.parse_request import ParsedRequest, ServingModel
from jaxspec.serving.prompt_logprobs import PromptScores
from jaxspec.serving.protocol import GenerationRequest
from jaxspec.serving.reply_format import (
    ChatChoice,
    Delta,
    LogprobsFormatter,
    TextChoice,
    Usage,
    join,
    stop_reason,
)
from jaxspec.serving.verify_steps import StepFormatter

LOG = logging.getLogger("jaxspec.serving")
Scorer = Callable[[tuple[int, ...]], PromptScores]


@dataclass(frozen=True)
class ReplyFormat:
    """Names and choices of a route's replies.

    Attributes:
      id_prefix: beginning of the reply's id.
      whole_object: `object` of a reply in one piece.
      chunk_object: `object` of a stream's event.
    """

    id_prefix: str
    whole_object: str
    chunk_object: str
    choice: type[TextChoice] | type[ChatChoice]


COMPLETION = ReplyFormat("cmpl-", "text_completion", "text_completion", TextChoice)
CHAT_COMPLETION = ReplyFormat("chatcmpl-", "chat.completion", "chat.completion.chunk", ChatChoice)


class Reply:
    """A reply in progress. The engine has its requests from the beginning.

    Attributes:
      usage: counts over the choices that are done.
      texts: texts of the reply, for the log.
    """

    def __init__(
        self,
        reply_format: ReplyFormat,
        model: ServingModel,
        engine: OpenEngine,
        scorer: Scorer,
        metrics: Metrics,
        request: GenerationRequest,
        parsed: ParsedRequest,
    ):
        """Submit the requests to the engine.

        Raises:
          ApiError: the engine does not take them.
        """
        self._format, self._model, self._metrics = reply_format, model, metrics
        self._request, self._parsed = request, parsed
        self._scores: list[Future[PromptScores]] = []
        self._handles: list[Handle] = []
        try:
            for prompt in parsed.prompts if parsed.needs_prompt_scores else ():
                self._scores.append(engine.call(partial(scorer, prompt)))
            self._handles += engine.submit_all(parsed.engine_requests)
        except (FieldError, NotAccepted) as error:
            self.cancel()  # the scores have no reader
            if isinstance(error, FieldError):
                raise invalid_value(error) from None
            raise not_accepted(error) from None
        self._end_s = time.monotonic() + model.settings.timeout
        self._head = {
            "id": reply_format.id_prefix + uuid.uuid4().hex,
            "object": reply_format.whole_object,
            "created": int(time.time()),
            "model": request.model or model.names[0],
        }
        self.usage = Usage(prompt_tokens=sum(map(len, parsed.prompts)))
        self.texts: list[str] = []

    def cancel(self) -> None:
        """Cancel the engine's requests and free their slots. Requests that are done stay so."""
        for handle in self._handles:
            handle.cancel()
        for future in self._scores:
            future.cancel()

    # --- in one piece ----------------------------------------------------------------------------

    async def whole(self) -> dict[str, Any]:
        """Wait for all choices, and return the reply.

        Raises:
          ApiError: the engine failed, or the request's time is over.
        """
        try:
            scores = [await self._prompt_scores(i) for i in range(len(self._parsed.prompts))]
            completions = [await self._completion(i) for i in range(self._parsed.num_choices)]
        finally:
            self.cancel()
        choices = [
            self._whole_choice(i, completion, scores[i // self._parsed.n])
            for i, completion in enumerate(completions)
        ]
        return {**self._head, "choices": choices, "usage": self.usage.to_json()}

    async def _completion(self, index: int) -> Completion:
        async for output in self._outputs(index):
            if isinstance(output, Completion):
                return output
        raise AssertionError("a handle ends with a completion")

    def _whole_choice(
        self, index: int, completion: Completion, scores: PromptScores | None
    ) -> dict[str, Any]:
        choice = self._format.choice(self._model.tokenizer, self._parsed, index)
        if isinstance(choice, ChatChoice):
            message, delta = choice.message(completion)
            self.texts.append(message.get("content") or "")
            content: dict[str, Any] = {"message": message}
        else:
            delta = join(choice.echo(scores), choice.push(completion))
            text = delta.fields.get("text", "")
            self.texts.append(text)
            content = {"text": text}
        self._count(completion, choice)
        made = {
            "index": index,
            **content,
            "logprobs": delta.logprobs,
            "finish_reason": delta.finish_reason,
            "stop_reason": self._stop_reason(completion, choice),
        }
        if (top := self._parsed.prompt_logprobs) is not None and scores is not None:
            formatter = LogprobsFormatter(self._model.tokenizer, top)
            made["prompt_logprobs"] = formatter.prompt_logprobs(scores)
        if self._request.return_token_ids:
            made |= {
                "token_ids": completion.token_ids,
                "prompt_token_ids": self._parsed.prompt_of(index),
            }
        return made

    # --- as a stream -----------------------------------------------------------------------------

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the events of a stream. Frees the slots, even if the stream is closed early."""
        options = self._request.stream_options
        wants_usage = bool(options and options.include_usage)
        more: dict[str, Any] = {"usage": None} if wants_usage else {}
        head = {**self._head, "object": self._format.chunk_object}
        try:
            if self._format.choice is ChatChoice:
                for index in range(self._parsed.num_choices):
                    first = self._chunk(index, Delta({"role": "assistant", "content": ""}, ()))
                    yield encode_event({**head, "choices": [first], **more})
            choices = [self._chunks(index) for index in range(self._parsed.num_choices)]
            async for chunk in merge(choices):
                yield encode_event({**head, "choices": [chunk], **more})
            if wants_usage:
                yield encode_event({**head, "choices": [], "usage": self.usage.to_json()})
        except ApiError as error:
            yield encode_event(error.to_json())
        except Exception:
            LOG.exception("a stream failed")
            yield encode_event(internal_error().to_json())
        finally:
            self.cancel()
        yield DONE

    async def _chunks(self, index: int) -> AsyncIterator[dict[str, Any]]:
        """Yield one choice of a stream, a chunk at a time."""
        choice = self._format.choice(self._model.tokenizer, self._parsed, index)
        if isinstance(choice, TextChoice):
            scores = await self._prompt_scores(index // self._parsed.n)
            if (delta := choice.echo(scores)) is not None:
                yield self._chunk(index, delta)
        text_index = len(self.texts)
        self.texts.append("")
        unsent_ids: tuple[int, ...] = ()  # of tokens that have nothing to show yet
        steps = StepFormatter(self._model.spec.depth)
        async for output in self._outputs(index):
            delta = choice.push(output)
            unsent_ids += delta.token_ids
            self.texts[text_index] += delta.fields.get("content", "") + delta.fields.get("text", "")
            reason = None
            if isinstance(output, Completion):
                self._count(output, choice)
                reason = self._stop_reason(output, choice)
            if delta.is_empty:
                continue
            chunk = self._chunk(index, delta, reason)
            if self._request.return_token_ids:
                chunk["token_ids"] = unsent_ids
            if self._parsed.return_steps:
                chunk["jaxspec"] = steps.push(output, delta.token_deltas, delta.rest)
            unsent_ids = ()
            yield chunk

    def _chunk(
        self, index: int, delta: Delta, stop_reason: int | str | None = None
    ) -> dict[str, Any]:
        is_chat = self._format.choice is ChatChoice
        chunk: dict[str, Any] = {"index": index}
        chunk |= {"delta": delta.fields} if is_chat else {"text": delta.fields.get("text", "")}
        chunk["logprobs"] = delta.logprobs
        chunk["finish_reason"] = delta.finish_reason
        if stop_reason is not None:
            chunk["stop_reason"] = stop_reason
        return chunk

    # --- both ------------------------------------------------------------------------------------

    async def _prompt_scores(self, index: int) -> PromptScores | None:
        """Return the scores of a prompt, or None if the request needs none."""
        if not self._scores:
            return None
        try:
            async with asyncio.timeout(self._left_s):
                return await asyncio.wrap_future(self._scores[index])
        except TimeoutError:
            raise self._timeout_error() from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and not task.cancelling():  # the engine has ended
                raise ApiError(503, "the server ended the request", code="cancelled") from None
            raise

    async def _outputs(self, index: int) -> AsyncIterator[RequestOutput]:
        """Yield the engine's outputs for a choice.

        Raises:
          ApiError: the engine failed, or the request's time is over.
        """
        if not self._handles:  # `max_tokens` is 0
            yield Completion(None)
            return
        outputs = aiter(self._handles[index])
        output: RequestOutput | None = None
        while not isinstance(output, Completion):
            try:
                async with asyncio.timeout(self._left_s):
                    output = await anext(outputs)
            except TimeoutError:
                raise self._timeout_error() from None
            if isinstance(output, Completion):
                _raise_if_failed(output)
                # The choices of a prompt share it, so only the first one counts its cached tokens.
                if index % self._parsed.n:
                    output = dataclasses.replace(output, cached_tokens=0)
            yield output

    @property
    def _left_s(self) -> float:
        return max(0.0, self._end_s - time.monotonic())

    def _timeout_error(self) -> ApiError:
        message = f"the request took longer than {self._model.settings.timeout:g} s"
        return ApiError(504, message, code="timeout")

    def _count(self, completion: Completion, choice: TextChoice | ChatChoice) -> None:
        """Count a choice that is done."""
        self.usage.add(completion, choice)
        if isinstance(choice, ChatChoice):
            self._metrics.tool_calls(choice.parser)

    def _stop_reason(
        self, completion: Completion, choice: TextChoice | ChatChoice
    ) -> int | str | None:
        return stop_reason(completion, choice.stop_text, self._request.stop_token_ids or ())


def _raise_if_failed(completion: Completion) -> None:
    if completion.finish_reason == "error" and completion.field is not None:
        raise ApiError(400, completion.error or "", param=completion.field)
    if completion.finish_reason == "error":
        LOG.error("a request failed: %s", completion.error)
        raise internal_error()
    if completion.finish_reason == "cancelled":
        raise ApiError(503, "the server ended the request", code="cancelled")
