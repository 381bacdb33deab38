"""Turn logits into tokens: shape the distribution, make each row's random keys, and draw.

Raw logits become the sampled distribution in this order. They are renormalised once, at the end:

    suppressed tokens -> biases -> penalties -> user function      `adjust`, for all rows
    -> temperature -> top-k -> top-p -> min-p                      `shape_logits`, for sampled rows

A greedy row takes the best token after the first line.

Nothing here sorts the vocabulary. Top-k and top-p each find a threshold by fixing the bits of a
float from the highest down. Each bit takes one pass, which compares and adds.

Every row has its own randomness. The row's key, the row's step number, the slot in the step and a
stream identify a draw. No two draws share all four, and no draw depends on the rest of the batch.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jax.typing import ArrayLike

from jaxspec.options import FieldError, ProgramFeatures
from jaxspec.shapes import Array, Bool, Float, Int

T = TypeVar("T")
KEY_KIND = "threefry2x32"
"""Of all keys. The default is a setting of JAX, and another kind draws for a row what depends on
the rows beside it."""


def make_key(seed: ArrayLike) -> Array:
    """Return the key of a seed."""
    return jax.random.key(seed, impl=KEY_KIND)


class Adjustments(struct.PyTreeNode):
    """Changes to the logits of each row before temperature. They apply to greedy rows too."""

    repetition_penalty: Float[Array, " B"]  # > 0; for tokens of prompt and output; 1: off
    presence_penalty: Float[Array, " B"]  # for tokens of the output; 0: off
    frequency_penalty: Float[Array, " B"]  # per occurrence of a token in the output; 0: off
    bias_ids: Int[Array, "B N"]  # padded with -1
    bias_values: Float[Array, "B N"]  # added to the logits of `bias_ids`; -inf bans


class SamplingParams(struct.PyTreeNode):
    """The sampling options of each row, as arrays on the device: new values compile nothing."""

    temperature: Float[Array, " B"]  # 0: greedy
    top_k: Int[Array, " B"]  # 0: off
    top_p: Float[Array, " B"]  # in (0, 1]; 1: off
    min_p: Float[Array, " B"]  # in [0, 1], relative to the best token; 0: off
    adjustments: Adjustments | None = None  # None when the spec has no penalties and no biases

    @classmethod
    def make(
        cls,
        batch: int,
        *,
        temperature: ArrayLike = 0.0,
        top_k: ArrayLike = 0,
        top_p: ArrayLike = 1.0,
        min_p: ArrayLike = 0.0,
        penalties: bool = False,
        num_biases: int = 0,
        repetition_penalty: ArrayLike = 1.0,
        presence_penalty: ArrayLike = 0.0,
        frequency_penalty: ArrayLike = 0.0,
        bias_ids: ArrayLike = -1,
        bias_values: ArrayLike = 0.0,
    ) -> SamplingParams:
        """Make the sampling parameters of `batch` rows.

        Each value is either one for all rows or one for each row.

        Args:
          penalties: whether the spec was made with penalties, see `ProgramFeatures`.
          num_biases: how many biases a row may have in the spec, see `ProgramFeatures`. With 0 and
            without `penalties`, all penalties and biases are ignored.
        """

        def rows(value: ArrayLike, dtype: type, *shape: int) -> Array:
            if not isinstance(value, jax.Array):
                # On the host: JAX would compile programs for each number of rows.
                value = np.broadcast_to(np.asarray(value, dtype), (batch, *shape))
            return jnp.broadcast_to(jnp.asarray(value, dtype), (batch, *shape))

        adjustments = None
        if penalties or num_biases:
            adjustments = Adjustments(
                repetition_penalty=rows(repetition_penalty, np.float32),
                presence_penalty=rows(presence_penalty, np.float32),
                frequency_penalty=rows(frequency_penalty, np.float32),
                bias_ids=rows(bias_ids, np.int32, num_biases),
                bias_values=rows(bias_values, np.float32, num_biases),
            )
        return cls(
            temperature=rows(temperature, np.float32),
            top_k=rows(top_k, np.int32),
            top_p=rows(top_p, np.float32),
            min_p=rows(min_p, np.float32),
            adjustments=adjustments,
        )

    def only(self, rows: Bool[Array, " B"]) -> SamplingParams:
        """Return a copy in which all other rows are greedy, so that they cost no sampling work."""
        return dataclasses.replace(
            self,
            temperature=jnp.where(rows, self.temperature, 0.0),
            top_k=jnp.where(rows, self.top_k, 0),
            top_p=jnp.where(rows, self.top_p, 1.0),
        )


class TokenCounts(struct.PyTreeNode):
    """The tokens that each row has so far, which penalties depend on.

    Attributes:
      prompt: whether the token is in the prompt.
      output: how often the token was generated.
    """

    prompt: Bool[Array, "B V"]
    output: Int[Array, "B V"]

    def with_prompt(
        self, tokens: Int[Array, "b T"], count: Int[Array, " b"], slots: Int[Array, " b"]
    ) -> TokenCounts:
        """Return the counts after adding the first `count` prompt tokens of the rows in `slots`."""
        fed = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :] < count[:, None]
        fed = jnp.where(fed, tokens, self.prompt.shape[1])  # an id of V is dropped
        prompt = self.prompt.at[slots[:, None], fed].set(True, mode="drop")
        return dataclasses.replace(self, prompt=prompt)

    def with_output(self, tokens: Int[Array, "B T"], kept: Bool[Array, "B T"]) -> TokenCounts:
        """Return the counts after adding the tokens of a step where `kept` is True."""
        emitted = jnp.where(kept, tokens, self.output.shape[1])  # an id of V is dropped
        output = jax.vmap(lambda row, ids: row.at[ids].add(1, mode="drop"))(self.output, emitted)
        return dataclasses.replace(self, output=output)


class Logprobs(struct.PyTreeNode):
    """Natural logs of token probabilities."""

    target: Float[Array, "B M"]  # under the target, without adjustments or filters
    sampled: Float[Array, "B M"]  # under the sampled distribution; 0 in greedy rows
    top_ids: Int[Array, "B M K"] | None = None  # the target's K best at each token, best first
    top_values: Float[Array, "B M K"] | None = None  # log-probs of `top_ids`, as in `target`


class Stream(enum.IntEnum):
    """The purpose of a draw.

    Attributes:
      ACCEPT: to accept or reject drafts.
      TOKEN: to choose a target token. After a rejection it comes from the residual distribution.
      DRAFT: to draw a draft.
    """

    ACCEPT = 0
    TOKEN = 1
    DRAFT = 2


def adjust(
    logits: Float[Array, "B T V"],
    sampling: SamplingParams,
    counts: TokenCounts | None,
    positions: Int[Array, "B T"],
    draft: Int[Array, "B G"],
    follows: Bool[Array, "#B T G"],
    *,
    suppress_tokens: tuple[int, ...],
    program_features: ProgramFeatures,
) -> Float[Array, "B T V"]:
    """Apply suppressed tokens, biases, penalties and the user function to logits, in this order.

    Args:
      positions: positions of the tokens that these logits choose.
      follows: whether each row of the block comes after each draft.
    """
    with jax.named_scope("adjust"):
        logits = suppress(logits, suppress_tokens)
        if program_features.num_biases:
            assert sampling.adjustments is not None
            logits = add_biases(logits, sampling.adjustments)
        if program_features.penalties:
            assert sampling.adjustments is not None
            assert counts is not None
            logits = penalize(logits, sampling.adjustments, counts, draft, follows)
        if program_features.logits_fn is not None:
            changed = program_features.logits_fn(logits, positions)
            if (changed.shape, changed.dtype) != (logits.shape, logits.dtype):
                raise FieldError(
                    "logits_fn",
                    f"returns {changed.dtype}{list(changed.shape)}; it was given, and has to "
                    f"return, {logits.dtype}{list(logits.shape)}",
                )
            logits = changed
        return logits


def suppress(
    logits: Float[Array, "... V"], tokens: tuple[int, ...], ids: Int[Array, " V"] | None = None
) -> Float[Array, "... V"]:
    """Set the logits of `tokens` to -inf. Logits of NaN or +inf become NaN, so they still show.

    Args:
      ids: the token of each logit; None when the logits are of all tokens, in order.
    """
    if not tokens:
        return logits
    if ids is not None:
        among = jnp.isin(ids, np.asarray(tokens, np.int32))
        return logits + jnp.where(among, -jnp.inf, jnp.float32(-0.0))
    # -0.0 changes no number, nor the sign of 0.
    added = np.full(logits.shape[-1], -0.0, np.float32)
    added[list(tokens)] = -np.inf
    return logits + added


def add_biases(logits: Float[Array, "B T V"], adjustments: Adjustments) -> Float[Array, "B T V"]:
    """Add each row's biases. If a row names an id twice, both biases are added."""
    b, _, vocab = logits.shape
    ids, values = adjustments.bias_ids, adjustments.bias_values
    ids = jnp.where(ids < 0, vocab, ids)  # an id of V is dropped
    bias = jnp.zeros((b, vocab), jnp.float32)
    return (
        logits
        + bias.at[jnp.arange(b, dtype=jnp.int32)[:, None], ids].add(values, mode="drop")[:, None]
    )


