"""One run of `jaxspec bench`: every case in turn, printed and returned. Read `run`."""

from __future__ import annotations

import dataclasses
import itertools
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from jaxspec.commands.bench import GENERATED, images, trace
from jaxspec.commands.bench.floor import (
    Ceiling,
    measure_ceiling,
    share_of_group,
    step_cost,
    stream_floor_s,
)
from jaxspec.commands.bench.measure import measure
from jaxspec.commands.bench.options import BenchOptions, TraceOptions
from jaxspec.commands.bench.pair import ModelPair, bench_cache_length, make_pair
from jaxspec.commands.bench.results import Case, floor_table, result_tables
from jaxspec.commands.dry_run import Plan, write
from jaxspec.commands.models import ModelOptions
from jaxspec.commands.progress import Notify
from jaxspec.commands.startup import versions
from jaxspec.engine.engine import Engine
from jaxspec.engine.request import Request
from jaxspec.options import DEFAULTS, VALUES, Drafting, Sampling, parse_cache_tokens
from jaxspec.runtime.runtime import cache_bucket


def run(
    console: Console,
    pair: ModelPair,
    prompts: np.ndarray,
    options: BenchOptions,
    notify: Notify = lambda _: None,
) -> dict[str, Any]:
    """Print the ceiling, measure every case and print the results; return all as JSON values."""
    notify("measuring the device")
    ceiling = measure_ceiling(
        pair.spec.target.dtype, step_cost(pair.spec, 1, prompts.shape[1]).weight_bytes
    )
    conditions = _conditions(pair, prompts, options, ceiling)
    contexts, new_tokens = options.context_length, options.new_tokens
    if contexts:
        conditions |= {"prompts": "caches of random numbers", "prompt_length": None}
    nproc = conditions["nproc"]
    device = conditions["device"] + (f" (NPROC={nproc})" if nproc else "")
    console.print(
        f"[bold]{pair.target_name}[/]{pair.title.removeprefix(pair.target_name)}\n"
        f"{conditions['dtype']} on {device} · jax {conditions['versions']['jax']} · "
        f"{conditions['prompts']} · {new_tokens} new tokens a row, {described(pair.sampling)}, no "
        f"stop ids"
    )
    alone = pair.spec.drafter is None or options.steps_only
    modes = [pair] if alone else [pair.plain(), pair]
    starts = contexts or [prompts.shape[1]]
    cases = [Case(*case) for case in itertools.product(options.batch_sizes, starts, modes)]
    console.print(floor_table(cases, new_tokens, ceiling))
    results = []
    for number, case in enumerate(cases, 1):
        name = f"case {number} of {len(cases)}, batch {case.batch}, {case.pair.label}"
        result = measure(
            case.pair,
            prompts[: case.batch],
            ceiling,
            new_tokens=new_tokens,
            repeats=options.repeats,
            seed=options.seed,
            context=case.start if contexts else None,
            parts=not options.steps_only,
            notify=lambda activity, name=name: notify(f"{name}: {activity}"),
        )
        results.append(result)
        speed = f"{result.step_ms} ms a step, {result.tokens_per_s} tok/s"
        print(f"batch {result.case}, {result.label}: {speed}", file=sys.stderr, flush=True)
    console.print(*result_tables(results, options.repeats), sep="\n")
    return {**conditions, "results": [dataclasses.asdict(r) for r in results]}


def run_images(
    console: Console,
    models: ModelOptions,
    options: BenchOptions,
    drafting: Drafting,
    sampling: Sampling,
    notify: Notify = lambda _: None,
) -> dict[str, Any]:
    """Measure images, print the results, and return them as JSON values."""
    sizes: dict[str, Any] = dict(seed=options.seed)
    sizes["positions"] = images.most_positions(options.prompt_length)
    pair = make_pair(
        *(models, drafting, options.random_weights), sampling=sampling, images=True, **sizes
    )
    measured: dict[str, Any] = dict(repeats=options.repeats, seed=options.seed, notify=notify)
    ceiling, results, first = images.run(pair, text_tokens=options.prompt_length, **measured)
    device = jax.devices()[0].device_kind
    console.print(
        f"[bold]{pair.target_name}[/]{pair.title.removeprefix(pair.target_name)}\n"
        f"{pair.spec.target.dtype} on {device} · jax {jax.__version__}"
    )
    console.print(images.render(ceiling, results, first))
    return {
        **_models_of(pair, options.seed),
        "repeats": options.repeats,
        "ceiling": dataclasses.asdict(ceiling),
        **images.to_json(results, first),
    }


