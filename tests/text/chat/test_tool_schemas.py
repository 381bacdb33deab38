"""Calls that a grammar allows have arguments of the tool's schema, in both notations."""

from __future__ import annotations

import functools
import json
import random
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llguidance")

from jaxspec.options import FieldError
from jaxspec.text.chat import choose, message_of, parser_for, rules
from jaxspec.text.chat.gemma_calls import gemma_calls
from jaxspec.text.grammars import Grammar, GrammarTokens
from jaxspec.text.grammars.json_regex import regex_of
from tests.text.chat.models import GEMMA, QWEN, Family
from tests.text.chat.test_rules import fits, thought, tokens
from tests.text.grammars.test_grammars import schema

jsonschema = pytest.importorskip("jsonschema")
FAMILIES = pytest.mark.parametrize("family", [GEMMA, QWEN], ids=lambda f: f.format.name)


@functools.cache
def known_tokens(name: str) -> GrammarTokens:
    return tokens(GEMMA if name == GEMMA.format.name else QWEN)


def tool(parameters: Any, *, name: str = "f", strict: bool = True) -> dict[str, Any]:
    function = {"name": name, "parameters": parameters, "strict": strict}
    return {"type": "function", "function": function}


def grammar_of(family: Family, tools: Sequence[Any], **options: Any) -> Grammar:
    found = rules.calls(family.tokenizer, (), choose(tools).tools, **options)
    assert found is not None
    kind, source, frame = found
    strict = any(t["function"].get("strict") for t in tools)
    return known_tokens(family.format.name).compile(kind, source, frame=frame, lenient=not strict)


def closing(family: Family) -> frozenset[int]:
    """Tokens that end something. A walk that likes them comes to an end."""
    markers = [m for role, m in family.format.markers.items() if role != "think"]
    texts = ['"', "}", "]", '"}', "}}", "\n", *markers]
    return frozenset(i for t in texts for i in family.encode(t)[:1])


def walk(family: Family, grammar: Grammar, rng: random.Random) -> list[int] | None:
    """Return a random reply, without its stop id; None: it did not end."""
    matcher, said, likes = grammar.matcher(), [], closing(family)
    for _ in range(200):
        bits = np.unpackbits(matcher.mask()[0].view(np.uint8), bitorder="little")
        may = np.flatnonzero(bits).tolist()
        if any(i in matcher.tokens.stop_ids for i in may):
            return said
        ends = [i for i in may if i in likes]
        said.append(rng.choice(ends if ends and rng.random() < 0.75 else may))
        matcher.commit(said[-1:])
    return None


def arguments(family: Family, ids: Sequence[int]) -> Any:
    parser = parser_for(family.tokenizer)
    (call,) = message_of(parser.push(ids) + parser.finish("stop"))["tool_calls"]
    assert call["function"]["name"] == "f"
    return json.loads(call["function"]["arguments"])


def parameters(rng: random.Random) -> dict[str, Any]:
    """Return a random schema of arguments."""
    names = rng.sample(["city", "Days", "unit", "ключ", "x y"], rng.randrange(1, 4))
    properties = {name: schema(rng, 1) for name in names}
    if rng.random() < 0.3:
        properties[names[0]] = {"$ref": "#/$defs/node"}
    node = {
        "type": "object",
        "properties": {"v": {"type": "boolean"}, "n": {"$ref": "#/$defs/node"}},
    }
    return {
        "type": "object",
        "properties": properties,
        "required": [name for name in names if rng.random() < 0.6],
        "$defs": {"node": {**node, "required": ["v"], "additionalProperties": False}},
        **rng.choice([{}, {"additionalProperties": False}]),
    }


@FAMILIES
def test_arguments_of_random_calls_fit_random_schemas(family: Family) -> None:
    rng, ended, refused = random.Random(1), 0, []
    for _ in range(40):
        asked = parameters(rng)
        try:
            grammar = grammar_of(family, [tool(asked)], one=True)
        except FieldError as error:
            refused.append(str(error))
            continue
        said = walk(family, grammar, rng)
        if said is not None:
            jsonschema.validate(arguments(family, said), asked)
            ended += 1
    assert ended > 20
    assert all('q"' in why for why in refused), refused


def gemma_call(inside: str) -> str:
    return f"<|tool_call>call:f{{{inside}}}<tool_call|>"


