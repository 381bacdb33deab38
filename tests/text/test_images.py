"""Images of every format and shape: as transformers' PIL class makes them, or refused by name."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxspec.configs.gemma4_vision import IMAGE_TOKENS, PRESETS
from jaxspec.options import FieldError
from jaxspec.text import images
from jaxspec.text.images import ImageError, grid_of, patches_of, read_image

Image = pytest.importorskip("PIL.Image", reason="images need Pillow")

TOWER, EMBEDDER = PRESETS["e2b"], PRESETS["12b"]


def noise(height: int, width: int, bands: int = 3) -> np.ndarray:
    """Return pixels that differ from each other, so that no wrong place is overlooked."""
    rng = np.random.default_rng(height * 10_007 + width)
    return rng.integers(0, 256, (height, width, bands), np.uint8)


def file_of(image: Any, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def png(width: int, height: int, depth: int, colour: int, raw: bytes) -> bytes:
    """Return a PNG file of a depth that Pillow does not write."""

    def part(name: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        )

    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    parts = part(b"IHDR", header) + part(b"IDAT", zlib.compress(raw)) + part(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


def turned(image: Any, orientation: int) -> bytes:
    exif = Image.Exif()
    exif[274] = orientation
    return file_of(image, "JPEG", exif=exif)


def with_palette(image: Any) -> Any:
    image = image.quantize(16)
    image.info["transparency"] = 3
    return image


PLAIN = Image.fromarray(noise(60, 90))
CASES = {
    "png": file_of(PLAIN),
    "jpeg": file_of(PLAIN, "JPEG"),
    "webp": file_of(PLAIN, "WEBP"),
    "webp with alpha": file_of(Image.fromarray(noise(33, 20, 4)), "WEBP", lossless=True),
    "gif of two frames": file_of(
        PLAIN, "GIF", save_all=True, append_images=[PLAIN.rotate(90)], transparency=7
    ),
    "turned": turned(PLAIN, 6),
    "turned and mirrored": turned(PLAIN, 5),
    "alpha": file_of(Image.fromarray(noise(40, 30, 4))),
    "grey with alpha": file_of(Image.fromarray(noise(40, 30, 4)).convert("LA")),
    "palette with transparency": file_of(with_palette(PLAIN), transparency=3),
    "one transparent colour": file_of(
        Image.new("RGB", (20, 30), (1, 2, 3)), transparency=(1, 2, 3)
    ),
    "cmyk": file_of(PLAIN.convert("CMYK"), "JPEG"),
    "bits": file_of(PLAIN.convert("1")),
    "grey": file_of(PLAIN.convert("L")),
    "16 bits": png(2, 1, 16, 2, b"\0" + bytes(range(100, 112))),
    "16 bits with alpha": png(2, 1, 16, 6, b"\0" + bytes(range(100, 116))),
    "1 x 1": file_of(Image.new("RGB", (1, 1), (9, 8, 7))),
    "wide": file_of(Image.fromarray(noise(10, 10_000))),
    "high": file_of(Image.fromarray(noise(3000, 10))),
    "of the right size": file_of(Image.fromarray(noise(768, 768))),
}


@pytest.fixture(scope="module")
def processor() -> Any:
    pytest.importorskip(
        "torch", reason="the version of transformers that parity is measured against"
    )
    module = pytest.importorskip("transformers.models.gemma4.image_processing_pil_gemma4")
    return module.Gemma4ImageProcessorPil()


@pytest.mark.parametrize("name", CASES)
def test_images_are_to_the_bit_those_of_transformers(processor: Any, name: str) -> None:
    from PIL import ImageOps

    theirs = ImageOps.exif_transpose(Image.open(io.BytesIO(CASES[name])))
    image = read_image(CASES[name], name)
    assert image.mode == "RGB"
    for budget in IMAGE_TOKENS:
        expected = processor(theirs, max_soft_tokens=budget)
        (count,) = expected["num_soft_tokens_per_image"]
        got = patches_of(image, TOWER, budget)
        assert (got.num_tokens, len(got.pixels)) == (count, 9 * count)
        patches, positions = got.padded(9 * budget)
        np.testing.assert_array_equal(patches, expected["pixel_values"][0], strict=True)
        np.testing.assert_array_equal(positions, expected["image_position_ids"][0])


@pytest.mark.parametrize("budget", IMAGE_TOKENS)
def test_patches_of_48_pixels_are_nine_of_16_together(budget: int) -> None:
    image = read_image(CASES["png"], "it")
    small, large = patches_of(image, TOWER, budget), patches_of(image, EMBEDDER, budget)
    assert small.num_tokens == large.num_tokens == len(large.pixels)
    for patch, (x, y) in zip(large.pixels, large.positions, strict=True):
        within = np.all(small.positions // 3 == (x, y), axis=1)
        rows = small.pixels[within].reshape(3, 3, 16, 16, 3).swapaxes(1, 2)
        np.testing.assert_array_equal(patch, rows.reshape(-1))


def test_the_checkpoint_says_how_many_tokens_there_are_unless_asked() -> None:
    image = read_image(CASES["png"], "it")
    assert patches_of(image, TOWER).num_tokens == patches_of(image, TOWER, 280).num_tokens == 260
    with pytest.raises(FieldError, match="image_tokens is 100; it must be one of 70, 140"):
        patches_of(image, TOWER, 100)


@pytest.mark.parametrize(
    ("height", "width", "expected"),
    [
        (480, 640, (63, 266, 1064)),
        (1080, 1920, (66, 264, 1100)),
        (224, 224, (64, 256, 1089)),
        (3000, 100, (45, 273, 1098)),
    ],
)
def test_numbers_of_tokens(height: int, width: int, expected: tuple[int, ...]) -> None:
    grids = [grid_of(height, width, budget, 48) for budget in (70, 280, 1120)]
    assert tuple(rows * columns for rows, columns in grids) == expected


def test_paths_pixels_and_images_are_read_as_files_are(tmp_path: Path) -> None:
    path = tmp_path / "image.png"
    path.write_bytes(CASES["png"])
    expected = np.asarray(PLAIN)
    for source in (CASES["png"], path, str(path), expected, PLAIN):
        np.testing.assert_array_equal(np.asarray(read_image(source, "it")), expected)


def test_the_first_frame_of_a_gif_counts() -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    file = file_of(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert read_image(file, "it").getpixel((4, 4)) == (255, 0, 0)


def test_grey_of_16_bits_keeps_its_shades() -> None:
    """Pillow makes all but the darkest 256 of 65,536 shades white, and so does transformers."""
    levels = np.array([[0, 256, 30_000, 65_535]], np.uint16)
    grey = np.asarray(read_image(file_of(Image.fromarray(levels)), "it"))
    np.testing.assert_array_equal(grey, np.repeat(levels[..., None] >> 8, 3, axis=2))


def bomb() -> bytes:
    return png(40_000, 40_000, 1, 0, bytes(5001) * 100)


REFUSED = {
    "text": (b"no image at all", r"the photo is no image in PNG, JPEG, WEBP or GIF"),
    "empty": (b"", r"the photo is no image"),
    "another format": (file_of(PLAIN, "BMP"), r"the photo is no image in PNG"),
    "bomb": (bomb(), r"the photo has more than 89,478,485 pixels; make it smaller"),
    "truncated png": (CASES["png"][:3000], r"the photo is a broken image: OSError: .*truncated"),
    "truncated jpeg": (CASES["jpeg"][:900], r"the photo is a broken image: OSError: .*truncated"),
    "truncated webp": (CASES["webp"][:900], r"the photo is (a broken|no) image"),
    "truncated gif": (CASES["gif of two frames"][:900], r"the photo is a broken image"),
    "no height": (png(5, 0, 8, 2, b""), r"the photo is (a broken|no) image"),
    "no such file": (Path("/nowhere/x.png"), r"the photo cannot be read: .*No such file"),
    "a directory": (Path("/"), r"the photo cannot be read: .*directory"),
    "no path": ("a\0b", r"the photo cannot be read: "),
    "floats": (
        np.zeros((4, 4, 3)),
        r"the photo is an array of float64 \[4, 4, 3\]; expected uint8",
    ),
    "other pixels": (
        Image.new("F", (4, 4)),
        r'the photo has pixels of mode F; convert it to "RGB"',
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_image_is_refused_by_name(name: str) -> None:
    source, message = REFUSED[name]
    with pytest.raises(ImageError, match=message):
        read_image(source, "the photo")


def test_large_images_are_refused_before_they_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if a program has switched Pillow's own check off."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    with pytest.raises(ImageError, match="the photo is 40000 x 40000 pixels, and the most is"):
        read_image(bomb(), "the photo")


def test_without_pillow_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(images.importlib, "import_module", missing)
    with pytest.raises(ImageError, match=r"pip install 'jaxspec-decoding\[vision\]'"):
        read_image(b"", "the photo")


def test_digests_tell_images_apart() -> None:
    image = read_image(CASES["png"], "it")
    wide, high = image.resize((96, 48)), image.resize((48, 96))
    digests = {
        patches_of(x, TOWER, budget).digest for x in (image, wide, high) for budget in (70, 140)
    }
    assert len(digests) == 6
    assert patches_of(image, TOWER).digest == patches_of(image.copy(), TOWER).digest
