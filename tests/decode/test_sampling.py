"""Filters against a reference that sorts, and whose randomness a draw is."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.sampling import SamplingParams, Stream, fold_keys, sample, shape_logits, suppress
from tests.decode.plain import Settings

VOCAB = 12
ROWS = 4


def params(*rows: tuple[float, ...]) -> SamplingParams:
    """Return a row of parameters for each of temperature, top-k, top-p and, where given, min-p."""
    names = ("temperature", "top_k", "top_p", "min_p")
    columns = {name: np.asarray(v) for name, v in zip(names, zip(*rows, strict=True), strict=False)}
    return SamplingParams.make(len(rows), **columns)


shape = jax.jit(shape_logits)


# Logits are eighths, so that ties are common; sums of their weights then meet a top-p of these exactly
# as good as never, and rounding cannot decide a case.
_logit = st.integers(-24, 24).map(lambda i: i / 8)
_row = st.tuples(
    st.sampled_from([0.0, 0.25, 0.7, 1.0, 2.0]),
    st.sampled_from([0, 1, 2, 5, VOCAB - 1, VOCAB, 10 * VOCAB]),
    st.sampled_from([1e-6, 0.1237, 0.5011, 0.9003, 0.99917, 1.0]),
    st.sampled_from([0.0, 0.0137, 0.2123, 0.7071, 1.0]),
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(_row, min_size=ROWS, max_size=ROWS),
    st.lists(_logit, min_size=ROWS * 2 * VOCAB, max_size=ROWS * 2 * VOCAB),
    st.sets(st.integers(0, VOCAB - 1), max_size=VOCAB - 1),
)
def test_filters_equal_a_sorting_reference(rows, values, suppressed):
    """Mixed rows, ties, and tokens that are already impossible. The best logit becomes 0."""
    logits = np.asarray(values, np.float32).reshape(ROWS, 2, VOCAB)
    logits[..., sorted(suppressed)] = -np.inf
    shaped = np.asarray(shape(jnp.asarray(logits), params(*rows)))
    for b, row in enumerate(rows):
        for t in range(2):
            expected = Settings(*row).filtered(logits[b, t])
            np.testing.assert_allclose(shaped[b, t], expected - expected.max(), rtol=1e-6)


def test_filters_come_in_order():
    """Temperature before top-p and min-p, top-k before top-p: other orders keep other tokens here."""
    probs = np.asarray([0.4, 0.3, 0.2, 0.1])
    logits = jnp.asarray(np.log(probs), jnp.float32)[None, None]
    kept = {
        row: int(np.isfinite(shape(logits, params(row))).sum())
        for row in (
            (1.0, 0, 0.65, 0.0),  # 0.4 + 0.3
            (0.5, 0, 0.65, 0.0),  # squared: 0.53 + 0.3
            (5.0, 0, 0.65, 0.0),  # nearly flat: three
            (1.0, 2, 0.65, 0.0),  # of the two left 0.57 + 0.43: both
            (1.0, 2, 0.55, 0.0),  # 0.57 alone; of all four it took two
            (1.0, 0, 0.55, 0.0),
            (1.0, 0, 1.0, 0.45),  # 0.2 is half of 0.4
            (0.5, 0, 1.0, 0.45),  # squared: 0.3 is 0.56 of 0.4
            (1.0, 2, 1.0, 0.2),
        )
    }
    assert list(kept.values()) == [2, 2, 3, 2, 1, 2, 3, 2, 2]


@pytest.mark.parametrize(
    "row",
    [
        (1.0, 1, 1.0),
        (1.0, 0, 1e-45),
        (1.0, 0, 1e-60),  # 0 in float32
        (2e-38, 0, 1.0),  # the smallest normal float32, nearly: logits overflow when divided by it
        (2e-38, 3, 0.9),
        (1e-6, 0, 1.0),
        (1.0, 0, 1.0, 1.0),
    ],
)
def test_extremes_leave_the_best_token(row):
    logits = jnp.linspace(-20, 25, VOCAB)[None, None]
    shaped = np.asarray(shape(logits.astype(jnp.float32), params(row)))[0, 0]
    assert not np.isnan(shaped).any()
    probs = np.asarray(jax.nn.softmax(shaped))
    assert probs[-1] == 1
    assert (probs[:-1] == 0).all()


def test_a_row_does_not_depend_on_other_rows():
    """What a row asks for decides alone, though the loops run when any row needs them."""
    logits = jax.random.normal(jax.random.key(0), (3, 2, VOCAB)) * 3
    rows = [(1.0, 0, 1.0), (0.7, 3, 1.0), (1.3, 0, 0.8)]  # the first has nothing cut
    together = shape(logits, params(*rows))
    for b, row in enumerate(rows):
        alone = shape(logits[b : b + 1], params(row))
        np.testing.assert_array_equal(alone[0], together[b])
    assert np.isfinite(together[0]).all()


def test_suppress():
    logits = jnp.zeros((2, 5))
    assert suppress(logits, ()) is logits
    out = np.asarray(suppress(logits, (1, 4)))
    assert np.isneginf(out[:, [1, 4]]).all()
    assert (out[:, [0, 2, 3]] == 0).all()


def test_no_two_draws_share_a_key():
    keys = jax.random.split(jax.random.key(1), 3)
    data = [
        jax.random.key_data(
            fold_keys(keys, jnp.full(3, step), jnp.tile(jnp.arange(4), (3, 1)), stream)
        )
        for step in range(3)
        for stream in Stream
    ]
    flat = np.concatenate([np.asarray(d).reshape(-1, d.shape[-1]) for d in data])
    assert len(np.unique(flat, axis=0)) == len(flat) == 3 * 4 * 3 * len(Stream)


def test_keys_are_the_rows_own():
    keys = jax.random.split(jax.random.key(1), 3)
    slots, steps = jnp.tile(jnp.arange(4), (3, 1)), jnp.asarray([5, 0, 2])
    together = jax.random.key_data(fold_keys(keys, steps, slots, Stream.ACCEPT))
    alone = jax.random.key_data(fold_keys(keys[1:2], steps[1:2], slots[:1], Stream.ACCEPT))
    np.testing.assert_array_equal(together[1], alone[0])


def test_sample_follows_softmax():
    """Chi-square over 20000 fixed keys; at 4 degrees of freedom 23.5 is passed by 1 in 10000."""
    probs = np.asarray([0.5, 0.25, 0.15, 0.07, 0.03])
    count = 20_000
    logits = jnp.broadcast_to(jnp.log(jnp.asarray(probs, jnp.float32)), (count, 5))
    drawn = np.asarray(jax.jit(sample)(logits, jax.random.split(jax.random.key(3), count)))
    expected = count * probs
    assert np.sum((np.bincount(drawn, minlength=5) - expected) ** 2 / expected) < 23.5
