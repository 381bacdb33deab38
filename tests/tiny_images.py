"""Prompts with images for the tiny models of `tiny_vision`, and what transformers makes of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.configs.gemma4_vision import Gemma4VisionConfig
from jaxspec.models.target import ImageTokens
from jaxspec.text.images import ImagePatches
from jaxspec.weights.loading import LoadedModel
from tests import tiny_vision

Grid = tuple[int, int]
"""Rows and columns of the tokens of an image."""


class Prompt(NamedTuple):
    """A prompt with images.

    Attributes:
      ids: with a placeholder for each token of an image.
      numbers: of each token's image, as `ImageTokens.numbers`.
    """

    ids: np.ndarray
    numbers: np.ndarray
    images: tuple[ImagePatches, ...]


def image(config: Gemma4VisionConfig, grid: Grid, seed: int = 0) -> ImagePatches:
    """Return a random image of so many tokens."""
    rows, columns = grid[0] * config.pool_size, grid[1] * config.pool_size
    y, x = np.divmod(np.arange(rows * columns, dtype=np.int32), columns)
    shape = rows * columns, 3 * config.patch_size**2
    pixels = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    return ImagePatches(pixels, np.stack([x, y], 1), grid[0] * grid[1])


def prompt(config: Gemma4VisionConfig, *parts: int | Grid, seed: int = 0) -> Prompt:
    """Return a prompt of parts: a number of tokens of text, or an image."""
    rng, ids, numbers, images = np.random.default_rng(seed), [], [], []
    for part in parts:
        if isinstance(part, int):
            ids += rng.integers(3, tiny_vision.IMAGE, part).tolist()
            numbers += [0] * part
            continue
        images.append(image(config, part, seed + len(images)))
        count = images[-1].num_tokens
        ids += [config.begin_token_id, *[config.image_token_id] * count, config.end_token_id]
        numbers += [0, *[len(images)] * count, 0]
    return Prompt(np.array(ids, np.int32), np.array(numbers, np.int32), tuple(images))


def padded(images: tuple[ImagePatches, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return patches and positions of images as one batch."""
    longest = max(len(image.pixels) for image in images)
    patches, positions = zip(*(image.padded(longest) for image in images), strict=True)
    return np.stack(patches), np.stack(positions)


def embeddings(model: LoadedModel, prompt: Prompt) -> np.ndarray:
    """Return the embeddings of a prompt's images in their places, and zeros elsewhere."""
    assert model.vision is not None
    vision = model.vision
    run = jax.jit(lambda params, *images: vision.model_def.bind(params)(*images))
    of_images = np.asarray(run(vision.params, *padded(prompt.images)))
    out = np.zeros((len(prompt.ids), of_images.shape[-1]), np.float32)
    for i, (rows, patches) in enumerate(zip(of_images, prompt.images, strict=True), 1):
        out[prompt.numbers == i] = rows[: patches.num_tokens]
    return out


def tokens_of(prompt: Prompt, embeddings: np.ndarray, two_way: bool) -> ImageTokens:
    """Return the images of a whole prompt, a batch of one."""
    return ImageTokens(jnp.asarray(embeddings[None]), jnp.asarray(prompt.numbers[None]), two_way)


def oracle_inputs(oracle: Any, prompt: Prompt) -> dict[str, Any]:
    """Return the arguments of a transformers model for a prompt."""
    import torch

    ids = torch.from_numpy(prompt.ids).long()[None]
    patches, positions = map(torch.from_numpy, padded(prompt.images))
    types = torch.from_numpy((prompt.numbers > 0).astype(np.int64))[None]
    inputs = dict(
        input_ids=ids,
        pixel_values=patches,
        image_position_ids=positions.long(),
        mm_token_type_ids=types,
    )
    if type(oracle).__name__.startswith("Gemma4Unified"):
        # Of the class's two rules this one is the released models'; see `docs/image-prompts.md`.
        where = torch.arange(ids.shape[1])[None]
        shapes = torch.zeros(*ids.shape, oracle.config.get_text_config().hidden_size)
        inputs["attention_mask"] = oracle.create_masks_for_generate(
            oracle.config, shapes, torch.ones_like(ids), None, where, mm_token_type_ids=types
        )
    return inputs
