"""Penalties, biases and a user's function: the same text by every road, and logprobs that say why.

The reference is one pass of the target over the whole text for every token, and numpy. Greedy rows must
give its tokens; of sampled rows, and of the greedy ones too, the logprobs must be what a pass over the
finished text gives.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import state as states
from jaxspec.decode_loop import decode_loop
from jaxspec.options import Drafting, ProgramFeatures, Tree
from jaxspec.sampling import Logprobs, SamplingParams
from jaxspec.shapes import Array
from jaxspec.state import Admission, DecodeSpec, DecodeState
from jaxspec.weights.loading import LoadedModel
from tests import fakes
from tests.cases import by_record, slow
from tests.decode.plain import Settings, columns, log_softmax
from tests.decode.rollout import num_programs, rollout
from tests.decode.test_distribution import VOCAB, target

NEW_TOKENS = 12
NUM_BIASES = 3
TOP = 3
SETTINGS = [
    Settings(temperature=0.0),
    Settings(temperature=0.0, repetition_penalty=1.6),
    Settings(temperature=0.0, repetition_penalty=0.7, presence_penalty=0.4),
    Settings(temperature=0.0, frequency_penalty=0.5, presence_penalty=-0.2),
    Settings(temperature=0.0, biases={4: -np.inf, 1: -1.5, 2: 0.3}),
    Settings(
        temperature=0.0, repetition_penalty=1.2, frequency_penalty=0.3, biases={0: -np.inf, 4: -1.0}
    ),
    Settings(temperature=1.3),
    Settings(temperature=0.05, frequency_penalty=0.2),
    Settings(temperature=0.8, top_k=4, presence_penalty=0.4),
    Settings(temperature=1.1, top_p=0.8, repetition_penalty=1.3),
    Settings(temperature=1.5, min_p=0.25, biases={3: 1.0, 6: -np.inf}),
    Settings(temperature=0.7, top_k=5, top_p=0.9, min_p=0.05, frequency_penalty=0.4),
]
PROMPT_LENGTHS = (1, 3, 5, 8, 11, 4, 7, 2)  # a chunk is 4 tokens, the window 3
PER_SETTING = len(PROMPT_LENGTHS)
ROWS = [settings for settings in SETTINGS for _ in range(PER_SETTING)]
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dflash": dict(draft_sampling=True, verification="block"),
    "mtp": dict(),
    "dflash tree": dict(tree=Tree(3, 3), num_draft_tokens=8),
    "mtp tree": dict(tree=Tree(2, 3), num_draft_tokens=6),
}


def odd_positions(logits: Array, positions: Array) -> Array:
    """Make token 5 likely where the position is odd, and token 1 impossible in the first nine."""
    is_odd = (positions % 2 == 1).astype(logits.dtype)
    logits = logits.at[:, :, 5].add(1.5 * is_odd)
    return logits.at[:, :, 1].add(jnp.where(positions < 9, -jnp.inf, 0.0))


def prompts() -> tuple[np.ndarray, np.ndarray]:
    """Return prompts and their lengths, the same for each setting."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB, (PER_SETTING, max(PROMPT_LENGTHS)))
    return np.tile(tokens, (len(SETTINGS), 1)), np.tile(PROMPT_LENGTHS, len(SETTINGS))


def adjusted(settings: Settings, logits: np.ndarray, text: list[int], length: int) -> np.ndarray:
    """Return the logits of the token after `text`, whose first `length` are the prompt."""
    out = settings.adjusted(logits, text[:length], text[length:])
    out[5] += 1.5 * (len(text) % 2)
    out[1] += -np.inf if len(text) < 9 else 0.0
    return out


@functools.cache
def naive() -> tuple[list[list[int]], np.ndarray]:
    """Return the texts of the greedy rows, and by how much every row was decided at its closest."""
    tokens, lengths = prompts()
    greedy = [i for i, settings in enumerate(ROWS) if settings.temperature == 0]
    texts = [tokens[i, : lengths[i]].tolist() for i in greedy]
    gaps = np.full(len(greedy), np.inf)
    for _ in range(NEW_TOKENS):
        padded = np.zeros((len(greedy), max(PROMPT_LENGTHS) + NEW_TOKENS), np.int32)
        for row, text in zip(padded, texts, strict=True):
            row[: len(text)] = text
        logits = fakes.forward(target().model_def, target().params, jnp.asarray(padded))
        for i, text in enumerate(texts):
            row = adjusted(ROWS[greedy[i]], np.asarray(logits[i, len(text) - 1]), text, lengths[i])
            best = np.sort(row)
            gaps[i] = min(gaps[i], best[-1] - best[-2])
            text.append(int(row.argmax()))
    return texts, gaps


@dataclass(frozen=True)
class Run:
    """The texts of all rows, what the state says of their new tokens, and the state."""

    texts: list[list[int]]
    logprobs: Logprobs
    state: DecodeState


