"""Measure what rows that take turns in few slots save: `jaxspec.Sampler(batch_size=...)`.

    python -m scripts.measure_rollouts [--rollouts 512] [--slots 64] [--json out/rollouts.json]
    python -m scripts.measure_rollouts --random-weights e2b --drafter mtp --synthetic-acceptance 3.5

Rollouts are samples of prompts, each with a limit of its own: uniform from an eighth of `--new-tokens` to all of
them. They are generated in two ways, by samplers that differ in nothing else:

    batches    a call for every `--slots` rows, which waits for the longest of them
    turns      one call for all rows, with `batch_size` slots

A row of the table has the passes of each kind, the share of idle row steps (slots times steps in which no row used
the slot), and seconds of a call by the clock, and of the processor, which other programs on the machine disturb
less. Steps follow from those that each row took, see `passes_of_turns`; the tests compare that with a count on the
device. Compiling is left out: the first call, in which every row ends at once, is not timed.

With random weights there is no end of text, and `--synthetic-acceptance` says how many tokens a step adds.
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
from jaxspec.api import BUNDLED
from jaxspec.registry import family_of, presets
from jaxspec.rollout.batch import GenerateResult, Prompts
from jaxspec.shapes import Params
from jaxspec.weights.define import model_def_of, random_drafter
from jaxspec.weights.model_def import ModelDef

SHORTEST = 8  # the shortest limit is an eighth of the longest one


def passes_of_turns(slots: int, group: int, samples: int, steps: Sequence[int]) -> dict[str, int]:
    """Return how many passes there are of each kind, where rows take turns.

    Args:
      group: how many slots are refilled at a time.
      steps: of each row, after its first token.
    """
    ends, now, readings = [0] * slots, 0, 0
    groups = [steps[i : i + group] for i in range(0, len(steps), group)]
    for number, some in enumerate(groups):
        readings += number % samples == 0
        ends.sort()
        now = max(now, ends[len(some) - 1])  # until so many slots are free
        ends[: len(some)] = [now + n for n in some]
    return {"read": readings, "first tokens": len(groups), "steps": max(ends)}


def passes_of_batches(slots: int, steps: Sequence[int]) -> dict[str, int]:
    """Return the same where a call has a row for every slot, and prompts of one chunk."""
    batches = [max(steps[i : i + slots]) for i in range(0, len(steps), slots)]
    return {"read": len(batches), "first tokens": len(batches), "steps": sum(batches)}


def models_of(
    preset: str | None, drafter: str | None, dtype: str
) -> tuple[Any, Any, Params, Params | None]:
    """Return a target, a drafter or None, and the weights of both."""
    if preset is None:
        pair = jaxspec.load()
        guess = None if drafter == "none" else pair.drafter
        return pair.target, guess, pair.target.params, None if guess is None else guess.params

    def random(model_def: ModelDef, seed: int) -> Params:
        return family_of(model_def.config).randomise(model_def.random_params(seed), seed)

    target = model_def_of(presets()[preset], dtype)
    kind = drafter or family_of(target.config).usual_drafter or "none"
    if kind == "none":
        return target, None, random(target, 0), None
    model_def, _ = random_drafter(preset, kind, dtype)
    return target, model_def, random(target, 0), random(model_def, 1)


def prompts_of(target: Any, count: int, longest: int) -> Prompts:
    """Return held-out prompts of the bundled pair, again and again, or random ids; of different lengths."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(max(1, longest // 8), longest + 1, count)
    if isinstance(target, ModelDef):
        size = target.config.vocab_size
        rows = [rng.integers(5, size, n).tolist() for n in lengths]
    else:
        held_out = json.loads((BUNDLED / "held_out.json").read_text())["prompts"]
        rows = [held_out[i % len(held_out)]["ids"][:n] for i, n in enumerate(lengths)]
    return Prompts.padded(rows)


def timed(call: Callable[[Any], list[GenerateResult]], limits: np.ndarray) -> dict[str, Any]:
    """Return results by field, and seconds: by the clock, and of the processor for all threads."""
    jax.block_until_ready(call(np.ones_like(limits)))  # compiles
    begin, busy = time.perf_counter(), time.process_time()
    parts = jax.block_until_ready(call(limits))
    seconds = time.perf_counter() - begin, time.process_time() - busy
    joined = jax.tree.map(lambda *x: np.concatenate([np.asarray(a) for a in x]), *parts)
    return {"result": joined, "seconds": seconds[0], "processor_seconds": seconds[1]}


