"""Replies that follow grammars, as the compiled decode loop asks for them: by their numbers.

A compiled program knows no objects of Python, and engines may share it. So a row of its state has the number of a
`Guide`, wherever the row moves. Once a step the program calls `answer` with the numbers, and with what the rows said
since the last step. Nobody has to end a guide: it is gone with the request that holds it.

`answer` runs in a thread of the program's, while the program waits. It does no work of JAX, which could wait for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from weakref import WeakValueDictionary

import numpy as np
from jaxtyping import Int32, UInt32

from jaxspec.text.grammars.matcher import ALL, Grammar, Matcher, fill, num_allowed

_NUMBERS = itertools.count()
_LIVE: WeakValueDictionary[int, Guide] = WeakValueDictionary()
_MOST_RUNS = 4  # of forced tokens that are written into one row's drafts


class Guide:
    """Where one request is in its grammar.

    Attributes:
      number: what programs call it by.
      error: why the grammar does not go on, if it does not. The request then gets no more tokens.
    """

    def __init__(self, grammar: Grammar):
        """Begin a reply."""
        self.number = next(_NUMBERS) % 2**31
        self.error: str | None = None
        self.matcher: Matcher = grammar.matcher()
        self._seen = 0  # tokens of the reply that the matcher knows
        _LIVE[self.number] = self

    def first_mask(self) -> UInt32[np.ndarray, " words"]:
        """Return what the reply may begin with."""
        masks = np.full((1, 1, self.matcher.tokens.words), ALL, np.uint32)
        fill(masks, {0: (self.matcher, ())})
        self.check(masks[0])
        return masks[0, 0]

    def hear(self, recent: Sequence[int], count: int) -> None:
        """Take what the reply said since the last call.

        Args:
          recent: its last tokens, or more.
          count: of all its tokens.
        """
        if (new := count - self._seen) and self.error is None:
            assert 0 < new <= len(recent)
            try:
                self.matcher.commit(recent[-new:])
            except ValueError as error:
                self.error = str(error)
            self._seen = count

    def check(self, masks: UInt32[np.ndarray, "T words"]) -> None:
        """Let masks allow nothing, if something went wrong."""
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
    """Say what the rows of a batch may choose, before and after each of their drafts.

    Args:
      numbers: of guides. All tokens are allowed to a row with no live guide of its number.
      counts: tokens that each row has.
      recent: the last of them.
      words: of a mask.
      force: whether drafts may be replaced.

    Returns:
      The drafts, and the masks. Masks behind a draft that is not allowed allow everything, and do not count. With
      `force`, such a draft and those behind it are replaced where the grammar leaves no choice of the text.
    """
    offered = np.array(drafts)
    masks = np.full((len(numbers), drafts.shape[1] + 1, words), ALL, np.uint32)
    found = {row: _LIVE.get(int(number)) for row, number in enumerate(numbers)}
    guides = {row: guide for row, guide in found.items() if guide is not None}
    for row, guide in guides.items():
        guide.hear(recent[row].tolist(), int(counts[row]))
    sound = {row: guide for row, guide in guides.items() if guide.error is None}
    fill(masks, {row: (guide.matcher, offered[row].tolist()) for row, guide in sound.items()})
    if force:
        _write_forced(sound, offered, masks)
    for row, guide in guides.items():
        guide.check(masks[row])
    return offered, masks


def _write_forced(
    guides: dict[int, Guide],
    offered: Int32[np.ndarray, "B G"],
    masks: UInt32[np.ndarray, "B G+1 words"],
) -> None:
    """Replace drafts that are not allowed by what the grammar forces there, and their masks with them."""
    changed = dict(guides)
    for _ in range(_MOST_RUNS):
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
