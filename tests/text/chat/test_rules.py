"""Grammars of replies: what they allow is what parsers read back."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("llguidance")

from jaxspec.text.chat import choose, message_of, parser_for, rules
from jaxspec.text.grammars import Grammar, GrammarTokens
from tests.text.chat.models import GEMMA, QWEN, Family

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    }
    for name in ("weather", "time")
]


def tokens(family: Family) -> GrammarTokens:
    backend = family.tokenizer.backend
    ends = [backend.get_vocab_size() - 1]
    return GrammarTokens(family.tokenizer, backend.get_vocab_size(), ends)


def fits(family: Family, grammar: Grammar, text: str) -> bool:
    """Tell whether a text is a whole reply."""
    ids, matcher = family.encode(text), grammar.matcher()
    return matcher.state.validate_tokens(list(ids)) == len(ids) and (
        matcher.commit(ids) or matcher.may_end
    )


def calls(family: Family, prompt: str = "", *, names: Any = None) -> Grammar:
    choice = "required" if names is None else {"type": "function", "function": {"name": names}}
    tools = choose(TOOLS, choice, grammars=True)
    ids = family.encode(prompt)
    found = rules.calls(family.tokenizer, ids, tools.callable, one=names is not None)
    assert found is not None
    kind, source, frame = found
    return tokens(family).compile(kind, source, frame=frame, lenient=True)


def call(family: Family, name: str, city: str) -> str:
    if family is GEMMA:
        return f'<|tool_call>call:{name}{{city:<|"|>{city}<|"|>,days:3}}<tool_call|>'
    arguments = {"city": city, "days": 3}
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"


def thought(family: Family, text: str) -> str:
    if family is GEMMA:
        return f"<|channel>thought\n{text}<channel|>"
    return f"<think>\n{text}\n</think>\n\n"


@pytest.mark.parametrize("family", [GEMMA, QWEN], ids=lambda f: f.format.name)
def test_a_reply_that_has_to_call_calls(family: Family) -> None:
    grammar = calls(family)
    one = call(family, "weather", "Oslo {é")
    assert fits(family, grammar, one)
    assert fits(family, grammar, thought(family, "which { city") + one)
    assert fits(family, grammar, one + ("\n" if family is QWEN else "") + call(family, "time", ""))
    for wrong in ("", "Oslo", call(family, "wether", "Oslo"), one[:-5], thought(family, "no")):
        assert not fits(family, grammar, wrong), wrong
    named = calls(family, names="time")
    assert fits(family, named, call(family, "time", "Oslo"))
    assert not fits(family, named, one)
    assert not fits(family, named, call(family, "time", "a") + call(family, "time", "a"))


@pytest.mark.parametrize("family", [GEMMA, QWEN], ids=lambda f: f.format.name)
def test_what_is_read_back_is_a_call(family: Family) -> None:
    ids = family.encode(
        thought(family, "hm") + call(family, "weather", 'a "b" \\ {'.replace("\\", "/"))
    )
    calls(family).matcher().commit(ids)
    parser = parser_for(family.tokenizer)
    events = parser.push(ids) + parser.finish("stop")
    (made,) = message_of(events)["tool_calls"]
    assert json.loads(made["function"]["arguments"]) == {"city": 'a "b" / {', "days": 3}
    assert parser.finish_reason == "tool_calls"


@pytest.mark.parametrize("family", [GEMMA, QWEN], ids=lambda f: f.format.name)
def test_an_answer_may_come_after_reasoning(family: Family) -> None:
    """A prompt may begin the reasoning, which then has to end first; or end it, as one with thinking turned off."""
    markers, turn = family.format.markers, family.format.turn
    open_ = family.encode(markers["think"])
    for kind, source, answer in (
        ("json_schema", {"type": "array"}, "[1, 2]"),
        ("regex", "[0-9]+", "12"),
        ("lark", 'start: "yes" | "no"', "no"),
    ):
        free = rules.frame(family.tokenizer, ())
        grammar = tokens(family).compile(kind, source, frame=free)
        assert fits(family, grammar, answer)
        assert fits(family, grammar, thought(family, "so: [") + answer)
        assert not fits(family, grammar, "so: " + answer)
        begun = rules.frame(family.tokenizer, open_)
        grammar = tokens(family).compile(kind, source, frame=begun)
        assert fits(family, grammar, "so" + markers["end think"] + answer)
        assert not fits(family, grammar, answer)
        over = family.encode(markers["think"] + "\n\n" + markers["end think"])
        for prompt, may_think in ((over, False), ([*over, *family.encode(turn)], True)):
            grammar = tokens(family).compile(
                kind, source, frame=rules.frame(family.tokenizer, prompt)
            )
            assert fits(family, grammar, answer)
            assert fits(family, grammar, thought(family, "so") + answer) == may_think


def test_schemas_of_tools_may_say_more_than_is_followed() -> None:
    odd = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": odd}}
    found = rules.calls(QWEN.tokenizer, (), [tool], one=True)
    assert found is not None
    kind, source, frame = found
    grammar = tokens(QWEN).compile(kind, source, frame=frame, lenient=True)
    body = '{"name": "f", "arguments": {"a": [1]}}'
    assert fits(QWEN, grammar, f"<tool_call>\n{body}\n</tool_call>")
