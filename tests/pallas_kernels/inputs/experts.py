"""Shapes and inputs of `experts`, and difficult routings."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from pallas_kernels.int4_matmul.coding import BLOCK, HALF, Codes, Coding
from tests.pallas_kernels.inputs import Random


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of one layer's experts."""

    experts: int
    top_k: int
    width: int
    hidden: int


GEMMA4_26B_A4B = Shape(experts=128, top_k=8, width=2816, hidden=704)
# Width and hidden size are odd. Few of the experts are in use.
SMALL = Shape(experts=24, top_k=3, width=81, hidden=43)
# The routing of 26B-A4B, with experts that are small enough for the interpreter.
NARROW = Shape(experts=128, top_k=8, width=48, hidden=24)
# Sizes that are multiples of 64, as the kernels for codes need.
CODED = Shape(experts=8, top_k=3, width=192, hidden=128)

ROUTINGS = ("random", "same", "spread", "skewed")


def chosen_experts(shape: Shape, tokens: int, routing: str, seed: int = 0) -> np.ndarray:
    """Return `top_k` different experts for each token: [tokens, top_k].

    Args:
      shape: sizes. Only the number of experts and `top_k` matter.
      tokens: number of tokens.
      routing: "random" is uniform. "same" gives all tokens the same experts. "spread" goes through
        all experts in turn. "skewed" gives one expert to every token.
      seed: seed of the random choices.
    """
    rng = np.random.default_rng(seed)
    random = np.stack([rng.permutation(shape.experts)[: shape.top_k] for _ in range(tokens)])
    match routing:
        case "random":
            chosen = random
        case "same":
            chosen = np.tile(random[0], (tokens, 1))
        case "spread":
            chosen = np.arange(tokens * shape.top_k).reshape(tokens, -1) % shape.experts
        case "skewed":
            chosen = 1 + random % (shape.experts - 1)
            chosen = np.stack([np.unique(row)[: shape.top_k - 1] for row in chosen])
            chosen = np.concatenate([chosen, np.zeros((tokens, 1))], axis=1)
        case _:
            raise ValueError(f"routing is {routing!r}; pass one of {ROUTINGS}")
    return chosen.astype(np.int32)


def logits_for(shape: Shape, chosen: np.ndarray, seed: int = 0) -> Array:
    """Return random float32 logits [tokens, experts] that are largest for the `chosen` experts."""
    logits = np.random.default_rng(seed).normal(size=(len(chosen), shape.experts))
    np.put_along_axis(logits, chosen, np.take_along_axis(logits, chosen, axis=1) + 10, axis=1)
    return jax.device_put(logits.astype(np.float32))


def inputs(
    shape: Shape, tokens: int, dtype: jnp.dtype, routing: str = "random", seed: int = 0
) -> tuple[Array, Array, Array, Array, Array]:
    """Return x, logits, expert_scale, gate_up and down, scaled so that results are of order one."""
    e, d, f = shape.experts, shape.width, shape.hidden
    random = Random(seed)
    return (
        random.normal(tokens, d, dtype=dtype),
        logits_for(shape, chosen_experts(shape, tokens, routing, seed), seed)[None],
        random.uniform(0.5, 2, e, dtype=dtype),
        random.normal(e, d, 2, f, dtype=dtype, scale=d**-0.5),
        random.normal(e, f, d, dtype=dtype, scale=f**-0.5),
    )


def abstract_inputs(
    shape: Shape, tokens: int
) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Return shapes and dtypes of x, logits and expert_scale, in bfloat16."""
    of = jax.ShapeDtypeStruct
    return (
        of((tokens, shape.width), jnp.bfloat16),
        of((1, tokens, shape.experts), jnp.float32),
        of((shape.experts,), jnp.bfloat16),
    )


def abstract_codes(shape: Shape, format: str) -> tuple[Codes, Codes, Coding | None]:
    """Return shapes and dtypes of gate and up and of down as codes, and their coding.

    Args:
      format: "int4" or "int4-g64"; or a dtype of 8 bits.
    """
    of, (e, d, f) = jax.ShapeDtypeStruct, (shape.experts, shape.width, shape.hidden)
    group = {"int4": 32, "int4-g64": 64}.get(format, 0)

    def codes(inputs: int, *outputs: int) -> Codes:
        if not group:
            factors = of((e, *outputs), jnp.float32)
            return Codes(of((e, *outputs, inputs), format), factors=factors)  # type: ignore[arg-type]
        packed = of((e, inputs // BLOCK, *outputs, HALF), jnp.uint8)
        return Codes(packed, of((e, inputs // group, *outputs), jnp.bfloat16))  # type: ignore[arg-type]

    return codes(d, 2, f), codes(f, d), Coding("int4", group) if group else None
