"""Requests with images: as transformers continues them, plain and with drafts, and refused where they do not fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

from jaxspec import cache
from jaxspec.configs.base import GenerationDefaults
from jaxspec.engine.engine import Engine
from jaxspec.engine.prefix_cache import store
from jaxspec.engine.prefix_cache.entries import ids_of, named
from jaxspec.engine.request import Completion, Request, kind_refusal
from jaxspec.options import FieldError, Sampling
from jaxspec.runtime import prefill
from jaxspec.runtime.prefill import PrefillPlanner, PromptImage
from jaxspec.weights.loading import LoadedModel, load_target
from tests import fakes, tiny, tiny_images, tiny_vision
from tests.cases import BLOCK, engine_of, run, slow
from tests.tiny_images import Prompt

NEW_TOKENS = 16
# With `tight`, passes have 16 tokens. The third image is longer, and than the window too.
PARTS = ((5, (2, 3), 4), (3, (2, 2), 1, (4, 7), 12), (9,), (1, (1, 5)))
# Of "12b" those that would always win, and placeholders, of which transformers wants images and sounds.
SUPPRESSED = (*tiny.SUPPRESS_TOKENS["12b"], *range(tiny_vision.IMAGE, tiny.VOCAB_SIZE))


class Both(NamedTuple):
    oracle: Any
    model: LoadedModel
    prompts: tuple[Prompt, ...]

    @property
    def requests(self) -> list[Request]:
        return [request_of(prompt) for prompt in self.prompts]

    def drafter(self, name: str, sequences: list[list[int]]) -> LoadedModel:
        if name == "dflash":
            return fakes.dflash(self.model, block_size=BLOCK)
        if name == "mtp":
            return fakes.mtp(self.model, centroids=bool(self.model.config.num_kv_shared_layers))
        return fakes.lookup(self.model, sequences, block_size=BLOCK)


def request_of(prompt: Prompt, count: int = NEW_TOKENS) -> Request:
    return Request(tuple(prompt.ids.tolist()), count, images=prompt.images)


@pytest.fixture(scope="module", params=["26b-a4b", *slow("e2b", "e4b", "12b", "31b")])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Both:
    pytest.importorskip("torch", reason="transformers needs torch")
    directory = tmp_path_factory.mktemp("checkpoint")
    oracle = tiny_vision.save(request.param, directory)
    model = load_target(str(directory), dtype="float32", vision=True)
    model = dataclasses.replace(model, generation=GenerationDefaults(suppress_tokens=SUPPRESSED))
    assert model.vision is not None
    config = model.vision.config
    prompts = tuple(tiny_images.prompt(config, *parts, seed=i) for i, parts in enumerate(PARTS))
    return Both(oracle, model, prompts)


def likeliest(oracle: Any, prompt: Prompt, tokens: tuple[int, ...]) -> tuple[int, ...]:
    """Return what transformers finds likeliest in the place of each token."""
    import torch

    ids = np.concatenate([prompt.ids, tokens])
    numbers = np.concatenate([prompt.numbers, np.zeros(len(tokens), np.int32)])
    whole = prompt._replace(ids=ids.astype(np.int32), numbers=numbers)
    with torch.no_grad():
        if prompt.images:
            logits = oracle(**tiny_images.oracle_inputs(oracle, whole)).logits[0]
        else:
            logits = oracle(torch.from_numpy(ids).long()[None]).logits[0]
    logits[:, list(SUPPRESSED)] = -torch.inf
    return tuple(logits[len(prompt.ids) - 1 : -1].argmax(-1).tolist())


@pytest.fixture(scope="module")
def plain(both: Both, request: pytest.FixtureRequest) -> list[tuple[int, ...]]:
    """The continuations without drafts, longer than tests compare."""
    requests = [dataclasses.replace(r, max_new_tokens=NEW_TOKENS + BLOCK) for r in both.requests]
    return [done.token_ids for done in run(engine_of(both.model, None, **SIZES), requests)]


SIZES: dict[str, Any] = dict(batch_size=4, cache_length=96)


def test_greedy_continuations_are_those_of_transformers(
    both: Both, plain: list[tuple[int, ...]]
) -> None:
    for prompt, tokens in zip(both.prompts, plain, strict=True):
        assert tokens == likeliest(both.oracle, prompt, tokens)
    assert len({*sum(plain, ())}) > 8, "a model that repeats itself shows little"


@pytest.mark.parametrize("name", ["oracle", *slow("dflash", "mtp")])
def test_drafts_change_no_token(both: Both, plain: list[tuple[int, ...]], name: str) -> None:
    sequences = [[*p.ids.tolist(), *t] for p, t in zip(both.prompts, plain, strict=True)]
    engine = engine_of(both.model, both.drafter(name, sequences), **SIZES)
    for done, tokens in zip(run(engine, both.requests), plain, strict=True):
        assert done.token_ids == tokens[:NEW_TOKENS]
        if name == "oracle":
            assert set(done.acceptance_lengths[:-1]) == {BLOCK}


@pytest.mark.slow
def test_a_row_does_not_depend_on_its_neighbours(both: Both, plain: list[tuple[int, ...]]) -> None:
    """Alone, two at a time, in another order, and in pages."""
    alone = run(engine_of(both.model, None, batch_size=1, cache_length=96), both.requests)
    two = engine_of(both.model, None, batch_size=2, cache_length=96, invariant=True)
    pairs = run(two, both.requests[::-1])[::-1]
    pages = run(engine_of(both.model, None, cache_tokens=256, **SIZES), both.requests)
    for tokens, *others in zip(plain, alone, pairs, pages, strict=True):
        for done in others:
            assert done.token_ids == tokens[:NEW_TOKENS]


@pytest.mark.slow  # continuations are those of transformers, and rows share images, by default
def test_images_are_in_the_continuation(both: Both, plain: list[tuple[int, ...]]) -> None:
    """Other images of the same size continue otherwise, also with a store of prefixes."""
    other = tiny_images.prompt(both.model.vision.config, *PARTS[0], seed=0)  # type: ignore[union-attr]
    images = tuple(dataclasses.replace(x, pixels=255 - x.pixels) for x in other.images)
    engine = engine_of(both.model, None, prefix_bytes=1 << 20, **SIZES)
    same, changed = run(engine, [both.requests[0], request_of(other._replace(images=images))])
    (again,) = run(engine, both.requests[:1])
    assert same.token_ids == again.token_ids == plain[0][:NEW_TOKENS] != changed.token_ids


# --- passes ------------------------------------------------------------------------------------------


def passes(planner: PrefillPlanner) -> Iterator[tuple[int, dict[int, tuple[int, int]]]]:
    """Yield the width of each pass, and the part of each slot's prompt in it."""
    while planner.pending:
        chunk, _ = planner.next_chunk()
        rows = zip(*map(np.asarray, (chunk.slots, chunk.start, chunk.count)), strict=True)
        parts = {int(s): (int(b), int(b + n)) for s, b, n in rows if n}
        yield chunk.tokens.shape[1], parts


