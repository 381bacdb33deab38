"""Weights of fewer bits. A weight is an array, or a `QuantisedArray` of codes and scales.

Read `array.QuantisedArray`, then `formats.Format`, then `choice.formats_for`. A format is one file
with an entry in the registry; `per_channel` has the first two.

In a flat dict of parameters a quantised weight is its arrays: `layers.0.mlp.down.codes` and
`layers.0.mlp.down.scales` stand for `layers.0.mlp.down`. So whatever shards, donates, stores or
swaps arrays does so with these. `params.Graph.formats` says which weights are quantised, and
`Graph.bind` puts their arrays together.
"""

from jaxspec.quantised import per_channel  # noqa: F401  registers its formats
from jaxspec.quantised.array import QuantisedArray
from jaxspec.quantised.formats import Format, FormatError, named, names

__all__ = ["Format", "FormatError", "QuantisedArray", "named", "names"]
