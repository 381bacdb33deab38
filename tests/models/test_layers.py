"""The parts of the models, each against the plain formula."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache import KVSegment
from jaxspec.configs.gemma4 import PRESETS as TARGET_PRESETS
from jaxspec.models.attention import attend
from jaxspec.models.gemma4 import Embedder
from jaxspec.models.layers import (
    project,
    rms_norm,
    rope,
    rope_frequencies,
    table_logits,
)
from jaxspec.models.residual import Residual
from jaxspec.models.xla import COMPILER_OPTIONS
from jaxspec.shapes import Array, Params
from jaxspec.weights.model_def import ModelDef
from pallas_kernels.norms import Branch, router_norm
from tests import tiny
from tests.pallas_kernels.inputs import gelu


def normal(*shape: int, seed: int = 0) -> Array:
    return jax.device_put(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


@pytest.mark.parametrize("inputs", [1, 2])
def test_project_contracts_the_axes_it_says(inputs: int) -> None:
    weight = normal(*(3, 4)[2 - inputs :], 5, 2)
    x = normal(2, 6, *weight.shape[:inputs], seed=1)
    expected = np.tensordot(x, weight, axes=inputs)
    np.testing.assert_allclose(project(x, weight, inputs=inputs), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 2, 64, 65])
def test_table_logits_on_either_side_of_the_product(rows: int) -> None:
    x, table = normal(rows, 8), normal(24, 8, seed=1)
    expected = np.asarray(x) @ np.asarray(table).T
    np.testing.assert_allclose(jax.jit(table_logits)(x, table), expected, rtol=1e-5, atol=1e-5)


def test_rms_norm_uses_the_weight_as_it_is() -> None:
    """Unlike Gemma 1 to 3, which add 1 to it."""
    x, scale = normal(2, 3, 8), normal(8, seed=1)
    x, scale = np.asarray(x), np.asarray(scale)
    expected = x / np.sqrt(np.mean(np.square(x), -1, keepdims=True) + 0.25)
    norm = jax.jit(rms_norm, static_argnums=2)
    np.testing.assert_allclose(norm(x, None, 0.25), expected, rtol=1e-6)
    np.testing.assert_allclose(norm(x, scale, 0.25), expected * scale, rtol=1e-6)


def test_a_residual_is_added_to_and_normed_as_the_equation_says() -> None:
    x, h, routed = (normal(2, 3, 8, seed=i) for i in range(3))
    before, post, other, first, second = (normal(8, seed=i) for i in range(3, 8))
    factor = jnp.asarray([0.5], jnp.float32)
    stream = Residual(x, 0.25).norm(before)
    np.testing.assert_array_equal(stream.value, x)
    np.testing.assert_array_equal(stream.normed, rms_norm(x, before, 0.25))
    after = stream.add(h, post).times(factor).norm(first, second)
    expected = (x + rms_norm(h, post, 0.25)) * factor
    np.testing.assert_allclose(after.value, expected, rtol=1e-6)
    for got, scale in zip(after.norms, (first, second), strict=True):
        np.testing.assert_allclose(got, rms_norm(expected, scale, 0.25), rtol=1e-5)
    both = stream.add((Branch(h, post), Branch(routed, other)), first).norm()
    branches = rms_norm(h, post, 0.25) + rms_norm(routed, other, 0.25)
    np.testing.assert_allclose(both.value, x + rms_norm(branches, first, 0.25), rtol=1e-5)
    assert both.norms == ()


def test_rms_norm_of_bfloat16_rounds_once() -> None:
    norm = jax.jit(rms_norm, static_argnums=2)
    x, scale = (np.asarray(a).astype(jnp.bfloat16) for a in (normal(4, 64), normal(64, seed=1)))
    expected = np.asarray(norm(x.astype(np.float32), scale.astype(np.float32), 1e-6))
    np.testing.assert_array_equal(norm(x, scale, 1e-6), expected.astype(jnp.bfloat16))


def test_proportional_rope_divides_by_the_whole_head() -> None:
    """A full layer's quarter: exponents run over 512 dims, not 128, and the other pairs stand still."""
    frequencies = np.asarray(rope_frequencies(512, 1e6, 0.25))
    expected = 1e6 ** (-2.0 * np.arange(64) / 512)
    np.testing.assert_allclose(frequencies[:64], expected, rtol=1e-5)
    np.testing.assert_array_equal(frequencies[64:], np.zeros(192))


@pytest.mark.parametrize("heads", [(3,), (3, 2)], ids=["keys", "queries"])
def test_rope_turns_complex_pairs(heads: tuple[int, ...]) -> None:
    x, frequencies = normal(2, 4, *heads, 8), rope_frequencies(8, 100.0)
    positions = jnp.asarray([[0, 1, 2, 3], [50, 51, 52, 53]])
    angles = np.multiply.outer(np.asarray(positions), np.asarray(frequencies))
    angles = angles.reshape(2, 4, *(1,) * len(heads), 4)
    turned = (np.asarray(x)[..., :4] + 1j * np.asarray(x)[..., 4:]) * np.exp(1j * angles)
    expected = np.concatenate([turned.real, turned.imag], -1)
    ours = jax.jit(rope)(x, positions, frequencies)
    np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "scale"),
    [("e2b", 39.25), ("e4b", 50.5), ("12b", 62.0), ("26b-a4b", 53.0), ("31b", 73.5)],
)
def test_embedding_scale_is_rounded_to_the_weights_dtype(name: str, scale: float) -> None:
    width = TARGET_PRESETS[name].hidden_size
    config = dataclasses.replace(tiny.config(name), vocab_size=3, hidden_size=width)

    def encode(dtype: str, *, scaled: bool) -> np.ndarray:
        embedder = ModelDef(Embedder, config, dtype)
        params = {"table": jax.device_put(np.ones((3, width), jnp.dtype(dtype)))}
        run = jax.jit(lambda params, tokens: embedder.bind(params).embed(tokens, scaled=scaled))
        return np.asarray(run(params, np.asarray([[2, 0]], np.int32)), np.float32)

    np.testing.assert_array_equal(encode("bfloat16", scaled=True), np.full((1, 2, width), scale))
    np.testing.assert_allclose(encode("float32", scaled=True), math.sqrt(width), rtol=1e-6)
    np.testing.assert_array_equal(encode("bfloat16", scaled=False), np.ones((1, 2, width)))


