"""Weights of fewer bits. A weight is an array, or a `QuantisedArray` of codes and scales.

Read `array.QuantisedArray`, then `format.Format`. `int8_fp8` and `int4` define the formats of 8 and
of 4 bits. `choice` refuses what a device cannot multiply, and `kv` is about keys and values.

Other places are about quantised weights too. `checkpoints_convert/quantised` reads the files of other
programs, `jaxspec/weights/quantised_files.py` brings what they hold into a format of this package,
`jaxspec/weights/define.py` chooses formats, and the kernels multiply.

In a flat dict of parameters a quantised weight is its arrays: `layers.0.mlp.down.codes` and
`layers.0.mlp.down.scales` stand for `layers.0.mlp.down`. So whatever shards, donates, stores or
swaps arrays does so with these. `model_def.ModelDef.formats` says which weights are quantised, and
`ModelDef.bind` puts their arrays together.
"""

# Both register their formats, in the order of this import: those of 8 bits come first.
from jaxspec.quantised import int8_fp8  # noqa: F401  isort: skip
from jaxspec.quantised import int4  # noqa: F401  isort: skip
from jaxspec.quantised.array import QuantisedArray
from jaxspec.quantised.format import Format, FormatError, get_format, names

__all__ = ["Format", "FormatError", "QuantisedArray", "get_format", "names"]
