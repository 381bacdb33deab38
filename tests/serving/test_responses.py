"""Items of /v1/responses, in and out, without a server."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from jaxspec.engine.request import Update
from jaxspec.serving.reply_format import AnswerLogprobs
from jaxspec.serving.responses import LOGPROBS, Output, messages_of
from jaxspec.text import chat
from tests.serving.conftest import Live
from tests.text.chat.models import GEMMA, QWEN, Family, corpus


def test_items_become_messages() -> None:
    """One turn of the model is one message: reasoning, text and calls."""
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
    """The deltas of each item add up to the item."""
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
        chat.Text("add{"),
    ]
    output = Output()
    stream = [made for event in events for made in output.push([event])]
    stream += output.end()
    assert [(item["type"], item["status"]) for item in output.items] == [
        ("reasoning", "completed"),
        ("message", "completed"),
        ("function_call", "completed"),
        ("message", "completed"),
    ]
    deltas, ids = [""] * 5, dict[str, int]()
    for event in stream:
        if event["type"].endswith(".delta"):
            deltas[event["output_index"]] += event["delta"]
            ids.setdefault(event["item_id"], event["output_index"])
            assert ids[event["item_id"]] == event["output_index"]
    assert deltas == ["I think", "So it is", '{"a":1}', "{", "add{"]
    assert output.items[2]["arguments"] == '{"a":1}'
    kinds = [event["type"] for event in stream]
    assert kinds.count("response.output_item.added") == 5
    done = [e["item"] for e in stream if e["type"] == "response.output_item.done"]
    assert done == output.items  # never the broken call
    added = [e["item"] for e in stream if e["type"] == "response.output_item.added"]
    assert [item["status"] for item in added] == ["in_progress"] * 5
    assert added[0]["content"] == []


def test_log_probabilities_are_told_once() -> None:
    """The text that was held back until the end may come in two pieces."""
    parser = chat.parser_for(QWEN.tokenizer, stop_texts=["\n#"])
    parser.push(QWEN.encode("a b\n\n"))
    events = parser.finish("length")
    assert len(events) == 2
    output, entry = Output(), {"token": "\n\n", "logprob": -1.0}
    stream = [*output.push(events, [entry])]
    assert output.items[0]["content"][0]["logprobs"] == [entry]
    assert [e for made in stream for e in made.get("logprobs", ())] == [entry]


@pytest.mark.parametrize("family", [GEMMA, QWEN], ids=["gemma", "qwen"])
def test_log_probabilities_are_those_of_the_text(family: Family) -> None:
    """Tokens of reasoning, of calls, of markers and of the turn's end have none."""
    for name, reply in corpus(family).items():
        ids = tuple(family.encode(reply))
        event = Update(0, ids, logprobs=tuple(-float(i) for i in range(len(ids))))
        logprobs = AnswerLogprobs(family.tokenizer, 0)
        parser = chat.parser_for(family.tokenizer)
        stream = list(logprobs.push(parser, event, 0))
        broken = parser.broken_calls
        stream.append((parser.finish("stop"), logprobs.release(parser, broken)))
        text = "".join(e.text for events, _ in stream for e in events if isinstance(e, chat.Text))
        entries = [entry for _, entries in stream for entry in entries]
        places = [-entry["logprob"] for entry in entries]
        assert places == sorted(set(places)), name
        written = bytes(byte for entry in entries for byte in entry["bytes"]).decode()
        assert written.replace("\n", "") == text.replace("\n", ""), name


@pytest.mark.parametrize("asks", [{"include": [LOGPROBS]}, {"top_logprobs": 2}])
def test_log_probabilities_are_those_of_a_chat(live: Live, asks: dict[str, Any]) -> None:
    """The reply, its stream and the client's types have them."""
    top = asks.get("top_logprobs", 0)
    same: dict[str, Any] = {"temperature": 0, "extra_body": {"repetition_penalty": 1.0}}
    with openai.OpenAI(base_url=f"{live.client.base_url}/v1", api_key="x") as client:
        (choice,) = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "a"}],
            max_tokens=6,
            logprobs=True,
            top_logprobs=top,
            **same,
        ).choices
        body = {"model": "tiny", "input": "a", "max_output_tokens": 6, **same, **asks}
        whole = client.responses.create(**body)
        events = list(client.responses.create(**body, stream=True))
        plain = client.responses.create(**{k: v for k, v in body.items() if k not in asks})
    expected = [entry.model_dump() for entry in choice.logprobs.content]
    assert len(expected) == 6
    (message,) = whole.output
    assert [entry.model_dump() for entry in message.content[0].logprobs] == expected
    assert whole.top_logprobs == top
    deltas = [e for e in events if e.type == "response.output_text.delta"]
    streamed = [(x.token, x.logprob) for e in deltas for x in e.logprobs]
    (done,) = (e for e in events if e.type == "response.output_text.done")
    assert streamed == [(x["token"], x["logprob"]) for x in expected]
    assert streamed == [(x.token, x.logprob) for x in done.logprobs]
    assert plain.output[0].content[0].logprobs is None