def _conditions(
    pair: ModelPair, prompts: np.ndarray, options: BenchOptions, ceiling: Ceiling
) -> dict[str, Any]:
    kind = "held-out" if pair.held_out else "random"
    return {
        **_models_of(pair, options.seed),
        "prompts": f"{kind} prompts of {prompts.shape[1]} tokens",
        "prompt_length": prompts.shape[1],
        "new_tokens": options.new_tokens,
        **{name: getattr(pair.sampling, name) for name in VALUES},
        "draft_sampling": pair.spec.drafting.draft_sampling,
        "verification": pair.spec.drafting.verification,
        "repeats": options.repeats,
        "ceiling": dataclasses.asdict(ceiling),
    }


def _models_of(pair: ModelPair, seed: int) -> dict[str, Any]:
    """Return the models and their device as JSON values."""
    device = jax.devices()[0]
    return {
        "target": pair.target_name,
        "drafter": pair.drafter_name,
        "drafter_kind": pair.drafter_kind,
        "num_draft_tokens": pair.spec.num_draft_tokens,
        "tree": None if pair.spec.tree is None else dataclasses.asdict(pair.spec.tree),
        "synthetic_acceptance": pair.spec.drafting.synthetic_acceptance,
        "dtype": pair.spec.target.dtype,
        "kv_dtype": pair.spec.target.cache_dtype.name,
        "weights": pair.spec.target.storage,
        "drafter_weights": None if pair.spec.drafter is None else pair.spec.drafter.storage,
        "device": device.device_kind,
        "platform": device.platform,
        "nproc": os.environ.get("NPROC"),  # threads of CPU programs; None for the number of cores
        "mesh": dict(pair.mesh.shape),
        "seed": seed,
        "versions": versions("jax", "jaxlib", "flax", "numpy"),
        "command": shlex.join(["jaxspec", *sys.argv[1:]]),
    }


def described(sampling: Sampling) -> str:
    """Return the sampling as text: "greedy", and the values that are not the default."""
    names = [n for n in VALUES if getattr(sampling, n) != DEFAULTS[n]]
    if sampling.temperature == 0:
        names.insert(0, "greedy")
    words = [
        n if n == "greedy" else f"{n.replace('_', '-')} {getattr(sampling, n):g}" for n in names
    ]
    return ", ".join(words)


def startup_of(first: dict[str, Any], import_s: float | None, load_s: float) -> dict[str, Any]:
    """Return the seconds from the command to the first token, as if the first case were alone.

    Args:
      first: the result of the first case.
      import_s: age of the process when the command began; None if unknown.
    """
    compile_s, ttft_ms = first["prefill_compile_s"], first["ttft_ms"]
    total = None
    if import_s is not None and ttft_ms is not None:
        total = import_s + load_s + compile_s + ttft_ms["median"] / 1e3
    kept = jax.config.values["jax_enable_compilation_cache"]
    return {
        "case": first["label"],
        "batch_size": first["batch_size"],
        "import_s": import_s,
        "load_s": load_s,
        "compile_s": compile_s,  # of prefill; the decode loop comes after the first token
        "first_token_s": total,
        "compilation_cache": jax.config.values["jax_compilation_cache_dir"] if kept else None,
    }


def described_startup(startup: dict[str, Any]) -> str:
    """Return the values of `startup_of` as one line."""
    imports, total = startup["import_s"], startup["first_token_s"]
    parts = [] if imports is None else [f"{imports:.1f} start and imports"]
    parts += [f"{startup['load_s']:.1f} weights", f"{startup['compile_s']:.1f} compiling prefill"]
    to_first = "" if total is None else f": {total:.1f} to the first token"
    kept = startup["compilation_cache"]
    where = f"in {kept}" if kept else "nowhere"
    return f"seconds: {', '.join(parts)}{to_first}; programs are kept {where}"


def _traced(
    models: ModelOptions,
    drafting: Drafting,
    sampling: Sampling,
    options: TraceOptions,
    preset: str | None,
    seed: int,
    *,
    with_weights: bool = True,
) -> tuple[ModelPair, list[trace.TraceRequest], int]:
    """Return the models of a trace, its requests, and the positions of a slot."""
    stream = None if options.trace in (None, GENERATED) else trace.read(Path(options.trace))
    positions = max((r.prompt_tokens + r.new_tokens for r in stream or ()), default=1)
    rows = options.slots if options.cache_tokens is None else 1  # an engine checks its pages itself
    sizes: dict[str, Any] = dict(rows=rows, positions=positions, sampling=sampling)
    pair = make_pair(models, drafting, preset, seed=seed, with_weights=with_weights, **sizes)
    if stream is None:
        limit = pair.spec.target.config.max_positions
        stream = trace.generate(options.requests, options.trace_seed, options.rate, limit)
        positions = max(r.prompt_tokens + r.new_tokens for r in stream)
    return pair, stream, cache_bucket(positions + pair.spec.step_tokens)


