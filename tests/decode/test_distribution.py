"""Sampled speculative decoding follows the target's own distribution, whatever the drafter.

Seven tokens and a tiny target: the probability of every continuation is known exactly, by running the
target over all of them. Thousands of rows are counted against it with a G-test, once over the first three
tokens together and once over the third to fifth, which later steps made. Each test is passed by a correct
sampler but for 1 in 10000 seeds, and the seeds are fixed. That they would fail for a wrong one is shown
too, with three wrong ones.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxspec import decode, verify
from jaxspec.configs.dflash import DFlashConfig
from jaxspec.configs.dflash2 import DFlash2Config
from jaxspec.configs.dspark import DSparkConfig
from jaxspec.configs.gemma4 import Gemma4Config
from jaxspec.configs.ngram import NGramConfig
from jaxspec.decode_loop import decode_loop
from jaxspec.drafters.dflash import DFlashDrafter
from jaxspec.drafters.dflash2 import DFlash2Drafter
from jaxspec.drafters.dspark import DSparkDrafter
from jaxspec.drafters.ngram import NGramDrafter
from jaxspec.engine.draft_length import DraftLengthController
from jaxspec.engine.draft_length_policy import Choice
from jaxspec.models.gemma4 import Gemma4
from jaxspec.options import Drafting, Sampling, Tree
from jaxspec.rollout.batch import Prompts
from jaxspec.rollout.sampler import Sampler
from jaxspec.runtime import prefill
from jaxspec.sampling import SamplingParams, Stream, fold_keys, sample, shape_logits
from jaxspec.verify import AcceptResult
from jaxspec.weights.loading import LoadedModel
from jaxspec.weights.model_def import ModelDef
from tests import cases, fakes, tiny, words
from tests.cases import engine_of, request, run

VOCAB = 7
NEW_TOKENS = 5
DRAFTS = 3
ROWS = 4096
SLOTS = 1024
FALSE_ALARM = 1e-4
PROMPT = (3, 0, 5, 1)
FILTERS = {
    "temperature 1": dict(temperature=1.0),
    "cooler, top-k 5, top-p 0.9": dict(temperature=0.7, top_k=5, top_p=0.9),
    "warmer, top-p 0.8": dict(temperature=1.6, top_p=0.8),
}


@functools.cache
def target() -> LoadedModel:
    config = Gemma4Config(
        vocab_size=VOCAB,
        hidden_size=16,
        layer_types=("sliding", "full"),
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        full_num_kv_heads=1,
        full_head_dim=8,
        intermediate_size=16,
        sliding_window=3,
        max_positions=1024,
        final_logit_softcap=None,
    )
    model_def = ModelDef(Gemma4, config, "float32")
    params = tiny.random_params(model_def, 0)
    params["final_norm"] /= 4  # no token is nearly certain, none nearly impossible
    return fakes.loaded(model_def, params)


TEXTS = ["a", "b", "c", "d", "ab", "cc"]
"""The tokens' texts, where a grammar counts; the last token ends a text."""
LANGUAGE = "([abc][bcd]){6}"


def allowed(ids: Iterable[int]) -> list[bool]:
    """Tell which tokens may follow some in the language, by trying them. Behind wrong ones, any."""
    sets = ["abc", "bcd"]

    def fits(text: str) -> bool:
        return all(c in sets[i % 2] for i, c in enumerate(text))

    texts = [*TEXTS, "?"]
    begun = "".join(texts[i] for i in ids)
    return [not fits(begun) or fits(begun + text) for text in texts]


