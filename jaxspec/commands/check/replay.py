"""Teacher forcing: what a drafter's drafts are worth on a text, under one reading of it or another.

The target reads rows of text once; then, for every reading of the drafter, it is drafted from each position of
the part that the target wrote itself, from the true context. Read `replay`. What is made of it is `search`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from jaxspec.cache import cache_bytes
from jaxspec.commands.check.conventions import Reading, traced_values
from jaxspec.drafters.base import AnyDrafter, Kept, TargetView
from jaxspec.engine.request import Completion
from jaxspec.models.target import Target, TargetOutput, init_caches
from jaxspec.runtime.programs import jit
from jaxspec.shapes import Array, Int, Params
from jaxspec.weights.loading import LoadedModel
from jaxspec.weights.model_def import ModelDef
from jaxspec.weights.sharding import fetch, mesh_of, place_rows

HOPELESS = 0.5
"""A reading that has less than this share of the best one's accepted drafts on the first rows is not replayed
on the others. This can only hide a better reading, and never make one up."""

SCREENED_ROWS = 8  # how many the first rows are, at least


@dataclass(frozen=True)
class Text:
    """Rows of tokens that the target wrote itself, from `starts` on; padded with zeros after `ends`."""

    tokens: np.ndarray  # [R, L]
    starts: np.ndarray
    ends: np.ndarray

    @classmethod
    def of(cls, prompts: Sequence[tuple[int, ...]], done: Sequence[Completion]) -> Text:
        rows = [p + c.token_ids for p, c in zip(prompts, done, strict=True)]
        tokens = np.zeros((len(rows), max(map(len, rows))), np.int32)
        for i, row in enumerate(rows):
            tokens[i, : len(row)] = row
        return cls(tokens, np.asarray([*map(len, prompts)]), np.asarray([*map(len, rows)]))

    def anchors(self, num_draft_tokens: int) -> np.ndarray:
        """Return [R, A]: does the continuation reach as far as a draft after its token a?"""
        counts = self.ends - self.starts - num_draft_tokens
        return np.arange(max(int(counts.max()), 1))[None, :] < counts[:, None]


@functools.partial(jit, static_argnums=(0, 1))
def read(
    target: ModelDef,
    feature_layers: tuple[int, ...],
    params: Params,
    tokens: Int[Array, "B T"],
    logit_rows: Int[Array, " B"],
) -> TargetOutput:
    """Run the target over whole rows, once for all readings of the drafter.

    Its caches hold every position, in no ring: a query at n finds below n what it would while decoding.
    """
    b, t = tokens.shape
    zeros = jnp.zeros(b, jnp.int32)
    caches = init_caches(target.config, b, cache_length=t, slack=t, dtype=target.cache_dtype)
    model: Target = target.bind(params)
    rows = logit_rows[:, None]
    return model(tokens, zeros, zeros + t, caches, feature_layers=feature_layers, logit_rows=rows)


@functools.partial(
    jit,
    static_argnums=(0, 1),
    static_argnames=("anchors", "num_draft_tokens", "suppress_tokens"),
)
def replay(
    target: ModelDef,
    drafter: ModelDef,
    target_params: Params,
    drafter_params: Params,
    values: Mapping[str, Array],
    tokens: Int[Array, "B T"],
    starts: Int[Array, " B"],
    output: TargetOutput,
    *,
    anchors: int,
    num_draft_tokens: int,
    suppress_tokens: tuple[int, ...],
) -> Int[Array, "B A"]:
    """Draft after each of the first `anchors` tokens from `starts` on; return how many drafts the text has.

    The drafter is called as by the decode loop, but one token is committed between drafts, the text's own.

    Args:
      values: see `Drafter.assume`.
      output: what the target gave for these rows, with features in the drafter's order.
    """
    model: Target = target.bind(target_params)
    draft_model: AnyDrafter = drafter.bind(drafter_params)
    if values:
        draft_model.assume(values)
    b, t = tokens.shape
    assert output.caches is not None
    view = TargetView(model, output.caches, suppress_tokens)
    state = draft_model.init_state(b, cache_length=t, dtype=jnp.dtype(target.dtype))
    state = draft_model.absorb(state, Kept.of(tokens, output, jnp.zeros(b, jnp.int32), starts))
    ahead = 1 + jnp.arange(num_draft_tokens)[None, :]

    def step(state: Any, a: Array) -> tuple[Any, Array]:
        lengths = jnp.minimum(starts + a, t - 1)

        def committed(x: Array) -> Array:
            return jnp.take_along_axis(x, lengths[:, None, None], axis=1)

        anchor = jnp.take_along_axis(tokens, lengths[:, None], axis=1)
        draft = draft_model.draft(
            state, view, anchor[:, 0], lengths, num_draft_tokens=num_draft_tokens
        )
        one = Kept(
            anchor,
            committed(output.hidden),
            tuple(committed(x) for x in output.features),
            lengths,
            jnp.ones(b, jnp.int32),
        )
        state = draft_model.absorb(state, one)
        following = jnp.take_along_axis(
            tokens, jnp.minimum(lengths[:, None] + ahead, t - 1), axis=1
        )
        agree = (draft.tokens == following).astype(jnp.int32)
        return state, jnp.sum(jnp.cumprod(agree, axis=1), axis=1)

    return lax.scan(step, state, jnp.arange(anchors))[1].T


@dataclass(frozen=True)
class Replayed:
    """Accepted drafts at every anchor of every row, for some readings, and what came by the way.

    Attributes:
      accepted: for each reading, [R, A]; for one that is hopeless, of the first rows alone.
    """

    accepted: list[np.ndarray]
    logits: np.ndarray  # [R, V], at the row asked for
    nbytes: int  # that a batch's K/V and features took


def replay_all(
    target: LoadedModel,
    readings: Sequence[Reading],
    text: Text,
    logit_rows: np.ndarray,
    *,
    num_draft_tokens: int,
    batch_size: int,
    say: Callable[[str], None],
    against: np.ndarray | None = None,
) -> Replayed:
    """Replay all rows for all readings, a batch of rows at a time; the target reads each batch once.

    Readings that differ in traced values, in the order of features or in weights share a program. The
    reading in force is replayed on all rows, others while they are not `HOPELESS`.

    Args:
      batch_size: rows at a time, rounded up to a multiple of the mesh's data axis.
      against: what is known of the reading in force, [R, A]; None if it is the first of these.
    """
    mesh = mesh_of(target=target.params, drafter=readings[0].loaded)
    data, going = mesh.shape["data"], list(range(len(readings)))
    batch_size = -(-batch_size // data) * data
    layers_of = [reading.model_def.bind_abstract().feature_layers for reading in readings]
    union = tuple(sorted({layer for layers in layers_of for layer in layers}))
    anchors = text.anchors(num_draft_tokens).shape[1]
    suppress_tokens = target.generation.suppress_tokens if target.generation else ()
    count, nbytes = len(text.tokens), 0
    accepted: list[list[np.ndarray]] = [[] for _ in readings]
    logits = []
    for begin in range(0, count, batch_size):
        # The last batch is filled up with a row it has, so that it needs no programs of its own.
        rows = np.minimum(np.arange(begin, begin + batch_size), count - 1)
        kept = min(batch_size, count - begin)
        given = (text.tokens[rows], text.starts[rows], logit_rows[rows])
        say(f"reading rows {begin + 1} to {begin + kept} of {count}")
        with _on(mesh):
            tokens, starts, at = _placed(given, mesh)
            output = read(target.model_def, union, target.params, tokens, at)
            logits.append(fetch(output.logits)[:kept, 0])
            nbytes = cache_bytes(output)
            for i in going:
                reading = readings[i]
                say(f"rows {begin + 1} to {begin + kept} of {count}: {reading.name}")
                features = tuple(output.features[union.index(layer)] for layer in layers_of[i])
                model_def, values = traced_values(reading)
                drafts = replay(
                    target.model_def,
                    model_def,
                    target.params,
                    reading.params,
                    {name: jnp.asarray(value) for name, value in values.items()},
                    tokens,
                    starts,
                    dataclasses.replace(output, features=features),
                    anchors=anchors,
                    num_draft_tokens=reading.num_draft_tokens or num_draft_tokens,
                    suppress_tokens=suppress_tokens,
                )
                accepted[i].append(fetch(drafts)[:kept])
        if begin + kept >= SCREENED_ROWS:
            mask = text.anchors(num_draft_tokens)[: begin + kept]
            sums = {i: int((np.concatenate(accepted[i]) * mask).sum()) for i in going}
            known = (
                0
                if against is None
                else int((against[: begin + kept] * mask[: len(against)]).sum())
            )
            enough = HOPELESS * max(known, *sums.values())
            going = [i for i in going if sums[i] >= enough or (i == 0 and against is None)]
    return Replayed([np.concatenate(a) for a in accepted], np.concatenate(logits), nbytes)


def _on(mesh: Mesh) -> contextlib.AbstractContextManager[Any]:
    """Return the context in which programs for weights on a mesh are compiled."""
    return contextlib.nullcontext() if mesh.size == 1 else jax.set_mesh(mesh)


def _placed(rows: Sequence[np.ndarray], mesh: Mesh) -> Any:
    """Put rows of whole numbers where the weights are; on one device they stay uncommitted, as those are."""
    whole = [np.asarray(x, np.int32) for x in rows]
    return [jnp.asarray(x) for x in whole] if mesh.size == 1 else place_rows(whole, mesh)
