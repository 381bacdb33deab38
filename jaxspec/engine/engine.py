"""The engine: continuous batching of requests over a fixed number of slots.

Read `Engine.step`. A step collects the output of the device's last call and launches the next one:
a prefill pass over prompts of waiting requests, or some steps of the compiled decode loop.
`scheduler` chooses which. `Engine.run` decodes a list of requests by such steps. `runtime` has the
arrays and the programs.

Prompts that wait together share passes, as many as fill the device. Passes of other shapes round
differently, so a row's last bits may depend on the requests beside it. With `invariant=True` they
do not: the shapes of all passes over a row follow from its own prompt's length alone. A request's
random draws always follow from its own seed and sample number.
"""

from __future__ import annotations

import dataclasses
import logging
import warnings
from bisect import bisect_right
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
from jax.sharding import Mesh

from jaxspec import row_subset
from jaxspec._deprecated import renamed_keywords
from jaxspec.cache import Paging
from jaxspec.engine.draft_length import DraftLengthController
from jaxspec.engine.draft_length_policy import ladder
from jaxspec.engine.prefix_cache.copies import DeviceCopies, RowSizes
from jaxspec.engine.prefix_cache.entries import PrefixStats
from jaxspec.engine.prefix_cache.store import Store
from jaxspec.engine.request import (
    CheckedRequest,
    Completion,
    Request,
    RequestLimits,
    Update,
    check_for_spec,
    check_max_cache_length,
    check_min_cache_length,
    check_request,
    num_positions,
    refused,
    with_identity,
)
from jaxspec.engine.scheduler import Scheduler
from jaxspec.engine.slots import Slots
from jaxspec.options import (
    CacheTokens,
    ChooseLength,
    Drafting,
    FieldError,
    ProgramFeatures,
    Range,
    as_record,
    at_least,
)
from jaxspec.runtime import memory
from jaxspec.runtime.prefill import Shapes, ahead_on, bucket, on_cpu, slots_on
from jaxspec.runtime.runtime import Programs, Runtime, Timings, cache_bucket, make_spec
from jaxspec.shapes import Params
from jaxspec.state import DecodeSpec
from jaxspec.weights import memory as weight_memory
from jaxspec.weights.loading import LoadedModel
from jaxspec.weights.sharding import mesh_of, own_context

LOG = logging.getLogger("jaxspec.engine")
BYTES = Range("0 or more", lambda x: x >= 0, 0, 1 << 62, "a whole number")
STOP_IDS = 4
"""Stop ids of a slot, unless the engine is made for more."""


def fitting_sizes(
    target: LoadedModel,
    drafter: LoadedModel | None,
    requests: Sequence[Request],
    drafting: Drafting | Mapping[str, Any] = Drafting(),
    program_features: ProgramFeatures | Mapping[str, Any] | None = None,
    cache_length: int | None = None,
) -> tuple[DecodeSpec, int]:
    """Return the spec and the cache length of `Engine.fitting`, whose arguments these are."""
    if program_features is None:
        program_features = ProgramFeatures.wanted_by(
            [r.sampling for r in requests], grammars=any(r.grammar is not None for r in requests)
        )
    drafting = as_record(Drafting, "drafting", drafting)
    program_features = as_record(ProgramFeatures, "program_features", program_features)
    spec = make_spec(target, drafter, drafting, program_features)
    if cache_length is not None:
        check_max_cache_length(spec, cache_length)
        return spec, cache_length
    needed = [num_positions(spec, r) for r in requests if check_for_spec(spec, r) is None]
    return spec, cache_bucket(max(needed, default=1))


