"""`jaxspec bench`: what a decode step must cost, and then what it does cost.

Read `bench_command`, then `measure` (the decode programs, timed); what a step must cost is in `floor`, how it is
taken apart in `step_profile`. A batch of prompts is prefilled and decoded until every row has its new tokens;
nothing refills a row. Plain decoding is the same loop without a drafter, measured in the same run.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib.metadata
import itertools
import json
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
from jax.sharding import Mesh
from rich import box
from rich.console import Console
from rich.table import Table

import jaxspec
from jaxspec import decode, memory
from jaxspec import state as states
from jaxspec.api import BUNDLED, default_dtype, load
from jaxspec.cache import RING_MULTIPLE
from jaxspec.commands import plot
from jaxspec.commands.floor import (
    Ceiling,
    StepCost,
    measure_ceiling,
    step_cost,
    step_costs,
    step_floor_s,
)
from jaxspec.commands.generation import as_flags, use_one_thread
from jaxspec.commands.report import json_lines, write_line
from jaxspec.commands.step_profile import Block, draft_loop, loop_counts, verify_loop
from jaxspec.decode import propose
from jaxspec.drafters.base import Tree
from jaxspec.drafters.tree import ancestors
from jaxspec.engine import PREFILL_CHUNK, make_spec, row_keys
from jaxspec.families import families, family_of, graph_of, presets, random_drafter
from jaxspec.models.target import Target, place
from jaxspec.models.xla import COMPILER_OPTIONS
from jaxspec.params import Graph
from jaxspec.records import Drafting
from jaxspec.sampling import SamplingParams
from jaxspec.shapes import Int, Params
from jaxspec.sharding import fetch, make_mesh, mesh_of, parse_mesh, place_rows
from jaxspec.state import Admission, DecodeSpec, DecodeState, PrefillChunk

WARM_UP_STEPS = 4  # the first run of a captured graph goes kernel by kernel, the second records it
PART_STEPS = 16  # rounds of a timed run of drafting or verifying alone


class Dtype(enum.StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"


def bench_command(
    random_weights: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(presets()),
            help="Random weights of this target's shape, and of its drafter's.",
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            metavar="PATH|ID", help="A Gemma 4 model. Default: the bundled one, with its drafter."
        ),
    ] = None,
    drafter: Annotated[
        str | None,
        typer.Option(
            metavar="PATH|ID|mtp|dflash|none",
            help="A drafter; [bold]mtp[/] or [bold]dflash[/] for the bundled one, or the one of that kind that "
            "belongs to --random-weights (default: dflash); [bold]none[/] to measure plain decoding alone.",
        ),
    ] = None,
    synthetic_acceptance: Annotated[
        float | None,
        typer.Option(
            metavar="TAU",
            help="Commit this many tokens a step on average, whatever the target thinks of the drafts. "
            "Only the decision is replaced: all work is done. The text is meaningless.",
        ),
    ] = None,
    batch_size: Annotated[
        list[int] | None, typer.Option(min=1, help="Rows. Repeatable. Default: 1, 8 and 32.")
    ] = None,
    prompt_length: Annotated[
        int, typer.Option(min=1, help="Tokens of each prompt; at most 64 with the bundled target.")
    ] = 256,
    context_length: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            help="Start with so many tokens in every row's caches, which hold random numbers: nothing is "
            "prefilled. Instead of prompts; a drafter needs --synthetic-acceptance with it. Repeatable.",
        ),
    ] = None,
    new_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens to decode in each row, after prefill's own.")
    ] = 256,
    num_draft_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens drafted a step. Default: the drafter's own number."),
    ] = None,
    tree_topk: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Draft a tree: each level widens its best nodes, this many, by as many tokens. Needs "
            "--tree-depth and --num-draft-tokens, the nodes to verify: 3, 5 and 11, say.",
        ),
    ] = None,
    tree_depth: Annotated[int | None, typer.Option(min=1, help="Levels of that tree.")] = None,
    dtype: Annotated[
        Dtype | None,
        typer.Option(
            help="Of weights and caches. Default: bfloat16 on GPU, float32 on CPU.",
        ),
    ] = None,
    mesh: Annotated[
        str | None,
        typer.Option(
            metavar="data=2,model=4",
            help="Split rows over so many devices, and models over so many. Default: one device.",
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each case.")] = 5,
    seed: Annotated[int, typer.Option(min=0, help="Of random weights and prompts.")] = 0,
    json_path: Annotated[
        str | None,
        typer.Option(
            "--json",
            metavar="PATH|-",
            help="Also write everything as one line of JSON; with - the rest goes to standard error.",
        ),
    ] = None,
    plot_path: Annotated[
        Path | None,
        typer.Option(
            "--plot",
            metavar="FILE.png",
            help="Also draw tokens a second against batch size and against acceptance length, with the "
            "floors and plain decoding. Needs matplotlib: the extra \\[plot].",
        ),
    ] = None,
) -> None:
    """Measure prefill and decode steps, beside the least they could take.

    Every case is compiled and warmed up first; neither is in any time. Each
    time is the median of the repeats, with the device waited for, and every
    repeat starts again from the prompts. A step's parts are timed by
    themselves, on the state in the middle of a run: the drafter drafting and
    absorbing, the target verifying and choosing its best tokens. The rest is
    what the whole step takes beyond both.

      jaxspec bench

      jaxspec bench --random-weights 26b-a4b --synthetic-acceptance 7.7 --batch-size 1 --batch-size 8

      jaxspec bench --random-weights e4b --drafter mtp --num-draft-tokens 5 --synthetic-acceptance 3.5

      jaxspec bench --random-weights 31b --drafter none --batch-size 4 --context-length 32768
    """
    import_s = process_age_s()
    console = Console(stderr=json_path == "-", highlight=False)
    try:
        given = [v is not None for v in (tree_topk, tree_depth, num_draft_tokens)]
        if any(given[:2]) and not all(given):
            raise ValueError(
                "a tree needs --tree-topk, --tree-depth and --num-draft-tokens together"
            )
        drafts = drafter != "none" and bool(drafter or not target)  # a target of one's own has none
        if context_length and drafts and synthetic_acceptance is None:
            raise ValueError(
                "--context-length fills caches with random numbers, which no drafter can follow: add "
                "--synthetic-acceptance, or --drafter none"
            )
        if plot_path is not None:
            plot.check(plot_path)
        if target is None and random_weights is None and mesh is None:
            use_one_thread()
        devices = None if mesh is None else parse_mesh(mesh)
        sizes = batch_size or [1, 8, 32]
        if devices is not None:
            check_rows(sizes, devices.shape["data"])
        with json_lines(json_path or "-") as file:
            begin = time.perf_counter()
            pair = make_pair(
                random_weights,
                target,
                drafter,
                dtype=dtype.value if dtype else default_dtype(),
                num_draft_tokens=num_draft_tokens,
                tree=Tree(tree_topk, tree_depth) if tree_topk and tree_depth else None,
                synthetic_acceptance=synthetic_acceptance,
                seed=seed,
                mesh=devices,
                rows=max(sizes),
                positions=max(context_length or [prompt_length]) + new_tokens + 1,
            )
            load_s = time.perf_counter() - begin
            prompts = pair.prompts(max(sizes), prompt_length, seed)
            report = run(console, pair, prompts, sizes, context_length, new_tokens, repeats, seed)
            report["startup"] = startup = startup_of(report["results"][0], import_s, load_s)
            console.print(f"[dim]{described_startup(startup)}[/]")
            if json_path is not None:
                write_line(file, report)
            if plot_path is not None:
                plot.draw(report, plot_path)
    except (ValueError, OSError) as error:
        message = f"error: {error}"
        Console(stderr=True).print(
            message, style="red", markup=False, highlight=False, soft_wrap=True
        )
        raise typer.Exit(2) from None


# --- what is measured --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """Two models to measure, or one; with words for the report."""

    spec: DecodeSpec
    target_params: Params
    drafter_params: Params | None
    target_name: str
    drafter_name: str | None
    held_out: tuple[tuple[int, ...], ...] = ()  # prompts the bundled pair was not trained on

    @functools.cached_property
    def mesh(self) -> Mesh:
        return mesh_of(target=self.target_params, drafter=self.drafter_params)

    def prompts(self, count: int, length: int, seed: int) -> np.ndarray:
        """Return [count, length] prompt ids: held-out ones where there are any, else random."""
        if self.held_out:
            length = min(length, min(map(len, self.held_out)))
            rows = [self.held_out[i % len(self.held_out)][:length] for i in range(count)]
            return np.asarray(rows, np.int32)
        rng = np.random.default_rng(seed)
        return rng.integers(
            self.spec.target.config.vocab_size, size=(count, length), dtype=np.int32
        )


def make_pair(
    preset: str | None,
    target: str | None,
    drafter: str | None,
    *,
    dtype: str,
    num_draft_tokens: int | None = None,
    tree: Tree | None = None,
    synthetic_acceptance: float | None = None,
    seed: int = 0,
    mesh: Mesh | None = None,
    rows: int = 1,
    positions: int = 1,
) -> Pair:
    """Load a pair or make a random one.

    Args:
      rows, positions: of the largest case, a step's own tokens not counted. What no device holds is refused
        before random weights are made, and before caches are.

    Raises:
      ValueError: the options do not fit each other, a model cannot be loaded, or memory is too small.
    """
    kinds = [f.name for f in reversed(families("drafter")) if f.drafter_for]
    if preset is not None and (target is not None or drafter not in (None, *kinds, "none")):
        raise ValueError(
            "--random-weights makes both models itself: give no --target, and as --drafter only "
            f"{', '.join(kinds)} or none"
        )
    if preset is not None and preset not in presets():
        raise ValueError(
            f"--random-weights {preset} is not known; expected one of {', '.join(presets())}"
        )
    if synthetic_acceptance is not None and tree is not None:
        raise ValueError(
            "--synthetic-acceptance is for chains; leave --tree-topk and --tree-depth out"
        )
    held_out: tuple[tuple[int, ...], ...] = ()
    model, target_params, drafter_graph, drafter_params, drafter_name = (None,) * 5
    if preset is not None:
        target_graph = graph_of(presets()[preset], dtype)
        target_name = f"{preset}, random weights"
        kind = drafter or family_of(target_graph.config).usual_drafter or "none"
        if kind != "none":
            drafter_graph, drafter_name = random_drafter(preset, kind, dtype)
    else:
        model, drafter_model = load(target, drafter, dtype=dtype, mesh=mesh)
        target_graph, target_params, target_name = model.graph, model.params, target or "bundled"
        if target is None:
            values = json.loads((BUNDLED / "held_out.json").read_text())
            held_out = tuple(tuple(p["ids"]) for p in values["prompts"])
        if drafter_model is not None:
            drafter_graph, drafter_params = drafter_model.graph, drafter_model.params
            drafter_name = drafter or "dflash"
    if num_draft_tokens is not None and drafter_graph is None:
        raise ValueError("--num-draft-tokens needs a drafter")
    try:
        spec = make_spec(
            model or target_graph,
            drafter_graph,
            Drafting(num_draft_tokens, tree, synthetic_acceptance=synthetic_acceptance),
        )
    except ValueError as error:
        raise ValueError(as_flags(str(error))) from None
    if positions > target_graph.config.max_positions:
        raise ValueError(
            f"prompt or context and --new-tokens need {positions} positions; {target_name} has "
            f"{target_graph.config.max_positions}"
        )
    devices = mesh or make_mesh(devices=jax.devices()[:1])
    memory.check_fits(spec, rows, cache_length_for(spec, positions), devices)
    if target_params is None:
        target_params = _random_params(target_graph, seed, mesh)
        if drafter_graph is not None:
            drafter_params = _random_params(drafter_graph, seed + 1, mesh)
    return Pair(spec, target_params, drafter_params, target_name, drafter_name, held_out)


def cache_length_for(spec: DecodeSpec, positions: int) -> int:
    """Return the length of caches for so many positions and a step's own tokens."""
    return -(-(positions + spec.step_tokens) // RING_MULTIPLE) * RING_MULTIPLE


def check_rows(batch_sizes: Sequence[int], data: int) -> None:
    """Refuse batches that leave the devices of the data axis with unequal rows, with ValueError."""
    wrong = [size for size in batch_sizes if size % data]
    if wrong:
        raise ValueError(
            f"--batch-size {wrong[0]} does not divide by data={data} of --mesh; give multiples of {data}"
        )


def _random_params(graph: Graph, seed: int, mesh: Mesh | None) -> Params:
    """Return random weights, which behave as real ones do where that takes more than numbers."""
    params = graph.random_params(seed, None if mesh is None else graph.shardings(mesh))
    return family_of(graph.config).randomise(params, seed)


def drafter_kind(spec: DecodeSpec) -> str | None:
    """Return the name of the drafter's family, or None without a drafter."""
    return spec.drafter and family_of(spec.drafter.config).name


# --- what it does cost -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spread:
    """Median of some repeats, with the range they lie in."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float], scale: float = 1.0) -> Spread:
        return cls(statistics.median(values) * scale, min(values) * scale, max(values) * scale)

    def __str__(self) -> str:
        return f"{self.median:.3g} ({self.min:.3g}-{self.max:.3g})"


@dataclass(frozen=True)
class Result:
    """One case: a batch size, with or without the drafter.

    Attributes:
      label: the case in a few words, such as "mtp 7": drafter and draft tokens.
      context_length: tokens that the caches only seemed to hold at the start; None where prompts were prefilled.
      draft_floor_ms: the drafter's part of `floor_ms`.
      steps: of the longest row; `step_ms` is the decode time of the batch over these.
      draft_ms: of the drafter alone, drafting and absorbing; None for plain decoding.
      verify_ms: of the target's pass alone, with the choice of its best tokens.
      rest_ms: medians, `step_ms` beyond those two: acceptance, bookkeeping, the loop itself. Small and below
        zero where the parts overlap.
      kernels_per_step, host_round_trips_per_step: see `step_profile.LoopCounts`; on CPUs no host is apart.
      tokens_per_s: tokens returned after prefill's, of all rows, over decode time.
      ttft_ms: prefill of the whole batch; None where nothing was prefilled.
      tpot_ms: decode time over a row's mean tokens.
      acceptance_length: mean over all verify steps of all rows; None for plain decoding.
      distinct_experts: a layer, in one target pass at the end of the run: mean, fewest and most.
      footprint: what the configs say that a device holds.
      temporary_bytes: what the compiled loop takes beside that, where the compiler tells.
      peak_bytes: of the process so far, where the device counts them.
    """

    mode: str
    label: str
    batch_size: int
    context_length: int | None
    step_tokens: int
    cache_length: int
    cost: StepCost
    floor_ms: float
    draft_floor_ms: float
    step_ms: Spread
    draft_ms: Spread | None
    verify_ms: Spread
    rest_ms: float
    kernels_per_step: int
    host_round_trips_per_step: int | None
    steps: int
    tokens_per_s: Spread
    ttft_ms: Spread | None
    tpot_ms: Spread
    achieved_bytes_per_s: float
    acceptance_length: float | None
    acceptance: str | None  # "real" or "synthetic"
    distinct_experts: Spread | None
    prefill_compile_s: float
    decode_compile_s: float
    footprint: memory.Footprint
    temporary_bytes: int | None
    peak_bytes: int | None


def measure(
    pair: Pair,
    prompts: np.ndarray,
    ceiling: Ceiling,
    *,
    new_tokens: int,
    repeats: int,
    seed: int,
    context: int | None = None,
) -> Result:
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
    admission = place_rows(_admission(batch, new_tokens + 1, seed), mesh)
    state = states.init_state(
        spec,
        batch,
        cache_length=cache_length,
        num_stop_ids=1,
        cache_dtype=jnp.dtype(spec.target.dtype),
        mesh=mesh,
    )
    admit = _compiled(states.admit, mesh, 0, state, admission)
    begin = time.perf_counter()
    if context is None:
        chunks = [place_rows(chunk, mesh) for chunk in _chunks(prompts)]
        prefill = functools.partial(decode.prefill, spec)
        programs = {c.tokens.shape: _compiled(prefill, mesh, 2, *weights, state, c) for c in chunks}
        calls = [functools.partial(_feed, programs[c.tokens.shape], weights, c) for c in chunks]
    else:
        state = _with_random_caches(state, seed)
        anchors = place_rows(prompts[:, 0], mesh)
        jump = functools.partial(_stand_after, context)
        calls = [functools.partial(_compiled(jump, mesh, 1, anchors, state), anchors)]
    prefill_compile_s = time.perf_counter() - begin
    begin = time.perf_counter()
    loop = functools.partial(decode.decode_loop, spec)
    loop = _compiled(loop, mesh, 2, *weights, state, place_rows(np.int32(0), mesh))
    decode_compile_s = time.perf_counter() - begin

    def once(state: DecodeState, max_steps: int) -> tuple[DecodeState, float, float]:
        steps = place_rows(np.int32(max_steps), mesh)
        # The caches stay, and keep what is in them: old tokens are never looked at again.
        state = jax.block_until_ready((admit(state, admission), steps))[0]
        begin = time.perf_counter()
        for call in calls:
            state = call(state)
        jax.block_until_ready(state)
        middle = time.perf_counter()
        state = jax.block_until_ready(loop(*weights, state, steps))
        return state, middle - begin, time.perf_counter() - middle

    state = once(state, WARM_UP_STEPS)[0]
    ttft_s, step_s, tpot_s, tokens_per_s, lengths, steps = [], [], [], [], [], 0
    for _ in range(repeats):
        state, prefill_s, decode_s = once(state, new_tokens)
        num_steps, num_tokens = fetch((state.num_steps, state.num_tokens))
        steps = int(num_steps.max())
        ttft_s.append(prefill_s)
        step_s.append(decode_s / steps)
        tpot_s.append(decode_s / float((num_tokens - 1).mean()))
        tokens_per_s.append(float((num_tokens - 1).sum()) / decode_s)
        accepted = fetch(state.acceptance_lengths)
        lengths.append(np.concatenate([accepted[i, :n] for i, n in enumerate(num_steps)]).mean())
    experts = None
    if spec.target.config.num_experts:
        with jax.set_mesh(mesh):
            counts = fetch(jax.jit(distinct_experts, static_argnums=0)(spec, *weights, state))
        experts = Spread(float(counts.mean()), float(counts.min()), float(counts.max()))
    state = once(state, steps // 2)[0]
    draft_s, verify_s = _part_seconds(spec, weights, state, mesh, repeats)
    rest_s = statistics.median(step_s) - statistics.median(verify_s)
    rest_s -= statistics.median(draft_s) if draft_s else 0
    in_loop, on_gpu = loop_counts(loop.as_text()), mesh.devices.flat[0].platform == "gpu"
    analysis = loop.memory_analysis()
    # The floor is that of the middle of the run.
    middle = start + new_tokens // 2
    rows, ceiling = _of_a_group(mesh, batch, ceiling)
    cost, draft = step_cost(spec, rows, middle), step_costs(spec, rows, middle)[1]
    speculative = spec.drafter is not None
    return Result(
        mode="speculative" if speculative else "plain",
        label=_label(spec),
        batch_size=batch,
        context_length=context,
        step_tokens=spec.step_tokens,
        cache_length=cache_length,
        cost=cost,
        floor_ms=step_floor_s(spec, rows, middle, ceiling) * 1e3,
        draft_floor_ms=draft.floor_s(ceiling) * 1e3,
        step_ms=Spread.of(step_s, 1e3),
        draft_ms=Spread.of(draft_s, 1e3) if draft_s else None,
        verify_ms=Spread.of(verify_s, 1e3),
        rest_ms=rest_s * 1e3,
        kernels_per_step=in_loop.kernels,
        host_round_trips_per_step=in_loop.host_round_trips if on_gpu else None,
        steps=steps,
        tokens_per_s=Spread.of(tokens_per_s),
        ttft_ms=Spread.of(ttft_s, 1e3) if context is None else None,
        tpot_ms=Spread.of(tpot_s, 1e3),
        achieved_bytes_per_s=(cost.weight_bytes + cost.kv_bytes) / statistics.median(step_s),
        acceptance_length=float(np.mean(lengths)) if speculative else None,
        acceptance=("real" if spec.drafting.synthetic_acceptance is None else "synthetic")
        if speculative
        else None,
        distinct_experts=experts,
        prefill_compile_s=prefill_compile_s,
        decode_compile_s=decode_compile_s,
        footprint=memory.footprint(spec, batch, cache_length, mesh),
        temporary_bytes=None if analysis is None else analysis.temp_size_in_bytes,
        peak_bytes=(jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
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
        program = _compiled(functools.partial(part, spec), mesh, 2, *weights, block, few)
        block = jax.block_until_ready(program(*weights, block, few))
        for _ in range(repeats):
            begin = time.perf_counter()
            block = jax.block_until_ready(program(*weights, block, many))
            seconds[-1].append((time.perf_counter() - begin) / PART_STEPS)
    return seconds[0], seconds[1]


def _feed(
    prefill: Any, weights: tuple[Params, Params | None], chunk: PrefillChunk, state: DecodeState
) -> DecodeState:
    return prefill(*weights, state, chunk)


def _stand_after(context: int, anchors: Int[jax.Array, " B"], state: DecodeState) -> DecodeState:
    """Make admitted rows look as if a prompt had been prefilled."""
    return dataclasses.replace(
        state,
        lengths=jnp.full_like(state.lengths, context),
        anchors=anchors,
        active=jnp.full_like(state.active, True),
        tokens=state.tokens.at[:, 0].set(anchors),
        num_tokens=jnp.full_like(state.num_tokens, 1),
        num_steps=jnp.zeros_like(state.num_steps),
    )


def _with_random_caches(state: DecodeState, seed: int) -> DecodeState:
    """Fill caches and what else a drafter keeps, array by array, with numbers of the size that norms leave."""
    leaves, structure = jax.tree.flatten((state.caches, state.drafter))
    for i, old in enumerate(leaves):
        leaves[i] = _normal_like(old.sharding)(old, seed, i)
    caches, drafter = jax.tree.unflatten(structure, leaves)
    return dataclasses.replace(state, caches=caches, drafter=drafter)


@functools.cache
def _normal_like(sharding: Any) -> Callable[[jax.Array, int, int], jax.Array]:
    def make(old: jax.Array, seed: jax.Array, index: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed), index)
        return jax.random.normal(key, old.shape, old.dtype)

    return jax.jit(make, donate_argnums=0, out_shardings=sharding)


def _of_a_group(mesh: Mesh, batch: int, ceiling: Ceiling) -> tuple[int, Ceiling]:
    """Return the rows that devices of the model axis share, and what these devices can do together."""
    data, model = mesh.shape["data"], mesh.shape["model"]
    # Devices of a host share its memory and cores, all of which were measured.
    times = 1 / data if mesh.devices.flat[0].platform == "cpu" else model
    together = Ceiling(ceiling.bytes_per_s * times, ceiling.flops_per_s * times)
    return batch // data, together


def _compiled(function: Any, mesh: Mesh, state: int, *args: Any) -> Any:
    """Compile a program that takes a state at that place, may use its memory and returns the next."""
    jitted = jax.jit(
        function,
        donate_argnums=state,
        out_shardings=jax.tree.map(lambda x: x.sharding, args[state]),
        compiler_options=COMPILER_OPTIONS,
    )
    with jax.set_mesh(mesh):
        return jitted.lower(*args).compile()


def _admission(batch: int, max_new_tokens: int, seed: int) -> Admission:
    """Admit a greedy request without stop ids to every slot."""
    zeros = jnp.zeros(batch, jnp.int32)
    seeds = np.stack([np.full(batch, seed), np.arange(batch)], axis=1).astype(np.uint32)
    return Admission(
        slots=jnp.arange(batch, dtype=jnp.int32),
        max_new_tokens=zeros + max_new_tokens,
        stop_ids=jnp.full((batch, 1), -1, jnp.int32),
        sampling=SamplingParams.make(batch),
        keys=row_keys(jnp.asarray(seeds)),
    )


def _chunks(prompts: np.ndarray) -> list[PrefillChunk]:
    batch, length = prompts.shape
    chunks = []
    for begin in range(0, length, PREFILL_CHUNK):
        tokens = prompts[:, begin : begin + PREFILL_CHUNK]
        end = begin + tokens.shape[1]
        chunks.append(
            PrefillChunk(
                slots=jnp.arange(batch, dtype=jnp.int32),
                tokens=jnp.asarray(tokens),
                start=jnp.full(batch, begin, jnp.int32),
                count=jnp.full(batch, end - begin, jnp.int32),
                is_last=jnp.full(batch, end == length),
            )
        )
    return chunks


def distinct_experts(
    spec: DecodeSpec, target_params: Params, drafter_params: Params | None, state: DecodeState
) -> Int[jax.Array, " L"]:
    """Count the experts of each layer that the next target pass of all rows would use."""
    target: Target = spec.target.bind(target_params)
    tokens, sees = state.anchors[:, None], None
    if spec.drafter is not None:
        draft = propose(target, spec.drafter.bind(drafter_params or {}), spec, state)
        tokens = jnp.concatenate([tokens, draft.tokens], axis=1)
        sees = None if draft.parents is None else ancestors(draft.parents)
    count = jnp.full_like(state.lengths, tokens.shape[1])
    where = place(tokens, state.lengths, count, ancestors=sees)
    return target.distinct_experts(tokens, where, state.caches)


# --- the report --------------------------------------------------------------------------------------


def run(
    console: Console,
    pair: Pair,
    prompts: np.ndarray,
    batch_sizes: Sequence[int],
    contexts: Sequence[int] | None,
    new_tokens: int,
    repeats: int,
    seed: int,
) -> dict[str, Any]:
    """Print the ceiling, measure every case, print the results; return all of it as JSON values.

    Args:
      contexts: lengths to start from, with random caches; None prefills the prompts.
    """
    ceiling = measure_ceiling(
        pair.spec.target.dtype, step_cost(pair.spec, 1, prompts.shape[1]).weight_bytes
    )
    conditions = _conditions(pair, prompts, new_tokens, repeats, seed, ceiling)
    if contexts:
        conditions |= {"prompts": "caches of random numbers", "prompt_length": None}
    plain = dataclasses.replace(
        pair,
        spec=dataclasses.replace(pair.spec, drafter=None, drafting=Drafting()),
        drafter_params=None,
    )
    modes = [plain] if pair.spec.drafter is None else [plain, pair]
    nproc = conditions["nproc"]
    device = conditions["device"] + (f" (NPROC={nproc})" if nproc else "")
    console.print(
        f"[bold]{pair.target_name}[/] + {pair.drafter_name or 'no drafter'}{_shape(pair.spec)}\n"
        f"{conditions['dtype']} on {device} · jax {conditions['versions']['jax']} · "
        f"{conditions['prompts']} · {new_tokens} new tokens a row, greedy, no stop ids"
    )
    starts = contexts or [prompts.shape[1]]
    cases = list(itertools.product(batch_sizes, starts, modes))
    middles = [(batch, start + new_tokens // 2, case) for batch, start, case in cases]
    console.print(_ceiling_table(middles, ceiling))
    results = []
    for batch, start, case in cases:
        result = measure(
            case,
            prompts[:batch],
            ceiling,
            new_tokens=new_tokens,
            repeats=repeats,
            seed=seed,
            context=start if contexts else None,
        )
        results.append(result)
        speed = f"{result.step_ms} ms a step, {result.tokens_per_s} tok/s"
        print(f"{_case(result)}, {result.label}: {speed}", file=sys.stderr, flush=True)
    console.print(*_results_tables(results, repeats), sep="\n")
    return {**conditions, "results": [dataclasses.asdict(r) for r in results]}


def _shape(spec: DecodeSpec) -> str:
    if spec.drafter is None:
        return ""
    drafts = f": {spec.num_draft_tokens} drafts a step"
    if spec.tree is None:
        return drafts
    return f"{drafts}, a tree of topk {spec.tree.topk} and depth {spec.tree.depth}"


def _label(spec: DecodeSpec) -> str:
    if spec.drafter is None:
        return "plain"
    return f"{drafter_kind(spec)} {'tree ' if spec.tree else ''}{spec.num_draft_tokens}"


def _conditions(
    pair: Pair, prompts: np.ndarray, new_tokens: int, repeats: int, seed: int, ceiling: Ceiling
) -> dict[str, Any]:
    device = jax.devices()[0]
    packages = ("jax", "jaxlib", "flax", "numpy")
    return {
        "target": pair.target_name,
        "drafter": pair.drafter_name,
        "drafter_kind": drafter_kind(pair.spec),
        "num_draft_tokens": pair.spec.num_draft_tokens,
        "tree": None if pair.spec.tree is None else dataclasses.asdict(pair.spec.tree),
        "synthetic_acceptance": pair.spec.drafting.synthetic_acceptance,
        "dtype": pair.spec.target.dtype,
        "device": device.device_kind,
        "platform": device.platform,
        "nproc": os.environ.get("NPROC"),  # threads of programs on a CPU; else as many as cores
        "mesh": dict(pair.mesh.shape),
        "prompts": f"{'held-out' if pair.held_out else 'random'} prompts of {prompts.shape[1]} tokens",
        "prompt_length": prompts.shape[1],
        "new_tokens": new_tokens,
        "temperature": 0.0,
        "repeats": repeats,
        "seed": seed,
        "ceiling": dataclasses.asdict(ceiling),
        "versions": {
            "jaxspec": jaxspec.__version__,
            "python": sys.version.split()[0],
            **{name: importlib.metadata.version(name) for name in packages},
        },
        "command": shlex.join(["jaxspec", *sys.argv[1:]]),
    }


def _ceiling_table(cases: Sequence[tuple[int, int, Pair]], ceiling: Ceiling) -> Table:
    """Return the floors of cases: batch size, committed tokens of each row, models."""
    table = Table(
        title=f"floor of a step, at {ceiling.bytes_per_s / 1e9:,.0f} GB/s read and "
        f"{ceiling.flops_per_s / 1e12:.3g} TFLOP/s (both measured just now)",
        box=box.SIMPLE_HEAD,
        title_justify="left",
        caption="mode: the drafter and its draft tokens. context: tokens of a row, in the middle of the run. "
        "drafting: the drafter's part of the floor.",
        caption_justify="left",
        collapse_padding=True,
    )
    for name in (
        "batch",
        "context",
        "mode",
        "weights MB",
        "K/V MB",
        "GFLOP",
        "floor ms",
        "drafting",
    ):
        table.add_column(name, justify="left" if name == "mode" else "right")
    for batch, context, pair in cases:
        rows, together = _of_a_group(pair.mesh, batch, ceiling)
        cost = step_cost(pair.spec, rows, context)
        draft = step_costs(pair.spec, rows, context)[1]
        table.add_row(
            str(batch),
            f"{context:,}",
            _label(pair.spec),
            f"{cost.weight_bytes / 1e6:,.1f}",
            f"{cost.kv_bytes / 1e6:,.1f}",
            f"{cost.flops / 1e9:,.3g}",
            f"{step_floor_s(pair.spec, rows, context, together) * 1e3:.3g}",
            "" if pair.spec.drafter is None else f"{draft.floor_s(together) * 1e3:.3g}",
        )
    return table


def _results_tables(results: Sequence[Result], repeats: int) -> list[Table]:
    """Return tables that each fit a narrow terminal: what came out, where a step's time goes, what it took."""
    synthetic = any(r.acceptance == "synthetic" for r in results)
    tau = "set tau" if synthetic else "tau"
    titles = [f"measured: median (min-max) of {repeats}, warm-up and compilation excluded"]
    captions = [
        "x floor: step over floor. tok/s: returned, all rows. tau: mean tokens a verify step"
        + (", as --synthetic-acceptance sets them." if synthetic else "."),
        "draft, verify: the two models by themselves. rest: the step beyond them. TPOT: ms a token of a row. "
        "kernels: started in a step. host: round trips of a step.",
        "TTFT: prefill of the whole batch. GB/s: the floor's bytes over the step. compile: prefill + decode. "
        "GB: weights, caches and logits by the configs (peak of the process). experts: distinct ones a layer, "
        "in one target pass.",
    ]
    columns = [
        ("step ms", "x floor", "tok/s", "speedup", tau),
        ("draft ms", "verify ms", "rest ms", "TPOT ms", "kernels", "host"),
        ("TTFT ms", "GB/s", "compile s", "GB (peak)", "experts"),
    ]
    tables = []
    for title, caption, names in itertools.zip_longest(titles, captions, columns):
        table = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, collapse_padding=True)
        table.title_justify = table.caption_justify = "left"
        for name in ("batch", "mode", *names):
            table.add_column(name, justify="left" if name == "mode" else "right", no_wrap=True)
        tables.append(table)
    speeds, parts, details = tables
    plain = {_case(r): r.tokens_per_s.median for r in results if r.mode == "plain"}
    for r in results:
        case = (_case(r).removeprefix("batch "), r.label)
        speeds.add_row(
            *case,
            str(r.step_ms),
            f"{r.step_ms.median / r.floor_ms:.2f}",
            f"{r.tokens_per_s.median:,.0f}",
            "" if r.mode == "plain" else f"{r.tokens_per_s.median / plain[_case(r)]:.2f}x",
            "" if r.acceptance_length is None else f"{r.acceptance_length:.2f}",
        )
        parts.add_row(
            *case,
            "" if r.draft_ms is None else f"{r.draft_ms.median:.3g}",
            f"{r.verify_ms.median:.3g}",
            f"{r.rest_ms:.2g}",
            f"{r.tpot_ms.median:.3g}",
            f"{r.kernels_per_step:,}",
            "" if r.host_round_trips_per_step is None else str(r.host_round_trips_per_step),
        )
        details.add_row(
            *case,
            "" if r.ttft_ms is None else str(r.ttft_ms),
            f"{r.achieved_bytes_per_s / 1e9:,.0f}",
            f"{r.prefill_compile_s:.1f} + {r.decode_compile_s:.1f}",
            f"{r.footprint.total / 1e9:.3g}"
            + ("" if r.peak_bytes is None else f" ({r.peak_bytes / 1e9:.3g})"),
            "" if r.distinct_experts is None else str(r.distinct_experts),
        )
    return tables


