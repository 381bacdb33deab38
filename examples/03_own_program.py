"""Decode inside a JAX program of your own: best of n, by the target's own opinion, as one jitted function.

The sampler is called like any function; what it returns stays on the device. Weights are arguments, so
that new ones, as after a training step, compile nothing.
"""

import jax
import jax.numpy as jnp

import jaxspec
from jaxspec.tokenizer import Tokenizer

SAMPLES = 4

target, drafter = jaxspec.load()
sampler = jaxspec.Sampler(
    target, drafter, max_new_tokens=32, num_samples=SAMPLES, stop_ids=(), logprobs=True
)


@jax.jit
def best_of_n(target_params, drafter_params, prompts, seeds, temperature):
    """Return the [B, 32] likeliest of SAMPLES continuations of [B, T] prompts, and tokens per verify step."""
    sampling = sampler.sampling(len(seeds), temperature=temperature)
    result = sampler(target_params, drafter_params, prompts, sampling, seeds)
    scores = result.logprobs.target.sum(axis=1).reshape(-1, SAMPLES)
    rows = jnp.arange(len(prompts)) * SAMPLES + jnp.argmax(scores, axis=1)
    return result.tokens[rows], result.acceptance_length()


tokenizer = Tokenizer.load(target.directory)
prompts = jnp.asarray([tokenizer.encode("def read_config(path):\n")] * 2)
seeds = jnp.arange(len(prompts) * SAMPLES)
updated = jax.tree.map(lambda w: w * 1.01, target.params)  # as after a training step

for params in (target.params, updated):
    tokens, tau = best_of_n(params, drafter.params, prompts, seeds, 0.8)
    print("tokens per step:", float(tau))
    for row in tokens.tolist():
        print(repr(tokenizer.decode(row)))
print("compilations:", best_of_n._cache_size())

# prints: tokens per step: ...
# prints: compilations: 1
