"""What drafters draw: tokens of their own distribution, which they tell, and their best in greedy rows."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import decode
from jaxspec import state as states
from jaxspec.drafters.base import Draft
from jaxspec.options import Drafting
from jaxspec.shapes import Array, Params
from jaxspec.state import DecodeSpec, DecodeState
from tests import fakes, tiny
from tests.cases import target

ROWS = 512
DRAFTS = 4


@functools.partial(jax.jit, static_argnums=0)
def propose(
    spec: DecodeSpec, target_params: Params, drafter_params: Params, state: DecodeState
) -> Draft:
    assert spec.drafter is not None
    models = spec.target.bind(target_params), spec.drafter.bind(drafter_params)
    return decode.propose(*models, spec, state)


def drafted(name: str, drafter: str) -> tuple[Draft, Draft]:
    """Return drafts after one text for many rows, drawn in the odd ones, and the same without draws."""
    loaded = target(name)
    if drafter == "dflash":
        model = fakes.dflash(loaded, block_size=DRAFTS + 1)
    else:
        model = fakes.mtp(loaded, centroids=name == "e2b")
    spec = DecodeSpec(loaded.model_def, model.model_def, Drafting(DRAFTS, draft_sampling=True))
    state = states.init_state(
        spec, ROWS, cache_length=16, num_stop_ids=1, cache_dtype=jnp.dtype("float32")
    )

    def some_text(x: Array) -> Array:
        row = jax.random.normal(jax.random.key(x.size), x.shape[1:])
        return jnp.broadcast_to(row, x.shape)

    state = dataclasses.replace(
        state,
        caches=jax.tree.map(some_text, state.caches),
        drafter=jax.tree.map(some_text, state.drafter),
        lengths=jnp.full(ROWS, 9),
        anchors=jnp.full(ROWS, 5),
        active=jnp.ones(ROWS, bool),
        sampling=spec.sampling(ROWS, temperature=(np.arange(ROWS) % 2) * 1.5),
    )
    certain = dataclasses.replace(spec, drafting=Drafting(DRAFTS))
    weights = loaded.params, model.params
    return propose(spec, *weights, state), propose(certain, *weights, state)


@pytest.mark.parametrize(("name", "drafter"), [("31b", "dflash"), ("e2b", "mtp")])
def test_drafters_tell_what_they_draw_from(name: str, drafter: str) -> None:
    """The assistant of E2B has centroids: it can draw only the tokens of a few clusters."""
    draft, certain = drafted(name, drafter)
    assert certain.log_q is None
    tokens, log_q = np.asarray(draft.tokens), np.asarray(draft.log_q)
    assert log_q.shape == (ROWS, DRAFTS, tiny.VOCAB_SIZE)
    greedy, drawn = np.arange(ROWS) % 2 == 0, np.arange(ROWS) % 2 == 1
    np.testing.assert_array_equal(tokens[greedy], np.asarray(certain.tokens)[greedy])
    own = np.take_along_axis(log_q, tokens[:, :, None], axis=-1)[:, :, 0]
    assert (own[greedy] == 0).all()
    assert (np.isfinite(log_q[greedy]).sum(axis=-1) == 1).all()
    assert np.isfinite(own).all()
    np.testing.assert_allclose(np.exp(log_q).sum(axis=-1), 1, rtol=1e-5)
    possible = np.isfinite(log_q[drawn]).sum(axis=-1)
    assert (possible < tiny.VOCAB_SIZE // 2).all() == (name == "e2b")
    # Every row's first draft comes from one distribution; a likelihood is as large as it expects of itself,
    # within four standard deviations.
    first = log_q[1, 0]
    np.testing.assert_allclose(log_q[drawn, 0], np.broadcast_to(first, log_q[drawn, 0].shape))
    p = np.exp(first[np.isfinite(first)])
    mean, deviation = (p * np.log(p)).sum(), np.sqrt((p * np.log(p) ** 2).sum())
    assert len(set(tokens[drawn, 0])) > 3
    assert abs(own[drawn, 0].mean() - mean) < 4 * deviation / np.sqrt(drawn.sum())
