"""`jaxspec bench`: measure decoding beside the least it could take. Read `command`, `run`, `measure`, then `results`."""