@functools.cache
def exact(filters: str, *, in_language: bool = False) -> np.ndarray:
    """Return the joint distribution of the new tokens, an axis a token.

    The filters' own correctness is the business of test_sampling.

    Args:
      in_language: whether what the language does not allow has no probability.
    """
    sampling = Sampling(**FILTERS[filters])
    continuations = np.asarray(list(itertools.product(range(VOCAB), repeat=NEW_TOKENS - 1)))
    prompts = np.broadcast_to(PROMPT, (len(continuations), len(PROMPT)))
    tokens = jnp.asarray(np.concatenate([prompts, continuations], axis=1), jnp.int32)
    logits = fakes.forward(target().model_def, target().params, tokens)
    logits = logits[:, len(PROMPT) - 1 :]
    b = len(tokens)
    if in_language:
        may = [[allowed(row[:i]) for i in range(NEW_TOKENS)] for row in continuations]
        logits = jnp.where(jnp.asarray(may), logits, -jnp.inf)
    shaped = jax.jit(shape_logits)(
        logits,
        SamplingParams.make(
            b, temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p
        ),
    )
    probs = np.asarray(jax.nn.softmax(shaped, axis=-1), np.float64)
    probs /= probs.sum(axis=-1, keepdims=True)
    probs = probs.reshape(*[VOCAB] * (NEW_TOKENS - 1), NEW_TOKENS, VOCAB)
    joint = np.ones(())
    for i in range(NEW_TOKENS):  # p(token i | those before), which do not depend on later axes
        conditional = probs[(*[slice(None)] * i, *[0] * (NEW_TOKENS - 1 - i), i)]
        joint = joint[..., None] * conditional
    assert joint.shape == (VOCAB,) * NEW_TOKENS
    assert abs(joint.sum() - 1) < 1e-6
    return joint


@functools.cache
def drafters() -> dict[str, LoadedModel]:
    """Return drafters good and bad: likely continuations, unlikely ones, and a random network's."""
    joint = exact("temperature 1")
    # After each anchor, what mostly and what rarely follows the first token.
    following = joint.sum(axis=(0, 3, 4))
    after = following / following.sum(axis=1, keepdims=True)

    def chain(pick: Callable[[np.ndarray], np.ndarray]) -> list[list[int]]:
        step, rows = pick(after), []
        for anchor in range(VOCAB):
            row, token = [], anchor
            for _ in range(DRAFTS):
                token = int(step[token])
                row.append(token)
            rows.append(row)
        return rows

    return {
        "likely": fakes.table(target(), chain(lambda p: p.argmax(axis=1)), np.log(after)),
        "unlikely": fakes.table(target(), chain(lambda p: p.argmin(axis=1)), -np.log(after)),
        "dflash": fakes.dflash(target(), block_size=DRAFTS + 1),
        "mtp": fakes.mtp(target(), drafts=DRAFTS),
        "ngram": fakes.loaded(ModelDef(NGramDrafter, NGramConfig(), "float32"), {}),
        "reduced": selecting(DFlashDrafter, DFlashConfig, own_head=True, draft_vocab_size=4),
        "dflash2": selecting(
            DFlash2Drafter, DFlash2Config, conv_group_size=4, selector_rank=5, selector_top_k=3
        ),
        "dspark": selecting(DSparkDrafter, DSparkConfig, markov_rank=5),
        "dspark-rnn": selecting(
            DSparkDrafter,
            DSparkConfig,
            markov_rank=5,
            markov_head_type="rnn",
            own_head=True,
            draft_vocab_size=4,
            block_size=DRAFTS,
            sample_from_anchor=True,
        ),
    }


def selecting(module: Any, config: Any, **values: Any) -> LoadedModel:
    """Return a block drafter with random weights: some tokens are never drafted, or they depend on others."""
    usual = fakes.dflash(target(), block_size=DRAFTS + 1).config
    fields = {f.name: getattr(usual, f.name) for f in dataclasses.fields(DFlashConfig)}
    model_def = ModelDef(module, config(**{**fields, **values}), "float32")
    params = tiny.random_params(model_def, 0)
    if "ids" in params:
        params["ids"] = jnp.asarray([0, 2, 3, 6], jnp.int32)
    params["final_norm"] /= 6  # as the target's, so that many drafts are accepted
    return fakes.loaded(model_def, params)


