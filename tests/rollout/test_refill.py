"""More rows than slots: each says what it says where all rows have a slot, whenever its turn comes."""

from __future__ import annotations

import collections
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, PartitionSpec

import jaxspec
from jaxspec.models.gemma4 import Gemma4
from jaxspec.options import Drafting, FieldError, ProgramFeatures, Sampling, Tree
from jaxspec.rollout.batch import FinishReason, GenerateResult, Prompts
from jaxspec.rollout.rollout import RolloutPlan
from jaxspec.rollout.sampler import Sampler
from jaxspec.runtime.runtime import make_spec
from jaxspec.weights.loading import LoadedModel
from jaxspec.weights.model_def import ModelDef
from tests import fakes, tiny

PROMPTS, SAMPLES, SLOTS, NEW_TOKENS = 8, 2, 3, 12
ROWS, STOPS = PROMPTS * SAMPLES, 20
EXTRAS = ProgramFeatures(logprobs=True, penalties=True)
BAD = 7
"""A token of the first prompt alone."""


@functools.cache
def prompts() -> list[list[int]]:
    rng = np.random.default_rng(1)
    lengths = (4, 1, 16, 9, 2, 12, 7, 5)  # the window is 8
    found = [[20 + i, *rng.integers(40, 160, n - 1).tolist()] for i, n in enumerate(lengths)]
    found[0][2] = BAD
    return found


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    """A sliding layer and a full one, and a table of inputs that the head does not share."""
    config = tiny.config("e2b")
    config = dataclasses.replace(config, layer_types=("sliding", "full"), num_kv_shared_layers=0)
    model_def = ModelDef(Gemma4, config, "float32")
    return fakes.loaded(model_def, tiny.random_params(model_def, 0))


@pytest.fixture(scope="module")
def drafter(target: LoadedModel) -> LoadedModel:
    """It knows by a row's first token how the row goes on, and is wrong here and there."""
    known, rng = fakes.naive_greedy(target, prompts(), NEW_TOKENS + 4).sequences, np.random
    wrong = rng.default_rng(0).random((PROMPTS, 40)) < 0.2
    return fakes.lookup(
        target,
        [
            s[:1] + [t + int(w) for t, w in zip(s[1:], row, strict=False)]
            for s, row in zip(known, wrong, strict=True)
        ],
        block_size=4,
    )


@pytest.fixture(scope="module")
def ask(target: LoadedModel, drafter: LoadedModel) -> Any:
    """Call the sampler with a slot for each row, or with few; something of its arguments is changed."""

    def sampler(batch_size: int | None) -> Sampler:
        return Sampler(
            target,
            drafter,
            max_new_tokens=NEW_TOKENS,
            num_samples=SAMPLES,
            batch_size=batch_size,
            program_features=EXTRAS,
        )

    samplers = {few: sampler(SLOTS if few else None) for few in (False, True)}

    def call(*, few: bool = True, **changes: Any) -> GenerateResult:
        some: dict[str, Any] = dict(
            target_params=target.params,
            drafter_params=drafter.params,
            prompts=prompts(),
            sampling=samplers[few].sampling(ROWS, temperature=[0.0, 1.0] * PROMPTS),
            seeds=np.arange(ROWS) + 5,
            max_new_tokens=np.arange(ROWS) % NEW_TOKENS + 1,
            stop_ids=np.full((ROWS, STOPS), -1),
        )
        return samplers[few](**(some | changes))

    return call


def same(got: Any, expected: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def equal(got: GenerateResult, expected: GenerateResult) -> None:
    """Compare results of other batch sizes: other programs, which round log-probabilities otherwise."""
    same(dataclasses.replace(got, logprobs=None), dataclasses.replace(expected, logprobs=None))
    if expected.logprobs is not None:
        near = functools.partial(np.testing.assert_allclose, atol=1e-4)
        jax.tree.map(near, got.logprobs, expected.logprobs)


@settings(max_examples=6, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 2**31), stops=st.booleans())
def test_rows_say_what_they_say_alone(
    ask: Any, target: LoadedModel, seed: int, stops: bool
) -> None:
    """Of any lengths, limits, stops and temperatures: tokens, steps and log-probabilities are those of one batch."""
    rng = np.random.default_rng(seed)
    some = [p[: rng.integers(1, len(p) + 1)] for p in prompts()[: rng.integers(5, PROMPTS + 1)]]
    rows = len(some) * SAMPLES  # fewer prompts are padded, to share a program
    values = make_spec(target, None, program_features=EXTRAS).sampling(
        rows,
        temperature=rng.choice([0.0, 0.7, 1.3], rows),
        top_k=rng.choice([0, 20], rows),
        frequency_penalty=rng.choice([0.0, 0.4], rows),
    )
    changes: dict[str, Any] = dict(
        prompts=some,
        sampling=values,
        seeds=rng.integers(0, 2**32, rows, dtype=np.uint32),
        max_new_tokens=rng.integers(1, NEW_TOKENS + 1, rows),
        stop_ids=rng.integers(0, 160, (rows, STOPS)) if stops else np.full((rows, STOPS), -1),
    )
    equal(ask(**changes), ask(few=False, **changes))


