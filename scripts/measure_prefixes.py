"""Measure how much sooner a prompt gets its first token when its beginning is stored: `Engine(prefix_bytes=...)`.

    python -m scripts.measure_prefixes [--prefix-tokens 1024] [--json out/prefixes.json]
    python -m scripts.measure_prefixes --random-weights 31b --prefix-tokens 8192

A first turn is a prompt of so many random tokens. A second turn is that prompt without its last four tokens, which a
chat template renders in another way, an answer and a next question. The table has seconds from `add` to the first
token, the median of some runs:

    no store           the second turn, by an engine without a store
    cold               by an engine with an empty store
    second turn        after the first turn
    again              the same prompt once more: one token is read
    from host memory   the second turn, after other prompts moved its prefix there
    samples            until each of some samples of one prompt has its first token, with and without a store

All programs are compiled before, by `warm_up`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import typer
from rich.console import Console
from rich.table import Table

import jaxspec
from jaxspec import Engine, Request
from jaxspec.engine.prefix_cache.copies import RowSizes
from jaxspec.engine.request import Completion
from jaxspec.registry import family_of, presets
from jaxspec.runtime.runtime import Programs, cache_bucket
from jaxspec.weights.define import model_def_of, random_drafter
from jaxspec.weights.loading import LoadedModel
from jaxspec.weights.model_def import ModelDef

RERENDERED, ANSWER, QUESTION, NEW = 4, 96, 32, 8
PREFIXES = 3  # of whole rows, for which the device has pages besides those of its slots


def model(model_def: ModelDef, seed: int) -> LoadedModel:
    """Return a model of random weights."""
    params = family_of(model_def.config).randomise(model_def.random_params(seed), seed)
    return LoadedModel(model_def, params, model_def.config, None, Path(), "random weights")


def pair_of(
    preset: str | None, drafter: str | None, dtype: str
) -> tuple[tuple[LoadedModel, LoadedModel | None], str]:
    """Return target and drafter, and what the drafter is."""
    if preset is None:
        pair = jaxspec.load()
        return (pair.target, None if drafter == "none" else pair.drafter), drafter or "dflash"
    target = model_def_of(presets()[preset], dtype)
    kind = drafter or family_of(target.config).usual_drafter or "none"
    if kind == "none":
        return (model(target, 0), None), kind
    return (model(target, 0), model(random_drafter(preset, kind, dtype)[0], 1)), kind


def first_tokens_s(engine: Engine, prompts: Sequence[Sequence[int]]) -> float:
    """Return the seconds until each of some prompts has its first token, and let them end."""
    begin, waiting, last = time.perf_counter(), set(), 0.0
    for sample, prompt in enumerate(prompts):
        waiting.add(engine.add(Request(tuple(prompt), NEW, sample=sample)))
    while not engine.is_idle:
        for event in engine.step():
            assert not isinstance(event, Completion) or event.error is None, event
            if event.token_ids and event.id in waiting:
                waiting.remove(event.id)
                last = time.perf_counter() - begin
    return last


def forget(engine: Engine) -> None:
    """Empty the engine's store."""
    engine.target_params = engine.target_params


def main(
    random_weights: Annotated[str | None, typer.Option(help="a size; None: bundled pair")] = None,
    drafter: Annotated[str | None, typer.Option(help="none, or with random weights a kind")] = None,
    prefix_tokens: Annotated[int, typer.Option(min=16)] = 1024,
    slots: Annotated[int, typer.Option(min=1)] = 4,
    samples: Annotated[int, typer.Option(min=1)] = 4,
    runs: Annotated[int, typer.Option(min=1)] = 3,
    dtype: Annotated[str, typer.Option()] = "bfloat16",
    json_path: Annotated[Path | None, typer.Option("--json", help="write the figures here")] = None,
) -> None:
    """Measure and print a table."""
    began = time.perf_counter()
    pair, kind = pair_of(random_weights, drafter, dtype)
    second_tokens = prefix_tokens - RERENDERED + ANSWER + QUESTION
    length = cache_bucket(second_tokens + NEW + 16)
    options: dict[str, Any] = dict(batch_size=slots, cache_length=length, programs=Programs())
    off = Engine(*pair, **options)
    row = RowSizes(off.spec, length, off.mesh)
    nbytes = PREFIXES * row.min_bytes
    on = Engine(*pair, prefix_bytes=nbytes, prefix_host_bytes=4 * nbytes, **options)

    for engine in (off, on):
        engine.warm_up()
    off.reset()

    rng = np.random.default_rng(0)
    size = pair[0].config.vocab_size

    def ids(count: int) -> list[int]:
        return rng.integers(5, size, count).tolist()

    first, *others = (ids(prefix_tokens) for _ in range(1 + PREFIXES + slots))
    second = first[:-RERENDERED] + ids(ANSWER + QUESTION)

    def hot() -> float:
        forget(on)
        first_tokens_s(on, [first])
        return first_tokens_s(on, [second])

    def from_host() -> float:
        forget(on)
        first_tokens_s(on, [first])
        for other in others:
            first_tokens_s(on, [other])
        return first_tokens_s(on, [second])

    def cold() -> float:
        forget(on)
        return first_tokens_s(on, [second])

    def sampled(engine: Engine) -> float:
        forget(engine)
        return first_tokens_s(engine, [first] * samples)

    cases: list[tuple[str, Callable[[], float]]] = [
        ("no store", lambda: first_tokens_s(off, [second])),
        (f"{samples} samples, no store", lambda: sampled(off)),
        ("cold", cold),
        ("second turn", hot),
        ("again", lambda: first_tokens_s(on, [second])),
        ("from host memory", from_host),
        (f"{samples} samples", lambda: sampled(on)),
    ]
    rows: list[dict[str, Any]] = []
    for name, case in cases:
        if name == "cold":
            off.reset()  # gives back its caches
        case()  # allocates
        before = on.num_compilations
        seconds = [case() for _ in range(runs)]
        assert on.num_compilations == before
        stats = on.prefix_stats
        assert stats is not None
        rows.append(
            {"name": name, "seconds": float(np.median(seconds)), "of": seconds, **vars(stats)}
        )
        print(f"{time.perf_counter() - began:.0f} s: {name}: {seconds}", flush=True)
    device = jax.devices()[0].device_kind
    table = Table(
        "seconds to first token",
        "median",
        "least",
        "most",
        "host hits",
        title=f"{random_weights or 'bundled'} {pair[0].model_def.dtype}, {kind}, {prefix_tokens} tokens, "
        f"{slots} slots on {device}",
    )
    for case in rows:
        times = (f"{x:.4f}" for x in (case["seconds"], min(case["of"]), max(case["of"])))
        table.add_row(case["name"], *times, str(case["host_hits"]))
    console = Console(width=100)
    console.print(table)
    by_name = {row["name"]: row["seconds"] for row in rows}
    console.print(
        f"second turn {by_name['no store'] / by_name['second turn']:.1f} times sooner; a page of 64 "
        f"tokens takes {sum(row.page_bytes.values()) / 2**20:,.1f} MiB; {on.num_compilations} programs, "
        f"{on.timings.compile_s:.0f} s of compiling, {time.perf_counter() - began:.0f} s in all"
    )
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        about = {"device": device, "jax": jax.__version__, "prefix_tokens": prefix_tokens}
        json_path.write_text(json.dumps({**about, "model": random_weights, "rows": rows}) + "\n")


if __name__ == "__main__":
    typer.run(main)
