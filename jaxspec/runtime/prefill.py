"""Which passes read prompts: how they are cut into chunks, and which chunks share a pass.

Read `Shapes`, then `chunks`. A pass has some rows of some width, and each such shape is a program to compile, so
there are few. What a pass takes depends on its tokens, padding included: up to some number of them the device is
busy reading weights, whatever it computes on them. `reading_tokens` says up to how many.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from jaxspec import decode
from jaxspec.shapes import Array, Int, Params
from jaxspec.state import DecodeSpec, DecodeState, PrefillChunk
from jaxspec.weights.model_def import ModelDef

PREFILL_CHUNK = 512
"""Longer prompts are fed in pieces of this many tokens, where a pass has several rows or runs on a CPU."""
LONGEST_CHUNK = 8192
"""Likewise on a GPU where there is one slot: nobody waits for it. One pass over 8,192 tokens of 26B-A4B takes
154 ms on an H200, and 16 passes over 512 take 360 ms."""

SMALLEST_PREFILL = 16
SHARED_WIDTHS = (64, 256)
MIDDLE_WIDTH = 128
"""Passes that many prompts share have this width too. With 16 rows ahead, passes over 192 mixed prompts of 334 tokens
on average then take 1.73 s instead of 2.00 s, by the times that 26B-A4B takes on an H200."""
SHARED_PREFILL = 256
"""Where there are several slots, a small pass has so many tokens: rows of a few widths. A row that comes alone pays
for all of them."""

FULL_PASS = 2048
"""On a GPU a pass that many prompts share has up to so many tokens. E4B takes 12 ms for 512 of them on an H200, and
21 ms for 2,048."""

BALANCE = 184.0
"""Operations that an H200 does while it reads a byte: 790 TFLOP/s at 4.3 TB/s. An A100 does 195, an H100 260."""


def bucket(n: int, smallest: int = 1) -> int:
    """Round up to a power of two, at least `smallest`."""
    return max(smallest, 1 << (n - 1).bit_length() if n > 1 else 1)


def rows_bucket(count: int, mesh: Mesh) -> int:
    """Round rows up to a power of two for every part of the mesh's data axis."""
    data = mesh.shape["data"]
    return data * bucket(-(-count // data))


def rows_ahead(slots: int, mesh: Mesh) -> int:
    """Return how many rows it is worth to read ahead of free slots: twice what one pass of 128 tokens a row takes.

    None where there is one slot, which nobody shares; on a CPU, where all passes take as long for a token; and
    where slots are split over devices, since a row is copied within one.
    """
    if slots == 1 or on_cpu(mesh) or mesh.shape["data"] > 1:
        return 0
    return min(slots, 2 * FULL_PASS // MIDDLE_WIDTH)


def on_cpu(mesh: Mesh) -> bool:
    """Tell whether a mesh is of CPUs."""
    return mesh.devices.flat[0].platform == "cpu"


def full_pass(mesh: Mesh, most: int | None) -> int:
    """Return the tokens of a pass that many waiting prompts share, a power of two.

    On a CPU arithmetic binds from the start, so passes are small.

    Args:
      most: tokens after which rows that decode go on; None for no bound. A pass has no more than that, or
        `SHARED_PREFILL`.
    """
    full = SHARED_PREFILL if on_cpu(mesh) else FULL_PASS
    if most is not None:
        full = min(full, 1 << most.bit_length() - 1)
    return max(SHARED_PREFILL, full)


def reading_tokens(target: ModelDef) -> float:
    """Return for how many tokens arithmetic takes as long as reading the weights.

    184 for a dense model. A mixture of experts reads all experts and computes with few: 1,215 for 26B-A4B.
    """
    config, declared = target.config, target.declared()
    read = products = 0.0
    for name, array in target.abstract_weights().items():
        if declared[name].lookup or array.ndim < 2:
            continue
        share = 1.0
        if "experts" in declared[name].axes:
            share = config.num_experts_per_token / config.num_experts
        # Quantised weights count as numbers: shapes of passes do not depend on formats.
        read += array.size * array.dtype.itemsize
        products += 2.0 * array.size * share
    return BALANCE * read / products


@dataclass(frozen=True)
class Shapes:
    """The shapes of the passes that read prompts.

    Attributes:
      slots: of the batch.
      full: tokens of a pass that many waiting prompts share; see `full_pass`. Where it is `SHARED_PREFILL`, the
        shapes that read a prompt follow from its own length alone, whoever waits beside it.
      longest: tokens of a pass of one row, where there is one slot.
      reading: tokens that take as long as reading the weights; see `reading_tokens`.
    """

    slots: int
    mesh: Mesh
    full: int
    longest: int
    reading: float

    @classmethod
    def of(
        cls, target: ModelDef, slots: int, mesh: Mesh, *, invariant: bool, most: int | None = None
    ) -> Shapes:
        """Return the shapes for a model on a mesh; for `most` see `full_pass`."""
        return cls(
            slots,
            mesh,
            full=SHARED_PREFILL if invariant else full_pass(mesh, most),
            longest=PREFILL_CHUNK if on_cpu(mesh) else LONGEST_CHUNK,
            reading=reading_tokens(target),
        )

    def width(self, left: int) -> int:
        """Return the width of the chunk that reads on where so many tokens of a prompt are left."""
        if self.slots > 1:
            if self.full > max(PREFILL_CHUNK, SHARED_PREFILL) and 2 * left > self.full:
                return self.full
            most = min(left, PREFILL_CHUNK)
            return min(w for w in (*SHARED_WIDTHS, PREFILL_CHUNK) if w >= most)
        width = min(bucket(left, SMALLEST_PREFILL), self.longest)
        # Where less than three quarters would be used, two passes are quicker than one.
        return width // 2 if width > PREFILL_CHUNK and 4 * left <= 3 * width else width

    def small_rows(self, width: int) -> int:
        """Return the rows of a pass for few prompts."""
        return self._rows(SHARED_PREFILL // width)

    def full_rows(self, width: int) -> int:
        """Return the rows of a pass that fills the device."""
        return self._rows(self.full // width)

    def next_pass(self, left: Mapping[int, int]) -> tuple[int, int, list[int]]:
        """Return the rows and the width of the next pass, and which slots it reads.

        A pass takes the slots in their order. Its width is the one that reads most for its time. Where what is
        left fits one full pass, it is the one by which all is read soonest.

        Args:
          left: tokens that are not read yet, of each slot.
        """
        if self.full == SHARED_PREFILL or self.slots == 1:
            widths = {slot: self.width(count) for slot, count in left.items()}
            width = max(widths.values())
            rows = self.small_rows(width)
            return rows, width, [slot for slot in left if widths[slot] == width][:rows]
        if sum(left.values()) <= self.full:
            width = min(self.widths, key=lambda width: self._cost(width, left.values()))
        else:
            width = max(self.widths, key=lambda width: self._rate(width, left.values()))
        rows = self._rows_for(width, len(left))
        return rows, width, list(left)[:rows]

    def _rows_for(self, width: int, count: int) -> int:
        small = self.small_rows(width)
        return small if count <= small else self.full_rows(width)

    def _cost(self, width: int, left: Collection[int]) -> float:
        """Return what passes of one width over all that is left take, as `_pass_cost`."""
        rows = self._rows_for(width, len(left))
        pieces = [-(-count // width) for count in left]
        passes = max(*pieces, -(-sum(pieces) // rows)) if len(pieces) > 1 else pieces[0]
        return passes * self._pass_cost(rows, width)

    def _rate(self, width: int, left: Collection[int]) -> float:
        """Return the tokens that the next pass reads, for each token's time that it takes."""
        rows = self._rows_for(width, len(left))
        read = sum(min(count, width) for count in itertools.islice(left, rows))
        return read / self._pass_cost(rows, width)

    def _pass_cost(self, rows: int, width: int) -> float:
        """Return what a pass takes, in units of what one more token takes.

        On an H200 26B-A4B takes 20 ms for 256 tokens, 22 for 512 and 41 for 2,048.
        """
        return self.reading + rows * width

    def worth_reading(self, waiting: Iterable[int]) -> int:
        """Return for how many free slots it is worth to stop decoding; 0 where no prompt waits.

        A pass takes about as long for one prompt as for all that fill it. At most an eighth of the slots is left
        empty for that.

        Args:
          waiting: tokens of the prompts that wait, the first one first.
        """
        count = tokens = 0
        for length in itertools.islice(waiting, max(1, self.slots // 8)):
            if tokens >= self.full:
                break
            count, tokens = count + 1, tokens + self.width(length)
        return count

    def _rows(self, count: int) -> int:
        return rows_bucket(min(self.slots, max(1, count)), self.mesh)

    def all(self) -> list[tuple[int, int]]:
        """List the rows and the width of every pass there is."""
        rows = (self.small_rows, self.full_rows)
        return sorted({(of(width), width) for width in self.widths for of in rows})

    @functools.cached_property
    def widths(self) -> list[int]:
        """The widths of all passes."""
        found = {self.width(left) for left in range(1, max(self.longest, self.full) + 1)}
        return sorted(
            found | {MIDDLE_WIDTH} if self.full > SHARED_PREFILL and self.slots > 1 else found
        )


def chunks(
    prompts: Mapping[int, Sequence[int] | np.ndarray], shapes: Shapes
) -> Iterator[PrefillChunk]:
    """Cut the prompts of slots into chunks, in the order in which they have to be fed."""
    reader = PromptReader(shapes)
    reader.start(prompts)
    while reader.unread:
        yield reader.next_chunk()[0]


def chunk_of(
    some: Mapping[int, tuple[Sequence[int] | np.ndarray, int]],
    rows: int,
    width: int,
    slots: int,
    ends: Mapping[int, int] = {},
) -> PrefillChunk:
    """Return a pass over the prompts of some slots, each from its own place on.

    Args:
      some: by slot, the prompt and how many of its tokens are read already.
      slots: how many there are; a row without a prompt names this one, which does not exist.
      ends: by slot, how many tokens are read after the pass, where that is not all it has room for.
    """
    of = np.full(rows, slots, np.int32)
    tokens = np.zeros((rows, width), np.int32)
    start, count = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
    is_last = np.zeros(rows, bool)
    for row, (slot, (prompt, begin)) in enumerate(some.items()):
        piece = prompt[begin : min(begin + width, ends.get(slot, len(prompt)))]
        of[row], start[row], count[row] = slot, begin, len(piece)
        tokens[row, : len(piece)] = piece
        is_last[row] = begin + len(piece) == len(prompt)
    return PrefillChunk(*jax.device_put([of, tokens, start, count, is_last]))


class PromptReader:
    """Reads the prompts of slots, pass by pass. More may come between two passes.

    Attributes:
      unread: the prompts of slots that are not read to the end, and how many of their tokens are.
      stops: where passes over some of them have to end.
      taken: the slots of the newest pass, and how many of their tokens are read after it.
    """

    def __init__(self, shapes: Shapes):
        self.shapes = shapes
        self.unread: dict[int, tuple[Sequence[int] | np.ndarray, int]] = {}
        self.stops: dict[int, Set[int]] = {}
        self.taken: dict[int, int] = {}

    def start(
        self,
        prompts: Mapping[int, Sequence[int] | np.ndarray],
        begin: int = 0,
        stops: Set[int] = frozenset(),
    ) -> None:
        """Take the prompts of more slots.

        Args:
          begin: how many of their tokens are read already.
          stops: where passes over them have to end. More may be added later.
        """
        self.unread |= {slot: (prompt, begin) for slot, prompt in prompts.items()}
        self.stops |= dict.fromkeys(prompts, stops)

    def forget(self, slot: int) -> None:
        """Read no more of a slot's prompt."""
        self.unread.pop(slot, None)

    def next_chunk(self) -> tuple[PrefillChunk, list[int]]:
        """Return the next pass, and the slots whose prompts end in it.

        Rows of a pass that nobody needs point past the last slot.
        """
        left = self._left()
        rows, width, taken = self.shapes.next_pass(left)
        some = {slot: self.unread[slot] for slot in taken}
        self.taken = {slot: some[slot][1] + min(width, left[slot]) for slot in taken}
        chunk = chunk_of(some, rows, width, self.shapes.slots, self.taken)
        ended = [slot for slot in taken if self.taken[slot] == len(some[slot][0])]
        for slot in taken:
            self.unread[slot] = some[slot][0], self.taken[slot]
        for slot in ended:
            del self.unread[slot]
        return chunk, ended

    @property
    def next_tokens(self) -> int:
        """The tokens of the next pass, padding included."""
        rows, width, _ = self.shapes.next_pass(self._left())
        return rows * width

    def _left(self) -> dict[int, int]:
        return {slot: self._stop(slot) - begin for slot, (_, begin) in self.unread.items()}

    def _stop(self, slot: int) -> int:
        """Return where the next passes over a slot's prompt end."""
        prompt, begin = self.unread[slot]
        return min((at for at in self.stops[slot] if at > begin), default=len(prompt))


def read_prompts(
    spec: DecodeSpec,
    target_params: Params,
    drafter_params: Params | None,
    state: DecodeState,
    tokens: Int[Array, "B T"],
    counts: Int[Array, " B"],
) -> DecodeState:
    """Feed the first `counts` tokens of every row in chunks, inside a compiled program.

    No prompt ends here: rows stay inactive, and a last chunk has to follow.
    """
    b, t = tokens.shape
    width = min(t, PREFILL_CHUNK)
    if not width:
        return state

    def feed(i: Array | int, state: DecodeState) -> DecodeState:
        begin = i * width
        chunk = PrefillChunk(
            slots=jnp.arange(b, dtype=jnp.int32),
            tokens=lax.dynamic_slice_in_dim(padded, begin, width, axis=1),
            start=jnp.minimum(counts, begin),
            count=jnp.clip(counts - begin, 0, width),
            is_last=jnp.zeros(b, bool),
        )
        return decode.prefill(spec, target_params, drafter_params, state, chunk)

    padded = jnp.pad(tokens, ((0, 0), (0, width)))
    if t <= width:
        return feed(0, state)
    return lax.fori_loop(0, -(-jnp.max(counts) // width), feed, state)
