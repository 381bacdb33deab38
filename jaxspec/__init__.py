"""Speculative decoding of Gemma 4 in JAX. Read `decode` first: it is the algorithm on one page."""

__version__ = "0.1.0"
