"""Write the data of the two tasks beside this file: the bundled held-out prompts, each cut before one of its lines.

    python examples/lm_eval/make_data.py

A document has the text before the line, and four lines to choose from: the right one and those of three other prompts.
"""

import json
import random
from pathlib import Path

from jaxspec.api import BUNDLED
from jaxspec.tokenizer import Tokenizer

tokenizer = Tokenizer.load(BUNDLED / "target")
prompts = json.loads((BUNDLED / "held_out.json").read_text())["prompts"]
cut = []
for prompt in prompts:
    lines = tokenizer.decode(prompt["ids"]).splitlines(keepends=True)[:-1]  # the last is cut off
    place = max(i for i, line in enumerate(lines) if line.strip())
    cut.append(("".join(lines[:place]), lines[place]))
rng = random.Random(0)
documents = []
for before, line in cut:
    others = rng.sample([other for _, other in cut if other != line], 3)
    choices = [line, *others]
    rng.shuffle(choices)
    documents.append({"before": before, "choices": choices, "answer": choices.index(line)})
path = Path("out/held_out.jsonl")
path.parent.mkdir(exist_ok=True)
path.write_text("".join(json.dumps(d) + "\n" for d in documents))
print(f"{path}: {len(documents)} documents")
