"""`jaxspec bench`: measure decoding beside the least it could take. Read `command`, `run`, `measure`, then `results`."""

PROMPT_LENGTH = 256
"""Tokens of a prompt, unless the models' own prompts are shorter."""
