"""Our directory format, and conversion into it and back.

A directory of ours holds `params/` (`arrays.py`), `manifest.json` (`manifest.py`), and the source's config and
tokenizer files as they were. `conversion.py` reads Hugging Face directories and writes both kinds. `bridge.py`
renames parameters that are in memory.
"""
