"""Drafters that are no models, and the slow decoding that everything is compared with.

`LookupDrafter` knows how some sequences go on and says so (an oracle) or says something else (hostile):
which is a weight, so both run the same program. `TableDrafter` knows the anchor only. `naive_greedy` is
the root reference: one forward pass over the whole sequence a token, no cache, no loop on the device.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspec.cache import Paging
from jaxspec.configs.base import GenerationDefaults
from jaxspec.configs.dflash import DFlashConfig
from jaxspec.configs.gemma4 import Gemma4Config
from jaxspec.configs.mtp import MTPConfig
from jaxspec.drafters.base import Draft, Drafter, Draws, Kept, TargetView, Tree
from jaxspec.drafters.dflash import DFlashDrafter
from jaxspec.drafters.mtp import MTPDrafter
from jaxspec.drafters.tree import Children, grow
from jaxspec.sampling import draw_drafts, suppress
from jaxspec.shapes import Array, DTypeLike, Params
from jaxspec.weights.loading import LoadedModel
from jaxspec.weights.model_def import ModelDef
from tests import tiny


@dataclass(frozen=True)
class FakeConfig:
    """What the fakes need to know; they fit every target."""

    vocab_size: int
    hidden_size: int
    block_size: int
    num_sequences: int = 0
    length: int = 0

    def check_fits(self, target: Gemma4Config) -> None:
        del target


class _Fake(Drafter[Array]):
    drafts_by_slot = True
    config: FakeConfig

    @property
    def max_draft_tokens(self) -> int:
        return self.config.block_size - 1


class LookupDrafter(_Fake):
    """Looks the row's sequence up by its first token and proposes what follows, moved by `shift` ids.

    The state is that token.
    """

    def __init__(self, config: FakeConfig, *, dtype: DTypeLike):
        self.config = config
        del dtype
        self.sequences = nnx.Param(jnp.zeros((config.num_sequences, config.length), jnp.int32))
        self.shift = nnx.Param(jnp.zeros((), jnp.int32))

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return ()

    def init_state(
        self, batch: int, *, cache_length: int, dtype: DTypeLike, paging: Paging | None = None
    ) -> Array:
        del cache_length, dtype, paging
        return jnp.zeros(batch, jnp.int32)

    def absorb(self, state: Array, kept: Kept) -> Array:
        rows = jnp.where(kept.start == 0, kept.tokens[:, 0], kept.rows_of(state))
        return kept.put(state, rows)

    def draft(
        self,
        state: Array,
        view: TargetView,
        anchors: Array,
        lengths: Array,
        *,
        num_draft_tokens: int,
        tree: Tree | None = None,
        draws: Draws | None = None,
    ) -> Draft:
        sequences = self.sequences[...]
        known = sequences[jnp.argmax(view.rows_of(state)[:, None] == sequences[:, 0], axis=-1)]
        depth = num_draft_tokens if tree is None else tree.depth
        index = lengths[:, None] + 1 + jnp.arange(depth)[None, :]
        tokens = jnp.take_along_axis(known, index, axis=1, mode="clip") + self.shift[...]
        if tree is None:
            return Draft(tokens % self.config.vocab_size)

        def expand(level: int, frontier: Array, origins: Array, topk: int) -> tuple[int, Children]:
            # What is known comes first at one level and second at the next.
            rank = list(range(topk))
            if level % 2:
                rank[:2] = reversed(rank[:2])
            shape = (*frontier.shape, topk)
            near = tokens[:, level, None, None] + jnp.asarray(rank)
            near = jnp.broadcast_to(near, shape)
            likely = jnp.broadcast_to(-0.1 - 0.3 * jnp.arange(topk, dtype=jnp.float32), shape)
            return level + 1, Children(near % self.config.vocab_size, likely)

        return grow(expand, 0, anchors, tree=tree, num_draft_tokens=num_draft_tokens)


class TableDrafter(_Fake):
    """Proposes the same tokens after the same anchor, whatever came before it.

    Drafts that are drawn come one after the other from `logits`, which look at one token back.
    """

    def __init__(self, config: FakeConfig, *, dtype: DTypeLike):
        del dtype
        self.config = config
        self.table = nnx.Param(jnp.zeros((config.vocab_size, config.block_size - 1), jnp.int32))
        self.logits = nnx.Param(jnp.zeros((config.vocab_size, config.vocab_size)))

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return ()

    def init_state(
        self, batch: int, *, cache_length: int, dtype: DTypeLike, paging: Paging | None = None
    ) -> Array:
        del cache_length, paging
        return jnp.zeros((batch, 0), dtype)

    def absorb(self, state: Array, kept: Kept) -> Array:
        del kept
        return state

    def draft(
        self,
        state: Array,
        view: TargetView,
        anchors: Array,
        lengths: Array,
        *,
        num_draft_tokens: int,
        tree: Tree | None = None,
        draws: Draws | None = None,
    ) -> Draft:
        del state, view, lengths
        if draws is not None:
            tokens, chain = anchors, []
            for i in range(num_draft_tokens):
                logits = self.logits[...][tokens][:, None]
                drawn, log_q = draw_drafts(logits, draws.sampling, draws.keys[:, i, None])
                tokens = drawn[:, 0]
                chain.append((drawn, log_q))
            drawn, log_q = (jnp.concatenate(x, axis=1) for x in zip(*chain, strict=True))
            return Draft(drawn, log_q=log_q)
        if tree is None:
            return Draft(self.table[...][anchors][:, :num_draft_tokens])

        def expand(
            carry: None, frontier: Array, origins: Array, topk: int
        ) -> tuple[None, Children]:
            following = self.table[...][frontier][:, :, :1] + jnp.arange(topk)
            likely = jnp.broadcast_to(
                -0.1 - 0.3 * jnp.arange(topk, dtype=jnp.float32), following.shape
            )
            return None, Children(following % self.config.vocab_size, likely)

        return grow(expand, None, anchors, tree=tree, num_draft_tokens=num_draft_tokens)


def loaded(
    model_def: ModelDef, params: Params, generation: GenerationDefaults | None = None
) -> LoadedModel:
    """Return a model as if it came from a checkpoint."""
    return LoadedModel(model_def, params, model_def.config, generation, Path(), "made in a test")


def lookup(
    target: LoadedModel, sequences: Sequence[Sequence[int]], *, block_size: int, shift: int = 0
) -> LoadedModel:
    """Return a drafter that knows how these sequences go on: an oracle, or hostile with a shift."""
    first = [s[0] for s in sequences]
    assert len(set(first)) == len(first), "sequences are told apart by their first tokens"
    config = FakeConfig(
        target.config.vocab_size,
        target.config.hidden_size,
        block_size,
        len(sequences),
        max(map(len, sequences)),
    )
    table = np.zeros((config.num_sequences, config.length), np.int32)
    for row, sequence in zip(table, sequences, strict=True):
        row[: len(sequence)] = sequence
    params = {"sequences": jnp.asarray(table), "shift": jnp.int32(shift)}
    return loaded(ModelDef(LookupDrafter, config, target.model_def.dtype), params)


def table(
    target: LoadedModel, rows: Sequence[Sequence[int]], logits: np.ndarray | None = None
) -> LoadedModel:
    """Return a drafter that proposes `rows[anchor]`, or draws after each token from `logits[token]`."""
    config = FakeConfig(target.config.vocab_size, target.config.hidden_size, len(rows[0]) + 1)
    model_def = ModelDef(TableDrafter, config, target.model_def.dtype)
    if logits is None:
        logits = np.zeros((config.vocab_size, config.vocab_size))
    weights = {"table": jnp.asarray(rows, jnp.int32), "logits": jnp.asarray(logits, jnp.float32)}
    return loaded(model_def, weights)


def dflash(target: LoadedModel, *, block_size: int, seed: int = 0) -> LoadedModel:
    """Return a DFlash drafter of two layers with random weights; its window is shorter than the target's."""
    c = target.config
    config = DFlashConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        layer_types=("sliding", "full"),
        causal=(True, False),
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=32,
        block_size=block_size,
        mask_token_id=3,
        feature_layers=(0, c.num_layers - 2) if c.num_layers > 2 else (0,),
        num_target_layers=c.num_layers,
        max_positions=c.max_positions,
        sliding_window=6,
        final_logit_softcap=30.0,
    )
    model_def = ModelDef(DFlashDrafter, config, target.model_def.dtype)
    return loaded(model_def, tiny.random_params(model_def, seed))


