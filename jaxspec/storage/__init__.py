"""jaxspec's directory format, and conversion from and to Hugging Face directories.

A directory in jaxspec's format holds `params/` (`arrays.py`), `manifest.json` (`manifest.py`), and
unchanged copies of the source's config and tokenizer files. `conversion.py` reads Hugging Face
directories and writes both kinds of directory. `bridge.py` renames parameters that are in memory.
"""
