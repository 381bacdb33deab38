"""Grammars over HTTP: every name that the protocol and other servers have for them."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import pytest

from jaxspec.serving.errors import ApiError
from jaxspec.serving.protocol import CompletionRequest
from tests.serving.conftest import Live

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 22]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
DIGITS = "[0-9]{3}"


def named(schema: Any) -> dict[str, Any]:
    form = {"name": "x", "strict": True, "schema": schema}
    return {"type": "json_schema", "json_schema": form}


FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"response_format": named({"enum": [123]})}, r"\s*123"),
    ({"regex": DIGITS}, DIGITS),
    ({"guided_regex": DIGITS}, DIGITS),
    ({"structured_outputs": {"regex": DIGITS}}, DIGITS),
    ({"lark": 'start: "yes" | "no"'}, "yes|no"),
    ({"guided_grammar": 'start: "yes" | "no"'}, "yes|no"),
    ({"structured_outputs": {"grammar": 'start: "yes" | "no"'}}, "yes|no"),
    ({"guided_choice": ["yé", 'n"o']}, 'yé|n"o'),
    ({"structured_outputs": {"choice": ["yes", "no"], "json": None}}, "yes|no"),
    ({"guided_json": json.dumps({"const": "x"})}, '"x"'),
    ({"structured_outputs": {"json": {"const": "x"}}}, '"x"'),
    ({"response_format": {"type": "text"}, "max_tokens": 3}, "(?s).*"),
]


@pytest.mark.parametrize(("field", "wanted"), FIELDS, ids=lambda x: str(x)[:40])
def test_a_reply_is_what_was_asked_for(live: Live, field: dict[str, Any], wanted: str) -> None:
    body = {"prompt": "ab", "max_tokens": 40, "temperature": 1, "seed": 3, "n": 2, **field}
    reply = live.post("/v1/completions", **body).json()
    for choice in reply["choices"]:
        assert re.fullmatch(wanted, choice["text"].strip(" \n\t")), choice
        if "max_tokens" not in field:
            assert choice["finish_reason"] == "stop"


def test_json_in_a_chat_streamed_and_not(live: Live) -> None:
    messages = [{"role": "user", "content": "a"}]
    body = dict(messages=messages, response_format=named(SCHEMA), max_tokens=100, temperature=0.7)
    whole = live.post("/v1/chat/completions", **body, seed=1).json()["choices"][0]
    if whole["finish_reason"] == "stop":
        made = json.loads(whole["message"]["content"])
        assert made["a"] in (1, 22)
        assert isinstance(made["b"], bool)
    stream = live.post("/v1/chat/completions", **body, seed=1, stream=True).text
    chunks = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks)
    assert text == whole["message"]["content"]


def test_the_responses_protocol(live: Live) -> None:
    form = {"type": "json_schema", "name": "x", "schema": {"enum": [7, 8]}}
    reply = live.post("/v1/responses", input="a", text={"format": form}, seed=2).json()
    (item,) = reply["output"]
    assert json.loads(item["content"][0]["text"]) in (7, 8)
    assert reply["text"] == {"format": form}
    wrong = live.post("/v1/responses", input="a", text={"format": {"type": "xml"}})
    assert wrong.status_code == 400
    assert wrong.json()["error"]["param"] == "text.format"


@pytest.mark.parametrize(
    ("wrong", "param", "message"),
    [
        ({"regex": "(["}, "regex", "unclosed"),
        ({"guided_json": {"type": "text"}}, "guided_json", "Invalid type"),
        (
            {"response_format": named({"type": "array", "uniqueItems": True})},
            "response_format",
            "uniqueItems",
        ),
        ({"structured_outputs": {"lark": "start: nothing"}}, "structured_outputs.lark", "unknown"),
        ({"regex": "a", "logit_bias": {"0": 1}, "guided_json": {}}, "guided_json", "give one"),
    ],
)
def test_a_grammar_that_cannot_be_used_is_refused(
    live: Live, wrong: dict[str, Any], param: str, message: str
) -> None:
    reply = live.post("/v1/completions", prompt="a", **wrong)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["param"] == param
    assert message in error["message"]
    assert error["message"].startswith((param, "regex and"))


def test_tools_and_a_format_exclude_each_other(live: Live) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    body = dict(messages=[{"role": "user", "content": "a"}], tools=[tool])
    reply = live.post("/v1/chat/completions", **body, response_format={"type": "json_object"})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "response_format"


def test_a_server_without_grammars_says_why(live: Live) -> None:
    bare = dataclasses.replace(live.serving_model, grammars=None, no_grammars="none here")
    with pytest.raises(ApiError, match="regex: none here"):
        bare.parse_completion(CompletionRequest(prompt="a", regex="a"))
