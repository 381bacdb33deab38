"""Prompts, sampling parameters and results of a sampler, one row each."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.core import Tracer
from jax.typing import ArrayLike

from jaxspec.models.target import ImageTokens
from jaxspec.options import BIAS, PENALTIES, RANGES, VALUES, FieldError, Sampling, near_names
from jaxspec.runtime.prefill import SMALLEST_PREFILL, bucket
from jaxspec.runtime.runtime import cache_bucket, embedded
from jaxspec.sampling import Logprobs, SamplingParams
from jaxspec.shapes import Array, Bool, Float, Int
from jaxspec.state import DecodeSpec
from jaxspec.text.images import ImagePatches
from jaxspec.weights.loading import LoadedModel


def check_ids(name: str, ids: Sequence[Any] | np.ndarray | Array) -> None:
    """Refuse ids that are not whole numbers of 32 bits. NumPy would convert others silently.

    Raises:
      ValueError: an id is not such a number.
    """
    if hasattr(ids, "dtype"):
        wrong = (
            [] if np.issubdtype(np.asarray(ids).dtype, np.integer) else np.ravel(ids)[:1].tolist()
        )
    else:
        wrong = [i for i in ids if isinstance(i, bool) or not isinstance(i, int | np.integer)]
    if wrong:
        raise ValueError(
            f"{name} has the id {wrong[0]!r}; expected whole numbers, as a tokenizer gives"
        )
    numbers = np.asarray(ids)
    far = numbers[(numbers < -(2**31)) | (numbers >= 2**31)]
    if far.size:
        raise ValueError(f"{name} has the id {far[0]}; expected whole numbers of 32 bits")


def is_sequence(value: Any) -> bool:
    """Return whether a value is a list or an array, and no text."""
    return isinstance(value, Sequence | np.ndarray | jax.Array) and not isinstance(value, str)


def is_conversation(prompt: Any) -> bool:
    """Return whether a prompt is a list of messages."""
    is_list = isinstance(prompt, Sequence) and len(prompt) > 0
    return is_list and all(isinstance(message, Mapping) for message in prompt)


def is_one(prompts: Any) -> bool:
    """Return whether this is one prompt and not a list of them.

    Raises:
      ValueError: there is none.
    """
    if isinstance(prompts, np.ndarray | jax.Array):
        return prompts.ndim == 1
    if isinstance(prompts, str | Mapping) or not isinstance(prompts, Sequence):
        return True
    if not len(prompts):
        raise ValueError("there is no prompt; give a text, a list of messages, or a list of ids")
    return not any(isinstance(prompt, str) or is_sequence(prompt) for prompt in prompts)


class FinishReason(enum.IntEnum):
    """Reason for the end of a row."""

    UNFINISHED = 0  # in what a stream yields
    STOP = 1
    LENGTH = 2
    ERROR = 3  # the target's logits were not finite; the tokens before them stay


class Past(struct.PyTreeNode):
    """History of rows before the call that continues them.

    Attributes:
      steps: step numbers that their draws have used, prefill's included.
      generated: whether each token of their prompts was generated; penalties of the output count
        those.
      finished: the `FinishReason` of finished rows, which get no more tokens; 0 for the others.
    """

    steps: Int[Array, " B"]
    generated: Bool[Array, "B T"]
    finished: Int[Array, " B"]


class Prompts(struct.PyTreeNode):
    """Prompt ids, padded on the right with anything.

    Attributes:
      past: of rows that are continued, see `after`. They have a row for each sample.
      images: the tokens that are of images, see `with_images`; None: none is.
    """

    tokens: Int[Array, "B T"]
    lengths: Int[Array, " B"]  # 1 to T
    past: Past | None = None
    images: ImageTokens | None = None

    @classmethod
    def padded(cls, prompts: Sequence[Sequence[int]]) -> Prompts:
        """Pad prompts to a common width, see `width_bucket`: few widths mean few programs.

        Raises:
          ValueError: there is no prompt, or one is empty or has an id that is not a whole number.
        """
        return jax.device_put(padded_on_host(prompts))

    def with_images(self, images: Sequence[Sequence[ImagePatches]], vision: LoadedModel) -> Prompts:
        """Return them with images, which the vision part of the target embeds.

        Args:
          images: of each prompt, in the order of their placeholders.
          vision: `target.vision`.

        Raises:
          ValueError: a prompt has other placeholders than its images have tokens.
        """
        tokens, config = np.asarray(self.tokens), vision.config
        if len(images) != len(tokens):
            raise FieldError("images", f"has {len(images)} rows; expected {len(tokens)}")
        numbers = np.zeros(tokens.shape, np.int32)
        embeddings: Any = np.zeros((*tokens.shape, config.text_hidden_size), vision.model_def.dtype)
        for row, (of_prompt, length) in enumerate(zip(images, self.lengths, strict=True)):
            is_image = tokens[row] == config.image_token_id
            is_image &= np.arange(tokens.shape[1]) < length
            places = np.flatnonzero(is_image) if of_prompt else ()
            counts = [image.num_tokens for image in of_prompt]
            if len(places) != sum(counts):
                raise FieldError(
                    "images",
                    f"of prompt {row} have {sum(counts)} tokens, and it has {len(places)} "
                    "placeholders for them; expected as many",
                )
            for number, image in enumerate(of_prompt, 1):
                end = sum(counts[:number])
                here = places[end - image.num_tokens : end]
                numbers[row, here] = number
                embeddings[row, here] = embedded(vision.model_def, vision.params, image)
        tokens_of = ImageTokens(jnp.asarray(embeddings), jnp.asarray(numbers), config.two_way)
        return dataclasses.replace(self, images=tokens_of)

    def take(self, rows: ArrayLike | Sequence[int]) -> Prompts:
        """Return some of the prompts, as wide as before: batches of one width share a program.

        Raises:
          ValueError: there is no such prompt. Inside of jit it is the nearest one.
        """
        if not any(isinstance(row, Tracer) for row in jax.tree.leaves(rows)):
            index, count = np.asarray(rows), len(self.tokens)
            are_whole = np.issubdtype(index.dtype, np.integer) or not index.size
            wrong = index[(index < 0) | (index >= count)] if are_whole else index.ravel()
            if wrong.size:
                raise ValueError(f"rows has {wrong[0]}; expected numbers from 0 to {count - 1}")
        return jax.tree.map(lambda x: x[jnp.asarray(rows)], self)

    def after(
        self,
        result: GenerateResult,
        appended: Sequence[Sequence[int]] | Prompts | None = None,
    ) -> Prompts:
        """Return these prompts and the tokens that were generated after them, to continue in another call.

        That call needs the seeds and the sampling of the first one. It draws what one long call
        would draw next. Rows that a stop ended get no more tokens, unless something is appended to
        them.

        Args:
          result: of a call with these prompts, a row for each sample.
          appended: ids that follow in each row, such as a tool's answer; a row's may be empty.
            Inside of jit: `Prompts`, whose lengths may be 0.

        Raises:
          ValueError: the rows of the result, or of what is appended, are not those of the prompts.
        """
        rows, b = result.tokens.shape[0], self.tokens.shape[0]
        if rows % b or (self.past is not None and rows != b):
            raise FieldError("result", f"has {rows} rows, which are not samples of {b} prompts")
        if appended is None:
            appended = _on_host([()] * rows, 1)
        elif not isinstance(appended, Prompts):
            appended = _on_host(appended, max([1, *map(len, appended)]))
        if appended.tokens.shape[0] != rows:
            raise FieldError(
                "appended", f"has {appended.tokens.shape[0]} rows; expected {rows}, as the result"
            )
        is_traced = any(isinstance(x, Tracer) for x in jax.tree.leaves((self, result, appended)))
        if not is_traced:
            longer = _after(np, *jax.tree.map(np.asarray, (self, result, appended)))
            width = width_bucket(int(longer.lengths.max()))
            longer = longer.widened(width, np)
            return jax.tree.map(jnp.asarray, longer)
        return _after(jnp, self, result, appended)

    def widened(self, width: int, xnp: Any = jnp) -> Prompts:
        """Return them padded, or cut, to a width.

        Args:
          xnp: `numpy` to compute on the host.
        """

        def of(x: Any) -> Any:
            more = max(0, width - x.shape[1])
            return xnp.pad(x[:, :width], ((0, 0), (0, more), *((0, 0),) * (x.ndim - 2)))

        past, images = self.past, jax.tree.map(of, self.images)
        if past is not None:
            past = dataclasses.replace(past, generated=of(past.generated))
        return dataclasses.replace(self, tokens=of(self.tokens), past=past, images=images)


def width_bucket(length: int) -> int:
    """Round a width of prompts up: to a power of two up to 128, and then as caches are.

    At most a quarter of a long cache is padding.
    """
    return bucket(length, SMALLEST_PREFILL) if length <= 128 else cache_bucket(length)


def padded_on_host(prompts: Sequence[Sequence[int]]) -> Prompts:
    """Return `Prompts.padded` as arrays of numpy."""
    for i, prompt in enumerate(prompts):
        if not is_sequence(prompt):
            raise ValueError(f"prompt {i} is {prompt!r}; give a list of ids for each prompt")
    empty = [i for i, prompt in enumerate(prompts) if not len(prompt)]
    if empty or not len(prompts):
        where = f"prompt {empty[0]} is empty" if empty else "there are no prompts"
        raise ValueError(f"{where}; give at least one token of at least one prompt")
    return _on_host(prompts, width_bucket(max(map(len, prompts))))


def _on_host(rows: Sequence[Sequence[int]], width: int) -> Prompts:
    """Return rows of ids, padded to a width, as arrays of numpy."""
    tokens: Any = np.zeros((len(rows), width), np.int32)
    lengths: Any = np.asarray([len(ids) for ids in rows], np.int32)
    for i, (row, ids) in enumerate(zip(tokens, rows, strict=True)):
        check_ids(f"prompt {i}", ids)
        row[: len(ids)] = ids
    return Prompts(tokens, lengths)


def _after(xnp: Any, prompts: Prompts, result: GenerateResult, appended: Prompts) -> Prompts:
    """Return prompts, generated and appended tokens, one after the other, with padding."""
    index = np.repeat(np.arange(len(prompts.tokens)), len(result.tokens) // len(prompts.tokens))
    past, lengths = prompts.past, prompts.lengths[index]
    was_generated = xnp.zeros(prompts.tokens.shape, bool) if past is None else past.generated
    parts = (
        (prompts.tokens[index], was_generated[index], lengths),
        (result.tokens, xnp.ones(result.tokens.shape, bool), result.lengths),
        (appended.tokens, xnp.zeros(appended.tokens.shape, bool), appended.lengths),
    )
    width = sum(ids.shape[1] for ids, _, _ in parts)
    column = np.arange(width, dtype=np.int32)[None, :]
    tokens = xnp.zeros((len(index), width), np.int32)
    generated, begin = tokens.astype(bool), xnp.zeros(len(index), np.int32)
    for ids, flags, counts in parts:
        at = column - begin[:, None]
        here = (at >= 0) & (at < counts[:, None])
        at = xnp.clip(at, 0, ids.shape[1] - 1)
        tokens = xnp.where(here, xnp.take_along_axis(ids, at, axis=1), tokens)
        generated = xnp.where(here, xnp.take_along_axis(flags, at, axis=1), generated)
        begin = begin + counts
    reasons = result.finish_reasons
    is_over = (reasons != FinishReason.LENGTH) & (appended.lengths == 0)
    used = 0 if past is None else past.steps
    past = Past(
        steps=used + xnp.maximum(result.num_steps, 0) + 1,
        generated=generated,
        finished=xnp.where(is_over, reasons, xnp.zeros_like(reasons)),
    )
    images = jax.tree.map(lambda x: x[index], prompts.images)
    return Prompts(tokens, begin, past, images).widened(width, xnp)


class GenerateResult(struct.PyTreeNode):
    """Generated tokens of R rows. The samples of prompt i are rows i * num_samples and following.

    Everything past a row's length is 0. Rows that ended in an error count in no statistic.
    """

    tokens: Int[Array, "R M"]
    lengths: Int[Array, " R"]
    finish_reasons: Int[Array, " R"]  # a FinishReason
    logprobs: Logprobs | None  # of each token, if the sampler keeps them
    num_steps: Int[Array, " R"]  # verify steps
    acceptance_lengths: Int[Array, "R M"]  # tokens that each of them committed, uncut
    depth: int = struct.field(pytree_node=False)  # most drafts that a step can accept

    def accepted_per_depth(self) -> Float[Array, " depth"]:
        """Return the share of all verify steps that accepted at least 1, 2, ... drafts."""
        lengths, steps = self._counted()
        depths = jnp.arange(1, self.depth + 1, dtype=jnp.int32)
        return jnp.sum(lengths[:, :, None] > depths, axis=(0, 1)) / steps

    def acceptance_length(self) -> Float[Array, ""]:
        """Return the mean number of tokens per verify step."""
        lengths, steps = self._counted()
        return jnp.sum(lengths) / steps

    def _counted(self) -> tuple[Int[Array, "R M"], Int[Array, ""]]:
        """Return the acceptance lengths of rows that did not fail, and their verify steps, at least 1."""
        finite = self.finish_reasons != FinishReason.ERROR
        steps = jnp.sum(jnp.where(finite, self.num_steps, 0))
        return jnp.where(finite[:, None], self.acceptance_lengths, 0), jnp.maximum(steps, 1)

    def cut(
        self, lengths: Int[Array, " R"], stopped: Bool[Array, " R"] | None = None
    ) -> GenerateResult:
        """End rows earlier, as a stop does.

        Args:
          stopped: whether a stop ended each row, even at its own end; None: those that are cut.
        """
        kept = jnp.arange(self.tokens.shape[1], dtype=jnp.int32) < lengths[:, None]

        def mask(x: Array) -> Array:
            return jnp.where(kept.reshape(kept.shape + (1,) * (x.ndim - 2)), x, 0)

        if stopped is None:
            stopped = lengths < self.lengths
        return dataclasses.replace(
            self,
            tokens=mask(self.tokens),
            logprobs=jax.tree.map(mask, self.logprobs),
            lengths=jnp.minimum(self.lengths, lengths),
            finish_reasons=jnp.where(stopped, jnp.int32(FinishReason.STOP), self.finish_reasons),
        )


# --- sampling values ---------------------------------------------------------------------------------


def sampling_params(spec: DecodeSpec, rows: int, values: Mapping[str, Any]) -> SamplingParams:
    """Return sampling values as programs of a spec take them: one for all rows, or one a row.

    Args:
      values: by the name of a field of `Sampling`; biases are `bias_ids` and `bias_values`, [rows,
        N] each.

    Raises:
      ValueError: a value is out of range, has another number of rows, or is of something that the
        spec was made without.
    """
    for name, value in values.items():
        _check_value(spec, name, value, rows)
    biases = [name for name in ("bias_ids", "bias_values") if name in values]
    if len(biases) == 1:
        raise FieldError(biases[0], "was given alone; give bias_ids and bias_values")
    if biases and np.shape(values["bias_ids"]) != np.shape(values["bias_values"]):
        shapes = [np.shape(values[name]) for name in biases]
        raise FieldError(biases[1], f"has shape {shapes[1]}, and bias_ids has {shapes[0]}")
    arrays = {name: jnp.asarray(value) for name, value in values.items()}
    if "bias_ids" in arrays:  # fewer than the spec allows: padded
        pad = [(0, 0), (0, spec.program_features.num_biases - arrays["bias_ids"].shape[1])]
        arrays["bias_ids"] = jnp.pad(arrays["bias_ids"], pad, constant_values=-1)
        arrays["bias_values"] = jnp.pad(arrays["bias_values"], pad)
    return spec.sampling(rows, **arrays)


def same_for_all(spec: DecodeSpec, rows: int, sampling: Sampling) -> SamplingParams:
    """Return one record's sampling values for all rows.

    Raises:
      FieldError: the record needs a feature that the spec lacks.
    """
    if error := spec.program_features.refusal(sampling, owner="sampler"):
        raise error
    wanted = [name for name in VALUES if name not in PENALTIES or name in sampling.penalties]
    values: dict[str, Any] = {name: getattr(sampling, name) for name in wanted}
    if biases := sampling.logit_bias:
        values["bias_ids"] = np.tile(np.asarray([*biases], np.int32), (rows, 1))
        values["bias_values"] = np.tile(np.asarray([*biases.values()], np.float32), (rows, 1))
    return sampling_params(spec, rows, values)


def has_adjustments_of(spec: DecodeSpec, sampling: SamplingParams, rows: int | None = None) -> bool:
    """Return whether sampling parameters have the penalties and biases of a spec.

    Args:
      rows: that the biases must have; None: any number.
    """
    features, adjustments = spec.program_features, sampling.adjustments
    if adjustments is None:
        return not (features.penalties or features.num_biases)
    count, num_biases = adjustments.bias_ids.shape
    has_any = bool(features.penalties or features.num_biases)
    return has_any and num_biases == features.num_biases and rows in (None, count)


def _check_value(spec: DecodeSpec, name: str, value: Any, rows: int) -> None:
    biases = ("bias_ids", "bias_values")
    known = (*VALUES, *biases)
    if name not in known:
        raise ValueError(f"{name} is not a sampling value{near_names(name, known)}")
    if name in PENALTIES and not spec.program_features.penalties:
        raise FieldError(name, "was given, but the sampler was made without penalties=True")
    shape, max_biases = np.shape(value), spec.program_features.num_biases
    if name in biases:
        if len(shape) != 2 or shape[0] != rows or shape[1] > max_biases:
            raise FieldError(
                name,
                f"has shape {shape}; expected [{rows}, at most {max_biases}], the sampler's num_biases",
            )
    elif shape not in ((), (1,), (rows,)):
        raise FieldError(name, f"has shape {shape}; expected one value, or {rows}")
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(value)):
        return
    kind = np.asarray(value).dtype
    is_whole = name in ("bias_ids", "top_k")
    if not jnp.issubdtype(kind, np.integer if is_whole else np.number):
        expected = "whole numbers" if is_whole else "numbers"
        raise FieldError(name, f"has the dtype {kind}; it must be {expected}")
    numbers = np.asarray(value, np.float64)
    if name == "bias_ids":
        size = spec.target.config.vocab_size
        words, fits = "-1 or a token id", (numbers >= -1) & (numbers < size)
    else:
        allowed = BIAS if name == "bias_values" else RANGES[name]
        words, fits = allowed.words, allowed.allows(numbers)
        if allowed.end is not None:
            words, fits = f"{words}, and below 2**31", fits & (numbers < allowed.end)
    if not np.all(fits):
        first = numbers[~fits].flat[0]
        raise FieldError(name, f"is {first:{'.0f' if is_whole else 'g'}}; it must be {words}")