@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize("two_way", [True, False])
def test_an_image_is_in_one_pass_if_its_tokens_see_each_other(slots: int, two_way: bool) -> None:
    engine = engine_of(fakes_target(), None, batch_size=slots, cache_length=4096)
    rng = np.random.default_rng(0)
    planner = PrefillPlanner(engine.runtime.shapes, two_way=two_way)
    spans = [(3, 73), (74, 354), (400, 1520), (1521, 1522)]
    embed = rng.normal(size=(1120, 4)).astype(np.float32)
    for slot in range(slots):
        images = [PromptImage(b, e, lambda b=b, e=e: embed[: e - b]) for b, e in spans]
        planner.add({slot: np.arange(1600 + slot)}, images=images)
    reached, cut = dict.fromkeys(range(slots), 0), 0
    for width, parts in passes(planner):
        for slot, (begin, end) in parts.items():
            assert begin == reached[slot] < end <= begin + width
            reached[slot] = end
            cut += any(b < end < e for b, e in spans)
    assert reached == {slot: 1600 + slot for slot in range(slots)}
    assert (cut == 0) is two_way


def fakes_target() -> LoadedModel:
    from tests import cases

    return cases.target("31b")


# --- beginnings that are read once ------------------------------------------------------------------


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "PAGE", 4)
    monkeypatch.setattr(store, "MIN_TOKENS", 4)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("drafter", [None, *slow("dflash")])
