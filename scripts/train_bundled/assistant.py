"""Train the MTP assistant, as `drafter` trains the block drafter; only its first weights are others."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxspec.drafters.mtp import MTPDrafter
from jaxspec.shapes import Params
from jaxspec.weights.model_def import ModelDef
from scripts.train_bundled import drafter, recipe
from scripts.train_bundled.recipe import AssistantSchedule
from scripts.train_bundled.target import Report


def assistant_def(dtype: str) -> ModelDef:
    return ModelDef(MTPDrafter, recipe.MTP, dtype)


def initial_params(model_def: ModelDef, target_params: Params, seed: int) -> Params:
    """Return float32 weights that start training well.

    Norms begin as the target's do. The head begins as the directions in which the target's embeddings differ
    most, so that likely tokens are near each other from the start.
    """
    num_sublayers = 2 * model_def.config.num_layers
    params = {}
    for name, value in (
        ModelDef(model_def.module, model_def.config, "float32").random_params(seed).items()
    ):
        if name.endswith("q_norm"):
            value = value * value.shape[0] ** -0.25
        elif name.endswith(("post_attention_norm", "post_mlp_norm")):
            value = value * num_sublayers**-0.5
        params[name] = value
    table = np.asarray(target_params["embedder.table"], np.float32)
    directions = np.linalg.svd(table, full_matrices=False)[0][:, : model_def.config.hidden_size]
    spread = np.sqrt(len(table) / model_def.config.hidden_size)
    return params | {"head": jnp.asarray(directions * spread)}


def train(
    model_defs: tuple[ModelDef, ModelDef],
    target_params: Params,
    schedule: AssistantSchedule,
    streams: dict[str, np.ndarray],
    report: Report,
) -> Params:
    """Train from scratch; return float32 master weights."""
    options: Any = dict(initial_params=initial_params, seed=recipe.SEED + 3)
    return drafter.train(model_defs, target_params, schedule, streams, report, **options)
