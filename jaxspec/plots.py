"""Pictures of results. They need matplotlib, the extra `plot`."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from jaxspec.api import Generation
from jaxspec.rollout.batch import GenerateResult


def plot_acceptance(
    result: GenerateResult | Generation | Iterable[Generation], axes: Any = None
) -> Any:
    """Draw the share of verify steps that accepted each draft token, and return the axes.

    Args:
      result: of a `Sampler`, or what `Pair.generate` returns.
      axes: of matplotlib, to draw on; None: new ones.

    Raises:
      ValueError: no step verified a draft, or matplotlib is not installed.
    """
    shares, mean = _acceptance(result)
    if axes is None:
        try:
            pyplot = importlib.import_module("matplotlib.pyplot")
        except ImportError:
            raise ValueError(
                "plot_acceptance needs matplotlib: pip install 'jaxspec-decoding[plot]'"
            ) from None
        axes = pyplot.subplots()[1]
    axes.bar(np.arange(1, len(shares) + 1), shares)
    axes.set_ylim(0, 1)
    axes.set_xticks(np.arange(1, len(shares) + 1))
    axes.set_xlabel("draft token")
    axes.set_ylabel("share of steps that accepted it")
    axes.set_title(f"{mean:.2f} tokens a step")
    return axes


def _acceptance(
    result: GenerateResult | Generation | Iterable[Generation],
) -> tuple[np.ndarray, float]:
    """Return the share of steps that accepted each draft, and the mean tokens of a step."""
    if isinstance(result, GenerateResult):
        shares = np.asarray(result.accepted_per_depth())
        mean = float(result.acceptance_length())
    else:
        generations = [result] if isinstance(result, Generation) else list(result)
        lengths = np.asarray([n for one in generations for n in one.acceptance_lengths], np.int32)
        depths = np.arange(1, lengths.max(initial=1))
        shares = (lengths[:, None] > depths).mean(axis=0) if len(lengths) else depths
        mean = lengths.mean() if len(lengths) else 1.0
    if not len(shares):
        raise ValueError("no step of this result accepted a draft, so there is nothing to draw")
    return shares, float(mean)
