"""The family of Gemma 4's MTP assistants."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxspec.configs.base import TargetConfig
from jaxspec.configs.gemma4 import Gemma4Config
from jaxspec.configs.mtp import KEYS, MODEL_TYPES, PRESETS, MTPConfig
from jaxspec.registry.base import Assumption, Change, Conventions, Family, WeightChange
from jaxspec.registry.costs import DraftStep, StepCost, operations, reached, stored_bytes
from jaxspec.registry.describe import shown_scale
from jaxspec.registry.weight_changes import changed, common_changes

if TYPE_CHECKING:
    from checkpoints_convert.rules import RuleSet
    from jaxspec.shapes import Params


def _module() -> type[Any]:
    from jaxspec.drafters.mtp import MTPDrafter

    return MTPDrafter


def _rules(config: MTPConfig, params: Iterable[str]) -> RuleSet:
    from checkpoints_convert import mtp

    return mtp.rule_set(params, num_layers=config.num_layers, centroids=bool(config.num_centroids))


def _drafter_for(preset: str, target: TargetConfig) -> tuple[MTPConfig, str]:
    del target
    if preset not in PRESETS:
        raise ValueError(
            f"there is no MTP assistant for {preset}; there is one for {', '.join(PRESETS)}"
        )
    return PRESETS[preset], f"MTP of {preset}, random weights"


def _randomise(params: Params, seed: int) -> Params:
    """Shuffle the token ordering, so that a step gathers scattered rows, as a real one does."""
    import jax

    if "token_ordering" not in params:
        return params
    ordering = params["token_ordering"]
    shuffled = np.random.default_rng(seed).permutation(ordering.size)
    placed = jax.device_put(shuffled.astype(ordering.dtype), ordering.sharding)
    return {**params, "token_ordering": placed}


def _cost(step: DraftStep, batch: int, context: int) -> StepCost:
    """Return the cost of drafting with an assistant.

    There is one pass for each draft of a chain, or for each level of a tree. A pass needs the token
    of the pass before it, so each pass reads everything again. No cache is assumed to hold a
    gigabyte from one pass to the next. Bytes read are:

        passes x (weights + head + embedding rows
                  + K/V of the target's last sliding and last full layer)

    In a chain a pass has one row for each sequence. In a tree a pass has `topk` rows for each
    sequence, and one row in the first level. A dense head is read whole. With centroids a pass
    reads the head's rows for the clusters that uniform choices of all rows reach, and these
    clusters' part of the token ordering. Layers of one type share their keys and values, which
    therefore count once in each pass.
    """
    config: MTPConfig = step.config
    levels = [1] + [step.topk] * (step.depth - 1)
    weight_bytes = flops = kv_bytes = 0.0
    for level in levels:
        rows = batch * level
        for name, a in step.weights.items():
            # Parts of a parameter: all rows together read `share` of it, each row uses `used`.
            share = used = 1.0
            if config.num_centroids and name in ("head", "token_ordering"):
                used = config.num_top_centroids / config.num_centroids
                share = reached(used, rows)
            weight_bytes += share * stored_bytes(a)
            flops += used * operations(a, rows)
        weight_bytes += rows * config.backbone_hidden_size * step.itemsize
        for kind in set(config.layer_types):
            sliding = kind == "sliding"
            seen = min(context, config.num_window_keys) if sliding else context
            heads = config.num_kv_heads if sliding else config.full_num_kv_heads
            head_dim = config.head_dim if sliding else config.full_head_dim
            kv_bytes += 2.0 * batch * seen * heads * head_dim * step.cache_itemsize
            layers = config.layer_types.count(kind)
            flops += 4.0 * rows * seen * layers * config.num_heads * head_dim
    return StepCost(weight_bytes, kv_bytes, flops)


def _in_force(target: TargetConfig, c: MTPConfig, dtype: str) -> Iterator[Assumption]:
    owners = {kind: target.last_kv_owner(kind) for kind in sorted(set(c.layer_types))}
    shown = ", ".join(f"{layer} ({kind})" for kind, layer in owners.items())
    origin = "target's config: the last of a kind with K/V"
    yield Assumption("K/V of layers", owners, shown, origin=origin)
    shown = f"{'n - 1' if c.query_position == 'last' else 'n'}, frozen (n: committed tokens)"
    yield Assumption("query position", c.query_position, shown, "query_position", "last")
    shown = f"the last {c.num_window_keys} committed keys on sliding layers"
    yield Assumption(
        "window", c.num_window_keys, shown, "num_window_keys", "as many as sliding_window"
    )
    if "sliding" in c.layer_types:
        shown = f"{c.rope_theta:g} on sliding layers"
        yield Assumption("rope theta", c.rope_theta, shown, "rope_theta", "10,000")
    shown = f"{c.full_rope_theta:g} on full layers, on {c.full_partial_rotary_factor:g} of a head"
    if c.full_rope_factor != 1:
        shown += f", positions divided by {c.full_rope_factor:g}"
    yield Assumption(
        "rope of full layers", c.full_rope_theta, shown, "full_rope_theta", "1,000,000"
    )
    order = "[embedding, state]; state: after the final norm"
    yield Assumption("inputs", ["embedding", "state"], order)
    yield Assumption("embedding scale", True, shown_scale(target, dtype, scaled=True))
    origin = "the method: others are refused"
    yield Assumption("logit soft cap", None, "none", origin=origin)
    shown = "none: it reads no masks, and its layers no drafts"
    yield Assumption("mask id, causality", None, shown)
    shown = "dense"
    if c.num_centroids:
        shown = f"best {c.num_top_centroids} of {c.num_centroids} centroids"
    yield Assumption("head", c.num_top_centroids or None, shown, origin="assistant's {config}")
    if c.suppress_tokens:
        yield Assumption(
            "suppressed in drafts",
            list(c.suppress_tokens),
            ", ".join(map(str, c.suppress_tokens)),
            origin="assistant's {generation}: suppress_tokens",
        )


def _changes(target: TargetConfig, c: MTPConfig, special_ids: Sequence[int]) -> Iterator[Change]:
    del special_ids  # no mask is read
    if c.query_position == "last":
        yield Change("query position n", "query_position", "next")
    else:
        yield Change("query position n - 1", "query_position", "last")
    w = c.sliding_window
    keys = w + 1 if c.num_window_keys == w else w
    yield Change(f"window of {keys} keys", "num_window_keys", keys, needs_tokens=w)
    # The assistant's queries meet keys that the target has turned, so the target's values come first.
    own = target if isinstance(target, Gemma4Config) else None
    for name, field, usual in (
        ("rope theta of sliding layers", "rope_theta", (1e4, 1e6)),
        ("rope theta of full layers", "full_rope_theta", (1e6, 1e4)),
        ("rotary part of full layers", "full_partial_rotary_factor", (0.25, 1.0)),
        ("rope factor of full layers", "full_rope_factor", (1.0,)),
    ):
        values = usual if own is None else (getattr(own, field), *usual)
        for value in dict.fromkeys(values):
            if value != getattr(c, field):
                origin = ", the target's" if own and value == getattr(own, field) else ""
                yield Change(f"{name} {value:g}{origin}", field, value)


def _weight_changes(target: TargetConfig, params: Params) -> Iterator[WeightChange]:
    """Yield other orders and scales of the two inputs, and what may be wrong with any drafter.

    The weights of a linear layer absorb the order and the scale of its inputs, so a checkpoint may
    have been trained with others.
    """
    import jax.numpy as jnp

    def halves(change: Callable[[Any, Any], tuple[Any, Any]]) -> Callable[[Params], Params]:
        def apply(params: Params) -> Params:
            weight = params["pre_projection"]
            rows = change(*jnp.split(weight, 2))
            return {**params, "pre_projection": jnp.concatenate(rows).astype(weight.dtype)}

        return apply

    scale = target.embedding_scale
    name = "inputs swapped: [state, embedding]"
    swap = halves(lambda embedding, state: (state, embedding))
    yield WeightChange(name, "pre_projection", "swap the halves of {where}", swap)
    if scale != 1:
        for name, word, factor in (
            ("embeddings not scaled", "divide", 1 / scale),
            ("embeddings scaled twice", "multiply", scale),
        ):
            fix = f"{word} the embedding's half of {{where}} by {scale:.5g}"
            apply = halves(lambda embedding, state, f=factor: (embedding * f, state))
            yield WeightChange(name, "pre_projection", fix, apply)
    # Not a convention: if the numbers do as well in another order, they say nothing to later drafts.
    name, fix = "post_projection in reverse order", "{where} carries nothing: get it again"
    yield WeightChange(
        name,
        "post_projection",
        fix,
        lambda params: changed(params, ["post_projection"], lambda x: x[::-1, ::-1]),
    )
    yield from common_changes(params)


FAMILY = Family(
    name="mtp",
    role="drafter",
    title="an MTP assistant",
    config=MTPConfig,
    read=MTPConfig.from_hf,
    module=_module,
    rules=_rules,
    model_types=MODEL_TYPES,
    presets=PRESETS,
    drafter_for=_drafter_for,
    cost=_cost,
    conventions=Conventions(
        KEYS,
        _in_force,
        _changes,
        _weight_changes,
        traced=lambda c: dict(rope_theta=1.0, full_rope_theta=1.0),
        later_only="post_projection",
    ),
    randomise=_randomise,
)
