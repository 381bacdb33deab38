"""What a target is to everybody else: the interface that decoding, drafters and commands know.

Read `Target`, then `TargetOutput`. A family (`gemma4`, `qwen3`) derives from `Target` and says how it embeds,
what its layers do, and how its head makes logits. Which layers own keys and values, with which head dim and
window, is in the config's `layers`: caches are made from that alone.
"""

from __future__ import annotations

import abc
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx, struct

from jaxspec import cache as kv
from jaxspec.cache import KVCache, KVSegment
from jaxspec.configs.base import TargetConfig
from jaxspec.models.xla import materialize
from jaxspec.quantised.kv import KVFormat, KVStorage
from jaxspec.shapes import Array, Bool, DTypeLike, Float, Int
from pallas_kernels.common.single_row import twice_if_alone

Caches = tuple[KVCache | None, ...]
"""One entry a layer; None where the layer reads another layer's K/V."""


class Placement(struct.PyTreeNode):
    """Where the tokens of one pass stand in their sequences.

    Attributes:
      start: positions below it are in the caches.
      count: tokens of a row that are real.
      slots: cache row of each batch row; None when they are the same.
      ancestors: the rows that each row may see, itself included: of a draft tree, or of several texts in
        one row. None for a chain.
      real: which tokens are no padding, row by row; experts do no work for the others. None: all.
      wanted: the tokens of each row whose hidden states are wanted; None: all. See `only_wanted`.
      remat: whether a backward pass computes each layer again, instead of keeping what it needs of it.
    """

    positions: Int[Array, "B T"]
    start: Int[Array, " B"]
    count: Int[Array, " B"]
    slots: Int[Array, " B"] | None = None
    ancestors: Bool[Array, "B T T"] | None = None
    real: Bool[Array, " rows"] | None = None
    wanted: Int[Array, "B R"] | None = None
    remat: bool = struct.field(pytree_node=False, default=False)

    @property
    def written(self) -> tuple[Int[Array, " B"], Int[Array, " B"], Int[Array, " B"] | None]:
        """Where the caches are written: first position, how many, and the row."""
        return self.start, self.count, self.slots

    def only_wanted(self, x: Float[Array, "B T *D"]) -> Float[Array, "B R *D"]:
        """Return what belongs to the wanted tokens; x itself, where all are wanted."""
        if self.wanted is None:
            return x
        return jnp.take_along_axis(
            x, self.wanted.reshape(*self.wanted.shape, *(1,) * (x.ndim - 2)), axis=1
        )

    def narrowed(self) -> Placement:
        """Return where the wanted tokens stand, for layers that write no keys and values. All are real."""
        assert self.wanted is not None
        positions = jnp.take_along_axis(self.positions, self.wanted, axis=1)
        return self.replace(positions=positions, real=None, wanted=None)


class TargetOutput(struct.PyTreeNode):
    """What one pass of a target gives.

    Attributes:
      logits: float32, as the model defines them; R = T, or the rows that were asked for.
      hidden: after the final norm; with `only_logit_rows`, of these rows alone.
      features: outputs of the layers that were asked for, not normed.
      fresh: of a tree, each layer's keys and values, which are not in the caches yet.
    """

    logits: Float[Array, "B R V"]
    hidden: Float[Array, "B T D"]
    features: tuple[Float[Array, "B T D"], ...]
    caches: Caches | None
    fresh: tuple[KVSegment | None, ...] = ()


class LayersOutput(struct.PyTreeNode):
    """What the layers of a target make of a pass.

    Attributes:
      hidden: after the final norm, of the wanted tokens (`Placement.only_wanted`).
      segments: the keys and values that each layer's queries saw.
    """

    hidden: Float[Array, "B T D"]
    features: tuple[Float[Array, "B T D"], ...]
    caches: Caches | None
    segments: tuple[tuple[KVSegment, ...], ...]


