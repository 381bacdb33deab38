"""The DFlash drafter against a plain oracle: numpy in float64, loops over heads and queries, no cache."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import cache as kv
from jaxspec.configs.dflash import DFlashConfig
from jaxspec.drafters.base import Kept, TargetView
from jaxspec.drafters.dflash import DFlashDrafter, DFlashState
from jaxspec.shapes import Array, Params
from jaxspec.weights.model_def import ModelDef
from tests import tiny

MIXED = DFlashConfig(  # z-lab's Gemma 4 drafters, small
    vocab_size=tiny.VOCAB_SIZE,
    hidden_size=48,
    layer_types=("sliding", "sliding", "full"),
    causal=(True, True, False),
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=40,
    block_size=5,
    mask_token_id=4,
    feature_layers=(3, 0, 2, 1),  # not in order, and more than there are layers
    num_target_layers=5,
    max_positions=4096,
    sliding_window=6,
    final_logit_softcap=30.0,
)
CONFIGS = {
    "sliding-and-full": MIXED,
    "all-full": dataclasses.replace(  # as the Qwen3-8B drafter
        MIXED,
        layer_types=("full",) * 3,
        causal=(False,) * 3,
        sliding_window=None,
        final_logit_softcap=None,
    ),
    "explicit-flags": dataclasses.replace(MIXED, causal=(False, True, True)),
    "window-below-block": dataclasses.replace(MIXED, sliding_window=3),
    "unscaled-embeddings": dataclasses.replace(MIXED, scale_embeddings=False),
}
LENGTHS = (1, 4, 29, 90)  # the last is past the ring of 64 slots
CACHE_LENGTH = 128
TOLERANCE = 1e-4  # norm-wise; float32 rounding gives 1e-6, a wrong mask or norm 1e-2 and more


def oracle(
    config: DFlashConfig,
    params: dict[str, np.ndarray],
    table: np.ndarray,
    features: np.ndarray,
    anchor: int,
    num_draft_tokens: int,
) -> np.ndarray:
    """Return the logits of the masked slots, from the features [N, C] of all committed tokens."""
    group, length = config.num_heads // config.num_kv_heads, len(features)
    context = norm(features @ params["fuse"], params["context_norm"])
    x = table[[anchor] + [config.mask_token_id] * num_draft_tokens]
    if config.scale_embeddings:
        x = x * config.hidden_size**0.5
    block = np.arange(length, length + len(x))
    everything = np.arange(length + len(x))
    for i, kind in enumerate(config.layer_types):
        w = {k.removeprefix(f"layers.{i}."): v for k, v in params.items() if f"layers.{i}." in k}
        h, attended = norm(x, w["input_norm"]), np.zeros_like(x)
        for head in range(config.num_heads):
            kv_head, g = divmod(head, group)
            w_k, w_v = w["kv"][:, kv_head, 0], w["kv"][:, kv_head, 1]
            # The context goes into keys and values as it is, the block after the layer's norm.
            rows = np.concatenate([context, h])
            keys = rotate(norm(rows @ w_k, w["k_norm"]), everything, config.rope_theta)
            values = rows @ w_v
            queries = norm(h @ w["q"][:, kv_head, g], w["q_norm"])
            queries = rotate(queries, block, config.rope_theta)
            for t, position in enumerate(block):
                seen = np.ones(len(everything), bool)
                if kind == "sliding":
                    seen &= everything > position - config.sliding_window
                if config.causal[i]:
                    seen &= everything <= position
                scores = np.exp(keys[seen] @ queries[t] * config.head_dim**-0.5)
                head_out = scores / scores.sum() @ values[seen]
                attended[t] += head_out @ w["out"][kv_head, g]
        x = x + attended
        gate, up = np.moveaxis(np.tensordot(norm(x, w["mlp_norm"]), w["mlp.gate_up"], 1), 1, 0)
        x = x + gate / (1 + np.exp(-gate)) * up @ w["mlp.down"]
    logits = norm(x[1:], params["final_norm"]) @ table.T
    cap = config.final_logit_softcap
    return logits if cap is None else cap * np.tanh(logits / cap)


def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weight


def rotate(x: np.ndarray, positions: np.ndarray, theta: float) -> np.ndarray:
    """Turn the complex numbers whose parts stand half a head apart."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * theta ** (-np.arange(half) / half)
    turned = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag], -1)


@functools.partial(jax.jit, static_argnums=0)
def absorb(
    model_def: ModelDef,
    params: Params,
    state: DFlashState,
    features: tuple[Array, ...],
    start: Array,
    count: Array,
    slots: Array | None = None,
) -> DFlashState:
    b, t, d = features[0].shape
    tokens = jnp.zeros((b, t), jnp.int32)
    kept = Kept(tokens, jnp.zeros((b, t, d)), features, start, count, slots)
    return model_def.bind(params).absorb(state, kept)


@functools.partial(jax.jit, static_argnums=(0, 1), static_argnames="drafts")
def draft(
    model_def: ModelDef,
    target_def: ModelDef,
    params: Params,
    target_params: Params,
    state: DFlashState,
    anchors: Array,
    lengths: Array,
    *,
    drafts: int,
) -> tuple[Array, Array]:
    """Return block logits and the draft made of them."""
    drafter = model_def.bind(params)
    target = target_def.bind(target_params)
    view = TargetView(target, (), suppress_tokens=(7, 11))
    context = tuple(kv.view(cache, lengths) for cache in state)
    logits = drafter.block_logits(context, target, anchors, lengths, num_draft_tokens=drafts)
    return logits, drafter.draft(state, view, anchors, lengths, num_draft_tokens=drafts).tokens


