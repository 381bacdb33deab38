"""Steps that choose how many drafts they verify, by how sure the drafter is.

Exactness is shown by enumeration: of a small vocabulary, all drafts that a selector can draw are tried
with their probabilities, and the emitted tokens must have the target's distribution to rounding. The
same sum shows that a choice by the probability of the drawn token would be wrong.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspec import decode_loop
from jaxspec.configs.dflash2 import DFlash2Config
from jaxspec.configs.dspark import DSparkConfig
from jaxspec.drafters import survival
from jaxspec.drafters.chain import over_vocabulary
from jaxspec.drafters.dflash2 import CandidateSelector
from jaxspec.drafters.dspark import MarkovSelector
from jaxspec.drafters.selector import Block, Independent, Selector
from jaxspec.drafters.survival import SurvivalState, bins_of, calibrated, choose_width
from jaxspec.engine import engine as engines
from jaxspec.engine.draft_length import DraftLengthController
from jaxspec.engine.draft_length_policy import Choice, Prospects
from jaxspec.models import packing
from jaxspec.options import Drafting, FieldError
from jaxspec.shapes import Array
from jaxspec.weights.model_def import ModelDef
from tests import cases, tiny
from tests.cases import NEW_TOKENS, case, request, run
from tests.decode import test_distribution as distribution

VOCAB, DRAFTS, WIDTHS = 3, 3, (1, 2, 3)
TEMPERATURES = (0.7, 1.5)  # of drafts: no token is nearly certain
SEQUENCES = np.asarray(list(itertools.product(range(VOCAB), repeat=DRAFTS)), np.int32)

# --- exactness -----------------------------------------------------------------------------------


def target_probs(rng: np.random.Generator) -> dict[tuple[int, ...], np.ndarray]:
    """Return the target's distribution after every prefix."""
    prefixes = [p for n in range(DRAFTS + 1) for p in itertools.product(range(VOCAB), repeat=n)]
    return {p: rng.dirichlet(np.ones(VOCAB)) for p in prefixes}


def step_joint(
    x: np.ndarray, q: np.ndarray, width: int, p: dict[tuple[int, ...], np.ndarray], rule: str
) -> np.ndarray:
    """Return the joint distribution of DRAFTS + 1 tokens where a step verifies `width` drafts `x`.

    Written from the rules of Leviathan et al. 2023 and Sun et al. 2024. What the step does not emit
    follows from the target.

    Args:
      q: the distribution that each draft was drawn from.
    """
    joint = np.zeros((VOCAB,) * (DRAFTS + 1))
    weights = [1.0]
    for i in range(width):
        ratio = p[tuple(x[:i])][x[i]] / q[i][x[i]]
        weights.append(min(1.0, weights[-1] * ratio) if rule == "block" else min(1.0, ratio))
    if rule == "block":
        passes = []
        for i in range(1, width + 1):
            w = weights[i]
            if i == width:
                passes.append(w)
                continue
            mass = np.maximum(w * p[tuple(x[:i])] - q[i], 0).sum()
            passes.append(mass / (mass + 1 - w) if mass + 1 - w > 0 else 1.0)
        ends, left = [0.0] * (width + 1), 1.0
        for i in range(width, 0, -1):  # the longest prefix that passes
            ends[i] = left * passes[i - 1]
            left -= ends[i]
        ends[0] = left
    else:
        ends, left = [], 1.0
        for i in range(width):
            ends.append(left * (1 - weights[i + 1]))
            left *= weights[i + 1]
        ends.append(left)
    for accepted, chance in enumerate(ends):
        prefix = tuple(int(t) for t in x[:accepted])
        scale = weights[accepted] if rule == "block" else 1.0
        bonus = p[prefix]
        if accepted < width:
            residual = np.maximum(scale * bonus - q[accepted], 0)
            bonus = residual / residual.sum() if residual.sum() > 0 else bonus
        add_rest(joint, prefix, bonus, chance, p)
    return joint


def add_rest(joint: np.ndarray, prefix: tuple[int, ...], bonus: Any, chance: float, p: Any) -> None:
    for token in range(VOCAB):
        more = (*prefix, token)
        if len(more) == DRAFTS + 1:
            joint[more] += chance * bonus[token]
        else:
            add_rest(joint, more, p[more], chance * bonus[token], p)


def exact_joint(p: dict[tuple[int, ...], np.ndarray]) -> np.ndarray:
    joint = np.zeros((VOCAB,) * (DRAFTS + 1))
    add_rest(joint, (), p[()], 1.0, p)
    return joint


