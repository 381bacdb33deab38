"""The sampler: decoding as a function, params and prompts in, arrays out, for programs that train or evaluate.

    target, drafter = jaxspec.load()
    sampler = jaxspec.Sampler(target, drafter, max_new_tokens=64, logprobs=True)
    result = sampler(
        target.params, drafter.params, [[2, 17, 5]], sampler.sampling(1, temperature=1.0), seeds=[0]
    )

A `Sampler` holds what is static: both graphs, the number of new tokens, what sampling may do. Weights,
prompts, sampling values and seeds are arguments: new values compile nothing. Inside a jitted function of
your own the same call traces the same program; stop texts and streaming need the host and are refused there.

Every prompt is read once, up to its last token; then the state is repeated for each of its samples, and
each sample reads the last token and goes its own way. `engine.Engine` is the other way to decode: many
requests of many kinds through few slots.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jax.core import Tracer
from jax.sharding import Mesh
from jax.typing import ArrayLike

from jaxspec import decode, memory
from jaxspec import state as states
from jaxspec.engine import PREFILL_CHUNK, SMALLEST_PREFILL, VALUES, bucket, make_spec
from jaxspec.loading import LoadedModel
from jaxspec.models.xla import COMPILER_OPTIONS
from jaxspec.params import Graph
from jaxspec.ranges import PENALTIES, RANGES
from jaxspec.records import Drafting, Extras, Tree
from jaxspec.sampling import Logprobs, SamplingParams
from jaxspec.shapes import Array, Float, Int, Params, UInt32
from jaxspec.sharding import fetch, mesh_of, place_rows
from jaxspec.state import DecodeState, LogitsFn, PrefillChunk

T = TypeVar("T")
StopAt = Callable[[Sequence[int]], int | None]
"""Given a row's tokens so far: how many of them to keep, which ends the row, or None to go on."""


class FinishReason(enum.IntEnum):
    """Why a row ended."""

    UNFINISHED = 0  # in what a stream yields
    STOP = 1
    LENGTH = 2


class Prompts(struct.PyTreeNode):
    """Prompt ids, padded on the right with anything."""

    tokens: Int[Array, "B T"]
    lengths: Int[Array, " B"]  # 1 to T

    @classmethod
    def padded(cls, prompts: Sequence[Sequence[int]]) -> Prompts:
        """Pad prompts to a common width, a power of two, so that few widths mean few programs.

        Raises:
          ValueError: there is no prompt, or one is empty.
        """
        empty = [i for i, prompt in enumerate(prompts) if not len(prompt)]
        if empty or not len(prompts):
            where = f"prompt {empty[0]} is empty" if empty else "there are no prompts"
            raise ValueError(f"{where}; give at least one token of at least one prompt")
        lengths = np.asarray([len(prompt) for prompt in prompts], np.int32)
        tokens = np.zeros((len(prompts), bucket(int(lengths.max()), SMALLEST_PREFILL)), np.int32)
        for row, prompt in zip(tokens, prompts, strict=True):
            row[: len(prompt)] = prompt
        return cls(jnp.asarray(tokens), jnp.asarray(lengths))

    def take(self, rows: ArrayLike | Sequence[int]) -> Prompts:
        """Return some of the prompts, as wide as before: batches of one width share a program."""
        return jax.tree.map(lambda x: x[jnp.asarray(rows)], self)


class GenerateResult(struct.PyTreeNode):
    """What was generated. R rows: the samples of prompt i are rows i * num_samples and following.

    Everything past a row's length is 0.
    """

    tokens: Int[Array, "R M"]
    lengths: Int[Array, " R"]
    finish_reasons: Int[Array, " R"]  # a FinishReason
    logprobs: Logprobs | None  # of each token, where the sampler keeps them
    num_steps: Int[Array, " R"]  # verify steps
    acceptance_lengths: Int[Array, "R M"]  # tokens that each of them committed, uncut
    depth: int = struct.field(pytree_node=False)  # most drafts that a step can accept

    def accepted_per_depth(self) -> Float[Array, " depth"]:
        """Return the share of all verify steps that accepted at least 1, 2, ... drafts."""
        accepted = self.acceptance_lengths - 1
        steps = jnp.maximum(jnp.sum(self.num_steps), 1)
        depths = jnp.arange(1, self.depth + 1)
        return jnp.sum(accepted[:, :, None] >= depths, axis=(0, 1)) / steps

    def acceptance_length(self) -> Float[Array, ""]:
        """Return the mean tokens a verify step."""
        return jnp.sum(self.acceptance_lengths) / jnp.maximum(jnp.sum(self.num_steps), 1)

    def cut(self, lengths: Int[Array, " R"]) -> GenerateResult:
        """End rows earlier, as by a stop."""
        kept = jnp.arange(self.tokens.shape[1]) < lengths[:, None]

        def mask(x: Array) -> Array:
            return jnp.where(kept.reshape(kept.shape + (1,) * (x.ndim - 2)), x, 0)

        stopped = lengths < self.lengths
        return dataclasses.replace(
            self,
            tokens=mask(self.tokens),
            logprobs=jax.tree.map(mask, self.logprobs),
            lengths=jnp.minimum(self.lengths, lengths),
            finish_reasons=jnp.where(stopped, FinishReason.STOP, self.finish_reasons),
        )


