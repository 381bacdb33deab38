"""The events of a parser of a model's output, as small records."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Text:
    """A piece of the answer."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """A piece of the reasoning before the answer."""

    text: str


@dataclass(frozen=True)
class ToolCallStart:
    """A tool call has begun. Calls are numbered from 0 in the order of their start."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class ToolCallArguments:
    """A piece of the JSON text of a call's arguments.

    All pieces so far are the beginning of a valid JSON object. With `ToolCallEnd` they are one.
    """

    index: int
    json_delta: str


@dataclass(frozen=True)
class ToolCallEnd:
    """A tool call is complete: its pieces of JSON make one valid object."""

    index: int


@dataclass(frozen=True)
class ToolCallBroken:
    """A tool call has begun and will never be complete. It must not be presented as a call.

    The `Text` behind it is what the model wrote.

    Attributes:
      why: the error in it, or that generation ended inside it.
    """

    index: int
    why: str


Event = Text | Reasoning | ToolCallStart | ToolCallArguments | ToolCallEnd | ToolCallBroken


def merged(events: Iterable[Event]) -> list[Event]:
    """Return the same events, with neighbouring pieces of one thing joined."""
    out: list[Event] = []
    for event in events:
        last = out[-1] if out else None
        if isinstance(event, Text) and isinstance(last, Text):
            out[-1] = Text(last.text + event.text)
        elif isinstance(event, Reasoning) and isinstance(last, Reasoning):
            out[-1] = Reasoning(last.text + event.text)
        elif (
            isinstance(event, ToolCallArguments)
            and isinstance(last, ToolCallArguments)
            and event.index == last.index
        ):
            out[-1] = replace(last, json_delta=last.json_delta + event.json_delta)
        else:
            out.append(event)
    return out


def message_of(events: Sequence[Event]) -> dict[str, Any]:
    """Return the assistant's message of all events of one reply, in the protocol's form.

    Calls that are not complete are left out. `content` is None if there is a call and no text.
    `reasoning` and `tool_calls` are absent if the model wrote none.
    """
    text = "".join(e.text for e in events if isinstance(e, Text))
    reasoning = "".join(e.text for e in events if isinstance(e, Reasoning))
    complete = {e.index for e in events if isinstance(e, ToolCallEnd)}
    arguments: dict[int, list[str]] = {index: [] for index in complete}
    for event in events:
        if isinstance(event, ToolCallArguments) and event.index in complete:
            arguments[event.index].append(event.json_delta)
    calls = [
        {
            "id": e.id,
            "type": "function",
            "function": {"name": e.name, "arguments": "".join(arguments[e.index])},
        }
        for e in events
        if isinstance(e, ToolCallStart) and e.index in complete
    ]
    message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else "")}
    if reasoning:
        message["reasoning"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message
