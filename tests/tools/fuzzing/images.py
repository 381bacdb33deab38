"""Mutated image files: bytes changed, cut out, doubled or cut off, and numbers of headers replaced.

An image that is read must have patches that vision parts can take.
"""

from __future__ import annotations

import io
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.configs.gemma4_vision import IMAGE_TOKENS, PRESETS
from jaxspec.text.images import MOST_PIXELS, ImageError, patches_of, read_image
from tests.tools.fuzzing.outcomes import Case, Fault, Outcome, judge


def seeds() -> dict[str, bytes]:
    """Return small files of every format."""
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, (24, 30, 4), np.uint8)
    image = Image.fromarray(pixels)
    rgb, exif = image.convert("RGB"), Image.Exif()
    exif[274] = 8

    def file_of(image: Any, kind: str, **options: Any) -> bytes:
        file = io.BytesIO()
        image.save(file, kind, **options)
        return file.getvalue()

    return {
        "png": file_of(rgb, "PNG"),
        "palette.png": file_of(rgb.quantize(8), "PNG", transparency=2),
        "grey.png": file_of(Image.fromarray(pixels[..., 0].astype(np.uint16) << 8), "PNG"),
        "alpha.png": file_of(image, "PNG"),
        "jpeg": file_of(rgb, "JPEG", exif=exif),
        "progressive.jpeg": file_of(rgb, "JPEG", progressive=True),
        "cmyk.jpeg": file_of(rgb.convert("CMYK"), "JPEG"),
        "webp": file_of(rgb, "WEBP"),
        "alpha.webp": file_of(image, "WEBP", lossless=True, exif=exif.tobytes()),
        "gif": file_of(rgb, "GIF", save_all=True, append_images=[rgb.rotate(90)]),
    }


def mutated(rng: random.Random, data: bytes) -> tuple[str, bytes]:
    """Return what was done to a file, and the new file."""
    kind = rng.choice(("bytes", "bytes", "header", "cut off", "cut out", "doubled", "number"))
    begin = rng.randrange(len(data))
    end = min(len(data), begin + rng.choice((1, 4, 40, 400)))
    if kind == "cut off":
        return f"cut off at {begin}", data[:begin]
    if kind == "cut out":
        return f"without {begin} to {end}", data[:begin] + data[end:]
    if kind == "doubled":
        return f"{begin} to {end} twice", data[:end] + data[begin:]
    changed = bytearray(data)
    if kind == "number":
        begin = rng.randrange(min(len(data), 64))
        size, number = (
            rng.choice((2, 4)),
            rng.choice((0, 1, 255, 32_767, 65_535, 2**31 - 1, 2**32 - 1)),
        )
        written = (number % 256**size).to_bytes(size, rng.choice(("big", "little")))
        changed[begin : begin + size] = written
        return f"{number} at {begin}", bytes(changed)
    places = len(data) if kind == "bytes" else min(len(data), 64)
    for _ in range(rng.choice((1, 3, 20))):
        changed[rng.randrange(places)] = rng.randrange(256)
    return f"other bytes among {places}", bytes(changed)


def check(data: bytes, budget: int) -> None:
    """Read an image, and find fault with what comes of it."""
    # Pillow tells of broken EXIF data, and goes on without them.
    warnings.filterwarnings("ignore", module=r"PIL\.TiffImagePlugin")
    image = read_image(data, "the image")
    if image.mode != "RGB" or not 0 < image.width * image.height <= MOST_PIXELS:
        raise Fault(Outcome.NONSENSE, f"{image.mode} {image.size}")
    for name in ("e2b", "12b"):
        config = PRESETS[name]
        patches = patches_of(image, config, budget)
        count = patches.num_tokens * config.pool_size**2
        if not 0 < patches.num_tokens <= budget or patches.pixels.shape[0] != count:
            raise Fault(Outcome.NONSENSE, f"{patches.num_tokens} tokens, {patches.pixels.shape}")
        if patches.positions.max() >= config.num_positions or patches.positions.min() < 0:
            raise Fault(Outcome.NONSENSE, f"positions up to {patches.positions.max()}")


def fuzz(directory: Path, count: int) -> Iterator[Case]:
    """Yield what came of so many mutated images."""
    del directory
    files = seeds()
    for number in range(count):
        rng = random.Random(number)
        name = rng.choice(list(files))
        words, data = mutated(rng, files[name])
        budget = rng.choice(IMAGE_TOKENS[:2])
        yield judge(
            f"{name}: {words}",
            lambda data=data, budget=budget: check(data, budget),
            documented=(ImageError,),
            names=("is no image", "is a broken image", "pixels"),
            places=("the image",),
        )
