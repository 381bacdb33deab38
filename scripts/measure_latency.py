"""Measure what clients of a running `jaxspec serve` wait for: percentiles, at several numbers of clients.

    python -m scripts.measure_latency --port 8000 --clients 1 --clients 16 --clients 64

Each client asks one request after the other: the beginning of a Python file, 16 to 128 new tokens, greedy or at
temperature 0.8, as a stream. "waiting" is the time to the first token, that in the queue included; "a token" the mean
time of a later one; "a gap" the longest time in a reply between two pieces of text.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

PROMPTS = ("def read_config(path):", "class Queue:\n", "import os\n", "    for i in range(")
PERCENTILES = (50, 90, 95, 99)


class Seen(NamedTuple):
    """Of a reply: tokens, and milliseconds."""

    tokens: int
    waiting: float
    whole: float
    a_token: float
    a_gap: float


async def _ask(port: int, rng: random.Random) -> Seen:
    """Ask one request, and read its stream."""
    new_tokens = rng.randint(16, 128)
    asked: dict[str, Any] = dict(
        prompt=rng.choice(PROMPTS) * rng.randint(1, 4),
        max_tokens=new_tokens,
        temperature=rng.choice((0.0, 0.8)),
        seed=rng.randrange(1000),
        ignore_eos=True,
        stream=True,
        return_token_ids=True,
    )
    body = json.dumps(asked).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: {len(body)}"
    begin = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{head}\r\n\r\n".encode() + body)
    at, tokens = [], 0
    async for line in reader:
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            assert "error" not in event, event
            tokens += len(event["choices"][0]["token_ids"])
            at.append((time.monotonic() - begin) * 1e3)
    writer.close()
    assert tokens == new_tokens, f"{tokens} of {new_tokens} tokens came"
    a_token = (at[-1] - at[0]) / (tokens - 1)
    return Seen(tokens, at[0], at[-1], a_token, max(np.diff(at), default=0.0))


async def _ask_all(port: int, clients: int, seconds: float) -> tuple[list[Seen], float]:
    """Return all replies, and the seconds that they took."""
    seen: list[Seen] = []
    begin = time.monotonic()

    async def client(seed: int) -> None:
        rng = random.Random(seed)
        while time.monotonic() < begin + seconds:
            seen.append(await _ask(port, rng))

    await asyncio.gather(*map(client, range(clients)))
    return seen, time.monotonic() - begin


def main(
    port: Annotated[int, typer.Option()] = 8000,
    clients: Annotated[list[int], typer.Option(min=1)] = [1, 16, 64],  # noqa: B006
    seconds: Annotated[float, typer.Option(min=0)] = 25.0,
) -> None:
    """Measure and print a table."""
    names = [f"{p} %" for p in PERCENTILES]
    table = Table("clients", "replies", "tokens a second", "ms", *names, "load of the machine")
    for count in clients:
        seen, wall_s = asyncio.run(_ask_all(port, count, seconds))
        rate = sum(reply.tokens for reply in seen) / wall_s
        first = [str(count), str(len(seen)), f"{rate:,.0f}"]
        for name in Seen._fields[1:]:
            found = np.percentile([getattr(reply, name) for reply in seen], PERCENTILES)
            load = f"{os.getloadavg()[0]:.1f}" if first[0] else ""
            table.add_row(*first, name.replace("_", " "), *(f"{x:,.0f}" for x in found), load)
            first = ["", "", ""]
    Console(width=110).print(table)


if __name__ == "__main__":
    typer.run(main)
