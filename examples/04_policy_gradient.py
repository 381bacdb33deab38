"""Train by policy gradient: rollouts with the sampler, a reward, an update, and again with the new weights.

The reward is the share of tokens that end a line: the target learns to write short lines, which anyone
can see in what it writes. The drafter stays as it was; how well it still guesses is printed each time.

    python examples/04_policy_gradient.py [SEED]
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxspec
from jaxspec.api import BUNDLED

ITERATIONS, PROMPTS, SAMPLES, PROMPT_TOKENS, NEW_TOKENS = 10, 8, 4, 16, 24
SEED = int(sys.argv[1]) if len(sys.argv) > 1 else 0

pair = jaxspec.load()
target, drafter = pair
held_out = json.loads((BUNDLED / "held_out.json").read_text())["prompts"]
prompts = jnp.asarray([p["ids"][:PROMPT_TOKENS] for p in held_out[:PROMPTS]])
ends_line = jnp.asarray(["\n" in pair.decode([i]) for i in range(target.config.vocab_size)])

sampler = jaxspec.Sampler(
    pair,
    max_new_tokens=NEW_TOKENS,
    num_samples=SAMPLES,
    stop_ids=(),  # every sample has NEW_TOKENS tokens, so that no loss needs a mask
    drafting=jaxspec.Drafting(num_draft_tokens=3),  # it is right about one or two of them
    program_features=jaxspec.ProgramFeatures(logprobs=True),
)
rows = PROMPTS * SAMPLES
sampling = jaxspec.Sampling(temperature=1.0)
optimizer = optax.rmsprop(3e-4)


def loss(params, result, advantages):
    """Return minus the mean of ratio * advantage; the ratio is to what the sampler says it sampled from."""
    logprobs = jaxspec.score(sampler, params, (prompts, result), sampling).sampled
    ratio = jnp.exp(logprobs - result.logprobs.sampled)  # 1 until the first update
    return -jnp.mean(ratio * advantages[:, None]), jnp.max(jnp.abs(ratio - 1))


@jax.jit
def update(params, optimizer_state, result):
    """Return new weights, the reward of each row, and how far the sampler's logprobs are from a pass's."""
    rewards = jnp.mean(ends_line[result.tokens], axis=1)
    by_prompt = rewards.reshape(PROMPTS, SAMPLES)
    advantages = (by_prompt - by_prompt.mean(axis=1, keepdims=True)).ravel()
    gradients, off = jax.grad(loss, has_aux=True)(params, result, advantages)
    changes, optimizer_state = optimizer.update(gradients, optimizer_state)
    return optax.apply_updates(params, changes), optimizer_state, rewards, off


params, optimizer_state = target.params, optimizer.init(target.params)
rewards, events = [], []
jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: events.append(event))
for i in range(ITERATIONS):
    seeds = np.arange(rows) + rows * (i + ITERATIONS * SEED)  # no draw is repeated
    result = sampler(params, drafter.params, prompts, sampling, seeds)
    params, optimizer_state, of_rows, off = update(params, optimizer_state, result)
    assert off < 1e-3, "the rollout's logprobs are those of the weights that are being trained"
    rewards.append(np.asarray(of_rows))
    accepted = " ".join(f"{share:.2f}" for share in result.accepted_per_depth())
    print(f"{i:3} reward {rewards[-1].mean():.3f}, accepted at depth 1, 2, ...: {accepted}")
    if i == 0:
        events.clear()

first, last = np.concatenate(rewards[:3]), np.concatenate(rewards[-3:])
error = np.sqrt((first.var(ddof=1) + last.var(ddof=1)) / len(first))
print(f"reward: {first.mean():.3f} at first, {last.mean():.3f} at last, standard error {error:.4f}")
print("better by three standard errors:", bool(last.mean() - first.mean() > 3 * error))
print("compilations after the first iteration:", sum("backend_compile" in e for e in events))
print(pair.decode(result.tokens[0].tolist()))

# prints: better by three standard errors: True
# prints: compilations after the first iteration: 0
