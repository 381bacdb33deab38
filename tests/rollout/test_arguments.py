"""What a sampler is called with: refused by name, brought into one form, rounded up to a few shapes."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.options import FieldError, Sampling
from jaxspec.rollout.arguments import make_inputs, pad_inputs, prompts_bucket
from jaxspec.rollout.batch import FinishReason, GenerateResult, Prompts, check_ids, width_bucket
from jaxspec.rollout.rollout import RolloutPlan, row_keys
from jaxspec.runtime.runtime import make_spec
from jaxspec.weights.sharding import make_mesh
from tests import tiny

GRAPH, _ = tiny.target("31b")
POSITIONS = 2048
SHORT = dataclasses.replace(
    GRAPH, config=dataclasses.replace(GRAPH.config, max_positions=POSITIONS)
)
PLAN = RolloutPlan(make_spec(SHORT, None), max_new_tokens=8, num_samples=2)


def asked(plan: RolloutPlan = PLAN, **changes: Any) -> Any:
    given: dict[str, Any] = dict(
        prompts=[[2, 3], [4]], sampling=None, seeds=0, max_new_tokens=None, stop_ids=None
    )
    return make_inputs(plan, *(given | changes).values(), default_stop_ids=(1,))


@pytest.mark.parametrize(
    ("changes", "field", "message"),
    [
        (dict(max_new_tokens=0), "max_new_tokens", "got 0; expected whole numbers from 1 to 8"),
        (dict(max_new_tokens=[8, 8, 9, 8]), "max_new_tokens", "got 9; .* 8 is the sampler's"),
        (dict(max_new_tokens=2.5), "max_new_tokens", r"got 2\.5; expected whole"),
        (dict(max_new_tokens=[1, 2]), "max_new_tokens", "expected 4: 2 prompts, 2 of num_samples"),
        (dict(sampling=dict(temprature=1)), "sampling", "did you mean temperature"),
        (dict(seeds=-1), "seeds", "got -1; expected whole numbers from 0 to 4294967295"),
        (dict(seeds=2**32), "seeds", "got 4294967296; expected"),
        (dict(seeds=2**70), "seeds", "got 1180591620717411303424; expected"),
        (dict(seeds=[0, 1, 2, 0.5]), "seeds", r"got 0\.0; expected whole numbers"),
        (dict(seeds=True), "seeds", "got True; expected whole numbers"),
        (dict(seeds=[1, 2]), "seeds", r"shape \(2,\); expected 4"),
        (dict(seeds=np.zeros((4, 2), np.uint32)), "seeds", "jax.random.wrap_key_data"),
        (dict(seeds=jax.random.PRNGKey(0)), "seeds", "jax.random.wrap_key_data"),
        (dict(seeds=jax.random.key(0, impl="rbg")), "seeds", "keys of key<rbg>; expected key<fry>"),
        (dict(seeds=jax.random.split(jax.random.key(0), 3)), "seeds", "expected 4"),
        (dict(stop_ids=[[1.0]] * 4), "stop_ids", r"got 1\.0; expected whole numbers"),
        (dict(stop_ids=[[-2]] * 4), "stop_ids", "got -2; .* -1 is padding"),
        (dict(stop_ids=[[tiny.VOCAB_SIZE]] * 4), "stop_ids", "got 160; expected .* to 159"),
        (dict(stop_ids=[[1]] * 3), "stop_ids", r"shape \(3, 1\); expected 4"),
        (dict(prompts=np.ones((2, 3))), "prompts", "have ids of float64"),
        (dict(prompts=np.ones(3, np.int32)), "prompts", r"shape \(3,\); expected 2 axes"),
        (dict(prompts=np.full((2, 3), 2**33)), "prompts", "8589934592.* outside the vocabulary"),
        (dict(prompts=Prompts(np.ones((2, 3), int), np.ones(3, int))), "prompts", "lengths of"),
        (dict(prompts=Prompts(np.ones((2, 3), int), np.ones(2))), "prompts", "lengths of float64"),
        (
            dict(prompts=[[2] * 2041, [2]]),
            "prompts",
            "2041 tokens in row 0, .* need 2049 positions",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(changes: Any, field: str, message: str) -> None:
    """It was cut to fit, or came to light deep inside a program."""
    with pytest.raises(FieldError, match=message) as caught:
        asked(**changes)
    assert caught.value.field == field


@pytest.mark.parametrize("wrong", [2**31, -(2**40), 2**70])
def test_ids_beyond_32_bits_are_refused(wrong: int) -> None:
    with pytest.raises(ValueError, match=f"prompt 0 has the id {wrong}; expected whole numbers of"):
        check_ids("prompt 0", [2, wrong])


def test_padding_needs_no_positions() -> None:
    """1,100 tokens and 8 new ones fit 2,048 positions: a width of 2,048 was once counted."""
    given = asked(prompts=[[2] * 1100, [3]])
    assert given.prompts.tokens.shape == (2, 1280)
    assert PLAN.cache_length(1280) == 1280 + 8 + 8  # of the step's one token, a multiple of 8
    assert asked(prompts=[[2] * 2040, [3]]).prompts.tokens.shape == (2, 2048)
    assert PLAN.cache_length(2048) == POSITIONS + 8
    # A row's own limit counts, and a length that is traced may be as long as the width.
    asked(prompts=[[2] * 2047, [3]], max_new_tokens=[1, 1, 8, 8])
    wide = Prompts(jnp.ones((2, 2048), int), jnp.asarray([9, 9]))
    asked(prompts=wide)
    with pytest.raises(FieldError, match=r"Lengths that are traced .* cut it to 2040"):
        jax.eval_shape(lambda prompts: asked(prompts=prompts).prompts.tokens, wide)


def test_what_is_traced_is_cast_and_clipped() -> None:
    """Its values cannot be refused."""

    def of(limits: Any, seeds: Any, stops: Any) -> Any:
        given = asked(max_new_tokens=limits, seeds=seeds, stop_ids=stops)
        return given.max_new_tokens, given.seeds, given.stop_ids

    limits, seeds, stops = jax.jit(of)(jnp.asarray([0, 3, 9, 8]), 7, jnp.asarray([[5]] * 4))
    assert limits.tolist() == [1, 3, 8, 8]
    assert (seeds.dtype, stops.tolist()) == (jnp.uint32, [[5]] * 4)
    with pytest.raises(FieldError, match="seeds are float32"):
        jax.eval_shape(lambda seeds: asked(seeds=seeds).seeds, jnp.zeros(4))


def test_seeds_are_numbers_or_keys() -> None:
    """A number and the key of that number are one seed, for all rows or for each."""

    def keys(seeds: Any) -> Any:
        return jax.random.key_data(row_keys(jnp.asarray(asked(seeds=seeds).seeds), 4)).tolist()

    assert keys(7) == keys(jax.random.key(7))
    each = [1, 5, 2**32 - 1, 0]
    assert keys(each) == keys(jax.vmap(jax.random.key)(jnp.asarray(each, jnp.uint32)))
    assert keys(7)[2] == jax.random.key_data(jax.random.fold_in(jax.random.key(7), 2)).tolist()
    assert keys(np.asarray(each, np.int64)) == keys(each)


def test_rows_and_widths_go_to_a_few_buckets() -> None:
    one = make_mesh(devices=jax.devices()[:1])
    counts = [1, 2, 3, 5, 8, 9, 17, 33, 48, 49, 65, 100, 129]
    buckets = [1, 2, 4, 8, 8, 16, 24, 48, 48, 64, 96, 128, 192]
    assert [prompts_bucket(n, 1) for n in counts] == buckets
    assert {prompts_bucket(n, 4) for n in range(5, 9)} == {8}
    assert all(prompts_bucket(n, 4) % 4 == 0 for n in range(1, 200))
    found = [width_bucket(n) for n in (1, 16, 17, 128, 129, 300, 600, 1100, 1500, 5000)]
    assert found == [16, 16, 32, 128, 256, 384, 640, 1280, 1536, 5120]
    given = pad_inputs(PLAN, asked(prompts=np.full((5, 20), 9), sampling=Sampling(top_k=3)), one)
    assert given.prompts.tokens.shape == (8, 32)
    assert given.sampling.top_k.tolist() == [3] * 16
    assert given.max_new_tokens.tolist() == [8] * 10 + [1] * 6
    assert given.seeds.shape == ()


# --- rows that go on -----------------------------------------------------------------------------------


def result(tokens: Any, lengths: Any, reasons: Any, steps: Any) -> GenerateResult:
    arrays = map(jnp.asarray, (tokens, lengths, reasons))
    return GenerateResult(*arrays, None, jnp.asarray(steps), jnp.zeros_like(jnp.asarray(tokens)), 0)


STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def test_prompts_after_a_result() -> None:
    """What was generated follows each prompt, and what a tool says follows that."""
    prompts = Prompts.padded([[2, 3, 4], [5]])
    done = result(
        [[6, 7], [8, 0], [6, 6], [9, 1]], [2, 1, 2, 2], [LENGTH, STOP, LENGTH, STOP], [1, 0, 0, 1]
    )
    on = prompts.after(done, [[], [], [20, 21], [22]])
    rows = [row[:n] for row, n in zip(on.tokens.tolist(), on.lengths.tolist(), strict=True)]
    assert rows == [[2, 3, 4, 6, 7], [2, 3, 4, 8], [5, 6, 6, 20, 21], [5, 9, 1, 22]]
    assert on.tokens.shape == (4, 16)
    assert on.past is not None
    assert on.past.generated.astype(int)[:, :6].tolist() == [
        [0, 0, 0, 1, 1, 0],
        [0, 0, 0, 1, 0, 0],
        [0, 1, 1, 0, 0, 0],
        [0, 1, 1, 0, 0, 0],
    ]
    # Prefill's draw has a number, and every verify step has one: none of them comes again.
    assert on.past.steps.tolist() == [2, 1, 1, 2]
    assert on.past.finished.tolist() == [0, STOP, 0, 0]  # a row that was told more goes on
    again = on.after(done)
    assert again.past is not None
    assert again.past.steps.tolist() == [4, 2, 2, 4]
    assert again.past.generated.sum(axis=1).tolist() == [4, 2, 4, 4]
    assert PLAN.rows(prompts) == PLAN.rows(on) == 4
    same = jax.jit(lambda p, r: p.after(r))(prompts, done)
    assert same.tokens[:, :16].tolist() == prompts.after(done).tokens.tolist()
    with pytest.raises(FieldError, match="result has 4 rows, which are not samples of 3 prompts"):
        Prompts.padded([[2]] * 3).after(done)
    with pytest.raises(FieldError, match="appended has 1 rows; expected 4"):
        prompts.after(done, [[1]])
