"""`jaxspec check`: does a drafter fit a target? Read `command`, `run`, `replay`, `search`."""
