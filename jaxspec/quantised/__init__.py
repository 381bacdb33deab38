"""Weights of fewer bits. A weight is an array, or a `QuantisedArray` of codes and scales.

Read `array.QuantisedArray`, then `formats.Format`, then `choice.formats_for`. A format is one file
with entries in the registry: `per_channel` has those of 8 bits, `grouped` those of 4.

In a flat dict of parameters a quantised weight is its arrays: `layers.0.mlp.down.codes` and
`layers.0.mlp.down.scales` stand for `layers.0.mlp.down`. So whatever shards, donates, stores or
swaps arrays does so with these. `params.ModelDef.formats` says which weights are quantised, and
`ModelDef.bind` puts their arrays together.
"""

# Both register their formats, in the order of this import: those of 8 bits come first.
from jaxspec.quantised import per_channel  # noqa: F401  isort: skip
from jaxspec.quantised import grouped  # noqa: F401  isort: skip
from jaxspec.quantised.array import QuantisedArray
from jaxspec.quantised.formats import Format, FormatError, get_format, names

__all__ = ["Format", "FormatError", "QuantisedArray", "get_format", "names"]
