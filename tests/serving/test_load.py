"""Load: two hundred streaming clients for a minute or more, a third of which leave at random.

JAXSPEC_LOAD_CLIENTS and JAXSPEC_LOAD_S change both numbers.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import os
import random
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import jaxspec
from jaxspec.configs.base import GenerationDefaults
from jaxspec.engine.engine import Engine
from jaxspec.engine.prefix_cache.store import MIN_TOKENS
from jaxspec.engine.request import Completion, Request
from jaxspec.options import Sampling
from jaxspec.runtime.runtime import Programs
from jaxspec.serving.parse_request import ServingModel
from jaxspec.serving.prompt_logprobs import PromptScorer
from jaxspec.serving.settings import ProgramOptions, Settings
from tests.serving.conftest import run_server

CLIENTS, JOBS = int(os.environ.get("JAXSPEC_LOAD_CLIENTS", "200")), 60
SECONDS = float(os.environ.get("JAXSPEC_LOAD_S", "60"))
PROMPTS = ("def read_config(path):", "class Queue:\n", "import os\n", "    for i in range(")


@dataclass
class Seen:
    """Counts over all clients."""

    whole: int = 0
    left: int = 0
    wrong: list[str] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    total_s: list[float] = field(default_factory=list)
    tokens: int = 0


def resources() -> tuple[int, int, int]:
    """Return MiB in memory, open files and threads."""
    gc.collect()
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    return pages * 4096 // 2**20, len(os.listdir("/proc/self/fd")), threading.active_count()


async def ask(
    address: tuple[str, int], body: bytes, expected: tuple[int, ...], leave: int, seen: Seen
) -> None:
    begin = time.monotonic()
    reader, writer = await asyncio.open_connection(*address)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    tokens: list[int] = []
    try:
        while line := await reader.readline():
            if not line.startswith(b"data: "):
                continue
            if line.startswith(b"data: [DONE]"):
                break
            value = json.loads(line[6:])
            if "error" in value:
                seen.wrong.append(value["error"]["message"])
                return
            if not tokens:
                seen.first_s.append(time.monotonic() - begin)
            tokens += value["choices"][0]["token_ids"]
            if leave and len(tokens) >= leave:
                seen.left += 1
                break
        else:
            seen.wrong.append("the connection ended early")
            return
        seen.tokens += len(tokens)
        if tuple(tokens) != expected[: len(tokens)] or (not leave and len(tokens) < len(expected)):
            seen.wrong.append(f"{tokens} is not {expected}")
        elif not leave:
            seen.whole += 1
            seen.total_s.append(time.monotonic() - begin)
    finally:
        writer.close()


@pytest.mark.slow
@pytest.mark.parametrize(("read_ahead", "prefix_mib"), [(0, 0), (8, 0), (8, 256)])
def test_many_clients_get_their_own_tokens(read_ahead: int, prefix_mib: int) -> None:
    """No token is wrong, lost or sent twice; no slot, file or thread leaks."""
    cache_length = 512 if prefix_mib else 256
    programs = ProgramOptions(slots=32, cache_length=cache_length)
    pair = jaxspec.load()
    shared: dict[str, Any] = dict(
        program_features=programs.program_features,
        batch_size=programs.slots,
        cache_length=cache_length,
        num_stop_ids=programs.max_stop_ids,
        steps_per_return=programs.steps_per_return,
        max_prefill_tokens=programs.max_prefill_tokens,
        programs=Programs(),
    )
    offline = Engine(*pair, **shared)
    engine = Engine(*pair, **shared, read_ahead=read_ahead, prefix_bytes=prefix_mib * 2**20)
    rng = random.Random(0)
    long = MIN_TOKENS + 20 if prefix_mib else 0
    begin = [tuple(pair.encode(text * 99)[:long]) for text in PROMPTS[:2]]
    requests = [
        Request(
            rng.choice(begin) + pair.encode(rng.choice(PROMPTS) * rng.randint(1, 4)),
            rng.randint(8, 64),
            Sampling(temperature=rng.choice((0.0, 0.8, 1.2))),
            seed=i,
            sample=0,
        )
        for i in range(JOBS)
    ]
    offline.warm_up()
    done = {e.id: e for e in offline.run(requests) if isinstance(e, Completion)}
    begin = time.monotonic()
    tokens = sum(
        len(e.token_ids)
        for e in offline.run([dataclasses.replace(r, sample=0) for r in requests * 5])
        if isinstance(e, Completion)
    )
    print(f"\nthe engine alone: {tokens / (time.monotonic() - begin):,.0f} tokens a second")
    bodies = [
        json.dumps(
            dict(
                prompt=r.prompt_ids,
                max_tokens=r.max_new_tokens,
                temperature=r.sampling.temperature,
                top_k=0,
                top_p=1.0,
                seed=r.seed,
                ignore_eos=True,
                stream=True,
                return_token_ids=True,
            )
        ).encode()
        for r in requests
    ]
    serving_model = ServingModel(
        names=("bundled",),
        tokenizer=pair.tokenizer,
        spec=engine.spec,
        generation=pair.target.generation or GenerationDefaults(),
        cache_length=cache_length,
        settings=Settings(max_waiting=CLIENTS),
    )
    server = run_server(serving_model, engine, PromptScorer(pair.target, 1))
    live = next(server)
    url = live.client.base_url
    address = url.host, url.port or 0
    seen = Seen()

    async def client(seed: int, end: float) -> None:
        rng = random.Random(seed)
        while time.monotonic() < end:
            job = rng.randrange(JOBS)
            leave = rng.randint(1, 20) if seed % 3 == 0 else 0
            await ask(address, bodies[job], done[job].token_ids, leave, seen)

    async def load(seconds: float) -> None:
        end = time.monotonic() + seconds
        await asyncio.gather(*(client(seed, end) for seed in range(CLIENTS)))

    asyncio.run(load(5))  # what is kept for good is there now
    live.settle()
    before, seen = resources(), Seen()
    begin = time.monotonic()
    asyncio.run(load(SECONDS))
    seconds = time.monotonic() - begin
    live.settle()
    time.sleep(1)
    after = resources()
    for name, values in (("first token", seen.first_s), ("whole", seen.total_s)):
        shown = ", ".join(f"p{p} {np.percentile(values, p) * 1e3:,.0f} ms" for p in (50, 95, 99))
        print(f"{name}: {shown}")
    print(f"load averages of the machine: {os.getloadavg()}, {os.cpu_count()} cores")
    print(
        f"{seen.whole} whole streams, {seen.left} left, {seen.tokens / seconds:,.0f} tokens a "
        "second; "
        f"MiB, files, threads before {before}, after {after}"
    )
    for _ in server:
        pass
    if prefix_mib:
        print(f"prefixes: {engine.prefix_stats}")
        assert engine.prefix_stats.hits > seen.whole
    assert not seen.wrong, seen.wrong[:3]
    assert seen.whole > CLIENTS
    assert seen.left
    assert live.open_engine.num_live == engine.num_running == 0
    assert after[1] <= before[1] + 2
    assert after[2] <= before[2] + 2
    assert after[0] <= before[0] + 100
