"""Passes over prompts: layers behind the last keys and values compute the last tokens alone.

What the other tokens would have there, nobody reads. So nothing that is read may change.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models.target import Caches, TargetOutput, init_caches
from jaxspec.shapes import Array, Params
from jaxspec.weights.model_def import ModelDef
from tests import tiny

WIDTH, SLACK = 24, 4
COUNTS = ((24, 24, 7), (11, 24, 0))  # of two passes: a row may end, go on, or be padding


@pytest.fixture(scope="module", params=["e4b", "31b"])
def model(request: pytest.FixtureRequest) -> tuple[ModelDef, Params]:
    return tiny.target(request.param)


def run(
    model_def: ModelDef, params: Params, rows: int = 3, **how: Any
) -> tuple[list[TargetOutput], list[Array], float]:
    """Return the outputs of two passes, their last rows, and the operations of the second."""

    @jax.jit
    def step(tokens: Array, start: Array, count: Array, caches: Caches) -> TargetOutput:
        last = jnp.maximum(count - 1, 0)[:, None]
        return model_def.bind(params)(tokens, start, count, caches, logit_rows=last, **how)

    caches = init_caches(model_def.config, rows, cache_length=64, slack=SLACK, dtype="float32")
    rng, start = np.random.default_rng(0), jnp.zeros(rows, jnp.int32)
    outputs, lasts = [], []
    for counts in COUNTS:
        tokens = jnp.asarray(rng.integers(0, model_def.config.vocab_size, (3, WIDTH)), jnp.int32)[
            :rows
        ]
        count = jnp.asarray(counts[:rows], jnp.int32)
        operands = tokens, start, count, caches
        outputs.append(step(*operands))
        caches, start = outputs[-1].caches, start + count
        lasts.append(jnp.maximum(count - 1, 0))
    cost = step.lower(*operands).compile().cost_analysis()
    return outputs, lasts, cost["flops"]


@pytest.mark.parametrize("rows", [3, 1])
def test_nothing_that_is_read_changes(model: tuple[ModelDef, Params], rows: int) -> None:
    whole, lasts, operations = run(*model, rows)
    narrow, _, fewer = run(*model, rows, only_logit_rows=True)
    for full, only, last, counts in zip(whole, narrow, lasts, COUNTS, strict=True):
        real = np.flatnonzero(counts[:rows])
        hidden = np.take_along_axis(
            np.asarray(full.hidden), np.asarray(last)[:, None, None], axis=1
        )
        assert only.hidden.shape == (rows, 1, model[0].config.hidden_size)
        np.testing.assert_allclose(only.hidden[real], hidden[real], rtol=2e-5, atol=2e-5)
        np.testing.assert_allclose(only.logits[real], full.logits[real], rtol=2e-5, atol=2e-5)
        jax.tree.map(np.testing.assert_array_equal, only.caches, full.caches)
    owners = [layer.kv_owner for layer in model[0].config.layers]
    if max(owners) + 1 < len(owners):
        assert fewer < 0.8 * operations


def test_layers_whose_features_are_asked_for_compute_every_token() -> None:
    model_def, params = tiny.target("e4b")
    layer = model_def.config.num_layers - 2
    how: dict[str, Any] = dict(feature_layers=(layer,))
    whole, narrow = (
        run(model_def, params, only_logit_rows=only, **how)[0] for only in (False, True)
    )
    for full, only, counts in zip(whole, narrow, COUNTS, strict=True):
        for row, count in enumerate(counts):
            found, wanted = (x.features[0][row, :count] for x in (only, full))
            np.testing.assert_array_equal(found, wanted)
