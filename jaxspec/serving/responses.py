"""`/v1/responses`: the same engine, asked and answered in the form of the Responses protocol.

Read `ResponsesReply`. Items of the input become messages of a chat (`messages_of`). What the model writes becomes
items of the output (`Output`), told event by event. A reply in one piece is the end of the same story. Nothing is
stored, so a conversation is sent whole each time.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxspec.engine.request import Completion
from jaxspec.options import shown
from jaxspec.serving import event_stream
from jaxspec.serving.completions import Kind, Reply, internal_error
from jaxspec.serving.errors import ApiError
from jaxspec.serving.open_engine import OpenEngine
from jaxspec.serving.parse_request import ParsedRequest, ServingModel
from jaxspec.serving.prompt_logprobs import PromptScores
from jaxspec.serving.protocol import ChatCompletionRequest, GenerationRequest
from jaxspec.serving.reply_format import ChatChoice, TextLogprobs, finish_reason
from jaxspec.text import chat

LOG = logging.getLogger("jaxspec.serving")
KIND = Kind("resp_", "response", "response", ChatChoice)
Event = dict[str, Any]
LOGPROBS = "message.output_text.logprobs"
"""What `include` has where log-probabilities are asked for."""
_PARAMS = {
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "response_format": "text.format",
}


class ResponsesRequest(GenerationRequest):
    """A request to /v1/responses."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    previous_response_id: str | None = None
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None
    chat_template_kwargs: dict[str, Any] | None = None


def parse_responses(served: ServingModel, asked: ResponsesRequest) -> ParsedRequest:
    """Understand a request.

    Raises:
      ApiError: it cannot be served; says which field is wrong.
    """
    wrong = {
        "previous_response_id": asked.previous_response_id is not None,
        "background": bool(asked.background),
        "conversation": asked.conversation is not None,
        "prompt": asked.prompt is not None,
        "n": asked.n not in (None, 1),
    }
    for name, is_wrong in wrong.items():
        if is_wrong:
            raise ApiError(400, f"{name} is not supported", param=name)
    for name in ("metadata", "tools", "tool_choice", "reasoning", "text"):  # the reply repeats them
        try:
            json.dumps(getattr(asked, name), allow_nan=False)
        except ValueError:
            said = f"{name} has a number that is none of JSON"
            raise ApiError(400, said, param=name) from None
    effort = (asked.reasoning or {}).get("effort")
    if not isinstance(effort, str | None):
        name = "reasoning.effort"
        raise ApiError(400, f"{name} is {shown(effort)}; expected a word", param=name)
    top = asked.top_logprobs
    wants_logprobs = bool(top) or LOGPROBS in (asked.include or ())
    same = {
        name: getattr(asked, name) for name in GenerationRequest.model_fields if name != "stream"
    }
    try:
        return served.chat(
            ChatCompletionRequest(
                **same | {"stream_options": None, "response_format": _format(asked)},
                messages=messages_of(asked.input, asked.instructions),
                max_completion_tokens=asked.max_output_tokens,
                tools=asked.tools,
                tool_choice=asked.tool_choice,
                parallel_tool_calls=asked.parallel_tool_calls,
                reasoning_effort=effort,
                chat_template_kwargs=asked.chat_template_kwargs,
                logprobs=wants_logprobs,
                top_logprobs=top if wants_logprobs else None,
            )
        )
    except ApiError as error:
        first = (error.param or "").partition("[")[0]
        if first in _PARAMS:
            message = error.message.replace(first, _PARAMS[first], 1)
            param = _PARAMS[first] + (error.param or "")[len(first) :]
            raise ApiError(error.status, message, param=param, code=error.code) from None
        raise


def _format(asked: ResponsesRequest) -> dict[str, Any] | None:
    """Return what the reply has to be, as /v1/chat/completions has it."""
    found = (asked.text or {}).get("format")
    if found is not None and not isinstance(found, dict):
        raise ApiError(
            400, f"text.format is {shown(found)}; expected an object", param="text.format"
        )
    return found


# --- the input ---------------------------------------------------------------------------------------


def messages_of(given: str | Sequence[Any], instructions: str | None) -> list[dict[str, Any]]:
    """Return the messages of a chat that the items of an input make.

    Raises:
      ApiError: an item cannot be used.
    """
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    for place, item in enumerate(given):
        _add(messages, f"input[{place}]", item)
    return messages