def penalize(
    logits: Float[Array, "B T V"],
    adjustments: Adjustments,
    counts: TokenCounts,
    draft: Int[Array, "B G"],
    follows: Bool[Array, "#B T G"],
) -> Float[Array, "B T V"]:
    """Apply the repetition, presence and frequency penalties to a block, in this order.

    The output of a block row is the committed tokens and the drafts that the row follows. Plain
    decoding would count the same tokens. The repetition penalty divides positive logits and
    multiplies negative ones. The presence penalty is subtracted once for a token of the output. The
    frequency penalty is subtracted for each occurrence.

    Args:
      follows: whether each row of the block comes after each draft, on the same branch.
    """
    vocab = lax.broadcasted_iota(jnp.int32, (1, 1, 1, logits.shape[-1]), 3)
    drafted = (draft[:, None, :, None] == vocab) & follows[..., None]
    output = counts.output[:, None] + jnp.sum(drafted, axis=2, dtype=jnp.int32)

    def of(penalty: Float[Array, " B"]) -> Float[Array, "B 1 1"]:
        return penalty[:, None, None]

    repeated = counts.prompt[:, None] | (output > 0)
    repetition = of(adjustments.repetition_penalty)
    scaled = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(repeated, scaled, logits)
    logits -= of(adjustments.presence_penalty) * (output > 0).astype(jnp.float32)
    return logits - of(adjustments.frequency_penalty) * output.astype(jnp.float32)


