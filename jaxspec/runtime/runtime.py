"""What runs the algorithm: compiled programs, the shapes they are compiled for, and where their arrays are.

`decode` says what happens to a batch of slots; this module decides in which shapes. Read `Runtime`: it has
slots and knows no requests. Shapes are buckets, so that a handful of programs serves every prompt:

    rows      powers of two, for every part of a mesh's data axis      `prefill.rows_bucket`
    chunks    prompts are fed in passes of a few shapes                `prefill.Shapes`
    caches    multiples of a step that grows with the length           `cache_bucket`, `cache_length_for`

The engine, the sampler and the benchmark use it. Whoever wants to share programs passes a `Programs` on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.typing import ArrayLike

from jaxspec import decode
from jaxspec import state as states
from jaxspec.drafters.tree import settle_num_draft_tokens
from jaxspec.options import Drafting, FieldError, ProgramFeatures
from jaxspec.runtime.prefill import Shapes, chunks
from jaxspec.runtime.programs import Compiler, Programs
from jaxspec.runtime.step_output import Ask, Most, Packed
from jaxspec.shapes import Params
from jaxspec.state import NO_GUIDE, Admission, DecodeSpec, DecodeState, PrefillChunk
from jaxspec.text.grammars.masking import words_of
from jaxspec.text.grammars.matcher import ALL
from jaxspec.weights.loading import LoadedModel
from jaxspec.weights.model_def import ModelDef
from jaxspec.weights.sharding import mesh_of, on_decoding_mesh, place_rows
from jaxspec.weights.trees import flat_params

Phase = Literal["admit", "prefill", "decode", "retire", "clear", "insert"]

Told = tuple[DecodeState, Packed | None]
"""The next state, and the news that were asked for."""


# --- what is decoded ---------------------------------------------------------------------------------


def make_spec(
    target: LoadedModel | ModelDef,
    drafter: LoadedModel | ModelDef | None,
    drafting: Drafting = Drafting(),
    program_features: ProgramFeatures = ProgramFeatures(),
) -> DecodeSpec:
    """Return what a pair of models is to do: the checkpoint's suppressed tokens, as many drafts as asked.

    Args:
      drafting: without a number of draft tokens it gets the drafter's own.

    Raises:
      ConfigError: the drafter does not fit the target.
      FieldError: a number is out of range, or options do not fit the models.
    """
    target_def = target.model_def if isinstance(target, LoadedModel) else target
    drafter_def = drafter.model_def if isinstance(drafter, LoadedModel) else drafter
    generation = target.generation if isinstance(target, LoadedModel) else None
    drafts = 0
    if drafter_def is not None:
        drafter_def.config.check_fits(target_def.config)
        drafts = settle_num_draft_tokens(drafter_def, drafting)
        drafting = dataclasses.replace(drafting, num_draft_tokens=drafts)
    elif drafting.num_draft_tokens or drafting.tree:
        field = "num_draft_tokens" if drafting.num_draft_tokens else "tree"
        raise FieldError(field, "was given, but there is no drafter: leave it out")
    tau = drafting.synthetic_acceptance
    if tau is not None and tau > drafts + 1:
        raise FieldError(
            "synthetic_acceptance",
            f"is {tau}; with {drafts} draft tokens it lies between 1 and {drafts + 1}",
        )
    suppress = generation.suppress_tokens if generation else ()
    return DecodeSpec(target_def, drafter_def, drafting, suppress, program_features)


# --- shapes ------------------------------------------------------------------------------------------


def cache_bucket(length: int) -> int:
    """Round a cache length up to a multiple of 128, or of an eighth of the next power of two.

    Few lengths mean few programs to compile, and at most a quarter of the cache is spare.
    """
    step = max(128, (1 << (length - 1).bit_length()) // 8)
    return -(-length // step) * step


def cache_length_for(spec: DecodeSpec, positions: int, *, multiple: int = 1) -> int:
    """Return the length of caches for so many positions and one step's tokens, rounded up to a multiple."""
    return -(-(positions + spec.step_tokens) // multiple) * multiple


# --- slots -------------------------------------------------------------------------------------------


@dataclass
class Timings:
    """Seconds of wall clock, device work waited for; compilation stands apart from the other two."""

    prefill_s: float = 0.0
    decode_s: float = 0.0
    compile_s: float = 0.0
    decode_tokens: int = 0  # returned tokens but those of prefill


class NewRows(NamedTuple):
    """A `state.Admission` as the host has it."""

    slots: np.ndarray
    max_new_tokens: np.ndarray
    stop_ids: np.ndarray
    sampling: dict[str, np.ndarray]
    seeds: np.ndarray
    guides: np.ndarray | None = None


def _admit(spec: DecodeSpec, state: DecodeState, new: NewRows) -> DecodeState:
    sampling = spec.sampling(len(new.seeds), **new.sampling)
    return states.admit(state, Admission(**{**new._asdict(), "sampling": sampling}))


_FUNCTIONS: dict[Phase, Callable[..., Any]] = {
    "admit": _admit,
    "prefill": decode.prefill,
    "decode": decode.decode_loop,
    "retire": states.retire,
    "clear": states.clear,
    "insert": states.insert,
}


class Runtime:
    """A fixed number of slots, and the programs that fill, advance and empty them.

    It runs on the mesh that the weights are on. A state is passed in, donated, and returned.

    Args:
      batch_size: slots; a multiple of the mesh's data axis, see `rows_bucket`.
      cache_length: positions a slot holds: prompt, new tokens and one step's tokens.
      read_ahead: rows of a second state, in which prompts are read. 0: they are read in the slots themselves.
      max_prefill_tokens: prompt tokens that are read before rows decode on; no pass has more, see
        `prefill.full_pass`. None: no bound.
      invariant: whether the shapes of all passes over a row follow from its own prompt alone.
      programs: where compiled programs are kept; None for a place of its own.
    """

    def __init__(
        self,
        spec: DecodeSpec,
        target_params: Params,
        drafter_params: Params | None,
        *,
        batch_size: int,
        cache_length: int,
        read_ahead: int = 0,
        max_prefill_tokens: int | None = None,
        invariant: bool = False,
        programs: Programs | None = None,
    ):
        self.spec = spec
        self.mesh = mesh_of(target=target_params, drafter=drafter_params)
        self.target_params, self.drafter_params = target_params, drafter_params
        self.batch_size = batch_size
        self.cache_length, self.read_ahead = cache_length, read_ahead
        self.invariant = invariant
        rows = read_ahead or batch_size
        self.shapes = Shapes.of(
            spec.target, rows, self.mesh, invariant=invariant, most=max_prefill_tokens
        )
        self.programs = Programs() if programs is None else programs
        self.used: dict[tuple[Any, ...], Any] = {}  # programs by name and shape, of this runtime
        self.timings = Timings()
        self.few: tuple[int, ...] = ()  # rows of programs for few of the slots, once compiled
        self._compiler: Compiler | None = None  # who compiles meanwhile
        self.begun = (
            0.0  # when the last pass or steps were sent to the device, by `time.perf_counter`
        )

    @property
    def num_compilations(self) -> int:
        """How many programs it needed so far."""
        return len(self.used)

    @property
    def target_params(self) -> Params:
        """The target's weights; others of the same shapes compile nothing. Set them as any `flat_params`.

        Setting what does not fit raises ValueError, and the old weights stay.
        """
        return self._target_params

    @target_params.setter
    def target_params(self, params: Any) -> None:
        params = flat_params(params)
        self.spec.target.check(params)
        self._target_params = on_decoding_mesh(params)

    @property
    def drafter_params(self) -> Params | None:
        """The drafter's weights, likewise."""
        return self._drafter_params

    @drafter_params.setter
    def drafter_params(self, params: Any) -> None:
        if params is not None:
            params = flat_params(params)
            if self.spec.drafter is not None:
                self.spec.drafter.check(params)
            params = on_decoding_mesh(params)
        self._drafter_params = params

    def place(self, rows: Any) -> Any:
        """Put what the host knows about rows onto the mesh."""
        return place_rows(rows, self.mesh)

    def init_state(self, num_stop_ids: int, rows: int | None = None) -> DecodeState:
        """Return a state of empty slots, or of some other number of rows."""
        return self.programs.new_state(
            self.spec,
            rows or self.batch_size,
            self.cache_length,
            num_stop_ids,
            self.spec.target.cache_dtype,
            self.mesh,
        )

    def admission(
        self,
        slots: Sequence[int] | np.ndarray,
        max_new_tokens: Sequence[int],
        stop_ids: np.ndarray,
        sampling: Mapping[str, np.ndarray],
        seeds: np.ndarray,
        guides: Sequence[int] | np.ndarray | None = None,
    ) -> NewRows:
        """Return what `admit` takes, a row each; a slot of `batch_size` is no slot at all.

        Args:
          stop_ids: [rows, I], padded with -1.
          sampling: as `requests.sampling_values` returns it.
          seeds: [rows, 2]: a seed, and which sample of it.
          guides: numbers of `grammars.guides`; None: no row has a grammar.
        """
        if self.spec.program_features.grammars and guides is None:
            guides = np.full(len(slots), NO_GUIDE)
        return NewRows(
            slots=np.asarray(slots, np.int32),
            max_new_tokens=np.asarray(max_new_tokens, np.int32),
            stop_ids=np.asarray(stop_ids, np.int32),
            sampling=dict(sampling),
            seeds=seeds.astype(np.uint32),
            guides=None if guides is None else np.asarray(guides, np.int32),
        )

    def ask(self, steps: int, known: np.ndarray | None = None) -> Ask:
        """Return what to ask of a pass over prompts, or of a decode call.

        Args:
          steps: of the call, at most; 0: it reads prompts.
          known: as `Ask.known`; None: nothing is known of any slot.
        """
        if known is None:
            known = np.zeros((self.batch_size, 2), np.int32)
        tokens = max(1, steps * (self.spec.depth + 1))
        return Ask(known, Most(min(tokens, self.cache_length), steps))

    def admit(self, state: DecodeState, new: NewRows) -> DecodeState:
        """Give slots to new rows."""
        return self._change("admit", state, self.given(new))

    def prefill(
        self,
        state: DecodeState,
        prompts: Mapping[int, Sequence[int] | np.ndarray],
        ask: Ask | None = None,
    ) -> DecodeState:
        """Read the prompts of slots, and choose the first token of each.

        Args:
          ask: what others ask of the same programs; nobody hears what they pack.
        """
        for chunk in chunks(prompts, self.shapes):
            state, _ = self.feeding(state, chunk, ask)(state)
        return state

    def feeding(
        self, state: DecodeState, chunk: PrefillChunk, ask: Ask | None = None
    ) -> Callable[[DecodeState], Told]:
        """Return the call that reads one chunk into such a state, and packs what is asked."""
        if self.spec.program_features.grammars and chunk.masks is None:
            words = words_of(self.spec.target.config.vocab_size)
            chunk = dataclasses.replace(chunk, masks=np.full((len(chunk.tokens), words), ALL))
        chunk = self.place(chunk)
        return self._telling("prefill", state, ask, chunk)

    def decode(
        self,
        state: DecodeState,
        max_steps: int,
        until_active: int = 0,
        verify_length: int | None = None,
        guided: bool = False,
    ) -> DecodeState:
        """Run up to so many steps; fewer when no more than `until_active` rows are active.

        Args:
          verify_length: drafts that each step verifies; None for all.
          guided: whether rows have grammars.
        """
        return self.decoding(state, None, max_steps, until_active, verify_length, guided)(state)[0]

    def decoding(
        self,
        state: DecodeState,
        ask: Ask | None,
        max_steps: int,
        until_active: int = 0,
        verify_length: int | None = None,
        guided: bool = False,
        slots: np.ndarray | None = None,
    ) -> Callable[[DecodeState], Told]:
        """Return the call that decodes such a state, and packs what is asked; other arguments as in `decode`.

        Args:
          slots: the only ones that are computed, see `some_rows.fill`; no other may be active. None: all.
        """
        given = (np.int32(max_steps), np.int32(until_active))
        given = self.given(given if slots is None else (*given, slots))
        spec = self.spec.verifying(verify_length).asking(guided)
        return self._telling("decode", state, ask, *given, spec=spec)

    def _telling(
        self,
        phase: Phase,
        state: DecodeState,
        ask: Ask | None,
        *given: Any,
        spec: DecodeSpec | None = None,
    ) -> Callable[[DecodeState], Told]:
        """Return the call of a program that packs what is asked when it is done."""
        if ask is None:
            silent = self.program(phase, state, *given, spec=spec)
            return lambda state: (silent(state, *given), None)
        known = self.given(ask.known)
        program = self.program(phase, state, *given, known, spec=spec, most=ask.most)
        return lambda state: program(state, *given, known)

    def retire(self, state: DecodeState, finished: np.ndarray) -> DecodeState:
        """End the rows of slots that the host found finished."""
        return self._change("retire", state, self.given(finished))

    def clear(self, state: DecodeState, slots: np.ndarray) -> DecodeState:
        """Empty the caches of slots that are spoilt."""
        return self.program("clear", state, rows := self.place(slots))(state, rows)

    def insert(
        self, state: DecodeState, other: DecodeState, targets: Mapping[int, int]
    ) -> DecodeState:
        """Copy rows of another state into slots.

        Args:
          targets: the slot for each row there.
        """
        pairs = np.full((len(other.active), 2), -1, np.int32)
        pairs[: len(targets)] = [*targets.items()] or pairs[:0]
        given = other, self.given(pairs)
        return self.program("insert", state, *given)(state, *given)

    @contextlib.contextmanager
    def compiling_aside(self) -> Iterator[None]:
        """Trace what is asked for in this block while another thread compiles what was; call nothing of it in there.

        XLA compiles without Python's lock. So the two take as long as the longer one of them.
        """
        if jax.process_count() > 1:  # they would have to compile in one order
            yield
            return
        self._compiler = Compiler()
        try:
            yield
        finally:
            self._compiler.close()
            self._compiler = None

    def given(self, rows: Any) -> Any:
        """Return what a program is given of the host's. On one device the call itself places it, more quickly."""
        return rows if self.mesh.size == 1 else self.place(rows)

    def _change(self, phase: Phase, state: DecodeState, given: Any) -> DecodeState:
        """Run a program that touches no caches: then it need not take them, which takes the host longer."""
        small = state.small
        return state.with_small(self.program(phase, small, given)(small, given))

    def program(
        self,
        phase: Phase,
        state: DecodeState,
        *given: ArrayLike | Any,
        spec: DecodeSpec | None = None,
        most: Most | None = None,
    ) -> Bound:
        """Return the program of a phase for a state and what else it is given, compiled if it is new.

        Args:
          spec: a variant of the runtime's own; None for that one.
          most: sizes of the news that it returns beside the state, of `Ask.known`, which it is given last; None: it
            returns the state alone.
        """
        function, spec = _FUNCTIONS[phase], self.spec if spec is None else spec
        chunk = given[0].tokens.shape if isinstance(given[0], PrefillChunk) else ()
        rows = np.shape(given[-1 - (most is not None)]) if phase == "decode" else ()  # of few slots
        key = (phase, *chunk, *rows, *state.stop_ids.shape)
        if spec.verify_length is not None:
            key = (*key, f"verifying {spec.verify_length}")
        if spec.guided:
            key = (*key, "guided")
        if most is not None:
            key = (*key, *most)
        runs_models = phase in ("prefill", "decode")
        weights = (self.target_params, self.drafter_params) if runs_models else ()
        if key not in self.used:
            begin = time.perf_counter()
            found = self.programs.get(
                function,
                (*weights, state, *self.place(given)),
                donate=len(weights),
                mesh=self.mesh,
                spec=spec if runs_models or phase == "admit" else None,
                most=most,
                loops=phase == "decode" and not spec.guided,
                compiler=self._compiler,
            )
            self.timings.compile_s += time.perf_counter() - begin
            if isinstance(found, Future):
                return Bound(found, weights)
            self.used[key] = found
        return Bound(self.used[key], weights)


@dataclass(frozen=True)
class Bound:
    """A compiled program, called without the weights that it takes first."""

    compiled: Any
    weights: tuple[Any, ...]

    def __call__(self, *given: Any) -> Any:
        return self.compiled(*self.weights, *given)
