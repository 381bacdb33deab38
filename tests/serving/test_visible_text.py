"""What a request says of the text is meant of the text that its client sees.

A reply's tokens hold more than its content: reasoning, markers, calls, the end of the turn.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from tests import tiny_pair as tiny
from tests.serving.conftest import Live
from tests.serving.scripted import ScriptedEngine
from tests.text.chat.models import QWEN

Scripted = Callable[..., tuple[Live, ScriptedEngine]]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
USER = {"role": "user", "content": "a"}
CALL = QWEN.call("weather", {"city": "the\nclass"})
BROKEN = '<tool_call>\n{"name": "weather", "arguments": {"city": "Os; }\n</tool_call>'


def client_of(live: Live) -> Any:
    return openai.OpenAI(base_url=f"{live.client.base_url}/v1", api_key="x")


def both(client: Any, **fields: Any) -> list[dict[str, Any]]:
    """Return the choice of a whole reply, and that of a stream, as one: content, calls and the rest."""
    fields = {"model": "scripted", "messages": [USER], **fields}
    (whole,) = client.chat.completions.create(**fields).choices
    made = [whole.model_dump()]
    streamed: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "entries": []}
    for chunk in client.chat.completions.create(**fields, stream=True):
        for choice in chunk.choices:
            streamed["content"] += choice.delta.content or ""
            streamed["reasoning"] += getattr(choice.delta, "reasoning", None) or ""
            for call in choice.delta.tool_calls or ():
                if call.id:
                    streamed["calls"].append([call.id, call.function.name, ""])
                streamed["calls"][-1][2] += call.function.arguments or ""
            streamed["entries"] += choice.logprobs.content if choice.logprobs else ()
            streamed["finish_reason"] = choice.finish_reason or streamed.get("finish_reason")
            streamed["stop_reason"] = getattr(choice, "stop_reason", None)
    message = made[0]["message"]
    assert (message["content"] or "") == streamed["content"]
    assert message.get("reasoning", "") == streamed["reasoning"]
    assert made[0]["finish_reason"] == streamed["finish_reason"]
    assert made[0]["stop_reason"] == streamed["stop_reason"]
    if made[0]["logprobs"] is not None:
        assert made[0]["logprobs"]["content"] == [e.model_dump() for e in streamed["entries"]]
    return [made[0], streamed]


@pytest.mark.parametrize(
    ("reply", "stop", "content", "reason"),
    [
        (QWEN.thought("") + "the class", ["\n"], "the class", None),
        (QWEN.thought("of\nthe") + "class\nname", ["\n"], "class", "\n"),
        (QWEN.thought("of") + "the class and", ["of", " cla"], "the", " cla"),
        ("the " + CALL, ["class", "\n"], "the ", None),
        ("the class", ["</think>", "<|im_end|>"], "the class", None),
    ],
)
def test_stop_texts_are_those_of_the_content(
    scripted: Scripted, reply: str, stop: list[str], content: str, reason: str | None
) -> None:
    live, _ = scripted(reply + "<|im_end|>")
    with client_of(live) as client:
        whole, streamed = both(client, stop=stop, tools=TOOLS)
    assert whole["message"]["content"] == content
    assert whole["stop_reason"] == reason
    calls = [call["function"]["arguments"] for call in whole["message"]["tool_calls"] or ()]
    assert calls == [call[2] for call in streamed["calls"]]
    assert calls == (['{"city":"the\\nclass"}'] if "tool_call" in reply else [])
    answer = live.post("/v1/responses", input="a", stop=stop, tools=TOOLS).json()
    texts = [i["content"][0]["text"] for i in answer["output"] if i["type"] == "message"]
    assert "".join(texts) == content


@pytest.mark.parametrize(
    ("reply", "stop"),
    [
        (QWEN.thought("of the") + "the class\nand é 😀.\n" + CALL + "\nthe name", None),
        ("the class and the name", ["s and"]),
        ("the class and" + BROKEN, None),
        ("the class\n\nname é", ["\nn"]),
    ],
)
def test_log_probabilities_of_a_chat_are_those_of_its_content(
    scripted: Scripted, reply: str, stop: list[str] | None
) -> None:
    live, _ = scripted(reply + "<|im_end|>")
    with client_of(live) as client:
        whole, _ = both(client, logprobs=True, tools=TOOLS, stop=stop)
    text = bytes(byte for entry in whole["logprobs"]["content"] for byte in entry["bytes"]).decode()
    content = whole["message"]["content"]
    # A stop text may begin inside a token, and the newlines beside a marker are no content.
    assert text.replace("\n", "").startswith(content.replace("\n", ""))
    assert len(text) - len(content) <= (8 if stop or reply.endswith(BROKEN) else 1)


@pytest.mark.parametrize("stop", [None, ["s n"]])
def test_offsets_are_places_in_the_text(live: Live, scripted: Scripted, stop: Any) -> None:
    """BOS has no text, and the bytes of a character begin where it begins."""
    scripted_live, _ = scripted("é the class name 😀😀 of")
    body: dict[str, Any] = {"prompt": [tiny.BOS, 266, 267], "logprobs": 1, "max_tokens": 40}
    whole = scripted_live.post("/v1/completions", **body, stop=stop).json()["choices"][0]
    check_offsets(whole["text"], whole["logprobs"], "é the clas" if stop else None)
    raw = scripted_live.post("/v1/completions", **body, stop=stop, stream=True).text
    events = [json.loads(line[6:]) for line in raw.splitlines() if line.startswith("data: {")]
    parts = [choice["logprobs"] for event in events for choice in event["choices"]]
    for name in ("text_offset", "tokens"):
        streamed = [x for part in parts if part for x in part[name]]
        assert streamed == whole["logprobs"][name]
    echoed = live.post("/v1/completions", **body | {"max_tokens": 3}, echo=True).json()
    choice = echoed["choices"][0]
    assert choice["logprobs"]["text_offset"][:2] == [0, 0]
    check_offsets(choice["text"], choice["logprobs"])


def check_offsets(text: str, logprobs: dict[str, Any], end: str | None = None) -> None:
    assert end is None or text == end
    offsets = logprobs["text_offset"]
    assert offsets == sorted(offsets)
    for token, begin in zip(logprobs["tokens"], offsets, strict=True):
        if "\ufffd" not in token + text[begin:] and not token.startswith("<"):
            visible = token if end is None else token[: len(text) - begin]
            assert text[begin : begin + len(visible)] == visible
        elif "\ufffd" in token:
            assert not text[begin].isascii() or token.startswith(text[begin])
        else:
            assert begin in (0, len(text)) or "\ufffd" in text[begin:]


def test_the_round_trip_of_the_documentation(
    scripted: Scripted, capsys: pytest.CaptureFixture[str]
) -> None:
    """The block is run as it stands, but for the address. What it sends is what the template needs."""
    page = (Path(__file__).parents[2] / "docs/serving.md").read_text(encoding="utf-8")
    section = page.partition("### Tool calls: a round trip")[2]
    code = section.partition("```python\n")[2].partition("```")[0]
    call = QWEN.thought("of") + QWEN.call("weather", {"city": "Oslo"})
    live, engine = scripted(call + "<|im_end|>", "The class, with the name.<|im_end|>")
    address = "http://localhost:8000"
    assert address in code
    names: dict[str, Any] = {}
    exec(code.replace(address, str(live.client.base_url).rstrip("/")), names)
    names["client"].close()
    assert capsys.readouterr().out == "The class, with the name.\n"
    first, second = (QWEN.tokenizer.decode(request.prompt_ids) for request in engine.asked)
    result = json.dumps({"city": "Oslo", "sky": "rain", "degrees": 8})
    assert result in second
    assert result not in first


@pytest.mark.parametrize("max_tokens", [100, 24])
def test_a_call_that_cannot_be_read_is_the_content(
    scripted: Scripted, max_tokens: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The reply was empty, without a word in it or in the log, and its history was refused."""
    live, _ = scripted(BROKEN + "<|im_end|>")
    with client_of(live) as client, caplog.at_level(logging.INFO, "jaxspec.serving"):
        whole, streamed = both(client, tools=TOOLS, max_tokens=max_tokens)
        assert whole["finish_reason"] == ("stop" if max_tokens == 100 else "length")
        assert whole["message"]["tool_calls"] is None
        assert whole["message"]["content"].startswith('{"name": "weather", "arguments": {"city": "')
        (call,) = streamed["calls"]  # what the stream had told before the call broke
        history = [USER, {"role": "assistant", "content": streamed["content"]}]
        id, name, arguments = call
        function = {"name": name, "arguments": arguments}
        history[1]["tool_calls"] = [{"id": id, "type": "function", "function": function}]
        for more in ([USER], [{"role": "tool", "tool_call_id": id, "content": "no"}, USER]):
            client.chat.completions.create(
                model="scripted", messages=[*history, *more], tools=TOOLS, max_tokens=4
            )
        answer = client.responses.create(
            model="scripted", input="a", tools=[{**TOOLS[0]["function"], "type": "function"}]
        )
    assert [item.type for item in answer.output] == ["message"]
    if max_tokens == 100:
        assert answer.output_text == whole["message"]["content"]
    lines = [record.__dict__.get("fields", {}) for record in caplog.records]
    assert {line["broken_calls"] for line in lines} == {1}
    assert 'jaxspec:tool_calls_total{model_name="scripted",outcome="broken"} 5' in (
        live.client.get("/metrics").text
    )


