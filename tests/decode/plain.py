"""What sampling should do, in numpy, token by token, sorting freely: the reference for distributions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Settings:
    """What one row asks for, under the names of `SamplingParams.make`."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    biases: Mapping[int, float] = field(default_factory=dict)

    def adjusted(
        self, logits: np.ndarray, prompt: Sequence[int], output: Sequence[int]
    ) -> np.ndarray:
        """Return one row of logits with all that comes before temperature."""
        out = logits.astype(np.float64)
        for token, bias in self.biases.items():
            out[token] += bias
        times = Counter(output)
        for token in {*prompt, *output}:
            if out[token] > 0:
                out[token] /= self.repetition_penalty
            else:
                out[token] *= self.repetition_penalty
        for token in times:
            out[token] -= self.presence_penalty + self.frequency_penalty * times[token]
        return out

    def filtered(self, logits: np.ndarray) -> np.ndarray:
        """Return one row after temperature and filters; what ties with the last one kept is kept."""
        out = logits.astype(np.float64) / (self.temperature or 1.0)
        if 0 < self.top_k < out.size:
            out = np.where(out >= np.sort(out)[-self.top_k], out, -np.inf)
        if self.top_p < 1:
            probs = np.exp(out - out.max())
            probs /= probs.sum()
            order = np.argsort(-out, kind="stable")
            mass_before = np.cumsum(probs[order]) - probs[order]
            last = out[order][mass_before < self.top_p][-1]
            out = np.where(out >= last, out, -np.inf)
        if self.min_p > 0:
            out = np.where(out - out.max() >= np.log(self.min_p), out, -np.inf)
        return out


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Return the log of the distribution of each row."""
    logits = logits.astype(np.float64)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def columns(rows: Sequence[Settings], num_biases: int) -> dict[str, np.ndarray]:
    """Return arguments of `SamplingParams.make` with a row for each of these."""
    names = (
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
    )
    result = {name: np.asarray([getattr(row, name) for row in rows]) for name in names}
    ids, values = np.full((len(rows), num_biases), -1), np.zeros((len(rows), num_biases))
    for i, row in enumerate(rows):
        ids[i, : len(row.biases)] = list(row.biases)
        values[i, : len(row.biases)] = list(row.biases.values())
    return {**result, "bias_ids": ids, "bias_values": values}
