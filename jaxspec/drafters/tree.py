"""Draft trees: grow a tree from a drafter's probabilities, and check its shape.

Everything here works on arrays, without a model. A tree with G drafts is a block of T = G + 1 rows.
The anchor is the first row, and every other row comes after its parent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.drafters.base import Draft
from jaxspec.models.xla import materialize, top_k
from jaxspec.options import Drafting, FieldError, Tree
from jaxspec.shapes import Array, Bool, Float, Int
from jaxspec.weights.model_def import ModelDef

CarryT = TypeVar("CarryT")


class Children(NamedTuple):
    """The most likely next tokens of some nodes."""

    tokens: Int[Array, "B F K"]
    log_probs: Float[Array, "B F K"]


Expand = Callable[[CarryT, Int[Array, "B F"], Int[Array, "B F"], int], tuple[CarryT, Children]]
"""`expand(carry, tokens, origins, topk)` returns the next carry and the children of a frontier.

Node f has token `tokens[:, f]`. Its parent is node `origins[:, f]` of the previous frontier.
`carry` is the drafter's own (its states, for example) and is in the order of the previous frontier.
The first frontier is the anchor alone.
"""


def grow(
    expand: Expand[CarryT],
    carry: CarryT,
    anchors: Int[Array, " B"],
    *,
    tree: Tree,
    num_draft_tokens: int,
) -> Draft:
    """Grow a tree level by level, then keep the `num_draft_tokens` most likely nodes.

    A node's probability is the product of the probabilities on its path from the anchor. A node is
    therefore never kept without its parent. Each level expands only its `topk` best nodes.

    Source: EAGLE-2 (Li et al. 2024), section 4.
    """
    b, k = anchors.shape[0], tree.topk
    frontier, origins = anchors[:, None], jnp.zeros((b, 1), jnp.int32)
    # `rows` are the pool rows of the frontier. The pool holds all nodes; its row 0 is the anchor.
    scores, rows = jnp.zeros((b, 1), jnp.float32), jnp.zeros((b, 1), jnp.int32)
    tokens, parents, pool_scores, size = [], [], [], 0
    for _ in range(tree.depth):
        carry, children = expand(carry, frontier, origins, k)
        # Rounding must not make a child likelier than its parent.
        total = scores[:, :, None] + jnp.minimum(children.log_probs, 0.0)
        tokens.append(children.tokens.reshape(b, -1))
        parents.append(jnp.repeat(rows, k, axis=1))
        pool_scores.append(total.reshape(b, -1))
        scores, best = lax.top_k(pool_scores[-1], k)
        frontier, origins = _take(tokens[-1], best), best // k
        rows = size + 1 + best
        size += pool_scores[-1].shape[1]
    # Of equal scores `top_k` takes the first, and the pool has parents before children.
    _, kept = lax.top_k(jnp.concatenate(pool_scores, axis=1), num_draft_tokens)
    kept = jnp.sort(kept, axis=1)
    parent = _take(jnp.concatenate(parents, axis=1), kept)
    # A parent's block row is the number of kept nodes whose pool row is at most the parent's.
    parent = jnp.sum(kept[:, None, :] + 1 <= parent[:, :, None], axis=-1, dtype=jnp.int32)
    return Draft(_take(jnp.concatenate(tokens, axis=1), kept), parent)


def best_children(logits: Float[Array, "B F V"], topk: int) -> Children:
    """Return the `topk` most likely tokens of each node and their log-probabilities."""
    logits = materialize(logits)
    top, tokens = top_k(logits, topk)
    return Children(tokens, top - jax.nn.logsumexp(logits, axis=-1, keepdims=True))


def ancestors(parents: Int[Array, "B G"]) -> Bool[Array, "B T T"]:
    """Return for each row of a block a mask of its ancestors, the row itself included."""
    b, g = parents.shape
    rows = jnp.arange(g + 1, dtype=jnp.int32)
    own = rows[:, None] == rows
    seen = [jnp.broadcast_to(own[0], (b, g + 1))]
    for i in range(g):
        above = jnp.take_along_axis(jnp.stack(seen, axis=1), parents[:, i, None, None], axis=1)
        seen.append(above[:, 0] | own[i + 1])
    return jnp.stack(seen, axis=1)


def visible_rows(draft: Draft) -> Bool[Array, "#B T T"]:
    """Return for each row of a block the mask of rows that it follows, the row itself included."""
    if draft.parents is not None:
        return ancestors(draft.parents)
    rows = jnp.arange(draft.tokens.shape[1] + 1, dtype=jnp.int32)
    return (rows[:, None] >= rows)[None]


def check_tree(tree: Tree, num_draft_tokens: int, max_depth: int) -> None:
    """Check that a tree suits a drafter and a number of draft tokens.

    Args:
      max_depth: the longest chain that the drafter can propose.

    Raises:
      FieldError: the tree has no nodes or is deeper than `max_depth`; it has fewer nodes than
        `num_draft_tokens`; or `num_draft_tokens` is less than its topk or its depth.
    """
    k, depth = tree.topk, tree.depth
    if k < 1 or depth < 1:
        raise FieldError(
            "tree", lambda _: f"a draft tree has topk and depth of at least 1, got {k} and {depth}"
        )
    if depth > max_depth:
        raise FieldError(
            "tree",
            lambda format_field: (
                f"{format_field('tree depth')} {depth}: this drafter drafts at most {max_depth} "
                "tokens in a row"
            ),
        )
    if num_draft_tokens < max(k, depth):
        raise FieldError(
            "num_draft_tokens",
            lambda format_field: (
                f"a tree of topk {k} and depth {depth} needs at least {max(k, depth)} draft "
                "tokens, got "
                f"{num_draft_tokens}: raise {format_field('num_draft_tokens')} or narrow the tree"
            ),
        )
    nodes = k + (depth - 1) * k * k
    if num_draft_tokens > nodes:
        raise FieldError(
            "num_draft_tokens",
            lambda format_field: (
                f"a tree of topk {k} and depth {depth} has {nodes} nodes, fewer than "
                f"{num_draft_tokens} "
                f"draft tokens: lower {format_field('num_draft_tokens')} or widen the tree"
            ),
        )


def _take(x: Array, index: Array) -> Array:
    return jnp.take_along_axis(x, index, axis=1)


def settle_num_draft_tokens(drafter: ModelDef, drafting: Drafting) -> int:
    """Return the number of tokens to draft in a step: `drafting`'s, or the drafter's default.

    Raises:
      FieldError: the drafter cannot propose that many.
      ValueError: the tree does not allow it.
    """
    model, requested = drafter.bind_abstract(), drafting.num_draft_tokens
    limit = model.max_draft_tokens
    if drafting.tree is not None:
        if requested is None:
            raise FieldError(
                "num_draft_tokens",
                lambda format_field: (
                    f"a tree needs {format_field('num_draft_tokens')}: how many of its nodes to "
                    "verify"
                ),
            )
        check_tree(drafting.tree, requested, limit)
        children, topk = model.max_children, drafting.tree.topk
        if children is not None and topk > children:
            raise FieldError(
                "tree",
                lambda format_field: (
                    f"{format_field('tree topk')} {topk}: this drafter chooses among {children} tokens"
                ),
            )
        return requested
    drafts = model.default_draft_tokens if requested is None else requested
    if not 1 <= drafts <= limit:
        raise FieldError(
            "num_draft_tokens", f"is {drafts}; this drafter proposes 1 to {limit} tokens a step"
        )
    return drafts
