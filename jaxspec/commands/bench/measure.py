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

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxspec.commands.bench.experts import distinct_experts
from jaxspec.commands.bench.floor import Ceiling
from jaxspec.commands.bench.pair import Pair
from jaxspec.commands.bench.profile import Block, draft_loop, verify_loop
from jaxspec.commands.bench.programs import (
    admission_of,
    bench_cache_length,
    chunks_of,
    feed,
    stand_after,
    with_random_caches,
)
from jaxspec.commands.bench.results import CaseResult, Observed
from jaxspec.runtime.runtime import Bound, NewRows, Runtime
from jaxspec.state import DecodeState
from jaxspec.weights.sharding import fetch

WARM_UP_STEPS = 4  # the first run of a captured graph goes kernel by kernel, the second records it
PART_STEPS = 16  # rounds of a timed run of drafting or verifying alone


@dataclass(frozen=True)
class CasePrograms:
    """The compiled programs of a case, bound to all they take but the state.

    Attributes:
      fill: what stands for prefill, one after the other: a chunk of the prompts each.
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
        pair: Pair,
        prompts: np.ndarray,
        *,
        new_tokens: int,
        seed: int,
        context: int | None,
        cache_length: int,
    ) -> tuple[CasePrograms, DecodeState]:
        """Compile them, and make the state they start from; for the arguments see `measure`."""
        weights = (pair.target_params, pair.drafter_params)
        runtime = Runtime(pair.spec, *weights, batch_size=len(prompts), cache_length=cache_length)
        state = runtime.init_state(num_stop_ids=1)
        admission = admission_of(runtime, new_tokens + 1, seed, pair.sampling)
        state = runtime.admit(state, admission)
        begin = time.perf_counter()
        if context is None:
            fill = [
                feed(runtime, state, runtime.place(chunk))
                for chunk in chunks_of(prompts, runtime.shapes.longest)
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
        made = cls(runtime, admission, fill, loop, prefill_compile_s, decode_compile_s)
        return made, state

    def run(self, state: DecodeState, max_steps: int) -> tuple[DecodeState, float, float]:
        """Decode the batch from its prompts on; return also the seconds of prefill and of decoding."""
        steps = self.runtime.place(np.int32(max_steps))
        # The caches stay, and keep what is in them: old tokens are never looked at again.
        state = jax.block_until_ready((self.runtime.admit(state, self.admission), steps))[0]
        begin = time.perf_counter()
        for call in self.fill:
            state = call(state)
        jax.block_until_ready(state)
        middle = time.perf_counter()
        state = jax.block_until_ready(self.loop(state, steps))
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
    say: Callable[[str], None] = lambda _: None,
) -> CaseResult:
    """Prefill and decode one batch of prompts, `repeats` times after a warm-up.

    Args:
      ceiling: of one device; floors and rates are of the devices that share the same rows.
      context: prefill nothing; rows stand after so many tokens, and their first prompt token follows.
      say: called with what is being done.
    """
    mesh = pair.mesh
    spec, (batch, prompt_length) = pair.spec, prompts.shape
    start = prompt_length if context is None else context
    cache_length = bench_cache_length(spec, start + new_tokens + 1)
    weights = (pair.target_params, pair.drafter_params)
    say("compiling")
    programs, state = CasePrograms.compile(
        pair,
        prompts,
        new_tokens=new_tokens,
        seed=seed,
        context=context,
        cache_length=cache_length,
    )
    say("warming up")
    state = programs.run(state, WARM_UP_STEPS)[0]
    prefill_s, step_s, token_s, tokens_per_s, lengths, steps = [], [], [], [], [], 0
    for repeat in range(repeats):
        say(f"run {repeat + 1} of {repeats}")
        state, filling_s, decode_s = programs.run(state, new_tokens)
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
    say("the models by themselves")
    state = programs.run(state, steps // 2)[0]
    draft_s, verify_s = _part_seconds(programs.runtime, state, repeats)
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
            loop=programs.loop.compiled,
            prefill_compile_s=programs.prefill_compile_s,
            decode_compile_s=programs.decode_compile_s,
            experts=experts,
        )
    )


def _part_seconds(
    runtime: Runtime, state: DecodeState, repeats: int
) -> tuple[list[float], list[float]]:
    """Time drafting (nothing, without a drafter) and verifying alone, a round each; the state is given away."""
    spec, weights = runtime.spec, (runtime.target_params, runtime.drafter_params)
    tokens = np.repeat(fetch(state.anchors)[:, None], spec.step_tokens, axis=1)
    block: Block = (state, runtime.place(jnp.asarray(tokens)))
    few, many = (runtime.place(np.int32(n)) for n in (WARM_UP_STEPS, PART_STEPS))
    seconds = []
    for part in (draft_loop, verify_loop):
        seconds.append([])
        if part is draft_loop and spec.drafter is None:
            continue
        given = (*weights, block, few)
        program = runtime.programs.get(part, given, donate=2, mesh=runtime.mesh, spec=spec)
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