def test_a_row_does_not_depend_on_when_it_came(ask: Any) -> None:
    """The last rows come first: the same numbers, bit for bit, log-probabilities too."""
    expected = ask(sampling=Sampling(temperature=0.7))
    assert expected.acceptance_lengths.max() > 2  # the drafter's state goes with its row
    order = np.arange(ROWS).reshape(PROMPTS, SAMPLES)[::-1].ravel()
    moved = ask(
        prompts=prompts()[::-1],
        seeds=order + 5,
        max_new_tokens=order % NEW_TOKENS + 1,
        sampling=Sampling(temperature=0.7),
    )
    same(moved, jax.tree.map(lambda x: x[order], expected))


def test_a_failed_row_leaves_nothing_in_its_slot(ask: Any, target: LoadedModel) -> None:
    """The first two rows fail at their prompt, and some row later on; others have their slots after them."""
    sound = ask(sampling=None)
    last = sound.tokens[-1].tolist()
    token = next(t for t in last if (np.asarray(sound.tokens) == t).any(axis=1).sum() <= SAMPLES)
    table = target.params["per_layer.table"].at[jnp.asarray([BAD, token])].set(np.nan)
    bad = target.params | {"per_layer.table": table}
    result = ask(sampling=None, target_params=bad)
    equal(result, ask(few=False, sampling=None, target_params=bad))
    failed = np.asarray(result.finish_reasons) == FinishReason.ERROR
    assert failed[:SAMPLES].all()
    assert result.lengths[:SAMPLES].tolist() == [0] * SAMPLES
    assert 0 < failed[SAMPLES:].sum() < ROWS - 2 * SAMPLES
    same(*(jax.tree.map(lambda x: x[~failed], r) for r in (result, sound)))


def test_fewer_rows_than_slots_are_one_batch(ask: Any, target: LoadedModel) -> None:
    """And what has all rows at a time is refused where they take turns."""
    sampler = Sampler(target, None, max_new_tokens=4, batch_size=4)
    assert not sampler.plan.is_refilled(Prompts.padded(prompts()[:4]))
    with pytest.raises(
        FieldError, match=r"batch_size is 4, and the call has 8 rows: a stream, or st"
    ) as caught:
        sampler(target.params, None, prompts(), stop_at=lambda tokens: None)
    assert caught.value.field == "batch_size"
    with pytest.raises(FieldError, match="batch_size is 0; it must be 1 or more"):
        Sampler(target, None, batch_size=0)


