"""The floor of a decode step: its bytes and operations, and the ceiling of the device.

Read `step_costs`; `registry.costs` counts the costs of models. Only the ceiling is measured.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxspec.configs.base import TargetConfig
from jaxspec.configs.gemma4_vision import Gemma4VisionConfig
from jaxspec.registry import family_of
from jaxspec.registry.costs import (
    NOTHING,
    Ceiling,
    DraftStep,
    StepCost,
    operations,
    reached,
    stored_bytes,
)
from jaxspec.state import DecodeSpec
from jaxspec.weights.model_def import ModelDef


def step_costs(spec: DecodeSpec, batch: int, context: int) -> tuple[StepCost, StepCost]:
    """Return the costs of verifying and of drafting in one step, the latter 0 without a drafter.

    Each waits for the other, so a step takes at least the sum of their floors.

    Args:
      context: committed tokens of each row.
    """
    verify = target_cost(spec.target, batch, spec.step_tokens, context)
    if spec.drafter is None:
        return verify, NOTHING
    cost = family_of(spec.drafter.config).cost
    return verify, NOTHING if cost is None else cost(draft_step(spec), batch, context)


def step_cost(spec: DecodeSpec, batch: int, context: int) -> StepCost:
    """Return the cost of one step."""
    verify, draft = step_costs(spec, batch, context)
    return verify + draft


def step_floor_s(spec: DecodeSpec, batch: int, context: int, ceiling: Ceiling) -> float:
    """Return the least seconds of a step."""
    return sum(cost.floor_s(ceiling) for cost in step_costs(spec, batch, context))


def stream_floor_s(
    spec: DecodeSpec,
    slots: int,
    requests: Sequence[tuple[int, int]],
    ceiling: Ceiling,
    groups: int = 1,
) -> float | None:
    """Return the least seconds of a stream of requests; None if nothing says what a step commits.

    That is the arithmetic of the prompts without padding, each with logits for one token, and so
    many steps of full slots as the new tokens need. What a drafter reads of a prompt is not counted.

    Args:
      slots: those of one group.
      requests: prompt tokens and new tokens of each.
      ceiling: that of the devices of one group together, see `share_of_group`.
      groups: how many groups of devices share the requests.
    """
    acceptance = spec.drafting.synthetic_acceptance
    if spec.drafter is not None and acceptance is None:
        return None
    target, flops = spec.target, 0.0
    head = None if target.head is None else target.abstract_params()[target.head]
    for prompt, _ in requests:
        # A token sees half of the prompt on average.
        flops += target_cost(target, 1, prompt, -(prompt // 2)).flops
        flops -= 0.0 if head is None else operations(head, prompt - 1)
    steps = math.ceil(sum(new for _, new in requests) / (groups * slots * (acceptance or 1)))
    context = round(statistics.mean(prompt + new / 2 for prompt, new in requests))
    prompts_s = flops / (groups * ceiling.flops_per_s)
    return prompts_s + steps * step_floor_s(spec, slots, context, ceiling)


def target_cost(model_def: ModelDef, batch: int, tokens: int, context: int) -> StepCost:
    """Return the cost of one target pass over `tokens` tokens of each row, with logits for all.

    The declaration of a parameter (`model_def.param`) says what kind it is. Of a `lookup` table a
    pass reads some rows. Of a parameter with an "experts" axis a pass reads some experts. Every
    other parameter is read whole, and a matrix is also multiplied. An embedding that is also the
    head counts as such a matrix.

    Args:
      batch: the number of rows.
      context: the number of committed tokens of each row.
    """
    config: TargetConfig = model_def.config
    rows = batch * tokens
    weight_bytes = flops = 0.0
    declared = model_def.declared()
    for name, a in model_def.abstract_params().items():
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


def image_cost(vision: ModelDef, tokens: int) -> StepCost:
    """Return the cost of one image that becomes so many tokens, by a target's vision part.

    Each weight is read once, of the table of positions two rows for each patch. The last product
    has a row for each token, all others for each patch. Each patch attends to all.
    """
    config: Gemma4VisionConfig = vision.config
    patches = tokens * config.pool_size**2
    weight_bytes = flops = 0.0
    for name, weight in vision.abstract_params().items():
        nbytes, products = stored_bytes(weight), operations(weight, patches)
        if name == "encoder.positions":
            nbytes *= min(1, patches / config.num_positions)
            products = 0.0
        elif name == "projection":
            products = operations(weight, tokens)
        weight_bytes += nbytes
        flops += products
    attention = 4.0 * patches**2 * config.num_heads * config.head_dim
    return StepCost(weight_bytes, 0, flops + config.num_layers * attention)


def draft_step(spec: DecodeSpec) -> DraftStep:
    """Return the facts of a step that the cost of drafting depends on."""
    target, drafter = spec.target, spec.drafter
    assert drafter is not None
    head = None if target.head is None else target.abstract_params()[target.head]
    return DraftStep(
        drafter.config,
        drafter.abstract_params(),
        depth=spec.depth,
        topk=1 if spec.tree is None else spec.tree.topk,
        num_draft_tokens=spec.num_draft_tokens,
        itemsize=jnp.dtype(target.dtype).itemsize,
        cache_itemsize=target.cache_dtype.itemsize,
        head_bytes=0 if head is None else stored_bytes(head),
    )


def expected_experts(config: TargetConfig, rows: int) -> float:
    """Return the mean number of a layer's experts that uniform routing of `rows` tokens reaches."""
    share = config.num_experts_per_token / config.num_experts
    return config.num_experts * reached(share, rows)


