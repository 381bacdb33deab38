"""A row that is alone goes twice: the way round what XLA does to products and writes of one row.

XLA has special forms for one row, and each of them is slower than the general form for two. One row
occurs where a batch has one sequence and a pass one token. It is repeated, and one result is kept.

- A product on an NVIDIA GPU. XLA multiplies elements and adds them up. Above some million elements
  it writes the products down in float32, twice the size of the weight. Measured on an H200, a plain
  step of E2B: 2.8 ms with two rows, 3.5 ms with one.
- A batched product, as of experts, on an NVIDIA GPU. The same: 26B-A4B, 13.0 ms instead of 16.4.
- Cutting the second row off is a kernel of its own where another kernel reads the first. A whole
  pass is therefore repeated, rather than each of its products: E2B, 664 kernels a step instead of
  733.
- A write to a cache on a CPU. XLA makes a slice update of one row, makes that twice, and then
  copies the whole cache three times in every step.

No weight is read twice for that: equal tokens need the same weights, and the same experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar

from jax import lax

T = TypeVar("T")


def twice_if_alone(
    run: Callable[..., T],
    *args: Any,
    alone: bool,
    repeat: Callable[..., tuple[Any, ...]],
    first: Callable[[T], T],
    platform: Literal["cpu", "cuda"] = "cuda",
) -> T:
    """Return run(*args); on the platform where one row is slow, by way of two equal rows.

    Args:
      alone: whether there is one row only; with more nothing is changed.
      repeat: makes of the arguments those with the row repeated.
      first: cuts from the result what the second row added.
      platform: where to do so; elsewhere `run` gets the arguments as they are.
    """
    if not alone:
        return run(*args)

    def twice(*args: Any) -> T:
        return first(run(*repeat(*args)))

    return lax.platform_dependent(*args, default=run, **{platform: twice})
