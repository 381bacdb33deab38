"""The engine: requests in, tokens out, over a fixed batch of slots that are refilled as rows finish.

Read `Engine.step`. A step looks at what the device did and gives it its next work, which is `scheduler`'s choice:
a pass over prompts of waiting requests, or some steps of the compiled decode loop. `Engine.run` decodes a list of
requests by such steps. Which arrays and programs that takes is `runtime`'s business.

Prompts that wait together share passes, as many as fill the device. Other shapes round otherwise, so a row's last
bits may depend on who waited beside it. With `invariant=True` they do not: then the shapes of all passes over a row
follow from its own prompt's length alone. A request's draws follow from its own seed and sample number, always.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jax.sharding import Mesh

from jaxspec.engine.draft_length import ChosenLength
from jaxspec.engine.prefix_cache.entries import PrefixStats
from jaxspec.engine.prefix_cache.pool import Pool
from jaxspec.engine.prefix_cache.store import Store
from jaxspec.engine.request import (
    Completion,
    Request,
    Update,
    check_cache_length,
    check_room,
    positions,
    refusal,
    refused,
)
from jaxspec.engine.scheduler import Scheduler
from jaxspec.options import ChooseLength, Drafting, FieldError, ProgramFeatures, Range, at_least
from jaxspec.runtime import memory
from jaxspec.runtime.prefill import bucket, rows_ahead, rows_bucket
from jaxspec.runtime.runtime import Programs, Runtime, Timings, cache_bucket, make_spec
from jaxspec.shapes import Params
from jaxspec.state import DecodeSpec
from jaxspec.weights.loading import LoadedModel
from jaxspec.weights.sharding import mesh_of, own_context

BYTES = Range("0 or more", lambda x: x >= 0, 0, 1 << 62, "a whole number")
STOP_IDS = 4
"""Stop ids that a slot has room for, unless the engine is made for more."""


class Engine:
    """Decodes requests with one target and at most one drafter, on fixed shapes.

    It runs on the mesh that the weights are on. It is not safe to call from several threads at once.

    Args:
      drafter: None for plain decoding.
      drafting: how to draft and to judge drafts.
      program_features: what requests may ask for beyond the least, such as penalties and log-probabilities.
      batch_size: slots; rounded up to a power of two, times the mesh's data axis.
      cache_length: positions a slot holds; prompt, new tokens and one step's tokens must fit.
      num_stop_ids: most stop ids of a request; rounded up to a power of two, at least 4.
      steps_per_return: most decode steps between returns to the host.
      max_prefill_tokens: prompt tokens, padding included, that are read before rows decode on; at least one pass.
        None: all prompts that have slots are read first.
      read_ahead: rows beside the slots, into which the prompts of waiting requests are read while all slots are
        taken. A slot that is free then goes on at once. None: as many as keep passes full on a GPU, fewer where
        memory is short; none where there is one slot, on a CPU, or on a mesh with a data axis.
      invariant: no row depends on its neighbours, to the last bit; prompts share small passes only.
      choose_length: when to verify fewer drafts than there are, if that is quicker. See `records.ChooseLength`.
      prefix_bytes: of each device's memory, for prefixes of prompts that were read: prompts that begin with one
        do not read it again, see `prefixes`. 0: none.
      prefix_host_bytes: of host memory, for prefixes that no longer fit there. 0: they are forgotten.
      programs: compiled programs to share with other engines; None for its own.

    Raises:
      ConfigError: the drafter does not fit the target.
      FieldError: a number is out of range.
      DeviceMemoryError: the devices cannot hold all of this. Nothing was allocated.
    """

    def __init__(
        self,
        target: LoadedModel,
        drafter: LoadedModel | None,
        *,
        drafting: Drafting = Drafting(),
        program_features: ProgramFeatures = ProgramFeatures(),
        batch_size: int = 1,
        cache_length: int = 1024,
        num_stop_ids: int = STOP_IDS,
        steps_per_return: int = 16,
        max_prefill_tokens: int | None = None,
        read_ahead: int | None = None,
        invariant: bool = False,
        choose_length: ChooseLength = "exact",
        prefix_bytes: int = 0,
        prefix_host_bytes: int = 0,
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
        for name, value, allowed in (
            ("num_stop_ids", num_stop_ids, at_least(0)),
            ("read_ahead", read_ahead, at_least(0)),
            ("prefix_bytes", prefix_bytes, BYTES),
            ("prefix_host_bytes", prefix_host_bytes, BYTES),
        ):
            if value is not None and (wrong := allowed.refusal(value)):
                raise FieldError(name, wrong)
        if prefix_host_bytes and not prefix_bytes:
            raise FieldError(
                "prefix_host_bytes",
                lambda format_field: (
                    f"needs {format_field('prefix_bytes')}: prefixes are made on the device"
                ),
            )
        self.target, self.drafter = target, drafter
        weights = target.params, drafter.params if drafter else None
        mesh = mesh_of(target=weights[0], drafter=weights[1])
        if program_features.grammars and mesh.size > 1:
            raise FieldError(
                "grammar", f"needs one device, and this mesh has {mesh.size}; leave one of them out"
            )
        spec, slots = (
            make_spec(target, drafter, drafting, program_features),
            rows_bucket(batch_size, mesh),
        )
        check_room(spec, cache_length)
        sizes = spec, slots, cache_length, mesh
        if read_ahead is None:
            read_ahead = rows_ahead(slots, mesh)
            while read_ahead and not memory.fits(
                *sizes, read_ahead=read_ahead, prefix_bytes=prefix_bytes
            ):
                read_ahead //= 2
        elif read_ahead and mesh.shape["data"] > 1:
            raise FieldError(
                "read_ahead", "needs a mesh whose data axis has one device; leave it out"
            )
        memory.check_fits(*sizes, read_ahead=read_ahead, prefix_bytes=prefix_bytes)
        self.runtime = Runtime(
            spec,
            *weights,
            batch_size=slots,
            cache_length=cache_length,
            read_ahead=read_ahead,
            max_prefill_tokens=max_prefill_tokens,
            invariant=invariant,
            programs=programs,
        )
        self.chosen_length = ChosenLength(self.runtime, choose_length, invariant=invariant)
        self.steps_per_return = steps_per_return
        self.max_prefill_tokens = max_prefill_tokens
        self.num_stop_ids = bucket(num_stop_ids, smallest=STOP_IDS)
        self._prefixes: Store | None = None
        if prefix_bytes:
            self._prefixes = Store(Pool(self.runtime, prefix_bytes), prefix_host_bytes)
        self._names = 0  # ids that were made up
        # Several devices, or several processes, need their programs in one order, which one thread keeps.
        self._pool = ThreadPoolExecutor(1, "jaxspec") if self.mesh.size == 1 else None
        self._begin()

    @classmethod
    def fitting(
        cls,
        target: LoadedModel,
        drafter: LoadedModel | None,
        requests: Sequence[Request],
        *,
        drafting: Drafting = Drafting(),
        program_features: ProgramFeatures | None = None,
        batch_size: int = 1,
        cache_length: int | None = None,
        read_ahead: int | None = None,
        **options: Any,
    ) -> Engine:
        """Make an engine that just holds these requests.

        Requests that the model itself cannot take have no say in lengths; `check` refuses them later.

        Args:
          program_features: None for what these requests ask for. A program without program_features is quicker.
          cache_length: None for as many positions as the longest request needs, in buckets.
          read_ahead: None for what an engine takes by default, where there are more requests than slots.
          options: of the engine, such as `steps_per_return` and `invariant`.

        Raises:
          DeviceMemoryError: the devices cannot hold so many rows of that length.
          FieldError: the caches would have more positions than the model.
        """
        if program_features is None:
            program_features = ProgramFeatures.wanted_by(
                [r.sampling for r in requests],
                grammars=any(r.grammar is not None for r in requests),
            )
        spec = make_spec(target, drafter, drafting, program_features)
        if cache_length is None:
            needed = [positions(spec, r) for r in requests if refusal(spec, r) is None]
            cache_length = cache_bucket(max(needed, default=1))
        else:
            check_cache_length(spec, cache_length)
        mesh = mesh_of(target=target.params, drafter=drafter.params if drafter else None)
        if read_ahead is None and len(requests) <= rows_bucket(batch_size, mesh):
            read_ahead = 0
        return cls(
            target,
            drafter,
            drafting=drafting,
            program_features=program_features,
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
        return self.batch_size - len(self._scheduler.slots.free)

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
        self._forget_prefixes()

    @property
    def drafter_params(self) -> Params | None:
        """The drafter's weights, likewise."""
        return self.runtime.drafter_params

    @drafter_params.setter
    def drafter_params(self, params: Any) -> None:
        self.runtime.drafter_params = params
        self._forget_prefixes()

    @property
    def prefix_stats(self) -> PrefixStats | None:
        """What the store of prefixes did and holds; None where there is none."""
        return None if self._prefixes is None else self._prefixes.stats

    def _forget_prefixes(self, *, drop_arrays: bool = False) -> None:
        if self._prefixes is not None:
            self._prefixes.clear(drop_arrays=drop_arrays)

    # --- requests ------------------------------------------------------------------------------------

    def check(self, request: Request) -> FieldError | None:
        """Say what is wrong with a request and the way out, or None when it can run."""
        if error := refusal(self.spec, request):
            return error
        needed = positions(self.spec, request)
        if needed > self.cache_length:
            return FieldError(
                "cache_length",
                lambda format_field: (
                    f"cache holds {self.cache_length} positions, but prompt "
                    f"({len(request.prompt_ids)} tokens) + {format_field('max_new_tokens')} "
                    f"({request.max_new_tokens}) + one step ({self.spec.step_tokens}) needs "
                    f"{needed}; "
                    f"pass {format_field('cache_length', needed)}"
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
        waiting = self._scheduler.waiting
        place = bisect_right(waiting, request.priority, key=lambda r: r.priority)
        ids = request.prompt_ids
        if not isinstance(ids, tuple):  # it may change while the request waits
            ids = tuple(map(int, ids))
        waiting.insert(place, dataclasses.replace(request, id=name, prompt_ids=ids))
        return name

    def cancel(self, id: Hashable) -> None:
        """End a request, waiting or running. Its slot is free at once.

        Its completion comes with the next `step`: the tokens it has so far, and "cancelled".

        Raises:
          FieldError: there is no such request, or it is done.
        """
        if (done := self._scheduler.cancel(id)) is not None:
            self._ended.append(done)
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
        try:
            with own_context(self.mesh):
                came = self._scheduler.step(self.steps_per_return)
        except BaseException:  # its arrays may be half written, or gone
            self._forget_prefixes(drop_arrays=True)
            raise
        events: list[Update | Completion] = [*self._ended, *came]
        self._ended.clear()
        for event in events:
            if isinstance(event, Completion):
                self._live.discard(event.id)
                self.timings.decode_tokens += max(len(event.token_ids) - 1, 0)
        return events

    def warm_up(self) -> None:
        """Compile every program, and time all verify lengths. Later requests compile nothing; idle engines only."""
        if not self.is_idle:
            raise ValueError("warm_up needs an idle engine: call step until is_idle, or reset")
        with own_context(self.mesh):
            self._scheduler.warm_up(self.steps_per_return)

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
        """Forget all requests and give back the memory of the caches; the next request gets new ones.

        Stored prefixes stay.
        """
        self._scheduler.close()
        self._begin()

    def _begin(self) -> None:
        self._live: set[Hashable] = set()  # ids of what is not told to be done
        self._ended: list[Completion] = []  # not told yet
        self._scheduler = Scheduler(
            self.runtime,
            self.chosen_length,
            self._pool,
            num_stop_ids=self.num_stop_ids,
            max_prefill_tokens=self.max_prefill_tokens,
            prefixes=self._prefixes,
        )
