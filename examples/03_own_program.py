"""Decode inside a JAX program of your own: best of n, by the target's own opinion, as one jitted function.

The sampler is called like any function; what it returns stays on the device. Weights are arguments, so
that new ones, as after a training step, compile nothing.
"""

import jax
import jax.numpy as jnp

import jaxspec

SAMPLES = 4

pair = jaxspec.load()
program_features = jaxspec.ProgramFeatures(logprobs=True)
sampler = jaxspec.Sampler(
    pair, max_new_tokens=32, num_samples=SAMPLES, stop_ids=(), program_features=program_features
)


@jax.jit
def best_of_n(target_params, drafter_params, prompts, seed):
    """Return the [B, 32] likeliest of SAMPLES continuations of [B, T] prompts, and tokens per verify step."""
    sampling = jaxspec.Sampling(temperature=0.8)
    result = sampler(target_params, drafter_params, prompts, sampling, seed)
    scores = result.logprobs.target.sum(axis=1).reshape(-1, SAMPLES)
    rows = jnp.arange(len(prompts)) * SAMPLES + jnp.argmax(scores, axis=1)
    return result.tokens[rows], result.acceptance_length()


prompts = jnp.asarray([pair.encode("def read_config(path):\n")] * 2)
updated = jax.tree.map(lambda w: w * 1.01, pair.target.params)  # as after a training step

for params in (pair.target.params, updated):
    tokens, tau = best_of_n(params, pair.drafter.params, prompts, 0)
    print("tokens per step:", float(tau))
    for row in tokens.tolist():
        print(repr(pair.decode(row)))
print("compilations:", best_of_n._cache_size())

# prints: tokens per step: ...
# prints: compilations: 1