def selector_of(name: str) -> Selector:
    """Return a selector with random weights whose confidences are far apart."""
    if name == "independent":
        return Independent()
    backbone: dict[str, Any] = dict(
        vocab_size=VOCAB,
        hidden_size=4,
        layer_types=("full",),
        causal=(False,),
        num_heads=1,
        num_kv_heads=1,
        head_dim=4,
        intermediate_size=4,
        block_size=DRAFTS + 1,
        mask_token_id=0,
        feature_layers=(0,),
        num_target_layers=2,
        max_positions=64,
    )
    rng = np.random.default_rng(3)

    def made() -> Selector:
        if name == "candidates":  # two of three tokens may be drawn
            sizes: dict[str, Any] = dict(
                conv_group_size=2, selector_rank=3, selector_top_k=VOCAB - 1
            )
            config = DFlash2Config(**backbone, **sizes)
            return CandidateSelector(config, dtype=jnp.dtype("float32"))
        heads: dict[str, Any] = dict(markov_rank=3, confidence=True, confidence_with_markov=True)
        config = DSparkConfig(**backbone, **heads, markov_head_type=name)
        return MarkovSelector(config, dtype=jnp.dtype("float32"))

    graph, state = nnx.split(nnx.eval_shape(made))
    values = jax.tree.map(
        lambda x: jax.device_put(rng.normal(size=x.shape).astype(np.float32)), state
    )
    return nnx.merge(graph, values)


def compiled(run: Callable[[Block], Array], block: Block) -> np.ndarray:
    """Run something of a block in one program."""
    arrays = block.anchors, block.hidden, block.logits
    return np.asarray(jax.jit(lambda *arrays: run(Block(*arrays, None, VOCAB)))(*arrays))


def confidences_of(selector: Selector, block: Block) -> np.ndarray:
    return compiled(lambda block: selector.confidences(block, jnp.asarray(SEQUENCES)), block)


def drafts_of(
    selector: Selector, rng: np.random.Generator, temperature: float = 1.5
) -> tuple[Block, np.ndarray, np.ndarray]:
    """Return a block whose rows are all the same, one for each sequence; q of each; the chance of each."""
    rows = len(SEQUENCES)
    hidden, logits = (
        np.repeat(rng.normal(size=(1, DRAFTS, size)), rows, axis=0).astype(np.float32)
        for size in (4, VOCAB)
    )
    arrays = jax.device_put((np.ones(rows, np.int32), hidden, logits))

    def log_probs(block: Block) -> Array:
        carry, before, log_q = selector.begin(block), block.anchors, []
        for slot in range(DRAFTS):
            origins = jnp.zeros((rows, 1), jnp.int32)
            carry, choices = selector.step(block, slot, carry, before[:, None], origins)
            of_slot = jax.nn.log_softmax(choices.logits / temperature)
            log_q.append(over_vocabulary(choices, of_slot, VOCAB)[:, 0])
            before = jnp.asarray(SEQUENCES[:, slot])
        return jnp.stack(log_q, axis=1)

    block = Block(*arrays, None, VOCAB)
    q = np.exp(compiled(log_probs, block).astype(np.float64))
    q /= q.sum(axis=-1, keepdims=True)
    drawn = np.take_along_axis(q, SEQUENCES[:, :, None], axis=-1)[:, :, 0]
    return block, q, drawn


COSTS = ((1.0, 1.15, 1.3), (1.0, 1.25, 1.45), (1.0, 1.35, 1.6), (1.0, 1.5, 1.55), (1.0, 1.6, 1.65))
"""Machines on which one choice or the other is close."""


def widths_of(
    confidence: np.ndarray, costs: tuple[float, ...], *, drawn: bool = True, rows: int = 1
) -> np.ndarray:
    """Return the width that every combination of sequences of some rows chooses, with counts of the past."""
    seconds, every = np.asarray(costs, np.float32), every_combination(confidence, rows)
    index = np.asarray(width_indices(past_of(rows), every, seconds, drawn))
    return np.asarray(WIDTHS)[index].reshape((len(confidence),) * rows)


@functools.partial(jax.jit, static_argnums=3)
def width_indices(past: SurvivalState, every: Array, seconds: Array, drawn: bool) -> Array:
    active = jnp.ones(every.shape[1], bool)

    def one(confidence: Array) -> Array:
        chances, means = calibrated(past, confidence)
        return choose_width(chances, means, active, seconds, WIDTHS, drawn=drawn)

    return jax.vmap(one)(every)


