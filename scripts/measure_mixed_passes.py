"""Time a target's pass over prompts beside a pass over decoding rows, apart and as one.

    python -m scripts.measure_mixed_passes --preset 26b-a4b --rows 160 --tokens 8 --prompts 16 --json out/x.json

"decode" verifies `tokens` tokens of each of `rows` rows. "prompts" reads prompts, in rows of 64 tokens as an engine
does, or of 256. "both" is one `mixed_pass` over the two. "at best" reads prompts of as many tokens as both have. No
pass over both is quicker, since keys that decoding rows see are not read there. "saved" and "at most" are what these
two take less than both passes apart.

Layers alone are timed, on random weights: heads, drafters and sampling cost the same either way. Caches are in pages.
A time is the median of the repeats, each of which makes several calls and waits for the last.
"""

from __future__ import annotations

import functools
import statistics
import time
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from jaxspec.cache import Paging, caches_of, with_tables
from jaxspec.commands.output import json_lines, write_line
from jaxspec.models.mixed_pass import PassPart, mixed_pass
from jaxspec.models.target import Caches, init_caches
from jaxspec.registry import family_of, presets
from jaxspec.shapes import Array, Float, Int, Params
from jaxspec.weights.define import model_def_of
from jaxspec.weights.model_def import ModelDef

WIDTHS = (64, 256)
SLACK = 16


class Rows(NamedTuple):
    """The rows of a pass. Each feeds as many tokens as the pass is wide."""

    start: np.ndarray
    slots: np.ndarray


class Measured(NamedTuple):
    """One line of the table. Times in milliseconds."""

    preset: str
    rows: int
    tokens: int
    prompts: int
    prompt_length: int
    decode: float
    prompts_apart: float
    both: float
    at_best: float
    saved: float
    saved_at_most: float


def prompt_rows(prompts: int, length: int, width: int, first_slot: int) -> Rows:
    """Return rows of `width` tokens that read whole prompts."""
    start = np.tile(np.arange(0, length, width), prompts)
    slots = first_slot + np.repeat(np.arange(prompts), length // width)
    return Rows(start, slots)


@functools.partial(jax.jit, static_argnames="model_def", donate_argnames="caches")
def run_pass(
    model_def: ModelDef,
    params: Params,
    caches: Caches,
    tables: dict[int, Int[Array, "_ _"]],
    parts: list[PassPart],
) -> tuple[Caches, Float[Array, ""]]:
    """Run a pass through all layers. Several parts are a mixed pass, whose logits nothing asks for."""
    target = model_def.bind(params)
    slots = jnp.concatenate([x.slots for x in parts])
    caches = with_tables(caches, {size: table[slots] for size, table in tables.items()})
    if len(parts) > 1:
        outputs = mixed_pass(target, parts, caches)
    else:
        (part,) = parts
        embedded = target.embed(part.tokens)
        outputs = [target.run_layers(part.tokens, embedded, part.placement, caches, ())]
    total = sum((jnp.sum(x.hidden.astype(jnp.float32)) for x in outputs), jnp.float32(0))
    return with_tables(outputs[-1].caches, None), total


def milliseconds(run: Any, calls: int, repeats: int) -> float:
    """Return the median time of a call that is not the first."""
    run(2)
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run(calls)
        times.append((time.perf_counter() - begin) / calls * 1e3)
    return statistics.median(times)


def main(
    preset: Annotated[str, typer.Option(help="A target, with random weights.")] = "26b-a4b",
    rows: Annotated[int, typer.Option(min=1, help="That decode.")] = 160,
    tokens: Annotated[int, typer.Option(min=1, help="That a row verifies: a power of two.")] = 8,
    context: Annotated[int, typer.Option(min=1, help="Tokens in the caches of a row.")] = 600,
    prompts: Annotated[list[int], typer.Option(help="Of a pass. Repeatable.")] = [8, 16],  # noqa: B006
    prompt_length: Annotated[int, typer.Option(min=256, help="A multiple of 256.")] = 256,
    dtype: str = "bfloat16",
    calls: Annotated[int, typer.Option(min=1, help="Of a repeat.")] = 10,
    repeats: int = 5,
    to: Annotated[str, typer.Option("--json", help="Also JSON lines: a file, or -.")] = "",
) -> None:
    """Print the times of passes over decoding rows, over prompts, and over both."""
    if prompt_length % max(WIDTHS) or prompt_length % tokens:
        raise typer.BadParameter(f"--prompt-length {prompt_length}: not a multiple of the widths")
    model_def = model_def_of(presets()[preset], dtype)
    params = family_of(model_def.config).randomise(model_def.random_params(0), 0)
    more = -(-rows * tokens // prompt_length)
    slots = rows + max(prompts) + more
    longest = max(context + tokens, prompt_length)
    paging = Paging(slots, slots * longest)
    state = init_caches(
        model_def.config,
        slots,
        cache_length=longest,
        slack=SLACK,
        dtype=jnp.dtype(dtype),
        paging=paging,
    )
    rng = np.random.default_rng(0)
    tables = {}
    for cache in caches_of(state):
        assert cache.row_slots is not None
        pages = -(-cache.row_slots // cache.k.shape[2])
        table = 1 + rng.permutation(slots * pages).reshape(slots, pages)
        tables[cache.row_slots] = jnp.asarray(table, jnp.int32)

    def part_of(fed: Rows, width: int) -> PassPart:
        ids = rng.integers(0, model_def.config.vocab_size, (len(fed.start), width))
        count = np.full(len(fed.start), width)
        return PassPart(*(jnp.asarray(x, jnp.int32) for x in (ids, fed.start, count, fed.slots)))

    def timed(*parts: PassPart) -> float:
        def run(calls: int) -> None:
            nonlocal state
            last = None
            for _ in range(calls):
                state, last = run_pass(model_def, params, state, tables, list(parts))
            jax.block_until_ready(last)

        return milliseconds(run, calls, repeats)

    decoding = part_of(Rows(np.full(rows, context), np.arange(rows)), tokens)

    def reading(count: int) -> list[PassPart]:
        return [part_of(prompt_rows(count, prompt_length, w, rows), w) for w in WIDTHS]

    decode, measured = timed(decoding), []
    for count in prompts:
        apart = min(timed(x) for x in reading(count))
        both = min(timed(decoding, x) for x in reading(count))
        at_best = min(timed(x) for x in reading(count + more))
        sizes = preset, rows, tokens, count, prompt_length
        times = decode, apart, both, at_best, decode + apart - both, decode + apart - at_best
        measured.append(Measured(*sizes, *times))

    device = jax.devices()[0].device_kind
    table = Table(title=f"{preset}, {dtype}, {device}: milliseconds of a pass", box=None)
    columns = "decode", "prompts", "both", "at best", "saved", "at most"
    for name in ("rows", "prompt tokens", *columns):
        table.add_column(name, justify="right")
    for x in measured:
        times = x.decode, x.prompts_apart, x.both, x.at_best, x.saved, x.saved_at_most
        sizes = f"{x.rows} × {x.tokens}", f"{x.prompts * x.prompt_length:,}"
        table.add_row(*sizes, *(f"{t:.1f}" for t in times))
    Console(stderr=to == "-").print(table)
    if to:
        with json_lines(to) as file:
            for x in measured:
                write_line(file, x._asdict() | dict(dtype=dtype, device=device))


if __name__ == "__main__":
    typer.run(main)
