"""The memory of a command for the prefix cache."""

from __future__ import annotations

from jaxspec.engine.engine import Engine
from jaxspec.engine.prefix_cache.pool import Sizes, min_bytes
from jaxspec.options import FieldError
from jaxspec.runtime import memory
from jaxspec.runtime.prefill import on_cpu
from jaxspec.weights import memory as weight_memory

GIB = 1 << 30


def prefix_bytes(engine: Engine, gib: float | None) -> int:
    """Return the bytes of each device for prefixes of prompts, as `planned_bytes` describes them.

    Raises:
      FieldError: as there, or `gib` does not fit.
    """
    limit, left = weight_memory.bytes_limit(engine.mesh), None
    if limit is not None:
        sizes = engine.spec, engine.batch_size, engine.cache_length, engine.mesh
        tokens = engine.runtime.shapes.most_tokens(engine.cache_length)
        taken = memory.footprint(*sizes, read_ahead=engine.read_ahead, pass_tokens=tokens)
        left = limit - taken.total
    nbytes = planned_bytes(engine.runtime, gib, left)
    if left is not None and nbytes > max(left, 0):
        raise FieldError(
            "prefix_gib",
            lambda format_field: (
                f"{format_field('prefix_gib', gib)}: weights, caches and logits leave "
                f"{left / GIB:.3f} GiB of each device; give less, or fewer slots"
            ),
        )
    return nbytes


def planned_bytes(sizes: Sizes, gib: float | None, left: int | None) -> int:
    """Return the bytes of each device for prefixes of prompts, whether they fit or not.

    Args:
      gib: the option; None for half of the memory that weights, caches and logits leave on a GPU.
        On a CPU, whose memory is shared with others, an eighth of it and at most 1 GiB. Nothing if
        that holds no whole slot.
      left: bytes of a device that nothing else takes; None if that is not known.

    Raises:
      FieldError: `gib` holds no whole slot, or slots are split over devices.
    """
    mesh = sizes.mesh
    is_split = mesh.shape["data"] > 1
    if gib == 0 or (gib is None and (left is None or is_split)):
        return 0
    if is_split:
        raise FieldError("prefix_gib", "needs a mesh whose data axis has one device; leave it out")
    least = min_bytes(sizes)
    if gib is None:
        assert left is not None
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
