"""A drafter's checkpoint of random numbers on disk, and the drafts that our loader and module make of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from jaxspec.drafters.base import Draft, Draws, Kept, TargetView
from jaxspec.options import Tree
from jaxspec.sampling import SamplingParams, Stream, fold_keys, make_key
from jaxspec.weights.loading import LoadedModel
from tests import tiny

LENGTHS = (1, 7, 29, 90)  # the last is past the ring
CACHE_LENGTH = 128
SUPPRESSED = (7, 11)


def random_tensors(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> dict[str, np.ndarray]:
    """Return tensors by name. No norm is 1, and no distribution is flat."""
    rng = np.random.default_rng(seed)

    def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if len(shape) == 1:
            return rng.uniform(0.5, 1.5, shape) * (4 if name == "norm.weight" else 1)
        if name == "embed_tokens.weight":
            return rng.normal(0, 1, shape)
        if name.endswith("base_kernel"):
            return rng.normal(0.5, 0.5, shape)
        return rng.normal(0, shape[-1] ** -0.5, shape)

    return {name: draw(name, shape).astype(np.float32) for name, shape in shapes.items()}


def write(directory: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


class Pair:
    """A drafter that was loaded, the tiny target 31b, and features and anchors of a batch."""

    def __init__(self, drafter: LoadedModel, seed: int = 3):
        self.drafter, config = drafter, drafter.config
        self.target_def, self.target_params = tiny.target("31b")
        rng = np.random.default_rng(seed)
        width = config.feature_size * len(config.feature_layers)
        self.features = [rng.normal(size=(n, width)).astype(np.float32) for n in LENGTHS]
        self.anchors = rng.integers(20, tiny.VOCAB_SIZE, len(LENGTHS))
        self.table = np.asarray(self.target_params["embedder.table"], np.float64)

    def drafts(
        self, count: int, temperature: float | None = None, tree: Tree | None = None
    ) -> Draft:
        """Return drafts: the likeliest, or drawn at a temperature."""
        rows, n = len(LENGTHS), len(self.drafter.config.feature_layers)
        feed = np.zeros((rows, max(LENGTHS), self.features[0].shape[1]), np.float32)
        for row, features in enumerate(self.features):
            feed[row, : len(features)] = features
        draws = None
        if temperature is not None:
            slots = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32), (rows, count))
            keys = fold_keys(
                jax.vmap(make_key)(jnp.arange(rows)),
                jnp.zeros(rows, jnp.int32),
                slots,
                Stream.DRAFT,
            )
            draws = Draws(SamplingParams.make(rows, temperature=temperature), keys)

        @jax.jit
        def run(params: Any, target_params: Any, feed: Any, lengths: Any, anchors: Any) -> Draft:
            drafter = self.drafter.model_def.bind(params)
            target = self.target_def.bind(target_params)
            state = drafter.init_state(rows, cache_length=CACHE_LENGTH, dtype=jnp.float32)
            tokens = jnp.zeros(feed.shape[:2], jnp.int32)
            hidden = jnp.zeros((*feed.shape[:2], 1), jnp.float32)
            start = jnp.zeros(rows, jnp.int32)
            kept = Kept(tokens, hidden, tuple(jnp.split(feed, n, axis=-1)), start, lengths)
            state = drafter.absorb(state, kept)
            view = TargetView(target, (), suppress_tokens=SUPPRESSED)
            wanted: dict[str, Any] = dict(num_draft_tokens=count, tree=tree, draws=draws)
            return drafter.draft(state, view, anchors, lengths, **wanted)

        lengths = jnp.asarray(LENGTHS, jnp.int32)
        anchors = jnp.asarray(self.anchors, jnp.int32)
        return run(self.drafter.params, self.target_params, jnp.asarray(feed), lengths, anchors)