@pytest.fixture(autouse=True)
def together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill all rows at once: what is tested here comes after."""
    monkeypatch.setattr(prefill, "SHARED_PREFILL", 16 * SLOTS)


def sampled(
    drafter: str | None, filters: str, seed: int = 1, grammar: Any = None, **options: Any
) -> tuple[np.ndarray, float]:
    """Return the new tokens of many rows and which fraction of a chain of drafts was accepted."""
    model = None if drafter is None else drafters()[drafter]
    engine = engine_of(target(), model, batch_size=SLOTS, cache_length=24, **options)
    one = request(PROMPT, NEW_TOKENS, seed=seed, grammar=grammar, **FILTERS[filters])
    done = run(engine, [one] * ROWS)
    taus = np.concatenate([d.acceptance_lengths for d in done])
    return np.asarray([d.token_ids for d in done]), float((taus - 1).mean() / DRAFTS)


in_chains = functools.cache(sampled)


def g_test(tokens: np.ndarray, probs: np.ndarray) -> float:
    """Return how likely counts as far off as these are, if `probs` is the truth.

    Cells that expect fewer than 5 are taken together, as the chi-square distribution needs.
    """
    counts = np.zeros(probs.shape)
    np.add.at(counts, tuple(tokens.T), 1)
    if counts[probs == 0].any():
        return 0.0
    expected = probs * len(tokens)
    rare = expected < 5
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    counts, expected = counts[expected > 0], expected[expected > 0]
    seen = counts > 0
    g = 2 * np.sum(counts[seen] * np.log(counts[seen] / expected[seen]))
    return float(stats.chi2.sf(g, len(counts) - 1))


def p_values(tokens: np.ndarray, filters: str, **options: bool) -> tuple[float, float]:
    joint = exact(filters, **options)
    return (
        g_test(tokens[:, :3], joint.sum(axis=(3, 4))),
        g_test(tokens[:, 2:], joint.sum(axis=(0, 1))),
    )


@pytest.mark.parametrize(
    ("drafter", "filters"),
    [
        *itertools.product(("likely", "unlikely"), FILTERS),
        ("mtp", "temperature 1"),
        # Other block drafters are among the selectors.
        *(
            pytest.param(*form, marks=pytest.mark.slow)
            for form in itertools.product(("mtp", "dflash"), FILTERS)
            if form != ("mtp", "temperature 1")
        ),
    ],
)
def test_speculative_sampling_follows_the_target(drafter, filters):
    tokens, accepted = in_chains(drafter, filters)
    # Rejections and acceptances both occur; but what top-k or top-p cuts is never accepted.
    assert accepted < 0.9
    if drafter != "unlikely" or filters == "temperature 1":
        assert accepted > 0.001
    assert min(p_values(tokens, filters)) > FALSE_ALARM


@pytest.mark.parametrize("filters", ["temperature 1", "cooler, top-k 5, top-p 0.9"])
@pytest.mark.parametrize(
    ("drafter", "options"),
    [
        *((name, dict(draft_sampling=True)) for name in ("dflash2", "dspark-rnn")),
        # The last one drafts from few tokens too.
        pytest.param("reduced", dict(draft_sampling=True), marks=pytest.mark.slow),
        pytest.param("ngram", dict(num_draft_tokens=DRAFTS), marks=pytest.mark.slow),
        *(
            pytest.param(name, options, marks=pytest.mark.slow)
            for name in ("reduced", "dflash2", "dspark", "dspark-rnn")
            for options in ({}, dict(draft_sampling=True, verification="block"))
        ),
    ],
)
def test_selectors_follow_the_target(drafter, filters, options):
    """Drafts come from few tokens, and from a distribution that depends on the draft before."""
    tokens, accepted = sampled(drafter, filters, **options)
    assert 0.005 < accepted < 0.9
    assert min(p_values(tokens, filters)) > FALSE_ALARM


@pytest.mark.parametrize(
    ("drafter", "options"),
    [
        ("likely", {}),
        pytest.param("unlikely", dict(draft_sampling=True), marks=pytest.mark.slow),
        pytest.param(
            "likely", dict(draft_sampling=True, verification="block"), marks=pytest.mark.slow
        ),
        pytest.param("mtp", {}, marks=pytest.mark.slow),
    ],
)
def test_verify_lengths_that_follow_from_the_past_keep_the_distribution(
    drafter, options, monkeypatch
):
    """Each step's length follows from what all rows accepted before, in as wild a way as there is."""
    past, used = [0], set()

    def next(self: DraftLengthController, running: Any, most_steps: int) -> Choice:
        length = (0, 2, DRAFTS)[past[0] % 3]
        used.add(length)
        return Choice(most_steps, length)

    def learn(self: DraftLengthController, acceptance_lengths: Any, seconds: float) -> None:
        past[0] += int(sum(x.sum() for x in acceptance_lengths))

    monkeypatch.setattr(DraftLengthController, "next", next)
    monkeypatch.setattr(DraftLengthController, "learn", learn)
    tokens, accepted = sampled(drafter, "temperature 1", steps_per_return=1, **options)
    assert used == {0, 2, DRAFTS}
    assert accepted > 0.001
    assert min(p_values(tokens, "temperature 1")) > FALSE_ALARM


