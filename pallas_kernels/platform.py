"""Where a kernel runs: what it needs, chosen when a program is compiled, and never for derivatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

T = TypeVar("T")
Implementation = Literal["auto", "reference", "triton"]


def run(
    implementation: str,
    kernel: Callable[..., T],
    plain: Callable[..., T],
    *args: Any,
    reason: str | None,
    worth_it: bool = True,
) -> T:
    """Call what was asked for, of an operation that has a Triton kernel and a plain reference.

    Args:
      reason: why the kernel cannot run; None if it can.
      worth_it: whether "auto" should take it then.

    Raises:
      ValueError: there is no such implementation.
      NotImplementedError: it is "triton", and there is a reason against it.
    """
    if implementation not in ("auto", "reference", "triton"):
        raise ValueError(f"implementation is {implementation!r}; pass auto, reference or triton")
    if implementation == "triton":
        if reason:
            raise NotImplementedError(f"{reason}; pass implementation='auto' or 'reference'")
        return kernel(*args)
    if implementation == "reference" or reason or not worth_it:
        return plain(*args)
    return on_cuda(kernel, plain, *args)


def on_cuda(kernel: Callable[..., T], plain: Callable[..., T], *args: Any) -> T:
    """Call a kernel in programs for NVIDIA GPUs, and plain JAX elsewhere and where derivatives are taken.

    Kernels have none of their own, and any program that asks for some would be refused, whatever it is for.
    """

    @jax.custom_jvp
    def call(*args: Any) -> T:
        return lax.platform_dependent(*args, cuda=kernel, default=plain)

    @call.defjvp
    def derivative(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[T, T]:
        return jax.jvp(plain, primals, tangents)

    return call(*args)


def why_not_triton(*arrays: Array, interpret: bool) -> str | None:
    """Say why a Triton kernel cannot take these arrays on this machine's GPU, if it has one.

    Without one the reason is left to the compiler: programs may be compiled for a GPU elsewhere.
    """
    for array in arrays:
        if not interpret and array.dtype not in (jnp.bfloat16, jnp.float16):
            return f"the Triton kernel is cut for bfloat16 and float16, not {array.dtype}"
        if array.size >= 2**31:
            return f"the Triton kernel's offsets are 32 bits, and an array has {array.size} numbers"
    if devices := devices_of_mesh():
        return f"the Triton kernel runs on one device, not on a mesh of {devices}"
    found = None if interpret else capability()
    if found is not None and found < 8.0:
        return f"the Triton kernel needs compute capability 8.0; this GPU has {found}"
    return None


def devices_of_mesh() -> int:
    """Return how many devices of a mesh XLA spreads arrays over; 0 where it does not."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.size if mesh.size > 1 and not mesh.are_all_axes_manual else 0


def capability() -> float | None:
    """Return the compute capability of this machine's GPU, if it has one: 0 if that is not NVIDIA's."""
    if jax.default_backend() != "gpu":
        return None
    said = str(getattr(jax.devices()[0], "compute_capability", 0))
    return float(said) if said.replace(".", "").isdigit() else 0.0
