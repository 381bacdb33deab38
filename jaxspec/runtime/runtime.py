"""The runtime: compiled programs of the algorithm, and the shapes that they are compiled for.

`decode` has the algorithm for a batch of slots. This module chooses its shapes. Read `Runtime`. It
has slots and knows no requests. Shapes are buckets, so that a handful of programs serves every
prompt:

    slots     as many as are asked for, for every part of a mesh       `prefill.slots_on`
    chunks    prompts are fed in passes of a few shapes                `prefill.Shapes`
    caches    multiples of a step that grows with the length           `cache_bucket`, `cache_length_for`

Several runtimes share programs if they have one `Programs`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxspec import decode, row_subset
from jaxspec import state as states
from jaxspec.cache import HostTables, Paging, caches_of
from jaxspec.configs.gemma4_vision import IMAGE_TOKENS, Gemma4VisionConfig
from jaxspec.decode_loop import decode_loop
from jaxspec.drafters.tree import settle_num_draft_tokens
from jaxspec.mixed_step import mixed_step
from jaxspec.models.target import ImageTokens
from jaxspec.options import VALUES, Drafting, FieldError, ProgramFeatures, Sampling
from jaxspec.runtime.prefill import Shapes, chunks, make_chunk
from jaxspec.runtime.programs import Compiler, Programs
from jaxspec.runtime.step_output import OutputRequest, OutputSizes, PackedOutput
from jaxspec.shapes import Array, Float, Int, Params
from jaxspec.state import NO_GUIDE, Admission, DecodeSpec, DecodeState, PrefillChunk
from jaxspec.text.grammars.masking import words_of
from jaxspec.text.grammars.matcher import ALL
from jaxspec.text.images import ImagePatches
from jaxspec.weights.loading import LoadedModel
from jaxspec.weights.model_def import ModelDef
from jaxspec.weights.sharding import fetch, mesh_of, on_decoding_mesh, place_rows
from jaxspec.weights.trees import flat_params

Phase = Literal["admit", "prefill", "decode", "mixed", "retire", "clear"]

StepResult = tuple[DecodeState, PackedOutput | None]
"""The next state, and the output that was requested."""


# --- what is decoded ---------------------------------------------------------------------------------


def make_spec(
    target: LoadedModel | ModelDef,
    drafter: LoadedModel | ModelDef | None,
    drafting: Drafting = Drafting(),
    program_features: ProgramFeatures = ProgramFeatures(),
) -> DecodeSpec:
    """Return the spec of a pair of models, with the checkpoint's suppressed tokens.

    Args:
      drafting: `num_draft_tokens` of None becomes the drafter's own number.

    Raises:
      ConfigError: the drafter does not fit the target.
      FieldError: a number is out of range, or options do not fit the models.
    """
    target_def = target.model_def if isinstance(target, LoadedModel) else target
    drafter_def = drafter.model_def if isinstance(drafter, LoadedModel) else drafter
    generation = target.generation if isinstance(target, LoadedModel) else None
    vision = target.vision if isinstance(target, LoadedModel) else None
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
    of_images = None if vision is None else vision.model_def
    return DecodeSpec(
        target_def, drafter_def, drafting, suppress, program_features, vision=of_images
    )


# --- shapes ------------------------------------------------------------------------------------------


def cache_bucket(length: int) -> int:
    """Round a cache length up to a multiple of 128, or of an eighth of the next power of two.

    Few lengths mean few programs to compile, and at most a quarter of the cache is spare.
    """
    length = int(length)  # numpy's whole numbers have no bit_length
    step = max(128, (1 << (length - 1).bit_length()) // 8)
    return -(-length // step) * step


def cache_length_for(spec: DecodeSpec, positions: int, *, multiple: int = 1) -> int:
    """Return the length of caches for these positions and one step's tokens, rounded up to a multiple."""
    return -(-(positions + spec.step_tokens) // multiple) * multiple


# --- slots -------------------------------------------------------------------------------------------


@dataclass
class Timings:
    """Seconds of wall clock in prefill, decoding and compilation. None of them contains another.

    A pass over prompts in which rows decode counts as decoding.

    Attributes:
      decode_tokens: returned tokens, except those of prefill.
      preemptions: rows that gave up their pages for older ones.
    """

    prefill_s: float = 0.0
    decode_s: float = 0.0
    compile_s: float = 0.0
    decode_tokens: int = 0
    preemptions: int = 0


class NewRows(NamedTuple):
    """A `state.Admission` in host memory."""

    slots: np.ndarray
    max_new_tokens: np.ndarray
    stop_ids: np.ndarray
    sampling: dict[str, np.ndarray]
    seeds: np.ndarray
    guides: np.ndarray | None = None


def _admit(spec: DecodeSpec, state: DecodeState, new: NewRows) -> DecodeState:
    sampling = spec.sampling(len(new.seeds), **new.sampling)
    return states.admit(state, Admission(**{**new._asdict(), "sampling": sampling}))


def embed_images(
    vision: ModelDef,
    params: Params,
    patches: Float[Array, "B M X"],
    positions: Int[Array, "B M 2"],
) -> Float[Array, "B R D"]:
    """Return the embeddings of images by a vision part."""
    return vision.bind(params)(patches, positions)


_embed_images = jax.jit(embed_images, static_argnums=0)


def embedded(vision: ModelDef, params: Params, image: ImagePatches) -> np.ndarray:
    """Return the embeddings of the tokens of an image by a vision part, [tokens, D]."""
    patches, positions = padded_to_a_budget(image, vision)
    return fetch(_embed_images(vision, params, patches, positions))[0, : image.num_tokens]


def padded_to_a_budget(image: ImagePatches, vision: ModelDef) -> tuple[np.ndarray, np.ndarray]:
    """Return an image for `embed_images`: a shape for each number of tokens that images are resized to."""
    tokens = next(n for n in IMAGE_TOKENS if n >= image.num_tokens)
    patches, positions = image.padded(tokens * vision.config.pool_size**2)
    return patches[None], positions[None]


_FUNCTIONS: dict[Phase, Callable[..., Any]] = {
    "admit": _admit,
    "prefill": decode.prefill,
    "decode": decode_loop,
    "mixed": mixed_step,
    "retire": states.retire,
    "clear": states.clear,
}


class Runtime:
    """A fixed number of rows, and the programs that fill, advance and empty them.

    It runs on the mesh that the weights are on. A state is passed in, donated, and returned.

    Args:
      batch_size: rows of a decode step; a multiple of the mesh's data axis, see `slots_on`.
      cache_length: positions of a row, for prompt, new tokens and one step's tokens.
      read_ahead: rows of the state beyond those; a multiple of the data axis, too. Prompts can be prefilled
        in all rows, and a step computes some of them.
      max_prefill_tokens: prompt tokens that are prefilled before rows decode on. No pass has more,
        see `prefill.full_pass`. None: no bound.
      invariant: whether the shapes of all passes over a row follow from its own prompt alone.
      paging: the pages of the caches; None: one a row. With it, calls on states take the `tables`
        of all rows.
      programs: compiled programs to share; None for its own.
      vision_params: weights of the spec's vision part, if prompts are to have images.
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
        paging: Paging | None = None,
        programs: Programs | None = None,
        vision_params: Params | None = None,
    ):
        self.spec, self.paging, self.vision_params = spec, paging, vision_params
        self._embedded: WeakKeyDictionary[ImagePatches, np.ndarray] = WeakKeyDictionary()
        self.mesh = mesh_of(target=target_params, drafter=drafter_params)
        self.used: dict[tuple[Any, ...], Any] = {}  # programs by name and shape, of this runtime
        self._target_params: Params = {}
        self._drafter_params: Params | None = None
        self.target_params, self.drafter_params = target_params, drafter_params
        self.batch_size = batch_size
        self.cache_length, self.read_ahead = cache_length, read_ahead
        self.invariant = invariant
        self.num_rows = batch_size + read_ahead
        self.shapes = Shapes.of(
            spec.target,
            self.num_rows,
            self.mesh,
            invariant=invariant,
            max_prefill_tokens=max_prefill_tokens,
        )
        self.programs = Programs() if programs is None else programs
        self.timings = Timings()
        self.small_batches: tuple[int, ...] = ()  # rows of compiled small-batch programs
        self._compiler: Compiler | None = None  # in `compiling_in_background`
        if self.shapes.shares_passes and (
            spec.drafter is None or spec.drafter.bind_abstract().absorbs_together
        ):
            state = self.state_shapes(1)
            rings = caches_of(state.caches), caches_of(state.drafter)
            self.shapes = self.shapes.with_rings(*rings)

    @functools.cached_property  # a step asks, and `mixes` binds a drafter
    def can_mix(self) -> bool:
        """True if rows decode in passes over prompts."""
        return row_subset.mixes(self.spec) and bool(self.shapes.mixed_passes)

    @property
    def num_compilations(self) -> int:
        """Number of programs that it used so far."""
        return len(self.used)

    @property
    def target_params(self) -> Params:
        """The target's weights, set as any `flat_params`. New ones of the same shapes compile nothing.

        Weights that do not fit raise ValueError, and the old ones stay.
        """
        return self._target_params

    @target_params.setter
    def target_params(self, params: Any) -> None:
        params = flat_params(params, self.spec.target)
        self.spec.target.check(params)
        self._target_params = self._moved("target", params, self._target_params)

    @property
    def drafter_params(self) -> Params | None:
        """The drafter's weights, likewise."""
        return self._drafter_params

    @drafter_params.setter
    def drafter_params(self, params: Any) -> None:
        if params is not None:
            params = flat_params(params, self.spec.drafter)
            if self.spec.drafter is not None:
                self.spec.drafter.check(params)
            params = self._moved("drafter", params, self._drafter_params)
        self._drafter_params = params

    def _moved(self, role: str, params: Params, before: Params | None) -> Params:
        """Return new weights on the decoding mesh. Other shardings than before need other programs.

        Raises:
          ValueError: they are on other devices than the caches.
        """
        if params and mesh_of(**{role: params}) != self.mesh:
            raise ValueError(
                f"the {role}'s new weights are not on the mesh of the caches; put them there with "
                "jaxspec.place_params(params, model_def, engine.mesh), or make another engine"
            )
        params = on_decoding_mesh(params)
        if before:
            pairs = zip(jax.tree.leaves(params), jax.tree.leaves(before), strict=True)
            if not all(new.sharding.is_equivalent_to(old.sharding, new.ndim) for new, old in pairs):
                self.used.clear()
        return params

    def place(self, rows: Any) -> Any:
        """Put values of rows onto the mesh."""
        return place_rows(rows, self.mesh)

    def init_state(self, num_stop_ids: int, rows: int | None = None) -> DecodeState:
        """Return a state of empty rows.

        Args:
          rows: None for all.
        """
        return self.programs.new_state(*self._state_sizes(num_stop_ids, rows))

    def state_shapes(self, num_stop_ids: int) -> DecodeState:
        """Return the shapes of a state of all rows. Programs are bound to it as to the state itself."""
        return self.programs.state_shapes(*self._state_sizes(num_stop_ids, None))

    def _state_sizes(self, num_stop_ids: int, rows: int | None) -> tuple[Any, ...]:
        dtype, rows = self.spec.target.cache_dtype, rows or self.num_rows
        return self.spec, rows, self.cache_length, num_stop_ids, dtype, self.mesh, self.paging

    @functools.cached_property
    def page_counts(self) -> dict[int, int]:
        """The pages of each part of caches, `NO_PAGE` included, by the slots of a row; empty without paging."""
        caches = caches_of(jax.eval_shape(lambda: self.init_state(num_stop_ids=1)))
        parts = self.shapes.parts
        return {c.row_slots: c.k.shape[0] // parts for c in caches if c.row_slots is not None}

    def admission(
        self,
        slots: Sequence[int] | np.ndarray,
        max_new_tokens: Sequence[int],
        stop_ids: np.ndarray,
        sampling: Sequence[Sampling],
        seeds: np.ndarray,
        guides: Sequence[int] | np.ndarray | None = None,
    ) -> NewRows:
        """Return the argument of `admit`, with one entry a row. A slot number past the last is no slot.

        On a mesh that splits the rows, each part has as many entries, for slots of that part.

        Args:
          stop_ids: [rows, I], padded with -1.
          seeds: [rows, 2], a seed and the number of its sample.
          guides: numbers of `grammars.guides`; None: no row has a grammar.
        """
        if self.spec.program_features.grammars and guides is None:
            guides = np.full(len(slots), NO_GUIDE)
        numbers, each = np.asarray(slots, np.int32), self.num_rows // self.shapes.parts
        return NewRows(
            slots=np.where(numbers < self.num_rows, numbers % each, self.num_rows),
            max_new_tokens=np.asarray(max_new_tokens, np.int32),
            stop_ids=np.asarray(stop_ids, np.int32),
            sampling=self._sampling_arrays(sampling),
            seeds=seeds.astype(np.uint32),
            guides=None if guides is None else np.asarray(guides, np.int32),
        )

    def _sampling_arrays(self, rows: Sequence[Sampling]) -> dict[str, np.ndarray]:
        """Return sampling options as arrays, one row each, as `DecodeSpec.sampling` takes them."""
        arrays: dict[str, np.ndarray] = {
            name: np.asarray([getattr(r, name) for r in rows], np.float32) for name in VALUES
        }
        vocab = self.spec.target.config.vocab_size
        arrays["top_k"] = np.asarray([min(r.top_k, vocab) for r in rows], np.int32)
        ids = np.full((len(rows), self.spec.program_features.num_biases), -1, np.int32)
        biases = np.zeros(ids.shape, np.float32)
        for row, sampling in enumerate(rows):
            count = len(sampling.logit_bias)
            ids[row, :count] = list(sampling.logit_bias)
            biases[row, :count] = list(sampling.logit_bias.values())
        return dict(arrays, bias_ids=ids, bias_values=biases)

    def output_request(self, steps: int, known: np.ndarray | None = None) -> OutputRequest:
        """Return the output to request from a program.

        Args:
          steps: decode steps of the program at most; 0: a prefill pass.
          known: as `OutputRequest.known`; None: the host has nothing of any slot.
        """
        if known is None:
            known = np.zeros((self.num_rows, 2), np.int32)
        tokens = max(1, steps * (self.spec.depth + 1))
        return OutputRequest(known, OutputSizes(min(tokens, self.cache_length), steps))

    def admit(self, state: DecodeState, new: NewRows) -> DecodeState:
        """Give slots to new rows."""
        return self._run_small("admit", state, self.as_inputs(new))

    def prefill(
        self,
        state: DecodeState,
        prompts: Mapping[int, Sequence[int] | np.ndarray],
        output: OutputRequest | None = None,
    ) -> DecodeState:
        """Prefill the prompts of slots, and choose the first token of each.

        Args:
          output: as in `bind_prefill`, to use the same programs. The output is dropped.
        """
        for chunk in chunks(prompts, self.shapes):
            state, _ = self.bind_prefill(state, chunk, output)(state)
        return state

    def bind_prefill(
        self,
        state: DecodeState,
        chunk: PrefillChunk,
        output: OutputRequest | None = None,
        tables: HostTables | None = None,
    ) -> Callable[[DecodeState], StepResult]:
        """Return the call that prefills one chunk in a state like this one.

        Args:
          output: the output to return beside the next state; None: none.
          tables: the pages of all rows, with paging.
        """
        return self._bind("prefill", state, output, self._with_masks(chunk), tables=tables)

    def bind_mixed(
        self,
        state: DecodeState,
        output: OutputRequest | None,
        chunk: PrefillChunk,
        slots: np.ndarray,
        tables: HostTables | None = None,
    ) -> Callable[[DecodeState], StepResult]:
        """Return the call of a step that verifies all drafts of some rows, and prefills a chunk in the same pass.

        Args:
          slots: the rows that decode, `batch_size` of them; see `row_subset.fill`.
          output, tables: as in `bind_prefill`.
        """
        spec = self.spec.verifying(self.spec.num_draft_tokens).asking(False)
        chunk = self._with_masks(chunk)
        return self._bind("mixed", state, output, chunk, slots, tables=tables, spec=spec)

    def _with_masks(self, chunk: PrefillChunk) -> PrefillChunk:
        """Return a chunk with the masks that its program takes, if it has none."""
        if not self.spec.program_features.grammars or chunk.masks is not None:
            return chunk
        words = words_of(self.spec.target.config.vocab_size)
        return dataclasses.replace(chunk, masks=np.full((len(chunk.tokens), words), ALL))

    @property
    def vision_config(self) -> Gemma4VisionConfig | None:
        """The config of the vision part."""
        return None if self.spec.vision is None else self.spec.vision.config

    def warm_up_vision(self, chunks: Sequence[PrefillChunk], slots: int) -> list[PrefillChunk]:
        """Compile the vision part for all numbers of tokens, and return empty passes with images.

        Args:
          chunks: empty passes without images.
          slots: as in `make_chunk`.
        """
        config = self.vision_config
        assert config is not None
        passes = {chunk.tokens.shape for chunk in chunks}
        for tokens in IMAGE_TOKENS:
            count = tokens * config.pool_size**2
            pixels = np.zeros((count, 3 * config.patch_size**2), np.uint8)
            image = ImagePatches(pixels, np.zeros((count, 2), np.int32), tokens)
            embeddings = self.embed(image)
            if config.two_way:
                passes.add(self.shapes.image_pass(tokens))
        empty = []
        for rows, width in sorted(passes):
            of_images = jnp.zeros((rows, width, embeddings.shape[1]), embeddings.dtype)
            images = ImageTokens(of_images, jnp.zeros((rows, width), np.int32), config.two_way)
            empty.append(dataclasses.replace(make_chunk({}, rows, width, slots), images=images))
        return empty

    def embed(self, image: ImagePatches) -> np.ndarray:
        """Return the embeddings of the tokens of an image, [tokens, D]. They are kept as long as it is."""
        if (known := self._embedded.get(image)) is not None:
            return known
        vision = self.spec.vision
        assert vision is not None
        assert self.vision_params is not None
        args = (self.vision_params, *self.place(padded_to_a_budget(image, vision)))
        begin = time.perf_counter()
        program = self.programs.get(embed_images, args, donate=None, mesh=self.mesh, spec=vision)
        self.timings.compile_s += time.perf_counter() - begin
        rows = self._embedded[image] = fetch(program(*args))[0, : image.num_tokens]
        return rows

    def decode(
        self,
        state: DecodeState,
        max_steps: int,
        until_active: int = 0,
        verify_length: int | None = None,
        guided: bool = False,
    ) -> DecodeState:
        """Run `max_steps` decode steps, or fewer once at most `until_active` rows are active.

        Args:
          verify_length: drafts that each step verifies; None for all.
          guided: whether rows have grammars.
        """
        call = self.bind_decode(state, None, max_steps, until_active, verify_length, guided)
        return call(state)[0]

    def bind_decode(
        self,
        state: DecodeState,
        output: OutputRequest | None,
        max_steps: int,
        until_active: int = 0,
        verify_length: int | None = None,
        guided: bool = False,
        slots: np.ndarray | None = None,
        tables: HostTables | None = None,
        costs: np.ndarray | None = None,
    ) -> Callable[[DecodeState], StepResult]:
        """Return the call that decodes a state like this one; other arguments as in `decode`.

        Args:
          output: the output to return beside the next state; None: none.
          slots: the only rows to compute, see `row_subset.fill`. None: the first `batch_size`.
          tables: as in `bind_prefill`.
          costs: of `spec.widths`, among which each step chooses. None: all steps verify
            `verify_length` drafts.
        """
        if slots is None and self.read_ahead:
            slots = self.first_slots(self.batch_size)
        inputs = np.int32(max_steps), np.int32(until_active), slots
        length = self.spec.num_draft_tokens if verify_length is None else verify_length
        spec = self.spec.verifying(None if costs is not None else length).asking(guided)
        more = (costs,) if costs is not None else ()
        return self._bind("decode", state, output, *inputs, tables=tables, more=more, spec=spec)

    def first_slots(self, rows: int) -> np.ndarray:
        """Return the first slots of each part, for a program of so many rows."""
        of_all = self.num_rows, self.shapes.parts
        return row_subset.fill(row_subset.first(rows, *of_all), rows, *of_all)

    def _bind(
        self,
        phase: Phase,
        state: DecodeState,
        output: OutputRequest | None,
        *inputs: Any,
        tables: HostTables | None,
        more: tuple[Any, ...] = (),
        spec: DecodeSpec | None = None,
    ) -> Callable[[DecodeState], StepResult]:
        """Return the call of a program with everything but its state."""
        assert (tables is None) == (self.paging is None)
        inputs = (*inputs, None, tables, *more)  # no automaton
        if output is None:
            inputs = self.as_inputs(inputs)
            without_output = self.program(phase, state, *inputs, spec=spec)
            return lambda state: (without_output(state, *inputs), None)
        # In one call, which takes the host as long on a mesh as for one array.
        inputs = self.as_inputs((*inputs, output.known))
        program = self.program(phase, state, *inputs, spec=spec, sizes=output.sizes)
        return lambda state: program(state, *inputs)

    def retire(self, state: DecodeState, finished: np.ndarray) -> DecodeState:
        """End the rows of slots that are finished on the host."""
        return self._run_small("retire", state, self.as_inputs(finished))

    def clear(
        self, state: DecodeState, slots: np.ndarray, tables: HostTables | None = None
    ) -> DecodeState:
        """Empty the caches of slots that hold numbers which are not finite.

        Args:
          tables: as in `bind_prefill`.
        """
        inputs = self.place(slots), self.as_inputs(tables)
        return self.program("clear", state, *inputs)(state, *inputs)

    @contextlib.contextmanager
    def compiling_in_background(self) -> Iterator[None]:
        """Compile programs in another thread while this block binds more of them. Call none in the block.

        XLA compiles without Python's lock, so tracing and compilation overlap.
        """
        if jax.process_count() > 1:  # all processes have to compile in one order
            yield
            return
        self._compiler = Compiler()
        try:
            yield
        finally:
            self._compiler.close()
            self._compiler = None

    def wait_for_programs(self) -> None:
        """Wait until all programs that were bound are compiled. Their first call raises their errors."""
        begin = time.perf_counter()
        self.programs.wait()
        self.timings.compile_s += time.perf_counter() - begin

    def as_inputs(self, rows: Any) -> Any:
        """Return values of the host as inputs of a program. On one device the call places them, more quickly."""
        return rows if self.mesh.size == 1 else self.place(rows)

    def _run_small(self, phase: Phase, state: DecodeState, inputs: Any) -> DecodeState:
        """Run a program without the caches, which it does not need. They would take the host longer."""
        small = state.small
        return state.with_small(self.program(phase, small, inputs)(small, inputs))

    def program(
        self,
        phase: Phase,
        state: DecodeState,
        *inputs: ArrayLike | Any,
        spec: DecodeSpec | None = None,
        sizes: OutputSizes | None = None,
    ) -> Bound:
        """Return the program of a phase for a state and inputs, compiled if it is new.

        Args:
          spec: a variant of the runtime's own; None for that one.
          sizes: of the output beside the state. Then `OutputRequest.known` is the last input. None:
            the program returns the state alone.
        """
        function, spec = _FUNCTIONS[phase], self.spec if spec is None else spec
        chunk: tuple[Any, ...] = ()
        if isinstance(inputs[0], PrefillChunk):
            chunk, images = inputs[0].tokens.shape, inputs[0].images
            chunk = chunk if images is None else (*chunk, f"images {images.two_way}")
        rows = ()  # the slots of a program for some rows
        if phase == "decode" and len(inputs) > 2 and inputs[2] is not None:
            rows = np.shape(inputs[2])
        key = (phase, *chunk, *rows, *state.stop_ids.shape)
        if spec.verify_length is not None:
            key = (*key, f"verifying {spec.verify_length}")
        if spec.guided:
            key = (*key, "guided")
        if sizes is not None:
            key = (*key, *sizes)
        runs_models = phase in ("prefill", "decode", "mixed")
        weights = (self.target_params, self.drafter_params) if runs_models else ()
        if key not in self.used:
            begin = time.perf_counter()
            program = self.programs.get(
                function,
                (*weights, state, *self.place(inputs)),
                donate=len(weights),
                mesh=self.mesh,
                spec=spec if runs_models or phase == "admit" else None,
                sizes=sizes,
                loops=phase == "decode" and not spec.guided,
                compiler=self._compiler,
            )
            self.timings.compile_s += time.perf_counter() - begin
            if isinstance(program, Future):
                return Bound(program, weights)
            self.used[key] = program
        return Bound(self.used[key], weights)


@dataclass(frozen=True)
class Bound:
    """A compiled program with its first arguments, the weights."""

    compiled: Any
    weights: tuple[Any, ...]

    def __call__(self, *inputs: Any) -> Any:
        return self.compiled(*self.weights, *inputs)
