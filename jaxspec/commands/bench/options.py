"""The options of `jaxspec bench`. Needs no JAX."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jaxspec.commands.bench import PROMPT_LENGTH
from jaxspec.commands.models import DRY_RUN
from jaxspec.commands.options import UsageError
from jaxspec.options import (
    CACHE_TOKENS_HELP,
    CHOOSE_LENGTH_HELP,
    ChooseLength,
    Range,
    at_least,
    option,
)
from jaxspec.registry import families, presets

KINDS = tuple(f.name for f in families("drafter") if f.drafter_for)


@dataclass(frozen=True)
class BenchOptions:
    """The cases to measure."""

    random_weights: str | None = option(
        None,
        "Random weights of this target's shape, and of its drafter's: --drafter then names a kind, "
        f"{', '.join(KINDS)} or none. One of {', '.join(presets())}.",
        metavar="PRESET",
    )
    batch_size: tuple[int, ...] = option(
        (), "Rows. Repeatable. Default: 1, 8 and 32.", range=at_least(1)
    )
    prompt_length: int | None = option(
        None,
        "Tokens of each prompt. Default: 256; with the bundled target 64, as its prompts have no "
        "more.",
        range=at_least(1),
    )
    context_length: tuple[int, ...] = option(
        (),
        "Start with so many tokens in every row's caches, which hold random numbers: nothing is "
        "prefilled. Instead of prompts; a drafter needs --synthetic-acceptance with it. "
        "Repeatable.",
        range=at_least(1),
    )
    new_tokens: int = option(
        256, "Tokens to decode in each row, after prefill's own.", range=at_least(1)
    )
    images: bool = option(
        False,
        "Measure images instead of decoding: one of each size through the target's vision part, and "
        "the first token of a prompt with one.",
    )
    steps_only: bool = option(
        False,
        "Time whole steps alone: not their parts, and no plain decoding beside a drafter. Takes half "
        "the time, most of which is compiling.",
    )
    repeats: int = option(5, "Timed runs of each case.", range=at_least(1))
    seed: int = option(0, "Of random weights and prompts.", range=at_least(0))
    dry_run: bool = option(False, DRY_RUN)

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """The batch sizes to measure."""
        return self.batch_size or (1, 8, 32)

    @property
    def positions(self) -> int:
        """Positions of the longest case, a step's own tokens not counted."""
        starts = self.context_length or (self.prompt_length or PROMPT_LENGTH,)
        return max(starts) + self.new_tokens + 1

    def __post_init__(self) -> None:
        """Refuse options that exclude each other, with UsageError."""
        if self.images and (self.batch_size or self.context_length):
            raise UsageError(
                "--images measures one prompt: leave --batch-size and --context-length out"
            )
        if self.context_length and self.prompt_length is not None:
            raise UsageError(
                "--prompt-length and --context-length exclude each other; leave one out"
            )


@dataclass(frozen=True)
class TraceOptions:
    """A stream of requests, and its engine."""

    trace: str | None = option(
        None,
        "Send a stream of requests through the engine, and measure that: generated ones, whose "
        "prompts have 32 to 2048 tokens (log-normal around 300) and 64 to 512 new ones; or those "
        "of a file with lines of "
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
    cache_tokens: str | None = option(
        None,
        CACHE_TOKENS_HELP + " Default: the longest request for every slot.",
        metavar="N|auto",
    )
    steps_per_return: int = option(
        16,
        "Most decode steps between two looks at what came. On a GPU fewer, where they would take over "
        "a quarter of a second.",
        range=at_least(1),
    )
    max_prefill_tokens: int | None = option(
        None,
        "Prompt tokens, padding included, that are read before rows decode on. Default: what takes "
        "less than a quarter of a second on a GPU, all that wait on a CPU.",
        range=at_least(1),
    )
    read_ahead: int | None = option(
        None,
        "Prompts that are read before they have a slot. Default: as many as keep passes full on a "
        "GPU.",
        range=at_least(0),
    )
    invariant: bool = option(
        False, "No row depends on its neighbours, to the last bit: prompts share small passes only."
    )
    choose_length: ChooseLength = option("exact", CHOOSE_LENGTH_HELP)
