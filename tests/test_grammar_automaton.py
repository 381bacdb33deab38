"""The tables on the device allow what llguidance allows on the host."""

from __future__ import annotations

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.records import FieldError

pytest.importorskip("llguidance")
pytest.importorskip("outlines_core")

from jaxspec.grammars import Matcher
from jaxspec.grammars.automaton import (
    FREE,
    advance,
    automaton,
    masks_of,
    states_along,
)
from jaxspec.grammars.masking import masked, unpacked
from tests.test_grammars import STOPS, allowed, encode, tokens

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
    table = automaton(tokens(), [regex])
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
    table = automaton(tokens(), REGEXES[:3])
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
    table = automaton(tokens(), ["ab?"], states=8)
    logits = jnp.zeros((1, tokens().vocab_size))
    out = masked(logits, masks_of(table, table.starts))
    assert set(np.flatnonzero(np.isfinite(out[0])).tolist()) == {*encode("a"), *encode("ab")}
    assert not jnp.isnan(jax.nn.softmax(out)).any()
    free = masks_of(table, jnp.asarray([FREE]))
    np.testing.assert_array_equal(masked(logits, free), logits)
    assert unpacked(free, 7).shape == (1, 7)


def test_tables_of_one_size_are_one_program() -> None:
    step = jax.jit(lambda *a: states_along(*a))
    for regexes in (["a*"], ["yes|no"]):
        table = automaton(tokens(), regexes, states=16)
        step(table, table.starts, jnp.zeros((1, 3), jnp.int32))
    assert step._cache_size() == 1


@pytest.mark.parametrize(
    ("regex", "states", "say"),
    [
        ("[a-z]{40}", 16, "42 states.*16"),
        ("[^\\s\\S]", 16, "cannot be used"),
        ("([", 16, "cannot be used"),
        ("a" * 3000, 16, "at most"),
        ("a", 0, "states is 0"),
    ],
)
def test_what_does_not_fit_is_refused(regex: str, states: int, say: str) -> None:
    with pytest.raises(FieldError, match=say):
        automaton(tokens(), [regex], states=states)
