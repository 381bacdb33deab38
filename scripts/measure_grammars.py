"""Measure what grammars cost: the time of a step where no row, one row or all rows have one.

    python -m scripts.measure_grammars [--batch-size 8] [--json out/grammars.json]
    python -m scripts.measure_grammars --random-weights e4b --batch-size 8 --batch-size 32

Rows of the table:

    without    the engine was made without grammars
    0, 1, all  it was made with them, and so many rows have one

`host` is what the host takes of a step to say what is allowed, and `a mask` is a position's share of it. The grammar
allows letters and spaces, so nearly all drafts keep to it, and every position needs a mask. A tokenizer is made up
where there is none: random words, as many as the vocabulary has. Compiling is left out.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import tokenizers
import typer
from rich.console import Console
from rich.table import Table
from tokenizers import decoders, models, pre_tokenizers

from jaxspec import constraint
from jaxspec.api import BUNDLED
from jaxspec.commands.bench.pair import ModelPair, make_pair
from jaxspec.commands.models import ModelOptions
from jaxspec.engine.engine import Engine
from jaxspec.engine.request import Completion, Request
from jaxspec.options import Drafting, ProgramFeatures
from jaxspec.runtime.runtime import Programs
from jaxspec.text.grammars import Grammar, GrammarTokens
from jaxspec.tokenizer import Tokenizer

PROMPT_TOKENS = 64


def made_up_tokenizer(size: int, seed: int = 0) -> Tokenizer:
    """Return a tokenizer of random words, one to nine letters long; the last token ends a text."""
    rng = np.random.default_rng(seed)
    words = dict.fromkeys(pre_tokenizers.ByteLevel.alphabet())
    while len(words) < size - 1:
        letters = rng.integers(0, 26, (size, 9)) + ord("a")
        lengths, spaced = rng.integers(2, 9, size), rng.random(size) < 0.5
        for row, length, space in zip(letters, lengths, spaced, strict=True):
            words["Ġ" * bool(space) + bytes(row[:length].tolist()).decode()] = None
    texts = [*list(words)[: size - 1], "<eos>"]
    backend = tokenizers.Tokenizer(models.BPE({text: i for i, text in enumerate(texts)}, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    return Tokenizer(backend)


class Clock:
    """Seconds that the host takes to answer, and for how many calls and masks."""

    def __init__(self) -> None:
        """Start at nothing."""
        self.seconds, self.calls, self.masks = 0.0, 0, 0
        self._answer = constraint.answer

    def answer(self, numbers: Any, *given: Any, **options: Any) -> Any:
        """Answer, and count it."""
        begin = time.perf_counter()
        out = self._answer(numbers, *given, **options)
        self.seconds += time.perf_counter() - begin
        self.calls += 1
        self.masks += int((numbers >= 0).sum()) * out[1].shape[1]
        return out


def measure(
    pair: ModelPair, programs: Programs, rows: int, steps: int, grammar: Grammar | None, guided: int
) -> Any:
    """Return the milliseconds of a step, and of the host in it."""
    target, drafter = pair.loaded
    engine = Engine(
        target,
        drafter,
        drafting=pair.spec.drafting,
        program_features=ProgramFeatures(grammars=grammar is not None),
        batch_size=rows,
        cache_length=PROMPT_TOKENS + (steps + 2) * (pair.spec.depth + 2),
        read_ahead=0,
        choose_length="never",
        programs=programs,
    )
    prompts = pair.prompts(rows, PROMPT_TOKENS, seed=0).tolist()

    def requests(new: int) -> list[Request]:
        given = [grammar if row < guided else None for row in range(rows)]
        return [Request(tuple(p), new, grammar=g) for p, g in zip(prompts, given, strict=True)]

    list(engine.run(requests(2 + pair.spec.depth)))
    before, clock = engine.timings.decode_s, Clock()
    constraint.answer = clock.answer
    try:
        done = [e for e in engine.run(requests(steps)) if isinstance(e, Completion)]
    finally:
        constraint.answer = clock._answer
    assert all(completion.error is None for completion in done), done
    taken = max(len(completion.acceptance_lengths) for completion in done)
    length = np.mean([np.mean(completion.acceptance_lengths) for completion in done])
    return {
        "step_ms": 1e3 * (engine.timings.decode_s - before) / taken,
        "host_ms": 1e3 * clock.seconds / clock.calls if clock.calls else 0.0,
        "mask_us": 1e6 * clock.seconds / clock.masks if clock.masks else 0.0,
        "steps": taken,
        "acceptance_length": float(length),
    }


def main(
    random_weights: Annotated[str | None, typer.Option(help="A preset, such as e4b.")] = None,
    drafter: Annotated[str | None, typer.Option(help="dflash, mtp or none.")] = "dflash",
    batch_size: Annotated[list[int] | None, typer.Option(help="Repeatable.")] = None,
    steps: Annotated[int, typer.Option(help="New tokens of each row.")] = 64,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Measure, and print a table."""
    pair = make_pair(ModelOptions(drafter=drafter), Drafting(), random_weights)
    size = pair.spec.target.config.vocab_size
    begin = time.perf_counter()
    if random_weights is None:
        tokenizer, ends = Tokenizer.load(BUNDLED / "target"), [1]
    else:
        tokenizer, ends = made_up_tokenizer(size), [size - 1]
    tokens = GrammarTokens(tokenizer, size, ends)
    read_s = time.perf_counter() - begin
    grammar = tokens.compile("regex", "[a-z ]*!")
    device = jax.devices()[0].device_kind
    title = f"{pair.title}, {device}, jax {jax.__version__}; tokenizer read in {read_s:.1f} s"
    table = Table(title=title)
    for column in ("rows", "with grammar", "step, ms", "host, ms", "a mask, µs", "steps", "τ"):
        table.add_column(column, justify="right")
    found: list[dict[str, Any]] = []
    programs = Programs()
    for rows in batch_size or [8]:
        for name, guided in (("without", -1), ("0", 0), ("1", 1), ("all", rows)):
            of = None if guided < 0 else grammar
            values = measure(pair, programs, rows, steps, of, max(guided, 0))
            found.append({"rows": rows, "with_grammar": name, **values})
            shown = [f"{values[k]:.2f}" for k in ("step_ms", "host_ms", "mask_us")]
            tau = f"{values['acceptance_length']:.2f}"
            table.add_row(str(rows), name, *shown, str(values["steps"]), tau)
    Console().print(table)
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        about = {"pair": pair.title, "device": device, "jax": jax.__version__, "read_s": read_s}
        json_path.write_text(json.dumps({**about, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
