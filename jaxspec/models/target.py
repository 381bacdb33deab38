"""The interface of targets, for decoding, drafters and commands.

Read `Target`, then `TargetOutput`. A family (`gemma4`, `qwen3`) derives from `Target` and defines
its embedding, its layers and its head. The config's `layers` names the layers that own keys and
values, with head dim and window. Caches are made from that alone.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx, struct

from jaxspec import cache as kv
from jaxspec.cache import KVCache, KVSegment, Paging
from jaxspec.configs.base import TargetConfig
from jaxspec.models.xla import materialize
from jaxspec.quantised.kv import KVFormat, KVStorage
from jaxspec.shapes import Array, Bool, DTypeLike, Float, Int, Shaped
from pallas_kernels.common.single_row import repeat_if_single

Caches = tuple[KVCache | None, ...]
"""One entry for each layer; None where the layer reads another layer's K/V."""


class Placement(struct.PyTreeNode):
    """The positions of the tokens of one pass in their sequences.

    Attributes:
      start: positions below it are in the caches.
      count: the number of real tokens of a row.
      slots: the cache row of each batch row; None: row i has cache row i.
      ancestors: the rows that each row may see, itself included: of a draft tree, or of several
        texts in one row. None for a chain.
      real: which tokens are no padding, row by row; experts do no work for the others. None: all.
      wanted: the tokens of each row whose hidden states are wanted; None: all. See `only_wanted`.
      seen_by: the tokens of the pass that each of its tokens sees in layers with a window; None: all
        before it. In such a pass later tokens may be seen, see `ImageTokens`.
      remat: whether a backward pass computes each layer again instead of keeping its activations.
      parts: of a pass whose rows have two widths or more, the rows of each width, see `joined`. Then B is 1.
    """

    positions: Int[Array, "B T"]
    start: Int[Array, " B"]
    count: Int[Array, " B"]
    slots: Int[Array, " B"] | None = None
    ancestors: Bool[Array, "B T T"] | None = None
    real: Bool[Array, " rows"] | None = None
    wanted: Int[Array, "B R"] | None = None
    seen_by: Bool[Array, "B T T"] | None = None
    remat: bool = struct.field(pytree_node=False, default=False)
    parts: tuple[Placement, ...] = ()

    @classmethod
    def joined(cls, parts: tuple[Placement, ...]) -> Placement:
        """Return the placement of all tokens of rows of several widths, behind each other in one row.

        The caches of such a pass have the tables of all rows, in the order of the parts.
        """
        real = [
            jnp.ones(part.positions.size, bool) if part.real is None else part.real
            for part in parts
        ]
        positions = joined_row([part.positions for part in parts])
        start, count = jnp.zeros(1, jnp.int32), jnp.full(1, positions.size, jnp.int32)
        return cls(positions, start, count, real=jnp.concatenate(real), parts=parts)

    def split(self, x: Float[Array, "1 T *D"]) -> list[Float[Array, "_ _ *D"]]:
        """Return the values of the tokens of each part, row by row."""
        return split_row(x, [part.positions.shape for part in self.parts])

    @property
    def written(self) -> tuple[Int[Array, " B"], Int[Array, " B"], Int[Array, " B"] | None]:
        """The part of the caches that a pass writes: first position, count, and cache row."""
        return self.start, self.count, self.slots

    @property
    def is_all_wanted(self) -> bool:
        """True if the hidden states of all tokens are wanted."""
        return self.wanted is None and all(part.wanted is None for part in self.parts)

    def only_wanted(self, x: Float[Array, "B T *D"]) -> Float[Array, "B R *D"]:
        """Return the values of the wanted tokens, or x itself where all are wanted."""
        if self.is_all_wanted:
            return x
        if self.parts:
            pairs = zip(self.parts, self.split(x), strict=True)
            return joined_row([part.only_wanted(of_part) for part, of_part in pairs])
        if self.wanted is None:
            return x
        return jnp.take_along_axis(
            x, self.wanted.reshape(*self.wanted.shape, *(1,) * (x.ndim - 2)), axis=1
        )

    def narrowed(self) -> Placement:
        """Return the placement of the wanted tokens, for layers that write no keys and values.

        All of them are real.
        """
        if self.parts:
            parts = (part if part.is_all_wanted else part.narrowed() for part in self.parts)
            return Placement.joined(tuple(parts))
        assert self.wanted is not None
        positions = jnp.take_along_axis(self.positions, self.wanted, axis=1)
        return self.replace(positions=positions, real=None, wanted=None)


