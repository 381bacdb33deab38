"""Load a pair, continue a prompt, and see which tokens came together: each colour is one step of the target."""

import jaxspec

COLOURS = ("\033[92m", "\033[96m", "\033[93m", "\033[95m")

pair = jaxspec.load()  # the bundled pair; else directories or hub ids
prompt = "def read_config(path):\n"

done = pair.generate(prompt, max_new_tokens=64)
alone = pair.plain().generate(prompt, max_new_tokens=64)

print(prompt, end="")
for i, piece in enumerate(pair.text_by_step(done)):
    print(f"{COLOURS[i % 4]}{piece}", end="")
print("\033[0m\n")
print(f"# {done.acceptance_length:.2f} tokens a step, in {len(done.steps) - 1} steps")
print(f"# the target alone took {len(alone.steps) - 1} steps for the same text")
assert done.token_ids == alone.token_ids

# prints: # ... tokens a step, in ... steps
# prints: # the target alone took 63 steps for the same text
