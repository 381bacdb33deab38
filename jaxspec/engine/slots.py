"""The rows of a state, and the requests that have them: what each got so far, and how it ends.

Read `Slots.start` and `Slots.look`. What is new `news` says. When to read prompts and when to decode is the engine's
business.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Executor, Future
from typing import Any

import jax
import numpy as np

from jaxspec.engine.request import (
    Completion,
    Reason,
    Request,
    Update,
    admission,
    callback_failed,
    failed,
    grammar_failed,
    kept,
)
from jaxspec.runtime.runtime import Runtime, Told
from jaxspec.runtime.step_output import Ask, Most, News
from jaxspec.sampling import Logprobs
from jaxspec.state import DecodeState, PrefillChunk
from jaxspec.text.grammars.guides import Guide
from jaxspec.text.grammars.matcher import ALL

Work = tuple[DecodeState, News, float]
"""What work on a state comes to: the next state, what is new, and the seconds that it took."""


@dataclasses.dataclass
class Row:
    """A request that has a row, and what it got so far.

    Attributes:
      guide: follows its grammar.
      is_read: whether its prompt is read, so that its first token is there.
      cached_tokens: of the prompt, which were copied and not read.
    """

    request: Request
    guide: Guide | None = None
    is_read: bool = False
    cached_tokens: int = 0
    tokens: list[int] = dataclasses.field(default_factory=list)
    acceptance_lengths: list[int] = dataclasses.field(default_factory=list)
    verify_lengths: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[Logprobs] = dataclasses.field(default_factory=list)

    def hear(self, news: News, place: int, verified: int) -> None:
        """Take what is new of the row in some place, whose new steps verified so many drafts."""
        new = int(news.num_tokens[place]) - len(self.tokens)
        steps = int(news.num_steps[place]) - len(self.acceptance_lengths)
        assert new <= news.tokens.shape[1]
        assert steps <= news.acceptance_lengths.shape[1]
        self.tokens += news.tokens[place, :new].tolist()
        self.acceptance_lengths += news.acceptance_lengths[place, :steps].tolist()
        self.verify_lengths += [verified] * steps
        if news.logprobs is not None and new:
            self.logprobs.append(jax.tree.map(lambda x: x[place, :new], news.logprobs))

    def update(self) -> Update:
        """Return its tokens so far."""
        asks = self.request.sampling.logprobs or self.request.sampling.top_logprobs
        lengths = tuple(self.acceptance_lengths), tuple(self.verify_lengths)
        logprobs = self._logprobs() if asks else {}
        return Update(self.request.id, tuple(self.tokens), *lengths, **logprobs)

    def completion(self, reason: Reason, error: Exception | None = None) -> Completion:
        """Return how it ended.

        Args:
          error: what its `stop_at` raised.
        """
        done = self._completion(reason, error)
        return dataclasses.replace(done, cached_tokens=self.cached_tokens)

    def _completion(self, reason: Reason, error: Exception | None) -> Completion:
        tokens, logprobs = tuple(self.tokens), self._logprobs()
        if error is not None:
            return callback_failed(self.request, error, tokens, **logprobs)
        if reason == "error" and self.guide is not None and self.guide.error is not None:
            return grammar_failed(self.request, self.guide.error, tokens, **logprobs)
        if reason == "error":
            return failed(self.request, tokens, **logprobs)
        accepted, verified = tuple(self.acceptance_lengths), tuple(self.verify_lengths)
        return Completion(
            self.request.id, tokens, reason, accepted, verify_lengths=verified, **logprobs
        )

    def _logprobs(self) -> dict[str, Any]:
        """Return the fields of a `Completion` about log-probabilities."""
        if not self.logprobs:
            return {}
        count = len(self.tokens)
        whole = jax.tree.map(lambda *x: np.concatenate(x)[:count].tolist(), *self.logprobs)
        found = dict(logprobs=tuple(whole.target), sampled_logprobs=tuple(whole.sampled))
        if whole.top_ids is not None:
            best = zip(whole.top_ids, whole.top_values, strict=True)
            found["top_logprobs"] = tuple(tuple(zip(*row, strict=True)) for row in best)
        return found


class Slots:
    """A state of some rows, and who has them.

    Args:
      count: rows.
    """

    def __init__(self, runtime: Runtime, count: int, num_stop_ids: int):
        self.runtime, self.count, self.num_stop_ids = runtime, count, num_stop_ids
        self.rows: list[Row | None] = [None] * count
        self._spoilt = np.zeros(count, bool)  # as the device last said
        self._work: Future[Work] | Work | None = None  # what the device does
        self._news: News | None = None
        self._read_then: list[int] = []  # rows whose prompts were read when it was started
        self._verified = 0  # drafts that each of its steps verifies
        self._state: DecodeState | None = None

    @property
    def state(self) -> DecodeState:
        """The device's part. Every program takes the old one's memory, so set what it returns."""
        assert self._work is None, "the device has it"
        if self._state is None:
            self._state = self.runtime.init_state(self.num_stop_ids, self.count)
        return self._state

    @state.setter
    def state(self, state: DecodeState) -> None:
        self._state = state

    @property
    def free(self) -> list[int]:
        """Rows that nobody has."""
        return [place for place, row in enumerate(self.rows) if row is None]

    @property
    def read(self) -> list[int]:
        """Rows whose prompts are read."""
        return [place for place, row in enumerate(self.rows) if row is not None and row.is_read]

    @property
    def requests(self) -> list[Request]:
        """The requests whose prompts are read."""
        return [row.request for row in self.rows if row is not None and row.is_read]

    @property
    def new_acceptance_lengths(self) -> list[np.ndarray]:
        """What the steps of each row committed that `look` tells of next."""
        news, found = self._news, []
        assert news is not None
        for place in self._read_then:
            if (row := self.rows[place]) is not None:
                count = int(news.num_steps[place]) - len(row.acceptance_lengths)
                found.append(np.asarray(news.acceptance_lengths[place, :count]))
        return found

    def admit(self, new: Mapping[int, Request]) -> None:
        """Give free rows to requests, whose prompts are to be read."""
        guides: dict[int, int] = {}
        for place, request in new.items():
            guide = None if request.grammar is None else Guide(request.grammar)
            self.rows[place] = Row(request, guide)
            if guide is not None:
                guides[place] = guide.number
        mine = np.isin(np.arange(self.count), [*new])
        if (spoilt := mine & self._spoilt).any():
            self.state = self.runtime.clear(self.state, spoilt)
            self._spoilt &= ~mine
        sizes = dict(rows=self.count, num_stop_ids=self.num_stop_ids)
        self.state = self.runtime.admit(self.state, admission(self.runtime, new, guides, **sizes))

    def with_masks(self, chunk: PrefillChunk, ended: Sequence[int]) -> PrefillChunk:
        """Add to a pass what rows may say first, where their grammars rule that.

        Args:
          ended: rows whose prompts end in it.
        """
        rows = {place: self.rows[place] for place in ended}
        first = {p: row.guide.first_mask() for p, row in rows.items() if row and row.guide}
        if not first:
            return chunk
        places = np.asarray(chunk.slots).tolist()
        free = np.full_like(next(iter(first.values())), ALL)
        masks = np.stack([first.get(place, free) for place in places])
        return dataclasses.replace(chunk, masks=masks)

    def is_spoilt(self, place: int) -> bool:
        """Tell whether a row's numbers are not finite, as far as the work that was waited for says."""
        assert self._news is not None
        return bool(self._news.spoilt[place])

    def place_of(self, id: Hashable) -> int | None:
        """Return the row that a request has."""
        return next((p for p, row in enumerate(self.rows) if row and row.request.id == id), None)

    def take(self, other: Slots, targets: Mapping[int, int]) -> None:
        """Move rows of others to free rows of these.

        Args:
          targets: the row here for each row there.
        """
        self.state = self.runtime.insert(self.state, other.state, targets)
        for source, target in targets.items():
            self.rows[target], other.rows[source] = other.rows[source], None
            self._spoilt[target] = other._spoilt[source]

    def ask(self, steps: int) -> Ask:
        """Return what to ask the next program on this state.

        Args:
          steps: decode steps that it takes, at most; 0: it reads prompts.
        """
        known = [
            (len(row.tokens), len(row.acceptance_lengths)) if row else (0, 0) for row in self.rows
        ]
        return self.runtime.ask(steps, np.array(known, np.int32))

    def start(
        self,
        pool: Executor | None,
        most: Most,
        call: Callable[[DecodeState], Told],
        verified: int = 0,
    ) -> None:
        """Send work to the device; `look` waits for it. Until then the state is not here.

        Args:
          pool: who waits for the device; None: this call does. XLA's loops keep the thread that starts them busy,
            so only another one leaves the caller free.
          most: what the work was asked for.
          verified: drafts that each of its steps verifies.
        """
        before, self._state = self.state, None

        begun = threading.Event()

        def work() -> Work:
            begun.set()
            begin = time.perf_counter()
            state, packed = call(before)
            assert packed is not None
            return state, News.of(packed, most), time.perf_counter() - begin

        self._read_then, self._verified = self.read, verified
        if pool is None:
            self._work = work()
            return
        self._work = pool.submit(work)
        begun.wait()  # else Python lets it wait while this thread is busy, for milliseconds

    def wait(self) -> float:
        """Wait for the work that was started, and return the seconds that it took."""
        done = self._work.result() if isinstance(self._work, Future) else self._work
        assert done is not None
        self._state, self._news, taken_s = done
        self._work = None
        return taken_s

    def look(self) -> list[Update | Completion]:
        """Tell what is new of each row whose prompt was read, and free the rows that are done."""
        assert self._news is not None
        news = self._news
        self._spoilt = np.array(news.spoilt)
        events: list[Update | Completion] = []
        for place in self._read_then:
            if (row := self.rows[place]) is None:  # cancelled since
                continue
            before = len(row.tokens)
            row.hear(news, place, self._verified)
            reason: Reason | None = None
            if not news.active[place]:
                reason = "error" if news.failed[place] else "length"
                reason = "stop" if news.stopped[place] else reason
            error = None
            if len(row.tokens) > before and row.request.stop_at is not None:
                try:  # it is the user's: where it fails this request does, and the others go on
                    keep = kept(row.request.stop_at(tuple(row.tokens)))
                except Exception as raised:
                    keep, reason, error = None, "error", raised
                if keep is not None:
                    reason = "stop"
                    del row.tokens[keep:]
            if len(row.tokens) > before:
                events.append(row.update())
            if reason is not None:
                events.append(row.completion(reason, error))
                self.rows[place] = None
        over = np.array([row is None for row in self.rows])
        if (over & news.active).any():  # the device still thinks that these run
            self.state = self.runtime.retire(self.state, over)
        return events
