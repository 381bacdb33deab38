"""The sampler: decoding as a function, params and prompts in, arrays out, for programs that train or evaluate.

    pair = jaxspec.load()
    sampler = jaxspec.Sampler(pair, max_new_tokens=64)
    result = sampler(pair.target.params, pair.drafter.params, [[2, 17, 5]], Sampling(temperature=1.0), seeds=0)

A `Sampler` holds what is static: both graphs, the number of new tokens, what sampling may do. Weights,
prompts, sampling values and seeds are arguments: new values compile nothing. Inside a jitted function of
your own the same call traces the same program. Stop texts and streaming need the host and are refused there.

Every prompt is read once, up to its last token; then the state is repeated for each of its samples, and
each sample reads the last token and goes its own way. `engine.Engine` is the other way to decode: many
requests of many kinds through few slots.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh
from jax.typing import ArrayLike

from jaxspec import decode, memory
from jaxspec import state as states
from jaxspec.loading import LoadedModel
from jaxspec.params import Graph, KnownParams, accept_params
from jaxspec.records import Drafting, Extras, FieldError, Sampling
from jaxspec.rows import FinishReason, GenerateResult, Prompts, same_for_all, sampling_values
from jaxspec.runtime import cache_length_for, jit, make_spec, read_prompts
from jaxspec.sampling import SamplingParams
from jaxspec.shapes import Array, Int, Params, UInt32
from jaxspec.sharding import fetch, mesh_of, on_decoding_mesh, place_rows
from jaxspec.state import DecodeState, PrefillChunk

T = TypeVar("T")
Models = Iterable[Any]
"""A target and its drafter or None: what a `Pair` unpacks to."""

StopAt = Callable[[Sequence[int]], int | None]
"""Given a row's tokens so far: how many of them to keep, which ends the row, or None to go on."""


