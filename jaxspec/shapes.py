"""Define aliases for array types, and the letters that stand for sizes in shapes.

B batch, T query tokens in this pass, S cache length, N query heads, K key/value heads, G = N // K,
H head dim, D model width, F MLP width, V vocabulary, E experts, L layers, P per-layer-input width,
C context-feature width. In code, lower-case letters are the unpacked sizes: `b, t, d = x.shape`.
"""

from __future__ import annotations

from typing import Any

from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int, Shaped, UInt8, UInt32

Params = dict[str, Any]
"""The weights of one model by dotted module path, such as `layers.0.attention.qkv`.

A weight is an array, or a `quantised.QuantisedArray`.
"""

__all__ = ["Array", "Bool", "DTypeLike", "Float", "Int", "Params", "Shaped", "UInt8", "UInt32"]
