"""Images in requests of clients: data URLs in chats and responses, counted by usage, and refusals by name."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import jaxspec
from jaxspec.api import Pair
from jaxspec.configs.base import GenerationDefaults
from jaxspec.engine.engine import Engine
from jaxspec.serving import parse_request
from jaxspec.serving.parse_request import ServingModel
from jaxspec.serving.settings import Settings
from jaxspec.text.images import patches_of
from tests import tiny_photo
from tests.serving.conftest import Live, run_server

pytest.importorskip("PIL", reason="images need Pillow")

LENGTH = 320
OPTIONS: dict[str, Any] = dict(max_tokens=8, temperature=0, extra_body={"ignore_eos": True})


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


def serve(pair: Pair, **settings: Any) -> Iterator[Live]:
    engine = Engine(*pair, batch_size=2, cache_length=LENGTH, programs=pair.programs)
    model = ServingModel(
        names=("photo",),
        tokenizer=pair.tokenizer,
        spec=engine.spec,
        generation=pair.target.generation or GenerationDefaults(),
        cache_length=LENGTH,
        settings=Settings(**settings),
    )
    yield from run_server(model, engine)


@pytest.fixture(scope="module")
def live(pair: Pair) -> Iterator[Live]:
    yield from serve(pair, max_images=3, max_image_tokens=200)


def url(seed: int = 0) -> str:
    return "data:image/png;base64," + base64.b64encode(tiny_photo.png(seed)).decode()


def part(source: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": source}}


def user(*parts: Any) -> dict[str, Any]:
    texts = [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]
    return {"role": "user", "content": texts}


def expected(pair: Pair, *messages: Any) -> Any:
    return pair.generate(
        [*messages], max_new_tokens=8, cache_length=LENGTH, ignore_eos=True, temperature=0.0
    )


def test_the_openai_client_sends_an_image(live: Live, pair: Pair) -> None:
    """Whole and as a stream; usage counts the tokens of the image."""
    openai = pytest.importorskip("openai")
    messages = [user("a b", part(url()), "c")]
    want = expected(pair, *messages)
    with openai.OpenAI(base_url=f"{live.client.base_url}/v1", api_key="none") as client:
        whole = client.chat.completions.create(model="photo", messages=messages, **OPTIONS)
        assert whole.choices[0].message.content == want.text
        assert whole.usage.prompt_tokens == len(want.prompt_ids) == 63 + 2 + 8
        stream = client.chat.completions.create(
            model="photo",
            messages=messages,
            stream=True,
            stream_options={"include_usage": True},
            **OPTIONS,
        )
        chunks = [*stream]
        pieces = [c.delta.content or "" for chunk in chunks for c in chunk.choices]
        assert "".join(pieces) == want.text
        assert chunks[-1].usage == whole.usage
        reply = client.responses.create(
            model="photo",
            input=[
                {
                    "role": "user",
                    "content": [
                        {"type": "input_text", "text": "a b"},
                        {"type": "input_image", "image_url": url()},
                        {"type": "input_text", "text": "c"},
                    ],
                }
            ],
            max_output_tokens=8,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
        assert reply.output_text == want.text


@pytest.mark.slow  # a client's image by default
def test_images_of_several_turns_and_other_requests(live: Live, pair: Pair) -> None:
    """Requests with other images, and one without, do not meet."""
    chats = [
        [user(part(url(1)), "a"), {"role": "assistant", "content": "b"}, user(part(url(2)), "c")],
        [user(part(url(2)), "a")],
        [user("a b")],
    ]
    for messages in chats:
        body = dict(messages=messages, max_tokens=8, temperature=0, ignore_eos=True)
        reply = live.post("/v1/chat/completions", **body).json()
        assert reply["choices"][0]["message"]["content"] == expected(pair, *messages).text
        count = len(live.post("/tokenize", messages=messages).json()["tokens"])
        assert count == reply["usage"]["prompt_tokens"]


REFUSED = {
    "path": (part("photo.png"), "is 'photo.png'; expected a data URL"),
    "address": (part("https://a.b/c.png"), "is the address 'https://a.b/c.png'"),
    "file address": (part("file:///etc/passwd"), "is the address 'file:///etc/passwd'"),
    "number": ({"type": "image_url", "image_url": {"url": 7}}, "is 7; expected a data URL"),
    "broken": (part(url()[:200] + "===="), "is no data URL of base64"),
    "no image": (part("data:image/png;base64,aGVsbG8="), "is no image in PNG, JPEG, WEBP or GIF"),
    "audio": ({"type": "input_audio", "input_audio": {}}, "audio and video are planned"),
    "file": ({"type": "file", "file": {}}, "is 'file'; expected text"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_image_is_refused_by_name(
    live: Live, directory: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(directory)  # where there is such a file
    wrong, message = REFUSED[name]
    reply = live.post("/v1/chat/completions", messages=[user("a", wrong)])
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert message in error["message"]
    assert error["param"].startswith("messages[0].content[1]")
    assert live.post("/tokenize", messages=[user("a", wrong)]).status_code == 400


def test_limits_of_a_request(live: Live) -> None:
    many = live.post("/v1/chat/completions", messages=[user(*[part(url())] * 4)])
    assert "have 4 images; this server takes at most 3 (--max-images)" in many.text
    high = part(url()) | {"image_url": {"url": url(), "detail": "high"}}
    large = live.post("/v1/chat/completions", messages=[user(high)])
    assert "have images of 1064 tokens together; this server takes at most 200" in large.text
    long = live.post("/v1/chat/completions", messages=[user(*[part(url())] * 3)], max_tokens=200)
    assert long.json()["error"]["code"] == "context_length_exceeded"
    system = {**user(part(url())), "role": "system"}
    refused = live.post("/v1/chat/completions", messages=[system, user("a")])
    assert "is in a message that is not the user's" in refused.text
    marker = live.post("/v1/chat/completions", messages=[user("<|image|>", part(url()))])
    assert "have 1 images, and 2 placeholders" in marker.text


def test_addresses_of_allowed_hosts_are_fetched(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def fetch(field: str, url: str, hosts: set[str], **limits: Any) -> bytes:
        asked.append((field, url, hosts, limits["max_bytes"]))
        return tiny_photo.png()

    monkeypatch.setattr(parse_request, "fetch", fetch)
    address = "https://photos.example/a.png"
    for live in serve(pair, image_host=("Photos.example",)):
        body = dict(max_tokens=8, temperature=0, ignore_eos=True)
        replies = [
            live.post("/v1/chat/completions", messages=[user(part(source), "a")], **body).json()
            for source in (address, url())
        ]
        texts = [reply["choices"][0]["message"]["content"] for reply in replies]
        assert texts[0] == texts[1]
    field = "messages[0].content[0].image_url.url"
    assert asked == [(field, address, {"photos.example"}, 8 << 20)]


def test_a_server_of_text_says_so(directory: Path) -> None:
    pair = jaxspec.load(str(directory / "target"), vision=False)
    for live in serve(pair):
        reply = live.post("/v1/chat/completions", messages=[user(part(url()))])
        assert reply.status_code == 400
        assert "the target reads text alone" in reply.json()["error"]["message"]


@pytest.mark.slow
def test_a_warm_engine_compiles_nothing_for_images(pair: Pair) -> None:
    """All numbers of tokens, and all passes with images, are there before the first request."""
    engine = Engine(*pair, batch_size=2, cache_length=LENGTH)
    engine.warm_up()
    known = {*engine.runtime.programs.compiled}
    for size in ((40, 30), (300, 500)):
        prompt = [user({"type": "image", "image": tiny_photo.photo(size=size)}, "a")]
        image = patches_of(tiny_photo.photo(size=size), tiny_photo.VISION)
        engine.add(jaxspec.Request(pair.encode(prompt), 4, images=(image,)))
        while not engine.is_idle:
            engine.step()
    assert {*engine.runtime.programs.compiled} == known
