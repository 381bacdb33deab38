"""The one error of this package."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or written; the message names the file or the tensors."""
