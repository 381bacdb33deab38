"""Run a single row as two equal rows, because XLA is slower for one row than for two.

XLA has special forms for products and writes of one row. Each of them is slower than the general
form for two rows. A single row occurs where a batch has one sequence and a pass has one token. This
module repeats the row and keeps one result.

- A product on an NVIDIA GPU: XLA multiplies elements and adds them up. Above some million elements
  it writes the products to memory in float32, which is twice the size of the weight. A plain step
  of E2B on an H200 takes 2.8 ms with two rows and 3.5 ms with one.
- A batched product on an NVIDIA GPU, such as that of the experts: XLA does the same. A step of
  26B-A4B takes 13.0 ms with two rows and 16.4 ms with one.
- A write to a cache on a CPU: XLA turns one row into a slice update, makes that update twice, and
  copies the whole cache three times in every step.

A whole pass is repeated rather than each of its products. Cutting off the second row takes a kernel
of its own where another kernel reads the first row. On E2B a step has 664 kernels instead of 733.

No weight is read twice: equal tokens need the same weights and the same experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar

from jax import lax

T = TypeVar("T")


def repeat_if_single(
    run: Callable[..., T],
    *args: Any,
    single: bool,
    repeat: Callable[..., tuple[Any, ...]],
    first: Callable[[T], T],
    platform: Literal["cpu", "cuda"] = "cuda",
) -> T:
    """Return `run(*args)`, computed with two equal rows where a single row would be slow.

    Args:
      run: the computation.
      args: its arguments.
      single: whether there is only one row. If not, `run` gets the arguments as they are.
      repeat: returns the arguments with the row repeated.
      first: removes the part of the second row from the result.
      platform: where to repeat the row. On other platforms `run` gets the arguments as they are.
    """
    if not single:
        return run(*args)

    def twice(*args: Any) -> T:
        return first(run(*repeat(*args)))

    return lax.platform_dependent(*args, default=run, **{platform: twice})
