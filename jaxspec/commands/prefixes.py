"""The memory of a command for the prefix cache."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from jax.sharding import Mesh

from jaxspec.engine.engine import Engine
from jaxspec.engine.prefix_cache.copies import RowSizes
from jaxspec.options import FieldError
from jaxspec.runtime import memory
from jaxspec.runtime.prefill import on_cpu
from jaxspec.state import DecodeSpec
from jaxspec.weights import memory as weight_memory

GIB = 1 << 30


@runtime_checkable
class Sizes(Protocol):
    """The part of a runtime that says how large a row is."""

    @property
    def spec(self) -> DecodeSpec: ...
    @property
    def mesh(self) -> Mesh: ...
    @property
    def cache_length(self) -> int: ...


def prefix_bytes(engine: Engine, gib: float | None, *, takes_all: bool = False) -> int:
    """Return the bytes of each device for prefixes of prompts, as `planned_bytes` describes them.

    Args:
      engine: without prefixes.
      takes_all: whether its pages take what memory is left, and would leave room for prefixes.

    Raises:
      FieldError: as there, or `gib` does not fit.
    """
    limit, left = weight_memory.bytes_limit(engine.mesh), None
    is_short = takes_all and engine.cache_tokens < engine.runtime.num_rows * engine.cache_length
    if limit is not None:
        sizes = engine.spec, engine.batch_size, engine.cache_length, engine.mesh
        shapes, length = engine.runtime.shapes, engine.cache_length
        tokens = memory.largest_pass(engine.spec, shapes, engine.batch_size, length)
        paging = engine.runtime.paging
        least = engine.mesh.shape["data"] * engine.cache_length
        pages = least if is_short else paging and paging.tokens
        beside: dict[str, Any] = dict(
            read_ahead=engine.read_ahead, cache_tokens=pages, pass_tokens=tokens
        )
        left = limit - memory.footprint(*sizes, **beside).total
    nbytes = planned_bytes(engine.runtime, gib, left, is_short=is_short)
    if left is not None and nbytes > max(left, 0):
        raise FieldError(
            "prefix_gib",
            lambda format_field: (
                f"{format_field('prefix_gib', gib)}: weights, caches and logits leave "
                f"{left / GIB:.3f} GiB of each device; give less, or fewer slots"
            ),
        )
    return nbytes


def planned_bytes(
    sizes: Sizes, gib: float | None, left: int | None, *, is_short: bool = False
) -> int:
    """Return the bytes of each device for prefixes of prompts, whether they fit or not.

    Args:
      gib: the option; None for half of the memory that weights, caches and logits leave on a GPU.
        On a CPU, whose memory is shared with others, an eighth of it and at most 1 GiB. Nothing if
        that holds no whole slot.
      left: bytes of a device that nothing else takes; None if that is not known.
      is_short: whether memory holds fewer pages than all slots could need. By default prefixes then
        get the least, since they have all pages that no request has.

    Raises:
      FieldError: `gib` holds no whole slot.
    """
    mesh = sizes.mesh
    if gib == 0 or (gib is None and left is None):
        return 0
    least = RowSizes(sizes.spec, sizes.cache_length, mesh).min_bytes
    if gib is None:
        assert left is not None
        if is_short:
            return least
        nbytes = min(left // 8, GIB) if on_cpu(mesh) else left // 2
        return nbytes if nbytes >= least else 0
    nbytes = int(gib * GIB)
    if nbytes < least:
        raise FieldError(
            "prefix_gib",
            lambda format_field: (
                f"{format_field('prefix_gib', gib)} holds no prefix of a whole slot, which takes "
                f"{least / GIB:.3f} GiB; give as much, or {format_field('prefix_gib', 0)} for none"
            ),
        )
    return nbytes
