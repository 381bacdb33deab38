"""Choose which implementation of an operation runs, for all operations.

An operation has a plain reference, which runs anywhere, and kernels, which have requirements. The
operation lists its kernels as `Candidate`s, in order of preference, and calls `dispatch`. The
choice is made when a program is compiled. Derivatives never use a kernel.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Generic, Literal, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

T = TypeVar("T")
Implementation = Literal["auto", "reference", "triton"]


@dataclasses.dataclass(frozen=True)
class Candidate(Generic[T]):
    """A kernel that may stand in for the reference of an operation."""

    name: str
    """Value of `implementation` that requests this kernel."""
    kernel: Callable[..., T]
    """The kernel; it takes the same arguments as the reference."""
    reason: str | None
    """Why the kernel cannot take these arrays on this machine; None if it can."""
    worth_it: bool = True
    """Whether "auto" should take the kernel when it can run."""


def dispatch(
    implementation: str, candidates: Sequence[Candidate[T]], reference: Callable[..., T], *args: Any
) -> T:
    """Call the chosen implementation. "auto" takes the first candidate that can and should run.

    "auto" falls back to the reference where no candidate qualifies, in programs for devices other
    than NVIDIA GPUs, and for derivatives. An explicit choice never falls back.

    Args:
      implementation: "auto", "reference", or the name of a candidate.
      candidates: the operation's kernels, in order of preference.
      reference: the operation in plain JAX.
      args: arguments of the operation: arrays, or pytrees of them.

    Raises:
      ValueError: there is no such implementation.
      NotImplementedError: the chosen candidate cannot run; the message gives its reason.
    """
    names = ["auto", "reference", *(candidate.name for candidate in reversed(candidates))]
    if implementation not in names:
        raise ValueError(
            f"implementation is {implementation!r}; pass {', '.join(names[:-1])} or {names[-1]}"
        )
    for candidate in candidates:
        if implementation == candidate.name:
            if candidate.reason:
                raise NotImplementedError(
                    f"{candidate.reason}; pass implementation='auto' or 'reference'"
                )
            return _in_32_bits(candidate.kernel)(*args)
        if implementation == "auto" and candidate.worth_it and not candidate.reason:
            return _on_cuda(_in_32_bits(candidate.kernel), reference, *args)
    return reference(*args)


def _in_32_bits(kernel: Callable[..., T]) -> Callable[..., T]:
    """Return a kernel whose own numbers have 32 bits under `jax_enable_x64` too.

    Kernels use offsets of 32 bits, and their literals have no dtype of their own.
    """

    def call(*args: Any) -> T:
        with jax.enable_x64(False):
            return kernel(*args)

    return call


def _on_cuda(kernel: Callable[..., T], reference: Callable[..., T], *args: Any) -> T:
    """Call the kernel in programs for NVIDIA GPUs. Call the reference elsewhere.

    Derivatives are those of the reference, because kernels have none. Otherwise JAX would refuse
    every program that takes a derivative, even one for a CPU.
    """

    @jax.custom_jvp
    def call(*args: Any) -> T:
        return lax.platform_dependent(*args, cuda=kernel, default=reference)

    @call.defjvp
    def derivative(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[T, T]:
        return jax.jvp(reference, primals, tangents)

    return call(*args)


HOPPER = 9.0  # its compute capability
KV_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn)
"""The dtypes of caches that Triton kernels read and write."""
MAX_NUMBERS = 2**31
"""Triton kernels take arrays of fewer numbers than this, because their offsets are 32 bits."""


def why_not_triton(
    *arrays: Array | jax.ShapeDtypeStruct,
    interpret: bool,
    dtypes: Sequence[Any] = (jnp.bfloat16, jnp.float16),
) -> str | None:
    """Return why a Triton kernel cannot take these arrays on the GPU of this machine, or None.

    Args:
      dtypes: those that the kernel takes where it is not interpreted.

    On a machine without a GPU the compute capability is not checked, because a program may be
    compiled for a GPU elsewhere. The compiler then reports the problem.
    """
    for array in arrays:
        if not interpret and array.dtype not in dtypes:
            names = " and ".join(jnp.dtype(dtype).name for dtype in dtypes)
            return f"the Triton kernel is cut for {names}, not {array.dtype}"
        if array.size >= MAX_NUMBERS:
            return f"the Triton kernel's offsets are 32 bits, and an array has {array.size} numbers"
    if devices := devices_of_mesh():
        return f"the Triton kernel runs on one device, not on a mesh of {devices}"
    this_gpu = None if interpret else capability()
    least = 8.9 if any(array.dtype == jnp.float8_e4m3fn for array in arrays) else 8.0
    if this_gpu is not None and this_gpu < least:
        return f"the Triton kernel needs compute capability {least}; this GPU has {this_gpu}"
    return None


def why_not_mosaic(*, interpret: bool) -> str | None:
    """Return why no Mosaic kernel can run with this jax on the GPU of this machine, or None."""
    if interpret:
        return "the Mosaic kernel is not interpreted"
    if jax.__version_info__ < (0, 11, 2):
        return f"the Mosaic kernel needs jax 0.11.2; this is {jax.__version__}"
    if (this_gpu := capability()) not in (None, HOPPER):
        return f"the Mosaic kernel needs compute capability {HOPPER}; this GPU has {this_gpu}"
    return None


def why_not_rounding(x: Array, *, interpret: bool) -> str | None:
    """Return why a Triton kernel cannot take such rows and round them to e4m3, or None."""
    codes = jax.ShapeDtypeStruct((), jnp.float8_e4m3fn)  # only newer GPUs convert them
    return why_not_triton(x, interpret=interpret) or why_not_triton(
        codes, interpret=interpret, dtypes=(codes.dtype,)
    )


def too_many_rows(x: Array, max_rows: int) -> str | None:
    """Return why a Triton kernel for up to `max_rows` rows cannot take these, or None."""
    if x.shape[0] > max_rows:
        return f"the Triton kernel is cut for {max_rows} rows at most, not {x.shape[0]}"
    return None


def devices_of_mesh() -> int:
    """Return the number of devices over which XLA spreads arrays, or 0 where it does not."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.size if mesh.size > 1 and not mesh.are_all_axes_manual else 0