class Engine:
    """Decodes requests with one target and at most one drafter, on fixed shapes.

    It runs on the mesh of the weights. It is not safe to call from several threads at once.

    Args:
      drafter: None for plain decoding.
      drafting: how to draft and to verify drafts.
      program_features: what requests may ask for, such as penalties and log-probabilities.
      batch_size: slots; rounded up to a multiple of the mesh's data axis, and on a CPU beyond 16 to
        a multiple of 8.
      cache_length: positions of a slot; prompt, new tokens and one step's tokens must fit.
      cache_tokens: tokens for which caches have room, in pages of 64. A request gets pages for its
        prompt and its first steps, and more as it grows. It waits while too few are free. Where rows
        that run have too few, the youngest give up theirs, and go on later with the same tokens. At
        least `cache_length`. "auto": as many as memory holds; on a GPU all programs are then
        compiled before caches are allocated, by `warm_up` or by the first `add`. On a mesh, each
        part of its data axis has a share of the pages for its own slots, and at least
        `cache_length`. None: every slot has room for `cache_length` positions.
      num_stop_ids: most stop ids of a request; rounded up to a power of two, at least 4.
      steps_per_return: most decode steps between returns to the host. On a GPU fewer, where running
        rows would wait for more than a quarter of a second.
      max_prefill_tokens: prompt tokens, padding included, that are prefilled before rows decode on;
        at least one pass. While rows are missing, a decode call between two such passes has one
        step. None: on a GPU as many passes as rows wait for less than a quarter of a second, or one
        if several processes run the engine; on a CPU the prompts of all slots.
      read_ahead: rows beside the slots, in which prompts of waiting requests are prefilled while
        all slots are taken. A free slot then goes on at once. Rounded up to a multiple of the mesh's
        data axis. None: as many as keep passes full on a GPU, fewer if memory is short; none with
        one slot, on a CPU, or with a drafter without `drafts_by_slot`.
      invariant: whether a row is independent of its neighbours, to the last bit; prompts then share
        small passes only.
      choose_length: when to verify fewer drafts than there are, if that is quicker. See
        `options.ChooseLength`.
      prefix_bytes: of each device's memory, for the prefix cache. Prompts that begin with a stored
        prefix share its pages, see `prefix_cache`. Pages that no request has serve prefixes too. On
        a mesh, a prefix is stored in the part of the data axis whose row it was. 0: none.
      prefix_host_bytes: of host memory, for prefixes that the device evicts. 0: they are dropped.
      programs: compiled programs to share with other engines; None for its own.

    Raises:
      ConfigError: the drafter does not fit the target.
      FieldError: a number is out of range, or an option does not go with the others.
      DeviceMemoryError: the devices cannot hold all of this. Nothing was allocated.
    """

    @renamed_keywords(extras="program_features")
    def __init__(
        self,
        target: LoadedModel,
        drafter: LoadedModel | None,
        *,
        drafting: Drafting | Mapping[str, Any] = Drafting(),
        program_features: ProgramFeatures | Mapping[str, Any] = ProgramFeatures(),
        batch_size: int = 1,
        cache_length: int = 1024,
        cache_tokens: CacheTokens = None,
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
        drafting = as_record(Drafting, "drafting", drafting)
        program_features = as_record(ProgramFeatures, "program_features", program_features)
        for name, value in (
            ("batch_size", batch_size),
            ("cache_length", cache_length),
            ("steps_per_return", steps_per_return),
            ("max_prefill_tokens", max_prefill_tokens),
            ("cache_tokens", None if cache_tokens == "auto" else cache_tokens),
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
                    f"{format_field('prefix_host_bytes', prefix_host_bytes)} needs "
                    f"{format_field('prefix_bytes')}: prefixes are made on the device"
                ),
            )
        self.target, self.drafter = target, drafter
        weights = target.params, drafter.params if drafter else None
        mesh = mesh_of(target=weights[0], drafter=weights[1])
        if program_features.grammars and (processes := jax.process_count()) > 1:
            raise FieldError(
                "grammar", f"needs one process, and there are {processes}; leave the grammar out"
            )
        spec, slots = (
            make_spec(target, drafter, drafting, program_features),
            slots_on(mesh, batch_size),
        )
        if choose_length == "survival" and not invariant and spec.tree is None:
            widths = ladder(spec.num_draft_tokens)[1:]
            if len(widths) > 1 and jax.process_count() == 1:
                spec = dataclasses.replace(spec, widths=widths)
        check_min_cache_length(spec, cache_length)
        check_pages(spec, cache_length, cache_tokens, prefix_bytes, mesh)
        sizes, parts = (spec, slots, cache_length, mesh), mesh.shape["data"]
        shapes = Shapes.of(
            spec.target, slots, mesh, invariant=invariant, max_prefill_tokens=max_prefill_tokens
        )
        pass_tokens = memory.largest_pass(spec, shapes, slots, cache_length)
        beside = dict(prefix_bytes=prefix_bytes, pass_tokens=pass_tokens)
        if read_ahead is None:
            least = parts * cache_length if cache_tokens == "auto" else cache_tokens
            read_ahead = memory.plan_read_ahead(*sizes, cache_tokens=least, **beside)
        elif read_ahead and not row_subset.addressable(spec):
            raise FieldError("read_ahead", "needs a drafter that drafts by slot; leave it out")
        read_ahead = ahead_on(mesh, read_ahead)
        self._compiles_first = cache_tokens == "auto" and not on_cpu(mesh)
        if cache_tokens == "auto":
            limit = weight_memory.bytes_limit(mesh)
            cache_tokens = memory.plan_cache_tokens(
                *sizes, limit=limit, read_ahead=read_ahead, **beside
            )
        memory.check_fits(*sizes, read_ahead=read_ahead, cache_tokens=cache_tokens, **beside)
        rows, paging, snapshots = slots + read_ahead, None, 0
        if cache_tokens is not None:
            paging = Paging(rows, cache_tokens, parts)
        if prefix_bytes:
            snapshots, of = RowSizes(spec, cache_length, mesh).plan(prefix_bytes)
            paging = Paging(rows, cache_tokens or rows * cache_length, parts, **of)
        self.runtime = Runtime(
            spec,
            *weights,
            batch_size=slots,
            cache_length=cache_length,
            read_ahead=read_ahead,
            max_prefill_tokens=max_prefill_tokens,
            invariant=invariant,
            paging=paging,
            programs=programs,
            vision_params=target.vision.params if target.vision else None,
        )
        self.draft_length = DraftLengthController(self.runtime, choose_length, invariant=invariant)
        self.steps_per_return = steps_per_return
        self.max_prefill_tokens = max_prefill_tokens
        self.num_stop_ids = bucket(num_stop_ids, smallest=STOP_IDS)
        self._prefixes: tuple[Store, ...] = ()  # of each part of the slots
        if prefix_bytes:
            copies = DeviceCopies(self.runtime, snapshots)
            host_bytes = prefix_host_bytes // parts**2  # a copy there has room for every part
            self._prefixes = tuple(
                Store(copies, host_bytes, pool_bytes=prefix_bytes) for _ in range(parts)
            )
        self._next_id = 0  # of requests without one
        self._compiled_stop_ids = 0  # for which `warm_up` compiled all programs
        self._executor = ThreadPoolExecutor(1, "jaxspec")
        self._begin()

    @classmethod
    @renamed_keywords(extras="program_features")
    def fitting(
        cls,
        target: LoadedModel,
        drafter: LoadedModel | None,
        requests: Sequence[Request],
        *,
        drafting: Drafting | Mapping[str, Any] = Drafting(),
        program_features: ProgramFeatures | Mapping[str, Any] | None = None,
        batch_size: int = 1,
        cache_length: int | None = None,
        read_ahead: int | None = None,
        **options: Any,
    ) -> Engine:
        """Make an engine that is just large enough for these requests.

        Requests that the model cannot take do not count. `check` refuses them later.

        Args:
          program_features: None for what these requests ask for. Programs without features are
            quicker.
          cache_length: None for as many positions as the longest request needs, in buckets.
          read_ahead: None for the engine's default if there are more requests than slots, else 0.
          options: of the engine, such as `steps_per_return` and `invariant`.

        Raises:
          DeviceMemoryError: the devices cannot hold the slots.
          FieldError: the caches would have more positions than the model.
        """
        spec, cache_length = fitting_sizes(
            target, drafter, requests, drafting, program_features, cache_length
        )
        mesh = mesh_of(target=target.params, drafter=drafter.params if drafter else None)
        if read_ahead is None and len(requests) <= slots_on(mesh, batch_size):
            read_ahead = 0
        return cls(
            target,
            drafter,
            drafting=drafting,
            program_features=spec.program_features,
            batch_size=batch_size,
            cache_length=cache_length,
            num_stop_ids=max((r.num_stop_ids for r in requests), default=1),
            read_ahead=read_ahead,
            **options,
        )

    def __repr__(self) -> str:
        """Return one line."""
        return (
            f"Engine({self.spec.title}, batch_size={self.batch_size}, "
            f"cache_length={self.cache_length}, {len(self._live)} requests)"
        )

    # --- properties ----------------------------------------------------------------------------------

    @property
    def spec(self) -> DecodeSpec:
        """The spec of its programs."""
        return self.runtime.spec

    @property
    def mesh(self) -> Mesh:
        """Its devices."""
        return self.runtime.mesh

    @property
    def batch_size(self) -> int:
        """Number of its slots."""
        return self.runtime.batch_size

    @property
    def read_ahead(self) -> int:
        """Rows beside the slots, in which prompts are prefilled before they have a slot."""
        return self.runtime.read_ahead

    @property
    def cache_length(self) -> int:
        """Positions of a slot."""
        return self.runtime.cache_length

    @property
    def cache_tokens(self) -> int:
        """Tokens for which the caches have room."""
        paging = self.runtime.paging
        return paging.tokens if paging else self.runtime.num_rows * self.cache_length

    @property
    def cache_usage(self) -> float:
        """The share of the caches that requests have, from 0 to 1."""
        slots = self._scheduler.slots
        if slots.pages is not None:
            return slots.pages.usage
        return 1 - len(slots.free) / slots.count

    @property
    def num_preemptions(self) -> int:
        """Number of times that a request gave up its pages for an older one, and went on later."""
        return self.runtime.timings.preemptions

    @property
    def num_running(self) -> int:
        """Number of requests that have a slot."""
        slots = self._scheduler.slots
        return min(self.batch_size, slots.count - len(slots.free))

    @property
    def timings(self) -> Timings:
        """Seconds since it was made."""
        return self.runtime.timings

    @property
    def num_compilations(self) -> int:
        """Number of programs that it used so far."""
        return self.runtime.num_compilations

    @property
    def target_params(self) -> Params:
        """The target's weights. New ones of the same shapes compile nothing."""
        return self.runtime.target_params

    @target_params.setter
    def target_params(self, params: Any) -> None:
        self.runtime.target_params = params
        self._clear_prefixes()

    @property
    def drafter_params(self) -> Params | None:
        """The drafter's weights, likewise."""
        return self.runtime.drafter_params

    @drafter_params.setter
    def drafter_params(self, params: Any) -> None:
        self.runtime.drafter_params = params
        self._clear_prefixes()

    @property
    def chosen_length(self) -> DraftLengthController:
        """The former name of `draft_length`."""
        warnings.warn("Engine.chosen_length is now draft_length", DeprecationWarning, stacklevel=2)
        return self.draft_length

    @property
    def prefix_stats(self) -> PrefixStats | None:
        """Counts of the prefix cache; None without one."""
        return PrefixStats.sum([s.stats for s in self._prefixes]) if self._prefixes else None

    def _clear_prefixes(self, *, drop_arrays: bool = False) -> None:
        for store in self._prefixes:
            store.clear(drop_arrays=drop_arrays)

    # --- requests ------------------------------------------------------------------------------------

    @property
    def limits(self) -> RequestLimits:
        """Limits that `check` compares a request with."""
        return RequestLimits(self.spec, self.cache_length, self.num_stop_ids)

    def check(self, request: Request) -> FieldError | None:
        """Return why the engine cannot decode a request and the way out, or None if it can."""
        is_checked = isinstance(request, CheckedRequest) and request.limits == self.limits
        return None if is_checked else check_request(self.limits, request)

    def validate(self, request: Request) -> CheckedRequest:
        """Check a request, and return it in a form that `add` and `run` do not check again.

        Raises:
          FieldError: `check` refuses the request.
        """
        limits = self.limits
        if isinstance(request, CheckedRequest) and request.limits == limits:
            return request
        if error := check_request(limits, request):
            raise error
        values = {f.name: getattr(request, f.name) for f in dataclasses.fields(Request)}
        if not isinstance(request.prompt_ids, tuple):  # the caller may change it later
            values["prompt_ids"] = tuple(map(int, request.prompt_ids))
        values["images"] = tuple(request.images)
        return CheckedRequest(**values, limits=limits)

    def add(self, request: Request) -> Hashable:
        """Queue a request behind those of its priority, and return its id.

        More stop ids than the engine was made for are refused: their number is part of the shapes,
        and `step` never compiles programs for a second one.

        Raises:
          FieldError: `check` refuses the request, or its id belongs to a request that is not done.
        """
        request = self.validate(request)
        if self._compiles_first and self._compiled_stop_ids != self.num_stop_ids:
            self.warm_up()
        if request.id in self._live:
            raise FieldError(
                "id", f"{request.id!r} belongs to a request that is not done; give another"
            )
        if request.id is None:
            while self._next_id in self._live:
                self._next_id += 1
            request = with_identity(request, self._next_id, None)
            self._next_id += 1
        self._live.add(request.id)
        waiting = self._scheduler.waiting
        index = bisect_right(waiting, request.priority, key=lambda r: r.priority)
        waiting.insert(index, request)
        return request.id

    def cancel(self, id: Hashable) -> None:
        """End a request, waiting or running. Its slot is free at once.

        The next `step` returns its completion, with its tokens so far and "cancelled".

        Raises:
          FieldError: there is no such request, or it is done.
        """
        if (completion := self._scheduler.cancel(id)) is not None:
            self._ended.append(completion)
            return
        raise FieldError("id", f"{id!r} belongs to no request that waits or runs")

    @property
    def is_idle(self) -> bool:
        """Return whether the completions of all requests were returned."""
        return not self._live

    def step(self) -> list[Update | Completion]:
        """Wait for the running call, launch the next one, and return the events of the first.

        The next step returns the events of the launched call, so that the caller and the device
        work at the same time. On a mesh this method waits for the launched call too: programs of
        several devices must not overlap. A decode call ends after `steps_per_return` steps, or as soon as
        enough slots are free for waiting requests. An idle engine returns nothing.
        """
        try:
            with own_context(self.mesh):
                new_events = self._scheduler.step(self.steps_per_return)
        except BaseException:  # stored arrays may be half written, or gone
            self._clear_prefixes(drop_arrays=True)
            raise
        events: list[Update | Completion] = [*self._ended, *new_events]
        self._ended.clear()
        for event in events:
            if isinstance(event, Completion):
                self._live.discard(event.id)
                self.timings.decode_tokens += max(len(event.token_ids) - 1, 0)
        return events

    def warm_up(self, prompt_lengths: Collection[int] | None = None) -> None:
        """Compile every program, and time all verify lengths, so that later requests compile nothing.

        Args:
          prompt_lengths: of the requests that will come: programs for other prompts are left out.
            None: any prompt may come.

        Raises:
          ValueError: the engine has requests.
        """
        if not self.is_idle:
            raise ValueError("warm_up needs an idle engine: call step until is_idle, or reset")
        with own_context(self.mesh):
            self._scheduler.warm_up(self.steps_per_return, prompt_lengths)
        self._compiled_stop_ids = self.num_stop_ids

    def run(self, requests: Sequence[Request]) -> Iterator[Update | Completion]:
        """Decode all requests, and yield updates as tokens come and one completion for each.

        Completions come as rows finish, not in order. A request that `check` refuses completes at
        once with its error, without effect on the others. `num_stop_ids` grows to what the requests
        need.

        Raises:
          ValueError: the engine has other requests, or two of these have the same id.
        """
        if not self.is_idle:
            raise ValueError("run needs an idle engine: call step until is_idle, or reset")
        named = [with_identity(request, i, i) for i, request in enumerate(requests)]
        if len({r.id for r in named}) < len(named):
            raise FieldError(
                "id", "is the same in two requests; leave it out, or give each its own"
            )
        max_stop_ids = max((r.num_stop_ids for r in named), default=1)
        self.num_stop_ids = bucket(max_stop_ids, smallest=self.num_stop_ids)
        self.reset()  # the state may hold fewer stop ids
        try:
            for request in named:
                try:
                    self.add(request)
                except FieldError as error:
                    yield refused(request, error)
            while not self.is_idle:
                yield from self.step()
        finally:
            self.reset()

    def reset(self) -> None:
        """Drop all requests, and the memory of the caches unless they hold stored prefixes."""
        self._scheduler.close()
        slots = self._scheduler.slots
        keeps = self._prefixes and slots.num_stop_ids == self.num_stop_ids
        self._begin(slots if keeps and slots.restart() else None)

    def _begin(self, slots: Slots | None = None) -> None:
        self._live: set[Hashable] = (
            set()
        )  # ids of requests whose completions `step` has not returned
        self._ended: list[Completion] = []  # of cancelled requests, for the next `step`
        self._scheduler = Scheduler(
            slots or Slots(self.runtime, self.num_stop_ids),
            self.draft_length,
            self._executor,
            max_prefill_tokens=self.max_prefill_tokens,
            prefixes=self._prefixes,
        )


def check_pages(
    spec: DecodeSpec, cache_length: int, cache_tokens: CacheTokens, prefix_bytes: int, mesh: Mesh
) -> None:
    """Refuse pages for so many tokens, and for stored prefixes, where an engine cannot have them.

    Raises:
      FieldError: naming the argument and the way out.
    """
    parts = mesh.shape["data"]
    if isinstance(cache_tokens, int) and cache_tokens < parts * cache_length:
        among = f" in each of {parts} parts of the slots" if parts > 1 else ""
        enough = f"{parts * cache_length} or more" if parts > 1 else "as many or more"
        raise FieldError(
            "cache_tokens",
            lambda format_field: (
                f"{format_field('cache_tokens', cache_tokens)} holds no whole request{among}, which may "
                f"need {format_field('cache_length', cache_length)}; give {enough}"
            ),
        )
    name = "prefix_bytes" if cache_tokens is None else "cache_tokens"
    if (cache_tokens or prefix_bytes) and not row_subset.addressable(spec):
        raise FieldError(name, "needs a drafter that drafts by slot; leave it out")
