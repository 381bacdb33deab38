"""Vision parts against transformers in float32: what the towers and embedders make of images, at every budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.configs.gemma4_vision import IMAGE_TOKENS
from jaxspec.models import gemma4_vision
from jaxspec.weights.loading import LoadedModel, load_target
from tests import tiny_vision

torch = pytest.importorskip("torch", reason="transformers needs torch")
pytest.importorskip("transformers", reason="parity is measured against transformers")

# Norm-wise: float32 sums in another order differ by about 1e-6, a wrong convention by 1e-3 and more.
TOLERANCE = 1e-4

# Rows and columns of tokens of two images each: of the budget's size about, one of them wide, one high.
GRIDS = {
    70: ((7, 9), (1, 70)),
    140: ((10, 14), (2, 3)),
    280: ((14, 19), (280, 1)),
    560: ((23, 24),),
    1120: ((28, 40),),
}


KINDS = ("e2b", "12b", "31b")
"""E4B has the tower of E2B, and 26B-A4B that of 31B."""


@pytest.fixture(scope="module", params=KINDS)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    directory: Path = tmp_path_factory.mktemp("checkpoint")
    oracle = tiny_vision.save(request.param, directory)
    model = load_target(str(directory), dtype="float32", vision=True).vision
    assert model is not None
    return oracle, model


def image(grid: tuple[int, int], side: int, pixels: int, slots: int, seed: int = 0):
    """Return patches and positions of a random image, padded to `slots` patches."""
    rows, columns = grid[0] * side, grid[1] * side
    y, x = np.divmod(np.arange(rows * columns), columns)
    at = np.full((slots, 2), -1, np.int32)
    at[: rows * columns] = np.stack([x, y], 1)
    patches = np.zeros((slots, pixels), np.float32)
    patches[: rows * columns] = np.random.default_rng(seed).uniform(0, 1, (rows * columns, pixels))
    return patches, at


def theirs(oracle: Any, patches: np.ndarray, at: np.ndarray) -> list[np.ndarray]:
    with torch.no_grad():
        output = oracle.model.get_image_features(
            torch.from_numpy(patches), torch.from_numpy(at).long(), return_dict=True
        )
    return [x.numpy() for x in output.pooler_output]


def ours(model: LoadedModel, patches: np.ndarray, at: np.ndarray) -> np.ndarray:
    run = jax.jit(lambda params, *images: model.model_def.bind(params)(*images))
    return np.asarray(run(model.params, patches, at))


@pytest.mark.parametrize(
    "budget", [pytest.param(n, marks=[pytest.mark.slow] * (n > 560)) for n in IMAGE_TOKENS]
)
def test_images_become_what_transformers_makes_of_them(both: Any, budget: int) -> None:
    oracle, model = both
    config = model.config
    slots = budget * config.pool_size**2
    images = [
        image(grid, config.pool_size, 3 * config.patch_size**2, slots, seed)
        for seed, grid in enumerate(GRIDS[budget])
    ]
    patches, at = (np.stack(parts) for parts in zip(*images, strict=True))
    expected, got = theirs(oracle, patches, at), ours(model, patches, at)
    for (rows, columns), mine, other in zip(GRIDS[budget], got, expected, strict=True):
        assert other.shape == (rows * columns, config.text_hidden_size)
        error = np.linalg.norm(mine[: rows * columns] - other) / np.linalg.norm(other)
        assert error < TOLERANCE


def test_padding_changes_nothing(both: Any) -> None:
    """Images may be padded to a bucket: their patches do not see what pads them."""
    _, model = both
    side, pixels = model.config.pool_size, 3 * model.config.patch_size**2
    grid = (4, 5)
    tight = image(grid, side, pixels, 20 * side**2)
    loose = image(grid, side, pixels, 70 * side**2)
    loose[0][20 * side**2 :] = 7.0
    first, second = (ours(model, x[0][None], x[1][None])[0, :20] for x in (tight, loose))
    np.testing.assert_allclose(first, second, rtol=1e-5, atol=1e-5)


def test_blocks_of_queries_are_all_queries_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(2, 45, 3, 8)), jnp.float32) for _ in range(3))
    real = jnp.arange(45) < jnp.asarray([[45], [30]])
    whole = gemma4_vision.attend_to_all(q, k, v, real)
    monkeypatch.setattr(gemma4_vision, "QUERY_BLOCK", 16)
    blocks = gemma4_vision.attend_to_all(q, k, v, real)
    np.testing.assert_allclose(blocks, whole, rtol=1e-6, atol=1e-6)
    scores = jnp.einsum("btnh,bmnh->bntm", q, k)[1, :, :, :30]
    expected = jnp.einsum("ntm,mnh->tnh", jax.nn.softmax(scores, -1), v[1, :30])
    np.testing.assert_allclose(whole[1], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(("patches", "heads", "head_dim"), [(630, 12, 64), (2520, 16, 72)])
def test_cudnn_s_attention_equals_the_reference(patches: int, heads: int, head_dim: int) -> None:
    rng = np.random.default_rng(0)
    shape = 2, patches, heads, head_dim
    q, k, v = (jnp.asarray(rng.normal(size=shape) * head_dim**-0.25, jnp.bfloat16) for _ in "qkv")
    real = jnp.arange(patches)[None, :] < jnp.asarray([[patches], [patches - 243]])
    got = jax.jit(gemma4_vision.attend_to_all)(q, k, v, real)
    want = gemma4_vision.attend_in_blocks(q, k, v, real)
    np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(want, np.float32), atol=2e-2)
    no_patches = gemma4_vision.attend_to_all(q, k, v, jnp.zeros_like(real))
    assert bool(jnp.all(jnp.isfinite(no_patches)))
