"""Teacher forcing: drafts accepted on a text, under each hypothesis about the drafter.

The target reads rows of text once. Then the drafter drafts, under every hypothesis, at each
position of the target's own tokens, from the true context. Read `replay`. `search` uses the counts.
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
from jaxspec.commands.check.hypotheses import Hypothesis, traced_values
from jaxspec.commands.check.text import Text
from jaxspec.drafters.base import AnyDrafter, Kept, TargetView
from jaxspec.models.target import Target, TargetOutput, init_caches
from jaxspec.runtime.programs import jit
from jaxspec.shapes import Array, Int, Params
from jaxspec.weights.loading import LoadedModel
from jaxspec.weights.model_def import ModelDef
from jaxspec.weights.sharding import fetch, mesh_of, place_rows

HOPELESS = 0.5
"""A hypothesis with less than this share of the best one's accepted drafts on the first rows is not
replayed on the others. This can hide a better hypothesis, and never invent one."""

SCREENED_ROWS = 8  # least number of first rows


@functools.partial(jit, static_argnums=(0, 1))
def read(
    target: ModelDef,
    feature_layers: tuple[int, ...],
    params: Params,
    tokens: Int[Array, "B T"],
    logit_rows: Int[Array, " B"],
) -> TargetOutput:
    """Run the target over whole rows, once for all hypotheses.

    Its caches hold every position, without a ring: a query at n sees the same positions below n as
    in decoding.
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
    """Draft after each of the first `anchors` tokens from `starts` on; count the drafts that agree.

    The drafter is called as in the decode loop, but one token of the text is committed between
    drafts.

    Args:
      values: see `Drafter.assume`.
      output: the target's output for these rows, with features in the drafter's order.
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
    """Accepted drafts at every anchor of every row, by hypothesis.

    Attributes:
      accepted: for each hypothesis, [R, A]; for a hopeless one, of the first rows only.
    """

    accepted: list[np.ndarray]
    logits: np.ndarray  # [R, V], at `logit_rows`
    nbytes: int  # K/V and features of a batch


def replay_all(
    target: LoadedModel,
    hypotheses: Sequence[Hypothesis],
    text: Text,
    logit_rows: np.ndarray,
    *,
    num_draft_tokens: int,
    batch_size: int,
    notify: Callable[[str], None],
    baseline: np.ndarray | None = None,
) -> Replayed:
    """Replay all rows for all hypotheses; the target reads each batch of rows once.

    Hypotheses that differ in traced values, in the order of features or in weights share a program.
    The hypothesis in force is replayed on all rows, others while they are not `HOPELESS`.

    Args:
      batch_size: rows at a time, rounded up to a multiple of the mesh's data axis.
      baseline: accepted drafts of the hypothesis in force, [R, A]; None if that is the first of
        `hypotheses`.
    """
    mesh = mesh_of(target=target.params, drafter=hypotheses[0].loaded)
    data, going = mesh.shape["data"], list(range(len(hypotheses)))
    batch_size = -(-batch_size // data) * data
    layers_of = [hypothesis.model_def.bind_abstract().feature_layers for hypothesis in hypotheses]
    union = tuple(sorted({layer for layers in layers_of for layer in layers}))
    anchors = text.anchors(num_draft_tokens).shape[1]
    suppress_tokens = target.generation.suppress_tokens if target.generation else ()
    count, nbytes = len(text.tokens), 0
    accepted: list[list[np.ndarray]] = [[] for _ in hypotheses]
    logits = []
    for begin in range(0, count, batch_size):
        # The last batch is filled up with a row it has, so that it needs no programs of its own.
        rows = np.minimum(np.arange(begin, begin + batch_size), count - 1)
        kept = min(batch_size, count - begin)
        notify(f"reading rows {begin + 1} to {begin + kept} of {count}")
        with _on(mesh):
            tokens, starts, at = _placed(
                (text.tokens[rows], text.starts[rows], logit_rows[rows]), mesh
            )
            output = read(target.model_def, union, target.params, tokens, at)
            logits.append(fetch(output.logits)[:kept, 0])
            nbytes = cache_bytes(output)
            for i in going:
                hypothesis = hypotheses[i]
                notify(f"rows {begin + 1} to {begin + kept} of {count}: {hypothesis.name}")
                features = tuple(output.features[union.index(layer)] for layer in layers_of[i])
                model_def, values = traced_values(hypothesis)
                drafts = replay(
                    target.model_def,
                    model_def,
                    target.params,
                    hypothesis.params,
                    {name: jnp.asarray(value) for name, value in values.items()},
                    tokens,
                    starts,
                    dataclasses.replace(output, features=features),
                    anchors=anchors,
                    num_draft_tokens=hypothesis.num_draft_tokens or num_draft_tokens,
                    suppress_tokens=suppress_tokens,
                )
                accepted[i].append(fetch(drafts)[:kept])
        if begin + kept >= SCREENED_ROWS:
            mask = text.anchors(num_draft_tokens)[: begin + kept]
            sums = {i: int((np.concatenate(accepted[i]) * mask).sum()) for i in going}
            if baseline is not None:
                sums[-1] = int((baseline[: begin + kept] * mask[: len(baseline)]).sum())
            enough = HOPELESS * max(sums.values())
            going = [i for i in going if sums[i] >= enough or (i == 0 and baseline is None)]
    return Replayed([np.concatenate(a) for a in accepted], np.concatenate(logits), nbytes)


def _on(mesh: Mesh) -> contextlib.AbstractContextManager[Any]:
    """Return the context in which programs for weights on a mesh are compiled."""
    return contextlib.nullcontext() if mesh.size == 1 else jax.set_mesh(mesh)


def _placed(rows: Sequence[np.ndarray], mesh: Mesh) -> Any:
    """Put rows of integers on the weights' devices; on one device they stay uncommitted."""
    whole = [np.asarray(x, np.int32) for x in rows]
    return [jnp.asarray(x) for x in whole] if mesh.size == 1 else place_rows(whole, mesh)
