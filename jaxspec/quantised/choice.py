"""Refuse formats that weights cannot be quantised to on load, or that this device cannot multiply."""

from __future__ import annotations

import jax

from jaxspec.options import FieldError, shown
from jaxspec.quantised.format import get_format, names
from pallas_kernels.dispatch import capability


def check_format(field: str, format: str) -> None:
    """Refuse a format that weights cannot be quantised to on load, or not for this device.

    Raises:
      FieldError: naming the option, and what works.
    """
    known = names(on_load=True)
    if format not in known:
        raise FieldError(field, f"is {shown(format)}; expected one of {', '.join(known)}")
    check_device(field, format)


def check_device(field: str, format: str) -> None:
    """Refuse a format that the GPU of this machine cannot multiply.

    Raises:
      FieldError: naming the option, and what works there.
    """
    if (lacking := missing_support(format)) is not None:
        needs, works = lacking
        instead = f"use {works}" if works else "leave the weights unquantised"
        raise FieldError(field, f"is {format}, {needs}: {instead}")


def missing_support(format: str) -> tuple[str, str] | None:
    """Return what a format needs that this GPU lacks, and which formats work; None if it lacks nothing.

    Of formats with variants only the first is named: int4 stands for int4-g64 too.
    """
    least, available = get_format(format).least_capability, capability()
    if available is None or available >= least:
        return None
    works = [name for name in names(on_load=True) if get_format(name).least_capability <= available]
    kind = jax.devices()[0].device_kind
    return (
        f"which needs an NVIDIA GPU of compute capability {least}; {kind} has {available}",
        " or ".join(name for name in works if "-" not in name),
    )
