"""/v1/responses: requests as chats, and replies in the form of the Responses protocol.

Read `parse_responses`, then `ResponsesReply`. `messages_of` makes messages of a chat from the
input's items. `Output` makes items and stream events from the model's tokens. A reply in one piece
is the stream's last event. Nothing is stored, so each request has the whole conversation.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

from jaxspec.engine.request import Completion
from jaxspec.options import shown
from jaxspec.serving.completions import Reply, ReplyFormat, Scorer
from jaxspec.serving.errors import ApiError, internal_error
from jaxspec.serving.event_stream import encode_event
from jaxspec.serving.metrics import Metrics
from jaxspec.serving.open_engine import OpenEngine
from jaxspec.serving.parse_request import ParsedRequest, ServingModel
from jaxspec.serving.protocol import (
    ChatCompletionRequest,
    GenerationRequest,
    ResponsesRequest,
)
from jaxspec.serving.reply_format import ChatChoice
from jaxspec.text import chat

LOG = logging.getLogger("jaxspec.serving")
FORMAT = ReplyFormat("resp_", "response", "response", ChatChoice)
StreamEvent = dict[str, Any]
LOGPROBS = "message.output_text.logprobs"
"""Element of `include` that asks for log-probabilities."""
_PARAMS = {
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "response_format": "text.format",
}


def parse_responses(model: ServingModel, request: ResponsesRequest) -> ParsedRequest:
    """Parse a request to /v1/responses, as a chat.

    Raises:
      ApiError: the server cannot serve it; names the field.
    """
    unsupported = {
        "previous_response_id": request.previous_response_id is not None,
        "background": bool(request.background),
        "conversation": request.conversation is not None,
        "prompt": request.prompt is not None,
        "n": request.n not in (None, 1),
    }
    for name, is_set in unsupported.items():
        if is_set:
            raise ApiError(400, f"{name} is not supported", param=name)
    effort = (request.reasoning or {}).get("effort")
    if not isinstance(effort, str | None):
        name = "reasoning.effort"
        raise ApiError(400, f"{name} is {shown(effort)}; expected a word", param=name)
    top = request.top_logprobs
    wants_logprobs = bool(top) or LOGPROBS in (request.include or ())
    shared = {
        name: getattr(request, name) for name in GenerationRequest.model_fields if name != "stream"
    }
    try:
        return model.parse_chat(
            ChatCompletionRequest(
                **shared | {"stream_options": None, "response_format": _response_format(request)},
                messages=messages_of(request.input, request.instructions),
                max_completion_tokens=request.max_output_tokens,
                tools=request.tools,
                tool_choice=request.tool_choice,
                parallel_tool_calls=request.parallel_tool_calls,
                reasoning_effort=effort,
                chat_template_kwargs=request.chat_template_kwargs,
                logprobs=wants_logprobs,
                top_logprobs=top if wants_logprobs else None,
            )
        )
    except ApiError as error:
        field = (error.param or "").partition("[")[0]
        if field in _PARAMS:
            message = error.message.replace(field, _PARAMS[field], 1)
            param = _PARAMS[field] + (error.param or "")[len(field) :]
            raise ApiError(error.status, message, param=param, code=error.code) from None
        raise


def _response_format(request: ResponsesRequest) -> dict[str, Any] | None:
    """Return `text.format` as the `response_format` of /v1/chat/completions."""
    value = (request.text or {}).get("format")
    if value is not None and not isinstance(value, dict):
        message = f"text.format is {shown(value)}; expected an object"
        raise ApiError(400, message, param="text.format")
    return value


# --- the input ------------------------------------------------------------------------------------


def messages_of(items: str | Sequence[Any], instructions: str | None) -> list[dict[str, Any]]:
    """Return the input's items as messages of a chat.

    Raises:
      ApiError: an item is of a type that is not supported.
    """
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}]
    for index, item in enumerate(items):
        _add(messages, f"input[{index}]", item)
    return messages


def _add(messages: list[dict[str, Any]], field: str, item: Mapping[str, Any]) -> None:
    """Add an item to messages. Items of one turn of the model become one message."""
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
        _last_reply(messages).setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        output = item.get("output")
        text = output if isinstance(output, str | list | None) else json.dumps(output)
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": text})
    elif kind == "reasoning":
        lists = item.get("content"), item.get("summary")
        parts = [part for parts in lists if isinstance(parts, list) for part in parts]
        text = "\n".join(str(part.get("text", "")) for part in parts if isinstance(part, Mapping))
        if text:
            messages.append({"role": "assistant", "content": None, "reasoning": text})
    else:
        raise ApiError(
            400,
            f"{field}.type is {shown(kind)}; this server reads messages, reasoning and function "
            "calls",
            param=f"{field}.type",
        )


def _last_reply(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the last message, if it is the model's; else add one of the model's."""
    if not messages or messages[-1].get("role") != "assistant":
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


# --- the output -----------------------------------------------------------------------------------


