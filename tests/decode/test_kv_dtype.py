"""Decoding with K/V in fp8: the same tokens by every road, and rounding that is what it should be.

Whole passes without a cache round keys and values too. So naive decoding is the reference here, and
no cache has a part in it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache import init_cache
from jaxspec.configs.base import LayerSpec
from jaxspec.models.attention import Attention
from jaxspec.models.target import Placement, placement_of
from jaxspec.options import Tree
from jaxspec.quantised import kv
from jaxspec.quantised.kv import FP8, KVFormat, KVStorage
from jaxspec.shapes import Array
from jaxspec.state import DecodeSpec, init_state
from jaxspec.weights import define
from jaxspec.weights.model_def import ModelDef
from pallas_kernels.common.reference_ops import rms_norm, rotate
from tests import tiny, tiny_qwen3
from tests.cases import NEW_TOKENS, Request, case, run, slow
from tests.tiny import FEATURE_SETS


def tokens_of(name: str, drafter: str | None, **options: Any) -> tuple[Any, Any]:
    """Return what an engine makes of the prompts, and what naive decoding does."""
    c = case(name)
    done = run(c.engine(drafter, **options), [Request(p, NEW_TOKENS) for p in c.prompts])
    return [d.token_ids for d in done], [c.continuation(row) for row in range(len(done))]


@pytest.mark.parametrize("name", ["e2b fp8", *slow(*(f"{s} fp8" for s in FEATURE_SETS[1:]))])
def test_mtp_reads_the_caches_with_the_scales_of_the_target(name: str) -> None:
    """Chunks of prompts are longer than the slack of rings, so they are read beside the old ring."""
    ours, naive = tokens_of(name, "mtp", num_draft_tokens=4)
    assert ours == naive
    unrounded = case(name.removesuffix(" fp8"))
    assert ours != [unrounded.continuation(row) for row in range(len(ours))]


@pytest.mark.slow
@pytest.mark.parametrize("name", [f"{name} fp8" for name in FEATURE_SETS])
@pytest.mark.parametrize("drafter", [None, "mixed", "dflash"])
def test_every_drafter_writes_what_plain_decoding_writes(name: str, drafter: str | None) -> None:
    ours, naive = tokens_of(name, drafter)
    assert ours == naive


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["mtp", "dflash"])
def test_branches_of_a_tree_are_rounded_as_what_is_kept_of_them(drafter: str) -> None:
    ours, naive = tokens_of("31b fp8", drafter, num_draft_tokens=6, tree=Tree(2, 3))
    assert ours == naive


@pytest.mark.slow
def test_the_cache_may_be_narrower_than_the_products() -> None:
    ours, naive = tokens_of("e2b bfloat16", "mtp", num_draft_tokens=4)
    assert ours == naive


def test_only_the_targets_caches_are_narrow() -> None:
    """A DFlash drafter keeps keys of its own, in its own dtype; memory is counted as it is."""
    c = case("31b fp8")
    spec = c.engine("dflash").runtime.spec
    state = jax.eval_shape(
        lambda: init_state(
            spec, 2, cache_length=64, num_stop_ids=1, cache_dtype=spec.target.cache_dtype
        )
    )
    assert {x.dtype for x in jax.tree.leaves(state.caches)} == {FP8}
    assert {x.dtype for x in jax.tree.leaves(state.drafter)} == {jnp.dtype("float32")}


# --- one layer against plain arithmetic ------------------------------------------------------------


def layer_and_x(spec: LayerSpec, k_norm: float = 1.0) -> tuple[Attention, Array, Placement]:
    layer = Attention(
        24,
        spec,
        norm_values=True,
        values_are_keys=spec.window is None,
        score_scale=1.0,
        rope_theta=1e4,
        eps=1e-6,
        dtype=jnp.dtype("float32"),
    )
    rng = np.random.default_rng(0)
    for name in ("qkv", "q_norm", "k_norm", "out"):
        weight = getattr(layer, name)
        x = rng.normal(size=weight.shape) * 24**-0.5
        x = x if x.ndim > 1 else 0.3 * (1 + np.abs(x)) * (k_norm if name == "k_norm" else 1)
        weight[...] = jax.device_put(x.astype(np.float32))
    x = jax.device_put(rng.normal(size=(2, 11, 24)).astype(np.float32))
    zeros = jnp.zeros(2, jnp.int32)
    return layer, x, placement_of(jnp.zeros((2, 11), jnp.int32), zeros, zeros + 11)


turned, normed = jax.jit(rotate), jax.jit(rms_norm, static_argnums=2)


def by_hand(layer: Attention, x: Array, stored: KVStorage | None) -> np.ndarray:
    """Norm, rotate, divide by a scale, round to fp8, multiply by the scale, attend: in numpy."""
    groups = layer.out.shape[1]
    projected = np.einsum("btd,dkxh->btkxh", x, layer.qkv[...])
    angles = np.arange(11)[:, None] * 1e4 ** (-np.arange(8) / 8)
    turn = (f(angles).astype(np.float32)[None] for f in (np.cos, np.sin))
    cos, sin = (np.broadcast_to(x, (2, 11, 8)) for x in turn)
    q = turned(normed(projected[:, :, :, :groups], layer.q_norm[...], 1e-6), cos, sin)
    k = turned(normed(projected[:, :, :, groups], layer.k_norm[...], 1e-6), cos, sin)
    v = normed(projected[:, :, :, -1], None, 1e-6)
    if stored is not None:
        k, v = (fp8(x / s) * s for x, s in ((k, float(stored.k_scale)), (v, stored.v_scale)))
    scores = np.einsum("btkgh,bskh->bkgts", q, k)
    at = np.arange(11)
    hidden = at[None] > at[:, None]
    if layer.window is not None:
        hidden |= at[None] <= at[:, None] - layer.window
    scores[..., hidden] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("bkgts,bskh,kghd->btd", weights, v, layer.out[...])


def fp8(x: Array) -> np.ndarray:
    """Round to the nearest number of e4m3, or to its largest one."""
    import ml_dtypes

    return np.clip(np.asarray(x), -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)


SLIDING = LayerSpec(window=5, num_heads=4, num_kv_heads=2, head_dim=16, kv_owner=0)
FULL = dataclasses.replace(SLIDING, window=None)  # in these tests, with values that are raw keys


@pytest.mark.parametrize("spec", [SLIDING, FULL], ids=["sliding", "full"])
@pytest.mark.parametrize("how", ["ring or cache", "no cache", "file's scales", "keys that clip"])
def test_a_layer_is_what_plain_arithmetic_gives(spec: LayerSpec, how: str) -> None:
    """With fp8's own rounding it is far from what no rounding gives, and near what rounding gives."""
    layer, x, where = layer_and_x(spec, k_norm=3.0)
    scales = {"file's scales": ((0.07, 0.03),), "keys that clip": ((0.002, 0.001),)}.get(how)
    stored = KVFormat("fp8", scales).of_layer(0, layer.k_norm[...], jnp.dtype("float32"))
    assert stored is not None
    exact, expected = by_hand(layer, x, None), by_hand(layer, x, stored)
    layer.store_kv(stored)
    cache = None
    if how != "no cache":
        # A chunk longer than the slack of the ring is attended to beside it.
        how_long: dict[str, Any] = dict(cache_length=64, window=spec.window, slack=3, dtype=FP8)
        cache = init_cache(2, 2, 16, **how_long)
    ours, cache, _ = jax.jit(layer.__call__)(x, where, cache, None)
    assert np.isfinite(np.asarray(ours)).all()
    off = float(np.abs(np.asarray(ours) - expected).max())
    rounding = float(np.abs(exact - expected).max())
    assert off < 1e-4 < 30 * 1e-4 < rounding
    if cache is not None:
        largest = np.abs(np.asarray(cache.k).astype(np.float32)).max()
        assert (largest == 448) == (how == "keys that clip")


