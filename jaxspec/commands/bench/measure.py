"""What a decode step does cost: the decode programs of one case, timed.

Read `measure`; what follows from its observations is in `results`. What a step must cost is in `floor`, how it is
taken apart in `profile`. A batch of prompts is prefilled and decoded until every row has its new tokens; nothing
refills a row. Plain decoding is the same loop without a drafter, measured in the same run.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxspec import decode
from jaxspec import state as states
from jaxspec.commands.bench.experts import distinct_experts
from jaxspec.commands.bench.floor import Ceiling
from jaxspec.commands.bench.pair import Pair
from jaxspec.commands.bench.profile import Block, draft_loop, verify_loop
from jaxspec.commands.bench.programs import (
    admission_of,
    cache_length_for,
    chunks_of,
    compiled,
    feed,
    stand_after,
    with_random_caches,
)
from jaxspec.commands.bench.results import CaseResult, Observed
from jaxspec.shapes import Params
from jaxspec.sharding import fetch, place_rows
from jaxspec.state import Admission, DecodeSpec, DecodeState

WARM_UP_STEPS = 4  # the first run of a captured graph goes kernel by kernel, the second records it
PART_STEPS = 16  # rounds of a timed run of drafting or verifying alone


@dataclass(frozen=True)
class Programs:
    """The compiled programs of a case, bound to all they take but the state.

    Attributes:
      fill: what stands for prefill, one after the other: a chunk of the prompts each.
    """

    admission: Admission
    admit: Callable[..., DecodeState]
    fill: list[Callable[[DecodeState], DecodeState]]
    loop: Any
    prefill_compile_s: float
    decode_compile_s: float

    @classmethod
    def compile(
        cls,
        pair: Pair,
        prompts: np.ndarray,
        *,
        new_tokens: int,
        seed: int,
        context: int | None,
        cache_length: int,
    ) -> tuple[Programs, DecodeState]:
        """Compile them, and make the state they start from; for the arguments see `measure`."""
        mesh, spec, batch = pair.mesh, pair.spec, len(prompts)
        weights = (pair.target_params, pair.drafter_params)
        admission = place_rows(admission_of(batch, new_tokens + 1, seed), mesh)
        state = states.init_state(
            spec,
            batch,
            cache_length=cache_length,
            num_stop_ids=1,
            cache_dtype=jnp.dtype(spec.target.dtype),
            mesh=mesh,
        )
        admit = compiled(states.admit, mesh, 0, state, admission)
        begin = time.perf_counter()
        if context is None:
            chunks = [place_rows(chunk, mesh) for chunk in chunks_of(prompts)]
            prefill = functools.partial(decode.prefill, spec)
            programs = {
                c.tokens.shape: compiled(prefill, mesh, 2, *weights, state, c) for c in chunks
            }
            fill = [functools.partial(feed, programs[c.tokens.shape], weights, c) for c in chunks]
        else:
            state = with_random_caches(state, seed)
            anchors = place_rows(prompts[:, 0], mesh)
            jump = functools.partial(stand_after, context)
            fill = [functools.partial(compiled(jump, mesh, 1, anchors, state), anchors)]
        prefill_compile_s = time.perf_counter() - begin
        begin = time.perf_counter()
        loop = functools.partial(decode.decode_loop, spec)
        loop = compiled(loop, mesh, 2, *weights, state, place_rows(np.int32(0), mesh))
        decode_compile_s = time.perf_counter() - begin
        made = cls(admission, admit, fill, loop, prefill_compile_s, decode_compile_s)
        return made, state

    def run(
        self, pair: Pair, state: DecodeState, max_steps: int
    ) -> tuple[DecodeState, float, float]:
        """Decode the batch from its prompts on; return also the seconds of prefill and of decoding."""
        weights = (pair.target_params, pair.drafter_params)
        steps = place_rows(np.int32(max_steps), pair.mesh)
        # The caches stay, and keep what is in them: old tokens are never looked at again.
        state = jax.block_until_ready((self.admit(state, self.admission), steps))[0]
        begin = time.perf_counter()
        for call in self.fill:
            state = call(state)
        jax.block_until_ready(state)
        middle = time.perf_counter()
        state = jax.block_until_ready(self.loop(*weights, state, steps))
        return state, middle - begin, time.perf_counter() - middle


def measure(
    pair: Pair,
    prompts: np.ndarray,
    ceiling: Ceiling,
    *,
    new_tokens: int,
    repeats: int,
    seed: int,
    context: int | None = None,
) -> CaseResult:
    """Prefill and decode one batch of prompts, `repeats` times after a warm-up.

    Args:
      ceiling: of one device; floors and rates are of the devices that share the same rows.
      context: prefill nothing; rows stand after so many tokens, and their first prompt token follows.
    """
    mesh = pair.mesh
    spec, (batch, prompt_length) = pair.spec, prompts.shape
    start = prompt_length if context is None else context
    cache_length = cache_length_for(spec, start + new_tokens + 1)
    weights = (pair.target_params, pair.drafter_params)
    programs, state = Programs.compile(
        pair,
        prompts,
        new_tokens=new_tokens,
        seed=seed,
        context=context,
        cache_length=cache_length,
    )
    state = programs.run(pair, state, WARM_UP_STEPS)[0]
    prefill_s, step_s, token_s, tokens_per_s, lengths, steps = [], [], [], [], [], 0
    for _ in range(repeats):
        state, filling_s, decode_s = programs.run(pair, state, new_tokens)
        num_steps, num_tokens = fetch((state.num_steps, state.num_tokens))
        steps = int(num_steps.max())
        prefill_s.append(filling_s)
        step_s.append(decode_s / steps)
        token_s.append(decode_s / float((num_tokens - 1).mean()))
        tokens_per_s.append(float((num_tokens - 1).sum()) / decode_s)
        accepted = fetch(state.acceptance_lengths)
        lengths.append(np.concatenate([accepted[i, :n] for i, n in enumerate(num_steps)]).mean())
    experts = None
    if spec.target.config.num_experts:
        with jax.set_mesh(mesh):
            experts = fetch(jax.jit(distinct_experts, static_argnums=0)(spec, *weights, state))
    state = programs.run(pair, state, steps // 2)[0]
    draft_s, verify_s = _part_seconds(spec, weights, state, mesh, repeats)
    rows, together = of_a_group(mesh, batch, ceiling)
    return CaseResult.of(
        Observed(
            pair=pair,
            batch=batch,
            context=context,
            cache_length=cache_length,
            rows=rows,
            ceiling=together,
            middle=start + new_tokens // 2,
            steps=steps,
            prefill_s=prefill_s,
            step_s=step_s,
            token_s=token_s,
            tokens_per_s=tokens_per_s,
            lengths=lengths,
            draft_s=draft_s,
            verify_s=verify_s,
            loop=programs.loop,
            prefill_compile_s=programs.prefill_compile_s,
            decode_compile_s=programs.decode_compile_s,
            experts=experts,
        )
    )


def _part_seconds(
    spec: DecodeSpec,
    weights: tuple[Params, Params | None],
    state: DecodeState,
    mesh: Mesh,
    repeats: int,
) -> tuple[list[float], list[float]]:
    """Time drafting (nothing, without a drafter) and verifying alone, a round each; the state is given away."""
    tokens = np.repeat(fetch(state.anchors)[:, None], spec.step_tokens, axis=1)
    block: Block = (state, place_rows(jnp.asarray(tokens), mesh))
    few, many = (place_rows(np.int32(n), mesh) for n in (WARM_UP_STEPS, PART_STEPS))
    seconds = []
    for part in (draft_loop, verify_loop):
        seconds.append([])
        if part is draft_loop and spec.drafter is None:
            continue
        program = compiled(functools.partial(part, spec), mesh, 2, *weights, block, few)
        block = jax.block_until_ready(program(*weights, block, few))
        for _ in range(repeats):
            begin = time.perf_counter()
            block = jax.block_until_ready(program(*weights, block, many))
            seconds[-1].append((time.perf_counter() - begin) / PART_STEPS)
    return seconds[0], seconds[1]


def of_a_group(mesh: Mesh, batch: int, ceiling: Ceiling) -> tuple[int, Ceiling]:
    """Return the rows that devices of the model axis share, and what these devices can do together."""
    data, model = mesh.shape["data"], mesh.shape["model"]
    # Devices of a host share its memory and cores, all of which were measured.
    times = 1 / data if mesh.devices.flat[0].platform == "cpu" else model
    together = Ceiling(ceiling.bytes_per_s * times, ceiling.flops_per_s * times)
    return batch // data, together