class Sampler:
    """Generates from a target and at most one drafter.

    Args:
      target: a pair, as `load` returns it. Or a loaded model, or its graph alone; a graph suppresses nothing
        and has no stop ids but those given.
      drafter: likewise; None decodes plainly. A pair brings its own.
      max_new_tokens: most tokens a row; a call may set less for each row.
      num_samples: samples of each prompt.
      stop_ids: generation ends with (and keeps) the first of these; None for the checkpoint's own.
      drafting: how to draft and to judge drafts.
      extras: what rows may ask for beyond the least, such as penalties and log-probabilities.
      dtype: "float32" or "bfloat16" to decode in, whatever the dtype of the params: each call casts them
        first, and holds the copy while it runs. None: params must have the dtype of the graphs.

    Raises:
      ConfigError: the drafter does not fit the target.
      FieldError: a number is out of range, or options do not fit each other.
    """

    def __init__(
        self,
        target: Models | LoadedModel | Graph,
        drafter: LoadedModel | Graph | None = None,
        *,
        max_new_tokens: int = 64,
        num_samples: int = 1,
        stop_ids: Sequence[int] | None = None,
        drafting: Drafting = Drafting(),
        extras: Extras = Extras(),
        dtype: str | None = None,
    ):
        for name, value in (("max_new_tokens", max_new_tokens), ("num_samples", num_samples)):
            if value < 1:
                raise FieldError(name, f"is {value}; it must be 1 or more")
        if not isinstance(target, LoadedModel | Graph):
            if drafter is not None:
                raise ValueError("the pair has its own drafter; give pair.target to use another")
            target, drafter = cast(tuple[LoadedModel, LoadedModel | None], tuple(target))
        self.spec = make_spec(target, drafter, drafting, extras).of_dtype(dtype)
        self.dtype = dtype
        if stop_ids is None:
            generation = target.generation if isinstance(target, LoadedModel) else None
            stop_ids = generation.eos_token_ids if generation else ()
        self.stop_ids = tuple(stop_ids)
        self.max_new_tokens, self.num_samples = max_new_tokens, num_samples
        self._generate = jit(self._traced, static_argnums=0)
        self._begin = jit(self._prefilled, static_argnums=0)
        self._advance = jit(functools.partial(decode.decode_loop, self.spec), donate_argnums=2)
        self._retire = jax.jit(states.retire, donate_argnums=0)
        self._result = jax.jit(self._result_of)
        self._known = KnownParams()
        self._fitting: set[Any] = set()  # shapes of prompts for which there is memory

    @property
    def num_compilations(self) -> int:
        """How many programs calls have compiled: one for every number and width of prompts."""
        return self._generate._cache_size()  # type: ignore[attr-defined]

    def sampling(self, rows: int, **values: ArrayLike | Sequence[Any]) -> SamplingParams:
        """Return sampling parameters for `rows` rows: one value for all of them, or one a row.

        Args:
          values: temperature (0: greedy), top_k (0: off), top_p, min_p; with penalties, repetition_penalty,
            presence_penalty and frequency_penalty; with num_biases, bias_ids and bias_values, [rows, N]
            each, padded with id -1. A bias of -inf bans.

        Raises:
          ValueError: a value is out of range, has another number of rows, or is of something that this
            sampler was made without.
        """
        return sampling_values(self.spec, rows, values)

    def __call__(
        self,
        target_params: Any,
        drafter_params: Any,
        prompts: Prompts | ArrayLike | Sequence[Sequence[int]],
        sampling: Sampling | SamplingParams | None = None,
        seeds: ArrayLike | Sequence[int] = 0,
        *,
        max_new_tokens: ArrayLike | Sequence[int] | None = None,
        stop_ids: ArrayLike | Sequence[Sequence[int]] | None = None,
        stop_at: StopAt | Sequence[StopAt | None] | None = None,
    ) -> GenerateResult:
        """Generate R = B * num_samples rows.

        Args:
          target_params, drafter_params: what `load` or a training step returns, as `trees.flat_params` takes
            it; never changed.
          prompts: padded ids and their lengths; an array whose rows are all prompt; or, outside of jit,
            sequences of ids.
          sampling: what all rows ask; or values of R rows, see `sampling`. None is greedy.
          seeds: one integer, or R of them. A row's draws depend on nothing else but, with one integer, the
            row's number: row i has the key `fold_in(key(seed), i)`, as request i of an engine has.
          max_new_tokens: of each row, instead of the sampler's.
          stop_ids: [R, I] instead of the sampler's, padded with -1.
          stop_at: one for all rows or one a row, for stop texts: `tokenizer.stop_at_text` makes one. It
            needs the host, which looks every 16 steps.

        Raises:
          ValueError: params, prompts, sampling or seeds do not fit; every difference in params is named.
        """
        target_params, drafter_params = self._accept(target_params, drafter_params)
        if _is_traced((target_params, drafter_params, prompts, sampling, seeds, max_new_tokens)):
            if stop_at is not None:
                raise ValueError(
                    "stop_at needs the host; inside jit use stop_ids, or cut the result"
                )
            given = self._inputs(prompts, sampling, seeds, max_new_tokens, stop_ids)
            given = jax.tree.map(jnp.asarray, given)
            return self._traced(None, target_params, drafter_params, *given)
        if stop_at is not None:
            *_, result = self.stream(
                target_params,
                drafter_params,
                prompts,
                sampling,
                seeds,
                max_new_tokens=max_new_tokens,
                stop_ids=stop_ids,
                stop_at=stop_at,
            )
            return result
        given = self._inputs(prompts, sampling, seeds, max_new_tokens, stop_ids)
        mesh, *weights = self._check(target_params, drafter_params, given[0])
        with _on(mesh):
            given = _placed(given, mesh)
            return self._generate(mesh, *weights, *given)

    def stream(
        self,
        target_params: Any,
        drafter_params: Any,
        prompts: Prompts | ArrayLike | Sequence[Sequence[int]],
        sampling: Sampling | SamplingParams | None = None,
        seeds: ArrayLike | Sequence[int] = 0,
        *,
        max_new_tokens: ArrayLike | Sequence[int] | None = None,
        stop_ids: ArrayLike | Sequence[Sequence[int]] | None = None,
        stop_at: StopAt | Sequence[StopAt | None] | None = None,
        steps_per_return: int = 16,
    ) -> Iterator[GenerateResult]:
        """Yield all that was generated so far, every `steps_per_return` verify steps; the last is whole.

        Raises:
          ValueError: as in a call; or this is inside of jit.
        """
        target_params, drafter_params = self._accept(target_params, drafter_params)
        if _is_traced((target_params, drafter_params, prompts, sampling, seeds, max_new_tokens)):
            raise ValueError("streaming needs the host; inside jit call the sampler itself")
        if steps_per_return < 1:
            raise ValueError(f"steps_per_return is {steps_per_return}; it must be 1 or more")
        given = self._inputs(prompts, sampling, seeds, max_new_tokens, stop_ids)
        mesh, *weights = self._check(target_params, drafter_params, given[0])
        rows = given[2].shape[0]
        stops = [stop_at] * rows if stop_at is None or callable(stop_at) else list(stop_at)
        if len(stops) != rows:
            raise ValueError(
                f"stop_at has {len(stops)} entries; expected one for each of {rows} rows"
            )
        lengths = np.full(rows, self.max_new_tokens, np.int32)  # where the host ended rows
        with _on(mesh):
            given = _placed(given, mesh)
            state = self._begin(mesh, *weights, *given)
        steps = _placed(np.int32(steps_per_return), mesh)
        while True:
            result = self._result(state)
            active, tokens, counts = fetch((state.active, result.tokens, result.lengths))
            if any(stops):
                for row, stop in enumerate(stops):
                    ended = lengths[row] < self.max_new_tokens
                    keep = stop(tokens[row, : counts[row]].tolist()) if stop and not ended else None
                    lengths[row] = lengths[row] if keep is None else keep
                state = self._retire(state, _placed(lengths < counts, mesh))
                result = result.cut(_placed(jnp.asarray(lengths), mesh))
            yield result
            if not (active & (lengths >= counts)).any():
                return
            with _on(mesh):
                state = self._advance(*weights, state, steps)

    def _accept(self, target_params: Any, drafter_params: Any) -> tuple[Any, Any]:
        """Return weights as programs take them: flat, and in the sampler's dtype if it has one."""
        accept = functools.partial(accept_params, cast=self.dtype is not None)
        return accept(self.spec.target, target_params), accept(self.spec.drafter, drafter_params)

    def _inputs(
        self, prompts: Any, sampling: Any, seeds: Any, max_new_tokens: Any, stop_ids: Any
    ) -> tuple[Prompts, SamplingParams, Any, Any, Any]:
        """Bring arguments into the one form that the program takes; shapes are checked, values are not."""
        if not isinstance(prompts, Prompts):
            if hasattr(prompts, "ndim"):
                b, t = _shape("prompts", prompts, 2)
                if not np.issubdtype(prompts.dtype, np.integer):
                    raise ValueError(f"prompts are {prompts.dtype}; expected whole numbers")
                prompts = Prompts(jnp.asarray(prompts), jnp.full(b, t, jnp.int32))
            else:
                prompts = Prompts.padded(prompts)
        b, t = _shape("prompts.tokens", prompts.tokens, 2)
        rows = b * self.num_samples
        expected = f"expected {rows}: {b} prompts, {self.num_samples} of num_samples"
        if _shape("prompts.lengths", prompts.lengths, 1) != (b,):
            raise ValueError(
                f"prompts.lengths has {len(prompts.lengths)} rows, its tokens have {b}"
            )
        most = self.spec.target.config.max_positions
        if t + self.max_new_tokens > most:
            raise ValueError(
                f"prompts of width {t} + max_new_tokens ({self.max_new_tokens}) need "
                f"{t + self.max_new_tokens} positions; the model has {most}"
            )
        if np.shape(seeds) not in ((), (rows,)):
            raise ValueError(f"seeds have shape {np.shape(seeds)}; {expected}, or one integer")
        if sampling is None or isinstance(sampling, Sampling):
            sampling = same_for_all(self.spec, rows, sampling or Sampling())
        if sampling.temperature.shape != (rows,):
            raise ValueError(f"sampling has {sampling.temperature.shape[0]} rows; {expected}")
        adjusts, biases = (
            sampling.adjustments,
            bool(self.spec.extras.penalties or self.spec.extras.num_biases),
        )
        if (adjusts is not None) != biases or (
            adjusts is not None and adjusts.bias_ids.shape != (rows, self.spec.extras.num_biases)
        ):
            raise ValueError(
                "sampling was made for another sampler: penalties or num_biases differ; make it with "
                "this sampler's `sampling`"
            )
        limits = self.max_new_tokens if max_new_tokens is None else max_new_tokens
        stops = self.stop_ids or (-1,) if stop_ids is None else stop_ids
        given = (seeds, limits, stops)
        xnp: Any = (
            jnp if _is_traced(given) else np
        )  # numpy where it can: each jax call costs 0.1 ms
        limits = xnp.clip(xnp.asarray(limits, np.int32), 1, self.max_new_tokens)
        stops = xnp.asarray(stops, np.int32)
        return (
            prompts,
            sampling,
            xnp.asarray(seeds).astype(np.uint32),
            xnp.broadcast_to(limits, (rows,)),
            xnp.broadcast_to(stops, (rows, stops.shape[-1])),
        )

    def _prefilled(
        self,
        mesh: Mesh | None,
        target_params: Params,
        drafter_params: Params | None,
        prompts: Prompts,
        sampling: SamplingParams,
        seeds: UInt32[Array, " #R"] | UInt32[Array, ""],
        max_new_tokens: Int[Array, " R"],
        stop_ids: Int[Array, "R I"],
    ) -> DecodeState:
        """Read every prompt once, and let each sample choose its first token."""
        b, t = prompts.tokens.shape
        rows = b * self.num_samples
        state = self._init_state(b, t, stop_ids.shape[1], mesh)
        models = (self.spec, target_params, drafter_params)
        head = prompts.lengths - 1  # all but the last token
        state = read_prompts(*models, state, prompts.tokens[:, : t - 1], head)
        index = jnp.repeat(jnp.arange(b), self.num_samples)
        if self.num_samples > 1:
            state = jax.tree.map(lambda x: x[index], state)
        state = dataclasses.replace(
            state,
            sampling=sampling,
            keys=_keys(seeds, rows),
            max_new_tokens=max_new_tokens,
            stop_ids=stop_ids,
        )
        last = PrefillChunk(
            slots=jnp.arange(rows),
            tokens=jnp.take_along_axis(prompts.tokens, head[:, None], axis=1)[index],
            start=head[index],
            count=jnp.ones(rows, jnp.int32),
            is_last=jnp.ones(rows, bool),
        )
        return decode.prefill(*models, state, last)

    def _traced(
        self, mesh: Mesh | None, target_params: Params, drafter_params: Params | None, *given: Any
    ) -> GenerateResult:
        state = self._prefilled(mesh, target_params, drafter_params, *given)
        steps = jnp.int32(self.max_new_tokens)
        state = decode.decode_loop(self.spec, target_params, drafter_params, state, steps)
        return self._result_of(state)

    def _result_of(self, state: DecodeState) -> GenerateResult:
        m = self.max_new_tokens
        reasons = jnp.where(state.stopped, FinishReason.STOP, FinishReason.LENGTH)
        steps = jnp.arange(m) < state.num_steps[:, None]
        result = GenerateResult(
            tokens=state.tokens[:, :m],
            lengths=state.num_tokens,
            finish_reasons=jnp.where(state.active, FinishReason.UNFINISHED, reasons),
            logprobs=jax.tree.map(lambda x: x[:, :m], state.logprobs),
            num_steps=state.num_steps,
            acceptance_lengths=jnp.where(steps, state.acceptance_lengths[:, :m], 0),
            depth=self.spec.depth,
        )
        return result.cut(state.num_tokens)

    def _init_state(
        self, batch: int, width: int, num_stop_ids: int, mesh: Mesh | None
    ) -> DecodeState:
        return states.init_state(
            self.spec,
            batch,
            cache_length=self._cache_length(width),
            num_stop_ids=num_stop_ids,
            cache_dtype=jnp.dtype(self.spec.target.dtype),
            mesh=mesh,
        )

    def _cache_length(self, width: int) -> int:
        # Attention's kernels want a multiple of 8.
        return cache_length_for(self.spec, width + self.max_new_tokens, multiple=8)

    def _check(
        self, target_params: Params, drafter_params: Params | None, prompts: Prompts
    ) -> tuple[Mesh | None, Params, Params | None]:
        """Refuse params that do not fit, prompts out of range and states that no memory holds.

        Returns:
          The mesh that the params are on, None for one device, which its own arrays need not name; and the
          params, on that mesh.
        """
        some = dict(target=self._known.check("target", self.spec.target, target_params))
        if (self.spec.drafter is None) != (drafter_params is None):
            has, given = ("no", "were") if self.spec.drafter is None else ("a", "were not")
            raise ValueError(f"drafter_params {given} given, but this sampler has {has} drafter")
        if self.spec.drafter is not None:
            some["drafter"] = self._known.check("drafter", self.spec.drafter, drafter_params)
        mesh = mesh_of(**some)
        if any(on_decoding_mesh(params) is not params for params in some.values()):
            target_params = on_decoding_mesh(target_params)
            drafter_params = None if drafter_params is None else on_decoding_mesh(drafter_params)
        rows, data = len(prompts.tokens), mesh.shape["data"]
        if rows % data:
            raise ValueError(f"{rows} prompts do not divide by the mesh's data axis of {data}")
        tokens, lengths = np.asarray(prompts.tokens), np.asarray(prompts.lengths)
        t = tokens.shape[1]
        if lengths.min() < 1 or lengths.max() > t:
            raise ValueError(
                f"prompts.lengths must lie between 1 and {t}, the width of prompts.tokens"
            )
        size = self.spec.target.config.vocab_size
        bad = ((tokens < 0) | (tokens >= size)) & (np.arange(t) < lengths[:, None])
        if bad.any():
            raise ValueError(
                f"prompt ids {tokens[bad][:5].tolist()} are outside the vocabulary; expected 0 to {size - 1}"
            )
        if (shape := (len(tokens), t, mesh)) not in self._fitting:
            positions = self._cache_length(t)
            memory.check_fits(self.spec, rows * self.num_samples, positions, mesh)
            self._fitting.add(shape)
        return (mesh if mesh.size > 1 else None), target_params, drafter_params


