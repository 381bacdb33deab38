"""Compute how much device memory a run needs, and refuse a run that cannot fit.

The numbers of `footprint` come from configs alone, before anything is allocated. They count weights,
caches, the logits of a step, activations of a pass over prompts and stored prefixes, for the shards
that one device holds. Activations are an estimate. `check_compiled` has the exact number, once a
program is compiled.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from jaxspec import row_subset
from jaxspec import state as states
from jaxspec.cache import PAGE, RING_MULTIPLE, Paging
from jaxspec.options import ProgramFeatures
from jaxspec.runtime.prefill import Shapes, default_read_ahead, on_cpu
from jaxspec.sampling import GROUP_BYTES
from jaxspec.state import DecodeSpec
from jaxspec.weights import memory as weight_memory
from jaxspec.weights.memory import (
    DeviceMemoryError,
    describe_device,
    format_gib,
    shard_bytes,
    way_out,
    weight_bytes,
)
from jaxspec.weights.model_def import ModelDef
from jaxspec.weights.sharding import state_shardings

LOGITS_HELD = 3
"""A step that is not told below holds all logits as they are, adjusted, and as probabilities."""


def _logits_bytes(spec: DecodeSpec, rows: int, mesh: Mesh) -> int:
    """Return the bytes of logits that a step holds on each device.

    A step holds all of them once. Tokens are drawn for a group of rows after the other (`in_groups`),
    which holds as much as a group twice. Compiled for an H200 with 26B-A4B, a step takes 1.66 GB beside its
    arguments with MTP and 160 rows, whose logits are 1.34 GB, and 2.52 with DFlash and 128 rows (2.15).
    """
    logits = 4 * rows * spec.step_tokens * spec.target.config.vocab_size
    features = spec.program_features != ProgramFeatures()
    if mesh.size > 1 or features or spec.drafting.draft_sampling or spec.widths:
        return LOGITS_HELD * logits // mesh.size
    return round(1.05 * logits) + 2 * min(logits, GROUP_BYTES)


def largest_pass(spec: DecodeSpec, shapes: Shapes, rows: int, cache_length: int) -> int:
    """Return the tokens of the largest pass over prompts of at most so many, and of `rows` rows that decode in it."""
    tokens = shapes.most_tokens(cache_length)
    if not (shapes.are_mixed and row_subset.mixes(spec)):
        return tokens
    return max(tokens, shapes.full + rows * spec.step_tokens)


@dataclasses.dataclass(frozen=True)
class Footprint:
    """The memory that a run needs on each device, in bytes."""

    weights: int
    caches: int  # of target and drafter
    logits: int  # float32, of all tokens that a step verifies, as often as it holds them
    prefixes: int = 0
    activations: int = 0  # of a pass over prompts, beyond the memory of logits: no step runs then

    @property
    def total(self) -> int:
        return sum(dataclasses.astuple(self))

    def __str__(self) -> str:
        """Return the total and its parts in GiB."""
        sizes = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        parts = [f"{format_gib(size)} {name}" for name, size in sizes.items() if size]
        return f"{format_gib(self.total)} GiB a device ({', '.join(parts)})"


def footprint(
    spec: DecodeSpec,
    rows: int,
    cache_length: int,
    mesh: Mesh,
    *,
    read_ahead: int = 0,
    cache_tokens: int | None = None,
    prefix_bytes: int = 0,
    pass_tokens: int = 0,
) -> Footprint:
    """Return the memory that decoding needs on each device.

    Args:
      cache_length: how many positions each cache has room for.
      read_ahead: rows beside these, which have caches and take no part in steps.
      cache_tokens: for which there are pages; None: each row has all its positions.
      prefix_bytes: of each device, for stored prefixes.
      pass_tokens: of the largest pass over prompts, see `largest_pass`.
    """
    models = [model for model in (spec.target, spec.drafter) if model is not None]
    if cache_tokens is None:
        data = mesh.shape["data"]
        caches = -(-(rows + read_ahead) // data) * caches_bytes(spec, data, cache_length, mesh)
    else:
        paging = Paging(rows + read_ahead, cache_tokens, mesh.shape["data"])
        caches = caches_bytes(spec, rows + read_ahead, cache_length, mesh, paging)
    logits = _logits_bytes(spec, rows, mesh)
    activations = pass_tokens * max(map(bytes_a_token, models))
    if spec.vision is not None:
        models.append(spec.vision)
        activations = max(activations, spec.vision.config.activation_bytes)
    return Footprint(
        sum(weight_bytes(model, mesh) for model in models),
        caches,
        logits,
        prefix_bytes,
        max(0, activations // mesh.size - logits),
    )


@functools.cache
def caches_bytes(
    spec: DecodeSpec, rows: int, cache_length: int, mesh: Mesh, paging: Paging | None = None
) -> int:
    """Return the bytes of a device for the caches of some rows, the drafter's too."""
    dtype = spec.target.cache_dtype
    options: dict[str, Any] = dict(cache_length=cache_length, num_stop_ids=1, cache_dtype=dtype)
    options |= dict(paging=paging)
    state = jax.eval_shape(functools.partial(states.init_state, spec, rows, **options))
    caches = (state.caches, state.drafter)
    shardings = state_shardings(caches, mesh)
    return shard_bytes(zip(jax.tree.leaves(caches), jax.tree.leaves(shardings), strict=True))


