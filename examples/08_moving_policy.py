"""Train a policy, and let its drafter follow: every few updates the drafter learns from the rollouts that are there.

The reward and the policy's update are those of 04_policy_gradient.py. Rollouts are drafted by the adapted drafter. The
same rollouts are drafted once more by the drafter as it was, to compare: tokens of a verify step.

    python examples/08_moving_policy.py [UPDATES]
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxspec
from jaxspec.api import BUNDLED
from jaxspec.training.options import TrainingOptions
from jaxspec.training.trainer import Trainer

UPDATES = int(sys.argv[1]) if len(sys.argv) > 1 else 16
EVERY, DRAFTER_STEPS = 4, 8  # updates of the policy, then updates of the drafter
PROMPTS, SAMPLES, PROMPT_TOKENS, NEW_TOKENS = 8, 4, 16, 24

pair = jaxspec.load()
target, drafter = pair
held_out = json.loads((BUNDLED / "held_out.json").read_text())["prompts"]
prompts = jnp.asarray([p["ids"][:PROMPT_TOKENS] for p in held_out[:PROMPTS]])
repeated = jnp.repeat(prompts, SAMPLES, axis=0)
ends_line = jnp.asarray(["\n" in pair.decode([i]) for i in range(target.config.vocab_size)])

sampler = jaxspec.Sampler(
    pair,
    max_new_tokens=NEW_TOKENS,
    num_samples=SAMPLES,
    stop_ids=(),
    drafting=jaxspec.Drafting(num_draft_tokens=3),
    program_features=jaxspec.ProgramFeatures(logprobs=True),
)
sampling = jaxspec.Sampling(temperature=1.0)
optimizer = optax.rmsprop(3e-4)
trainer = Trainer(
    target,
    drafter,
    # The rate falls to 0 by the last step: a policy that goes on moving wants far more steps than are taken.
    TrainingOptions(steps=10_000, warmup=0.0, anchors=16, learning_rate=1e-3),
)


@jax.jit
def update(params, optimizer_state, result):
    """Return new weights of the policy, and its mean reward."""
    rewards = jnp.mean(ends_line[result.tokens], axis=1)
    by_prompt = rewards.reshape(PROMPTS, SAMPLES)
    advantages = (by_prompt - by_prompt.mean(axis=1, keepdims=True)).ravel()

    def loss(params):
        logprobs = jaxspec.score(sampler, params, (prompts, result), sampling).sampled
        return -jnp.mean(jnp.exp(logprobs - result.logprobs.sampled) * advantages[:, None])

    changes, optimizer_state = optimizer.update(jax.grad(loss)(params), optimizer_state)
    return optax.apply_updates(params, changes), optimizer_state, jnp.mean(rewards)


params, optimizer_state = target.params, optimizer.init(target.params)
state = trainer.init(drafter.params)
adapted, lengths = drafter.params, []
for i in range(UPDATES):
    seeds = np.arange(PROMPTS * SAMPLES) + PROMPTS * SAMPLES * i
    result = sampler(params, adapted, prompts, sampling, seeds)
    frozen = sampler(params, drafter.params, prompts, sampling, seeds)
    lengths.append((float(result.acceptance_length()), float(frozen.acceptance_length())))
    params, optimizer_state, reward = update(params, optimizer_state, result)
    with_it, without = lengths[-1]
    print(f"{i:3} reward {reward:.3f}, tokens a step: {with_it:.2f} adapted, {without:.2f} kept")
    if (i + 1) % EVERY == 0:
        texts = jaxspec.Sequences.of(repeated, result)
        for _ in range(DRAFTER_STEPS):
            state, metrics = trainer.update(state, params, texts)
        adapted = trainer.params(state)

last, kept = np.asarray(lengths[-EVERY:]).mean(axis=0)
print(f"in the last {EVERY} updates: {last:.2f} adapted, {kept:.2f} kept")
print("the drafter that follows drafts better:", bool(last > kept))

# prints: the drafter that follows drafts better: True
