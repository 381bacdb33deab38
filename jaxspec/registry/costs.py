"""The bytes and operations of a pass, counted from configs and shapes. Nothing is measured here.

Read `StepCost`, then `target_cost`, which applies to every target. The entry of a drafter's family
has the drafter's cost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxspec.configs.base import TargetConfig

if TYPE_CHECKING:
    from jaxspec.weights.model_def import ModelDef


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


def target_cost(model_def: ModelDef, batch: int, tokens: int, context: int) -> StepCost:
    """Return the cost of one target pass over `tokens` tokens of each row, with logits for all.

    The declaration of a parameter (`params.param`) says what kind it is. Of a `lookup` table a pass
    reads some rows. Of a parameter with an "experts" axis a pass reads some experts. Every other
    parameter is read whole, and a matrix is also multiplied. An embedding that is also the head
    counts as such a matrix.

    Args:
      batch: the number of rows.
      context: the number of committed tokens of each row.
    """
    config: TargetConfig = model_def.config
    rows = batch * tokens
    weight_bytes = flops = 0.0
    declared = model_def.declared()
    for name, a in model_def.abstract_weights().items():
        nbytes, products = stored_bytes(a), operations(a, rows)
        if declared[name].lookup:
            nbytes, products = nbytes * rows / a.shape[0], 0.0
        elif "experts" in declared[name].axes:
            nbytes *= expected_experts(config, rows) / config.num_experts
            products *= config.num_experts_per_token / config.num_experts
        weight_bytes += nbytes
        flops += products
    kv_bytes, stored = 0.0, model_def.cache_dtype.itemsize
    for layer in config.layers:
        seen = context + tokens
        if layer.window is not None:
            seen = min(seen, layer.window)
        kv_bytes += 2.0 * batch * seen * layer.num_kv_heads * layer.head_dim * stored
        flops += 4.0 * rows * seen * layer.num_heads * layer.head_dim
    return StepCost(weight_bytes, kv_bytes, flops)


def expected_experts(config: TargetConfig, rows: int) -> float:
    """Return the mean number of a layer's experts that uniform routing of `rows` tokens reaches."""
    share = config.num_experts_per_token / config.num_experts
    return config.num_experts * reached(share, rows)


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


def table_bytes(model_def: ModelDef) -> float:
    """Return the bytes of a target's head, which a drafter borrows."""
    assert model_def.head is not None
    return stored_bytes(model_def.abstract_weights()[model_def.head])


def itemsize(model_def: ModelDef) -> int:
    """Return the size in bytes of one number in a model's dtype, as activations have it."""
    import jax.numpy as jnp

    return jnp.dtype(model_def.dtype).itemsize