@functools.cache
def bytes_a_token(model_def: ModelDef) -> int:
    """Return an estimate of the bytes of activations for a token of a pass.

    They are the results of all products of the widest layer, in float32.
    """
    config, declared = model_def.config, model_def.declared()
    widths: dict[str, float] = collections.defaultdict(float)
    for name, weight in model_def.abstract_params().items():
        about = declared[name]
        if not about.contracting_axes or about.table or about.lookup:
            continue
        width = weight.size / math.prod(weight.shape[i] for i in about.contracting_axes)
        if "experts" in about.axes:
            width *= config.num_experts_per_token / config.num_experts
        widths[name.rpartition("layers.")[2].partition(".")[0]] += width
    return 4 * round(max(widths.values(), default=0))


SPARE = 1 / 16
"""Share of a device that optional caches leave free. Compiled programs need more than `footprint` counts."""
SPARE_TABLES = 3
"""They leave as much as so many copies of the target's largest weight, if that is more. While XLA compiles for
a GPU, it times products on copies of their operands. With 5.6 GiB free it found no 2.64 GiB for the head of 31B."""


SPARE_COMPILED = 1 / 64
"""Share that they leave free if every program is compiled before they are allocated."""


def _spare(spec: DecodeSpec, mesh: Mesh, limit: int) -> float:
    """Return the bytes that optional caches leave free of a device's limit."""
    largest_bytes = weight_memory.largest_weight_bytes(spec.target, mesh)
    return max(SPARE * limit, SPARE_TABLES * largest_bytes)