class Target(nnx.Module):
    """A decoder that can verify drafts. It is made with `(config, dtype=dtype)`."""

    config: TargetConfig
    kv: KVFormat | None = None  # how keys and values are stored; None as they are computed

    @abc.abstractmethod
    def embed(self, tokens: Int[Array, "B T"], *, scaled: bool = True) -> Float[Array, "B T D"]:
        """Look tokens up as the model's own input; not `scaled`: the rows of the table as they are."""

    @abc.abstractmethod
    def head(self, x: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Multiply by the head's table, in float32 and nothing more. Drafters borrow it."""

    def logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Return the model's own logits of normed hidden states: the head, and a soft cap if it has one."""
        return self.head(hidden)

    @abc.abstractmethod
    def run_layers(
        self,
        tokens: Int[Array, "B T"],
        x: Float[Array, "B T D"],
        where: Placement,
        caches: Caches | None,
        feature_layers: tuple[int, ...],
    ) -> LayersOutput:
        """Run embedded tokens through all layers and the final norm.

        Args:
          tokens: the ids that `x` embeds.
          caches: one entry a layer, or None to attend to this pass alone.
        """

    def attention_of(self, layer: int) -> Any:
        """Return the `attention.Attention` of a layer."""
        raise NotImplementedError(f"{type(self).__name__} has one way to store keys and values")

    def store_kv(self, format: KVFormat) -> Target:
        """Store keys and values in another format from now on. Return the module itself."""
        self.kv = format
        for i, layer in enumerate(self.config.layers):
            owner = self.attention_of(layer.kv_owner)
            k_norm = owner.k_norm[...]
            stored = format.of_layer(layer.kv_owner, k_norm, k_norm.dtype)
            self.attention_of(i).store_kv(stored)
        return self

    def stored_kv(self, layer: int) -> KVStorage | None:
        """Return how a layer stores the keys and values that its queries see; None as they are."""
        return None if self.kv is None else self.attention_of(layer).stored

    def distinct_experts(
        self, tokens: Int[Array, "B T"], where: Placement, caches: Caches
    ) -> Int[Array, " L"]:
        """Count the experts of each layer that a pass uses; `config.num_experts` says if there are any."""
        raise NotImplementedError(f"{type(self).__name__} has no experts")

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        start: Int[Array, " B"],
        count: Int[Array, " B"],
        caches: Caches | None,
        *,
        slots: Int[Array, " B"] | None = None,
        feature_layers: tuple[int, ...] = (),
        logit_rows: Int[Array, "B R"] | None = None,
        only_logit_rows: bool = False,
        ancestors: Bool[Array, "B T T"] | None = None,
    ) -> TargetOutput:
        """Run tokens at positions start .. start + count - 1 of each row, or a draft tree from `start` on.

        Args:
          count: how many of the T tokens of a row are real, 0 to T. The rest write nothing.
          caches: what earlier passes wrote, from `init_caches`; None to attend to this pass alone.
          slots: cache row of each batch row; None when they are the same.
          feature_layers: layers whose outputs are returned.
          logit_rows: the rows of T to compute logits for; None for all.
          only_logit_rows: no other row's hidden state is wanted. Layers behind the last one with keys and values
            of its own, and the last one of `feature_layers`, then compute these rows alone.
          ancestors: the tokens are a tree; [b, i, j] tells whether j is i itself or on i's way up to the
            root. A token stands as many positions past `start` as it has ancestors. The caches are read
            but not written: `keep_rows` does that once it is known which tokens stay.
        """
        run = functools.partial(self._run, feature_layers=feature_layers)
        where = place(tokens, start, count, slots=slots, ancestors=ancestors)
        if only_logit_rows and tokens.shape[1] > 1:
            where = where.replace(wanted=logit_rows)
        return twice_if_alone(
            run,
            tokens,
            where,
            caches,
            logit_rows,
            alone=tokens.size == 1 and ancestors is None,
            repeat=_repeat_token,
            first=_first_token,
        )

    def _run(
        self,
        tokens: Int[Array, "B T"],
        where: Placement,
        caches: Caches | None,
        logit_rows: Int[Array, "B R"] | None,
        *,
        feature_layers: tuple[int, ...],
    ) -> TargetOutput:
        done = self.run_layers(tokens, self.embed(tokens), where, caches, feature_layers)
        with jax.named_scope("head"):
            rows = done.hidden
            if logit_rows is not None and where.wanted is None:
                rows = jnp.take_along_axis(rows, logit_rows[..., None], axis=1)
            logits = self.logits(rows)
        fresh: tuple[KVSegment | None, ...] = ()
        if where.ancestors is not None:
            fresh = tuple(
                segments[-1] if self.config.owns_kv(i) else None
                for i, segments in enumerate(done.segments)
            )
        return TargetOutput(logits, done.hidden, done.features, done.caches, fresh)


