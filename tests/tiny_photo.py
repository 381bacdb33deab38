"""A tiny pair whose target has a vision part, on disk, with a tokenizer and a template that have places for images."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.weights.native import VISION as INSIDE
from tests import tiny_pair, tiny_vision

TOKENS = ("<|image|>", "<|image>", "<image|>")
IMAGE, BEGIN, END = (len(tiny_pair.VOCAB) + i for i in range(3))
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<turn>{{ m.role[0] }}"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<|image|>{% elif p.type == 'text' %}{{ p.text | trim }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %}<turn>m{% endif %}"
)
SIZE = len(tiny_pair.VOCAB) + len(TOKENS)
TARGET = replace(tiny_pair.TARGET, vocab_size=SIZE, max_positions=1500)
VISION = replace(
    tiny_vision.config("31b"),
    text_hidden_size=TARGET.hidden_size,
    image_tokens=70,
    image_token_id=IMAGE,
    begin_token_id=BEGIN,
    end_token_id=END,
)


def write_target(directory: Path, *, template: str = TEMPLATE) -> Path:
    """Write the target as a checkpoint directory of ours."""
    tiny_pair._write(directory, TARGET, seed=1)
    tiny_pair._write(directory / INSIDE, VISION, seed=4)
    tiny_pair.write_tokenizer(directory, template=template)
    backend = tiny_pair.backend()
    backend.add_special_tokens([*TOKENS])
    backend.save(str(directory / "tokenizer.json"))
    return directory


def write_drafter(directory: Path) -> Path:
    """Write a drafter for it."""
    return tiny_pair.write_drafter(directory, vocab_size=SIZE, max_positions=1500)


def photo(seed: int = 0, size: tuple[int, int] = (40, 30)) -> Any:
    """Return a small image of random colours, an image of Pillow's."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8)
    return Image.fromarray(pixels)


def png(seed: int = 0, size: tuple[int, int] = (40, 30)) -> bytes:
    """Return the same image as the bytes of a PNG file."""
    file = io.BytesIO()
    photo(seed, size).save(file, "PNG")
    return file.getvalue()
