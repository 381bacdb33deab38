"""Teacher forcing: drafts accepted on a text, under each hypothesis about the drafter.

The target reads rows of text once. Then the drafter drafts, under every hypothesis, at each
position of the target's own tokens, from the true context. Read `replay`, then `Evidence.replay`,
which keeps the counts for `search`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from jaxspec.cache import cache_bytes
from jaxspec.commands.check.hypotheses import Hypothesis, traced_values
from jaxspec.commands.check.options import MIN_ROWS
from jaxspec.commands.check.text import Text, generation_of
from jaxspec.commands.progress import Notify
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


class Evidence:
    """A text, and the drafts that each hypothesis gets accepted on it.

    Rows that continue one prompt are evidence of one prompt, and count as one row.

    Attributes:
      logits: [R, V], at `logit_rows`, once something was replayed.
      nbytes: of K/V and features of a batch.
    """

    logits: np.ndarray
    nbytes: int = 0

    def __init__(
        self,
        target: LoadedModel,
        text: Text,
        level: float,
        *,
        num_draft_tokens: int,
        batch_size: int,
        notify: Notify,
        num_counted: int | None = None,
        rows_per_prompt: int = 1,
        logit_rows: np.ndarray | None = None,
    ):
        """Prepare a text; `replay` replays hypotheses on it.

        Args:
          level: at which all intervals of a round hold together.
          batch_size: rows at a time, rounded up to a multiple of the mesh's data axis.
          num_counted: number of first rows that count; None for all. The others are read for their
            logits alone.
          rows_per_prompt: number of consecutive rows that continue one prompt.
          logit_rows: of each row, the position whose logits are kept; None for any.
        """
        self.target, self.text, self.level = target, text, level
        self.drafts, self.batch_size, self.notify = num_draft_tokens, batch_size, notify
        self.num_counted = len(text.tokens) if num_counted is None else num_counted
        self.rows_per_prompt = rows_per_prompt
        self.logit_rows = text.starts - 1 if logit_rows is None else logit_rows
        self._accepted: dict[Any, np.ndarray] = {}

    def anchors(self, hypothesis: Hypothesis | None = None) -> np.ndarray:
        """Return the anchors with a whole draft after them, [prompts, anchors]."""
        anchors = self.text.anchors(self.drafts)
        if hypothesis is not None and hypothesis.num_draft_tokens:
            anchors &= self.text.anchors(hypothesis.num_draft_tokens, anchors.shape[1])
        return self._by_prompt(anchors)

    def accepted(self, hypothesis: Hypothesis) -> np.ndarray:
        """Return accepted drafts, [prompts, anchors]; of a hopeless one, of the first prompts."""
        return self._by_prompt(self._accepted[hypothesis.key])

    def refusal(self, hypothesis: Hypothesis) -> str:
        """Return why a hypothesis cannot be compared; "" if it can."""
        rows = int(self.anchors(hypothesis).any(axis=1).sum())
        if rows >= MIN_ROWS:
            return ""
        return f"{hypothesis.name}: {rows} rows are long enough; {MIN_ROWS} are needed"

    def _by_prompt(self, rows: np.ndarray) -> np.ndarray:
        rows = rows[: self.num_counted]
        prompts = len(rows) // self.rows_per_prompt
        return rows[: prompts * self.rows_per_prompt].reshape(prompts, -1)

    def replay(self, hypotheses: Sequence[Hypothesis]) -> None:
        """Replay the new hypotheses; the target reads each batch of rows once for all of them.

        Hypotheses that differ in traced values, in the order of features or in weights share a
        program. The first of `hypotheses` is in force, and is replayed on all rows; the others
        while they are not `HOPELESS`.
        """
        new = [h for h in hypotheses if h.key not in self._accepted]
        if not new:
            return
        target, text = self.target, self.text
        mesh = mesh_of(target=target.params, drafter=new[0].loaded)
        batch_size = -(-self.batch_size // mesh.shape["data"]) * mesh.shape["data"]
        layers_of = [h.model_def.bind_abstract().feature_layers for h in new]
        union = tuple(sorted({layer for layers in layers_of for layer in layers}))
        mask, count = text.anchors(self.drafts), len(text.tokens)
        baseline = self._accepted.get(hypotheses[0].key)
        accepted: list[list[np.ndarray]] = [[] for _ in new]
        logits, going = [], list(range(len(new)))
        for begin in range(0, count, batch_size):
            # The last batch is filled up with a row it has, so that it needs no programs of its
            # own.
            rows = np.minimum(np.arange(begin, begin + batch_size), count - 1)
            end = min(begin + batch_size, count)
            shown = f"rows {begin + 1} to {end} of {count}"
            self.notify(f"reading {shown}")
            with _on(mesh):
                tokens, starts, at = _placed(
                    (text.tokens[rows], text.starts[rows], self.logit_rows[rows]), mesh
                )
                output = read(target.model_def, union, target.params, tokens, at)
                logits.append(fetch(output.logits)[: end - begin, 0])
                self.nbytes = self.nbytes or cache_bytes(output)
                for i in going:
                    self.notify(f"{shown}: {new[i].name}")
                    features = tuple(output.features[union.index(layer)] for layer in layers_of[i])
                    model_def, values = traced_values(new[i])
                    drafts = replay(
                        target.model_def,
                        model_def,
                        target.params,
                        new[i].params,
                        {name: jnp.asarray(value) for name, value in values.items()},
                        tokens,
                        starts,
                        dataclasses.replace(output, features=features),
                        anchors=mask.shape[1],
                        num_draft_tokens=new[i].num_draft_tokens or self.drafts,
                        suppress_tokens=generation_of(target).suppress_tokens,
                    )
                    accepted[i].append(fetch(drafts)[: end - begin])
            if end >= SCREENED_ROWS:
                sums = {i: int((np.concatenate(accepted[i]) * mask[:end]).sum()) for i in going}
                best = max(sums.values())
                if baseline is not None:
                    best = max(best, int((baseline[:end] * mask[: len(baseline)][:end]).sum()))
                going = [
                    i for i in going if sums[i] >= HOPELESS * best or (i == 0 and baseline is None)
                ]
        self.logits = np.concatenate(logits)
        self._accepted |= {h.key: np.concatenate(a) for h, a in zip(new, accepted, strict=True)}


def _on(mesh: Mesh) -> contextlib.AbstractContextManager[Any]:
    """Return the context in which programs for weights on a mesh are compiled."""
    return contextlib.nullcontext() if mesh.size == 1 else jax.set_mesh(mesh)


def _placed(rows: Sequence[np.ndarray], mesh: Mesh) -> Any:
    """Put rows of integers on the weights' devices; on one device they stay uncommitted."""
    whole = [np.asarray(x, np.int32) for x in rows]
    return [jnp.asarray(x) for x in whole] if mesh.size == 1 else place_rows(whole, mesh)
