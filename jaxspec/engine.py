"""The engine: requests in, tokens out, over a fixed batch of slots that are refilled as rows finish.

Read `Engine.step`. A step admits waiting requests to free slots and reads their prompts; where there is none to
admit, it runs the compiled decode loop for a few steps. Then it looks at what came. `Engine.run` decodes a list
of requests by such steps. Which arrays and programs that takes is `runtime`'s business.

Prompts that wait together share passes, as many as fill the device. Other shapes round otherwise, so a row's last
bits may depend on who waited beside it. With `invariant=True` they do not: then the shapes of all passes over a row
follow from its own prompt's length alone. A request's draws follow from its own seed and sample number, always.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jaxspec import memory
from jaxspec.chosen_length import ChosenLength
from jaxspec.loading import LoadedModel
from jaxspec.prefill import PromptReader, bucket, chunk_of, rows_bucket
from jaxspec.records import ChooseLength, Drafting, Extras, FieldError, at_least
from jaxspec.requests import (
    Completion,
    Reason,
    Request,
    Seen,
    Update,
    admission,
    check_cache_length,
    failed,
    positions,
    refusal,
    refused,
)
from jaxspec.runtime import Programs, Runtime, Timings, cache_bucket, make_spec
from jaxspec.shapes import Params
from jaxspec.sharding import mesh_of, own_context
from jaxspec.state import DecodeSpec, DecodeState

STOP_IDS = 4
"""Stop ids that a slot has room for, unless the engine is made for more."""


class Engine:
    """Decodes requests with one target and at most one drafter, on fixed shapes.

    It runs on the mesh that the weights are on. It is not safe to call from several threads at once.

    Args:
      drafter: None for plain decoding.
      drafting: how to draft and to judge drafts.
      extras: what requests may ask for beyond the least, such as penalties and log-probabilities.
      batch_size: slots; rounded up to a power of two, times the mesh's data axis.
      cache_length: positions a slot holds; prompt, new tokens and one step's tokens must fit.
      num_stop_ids: most stop ids of a request; rounded up to a power of two, at least 4.
      steps_per_return: most decode steps between returns to the host.
      max_prefill_tokens: prompt tokens, padding included, that are read before rows decode on; at least one pass.
        None: all prompts that have slots are read first.
      invariant: no row depends on its neighbours, to the last bit; prompts share small passes only.
      choose_length: when to verify fewer drafts than there are, if that is quicker. See `records.ChooseLength`.
      programs: compiled programs to share with other engines; None for its own.

    Raises:
      ConfigError: the drafter does not fit the target.
      FieldError: a number is out of range.
    """

    def __init__(
        self,
        target: LoadedModel,
        drafter: LoadedModel | None,
        *,
        drafting: Drafting = Drafting(),
        extras: Extras = Extras(),
        batch_size: int = 1,
        cache_length: int = 1024,
        num_stop_ids: int = STOP_IDS,
        steps_per_return: int = 16,
        max_prefill_tokens: int | None = None,
        invariant: bool = False,
        choose_length: ChooseLength = "greedy",
        programs: Programs | None = None,
    ):
        for name, value in (
            ("batch_size", batch_size),
            ("cache_length", cache_length),
            ("steps_per_return", steps_per_return),
            ("max_prefill_tokens", max_prefill_tokens),
        ):
            if value is not None and (wrong := at_least(1).refusal(value)):
                raise FieldError(name, wrong)
        self.target, self.drafter = target, drafter
        weights = target.params, drafter.params if drafter else None
        self.runtime = Runtime(
            make_spec(target, drafter, drafting, extras),
            *weights,
            batch_size=rows_bucket(batch_size, mesh_of(target=weights[0], drafter=weights[1])),
            cache_length=cache_length,
            invariant=invariant,
            programs=programs,
        )
        self.chosen_length = ChosenLength(self.runtime, choose_length, invariant=invariant)
        self.steps_per_return = steps_per_return
        self.max_prefill_tokens = max_prefill_tokens
        self.num_stop_ids = bucket(num_stop_ids, smallest=STOP_IDS)
        self._names = 0  # ids that were made up
        self.reset()

    @classmethod
    def fitting(
        cls,
        target: LoadedModel,
        drafter: LoadedModel | None,
        requests: Sequence[Request],
        *,
        drafting: Drafting = Drafting(),
        extras: Extras | None = None,
        batch_size: int = 1,
        cache_length: int | None = None,
        **options: Any,
    ) -> Engine:
        """Make an engine that just holds these requests.

        Requests that the model itself cannot take have no say in lengths; `check` refuses them later.

        Args:
          extras: None for what these requests ask for. A program without extras is quicker.
          cache_length: None for as many positions as the longest request needs, in buckets.
          options: of the engine, such as `steps_per_return` and `invariant`.

        Raises:
          DeviceMemoryError: the devices cannot hold so many rows of that length.
          FieldError: the caches would have more positions than the model.
        """
        if extras is None:
            extras = Extras.wanted_by([r.sampling for r in requests])
        spec = make_spec(target, drafter, drafting, extras)
        if cache_length is None:
            needed = [positions(spec, r) for r in requests if refusal(spec, r) is None]
            cache_length = cache_bucket(max(needed, default=1))
        else:
            check_cache_length(spec, cache_length)
        mesh = mesh_of(target=target.params, drafter=drafter.params if drafter else None)
        memory.check_fits(spec, rows_bucket(batch_size, mesh), cache_length, mesh)
        return cls(
            target,
            drafter,
            drafting=drafting,
            extras=extras,
            batch_size=batch_size,
            cache_length=cache_length,
            num_stop_ids=max((r.num_stop_ids for r in requests), default=1),
            **options,
        )

    # --- what it is ----------------------------------------------------------------------------------

    @property
    def spec(self) -> DecodeSpec:
        """What its programs were compiled for."""
        return self.runtime.spec

    @property
    def mesh(self) -> Mesh:
        """The devices that it runs on."""
        return self.runtime.mesh

    @property
    def batch_size(self) -> int:
        """Its slots."""
        return self.runtime.batch_size

    @property
    def cache_length(self) -> int:
        """Positions that a slot holds."""
        return self.runtime.cache_length

    @property
    def num_running(self) -> int:
        """Requests that have a slot."""
        return sum(request is not None for request in self._slots)

    @property
    def timings(self) -> Timings:
        """Seconds since it was made."""
        return self.runtime.timings

    @property
    def num_compilations(self) -> int:
        """How many programs it needed so far."""
        return self.runtime.num_compilations

    @property
    def target_params(self) -> Params:
        """The target's weights; set others of the same shapes, and nothing is compiled."""
        return self.runtime.target_params

    @target_params.setter
    def target_params(self, params: Any) -> None:
        self.runtime.target_params = params

    @property
    def drafter_params(self) -> Params | None:
        """The drafter's weights, likewise."""
        return self.runtime.drafter_params

    @drafter_params.setter
    def drafter_params(self, params: Any) -> None:
        self.runtime.drafter_params = params

    # --- requests ------------------------------------------------------------------------------------

    def check(self, request: Request) -> FieldError | None:
        """Say what is wrong with a request and the way out, or None when it can run."""
        if error := refusal(self.spec, request):
            return error
        needed = positions(self.spec, request)
        if needed > self.cache_length:
            return FieldError(
                "cache_length",
                lambda say: (
                    f"cache holds {self.cache_length} positions, but prompt "
                    f"({len(request.prompt_ids)} tokens) + {say('max_new_tokens')} "
                    f"({request.max_new_tokens}) + one step ({self.spec.step_tokens}) needs {needed}; "
                    f"pass {say('cache_length', needed)}"
                ),
            )
        if request.num_stop_ids > self.num_stop_ids:
            return FieldError(
                "stop_ids",
                f"names {request.num_stop_ids} tokens, but the engine was made for "
                f"{self.num_stop_ids}; pass num_stop_ids={request.num_stop_ids}",
            )
        return None

    def add(self, request: Request) -> Hashable:
        """Let a request wait for a slot, behind those that wait already; return its id.

        A request with more stop ids than the engine was made for is refused: they are part of the shapes, and
        none of `step`'s programs is ever compiled for a second number of them.

        Raises:
          FieldError: `check` refuses it, or its id belongs to a request that is not done.
        """
        if error := self.check(request):
            raise error
        name = request.id
        if name is None:
            while self._names in self._live:
                self._names += 1
            name, self._names = self._names, self._names + 1
        elif name in self._live:
            raise FieldError("id", f"{name!r} belongs to a request that is not done; give another")
        self._live.add(name)
        self._waiting.append(dataclasses.replace(request, id=name))
        return name

    def cancel(self, id: Hashable) -> None:
        """End a request, waiting or running. Its slot is free at once.

        Its completion comes with the next `step`: the tokens it has so far, and "cancelled".

        Raises:
          FieldError: there is no such request, or it is done.
        """
        for request in self._waiting:
            if request.id == id:
                self._waiting.remove(request)
                self._end(Completion(id, finish_reason="cancelled"))
                return
        for slot, request in enumerate(self._slots):
            if request is not None and request.id == id:
                if self._reported[slot]:
                    assert self._seen is not None
                    tokens = self._seen.tokens_of(slot)[: self._reported[slot]]
                    self._end(self._completion(slot, tokens, "cancelled"))
                else:  # its prompt is not read yet
                    self._end(Completion(id, finish_reason="cancelled"))
                self._slots[slot] = None
                self._retire(np.arange(self.batch_size) == slot)
                return
        raise FieldError("id", f"{id!r} belongs to no request that waits or runs")

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits, nothing runs, and all has been told."""
        return not self._live and not self._ended

    def step(self) -> list[Update | Completion]:
        """Admit waiting requests and read their prompts, or else decode on; return what came of it.

        Decoding returns after `steps_per_return` steps, or as soon as enough rows are done for those that wait.
        An engine that has nothing to do returns nothing.
        """
        events: list[Update | Completion] = [*self._ended]
        self._ended.clear()
        free = [slot for slot, request in enumerate(self._slots) if request is None]
        active = self.batch_size - len(self._reader.slots.union(free))
        lengths = (len(request.prompt_ids) for request in self._waiting)
        wanted = self.runtime.shapes.worth_reading(lengths)  # free slots; 0: nobody waits
        with own_context(self.mesh):
            if self._reader.is_done and wanted and free and (len(free) >= wanted or not active):
                self._admit({slot: self._waiting.popleft() for slot in free[: len(self._waiting)]})
            if not self._reader.is_done and not (self._reader.is_over_turn and active):
                assert self._state is not None
                self._state = self._reader.turn(self.runtime.feed, self._state)
            elif active:
                assert self._state is not None
                until = active + len(free) - wanted if wanted and self._reader.is_done else 0
                running = {s: r for s, r in enumerate(self._slots) if s not in self._reader.slots}
                call = self.chosen_length.next(running, self.steps_per_return)
                self._state = self.runtime.decode(self._state, *call, max(until, 0))
                self._reader.is_over_turn = False
            else:
                return events
            return events + self._look()

    def warm_up(self) -> None:
        """Compile every program, and time all verify lengths. Later requests compile nothing; idle engines only."""
        if not self.is_idle:
            raise ValueError("warm_up needs an idle engine: call step until is_idle, or reset")
        runtime, before = self.runtime, self.timings.prefill_s
        with own_context(self.mesh):
            state = self._state or runtime.init_state(self.num_stop_ids)
            state = runtime.admit(state, admission(runtime, {}, self.num_stop_ids))
            for rows, width in runtime.shapes.all():
                state = runtime.feed(state, chunk_of({}, rows, width, self.batch_size))
            state = self.chosen_length.measure(runtime.decode(state, 1))
            state = runtime.retire(state, np.zeros(self.batch_size, bool))
            self._state = runtime.clear(state, np.zeros(self.batch_size, bool))
        self.timings.prefill_s = before

    def run(self, requests: Sequence[Request]) -> Iterator[Update | Completion]:
        """Decode all requests, yielding updates as tokens come and one completion for each.

        Completions come as rows finish, not in order. A request that `check` refuses completes at once
        with its error; the others are not touched by it. An engine that had too little room for their stop ids
        has more from now on.

        Raises:
          ValueError: the engine has other requests; or two of these have the same id.
        """
        if not self.is_idle:
            raise ValueError("run needs an idle engine: call step until is_idle, or reset")
        named = [
            dataclasses.replace(
                r,
                id=place if r.id is None else r.id,
                sample=place if r.sample is None else r.sample,
            )
            for place, r in enumerate(requests)
        ]
        if len({r.id for r in named}) < len(named):
            raise FieldError(
                "id", "is the same in two requests; leave it out, or give each its own"
            )
        most = max((r.num_stop_ids for r in named), default=1)
        self.num_stop_ids = bucket(most, smallest=self.num_stop_ids)
        self.reset()  # the state may have room for fewer
        try:
            for request in named:
                if error := self.check(request):
                    yield refused(request, error)
                else:
                    self.add(request)
            while not self.is_idle:
                yield from self.step()
        finally:
            self.reset()

    def reset(self) -> None:
        """Forget all requests and give back the memory of the caches; the next request gets new ones."""
        self._waiting: deque[Request] = deque()
        self._live: set[Hashable] = set()  # ids of what waits or runs
        self._slots: list[Request | None] = [None] * self.batch_size
        self._reported = [0] * self.batch_size  # tokens of each slot that were told
        self._ended: list[Completion] = []  # not told yet
        self._reader = PromptReader(self.runtime.shapes, self.max_prefill_tokens)
        self._seen: Seen | None = None
        self._state: DecodeState | None = None

    # --- a step --------------------------------------------------------------------------------------

    def _admit(self, new: dict[int, Request]) -> None:
        """Give slots to requests; their prompts are read next."""
        if self._state is None:
            self._state = self.runtime.init_state(self.num_stop_ids)
        for slot, request in new.items():
            self._slots[slot], self._reported[slot] = request, 0
        taken = admission(self.runtime, new, self.num_stop_ids)
        self._state = self.runtime.admit(self._state, taken)
        self._reader.start({slot: request.prompt_ids for slot, request in new.items()})

    def _look(self) -> list[Update | Completion]:
        """Tell what is new in each slot, and free those that are done."""
        assert self._state is not None
        seen = self._seen = Seen.fetch(self._state)
        self.chosen_length.learn(seen)
        events: list[Update | Completion] = []
        for slot, request in enumerate(self._slots):
            if request is None or slot in self._reader.slots:
                continue
            tokens = seen.tokens_of(slot)
            is_new = len(tokens) > self._reported[slot]
            keep = request.stop_at(tokens) if request.stop_at and is_new else None
            tokens = tokens[:keep]
            if len(tokens) > self._reported[slot]:
                self._reported[slot] = len(tokens)
                events.append(Update(request.id, tokens))
            if keep is None and seen.active[slot]:
                continue
            stopped = keep is not None or seen.stopped[slot]
            reason = "stop" if stopped else "error" if seen.failed[slot] else "length"
            events.append(self._completion(slot, tokens, reason))
            self._live.discard(request.id)
            self.timings.decode_tokens += max(len(tokens) - 1, 0)
            self._slots[slot] = None
        finished = np.asarray([request is None for request in self._slots])
        if (finished & seen.active).any():  # the device still thinks these run
            self._retire(finished)
        if (spoilt := finished & seen.spoilt).any():
            self._state = self.runtime.clear(self._state, spoilt)
        return events

    def _retire(self, finished: np.ndarray) -> None:
        assert self._state is not None
        self._state = self.runtime.retire(self._state, finished)

    def _end(self, completion: Completion) -> None:
        """Count a cancelled request, which the next step tells of."""
        self._live.discard(completion.id)
        self._ended.append(completion)
        self.timings.decode_tokens += max(len(completion.token_ids) - 1, 0)

    def _completion(self, slot: int, tokens: tuple[int, ...], reason: Reason) -> Completion:
        request, seen = self._slots[slot], self._seen
        assert request is not None
        assert seen is not None
        logprobs = seen.logprobs_of(slot, len(tokens))
        if reason == "error":
            return failed(request, tokens, **logprobs)
        return Completion(request.id, tokens, reason, seen.acceptance_lengths_of(slot), **logprobs)