def _case(result: Result) -> str:
    """Name a case without its mode."""
    context = "" if result.context_length is None else f" @ {result.context_length:,}"
    return f"batch {result.batch_size}{context}"


def startup_of(first: dict[str, Any], import_s: float | None, load_s: float) -> dict[str, Any]:
    """Return the seconds from the command to the first token, as if its first case were alone.

    Args:
      first: that case's result.
      import_s: age of the process when the command began, where that is known.
    """
    compile_s, ttft_ms = first["prefill_compile_s"], first["ttft_ms"]
    total = None
    if import_s is not None and ttft_ms is not None:
        total = import_s + load_s + compile_s + ttft_ms["median"] / 1e3
    return {
        "case": first["label"],
        "batch_size": first["batch_size"],
        "import_s": import_s,
        "load_s": load_s,
        "compile_s": compile_s,  # of prefill: the decode loop comes after the first token
        "first_token_s": total,
        "compilation_cache": jax.config.values["jax_compilation_cache_dir"],
    }


def described_startup(startup: dict[str, Any]) -> str:
    """Return a line about `startup_of`."""
    imports, total = startup["import_s"], startup["first_token_s"]
    parts = [] if imports is None else [f"{imports:.1f} start and imports"]
    parts += [f"{startup['load_s']:.1f} weights", f"{startup['compile_s']:.1f} compiling prefill"]
    to_first = "" if total is None else f": {total:.1f} to the first token"
    kept = startup["compilation_cache"]
    where = f"in {kept}" if kept else "nowhere (set JAX_COMPILATION_CACHE_DIR)"
    return f"seconds: {', '.join(parts)}{to_first}; programs are kept {where}"


def process_age_s() -> float | None:
    """Return the seconds since this process started, where the system tells."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
