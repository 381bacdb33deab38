"""The Hugging Face side of conversion: which tensors a checkpoint has, and how they become parameters.

`rules.py` says what a rule is. `gemma4.py`, `dflash.py` and `mtp.py` are the tables. `hf_io.py` reads and
writes files. `bridge.py` applies a table to a tree of arrays, without files. Nothing here imports `jaxspec`:
`jaxspec.storage` calls this package, and knows the format that parameters are kept in.
"""
