"""The bytes and operations of a pass, counted from configs and shapes. Nothing is measured here.

Read `StepCost`. The entry of a drafter's family computes the drafter's cost from a `DraftStep`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Ceiling:
    """The measured speed limits of this device.

    Attributes:
      bytes_per_s: how fast a reduction reads memory.
      flops_per_s: how fast a big matrix product computes.
    """

    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True)
class StepCost:
    """The least that one decode step of a whole batch must read and compute.

    A step has several passes: the target's, every pass of the drafter, and absorb. A pass reads
    once each weight that it uses, and each key and value that some query sees. A pass that looks up
    a table reads only the rows of its tokens. A pass with experts reads as many as uniform routing
    reaches.
    """

    weight_bytes: float
    kv_bytes: float
    flops: float

    def __add__(self, other: StepCost) -> StepCost:
        return StepCost(
            self.weight_bytes + other.weight_bytes,
            self.kv_bytes + other.kv_bytes,
            self.flops + other.flops,
        )

    def floor_s(self, ceiling: Ceiling) -> float:
        """Return the seconds below which nothing of this cost can go."""
        memory = (self.weight_bytes + self.kv_bytes) / ceiling.bytes_per_s
        return max(memory, self.flops / ceiling.flops_per_s)


NOTHING = StepCost(0, 0, 0)


@dataclass(frozen=True)
class DraftStep:
    """The facts of a decode step that the cost of drafting depends on.

    Attributes:
      config: the drafter's config.
      weights: the drafter's abstract weights by name, arrays or quantised arrays.
      depth: the number of draft tokens on each path from the anchor.
      topk: the rows of a tree's levels after the first; 1 for a chain.
      num_draft_tokens: the draft tokens of a whole step.
      itemsize: bytes of one number of an activation.
      cache_itemsize: bytes of one number in the target's caches.
      head_bytes: bytes of the target's head; 0 if the target declares no head.
    """

    config: Any
    weights: Mapping[str, Any]
    depth: int
    topk: int
    num_draft_tokens: int
    itemsize: int
    cache_itemsize: int
    head_bytes: int


def reached(share: float, rows: int) -> float:
    """Return the mean share of a set that `rows` choices reach together.

    Args:
      share: the share of the set that each choice takes, uniformly at random.
    """
    return 1 - (1 - share) ** rows


def operations(weight: Any, rows: float) -> float:
    """Return the operations of a product of rows with an abstract weight, an array or a quantised one.

    Where activations are rounded to 8 bits too, they count half: a GPU does twice as many in a second.
    """
    if weight.ndim < 2:
        return 0.0
    return 2.0 * weight.size * rows * (0.5 if getattr(weight, "rounds_activations", False) else 1.0)


def stored_bytes(weight: Any) -> int:
    """Return the bytes of an abstract weight, an array or a quantised one."""
    nbytes = getattr(weight, "nbytes", None)
    return weight.size * weight.dtype.itemsize if nbytes is None else nbytes
