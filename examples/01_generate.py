"""Load a pair, continue prompts, and look at what speculation did."""

import jaxspec
from jaxspec.tokenizer import Tokenizer

target, drafter = jaxspec.load()  # the bundled pair; else directories or hub ids
tokenizer = Tokenizer.load(target.directory)
prompts = ["def read_config(path):\n", "class Queue:\n", "import os\n\n\ndef "]

plain = jaxspec.generate(target, None, prompts, max_new_tokens=48)
speculative = jaxspec.generate(target, drafter, prompts, max_new_tokens=48)

for prompt, alone, pair in zip(prompts, plain, speculative, strict=True):
    print(prompt + tokenizer.decode(pair.token_ids))
    steps, tokens = len(pair.acceptance_lengths), sum(pair.acceptance_lengths)
    print(f"# {tokens} tokens in {steps} verify steps: {tokens / steps:.2f} a step")
    print(f"# the target alone took {len(alone.acceptance_lengths)} steps\n")
    assert pair.token_ids == alone.token_ids

# prints: # ... tokens in ... verify steps: ... a step
# prints: # the target alone took 47 steps