def spec_of(form: str) -> tuple[DecodeSpec, LoadedModel | None]:
    drafter = {
        "plain": lambda: None,
        "dflash": lambda: fakes.dflash(target(), block_size=4),
        "mtp": lambda: fakes.mtp(target(), drafts=3),
    }[form.split()[0]]()
    options = {"num_draft_tokens": 3 if drafter else None, **FORMS[form]}
    spec = DecodeSpec(
        target().model_def,
        None if drafter is None else drafter.model_def,
        Drafting(**options),
        program_features=ProgramFeatures(True, NUM_BIASES, True, TOP, odd_positions),
    )
    return spec, drafter


def run(form: str, rows: list[Settings]) -> Run:
    spec, drafter = spec_of(form)
    tokens, lengths = prompts()
    state = rollout(
        spec,
        target().params,
        None if drafter is None else drafter.params,
        jnp.asarray(tokens),
        jnp.asarray(lengths),
        spec.sampling(len(rows), **columns(rows, NUM_BIASES)),
        new_tokens=NEW_TOKENS,
        chunk=4,
    )
    new = np.asarray(state.tokens[:, :NEW_TOKENS]).tolist()
    texts = [[*p[:n], *t] for p, n, t in zip(tokens.tolist(), lengths, new, strict=True)]
    logprobs = jax.tree.map(lambda x: np.asarray(x[:, :NEW_TOKENS]), state.logprobs)
    return Run(texts, logprobs, state)


run_all = functools.cache(lambda form: run(form, ROWS))


@pytest.mark.parametrize("form", ["mtp tree", *slow("plain", "dflash", "mtp", "dflash tree")])
def test_greedy_rows_equal_naive(form: str) -> None:
    texts, gaps = naive()
    clear = gaps > 1e-4  # else a near-tie, and rounding may choose
    assert clear.mean() > 0.95
    got = run_all(form)
    greedy = [t for t, settings in zip(got.texts, ROWS, strict=True) if not settings.temperature]
    assert list(itertools.compress(greedy, clear)) == list(itertools.compress(texts, clear))
    if form != "plain":
        taus = np.asarray(got.state.acceptance_lengths)[: len(greedy)]
        assert set(range(1, 4)) <= set(taus.ravel().tolist())


def test_these_penalties_and_biases_matter() -> None:
    """Each setting changes what rows with the same prompts would have said without."""
    texts, _ = naive()
    groups = [texts[i : i + PER_SETTING] for i in range(0, len(texts), PER_SETTING)]
    assert all(group != groups[0] for group in groups[1:])


@pytest.mark.parametrize("form", ["mtp tree", *slow("plain", "dflash", "mtp", "dflash tree")])
def test_logprobs_equal_a_teacher_forced_pass(form: str) -> None:
    got = run_all(form)
    top_ids, top_values = got.logprobs.top_ids, got.logprobs.top_values
    assert top_ids is not None
    assert top_values is not None
    _, lengths = prompts()
    padded = np.zeros((len(ROWS), max(PROMPT_LENGTHS) + NEW_TOKENS), np.int32)
    for row, text in zip(padded, got.texts, strict=True):
        row[: len(text)] = text
    logits = fakes.forward(target().model_def, target().params, jnp.asarray(padded))
    logits = np.asarray(logits)
    for i, (settings, text, n) in enumerate(zip(ROWS, got.texts, lengths, strict=True)):
        for j in range(NEW_TOKENS):
            row, token = logits[i, n + j - 1], text[n + j]
            raw = log_softmax(row)
            at = (i, j)
            # Ten places of the last digit of logits of up to 30. Processors round in their own order: 1.3e-5 was
            # met on one (AMD EPYC with AVX-512), others stay below 1e-5.
            np.testing.assert_allclose(got.logprobs.target[at], raw[token], atol=2e-5)
            best = np.argsort(-raw)[:TOP]
            np.testing.assert_allclose(top_values[at], raw[best], atol=2e-5)
            # Ties may stand in either order.
            np.testing.assert_allclose(raw[top_ids[at]], raw[best], atol=1e-5)
            if settings.temperature == 0:
                assert got.logprobs.sampled[at] == 0
                continue
            shaped = settings.filtered(adjusted(settings, row, text[: n + j], n))
            # A small temperature enlarges the rounding of the logits.
            tolerance = 1e-5 * max(1.0, 1 / settings.temperature)
            expected = log_softmax(shaped)[token]
            np.testing.assert_allclose(got.logprobs.sampled[at], expected, atol=tolerance)


@pytest.mark.parametrize("form", ["plain", *slow("dflash")])
def test_neighbours_change_nothing(form: str) -> None:
    """Every other row asks for something else: the rows between stay as they were, to the bit."""
    everything, kept = run_all(form), np.arange(len(ROWS)) % 2 == 0
    programs = num_programs()
    for neighbour in (Settings(temperature=0.0), SETTINGS[-1]):
        rows = [s if k else neighbour for s, k in zip(ROWS, kept, strict=True)]
        other = run(form, rows)
        assert list(itertools.compress(other.texts, kept)) == list(
            itertools.compress(everything.texts, kept)
        )
        jax.tree.map(
            lambda x, y: np.testing.assert_array_equal(x[kept], y[kept]),
            other.logprobs,
            everything.logprobs,
        )
    assert num_programs() == programs  # values compile nothing