def test_per_layer_inputs_of_ids_past_their_table_read_row_0() -> None:
    """Placeholders of other modalities have ids there."""
    model_def, params = tiny.target("e2b")
    short = {**params, "per_layer.table": params["per_layer.table"][:100]}
    config = dataclasses.replace(model_def.config, per_layer_vocab_size=100)
    short_def = ModelDef(model_def.module, config, "float32")
    tokens, like_0 = (np.asarray([[5, last]], np.int32) for last in (120, 0))

    @jax.jit
    def per_layer(params: Params, tokens: Array, of_embedding: Array) -> Array:
        target = short_def.bind(params)
        return target.per_layer(tokens, target.embedder.embed(of_embedding))

    found, expected = (per_layer(short, ids, tokens) for ids in (tokens, like_0))
    np.testing.assert_array_equal(found, expected)


def test_experts_equal_a_loop_over_tokens() -> None:
    model_def, params = tiny.target("26b-a4b")
    experts = model_def.bind(params).layers[0].experts
    x, residual = normal(2, 5, 48), normal(2, 5, 48, seed=1)
    chosen, weights = jax.device_get(jax.jit(experts.route)(residual))
    gate_up, down = np.asarray(experts.gate_up[...]), np.asarray(experts.down[...])
    expected = np.zeros((2, 5, 48))
    for b, t in np.ndindex(2, 5):
        for e, weight in zip(chosen[b, t], weights[b, t], strict=True):
            gate, up = np.tensordot(np.asarray(x)[b, t], gate_up[e], 1)
            hidden = gelu(gate) * up
            expected[b, t] += weight * (hidden @ down[e])

    @jax.jit
    def run(x: Array, residual: Array) -> Array:
        scale = experts.router_scale[...]
        return experts(x, router_norm(residual, scale, model_def.config.rms_norm_eps))

    np.testing.assert_allclose(run(x, residual), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 3])
def test_attend_equals_a_loop_over_queries(window: int | None, causal: bool) -> None:
    """Keys stand in two segments, out of order, with empty slots among them."""
    b, t, k, g, h = 2, 3, 2, 2, 4
    q = normal(b, t, k, g, h)
    q_positions = jnp.asarray([[4, 5, 6], [1, 2, 3]])
    cached = KVSegment(
        normal(b, k, 5, h, seed=1),
        normal(b, k, 5, h, seed=2),
        jnp.asarray([[3, -1, 1, 2, 0], [-1, -1, -1, -1, 0]]),
    )
    block = KVSegment(normal(b, k, 3, h, seed=3), normal(b, k, 3, h, seed=4), q_positions)
    run = jax.jit(functools.partial(attend, scale=0.5, window=window, causal=causal))
    got = np.asarray(run(q, q_positions, (cached, block)))
    keys, values, positions = (
        np.concatenate([getattr(cached, f), getattr(block, f)], axis)
        for f, axis in (("k", 2), ("v", 2), ("positions", 1))
    )
    for row, i, head, group in np.ndindex(b, t, k, g):
        at, where = int(q_positions[row, i]), positions[row]
        seen = where >= 0
        if window is not None:
            seen &= where > at - window
        if causal:
            seen &= where <= at
        scores = np.exp(keys[row, head, seen] @ np.asarray(q)[row, i, head, group] * 0.5)
        expected = scores / scores.sum() @ values[row, head, seen]
        np.testing.assert_allclose(got[row, i, head, group], expected, rtol=1e-5, atol=1e-6)


def test_a_query_that_sees_nothing_is_finite() -> None:
    """Padding rows are computed like others; a NaN there could reach a cache."""
    nothing = KVSegment(normal(1, 1, 4, 8), normal(1, 1, 4, 8, seed=1), jnp.full((1, 4), -1))
    run = jax.jit(functools.partial(attend, scale=1.0, window=None))
    out = run(normal(1, 2, 1, 1, 8), np.zeros((1, 2), np.int32), (nothing,))
    assert np.isfinite(out).all()


def test_logits_are_capped_smoothly() -> None:
    model_def, params = tiny.target("31b")
    target = model_def.bind(params)
    x = 40 * normal(1, 3, 48)
    raw = target.head(x)
    assert np.abs(raw).max() > 30
    np.testing.assert_allclose(target.logits(x), 30 * np.tanh(raw / 30), rtol=1e-5)


@pytest.mark.parametrize("rows", [8, 16, 24, 40])
def test_a_row_of_a_norm_has_the_same_bits_in_every_place(rows: int) -> None:
    """The counts that docs/numerics.md names. Of 17 rows the last one is contracting_axes in another order."""
    row = np.random.default_rng(1).normal(size=(8, 192)).astype(np.float32)
    norm = jax.jit(lambda x: rms_norm(x, None, 1e-6), compiler_options=COMPILER_OPTIONS)
    out = np.asarray(norm(np.tile(row, (rows, 1, 1))))
    np.testing.assert_array_equal(out, np.broadcast_to(out[0], out.shape))
