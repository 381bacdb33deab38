"""The only error class of this package, and how its messages list names."""

from collections.abc import Iterable

MOST_LISTED = 20
_MOST_CHARACTERS = 200  # of one name


class CheckpointError(ValueError):
    """A checkpoint cannot be read or written. The message names the file or the tensors."""


def listed(names: Iterable[str], between: str = ", ") -> str:
    """Join names for a message. Of many, the first are shown and the others counted."""
    all_names = list(names)
    shown = [n if len(n) <= _MOST_CHARACTERS else f"{n[:_MOST_CHARACTERS]}…" for n in all_names]
    if len(shown) > MOST_LISTED + 1:
        shown = [*shown[:MOST_LISTED], f"and {len(shown) - MOST_LISTED:,} more"]
    return between.join(shown)
