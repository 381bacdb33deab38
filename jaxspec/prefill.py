"""Which passes read prompts: how they are cut into chunks, and which chunks share a pass.

Read `Shapes`, then `chunks`. A pass has some rows of some width, and each such shape is a program to compile, so
there are few. What a pass takes depends on its tokens, padding included: up to some number of them the device is
busy reading weights, whatever it computes on them. `full_pass` says how many tokens fill a device.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from jaxspec import decode
from jaxspec.params import Graph
from jaxspec.shapes import Array, Int, Params
from jaxspec.state import DecodeSpec, DecodeState, PrefillChunk

PREFILL_CHUNK = 512
"""Longer prompts are fed in pieces of this many tokens, where a pass has several rows or runs on a CPU."""
LONGEST_CHUNK = 8192
"""Likewise on a GPU where there is one slot: nobody waits for it. One pass over 8,192 tokens of 26B-A4B takes
154 ms on an H200, and 16 passes over 512 take 360 ms."""

SMALLEST_PREFILL = 16
SHARED_WIDTHS = (64, 256)
SHARED_PREFILL = 256
"""Where there are several slots, a small pass has so many tokens: rows of a few widths. A row that comes alone pays
for all of them."""

BALANCE = 184.0
"""Operations that an H200 does while it reads a byte: 790 TFLOP/s at 4.3 TB/s. An A100 does 195, an H100 260."""


def bucket(n: int, smallest: int = 1) -> int:
    """Round up to a power of two, at least `smallest`."""
    return max(smallest, 1 << (n - 1).bit_length() if n > 1 else 1)


def rows_bucket(count: int, mesh: Mesh) -> int:
    """Round rows up to a power of two for every part of the mesh's data axis."""
    data = mesh.shape["data"]
    return data * bucket(-(-count // data))


def on_cpu(mesh: Mesh) -> bool:
    """Tell whether a mesh is of CPUs."""
    return mesh.devices.flat[0].platform == "cpu"


def full_pass(target: Graph, mesh: Mesh) -> int:
    """Return the tokens of a pass that fills the devices, a power of two.

    Twice as many as make arithmetic take as long as reading the weights: 512 for a dense model. A mixture of
    experts reads all experts and computes with few, so it takes more: 2,048 for 26B-A4B. There a pass of 256
    tokens takes 20 ms on an H200, and one of 2,048 takes 52 ms. On a CPU arithmetic binds from the start.
    """
    if on_cpu(mesh):
        return SHARED_PREFILL
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
    return max(SHARED_PREFILL, 2 ** round(math.log2(2 * BALANCE * read / products)))


@dataclass(frozen=True)
class Shapes:
    """The shapes of the passes that read prompts.

    Attributes:
      slots: of the batch.
      full: tokens of a pass that many waiting prompts share; see `full_pass`. Where it is `SHARED_PREFILL`, the
        shapes that read a prompt follow from its own length alone, whoever waits beside it.
      longest: tokens of a pass of one row, where there is one slot.
    """

    slots: int
    mesh: Mesh
    full: int
    longest: int

    @classmethod
    def of(cls, target: Graph, slots: int, mesh: Mesh, *, invariant: bool) -> Shapes:
        """Return the shapes for a model on a mesh."""
        return cls(
            slots,
            mesh,
            full=SHARED_PREFILL if invariant else full_pass(target, mesh),
            longest=PREFILL_CHUNK if on_cpu(mesh) else LONGEST_CHUNK,
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

    def next_pass(self, waiting: Mapping[int, int]) -> tuple[int, int, list[int]]:
        """Return the rows and the width of the next pass, and which of the chunks that wait it takes.

        Args:
          waiting: the width of the next chunk of each slot.
        """
        order = sorted(waiting, key=lambda slot: -waiting[slot])
        width = waiting[order[0]]
        rows = self.full_rows(width)
        if self.full > SHARED_PREFILL:
            apart = Counter(waiting[slot] for slot in order[:rows])
            passes = {w: -(-count // self.small_rows(w)) for w, count in apart.items()}
            if sum(n * self._cost(self.small_rows(w) * w) for w, n in passes.items()) > self._cost(
                rows * width
            ):
                return rows, width, order[:rows]
        rows = self.small_rows(width)
        return rows, width, [slot for slot in order if waiting[slot] == width][:rows]

    def _cost(self, tokens: int) -> float:
        """Return what a pass takes, in units of what one more token takes.

        Measured for 26B-A4B on an H200: 20 ms for 256 tokens, 53 ms for 2,048.
        """
        return 0.4 * self.full + tokens

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
        widths = {self.width(left) for left in range(1, max(self.longest, self.full) + 1)}
        rows = (self.small_rows, self.full_rows)
        return sorted({(of(width), width) for width in widths for of in rows})


def chunks(
    prompts: Mapping[int, Sequence[int] | np.ndarray], shapes: Shapes
) -> Iterator[PrefillChunk]:
    """Cut the prompts of slots into chunks, in the order in which they have to be fed.

    Rows of a pass that nobody needs point past the last slot.
    """
    begins = dict.fromkeys(prompts, 0)
    while begins:
        waiting = {slot: shapes.width(len(prompts[slot]) - begin) for slot, begin in begins.items()}
        while waiting:
            rows, width, taken = shapes.next_pass(waiting)
            some = {slot: (prompts[slot], begins[slot]) for slot in taken}
            yield chunk_of(some, rows, width, shapes.slots)
            for slot in taken:
                del waiting[slot]
                begins[slot] += width
        begins = {slot: begin for slot, begin in begins.items() if begin < len(prompts[slot])}


def chunk_of(
    some: Mapping[int, tuple[Sequence[int] | np.ndarray, int]], rows: int, width: int, slots: int
) -> PrefillChunk:
    """Return a pass over the prompts of some slots, each from its own place on.

    Args:
      some: by slot, the prompt and how many of its tokens are read already.
      slots: how many there are; a row without a prompt names this one, which does not exist.
    """
    of = np.full(rows, slots, np.int32)
    tokens = np.zeros((rows, width), np.int32)
    start, count = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
    is_last = np.zeros(rows, bool)
    for row, (slot, (prompt, begin)) in enumerate(some.items()):
        piece = prompt[begin : begin + width]
        of[row], start[row], count[row] = slot, begin, len(piece)
        tokens[row, : len(piece)] = piece
        is_last[row] = begin + len(piece) == len(prompt)
    return PrefillChunk(*map(jnp.asarray, (of, tokens, start, count, is_last)))


class PromptReader:
    """Reads the prompts of new slots by turns, so that rows which decode need not wait for all of them.

    Args:
      max_tokens: that are read in a turn, padding included, one pass at least; None for all.
    """

    def __init__(self, shapes: Shapes, max_tokens: int | None):
        self.shapes, self.max_tokens = shapes, max_tokens
        self.slots: set[int] = set()  # whose prompts are not read to the end
        self.is_over_turn = False  # rows that decode are to go on before more is read
        self._chunks: deque[PrefillChunk] = deque()

    @property
    def is_done(self) -> bool:
        """Tell whether all prompts are read."""
        return not self._chunks

    def start(self, prompts: Mapping[int, Sequence[int]]) -> None:
        """Take the prompts of some slots; those of earlier ones are read."""
        self._chunks.extend(chunks(prompts, self.shapes))
        self.slots = set(prompts)

    def turn(
        self, feed: Callable[[DecodeState, PrefillChunk], DecodeState], state: DecodeState
    ) -> DecodeState:
        """Feed the passes of one turn."""
        read = 0
        while self._chunks and (self.max_tokens is None or read < self.max_tokens):
            chunk = self._chunks.popleft()
            state = feed(state, chunk)
            read += chunk.tokens.size
            self.slots -= set(np.asarray(chunk.slots)[np.asarray(chunk.is_last)].tolist())
        self.is_over_turn = bool(self._chunks)
        return state


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
