"""Requests with grammars: the target's choice among what each grammar allows, however it is decoded.

The reference is `masked_greedy`: one pass over the whole text a token, and one mask a token.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("llguidance")

from jaxspec.engine.draft_length import DraftLengthController
from jaxspec.engine.draft_length_policy import Choice
from jaxspec.engine.engine import Engine
from jaxspec.engine.request import Completion, Request
from jaxspec.options import FieldError, Tree
from jaxspec.sampling import suppress
from jaxspec.text.grammars import Grammar, GrammarTokens, Matcher, guides
from tests import cases, fakes, tiny
from tests.cases import request, run
from tests.words import EOS, ascii_tokenizer, ascii_tokens

NEW = cases.NEW_TOKENS
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "size": {"enum": [12, None, True]},
        "list": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["name", "size"],
    "additionalProperties": False,
}


@functools.cache
def case() -> cases.Case:
    return cases.case("31b")


@functools.cache
def grammar(kind: Any, source: str) -> Grammar:
    return ascii_tokens(tiny.VOCAB_SIZE).compile(kind, source)


GRAMMARS: dict[str, tuple[str, str]] = {
    "schema": ("json_schema", json.dumps(SCHEMA)),
    "digits": ("regex", "[0-9]{3}(-[0-9]{2,4}){2}"),
    "lark": ("lark", 'start: ("yes" | "no" | /[a-f]{2,9}/) "!"'),
}


def of(name: str | None) -> Grammar | None:
    return None if name is None else grammar(*GRAMMARS[name])


@functools.cache
def masked_greedy(row: int, name: str) -> tuple[int, ...]:
    """Return what the target writes first under a grammar, without a cache, a batch or a drafter."""
    target, prompt = case().target, case().prompts[row]
    matcher, text = grammar(*GRAMMARS[name]).matcher(), list(prompt)
    padded = np.zeros((1, len(prompt) + NEW), np.int32)
    while len(text) < padded.size and EOS not in text[len(prompt) :]:
        padded[0, : len(text)] = text
        logits = fakes.forward(target.model_def, target.params, jnp.asarray(padded))[
            0, len(text) - 1
        ]
        assert target.generation is not None
        logits = np.array(suppress(logits, target.generation.suppress_tokens))
        bits = np.unpackbits(matcher.mask()[0].view(np.uint8), bitorder="little")
        logits[bits[: len(logits)] == 0] = -np.inf
        text.append(int(logits.argmax()))
        matcher.commit(text[-1:])
    return tuple(text[len(prompt) :])


EXTRAS = dict(grammars=True, penalties=True, num_biases=16, logprobs=True, top_logprobs=1)
"""Of all engines here, so that they share programs."""


def engine(drafter: str | None, **options: Any) -> Engine:
    return case().engine(drafter, **{**EXTRAS, **options})


def asked(row: int, name: str | None, **options: Any) -> Request:
    return request(case().prompts[row], NEW, grammar=of(name), stop_ids=(EOS,), **options)


MIXED: list[str | None] = ["schema", None, "digits", "lark", None, "schema", "digits", "lark"]
"""What the rows ask for, by the row of the case."""


def expected(row: int) -> tuple[int, ...]:
    name = MIXED[row]
    if name is None:
        return cases.until_stop(case().continuation(row), [EOS])
    return masked_greedy(row, name)


def check(done: Sequence[Completion]) -> None:
    for row, completion in enumerate(done):
        assert completion.error is None
        assert completion.token_ids == expected(row), row
        is_over = completion.token_ids[-1] == EOS
        assert completion.finish_reason == ("stop" if is_over else "length")


def mixed(**options: Any) -> list[Request]:
    return [asked(row, name, **options) for row, name in enumerate(MIXED)]


# --- what is chosen ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "drafter", ["mixed", *cases.slow(None, "oracle", "dflash", "mtp", "hostile")]
)
def test_greedy_rows_are_those_of_masked_plain_decoding(drafter: str | None) -> None:
    """In one batch with rows that have no grammar, which are what they are without."""
    check(run(engine(drafter), mixed()))


def test_the_reference_is_what_the_grammars_say() -> None:
    """Else all of the above could be wrong together."""
    texts = {n: ascii_tokenizer().decode(masked_greedy(r, n)) for r, n in enumerate(MIXED) if n}
    whole = dict(
        digits=texts["digits"].replace("-", "").isdigit(), lark=texts["lark"].endswith("!")
    )
    assert whole == dict(digits=True, lark=True), texts
    finished = [r for r, n in enumerate(MIXED) if n and masked_greedy(r, n)[-1] == EOS]
    assert {MIXED[r] for r in finished} >= {"digits", "lark"}


def test_a_row_keeps_its_grammar_when_it_moves_to_a_slot() -> None:
    """Prompts are read ahead of the slots, so every row moves."""
    small = engine("mixed", batch_size=2, read_ahead=2)
    check(run(small, mixed()))


def test_a_grammar_without_a_choice_is_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter that knows nothing proposes what the grammar forces. Without, each token is a step."""
    one = [request(case().prompts[0], 12, grammar=grammar("regex", "[0-9]abcdefghij[0-9]"))]
    forced = run(engine("hostile"), one)[0]
    monkeypatch.setattr(guides, "_write_forced", lambda *_: None)
    alone = run(engine("hostile"), one)[0]
    assert forced.token_ids == alone.token_ids
    assert len(forced.acceptance_lengths) < len(alone.acceptance_lengths) - 3