@pytest.mark.parametrize("factor", [1e-4, 1.0, 77.0, 1e5])
def test_scales_follow_the_weights_and_no_key_clips(factor: float) -> None:
    layer, x, where = layer_and_x(FULL, k_norm=factor)
    stored = KVFormat("fp8").of_layer(0, layer.k_norm[...], jnp.dtype("float32"))
    assert stored is not None
    mantissa, _ = np.frexp([float(stored.k_scale), stored.v_scale])
    assert set(mantissa) == {0.5}  # powers of two
    longest = 4 * np.asarray(layer.k_norm[...]).max()
    assert 224 < longest / float(stored.k_scale) <= 448
    layer.store_kv(stored)
    cache = init_cache(2, 2, 16, cache_length=64, window=None, slack=3, dtype=FP8)
    _, cache, _ = jax.jit(layer.__call__)(x, where, cache, None)
    assert 28 < np.abs(np.asarray(cache.k).astype(np.float32)).max() <= 448


@pytest.mark.parametrize("x", [1.0, 1.0000001, 0.75, 2.0**-30, 3e-5, 448.0, 1e30])
def test_the_least_power_of_two_above(x: float) -> None:
    found = float(kv.power_of_two_above(jnp.float32(x)))
    assert found / 2 < np.float32(x) <= found
    assert np.frexp(found)[0] == 0.5