@functools.cache
def past_of(rows: int) -> SurvivalState:
    """Return counts of the past: the surer a draft was, the more often it was accepted."""
    rng = np.random.default_rng(7)
    trials = rng.integers(0, 30, (rows, DRAFTS, survival.BINS)).astype(np.float32)
    hits = trials * np.linspace(0.4, 1.0, survival.BINS, dtype=np.float32)
    trials, hits = jax.device_put((trials, hits))
    return SurvivalState.empty(rows, DRAFTS, 1).replace(trials=trials, hits=hits)


def every_combination(confidence: np.ndarray, rows: int) -> np.ndarray:
    """Return the confidences [N, rows, DRAFTS] of all sequences that some rows may draw together."""
    every = itertools.product(range(len(confidence)), repeat=rows)
    return confidence[np.asarray(list(every))].astype(np.float32)


def limits_of(
    confidence: np.ndarray, unit: int, spare: int, *, drawn: bool = True, rows: int = 2
) -> np.ndarray:
    """Return the drafts that the first row verifies, for every combination of sequences of some rows."""
    every = every_combination(confidence, rows)
    limits = np.asarray(first_limits(past_of(rows), every, np.int32(spare), unit, drawn))
    return limits.reshape((len(confidence),) * rows)


@functools.partial(jax.jit, static_argnums=(3, 4))
def first_limits(past: SurvivalState, every: Array, spare: Array, unit: int, drawn: bool) -> Array:
    active = jnp.ones(every.shape[1], bool)

    def one(confidence: Array) -> Array:
        chances, means = calibrated(past, confidence)
        _, values = survival.unit_values(chances, means, unit, drawn=drawn)
        rank = survival.ranks(values, active)
        return survival.limits(rank, active, spare, unit, DRAFTS)[0]

    return jax.vmap(one)(every)


def sum_over_drafts(
    widths: np.ndarray, q: np.ndarray, chance: np.ndarray, p: Any, rule: str
) -> Any:
    return sum(
        c * step_joint(x, q_of_x, int(width), p, rule)
        for x, q_of_x, width, c in zip(SEQUENCES, q, widths, chance, strict=True)
        if c > 0  # of candidates, not all sequences can be drawn
    )


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("rule", ["standard", "block"])
@pytest.mark.parametrize("name", ["vanilla", "gated", "rnn", "candidates", "independent"])
def test_a_chosen_width_keeps_the_distribution(name: str, rule: str, temperature: float) -> None:
    rng = np.random.default_rng(1)
    selector, p = selector_of(name), target_probs(rng)
    block, q, drawn = drafts_of(selector, rng, temperature)
    chance = drawn.prod(axis=1)
    if name == "candidates":
        assert (q == 0).any()
    assert chance.sum() == pytest.approx(1)
    confidence = confidences_of(selector, block)
    used, off = set(), []
    for costs in COSTS:
        widths = widths_of(confidence, costs)
        used |= set(widths.tolist())
        joint = sum_over_drafts(widths, q, chance, p, rule)
        np.testing.assert_allclose(joint, exact_joint(p), atol=1e-9)
        # The same sum finds a choice by the probability of what was drawn.
        wrong = sum_over_drafts(widths_of(drawn, costs), q, chance, p, rule)
        off.append(np.abs(wrong - exact_joint(p)).sum())
    if name not in ("independent", "candidates"):  # of those the confidences are the backbone's
        assert len(used) > 1
    assert max(off) > 0.005


def test_a_choice_that_looks_ahead_does_not() -> None:
    """The best width by all confidences at once, where those of later drafts depend on the drawn one.

    It is right for drafts that are no random choice, which `drawn=False` says.
    """
    rng = np.random.default_rng(1)
    selector, p = selector_of("vanilla"), target_probs(rng)
    block, q, drawn = drafts_of(selector, rng)
    confidence = confidences_of(selector, block)
    off = []
    for costs in COSTS:
        widths = widths_of(confidence, costs, drawn=False)
        joint = sum_over_drafts(widths, q, drawn.prod(axis=1), p, "standard")
        off.append(np.abs(joint - exact_joint(p)).sum())
    assert max(off) > 1e-4  # rounding is 1e-16


