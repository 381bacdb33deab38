"""Measure how acceptance falls while a policy is trained, and what brings it back.

    python -m scripts.measure_moving_policy [--updates 40] [--json out/moving_policy.json]

The bundled target is trained by policy gradient as in `examples/04_policy_gradient.py`: the reward is the share
of tokens that end a line. Its drafter stays as it was. A copy of the drafter is trained a little after each
update, on the rollouts that are there anyway: it learns to draft what the policy wrote.

Every few updates 128 texts are generated anew, at temperature 1, in each of these ways. A row of the table has
the mean tokens of a verify step, and the seconds of processor time of one call, which other programs on the
machine disturb less than the clock. `examples/08_moving_policy.py` is the loop without the comparison.

    kept            the drafter as it was, 3 draft tokens
    one draft       the same, 1 draft token
    block           the same, 3 drafts that are drawn, with block verification
    retrained       the drafter that learns, 3 draft tokens
    plain           no drafter
"""

from __future__ import annotations

import functools
import json
import time
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax
import typer
from rich.console import Console
from rich.table import Table

import jaxspec
from jaxspec.api import BUNDLED
from jaxspec.shapes import Array, Params
from jaxspec.training.options import LossWeights, TrainingOptions
from jaxspec.training.trainer import Trainer

PROMPTS, SAMPLES, PROMPT_TOKENS, NEW_TOKENS = 8, 4, 16, 24
EVALUATED = 16  # samples of each prompt
DRAFTER_STEPS = 2  # of the drafter's training after an update

pair = jaxspec.load()
target, drafter = pair
held_out = json.loads((BUNDLED / "held_out.json").read_text())["prompts"]
prompts = jnp.asarray([p["ids"][:PROMPT_TOKENS] for p in held_out[:PROMPTS]])
ends_line = jnp.asarray(["\n" in pair.decode([i]) for i in range(target.config.vocab_size)])
sampling = jaxspec.Sampling(temperature=1.0)
policy_optimizer = optax.rmsprop(3e-4)
trainer = Trainer(
    target,
    drafter,
    # So many steps that the rate hardly falls. Every place of an answer is drafted after.
    TrainingOptions(steps=10_000, warmup=0.0, anchors=NEW_TOKENS, learning_rate=3e-4),
    weights=LossWeights(decay=2.0),
)


def sampler_of(drafting: jaxspec.Drafting | None, samples: int) -> jaxspec.Sampler:
    return jaxspec.Sampler(
        target,
        None if drafting is None else drafter,
        max_new_tokens=NEW_TOKENS,
        num_samples=samples,
        stop_ids=(),
        drafting=drafting or jaxspec.Drafting(),
        program_features=jaxspec.ProgramFeatures(logprobs=True),
    )


WAYS = {
    "kept": jaxspec.Drafting(num_draft_tokens=3),
    "one draft": jaxspec.Drafting(num_draft_tokens=1),
    "block": jaxspec.Drafting(num_draft_tokens=3, draft_sampling=True, verification="block"),
    "retrained": jaxspec.Drafting(num_draft_tokens=3),
    "plain": None,
}
samplers = {name: sampler_of(drafting, EVALUATED) for name, drafting in WAYS.items()}
rollouts = sampler_of(WAYS["kept"], SAMPLES)


@jax.jit
def update_policy(params: Params, state: Any, result: Any) -> tuple[Params, Any, Array]:
    rewards = jnp.mean(ends_line[result.tokens], axis=1)
    by_prompt = rewards.reshape(PROMPTS, SAMPLES)
    advantages = (by_prompt - by_prompt.mean(axis=1, keepdims=True)).ravel()

    def loss(params: Params) -> Array:
        logprobs = jaxspec.score(rollouts, params, (prompts, result), sampling)
        ratio = jnp.exp(logprobs.sampled - result.logprobs.sampled)
        return -jnp.mean(ratio * advantages[:, None])

    changes, state = policy_optimizer.update(jax.grad(loss)(params), state)
    return optax.apply_updates(params, changes), state, jnp.mean(rewards)  # type: ignore[return-value]


def measured(
    params: Params, drafters: dict[str, Params], seed: int
) -> dict[str, tuple[float, float]]:
    """Return tokens a step and processor seconds a call of each way."""
    found = {}
    for name, ask in samplers.items():
        weights = None if WAYS[name] is None else drafters.get(name, drafter.params)
        call = functools.partial(ask, params, weights, prompts, sampling, seed)
        result = jax.block_until_ready(call())
        begin = time.process_time()
        jax.block_until_ready(call())
        found[name] = float(result.acceptance_length()), time.process_time() - begin
    return found


def main(
    updates: Annotated[int, typer.Option(help="of the policy")] = 40,
    every: Annotated[int, typer.Option(help="updates between measurements")] = 5,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="where to write the rows")
    ] = None,
) -> None:
    """Train, measure, print."""
    params, state = target.params, policy_optimizer.init(target.params)
    state_of_drafter = trainer.init(drafter.params)
    rows = []
    console = Console()
    for i in range(updates + 1):
        result = rollouts(params, drafter.params, prompts, sampling, i)
        reward = float(jnp.mean(ends_line[result.tokens]))
        if i % every == 0:
            found = measured(params, {"retrained": trainer.params(state_of_drafter)}, 1000 + i)
            rows.append({"update": i, "reward": reward, **found})
            print(json.dumps(rows[-1]), flush=True)
        params, state, _ = update_policy(params, state, result)
        texts = jaxspec.Sequences.of(jnp.repeat(prompts, SAMPLES, axis=0), result)
        for _ in range(DRAFTER_STEPS):
            state_of_drafter, _ = trainer.update(state_of_drafter, params, texts)
    table = Table("updates", "reward", *WAYS)
    for row in rows:
        cells = (f"{row[name][0]:.2f} ({row[name][1]:.2f} s)" for name in WAYS)
        table.add_row(str(row["update"]), f"{row['reward']:.2f}", *cells)
    console.print(table)
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(rows) + "\n")


if __name__ == "__main__":
    typer.run(main)
