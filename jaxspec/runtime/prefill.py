"""Prefill passes: the chunks of prompts, and the chunks that share a pass.

Read `Shapes`, then `PrefillPlanner`. Each shape of a pass, rows times width, is a program to
compile, so there are few. The time of a pass depends on its tokens, padding included. Up to
`balance_tokens` of them the device is busy reading weights.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from jaxspec import decode
from jaxspec.cache import KVCache
from jaxspec.mesh import row_numbers
from jaxspec.models.target import ImageTokens
from jaxspec.shapes import Array, Int, Params
from jaxspec.state import DecodeSpec, DecodeState, PrefillChunk
from jaxspec.weights.model_def import ModelDef

PREFILL_CHUNK = 512
"""Width of the chunks of longer prompts, if a pass has several rows or runs on a CPU."""
LONGEST_CHUNK = 8192
"""Likewise on a GPU with one slot, where no other row waits. One pass over 8,192 tokens of 26B-A4B takes
154 ms on an H200, and 16 passes over 512 take 360 ms."""

SMALLEST_PREFILL = 16
SHARED_WIDTHS = (64, 256)
MIDDLE_WIDTH = 128
"""Another width of passes that many prompts share. With 16 rows ahead, passes over 192 mixed prompts of 334 tokens
on average then take 1.73 s instead of 2.00 s, by the times that 26B-A4B takes on an H200."""
IMAGE_WIDTHS = (*SHARED_WIDTHS, PREFILL_CHUNK, 640, 1152)
"""Widths of passes that hold a whole image, of 1,120 tokens at most."""
SHARED_PREFILL = 256
"""Tokens of a small pass if there are several slots. A row that comes alone pays for all of them."""

FULL_PASS = 2048
"""Most tokens of a pass that many prompts share on a GPU. E4B takes 12 ms for 512 of them on an H200, and
21 ms for 2,048. A model whose weights take as long as the arithmetic of half of them has passes of twice as many:
passes over 384 prompts of 26B-A4B then take 2.5 s instead of 3.0 s on an H200."""
LONGEST_ARITHMETIC_S = 0.1
"""Seconds of an H200's arithmetic in a full pass, for which running rows wait. 2,048 tokens of 31B would take 0.16, and
the pass 0.2. Passes of half as many tokens are also filled better: of 192 mixed prompts they have 10 % fewer tokens."""

FLOPS = 790e12  # of an H200
BALANCE = 184.0
"""Operations of an H200 in the time of reading one byte, at 4.3 TB/s. An A100 does 195, an H100 260."""


def bucket(n: int, smallest: int = 1) -> int:
    """Round up to a power of two, at least `smallest`."""
    return max(smallest, 1 << (int(n) - 1).bit_length() if n > 1 else 1)


def slots_on(mesh: Mesh, count: int) -> int:
    """Round slots up to a multiple of the mesh's data axis.

    On a CPU each part has at most 16, or a multiple of 8: of other numbers XLA rounds the last rows
    otherwise than the rest.
    """
    each = -(-count // mesh.shape["data"])
    if on_cpu(mesh) and each > 16:
        each = -(-each // 8) * 8
    return mesh.shape["data"] * each


def default_read_ahead(slots: int, mesh: Mesh) -> int:
    """Return the rows to prefill ahead of free slots: twice those of one pass of 128 tokens a row.

    As many in each part of a mesh. 0 with one slot in a part, which no other row shares; and on a CPU, where
    all passes take as long for a token.
    """
    data = mesh.shape["data"]
    if slots <= data or on_cpu(mesh):
        return 0
    return min(slots, data * (2 * FULL_PASS // MIDDLE_WIDTH))


def ahead_on(mesh: Mesh, count: int) -> int:
    """Round rows that are read ahead up to a multiple of the mesh's data axis."""
    data = mesh.shape["data"]
    return data * -(-count // data)


def on_cpu(mesh: Mesh) -> bool:
    """Return whether a mesh consists of CPUs."""
    return mesh.devices.flat[0].platform == "cpu"


def full_pass(
    mesh: Mesh, max_prefill_tokens: int | None, balance: float = 0.0, operations: float = 0.0
) -> int:
    """Return the tokens, in each part of a mesh, of a pass that many waiting prompts share: a power of two.

    On a CPU arithmetic binds from the start, so passes are small.

    Args:
      max_prefill_tokens: prompt tokens after which rows decode on; None for no bound. A pass has no
        more than that, or `SHARED_PREFILL` in each part.
      balance: of `balance_tokens`.
      operations: of a device, for a token.
    """
    full = SHARED_PREFILL if on_cpu(mesh) else FULL_PASS * (2 if 2 * balance > FULL_PASS else 1)
    while full > PREFILL_CHUNK and full * operations > LONGEST_ARITHMETIC_S * FLOPS:
        full //= 2
    if max_prefill_tokens is not None:
        each = max(1, int(max_prefill_tokens) // mesh.shape["data"])
        full = min(full, 1 << each.bit_length() - 1)
    return max(SHARED_PREFILL, full)


def balance_tokens(target: ModelDef) -> float:
    """Return the number of tokens whose arithmetic takes as long as reading the weights.

    184 for a dense model. A mixture of experts reads all experts and computes with few: 1,215 for
    26B-A4B.
    """
    read, operations = _bytes_and_operations(target)
    return BALANCE * read / operations


def _bytes_and_operations(target: ModelDef) -> tuple[float, float]:
    """Return the bytes of weights that a pass reads, and the operations of its products for each token."""
    config, declared = target.config, target.declared()
    read = operations = 0.0
    for name, array in target.abstract_params().items():
        if declared[name].lookup or array.ndim < 2:
            continue
        share = 1.0
        if "experts" in declared[name].axes:
            share = config.num_experts_per_token / config.num_experts
        # Quantised weights count as numbers: shapes of passes do not depend on formats.
        read += array.size * array.dtype.itemsize
        operations += 2.0 * array.size * share
    return read, operations


@dataclass(frozen=True)
class Shapes:
    """Shapes of prefill passes.

    Where a mesh splits the rows of a batch, each part of a pass has as many rows as the others, for slots of
    that part alone.

    Attributes:
      slots: of the batch.
      full: tokens in each part of a pass that many waiting prompts share; see `full_pass`. If it is
        `SHARED_PREFILL`, the shapes of the passes over a prompt follow from its own length alone.
      longest: most tokens of a pass if there is one slot.
      balance: tokens whose arithmetic takes as long as reading the weights; see `balance_tokens`.
      ring: positions of a prompt up to which chunks of it may share a pass: those of the smallest ring, in which
        no token is then written over another. 0: no two chunks of a prompt share a pass.
    """

    slots: int
    mesh: Mesh
    full: int
    longest: int
    balance: float
    ring: int = 0

    @classmethod
    def of(
        cls,
        target: ModelDef,
        slots: int,
        mesh: Mesh,
        *,
        invariant: bool,
        max_prefill_tokens: int | None = None,
    ) -> Shapes:
        """Return the shapes for a model on a mesh; for `max_prefill_tokens` see `full_pass`."""
        balance = balance_tokens(target)
        operations = _bytes_and_operations(target)[1] / mesh.shape["model"]
        own = full_pass(mesh, max_prefill_tokens, balance, operations)
        full = SHARED_PREFILL if invariant else own
        longest = PREFILL_CHUNK if on_cpu(mesh) else LONGEST_CHUNK
        return cls(slots, mesh, full=full, longest=longest, balance=balance)

    @property
    def shares_passes(self) -> bool:
        """True if prompts that wait together share passes of shapes that suit all of them."""
        return self.full > SHARED_PREFILL and self.slots > 1

    def with_rings(self, target: Sequence[KVCache], drafter: Sequence[KVCache]) -> Shapes:
        """Return shapes for a state with these caches, in which chunks of one prompt may share a pass.

        The target's keys and values are written before any query attends, where a chunk is no longer than a ring's
        slack. A drafter only writes.
        """
        slacks = [c.ring_slack for c in target if c.ring_slack is not None]
        if min(slacks, default=SHARED_WIDTHS[0]) < SHARED_WIDTHS[0]:
            return self
        sizes = (c.num_slots for c in (*target, *drafter) if c.ring_slack is not None)
        longest = np.iinfo(np.int32).max  # where every position has a slot
        return dataclasses.replace(self, ring=min(sizes, default=longest))

    @property
    def parts(self) -> int:
        """Parts of the batch."""
        return self.mesh.shape["data"]

    @property
    def full_tokens(self) -> int:
        """Tokens of a pass that fills all devices."""
        return self.parts * self.full

    def part(self, slot: int) -> int:
        """Return the part of the batch that a slot is in."""
        return slot // (self.slots // self.parts)

    def by_part(self, slots: Iterable[int]) -> list[list[int]]:
        """Return the slots of each part."""
        if self.parts == 1:
            return [list(slots)]
        parts: list[list[int]] = [[] for _ in range(self.parts)]
        for slot in slots:
            parts[self.part(slot)].append(slot)
        return parts

    def width(self, left: int) -> int:
        """Return the width of the next chunk of a prompt.

        Args:
          left: tokens of the prompt that are not prefilled yet.
        """
        if self.slots > 1:
            if self.full > max(PREFILL_CHUNK, SHARED_PREFILL) and 2 * left > self.full:
                return self.full
            chunk = min(left, PREFILL_CHUNK)
            return min(w for w in (*SHARED_WIDTHS, PREFILL_CHUNK) if w >= chunk)
        width = min(bucket(left, SMALLEST_PREFILL), self.longest)
        # Where less than three quarters would be used, two passes are quicker than one.
        return width // 2 if width > PREFILL_CHUNK and 4 * left <= 3 * width else width

    def small_rows(self, width: int) -> int:
        """Return the rows of a pass for few prompts."""
        return self._rows(SHARED_PREFILL // width)

    def full_rows(self, width: int) -> int:
        """Return the rows of a pass that fills the device."""
        return self._rows(self.full // width)

    def next_pass(
        self, left: Mapping[int, int], *, narrow: bool = False, begins: Mapping[int, int] = {}
    ) -> tuple[int, int, dict[int, int]]:
        """Return the rows and the width of the next pass, and the tokens of each slot in it.

        A pass takes the slots of each part in their order. Its width is the one of the most tokens for its cost.
        If all tokens that are left fit one full pass, it is the width of the lowest total cost. A pass of chunks,
        several of a prompt, is the next one where it is better by the same measure.

        Args:
          left: tokens of each slot that are not prefilled yet.
          narrow: whether no prompt has more than `PREFILL_CHUNK` tokens, if there are several slots.
          begins: tokens of slots that are prefilled already, if chunks of a prompt may share a pass.
        """
        if not self.shares_passes:
            widths = {slot: self.width(count) for slot, count in left.items()}
            width = max(widths.values())
            rows = self.small_rows(width)
            taken = self._first((s for s in left if widths[s] == width), rows)
            return rows, width, {slot: min(width, left[slot]) for slot in taken}
        counts = [[left[slot] for slot in slots] for slots in self.by_part(left)]
        widths = [width for width in self.widths if width <= PREFILL_CHUNK or not narrow]
        in_chunks = self._in_chunks(left, begins, PREFILL_CHUNK if narrow else self.full)
        if max(map(sum, counts)) <= self.full:
            width = min(widths, key=lambda width: self._cost(width, counts))
            cost = self._cost(width, counts)
            reads_all = sum(in_chunks.values()) == sum(left.values())
            is_better = reads_all and self._cost_of_chunks(in_chunks) < cost
        else:
            width = max(widths, key=lambda width: self._rate(width, counts))
            rate = sum(in_chunks.values()) / self._cost_of_chunks(in_chunks)
            is_better = rate > self._rate(width, counts)
        if is_better:
            return self._rows_of_chunks(in_chunks), SHARED_WIDTHS[0], in_chunks
        rows = self._rows_for(width, counts)
        return rows, width, {slot: min(width, left[slot]) for slot in self._first(left, rows)}

    @property
    def are_mixed(self) -> bool:
        """True if rows that decode share passes over prompts, where the models allow it.

        That saves one reading of the weights. It was measured to be faster with 26B-A4B, where this takes longer than
        the arithmetic of a small pass. No engine was measured with a dense model.
        """
        return self.shares_passes and self.parts == 1 and self.balance > PREFILL_CHUNK

    @property
    def mixed_passes(self) -> list[tuple[int, int]]:
        """Rows and width of the chunks in passes that rows which decode share, see `next_mixed`; []: there are none."""
        if not self.ring or not self.are_mixed:
            return []
        width = SHARED_WIDTHS[0]
        return sorted({(tokens // width, width) for tokens in (PREFILL_CHUNK, self.full)})

    def next_mixed(
        self, left: Mapping[int, int], begins: Mapping[int, int]
    ) -> tuple[int, int, dict[int, int]] | None:
        """Return the next pass that rows which decode share, as `next_pass`.

        It takes the prompts before the first one that goes beyond a ring or far: chunks of that one are better read
        in a pass of their own. None: that prompt is the next one, or there are no such passes.
        """
        passes, longest = self.mixed_passes, min(self.ring, LONGEST_CHUNK)
        short = itertools.takewhile(lambda slot: begins[slot] + left[slot] <= longest, left)
        left = {slot: left[slot] for slot in short}
        if not passes or not left:
            return None
        (small, width), (full, _) = passes[0], passes[-1]
        needed = sum(-(-count // width) for count in left.values())
        rows = full if 2 * needed >= full else small
        return rows, width, self._in_chunks(left, begins, self.full, rows)

    def _in_chunks(
        self,
        left: Mapping[int, int],
        begins: Mapping[int, int],
        limit: int,
        rows: int | None = None,
    ) -> dict[int, int]:
        """Return the tokens of each slot in a pass whose rows are chunks: `limit` of a prompt, or fewer.

        Args:
          rows: of each part; None: those of a full pass.
        """
        width, taken, of_part = SHARED_WIDTHS[0], dict[int, int](), rows
        for slots in self.by_part(left):
            rows = self.full_rows(width) // self.parts if of_part is None else of_part
            for slot in slots:
                up_to_ring = max(width, self.ring - begins.get(slot, self.ring))
                count = min(left[slot], limit, up_to_ring, rows * width)
                if count > 0:
                    taken[slot] = count
                    rows -= -(-count // width)
        return taken

    def _rows_of_chunks(self, chunks: Mapping[int, int]) -> int:
        width = SHARED_WIDTHS[0]
        taken = [sum(-(-chunks[s] // width) for s in slots) for slots in self.by_part(chunks)]
        small = self.small_rows(width)
        return small if self.parts * max(taken) <= small else self.full_rows(width)

    def _cost_of_chunks(self, chunks: Mapping[int, int]) -> float:
        return self._pass_cost(self._rows_of_chunks(chunks), SHARED_WIDTHS[0])

    def _first(self, slots: Iterable[int], rows: int) -> list[int]:
        """Return the first slots of each part that a pass of so many rows takes."""
        return [slot for of in self.by_part(slots) for slot in of[: rows // self.parts]]

    def _rows_for(self, width: int, left: Sequence[Sequence[int]]) -> int:
        small = self.small_rows(width)
        return small if self.parts * max(map(len, left)) <= small else self.full_rows(width)

    def _cost(self, width: int, left: Sequence[Sequence[int]]) -> float:
        """Return the cost of passes of one width over all prompts that are left, as `_pass_cost`.

        Args:
          left: tokens of the prompts of each part.
        """
        rows = self._rows_for(width, left)
        pieces = [[-(-count // width) for count in of] for of in left]
        each = rows // self.parts
        passes = max(max(*of, -(-sum(of) // each)) for of in pieces if of)
        return passes * self._pass_cost(rows, width)

    def _rate(self, width: int, left: Sequence[Sequence[int]]) -> float:
        """Return the tokens that the next pass prefills, divided by its cost."""
        rows = self._rows_for(width, left)
        read = sum(min(count, width) for of in left for count in of[: rows // self.parts])
        return read / self._pass_cost(rows, width)

    def _pass_cost(self, rows: int, width: int) -> float:
        """Return the cost of a pass, in units of the time of one more token.

        On an H200 26B-A4B takes 20 ms for 256 tokens, 22 for 512 and 41 for 2,048.
        """
        return self.balance + rows // self.parts * width

    def min_free_slots(self, waiting: Iterable[int]) -> int:
        """Return the free slots for which decoding should stop; 0 if no prompt waits.

        A pass takes about as long for one prompt as for all that fill it. So slots wait for each
        other, an eighth of them at most.

        Args:
          waiting: tokens of the waiting prompts, the first one first.
        """
        count = tokens = 0
        for length in itertools.islice(waiting, max(1, self.slots // 8)):
            if tokens >= self.full_tokens:
                break
            count, tokens = count + 1, tokens + self.width(length)
        return count

    def _rows(self, count: int) -> int:
        """Return the rows of a pass with so many in each part."""
        return min(self.slots, self.parts * bucket(max(1, count)))

    def image_pass(self, count: int) -> tuple[int, int]:
        """Return the rows and the width of a pass for an image of so many tokens."""
        return self._rows(1), next(width for width in IMAGE_WIDTHS if width >= count)

    def all(self, longest_prompt: int | None = None) -> list[tuple[int, int]]:
        """Return the rows and the width of every possible pass.

        Args:
          longest_prompt: tokens of the longest prompt; None if any may come. Of the widths that hold
            it whole, only the smallest is used: wider passes cost more and read no more.
        """
        widths = self.widths
        if longest_prompt is not None:
            holding = [width for width in widths if width >= longest_prompt]
            widths = [width for width in widths if width <= min(holding, default=width)]
        return self._passes(widths)

    def of_prompts(self, lengths: Collection[int]) -> list[tuple[int, int]]:
        """Return the rows and the width of every pass that prompts of these lengths can have."""
        if self.shares_passes:
            return self.all(max(lengths, default=1))
        widths = set()
        for left in set(lengths):
            while left > 0:
                widths.add(self.width(left))
                left -= self.width(left)
        return self._passes(widths)

    def _passes(self, widths: Iterable[int]) -> list[tuple[int, int]]:
        rows = (self.small_rows, self.full_rows)
        return sorted({(of(width), width) for width in widths for of in rows})

    def most_tokens(self, cache_length: int) -> int:
        """Return the tokens of the largest pass over prompts of at most so many tokens."""
        return max(rows * min(width, cache_length) for rows, width in self.all())

    @functools.cached_property
    def widths(self) -> list[int]:
        """The widths of all passes."""
        widths = {self.width(left) for left in range(1, max(self.longest, self.full) + 1)}
        if self.shares_passes:
            widths.add(MIDDLE_WIDTH)
        return sorted(widths)


def chunks(
    prompts: Mapping[int, Sequence[int] | np.ndarray], shapes: Shapes
) -> Iterator[PrefillChunk]:
    """Cut the prompts of slots into the chunks of passes, in the order of the passes."""
    planner = PrefillPlanner(shapes)
    planner.add(prompts)
    while planner.pending:
        yield planner.next_chunk()[0]


@dataclass(frozen=True, eq=False)
class PromptImage:
    """An image in a prompt.

    Attributes:
      begin, end: of its tokens in the prompt.
      embed: returns their embeddings. It is called when the first of them is prefilled.
    """

    begin: int
    end: int
    embed: Callable[[], np.ndarray]

    @functools.cached_property
    def embeddings(self) -> np.ndarray:
        """The embeddings of its tokens, [tokens, D]."""
        return self.embed()


def make_chunk(
    prompts: Mapping[int, tuple[Sequence[int] | np.ndarray, int]],
    rows: int,
    width: int,
    slots: int,
    ends: Mapping[int, int] = {},
    images: Mapping[int, Sequence[PromptImage]] = {},
    two_way: bool = False,
    parts: int = 1,
) -> PrefillChunk:
    """Return the chunk of a pass over the prompts of some slots.

    Args:
      prompts: by slot, the prompt and the number of its tokens that are prefilled already.
      slots: number of all slots. A row without a prompt has this number, which is no slot.
      parts: of the slots. The rows of the pass are as many of each part, and their slots are numbered in each
        part for itself.
      ends: by slot, the number of prefilled tokens after the pass; by default as many as one row holds. More
        take several rows.
      images: by slot, those of its prompt.
      two_way: as in `ImageTokens`.
    """
    of = np.full(rows, slots, np.int32)
    tokens = np.zeros((rows, width), np.int32)
    start, count = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
    is_last = np.zeros(rows, bool)
    of_rows: list[Sequence[PromptImage]] = [()] * rows
    taken = [rows // parts * part for part in range(parts)]  # rows before the next one of each part
    for slot, (prompt, begin) in prompts.items():
        part, number = divmod(slot, slots // parts)
        end = min(len(prompt), ends.get(slot, begin + width))
        for at in range(begin, end, width):
            row = taken[part]
            taken[part] += 1
            piece = prompt[at : min(at + width, end)]
            of[row], start[row], count[row] = number, at, len(piece)
            tokens[row, : len(piece)] = piece
            is_last[row] = at + len(piece) == len(prompt)
            of_rows[row] = images.get(slot, ())
    in_chunk = _image_tokens(of_rows, start, count, width, two_way)
    arrays: Any = of, tokens, start, count, is_last  # the call places them with its other inputs
    return PrefillChunk(*arrays, images=in_chunk)


def _image_tokens(
    images: Sequence[Sequence[PromptImage]],
    start: np.ndarray,
    count: np.ndarray,
    width: int,
    two_way: bool,
) -> ImageTokens | None:
    """Return the tokens of images in a chunk, or None if it has none.

    Args:
      images: of the prompt of each row.
      start: the position of each row's first token.
      count: the tokens of each row.
    """
    numbers = np.zeros((len(start), width), np.int32)
    embeddings: np.ndarray | None = None
    for row, of_prompt in enumerate(images):
        for number, image in enumerate(of_prompt, 1):
            begin, end = max(image.begin, start[row]), min(image.end, start[row] + count[row])
            if begin >= end:
                continue
            part = image.embeddings[begin - image.begin : end - image.begin]
            if embeddings is None:
                embeddings = np.zeros((*numbers.shape, part.shape[1]), part.dtype)
            columns = slice(begin - start[row], end - start[row])
            numbers[row, columns], embeddings[row, columns] = number, part
    if embeddings is None:
        return None
    return ImageTokens(*jax.device_put([embeddings, numbers]), two_way=two_way)


class PrefillPlanner:
    """Plans prefill passes over the prompts of slots. More prompts may come between two passes.

    Args:
      two_way: whether tokens of an image see each other. Each image is then in one pass.

    Attributes:
      pending: by slot, prompts that are not prefilled to the end, and the number of tokens that
        are.
      stops: by slot, positions where a pass has to end.
      images: by slot, those of its prompt.
      last_ends: by slot of the newest pass, the number of prefilled tokens after it.
      narrow_from: position of a prompt from which passes over it are narrow, since wide ones take too long.
    """

    def __init__(self, shapes: Shapes, *, two_way: bool = False):
        self.shapes, self.two_way = shapes, two_way
        self.narrow_from = math.inf
        self.pending: dict[int, tuple[Sequence[int] | np.ndarray, int]] = {}
        self.stops: dict[int, Set[int]] = {}
        self.images: dict[int, Sequence[PromptImage]] = {}
        self.last_ends: dict[int, int] = {}

    def add(
        self,
        prompts: Mapping[int, Sequence[int] | np.ndarray],
        begin: int = 0,
        stops: Set[int] = frozenset(),
        images: Sequence[PromptImage] = (),
    ) -> None:
        """Add the prompts of more slots.

        Args:
          begin: tokens of each that are prefilled already.
          stops: positions where a pass over them has to end. More may be added later.
          images: of each.
        """
        self.pending |= {slot: (prompt, begin) for slot, prompt in prompts.items()}
        self.stops |= dict.fromkeys(prompts, stops)
        self.images |= dict.fromkeys(prompts, images)

    def remove(self, slot: int) -> None:
        """Plan no more passes over a slot's prompt."""
        if self.pending.pop(slot, None) is not None:
            del self.images[slot]

    def next_chunk(self, *, mixed: bool = False) -> tuple[PrefillChunk, list[int]]:
        """Return the next pass, and the slots whose prompts end in it.

        Unused rows of a pass have a slot number past the last.

        Args:
          mixed: whether rows that decode share the pass, which `can_mix` says.
        """
        planned = self._next_mixed() if mixed else self._next_pass()
        assert planned is not None
        rows, width, ends = planned
        prompts = {slot: self.pending[slot] for slot in ends}
        self.last_ends = ends
        shapes = self.shapes
        of = (ends, self.images, self.two_way, shapes.parts)
        chunk = make_chunk(prompts, rows, width, shapes.slots, *of)
        ended = [slot for slot, end in ends.items() if end == len(prompts[slot][0])]
        for slot, end in ends.items():
            self.pending[slot] = prompts[slot][0], end
        for slot in ended:
            self.remove(slot)
        return chunk, ended

    @property
    def can_mix(self) -> bool:
        """True if rows that decode can share the next pass."""
        return bool(self.pending) and self._next_mixed() is not None

    def _next_mixed(self) -> tuple[int, int, dict[int, int]] | None:
        """Return the next pass that rows which decode share, as `_next_pass`; None: there is none."""
        begins = {slot: begin for slot, (_, begin) in self.pending.items()}
        left = self._left()
        without_images = itertools.takewhile(lambda slot: not self.images[slot], left)
        left = {slot: left[slot] for slot in without_images}
        planned = self.shapes.next_mixed(left, begins)
        if planned is None:
            return None
        rows, width, taken = planned
        return rows, width, {slot: begins[slot] + count for slot, count in taken.items()}

    @property
    def num_left(self) -> int:
        """Tokens of all prompts that are not prefilled yet."""
        return sum(self._left().values())

    @property
    def next_tokens(self) -> int:
        """Tokens of the next pass, padding included."""
        rows, width, _ = self._next_pass()
        return rows * width

    def _next_pass(self) -> tuple[int, int, dict[int, int]]:
        """Return the rows and the width of the next pass, and the end of each slot in it."""
        left = self._left()
        narrow = any(begin >= self.narrow_from for _, begin in self.pending.values())
        begins = {slot: begin for slot, (_, begin) in self.pending.items() if not self.images[slot]}
        rows, width, taken = self.shapes.next_pass(left, narrow=narrow, begins=begins)
        ends = {slot: self._end(slot, count) for slot, count in taken.items()}
        for slot, end in ends.items():
            if end == (begin := self.pending[slot][1]):  # the width holds no whole image
                image = next(image for image in self.images[slot] if image.end > begin)
                rows, width = self.shapes.image_pass(image.end - begin)
                return rows, width, {slot: self._end(slot, min(width, left[slot]))}
        return rows, width, ends

    def _end(self, slot: int, count: int) -> int:
        """Return the end of a pass over `count` tokens of a slot, or the begin of an image that it would cut."""
        begin = self.pending[slot][1]
        image = self._cut(slot, begin + count)
        return begin + count if image is None else max(begin, image.begin)

    def _left(self) -> dict[int, int]:
        return {slot: self._stop(slot) - begin for slot, (_, begin) in self.pending.items()}

    def _stop(self, slot: int) -> int:
        """Return the position where the next passes over a slot's prompt end."""
        prompt, begin = self.pending[slot]
        stops = (at for at in self.stops[slot] if at > begin and self._cut(slot, at) is None)
        return min(stops, default=len(prompt))

    def _cut(self, slot: int, at: int) -> PromptImage | None:
        """Return the image that a pass which ends there would cut, if it may not; else None."""
        images = self.images[slot] if self.two_way else ()
        return next((image for image in images if image.begin < at < image.end), None)


def prefill_prompts(
    spec: DecodeSpec,
    target_params: Params,
    drafter_params: Params | None,
    state: DecodeState,
    tokens: Int[Array, "B T"],
    counts: Int[Array, " B"],
    images: ImageTokens | None = None,
) -> DecodeState:
    """Prefill the first `counts` tokens of every row in chunks, inside a compiled program.

    No prompt ends here. Rows stay inactive, and a last chunk has to follow. Where tokens of images
    see each other, one pass reads all.
    """
    b, t = tokens.shape
    width = t if images is not None and images.two_way else min(t, PREFILL_CHUNK)
    if not width:
        return state

    def feed(i: Array | int, state: DecodeState) -> DecodeState:
        begin = i * width

        def cut(x: Array) -> Array:
            return lax.dynamic_slice_in_dim(x, begin, width, axis=1)

        chunk = PrefillChunk(
            slots=row_numbers(b),
            tokens=cut(padded),
            start=jnp.minimum(counts, begin),
            count=jnp.clip(counts - begin, 0, width),
            is_last=jnp.zeros(b, bool),
            images=jax.tree.map(cut, padded_images),
        )
        return decode.prefill(spec, target_params, drafter_params, state, chunk)

    def pad(x: Array) -> Array:
        return jnp.pad(x, ((0, 0), (0, width), *((0, 0),) * (x.ndim - 2)))

    padded, padded_images = pad(tokens), jax.tree.map(pad, images)
    if t <= width:
        return feed(0, state)
    return lax.fori_loop(0, -(-jnp.max(counts) // width), feed, state)
