"""The floor of a decode step: bytes and operations from configs, and the rates of the device it runs on.

Read `step_costs`, then `target_cost`; a drafter's own are beside it. Nothing is timed here but the device's ceiling.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.configs.dflash import DFlashConfig
from jaxspec.configs.gemma4 import Gemma4Config
from jaxspec.configs.mtp import MTPConfig
from jaxspec.params import Graph
from jaxspec.state import DecodeSpec


@dataclass(frozen=True)
class Ceiling:
    """What this device can do, measured: bytes that a reduction reads, arithmetic of a big product."""

    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True)
class StepCost:
    """The least one decode step of a whole batch moves and computes.

    Each of its passes (target, every pass of the drafter, absorb) reads each weight that it uses once, and each key and value
    that some query sees once. Of tables that are looked up, the rows; of experts, as many as uniform
    routing would reach.
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


def step_costs(spec: DecodeSpec, batch: int, context: int) -> tuple[StepCost, StepCost]:
    """Return the costs of verifying and of drafting in one step (nothing, without a drafter).

    Each waits for what the other made, so a step takes at least the sum of their floors.

    Args:
      context: committed tokens of each row.
    """
    verify = target_cost(spec.target, batch, spec.step_tokens, context)
    if spec.drafter is None:
        return verify, StepCost(0, 0, 0)
    cost = mtp_cost if isinstance(spec.drafter.config, MTPConfig) else dflash_cost
    return verify, cost(spec, batch, context)


def step_cost(spec: DecodeSpec, batch: int, context: int) -> StepCost:
    """Return all that one step moves and computes."""
    verify, draft = step_costs(spec, batch, context)
    return verify + draft


def step_floor_s(spec: DecodeSpec, batch: int, context: int, ceiling: Ceiling) -> float:
    """Return the seconds below which no step can go."""
    return sum(cost.floor_s(ceiling) for cost in step_costs(spec, batch, context))


def target_cost(graph: Graph, batch: int, tokens: int, context: int) -> StepCost:
    """Return the cost of one target pass over `tokens` tokens a row, with logits for all of them."""
    config: Gemma4Config = graph.config
    rows = batch * tokens
    weight_bytes = flops = 0.0
    for name, a in graph.abstract_params().items():
        nbytes, products = a.size * a.dtype.itemsize, 2.0 * a.size * rows
        if name == "per_layer.table":
            nbytes, products = nbytes * rows / a.shape[0], 0.0
        elif ".experts." in name and a.ndim > 2:
            nbytes *= expected_experts(config, rows) / config.num_experts
            products *= config.num_experts_per_token / config.num_experts
        weight_bytes += nbytes
        flops += products if a.ndim > 1 else 0.0
    kv_bytes = 0.0
    for layer in config.layers:
        seen = context + tokens
        if layer.window is not None:
            seen = min(seen, layer.window)
        kv_bytes += 2.0 * batch * seen * layer.num_kv_heads * layer.head_dim * _itemsize(graph)
        flops += 4.0 * rows * seen * layer.num_heads * layer.head_dim
    return StepCost(weight_bytes, kv_bytes, flops)


def dflash_cost(spec: DecodeSpec, batch: int, context: int) -> StepCost:
    """Return the cost of drafting a block and of absorbing what the target made of it."""
    assert spec.drafter is not None
    config: DFlashConfig = spec.drafter.config
    block = spec.depth + 1  # of a tree, too: its levels share the distributions of one block
    rows = batch * block
    weight_bytes = flops = kv_bytes = 0.0
    for name, a in spec.drafter.abstract_params().items():
        # Keys and values are made twice: of the block that is drafted, of the context that is kept.
        uses = 2 if name.endswith(".kv") else 1
        weight_bytes += uses * a.size * a.dtype.itemsize
        flops += uses * 2.0 * a.size * rows if a.ndim > 1 else 0.0
    head = config.vocab_size * config.hidden_size
    weight_bytes += head * _itemsize(spec.target)
    flops += 2.0 * head * batch * spec.depth
    for kind in config.layer_types:
        seen = context if kind == "full" else min(context, config.sliding_window or context)
        kv_bytes += (
            2.0 * batch * seen * config.num_kv_heads * config.head_dim * _itemsize(spec.target)
        )
        flops += 4.0 * rows * (seen + block) * config.num_heads * config.head_dim
    return StepCost(weight_bytes, kv_bytes, flops)


