"""Where a kernel runs: chosen when a program is compiled, and never for derivatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax import lax

T = TypeVar("T")


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
