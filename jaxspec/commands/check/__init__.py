"""`jaxspec check`: find out whether a drafter fits a target. Read `command`, then `run`, then `replay`."""
