"""Masks of a grammar allow exactly what can become a valid document, at every drafted position."""

from __future__ import annotations

import functools
import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxspec.options import FieldError
from jaxspec.tokenizer import Tokenizer

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

from jaxspec.text.chat import ToolCallArguments, parser_for  # noqa: E402
from jaxspec.text.grammars import Grammar, GrammarTokens, Matcher, masks  # noqa: E402
from jaxspec.text.grammars.json_regex import regex_of  # noqa: E402
from jaxspec.text.grammars.schemas import FORMATS  # noqa: E402
from tests.text.chat.models import GEMMA, QWEN, Family, corpus  # noqa: E402

BUNDLED = Path(__file__).parents[3] / "jaxspec/bundled/target"
STOPS = (1, 0)


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer.load(BUNDLED)


@functools.cache
def tokens() -> GrammarTokens:
    """The bundled pair's, with ten logits more than it has tokens: their number is no multiple of 32."""
    return GrammarTokens(tokenizer(), tokenizer().backend.get_vocab_size() + 10, STOPS)


@functools.cache
def closing() -> frozenset[int]:
    """Tokens that end something. A walk that likes them comes to an end."""
    texts = ['"', "}", "]", '"}', '"]', "}}", "]}", ",", '",']
    return frozenset(i for t in texts for i in tokenizer().encode_rendered(t)[:1])


