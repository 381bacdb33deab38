"""Decode inside a JAX program of your own: prompts and weights in, tokens out, one jitted function.

Training code rolls out its current policy like this. Weights are arguments, so new ones compile nothing;
the drafter's stay as they were.
"""

import jax
import jax.numpy as jnp

import jaxspec
from jaxspec import decode
from jaxspec.decode import Admission, DecodeSpec, PrefillChunk
from jaxspec.sampling import SamplingParams
from jaxspec.tokenizer import Tokenizer

NEW_TOKENS = 32

target, drafter = jaxspec.load()
spec = DecodeSpec(target.graph, drafter.graph, num_draft_tokens=7)


@jax.jit
def rollout(target_params, drafter_params, prompts, seeds, temperature):
    """Return [B, NEW_TOKENS] tokens that continue [B, T] prompts, and tokens per verify step."""
    b, t = prompts.shape
    rows, full = jnp.arange(b), lambda value: jnp.full(b, value)
    state = decode.init_state(
        spec, b, cache_length=t + NEW_TOKENS + 8, num_stop_ids=1, cache_dtype=jnp.float32
    )
    state = decode.admit(
        state,
        Admission(
            slots=rows,
            max_new_tokens=full(NEW_TOKENS),
            stop_ids=jnp.full((b, 1), -1),  # none
            sampling=SamplingParams.make(b, temperature=temperature),
            keys=jax.vmap(jax.random.key)(seeds),
        ),
    )
    chunk = PrefillChunk(rows, prompts, start=full(0), count=full(t), is_last=full(True))
    state = decode.prefill(spec, target_params, drafter_params, state, chunk)
    state = decode.decode_loop(spec, target_params, drafter_params, state, NEW_TOKENS)
    return state.tokens[:, :NEW_TOKENS], (state.num_tokens - 1) / state.num_steps


tokenizer = Tokenizer.load(target.directory)
prompts = jnp.asarray([tokenizer.encode("def read_config(path):\n")] * 4)
tokens, tau = rollout(target.params, drafter.params, prompts, jnp.arange(4), 0.8)
for row in tokens.tolist():
    print(repr(tokenizer.decode(row)))
print("tokens per step:", tau.tolist())

updated = jax.tree.map(lambda w: w * 1.01, target.params)  # as after a training step
tokens, tau = rollout(updated, drafter.params, prompts, jnp.arange(4), 0.8)
print("with new weights:", tau.tolist())
print("compilations:", rollout._cache_size())

# prints: compilations: 1