def test_rows_that_share_a_width_do_not_disturb_each_other() -> None:
    """Two rows; the width of a step depends on both, and each keeps its distribution."""
    rng = np.random.default_rng(5)
    selector, p = selector_of("vanilla"), target_probs(rng)
    block, q, drawn = drafts_of(selector, rng)
    confidence = confidences_of(selector, block)
    chance, depends = drawn.prod(axis=1), False
    for costs in COSTS:
        widths = widths_of(confidence, costs, rows=2)
        depends |= any(len({*row.tolist()}) > 1 for row in widths)
        joints = {
            tuple(column): sum_over_drafts(np.asarray(column), q, chance, p, "standard")
            for column in {*map(tuple, widths.T.tolist())}
        }
        joint = sum(
            c * joints[tuple(column)] for c, column in zip(chance, widths.T.tolist(), strict=True)
        )
        np.testing.assert_allclose(joint, exact_joint(p), atol=1e-9)
    assert depends


@pytest.mark.parametrize("name", ["vanilla", "candidates"])
@pytest.mark.parametrize("rule", ["standard", "block"])
@pytest.mark.parametrize(("unit", "spare"), [(1, 3), (1, 4), (2, 1)])
def test_rows_that_compete_keep_their_distributions(
    unit: int, spare: int, rule: str, name: str
) -> None:
    """Two rows compete for the slots of a pass; each keeps its distribution, whatever the other draws."""
    rng = np.random.default_rng(5)
    selector, p = selector_of(name), target_probs(rng)
    block, q, drawn = drafts_of(selector, rng)
    confidence = confidences_of(selector, block)
    chance = drawn.prod(axis=1)

    def largest_error(limits: np.ndarray) -> float:
        columns = {*map(tuple, limits.T.tolist())}  # of one sequence of the other row
        joints = (sum_over_drafts(np.asarray(c), q, chance, p, rule) for c in columns)
        return max(np.abs(joint - exact_joint(p)).sum() for joint in joints)

    limits = limits_of(confidence, unit, spare)
    if name == "vanilla":
        assert len({*limits.ravel().tolist()}) > 1
        assert any(len({*row.tolist()}) > 1 for row in limits)  # it depends on the other row
    assert largest_error(limits) < 1e-8
    # Neither the probability of what was drawn may be used, nor later confidences in a unit.
    assert largest_error(limits_of(drawn, unit, spare)) > 0.005
    if unit > 1 and name == "vanilla":  # other confidences depend on no draft
        assert largest_error(limits_of(confidence, unit, spare, drawn=False)) > 1e-4


# --- the choice ----------------------------------------------------------------------------------


def test_the_width_with_most_tokens_a_second_is_chosen() -> None:
    """Of drafts that are certain choices, against trying all widths."""
    rng, widths, found = np.random.default_rng(0), (1, 3, 7), set()
    choose = jax.jit(functools.partial(choose_width, widths=widths, drawn=False))
    for _ in range(50):
        chances = rng.uniform(0.2, 1, (4, 7)) ** rng.uniform(0.1, 3)
        active, costs = rng.random(4) < 0.7, np.cumsum(rng.uniform(0.1, 1, 3)) + 1
        made, means, seconds = (
            np.asarray(x, np.float32) for x in (chances, np.full(7, 0.5), costs)
        )
        index = choose(made, means, active, seconds)
        tokens = [(1 + np.cumprod(chances[:, :w], 1).sum(1))[active].sum() for w in widths]
        if active.any():
            found.add(int(index))
            assert int(index) == int(np.argmax(np.asarray(tokens) / costs))
    assert found == {0, 1, 2}


