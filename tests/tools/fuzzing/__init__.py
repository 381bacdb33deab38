"""Seeded mutations of the files that users bring, and what must come of each.

`python -m tests.tools.fuzzing` prints the counts of all three kinds: configs, safetensors headers and JSON lines. Read
`outcomes` first, then `mutate`.
"""