def test_prompts_that_begin_with_the_same_images_share_them(
    both: Both, drafter: str | None
) -> None:
    """A next turn, the same question of another image, another question of the same one, in any order."""
    config = both.model.vision.config  # type: ignore[union-attr]

    def turn(*parts: Any, seed: int = 0) -> Prompt:
        return tiny_images.prompt(config, *parts, seed=seed)

    first = turn(5, (4, 7), 9)
    other = turn(5, (4, 7), 9)
    changed = tuple(dataclasses.replace(x, pixels=255 - x.pixels) for x in other.images)
    longer = turn(5, (4, 7), 9, (2, 3), 6)
    asked = first._replace(
        ids=np.append(first.ids[:-2], [7, 8, 9]).astype(np.int32),
        numbers=np.append(first.numbers, 0).astype(np.int32),
    )
    prompts = [
        (first, 0),
        (longer, len(first.ids)),
        (asked, 42),
        (other._replace(images=changed), 6),  # the text before, and the token that begins an image
        (first, len(first.ids) - 1),
        (longer, len(longer.ids) - 1),
    ]
    models = both.model, None if drafter is None else both.drafter(drafter, [])
    hot, cold = (
        engine_of(*models, prefix_bytes=1 << 20, penalties=True, **SIZES) for _ in range(2)
    )

    def without_prefixes(request: Request) -> Completion:
        cold.target_params = cold.target_params  # empties its store
        (done,) = run(cold, [request])
        assert done.cached_tokens == 0
        return done

    for prompt, most in prompts:
        request = dataclasses.replace(request_of(prompt), sampling=Sampling(repetition_penalty=1.2))
        (done,), expected = run(hot, [request]), without_prefixes(request)
        assert done.token_ids == expected.token_ids
        assert done.acceptance_lengths == expected.acceptance_lengths
        assert done.cached_tokens <= most
        assert done.cached_tokens == most or not any(prompt is x for x in (longer, first))
    together = [request_of(prompt) for prompt, _ in prompts]
    for done, request in zip(run(hot, together), together, strict=True):
        assert done.token_ids == without_prefixes(request).token_ids
    assert hot.prefix_stats is not None
    assert hot.prefix_stats.hits >= 8


def test_names_of_images_keep_their_ids() -> None:
    ids = [5, 150, 150, 150, 7]
    one, two = (named(ids, [(1, 4, digest)]) for digest in (b"a", b"b"))
    assert ids_of(one).tolist() == ids_of(two).tolist() == ids
    assert (one[[0, 4]] == two[[0, 4]]).all()
    assert len({*one[1:4].tolist(), *two[1:4].tolist()}) == 6
    assert (one[1:4] < 0).all()


# --- refusals ----------------------------------------------------------------------------------------


def test_images_that_do_not_fit_their_prompt_are_refused(both: Both) -> None:
    engine = engine_of(both.model, None, **SIZES)
    first, second, text, _ = both.requests
    wrong = {
        "have 6 tokens, and the prompt has 0 placeholders": dataclasses.replace(
            text, images=first.images
        ),
        "have 12 tokens, and the prompt has 6 placeholders": dataclasses.replace(
            first, images=first.images * 2
        ),
        "have other tokens of the prompt between those of image 1": dataclasses.replace(
            second, images=second.images[::-1]
        ),
        "this target reads": dataclasses.replace(
            first,
            images=(dataclasses.replace(first.images[0], pixels=first.images[0].pixels[:, :5]),),
        ),
    }
    for message, request in wrong.items():
        with pytest.raises(FieldError, match=message) as caught:
            engine.validate(request)
        assert caught.value.field == "images"
    assert kind_refusal("images", ("photo.png",)) == (
        "is ('photo.png',); it must be a list of what jaxspec.text.images.patches_of returns, or ()"
    )


def test_a_target_without_a_vision_part_refuses_images(both: Both) -> None:
    engine: Engine = engine_of(dataclasses.replace(both.model, vision=None), None, **SIZES)
    with pytest.raises(FieldError, match="the target reads text alone"):
        engine.validate(both.requests[0])


def test_widths_hold_every_image() -> None:
    assert max(prefill.IMAGE_WIDTHS) >= 1120
