"""Prompts with images against transformers in float32: logits and hidden states of whole passes and of chunks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.configs.gemma4_vision import IMAGE_TOKENS
from jaxspec.models.target import Caches, ImageTokens, TargetOutput, init_caches
from jaxspec.shapes import Array, Params
from jaxspec.weights.loading import LoadedModel, load_target
from jaxspec.weights.model_def import ModelDef
from tests import tiny_images, tiny_vision
from tests.cases import slow
from tests.tiny_images import Prompt

torch = pytest.importorskip("torch", reason="transformers needs torch")
pytest.importorskip("transformers", reason="parity is measured against transformers")

# Norm-wise: float32 sums in another order differ by about 1e-6, a wrong convention by 1e-3 and more.
TOLERANCE = 1e-4
SLACK = 4

PARTS: dict[str, tuple[Any, ...]] = {
    "one image": (5, (2, 3), 4),
    "first and last": ((1, 5), 3, (2, 2)),
    "side by side": (2, (2, 2), (1, 3), 6),
    # The window is 8: the last tokens of the image do not see the first, which see all later ones.
    "longer than the window": (4, (4, 7), 3),
    "at the edge of the window": (3, (2, 4), 1, (3, 3), 12),
    "one token": (6, (1, 1), 2),
}


class Both(NamedTuple):
    oracle: Any
    model: LoadedModel

    @property
    def two_way(self) -> bool:
        assert self.model.vision is not None
        return self.model.vision.config.two_way

    def prompt(self, *parts: Any) -> Prompt:
        assert self.model.vision is not None
        return tiny_images.prompt(self.model.vision.config, *parts)


@pytest.fixture(scope="module", params=["e2b", "12b", "26b-a4b", *slow("e4b", "31b")])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Both:
    directory = tmp_path_factory.mktemp("checkpoint")
    oracle = tiny_vision.save(request.param, directory)
    return Both(oracle, load_target(str(directory), dtype="float32", vision=True))


def theirs(both: Both, prompt: Prompt) -> tuple[np.ndarray, list[np.ndarray]]:
    inputs = tiny_images.oracle_inputs(both.oracle, prompt)
    with torch.no_grad():
        out = both.oracle(**inputs, output_hidden_states=True)
    return out.logits[0].numpy(), [h[0].numpy() for h in out.hidden_states]


@functools.partial(jax.jit, static_argnums=0)
def forward(
    model_def: ModelDef,
    params: Params,
    tokens: Array,
    start: Array,
    count: Array,
    caches: Caches | None,
    images: ImageTokens | None,
) -> TargetOutput:
    layers = tuple(range(model_def.config.num_layers))
    target = model_def.bind(params)
    return target(tokens, start, count, caches, feature_layers=layers, images=images)


def ours(
    both: Both, prompt: Prompt, ends: Sequence[int], width: int, cache_length: int = 192
) -> TargetOutput:
    """Feed a prompt in passes that end at `ends`, beside a row that has nothing to do."""
    model, length = both.model, len(prompt.ids)
    embeddings = tiny_images.embeddings(model, prompt)
    caches = init_caches(model.config, 2, cache_length=cache_length, slack=SLACK, dtype=jnp.float32)
    parts, begin = [], 0
    for end in (*ends, length):
        n = end - begin
        tokens, numbers = np.zeros((2, 2, width), np.int32)
        rows = np.zeros((2, width, embeddings.shape[1]), np.float32)
        tokens[1, :n], numbers[1, :n] = prompt.ids[begin:end], prompt.numbers[begin:end]
        rows[1, :n] = embeddings[begin:end]
        images = ImageTokens(jnp.asarray(rows), jnp.asarray(numbers), both.two_way)
        start, count = np.array([0, begin], np.int32), np.array([0, n], np.int32)
        out = forward(model.model_def, model.params, tokens, start, count, caches, images)
        caches, begin = out.caches, end
        of_row = jax.device_get(out.replace(caches=None))
        parts.append(jax.tree.map(lambda x, n=n: x[1, :n], of_row))
    return jax.tree.map(lambda *x: np.concatenate(x), *parts)


def errors(out: TargetOutput, logits: np.ndarray, hidden: list[np.ndarray]) -> dict[str, float]:
    def error(mine: np.ndarray, other: np.ndarray) -> float:
        return float(np.linalg.norm(mine - other) / np.linalg.norm(other))

    pairs = {"logits": (out.logits, logits), "hidden": (out.hidden, hidden[-1])}
    pairs |= {f"layer {i}": (x, hidden[i + 1]) for i, x in enumerate(out.features[:-1])}
    wrong = {name: error(*pair) for name, pair in pairs.items()}
    print("largest relative error", max(wrong.values()))
    return {name: e for name, e in wrong.items() if not e < TOLERANCE}


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_a_prompt_in_one_pass_is_that_of_transformers(both: Both, parts: tuple[Any, ...]) -> None:
    prompt = both.prompt(*parts)
    assert errors(ours(both, prompt, (), width=40), *theirs(both, prompt)) == {}


def test_a_prompt_in_chunks_is_that_of_transformers(both: Both) -> None:
    """An image that is seen both ways is in one pass; others may be split anywhere."""
    prompt = both.prompt(9, (3, 4), 30, (2, 3), (2, 5), 3)
    first, second = (np.flatnonzero(prompt.numbers == i)[0] for i in (1, 2))
    ends = [4, first, first + 12, first + 20, second + 6]
    if not both.two_way:
        ends = [4, first + 5, first + 20, second + 2, second + 10]
    assert errors(ours(both, prompt, ends, width=40), *theirs(both, prompt)) == {}


def test_a_pass_without_caches_is_that_of_transformers(both: Both) -> None:
    prompt = both.prompt(3, (3, 4), 2, (2, 2), 4)
    images = tiny_images.tokens_of(prompt, tiny_images.embeddings(both.model, prompt), both.two_way)
    zero, count = np.zeros(1, np.int32), np.array([len(prompt.ids)], np.int32)
    model = both.model
    out = forward(model.model_def, model.params, prompt.ids[None], zero, count, None, images)
    alone = jax.tree.map(lambda x: np.asarray(x[0]), out.replace(caches=None))
    assert errors(alone, *theirs(both, prompt)) == {}


def test_who_sees_whom_matters(both: Both) -> None:
    """The other rule differs from the oracle by more than the tolerance, so these tests can fail."""
    prompt, model = both.prompt(5, (2, 3), 4), both.model
    images = tiny_images.tokens_of(prompt, tiny_images.embeddings(model, prompt), not both.two_way)
    zero, count = np.zeros(1, np.int32), np.array([len(prompt.ids)], np.int32)
    out = forward(model.model_def, model.params, prompt.ids[None], zero, count, None, images)
    logits, _ = theirs(both, prompt)
    assert np.linalg.norm(np.asarray(out.logits[0]) - logits) > 1e-2 * np.linalg.norm(logits)


GRIDS = {70: (7, 9), 140: (10, 14), 280: (14, 19), 560: (23, 24), 1120: (28, 40)}


@pytest.mark.parametrize(
    "budget", [pytest.param(n, marks=[pytest.mark.slow] * (n > 140)) for n in IMAGE_TOKENS]
)
def test_images_of_every_budget_are_those_of_transformers(both: Both, budget: int) -> None:
    prompt = both.prompt(11, GRIDS[budget], 5)
    out = ours(both, prompt, (11,), width=budget + 8, cache_length=budget + 64)
    assert errors(out, *theirs(both, prompt)) == {}
