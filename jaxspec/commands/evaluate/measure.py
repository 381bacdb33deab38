"""The counts of `jaxspec eval`: acceptance over steps and over responses, with intervals over responses.

Read `summarise`. Two means are in use. The micro figure is all committed tokens by all verify steps
(DeepSpec). The macro figure is the mean over responses of each one's own mean (z-lab). Both count the
bonus token, and neither the token of prefill. Intervals are bootstrap ones over responses, because
steps of one response are alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

LEVEL = 0.95
RESAMPLES = 2000
BUCKETS = (512, 1024, 2048, 4096, 8192, 16_384, 32_768)
"""Where buckets of context length end. The last one has no end."""


@dataclass(frozen=True)
class Response:
    """One response with drafts.

    Attributes:
      prompt_tokens: of its prompt.
      acceptance_lengths: the tokens that each verify step committed.
      num_tokens: new tokens.
    """

    prompt_tokens: int
    acceptance_lengths: tuple[int, ...]
    num_tokens: int
    category: str = ""

    @property
    def contexts(self) -> np.ndarray:
        """The committed tokens before each verify step."""
        committed = np.cumsum((1, *self.acceptance_lengths))[:-1]
        return self.prompt_tokens + committed


@dataclass(frozen=True)
class Interval:
    """A figure and its interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Group:
    """The steps of a bucket or of a category.

    Attributes:
      steps: verify steps.
      micro: tokens a step.
    """

    name: str
    steps: int
    micro: float


@dataclass(frozen=True)
class Summary:
    """The worth of the drafts of all responses.

    Attributes:
      micro, macro: mean acceptance length over steps, and over responses.
      positions: for each draft position, the share of steps whose draft there was accepted.
      conditional: likewise, of the steps that accepted all drafts before it.
      by_context: by the committed tokens before a step.
      by_category: by the category of the prompt.
    """

    responses: int
    steps: int
    micro: Interval
    macro: Interval
    positions: tuple[float, ...]
    conditional: tuple[float, ...]
    by_context: tuple[Group, ...]
    by_category: tuple[Group, ...]


def summarise(responses: Sequence[Response], num_drafts: int, seed: int = 0) -> Summary:
    """Count what drafts were worth.

    Args:
      responses: those without a verify step are left out.
      num_drafts: drafts of a step.

    Raises:
      ValueError: no response has a verify step.
    """
    responses = [r for r in responses if r.acceptance_lengths]
    if not responses:
        raise ValueError("no response has a verify step: all ended with their first token")
    committed = np.asarray([sum(r.acceptance_lengths) for r in responses], np.float64)
    steps = np.asarray([len(r.acceptance_lengths) for r in responses], np.float64)
    lengths = np.concatenate([r.acceptance_lengths for r in responses])
    reached = [int((lengths > i).sum()) for i in range(num_drafts + 1)]
    contexts = np.concatenate([r.contexts for r in responses])
    index = np.searchsorted(BUCKETS, contexts, side="right")
    categories = np.concatenate([[r.category] * len(r.acceptance_lengths) for r in responses])
    names = sorted({r.category for r in responses} - {""})
    return Summary(
        len(responses),
        len(lengths),
        _interval(lambda i: committed[i].sum(-1) / steps[i].sum(-1), len(responses), seed),
        _interval(lambda i: (committed / steps)[i].mean(-1), len(responses), seed),
        tuple(reached[i + 1] / reached[0] for i in range(num_drafts)),
        tuple(reached[i + 1] / reached[i] if reached[i] else 0.0 for i in range(num_drafts)),
        tuple(_group(_bucket(i), lengths[index == i]) for i in sorted({*index.tolist()})),
        tuple(_group(name, lengths[categories == name]) for name in names),
    )


def _interval(figure: Callable[[Any], Any], count: int, seed: int) -> Interval:
    """Return a figure of all responses, and the interval of it over resampled ones."""
    chosen = np.random.default_rng(seed).integers(0, count, (RESAMPLES, count))
    low, high = np.quantile(figure(chosen), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(figure(np.arange(count))), float(low), float(high))


def _group(name: str, lengths: np.ndarray) -> Group:
    return Group(name, len(lengths), float(lengths.mean()))


def _bucket(index: int) -> str:
    low = 0 if index == 0 else BUCKETS[index - 1]
    return f"{low}-{BUCKETS[index] - 1}" if index < len(BUCKETS) else f"{low} and more"