def _keys(seeds: Array, rows: int) -> Array:
    """Return the key of each row: of its own seed, or of its number under one seed for all."""
    if seeds.ndim:
        return jax.vmap(jax.random.key)(seeds)
    return jax.vmap(functools.partial(jax.random.fold_in, jax.random.key(seeds)))(jnp.arange(rows))


def _on(mesh: Mesh | None) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


def _placed(tree: T, mesh: Mesh | None) -> T:
    """Put what the host knows about rows onto the mesh.

    For one device nothing is done: what JAX places by itself it calls uncommitted, and so are results then.
    A result that were committed would make the caller's own programs compile twice, the second time for
    weights that an update had made committed.
    """
    return tree if mesh is None else place_rows(tree, mesh)


def _is_traced(tree: Any) -> bool:
    return any(issubclass(kind, Tracer) for kind in _kinds(tree))


def _kinds(tree: Any) -> set[type]:
    """Return the types of leaves: few, and to ask each array for its own takes most of a millisecond."""
    return set(map(type, jax.tree.leaves(tree)))


def _shape(name: str, value: Any, ndim: int) -> tuple[int, ...]:
    if np.ndim(value) != ndim:
        raise ValueError(f"{name} has shape {np.shape(value)}; expected {ndim} axes")
    return np.shape(value)
