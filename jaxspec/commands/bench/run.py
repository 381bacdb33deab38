"""One run of `jaxspec bench`: every case, one after the other, printed and returned. Read `run`."""

from __future__ import annotations

import dataclasses
import itertools
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from jaxspec.commands.bench import tables, trace, trace_report
from jaxspec.commands.bench.floor import Ceiling, measure_ceiling, step_cost
from jaxspec.commands.bench.measure import measure
from jaxspec.commands.bench.pair import Pair, make_pair
from jaxspec.commands.bench.tables import Case
from jaxspec.commands.bench.trace_options import GENERATED, TraceOptions
from jaxspec.commands.models import ModelOptions
from jaxspec.commands.startup import versions
from jaxspec.engine.engine import Engine
from jaxspec.engine.request import Request
from jaxspec.options import DEFAULTS, VALUES, Drafting, Sampling
from jaxspec.runtime.runtime import cache_bucket


def run(
    console: Console,
    pair: Pair,
    prompts: np.ndarray,
    batch_sizes: Sequence[int],
    contexts: Sequence[int],
    new_tokens: int,
    repeats: int,
    seed: int,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Print the ceiling, measure every case, print the results; return all of it as JSON values.

    Args:
      contexts: lengths to start from, with random caches; without any, the prompts are prefilled.
      say: called with what is being done.
    """
    say("measuring the device")
    ceiling = measure_ceiling(
        pair.spec.target.dtype, step_cost(pair.spec, 1, prompts.shape[1]).weight_bytes
    )
    conditions = _conditions(pair, prompts, new_tokens, repeats, seed, ceiling)
    if contexts:
        conditions |= {"prompts": "caches of random numbers", "prompt_length": None}
    nproc = conditions["nproc"]
    device = conditions["device"] + (f" (NPROC={nproc})" if nproc else "")
    console.print(
        f"[bold]{pair.target_name}[/]{pair.title.removeprefix(pair.target_name)}\n"
        f"{conditions['dtype']} on {device} · jax {conditions['versions']['jax']} · "
        f"{conditions['prompts']} · {new_tokens} new tokens a row, {described(pair.sampling)}, no stop ids"
    )
    modes = [pair] if pair.spec.drafter is None else [pair.plain(), pair]
    starts = contexts or [prompts.shape[1]]
    cases = [Case(*case) for case in itertools.product(batch_sizes, starts, modes)]
    console.print(*tables.floors(cases, new_tokens, ceiling), sep="\n")
    results = []
    for number, case in enumerate(cases, 1):
        name = f"case {number} of {len(cases)}, batch {case.batch}, {case.pair.label}"
        result = measure(
            case.pair,
            prompts[: case.batch],
            ceiling,
            new_tokens=new_tokens,
            repeats=repeats,
            seed=seed,
            context=case.start if contexts else None,
            say=lambda doing, name=name: say(f"{name}: {doing}"),
        )
        results.append(result)
        speed = f"{result.step_ms} ms a step, {result.tokens_per_s} tok/s"
        print(f"batch {result.case}, {result.label}: {speed}", file=sys.stderr, flush=True)
    console.print(*tables.results(results, repeats), sep="\n")
    return {**conditions, "results": [dataclasses.asdict(r) for r in results]}


def _conditions(
    pair: Pair, prompts: np.ndarray, new_tokens: int, repeats: int, seed: int, ceiling: Ceiling
) -> dict[str, Any]:
    return {
        **_models_of(pair, seed),
        "prompts": f"{'held-out' if pair.held_out else 'random'} prompts of {prompts.shape[1]} tokens",
        "prompt_length": prompts.shape[1],
        "new_tokens": new_tokens,
        **{name: getattr(pair.sampling, name) for name in VALUES},
        "draft_sampling": pair.spec.drafting.draft_sampling,
        "verification": pair.spec.drafting.verification,
        "repeats": repeats,
        "ceiling": dataclasses.asdict(ceiling),
    }


def _models_of(pair: Pair, seed: int) -> dict[str, Any]:
    """Return what runs, and where."""
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
        "nproc": os.environ.get("NPROC"),  # threads of programs on a CPU; else as many as cores
        "mesh": dict(pair.mesh.shape),
        "seed": seed,
        "versions": versions("jax", "jaxlib", "flax", "numpy"),
        "command": shlex.join(["jaxspec", *sys.argv[1:]]),
    }


def described(sampling: Sampling) -> str:
    """Say how tokens are chosen: "greedy", or what is not the default."""
    given = [n for n in VALUES if getattr(sampling, n) != DEFAULTS[n]]
    if sampling.temperature == 0:
        given.insert(0, "greedy")
    words = [
        n if n == "greedy" else f"{n.replace('_', '-')} {getattr(sampling, n):g}" for n in given
    ]
    return ", ".join(words)


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


def run_trace(
    console: Console,
    models: ModelOptions,
    drafting: Drafting,
    sampling: Sampling,
    options: TraceOptions,
    preset: str | None,
    seed: int,
    plot_path: Path | None,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Send a trace through an engine, print what came of it, and return that as JSON values."""
    given = options.trace
    jobs = None if given in (None, GENERATED) else trace.read(Path(given))
    most = max((job.prompt_tokens + job.new_tokens for job in jobs or ()), default=1)
    asked: dict[str, Any] = dict(rows=options.slots, positions=most, sampling=sampling)
    pair = make_pair(models, drafting, preset, seed=seed, **asked)
    if jobs is None:
        limit = pair.spec.target.config.max_positions
        jobs = trace.generated(options.requests, options.trace_seed, options.rate, limit)
        most = max(job.prompt_tokens + job.new_tokens for job in jobs)
    engine = Engine(
        *pair.loaded,
        drafting=drafting,
        program_features=pair.spec.program_features,
        batch_size=options.slots,
        cache_length=cache_bucket(most + pair.spec.step_tokens),
        steps_per_return=options.steps_per_return,
        max_prefill_tokens=options.max_prefill_tokens,
        read_ahead=options.read_ahead,
        invariant=options.invariant,
        choose_length=options.choose_length,
    )
    arrivals = "all at once" if not jobs[-1].arrival_s else f"over {jobs[-1].arrival_s:.1f} s"
    device = jax.devices()[0].device_kind
    console.print(
        f"[bold]{pair.target_name}[/]{pair.title.removeprefix(pair.target_name)}\n"
        f"{pair.spec.target.dtype} on {device} · jax {jax.__version__} · {len(jobs)} requests, {arrivals}"
    )
    rng = np.random.default_rng(seed)
    size = pair.spec.target.config.vocab_size
    requests = [
        Request(
            tuple(rng.integers(size, size=job.prompt_tokens).tolist()),
            job.new_tokens,
            sampling,
            seed=seed,
            sample=place,
            id=place,
        )
        for place, job in enumerate(jobs)
    ]
    with Console(stderr=True, highlight=False).status("[dim]compiling") as status:

        def tell(message: str) -> None:
            status.update(f"[dim]{message}")
            say(message)

        report, moments = trace.run(engine, jobs, requests, tell)
    console.print(trace_report.shown(report))
    if plot_path is not None:
        trace_report.draw(report, moments, f"{pair.title}, {device}", plot_path)
    return {
        **_models_of(pair, seed),
        "trace": dataclasses.asdict(options),
        "cache_length": engine.cache_length,
        **trace_report.to_json(report, moments),
    }
