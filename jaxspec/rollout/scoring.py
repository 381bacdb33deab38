"""Log-probabilities of tokens, with gradients, for training on a sampler's rollouts.

    result = sampler(params, drafter_params, prompts, sampling, seeds)
    logprobs = jaxspec.score(sampler, params, (prompts, result), sampling)
    ratio = jnp.exp(logprobs.sampled - result.logprobs.sampled)    # 1, until params change

Read `score`, then `Sequences`. One pass of the target computes the hidden states of all texts,
without caches. Logits are computed and adjusted a chunk at a time, as the sampler adjusts them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jax.core import Tracer
from jax.typing import ArrayLike

from jaxspec._deprecated import renamed_keywords
from jaxspec.models.target import Placement, Target
from jaxspec.options import FieldError, ProgramFeatures, Sampling
from jaxspec.rollout.arguments import is_traced
from jaxspec.rollout.batch import (
    GenerateResult,
    Prompts,
    check_ids,
    has_adjustments_of,
    same_for_all,
)
from jaxspec.rollout.sampler import Models, Sampler
from jaxspec.runtime.runtime import make_spec
from jaxspec.sampling import Logprobs, SamplingParams, TokenCounts, adjust, logprobs_of
from jaxspec.shapes import Array, Bool, Float, Int, Params
from jaxspec.state import DecodeSpec
from jaxspec.weights.loading import LoadedModel
from jaxspec.weights.model_def import ModelDef
from jaxspec.weights.trees import accept_params

CHUNK = 256
"""Tokens whose logits are in memory at once: 0.27 GB in float32, for a vocabulary of 262,144."""


class Sequences(struct.PyTreeNode):
    """Texts of prompt and generated tokens, one in each of R rows, or several. The methods make them.

    Attributes:
      tokens: padded with anything.
      positions: of each token in its own text.
      texts: the text of each token; -1 is padding. The tokens of a text are adjacent.
      generated: whether a token was generated. Others belong to a prompt or a tool's answer.
      places: the column of each scored token; T or more is none. None scores every column, and M is
        T.
      packed: whether a row may have several texts.
    """

    tokens: Int[Array, "R T"]
    positions: Int[Array, "R T"]
    texts: Int[Array, "R T"]
    generated: Bool[Array, "R T"]
    places: Int[Array, "R M"] | None = None
    packed: bool = struct.field(pytree_node=False, default=False)

    @classmethod
    def padded(
        cls,
        tokens: ArrayLike | Sequence[Sequence[int]],
        prompt_lengths: ArrayLike | Sequence[int],
        lengths: ArrayLike | Sequence[int],
    ) -> Sequences:
        """Return texts that begin in the first column of their rows. Scores have the shape of `tokens`.

        Args:
          tokens: [R, T] ids.
          prompt_lengths: [R]; what follows was generated.
          lengths: [R], prompt included; what follows is padding.

        Raises:
          ValueError: shapes do not fit together, or a number is not whole.
        """
        tokens = _whole("tokens", tokens, 2)
        rows, width = tokens.shape
        ends = [
            _whole(name, value, 1)
            for name, value in (("prompt_lengths", prompt_lengths), ("lengths", lengths))
        ]
        for name, value in zip(("prompt_lengths", "lengths"), ends, strict=True):
            if value.shape != (rows,):
                raise ValueError(f"{name} has shape {value.shape}; tokens has {rows} rows")
        if not is_traced((prompt_lengths, lengths)):
            first, last = np.asarray(prompt_lengths), np.asarray(lengths)
            wrong = np.flatnonzero((first < 0) | (first > last) | (last > width))
            if wrong.size:
                row = wrong[0]
                raise ValueError(
                    f"row {row} has prompt_lengths {first[row]} and lengths {last[row]}; expected them to be "
                    f"0 or more, in this order, and at most {width}"
                )
        place = jnp.broadcast_to(jnp.arange(width), (rows, width))
        real = place < ends[1][:, None]
        texts = jnp.where(real, jnp.arange(rows)[:, None], -1)
        return cls(tokens, place, texts, real & (place >= ends[0][:, None]))

    @classmethod
    def of(
        cls, prompts: Prompts | ArrayLike | Sequence[Sequence[int]], result: GenerateResult
    ) -> Sequences:
        """Return prompts and the tokens that a sampler generated. Scores have the shape of `result.tokens`.

        Raises:
          ValueError: the rows of the result are not samples of so many prompts.
        """
        if not isinstance(prompts, Prompts):
            if hasattr(prompts, "ndim"):
                tokens = _whole("prompts", prompts, 2)
                prompts = Prompts(tokens, jnp.full(tokens.shape[0], tokens.shape[1], jnp.int32))
            else:
                prompts = Prompts.padded(cast(Sequence[Sequence[int]], prompts))
        if prompts.images is not None:
            raise FieldError("prompts", "have images, and only texts are scored")
        b, t = prompts.tokens.shape
        rows, m = result.tokens.shape
        if not b or rows % b:
            raise ValueError(f"the result has {rows} rows; that is no multiple of {b} prompts")
        begin = jnp.repeat(prompts.lengths, rows // b)[:, None]
        place = jnp.arange(t + m)
        prompt = jnp.pad(jnp.repeat(prompts.tokens, rows // b, axis=0), ((0, 0), (0, m)))
        behind = jnp.take_along_axis(result.tokens, jnp.clip(place - begin, 0, m - 1), axis=1)
        sequences = cls.padded(
            jnp.where(place < begin, prompt, behind), begin[:, 0], begin[:, 0] + result.lengths
        )
        index = jnp.arange(m)
        places = jnp.where(index < result.lengths[:, None], begin + index, t + m)
        generated = sequences.generated
        if prompts.past is not None:  # a rollout that goes on: part of its prompt was generated too
            earlier = jnp.repeat(prompts.past.generated, rows // b, axis=0)
            generated |= jnp.pad(earlier, ((0, 0), (0, m))) & (place < begin)
        return sequences.replace(places=places, generated=generated)

    @classmethod
    def pack(
        cls,
        texts: Sequence[tuple[Sequence[int], Sequence[int]]],
        width: int,
        *,
        rows: int | None = None,
    ) -> Sequences:
        """Return texts side by side in rows, each in the first row with enough free columns.

        Scores have the shape of the rows: those of text i are `scores[sequences.texts == i]`, with
        0 for its prompt.

        Args:
          texts: ids of the prompt and of the generated tokens, for each.
          width: of the rows.
          rows: number of rows, so that batches share a program; None for as many as are needed.

        Raises:
          ValueError: a text is wider than a row, has no prompt, or no row has enough free columns.
        """
        free: list[int] = []  # columns of each row
        starts: list[tuple[int, int]] = []
        for i, (prompt, new) in enumerate(texts):
            check_ids(f"text {i}", [*prompt, *new])
            size = len(prompt) + len(new)
            if not len(prompt) or size > width:
                raise ValueError(
                    f"text {i} has {len(prompt)} prompt tokens and {len(new)} more; expected at least 1, and "
                    f"at most {width} together: the width"
                )
            row = next((r for r, left in enumerate(free) if left >= size), len(free))
            if row == len(free):
                free.append(width)
            starts.append((row, width - free[row]))
            free[row] -= size
        if rows is not None and len(free) > rows:
            raise ValueError(f"the texts need {len(free)} rows of width {width}; rows is {rows}")
        shape = (len(free) if rows is None else rows, width)
        tokens, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        owner, generated = np.full(shape, -1, np.int32), np.zeros(shape, bool)
        for i, ((prompt, new), (row, begin)) in enumerate(zip(texts, starts, strict=True)):
            size = len(prompt) + len(new)
            at = (row, slice(begin, begin + size))
            tokens[at], positions[at], owner[at] = [*prompt, *new], np.arange(size), i
            generated[at] = np.arange(size) >= len(prompt)
        return cls(*jax.device_put((tokens, positions, owner, generated)), packed=True)


@renamed_keywords(extras="program_features")
def score(
    model: Sampler | Models | LoadedModel | ModelDef,
    params: Any,
    sequences: Sequences | tuple[Any, GenerateResult],
    sampling: Sampling | SamplingParams | None = None,
    *,
    program_features: ProgramFeatures | None = None,
    dtype: str | None = None,
    remat: bool = True,
    chunk: int | None = CHUNK,
) -> Logprobs:
    """Return the log-probability of each generated token under the target, and under the sampled distribution.

    Both have gradients in `params`. Filters count as constant masks. The function runs inside a
    jitted function of yours too, and compiles once for each shape.

    Args:
      model: the sampler that generated the tokens, for its suppressed tokens and features. Or a
        pair, a loaded target, or a model definition, which suppresses nothing.
      params: the target's, as `trees.flat_params` takes them.
      sequences: the texts; or the prompts and the result of a sampler's call.
      sampling: of all texts; or parameters of one row for each text, as `Sampler.sampling` returns
        them. None is greedy.
      program_features: of a model that is not a sampler, such as a `logits_fn`; None for what
        `sampling` needs.
      dtype: "float32" or "bfloat16" to compute in. Params are cast to it, and gradients come in the
        params' own. None is the sampler's `dtype`; without one, params must have the model's dtype.
      remat: whether the backward pass computes each layer again, for a third more work and the
        memory of one layer.
      chunk: tokens whose logits are in memory at once; None for all.

    Returns:
      `target` and `sampled`, in the shape that the method of `Sequences` states, 0 where nothing is
      scored. With `top_logprobs` in `program_features`, `top_ids` and `top_values` have the
      target's best tokens at each position.
      `sampled` is 0 for greedy texts, as in a sampler's result. A token that the filters exclude
      has -inf. In float32 they differ from those of the sampler by up to 3e-5 for a trained model,
      by rounding in the logits.

    Raises:
      ValueError: params, sequences or sampling do not fit each other.
    """
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk is {chunk}; it must be 1 or more, or None for all tokens at once")
    spec = _spec_of(model, sampling, program_features)
    if not isinstance(sequences, Sequences):
        sequences = Sequences.of(*sequences)
    rows, width = sequences.tokens.shape
    if width > (limit := spec.target.config.max_positions) and not sequences.packed:
        raise ValueError(f"sequences are {width} tokens wide; the model has {limit} positions")
    if sampling is None or isinstance(sampling, Sampling):
        sampling = same_for_all(spec, 1, sampling or Sampling())
    elif not sequences.packed and sampling.temperature.shape != (rows,):
        raise ValueError(
            f"sampling has {sampling.temperature.shape[0]} rows; expected one for each of {rows} texts"
        )
    _check_values(spec, sequences, sampling)
    if dtype is None and isinstance(model, Sampler):
        dtype = model.dtype
    spec = spec.of_dtype(dtype)
    params = accept_params(spec.target, params, cast=dtype is not None)
    return _score(spec, remat, chunk, params, sequences, sampling)


def _spec_of(model: Any, sampling: Any, program_features: ProgramFeatures | None) -> DecodeSpec:
    """Return the sampler's own spec, or one for these sampling values."""
    if isinstance(model, Sampler):
        if program_features is not None:
            raise ValueError("a sampler has its own program_features; leave program_features out")
        program_features = dataclasses.replace(model.spec.program_features, top_logprobs=0)
        return dataclasses.replace(model.spec, program_features=program_features)
    if not isinstance(model, LoadedModel | ModelDef):
        model, _ = cast(tuple[LoadedModel, Any], tuple(model))
    if program_features is None:
        program_features = ProgramFeatures()
        if isinstance(sampling, Sampling):
            program_features = ProgramFeatures.wanted_by([sampling])
    return make_spec(model, None, program_features=program_features)