@pytest.mark.parametrize("form", ["plain", "mtp tree", *slow("dflash")])
def test_counts_are_those_of_the_text(form: str) -> None:
    got = run_all(form)
    counts = got.state.counts
    assert counts is not None
    _, lengths = prompts()
    for row, (text, n) in enumerate(zip(got.texts, lengths, strict=True)):
        prompt, output = text[:n], text[n:]
        assert np.flatnonzero(counts.prompt[row]).tolist() == sorted(set(prompt))
        assert counts.output[row].tolist() == np.bincount(output, minlength=VOCAB).tolist()


def test_a_new_request_starts_from_nothing() -> None:
    state, slots = run_all("plain").state, jnp.asarray([3, 0, len(ROWS)])  # the last is no slot
    spec, _ = spec_of("plain")
    new = Admission(
        slots,
        jnp.full(3, 4),
        jnp.full((3, 1), -1),
        spec.sampling(3),
        jnp.ones((3, 2), jnp.uint32),
    )
    counts = states.admit(state, new).counts
    assert counts is not None
    assert state.counts is not None
    emptied = np.isin(np.arange(len(ROWS)), [0, 3])
    assert not counts.prompt[emptied].any()
    assert not counts.output[emptied].any()
    np.testing.assert_array_equal(counts.output[~emptied], state.counts.output[~emptied])


@pytest.mark.parametrize("options", [dict(penalties=True), dict(num_biases=2)])
def test_penalties_and_biases_go_alone(options: dict[str, Any]) -> None:
    """What a spec leaves out is not carried: no counts without penalties."""
    spec = DecodeSpec(target().model_def, None, program_features=ProgramFeatures(**options))
    weights = spec.target.abstract_params(), None
    state = jax.eval_shape(
        lambda: states.init_state(
            spec, 2, cache_length=8, num_stop_ids=1, cache_dtype=jnp.dtype("float32")
        )
    )
    assert (state.counts is not None) == spec.program_features.penalties
    after = jax.eval_shape(functools.partial(decode_loop, spec), *weights, state, jnp.int32(1))
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, state)


def test_values_are_one_for_all_or_one_a_row() -> None:
    made = SamplingParams.make(
        2,
        temperature=np.asarray([0.5, 1.0]),
        top_k=3,
        penalties=True,
        num_biases=2,
        bias_ids=np.asarray([4, -1]),
    )
    assert made.temperature.tolist() == [0.5, 1.0]
    assert made.top_k.tolist() == [3, 3]
    assert made.adjustments is not None
    assert made.adjustments.bias_ids.tolist() == [[4, -1], [4, -1]]
    assert SamplingParams.make(2).adjustments is None


def test_drafters_that_cannot_draw_are_refused() -> None:
    text = [[3, 0, 5, 1, *range(VOCAB)]]
    drafter = fakes.lookup(target(), text, block_size=4)
    spec = DecodeSpec(target().model_def, drafter.model_def, Drafting(3, draft_sampling=True))
    state = jax.eval_shape(
        lambda: states.init_state(
            spec, 1, cache_length=9, num_stop_ids=1, cache_dtype=jnp.dtype("float32")
        )
    )
    weights = target().params, drafter.params
    with pytest.raises(
        ValueError, match=r"draft_sampling .* LookupDrafter .* leave draft_sampling"
    ):
        jax.eval_shape(functools.partial(decode_loop, spec), *weights, state, jnp.int32(1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(num_biases=-1), "num_biases is -1; it must be 0 or more"),
        (dict(top_logprobs=3), "top_logprobs is 3, but logprobs are off"),
        (dict(top_logprobs=8, logprobs=True), "top_logprobs is 8; the vocabulary has 7 tokens"),
        (dict(draft_sampling=True, tree=Tree(2, 2)), "draft_sampling is for chains"),
        (dict(verification="block", tree=Tree(2, 2)), 'verification="block" is for chains'),
        (dict(synthetic_acceptance=2.0, tree=Tree(2, 2)), "synthetic_acceptance is for chains"),
        (dict(synthetic_acceptance=2.0, draft_sampling=True), "draft_sampling changes how drafts"),
        (dict(synthetic_acceptance=2.0, verification="block"), "block.* changes how drafts"),
        (dict(draft_sampling=True, drafter=None), "draft_sampling was given, but there is no"),
        (dict(verification="block", drafter=None), "block.* was given, but there is no drafter"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    drafter = fakes.dflash(target(), block_size=4).model_def
    given = {"drafter": drafter, "num_draft_tokens": 3, **options}
    with pytest.raises(ValueError, match=message):
        DecodeSpec(target().model_def, **by_record(**given))
