"""Samplers read prompts with images: as an engine does, in fewer slots, inside of jit, and when they go on."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec.api import Pair
from jaxspec.engine.engine import Engine
from jaxspec.engine.request import Request
from jaxspec.models.target import ImageTokens
from jaxspec.options import FieldError
from jaxspec.rollout.batch import Prompts
from jaxspec.rollout.sampler import Sampler
from jaxspec.rollout.scoring import score
from jaxspec.weights.define import model_def_of
from jaxspec.weights.loading import LoadedModel
from tests import tiny_images, tiny_photo
from tests.cases import run, slow

pytestmark = pytest.mark.usefixtures("tight")

NEW_TOKENS = 10
# With `tight`, passes have 16 tokens where tokens of images do not see each other.
PARTS = ((5, (2, 3), 4), (3, (2, 2), 1, (4, 7), 12), (9,))


@pytest.fixture(scope="module", params=[True, *slow(False)], ids=["two way", "causal"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    path: Path = tmp_path_factory.mktemp("checkpoints")
    target = str(tiny_photo.write_target(path / "target"))
    loaded = jaxspec.load(target, str(tiny_photo.write_drafter(path / "drafter")))
    vision = loaded.target.vision
    assert vision is not None
    config = dataclasses.replace(vision.config, two_way=request.param)
    model_def = model_def_of(config, "float32")
    vision = dataclasses.replace(vision, config=config, model_def=model_def)
    return Pair(dataclasses.replace(loaded.target, vision=vision), loaded.drafter)


def vision_of(pair: Pair) -> LoadedModel:
    assert pair.target.vision is not None
    return pair.target.vision


@pytest.fixture
def asked(pair: Pair) -> list[tiny_images.Prompt]:
    config = vision_of(pair).config
    return [tiny_images.prompt(config, *parts, seed=i) for i, parts in enumerate(PARTS)]


@pytest.fixture
def prompts(pair: Pair, asked: list[tiny_images.Prompt]) -> Prompts:
    padded = Prompts.padded([p.ids.tolist() for p in asked])
    return padded.with_images([p.images for p in asked], vision_of(pair))


@pytest.fixture
def expected(pair: Pair, asked: list[tiny_images.Prompt]) -> list[tuple[int, ...]]:
    engine = Engine(pair.target, None, batch_size=3, cache_length=96, programs=pair.programs)
    requests = [Request(tuple(p.ids.tolist()), NEW_TOKENS, images=p.images) for p in asked]
    return [done.token_ids for done in run(engine, requests)]


def sampler_of(pair: Pair, **options: Any) -> Sampler:
    return Sampler(pair, max_new_tokens=NEW_TOKENS, stop_ids=(), **options)


def tokens(result: Any) -> list[tuple[int, ...]]:
    return [tuple(row.tolist()) for row in np.asarray(result.tokens)]


def test_a_sampler_says_what_an_engine_says(
    pair: Pair, prompts: Prompts, expected: list[tuple[int, ...]]
) -> None:
    target, drafter = pair.target.params, pair.drafter.params  # type: ignore[union-attr]
    assert tokens(sampler_of(pair)(target, drafter, prompts)) == expected
    order = [2, 0, 1]
    assert tokens(sampler_of(pair)(target, drafter, prompts.take(order))) == [
        expected[i] for i in order
    ]


@pytest.mark.slow
def test_rows_with_images_take_turns(
    pair: Pair, prompts: Prompts, expected: list[tuple[int, ...]]
) -> None:
    weights = pair.target.params, pair.drafter.params  # type: ignore[union-attr]
    refilled = sampler_of(pair, batch_size=2, num_samples=2)(*weights, prompts)
    assert tokens(refilled) == [row for row in expected for _ in range(2)]


def test_embeddings_may_be_made_inside_of_jit(
    pair: Pair, asked: list[tiny_images.Prompt], expected: list[tuple[int, ...]]
) -> None:
    """By a vision part that a program trains, say."""
    vision, sampler = vision_of(pair), sampler_of(pair)
    prompt = asked[0]
    patches, positions = tiny_images.padded(prompt.images)

    @jax.jit
    def rollout(target: Any, drafter: Any, of_vision: Any) -> Any:
        rows = vision.model_def.bind(of_vision)(jnp.asarray(patches), jnp.asarray(positions))[0]
        numbers = jnp.asarray(prompt.numbers)
        at = jnp.cumsum(numbers) - 1
        embeddings = jnp.where(numbers[:, None] > 0, rows[at], 0.0)
        images = ImageTokens(embeddings[None], numbers[None], vision.config.two_way)
        count = jnp.full(1, len(prompt.ids), jnp.int32)
        return sampler(
            target, drafter, Prompts(jnp.asarray(prompt.ids)[None], count, images=images)
        )

    weights = pair.target.params, pair.drafter.params, vision.params  # type: ignore[union-attr]
    assert tokens(rollout(*weights)) == expected[:1]


@pytest.mark.slow
def test_a_rollout_goes_on(pair: Pair, prompts: Prompts, expected: list[tuple[int, ...]]) -> None:
    weights = pair.target.params, pair.drafter.params  # type: ignore[union-attr]
    sampler = Sampler(pair, max_new_tokens=NEW_TOKENS // 2, stop_ids=())
    first = sampler(*weights, prompts)
    second = sampler(*weights, prompts.after(first))
    both = [a + b for a, b in zip(tokens(first), tokens(second), strict=True)]
    assert both == expected


def test_what_does_not_fit_is_refused(pair: Pair, prompts: Prompts) -> None:
    vision, weights = vision_of(pair), (pair.target.params, pair.drafter.params)  # type: ignore[union-attr]
    padded = Prompts.padded([[*range(3, 9), *[tiny_photo.IMAGE] * 6, 4]])
    image = tiny_images.image(vision.config, (2, 2))
    with pytest.raises(FieldError, match="of prompt 0 have 4 tokens, and it has 6"):
        padded.with_images([[image]], vision)
    images = prompts.images
    assert images is not None
    narrow = dataclasses.replace(prompts, images=images.replace(numbers=images.numbers[:, :5]))
    with pytest.raises(FieldError, match="prompts have images with embeddings of shape"):
        sampler_of(pair)(*weights, narrow)
    cut = dataclasses.replace(prompts, lengths=jnp.asarray([8, 8, 9], jnp.int32))
    with pytest.raises(FieldError, match="prompts end with an image"):
        sampler_of(pair)(*weights, cut)
    sampler = sampler_of(pair)
    result = sampler(*weights, prompts)
    with pytest.raises(FieldError, match="prompts have images, and only texts are scored"):
        score(sampler, pair.target.params, (prompts, result))
