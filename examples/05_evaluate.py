"""Evaluate on a JSONL file of prompts, a line of results for each; run again after an interruption to go on.

    python examples/05_evaluate.py [PROMPTS.jsonl [RESULTS.jsonl]]

Prompts are lines such as {"prompt": "def f("}; without a file, they are the bundled held-out ones. A row's
seed is its line's number and all batches have one shape, so that results do not depend on where a run was
interrupted, and one program does it all.
"""

import json
import os
import sys
from pathlib import Path

import jax
import numpy as np

import jaxspec
from jaxspec.api import BUNDLED

BATCH, NEW_TOKENS, TEMPERATURE = 6, 48, 0.8
default_prompts = Path("out/prompts.jsonl")
prompts_file = Path(sys.argv[1]) if len(sys.argv) > 1 else default_prompts
results_file = (
    Path(sys.argv[2]) if len(sys.argv) > 2 else prompts_file.with_suffix(".results.jsonl")
)


def write_held_out_prompts(path):
    held_out = json.loads((BUNDLED / "held_out.json").read_text())["prompts"]
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps({"prompt_ids": p["ids"]}) + "\n" for p in held_out))


def read_finished(path):
    """Return the results that are there, by line of the prompts; a half-written last one is cut off."""
    content = path.read_bytes() if path.exists() else b""
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        os.truncate(path, len(whole))
    return {result["line"]: result for result in map(json.loads, whole.splitlines())}


def results_of(lines, generated):
    """Yield what is kept of each row."""
    generated = jax.device_get(generated)
    for row, line in enumerate(lines):
        ids = generated.tokens[row, : generated.lengths[row]].tolist()
        yield {
            "line": int(line),
            "prompt": pair.decode(prompts[line]),
            "text": pair.decode(ids),
            "ids": ids,
            "logprob": float(generated.logprobs.target[row].sum()),
            "steps": int(generated.num_steps[row]),
            "committed": int(generated.acceptance_lengths[row].sum()),
        }


if prompts_file == default_prompts and not prompts_file.exists():
    write_held_out_prompts(prompts_file)
pair = jaxspec.load()
given = map(json.loads, prompts_file.read_text().splitlines())
prompts = [p.get("prompt_ids") or pair.encode(p["prompt"]) for p in given]
finished = read_finished(results_file)
for line, result in finished.items():
    if line >= len(prompts) or result["prompt"] != pair.decode(prompts[line]):
        raise SystemExit(f"{results_file} has results of other prompts; name another file")

program_features = jaxspec.ProgramFeatures(logprobs=True)
sampler = jaxspec.Sampler(pair, max_new_tokens=NEW_TOKENS, program_features=program_features)
sampling = jaxspec.Sampling(temperature=TEMPERATURE)
params = pair.target.params, pair.drafter.params
padded = jaxspec.Prompts.padded(prompts)  # all to one width
todo = [line for line in range(len(prompts)) if line not in finished]
print(f"{len(finished)} of {len(prompts)} prompts are done already", flush=True)
for begin in range(0, len(todo), BATCH):
    lines = todo[begin : begin + BATCH]
    rows = np.resize(lines, BATCH)  # the last batch is filled up with rows that are left out again
    generated = sampler(*params, padded.take(rows), sampling, rows)
    with results_file.open("a") as file:
        for result in results_of(lines, generated):
            finished[result["line"]] = result
            file.write(json.dumps(result) + "\n")
    print(f"{len(finished)} of {len(prompts)} done", flush=True)

results = finished.values()
total = {key: sum(r[key] for r in results) for key in ("logprob", "steps", "committed")}
tokens = sum(len(r["ids"]) for r in results)
fours = [tuple(r["ids"][i : i + 4]) for r in results for i in range(len(r["ids"]) - 3)]
print(f"tokens: {tokens} of {len(results)} prompts")
print(f"mean logprob a token: {total['logprob'] / tokens:.3f}")
print(f"acceptance length: {total['committed'] / total['steps']:.2f}")
print(f"distinct 4-grams: {len(set(fours)) / len(fours):.2f}")

# prints: 16 of 16 done
# prints: tokens: ... of 16 prompts
# prints: mean logprob a token: -...
