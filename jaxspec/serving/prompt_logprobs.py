"""Log-probabilities of a prompt's tokens, for the fields `echo` and `prompt_logprobs`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.options import ProgramFeatures
from jaxspec.rollout.scoring import Sequences, score
from jaxspec.runtime.prefill import bucket
from jaxspec.weights.loading import LoadedModel
from jaxspec.weights.sharding import fetch, mesh_of, own_context

MIN_WIDTH = 64
CHUNK = 256
"""Tokens whose logits are in memory at once."""

TopLogprobs = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class PromptScores:
    """Log-probabilities of a prompt's tokens under the target. The first token has none.

    Attributes:
      logprobs: one for each token after the first.
      top_logprobs: the best tokens at each of these positions, best first; empty if none are kept.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top_logprobs: tuple[TopLogprobs, ...]


class PromptScorer:
    """Scores prompts, each by one pass of the target. Prompts of similar length share a program.

    Args:
      top: number of best tokens to keep at each position.
    """

    def __init__(self, target: LoadedModel, top: int):
        self._target, self._top = target, top
        self._mesh = mesh_of(target=target.params)

    def __call__(self, ids: tuple[int, ...]) -> PromptScores:
        """Return the log-probabilities of a prompt's tokens. Runs on the device."""
        if len(ids) == 1:
            return PromptScores(ids, (), ())
        width = min(bucket(len(ids), smallest=MIN_WIDTH), self._target.config.max_positions)
        tokens = np.zeros((1, width), np.int32)
        tokens[0, : len(ids)] = ids
        one, length = np.ones(1, np.int32), np.full(1, len(ids), np.int32)
        with own_context(self._mesh):
            scores: Any = score(
                self._target,
                self._target.params,
                Sequences.padded(jnp.asarray(tokens), one, length),
                program_features=ProgramFeatures(logprobs=True, top_logprobs=self._top),
                remat=False,
                chunk=CHUNK,
            )
            scores = jax.tree.map(lambda x: x[0, 1 : len(ids)].tolist(), fetch(scores))
        best: tuple[TopLogprobs, ...] = ()
        if self._top:
            pairs = zip(scores.top_ids, scores.top_values, strict=True)
            best = tuple(tuple(zip(*row, strict=True)) for row in pairs)
        return PromptScores(ids, tuple(scores.target), best)
