"""Training sees what decoding does: the same distribution in each slot, for the same tokens before it.

Decoding reads prompts of several lengths into caches, in uneven pieces, and draws drafts. The text of each
row is then the prompt, the anchor and those drafts. The training pass over the texts has to tell, at that
anchor, the distributions that the drafts were drawn from.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.configs.dflash import DFlashConfig
from jaxspec.configs.dflash2 import DFlash2Config
from jaxspec.configs.dspark import DSparkConfig
from jaxspec.drafters.base import Draft, Draws, Kept, TargetView
from jaxspec.drafters.chain import Choices, over_vocabulary
from jaxspec.models.target import Caches, TargetOutput, init_caches
from jaxspec.sampling import SamplingParams, Stream, fold_keys, make_key
from jaxspec.shapes import Params
from jaxspec.training import passes
from jaxspec.weights.define import model_def_of
from jaxspec.weights.model_def import ModelDef
from tests import fakes, tiny

LENGTHS = (3, 9, 40, 77)  # the windows are 6 and 8: below them, past them, and past their rings
PIECES = (5, 30, 42)
CACHE_LENGTH = 128
SUPPRESSED = (7, 11)
# Beside the largest number: rounding of float32 in another order gives 1e-5 in the first slot, and a key too
# many or a wrong position 1e-3 and more. A chain of random weights makes rounding larger in every step.
TOLERANCE, GROWTH = 5e-5, 2

BASE: dict[str, Any] = dict(
    vocab_size=tiny.VOCAB_SIZE,
    hidden_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=32,
    block_size=6,
    mask_token_id=3,
    feature_layers=(2, 0),
    max_positions=4096,
    sliding_window=6,
    final_logit_softcap=9.0,
)
LAYERS: dict[str, dict[str, Any]] = {
    "sliding causal, full": dict(layer_types=("sliding", "full"), causal=(True, False)),
    "sliding, full causal": dict(layer_types=("sliding", "full"), causal=(False, True)),
    "window from the anchor": dict(
        layer_types=("sliding", "sliding"), causal=(False, True), window_from_anchor=True
    ),
}
TWO = LAYERS["sliding causal, full"]
OWN = dict(own_embedding=True, own_head=True, draft_vocab_size=90, scale_embeddings=False)
CONFIGS: dict[str, Any] = {
    **{name: DFlashConfig(**BASE, **layers) for name, layers in LAYERS.items()},
    "from the anchor": DFlashConfig(**BASE, **TWO, sample_from_anchor=True),
    "own head of fewer tokens": DFlashConfig(**BASE, **TWO, **OWN),
    "dflash2": DFlash2Config(
        **BASE, **TWO, conv_group_size=8, selector_rank=10, selector_top_k=6, output_multiplier=0.6
    ),
    **{
        f"dspark {kind}": DSparkConfig(
            **BASE, **TWO, markov_rank=10, markov_head_type=kind, confidence=True
        )
        for kind in ("vanilla", "gated", "rnn")
    },
    "dspark without the head": DSparkConfig(**BASE, **TWO, confidence=True),
    "dspark of Gemma's layers": DSparkConfig(
        **BASE | dict(layer_types=("full",) * 2, causal=(False,) * 2),
        markov_rank=6,
        gemma_layers=True,
        k_eq_v=True,
        rotary_factor=0.5,
    ),
}


def drafter_of(config: Any) -> tuple[ModelDef, Params]:
    model_def = model_def_of(config, "float32")
    params = tiny.random_params(model_def, 4)
    if "ids" in params:
        ids = np.random.default_rng(5).permutation(tiny.VOCAB_SIZE)[: config.draft_vocab_size]
        params["ids"] = jnp.asarray(np.sort(ids), jnp.int32)
    return model_def, params


@functools.partial(jax.jit, static_argnums=0)
def run_piece(model_def: ModelDef, params: Params, *args: Any) -> TargetOutput:
    return model_def.bind(params)(*args, feature_layers=BASE["feature_layers"])


@functools.cache
def prefilled(size: str) -> tuple[np.ndarray, list[Kept], Caches]:
    """Read the first tokens of each row into caches."""
    model_def, params = tiny.target(size)
    rows, begin, kept = len(LENGTHS), 0, []
    tokens = np.random.default_rng(0).integers(12, tiny.VOCAB_SIZE, (rows, CACHE_LENGTH))
    tokens = tokens.astype(np.int32)
    caches: Any = init_caches(
        model_def.config, rows, cache_length=CACHE_LENGTH, slack=16, dtype=jnp.float32
    )
    lengths = np.asarray(LENGTHS, np.int32)
    for piece in PIECES:
        part = jnp.asarray(tokens[:, begin : begin + piece])
        start = jnp.asarray(np.minimum(begin, lengths))
        count = jnp.asarray(np.clip(lengths - begin, 0, piece))
        out = run_piece(model_def, params, part, start, count, caches)
        kept.append(Kept.of(part, out, start, count))
        caches, begin = out.caches, begin + piece
    return tokens, kept, caches


def decoded(size: str, drafter: tuple[ModelDef, Params]) -> Draft:
    """Draw drafts after the anchor of each row, of which the target has read what comes before."""
    tokens, kept, caches = prefilled(size)
    rows, lengths = len(LENGTHS), jnp.asarray(LENGTHS, jnp.int32)
    target_def, target_params = tiny.target(size)

    @jax.jit
    def run(target_params: Params, params: Params, kept: Any, caches: Any, anchors: Any) -> Draft:
        model, bound = target_def.bind(target_params), drafter[0].bind(params)
        count = passes.num_slots(bound)
        state = bound.init_state(rows, cache_length=CACHE_LENGTH, dtype=jnp.float32)
        for piece in kept:
            state = bound.absorb(state, piece)
        slots = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32), (rows, count))
        each = jax.vmap(make_key)(jnp.arange(rows))
        keys = fold_keys(each, jnp.zeros(rows, jnp.int32), slots, Stream.DRAFT)
        draws = Draws(SamplingParams.make(rows, temperature=1.0), keys)
        view = TargetView(model, caches, suppress_tokens=SUPPRESSED)
        return bound.draft(state, view, anchors, lengths, num_draft_tokens=count, draws=draws)

    return run(target_params, drafter[1], kept, caches, tokens[np.arange(rows), LENGTHS])


@functools.partial(jax.jit, static_argnums=(0, 1))
def read(target_def: ModelDef, drafter_def: ModelDef, params: Params, *texts: Any) -> Any:
    bound = drafter_def.bind_abstract()
    made = passes.read(target_def.bind(params), bound, *texts, SUPPRESSED)
    return made.tokens, made.features


def trained(size: str, drafter: tuple[ModelDef, Params], texts: np.ndarray) -> passes.Predictions:
    """Predict at three anchors of each text. The middle one is the one that was drafted after."""
    target_def, target_params = tiny.target(size)
    count = passes.num_slots(drafter[0].bind_abstract())
    lengths = jnp.asarray(LENGTHS, jnp.int32)
    values = read(target_def, drafter[0], target_params, jnp.asarray(texts), lengths + 1 + count)

    @jax.jit
    def run(target_params: Params, params: Params, values: Any) -> passes.Predictions:
        model, bound = target_def.bind(target_params), drafter[0].bind(params)
        reading = passes.Reading(model, *values, suppress_tokens=SUPPRESSED)
        anchors = jnp.stack([jnp.full_like(lengths, 1), lengths, lengths - 1], axis=1)
        return passes.predictor(bound, reading)(anchors)

    return run(target_params, drafter[1], values)


def check(size: str, drafter: tuple[ModelDef, Params], growth: float = 1) -> passes.Predictions:
    draft, texts = decoded(size, drafter), prefilled(size)[0].copy()
    assert draft.log_q is not None
    count = draft.tokens.shape[1]
    for row, length in enumerate(LENGTHS):
        texts[row, length + 1 : length + 1 + count] = draft.tokens[row]
        texts[row, length + 1 + count :] = 0  # padding
    made = trained(size, drafter, texts)
    final = jax.tree.map(lambda x: x[:, 1] if x.ndim > 1 else x, made.final)
    logits = jax.nn.log_softmax(final.logits)
    log_q = over_vocabulary(Choices(logits, final.tokens), logits, tiny.VOCAB_SIZE)
    expected = np.asarray(draft.log_q)
    seen = np.isfinite(expected)
    assert seen.any(axis=-1).all()
    np.testing.assert_array_equal(np.isfinite(log_q), seen)
    expected = np.where(seen, expected, 0)
    far = np.abs(np.where(seen, log_q, 0) - expected).max(axis=(0, 2))
    far /= np.abs(expected).max(axis=(0, 2))
    assert (far < TOLERANCE * growth ** np.arange(count)).all(), far
    assert np.asarray(final.in_reach).all(), "a draft is one of the drafter's choices"
    ids = np.arange(tiny.VOCAB_SIZE) if final.tokens is None else np.asarray(final.tokens)
    ids = np.broadcast_to(ids, final.logits.shape)
    of_labels = np.take_along_axis(ids, np.asarray(final.label)[..., None], axis=-1)[..., 0]
    np.testing.assert_array_equal(of_labels, draft.tokens)
    return made


IN_SHORT = ("sliding causal, full", "dflash2")


@pytest.mark.parametrize(
    "name", [n if n in IN_SHORT else pytest.param(n, marks=pytest.mark.slow) for n in CONFIGS]
)
def test_blocks_equal_those_of_decoding(name: str) -> None:
    made = check("31b", drafter_of(CONFIGS[name]))
    assert (made.confidence is not None) == getattr(CONFIGS[name], "confidence", False)


@pytest.mark.parametrize(
    ("size", "centroids", "position"),
    [
        pytest.param("31b", False, "next", marks=pytest.mark.slow),
        ("31b", True, "last"),
        pytest.param("e2b", True, "next", marks=pytest.mark.slow),
        pytest.param("e2b", False, "last", marks=pytest.mark.slow),
    ],
)
def test_chains_equal_those_of_decoding_at_every_depth(
    size: str, centroids: bool, position: str
) -> None:
    drafter = fakes.mtp(fakes.loaded(*tiny.target(size)), centroids=centroids, drafts=4)
    config = dataclasses.replace(drafter.config, query_position=position)
    check(size, (dataclasses.replace(drafter.model_def, config=config), drafter.params), GROWTH)
