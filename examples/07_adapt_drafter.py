"""Adapt a drafter to a target that changed: the bundled target is fine-tuned on prose, and its drafter follows.

The bundled pair was trained on Python code. Here the target learns the prose of Python's manual. The drafter then
guesses worse, on the very text that the target is now good at. It is trained on what the new target writes.

    python examples/07_adapt_drafter.py
"""

import operator
from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxspec
from jaxspec.training.options import TrainingOptions
from jaxspec.training.trainer import Trainer

PROMPT_TOKENS, NEW_TOKENS, ROWS = 24, 48, 8
TARGET_STEPS, DRAFTER_STEPS = 40, 120

pair = jaxspec.load()
target, drafter = pair
stream = np.asarray(pair.encode("\n\n".join(topics[name] for name in sorted(topics))))
cut = len(stream) * 9 // 10  # what is behind it is measured alone
rng = np.random.default_rng(0)


def prompts_from(part, count, size=PROMPT_TOKENS):
    """Return pieces of the manual."""
    starts = rng.integers(0, len(part) - size, count)
    return jnp.asarray(part[starts[:, None] + np.arange(size)])


sampler = jaxspec.Sampler(pair, max_new_tokens=NEW_TOKENS, stop_ids=())
unseen = prompts_from(stream[cut:], 32)


def acceptance(target_params, drafter_params):
    """Return the tokens of a verify step, on prompts that nothing was trained on."""
    return float(sampler(target_params, drafter_params, unseen).acceptance_length())


# The target changes.
optimizer = optax.adam(1e-3)


@jax.jit
def update_target(params, state, rows):
    """Take a step of fine-tuning: the log-probability of text after its first token."""
    sequences = jaxspec.Sequences.padded(rows, np.ones(ROWS, int), np.full(ROWS, rows.shape[1]))

    def loss_of(params):
        return -jnp.mean(jaxspec.score(target, params, sequences).target)

    loss, gradient = jax.value_and_grad(loss_of)(params)
    changes, state = optimizer.update(gradient, state)
    return optax.apply_updates(params, changes), state, loss


before = acceptance(target.params, drafter.params)
params, state = target.params, optimizer.init(target.params)
for i in range(TARGET_STEPS):
    params, state, loss = update_target(params, state, prompts_from(stream[:cut], ROWS, 96))
    if i in (0, TARGET_STEPS - 1):
        print(f"target: {loss:.3f} nats a token")
changed = acceptance(params, drafter.params)
print(f"{before:.2f} tokens a step before, {changed:.2f} with the fine-tuned target")

# The drafter follows, on what the target writes now.
trainer = Trainer(
    target,
    drafter,
    TrainingOptions(steps=DRAFTER_STEPS, rows=ROWS, anchors=16, learning_rate=1e-3),
)
state = trainer.init(drafter.params)
for i in range(DRAFTER_STEPS):
    if i % 20 == 0:
        prompts = prompts_from(stream[:cut], 32)
        written = sampler(params, trainer.params(state), prompts)
        texts = jaxspec.Sequences.of(prompts, written)
    rows = (np.arange(ROWS) + i * ROWS) % 32
    state, metrics = trainer.update(state, params, jax.tree.map(operator.itemgetter(rows), texts))
adapted = acceptance(params, trainer.params(state))
print(f"{adapted:.2f} with the adapted drafter, after {DRAFTER_STEPS} updates")
print("better than before it was adapted:", adapted > changed + 0.1)

# prints: better than before it was adapted: True
