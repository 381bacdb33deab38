"""The Hugging Face side of conversion: the tensors of a checkpoint, and how they become parameters.

`rules.py` defines what a rule is. `gemma4.py`, `qwen3.py`, `dflash.py` and `mtp.py` have the
tables. `hf_io.py` reads and writes files, `headers.py` reads what they hold, and `files.py` reads
JSON. `bridge.py` applies a table to a tree of arrays, without files. Only `__main__.py`, the command
line, imports `jaxspec`. `jaxspec.weights` calls this package and knows the format in which
parameters are stored.
"""
