"""Which implementation of an operation runs: decided here, for all operations.

An operation has a plain reference, which runs anywhere, and kernels, which each need something. It
lists the kernels as `Candidate`s, in order of preference, and calls `dispatch`. The choice falls
when a program is compiled. Derivatives never take a kernel.
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
    """What a caller passes as `implementation` to demand it."""
    kernel: Callable[..., T]
    """Takes the arrays that the reference takes."""
    reason: str | None
    """Why it cannot run these arrays on this machine; None if it can."""
    worth_it: bool = True
    """Whether "auto" should take it then."""


def dispatch(
    implementation: str, candidates: Sequence[Candidate[T]], reference: Callable[..., T], *args: Any
) -> T:
    """Call the implementation that was asked for; "auto": the first that can and should run.

    An explicit choice never falls back. "auto" falls back to the reference: where no candidate can
    run, in programs for other devices than NVIDIA GPUs, and for derivatives.

    Args:
      implementation: "auto", "reference", or the name of a candidate.
      candidates: the operation's kernels, in order of preference.
      reference: the operation in plain JAX.
      args: arrays, or pytrees of them.

    Raises:
      ValueError: there is no such implementation.
      NotImplementedError: it is a candidate's name, and there is a reason against that candidate.
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
            return candidate.kernel(*args)
        if implementation == "auto" and candidate.worth_it and not candidate.reason:
            return _on_cuda(candidate.kernel, reference, *args)
    return reference(*args)


def _on_cuda(kernel: Callable[..., T], reference: Callable[..., T], *args: Any) -> T:
    """Call the kernel in programs for NVIDIA GPUs; elsewhere, and for derivatives, the reference.

    Kernels have no derivatives. JAX would refuse any program that asks for some, also one for a
    CPU.
    """

    @jax.custom_jvp
    def call(*args: Any) -> T:
        return lax.platform_dependent(*args, cuda=kernel, default=reference)

    @call.defjvp
    def derivative(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[T, T]:
        return jax.jvp(reference, primals, tangents)

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
    """Return the compute capability of this machine's GPU; 0 of one not NVIDIA's, None of none."""
    if jax.default_backend() != "gpu":
        return None
    said = str(getattr(jax.devices()[0], "compute_capability", 0))
    return float(said) if said.replace(".", "").isdigit() else 0.0