class Sampler:
    """Generates from a target and at most one drafter.

    Args:
      target: a loaded model, or its graph alone; then nothing is suppressed and there are no stop ids but
        those given.
      drafter: likewise; None decodes plainly.
      max_new_tokens: most tokens a row; a call may set less for each row.
      num_samples: samples of each prompt.
      stop_ids: generation ends with (and keeps) the first of these; None for the checkpoint's own.
      logprobs: keep the log-probability of every token, under the target and under what was sampled from.
      num_draft_tokens, tree: as in `engine.Engine`.
      top_logprobs, penalties, num_biases, logits_fn, draft_sampling, verification: as in `DecodeSpec`.

    Raises:
      ConfigError: the drafter does not fit the target.
      ValueError: a number is out of range, or options do not fit each other.
    """

    def __init__(
        self,
        target: LoadedModel | Graph,
        drafter: LoadedModel | Graph | None,
        *,
        max_new_tokens: int,
        num_samples: int = 1,
        stop_ids: Sequence[int] | None = None,
        num_draft_tokens: int | None = None,
        tree: Tree | None = None,
        logprobs: bool = False,
        top_logprobs: int = 0,
        penalties: bool = False,
        num_biases: int = 0,
        logits_fn: LogitsFn | None = None,
        draft_sampling: bool = False,
        verification: Literal["standard", "block"] = "standard",
    ):
        for name, value in (("max_new_tokens", max_new_tokens), ("num_samples", num_samples)):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be 1 or more")
        self.spec = make_spec(
            target,
            drafter,
            Drafting(num_draft_tokens, tree, draft_sampling, verification),
            Extras(penalties, num_biases, logprobs, top_logprobs, logits_fn),
        )
        if stop_ids is None:
            generation = target.generation if isinstance(target, LoadedModel) else None
            stop_ids = generation.eos_token_ids if generation else ()
        self.stop_ids = tuple(stop_ids)
        self.max_new_tokens, self.num_samples = max_new_tokens, num_samples
        jit = functools.partial(jax.jit, compiler_options=COMPILER_OPTIONS)
        self._generate = jit(self._traced, static_argnums=0)
        self._begin = jit(self._prefilled, static_argnums=0)
        self._advance = jit(functools.partial(decode.decode_loop, self.spec), donate_argnums=2)
        self._retire = jax.jit(states.retire, donate_argnums=0)
        self._result = jax.jit(self._result_of)
        self._shardings: dict[str, Any] = {}  # of each model's params, as they came last
        self._kinds: dict[str, list[str]] = {}  # a param of each different sharding among them
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
        for name, value in values.items():
            self._check_sampling(name, value, rows)
        arrays = {name: jnp.asarray(value) for name, value in values.items()}
        if "bias_ids" in arrays:  # fewer than the sampler allows: padded
            pad = [(0, 0), (0, self.spec.extras.num_biases - arrays["bias_ids"].shape[1])]
            arrays["bias_ids"] = jnp.pad(arrays["bias_ids"], pad, constant_values=-1)
            arrays["bias_values"] = jnp.pad(arrays["bias_values"], pad)
        return self.spec.sampling(rows, **arrays)

    def __call__(
        self,
        target_params: Params,
        drafter_params: Params | None,
        prompts: Prompts | ArrayLike | Sequence[Sequence[int]],
        sampling: SamplingParams,
        seeds: ArrayLike | Sequence[int],
        *,
        max_new_tokens: ArrayLike | Sequence[int] | None = None,
        stop_ids: ArrayLike | Sequence[Sequence[int]] | None = None,
        stop_at: StopAt | Sequence[StopAt | None] | None = None,
    ) -> GenerateResult:
        """Generate R = B * num_samples rows.

        Args:
          target_params, drafter_params: what `load` or a training step returns; never changed.
          prompts: padded ids and their lengths; an array whose rows are all prompt; or, outside of jit,
            sequences of ids.
          sampling: of R rows, see `sampling`.
          seeds: R integers. A row's draws depend on its seed and nothing else.
          max_new_tokens: of each row, instead of the sampler's.
          stop_ids: [R, I] instead of the sampler's, padded with -1.
          stop_at: one for all rows or one a row, for stop texts: `tokenizer.stop_at_text` makes one. It
            needs the host, which looks every 16 steps.

        Raises:
          ValueError: params, prompts, sampling or seeds do not fit; every difference in params is named.
        """
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
        mesh = self._check(target_params, drafter_params, given[0])
        with _on(mesh):
            given = _placed(given, mesh)
            return self._generate(mesh, target_params, drafter_params, *given)

    def stream(
        self,
        target_params: Params,
        drafter_params: Params | None,
        prompts: Prompts | ArrayLike | Sequence[Sequence[int]],
        sampling: SamplingParams,
        seeds: ArrayLike | Sequence[int],
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
        if _is_traced((target_params, drafter_params, prompts, sampling, seeds, max_new_tokens)):
            raise ValueError("streaming needs the host; inside jit call the sampler itself")
        if steps_per_return < 1:
            raise ValueError(f"steps_per_return is {steps_per_return}; it must be 1 or more")
        given = self._inputs(prompts, sampling, seeds, max_new_tokens, stop_ids)
        mesh = self._check(target_params, drafter_params, given[0])
        rows = given[2].shape[0]
        stops = [stop_at] * rows if stop_at is None or callable(stop_at) else list(stop_at)
        if len(stops) != rows:
            raise ValueError(
                f"stop_at has {len(stops)} entries; expected one for each of {rows} rows"
            )
        lengths = np.full(rows, self.max_new_tokens, np.int32)  # where the host ended rows
        with _on(mesh):
            given = _placed(given, mesh)
            state = self._begin(mesh, target_params, drafter_params, *given)
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
                state = self._advance(target_params, drafter_params, state, steps)

    def _inputs(
        self, prompts: Any, sampling: SamplingParams, seeds: Any, max_new_tokens: Any, stop_ids: Any
    ) -> tuple[Prompts, SamplingParams, Any, Any, Any]:
        """Bring arguments into the one form that the program takes; shapes are checked, values are not."""
        if not isinstance(prompts, Prompts):
            if hasattr(prompts, "ndim"):
                b, t = _shape("prompts", prompts, 2)
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
        if np.shape(seeds) != (rows,):
            raise ValueError(f"seeds have shape {np.shape(seeds)}; {expected}")
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
        seeds: UInt32[Array, " R"],
        max_new_tokens: Int[Array, " R"],
        stop_ids: Int[Array, "R I"],
    ) -> DecodeState:
        """Read every prompt once, and let each sample choose its first token."""
        b, t = prompts.tokens.shape
        rows = b * self.num_samples
        state = self._init_state(b, t, stop_ids.shape[1], mesh)
        prefill = functools.partial(decode.prefill, self.spec, target_params, drafter_params)
        head = prompts.lengths - 1  # all but the last token
        width = min(t - 1, PREFILL_CHUNK)

        def feed(i: Array | int, state: DecodeState) -> DecodeState:
            begin = i * width
            chunk = PrefillChunk(
                slots=jnp.arange(b),
                tokens=lax.dynamic_slice(padded, (0, begin), (b, width)),
                start=jnp.minimum(head, begin),
                count=jnp.clip(head - begin, 0, width),
                is_last=jnp.zeros(b, bool),
            )
            return prefill(state, chunk)

        if width:
            padded = jnp.pad(prompts.tokens, ((0, 0), (0, width)))
            if t - 1 <= width:
                state = feed(0, state)
            else:
                state = lax.fori_loop(0, -(-jnp.max(head) // width), feed, state)
        index = jnp.repeat(jnp.arange(b), self.num_samples)
        if self.num_samples > 1:
            state = jax.tree.map(lambda x: x[index], state)
        state = dataclasses.replace(
            state,
            sampling=sampling,
            keys=jax.vmap(jax.random.key)(seeds),
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
        return prefill(state, last)

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
        # A multiple of 8, which attention's kernels want.
        return -(-(width + self.max_new_tokens + self.spec.step_tokens) // 8) * 8

    def _check(
        self, target_params: Params, drafter_params: Params | None, prompts: Prompts
    ) -> Mesh | None:
        """Refuse params that do not fit, prompts out of range and states that no memory holds.

        Returns:
          The mesh that the params are on; None for one device, which its own arrays need not name.
        """
        some = dict(target=self._check_params("target", self.spec.target, target_params))
        if (self.spec.drafter is None) != (drafter_params is None):
            has, given = ("no", "were") if self.spec.drafter is None else ("a", "were not")
            raise ValueError(f"drafter_params {given} given, but this sampler has {has} drafter")
        if self.spec.drafter is not None:
            some["drafter"] = self._check_params("drafter", self.spec.drafter, drafter_params)
        mesh = mesh_of(**some)
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
        return mesh if mesh.size > 1 else None

    def _check_params(self, role: str, graph: Graph, params: Any) -> Params:
        """Refuse params that do not fit; return one of each sharding, for what looks at those alone."""
        if not (isinstance(params, dict) and _all_are(jax.Array, params)):
            raise ValueError(
                f"the {role}'s params must be jax.Arrays by name, as `load` returns them; jnp.asarray makes "
                "one of an array of numpy"
            )
        shardings = {name: value.sharding for name, value in params.items()}
        known = self._shardings.get(role)
        if shardings == known:  # takes a third of looking at each, and is so in nearly every call
            return {name: params[name] for name in self._kinds[role]}
        # Later, shapes and dtypes are looked at when they make JAX trace anew.
        if known is None or params.keys() != known.keys():
            graph.check(params)
            known = shardings
        wrong = [
            f"{name}: {s}, before {known[name]}"
            for name, s in shardings.items()
            if not s.is_equivalent_to(known[name], params[name].ndim)
        ]
        if wrong:
            more = f"\n  and {len(wrong) - 5} more" if len(wrong) > 5 else ""
            raise ValueError(
                f"the {role}'s params are sharded otherwise than in the first call; put them back with "
                "jax.device_put, or make another Sampler:\n  " + "\n  ".join(wrong[:5]) + more
            )
        kinds = {sharding: name for name, sharding in shardings.items()}
        self._shardings[role], self._kinds[role] = shardings, list(kinds.values())
        return {name: params[name] for name in self._kinds[role]}

    def _check_sampling(self, name: str, value: Any, rows: int) -> None:
        biases = ("bias_ids", "bias_values")
        known = (*VALUES, *biases)
        if name not in known:
            raise ValueError(f"{name} is not a sampling value; known are {', '.join(known)}")
        if name in PENALTIES and not self.spec.extras.penalties:
            raise ValueError(f"{name} was given, but the sampler was made without penalties=True")
        shape, most = np.shape(value), self.spec.extras.num_biases
        if name in biases:
            if len(shape) != 2 or shape[0] != rows or shape[1] > most:
                raise ValueError(
                    f"{name} has shape {shape}; expected [{rows}, at most {most}], the sampler's num_biases"
                )
        elif shape not in ((), (1,), (rows,)):
            raise ValueError(f"{name} has shape {shape}; expected one value, or {rows}")
        if _is_traced(value):
            return
        numbers = np.asarray(value, np.float64)
        if name == "bias_ids":
            size = self.spec.target.config.vocab_size
            words, fits = "-1 or a token id", (numbers >= -1) & (numbers < size)
        else:
            words, allows = RANGES["bias" if name == "bias_values" else name]
            fits = allows(numbers)
        if not np.all(fits):
            raise ValueError(f"{name} is {numbers[~fits].flat[0]:g}; it must be {words}")


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


def _all_are(kind: type, tree: Any) -> bool:
    return all(issubclass(found, kind) for found in _kinds(tree))


def _kinds(tree: Any) -> set[type]:
    """Return the types of leaves: few, and to ask each array for its own takes most of a millisecond."""
    return set(map(type, jax.tree.leaves(tree)))


def _shape(name: str, value: Any, ndim: int) -> tuple[int, ...]:
    if np.ndim(value) != ndim:
        raise ValueError(f"{name} has shape {np.shape(value)}; expected {ndim} axes")
    return np.shape(value)