def test_memory_is_asked_for_slots_and_not_for_rows(
    target: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxspec.weights.memory.bytes_limit", lambda mesh: 1 << 20)
    few = Sampler(target, None, max_new_tokens=4, num_samples=1000, batch_size=2000)
    with pytest.raises(ValueError, match=r"2000 rows .* GiB a device"):
        few(target.params, None, prompts())


def test_an_eighth_of_the_slots_is_refilled_at_a_time(target: LoadedModel) -> None:
    """In groups whose rows round alike on a CPU, and equal ones for each part of a mesh."""
    spec = make_spec(target, None)

    def slots(batch_size: int, parts: int) -> tuple[int, int]:
        return RolloutPlan(spec, 4, 1, batch_size).slots(parts)

    assert [slots(n, 1) for n in (1, 7, 8, 64, 100, 200)] == [
        (1, 1), (7, 1), (8, 1), (64, 8), (100, 12), (200, 24)
    ]  # fmt: skip
    assert [slots(n, 4) for n in (1, 64, 66)] == [(4, 4), (64, 8), (68, 8)]


def test_under_shard_map_it_has_types_that_fit(target: LoadedModel) -> None:
    """A loop's state has to vary by device from its start."""
    sampler = Sampler(target, None, max_new_tokens=4, batch_size=3, program_features=EXTRAS)

    def run(params: Any, prompts: Prompts, seeds: Any) -> GenerateResult:
        return sampler(params, None, prompts, Sampling(temperature=1.0), seeds)

    whole, rows = PartitionSpec(), PartitionSpec("data")
    mesh = jax.make_mesh((1, 1), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    mapped = jax.shard_map(run, mesh=mesh, in_specs=(whole, rows, rows), out_specs=rows)
    found = jax.eval_shape(mapped, target.params, Prompts.padded(prompts()), jnp.arange(PROMPTS))
    assert found.tokens.shape == (PROMPTS, 4)


# --- what takes longer -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("samples", [1, 3])
def test_slots_are_refilled_as_soon_as_a_group_is_free(target: LoadedModel, samples: int) -> None:
    """Every prompt is read once, rows are admitted in groups, and no slot waits longer than for its group."""
    from scripts.measure_rollouts import passes_of_turns

    slots, rng = 16, np.random.default_rng(0)
    some = [[2] * 9 for _ in range(24)]
    limits = rng.integers(1, NEW_TOKENS + 1, len(some) * samples)
    seen: list[tuple[int, ...]] = []

    def count(logits: Any, positions: Any) -> Any:
        jax.debug.callback(lambda _, shape=logits.shape[:2]: seen.append(shape), positions)
        return logits

    drafter = fakes.table(target, [[1, 2]] * tiny.VOCAB_SIZE)
    sampler = Sampler(
        target,
        drafter,
        max_new_tokens=NEW_TOKENS,
        num_samples=samples,
        batch_size=slots,
        program_features=ProgramFeatures(logits_fn=count),
    )
    result = sampler(target.params, drafter.params, some, max_new_tokens=limits)
    jax.effects_barrier()
    assert result.lengths.tolist() == limits.tolist()
    kinds = collections.Counter(seen)
    steps, group = result.num_steps.tolist(), 2
    expected = passes_of_turns(slots, group, samples, steps)
    assert kinds[(slots, 3)] == expected["steps"]
    assert kinds[(group, 1)] == expected["read"] + expected["first tokens"]
    assert expected["read"] == len(some) / group
    # The same rows in batches of as many slots wait for the longest of each.
    waiting = sum(max(steps[i : i + slots]) for i in range(0, len(steps), slots))
    assert expected["steps"] < 0.85 * waiting


FORMS = {
    "plain": (None, Drafting()),
    "dflash": ("dflash", Drafting()),
    "drawn": ("dflash", Drafting(draft_sampling=True, verification="block")),
    "mtp": ("mtp", Drafting(3)),
    "tree": ("dflash", Drafting(5, tree=Tree(3, 3))),
}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_decoding_takes_turns(target: LoadedModel, form: str) -> None:
    """Outside and inside of jit. A rollout that goes on does so from each row's own past."""
    kind, drafting = FORMS[form]
    made = {"dflash": functools.partial(fakes.dflash, block_size=4), "mtp": fakes.mtp}
    drafter = None if kind is None else made[kind](target)
    weights: Any = (target.params, None if drafter is None else drafter.params)
    few, whole = (
        Sampler(
            target,
            drafter,
            max_new_tokens=7,
            batch_size=n,
            drafting=drafting,
            program_features=EXTRAS,
        )
        for n in (SLOTS, None)
    )
    temperatures = [0.0, 1.0] * (PROMPTS // 2)
    how = few.sampling(PROMPTS, temperature=temperatures, presence_penalty=0.2), np.arange(PROMPTS)
    begun = few(*weights, prompts(), *how)
    stops = [[int(begun.tokens[row, 3])] for row in range(PROMPTS)]
    given = Prompts.padded(prompts())
    ended = few(*weights, given, *how, stop_ids=stops)
    equal(ended, whole(*weights, given, *how, stop_ids=stops))
    assert (ended.finish_reasons == FinishReason.STOP).all()
    jitted = jax.jit(lambda *weights: few(*weights, given, *how, stop_ids=stops))
    equal(jitted(*weights), ended)  # prompts that are constants are folded, and round otherwise
    mixed = jax.tree.map(
        lambda a, b: jnp.where(jnp.arange(PROMPTS).reshape(-1, *(1,) * (a.ndim - 1)) % 3 > 0, a, b),
        begun,
        ended,
    )  # some rows are over, and the others go on
    longer = given.after(mixed)
    more = few(*weights, longer, *how)
    equal(more, whole(*weights, longer, *how))
    assert sorted(set(more.lengths.tolist())) == [0, 7]


@pytest.mark.slow
def test_the_bundled_pair_takes_turns() -> None:
    """Real drafts: acceptance differs from row to row, and is the same in turns."""
    pair = jaxspec.load()
    texts = [
        "import os",
        "class Queue:\n",
        "def add(a, b):\n",
        "for i in range(",
        "try:\n",
        "x = 1",
    ]
    ids = [pair.encode(text) for text in texts]
    assert pair.drafter is not None
    weights = pair.target.params, pair.drafter.params
    found = [
        Sampler(pair, max_new_tokens=24, num_samples=4, batch_size=n)(
            *weights, ids, Sampling(temperature=0.8), 7, max_new_tokens=np.arange(24) + 1
        )
        for n in (8, None)
    ]
    equal(*found)
    assert found[0].acceptance_length() > 1.3
