"""Weights, from files to the arrays that programs take.

`model_def` keeps a module and its weights apart, `loading` reads a directory of ours or of Hugging Face's, `conversion`
and `saving` write them, and `sharding` places arrays on a mesh. Read `model_def` first.
"""