QUOTED = '<|"|>'
CASES: list[tuple[Any, list[str], list[str]]] = [
    ({}, ["", f"a:{QUOTED}x{QUOTED},b:[1,{{c:null}}]"], ["a"]),
    (None, ["", "a:1"], [":1"]),
    ({"type": "object", "properties": {}}, [""], ["a:1"]),
    (
        {
            "properties": {"b": {"type": "integer", "minimum": 3}, "A": {"enum": ["x", 2]}},
            "required": ["b"],
        },
        ["b:3", f"A:{QUOTED}x{QUOTED},b:10", "A:2,b:4"],
        ["", "b:2", "b:3,A:2", "A:3,b:3", f"b:{QUOTED}3{QUOTED}", "b:3,c:1", "A:2"],
    ),
    (
        {
            "properties": {
                "a": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2}
            }
        },
        ["", "a:[true]", "a:[true,false]"],
        ["a:[]", "a:[true,true,true]", "a:[1]", "a:true"],
    ),
    (
        {
            "properties": {
                "a": {"prefixItems": [{"type": "null"}, {"type": "boolean"}], "items": False}
            }
        },
        ["a:[]", "a:[null]", "a:[null,true]"],
        ["a:[true]", "a:[null,true,1]"],
    ),
    (
        {"properties": {"a": {"type": "string", "pattern": "b/c", "maxLength": 5}}},
        [f"a:{QUOTED}ab/cd{QUOTED}"],
        [f"a:{QUOTED}bc{QUOTED}", f"a:{QUOTED}aab/cd{QUOTED}"],
    ),
    (
        {"additionalProperties": {"type": "boolean"}},
        ["", "x:true", "x:true,y:false"],
        ["x:1", "x:true,"],
    ),
    (
        {"properties": {"a": {"anyOf": [{"type": "null"}, {"const": {"z": [1], "k": ""}}]}}},
        ["a:null", f"a:{{k:{QUOTED}{QUOTED},z:[1]}}"],
        ["a:{}", f"a:{{z:[1],k:{QUOTED}{QUOTED}}}"],
    ),
]


@pytest.mark.parametrize(("asked", "right", "wrong"), CASES)
def test_what_gemma_may_write(asked: Any, right: list[str], wrong: list[str]) -> None:
    """Keys are sorted, as its template writes them."""
    grammar = grammar_of(GEMMA, [tool(asked)], one=True)
    for inside in right:
        assert fits(GEMMA, grammar, gemma_call(inside)), inside
        if isinstance(asked, dict):
            made = arguments(GEMMA, GEMMA.encode(gemma_call(inside)))
            jsonschema.validate(made, {"type": "object", **asked})
    for inside in wrong:
        assert not fits(GEMMA, grammar, gemma_call(inside)), inside


ODD: list[tuple[Any, str]] = [
    ({"properties": {"a": {"type": "array", "uniqueItems": True}}}, "uniqueItems"),
    ({"properties": {'q"': {}}}, "bare key"),
    ({"properties": {"a": {"pattern": "(?=x)"}}}, "pattern"),
    ({"properties": {"a": {"$ref": "https://example.org/x"}}}, "ref"),
    ({"properties": {"a": {"type": "text"}}}, "none of JSON"),
    ({"properties": {"a": {}}, "not": {}}, "not"),
    ({"properties": {"a": {}}, "propertyNames": {"maxLength": 9}}, "propertyNames"),
    # Expressions of ECMAScript that Rust cannot read, or reads otherwise.
    ({"properties": {"a": {"pattern": "^[^[]*$"}}}, "pattern"),
    ({"properties": {"a": {"pattern": r"^[\w-\.]+@x$"}}}, "pattern"),
    ({"properties": {"a": {"pattern": "^{x}$"}}}, "pattern"),
    ({"properties": {"a": {"const": "\b"}}}, "control characters"),
    # No schemas at all.
    ({"properties": {"a": {"type": {}}}}, "none of JSON"),
    ({"properties": {"a": {"$ref": []}}}, "expected text"),
    ({"properties": {"a": {"prefixItems": {"b": 1}}}}, "expected a list"),
    ({"properties": {"a": {}}, "required": [1]}, "expected a list of names"),
    ({"properties": {"a": {"minimum": "0"}}}, "expected a number"),
    ({"properties": {"a": {"maxLength": True}}}, "expected a whole number"),
]


