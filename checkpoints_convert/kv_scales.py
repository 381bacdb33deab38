"""Scales of keys and values that some quantised checkpoints carry, a number for each layer.

    layers.3.self_attn.k_scale          compressed-tensors
    layers.3.self_attn.k_proj.k_scale   ModelOpt

Both mean the same: stored = x / scale. vLLM reads them in the same way (`maybe_remap_kv_scale_name`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping

import numpy as np

from checkpoints_convert.errors import CheckpointError
from checkpoints_convert.hf_io import HFCheckpoint
from checkpoints_convert.rules import Skip

_NAME = r"(?:.+\.)?layers\.(\d+)\.self_attn\.(?:k_proj\.|v_proj\.)?([kv])_scale"

SKIP = Skip(_NAME, "scales of an fp8 K/V cache")
"""These tensors fill no parameter. `--kv-dtype fp8` reads them."""


def read_kv_scales(
    checkpoint: HFCheckpoint, owners: Collection[int], num_layers: int
) -> tuple[tuple[float, float], ...] | None:
    """Return the scales of keys and of values for each layer; None where a checkpoint has none.

    A layer with one of both uses it for keys and values, as in vLLM. Layers that own no keys and
    values get 1.

    Raises:
      CheckpointError: only some layers have scales, or one is no positive number.
    """
    scales: dict[int, dict[str, float]] = {}
    for name in checkpoint.tensors:
        if match := re.fullmatch(_NAME, name):
            layer, which = int(match[1]), match[2]
            scales.setdefault(layer, {})[which] = _number(checkpoint, name)
    if not any(layer in scales for layer in owners):
        return None
    if missing := sorted(set(owners) - set(scales)):
        raise CheckpointError(
            f"{checkpoint.directory} has scales of keys and values for {len(scales)} layers, but none for "
            f"layer {missing[0]}; get the checkpoint again"
        )
    return tuple(
        _both(scales[layer]) if layer in owners else (1.0, 1.0) for layer in range(num_layers)
    )


def _both(scales: Mapping[str, float]) -> tuple[float, float]:
    return scales.get("k", scales.get("v", 1.0)), scales.get("v", scales.get("k", 1.0))


def _number(checkpoint: HFCheckpoint, name: str) -> float:
    values = np.ravel(checkpoint.read(name, np.dtype(np.float32)))
    if len(values) != 1 or not math.isfinite(values[0]) or values[0] <= 0:
        raise CheckpointError(
            f"{checkpoint.directory}: {name} is {values.tolist()[:4]}; expected one positive number for "
            "all heads of the layer"
        )
    return float(values[0])