def capability() -> float | None:
    """Return the compute capability of the GPU of this machine.

    The result is 0 for a GPU that is not from NVIDIA, and None for a machine without a GPU.
    """
    if jax.default_backend() != "gpu":
        return None
    version = str(getattr(jax.devices()[0], "compute_capability", 0))
    return float(version) if version.replace(".", "").isdigit() else 0.0


H200_PROCESSORS = 132


def processors() -> int:
    """Return the number of streaming multiprocessors of the GPU of this machine.

    Tile sizes depend on it. Hopper GPUs differ: an H200 has 132, an H100 for PCIe 114, an H20 78. A
    machine without a GPU counts as an H200.
    """
    if jax.default_backend() != "gpu":
        return H200_PROCESSORS
    return getattr(jax.devices()[0], "core_count", None) or H200_PROCESSORS


# Shared memory of a block of threads, in KiB, by compute capability: "Maximum amount of shared
# memory per thread block" in the technical specifications of the CUDA programming guide. GPUs with
# little of it are RTX cards and those that share their chips, such as L4, L40S and A10.
_SHARED_KIB = {8.0: 163, 8.7: 163, 9.0: 227, 10.0: 227, 10.3: 227, 11.0: 227}
_MIN_SHARED_KIB = 99
HOPPER_SHARED_BYTES = 227 << 10


def shared_bytes() -> int:
    """Return the shared memory, in bytes, of a program of a kernel on the GPU of this machine.

    An unknown GPU counts as one with little. A machine without a GPU counts as a Hopper.
    """
    this_gpu = capability()
    if this_gpu is None:
        return HOPPER_SHARED_BYTES
    return _SHARED_KIB.get(this_gpu, _MIN_SHARED_KIB) << 10
