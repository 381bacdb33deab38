"""Experts for few tokens: the choice of a router, a gated MLP per expert, and a weighted sum.

| File | Content |
|---|---|
| `reference.py` | the operation in plain JAX |
| `launch.py` | the kernels one after another |
| `routing.py` | the choice of experts; tiles of pairs (token, choice) by expert |
| `triton.py`, `coded.py` | products of most GPUs: with numbers, and with codes |
| `mma.py`, `mosaic.py` | products with codes on Hopper: few tokens, and many |
| `permute.py` | tokens to the rows of their pairs, and back |
| `tile_config.py`, `tuning.py` | tile sizes |

Kernels read each expert in use once, and the others never.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num

from pallas_kernels.dispatch import (
    Candidate,
    dispatch,
    shared_bytes,
    why_not_mosaic,
    why_not_triton,
)
from pallas_kernels.experts.launch import Tiling, experts_mosaic, experts_triton
from pallas_kernels.experts.reference import add_up, choose, reference, router_logits
from pallas_kernels.experts.tile_config import MmaConfig, MosaicConfig
from pallas_kernels.experts.tuning import mosaic_tiling_for, tiling_for
from pallas_kernels.int4_matmul.coding import BLOCK, Codes, Coding
from pallas_kernels.int4_matmul.triton import TileConfig

# The dtypes of codes of 8 bits that the kernels read.
CODES = ("int8", "float8_e4m3fn")
Implementation = Literal["auto", "reference", "triton", "mosaic"]

__all__ = [
    "MmaConfig",
    "MosaicConfig",
    "Tiling",
    "add_up",
    "choose",
    "experts",
    "reference",
    "router_logits",
]


def experts(
    x: Float[Array, "T D"],
    logits: Float[Array, "S T E"],
    expert_scale: Float[Array, " E"],
    gate_up: Num[Array, "X D 2 F"] | Codes,
    down: Num[Array, "X F D"] | Codes,
    real: Bool[Array, " T"] | None = None,
    first: Int[Array, ""] | None = None,
    *,
    top_k: int,
    coding: Coding | None = None,
    implementation: Implementation = "auto",
    tiling: Tiling | None = None,
    interpret: bool = False,
) -> Float[Array, "T D"]:
    """Run each token through the experts that the router chose, and return the weighted sum.

    The result of a token is the sum over its experts of
    weight * (gelu_tanh(x @ gate) * (x @ up)) @ down.

    Args:
      x: tokens, in the dtype of the experts.
      logits: float32 logits of the router, in S parts that are added up. The sum is rounded to the
        dtype of x, as a product would be. `choose` says which experts and weights follow from it.
      expert_scale: a factor of the weight of each expert.
      gate_up: gate and up matrices of each expert, side by side; or their codes. Codes of 8 bits
        have inputs last, [E, 2, F, D], and factors [E, 2, F]. Codes of 4 bits are
        [E, D / 64, 2, F, 32], their scales [E, D / group, 2, F]: see `int4_matmul.coding`.
      down: down matrix of each expert; or its codes, [E, D, F] or [E, F / 64, D, 32].
      real: which tokens are no padding. Experts that only the others chose are not read, and the
        results of the others are 0. None: all.
      first: the number of the first expert in `gate_up` and `down`, where these are only some of
        the experts that the router knows. The result is then the sum over these. None: all.
      top_k: number of experts of a token.
      coding: of codes of 4 bits; None for codes of 8 bits, and for numbers.
      implementation: "triton" needs 16-bit tokens and an NVIDIA GPU of compute capability 8.0 or
        newer (or `interpret`). "mosaic" needs codes of 8 bits, or int4 in groups of 32, and 9.0.
        "auto" takes the fastest that can run, and "reference" where none can.
      tiling: tile sizes of the kernels; None takes them from the table in `tuning.py`.
      interpret: whether to interpret the kernels. They then run on any device, slowly. For tests.

    Raises:
      ValueError: shapes or dtypes do not fit together.
      NotImplementedError: implementation is "triton" or "mosaic" and it cannot run.
    """
    e, d, f = _check(x, gate_up, down, coding)
    _check_router(x, logits, expert_scale, e if first is None else None, top_k)
    bits = 16 if not isinstance(gate_up, Codes) else 8 if coding is None else 4
    each = x.shape[0] * top_k / logits.shape[2]
    own = mosaic_tiling_for(each, bits)
    if tiling is not None and isinstance(tiling.gate_up, (MosaicConfig, MmaConfig)):
        own, tiling = tiling, None
    chosen = tiling is not None
    tiling = tiling or tiling_for(each, bits, shared_bytes())
    reason = why_not_triton(x, interpret=interpret)
    if isinstance(gate_up, Codes):
        reason = reason or _why_not_codes(x, gate_up, f, interpret)
        tiling = _dividing(tiling, f, d, gate_up)
    else:
        reason = reason or why_not_triton(gate_up, interpret=interpret)
    options = dict(top_k=top_k, coding=coding)
    kernel = functools.partial(experts_triton, **options, tiling=tiling, interpret=interpret)
    plain = functools.partial(reference, **options)
    mosaic = functools.partial(experts_mosaic, top_k=top_k, tiling=own or tiling)
    candidates = [
        Candidate(
            "mosaic", mosaic, _why_not_mosaic(x, gate_up, f, coding, own, interpret), not chosen
        ),
        Candidate("triton", kernel, reason),
    ]
    weights = gate_up, down, real, first
    return dispatch(implementation, candidates, plain, x, logits, expert_scale, *weights)


def _why_not_codes(x: Array, gate_up: Codes, f: int, interpret: bool) -> str | None:
    if not interpret and x.dtype != jnp.bfloat16:
        return f"the kernel for codes is cut for bfloat16, not {x.dtype}"
    if x.shape[1] % BLOCK or f % BLOCK:
        return f"the kernel for codes needs multiples of {BLOCK}, not {x.shape[1]} and {f}"
    dtypes = (gate_up.codes.dtype,)
    return why_not_triton(gate_up.codes, interpret=interpret, dtypes=dtypes)


def _why_not_mosaic(
    x: Array,
    gate_up: Array | Codes,
    f: int,
    coding: Coding | None,
    tiling: Tiling | None,
    interpret: bool,
) -> str | None:
    """Return why the Mosaic kernels cannot take these on the GPU of this machine, or None."""
    if not isinstance(gate_up, Codes) or tiling is None:
        return "the Mosaic kernels are cut for codes, and for some numbers of tokens"
    configs = [config for config in (tiling.gate_up, tiling.down) if isinstance(config, MmaConfig)]
    if configs and min(x.shape[1], f) < (least := max(config.inputs for config in configs)):
        return f"the Mosaic kernels for few tokens need sizes from {least} on"
    if coding is not None and (
        coding != Coding("int4", 32)
        or gate_up.scales is None
        or gate_up.scales.dtype != jnp.bfloat16
        or gate_up.zeros is not None
        or gate_up.factors is not None
    ):
        return "the Mosaic kernels take codes of 8 bits, and int4 in groups of 32 with bfloat16"
    if x.shape[1] % (2 * BLOCK):
        return f"the Mosaic kernels need tokens of a multiple of {2 * BLOCK}, not {x.shape[1]}"
    return why_not_mosaic(interpret=interpret) or _why_not_codes(x, gate_up, f, interpret)


def _dividing(tiling: Tiling, f: int, d: int, weight: Codes) -> Tiling:
    """Return a tiling whose columns and steps divide the sizes of both products.

    Scales of one byte are read for twice as many outputs, for the reason that
    `int4_matmul.tuning.fitted` gives.
    """
    if f % BLOCK or d % BLOCK:
        return tiling
    per_group = [a.dtype.itemsize for a in weight[1:3] if a is not None]
    twice = tiling.rows <= 16 and per_group and min(per_group) == 1

    def dividing(config: Any, outputs: int, inputs: int) -> Any:
        if not isinstance(config, TileConfig):
            return config
        wider = dataclasses.replace(config, outputs=2 * config.outputs) if twice else config
        return wider.dividing(outputs, inputs // BLOCK, last_may_reach_past=weight.scales is None)

    return Tiling(tiling.rows, dividing(tiling.gate_up, f, d), dividing(tiling.down, d, f))


def _check_router(
    x: Array, logits: Array, expert_scale: Array, num_experts: int | None, top_k: int
) -> None:
    t, e = x.shape[0], logits.shape[2] if num_experts is None else num_experts
    if logits.shape[1:] != (t, e) or expert_scale.shape != (e,) or logits.dtype != jnp.float32:
        raise ValueError(
            f"logits must be float32 [parts, {t}, {e}] and expert_scale [{e}]; they are "
            f"{logits.dtype} {logits.shape} and {expert_scale.shape}"
        )
    if not 0 < top_k <= e:
        raise ValueError(f"{top_k} different experts a token, of {e}")


def _check(
    x: Array, gate_up: Array | Codes, down: Array | Codes, coding: Coding | None
) -> tuple[int, int, int]:
    """Check the weights, and return the numbers of experts, inputs and hidden numbers."""
    d = x.shape[1]
    if isinstance(gate_up, Codes) and isinstance(down, Codes):
        return _check_codes(x, gate_up, down, coding)
    if isinstance(gate_up, Codes) or isinstance(down, Codes):
        raise ValueError("gate_up and down must both be numbers or both be codes")
    e, f = down.shape[0], down.shape[1]
    _same("tokens and experts must have one dtype", x.dtype, gate_up.dtype, down.dtype)
    _shapes(x, gate_up=(gate_up, (e, d, 2, f)), down=(down, (e, f, d)))
    return e, d, f


def _check_codes(
    x: Array, gate_up: Codes, down: Codes, coding: Coding | None
) -> tuple[int, int, int]:
    """Check codes, and return the numbers of experts, inputs and hidden numbers."""
    d = x.shape[1]
    if coding is None:
        (e, _, f), codes = down.codes.shape, down.codes.dtype
        if codes not in CODES or gate_up.codes.dtype != codes:
            raise ValueError(
                f"codes must be of one dtype of {CODES}; gate_up is {gate_up.codes.dtype}, "
                f"down {codes}"
            )
        _shapes(x, gate_up=(gate_up.codes, (e, 2, f, d)), down=(down.codes, (e, d, f)))
    else:
        e, _, _, f, _ = gate_up.codes.shape
        blocks, groups = ([-(-n // size) for n in (d, f)] for size in (BLOCK, coding.group))
        _shapes(
            x,
            gate_up=(gate_up.codes, (e, blocks[0], 2, f, BLOCK // 2)),
            down=(down.codes, (e, blocks[1], d, BLOCK // 2)),
            gate_up_scales=(gate_up.scales, (e, groups[0], 2, f)),
            down_scales=(down.scales, (e, groups[1], d)),
        )
    if coding is None or gate_up.factors is not None:
        factors = gate_up.factors, down.factors
        _shapes(x, gate_up_factors=(factors[0], (e, 2, f)), down_factors=(factors[1], (e, d)))
    return e, d, f


def _same(message: str, *dtypes: jnp.dtype) -> None:
    if len(set(dtypes)) > 1:
        raise ValueError(f"{message}; they are {', '.join(map(str, dtypes))}")


def _shapes(x: Array, **arrays: tuple[Array | None, tuple[int, ...]]) -> None:
    for name, (array, expected) in arrays.items():
        shape = None if array is None else array.shape
        if shape != expected:
            raise ValueError(f"for tokens {x.shape}, {name} must be {expected}, not {shape}")
