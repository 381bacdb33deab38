"""Grammars of running requests on the host, which compiled programs call by number.

A compiled program knows no Python objects, and engines may share it. A row of its state therefore
has the number of a `Guide`. Once a step, the program calls `answer` with these numbers and with the
newest tokens of each row. A guide ends with the request that holds it.

`answer` runs in a thread of the program, and the program waits for it. On a mesh each device asks for its
own rows, and those that hold the same rows share an answer (`answer_once`). It must not use JAX, which
could wait for the program.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from weakref import WeakValueDictionary

import numpy as np
from jaxtyping import Int32, UInt32

from jaxspec.text.grammars.matcher import ALL, Grammar, Matcher, fill, num_allowed

_NUMBERS = itertools.count()
_LIVE: WeakValueDictionary[int, Guide] = WeakValueDictionary()
_LOCK = threading.Lock()
_ANSWERS: dict[tuple[bytes, ...], tuple[np.ndarray, np.ndarray]] = {}  # the newest, oldest first
_MAX_ANSWERS = 8  # to as many groups of devices; a group that comes too late computes its own anew
_MAX_RUNS = 4  # runs of forced tokens that are written into one row's drafts


class Guide:
    """The position of one request in its grammar.

    Attributes:
      number: the number by which programs call the guide.
      error: the reason why the grammar cannot go on, or None. The request then gets no more tokens.
    """

    def __init__(self, grammar: Grammar):
        """Begin a reply."""
        self.number = next(_NUMBERS) % 2**31
        self.error: str | None = None
        self.matcher: Matcher = grammar.matcher()
        self._seen = 0  # tokens of the reply that the matcher knows
        _LIVE[self.number] = self

    def first_mask(self) -> UInt32[np.ndarray, " words"]:
        """Return the mask of the first token."""
        masks = np.full((1, 1, self.matcher.tokens.words), ALL, np.uint32)
        fill(masks, {0: (self.matcher, ())})
        self.check(masks[0])
        return masks[0, 0]

    def update(self, recent: Sequence[int], count: int) -> None:
        """Move past the tokens of the reply since the last call.

        Args:
          recent: the last tokens of the reply, at least the new ones.
          count: the number of all its tokens.
        """
        if (new := count - self._seen) and self.error is None:
            assert 0 < new <= len(recent)
            try:
                self.matcher.commit(recent[-new:])
            except ValueError as error:
                self.error = str(error)
            self._seen = count

    def check(self, masks: UInt32[np.ndarray, "T words"]) -> None:
        """Let masks allow nothing if the grammar has an error."""
        self.error = self.error or self.matcher.error
        if self.error is not None:
            masks[0] = 0


def answer(
    numbers: Int32[np.ndarray, " B"],
    counts: Int32[np.ndarray, " B"],
    recent: Int32[np.ndarray, "B W"],
    drafts: Int32[np.ndarray, "B G"],
    *,
    words: int,
    force: bool,
) -> tuple[Int32[np.ndarray, "B G"], UInt32[np.ndarray, "B G+1 words"]]:
    """Return the tokens that the rows of a batch may choose, before and after each draft.

    Args:
      numbers: the guide of each row. Without a live guide of this number, all tokens are allowed.
      counts: the number of tokens that each row has.
      recent: the last of these tokens.
      words: the words of a mask.
      force: whether drafts may be replaced.

    Returns:
      The drafts, and the masks. Masks behind a draft that is not allowed allow everything and mean
      nothing. With `force`, such a draft and those behind it are replaced where the grammar leaves
      no choice of the text.
    """
    offered = np.array(drafts)
    masks = np.full((len(numbers), drafts.shape[1] + 1, words), ALL, np.uint32)
    live = {row: _LIVE.get(int(number)) for row, number in enumerate(numbers)}
    guides = {row: guide for row, guide in live.items() if guide is not None}
    for row, guide in guides.items():
        guide.update(recent[row].tolist(), int(counts[row]))
    usable = {row: guide for row, guide in guides.items() if guide.error is None}
    fill(masks, {row: (guide.matcher, offered[row].tolist()) for row, guide in usable.items()})
    if force:
        _write_forced(usable, offered, masks)
    for row, guide in guides.items():
        guide.check(masks[row])
    return offered, masks


def answer_once(*arrays: np.ndarray, words: int, force: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return `answer` for devices that ask for the same rows. The first that asks computes it."""
    key = tuple(x.tobytes() for x in arrays)
    with _LOCK:
        if key not in _ANSWERS:
            if len(_ANSWERS) == _MAX_ANSWERS:
                _ANSWERS.pop(next(iter(_ANSWERS)))
            _ANSWERS[key] = answer(*arrays, words=words, force=force)
        return _ANSWERS[key]


def _write_forced(
    guides: dict[int, Guide],
    offered: Int32[np.ndarray, "B G"],
    masks: UInt32[np.ndarray, "B G+1 words"],
) -> None:
    """Replace drafts that are not allowed by the tokens that the grammar forces, with masks."""
    changed = dict(guides)
    for _ in range(_MAX_RUNS):
        for row, guide in list(changed.items()):
            drafts, matcher = offered[row].tolist(), guide.matcher
            good = num_allowed(masks[row, :-1], drafts)
            left = len(drafts) - good
            forced = [] if not left or matcher.error else matcher.forced(drafts[:good])
            if not forced:
                del changed[row]
                continue
            offered[row, good : good + len(forced)] = forced[:left]
            masks[row, good:] = ALL
        if not changed:
            return
        fill(masks, {row: (g.matcher, offered[row].tolist()) for row, g in changed.items()})
