"""A sampler whose rows follow grammars by tables on the device: the masked target's choice, without the host.

The reference is `masked_greedy`: one pass over the whole text a token. What it allows is asked of llguidance, one
token at a time: the tables are made by another library.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("llguidance")
pytest.importorskip("outlines_core")

from jaxspec.options import Drafting, FieldError, ProgramFeatures, Sampling, Tree
from jaxspec.rollout.batch import FinishReason, GenerateResult, Prompts
from jaxspec.rollout.sampler import Sampler
from jaxspec.sampling import suppress
from jaxspec.text.grammars.automaton import Automaton
from jaxspec.text.grammars.tables import automaton
from tests import cases, fakes, tiny
from tests.words import EOS, ascii_tokenizer, ascii_tokens

pytestmark = pytest.mark.usefixtures("tight")

NEW = 12
LANGUAGES: list[str | None] = [
    "[0-9]{3}(-[0-9]{2,4}){2}",
    None,
    '\\{"name": "[a-z]{2,9}", "size": (true|false|null)\\}',
    "yes|no|[a-f]{2,3}!",
]
"""Of each prompt. None: it may say anything."""


def tokens() -> Any:
    return ascii_tokens(tiny.VOCAB_SIZE)


@functools.cache
def table() -> Automaton:
    return automaton(tokens(), "regex", *LANGUAGES)


def case() -> cases.Case:
    return cases.case("31b")


PROMPTS = 4


def prompts() -> list[tuple[int, ...]]:
    return case().prompts[:PROMPTS]


@functools.cache
def masked_greedy(row: int) -> tuple[int, ...]:
    """Return what the target writes first in a language, without a cache, a batch or a drafter."""
    target, prompt = case().target, prompts()[row]
    language = LANGUAGES[row]
    matcher = None if language is None else tokens().compile("regex", language).matcher()
    text, padded = list(prompt), np.zeros((1, len(prompt) + NEW), np.int32)
    while len(text) < padded.size and EOS not in text[len(prompt) :]:
        padded[0, : len(text)] = text
        logits = fakes.forward(target.model_def, target.params, jnp.asarray(padded))[
            0, len(text) - 1
        ]
        assert target.generation is not None
        logits = np.array(suppress(logits, target.generation.suppress_tokens))
        if matcher is not None:
            for i in range(len(logits)):
                may = matcher.may_end if i == EOS else matcher.state.validate_tokens([i]) == 1
                logits[i] = logits[i] if may else -np.inf
        text.append(int(logits.argmax()))
        if matcher is not None:
            matcher.commit(text[-1:])
    return tuple(text[len(prompt) :])


def sampler(drafter: str | None, **options: Any) -> Sampler:
    drafting = Drafting(**options.pop("drafting", {}))
    pair = (case().target, None if drafter is None else case().drafter(drafter))
    program_features = ProgramFeatures(**options.pop("program_features", {}))
    return Sampler(
        pair,
        max_new_tokens=NEW,
        stop_ids=(EOS,),
        drafting=drafting,
        program_features=program_features,
        **options,
    )


def weights(drafter: str | None) -> tuple[Any, Any]:
    return case().target.params, None if drafter is None else case().drafter(drafter).params


def said(result: GenerateResult) -> list[tuple[int, ...]]:
    ids, lengths = np.asarray(result.tokens), np.asarray(result.lengths)
    return [tuple(row[:n].tolist()) for row, n in zip(ids, lengths, strict=True)]


@pytest.mark.parametrize(
    ("drafter", "options"),
    [
        # By default: rows of an engine, in tests/engine, and what samplers draw under a grammar, in test_distribution.
        pytest.param("mixed", dict(num_samples=2, batch_size=3), marks=pytest.mark.slow),
        *(
            pytest.param(d, {}, marks=pytest.mark.slow)
            for d in (None, "mixed", "hostile", "dflash", "mtp")
        ),
        pytest.param(
            "mixed",
            dict(drafting=dict(tree=Tree(2, 3), num_draft_tokens=5)),
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_greedy_rows_are_those_of_masked_plain_decoding(drafter: Any, options: Any) -> None:
    """A grammar for each prompt, and none for one. Also with samples, in few slots that are refilled."""
    samples = options.get("num_samples", 1)
    run = sampler(drafter, **options)
    result = run(*weights(drafter), prompts(), grammar=table())
    expected = [masked_greedy(row) for row in range(PROMPTS) for _ in range(samples)]
    assert said(result) == expected
    reasons = [FinishReason.STOP if row[-1] == EOS else FinishReason.LENGTH for row in expected]
    assert np.asarray(result.finish_reasons).tolist() == reasons
    assert FinishReason.STOP in reasons
    free = said(run(*weights(drafter), prompts()))
    assert free[samples : 2 * samples] == expected[samples : 2 * samples]
    assert free[0] != expected[0]


@pytest.mark.slow
def test_what_is_forced_is_drafted() -> None:
    """A drafter that knows nothing proposes the text that has to follow. Without, each token is a step."""
    run = sampler("hostile")
    forced = automaton(tokens(), "regex", "abcdefghijk")
    unforced = forced.replace(likely=jnp.full_like(forced.likely, -1))
    some = weights("hostile")
    results = [run(*some, prompts()[:1], grammar=g) for g in (forced, unforced)]
    assert said(results[0]) == said(results[1])
    assert results[0].num_steps[0] < results[1].num_steps[0] - 3


@pytest.mark.slow
def test_sampled_rows_keep_to_their_grammar_with_everything_on() -> None:
    schema = {"enum": ["no", "yes"]}
    small = automaton(
        tokens(), "json_schema", {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    )
    drafting = dict(draft_sampling=True, verification="block")
    program_features = dict(penalties=True, num_biases=1, logprobs=True, top_logprobs=2)
    run = sampler("mtp", num_samples=3, drafting=drafting, program_features=program_features)
    asked = Sampling(temperature=1.5, top_p=0.95, presence_penalty=0.5, logit_bias={40: 2.0})
    result = run(*weights("mtp"), prompts(), asked, seeds=3, grammar=small)
    texts = [ascii_tokenizer().decode(row) for row in said(result) if row[-1] == EOS]
    assert len(texts) > PROMPTS
    assert {json.loads(text)["a"] for text in texts} == {"no", "yes"}
    assert result.logprobs is not None
    of = np.asarray(result.logprobs.sampled)[0, : result.lengths[0]]
    assert np.isfinite(of).all()
    again = run(*weights("mtp"), prompts(), asked, seeds=3, grammar=small)
    assert said(again) == said(result)


@pytest.mark.slow
def test_a_call_goes_on_where_the_grammar_was() -> None:
    run, some = sampler("mixed"), weights("mixed")
    begun = run(*some, prompts(), grammar=table(), max_new_tokens=4)
    going_on = Prompts.padded(prompts()).after(begun)
    rest = run(*some, going_on, grammar=table(), max_new_tokens=NEW - 4)
    whole = [a + b for a, b in zip(said(begun), said(rest), strict=True)]
    assert whole == [masked_greedy(row) for row in range(PROMPTS)]


@pytest.mark.slow
def test_a_stream_and_a_program_of_the_callers() -> None:
    run, some = sampler("mixed"), weights("mixed")
    expected = [masked_greedy(row) for row in range(PROMPTS)]
    *_, last = run.stream(*some, prompts(), grammar=table(), steps_per_return=3)
    assert said(last) == expected
    inside = jax.jit(lambda grammar: run(*some, Prompts.padded(prompts()), grammar=grammar))
    assert said(inside(table())) == expected


def test_the_program_asks_no_host_and_is_the_same_without_a_grammar() -> None:
    run, some = sampler("mixed"), weights("mixed")
    begin = Prompts.padded(prompts())

    def text(grammar: Automaton | None) -> str:
        def call(grammar: Automaton | None) -> GenerateResult:
            return run(*some, begin, grammar=grammar)

        return jax.jit(call).lower(grammar).as_text(debug_info=True)

    with_one, without = text(table()), text(None)
    assert "grammar" in with_one
    assert "callback" not in with_one
    assert "grammar/" not in without


@pytest.mark.slow
def test_grammars_of_one_size_share_a_program() -> None:
    run, some = sampler("mixed"), weights("mixed")
    for language in ("[0-9]+", "(yes|no)+"):
        run(*some, prompts(), grammar=automaton(tokens(), "regex", language))
        compiled = run.num_compilations
    run(*some, prompts(), grammar=automaton(tokens(), "regex", "[a-z]{1,4}"))
    assert run.num_compilations == compiled


def test_what_a_sampler_cannot_follow_is_refused() -> None:
    run, some = sampler(None), weights(None)

    def refused(grammar: Any, say: str) -> None:
        with pytest.raises(FieldError, match=say):
            run(*some, prompts(), grammar=grammar)

    refused(tokens().compile("regex", "a"), "takes tables.*Engine")
    refused(automaton(tokens(), "regex", "a", "b"), "has 2 grammars; expected 1, or .* 4 prompts")
    refused(automaton(ascii_tokens(tiny.VOCAB_SIZE + 3), "regex", "a"), "was made for")
    many = sampler("mixed", drafting=dict(synthetic_acceptance=2.0))
    with pytest.raises(FieldError, match="leave one out"):
        many(*weights("mixed"), prompts(), grammar=table())
    with pytest.raises(FieldError, match=r"tables\.automaton"):
        sampler(None, program_features=dict(grammars=True))