def plan_read_ahead(
    spec: DecodeSpec, rows: int, cache_length: int, mesh: Mesh, **beside: Any
) -> int:
    """Return the rows to read ahead of free slots: the default number, or fewer if memory is short.

    Args:
      beside: as in `footprint`.
    """
    read_ahead, limit = default_read_ahead(rows, mesh), weight_memory.bytes_limit(mesh)
    if not row_subset.addressable(spec):
        return 0
    if limit is None:
        return read_ahead
    spare = _spare(spec, mesh, limit)
    while read_ahead:
        need = footprint(spec, rows, cache_length, mesh, read_ahead=read_ahead, **beside)
        if need.total <= limit - spare:
            break
        data = mesh.shape["data"]
        read_ahead = data * (read_ahead // data // 2)
    return read_ahead


def plan_cache_tokens(
    spec: DecodeSpec,
    rows: int,
    cache_length: int,
    mesh: Mesh,
    *,
    limit: int | None,
    read_ahead: int,
    **beside: int,
) -> int:
    """Return the tokens of pages that memory holds: at most for all rows, at least for one of each part of a mesh.

    On a GPU they leave little memory free: programs have to be compiled before they are allocated.

    Args:
      limit: bytes of a device; None: not known.
      beside: as in `footprint`.
    """
    all_tokens = (rows + read_ahead) * cache_length
    if limit is None:
        return all_tokens

    spare = _spare(spec, mesh, limit) if on_cpu(mesh) else SPARE_COMPILED * limit

    def fits(pages: int) -> bool:
        of = dict(read_ahead=read_ahead, cache_tokens=pages * PAGE)
        need = footprint(spec, rows, cache_length, mesh, **of, **beside)
        return need.total <= limit - spare

    least = mesh.shape["data"] * cache_length
    return max(least, PAGE * largest(all_tokens // PAGE, fits))


def check_fits(
    spec: DecodeSpec,
    rows: int,
    cache_length: int,
    mesh: Mesh,
    *,
    read_ahead: int = 0,
    cache_tokens: int | None = None,
    prefix_bytes: int = 0,
    pass_tokens: int = 0,
) -> None:
    """Raise an error if decoding a batch needs more memory than a device has.

    Args:
      read_ahead, cache_tokens, prefix_bytes, pass_tokens: as in `footprint`.

    Raises:
      DeviceMemoryError: the batch does not fit. The message has the most rows, the longest caches,
        the most rows read ahead, the most tokens of pages and the most bytes for prefixes that fit,
        everything else as it is.
    """
    limit = weight_memory.bytes_limit(mesh)
    if limit is None:
        return
    beside: dict[str, Any] = dict(prefix_bytes=prefix_bytes, pass_tokens=pass_tokens)
    beside |= dict(read_ahead=read_ahead, cache_tokens=cache_tokens)
    need = footprint(spec, rows, cache_length, mesh, **beside)
    if need.total <= limit:
        return
    data = mesh.shape["data"]

    def fit(rows: int = rows, length: int = cache_length, **other: int) -> bool:
        return footprint(spec, rows, length, mesh, **(beside | other)).total <= limit

    ways = []
    if cache_tokens is not None:
        least = data * cache_length
        steps = (cache_tokens - least) // PAGE
        if more := largest(steps, lambda n: fit(cache_tokens=least + n * PAGE)):
            ways.append(f"cache_tokens={least + more * PAGE} fits")
    if most_rows := data * largest(rows // data, lambda n: fit(rows=n * data)):
        ways.append(f"{most_rows} rows of this length fit")
    if cache_tokens is None and (
        longest := RING_MULTIPLE
        * largest(cache_length // RING_MULTIPLE, lambda n: fit(length=n * RING_MULTIPLE))
    ):
        ways.append(f"{rows} rows of {longest} positions fit")
    if read_ahead and fit(read_ahead=0):
        fewer = largest((read_ahead - 1) // data, lambda n: fit(read_ahead=n * data))
        ways.append(f"read_ahead={fewer * data} fits")
    if prefix_bytes and (left := limit - need.total + prefix_bytes) >= 0:
        ways.append(f"prefix_bytes={left} fits")
    what = f"{rows} rows" + (f", and {read_ahead} that are read ahead," if read_ahead else "")
    pages = f" in pages for {cache_tokens} tokens" if cache_tokens is not None else ""
    raise DeviceMemoryError(
        f"{what} with caches of {cache_length} positions{pages} need {need}, and {describe_device(mesh)} "
        "has "
        f"{format_gib(limit)} GiB: "
        f"{' or '.join(ways) or 'not one row fits; ' + way_out(spec.target.dtype, mesh)}"
        f"; {weight_memory.SEE_DRY_RUN}"
    )


def check_compiled(program: Any, mesh: Mesh) -> None:
    """Raise an error if a compiled program needs more memory beside its arguments than devices have left.

    Raises:
      DeviceMemoryError: with the temporary memory of the program, which only the compiler knows.
    """
    free, sizes = weight_memory.bytes_free(mesh), program.memory_analysis()
    if free is None or sizes is None:
        return
    results = max(0, sizes.output_size_in_bytes - sizes.alias_size_in_bytes)
    if (needed := sizes.temp_size_in_bytes + results) > free:
        raise DeviceMemoryError(
            f"a compiled program needs {format_gib(needed)} GiB beside its arguments, and "
            f"{describe_device(mesh)} has {format_gib(free)} GiB left: take fewer rows, shorter "
            "caches, a smaller max_prefill_tokens, or read_ahead=0"
        )


def largest(below: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number from 1 to `below` that fits, or 0 if none fits."""
    return bisect.bisect_left(range(1, below + 1), True, key=lambda n: not fits(n))