def shape_logits(logits: Float[Array, "B T V"], sampling: SamplingParams) -> Float[Array, "B T V"]:
    """Apply temperature, then top-k, top-p and min-p. Logits that are filtered out become -inf.

    The softmax of the result is the distribution that decoding follows. Tokens that tie at a
    threshold are all kept. Rows of temperature 0 use temperature 1 here. Their result is not used.

    Which tokens the filters keep has no gradient: for a derivative, filters are constant masks.
    """
    temperature = jnp.where(sampling.temperature > 0, sampling.temperature, 1.0)
    # Logits are made relative to the best one. A tiny temperature can then overflow only to -inf.
    logits = logits - jnp.max(logits, axis=-1, keepdims=True)
    logits = logits / temperature[:, None, None]
    constant = lax.stop_gradient(logits)
    ordered = _ordered_bits(constant)
    vocab = logits.shape[-1]

    k = jnp.where((sampling.top_k > 0) & (sampling.top_k < vocab), sampling.top_k, vocab)[:, None]
    at_least_k = _largest_threshold(
        lambda t: jnp.sum(ordered >= t[..., None], axis=-1, dtype=jnp.int32) >= k,
        ordered,
        needed=jnp.any(k < vocab),
    )
    kept = ordered >= at_least_k[..., None]

    top_p = sampling.top_p[:, None]
    weights = jnp.where(kept, jnp.exp(constant), 0.0)
    # The best token has weight 1, so it is kept even when top-p is 0 in float32.
    mass = jnp.maximum(jnp.sum(weights, axis=-1) * top_p, jnp.finfo(jnp.float32).tiny)
    at_least_p = _largest_threshold(
        lambda t: jnp.sum(jnp.where(ordered >= t[..., None], weights, 0.0), axis=-1) >= mass,
        ordered,
        needed=jnp.any(top_p < 1),
    )
    # Where top-p is off, rounding in the sums must not filter out any token.
    kept &= (ordered >= at_least_p[..., None]) | (top_p >= 1)[..., None]
    # The best token has logit 0, so each logit is the log of a token's ratio to the best.
    kept &= constant >= jnp.log(sampling.min_p)[:, None, None]
    return jnp.where(kept, logits, -jnp.inf)


