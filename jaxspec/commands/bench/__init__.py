"""`jaxspec bench`: decoding and its floor. Read `command`, `run`, `measure`, `results`."""

PROMPT_LENGTH = 256
"""Tokens of a prompt, unless the models' own prompts are shorter."""

GENERATED = "generated"
"""The value of --trace for generated requests."""