def _add(messages: list[dict[str, Any]], field: str, item: Mapping[str, Any]) -> None:
    """Add an item to messages. What one turn of the model said is one message."""
    kind = item.get("type", "message")
    if kind == "message":
        message = {"role": item.get("role"), "content": item.get("content")}
        is_open = bool(messages) and messages[-1].get("content", "") is None
        if item.get("role") == "assistant" and is_open and "tool_calls" not in messages[-1]:
            messages[-1]["content"] = item.get("content")  # its reasoning came before
        else:
            messages.append(message)
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        _own(messages).setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        output = item.get("output")
        text = output if isinstance(output, str | list) else json.dumps(output)
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": text})
    elif kind == "reasoning":
        given = item.get("content"), item.get("summary")
        parts = [part for parts in given if isinstance(parts, list) for part in parts]
        text = "\n".join(str(part.get("text", "")) for part in parts if isinstance(part, Mapping))
        if text:
            messages.append({"role": "assistant", "content": None, "reasoning": text})
    else:
        said = f"{field}.type is {shown(kind)}; this server reads messages, reasoning and function calls"
        raise ApiError(400, said, param=f"{field}.type")


def _own(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the model's message that a call belongs to."""
    if not messages or messages[-1].get("role") != "assistant":
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


# --- the output --------------------------------------------------------------------------------------


class Output:
    """The items of a reply while they are written, and the events that tell of them.

    Attributes:
      items: as the reply shows them.
    """

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._open = False  # whether the last item goes on

    def take(
        self, events: Sequence[chat.Event], logprobs: Sequence[dict[str, Any]] | None = None
    ) -> Iterator[Event]:
        """Tell of what the model wrote.

        Args:
          logprobs: of the tokens of its text; None where nobody asks.
        """
        for event in events:
            if isinstance(event, chat.Text):
                yield from self._text("message", event.text, logprobs)
                logprobs = None if logprobs is None else ()  # told once, with the first piece
            elif isinstance(event, chat.Reasoning):
                yield from self._text("reasoning", event.text)
            elif isinstance(event, chat.ToolCallStart):
                yield from self._begin(
                    {
                        "type": "function_call",
                        "id": f"fc_{uuid.uuid4().hex}",
                        "call_id": event.id,
                        "name": event.name,
                        "arguments": "",
                        "status": "in_progress",
                    }
                )
            elif isinstance(event, chat.ToolCallArguments):
                self.items[-1]["arguments"] += event.json_delta
                delta = {"delta": event.json_delta}
                yield self._event("response.function_call_arguments.delta", delta)
            elif isinstance(event, chat.ToolCallEnd):
                yield from self.end()
            else:
                yield from self.end("incomplete")

    def end(self, status: str = "completed") -> Iterator[Event]:
        """End the item that goes on."""
        if not self._open:
            return
        self._open = False
        item = self.items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            done = {"arguments": item["arguments"], "name": item["name"]}
            yield self._event("response.function_call_arguments.done", done)
        else:
            (part,) = item["content"]
            kind = part["type"]
            said = {"content_index": 0, "text": part["text"]}
            if kind == "output_text":
                said["logprobs"] = part.get("logprobs", [])
            yield self._event(f"response.{kind}.done", said)
            yield self._event("response.content_part.done", {"content_index": 0, "part": part})
        yield self._event("response.output_item.done", {"item": item})

    def _text(
        self, kind: str, text: str, logprobs: Sequence[dict[str, Any]] | None = None
    ) -> Iterator[Event]:
        """Tell of a piece of text, of an item of that kind."""
        if not self._open or self.items[-1]["type"] != kind:
            yield from self._begin_text(kind)
        (part,) = self.items[-1]["content"]
        part["text"] += text
        said = {"content_index": 0, "delta": text}
        if part["type"] == "output_text":
            said["logprobs"] = [*(logprobs or ())]
        if logprobs is not None:
            part.setdefault("logprobs", []).extend(logprobs)
        yield self._event(f"response.{part['type']}.delta", said)

    def _begin_text(self, kind: str) -> Iterator[Event]:
        if kind == "message":
            start: dict[str, Any] = {"id": f"msg_{uuid.uuid4().hex}", "role": "assistant"}
            part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": []}
        else:
            start = {"id": f"rs_{uuid.uuid4().hex}", "summary": []}
            part = {"type": "reasoning_text", "text": ""}
        item = {"type": kind, **start, "content": [], "status": "in_progress"}
        yield from self._begin(item)
        added = self._event("response.content_part.added", {"content_index": 0, "part": {**part}})
        item["content"] = [part]
        yield added

    def _begin(self, item: dict[str, Any]) -> Iterator[Event]:
        yield from self.end()
        self.items.append(item)
        self._open = True
        yield self._event("response.output_item.added", {"item": {**item}})

    def _event(self, kind: str, more: dict[str, Any]) -> Event:
        place = {"output_index": len(self.items) - 1}
        if "item" not in more:
            place["item_id"] = self.items[-1]["id"]
        return {"type": kind, **place, **more}


class ResponsesReply(Reply):
    """A reply of /v1/responses that is being made."""

    def __init__(
        self,
        served: ServingModel,
        opened: OpenEngine,
        scorer: Callable[[tuple[int, ...]], PromptScores],
        asked: ResponsesRequest,
        wish: ParsedRequest,
    ):
        """Submit the request; errors are as in `Reply`."""
        super().__init__(KIND, served, opened, scorer, asked, wish)
        self._items = Output()
        self._said = asked
        self._number = 0

    async def whole(self) -> dict[str, Any]:
        """Wait for the end, and return the reply.

        Raises:
          ApiError: the engine failed, or there was no time left.
        """
        last: Event = {}
        try:
            async for event in self._told():
                last = event
        finally:
            self.cancel()
        return last["response"]

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the events of a stream. However it is left, the slot is given back."""
        try:
            async for event in self._told():
                yield self._numbered(event)
        except ApiError as error:
            yield self._numbered(self._failed(error))
        except Exception:
            LOG.exception("a stream failed")
            yield self._numbered(self._failed(internal_error()))
        finally:
            self.cancel()

    async def _told(self) -> AsyncIterator[Event]:
        """Yield what happens; the last event has the whole reply."""
        for kind in ("response.created", "response.in_progress"):
            yield {"type": kind, "response": self._response("in_progress")}
        wish = self._wish
        parser = chat.parser_for(
            self._served.tokenizer,
            wish.prompt_of(0),
            calls=wish.tools.calls,
            stop_texts=wish.stops,
        )
        seen = 0
        status = "completed"
        text = None if wish.top_logprobs is None else TextLogprobs(self._served.tokenizer, wish)
        async for event in self._events(0):
            if text is not None:
                for events, logprobs in text.read(parser, event, seen):
                    for made in self._items.take(events, logprobs):
                        yield made
            else:
                for made in self._items.take(parser.push(event.token_ids[seen:])):
                    yield made
            seen = len(event.token_ids)
            if isinstance(event, Completion):
                self._count(event, parser.reasoning_tokens)
                events = parser.finish(finish_reason(event))
                for made in self._items.take(events, text and text.rest()):
                    yield made
                status = "completed" if event.finish_reason == "stop" else "incomplete"
        for made in self._items.end(status):
            yield made
        self.texts += [i["content"][0]["text"] for i in self._items.items if i["type"] == "message"]
        yield {"type": f"response.{status}", "response": self._response(status)}

    def _failed(self, error: ApiError) -> Event:
        said = {"code": error.code or "server_error", "message": error.message}
        return {"type": "response.failed", "response": {**self._response("failed"), "error": said}}

    def _numbered(self, event: Event) -> bytes:
        value = {**event, "sequence_number": self._number}
        self._number += 1
        return event_stream.event(value, event["type"])

    def _response(self, status: str) -> dict[str, Any]:
        asked, usage, sampling = self._said, self.usage, self._wish.requests[0].sampling
        is_over = status not in ("in_progress", "failed")
        return {
            "id": self._head["id"],
            "object": "response",
            "created_at": self._head["created"],
            "model": self._head["model"],
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"}
            if status == "incomplete"
            else None,
            "output": self._items.items if is_over else [],
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "tools": asked.tools or [],
            "tool_choice": asked.tool_choice or "auto",
            "parallel_tool_calls": self._wish.tools.parallel,
            "top_logprobs": self._wish.top_logprobs or 0,
            "reasoning": asked.reasoning or {"effort": None, "summary": None},
            "text": {"format": _format(asked) or {"type": "text"}},
            "truncation": "disabled",
            "store": False,
            "previous_response_id": None,
            "metadata": asked.metadata or {},
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_tokens},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": usage.details,
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            }
            if is_over
            else None,
        }