def measure_ceiling(dtype: str, nbytes: float) -> Ceiling:
    """Measure the rate at which the device reads memory, and its rate in a square product.

    A step reads weights and writes almost nothing, so the rate is that of a sum, not of a copy. CPU
    caches read and write at the same time (a core of an AVX-512 machine negates 12.5 MB in place as
    fast as it sums them), and no step reads at the sum of both rates.

    Args:
      nbytes: read by a step. As many are summed (up to 2 GiB), so that a model that fits a cache is
        compared with that cache.
    """
    size = int(min(max(nbytes, 1 << 20), 1 << 31)) // 4
    numbers = jax.random.normal(jax.random.key(0), (size,), jnp.float32)
    total = jax.jit(jnp.sum)
    read_s = statistics.median(call_seconds(lambda: total(numbers)))
    n = 1024 if jax.default_backend() == "cpu" else 8192
    a = jax.random.normal(jax.random.key(1), (n, n), jnp.dtype(dtype))
    precision = jax.lax.Precision.HIGHEST if dtype == "float32" else None
    product = jax.jit(functools.partial(jnp.matmul, precision=precision))
    product_s = statistics.median(call_seconds(lambda: product(a, a)))
    return Ceiling(4 * size / read_s, 2 * n**3 / product_s)


def call_seconds(call: Callable[[], Any], repeats: int = 5, chain: int = 16) -> list[float]:
    """Return the seconds of a call, `repeats` times, after a warm-up.

    Args:
      chain: calls that are timed together.
    """
    jax.block_until_ready(call())
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        for _ in range(chain):  # starting a call overlaps with the one before
            last = call()
        jax.block_until_ready(last)
        seconds.append((time.perf_counter() - begin) / chain)
    return seconds


def share_of_group(mesh: Mesh, batch: int, ceiling: Ceiling) -> tuple[int, Ceiling]:
    """Return the rows of the devices of one model axis, and the ceiling of these together."""
    data, model = mesh.shape["data"], mesh.shape["model"]
    # CPU devices share the memory and cores of the host, all of which were measured.
    times = 1 / data if mesh.devices.flat[0].platform == "cpu" else model
    together = Ceiling(ceiling.bytes_per_s * times, ceiling.flops_per_s * times)
    return batch // data, together