def main(
    rollouts: Annotated[int, typer.Option(min=1)] = 512,
    samples: Annotated[int, typer.Option(min=1, help="of each prompt")] = 4,
    slots: Annotated[int, typer.Option(min=1)] = 64,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="of the longest prompt")] = 32,
    new_tokens: Annotated[int, typer.Option(min=1, help="of the longest rollout")] = 96,
    temperature: Annotated[float, typer.Option(min=0)] = 1.0,
    random_weights: Annotated[str | None, typer.Option(help="a size; None: bundled pair")] = None,
    drafter: Annotated[str | None, typer.Option(help="none, or with random weights a kind")] = None,
    num_draft_tokens: Annotated[int | None, typer.Option()] = None,
    synthetic_acceptance: Annotated[float | None, typer.Option(help="tokens a step")] = None,
    dtype: Annotated[str, typer.Option(help="of random weights")] = "bfloat16",
    json_path: Annotated[Path | None, typer.Option("--json", help="write the figures here")] = None,
) -> None:
    """Measure and print a table."""
    if rollouts % slots or slots % samples:
        raise typer.BadParameter("--rollouts must be a multiple of --slots, and that of --samples")
    target, guess, *params = models_of(random_weights, drafter, dtype)
    weights = (params[0], params[1])
    prompts = prompts_of(target, rollouts // samples, prompt_tokens)
    drafting = jaxspec.Drafting(num_draft_tokens, synthetic_acceptance=synthetic_acceptance)
    options: dict[str, Any] = dict(max_new_tokens=new_tokens, num_samples=samples, stop_ids=())
    if guess is not None:
        options["drafting"] = drafting
    turns = jaxspec.Sampler(target, guess, batch_size=slots, **options)
    batches = jaxspec.Sampler(target, guess, **options)
    sampling, seeds = jaxspec.Sampling(temperature=temperature), np.arange(rollouts)
    limits = np.random.default_rng(1).integers(-(-new_tokens // SHORTEST), new_tokens + 1, rollouts)

    def in_turns(limits: np.ndarray) -> list[GenerateResult]:
        return [turns(*weights, prompts, sampling, seeds, max_new_tokens=limits)]

    def in_batches(limits: np.ndarray) -> list[GenerateResult]:
        found = []
        for begin in range(0, rollouts, slots):
            rows, some = slice(begin, begin + slots), np.arange(begin, begin + slots, samples)
            these = prompts.take(some // samples)
            found.append(
                batches(*weights, these, sampling, seeds[rows], max_new_tokens=limits[rows])
            )
        return found

    found = {"batches": timed(in_batches, limits), "turns": timed(in_turns, limits)}
    device, rows = jax.devices()[0].device_kind, []
    for name, values in found.items():
        result = values.pop("result")
        steps = result.num_steps.tolist()
        _, group = turns.plan.slots(1)
        passes = (
            passes_of_batches(slots, steps)
            if name == "batches"
            else passes_of_turns(slots, group, samples, steps)
        )
        idle = 1 - sum(steps) / (slots * passes["steps"])
        rows.append({"name": name, **passes, "idle": idle, **values})
        found[name]["tokens"] = result.tokens
    tokens = int(limits.sum())
    equal = (found["batches"]["tokens"] == found["turns"]["tokens"]).all(axis=1).sum()
    columns = ("", "read", "first tokens", "steps", "idle", "seconds", "of the processor", "tok/s")
    table = Table(*columns, title=f"{rollouts} rollouts through {slots} slots on {device}")
    for row in rows:
        table.add_row(
            row["name"],
            *(str(row[kind]) for kind in ("read", "first tokens", "steps")),
            f"{row['idle']:.0%}",
            f"{row['seconds']:.2f}",
            f"{row['processor_seconds']:.2f}",
            f"{tokens / row['seconds']:,.0f}",
        )
    console = Console()
    console.print(table)
    console.print(f"{tokens} tokens; {equal} of {rollouts} rollouts are equal in both ways")
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        about = {"device": device, "jax": jax.__version__, "slots": slots, "tokens": tokens}
        json_path.write_text(json.dumps({**about, "equal": int(equal), "rows": rows}) + "\n")


if __name__ == "__main__":
    typer.run(main)