def dry_run(
    models: ModelOptions,
    options: BenchOptions,
    drafting: Drafting,
    sampling: Sampling,
    traced: TraceOptions,
    json_path: str | None,
) -> None:
    """Print the memory of the largest case, or of a trace's engine."""
    preset, seed = options.random_weights, options.seed
    if traced.trace is not None:
        pair, _, length = _traced(
            models, drafting, sampling, traced, preset, seed, with_weights=False
        )
        engine: dict[str, Any] = dict(
            read_ahead=traced.read_ahead,
            cache_tokens=parse_cache_tokens(traced.cache_tokens),
            max_prefill_tokens=traced.max_prefill_tokens,
            invariant=traced.invariant,
        )
        plan = Plan(pair.spec, pair.mesh, traced.slots, length, **engine)
    else:
        rows, positions = max(options.batch_sizes), options.positions
        sizes: dict[str, Any] = dict(rows=rows, positions=positions, sampling=sampling, seed=seed)
        if options.images:
            sizes |= dict(rows=1, positions=images.most_positions(options.prompt_length))
            rows, positions = 1, sizes["positions"]
        pair = make_pair(
            *(models, drafting, preset), with_weights=False, images=options.images, **sizes
        )
        length = bench_cache_length(pair.spec, positions)
        plan = Plan(pair.spec, pair.mesh, rows, length, passes=options.images)
    write(plan, pair.title, json_path)


def run_trace(
    console: Console,
    models: ModelOptions,
    drafting: Drafting,
    sampling: Sampling,
    options: TraceOptions,
    preset: str | None,
    seed: int,
    plot_path: Path | None,
    notify: Notify = lambda _: None,
) -> dict[str, Any]:
    """Send a trace through an engine, print the results, and return them as JSON values."""
    pair, stream, cache_length = _traced(models, drafting, sampling, options, preset, seed)
    notify("measuring the device")
    ceiling = measure_ceiling(
        pair.spec.target.dtype, step_cost(pair.spec, options.slots, cache_length).weight_bytes
    )
    lengths = [(r.prompt_tokens, r.new_tokens) for r in stream]
    rows, together = share_of_group(pair.mesh, options.slots, ceiling)
    floor_s = stream_floor_s(pair.spec, rows, lengths, together, pair.mesh.shape["data"])
    engine = Engine(
        *pair.loaded,
        drafting=drafting,
        program_features=pair.spec.program_features,
        batch_size=options.slots,
        cache_length=cache_length,
        cache_tokens=parse_cache_tokens(options.cache_tokens),
        steps_per_return=options.steps_per_return,
        max_prefill_tokens=options.max_prefill_tokens,
        read_ahead=options.read_ahead,
        invariant=options.invariant,
        choose_length=options.choose_length,
    )
    arrivals = "all at once" if not stream[-1].arrival_s else f"over {stream[-1].arrival_s:.1f} s"
    device = jax.devices()[0].device_kind
    console.print(
        f"[bold]{pair.target_name}[/]{pair.title.removeprefix(pair.target_name)}\n"
        f"{pair.spec.target.dtype} on {device} · jax {jax.__version__} · {len(stream)} requests, "
        f"{arrivals}"
    )
    rng = np.random.default_rng(seed)
    size = pair.spec.target.config.vocab_size
    requests = [
        Request(
            tuple(rng.integers(size, size=r.prompt_tokens).tolist()),
            r.new_tokens,
            sampling,
            seed=seed,
            sample=index,
            id=index,
        )
        for index, r in enumerate(stream)
    ]
    with Console(stderr=True, highlight=False).status("[dim]compiling") as status:

        def update(message: str) -> None:
            status.update(f"[dim]{message}")
            notify(message)

        report, moments = trace.run(engine, stream, requests, update)
    console.print(trace.render(report))
    if floor_s is not None:
        console.print(f"floor: {floor_s:.2f} s, with all slots taken and prompts without padding")
    if plot_path is not None:
        trace.draw(report, moments, f"{pair.title}, {device}", plot_path)
    return {
        **_models_of(pair, seed),
        "trace": dataclasses.asdict(options),
        "cache_length": engine.cache_length,
        "ceiling": dataclasses.asdict(ceiling),
        "floor_s": floor_s,
        **trace.to_json(report, moments),
    }
