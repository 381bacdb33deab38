"""`jaxspec check`: does a drafter fit a target? Read `command`, `run`, `replay`, `search`."""

MIN_ROWS = 4
"""Least number of rows of text for an interval."""
