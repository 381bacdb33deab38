"""The engine: requests in, tokens out, over a fixed batch of slots that are refilled as rows finish.

Read `Engine.step`. A step admits waiting requests to free slots and reads their prompts; where there is none to
admit, it runs the compiled decode loop for a few steps. Then it looks at what came. `Engine.run` decodes a list
of requests by such steps. Which arrays and programs that takes is `runtime`'s business.

Prompts that wait together share passes, as many as fill the device. Other shapes round otherwise, so a row's last
bits may depend on who waited beside it. With `invariant=True` they do not: then the shapes of all passes over a row
follow from its own prompt's length alone. A request's draws follow from its own seed and sample number, always.
"""

from __future__ import annotations

import contextlib
import dataclasses
from bisect import bisect_right
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jaxspec import memory
from jaxspec.chosen_length import ChosenLength
from jaxspec.loading import LoadedModel
from jaxspec.prefill import PromptReader, bucket, chunk_of, rows_ahead, rows_bucket
from jaxspec.records import ChooseLength, Drafting, Extras, FieldError, at_least
from jaxspec.requests import (
    Completion,
    Request,
    Update,
    check_cache_length,
    positions,
    refusal,
    refused,
)
from jaxspec.runtime import Programs, Runtime, Timings, cache_bucket, make_spec
from jaxspec.shapes import Params
from jaxspec.sharding import mesh_of, own_context
from jaxspec.slots import Slots
from jaxspec.state import DecodeSpec

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
      read_ahead: rows beside the slots, into which the prompts of waiting requests are read while all slots are
        taken. A slot that is free then goes on at once. None: as many as keep passes full on a GPU, none where
        there is one slot, on a CPU, or on a mesh with a data axis.
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
        read_ahead: int | None = None,
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
        if read_ahead is not None and (wrong := at_least(0).refusal(read_ahead)):
            raise FieldError("read_ahead", wrong)
        self.target, self.drafter = target, drafter
        weights = target.params, drafter.params if drafter else None
        mesh = mesh_of(target=weights[0], drafter=weights[1])
        slots = rows_bucket(batch_size, mesh)
        if read_ahead is None:
            read_ahead = rows_ahead(target.graph, slots, mesh)
        elif read_ahead and mesh.shape["data"] > 1:
            raise FieldError(
                "read_ahead", "needs a mesh whose data axis has one device; leave it out"
            )
        self.runtime = Runtime(
            make_spec(target, drafter, drafting, extras),
            *weights,
            batch_size=slots,
            cache_length=cache_length,
            read_ahead=read_ahead,
            invariant=invariant,
            programs=programs,
        )
        self.chosen_length = ChosenLength(self.runtime, choose_length, invariant=invariant)
        self.steps_per_return = steps_per_return
        self.max_prefill_tokens = max_prefill_tokens
        self.num_stop_ids = bucket(num_stop_ids, smallest=STOP_IDS)
        self._names = 0  # ids that were made up
        # Several devices, or several processes, need their programs in one order, which one thread keeps.
        self._pool = ThreadPoolExecutor(1, "jaxspec") if self.mesh.size == 1 else None
        self._busy: Slots | None = None  # whose state the device has
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
        read_ahead: int | None = None,
        **options: Any,
    ) -> Engine:
        """Make an engine that just holds these requests.

        Requests that the model itself cannot take have no say in lengths; `check` refuses them later.

        Args:
          extras: None for what these requests ask for. A program without extras is quicker.
          cache_length: None for as many positions as the longest request needs, in buckets.
          read_ahead: None for what an engine takes by default, where there are more requests than slots and the
            memory allows it.
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
        slots = rows_bucket(batch_size, mesh)
        if read_ahead is None:
            read_ahead = rows_ahead(target.graph, slots, mesh) if len(requests) > slots else 0
            if not memory.fits(spec, slots + read_ahead, cache_length, mesh):
                read_ahead = 0
        memory.check_fits(spec, slots + read_ahead, cache_length, mesh)
        return cls(
            target,
            drafter,
            drafting=drafting,
            extras=extras,
            batch_size=batch_size,
            cache_length=cache_length,
            num_stop_ids=max((r.num_stop_ids for r in requests), default=1),
            read_ahead=read_ahead,
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
    def read_ahead(self) -> int:
        """Rows beside the slots, into which prompts are read before they have one."""
        return self.runtime.read_ahead

    @property
    def cache_length(self) -> int:
        """Positions that a slot holds."""
        return self.runtime.cache_length

    @property
    def num_running(self) -> int:
        """Requests that have a slot."""
        return self.batch_size - len(self._slots.free)

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
        """Let a request wait for a slot, behind those of its priority that wait already; return its id.

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
        place = bisect_right(self._waiting, request.priority, key=lambda r: r.priority)
        self._waiting.insert(place, dataclasses.replace(request, id=name))
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
                self._ended.append(Completion(id, finish_reason="cancelled"))
                return
        for slots in self._all_slots:
            if (place := slots.place_of(id)) is not None:
                row = slots.rows[place]
                assert row is not None
                self._ended.append(row.completion("cancelled"))
                if slots is self._reading:
                    self._reader.forget(place)
                slots.rows[place] = None  # the device hears of it after what it does now
                return
        raise FieldError("id", f"{id!r} belongs to no request that waits or runs")

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits, nothing runs, and all has been told."""
        return not self._live

    def step(self) -> list[Update | Completion]:
        """Wait for what the device does, give it the next pass over prompts or the next steps, and say what came.

        What a step sends to the device the next step tells of, so that the caller and the device work at the
        same time. Decoding ends after `steps_per_return` steps, or as soon as enough rows are done for those that
        wait. An engine that has nothing to do returns nothing.
        """
        events: list[Update | Completion] = [*self._ended]
        self._ended.clear()
        with own_context(self.mesh):
            if self._busy is not None:
                events += self._look()
            if self._ahead is not None:
                self._hand_over(self._ahead)
            if self._ahead is None or not self._slots.read or self._is_time_to_read():
                self._admit()
            if self._is_time_to_read():
                self._read()
            elif self._slots.read:
                self._decode()
            if (
                self._ahead is not None and self._busy is not self._ahead
            ):  # while the device decodes
                self._admit()
        for event in events:
            if isinstance(event, Completion):
                self._live.discard(event.id)
                self.timings.decode_tokens += max(len(event.token_ids) - 1, 0)
        return events

    def warm_up(self) -> None:
        """Compile every program, and time all verify lengths. Later requests compile nothing; idle engines only."""
        if not self.is_idle:
            raise ValueError("warm_up needs an idle engine: call step until is_idle, or reset")
        runtime, reading, running = self.runtime, self._reading, self._slots
        with own_context(self.mesh):
            reading.admit({})
            for rows, width in runtime.shapes.all():
                chunk = chunk_of({}, rows, width, reading.count)
                reading.state = runtime.feed(reading.state, chunk)
            if reading is not running:
                running.state = runtime.insert(running.state, reading.state, 0, 0)
            running.state = self.chosen_length.measure(runtime.decode(running.state, 1))
            for slots in self._all_slots:
                nobody = np.zeros(slots.count, bool)
                slots.state = runtime.retire(slots.state, nobody)
                slots.state = runtime.clear(slots.state, nobody)
            for slots, steps in ((reading, 0), (running, self.steps_per_return)):
                slots.start(None, steps, lambda state: state)
                slots.wait()

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
        if self._busy is not None:
            with contextlib.suppress(
                Exception
            ):  # whoever waited for it has heard, or does not care
                self._busy.wait()
        self._waiting: deque[Request] = deque()
        self._live: set[Hashable] = set()  # ids of what is not told to be done
        self._ended: list[Completion] = []  # not told yet
        self._slots = Slots(self.runtime, self.batch_size, self.num_stop_ids)
        self._ahead: Slots | None = None
        if self.read_ahead:
            self._ahead = Slots(self.runtime, self.read_ahead, self.num_stop_ids)
        self._reader = PromptReader(self.runtime.shapes)
        self._busy = None
        self._read_since = 0  # prompt tokens since rows decoded, padding included

    # --- a step --------------------------------------------------------------------------------------

    @property
    def _reading(self) -> Slots:
        """Where prompts are read."""
        return self._slots if self._ahead is None else self._ahead

    @property
    def _all_slots(self) -> list[Slots]:
        return [self._slots] if self._ahead is None else [self._slots, self._ahead]

    @property
    def _worth_reading(self) -> int:
        """For how many free slots decoding stops to read prompts into them; 0 where nobody waits."""
        lengths = (len(request.prompt_ids) for request in self._waiting)
        return self.runtime.shapes.worth_reading(lengths)

    def _hand_over(self, ahead: Slots) -> None:
        """Give free slots to requests whose prompts were read ahead."""
        if pairs := dict(zip(ahead.read, self._slots.free, strict=False)):
            self._slots.take(ahead, pairs)

    def _admit(self) -> None:
        """Give rows to requests that wait; their prompts are read next."""
        if self._ahead is None and (
            self._reader.unread
            or (self._slots.read and len(self._slots.free) < self._worth_reading)
        ):
            return
        new = {place: self._waiting.popleft() for place in self._reading.free[: len(self._waiting)]}
        if new:
            self._reading.admit(new)
            self._reader.start({place: request.prompt_ids for place, request in new.items()})

    def _is_time_to_read(self) -> bool:
        """Tell whether a pass over prompts comes next; rows that decode wait for it."""
        if not self._reader.unread or not self._slots.read:
            return bool(self._reader.unread)
        if self.max_prefill_tokens is not None and self._read_since >= self.max_prefill_tokens:
            return False
        # Read ahead, prompts wait for a slot, and not a slot for prompts. An eighth of them is kept ready.
        return self._ahead is None or len(self._ahead.read) < max(1, self._ahead.count // 8)

    def _read(self) -> None:
        """Send a pass over prompts to the device."""
        chunk, ended = self._reader.next_chunk()
        self._read_since += chunk.tokens.size
        for place in ended:
            row = self._reading.rows[place]
            assert row is not None
            row.is_read = True
        self._busy = self._reading
        self._busy.start(self._pool, 0, self.runtime.feeding(self._busy.state, chunk))

    def _decode(self) -> None:
        """Send some steps to the device; it does fewer when rows end that others wait for."""
        active, until = len(self._slots.read), 0
        if self._ahead is not None and self._ahead.read:
            until = active - 1
        elif self._ahead is None and self._waiting and not self._reader.unread:
            until = max(0, active + len(self._slots.free) - self._worth_reading)
        self._read_since = 0
        most, self._busy = self.steps_per_return, self._slots
        steps, length = self.chosen_length.next(self._busy.requests, most)
        call = self.runtime.decoding(self._busy.state, steps, until, length)
        self._busy.start(self._pool, most, call)

    def _look(self) -> list[Update | Completion]:
        """Wait for what the device does, and tell what came of it."""
        assert self._busy is not None
        slots, self._busy = self._busy, None
        taken_s = slots.wait()
        if self._read_since:
            self.timings.prefill_s += taken_s
        else:
            self.timings.decode_s += taken_s
            self.chosen_length.learn(slots.new_acceptance_lengths, taken_s)
        return slots.look()
