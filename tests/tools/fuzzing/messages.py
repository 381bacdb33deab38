"""Mutated conversations with images, as clients send them.

An accepted one must have as many placeholders among its ids as its images have tokens, each image in one piece
between the tokens around it, and each image that the body has.
"""

from __future__ import annotations

import base64
import functools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxspec.configs.base import GenerationDefaults
from jaxspec.options import FieldError
from jaxspec.serving.errors import ApiError
from jaxspec.serving.parse_request import ServingModel
from jaxspec.serving.protocol import ChatCompletionRequest, parse_body
from jaxspec.serving.settings import Settings
from jaxspec.state import DecodeSpec
from jaxspec.tokenizer import Tokenizer
from jaxspec.weights.define import model_def_of
from tests import tiny_photo
from tests.tools.fuzzing import mutate
from tests.tools.fuzzing.outcomes import Case, Fault, Outcome, judge


def url(seed: int) -> str:
    return "data:image/png;base64," + base64.b64encode(tiny_photo.png(seed)).decode()


def document() -> dict[str, Any]:
    """Return the body of a request with all kinds of parts."""
    return {
        "messages": [
            {"role": "system", "content": "the a"},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "a b"},
                    {"type": "image_url", "image_url": {"url": url(0), "detail": "high"}},
                    {"type": "text", "text": "c"},
                ],
            },
            {"role": "assistant", "content": "b"},
            {
                "role": "user",
                "content": [
                    {"type": "input_image", "image_url": url(1)},
                    {"type": "image", "image": url(2)},
                ],
            },
        ]
    }


def damaged(rng: random.Random, body: dict[str, Any]) -> str:
    """Damage an image, or the place of one, and return what was done."""
    parts = [body["messages"][i]["content"] for i in (1, 3)]
    kind = rng.choice(("data", "head", "marker", "more", "swap"))
    content = rng.choice(parts)
    if kind == "marker":
        marker = rng.choice(tiny_photo.TOKENS)
        parts[0][0]["text"] += marker
        return f"{marker} in a text"
    if kind == "more":
        count = rng.choice((1, 2, 20))
        content += [{"type": "image_url", "image_url": {"url": url(3)}}] * count
        return f"{count} images more"
    if kind == "swap":
        body["messages"][2]["content"], body["messages"][3]["content"] = (
            body["messages"][3]["content"],
            body["messages"][2]["content"],
        )
        return "images in the assistant's message"
    text = parts[0][1]["image_url"]["url"]
    at = rng.randrange(22) if kind == "head" else rng.randrange(22, len(text))
    new = text[:at] + rng.choice(("", "=", "é", "\n", "A", ",", "\0", "%20")) + text[at + 1 :]
    parts[0][1]["image_url"]["url"] = new
    return f"{kind} of a URL at {at}"


@functools.cache
def serving_model(directory: Path) -> ServingModel:
    target = model_def_of(tiny_photo.TARGET, "float32")
    spec = DecodeSpec(target, None, vision=model_def_of(tiny_photo.VISION, "float32"))
    tiny_photo.write_target(directory / "target")
    tokenizer = Tokenizer.load(directory / "target")
    defaults = GenerationDefaults()
    return ServingModel(("photo",), tokenizer, spec, defaults, 4096, Settings(max_images=8))


def check(model: ServingModel, body: bytes) -> None:
    """Read a body, and find fault with what comes of it."""
    request = parse_body(ChatCompletionRequest, body)
    parsed = model.parse_chat(request)
    (ids,), images = parsed.prompts, parsed.engine_requests[0].images
    config = tiny_photo.VISION
    sent = json.dumps(request.messages).count('"image_url"') if images else 0
    runs: list[int] = []
    for before, token in zip((None, *ids), ids, strict=False):
        if token == config.image_token_id:
            if before != token:
                if before != config.begin_token_id:
                    raise Fault(Outcome.NONSENSE, "an image begins without its token")
                runs.append(0)
            runs[-1] += 1
        elif before == config.image_token_id and token != config.end_token_id:
            raise Fault(Outcome.NONSENSE, "an image ends without its token")
    if runs != [image.num_tokens for image in images]:
        raise Fault(Outcome.MISREAD, f"runs of {runs} placeholders")
    if len(images) > 8 or (sent and not images):
        raise Fault(Outcome.MISREAD, f"{len(images)} images")


def fuzz(directory: Path, count: int) -> Iterator[Case]:
    """Yield what came of so many mutated conversations."""
    model = serving_model(directory)
    read = [path for path in mutate.paths(document()) if path[:1] == ("messages",)]
    for number in range(count):
        rng = random.Random(number)
        body = document()
        if rng.random() < 0.4:
            words = damaged(rng, body)
            text = json.dumps(body).encode()
        else:
            mutation = mutate.mutated(rng, body, read)
            words, text = mutation.words, mutation.text
        yield judge(
            words,
            lambda text=text: check(model, text),
            documented=(ApiError, FieldError),
            names=("messages", "body", "template", "max_tokens", "room"),
            places=("",),
        )
