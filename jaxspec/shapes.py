"""Define aliases for array types, and the letters that stand for sizes in shapes.

B batch, T query tokens in this pass, S cache length, N query heads, K key/value heads, G = N // K,
H head dim, D model width, F MLP width, V vocabulary, E experts, L layers, P per-layer-input width,
C context-feature width. In code, lower-case letters are the unpacked sizes: `b, t, d = x.shape`.
"""

from __future__ import annotations

from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int, UInt32

Params = dict[str, Array]
"""The weights of one model: dotted module paths to arrays, such as `layers.0.attention.qkv`."""

__all__ = ["Array", "Bool", "DTypeLike", "Float", "Int", "Params", "UInt32"]
