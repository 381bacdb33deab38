"""The parts of a decode step: its models run alone, its experts, its kernels.

`draft_loop` and `verify_loop` run one model of the step: same shapes, same state, in a loop on the
device like the step's own. Each round repeats the same work, written so that the compiler cannot
skip it.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, fields, replace

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.decode import propose
from jaxspec.drafters.base import Kept
from jaxspec.drafters.tree import ancestors
from jaxspec.models.target import Target, placement_of
from jaxspec.sampling import argmax
from jaxspec.shapes import Array, Int, Params
from jaxspec.state import DecodeSpec, DecodeState

Block = tuple[DecodeState, Array]
"""A state, and the tokens [B, T] that a step verifies: anchors and drafts."""

PassOutput = tuple[Array, tuple[Array, ...]]
"""Hidden states and features of a target's pass."""


def draft_loop(
    spec: DecodeSpec,
    target_params: Params,
    drafter_params: Params | None,
    block: Block,
    num_steps: Int[Array, ""],
) -> Block:
    """Draft and absorb a target's pass, repeatedly from one state; return the drafted block."""
    assert spec.drafter is not None
    target, drafter = spec.target.bind(target_params), spec.drafter.bind(drafter_params or {})
    b, t = block[1].shape
    config = spec.target.config
    shape = (1 + len(drafter.feature_layers), b, t, config.hidden_size)
    hidden, *features = jax.random.normal(jax.random.key(0), shape, jnp.dtype(spec.target.dtype))
    output = hidden, tuple(features)

    def body(_: Array, carry: tuple[Block, PassOutput]) -> tuple[Block, PassOutput]:
        (state, _), output = carry
        draft = propose(target, drafter, spec, state)
        # The barrier's outputs count as new in every round, and absorb waits for the draft.
        drafts, anchors, lengths, output = lax.optimization_barrier(
            (draft.tokens, state.anchors, state.lengths, output)
        )
        tokens = jnp.concatenate([anchors[:, None], drafts], axis=1)
        kept = Kept(tokens, output[0], output[1], lengths, jnp.full_like(lengths, t))
        absorbed = drafter.absorb(state.drafter, kept)
        state = dataclasses.replace(state, drafter=absorbed, anchors=anchors, lengths=lengths)
        return (state, tokens), output

    return lax.fori_loop(0, num_steps, body, (block, output))[0]


def verify_loop(
    spec: DecodeSpec,
    target_params: Params,
    drafter_params: Params | None,
    block: Block,
    num_steps: Int[Array, ""],
) -> Block:
    """Run the target over a block and take its best tokens, repeatedly."""
    target = spec.target.bind(target_params)
    b, t = block[1].shape
    feature_layers = () if spec.drafter is None else spec.drafter.bind_abstract().feature_layers
    seen = None if spec.tree is None else jnp.broadcast_to(jnp.tri(t, dtype=bool), (b, t, t))

    def body(_: Array, block: Block) -> Block:
        state, tokens = block
        output = target(
            tokens,
            state.lengths,
            jnp.full_like(state.lengths, t),
            state.caches,
            feature_layers=feature_layers,
            ancestors=seen,
        )
        best = argmax(output.logits)
        never = best < 0  # makes the next round depend on all logits of this one
        lengths = state.lengths - never[:, 0].astype(state.lengths.dtype)
        state = dataclasses.replace(state, caches=output.caches, lengths=lengths)
        return state, jnp.where(never, best, tokens)

    return lax.fori_loop(0, num_steps, body, block)


def distinct_experts(
    spec: DecodeSpec, target_params: Params, drafter_params: Params | None, state: DecodeState
) -> Int[Array, " L"]:
    """Return the number of experts of each layer that the next target pass of all rows uses."""
    target: Target = spec.target.bind(target_params)
    tokens, sees = state.anchors[:, None], None
    if spec.drafter is not None:
        draft = propose(target, spec.drafter.bind(drafter_params or {}), spec, state)
        tokens = jnp.concatenate([tokens, draft.tokens], axis=1)
        sees = None if draft.parents is None else ancestors(draft.parents)
    count = jnp.full_like(state.lengths, tokens.shape[1])
    placement = placement_of(tokens, state.lengths, count, ancestors=sees)
    return target.distinct_experts(tokens, placement, state.caches)


# --- the compiled program ------------------------------------------------------------------------