def allowed(mask: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def encode(text: str) -> list[int]:
    return list(tokenizer().encode_rendered(text))


def schema(rng: random.Random, depth: int = 2) -> Any:
    """Return a random schema. What it allows is bounded, so that walks end."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern"]
    kinds += ["object", "object", "array", "anyOf"] if depth else []
    inner = functools.partial(schema, rng, depth - 1)
    match rng.choice(kinds):
        case "string":
            return {
                "type": "string",
                "minLength": rng.randrange(3),
                "maxLength": 3 + rng.randrange(4),
            }
        case "integer":
            low = rng.randrange(-50, 50)
            return {"type": "integer", "minimum": low, "maximum": low + rng.randrange(100)}
        case "enum":
            return {
                "enum": rng.sample(["a", 'say "x"', "{", "é 😀", 1, 2.5, None, True, "ab\n"], 3)
            }
        case "const":
            return {"const": rng.choice(["fixed", 7, [1, "x"], {"k": None}])}
        case "pattern":
            return {
                "type": "string",
                "pattern": rng.choice(["^[a-z]{1,4}$", "^[0-9]+-[0-9]{2}$", "^(x|yz)*$"]),
            }
        case "object":
            names = rng.sample(["a", "b", "name", "ключ", 'q"', "x y"], rng.randrange(4))
            required = [n for n in names if rng.random() < 0.6]
            properties = {n: inner() for n in names}
            return {
                "type": "object",
                "properties": properties,
                "required": required,
                "additionalProperties": False,
            }
        case "array":
            low = rng.randrange(3)
            return {
                "type": "array",
                "items": inner(),
                "minItems": low,
                "maxItems": low + rng.randrange(3),
            }
        case "anyOf":
            return {"anyOf": [inner(), inner()]}
        case kind:
            return {"type": kind}


def walk(matcher: Matcher, rng: random.Random) -> list[int]:
    """Go through masks at random, from the first token to a stop id."""
    ids: list[int] = []
    while True:
        choices = allowed(matcher.mask()[0])
        assert choices, "a mask that allows nothing"
        stops = [i for i in choices if i in STOPS]
        ends = [i for i in choices if i in closing()]
        others = [i for i in choices if i not in STOPS]
        if stops and (not others or rng.random() < 0.5 or len(ids) > 60):
            matcher.commit(stops[:1])
            assert matcher.is_done
            return ids
        token = rng.choice(ends if ends and (rng.random() < 0.5 or len(ids) > 60) else others)
        ids.append(token)
        matcher.commit([token])
        assert len(ids) < 500


def test_any_walk_through_the_masks_is_a_valid_document() -> None:
    for seed in range(1000):
        rng = random.Random(seed)
        wanted = schema(rng)
        ids = walk(tokens().compile("json_schema", wanted).matcher(), rng)
        jsonschema.validate(json.loads(tokenizer().decode(ids)), wanted)


def one_by_one(grammar: Grammar, drafts: list[int]) -> list[np.ndarray]:
    """Return the masks that plain decoding would see, up to the first draft that is not allowed."""
    rows = []
    for n in range(len(drafts) + 1):
        matcher = grammar.matcher()
        try:
            matcher.commit(drafts[:n])
        except ValueError:
            break
        if drafts[:n] and drafts[n - 1] in STOPS:
            break
        rows.append(matcher.mask()[0])
    return rows


def test_masks_of_all_drafts_are_those_of_plain_decoding() -> None:
    """In one call, with drafts that break the grammar at a random place, and nothing is committed."""
    rng = random.Random(0)
    for _ in range(20):
        grammar = tokens().compile("json_schema", schema(rng))
        drafts = walk(grammar.matcher(), rng)[:12]
        if drafts and rng.random() < 0.5:
            drafts[rng.randrange(len(drafts))] = rng.randrange(tokens().vocab_size)
        if rng.random() < 0.3:
            drafts.append(STOPS[0])
        matcher = grammar.matcher()
        whole = matcher.mask(drafts)
        wanted = one_by_one(grammar, drafts)
        assert whole.shape == (len(drafts) + 1, tokens().words)
        np.testing.assert_array_equal(whole[: len(wanted)], wanted)
        assert (whole[len(wanted) :] == 0xFFFFFFFF).all()
        # A row is left by a draft that its mask allows, and by no other.
        bits = [d in allowed(row) for d, row in zip(drafts, wanted, strict=False)]
        assert matcher.num_allowed(drafts) == (bits.index(False) if False in bits else len(bits))
        np.testing.assert_array_equal(matcher.mask(), whole[:1])


def test_one_call_serves_rows_with_a_grammar_and_without() -> None:
    object_, digits = tokens().compile("json_object"), tokens().compile("regex", "[0-9]{2}")
    rows = [object_.matcher(), None, digits.matcher(), object_.matcher()]
    drafts = [encode('{"a'), [5], encode("12"), []]
    out = masks(rows, drafts)
    assert out.shape == (4, 4, tokens().words)
    for row, ids, got in zip(rows, drafts, out, strict=True):
        wanted = row.mask(ids) if row else np.full_like(got, 0xFFFFFFFF)
        np.testing.assert_array_equal(got[: len(wanted)], wanted)
        assert (got[len(wanted) :] == 0xFFFFFFFF).all()


def test_a_reply_ends_where_its_grammar_may() -> None:
    matcher = tokens().compile("regex", "ab?").matcher()
    assert not matcher.may_end
    matcher.commit(encode("a"))
    assert matcher.may_end
    assert not matcher.is_done
    assert set(allowed(matcher.mask()[0])) == {*STOPS, *encode("b")}
    matcher.commit(encode("b"))
    assert matcher.is_done
    assert set(allowed(matcher.mask()[0])) == set(STOPS)
    matcher.commit([STOPS[1]])
    assert set(allowed(matcher.mask()[0])) == set(STOPS)
    early = tokens().compile("regex", "ab?").matcher()
    early.commit([*encode("a"), STOPS[0]])
    assert early.is_done
    assert set(allowed(early.mask()[0])) == set(STOPS)
    with pytest.raises(ValueError, match="follows the end"):
        matcher.commit(encode("a"))


def test_ids_outside_the_tokenizer_are_never_allowed() -> None:
    """The model has more logits than its tokenizer has tokens. The last word's spare bits are off too."""
    matcher = tokens().compile("regex", "(.|\n)*").matcher()
    assert max(allowed(matcher.mask()[0])) < tokenizer().backend.get_vocab_size()


def test_a_token_against_the_grammar_is_refused() -> None:
    matcher = tokens().compile("json_object").matcher()
    with pytest.raises(ValueError, match="does not go on"):
        matcher.commit(encode("no"))


def test_whitespace_is_bounded() -> None:
    """A model that likes spaces would otherwise write them until its limit."""
    matcher = tokens().compile("json_object").matcher()
    pretty = encode('{\n    "a": [\n        1\n    ]\n}')
    assert matcher.num_allowed(pretty) == len(pretty)
    spaces = encode("{")
    while len(spaces) < 200 and matcher.num_allowed(spaces) == len(spaces):
        spaces += encode(" ")
    assert 10 < len(spaces) < 50


@pytest.mark.parametrize("family", [GEMMA, QWEN], ids=lambda f: f.format.name)
def test_streamed_arguments_are_always_the_beginning_of_json(family: Family) -> None:
    """What a parser of tool calls has given so far, also of calls that break: a grammar of JSON goes on."""
    grammar = tokens().compile("json_object")
    for text in corpus(family).values():
        given: dict[int, str] = {}
        parser = parser_for(family.tokenizer)
        for token in family.encode(text):
            for event in parser.push([token]):
                if isinstance(event, ToolCallArguments):
                    given[event.index] = given.get(event.index, "") + event.json_delta
                    ids = encode(given[event.index])
                    assert grammar.matcher().state.validate_tokens(ids) == len(ids)


@pytest.mark.parametrize(
    ("kind", "source", "say"),
    [
        ("regex", "([ab", "unclosed character class"),
        ("regex", "", "not empty"),
        ("lark", "start: thing", "unknown name"),
        ("json_schema", "{", "no valid JSON"),
        ("json_schema", [1], "expected a JSON schema"),
        ("json_schema", {"type": "text"}, "Invalid type"),
        ("json_schema", '{"maximum": 1e400}', "too large for a number"),
        ("json_schema", {"type": "array", "uniqueItems": True}, "uniqueItems"),
        ("json_schema", {"enum": ["x" * 1_000_001]}, "at most"),
    ],
)
def test_a_grammar_that_cannot_be_used_is_refused(kind: Any, source: Any, say: str) -> None:
    with pytest.raises(FieldError, match=say) as caught:
        tokens().compile(kind, source)
    assert caught.value.field == kind
    assert len(str(caught.value)) < 400


def _accepts(source: Any, text: str) -> bool:
    matcher = tokens().compile("json_schema", source).matcher()
    try:
        matcher.commit(encode(text))
    except ValueError:
        return False
    return matcher.may_end


def test_a_format_is_followed_or_ignored() -> None:
    """JSON Schema lets readers ignore formats. Many schemas have some of their own."""
    for name in sorted(FORMATS - {"unknown"}):
        assert not _accepts({"type": "string", "format": name}, '"}"'), name
    for name in ("idn-email", "uri-reference", "int32", "password", "phone", "regex", ""):
        properties = {"format": {"type": "string", "format": name}}
        asked = {"type": "object", "properties": properties, "required": ["format"]}
        assert _accepts(asked, '{"format":"}"}'), name
        assert _accepts({"type": "integer", "format": name}, "12"), name
        assert not _accepts({"const": {"format": name}}, "{}"), name
        regex_of(asked)


TRUE_OF_NAMES = [True, {}, {"type": "string"}, {"pattern": ".*"}, {"minLength": 0, "title": "a"}]


@pytest.mark.parametrize("names", TRUE_OF_NAMES)
def test_property_names_that_may_be_any_are_no_restriction(names: Any) -> None:
    values = {"type": "object", "additionalProperties": {"type": "integer"}, "propertyNames": names}
    assert _accepts(values, '{"a":1}')
    assert not _accepts(values, '{"a":"b"}')
    assert _accepts({"type": "array", "items": values}, '[{"a":1}]')
    assert re.fullmatch(regex_of(values), '{"a": 1}')
    for other in ({"pattern": "^a"}, {"maxLength": 3}, {"enum": ["a"]}, {"type": "integer"}, False):
        for read in (lambda x: tokens().compile("json_schema", x), regex_of):
            with pytest.raises(FieldError, match="propertyNames"):
                read({**values, "propertyNames": other})


def test_a_lark_grammar() -> None:
    grammar = tokens().compile("lark", 'start: "yes" | "no" " " /[0-9]+/')
    rng = random.Random(3)
    assert {tokenizer().decode(walk(grammar.matcher(), rng))[:2] for _ in range(12)} == {"ye", "no"}


def test_without_llguidance_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from jaxspec.text.grammars import matcher

    matcher._llguidance.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(FieldError, match=r"jaxspec-decoding\[grammar\]"):
        GrammarTokens(tokenizer(), 3082, STOPS)
    matcher._llguidance.cache_clear()