def logprobs_of(
    tokens: Int[Array, "B T"],
    logits: Float[Array, "B T V"],
    adjusted: Float[Array, "B T V"],
    sampling: SamplingParams,
    *,
    top: int = 0,
) -> Logprobs:
    """Return the log-probability of each token under the row of logits that chose it.

    Args:
      logits: the target's raw logits.
      adjusted: the same logits after `adjust`.
      top: how many of the target's best tokens to return too.
    """

    def of(
        logits: Float[Array, "B T V"], *, top: int = 0
    ) -> tuple[Array, Array | None, Array | None]:
        """Return each token's log-probability, and ids and log-probabilities of the best ones."""
        # Both terms are measured from the best logit, and so are small: logits of 48 are rounded
        # to 4e-6.
        best = lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
        best = jnp.where(jnp.isfinite(best), best, 0.0)
        total = jnp.log(jnp.sum(jnp.exp(logits - best), axis=-1))
        chosen = jnp.take_along_axis(logits, tokens[:, :, None], axis=-1) - best
        if not top:
            return chosen[:, :, 0] - total, None, None
        values, ids = lax.top_k(logits, top)
        return chosen[:, :, 0] - total, ids, values - best - total[:, :, None]

    def shaped() -> Float[Array, "B T"]:
        of_sampled = of(shape_logits(adjusted, sampling))[0]
        return jnp.where(sampling.temperature[:, None] > 0, of_sampled, 0.0)

    any_samples = jnp.any(sampling.temperature > 0)
    none = lax.full_like(logits, 0, shape=tokens.shape)
    target, top_ids, top_values = of(logits, top=top)
    return Logprobs(target, lax.cond(any_samples, shaped, lambda: none), top_ids, top_values)


def _ordered_bits(x: Float[Array, "..."]) -> Array:
    """Map float32 to uint32 and keep the order."""
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    return bits ^ jnp.where(bits >> 31 == 1, jnp.uint32(0xFFFFFFFF), jnp.uint32(0x80000000))


def _largest_threshold(holds, ordered: Array, *, needed: Array) -> Array:
    """Return the largest uint32 t of each row for which `holds(t)` is true.

    `holds` must change from true to false once as t grows.

    Args:
      ordered: the rows [B, T, V] that t is a threshold of.
      needed: whether any row needs the threshold. If not, the loop does not run, and the result is
        0, which keeps every token.
    """

    def fix_bit(i: Array, t: Array) -> Array:
        candidate = t | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        return jnp.where(holds(candidate), candidate, t)

    # As `ordered` varies by device under `shard_map`, so does t, and its first value has to.
    first = lax.full_like(ordered, 0, shape=ordered.shape[:-1])
    return lax.fori_loop(0, jnp.where(needed, jnp.int32(32), 0), fix_bit, first)


def argmax(x: Float[Array, "... V"]) -> Int[Array, "..."]:
    """Return the first index of the largest value; some index where a value is NaN."""
    return _best(x, of_nan=x.shape[-1] - 1)[0]


NO_TOKEN = -1
"""Stands for a token where none can be chosen."""


def choose(logits: Float[Array, "... V"]) -> Int[Array, "..."]:
    """Return the best token of each row, or `NO_TOKEN` where the logits are not finite.

    Here logits count as finite if none is NaN or +inf, and not all are -inf.
    """
    token, logit = _best(logits, of_nan=NO_TOKEN)
    return jnp.where(jnp.isfinite(logit), token, NO_TOKEN)


