"""The tables on the device allow what llguidance allows on the host."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.options import FieldError

pytest.importorskip("llguidance")
pytest.importorskip("outlines_core")
from jaxspec.text.grammars import Matcher, tables
from jaxspec.text.grammars.automaton import (
    FREE,
    Automaton,
    advance,
    draft_states,
    masks_of,
    states_along,
)
from jaxspec.text.grammars.json_regex import regex_of
from jaxspec.text.grammars.masking import masked, unpacked
from jaxspec.text.grammars.tables import automaton
from tests.text.grammars.test_grammars import (
    STOPS,
    allowed,
    closing,
    encode,
    schema,
    tokenizer,
    tokens,
)
from tests.words import ascii_tokens

jsonschema = pytest.importorskip("jsonschema")

REPEATED: dict[str, Any] = {"$ref": "#/$defs/7", "$defs": {"0": {"type": "null"}}}
"""Definitions that have the one before ten times. One expression of them is 10^7 times as large as the first."""
for n in range(7):
    REPEATED["$defs"][str(n + 1)] = {"anyOf": [{"$ref": f"#/$defs/{n}"}] * 10}

REGEXES = [
    "yes|no|maybe so",
    "(a|bc)*d",
    r"[0-9]{1,3}(\.[0-9]{2})?",
    '\\{"a": (true|false), "b": "[a-z é😀]*"\\}',
    r"-?(0|[1-9]\d*)",
    "(.|\\n){0,3}",
    "(aé?)*|ab{2,5}c",
]


def choices(matcher: Matcher) -> set[int]:
    """Return every token after which the reply can still become a match.

    The masks of llguidance allow fewer where the grammar leaves no choice of the text: one way to write it.
    """
    one_each = range(tokens().vocab_size)
    return {i for i in one_each if matcher.state.validate_tokens([i])} | {
        i for i in STOPS if matcher.may_end
    }


@pytest.mark.parametrize("regex", REGEXES)
def test_masks_are_those_of_llguidance(regex: str) -> None:
    """At every step of random walks, up to the end."""
    table = automaton(tokens(), "regex", regex)
    grammar = tokens().compile("regex", regex)
    rng = random.Random(regex)
    for _ in range(4):
        matcher, state = grammar.matcher(), table.starts
        for _ in range(12):
            got = set(allowed(np.asarray(masks_of(table, state))[0]))
            assert got == choices(matcher)
            assert set(allowed(matcher.mask()[0])) <= got
            token = rng.choice(sorted(got))
            matcher.commit([token])
            state = advance(table, state, jnp.asarray([token]))
            if token in STOPS:
                assert set(allowed(np.asarray(masks_of(table, state))[0])) == set(STOPS)
                break


def test_drafts_and_rows_in_one_call() -> None:
    """Rows of two grammars, one without, and one whose second draft breaks its grammar."""
    table = automaton(tokens(), "regex", *REGEXES[:3])
    of = {r: tokens().compile("regex", r) for r in REGEXES}
    digits, words = of[REGEXES[2]], of[REGEXES[0]]
    rows = [
        (digits.matcher(), table.starts[2], encode("12.34")[:4]),
        (words.matcher(), table.starts[0], [*encode("no"), STOPS[0], STOPS[0], STOPS[0]][:4]),
        (None, jnp.int32(FREE), [5, 6, 7, 8]),
        (digits.matcher(), table.starts[2], [*encode("1")[:1], 5, 5, 5]),
    ]
    drafts = jnp.asarray([d for _, _, d in rows])
    states = jax.jit(lambda *a: states_along(*a))(table, jnp.stack([s for _, s, _ in rows]), drafts)
    got = np.asarray(masks_of(table, states))
    assert got.shape == (4, 5, tokens().words)
    for i, (matcher, _, ids) in enumerate(rows):
        for n, token in enumerate(ids):
            if matcher is None:
                assert (got[i, n] == 0xFFFFFFFF).all()
            elif matcher.is_done or matcher.state.is_error():
                continue
            else:
                assert set(allowed(got[i, n])) == choices(matcher)
                if token not in choices(matcher):
                    assert (states[i, n + 1 :] == FREE).all()
                    break
                matcher.commit([token])
    assert (states[2] == FREE).all()
    assert (states[3, 2:] == FREE).all()


def test_masked_logits() -> None:
    table = automaton(tokens(), "regex", "ab?")
    logits = jnp.zeros((1, tokens().vocab_size))
    out = masked(logits, masks_of(table, table.starts))
    assert set(np.flatnonzero(np.isfinite(out[0])).tolist()) == {*encode("a"), *encode("ab")}
    assert not jnp.isnan(jax.nn.softmax(out)).any()
    free = masks_of(table, jnp.asarray([FREE]))
    np.testing.assert_array_equal(masked(logits, free), logits)
    assert unpacked(free, 7).shape == (1, 7)


def test_tables_of_one_size_are_one_program() -> None:
    step = jax.jit(lambda *a: states_along(*a))
    for regex in ("a*", "yes|no"):
        table = automaton(tokens(), "regex", regex)
        step(table, table.starts, jnp.zeros((1, 3), jnp.int32))
    assert step._cache_size() == 1


def test_drafts_of_a_tree() -> None:
    """Each node is judged after its own parent, and nothing behind a wrong one counts."""
    table = automaton(tokens(), "regex", "[0-9][a-c]{2}")
    (one, two), (a, b) = encode("1")[:1] + encode("2")[:1], encode("a")[:1] + encode("b")[:1]
    drafts, parents = jnp.asarray([[one, two, a, b, a]]), jnp.asarray([[0, 0, 1, 2, 4]])
    got = states_along(table, table.starts, drafts, parents)[0]
    for path in ([], [one], [two], [one, a], [two, b], [two, b, a]):
        chain = states_along(table, table.starts, jnp.asarray([path], jnp.int32).reshape(1, -1))
        at = {0: 0, 1: 1 + (path[:1] == [two]), 2: 3 + (path[:1] == [two]), 3: 5}[len(path)]
        assert got[at] == chain[0, -1] >= 0
    wrong = states_along(table, table.starts, drafts.at[0, 0].set(a), parents)[0]
    assert wrong.tolist() == [got[0], FREE, got[2], FREE, got[4], got[5]]


def test_a_draft_that_breaks_the_grammar_is_replaced_where_the_text_is_forced() -> None:
    """By the longest token that it begins with; where there is a choice, nothing is."""
    table = automaton(tokens(), "regex", "[0-9]: the end")
    wrong = encode("x")[:1] * 6
    drafts, states = draft_states(table, table.starts, jnp.asarray([wrong]), replace=True)
    assert drafts[0].tolist() == wrong
    begun = jnp.asarray([[*encode("1")[:1], *wrong]])
    drafts, states = draft_states(table, table.starts, begun, replace=True)
    assert (states >= 0).all()
    text = tokenizer().decode(drafts[0, 1:].tolist())
    assert text.startswith(": the end"[: len(text)])
    assert len(text) > 3


@pytest.mark.parametrize(
    ("kind", "source", "say"),
    [
        ("regex", "[^\\s\\S]", "cannot be used"),
        ("regex", "([", "cannot be used"),
        ("regex", "", "not empty"),
        ("regex", "a" * 30_000, "at most.*Engine"),
        ("regex", "[a-z]{9000}", "states over bytes.*Engine"),
        ("lark", 'start: "a"', "need a stack.*Engine"),
        ("json_object", None, "nest without bound.*Engine"),
        ("json_schema", {}, "any value"),
        ("json_schema", {"$ref": "#"}, "contains itself"),
        ("json_schema", {"type": "array", "uniqueItems": True}, "uniqueItems"),
        ("json_schema", {"type": "integer", "multipleOf": 3}, "multipleOf"),
        ("json_schema", {"type": "string", "pattern": "(?=a)"}, "pattern"),
        ("json_schema", "{", "no valid JSON"),
        ("json_schema", REPEATED, "is too large"),
        ("json_schema", {"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, "range of 18446"),
        # It has a backslash, which JSON escapes.
        ("json_schema", {"type": "string", "pattern": "^[A-z]+$"}, "characters beside it"),
        ("json_schema", {"type": "string", "pattern": "(?:" * 40 + '"' + ")" * 40}, "beside it"),
    ],
)
def test_what_does_not_fit_is_refused(kind: Any, source: Any, say: str) -> None:
    with pytest.raises(FieldError, match=say):
        automaton(tokens(), kind, source)


def test_signs_that_are_no_letters() -> None:
    r"""Rust reads \< as the beginning of a word, so it is no way to write a sign."""
    table = automaton(tokens(), "json_schema", {"enum": ["<", ">=", "a/b."]})
    assert {walk(table, random.Random(i)) for i in range(9)} == {'"<"', '">="', '"a/b."'}


def test_a_digit_of_a_pattern_is_one_of_ascii() -> None:
    """As in ECMAScript. For Rust the digits of all scripts are digits."""
    for pattern in (r"^\d$", r"^[\d]$"):
        regex = regex_of({"type": "string", "pattern": pattern})
        assert re.fullmatch(regex, '"7"')
        assert not re.fullmatch(regex, '"\u0667"')


def test_tables_that_are_too_large_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "MAX_BYTES", 100_000)
    with pytest.raises(FieldError, match=r"tables of .* MiB; at most .*Engine"):
        automaton(tokens(), "regex", "[a-z]{300}")


def test_a_text_that_no_token_spells_is_refused() -> None:
    with pytest.raises(FieldError, match="no text that tokens can spell"):
        automaton(ascii_tokens(130), "regex", "é+")


def walk(table: Automaton, rng: random.Random) -> str | None:
    """Return a random text of a grammar; None: it did not end."""
    said, state, after = [], int(table.starts[0]), np.asarray(table.next)
    masks, classes = np.asarray(table.masks), np.asarray(table.classes)
    for _ in range(150):
        may = allowed(masks[state])
        ends = [i for i in may if i in closing() or i in STOPS]
        token = rng.choice(ends if ends and rng.random() < 0.6 else may)
        if token in STOPS:
            return tokenizer().decode(said)
        said.append(token)
        state = int(after[state, classes[token]])
    return None


def test_what_tables_of_random_schemas_spell_is_valid() -> None:
    """Those that can be tables: most. What cannot is refused by name."""
    rng, made, ended = random.Random(0), 0, 0
    for _ in range(150):
        asked = schema(rng)
        try:
            table = automaton(tokens(), "json_schema", asked)
        except FieldError:
            continue
        made += 1
        text = walk(table, rng)
        if text is not None:
            ended += 1
            jsonschema.validate(json.loads(text), asked)
    assert made > 100
    assert ended > 70
