"""`jaxspec generate`: continue prompts. Read `command`, then `run`."""