def _best(
    x: Float[Array, "... V"], *, of_nan: int
) -> tuple[Int[Array, "..."], Float[Array, "..."]]:
    """Return the first index of the largest value, and that value.

    On NVIDIA GPUs this is one reduction over pairs of value and index. It reads the logits once,
    and XLA need not write out the result of the operation before it (a soft cap). XLA's CPU backend
    does not vectorise such a reduction. Other platforms therefore use two plain reductions.

    Args:
      of_nan: the index to return where a value is NaN, unless the returned value is NaN.
    """

    def in_two(x: Array) -> tuple[Array, Array]:
        # The maximum of many values misses a NaN on a CPU, so the second reduction looks for it.
        largest = jnp.max(x, axis=-1, keepdims=True)
        index = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
        other = jnp.where(jnp.isnan(x), jnp.int32(of_nan), jnp.int32(x.shape[-1] - 1))
        return jnp.min(jnp.where(x == largest, index, other), axis=-1), largest[..., 0]

    def in_one(x: Array) -> tuple[Array, Array]:
        first = lax.argmax(x, x.ndim - 1, jnp.int32)
        return first, jnp.take_along_axis(x, first[..., None], axis=-1)[..., 0]

    return lax.platform_dependent(x, cuda=in_one, default=in_two)


GROUP_BYTES = 1 << 27
"""Most bytes of float32 logits from which tokens are drawn at once. That takes twice as much memory beside them."""


def in_groups(function: Callable[..., T], logits: Float[Array, "B T V"], *rows: Any) -> T:
    """Return `function(logits, *rows)`, computed for one group of rows after the other.

    What the function holds beside the logits then has the size of a group. All results are the
    rows' own, so groups may overlap.

    Args:
      rows: pytrees whose arrays begin with the axis of rows. Those of None stay.
    """
    count = logits.shape[0]
    size = max(1, count * GROUP_BYTES // max(1, 4 * logits.size))
    if (
        size >= count or jax.sharding.get_abstract_mesh().size > 1
    ):  # a device holds some of the rows
        return function(logits, *rows)

    def add(i: Array, results: T) -> T:
        start = jnp.minimum(i * size, count - size)
        part = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, size), (logits, *rows))
        return jax.tree.map(
            lambda whole, part: lax.dynamic_update_slice_in_dim(whole, part, start, 0),
            results,
            function(*part),
        )

    shapes = jax.eval_shape(function, logits, *rows)
    none = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return lax.fori_loop(0, -(-count // size), add, none)


def fold_keys(
    keys: Array, steps: Int[Array, " B"], slots: Int[Array, "B R"], stream: Stream
) -> Array:
    """Return a key for each row and slot of this step, as [B, R] typed keys."""

    def one(key: Array, step: Array, slot: Array) -> Array:
        return jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(key, step), slot), stream)

    return jax.vmap(jax.vmap(one, in_axes=(None, None, 0)))(keys, steps, slots)


def sample(logits: Float[Array, "B V"], keys: Array) -> Int[Array, " B"]:
    """Draw a token from softmax(logits) for each row, with the key of that row (Gumbel-max)."""
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[-1:], jnp.float32))(keys)
    return argmax(logits + noise)


def draw_drafts(
    logits: Float[Array, "B F V"], sampling: SamplingParams, keys: Array
) -> tuple[Int[Array, "B F"], Float[Array, "B F V"]]:
    """Draw a token from each row of a drafter's logits.

    Temperature and filters apply as for the target's logits. Greedy rows take the best token.

    Returns:
      The tokens, and the log of the distribution that each was drawn from. That distribution is
      one-hot in greedy rows.
    """
    best = argmax(logits)
    index = lax.broadcasted_iota(jnp.int32, logits.shape, 2)
    certain = jnp.where(index == best[:, :, None], jnp.float32(0), -jnp.inf)

    def drawn() -> tuple[Array, Array]:
        log_q = jax.nn.log_softmax(shape_logits(logits, sampling))
        tokens = jax.vmap(sample, in_axes=1, out_axes=1)(log_q, keys)
        is_sampled = sampling.temperature[:, None] > 0
        return jnp.where(is_sampled, tokens, best), jnp.where(is_sampled[..., None], log_q, certain)

    return lax.cond(jnp.any(sampling.temperature > 0), drawn, lambda: (best, certain))