def test_a_reply_that_the_limit_cuts_anywhere_may_be_sent_back(scripted: Scripted) -> None:
    """A stream has told half a call by then. Clients keep it with its content, or alone."""
    reply = QWEN.thought("of") + "the " + QWEN.call("weather", {"city": "Oslo", "days": [1]})
    live, _ = scripted(reply + "<|im_end|>")
    tools = [{**TOOLS[0]["function"], "type": "function"}]
    with client_of(live) as client:
        for limit in range(10, len(QWEN.tokenizer.encode(reply)), 3):
            whole, streamed = both(client, tools=TOOLS, max_tokens=limit)
            assert whole["message"]["content"] == streamed["content"]
            calls = [
                {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
                for id, name, arguments in streamed["calls"]
            ]
            told: dict[str, Any] = {"role": "assistant", "tool_calls": calls or None}
            for content in (streamed["content"], None):
                messages = [USER, told | {"content": content}, USER]
                again = live.post("/v1/chat/completions", messages=messages, tools=TOOLS)
                assert again.status_code == 200, (limit, again.text)
            options: dict[str, Any] = dict(tools=tools, max_output_tokens=limit, input=[USER])
            lines = live.post("/v1/responses", **options, stream=True).text.splitlines()
            events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
            items = [e["item"] for e in events if e["type"] == "response.output_item.done"]
            options["input"] = [USER, *items, USER]
            again = live.post("/v1/responses", **options)
            assert again.status_code == 200, (limit, again.text)
