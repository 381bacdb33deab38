"""`jaxspec train-drafter`: `command` has the options, `run` does the work."""