def test_confidences_are_calibrated_by_what_became_of_drafts() -> None:
    """Against loops; and rates that differ by position and bin are learned."""
    rng, rows, steps = np.random.default_rng(0), 8, 400
    state = SurvivalState.empty(rows, DRAFTS, 4)
    trials, hits = (np.zeros((rows, DRAFTS, survival.BINS)) for _ in range(2))
    add = jax.jit(SurvivalState.counting, static_argnums=4)
    calibrate, find_bins = jax.jit(calibrated), jax.jit(bins_of)
    rate = np.asarray([[0.9, 0.3], [0.6, 0.2], [0.5, 0.1]])  # sure and unsure, by position
    for _ in range(steps):
        sure = rng.random((rows, DRAFTS)) < 0.5
        confidence = np.where(sure, 0.8, 0.4).astype(np.float32)
        chance = np.where(sure, rate[:, 0], rate[:, 1])
        accepted = np.cumprod(rng.random((rows, DRAFTS)) < chance, axis=1).sum(1)
        width, active = int(rng.integers(1, DRAFTS + 1)), rng.random(rows) < 0.8
        accepted = np.minimum(accepted, width).astype(np.int32)
        state = add(state, confidence, accepted, active, width)
        bins = np.asarray(find_bins(confidence))
        for row in np.flatnonzero(active):
            trials[row] *= 0.5 ** (1 / survival.HALF_LIFE_STEPS)
            hits[row] *= 0.5 ** (1 / survival.HALF_LIFE_STEPS)
            for i in range(min(width, accepted[row] + 1)):
                trials[row, i, bins[row, i]] += 1
                hits[row, i, bins[row, i]] += accepted[row] > i
    np.testing.assert_allclose(state.trials, trials, rtol=1e-4)
    np.testing.assert_allclose(state.hits, hits, rtol=1e-4)
    for column, value in enumerate((0.8, 0.4)):
        chances, _ = calibrate(state, np.full((rows, DRAFTS), value, np.float32))
        np.testing.assert_allclose(np.asarray(chances)[0], rate[:, column], atol=0.08)
    empty = SurvivalState.empty(rows, DRAFTS, 4)
    chances, means = calibrate(empty, np.full((rows, DRAFTS), 0.8, np.float32))
    np.testing.assert_allclose(chances, 0.8, rtol=1e-6)
    np.testing.assert_allclose(means, survival.UNKNOWN)


# --- engines -------------------------------------------------------------------------------------


def choosing(monkeypatch: pytest.MonkeyPatch, costs: tuple[float, ...]) -> None:
    """Let every step of every call choose, by these costs."""

    def next(self: DraftLengthController, running: Any, most_steps: int) -> Choice:
        return Choice(most_steps, self.runtime.spec.num_draft_tokens, costs)

    monkeypatch.setattr(DraftLengthController, "next", next)
    monkeypatch.setattr(DraftLengthController, "learn", lambda *args: None)