def mtp_cost(spec: DecodeSpec, batch: int, context: int) -> StepCost:
    """Return the cost of drafting with an assistant, one pass a draft or a level of a tree.

    A pass waits for the token of the pass before it, so each reads everything again (no cache is assumed to
    hold a gigabyte from one pass to the next):

        passes x (weights + head + embedding rows + K/V of the target's last sliding and last full layer)

    A pass has one row a sequence in a chain, `topk` rows in a tree (one in its first level). The head is the
    whole table, or with centroids the rows of the clusters that uniform choices of all rows reach, and their
    places in the order of tokens. The layers of a type share their keys and values, which count once a pass.
    """
    assert spec.drafter is not None
    config: MTPConfig = spec.drafter.config
    params = spec.drafter.abstract_params()
    levels = [1] * spec.depth
    if spec.tree is not None:
        levels[1:] = [spec.tree.topk] * (spec.depth - 1)
    itemsize = _itemsize(spec.target)
    weight_bytes = flops = kv_bytes = 0.0
    for level in levels:
        rows = batch * level
        for name, a in params.items():
            share = used = 1.0  # of the table: read by all rows together, used by each
            if config.num_centroids and name in ("head", "token_ordering"):
                used = config.num_top_centroids / config.num_centroids
                share = _reached(used, rows)
            weight_bytes += share * a.size * a.dtype.itemsize
            flops += 2.0 * used * a.size * rows if a.ndim > 1 else 0.0
        weight_bytes += rows * config.backbone_hidden_size * itemsize
        for kind in set(config.layer_types):
            sliding = kind == "sliding"
            seen = min(context, config.num_window_keys) if sliding else context
            heads = config.num_kv_heads if sliding else config.full_num_kv_heads
            head_dim = config.head_dim if sliding else config.full_head_dim
            kv_bytes += 2.0 * batch * seen * heads * head_dim * itemsize
            layers = config.layer_types.count(kind)
            flops += 4.0 * rows * seen * layers * config.num_heads * head_dim
    return StepCost(weight_bytes, kv_bytes, flops)


def expected_experts(config: Gemma4Config, rows: int) -> float:
    """Return how many experts of a layer uniform routing of `rows` tokens reaches on average."""
    share = config.num_experts_per_token / config.num_experts
    return config.num_experts * _reached(share, rows)


def _reached(share: float, rows: int) -> float:
    """Return the share of a set that `rows` uniform choices of a share each reach together on average."""
    return 1 - (1 - share) ** rows


def _itemsize(graph: Graph) -> int:
    return jnp.dtype(graph.dtype).itemsize


def measure_ceiling(dtype: str, nbytes: float) -> Ceiling:
    """Measure how fast the device reads memory, and its rate in a square product.

    A step reads weights and writes next to nothing, so the bytes are those of a sum, not of a copy: caches of
    a CPU read and write at the same time (a core of an AVX-512 machine took as long to negate 12.5 MB in
    place as to sum them), and no step could read at the sum of both rates.

    Args:
      nbytes: what a step reads; as much is summed (up to 2 GiB), so that a model which fits a cache is
        held against that cache.
    """
    size = int(min(max(nbytes, 1 << 20), 1 << 31)) // 4
    numbers = jax.random.normal(jax.random.key(0), (size,), jnp.float32)
    total = jax.jit(jnp.sum)
    read_s = _median_seconds(lambda: total(numbers))
    n = 1024 if jax.default_backend() == "cpu" else 8192
    a = jax.random.normal(jax.random.key(1), (n, n), jnp.dtype(dtype))
    precision = jax.lax.Precision.HIGHEST if dtype == "float32" else None
    product = jax.jit(functools.partial(jnp.matmul, precision=precision))
    return Ceiling(4 * size / read_s, 2 * n**3 / _median_seconds(lambda: product(a, a)))


def _median_seconds(call: Callable[[], Any], repeats: int = 5, chain: int = 16) -> float:
    jax.block_until_ready(call())
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        for _ in range(chain):  # so that starting a call hides behind the one before
            last = call()
        jax.block_until_ready(last)
        seconds.append((time.perf_counter() - begin) / chain)
    return statistics.median(seconds)