class Setting:
    """A drafter with random weights, its target, and the features of a batch of sequences."""

    def __init__(self, config: DFlashConfig, seed: int = 0):
        self.config, self.rng = config, np.random.default_rng(seed)
        self.model_def = ModelDef(DFlashDrafter, config, "float32")
        self.params = tiny.random_params(self.model_def, seed)
        self.target_def, self.target_params = tiny.target("31b")
        width = config.hidden_size * len(config.feature_layers)
        self.features = [self.rng.normal(size=(n, width)) for n in LENGTHS]
        self.anchors = self.rng.integers(0, config.vocab_size, len(LENGTHS))

    def empty(self, batch: int = len(LENGTHS)) -> DFlashState:
        drafter = self.model_def.bind(self.params)
        return drafter.init_state(batch, cache_length=CACHE_LENGTH, dtype=jnp.float32)

    def absorb(
        self, state: DFlashState, start: np.ndarray, count: np.ndarray, width: int
    ) -> DFlashState:
        """Absorb the next `count` features of each row; the pass's other rows are NaN."""
        feed = np.full((len(LENGTHS), width, self.features[0].shape[1]), np.nan, np.float32)
        for row, features in enumerate(self.features):
            feed[row, : count[row]] = features[start[row] : start[row] + count[row]]
        split = jnp.split(jnp.asarray(feed), len(self.config.feature_layers), axis=-1)
        start, count = jnp.asarray(start, jnp.int32), jnp.asarray(count, jnp.int32)
        return absorb(self.model_def, self.params, state, tuple(split), start, count)

    def whole(self) -> DFlashState:
        count = np.array(LENGTHS)
        return self.absorb(self.empty(), np.zeros_like(count), count, max(LENGTHS))

    def draft(self, state: DFlashState, drafts: int) -> tuple[np.ndarray, np.ndarray]:
        anchors, lengths = jnp.asarray(self.anchors, jnp.int32), jnp.asarray(LENGTHS, jnp.int32)
        models = self.model_def, self.target_def, self.params, self.target_params
        return jax.device_get(draft(*models, state, anchors, lengths, drafts=drafts))

    def expected(self, drafts: int) -> np.ndarray:
        params = {k: np.asarray(v, np.float64) for k, v in self.params.items()}
        table = np.asarray(self.target_params["embedder.table"], np.float64)
        return np.stack(
            [
                oracle(
                    self.config, params, table, f.astype(np.float32).astype(np.float64), a, drafts
                )
                for f, a in zip(self.features, self.anchors, strict=True)
            ]
        )


@pytest.fixture(scope="module", params=CONFIGS)
def setting(request: pytest.FixtureRequest) -> Setting:
    return Setting(CONFIGS[request.param])


def relative_errors(got: np.ndarray, expected: np.ndarray) -> list[float]:
    return [
        float(np.linalg.norm(g - e) / np.linalg.norm(e)) for g, e in zip(got, expected, strict=True)
    ]


def test_block_logits_equal_the_oracle(setting: Setting) -> None:
    drafts = setting.config.block_size - 1
    logits, tokens = setting.draft(setting.whole(), drafts)
    errors = relative_errors(logits, setting.expected(drafts))
    print("largest relative error", max(errors))
    assert max(errors) < TOLERANCE
    allowed = ~np.isin(np.arange(tiny.VOCAB_SIZE), (7, 11))  # what the target never emits
    np.testing.assert_array_equal(tokens, np.where(allowed, logits, -np.inf).argmax(-1))


def test_blocks_may_be_shorter_than_trained(setting: Setting) -> None:
    logits, _ = setting.draft(setting.whole(), 2)
    assert max(relative_errors(logits, setting.expected(2))) < TOLERANCE


def test_absorbing_in_parts_equals_absorbing_at_once(setting: Setting) -> None:
    """Passes of one width, of which each row keeps some tokens or none: what was rejected never enters.

    Rejected rows are NaN here, which would spread to every logit.
    """
    rng, lengths = np.random.default_rng(1), np.array(LENGTHS)
    state, start, passes = setting.empty(), np.zeros_like(lengths), 0
    while (start < lengths).any():
        count = np.minimum(rng.integers(0, setting.config.block_size + 1, 4), lengths - start)
        state = setting.absorb(state, start, count, setting.config.block_size)
        start, passes = start + count, passes + 1
    assert passes > 20
    drafts = setting.config.block_size - 1
    logits, _ = setting.draft(state, drafts)
    assert max(relative_errors(logits, setting.expected(drafts))) < TOLERANCE


def test_absorb_into_slots_touches_no_other_slot() -> None:
    """Prefill of two rows into slots 3 and 1; a third row is padding, past the last slot."""
    setting = Setting(MIXED)
    rng = np.random.default_rng(2)
    features = tuple(jnp.asarray(rng.normal(size=(3, 8, 48)), jnp.float32) for _ in range(4))
    start, count = jnp.zeros(3, jnp.int32), jnp.asarray([8, 5, 8], jnp.int32)
    busy = jax.tree.map(lambda x: x + 7, setting.empty())
    state = absorb(
        setting.model_def, setting.params, busy, features, start, count, jnp.asarray([3, 1, 4])
    )
    direct = absorb(setting.model_def, setting.params, setting.empty(3), features, start, count)
    for scattered, plain in zip(jax.tree.leaves(state), jax.tree.leaves(direct), strict=True):
        np.testing.assert_allclose(scattered[3, :, :8], plain[0, :, :8], rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(scattered[1, :, :5], plain[1, :, :5], rtol=1e-6, atol=1e-6)
        for untouched in (scattered[0], scattered[2], scattered[1, :, 5:], scattered[3, :, 8:]):
            np.testing.assert_array_equal(untouched, 7)