@pytest.mark.parametrize(
    ("drafter", "cache_tokens"),
    [
        ("mixed", None),
        pytest.param("dflash", None, marks=pytest.mark.slow),
        pytest.param("dflash", 160, marks=pytest.mark.slow),  # rows of several pages
    ],
)
def test_greedy_tokens_are_those_of_plain_decoding(
    drafter: str, cache_tokens: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A made-up drafter without confidences, and one with. No step commits more than it verified."""
    c = case("31b")
    paged = {} if cache_tokens is None else dict(cache_tokens=cache_tokens)
    engine = c.engine(drafter, steps_per_return=3, choose_length="survival", **paged)
    widths = engine.spec.widths
    choosing(monkeypatch, tuple(1 + 0.2 * w for w in range(len(widths))))
    done = run(engine, [request(p, NEW_TOKENS) for p in c.prompts])
    assert [d.token_ids for d in done] == [c.continuation(row) for row in range(len(done))]
    used = set()
    for d in done:
        assert len(d.verify_lengths) == len(d.acceptance_lengths)
        for verified, committed in zip(d.verify_lengths, d.acceptance_lengths, strict=True):
            assert committed <= verified + 1
        used |= set(d.verify_lengths)
    assert used <= {1, 3, 4}  # whole units
    if drafter == "mixed":
        assert len(used) > 1


@pytest.mark.parametrize(
    ("drafter", "options"),
    [
        pytest.param("dspark", dict(draft_sampling=True), marks=pytest.mark.slow),
        pytest.param(
            "dspark", dict(draft_sampling=True, verification="block"), marks=pytest.mark.slow
        ),
        pytest.param("dspark-rnn", {}, marks=pytest.mark.slow),
        pytest.param("mtp", {}, marks=pytest.mark.slow),
    ],
)
def test_sampled_tokens_follow_the_target(
    drafter: str,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    confident_dspark: Callable[[], None],
) -> None:
    """The whole engine, with confidences of the drafts that were drawn; thresholds as in `test_distribution`."""
    del confident_dspark
    monkeypatch.setattr(distribution.prefill, "SHARED_PREFILL", 16 * distribution.SLOTS)
    choosing(monkeypatch, (1.0, 1.04))
    model = distribution.drafters()[drafter]
    slots = 8  # few rows share a width, so the confidences of each count
    drafting = Drafting(**options)
    engine = cases.engine_of(
        distribution.target(),
        model,
        batch_size=slots,
        cache_length=24,
        choose_length="survival",
        drafting=drafting,
    )
    assert engine.spec.widths == (1, 3)
    asked = request(distribution.PROMPT, distribution.NEW_TOKENS, seed=1, temperature=1.0)
    done = run(engine, [asked] * distribution.ROWS)
    assert {v for d in done for v in d.verify_lengths} == {1, 3}
    tokens = np.asarray([d.token_ids for d in done])
    assert min(distribution.p_values(tokens, "temperature 1")) > distribution.FALSE_ALARM


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, dict(verification="block")], ids=["standard", "block"])
def test_sampled_tokens_of_rows_that_compete_follow_the_target(
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    confident_dspark: Callable[[], None],
) -> None:
    """Units of one token, so that rows of a step verify 0 to 3 drawn drafts; a limit has any length."""
    del confident_dspark
    monkeypatch.setattr(distribution.prefill, "SHARED_PREFILL", 16 * distribution.SLOTS)
    monkeypatch.setattr(engines, "ladder", lambda drafts: (0, 1, 2, drafts))
    for module in (packing, decode_loop):
        monkeypatch.setattr(module, "UNIT", 1)
    choosing(monkeypatch, (1.0, 1.01, 1.6))
    engine = cases.engine_of(
        distribution.target(),
        distribution.drafters()["dspark"],
        batch_size=8,
        cache_length=24,
        choose_length="survival",
        drafting=Drafting(draft_sampling=True, **options),
    )
    asked = request(distribution.PROMPT, distribution.NEW_TOKENS, seed=1, temperature=1.0)
    done = run(engine, [asked] * distribution.ROWS)
    assert {v for d in done for v in d.verify_lengths} == {0, 1, 2, 3}
    tokens = np.asarray([d.token_ids for d in done])
    assert min(distribution.p_values(tokens, "temperature 1")) > distribution.FALSE_ALARM


@pytest.fixture
def confident_dspark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the DSpark drafters of `test_distribution` a confidence head that reads the token before."""
    made = dict(distribution.drafters())
    for name in ("dspark", "dspark-rnn"):
        old = made[name]
        fields = {f: getattr(old.config, f) for f in old.config.__dataclass_fields__}
        config = DSparkConfig(**{**fields, "confidence": True, "confidence_with_markov": True})
        model_def = ModelDef(old.model_def.module, config, "float32")
        params = {**tiny.random_params(model_def, 0), **old.params}
        made[name] = distribution.fakes.loaded(model_def, params)
    monkeypatch.setattr(distribution, "drafters", lambda: made)


@pytest.mark.slow
def test_an_engine_chooses_between_both_kinds_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs are measured at warm-up; both kinds are tried, and text is that of plain decoding."""
    promised = Prospects(0.0, 1e9, 1e9)  # so a try costs nothing
    monkeypatch.setattr(Prospects, "of", lambda *args: promised)
    c = case("31b")
    engine = c.engine("mixed", steps_per_return=2, choose_length="survival")
    engine.warm_up()
    compiled = engine.num_compilations
    for _ in range(3):
        done = run(engine, [request(p, NEW_TOKENS) for p in c.prompts])
        assert [d.token_ids for d in done] == [c.continuation(row) for row in range(len(done))]
    assert engine.num_compilations == compiled
    cold = c.engine("mixed", steps_per_return=2, choose_length="survival")
    run(cold, [request(p, NEW_TOKENS) for p in c.prompts])
    for warmed, chooses in ((engine, True), (cold, False)):
        gate = warmed.draft_length.gate
        assert gate is not None
        kinds = {length is None for length, _ in gate._seen}
        assert kinds == {False, True} if chooses else True not in kinds


def test_where_steps_cannot_choose() -> None:
    c = case("31b")
    assert c.engine("mixed", choose_length="survival").spec.widths == (1, 3, 4)
    assert c.engine("mixed", choose_length="always").spec.widths == ()
    assert c.engine("mixed", choose_length="survival", num_draft_tokens=1).spec.widths == ()
    with pytest.raises(FieldError, match='choose_length="survival" lets a row depend'):
        c.engine("mixed", choose_length="survival", invariant=True)
    spec = c.engine("mixed").spec
    for widths in ((0, 4), (1, 3), (3, 1, 4)):
        with pytest.raises(FieldError, match="must ascend from 1 or more to num_draft_tokens=4"):
            dataclasses.replace(spec, widths=widths)
