"""Seeded mutations of the files that users bring, and what must come of each.

`python -m tests.tools.fuzzing` prints the counts of all kinds: configs, safetensors headers, images, JSON
lines and conversations. Read `outcomes` first, then `mutate`.
"""