@functools.cache
def language() -> Any:
    """Return the language as engines take it. No step of it is forced, so all ways to write it are allowed."""
    return language_tokens().compile("regex", LANGUAGE)


@functools.cache
def language_tokens() -> Any:
    pytest.importorskip("llguidance")
    from jaxspec.text.grammars import GrammarTokens

    return GrammarTokens(words.tokenizer(TEXTS, VOCAB - 1), VOCAB, [VOCAB - 1])


@pytest.mark.parametrize(
    ("drafter", "filters", "options"),
    [
        ("likely", "temperature 1", {}),
        *(
            pytest.param(drafter, filters, options, marks=pytest.mark.slow)
            for drafter, filters, options in [
                (None, "temperature 1", {}),
                ("unlikely", "temperature 1", {}),
                ("mtp", "temperature 1", {}),
                ("likely", "cooler, top-k 5, top-p 0.9", {}),
                ("likely", "temperature 1", dict(draft_sampling=True)),
                ("unlikely", "temperature 1", dict(draft_sampling=True, verification="block")),
                ("mtp", "warmer, top-p 0.8", dict(draft_sampling=True, verification="block")),
            ]
        ),
    ],
)
def test_rows_with_a_grammar_follow_the_masked_target(drafter, filters, options):
    """Where the grammar leaves a choice, in their proportions; also of tokens of several characters."""
    given = dict(grammar=language(), grammars=True)
    tokens, accepted = sampled(drafter, filters, **given, **options)
    assert drafter is None or 0.01 < accepted < 0.9
    assert min(p_values(tokens, filters, in_language=True)) > FALSE_ALARM
    assert min(p_values(tokens, filters)) < FALSE_ALARM / 1000


@pytest.mark.parametrize(
    ("drafter", "filters", "drafting"),
    [
        ("likely", "temperature 1", {}),
        *(
            pytest.param(drafter, filters, drafting, marks=pytest.mark.slow)
            for drafter, filters, drafting in [
                (None, "cooler, top-k 5, top-p 0.9", {}),
                ("unlikely", "temperature 1", dict(draft_sampling=True, verification="block")),
                ("dflash", "temperature 1", {}),
                ("mtp", "warmer, top-p 0.8", dict(draft_sampling=True)),
                ("likely", "temperature 1", dict(tree=Tree(3, DRAFTS), num_draft_tokens=8)),
            ]
        ),
    ],
)
def test_a_sampler_with_a_grammar_follows_the_masked_target(drafter, filters, drafting):
    """By tables on the device, in one program."""
    pytest.importorskip("outlines_core")
    from jaxspec.text.grammars.tables import automaton

    model = None if drafter is None else drafters()[drafter]
    ask = Sampler(
        (target(), model),
        max_new_tokens=NEW_TOKENS,
        num_samples=ROWS,
        stop_ids=(),
        drafting=Drafting(**drafting),
    )
    table = automaton(language_tokens(), "regex", LANGUAGE)
    weights = target().params, None if model is None else model.params
    done = ask(*weights, [PROMPT], Sampling(**FILTERS[filters]), seeds=4, grammar=table)
    tokens = np.asarray(done.tokens)
    steps = np.arange(NEW_TOKENS) < np.asarray(done.num_steps)[:, None]
    accepted = (np.asarray(done.acceptance_lengths) - 1)[steps].mean()
    assert (accepted > 0.03) == (drafter is not None)
    assert min(p_values(tokens, filters, in_language=True)) > FALSE_ALARM
    assert min(p_values(tokens, filters)) < FALSE_ALARM / 1000


TREE: dict[str, Any] = dict(tree=Tree(3, DRAFTS), num_draft_tokens=8)


@pytest.mark.parametrize(
    ("drafter", "filters"),
    [
        ("likely", next(iter(FILTERS))),
        *(pytest.param("likely", filters, marks=pytest.mark.slow) for filters in list(FILTERS)[1:]),
        *(
            pytest.param(drafter, filters, marks=pytest.mark.slow)
            for drafter in ("dflash", "mtp")
            for filters in FILTERS
        ),
    ],
)
def test_sampling_with_trees_follows_the_target(drafter, filters):
    """Several branches fit a token, and deep ones are reached: wide trees accept more than chains."""
    tokens, accepted = sampled(drafter, filters, **TREE)
    assert in_chains(drafter, filters)[1] < accepted < 0.95
    assert min(p_values(tokens, filters)) > FALSE_ALARM