class Output:
    """Items of a growing reply, and their stream events.

    A call that breaks is no item of the reply. A stream that began it never says that it is done.

    Attributes:
      items: the items as in the reply's `output`.
    """

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._index = -1  # of the last item among those of the stream
        self._open = False  # whether the last item is unfinished

    def push(
        self, events: Sequence[chat.Event], logprobs: Sequence[dict[str, Any]] | None = None
    ) -> Iterator[StreamEvent]:
        """Add the parser's events to the items; yield stream events.

        Args:
          logprobs: entries of the text's tokens; None if the request has no log-probabilities.
        """
        for event in events:
            if isinstance(event, chat.Text):
                yield from self._text("message", event.text, logprobs)
                logprobs = None if logprobs is None else ()  # sent once, with the first text
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
                self.items.pop()
                self._open = False

    def end(self, status: str = "completed") -> Iterator[StreamEvent]:
        """End the last item, if it is unfinished."""
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
            fields = {"content_index": 0, "text": part["text"]}
            if kind == "output_text":
                fields["logprobs"] = part.get("logprobs", [])
            yield self._event(f"response.{kind}.done", fields)
            yield self._event("response.content_part.done", {"content_index": 0, "part": part})
        yield self._event("response.output_item.done", {"item": item})

    def _text(
        self, kind: str, text: str, logprobs: Sequence[dict[str, Any]] | None = None
    ) -> Iterator[StreamEvent]:
        """Add text to an item of this type, and begin one if the last item is of another type."""
        if not self._open or self.items[-1]["type"] != kind:
            yield from self._begin_text(kind)
        (part,) = self.items[-1]["content"]
        part["text"] += text
        fields = {"content_index": 0, "delta": text}
        if part["type"] == "output_text":
            fields["logprobs"] = [*(logprobs or ())]
        if logprobs is not None:
            part.setdefault("logprobs", []).extend(logprobs)
        yield self._event(f"response.{part['type']}.delta", fields)

    def _begin_text(self, kind: str) -> Iterator[StreamEvent]:
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

    def _begin(self, item: dict[str, Any]) -> Iterator[StreamEvent]:
        yield from self.end()
        self.items.append(item)
        self._index += 1
        self._open = True
        yield self._event("response.output_item.added", {"item": {**item}})

    def _event(self, kind: str, fields: dict[str, Any]) -> StreamEvent:
        position = {"output_index": self._index}
        if "item" not in fields:
            position["item_id"] = self.items[-1]["id"]
        return {"type": kind, **position, **fields}


class ResponsesReply(Reply):
    """A reply of /v1/responses in progress."""

    def __init__(
        self,
        model: ServingModel,
        engine: OpenEngine,
        scorer: Scorer,
        metrics: Metrics,
        request: ResponsesRequest,
        parsed: ParsedRequest,
    ):
        """Submit the request; errors are as in `Reply`."""
        super().__init__(FORMAT, model, engine, scorer, metrics, request, parsed)
        self._output = Output()
        self._responses_request = request
        self._sequence_number = 0

    async def whole(self) -> dict[str, Any]:
        """Wait for the end, and return the reply.

        Raises:
          ApiError: the engine failed, or the request's time is over.
        """
        last: StreamEvent = {}
        try:
            async for event in self._stream_events():
                last = event
        finally:
            self.cancel()
        return last["response"]

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the events of a stream. Frees the slot, even if the stream is closed early."""
        try:
            async for event in self._stream_events():
                yield self._encode(event)
        except ApiError as error:
            yield self._encode(self._failed(error))
        except Exception:
            LOG.exception("a stream failed")
            yield self._encode(self._failed(internal_error()))
        finally:
            self.cancel()

    async def _stream_events(self) -> AsyncIterator[StreamEvent]:
        """Yield the events of a stream; the last one has the whole reply."""
        for kind in ("response.created", "response.in_progress"):
            yield {"type": kind, "response": self._response("in_progress")}
        choice = ChatChoice(self._model.tokenizer, self._parsed, 0)
        seen = 0
        status = "completed"
        wants_logprobs = self._parsed.top_logprobs is not None
        async for output in self._outputs(0):
            for events, logprobs in choice.read(output, seen):
                for event in self._output.push(events, logprobs if wants_logprobs else None):
                    yield event
            seen = len(output.token_ids)
            if isinstance(output, Completion):
                self._count(output, choice)
                if choice.parser.finish_reason == "length":
                    status = "incomplete"
        for event in self._output.end(status):
            yield event
        items = self._output.items
        self.texts += [i["content"][0]["text"] for i in items if i["type"] == "message"]
        yield {"type": f"response.{status}", "response": self._response(status)}

    def _failed(self, error: ApiError) -> StreamEvent:
        value = {"code": error.code or "server_error", "message": error.message}
        return {"type": "response.failed", "response": {**self._response("failed"), "error": value}}

    def _encode(self, event: StreamEvent) -> bytes:
        """Return an event with the stream's next sequence number."""
        event = {**event, "sequence_number": self._sequence_number}
        self._sequence_number += 1
        return encode_event(event, event["type"])

    def _response(self, status: str) -> dict[str, Any]:
        """Return the reply's `response` object. Only a finished one has output and usage."""
        request, usage = self._responses_request, self.usage
        sampling = self._parsed.engine_requests[0].sampling
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
            "output": self._output.items if is_over else [],
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "tools": request.tools or [],
            "tool_choice": request.tool_choice or "auto",
            "parallel_tool_calls": self._parsed.tools.parallel,
            "top_logprobs": self._parsed.top_logprobs or 0,
            "reasoning": request.reasoning or {"effort": None, "summary": None},
            "text": {"format": _response_format(request) or {"type": "text"}},
            "truncation": "disabled",
            "store": False,
            "previous_response_id": None,
            "metadata": request.metadata or {},
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": usage.prompt_details,
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": usage.details,
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            }
            if is_over
            else None,
        }
