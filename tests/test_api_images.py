"""Prompts with images in Python: messages with image parts, of every kind of source, and refusals by name."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxspec
from jaxspec.api import Pair
from jaxspec.options import FieldError, Tree
from jaxspec.text.images import patches_of, read_image
from tests import tiny_pair, tiny_photo

pytest.importorskip("PIL", reason="images need Pillow")

LENGTH = 256


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoints")
    tiny_photo.write_target(path / "target")
    tiny_photo.write_drafter(path / "drafter")
    (path / "photo.png").write_bytes(tiny_photo.png())
    return path


@pytest.fixture(scope="module")
def pair(directory: Path) -> Pair:
    return jaxspec.load(str(directory / "target"), str(directory / "drafter"))


def message(*parts: Any) -> dict[str, Any]:
    """Return a user's message of texts and images."""
    kinds = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", **part}
        for part in parts
    ]
    return {"role": "user", "content": kinds}


def generate(pair: Pair, *messages: Any, **options: Any) -> Any:
    options = dict(max_new_tokens=8, cache_length=LENGTH, ignore_eos=True) | options
    return pair.generate([*messages], **options)


def test_every_source_of_an_image_gives_the_same_prompt(pair: Pair, directory: Path) -> None:
    data, path = tiny_photo.png(), directory / "photo.png"
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    sources: list[dict[str, Any]] = [
        {"image": data},
        {"image": path},
        {"image": str(path)},
        {"path": str(path)},
        {"image": tiny_photo.photo()},
        {"image": np.asarray(tiny_photo.photo())},
        {"image": url},
        {"url": url},
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "input_image", "image_url": url},
    ]
    results = [generate(pair, message("a b", source, "c")) for source in sources]
    assert {r.token_ids for r in results} == {results[0].token_ids}
    patches = patches_of(read_image(data, "it"), tiny_photo.VISION)
    image = (
        tiny_photo.BEGIN,
        *[tiny_photo.IMAGE] * patches.num_tokens,
        tiny_photo.END,
    )
    text = pair.tokenizer.encode_rendered
    expected = (*text("<bos><turn>ua b"), *image, *text("c<turn>m"))
    assert results[0].prompt_ids == expected
    assert results[0].prompt == "<bos><turn>ua b<|image|>c<turn>m"
    assert pair.encode([message("a b", {"image": data}, "c")]) == expected


def test_drafts_and_neighbours_change_no_token(pair: Pair) -> None:
    """Several images, several turns, a prompt without, more than one sample."""
    first, second = ({"image": tiny_photo.photo(seed)} for seed in (1, 2))
    prompts = [
        [message(first, "a"), {"role": "assistant", "content": "b"}, message(second, "the c")],
        [message(second, first)],
        [{"role": "user", "content": "a b the"}],
    ]
    options: dict[str, Any] = dict(max_new_tokens=10, cache_length=LENGTH, ignore_eos=True)
    together = pair.generate(prompts, num_samples=2, **options)
    alone = [pair.plain().generate(prompt, **options) for prompt in prompts]
    assert [r.token_ids for r in together] == [r.token_ids for r in alone for _ in range(2)]
    assert alone[1].prompt_ids.count(tiny_photo.IMAGE) == 2 * 63
    swapped = pair.plain().generate([message(first, second)], **options)
    assert swapped.token_ids != alone[1].token_ids


@pytest.mark.parametrize(
    ("loading", "drafting"),
    [
        pytest.param(
            {}, {"tree": Tree(topk=2, depth=3), "num_draft_tokens": 4}, marks=pytest.mark.slow
        ),
        pytest.param({"kv_dtype": "fp8"}, {}, marks=pytest.mark.slow),
        pytest.param({"quantize": "int4-g16", "quantize_head": "int8"}, {}, marks=pytest.mark.slow),
        pytest.param({"quantize_vision": "int8"}, {}, marks=pytest.mark.slow),
    ],
    ids=["tree", "fp8 caches", "int4", "vision part int8"],
)
def test_drafts_change_no_token_in_any_form(
    directory: Path, loading: dict[str, Any], drafting: dict[str, Any]
) -> None:
    pair = jaxspec.load(str(directory / "target"), str(directory / "drafter"), **loading)
    prompt = message("the a", {"image": tiny_photo.photo(3)}, "b")
    drafted = generate(pair, prompt, max_new_tokens=16, drafting=drafting)
    assert drafted.token_ids == generate(pair.plain(), prompt, max_new_tokens=16).token_ids
    assert len(set(drafted.token_ids)) > 3