def joined_row(parts: Sequence[Shaped[Array, "_ _ *D"]]) -> Shaped[Array, "1 T *D"]:
    """Return values of the tokens of several parts behind each other, in one row."""
    return jnp.concatenate([x.reshape(1, -1, *x.shape[2:]) for x in parts], axis=1)


def split_row(
    x: Shaped[Array, "1 T *D"], shapes: Sequence[tuple[int, ...]]
) -> list[Shaped[Array, "_ _ *D"]]:
    """Undo `joined_row`.

    Args:
      shapes: the rows and the width of each part.
    """
    parts, end = [], 0
    for rows, width in shapes:
        begin, end = end, end + rows * width
        parts.append(x[0, begin:end].reshape(rows, width, *x.shape[2:]))
    return parts


class ImageTokens(struct.PyTreeNode):
    """The tokens of images among the tokens of one pass.

    Attributes:
      embeddings: of these tokens, by the vision part. Those of other tokens mean nothing.
      numbers: the number of each token's image, from 1 on; 0 where there is none.
      two_way: whether the tokens of an image see each other in layers with a window. Each image
        must then be in one pass.
    """

    embeddings: Float[Array, "B T D"]
    numbers: Int[Array, "B T"]
    two_way: bool = struct.field(pytree_node=False, default=False)

    def ids_of(self, tokens: Int[Array, "B T"]) -> Int[Array, "B T"]:
        """Return tokens with 0 in place of those of images, which is what the model looks up."""
        return jnp.where(self.numbers > 0, 0, tokens)

    def put(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Put the embeddings of images in the places of those that were looked up."""
        return jnp.where(self.numbers[..., None] > 0, self.embeddings.astype(x.dtype), x)

    @property
    def seen_by(self) -> Bool[Array, "B T T"] | None:
        """See `Placement.seen_by`."""
        if not self.two_way:
            return None
        query, key = self.numbers[:, :, None], self.numbers[:, None, :]
        causal = jnp.tri(self.numbers.shape[1], dtype=bool)
        return causal | ((query == key) & (query > 0))


class TargetOutput(struct.PyTreeNode):
    """The result of one pass of a target.

    Attributes:
      logits: float32, as the model defines them; R = T, or the number of `logit_rows`.
      hidden: hidden states after the final norm; with `only_logit_rows`, of these rows alone.
      features: the outputs of `feature_layers`, not normed.
      fresh: for a tree, each layer's keys and values, which are not in the caches yet.
    """

    logits: Float[Array, "B R V"]
    hidden: Float[Array, "B T D"]
    features: tuple[Float[Array, "B T D"], ...]
    caches: Caches | None
    fresh: tuple[KVSegment | None, ...] = ()


class LayersOutput(struct.PyTreeNode):
    """The result of a target's layers for one pass.

    Attributes:
      hidden: hidden states of the wanted tokens after the final norm (`Placement.only_wanted`).
      segments: the keys and values that each layer's queries saw.
    """

    hidden: Float[Array, "B T D"]
    features: tuple[Float[Array, "B T D"], ...]
    caches: Caches | None
    segments: tuple[tuple[KVSegment, ...], ...]


class Target(nnx.Module):
    """A decoder that can verify drafts. Its constructor takes `(config, dtype=dtype)`."""

    config: TargetConfig
    kv: KVFormat | None = None  # the format of stored keys and values; None: as computed
    mixes: ClassVar[bool] = False  # whether `run_layers` takes a `Placement` with parts

    @abc.abstractmethod
    def embed(self, tokens: Int[Array, "B T"], *, scaled: bool = True) -> Float[Array, "B T D"]:
        """Look tokens up as the model's input. Not `scaled`: the rows of the table as they are."""

    @abc.abstractmethod
    def head(self, x: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Multiply by the head's table, in float32. Drafters use it too."""

    def logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Return the model's logits of normed hidden states: head, and soft cap if it has one."""
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
        """Return the storage of the K/V that a layer's queries see; None: as computed."""
        return None if self.kv is None else self.attention_of(layer).stored

    def distinct_experts(
        self, tokens: Int[Array, "B T"], where: Placement, caches: Caches
    ) -> Int[Array, " L"]:
        """Count the experts of each layer that a pass uses; see `config.num_experts`."""
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
        images: ImageTokens | None = None,
    ) -> TargetOutput:
        """Run tokens at positions start .. start + count - 1 of each row, or a tree from `start`.

        Args:
          count: the number of real tokens of each row, 0 to T. The rest write nothing.
          caches: from `init_caches`, with earlier passes; None: attend to this pass alone.
          slots: the cache row of each batch row; None: row i has cache row i.
          feature_layers: layers whose outputs are returned.
          logit_rows: the rows of T to compute logits for; None: all.
          only_logit_rows: whether no other row's hidden state is wanted. The last layers, which
            share keys and values and have no features, then compute these rows alone.
          ancestors: for a tree; [b, i, j] is whether j is i itself or on i's way up to the root. A
            token stands as many positions past `start` as it has ancestors. The caches are read but
            not written. `keep_rows` writes them after acceptance.
          images: the tokens that are of images; None: none is.
        """
        run = functools.partial(self._run, feature_layers=feature_layers, images=images)
        where = placement_of(tokens, start, count, slots=slots, ancestors=ancestors)
        if images is not None:
            tokens, where = images.ids_of(tokens), where.replace(seen_by=images.seen_by)
        if only_logit_rows and tokens.shape[1] > 1 and where.seen_by is None:
            where = where.replace(wanted=logit_rows)
        return repeat_if_single(
            run,
            tokens,
            where,
            caches,
            logit_rows,
            single=tokens.size == 1 and ancestors is None and images is None,
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
        images: ImageTokens | None,
    ) -> TargetOutput:
        x = self.embed(tokens) if images is None else images.put(self.embed(tokens))
        done = self.run_layers(tokens, x, where, caches, feature_layers)
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


def placement_of(
    tokens: Int[Array, "B T"],
    start: Int[Array, " B"],
    count: Int[Array, " B"],
    *,
    slots: Int[Array, " B"] | None = None,
    ancestors: Bool[Array, "B T T"] | None = None,
) -> Placement:
    """Return the placement of the tokens of a pass. Arguments are as in a target's call."""
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
    """Turn a pass over one token into one over two at the same position, of which one is real."""
    assert where.real is not None
    pair = where.replace(
        positions=jnp.repeat(where.positions, 2, axis=1),
        real=jnp.concatenate([where.real, jnp.zeros_like(where.real)]),
    )
    rows = jnp.zeros((1, 1), jnp.int32) if logit_rows is None else logit_rows
    return jnp.repeat(tokens, 2, axis=1), pair, caches, rows


def _first_token(output: TargetOutput) -> TargetOutput:
    """Cut off the token that `_repeat_token` added. Logits are of the first token already."""
    features = tuple(x[:, :1] for x in output.features)
    return output.replace(hidden=output.hidden[:, :1], features=features)


def init_caches(
    config: TargetConfig,
    batch: int,
    *,
    cache_length: int,
    slack: int,
    dtype: DTypeLike,
    paging: Paging | None = None,
) -> Caches:
    """Make empty caches for every layer that owns K/V.

    Args:
      slack: the most tokens that a verify step writes, the anchor included.
      paging: as in `cache.init_cache`.
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
            paging=paging,
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
    slots: Int[Array, " B"] | None = None,
) -> TargetOutput:
    """Move the kept tokens of a tree to the front, as if they were a chain, and write their K/V.

    Args:
      rows: the kept tokens, in order. Values behind the first `count` mean nothing.
      slots: the cache row of each batch row; None: row i has cache row i.
    """

    def chosen(x: Array) -> Array:
        return jnp.take_along_axis(x, rows[:, :, None], axis=1)

    assert output.caches is not None
    caches = tuple(
        None
        if cache is None or segment is None
        else kv.append_chosen(cache, segment, rows, start, count, slots)
        for cache, segment in zip(output.caches, output.fresh, strict=True)
    )
    return TargetOutput(
        chosen(output.logits),
        chosen(output.hidden),
        tuple(chosen(x) for x in output.features),
        caches,
    )
