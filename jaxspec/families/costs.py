"""The bytes and operations of a pass, counted from configs and shapes. Nothing is measured here.

Read `StepCost`, then `target_cost`, which holds for every target. A drafter's cost is in its family's entry.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxspec.configs.base import TargetConfig

if TYPE_CHECKING:
    from jaxspec.params import Graph


@dataclass(frozen=True)
class Ceiling:
    """What this device can do, measured: bytes that a reduction reads, arithmetic of a big product."""

    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True)
class StepCost:
    """The least one decode step of a whole batch moves and computes.

    Each of its passes (target, every pass of the drafter, absorb) reads each weight that it uses once, and
    each key and value that some query sees once. Of a table that is looked up it reads the rows. Of experts it
    reads as many as uniform routing would reach.
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


def target_cost(graph: Graph, batch: int, tokens: int, context: int) -> StepCost:
    """Return the cost of one target pass over `tokens` tokens a row, with logits for all of them.

    Parameters say what they are where they are declared (`params.param`): a table that is only looked up,
    or weights of experts, by their axis. All others are read whole, and multiplied if they are matrices.
    An embedding that is the head too is such a matrix.

    Args:
      context: committed tokens of each row.
    """
    config: TargetConfig = graph.config
    rows = batch * tokens
    weight_bytes = flops = 0.0
    declared = graph.declared()
    for name, a in graph.abstract_params().items():
        nbytes, products = a.size * a.dtype.itemsize, 2.0 * a.size * rows
        if declared[name].lookup:
            nbytes, products = nbytes * rows / a.shape[0], 0.0
        elif "experts" in declared[name].axes:
            nbytes *= expected_experts(config, rows) / config.num_experts
            products *= config.num_experts_per_token / config.num_experts
        weight_bytes += nbytes
        flops += products if a.ndim > 1 else 0.0
    kv_bytes = 0.0
    for layer in config.layers:
        seen = context + tokens
        if layer.window is not None:
            seen = min(seen, layer.window)
        kv_bytes += 2.0 * batch * seen * layer.num_kv_heads * layer.head_dim * itemsize(graph)
        flops += 4.0 * rows * seen * layer.num_heads * layer.head_dim
    return StepCost(weight_bytes, kv_bytes, flops)


def expected_experts(config: TargetConfig, rows: int) -> float:
    """Return how many experts of a layer uniform routing of `rows` tokens reaches on average."""
    share = config.num_experts_per_token / config.num_experts
    return config.num_experts * reached(share, rows)


def reached(share: float, rows: int) -> float:
    """Return the share of a set that `rows` uniform choices of a share each reach together on average."""
    return 1 - (1 - share) ** rows


def itemsize(graph: Graph) -> int:
    """Return the bytes of one number of a model."""
    import jax.numpy as jnp

    return jnp.dtype(graph.dtype).itemsize
