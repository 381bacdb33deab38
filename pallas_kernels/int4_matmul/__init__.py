"""A product of rows with a weight of 4-bit codes (int4, mxfp4, nvfp4) and a scale for each group.

| File | Content |
|---|---|
| `coding.py` | the stored arrays |
| `reference.py` | the product in plain JAX |
| `dequantise.py`, `dequantise_mosaic.py` | codes to numbers inside of kernels |
| `operand.py` | the weight of a Triton kernel, in blocks of inputs |
| `triton.py` | the kernel for most GPUs |
| `small_m.py`, `mma.py`, `mosaic.py` | kernels for Hopper: very few, few and many rows |
| `tuning.py` | tile sizes |

`small_m.py` also multiplies by gate and up and applies their activation.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.common.gated import dispatch_gated
from pallas_kernels.common.reference_ops import Activation
from pallas_kernels.common.tiles import SmallMConfig
from pallas_kernels.dispatch import (
    Candidate,
    dispatch,
    too_many_rows,
    why_not_mosaic,
    why_not_triton,
)
from pallas_kernels.int4_matmul.coding import BLOCK, Codes, Coding
from pallas_kernels.int4_matmul.reference import reference
from pallas_kernels.int4_matmul.triton import TileConfig, linear_triton
from pallas_kernels.int4_matmul.tuning import (
    MmaConfig,
    MosaicConfig,
    config_for,
    gated_config_for,
    mosaic_config_for,
    mosaic_is_faster,
)

# Of Triton's kernel. With more, writing the weight out in 16 bits costs little beside the product.
MAX_ROWS = 512
OUTPUTS_MULTIPLE = 16
Implementation = Literal["auto", "reference", "triton", "mosaic"]
GatedImplementation = Literal["auto", "reference", "mosaic"]

__all__ = [
    "Codes",
    "Coding",
    "MmaConfig",
    "MosaicConfig",
    "SmallMConfig",
    "TileConfig",
    "gated",
    "linear",
    "reference",
]


def linear(
    x: Float[Array, "R K"],
    weight: Codes,
    *,
    coding: Coding,
    inputs_first: bool = True,
    dtype: DTypeLike,
    implementation: Implementation = "auto",
    config: TileConfig | SmallMConfig | MosaicConfig | None = None,
    interpret: bool = False,
) -> Float[Array, "R N"]:
    """Return x @ weight, summed in float32.

    Args:
      x: rows.
      weight: codes [K / 64, N, 32] and scales [K / group, N]; or, unless `inputs_first`,
        [N, K / 64, 32] and [N, K / group]. See `coding.Codes`.
      dtype: of the result.
      implementation: "triton" needs bfloat16 rows, up to 512 of them, inputs that are a multiple of
        64, outputs that are a multiple of 16, and an NVIDIA GPU of compute capability 8.0 or newer
        (or `interpret`). "mosaic" needs bfloat16 rows, a GPU of compute capability 9.0, int4 in
        groups of 32, 64 or 128 with bfloat16 scales and without zeros, inputs first, and outputs
        that are a multiple of 128, or of 16 where `small_m.py` takes them. "auto" takes Mosaic
        where `tuning.mosaic_is_faster`, else Triton, where they can run, and takes "reference"
        elsewhere.
      config: tile sizes of the kernel; None takes them from `tuning.py`.
      interpret: whether to interpret the kernel. It then runs on any device, slowly. For tests.

    Raises:
      ValueError: shapes do not fit together.
      NotImplementedError: implementation is "triton" or "mosaic" and it cannot run.
    """
    blocks, outputs = weight.codes.shape[:2] if inputs_first else weight.codes.shape[1::-1]
    _check(x, weight, coding, inputs_first)
    kwargs = dict(coding=coding, inputs_first=inputs_first, dtype=dtype)
    per_group = [array for array in (weight.scales, weight.zeros) if array is not None]
    scale_bytes = min(array.dtype.itemsize for array in per_group)
    own = (
        config
        if isinstance(config, (SmallMConfig, MosaicConfig))
        else mosaic_config_for(x.shape[0], blocks, outputs, jnp.dtype(dtype).itemsize)
    )
    tiles = (
        config
        if isinstance(config, TileConfig)
        else config_for(x.shape[0], blocks, outputs, scale_bytes)
    )

    def mosaic(x: Array, weight: Codes) -> Array:
        # not in every jax
        from pallas_kernels.int4_matmul.mma import linear_mma
        from pallas_kernels.int4_matmul.mosaic import linear_mosaic
        from pallas_kernels.int4_matmul.small_m import linear_small_m

        kwargs: Any = dict(group=coding.group, dtype=dtype)
        if isinstance(own, SmallMConfig):
            return linear_small_m(x, weight, **kwargs, config=own)
        if isinstance(own, MmaConfig):
            return linear_mma(x, weight, **kwargs, config=own)
        assert own is not None
        return linear_mosaic(x, weight, **kwargs, config=own)

    triton = functools.partial(linear_triton, **kwargs, config=tiles, interpret=interpret)
    reason = why_not_triton(x, interpret=interpret, dtypes=(jnp.bfloat16,))
    reason = reason or _why_not(x, weight, outputs)
    candidates = [
        Candidate(
            "mosaic",
            mosaic,
            _why_not_mosaic(x, weight, coding, inputs_first, own, interpret) or reason,
            mosaic_is_faster(x.shape[0], blocks, outputs),
        ),
        Candidate("triton", triton, too_many_rows(x, MAX_ROWS) or reason),
    ]
    return dispatch(implementation, candidates, functools.partial(reference, **kwargs), x, weight)


def gated(
    x: Float[Array, "R K"],
    weight: Codes,
    *,
    coding: Coding,
    activation: Activation,
    dtype: DTypeLike,
    implementation: GatedImplementation = "auto",
    config: SmallMConfig | None = None,
) -> Float[Array, "R F"]:
    """Return activation(x @ gate) * (x @ up). Both products are rounded before.

    Args:
      x: rows.
      weight: gate and up side by side: codes [K / 64, 2, F, 32], scales [K / group, 2, F].
      implementation: "mosaic" is one kernel for products and activation, for up to 8 rows and the
        weights that `linear` takes. "auto" chooses it where it runs and is faster, and otherwise
        the kernels of `linear`. "reference" is plain JAX.
      config: of that kernel; None takes it from `tuning.py`.
      others: as in `linear`.

    Raises:
      ValueError: shapes do not fit together.
      NotImplementedError: implementation is "mosaic" and it cannot run.
    """
    if weight.codes.ndim != 4 or weight.codes.shape[1] != 2:
        raise ValueError(
            f"codes of gate and up must be [blocks, 2, outputs, 32]; they are {weight.codes.shape}"
        )
    rows, outputs = x.shape[0], weight.codes.shape[2]
    config = config or gated_config_for(rows, outputs)

    def kernel(x: Array, weight: Codes, config: SmallMConfig) -> Array:
        from pallas_kernels.int4_matmul.small_m import linear_small_m  # not in every jax

        kwargs: Any = dict(group=coding.group, dtype=dtype, activation=activation)
        return linear_small_m(x, weight, **kwargs, config=config)

    def both(x: Array, weight: Codes, implementation: Implementation) -> Array:
        kwargs: Any = dict(coding=coding, dtype=dtype, implementation=implementation)
        return linear(x, _side_by_side(weight), **kwargs)

    _check(x, jax.eval_shape(_side_by_side, weight), coding, True)
    reason = why_not_triton(x, interpret=False, dtypes=(jnp.bfloat16,))
    reason = reason or _why_not(x, weight, outputs)
    reason = _why_not_mosaic(x, weight, coding, True, config, False) or reason
    options: Any = dict(outputs=outputs, activation=activation, config=config, reason=reason)
    return dispatch_gated(implementation, kernel, both, x, weight, **options)


def _side_by_side(weight: Codes) -> Codes:
    """Return gate and up as one matrix."""

    def joined(array: Array | None) -> Array | None:
        return None if array is None else array.reshape(array.shape[0], -1)

    factors = None if weight.factors is None else weight.factors.reshape(-1)
    codes = weight.codes.reshape(weight.codes.shape[0], -1, weight.codes.shape[-1])
    return Codes(codes, joined(weight.scales), joined(weight.zeros), factors)


def _why_not_mosaic(
    x: Array,
    weight: Codes,
    coding: Coding,
    inputs_first: bool,
    config: SmallMConfig | MosaicConfig | None,
    interpret: bool,
) -> str | None:
    """Return why the Mosaic kernel cannot run on the GPU of this machine, or None."""
    if reason := why_not_mosaic(interpret=interpret):
        return reason
    if not inputs_first or config is None:
        return (
            "the Mosaic kernel needs inputs first and outputs that are a multiple of 128; "
            f"codes are {weight.codes.shape}"
        )
    others = weight.zeros is not None or weight.factors is not None
    if coding.kind != "int4" or coding.group < 32 or others:
        return f"the Mosaic kernel takes int4 in groups of 32 and more without zeros, not {coding}"
    if weight.scales is None or weight.scales.dtype != jnp.bfloat16:
        return "the Mosaic kernel takes bfloat16 scales"
    return None


def _why_not(x: Array, weight: Codes, outputs: int) -> str | None:
    if x.shape[1] % BLOCK or outputs % OUTPUTS_MULTIPLE:
        return (
            f"the Triton kernel needs inputs that are a multiple of {BLOCK} and outputs that are one "
            f"of {OUTPUTS_MULTIPLE}, not {x.shape[1]} and {outputs}"
        )
    if weight.codes.size >= 2**31:
        return f"the Triton kernel's offsets are 32 bits, and there are {weight.codes.size} codes"
    return None


def _check(x: Array, weight: Codes, coding: Coding, inputs_first: bool) -> None:
    inputs, outputs = x.shape[1], weight.codes.shape[1 if inputs_first else 0]

    def shape(count: int) -> tuple[int, ...]:
        return (count, outputs) if inputs_first else (outputs, count)

    wanted: dict[str, tuple[int, ...]] = dict(
        codes=(*shape(-(-inputs // BLOCK)), BLOCK // 2),
        scales=shape(-(-inputs // coding.group)),
        zeros=shape(-(-inputs // coding.group)),
        factors=(outputs,),
    )
    for name, array in weight._asdict().items():
        if array is not None and array.shape != wanted[name]:
            raise ValueError(
                f"for rows {x.shape} and groups of {coding.group}, {name} must be "
                f"{wanted[name]}; they are {array.shape}"
            )
