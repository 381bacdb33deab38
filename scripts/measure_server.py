"""Measure what the server costs: tokens a second of an engine alone, and of a server on the same requests.

    python -m scripts.measure_server [--slots 8] [--requests 64]
    python -m scripts.measure_server --random-weights 26b-a4b --synthetic-acceptance 7.7 --slots 32 --requests 192

All requests come at once, and are those of `bench --trace generated`. The engine is the same in all cases, and its
programs are compiled before:

    engine       `Engine.step` in a loop
    open engine  the engine in a thread of its own, and nobody reads the streams
    server       event streams over loopback, to clients in another process, a connection for each request

Cases take turns. Random weights have no tokenizer; one is made that has a word for each id of the vocabulary.
With --profile, one more run tells which functions the server's thread and the engine's spend their CPU time in
(Python 3.11 only).
"""

from __future__ import annotations

import asyncio
import cProfile
import io
import json
import pstats
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import tokenizers
import typer
import uvicorn
from rich.console import Console
from rich.table import Table
from tokenizers import decoders, models

from jaxspec.api import BUNDLED
from jaxspec.commands.bench import trace
from jaxspec.commands.bench.pair import make_pair
from jaxspec.commands.models import ModelOptions
from jaxspec.commands.startup import use_one_thread
from jaxspec.configs.base import GenerationDefaults
from jaxspec.engine.engine import Engine
from jaxspec.engine.request import Completion, Request
from jaxspec.options import Drafting, Sampling
from jaxspec.runtime.runtime import cache_bucket
from jaxspec.serving.app import make_app
from jaxspec.serving.metrics import Metrics
from jaxspec.serving.open_engine import OpenEngine
from jaxspec.serving.parse_request import ServingModel
from jaxspec.serving.server import bind
from jaxspec.serving.settings import ProgramOptions, Settings
from jaxspec.tokenizer import Tokenizer

CLIENT = "--client"


# --- clients, in a process of their own ------------------------------------------------------------


async def _ask(address: tuple[str, int], body: bytes) -> tuple[float, float, int]:
    """Return when the first piece of text and the last one came, and how many."""
    reader, writer = await asyncio.open_connection(*address)
    head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\n"
    writer.write(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    first = events = 0
    tail = b""
    while piece := await reader.read(65536):
        if not first and b"data: " in piece:  # the head of the reply comes at once
            first = time.perf_counter()
        events += piece.count(b"data: ")
        tail = (tail + piece)[-64:]
    assert b"data: [DONE]" in tail, tail
    writer.close()
    return first, time.perf_counter(), events


async def _ask_all(port: int, bodies: list[bytes]) -> dict[str, float]:
    begin = time.perf_counter()
    seen = await asyncio.gather(*(_ask(("127.0.0.1", port), body) for body in bodies))
    return {
        "wall_s": max(last for _, last, _ in seen) - begin,
        "first_s": float(np.median([first for first, _, _ in seen]) - begin),
        "events": sum(events for _, _, events in seen),
    }


def client() -> None:
    """Read a port and bodies from standard input, ask for all, and write what it took."""
    port, *bodies = sys.stdin.buffer.read().splitlines()
    print(json.dumps(asyncio.run(_ask_all(int(port), bodies))))


# --- the cases -------------------------------------------------------------------------------------


def alone(engine: Engine, requests: list[Request]) -> dict[str, float]:
    """Run the engine in a loop."""
    begin = time.perf_counter()
    for request in requests:
        engine.add(request)
    tokens = 0
    while not engine.is_idle:
        for event in engine.step():
            tokens += len(event.token_ids) if isinstance(event, Completion) else 0
    wall_s = time.perf_counter() - begin
    return {"wall_s": wall_s, "tokens": tokens}


def opened(engine: Engine, requests: list[Request]) -> dict[str, float]:
    """Run it in its thread."""
    with OpenEngine(engine, max_waiting=len(requests)) as running:
        begin = time.perf_counter()
        handles = running.submit_all(requests)
        tokens = sum(len(handle.result().token_ids) for handle in handles)
        return {"wall_s": time.perf_counter() - begin, "tokens": tokens}


def served(
    engine: Engine, requests: list[Request], tokenizer: Tokenizer, profile: list[Any] | None = None
) -> dict[str, float]:
    """Run the whole server."""
    settings = Settings(max_waiting=len(requests))
    model = ServingModel(
        ("m",), tokenizer, engine.spec, GenerationDefaults(), engine.cache_length, settings
    )
    metrics = Metrics("m")
    bodies = [
        json.dumps(
            dict(
                prompt=r.prompt_ids,
                max_tokens=r.max_new_tokens,
                temperature=r.sampling.temperature,
                seed=r.seed,
                ignore_eos=True,
                stream=True,
            )
        ).encode()
        for r in requests
    ]
    with OpenEngine(engine, max_waiting=len(requests), observer=metrics) as running:
        bound = bind("127.0.0.1", 0)
        app = make_app(model, running, lambda ids: None, metrics)  # type: ignore[arg-type, return-value]
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            http="h11",
            ws="none",
            loop="asyncio",
        )
        server = uvicorn.Server(config)
        run: Callable[[], None] = lambda: server.run(sockets=[bound])  # noqa: E731
        thread = threading.Thread(target=run if profile is None else _profiled(run, profile))
        thread.start()
        if profile is not None:
            running.call(
                lambda: profile.append(cProfile.Profile(time.thread_time)) or profile[-1].enable()
            ).result()
        given = b"\n".join([str(bound.getsockname()[1]).encode(), *bodies])
        command = [sys.executable, "-m", "scripts.measure_server", CLIENT]
        made = subprocess.run(command, input=given, stdout=subprocess.PIPE, check=True)
        if profile is not None:
            running.call(lambda: profile[-1].disable()).result()
        server.should_exit = True
        thread.join()
    return {**json.loads(made.stdout), "tokens": sum(r.max_new_tokens for r in requests)}