@pytest.mark.parametrize("filters", FILTERS)
def test_plain_sampling_follows_the_target(filters):
    tokens, _ = sampled(None, filters, seed=2)
    assert min(p_values(tokens, filters)) > FALSE_ALARM


@pytest.mark.slow  # two programs of thousands of rows
@pytest.mark.parametrize("noise", ["new", "used"])
def test_a_rollout_that_goes_on_follows_the_target(noise):
    """Also where a step was cut, whose last drafts are drawn again. With used noise it would not, which is found."""
    ask = Sampler(target(), drafters()["likely"], max_new_tokens=3)
    weights = target().params, drafters()["likely"].params
    asked = (Sampling(temperature=1.0), 1)
    prompts = Prompts.padded([PROMPT] * ROWS)
    begun = ask(*weights, prompts, *asked, max_new_tokens=2)
    assert int(begun.acceptance_lengths.max()) > 1  # past the limit
    on = prompts.after(begun)
    if noise == "used":
        assert on.past is not None
        on = dataclasses.replace(on, past=on.past.replace(steps=jnp.zeros_like(on.past.steps)))
    rest = ask(*weights, on, *asked)
    tokens = np.concatenate([begun.tokens[:, :2], rest.tokens], axis=1)
    p = min(p_values(tokens, "temperature 1"))
    assert p > FALSE_ALARM if noise == "new" else p < FALSE_ALARM / 1000


def residual_of_all(logits, draft, sampling, keys, steps, log_q, limit) -> AcceptResult:
    """Draw from p after a rejection, rejected token included."""
    result = RIGHT(logits, draft, sampling, keys, steps)
    row = jnp.take_along_axis(
        shape_logits(logits, sampling), result.accepted[:, None, None], axis=1
    )
    token_keys = fold_keys(keys, steps, result.accepted[:, None], Stream.TOKEN)
    return dataclasses.replace(result, bonus=sample(row[:, 0], token_keys[:, 0]))


def accept_all(logits, draft, sampling, keys, steps, log_q, limit) -> AcceptResult:
    shaped = shape_logits(logits, sampling)[:, -1]
    count = jnp.full(draft.shape[0], draft.shape[1], jnp.int32)
    token_keys = fold_keys(keys, steps, count[:, None], Stream.TOKEN)
    return AcceptResult(count, sample(shaped, token_keys[:, 0]))


def same_draws_every_step(logits, draft, sampling, keys, steps, log_q, limit) -> AcceptResult:
    return RIGHT(logits, draft, sampling, keys, jnp.zeros_like(steps))


def first_branch_for_all(logits, draft, parents, sampling, keys, steps, *, depth) -> AcceptResult:
    """Take each node's draw from the distribution of the row before it."""
    shifted = jnp.concatenate([logits[:, :1], logits[:, 1:2], logits[:, 1:-1]], axis=1)
    return RIGHT_TREE(shifted, draft, parents, sampling, keys, steps, depth=depth)


def forget_the_right_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    known = cases.PROGRAMS.compiled
    others = {key: f for key, f in known.items() if key[0] is not decode_loop}
    monkeypatch.setattr(cases.PROGRAMS, "compiled", others)


RIGHT, RIGHT_TREE = verify.rejection_verify, verify.tree_verify


@pytest.mark.parametrize("wrong", [residual_of_all, same_draws_every_step, *cases.slow(accept_all)])
def test_wrong_samplers_are_found(wrong, monkeypatch):
    """The negative control: the same counts and the same test must refuse these."""
    monkeypatch.setattr(verify, "rejection_verify", wrong)
    forget_the_right_loop(monkeypatch)
    tokens, _ = sampled("likely", "temperature 1")
    assert min(p_values(tokens, "temperature 1")) < FALSE_ALARM / 1000


def test_a_wrong_tree_sampler_is_found(monkeypatch):
    monkeypatch.setattr(decode, "tree_verify", first_branch_for_all)
    forget_the_right_loop(monkeypatch)
    tokens, _ = sampled("likely", "temperature 1", **TREE)
    assert min(p_values(tokens, "temperature 1")) < FALSE_ALARM / 1000
