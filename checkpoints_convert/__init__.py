"""Convert Hugging Face checkpoints into directories of ours, and back.

`rules.py` says what a rule is, `gemma4.py`, `dflash.py` and `mtp.py` are the tables, `hf_io.py` reads
and writes files, `convert.py` puts them together, `cli.py` is the command. `bridge.py` does the same to
trees of arrays, without files.
"""
