"""Items of /v1/responses, in and out, without a server."""

from __future__ import annotations

from typing import Any

from jaxspec import chat
from jaxspec.serving.responses import Output, messages_of


def test_items_become_messages() -> None:
    """What one turn of the model said is one message: reasoning, text and calls."""
    call = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'}
    items: list[dict[str, Any]] = [
        {"role": "user", "content": "1 + 1"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "So"}],
        },
        call,
        {**call, "call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "2"},
        {"type": "function_call_output", "call_id": "c2", "output": {"sum": 2}},
        {"role": "user", "content": "thanks"},
    ]
    function = {"name": "add", "arguments": '{"a": 1}'}
    assert messages_of(items, "be brief") == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "1 + 1"},
        {
            "role": "assistant",
            "reasoning": "hm",
            "content": [{"type": "output_text", "text": "So"}],
            "tool_calls": [
                {"id": name, "type": "function", "function": function} for name in ("c1", "c2")
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
        {"role": "tool", "tool_call_id": "c2", "content": '{"sum": 2}'},
        {"role": "user", "content": "thanks"},
    ]


def test_events_become_items() -> None:
    """The deltas of each item are what it has in the end, however events are grouped."""
    events: list[chat.Event] = [
        chat.Reasoning("I "),
        chat.Reasoning("think"),
        chat.Text("So "),
        chat.Text("it is"),
        chat.ToolCallStart(0, "c1", "add"),
        chat.ToolCallArguments(0, '{"a":'),
        chat.ToolCallArguments(0, "1}"),
        chat.ToolCallEnd(0),
        chat.ToolCallStart(1, "c2", "add"),
        chat.ToolCallArguments(1, "{"),
        chat.ToolCallBroken(1, "generation ended inside the call"),
    ]
    output = Output()
    told = [made for event in events for made in output.take([event])]
    told += output.end()
    assert [(item["type"], item["status"]) for item in output.items] == [
        ("reasoning", "completed"),
        ("message", "completed"),
        ("function_call", "completed"),
        ("function_call", "incomplete"),
    ]
    deltas = ["", "", "", ""]
    for event in told:
        if event["type"].endswith(".delta"):
            deltas[event["output_index"]] += event["delta"]
            assert event["item_id"] == output.items[event["output_index"]]["id"]
    assert deltas == ["I think", "So it is", '{"a":1}', "{"]
    assert output.items[2]["arguments"] == '{"a":1}'
    kinds = [event["type"] for event in told]
    assert (
        kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 4
    )
    added = [e["item"] for e in told if e["type"] == "response.output_item.added"]
    assert [item["status"] for item in added] == ["in_progress"] * 4
    assert added[0]["content"] == []