def place(
    tokens: Int[Array, "B T"],
    start: Int[Array, " B"],
    count: Int[Array, " B"],
    *,
    slots: Int[Array, " B"] | None = None,
    ancestors: Bool[Array, "B T T"] | None = None,
) -> Placement:
    """Return where the tokens of a pass stand; arguments as in a target's call."""
    offset = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    # XLA would compute it again in every layer.
    real = materialize((offset < count[:, None]).reshape(-1))
    if ancestors is not None:
        offset = jnp.sum(ancestors, axis=-1, dtype=jnp.int32) - 1
    return Placement(start[:, None] + offset, start, count, slots, ancestors, real)


def _repeat_token(
    tokens: Int[Array, "1 1"],
    where: Placement,
    caches: Caches | None,
    logit_rows: Int[Array, "1 R"] | None,
) -> tuple[Int[Array, "1 2"], Placement, Caches | None, Int[Array, "1 R"]]:
    """Make of a pass over one token a pass over two at one place; `count` says that one is real."""
    assert where.real is not None
    pair = where.replace(
        positions=jnp.repeat(where.positions, 2, axis=1),
        real=jnp.concatenate([where.real, jnp.zeros_like(where.real)]),
    )
    rows = jnp.zeros((1, 1), jnp.int32) if logit_rows is None else logit_rows
    return jnp.repeat(tokens, 2, axis=1), pair, caches, rows


def _first_token(output: TargetOutput) -> TargetOutput:
    """Cut off what `_repeat_token` added; logits are of the first token already."""
    features = tuple(x[:, :1] for x in output.features)
    return output.replace(hidden=output.hidden[:, :1], features=features)


def init_caches(
    config: TargetConfig, batch: int, *, cache_length: int, slack: int, dtype: DTypeLike
) -> Caches:
    """Make empty caches for every layer that owns K/V.

    Args:
      slack: most tokens that a verify step writes, the anchor included.
    """
    return tuple(
        kv.init_cache(
            batch,
            layer.num_kv_heads,
            layer.head_dim,
            cache_length=cache_length,
            window=layer.window,
            slack=slack,
            dtype=dtype,
        )
        if layer.kv_owner == i
        else None
        for i, layer in enumerate(config.layers)
    )


def keep_rows(
    output: TargetOutput,
    rows: Int[Array, "B T"],
    start: Int[Array, " B"],
    count: Int[Array, " B"],
) -> TargetOutput:
    """Bring tokens of a tree that stay to the front, as if they alone had been fed, and write their K/V.

    Args:
      rows: the tokens that stay, in order. What follows the first `count` is rubbish.
    """

    def chosen(x: Array) -> Array:
        return jnp.take_along_axis(x, rows[:, :, None], axis=1)

    assert output.caches is not None
    caches = tuple(
        None
        if cache is None or segment is None
        else kv.append_chosen(cache, segment, rows, start, count)
        for cache, segment in zip(output.caches, output.fresh, strict=True)
    )
    return TargetOutput(
        chosen(output.logits),
        chosen(output.hidden),
        tuple(chosen(x) for x in output.features),
        caches,
    )
