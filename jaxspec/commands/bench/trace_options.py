"""What `bench --trace` can be asked. Needs no JAX."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jaxspec.options import CHOOSE_LENGTH_HELP, ChooseLength, Range, at_least, option

GENERATED = "generated"


@dataclass(frozen=True)
class TraceOptions:
    """A stream of requests, and the engine that it goes through."""

    trace: str | None = option(
        None,
        "Send a stream of requests through the engine, and measure that: generated ones, whose prompts have 32 to "
        "2048 tokens (log-normal around 300) and 64 to 512 new ones; or those of a file with lines of "
        '{"prompt_tokens": 300, "new_tokens": 128, "arrival_s": 0.5}.',
        metavar="generated|FILE.jsonl",
    )
    requests: int = option(192, "Generated requests.", range=at_least(1))
    rate: float | None = option(
        None,
        "Generated requests arrive at random, this many a second on average. Default: all at once.",
        range=Range("finite and above 0", lambda x: (x > 0) & (x < math.inf)),
        metavar="R",
    )
    trace_seed: int = option(
        7, "Of the lengths and arrivals that are generated.", range=at_least(0)
    )
    slots: int = option(32, "Requests that are decoded together.", range=at_least(1))
    steps_per_return: int = option(
        16, "Most decode steps between two looks at what came.", range=at_least(1)
    )
    max_prefill_tokens: int | None = option(
        None,
        "Prompt tokens, padding included, that are read before rows decode on. Default: all that wait.",
        range=at_least(1),
    )
    read_ahead: int | None = option(
        None,
        "Prompts that are read before they have a slot. Default: as many as keep passes full on a GPU.",
        range=at_least(0),
    )
    invariant: bool = option(
        False, "No row depends on its neighbours, to the last bit: prompts share small passes only."
    )
    choose_length: ChooseLength = option("exact", CHOOSE_LENGTH_HELP)