def test_any_verify_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also none, where a drafter absorbs the tokens of many plain steps at once."""
    lengths: list[int] = []

    def next(self: DraftLengthController, running: Any, most_steps: int) -> Choice:
        lengths.append((0, cases.BLOCK - 1)[len(lengths) % 2])
        return Choice(3, lengths[-1])

    monkeypatch.setattr(DraftLengthController, "next", next)
    check(run(engine("mixed"), mixed()))
    assert {*lengths} == {0, cases.BLOCK - 1}


@pytest.mark.parametrize(
    ("drafter", "how"),
    [
        ("mixed", {}),
        pytest.param(
            "mtp", dict(draft_sampling=True, verification="block"), marks=pytest.mark.slow
        ),
    ],
)
def test_sampled_rows_with_everything_on_keep_to_their_grammars(
    drafter: str, how: dict[str, Any]
) -> None:
    everything: dict[str, Any] = dict(
        temperature=1.0, top_p=0.9, presence_penalty=0.5, logit_bias={40: 2.0}, logprobs=True
    )
    done = run(engine(drafter, **how), mixed(**everything))
    for name, completion in zip(MIXED, done, strict=True):
        assert completion.error is None
        if name is not None:
            grammar(*GRAMMARS[name]).matcher().commit(completion.token_ids)
            assert np.isfinite(completion.sampled_logprobs).all()


def test_log_probabilities_are_the_targets_own() -> None:
    """Under the target as it is, whatever the grammar forbids."""
    done = run(engine("mixed"), [asked(2, "digits", logprobs=True, top_logprobs=1)])[0]
    assert done.logprobs is not None
    assert done.top_logprobs is not None
    assert min(done.logprobs) < -1
    assert any(
        best[0][0] != token for token, best in zip(done.token_ids, done.top_logprobs, strict=True)
    )


# --- how it ends ---------------------------------------------------------------------------------


def test_a_reply_ends_with_its_grammar() -> None:
    """Also where the request names no stop ids, and where it might go on."""
    source = grammar("regex", "ab?")
    one = request(case().prompts[0], NEW, grammar=source)
    done = run(engine("mixed"), [one])[0]
    assert done.finish_reason == "stop"
    assert done.token_ids[-1] == EOS
    assert ascii_tokenizer().decode(done.token_ids) in ("a", "ab")


def test_where_bans_leave_no_token_one_request_fails() -> None:
    digits = {i: float("-inf") for i in (*range(11), ascii_tokenizer().backend.token_to_id("12"))}
    requests = mixed()
    requests[2] = cases.resampled(requests[2], logit_bias=digits)
    done = run(engine("mixed"), requests)
    assert done[2].finish_reason == "error"
    assert "a grammar leave no token" in (done[2].error or "")
    assert done[2].token_ids == ()
    check([done[0], done[1]])


@pytest.mark.parametrize("when", ["commit", "fill"])
def test_a_grammar_that_goes_wrong_ends_its_request_alone(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one whose limits are exceeded after some tokens."""
    requests = mixed()
    broken = grammar("regex", "[0-9]{30}")
    requests[2] = dataclasses.replace(requests[2], grammar=broken)
    original_commit, original_error = Matcher.commit, Matcher.error

    def is_broken(matcher: Matcher) -> bool:
        return matcher in mine and seen[0] > 4

    mine, seen = [], [0]
    make = Grammar.matcher

    def matcher(self: Grammar) -> Matcher:
        made = make(self)
        if self is broken:
            mine.append(made)
        return made

    def count(self: Matcher, tokens: Sequence[int]) -> None:
        original_commit(self, tokens)
        if self in mine:
            seen[0] += len(tokens)
            if when == "commit" and is_broken(self):
                raise ValueError("too complex")

    def error(self: Matcher) -> str | None:
        assert original_error.fget is not None
        return "too complex" if when == "fill" and is_broken(self) else original_error.fget(self)

    monkeypatch.setattr(Grammar, "matcher", matcher)
    monkeypatch.setattr(Matcher, "commit", count)
    monkeypatch.setattr(Matcher, "error", property(error))
    done = run(engine("mixed"), requests)
    assert done[2].finish_reason == "error"
    assert done[2].field == "grammar"
    assert "too complex" in (done[2].error or "")
    assert len(done[2].token_ids) > 4
    others = [c for row, c in enumerate(done) if row != 2]
    assert [c.error for c in others] == [None] * 7
    assert done[0].token_ids == expected(0)