def test_a_stream_is_what_is_generated(pair: Pair) -> None:
    prompt = [message({"image": tiny_photo.photo()}, "a")]
    pieces = "".join(pair.stream(prompt, max_new_tokens=8, cache_length=LENGTH))
    assert pieces == pair.generate(prompt, max_new_tokens=8, cache_length=LENGTH).text


def test_the_number_of_tokens_is_chosen(pair: Pair) -> None:
    prompt = message({"image": tiny_photo.photo(size=(100, 100))})
    counts = {
        budget: pair.encode([prompt], image_tokens=budget).count(tiny_photo.IMAGE)
        for budget in (None, 70, 280)
    }
    assert counts == {None: 64, 70: 64, 280: 256}
    generated = generate(pair, prompt, image_tokens=70)
    assert generated.prompt_ids == pair.encode([prompt], image_tokens=70)
    # A part's own detail goes before the number of the call.
    photo = {"image": tiny_photo.photo(size=(100, 100))}
    detailed = {None: 256, "auto": 256, "low": 64, "high": 1089}
    for detail, count in detailed.items():
        encoded = pair.encode([message(photo | {"detail": detail})], image_tokens=280)
        assert encoded.count(tiny_photo.IMAGE) == count
    with pytest.raises(
        FieldError, match=r"\[0\].detail is 'best'; expected one of auto, low, high"
    ):
        generate(pair, message(photo | {"detail": "best"}))
    with pytest.raises(FieldError, match="image_tokens is 99; it must be one of 70, 140"):
        generate(pair, prompt, image_tokens=99)


PHOTO = {"image": np.zeros((20, 20, 3), np.uint8)}
REFUSED = {
    "no file": (message({"image": "nowhere.png"}), r"content\[0\].image cannot be read: .*No such"),
    "broken": (message("a", {"image": tiny_photo.png()[:100]}), r"\[1\].image is a broken image"),
    "address": (message({"url": "https://a.b/c.png"}), r"\[0\].url is the address .*not fetched"),
    "no base64": (message({"url": "data:image/png,abc"}), r"\[0\].url is no data URL of base64"),
    "no source": (message({}), r"content\[0\] is an image with none of them; expected one of"),
    "two sources": (message({**PHOTO, "path": "a"}), r"is an image with image and path"),
    "audio": (message({"type": "audio", "audio": b""}), r"is 'audio'; text and images are read"),
    "video": (message({"type": "video", "video": b""}), r"audio and video are planned"),
    "marker": (message("a <|image|>", PHOTO), r"have 1 images, and 2 placeholders"),
    "assistant": (
        {**message(PHOTO), "role": "assistant"},
        r"content\[0\].image is in a message that is not the user's",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_used_is_refused_by_name(pair: Pair, name: str) -> None:
    prompt, expected = REFUSED[name]
    with pytest.raises(FieldError, match=expected):
        generate(pair, prompt)


def test_more_images_than_fit_are_refused(pair: Pair) -> None:
    with pytest.raises(FieldError, match=r"prompt \(269 tokens\).*pass cache_length="):
        generate(pair, message(PHOTO, PHOTO, PHOTO, PHOTO))


def test_images_need_a_vision_part(directory: Path) -> None:
    text_only = jaxspec.load(str(directory / "target"), vision=False)
    assert text_only.target.vision is None
    for pair in (text_only, jaxspec.load()):
        with pytest.raises(FieldError, match="is an image, and the target reads text alone"):
            generate(pair, message(PHOTO))


def test_images_need_a_place_in_the_template(tmp_path: Path) -> None:
    template = "{{ bos_token }}{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    tiny_photo.write_target(tmp_path / "target", template=template)
    pair = jaxspec.load(str(tmp_path / "target"))
    with pytest.raises(FieldError, match="have 1 images, and the chat template has a place for 0"):
        generate(pair, message("a", PHOTO))


def test_shapes_count_the_vision_part(directory: Path) -> None:
    """Memory is counted without weights."""
    shapes = jaxspec.load(str(directory / "target"), read_weights=False).target.vision
    weights = jaxspec.load(str(directory / "target")).target.vision
    assert shapes is not None
    assert weights is not None
    assert {n: (x.shape, x.dtype) for n, x in shapes.params.items()} == {
        n: (x.shape, x.dtype) for n, x in weights.params.items()
    }
    assert tiny_pair.TARGET.hidden_size == weights.config.text_hidden_size  # type: ignore[union-attr]