def mtp(
    target: LoadedModel, *, centroids: bool = False, drafts: int = 5, seed: int = 0
) -> LoadedModel:
    """Return an MTP assistant with random weights and the released layer types."""
    c = target.config
    config = MTPConfig(
        vocab_size=c.vocab_size,
        hidden_size=38,  # sizes no activation has, so that copies of weights can be told
        backbone_hidden_size=c.hidden_size,
        layer_types=("sliding", "sliding", "sliding", "full"),
        num_heads=c.num_heads,
        num_kv_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        full_num_kv_heads=c.full_num_kv_heads,
        full_head_dim=c.full_head_dim,
        intermediate_size=46,
        sliding_window=c.sliding_window,
        max_positions=c.max_positions,
        num_centroids=16 if centroids else 0,
        num_top_centroids=3 if centroids else 0,
        num_draft_tokens=drafts,
    )
    model_def = ModelDef(MTPDrafter, config, target.model_def.dtype)
    return loaded(model_def, tiny.random_params(model_def, seed))


@dataclass(frozen=True)
class Greedy:
    """What naive decoding chose, and by how much: the smallest gap between the two best logits."""

    sequences: list[list[int]]  # prompt and new tokens
    smallest_gap: float


def naive_greedy(
    target: LoadedModel, prompts: Sequence[Sequence[int]], num_new_tokens: int
) -> Greedy:
    """Continue prompts by running the target over the whole of each sequence for every new token."""
    rows = [list(p) for p in prompts]
    tokens = np.zeros((len(rows), max(map(len, rows)) + num_new_tokens), np.int32)
    gap = np.inf
    for row, prompt in zip(tokens, rows, strict=True):
        row[: len(prompt)] = prompt
    suppressed = target.generation.suppress_tokens if target.generation else ()
    for _ in range(num_new_tokens):
        last = [len(r) - 1 for r in rows]
        logits = forward(target.model_def, target.params, jnp.asarray(tokens))
        logits = np.asarray(suppress(logits, suppressed))[np.arange(len(rows)), last]
        best = np.sort(logits, axis=-1)
        gap = min(gap, float(np.min(best[:, -1] - best[:, -2])))
        for i, token in enumerate(np.argmax(logits, axis=-1).tolist()):
            tokens[i, len(rows[i])] = token
            rows[i].append(token)
    return Greedy(rows, gap)


@functools.partial(jax.jit, static_argnums=0)
def forward(model_def: ModelDef, params: Params, tokens: Array) -> Array:
    """Return the logits of whole sequences, without any cache."""
    b, t = tokens.shape
    start, count = jnp.zeros(b, jnp.int32), jnp.full(b, t, jnp.int32)
    return model_def.bind(params)(tokens, start, count, None).logits