def test_nothing_is_left_of_requests_that_are_over() -> None:
    """Done, cancelled while the device works, or forgotten."""
    before = len(guides._LIVE)
    one = engine("mixed", batch_size=2)
    for r in mixed()[:4]:
        one.add(r)
    one.step()
    one.step()
    one.cancel(0)
    while not one.is_idle:
        one.step()
    assert len(guides._LIVE) == before
    one.add(mixed()[0])
    one.step()
    assert len(guides._LIVE) == before + 1
    one.reset()
    assert len(guides._LIVE) == before


# --- what it costs -------------------------------------------------------------------------------


def test_rows_without_grammars_run_the_programs_they_always_ran(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The host is asked only while a row with a grammar runs, and nothing is compiled after `warm_up`."""
    calls: list[int] = []
    answer = guides.answer

    def counted(numbers: Any, *given: Any, **options: Any) -> Any:
        calls.append(int((numbers >= 0).sum()))
        return answer(numbers, *given, **options)

    from jaxspec import constraint

    monkeypatch.setattr(constraint, "answer", counted)
    warm = engine("mixed", choose_length="never")
    warm.warm_up()
    compiled = warm.num_compilations
    free = [asked(row, None) for row in range(4)]
    run(warm, free)
    assert not calls
    short = grammar("regex", "[0-9]")
    run(warm, [*free[:3], dataclasses.replace(free[3], grammar=short)])
    assert 0 < len(calls) < 5, "rows that went on asked too"
    assert {*calls} == {1}
    assert warm.num_compilations == compiled


# --- what is refused -----------------------------------------------------------------------------


def test_what_cannot_be_is_refused_by_name() -> None:
    digits = asked(0, "digits")
    error = engine("mixed", grammars=False).check(digits)
    assert error is not None
    assert error.field == "grammar"
    assert "grammars=True" in str(error)
    other = GrammarTokens(ascii_tokenizer(), 200, [EOS]).compile("regex", "a")
    error = engine("mixed").check(dataclasses.replace(digits, grammar=other))
    assert "was made for 200 tokens; the target has 160" in str(error)
    with pytest.raises(FieldError, match="leave the tree out"):
        engine("oracle", tree=Tree(2, 2), num_draft_tokens=4)
    with pytest.raises(FieldError, match="takes any; leave one out"):
        engine("oracle", synthetic_acceptance=2.0)
    many = dataclasses.replace(digits, stop_ids=tuple(range(2, 6)))
    assert "names 5 tokens" in str(engine("mixed").check(many))


def test_several_processes_follow_no_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guides of another process's rows would stand still."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(FieldError, match=r"^grammar needs one process, and there are 2; leave"):
        engine("mixed")
