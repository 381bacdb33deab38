"""Time products of rows with a weight, kernel by kernel, for docs/weight-format-speed.md.

    python -m scripts.measure_products --size "31b down" --format int4 --rows 8 --json out/x.json

A figure is the time of the GPU's own kernels, by its profile: the median of each kernel, and the
sum of all kernels of a call. Adding up parts is a kernel. Launching is not counted. Weights are
random, and so many that none stays in the L2 cache between calls. "GB/s" is the size of the weight
by the time. "floor" is the time of reading the weight once, or of the arithmetic where that takes
longer, at rates that the same run measures. "error" is that of a result in float32 against the plain
reference's, in the 2-norm.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import typer
from jaxtyping import Array
from rich.console import Console
from rich.live import Live
from rich.table import Table

from jaxspec.commands.bench.floor import Ceiling, StepCost, measure_ceiling
from jaxspec.commands.output import json_lines, write_line
from pallas_kernels import int4_matmul, int8_matmul
from pallas_kernels.common import reference_ops
from pallas_kernels.int4_matmul import Codes, Coding
from pallas_kernels.int8_matmul.cases import SHAPES
from pallas_kernels.rounding import round_rows

FORMATS = ("bfloat16", "int8", "fp8", "fp8-dynamic", "int4", "int4-g64", "int4-g128")
CACHE_BYTES = 120e6  # more than the L2 of any GPU has today
Run = Callable[..., Array]


class Measured(NamedTuple):
    """One line of the table. Times in microseconds."""

    size: str
    format: str
    rows: int
    implementation: str
    us: float
    gb_a_second: float
    floor_us: float
    error: float
    kernels: dict[str, float]


def weight(format: str, inputs: int, outputs: int, key: Array) -> tuple[Array, ...]:
    """Return a random weight: codes and scales, or numbers."""
    of_codes, of_scales = jax.random.split(key)
    scale = functools.partial(jax.random.uniform, of_scales, minval=0.5, maxval=1.5)
    if format == "bfloat16":
        return (jax.random.normal(of_codes, (outputs, inputs), jnp.bfloat16),)
    if format.startswith("int4"):
        codes = jax.random.bits(of_codes, (inputs // 64, outputs, 32), jnp.uint8)
        return codes, scale((inputs // _group(format), outputs)).astype(jnp.bfloat16)
    bits = jax.random.bits(of_codes, (outputs, inputs), jnp.uint8)
    if format == "int8":
        return jax.lax.bitcast_convert_type(bits, jnp.int8), scale((outputs,))
    bits = jnp.where(bits & 127 == 127, 0, bits)  # that one is no number
    return jax.lax.bitcast_convert_type(bits, jnp.float8_e4m3fn), scale((outputs,))


def activated(format: str, implementation: Any, dtype: Any) -> Run:
    """Return the function that multiplies rows by gate and up, and applies the activation.

    "auto" has one kernel for all of it, where models have one. Others have a product and an
    activation.
    """
    if format == "fp8-dynamic":
        raise ValueError("scales of rounded rows come between the product and the activation")
    both = product(format, implementation, dtype)
    kwargs: Any = dict(dtype=dtype, implementation=implementation, activation="gelu_tanh")
    if format == "bfloat16" or implementation not in ("auto", "reference"):
        return lambda x, *w: reference_ops.gated(both(x, *w).reshape(len(x), 2, -1), "gelu_tanh")
    if not format.startswith("int4"):
        return lambda x, codes, scales: int8_matmul.gated(
            x, codes.reshape(2, -1, codes.shape[1]), scales.reshape(2, -1), **kwargs
        )
    coding = Coding("int4", _group(format))
    return lambda x, codes, scales: int4_matmul.gated(
        x,
        Codes(codes.reshape(len(codes), 2, -1, 32), scales.reshape(len(scales), 2, -1)),
        coding=coding,
        **kwargs,
    )


def product(format: str, implementation: Any, dtype: Any) -> Run:
    """Return the function that multiplies rows [R, inputs] by a weight.

    Rows are bfloat16; for "fp8-dynamic" they are rounded to e4m3, which the norm before does in a
    model.
    """
    kwargs: Any = dict(dtype=dtype, implementation=implementation)
    if format == "bfloat16":
        return lambda x, w: jnp.einsum("rk,nk->rn", x, w, preferred_element_type=dtype)
    if format == "fp8-dynamic":  # scales are multiplied where sums are read
        return lambda x, codes, scales: int8_matmul.rounded_sums(x, codes, **kwargs)
    if not format.startswith("int4"):
        return functools.partial(int8_matmul.linear, **kwargs)
    coding = Coding("int4", _group(format))
    return lambda x, codes, scales: int4_matmul.linear(
        x, Codes(codes, scales), coding=coding, **kwargs
    )


def _group(format: str) -> int:
    _, _, group = format.partition("-g")
    return int(group) if group else 32


def kernel_times(call: Callable[[int], Array], runs: int) -> dict[str, float]:
    """Return the microseconds of each kernel that a call starts, by the GPU's profile.

    Args:
      call: given the number of the run, does what is timed.

    Raises:
      RuntimeError: the profile shows no kernel of a GPU.
    """
    for run in range(3):
        jax.block_until_ready(call(run))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for run in range(runs):
                jax.block_until_ready(call(run))
        (path,) = Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(path))
    kernels = medians(
        (event.name, event.duration_ns / 1e3)
        for plane in data.planes
        if "GPU" in plane.name
        for line in plane.lines
        if "Stream" in line.name
        for event in line.events
    )
    if not kernels:
        raise RuntimeError("the profile shows no kernel of a GPU")
    return {name: us * count / runs for name, (us, count) in kernels.items()}


def medians(events: Iterable[tuple[str, float]]) -> dict[str, tuple[float, int]]:
    """Return the median time of each kernel, and how often it ran, the longest first."""
    times = collections.defaultdict(list)
    for name, us in events:
        times[name].append(us)
    result = {name: (float(np.median(us)), len(us)) for name, us in times.items()}
    return dict(sorted(result.items(), key=lambda item: -item[1][0] * item[1][1]))


def measure(
    size: str,
    format: str,
    rows: int,
    implementation: str,
    runs: int,
    ceiling: Ceiling,
    make: Callable[..., Run] = product,
) -> Measured:
    """Time one product, and compare it with the reference.

    Args:
      make: `product`, or `activated`.
    """
    inputs, outputs = SHAPES[size]
    keys = jax.random.split(jax.random.key(0), 64)
    weights = [jax.block_until_ready(weight(format, inputs, outputs, keys[0]))]
    size_bytes = sum(array.nbytes for array in weights[0])
    copies = min(len(keys), max(2, int(CACHE_BYTES // size_bytes) + 1))
    weights += [weight(format, inputs, outputs, key) for key in keys[1:copies]]
    x = jax.random.normal(jax.random.key(1), (rows, inputs), jnp.bfloat16)
    if format == "fp8-dynamic":
        x, _ = round_rows(x)
    run = jax.jit(make(format, implementation, jnp.bfloat16))
    kernels = kernel_times(lambda i: run(x, *weights[i % copies]), runs)
    us = sum(kernels.values())
    ours, theirs = (
        jax.jit(make(format, name, jnp.float32))(x, *weights[0])
        for name in (implementation, "reference")
    )
    error = float(jnp.linalg.norm(ours - theirs) / jnp.linalg.norm(theirs))
    # Tensor cores multiply numbers of 8 bits twice as fast.
    flops = 2.0 * rows * inputs * outputs / (2 if format == "fp8-dynamic" else 1)
    floor_us = StepCost(size_bytes, 0.0, flops).floor_s(ceiling) * 1e6
    speed = us, size_bytes / us / 1e3, floor_us
    return Measured(size, format, rows, implementation, *speed, error, kernels)


def main(
    size: Annotated[
        list[str],
        typer.Option(help="A name of pallas_kernels/int8_matmul/cases.py, or its beginning."),
    ] = ["31b down"],  # noqa: B006
    format: Annotated[list[str], typer.Option(help=", ".join(FORMATS) + ".")] = ["int4"],  # noqa: B006
    rows: Annotated[list[int], typer.Option(min=1)] = [1, 8, 16, 32, 64, 128],  # noqa: B006
    implementation: Annotated[
        list[str], typer.Option(help="auto, reference, triton or mosaic.")
    ] = ["auto"],  # noqa: B006
    activation: Annotated[
        bool,
        typer.Option(
            "--activation",
            help="With the activation behind it, for sizes that end with gate_up. Models have both in one "
            "kernel where auto finds one.",
        ),
    ] = False,
    runs: Annotated[int, typer.Option(min=1)] = 10,
    to: Annotated[
        str | None,
        typer.Option("--json", help="A file for what was measured, a line of JSON each."),
    ] = None,
) -> None:
    """Measure every combination, and print a table that grows meanwhile."""
    sizes = [name for name in SHAPES if any(name.startswith(asked) for asked in size)]
    if not sizes:
        raise typer.BadParameter(
            f"no size begins with {', '.join(size)}; there are {', '.join(SHAPES)}"
        )
    if activation and (others := [name for name in sizes if not name.endswith("gate_up")]):
        raise typer.BadParameter(f"--activation is for gate_up, not for {', '.join(others)}")
    if unknown := sorted(set(format) - set(FORMATS)):
        raise typer.BadParameter(f"no format {', '.join(unknown)}; there are {', '.join(FORMATS)}")
    device = jax.devices()[0]
    if device.platform != "gpu":
        raise typer.BadParameter("kernels are timed by a GPU's profile, and there is no GPU here")
    on = dict(device=device.device_kind, jax=jax.__version__, runs=runs)
    ceiling = measure_ceiling("bfloat16", 2**31)
    columns = (
        "size",
        "format",
        "rows",
        "implementation",
        "us",
        "GB/s",
        "floor",
        "error",
        "kernels",
    )
    table = Table(*columns, title=f"{on['device']}, jax {on['jax']}")
    with (
        json_lines(to) if to else contextlib.nullcontext() as file,
        Live(table, console=Console(width=140, stderr=to == "-")),
    ):
        for name, kind, count, chosen in itertools.product(sizes, format, rows, implementation):
            if kind == "bfloat16" and chosen != implementation[0]:
                continue  # XLA has one product of these
            try:
                make = activated if activation else product
                one = measure(name, kind, count, chosen, runs, ceiling, make)
            except (NotImplementedError, ValueError) as error:  # no such kernel, or none for these
                table.add_row(name, kind, str(count), chosen, "", "", "", "", str(error))
                continue
            parts = ", ".join(f"{kernel[:24]} {us:.1f}" for kernel, us in one.kernels.items())
            speed = f"{one.us:.1f}", f"{one.gb_a_second:,.0f}", f"{one.floor_us:.1f}"
            figures = *speed, f"{one.error:.1e}"
            table.add_row(name, kind, str(count), chosen, *figures, parts)
            if file is not None:
                write_line(file, one._asdict() | on)


if __name__ == "__main__":
    typer.run(main)
