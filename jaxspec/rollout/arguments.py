"""Check the arguments of a sampler's call, and convert them to the inputs of its programs.

Read `make_inputs`. Values are checked unless JAX traces them: a traced array has a shape and a
dtype, and no value. It is cast and clipped where a known value would be refused. `pad_inputs`
rounds shapes up, so that a few programs serve all calls.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh

from jaxspec.models.target import ImageTokens
from jaxspec.options import FieldError, Sampling, as_record, shown
from jaxspec.rollout.batch import (
    Prompts,
    has_adjustments_of,
    padded_on_host,
    same_for_all,
    width_bucket,
)
from jaxspec.rollout.rollout import RolloutInputs, RolloutPlan
from jaxspec.runtime.prefill import bucket
from jaxspec.sampling import KEY_KIND, SamplingParams, make_key
from jaxspec.text.grammars.automaton import Automaton

Value = Any
"""An array, a number, or a sequence of them; perhaps traced."""


def is_traced(tree: Value) -> bool:
    """Return whether JAX traces any of these values."""
    # A check of each array by itself takes most of a millisecond.
    return any(issubclass(kind, Tracer) for kind in set(map(type, jax.tree.leaves(tree))))


def is_inside_jit() -> bool:
    """Return whether JAX traces a function now. Operations on constants are then traced too."""
    return isinstance(jnp.zeros(()), Tracer)


def make_inputs(
    plan: RolloutPlan,
    prompts: Prompts | Value,
    sampling: Sampling | SamplingParams | Mapping[str, Any] | None,
    seeds: Value,
    max_new_tokens: Value,
    stop_ids: Value,
    grammar: Any = None,
    *,
    default_stop_ids: Sequence[int],
) -> RolloutInputs:
    """Return the inputs of programs for the arguments of a call.

    Raises:
      FieldError: an argument cannot be used.
    """
    prompts = _prompts(plan, prompts)
    rows, b = plan.rows(prompts), len(prompts.tokens)
    expected = f"expected {rows}: {b} prompts, {rows // b} of num_samples"
    limits = _limits(plan, max_new_tokens, rows, expected)
    count: Any = np.int32(rows) if plan.is_refilled(prompts) else None
    _check_positions(plan, prompts, limits)
    stops, starts = _stop_ids(plan, stop_ids, default_stop_ids, rows, expected), None
    if grammar is not None:
        starts = _starts(plan, grammar, rows, b)
        ends = grammar.stops if is_traced(grammar.stops) else np.asarray(grammar.stops)
        xnp: Any = jnp if is_traced((stops, ends)) else np
        stops = xnp.concatenate([stops, xnp.broadcast_to(ends, (rows, len(ends)))], axis=1)
    return RolloutInputs(
        prompts,
        _sampling(plan, sampling, rows, expected),
        _seeds(seeds, rows, expected),
        limits,
        stops,
        count,
        starts,
        grammar,
    )


def pad_inputs(plan: RolloutPlan, inputs: RolloutInputs, mesh: Mesh) -> RolloutInputs:
    """Round rows and the width of prompts up, see `prompts_bucket` and `width_bucket`.

    Rows of padding repeat the last prompt, and end after one token.
    """
    prompts = inputs.prompts
    b, t = prompts.tokens.shape
    width = max(t, min(width_bucket(t), plan.max_positions))
    more = prompts_bucket(b, mesh.shape["data"]) - b
    if width > t:
        inputs = dataclasses.replace(inputs, prompts=prompts.widened(width))
    if not more:
        return inputs
    rows = plan.rows(prompts)

    def repeated(x: Any) -> Any:
        if np.ndim(x) == 0:
            return x  # the seed of all rows
        times = more * (len(x) // b)
        xnp: Any = jnp if isinstance(x, jax.Array) else np
        return xnp.concatenate([x, xnp.repeat(x[-1:], times, axis=0)])

    grammar = inputs.grammar
    inputs = jax.tree.map(repeated, dataclasses.replace(inputs, grammar=None))
    limits = np.asarray(inputs.max_new_tokens)
    limits = np.where(np.arange(len(limits)) < rows, limits, np.int32(1))
    return dataclasses.replace(inputs, max_new_tokens=limits, grammar=grammar)


def prompts_bucket(count: int, parts: int) -> int:
    """Round a number of prompts up, for every part of a mesh's data axis.

    To a power of two up to 8, and then to a multiple of 8 or of a quarter of the next power of two:
    at most a third of the rows of a large batch are padding.
    """
    each = -(-count // parts)
    if each <= 8:
        return parts * bucket(each)
    step = max(8, bucket(each) // 4)
    return parts * step * -(-each // step)


# --- each argument -----------------------------------------------------------------------------------


def _prompts(plan: RolloutPlan, prompts: Any) -> Prompts:
    if not isinstance(prompts, Prompts):
        if not hasattr(prompts, "ndim"):
            prompts = padded_on_host(prompts)
        elif prompts.ndim != 2:
            raise FieldError("prompts", f"have shape {prompts.shape}; expected 2 axes, rows of ids")
        else:
            b, t = prompts.shape
            whole: Any = np.full(b, t, np.int32)
            prompts = Prompts(prompts, whole)
    tokens, lengths = prompts.tokens, prompts.lengths
    if np.ndim(tokens) != 2 or 0 in np.shape(tokens):
        raise FieldError(
            "prompts", f"have ids of shape {np.shape(tokens)}; expected rows of one id or more"
        )
    b, t = np.shape(tokens)
    if np.shape(lengths) != (b,):
        raise FieldError(
            "prompts", f"have lengths of shape {np.shape(lengths)}, and {b} rows of ids"
        )
    for name, x in (("ids", tokens), ("lengths", lengths)):
        if not jnp.issubdtype(x.dtype, np.integer):
            raise FieldError("prompts", f"have {name} of {x.dtype}; expected whole numbers")
    if not is_traced(lengths):
        lengths = np.asarray(lengths)
        if lengths.min() < 1 or lengths.max() > t:
            raise FieldError(
                "prompts", f"have lengths that do not lie between 1 and {t}, the width of their ids"
            )
    if not is_traced((tokens, lengths)):
        size, ids = plan.spec.target.config.vocab_size, np.asarray(tokens)
        bad = ((ids < 0) | (ids >= size)) & (np.arange(t) < lengths[:, None])
        if bad.any():
            raise FieldError(
                "prompts",
                f"have ids {ids[bad][:5].tolist()} outside the vocabulary; expected 0 to "
                f"{size - 1}",
            )
    if prompts.images is not None:
        _check_images(plan, prompts, prompts.images)
    return dataclasses.replace(prompts, tokens=_int32(tokens), lengths=_int32(lengths))


def _check_images(plan: RolloutPlan, prompts: Prompts, images: ImageTokens) -> None:
    """Refuse images of other shapes than the prompts, and a prompt that ends with one."""
    shape = *np.shape(prompts.tokens), plan.spec.target.config.hidden_size
    shapes = np.shape(images.embeddings), np.shape(images.numbers)
    if shapes != (shape, shape[:2]):
        raise FieldError(
            "prompts",
            f"have images with embeddings of shape {shapes[0]} and numbers of shape {shapes[1]}; "
            f"expected {shape} and {shape[:2]}",
        )
    if not is_traced((images.numbers, prompts.lengths)):
        last = np.asarray(prompts.lengths)[:, None] - 1
        if np.take_along_axis(np.asarray(images.numbers), last, axis=1).any():
            raise FieldError("prompts", "end with an image; its end token has to follow")


def _check_positions(plan: RolloutPlan, prompts: Prompts, limits: Any) -> None:
    """Refuse rows that need more positions than the model has. Padding needs none.

    Traced lengths count as the width.
    """
    limit, width = plan.max_positions, prompts.tokens.shape[1]
    if is_traced(prompts.lengths):
        if width + plan.max_new_tokens > limit:
            raise FieldError(
                "prompts",
                f"are {width} wide, and with max_new_tokens ({plan.max_new_tokens}) need "
                f"{width + plan.max_new_tokens} positions; the model has {limit}. Lengths that are "
                "traced "
                f"may be as long as the width: cut it to {limit - plan.max_new_tokens}",
            )
        return
    lengths = np.repeat(np.asarray(prompts.lengths), plan.rows(prompts) // len(prompts.tokens))
    new = np.full(len(lengths), plan.max_new_tokens) if is_traced(limits) else np.asarray(limits)
    row = int(np.argmax(lengths + new))
    if lengths[row] + new[row] > limit:
        raise FieldError(
            "prompts",
            f"have {lengths[row]} tokens in row {row}, and with max_new_tokens ({new[row]}) need "
            f"{lengths[row] + new[row]} positions; the model has {limit}",
        )


def _sampling(plan: RolloutPlan, sampling: Any, rows: int, expected: str) -> SamplingParams:
    if not isinstance(sampling, SamplingParams):
        record = Sampling() if sampling is None else as_record(Sampling, "sampling", sampling)
        return same_for_all(plan.spec, rows, record)
    if sampling.temperature.shape != (rows,):
        raise FieldError("sampling", f"has {sampling.temperature.shape[0]} rows; {expected}")
    if not has_adjustments_of(plan.spec, sampling, rows):
        raise FieldError(
            "sampling",
            "was made for another sampler: penalties or num_biases differ; make it with this "
            "sampler's "
            "`sampling`",
        )
    return sampling


def _seeds(seeds: Any, rows: int, expected: str) -> Any:
    """Return seeds as uint32, or as the typed keys that they are."""
    dtype, shape = getattr(seeds, "dtype", None), np.shape(seeds)
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key):
        if dtype != (ours := jax.eval_shape(lambda: make_key(0)).dtype):
            # Another implementation draws for a row what depends on the rows beside it.
            raise FieldError(
                "seeds",
                f"are keys of {dtype}; expected {ours}, as jax.random.key(seed, "
                f"impl={KEY_KIND!r}) makes them",
            )
    elif dtype == np.uint32 and len(shape) and shape[-1] == 2 and shape != (rows,):
        raise FieldError(
            "seeds",
            f"have shape {shape} of uint32, as keys of jax.random.PRNGKey have; make typed keys of "
            "them "
            "with jax.random.wrap_key_data",
        )
    elif is_traced(seeds):
        if not jnp.issubdtype(seeds.dtype, np.integer):
            raise FieldError("seeds", f"are {dtype}; expected whole numbers")
        seeds = seeds.astype(np.uint32)
    else:
        seeds = _whole("seeds", seeds, 0, 2**32 - 1, np.uint32, "or keys of jax.random.key")
    if shape not in ((), (rows,)):
        raise FieldError("seeds", f"have shape {shape}; {expected}, or one for all")
    return seeds


def _limits(plan: RolloutPlan, limits: Any, rows: int, expected: str) -> Any:
    name, largest = "max_new_tokens", plan.max_new_tokens
    if limits is None:
        return np.full(rows, largest, np.int32)
    if np.shape(limits) not in ((), (rows,)):
        raise FieldError(name, f"has shape {np.shape(limits)}; {expected}, or one for all")
    if is_traced(limits):
        return jnp.broadcast_to(jnp.clip(limits, 1, largest).astype(np.int32), (rows,))
    numbers = _whole(name, limits, 1, largest, np.int32, f"{largest} is the sampler's")
    return np.broadcast_to(numbers, (rows,))


def _stop_ids(
    plan: RolloutPlan, stop_ids: Any, default: Sequence[int], rows: int, expected: str
) -> Any:
    if stop_ids is None:
        stops: Any = np.asarray(tuple(default) or (-1,), np.int32)
    elif is_traced(stop_ids):
        stops = jnp.asarray(stop_ids).astype(np.int32)
    else:
        last = plan.spec.target.config.vocab_size - 1
        stops = _whole("stop_ids", stop_ids, -1, last, np.int32, "-1 is padding")
    if stops.ndim not in (1, 2) or (stops.ndim == 2 and stops.shape[0] != rows):
        raise FieldError("stop_ids", f"has shape {stops.shape}; {expected}, or ids for all")
    xnp: Any = jnp if is_traced(stops) else np
    return xnp.broadcast_to(stops, (rows, stops.shape[-1]))


def token_ids(name: str, ids: Any, vocab_size: int) -> tuple[int, ...]:
    """Return ids as a tuple.

    Raises:
      FieldError: they are not a list of ids of the vocabulary.
    """
    array = np.asarray([*ids] if isinstance(ids, Iterable) else ids)
    if array.ndim != 1:
        raise FieldError(name, f"has shape {array.shape}; expected a list of ids")
    return tuple(_whole(name, array, -1, vocab_size - 1, np.int32, "-1 is padding").tolist())


def _starts(plan: RolloutPlan, grammar: Any, rows: int, prompts: int) -> Any:
    """Return the first grammar state of each row.

    Raises:
      FieldError: `grammar` is not an automaton, has another vocabulary, or has another number of
        grammars than there are prompts.
    """
    if not isinstance(grammar, Automaton):
        raise FieldError(
            "grammar",
            f"is {shown(grammar)}; a sampler's program takes tables, without the host: make them "
            "with "
            "jaxspec.text.grammars.tables.automaton, or use an Engine for what they cannot follow",
        )
    if plan.spec.drafting.synthetic_acceptance is not None:
        raise FieldError(
            "grammar",
            lambda format_field: (
                f"{format_field('grammar')} says which tokens may follow, and "
                f"{format_field('synthetic_acceptance')} takes any; leave one out"
            ),
        )
    size = plan.spec.target.config.vocab_size
    if len(grammar.classes) != size:
        raise FieldError(
            "grammar", f"was made for {len(grammar.classes)} tokens; the target has {size}"
        )
    if (count := len(grammar.starts)) not in (1, prompts):
        raise FieldError(
            "grammar", f"has {count} grammars; expected 1, or one for each of {prompts} prompts"
        )
    if is_traced(grammar.starts):
        return jnp.repeat(grammar.starts, rows // count, total_repeat_length=rows)
    return np.repeat(np.asarray(grammar.starts), rows // count)


def _whole(name: str, value: Any, low: int, high: int, dtype: Any, more: str) -> np.ndarray:
    """Return whole numbers as an array, and refuse others and those out of range."""
    numbers = np.asarray(value)
    if numbers.size == 0:
        return numbers.astype(dtype)
    kinds = {type(x) for x in numbers.flat} if numbers.dtype == object else {numbers.dtype.type}
    are_whole = all(issubclass(kind, int | np.integer) and kind is not bool for kind in kinds)
    wrong = (numbers < low) | (numbers > high) if are_whole else np.ones(numbers.shape, bool)
    if np.any(wrong):
        first = numbers[wrong].tolist()[0]
        raise FieldError(
            name,
            lambda format_field: (
                f"{format_field(name)}: got {first!r}; expected whole numbers from {low} to "
                f"{high}; {more}"
            ),
        )
    return numbers.astype(dtype)


def _int32(x: Any) -> Any:
    return x if x.dtype == np.int32 else x.astype(np.int32)
