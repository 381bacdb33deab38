"""The measurement of one case: its decode programs, timed.

Read `measure`; `results` derives the results. `floor` has the least cost of a step, `profile` its
parts. A batch of prompts is prefilled and decoded until every row has its new tokens; no row is
refilled. Plain decoding is the same loop without a drafter, measured in the same run.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.commands.bench.floor import Ceiling, share_of_group
from jaxspec.commands.bench.pair import ModelPair, bench_cache_length
from jaxspec.commands.bench.profile import Block, distinct_experts, draft_loop, verify_loop
from jaxspec.commands.bench.results import CaseResult, Observed
from jaxspec.commands.progress import Notify
from jaxspec.options import Sampling
from jaxspec.runtime.prefill import PREFILL_CHUNK, make_chunk
from jaxspec.runtime.runtime import Bound, NewRows, Runtime
from jaxspec.shapes import Int
from jaxspec.state import DecodeState, PrefillChunk
from jaxspec.weights.sharding import fetch

WARM_UP_STEPS = 4  # the first run of a CUDA graph starts kernel by kernel, the second records it
PART_STEPS = 16  # rounds of a timed run of drafting or verifying alone


@dataclass(frozen=True)
class CasePrograms:
    """The compiled programs of a case, bound to all arguments but the state.

    Attributes:
      fill: replace the state by the prefilled one, a chunk of the prompts each.
    """

    runtime: Runtime
    admission: NewRows
    fill: list[Callable[[DecodeState], DecodeState]]
    loop: Bound
    prefill_compile_s: float
    decode_compile_s: float

    @classmethod
    def compile(
        cls,
        pair: ModelPair,
        prompts: np.ndarray,
        *,
        new_tokens: int,
        seed: int,
        context: int | None,
        cache_length: int,
    ) -> tuple[CasePrograms, DecodeState]:
        """Compile the programs, and make their first state; for the arguments see `measure`."""
        weights = (pair.target_params, pair.drafter_params)
        runtime = Runtime(pair.spec, *weights, batch_size=len(prompts), cache_length=cache_length)
        state = runtime.init_state(num_stop_ids=1)
        admission = admission_of(runtime, new_tokens + 1, seed, pair.sampling)
        state = runtime.admit(state, admission)
        begin = time.perf_counter()
        if context is None:
            fill = [
                feed(runtime, state, runtime.place(chunk))
                for chunk in chunks_of(prompts, runtime.shapes.longest, runtime.shapes.parts)
            ]
        else:
            state = with_random_caches(state, seed)
            anchors = runtime.place(prompts[:, 0])
            jump = functools.partial(stand_after, context)
            jump = runtime.programs.get(jump, (anchors, state), donate=1, mesh=runtime.mesh)
            fill = [functools.partial(jump, anchors)]
        prefill_compile_s = time.perf_counter() - begin
        begin = time.perf_counter()
        loop = runtime.program("decode", state, runtime.place(np.int32(0)))
        decode_compile_s = time.perf_counter() - begin
        return cls(runtime, admission, fill, loop, prefill_compile_s, decode_compile_s), state

    def run(self, state: DecodeState, max_steps: int) -> tuple[DecodeState, float, float]:
        """Decode the batch; return the state, and the seconds of prefill and of decoding."""
        steps = self.runtime.place(np.int32(max_steps))
        # The caches keep their content: old tokens are never read again.
        state = jax.block_until_ready((self.runtime.admit(state, self.admission), steps))[0]
        begin = time.perf_counter()
        for call in self.fill:
            state = call(state)
        jax.block_until_ready(state)
        middle = time.perf_counter()
        state = jax.block_until_ready(self.loop(state, steps))
        return state, middle - begin, time.perf_counter() - middle


def measure(
    pair: ModelPair,
    prompts: np.ndarray,
    ceiling: Ceiling,
    *,
    new_tokens: int,
    repeats: int,
    seed: int,
    context: int | None = None,
    parts: bool = True,
    notify: Notify = lambda _: None,
) -> CaseResult:
    """Prefill and decode one batch of prompts, `repeats` times after a warm-up.

    Args:
      ceiling: of one device; floors and rates are of the devices that share the same rows.
      context: prefill nothing; rows start after so many tokens, with their first prompt token.
      parts: whether to time the drafter and the target by themselves too, and to count experts.
    """
    mesh = pair.mesh
    spec, (batch, prompt_length) = pair.spec, prompts.shape
    start = prompt_length if context is None else context
    cache_length = bench_cache_length(spec, start + new_tokens + 1)
    notify("compiling")
    programs, state = CasePrograms.compile(
        pair,
        prompts,
        new_tokens=new_tokens,
        seed=seed,
        context=context,
        cache_length=cache_length,
    )
    notify("warming up")
    state = programs.run(state, WARM_UP_STEPS)[0]
    rows, together = share_of_group(mesh, batch, ceiling)
    observed = Observed(
        pair=pair,
        batch=batch,
        context=context,
        cache_length=cache_length,
        rows=rows,
        ceiling=together,
        middle=start + new_tokens // 2,
        loop=programs.loop.compiled,
        prefill_compile_s=programs.prefill_compile_s,
        decode_compile_s=programs.decode_compile_s,
    )
    for repeat in range(repeats):
        notify(f"run {repeat + 1} of {repeats}")
        state, filling_s, decode_s = programs.run(state, new_tokens)
        num_steps, num_tokens = fetch((state.num_steps, state.num_tokens))
        observed.steps = int(num_steps.max())
        observed.prefill_s.append(filling_s)
        observed.step_s.append(decode_s / observed.steps)
        observed.token_s.append(decode_s / float((num_tokens - 1).mean()))
        observed.tokens_per_s.append(float((num_tokens - 1).sum()) / decode_s)
        accepted = fetch(state.acceptance_lengths)
        observed.lengths.append(
            np.concatenate([accepted[i, :n] for i, n in enumerate(num_steps)]).mean()
        )
    if not parts:
        return CaseResult.of(observed)
    if spec.target.config.num_experts:
        weights = (pair.target_params, pair.drafter_params)
        with jax.set_mesh(mesh):
            observed.experts = fetch(
                jax.jit(distinct_experts, static_argnums=0)(spec, *weights, state)
            )
    notify("the models by themselves")
    state = programs.run(state, observed.steps // 2)[0]
    observed.draft_s, observed.verify_s = _part_seconds(programs.runtime, state, repeats)
    return CaseResult.of(observed)


def _part_seconds(
    runtime: Runtime, state: DecodeState, repeats: int
) -> tuple[list[float], list[float]]:
    """Return seconds per round of drafting (if any) and of verifying; the state is donated."""
    spec, weights = runtime.spec, (runtime.target_params, runtime.drafter_params)
    tokens = np.repeat(fetch(state.anchors)[:, None], spec.step_tokens, axis=1)
    block: Block = (state, runtime.place(jnp.asarray(tokens)))
    warm_up, timed = (runtime.place(np.int32(n)) for n in (WARM_UP_STEPS, PART_STEPS))
    seconds = []
    for part in (draft_loop, verify_loop):
        seconds.append([])
        if part is draft_loop and spec.drafter is None:
            continue
        arguments = (*weights, block, warm_up)
        program = runtime.programs.get(part, arguments, donate=2, mesh=runtime.mesh, spec=spec)
        block = jax.block_until_ready(program(*arguments))
        for _ in range(repeats):
            begin = time.perf_counter()
            block = jax.block_until_ready(program(*weights, block, timed))
            seconds[-1].append((time.perf_counter() - begin) / PART_STEPS)
    return seconds[0], seconds[1]


# --- states --------------------------------------------------------------------------------------


def admission_of(runtime: Runtime, max_new_tokens: int, seed: int, sampling: Sampling) -> NewRows:
    """Admit a request without stop ids to every slot."""
    batch = runtime.batch_size
    seeds = np.stack([np.full(batch, seed), np.arange(batch)], axis=1)
    limits, no_stop = [max_new_tokens] * batch, np.full((batch, 1), -1)
    return runtime.admission(range(batch), limits, no_stop, [sampling] * batch, seeds)


def chunks_of(prompts: np.ndarray, longest: int, parts: int = 1) -> list[PrefillChunk]:
    """Cut prompts of one length, one for each slot, into chunks without padding.

    Args:
      longest: tokens of a pass, if that is more than `PREFILL_CHUNK` of each row.
      parts: of the slots, on a mesh.
    """
    batch, length = prompts.shape
    width = max(PREFILL_CHUNK, longest // batch)
    return [
        make_chunk(
            {i: (p, begin) for i, p in enumerate(prompts)},
            batch,
            min(width, length - begin),
            batch,
            parts=parts,
        )
        for begin in range(0, length, width)
    ]


def feed(
    runtime: Runtime, state: DecodeState, chunk: PrefillChunk
) -> Callable[[DecodeState], DecodeState]:
    """Compile the prefill of a chunk, and return a function that feeds the chunk to a state."""
    prefill = runtime.program("prefill", state, chunk)
    return lambda state: prefill(state, chunk)


def stand_after(context: int, anchors: Int[jax.Array, " B"], state: DecodeState) -> DecodeState:
    """Return admitted rows as after the prefill of `context` tokens."""
    return dataclasses.replace(
        state,
        lengths=jnp.full_like(state.lengths, context),
        anchors=anchors,
        active=jnp.full_like(state.active, True),
        tokens=state.tokens.at[:, 0].set(anchors),
        num_tokens=jnp.full_like(state.num_tokens, 1),
        num_steps=jnp.zeros_like(state.num_steps),
    )


def with_random_caches(state: DecodeState, seed: int) -> DecodeState:
    """Fill caches and the drafter's state with standard normal numbers, array by array."""
    leaves, structure = jax.tree.flatten((state.caches, state.drafter))
    for i, old in enumerate(leaves):
        leaves[i] = _normal_like(old.sharding)(old, seed, i)
    caches, drafter = jax.tree.unflatten(structure, leaves)
    return dataclasses.replace(state, caches=caches, drafter=drafter)


@functools.cache
def _normal_like(sharding: Any) -> Callable[[jax.Array, int, int], jax.Array]:
    def make(old: jax.Array, seed: jax.Array, index: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed), index)
        # fp8 is cast from bfloat16. Real numbers are larger by a scale, which costs the same.
        dtype = jnp.bfloat16 if old.dtype.itemsize == 1 else old.dtype
        return jax.random.normal(key, old.shape, dtype).astype(old.dtype)

    return jax.jit(make, donate_argnums=0, out_shardings=sharding)