def _check_values(spec: DecodeSpec, sequences: Sequences, sampling: SamplingParams) -> None:
    """Refuse ids and texts out of range, if their values are known, and sampling for other features."""
    if not has_adjustments_of(spec, sampling):
        raise ValueError(
            "sampling was made for other program_features: penalties or num_biases differ; make it with the "
            "`sampling` of the sampler that is scored"
        )
    if any(isinstance(x, Tracer) for x in jax.tree.leaves(sequences)):
        return
    tokens, texts = np.asarray(sequences.tokens), np.asarray(sequences.texts)
    size = spec.target.config.vocab_size
    bad = ((tokens < 0) | (tokens >= size)) & (texts >= 0)
    if bad.any():
        raise ValueError(
            f"ids {tokens[bad][:5].tolist()} are outside the vocabulary; expected 0 to {size - 1}"
        )
    first = np.asarray(sequences.generated) & (np.asarray(sequences.positions) == 0)
    if first.any():
        raise ValueError(
            f"text {texts[first][0]} has no prompt: nothing comes before its first token; give one token "
            "or more"
        )
    count = sampling.temperature.shape[0]
    if count > 1 and texts.max() >= count:
        raise ValueError(
            f"sampling has {count} rows; expected one for each of {texts.max() + 1} texts"
        )


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _score(
    spec: DecodeSpec,
    remat: bool,
    chunk: int | None,
    params: Params,
    sequences: Sequences,
    sampling: SamplingParams,
) -> Logprobs:
    target: Target = spec.target.bind(params)
    rows, width = sequences.tokens.shape
    # A row's padding may hold anything: an id that the embedding lacks would give NaN.
    tokens = jnp.where(sequences.texts >= 0, sequences.tokens, 0)
    sequences = sequences.replace(tokens=tokens)
    hidden = _hidden_states(target, sequences, remat)
    if (places := sequences.places) is None:
        places = jnp.broadcast_to(jnp.arange(width), (rows, width))
        places = jnp.where(sequences.generated, places, width)
    count = places.shape[1]
    each = count if chunk is None else min(count, max(1, chunk // rows))  # places of a row
    pieces = -(-count // each)
    places = jnp.pad(places, ((0, 0), (0, pieces * each - count)), constant_values=width)

    def run(places: Int[Array, "R C"]) -> Logprobs:
        return _score_places(spec, target, hidden, sequences, sampling, places)

    if pieces == 1:
        return run(places)
    # The backward pass makes the logits of a chunk again, so that no two chunks are held at once.
    each_piece = places.reshape(rows, pieces, each).swapaxes(0, 1)
    done = lax.map(jax.checkpoint(run), each_piece)
    return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(rows, -1, *x.shape[3:])[:, :count], done)


def _hidden_states(target: Target, sequences: Sequences, remat: bool) -> Float[Array, "R T D"]:
    """Return the hidden states of whole rows, after the final norm. No text attends to another."""
    rows, width = sequences.tokens.shape
    texts = sequences.texts
    where = Placement(
        positions=sequences.positions,
        start=jnp.zeros(rows, jnp.int32),
        count=jnp.full(rows, width, jnp.int32),
        ancestors=texts[:, :, None] == texts[:, None, :] if sequences.packed else None,
        remat=remat,
    )
    x = target.embed(sequences.tokens)
    return target.run_layers(sequences.tokens, x, where, None, ()).hidden


def _score_places(
    spec: DecodeSpec,
    target: Target,
    hidden: Float[Array, "R T D"],
    sequences: Sequences,
    sampling: SamplingParams,
    places: Int[Array, "R C"],
) -> Logprobs:
    """Score the tokens in some columns of each row. Each becomes a row of its own, with its text's sampling."""
    width = sequences.tokens.shape[1]
    known = places < width
    at = jnp.minimum(places, width - 1)

    def of(x: Array, at: Array = at) -> Array:
        return jnp.take_along_axis(x, at, axis=1).reshape(-1)

    before = jnp.maximum(at - 1, 0)  # its logits choose the token
    logits = target.logits(jnp.take_along_axis(hidden, before[:, :, None], axis=1))
    logits = logits.reshape(-1, 1, logits.shape[-1])
    tokens, text = of(sequences.tokens), of(sequences.texts)
    if sampling.temperature.shape[0] > 1:
        sampling = jax.tree.map(lambda x: x[jnp.maximum(text, 0)], sampling)
    else:
        sampling = jax.tree.map(lambda x: jnp.repeat(x, len(text), axis=0), sampling)
    adjusted = adjust(
        logits,
        sampling,
        _counts(spec, sequences, at) if spec.program_features.penalties else None,
        of(sequences.positions)[:, None],
        jnp.zeros((len(text), 0), jnp.int32),
        jnp.zeros((1, 1, 0), bool),
        suppress_tokens=spec.suppress_tokens,
        program_features=spec.program_features,
    )
    top = spec.program_features.top_logprobs
    logprobs = logprobs_of(tokens[:, None], logits, adjusted, sampling, top=top)

    def masked(x: Array) -> Array:
        x = x.reshape(*known.shape, *x.shape[2:])
        return jnp.where(known.reshape(known.shape + (1,) * (x.ndim - 2)), x, jnp.zeros_like(x))

    return jax.tree.map(masked, logprobs)


def _counts(spec: DecodeSpec, sequences: Sequences, at: Int[Array, "R C"]) -> TokenCounts:
    """Return the counts of penalties for each column: the tokens of its text before it."""
    width, vocab = sequences.tokens.shape[1], spec.target.config.vocab_size
    text = jnp.take_along_axis(sequences.texts, at, axis=1)
    seen = sequences.texts[:, None] == text[:, :, None]
    seen &= jnp.arange(width) < at[:, :, None]
    generated = sequences.generated[:, None]
    tokens = jnp.broadcast_to(sequences.tokens[:, None], seen.shape).reshape(-1, width)
    none = jnp.zeros((len(tokens), vocab), jnp.int32)
    empty = TokenCounts(none.astype(bool), none)

    def counted(kept: Bool[Array, "R C T"]) -> TokenCounts:
        return empty.with_output(tokens, kept.reshape(-1, width))

    prompt = counted(seen & ~generated).output > 0
    return dataclasses.replace(counted(seen & generated), prompt=prompt)


def _whole(name: str, value: Any, ndim: int) -> Array:
    value = value if hasattr(value, "dtype") else np.asarray(value)
    if value.ndim != ndim or not np.issubdtype(value.dtype, np.integer):
        raise ValueError(
            f"{name} is {value.dtype} of shape {value.shape}; expected whole numbers on {ndim} axes"
        )
    return jnp.asarray(value, jnp.int32)
