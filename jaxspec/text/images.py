"""Image files in, patches for the vision part of a target out.

Read `read_image`, then `patches_of`. Patches are to the bit those of transformers'
`Gemma4ImageProcessorPil`, except for grey images of 16 bits, which it makes white. Pillow does the
decoding and the resizing; it is the extra `vision`.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import io
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Int, UInt8

from jaxspec.configs.gemma4_vision import BUDGETS, Gemma4VisionConfig
from jaxspec.options import FieldError, shown

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MOST_PIXELS = 89_478_485
"""The most pixels of an image. It is the number from which on Pillow warns: a file of a few kB can
have more, and decoding it would take all memory."""

# Of each level of 8 bits, as transformers rounds it: a product in float64.
_SCALED = (np.arange(256) * (1 / 255)).astype(np.float32)
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "La", "RGBa", "CMYK", "YCbCr", "HSV")


ImageSource = Any
"""A path of an image file, the bytes of one, pixels [height, width, 3] of 8 bits, or an image of
Pillow's."""


class ImageError(FieldError):
    """Raised if an image cannot be used. The message says why."""


@dataclass(frozen=True, eq=False)
class ImagePatches:
    """An image as the vision part of a target reads it.

    Attributes:
      pixels: red, green and blue of each pixel of each patch, row by row.
      positions: column and row of each patch.
      num_tokens: of the image in the target's sequence, without those around it.
    """

    pixels: UInt8[np.ndarray, "M X"]
    positions: Int[np.ndarray, "M 2"]
    num_tokens: int

    def padded(
        self, count: int
    ) -> tuple[Float[np.ndarray, "{count} X"], Int[np.ndarray, "{count} 2"]]:
        """Return patches from 0 to 1 and their positions: `count`, of which the last are padding."""
        more = ((0, count - len(self.pixels)), (0, 0))
        patches = np.pad(_SCALED[self.pixels], more)
        return patches, np.pad(self.positions, more, constant_values=-1)

    @functools.cached_property
    def digest(self) -> bytes:
        """A digest of all that the vision part reads."""
        rows = self.positions[-1, 1] + 1
        return hashlib.sha256(self.pixels.tobytes() + rows.tobytes()).digest()


def read_image(source: ImageSource, name: str) -> Image:
    """Read an image, turn it upright, and return it in red, green and blue of 8 bits.

    What is transparent becomes white. Of several frames the first one counts.

    Args:
      name: of the image in errors.

    Raises:
      ImageError: it is no image, broken, or too large; or Pillow is not installed.
    """
    pil, ops = _pillow("Image"), _pillow("ImageOps")
    if isinstance(source, np.ndarray):
        if source.dtype != np.uint8 or source.ndim != 3 or source.shape[-1] != 3:
            raise ImageError(
                name,
                f"is an array of {source.dtype} {list(source.shape)}; expected uint8 "
                "[height, width, 3]",
            )
        source = pil.fromarray(source)
    if isinstance(source, pil.Image):
        return _upright(source, name, ops)
    if not isinstance(source, bytes):
        try:
            source = Path(source).read_bytes()
        except (OSError, ValueError) as error:  # such as a null byte in a path
            raise ImageError(name, f"cannot be read: {error}") from None
    try:
        image = pil.open(io.BytesIO(source), formats=FORMATS)
    except pil.UnidentifiedImageError:
        raise ImageError(name, f"is no image in {', '.join(FORMATS[:-1])} or GIF") from None
    except (pil.DecompressionBombError, pil.DecompressionBombWarning):
        raise ImageError(name, f"has more than {MOST_PIXELS:,} pixels; make it smaller") from None
    except Exception as error:  # a decoder on foreign bytes raises anything
        raise _broken(name, error) from None
    return _upright(image, name, ops)


def _upright(image: Image, name: str, ops: Any) -> Image:
    """Decode an opened image, and turn it as its EXIF data say."""
    width, height = image.size
    if not width or not height:
        raise ImageError(name, f"is {width} x {height} pixels; expected at least one")
    if width * height > MOST_PIXELS:
        raise ImageError(
            name, f"is {width} x {height} pixels, and the most is {MOST_PIXELS:,}; make it smaller"
        )
    if not image.mode.startswith("I;16") and image.mode not in _MODES:
        raise ImageError(name, f'has pixels of mode {image.mode}; convert it to "RGB"')
    try:
        image.load()
        return _rgb(ops.exif_transpose(image))
    except Exception as error:  # likewise
        raise _broken(name, error) from None


def _broken(name: str, error: Exception) -> ImageError:
    return ImageError(name, f"is a broken image: {type(error).__name__}: {shown(str(error))}")


def _rgb(image: Image) -> Image:
    """Return an image in red, green and blue, on white where it is transparent."""
    pil = _pillow("Image")
    if image.mode.startswith("I;16"):
        return pil.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    white = pil.new("RGBA", image.size, (255,) * 4)
    return pil.alpha_composite(white, image.convert("RGBA")).convert("RGB")


def patches_of(
    image: Image, config: Gemma4VisionConfig, image_tokens: int | None = None
) -> ImagePatches:
    """Resize an image to a number of tokens, and cut it into patches.

    Args:
      image: from `read_image`.
      image_tokens: the most tokens that it becomes, see `configs.gemma4_vision.IMAGE_TOKENS`; None
        for the checkpoint's own number.

    Raises:
      FieldError: `image_tokens` is another number.
    """
    tokens = config.image_tokens if image_tokens is None else image_tokens
    if wrong := BUDGETS.refusal(tokens):
        raise FieldError("image_tokens", wrong)
    rows, columns = grid_of(image.height, image.width, tokens, config.pixels_a_token)
    size = columns * config.pixels_a_token, rows * config.pixels_a_token
    if image.size != size:
        image = image.resize(size, _pillow("Image").Resampling.BICUBIC)
    side = config.patch_size
    high, wide = rows * config.pool_size, columns * config.pool_size
    pixels = np.asarray(image).reshape(high, side, wide, side, 3).swapaxes(1, 2)
    y, x = np.divmod(np.arange(high * wide, dtype=np.int32), wide)
    return ImagePatches(pixels.reshape(high * wide, -1), np.stack([x, y], axis=1), rows * columns)


def grid_of(height: int, width: int, tokens: int, pixels_a_token: int) -> tuple[int, int]:
    """Return the rows and the columns of tokens that an image becomes.

    They keep its aspect ratio, rounded down, and are as many as `tokens` allow. An image so thin
    that it would have no row or no column gets one.

    Args:
      pixels_a_token: the side in pixels of the square that becomes one token.
    """
    scale = math.sqrt(tokens * pixels_a_token**2 / (height * width))
    rows = math.floor(scale * height / pixels_a_token)
    columns = math.floor(scale * width / pixels_a_token)
    if not rows:
        return 1, min(width // height, tokens)
    if not columns:
        return min(height // width, tokens), 1
    return rows, columns


def _pillow(module: str) -> Any:
    try:
        return importlib.import_module(f"PIL.{module}")
    except ImportError:
        raise ImageError(
            "images", "need the package Pillow; pip install 'jaxspec-decoding[vision]'"
        ) from None