def test_derivatives_of_passes_without_a_cache_are_those_of_no_rounding() -> None:
    """A conversion to fp8 would round gradients too, most of them to 0."""
    layer, x, where = layer_and_x(SLIDING)
    layer.store_kv(KVFormat("fp8").of_layer(0, layer.k_norm[...], jnp.dtype("float32")))
    gradients = []
    for stored in (layer.stored, None):
        layer.stored = stored
        loss = jax.jit(jax.grad(lambda x: jnp.sum(layer(x, where, None, None)[0] * 1e-4)))
        gradients.append(np.asarray(loss(x)))
    rounded, exact = gradients
    off = np.linalg.norm(rounded - exact) / np.linalg.norm(exact)
    assert 1e-4 < off < 0.2


# --- what is refused -------------------------------------------------------------------------------


def test_what_cannot_be_is_refused_with_what_can(monkeypatch: pytest.MonkeyPatch) -> None:
    gemma, qwen = tiny.target("31b")[0], tiny_qwen3.target(tiny_qwen3.FEATURE_SETS[0])[0]
    with pytest.raises(ValueError, match="kv_dtype is 'fp4'; expected one of bfloat16, float32"):
        define.with_kv_dtype(gemma, "fp4")
    with pytest.raises(ValueError, match="more bytes for the same numbers: leave it out, or give"):
        define.with_kv_dtype(gemma.of_dtype("bfloat16"), "float32")
    with pytest.raises(ValueError, match=r"Qwen3 does not norm its values.*use bfloat16, or a"):
        define.with_kv_dtype(qwen, "fp8")
    scales = ((0.5, 0.25),) * qwen.config.num_layers
    assert define.with_kv_dtype(qwen, "fp8", scales).kv == KVFormat("fp8", scales)
    assert define.with_kv_dtype(gemma, "float32") == gemma
    monkeypatch.setattr(define, "capability", lambda: 8.0)
    with pytest.raises(ValueError, match=r"compute capability 8.9; .* has 8.0: use bfloat16"):
        define.with_kv_dtype(gemma, "fp8")
    assert define.with_kv_dtype(gemma, "bfloat16").cache_dtype == jnp.bfloat16


def test_graphs_say_how_they_store_keys_and_values() -> None:
    gemma = tiny.target("31b")[0]
    narrow = define.with_kv_dtype(gemma, "fp8")
    assert (gemma.dtypes, narrow.dtypes) == ("float32", "float32, K/V fp8")
    assert "float32, K/V fp8" in repr(narrow)
    assert "K/V" not in repr(gemma)
    assert isinstance(DecodeSpec(narrow, None).of_dtype("bfloat16").target, ModelDef)
    assert DecodeSpec(narrow, None).of_dtype("bfloat16").target.cache_dtype == FP8
