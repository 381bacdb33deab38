"""Every step of the bundled pairs is what a computation without any cache says it is.

One pass of the target over each finished text, without caches, gives its choice, its features and its K/V at
every position. From those alone follow the tokens that greedy decoding must have emitted, the drafts at
every anchor, and so the acceptance length of every verify step: no ring, no prefill chunk, no rollback and
no slot takes part.
"""

from __future__ import annotations

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.api import BUNDLED
from jaxspec.cache import KVSegment
from jaxspec.drafters.mtp import FrozenKV, MTPDrafter
from jaxspec.engine.engine import Completion, Engine, Request
from jaxspec.models.target import TargetOutput
from jaxspec.options import Drafting
from jaxspec.shapes import Array, Params
from jaxspec.weights.loading import LoadedModel, load_drafter, load_target
from jaxspec.weights.model_def import ModelDef
from tests.cases import run, slow

NEW_TOKENS = 128
HELD_OUT = json.loads((BUNDLED / "held_out.json").read_text())["prompts"]
PROMPTS = [tuple(p["ids"]) for p in HELD_OUT[::2]]
SURE = 1e-3  # logits nearer than this may change places between two ways to compute them


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return load_target(str(BUNDLED / "target"), dtype="float32")


def generated(target: LoadedModel, drafter: LoadedModel, num_draft_tokens: int) -> list[Completion]:
    drafting = Drafting(num_draft_tokens)
    engine = Engine(target, drafter, drafting=drafting, batch_size=8, cache_length=256)
    return run(engine, [Request(ids, NEW_TOKENS) for ids in PROMPTS])


@functools.partial(jax.jit, static_argnames=("model_def", "feature_layers"))
def whole(
    model_def: ModelDef, params: Params, text: Array, feature_layers: tuple[int, ...]
) -> TargetOutput:
    """Run the target over whole texts; the mask of a chain makes it return its K/V too."""
    b, s = text.shape
    causal = jnp.broadcast_to(jnp.tril(jnp.ones((s, s), bool)), (b, s, s))
    return model_def.bind(params)(
        text,
        jnp.zeros(b, jnp.int32),
        jnp.full(b, s, jnp.int32),
        None,
        feature_layers=feature_layers,
        ancestors=causal,
    )


def assert_target_chose(output: TargetOutput, text: np.ndarray) -> None:
    """Each new token is the target's best, or one that float32 cannot tell from it."""
    logits = np.asarray(output.logits)[:, 63:-1]
    emitted = np.take_along_axis(logits, text[:, 64:, None], axis=-1)[..., 0]
    assert (logits.max(axis=-1) - emitted).max() < SURE
    assert (logits.argmax(axis=-1) == text[:, 64:]).mean() > 0.999


def steps_of(drafts: np.ndarray, text: np.ndarray) -> list[list[int]]:
    """Return the acceptance lengths that drafts [B, A, G] at the anchors 64, 65, ... give."""
    rows = []
    for row, new in enumerate(text[:, 64:]):
        steps, at = [], 0
        while at < len(new) - 1:
            truth = new[at + 1 :]
            right = drafts[row, at, : len(truth)] == truth[: drafts.shape[2]]
            steps.append(int(np.cumprod(right).sum()) + 1)
            at += steps[-1]
        rows.append(steps)
    return rows


def assert_same_steps(done: list[Completion], expected: list[list[int]], most: int) -> None:
    """The last step reaches past the end of the text, where nobody knows what was accepted."""
    for completion, steps in zip(done, expected, strict=True):
        *before, last = completion.acceptance_lengths
        assert before == steps[:-1]
        assert len(completion.acceptance_lengths) == len(steps)
        assert steps[-1] <= last <= most + 1


def test_dflash_steps_equal_those_without_caches(target: LoadedModel) -> None:
    drafter = load_drafter(str(BUNDLED / "dflash"), dtype="float32")
    g = drafter.config.block_size - 1
    done = generated(target, drafter, g)
    text = np.asarray([p + c.token_ids for p, c in zip(PROMPTS, done, strict=True)])
    output = whole(
        target.model_def, target.params, jnp.asarray(text), drafter.config.feature_layers
    )
    assert_target_chose(output, text)

    @jax.jit
    def drafts(target_params: Params, params: Params, features: tuple, text: Array) -> Array:
        bound = target.model_def.bind(target_params)
        model = drafter.model_def.bind(params)
        b, s = text.shape
        positions = jnp.broadcast_to(jnp.arange(s), (b, s))
        context = model.context(features)
        kv = [layer.keys_and_values(context, positions) for layer in model.layers]

        def at(anchor: Array) -> Array:
            seen = jnp.where(positions < anchor, positions, -1)
            segments = tuple(KVSegment(k, v, seen) for k, v in kv)
            lengths = jnp.full(b, anchor)
            logits = model.block_logits(
                segments, bound, text[:, anchor], lengths, num_draft_tokens=g
            )
            return jnp.argmax(logits, axis=-1)

        return jax.lax.map(at, jnp.arange(64, s - 1)).swapaxes(0, 1)

    got = drafts(target.params, drafter.params, output.features, jnp.asarray(text))
    assert_same_steps(done, steps_of(np.asarray(got), text), g)


@pytest.mark.parametrize("position", slow("last", "next"))
def test_mtp_steps_equal_those_without_caches(target: LoadedModel, position: str) -> None:
    """All anchors of a text are drafted from at once, each seeing the K/V before it."""
    drafter = load_drafter(str(BUNDLED / "mtp"), dtype="float32")
    config = dataclasses.replace(drafter.config, query_position=position)
    model_def = ModelDef(MTPDrafter, config, "float32")
    drafter = dataclasses.replace(drafter, model_def=model_def, config=config)
    done = generated(target, drafter, config.num_draft_tokens)
    text = np.asarray([p + c.token_ids for p, c in zip(PROMPTS, done, strict=True)])
    output = whole(target.model_def, target.params, jnp.asarray(text), ())
    assert_target_chose(output, text)

    @jax.jit
    def drafts(target_params: Params, params: Params, output: TargetOutput, text: Array) -> Array:
        bound, model = target.model_def.bind(target_params), model_def.bind(params)
        b, s = text.shape
        segments = {}
        for kind in ("sliding", "full"):
            segment = output.fresh[target.config.last_kv_owner(kind)]
            assert segment is not None
            segments[kind] = segment._replace(seen_by=None)
        anchors = jnp.broadcast_to(jnp.arange(64, s - 1), (b, s - 65))
        frozen = FrozenKV(segments, anchors - 1)
        tokens, states, out = text[:, 64 : s - 1], output.hidden[:, 63 : s - 2], []
        for _ in range(config.num_draft_tokens):
            hidden, states = model.step(bound, tokens, states, frozen)
            tokens = jnp.argmax(model.choices(hidden).logits, axis=-1)
            out.append(tokens)
        return jnp.stack(out, axis=-1)

    got = drafts(target.params, drafter.params, output, jnp.asarray(text))
    assert_same_steps(done, steps_of(np.asarray(got), text), config.num_draft_tokens)
