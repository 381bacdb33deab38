"""Weights of fewer bits. A weight is an array, or a `QuantisedArray` of codes and scales.

Read `array.QuantisedArray`, then `format.Format`. `int8_fp8` and `int4` define the formats of 8 and
of 4 bits. `choice` refuses what a device cannot multiply, and `kv` is about keys and values.

Other places are about quantised weights too. `checkpoints_convert/quantised` reads the files of other
programs, `jaxspec/weights/quantised_files.py` brings what they hold into a format of this package,
`jaxspec/weights/define.py` chooses formats, and the kernels multiply.

A `QuantisedArray` is a pytree, so shardings, donation and swaps of weights apply to its arrays.
`model_def.ModelDef.formats` names the quantised weights. Files hold each array by itself, such as
`layers.0.mlp.down.codes` and `layers.0.mlp.down.scales`; `weights/arrays.py` knows that.
"""

# Both register their formats, in the order of this import: those of 8 bits come first.
from jaxspec.quantised import int8_fp8  # noqa: F401  isort: skip
from jaxspec.quantised import int4  # noqa: F401  isort: skip
from jaxspec.quantised.array import QuantisedArray
from jaxspec.quantised.format import Format, FormatError, get_format, names

__all__ = ["Format", "FormatError", "QuantisedArray", "get_format", "names"]
