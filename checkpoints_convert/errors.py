"""The only error class of this package."""


class CheckpointError(ValueError):
    """A checkpoint cannot be read or written. The message names the file or the tensors."""