@dataclass(frozen=True)
class LoopCounts:
    """The kernels and round trips of one round of a compiled loop.

    Sampling is in a branch that greedy steps skip.

    Attributes:
      kernels: fusions, library calls, custom kernels, copies; a library call counts once.
      host_round_trips: loop conditions that the host of a GPU reads: the loop's own, and those of
        inner loops without a fixed number of rounds (once each).
      collectives: operations in which the devices of a mesh exchange data.
      collective_bytes: of their results, on one device.
    """

    kernels: int
    host_round_trips: int
    collectives: int = 0
    collective_bytes: int = 0


_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.-]+ = (.*?)\s([a-z][a-z0-9-]*)\((.*)$")
_COLLECTIVES = {"all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter"}
_NO_KERNEL = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"}
_NO_KERNEL |= {"opt-barrier", "add-dependency", "partition-id", "replica-id", "domain"}


def loop_counts(hlo: str, *, sampled: bool = False) -> LoopCounts:
    """Count the kernels and round trips of the largest outermost loop in optimized HLO.

    Args:
      sampled: count the branch with most kernels, else the one with fewest.

    Raises:
      ValueError: it has no loop.
    """
    bodies: dict[str, list[tuple[str, str, str]]] = {}
    entry = ""
    for block in re.split(r"\n(?=\S)", hlo):
        header = re.match(r"(ENTRY )?%?([\w.-]+) ", block)
        if header:
            matches = map(_INSTRUCTION.match, block.splitlines()[1:])
            bodies[header[2]] = [(m[1], m[2], m[3]) for m in matches if m]
            entry = header[2] if header[1] else entry
    loops = [_called(rest, "body") for _, op, rest in bodies.get(entry, []) if op == "while"]
    if not loops:
        raise ValueError("the program has no loop")
    rounds = [_counts(bodies, body, max if sampled else min) for body in loops]
    largest = max(rounds, key=lambda counts: counts.kernels)
    return replace(largest, host_round_trips=largest.host_round_trips + 1)


def _counts(
    bodies: Mapping[str, list[tuple[str, str, str]]], name: str, choose: Callable[..., LoopCounts]
) -> LoopCounts:
    sums = [0] * len(fields(LoopCounts))
    for shape, op, rest in bodies.get(name, []):
        if op in _NO_KERNEL or op.endswith(("-done", "-update")):
            continue
        times, inner = 1, [LoopCounts(1, 0)]
        if op.removesuffix("-start") in _COLLECTIVES:
            inner = [LoopCounts(1, 0, 1, _result_bytes(shape, started=op.endswith("-start")))]
        if op == "while":
            inner = [_counts(bodies, _called(rest, "body"), choose)]
            if known := re.search(r'known_trip_count":\{"n":"(\d+)"', rest):
                times = int(known[1])
            else:
                inner = [replace(i, host_round_trips=i.host_round_trips + 1) for i in inner]
        elif op == "conditional":
            branches = re.search(r"branch_computations=\{([^}]*)\}", rest)
            names = re.findall(r"%?([\w.-]+)", branches[1]) if branches else []
            names += re.findall(r"(?:true|false)_computation=%?([\w.-]+)", rest)
            inner = [_counts(bodies, name, choose) for name in names]
        elif op in ("call", "async-start"):
            inner = [_counts(bodies, _called(rest, "to_apply|calls"), choose)]
        chosen = choose(inner, key=lambda counts: counts.kernels)
        sums = [old + times * new for old, new in zip(sums, astuple(chosen), strict=True)]
    return LoopCounts(*sums)


def _result_bytes(shape: str, *, started: bool) -> int:
    """Return the bytes of an instruction's result.

    Args:
      started: the shape is of an operation's start: its arguments, then its results.
    """
    sizes = []
    if started:
        shape = re.sub(r"\bu32\[\]", "", shape)  # what XLA's start of a permutation keeps
    for dtype, dims in re.findall(r"\b(pred|[a-z]+\d+)\w*\[([\d,]*)\]", shape):
        bits = 8 if dtype == "pred" else int(re.sub(r"\D", "", dtype))
        sizes.append(math.prod(int(n) for n in dims.split(",") if n) * bits // 8)
    return sum(sizes[len(sizes) // 2 :] if started else sizes)


def _called(rest: str, attribute: str) -> str:
    match = re.search(rf"\b(?:{attribute})=%?([\w.-]+)", rest)
    return match[1] if match else ""