@pytest.mark.parametrize(("asked", "say"), ODD)
def test_what_cannot_be_followed_is_refused_of_strict_tools_only(asked: Any, say: str) -> None:
    with pytest.raises(FieldError, match=f"tools has f, which is strict.*{say}"):
        grammar_of(GEMMA, [tool(asked)])
    lenient = grammar_of(GEMMA, [tool(asked, strict=False)])
    name = next(iter(asked["properties"]))
    inside = f"{name}:[1,1]" if name == "a" and "pattern" not in str(asked) else ""
    assert fits(GEMMA, lenient, gemma_call(inside))


def test_no_schema_is_too_odd_to_be_refused() -> None:
    """Whatever a client sends, it gets a reason and no exception of another kind."""
    rng, refused = random.Random(0), 0
    words = ["object", "array", "string", "integer", "#", "#/$defs/a", "[A-z]+", "("]
    keys = ["type", "properties", "required", "additionalProperties", "items", "prefixItems"]
    keys += ["minItems", "maxLength", "pattern", "minimum", "$ref", "enum", "const", "anyOf"]

    def value(depth: int) -> Any:
        kind = rng.randrange(6 if depth < 4 else 3)
        if kind < 3:
            return rng.choice([words, [None, True, -1, 3], [10**30, 1e400, 10**400]][kind])
        if kind == 3:
            return [value(depth + 1) for _ in range(rng.randrange(3))]
        names = ["a", "b"] if kind == 4 else rng.sample(keys, 3)
        return {name: value(depth + 1) for name in names}

    for _ in range(4000):
        asked = {name: value(0) for name in rng.sample(keys, 3)}
        gemma_calls([{"name": "f", "parameters": asked}], "<[1]>", "<[2]>", "<[3]>")
        try:
            regex_of(asked)
        except FieldError:
            refused += 1
    assert refused > 1000


def test_a_pattern_takes_no_time_to_refuse() -> None:
    """Looking for the end of each bracket took the square of their number, and no other thread ran."""
    begin = time.monotonic()
    with pytest.raises(FieldError, match="pattern"):
        grammar_of(GEMMA, [tool({"properties": {"a": {"pattern": "[" * 20_000}}})])
    assert time.monotonic() - begin < 1


@FAMILIES
def test_a_pattern_that_cannot_be_followed_refuses_no_call(family: Family) -> None:
    """Unless the tool is strict. Other patterns are followed, and properties may be called `pattern`."""
    ahead, plain = {"pattern": "^(?=.*x).*$"}, {"pattern": "^y$"}
    asked = {"properties": {"a": ahead, "b": plain, "pattern": {"type": "boolean"}}}
    with pytest.raises(FieldError):
        grammar_of(family, [tool(asked)])
    grammar = grammar_of(family, [tool(asked, strict=False)], one=True)
    assert fits(family, grammar, family.call("f", {"a": "z", "b": "y", "pattern": True}))
    assert not fits(family, grammar, family.call("f", {"a": "z", "b": "z"}))
    assert not fits(family, grammar, family.call("f", {"pattern": 1}))


def test_references_of_properties_that_are_called_like_keywords() -> None:
    """The call of Qwen3 is a part of a schema, and references move with it."""
    some = {"$ref": "#/$defs/some"}
    asked = {"properties": {"const": some, "enum": some}, "$defs": {"some": {"type": "boolean"}}}
    grammar = grammar_of(QWEN, [tool(asked)], one=True)
    assert fits(QWEN, grammar, QWEN.call("f", {"const": True, "enum": False}))
    assert not fits(QWEN, grammar, QWEN.call("f", {"const": 1, "enum": False}))


@FAMILIES
def test_calls_that_are_no_duty_fit_their_schema_too(family: Family) -> None:
    """The reply may be text, or text and calls."""
    asked = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    grammar = grammar_of(family, [tool(asked)], required=False)
    good, bad = family.call("f", {"n": 2}), family.call("f", {"n": 3})
    for reply in ("", "no { call", good, "so: " + good, thought(family, "hm") + "so" + good):
        assert fits(family, grammar, reply), reply
    for reply in (bad, "so: " + bad, thought(family, "hm") + bad, good[:-1], "so: " + good[:-5]):
        assert not fits(family, grammar, reply), reply
