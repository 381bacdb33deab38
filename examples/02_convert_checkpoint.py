"""Convert a Hugging Face checkpoint to the layout that loads fast, and back; nothing is lost on the way.

The command line does the same: `jaxspec convert SRC DST`, and `jaxspec convert --to-hf DST BACK`.
"""

import tempfile
from pathlib import Path

import jaxspec
from jaxspec.weights.conversion import convert, to_hf

original, _ = jaxspec.load()

with tempfile.TemporaryDirectory() as folder:
    ours, back = Path(folder) / "ours", Path(folder) / "back"
    report = convert(original.directory, ours)
    print(f"{report.tensors} tensors became {report.parameters} parameters")
    to_hf(ours, back)

    for directory in (ours, back):
        copy, _ = jaxspec.load(str(directory))
        equal = [
            bool((copy.params[name] == array).all()) for name, array in original.params.items()
        ]
        print(f"{directory.name}: all of {len(equal)} parameters are equal: {all(equal)}")

# prints: ours: all of ... parameters are equal: True
# prints: back: all of ... parameters are equal: True
