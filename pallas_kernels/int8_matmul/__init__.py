"""A product of rows with a weight of 8-bit codes (int8, fp8) and a scale for each output.

| File | Content |
|---|---|
| `reference.py` | the product in plain JAX |
| `dequantise.py` | codes to numbers inside of kernels |
| `triton.py` | the kernel for most GPUs |
| `small_m.py`, `mosaic.py` | kernels for Hopper: up to 8 rows, and more |
| `mma.py` | the weight of `small_m.py` |
| `tuning.py` | tile sizes, and the sizes for which each kernel is faster |

`small_m.py` also multiplies by gate and up and applies their activation. `mosaic.py` also
multiplies rows of 8-bit floats.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Literal

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

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
from pallas_kernels.int8_matmul.reference import reference, sums
from pallas_kernels.int8_matmul.triton import TileConfig, linear_triton
from pallas_kernels.int8_matmul.tuning import (
    MAX_ROWS,
    MosaicConfig,
    config_for,
    gated_config_for,
    gated_is_faster,
    mosaic_config_for,
    mosaic_is_faster,
    sums_are_faster,
    sums_config_for,
    triton_is_faster,
)

SIZE_MULTIPLE = 64  # inputs and outputs are multiples of it
FLOATS = (jnp.float8_e4m3fn,)
CODES = (jnp.int8, *FLOATS)
Implementation = Literal["auto", "reference", "triton", "mosaic"]
SumsImplementation = Literal["auto", "reference", "mosaic"]
GatedImplementation = SumsImplementation

__all__ = [
    "MosaicConfig",
    "SmallMConfig",
    "TileConfig",
    "gated",
    "linear",
    "reference",
    "rounded_sums",
    "sums",
]


def linear(
    x: Float[Array, "R *in"],
    codes: Shaped[Array, "*out_in"],
    scales: Float[Array, "*out"],
    *,
    dtype: DTypeLike,
    implementation: Implementation = "auto",
    config: TileConfig | SmallMConfig | MosaicConfig | None = None,
    interpret: bool = False,
) -> Float[Array, "R *out"]:
    """Return the sums of x * codes over all axes of x but the first, in float32, times scales.

    Args:
      x: rows.
      codes: [*out, *in], int8 or e4m3.
      scales: float32, [*out].
      dtype: of the result.
      implementation: "triton" needs bfloat16 rows, up to `tuning.MAX_ROWS` of them, inputs and
        outputs that are multiples of 64, and an NVIDIA GPU of compute capability 8.0 or newer, 8.9
        for e4m3 (or `interpret`). "mosaic" needs the same, but 9.0, any number of rows, and with
        more than 8 of them outputs that are a multiple of 128. "auto" takes one of them where it
        can run and is fastest, and takes "reference" elsewhere.
      config: tile sizes of the kernel; None takes them from `tuning.py`.
      interpret: whether to interpret the kernel. It then runs on any device, slowly. For tests.

    Raises:
      ValueError: shapes do not fit together.
      NotImplementedError: implementation is "triton" or "mosaic" and it cannot run.
    """
    _check(x, codes, scales)
    sizes = x.shape[0], math.prod(x.shape[1:]), scales.size
    own = (
        config
        if isinstance(config, (SmallMConfig, MosaicConfig))
        else mosaic_config_for(*sizes, jnp.dtype(dtype).itemsize)
    )
    tile_config = config if isinstance(config, TileConfig) else config_for(*sizes)

    def mosaic(*args: Array) -> Array:
        # not in every jax
        from pallas_kernels.int8_matmul.mosaic import linear_mosaic
        from pallas_kernels.int8_matmul.small_m import linear_small_m

        if isinstance(own, SmallMConfig):
            return linear_small_m(*args, dtype=dtype, config=own)
        assert own is not None
        return linear_mosaic(*args, dtype=dtype, config=own)

    triton = functools.partial(linear_triton, dtype=dtype, config=tile_config, interpret=interpret)
    reason, fp8 = _why_not_cut(*sizes[1:]), codes.dtype != jnp.int8
    candidates = [
        Candidate(
            "mosaic",
            mosaic,
            _why_not_mosaic(x, codes, own, interpret) or reason,
            mosaic_is_faster(*sizes, fp8=fp8),
        ),
        Candidate(
            "triton",
            triton,
            too_many_rows(x, MAX_ROWS) or _why_not_triton(x, codes, interpret) or reason,
            triton_is_faster(*sizes, fp8=fp8),
        ),
    ]
    plain = functools.partial(reference, dtype=dtype)
    return dispatch(implementation, candidates, plain, x, codes, scales)


def gated(
    x: Float[Array, "R *in"],
    codes: Shaped[Array, "*two_F_in"],
    scales: Float[Array, "*two_F"],
    *,
    activation: Activation,
    dtype: DTypeLike,
    implementation: GatedImplementation = "auto",
    config: SmallMConfig | None = None,
) -> Float[Array, "R F"]:
    """Return activation(x @ gate) * (x @ up). Both products are rounded before.

    Args:
      x: rows.
      codes: of gate and of up, int8 or e4m3: [2, F, *in].
      scales: of both, float32: [2, F].
      implementation: "mosaic" has one kernel for all. It needs up to 8 rows, and otherwise the same
        as in `linear`. "auto" takes it where it can run and is faster, and the kernels of `linear`
        elsewhere. "reference" takes none.
      config: of that kernel; None takes it from `tuning.py`.
      others: as in `linear`.

    Raises:
      ValueError: shapes do not fit together.
      NotImplementedError: implementation is "mosaic" and it cannot run.
    """
    _check(x, codes, scales)
    if scales.ndim != 2 or scales.shape[0] != 2:
        raise ValueError(f"scales of gate and up must be [2, outputs]; they are {scales.shape}")
    rows, inputs, outputs = x.shape[0], math.prod(x.shape[1:]), scales.shape[1]
    config = config or gated_config_for(rows, outputs)

    def kernel(*args: Array, config: SmallMConfig) -> Array:
        from pallas_kernels.int8_matmul.small_m import linear_small_m  # not in every jax

        return linear_small_m(*args, dtype=dtype, config=config, activation=activation)

    both = functools.partial(linear, dtype=dtype)
    reason = _why_not_mosaic(x, codes, config, False) or _why_not_cut(inputs, outputs)
    options: Any = dict(outputs=outputs, activation=activation, config=config, reason=reason)
    options["worth_it"] = gated_is_faster(inputs, outputs)
    return dispatch_gated(implementation, kernel, both, x, codes, scales, **options)


def rounded_sums(
    x: Float[Array, "R *in"],
    codes: Float[Array, "*out_in"],
    *,
    dtype: DTypeLike,
    implementation: SumsImplementation = "auto",
    config: MosaicConfig | None = None,
) -> Float[Array, "R *out"]:
    """Return the sums of x * codes over all axes of x but the first, in float32.

    Args:
      x: codes of rounded rows, e4m3.
      codes: [*out, *in], e4m3.
      dtype: of the result. The sums are rounded to it.
      implementation: "mosaic" needs up to 128 rows, sizes as in `linear`, and a Hopper GPU. "auto"
        takes it where it can run and is faster, and takes "reference" elsewhere.
      config: tile sizes of the kernel; None takes them from `tuning.py`.

    Raises:
      ValueError: shapes do not fit together.
      NotImplementedError: implementation is "mosaic" and it cannot run.
    """
    first = codes.ndim - x.ndim + 1  # contracting axis of the codes
    shape = codes.shape[:first]
    if codes.shape != (*shape, *x.shape[1:]):
        raise ValueError(f"rows {x.shape} and codes {codes.shape} do not have the same inputs")
    sizes = x.shape[0], math.prod(x.shape[1:]), math.prod(shape)
    own = config or sums_config_for(*sizes, jnp.dtype(dtype).itemsize)

    def mosaic(x: Array, codes: Array) -> Array:
        from pallas_kernels.int8_matmul.mosaic import sums_mosaic  # not in every jax

        assert own is not None
        flat, codes = x.reshape(x.shape[0], -1), codes.reshape(sizes[2], -1)
        return sums_mosaic(flat, codes, dtype=dtype, config=own).reshape(-1, *shape)

    reason = _why_not_cut(*sizes[1:]) or _why_not_mosaic(x, codes, own, False, FLOATS, FLOATS)
    candidate = Candidate("mosaic", mosaic, reason, sums_are_faster(*sizes))
    plain = functools.partial(sums, axes=tuple(range(first, codes.ndim)), dtype=dtype)
    return dispatch(implementation, [candidate], plain, x, codes)


def _check(x: Array, codes: Array, scales: Array) -> None:
    if codes.shape != (*scales.shape, *x.shape[1:]):
        raise ValueError(
            f"for rows {x.shape} and scales {scales.shape}, codes must be "
            f"{(*scales.shape, *x.shape[1:])}; they are {codes.shape}"
        )


def _why_not_cut(inputs: int, outputs: int) -> str | None:
    if inputs % SIZE_MULTIPLE or outputs % SIZE_MULTIPLE:
        return (
            f"the kernels need inputs and outputs that are multiples of {SIZE_MULTIPLE}, not {inputs} and "
            f"{outputs}"
        )
    return None


def _why_not_triton(
    x: Array,
    codes: Array,
    interpret: bool,
    dtypes: tuple[Any, ...] = (jnp.bfloat16,),
    codes_dtypes: tuple[Any, ...] = CODES,
) -> str | None:
    """Return why the Triton kernel cannot run on the GPU of this machine, or None.

    Args:
      dtypes, codes_dtypes: dtypes of rows and of codes that it takes.
    """
    return why_not_triton(x, interpret=interpret, dtypes=dtypes) or why_not_triton(
        codes, interpret=interpret, dtypes=codes_dtypes
    )


def _why_not_mosaic(
    x: Array,
    codes: Array,
    config: SmallMConfig | MosaicConfig | None,
    interpret: bool,
    *dtypes: tuple[Any, ...],
) -> str | None:
    """Return why a Mosaic kernel cannot run on the GPU of this machine, or None.

    Args:
      dtypes: as in `_why_not_triton`.
    """
    if reason := why_not_mosaic(interpret=interpret):
        return reason
    if config is None:
        return f"the Mosaic kernel has no cut for rows {x.shape} and codes {codes.shape}"
    return _why_not_triton(x, codes, interpret, *dtypes)  # it needs the same
