"""The two routes that generate: a reply in one piece, or a stream of events.

Read `Reply`. A route has a kind: how its objects are called, and which choices make them. All else is the same.
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
from jaxspec.serving import event_stream
from jaxspec.serving.errors import ApiError, not_accepted, wrong_value
from jaxspec.serving.handle import Event, Handle
from jaxspec.serving.open_engine import NotAccepted, OpenEngine
from jaxspec.serving.parse_request import ParsedRequest, ServingModel
from jaxspec.serving.prompt_logprobs import PromptScores
from jaxspec.serving.protocol import GenerationRequest
from jaxspec.serving.reply_format import (
    ChatChoice,
    Delta,
    Logprobs,
    TextChoice,
    Usage,
    joined,
    stop_reason,
)
from jaxspec.serving.verify_steps import Steps

LOG = logging.getLogger("jaxspec.serving")


@dataclass(frozen=True)
class Kind:
    """What distinguishes the two routes."""

    prefix: str
    whole: str
    chunk: str
    choice: type[TextChoice] | type[ChatChoice]


TEXT = Kind("cmpl-", "text_completion", "text_completion", TextChoice)
CHAT = Kind("chatcmpl-", "chat.completion", "chat.completion.chunk", ChatChoice)


class Reply:
    """A reply that is being made: its requests are with the engine from the beginning.

    Attributes:
      usage: of the choices that are done.
    """

    def __init__(
        self,
        kind: Kind,
        served: ServingModel,
        opened: OpenEngine,
        scorer: Callable[[tuple[int, ...]], PromptScores],
        asked: GenerationRequest,
        wish: ParsedRequest,
    ):
        """Submit the requests.

        Raises:
          ApiError: the engine does not take them.
        """
        self._kind, self._served, self._asked, self._wish = kind, served, asked, wish
        self._scores: list[Future[PromptScores]] = []
        self._handles: list[Handle] = []
        try:
            for prompt in wish.prompts if wish.needs_scores else ():
                self._scores.append(opened.call(partial(scorer, prompt)))
            self._handles += opened.submit_all(wish.requests)
        except (FieldError, NotAccepted) as error:
            self.cancel()  # nobody will read the scores
            if isinstance(error, FieldError):
                raise wrong_value(error) from None
            raise not_accepted(error) from None
        self._end_s = time.monotonic() + served.settings.timeout
        self._head = {
            "id": kind.prefix + uuid.uuid4().hex,
            "object": kind.whole,
            "created": int(time.time()),
            "model": asked.model or served.names[0],
        }
        self.usage = Usage(prompt_tokens=sum(map(len, wish.prompts)))
        self.texts: list[str] = []  # of the reply, for a log that wants them

    def cancel(self) -> None:
        """Give the slots back; what is done stays done."""
        for handle in self._handles:
            handle.cancel()
        for future in self._scores:
            future.cancel()

    # --- in one piece ----------------------------------------------------------------------------

    async def whole(self) -> dict[str, Any]:
        """Wait for all choices, and return the reply.

        Raises:
          ApiError: the engine failed, or there was no time left.
        """
        try:
            scores = [await self._scored(i) for i in range(len(self._wish.prompts))]
            done = [await self._completion(i) for i in range(self._wish.num_choices)]
        finally:
            self.cancel()
        choices = [
            self._whole_choice(i, completion, scores[i // self._wish.n])
            for i, completion in enumerate(done)
        ]
        return {**self._head, "choices": choices, "usage": self.usage.to_json()}

    async def _completion(self, index: int) -> Completion:
        async for event in self._events(index):
            if isinstance(event, Completion):
                return event
        raise AssertionError("a handle ends with a completion")

    def _whole_choice(
        self, index: int, done: Completion, scores: PromptScores | None
    ) -> dict[str, Any]:
        choice = self._kind.choice(self._served.tokenizer, self._wish, index)
        if isinstance(choice, ChatChoice):
            message, piece = choice.message(done)
            self.texts.append(message.get("content") or "")
            shown: dict[str, Any] = {"message": message}
        else:
            piece = joined(choice.echo(scores), choice.push(done))
            text = piece.delta.get("text", "")
            self.texts.append(text)
            shown = {"text": text}
        self._count(done, choice.reasoning_tokens)
        made = {
            "index": index,
            **shown,
            "logprobs": piece.logprobs,
            "finish_reason": piece.reason,
            "stop_reason": self._stop_reason(done),
        }
        if (top := self._wish.prompt_logprobs) is not None and scores is not None:
            logprobs = Logprobs(self._served.tokenizer, top)
            made["prompt_logprobs"] = logprobs.of_prompt(scores)
        if self._asked.return_token_ids:
            made |= {
                "token_ids": done.token_ids,
                "prompt_token_ids": self._wish.prompt_of(index),
            }
        return made

    # --- as a stream -----------------------------------------------------------------------------

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the events of a stream. However it is left, the slots are given back."""
        options = self._asked.stream_options
        wants_usage = bool(options and options.include_usage)
        more: dict[str, Any] = {"usage": None} if wants_usage else {}
        head = {**self._head, "object": self._kind.chunk}
        try:
            if self._kind.choice is ChatChoice:
                for index in range(self._wish.num_choices):
                    first = self._chunk(index, {"role": "assistant", "content": ""}, None)
                    yield event_stream.event({**head, "choices": [first], **more})
            sources = [self._pieces(index) for index in range(self._wish.num_choices)]
            async for chunk in event_stream.merged(sources):
                yield event_stream.event({**head, "choices": [chunk], **more})
            if wants_usage:
                yield event_stream.event({**head, "choices": [], "usage": self.usage.to_json()})
        except ApiError as error:
            yield event_stream.event(error.to_json())
        except Exception:
            LOG.exception("a stream failed")
            yield event_stream.event(internal_error().to_json())
        finally:
            self.cancel()
        yield event_stream.DONE

    async def _pieces(self, index: int) -> AsyncIterator[dict[str, Any]]:
        choice = self._kind.choice(self._served.tokenizer, self._wish, index)
        if isinstance(choice, TextChoice):
            scores = await self._scored(index // self._wish.n)
            if (piece := choice.echo(scores)) is not None:
                yield self._chunk(index, piece.delta, piece)
        place = len(self.texts)
        self.texts.append("")
        ids: tuple[int, ...] = ()  # that came without anything to show
        steps = Steps(self._served.spec.depth)
        async for event in self._events(index):
            piece = choice.push(event)
            ids += piece.token_ids
            self.texts[place] += piece.delta.get("content", "") + piece.delta.get("text", "")
            stop = None
            if isinstance(event, Completion):
                self._count(event, choice.reasoning_tokens)
                stop = self._stop_reason(event)
            if piece.is_empty:
                continue
            chunk = self._chunk(index, piece.delta, piece, stop)
            if self._asked.return_token_ids:
                chunk["token_ids"] = ids
            if self._wish.steps:
                chunk["jaxspec"] = steps.push(event, piece.of_tokens, piece.rest)
            ids = ()
            yield chunk

    def _chunk(
        self, index: int, delta: dict[str, Any], piece: Delta | None, stop: int | str | None = None
    ) -> dict[str, Any]:
        is_chat = self._kind.choice is ChatChoice
        chunk: dict[str, Any] = {"index": index}
        chunk |= {"delta": delta} if is_chat else {"text": delta.get("text", "")}
        chunk["logprobs"] = piece.logprobs if piece else None
        chunk["finish_reason"] = piece.reason if piece else None
        if stop is not None:
            chunk["stop_reason"] = stop
        return chunk

    async def _scored(self, prompt: int) -> PromptScores | None:
        """Return the scores of a prompt, or None where nobody asks."""
        if not self._scores:
            return None
        try:
            async with asyncio.timeout(self._left_s):
                return await asyncio.wrap_future(self._scores[prompt])
        except TimeoutError:
            raise self._too_late() from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and not task.cancelling():  # the engine has ended
                raise ApiError(503, "the server ended the request", code="cancelled") from None
            raise

    # --- both ------------------------------------------------------------------------------------

    async def _events(self, index: int) -> AsyncIterator[Event]:
        """Yield the events of a choice while there is time.

        Raises:
          ApiError: there is none left, or the engine failed.
        """
        if not self._handles:  # only the prompts were asked for
            yield Completion(None)
            return
        events = aiter(self._handles[index])
        event: Event | None = None
        while not isinstance(event, Completion):
            try:
                async with asyncio.timeout(self._left_s):
                    event = await anext(events)
            except TimeoutError:
                raise self._too_late() from None
            if isinstance(event, Completion):
                _refuse_failed(event)
                # The choices of a prompt share it: its first one says what was there.
                if index % self._wish.n:
                    event = dataclasses.replace(event, cached_tokens=0)
            yield event

    @property
    def _left_s(self) -> float:
        return max(0.0, self._end_s - time.monotonic())

    def _too_late(self) -> ApiError:
        said = f"the request took longer than {self._served.settings.timeout:g} s"
        return ApiError(504, said, code="timeout")

    def _stop_reason(self, done: Completion) -> int | str | None:
        ids = self._asked.stop_token_ids or ()
        return stop_reason(done, self._served.tokenizer, self._wish, ids)

    def _count(self, done: Completion, reasoning_tokens: int) -> None:
        self.usage.add(done, reasoning_tokens)


def internal_error() -> ApiError:
    """Return the reply for a mistake of the server's own. It says nothing of what it was."""
    return ApiError(500, "internal error; the server's log says more", code="internal_error")


def _refuse_failed(done: Completion) -> None:
    if done.finish_reason == "error" and done.field is not None:
        raise ApiError(400, done.error or "", param=done.field)
    if done.finish_reason == "error":
        LOG.error("a request failed: %s", done.error)
        raise internal_error()
    if done.finish_reason == "cancelled":
        raise ApiError(503, "the server ended the request", code="cancelled")
