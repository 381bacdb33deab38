"""Log-probabilities of a prompt's own tokens, which evaluations ask for: `echo` and `prompt_logprobs`."""

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

NARROWEST = 64
CHUNK = 256
"""Tokens whose logits are in memory at once."""

Best = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class PromptScores:
    """What the target thinks of a prompt. Nothing comes before the first token, so that one has none.

    Attributes:
      logprobs: of each token after the first.
      top_logprobs: the best tokens in each one's place, best first.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top_logprobs: tuple[Best, ...]


class PromptScorer:
    """Scores prompts, each by one pass of the target. Prompts of similar length share a program.

    Args:
      top: best tokens to tell of in each place.
    """

    def __init__(self, target: LoadedModel, top: int):
        self._target, self._top = target, top
        self._mesh = mesh_of(target=target.params)

    def __call__(self, ids: tuple[int, ...]) -> PromptScores:
        """Score a prompt. This takes the device."""
        if len(ids) == 1:
            return PromptScores(ids, (), ())
        most = self._target.config.max_positions
        width = min(bucket(len(ids), smallest=NARROWEST), most)
        tokens = np.zeros((1, width), np.int32)
        tokens[0, : len(ids)] = ids
        one, length = np.ones(1, np.int32), np.full(1, len(ids), np.int32)
        with own_context(self._mesh):
            found: Any = score(
                self._target,
                self._target.params,
                Sequences.padded(jnp.asarray(tokens), one, length),
                program_features=ProgramFeatures(logprobs=True, top_logprobs=self._top),
                remat=False,
                chunk=CHUNK,
            )
            found = jax.tree.map(lambda x: x[0, 1 : len(ids)].tolist(), fetch(found))
        best: tuple[Best, ...] = ()
        if self._top:
            pairs = zip(found.top_ids, found.top_values, strict=True)
            best = tuple(tuple(zip(*row, strict=True)) for row in pairs)
        return PromptScores(ids, tuple(found.target), best)
