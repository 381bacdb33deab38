"""Pure functions that rename arrays between our parameters and Hugging Face tensors.

They serve bridges to other JAX trees. They use the same tables as the conversion of files. They
also run under `jax.jit`, which copies only what a change of layout forces it to copy.
`jaxspec.weights.bridge` calls them with the table of a config.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from checkpoints_convert.errors import CheckpointError, listed
from checkpoints_convert.hf_io import DTYPES
from checkpoints_convert.rules import RuleSet, Shape, TensorSpec, fills_for, match, unwrapped

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def to_hf_names(
    params: Mapping[str, jax.Array],
    rules: RuleSet,
    shapes: Mapping[str, Shape],
    *,
    prefix: str | None = None,
) -> dict[str, jax.Array]:
    """Convert parameters to the tensors of a Hugging Face checkpoint. Dtypes stay as they are.

    Token ids stay int32, whereas a file stores them as int64.

    Args:
      params: the parameters by name.
      rules: the table of the model.
      shapes: name and shape of every parameter of the model.
      prefix: what stands before every tensor name; None for the prefix of the releases.

    Raises:
      ValueError: parameters are missing, not known, or of a wrong shape. The message lists
        them.
    """
    wrong = [f"{name}: missing" for name in shapes if name not in params]
    for name, param in params.items():
        if name not in shapes:
            wrong.append(f"{name}: not known")
        elif param.shape != shapes[name]:
            wrong.append(f"{name}: shape {list(param.shape)}, expected {list(shapes[name])}")
    if wrong:
        raise ValueError(
            f"params do not fit their config, {len(wrong):,} problems:\n  "
            + listed(sorted(wrong), "\n  ")
        )
    tensors: dict[str, jax.Array] = {}
    for fill in fills_for(rules, shapes, rules.prefixes[0] if prefix is None else prefix):
        parts = fill.transform.to_sources(params[fill.path], len(fill.sources))
        tensors |= zip(fill.sources, parts, strict=True)
    return tensors


def from_hf_names(
    tensors: Mapping[str, jax.Array | np.ndarray], rules: RuleSet, shapes: Mapping[str, Shape]
) -> dict[str, jax.Array]:
    """Convert tensors of a Hugging Face checkpoint to parameters. Floats keep their dtypes.

    Token ids become int32. Tensors without a place in the model, such as a vision tower, are left
    out, as in the conversion of files.

    Args:
      tensors: the tensors by full name. Their prefix is detected.
      rules: the table of the model.
      shapes: name and shape of every parameter of the model.

    Raises:
      CheckpointError: tensors are missing, not known, or of a wrong shape or dtype; the message
        lists them. Outside of jit, also when a head differs from the embedding that it is
        tied to.
    """
    plain = unwrapped(tensors, "the tree of tensors")
    tensors = {plain[name]: tensor for name, tensor in tensors.items()}
    specs = {n: TensorSpec(np.shape(t), _NAMES[np.dtype(t.dtype)]) for n, t in tensors.items()}
    plan = match(rules, shapes, specs, "the tree of tensors")
    for name, original in plan.copies.items():
        pair = tensors[name], tensors[original]
        traced = any(isinstance(t, Tracer) for t in pair)
        if not traced and not jnp.array_equal(*pair):
            raise CheckpointError(
                f"{name} differs from {original}, but the config says that they are one "
                "(tie_word_embeddings)"
            )
    params: dict[str, jax.Array] = {}
    for fill in plan.fills:
        sources = [jnp.asarray(tensors[name]) for name in fill.sources]
        param = fill.transform.to_param(sources, fill.shape)
        params[fill.path] = param.astype(jnp.int32) if fill.transform.integers else param
    return params