def _profiled(run: Callable[[], None], profile: list[Any]) -> Callable[[], None]:
    def target() -> None:
        profile.insert(0, mine := cProfile.Profile(time.thread_time))
        mine.enable()
        run()
        mine.disable()

    return target


def made_up_tokenizer(size: int) -> Tokenizer:
    """Return a tokenizer with a word for each id, which decodes as Gemma's does."""
    vocab = {f"▁w{i}": i for i in range(size - 1)} | {"<unk>": size - 1}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(  # type: ignore[assignment]
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return Tokenizer(backend)


def main(
    random_weights: Annotated[str | None, typer.Option(help="a size; None: bundled pair")] = None,
    drafter: Annotated[str | None, typer.Option(help="none, or with random weights a kind")] = None,
    synthetic_acceptance: Annotated[float | None, typer.Option()] = None,
    slots: Annotated[int, typer.Option(min=1)] = 8,
    requests: Annotated[int, typer.Option(min=1)] = 64,
    steps_per_return: Annotated[int, typer.Option(min=1)] = ProgramOptions().steps_per_return,
    temperature: Annotated[float, typer.Option(min=0)] = 0.0,
    runs: Annotated[int, typer.Option(min=1)] = 3,
    profile: Annotated[bool, typer.Option("--profile")] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help="write the figures here")] = None,
) -> None:
    """Measure and print a table."""
    if profile and sys.version_info >= (3, 12):
        raise typer.BadParameter("--profile needs Python 3.11; later ones profile one thread only")
    began = time.perf_counter()
    if random_weights is None:
        use_one_thread()
    programs, sampling = ProgramOptions(), Sampling(temperature=temperature)
    drafting = Drafting(synthetic_acceptance=synthetic_acceptance)
    pair = make_pair(ModelOptions(drafter=drafter), drafting, random_weights, rows=slots)  # type: ignore[arg-type]
    config = pair.spec.target.config
    size = config.vocab_size
    jobs = trace.generate(requests, 7, None, min(config.max_positions, 4096))
    most = max(job.prompt_tokens + job.new_tokens for job in jobs)
    engine = Engine(
        *pair.loaded,
        drafting=drafting,
        program_features=programs.program_features,
        batch_size=slots,
        cache_length=cache_bucket(most + pair.spec.step_tokens),
        num_stop_ids=programs.max_stop_ids,
        steps_per_return=steps_per_return,
        max_prefill_tokens=programs.max_prefill_tokens,
    )
    tokenizer = (
        Tokenizer.load(BUNDLED / "target") if random_weights is None else made_up_tokenizer(size)
    )
    rng = np.random.default_rng(0)
    asked = [
        Request(
            tuple(rng.integers(5, size - 1, j.prompt_tokens).tolist()),
            j.new_tokens,
            sampling,
            seed=i,
            sample=0,
        )
        for i, j in enumerate(jobs)
    ]
    engine.warm_up()
    print(f"{time.perf_counter() - began:.0f} s: compiled", flush=True)
    cases: dict[str, Callable[[], dict[str, float]]] = {
        "engine": lambda: alone(engine, asked),
        "open engine": lambda: opened(engine, asked),
        "server": lambda: served(engine, asked, tokenizer),
    }
    compiled = engine.num_compilations
    found: dict[str, list[dict[str, float]]] = {name: [] for name in cases}
    for _ in range(runs):
        for name, case in cases.items():
            found[name].append(case())
            print(f"{time.perf_counter() - began:.0f} s: {name}: {found[name][-1]}", flush=True)
    _show(found, pair.title, slots, requests, steps_per_return, engine.num_compilations - compiled)
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        about = {
            "device": jax.devices()[0].device_kind,
            "jax": jax.__version__,
            "models": pair.title,
        }
        about |= {"slots": slots, "requests": requests, "steps_per_return": steps_per_return}
        json_path.write_text(json.dumps({**about, "cases": found}) + "\n")
    if profile:
        profiles: list[Any] = []
        served(engine, asked, tokenizer, profiles)
        for name, one in zip(("server", "engine"), profiles, strict=True):
            text = io.StringIO()
            pstats.Stats(one, stream=text).sort_stats("tottime").print_stats(25)
            print(f"--- the {name}'s thread\n{text.getvalue()}")


def _show(
    found: dict[str, list[dict[str, float]]],
    title: str,
    slots: int,
    requests: int,
    steps: int,
    late: int,
) -> None:
    table = Table("tokens a second", "median", "least", "most", "of the engine's")
    of_engine = float(np.median([r["tokens"] / r["wall_s"] for r in found["engine"]]))
    for name, rows in found.items():
        rates = [r["tokens"] / r["wall_s"] for r in rows]
        median = float(np.median(rates))
        shown = (f"{x:,.0f}" for x in (median, min(rates), max(rates)))
        table.add_row(name, *shown, f"{median / of_engine:.1%}")
    Console(width=100).print(table)
    device = jax.devices()[0].device_kind
    print(
        f"{title}; {requests} requests, {slots} slots, {steps} steps a return, {device}; {late} late programs"
    )


if __name__ == "__main__":
    client() if CLIENT in sys.argv else typer.run(main)
