"""Images in conversations: parts of messages in, patches and the ids of a prompt out.

Read `encode_conversation`. `take_images` comes before the template, `read_images` beside it, and
`place_images` behind it.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxspec.configs.gemma4_vision import IMAGE_TOKENS, Gemma4VisionConfig
from jaxspec.options import FieldError, shown
from jaxspec.text.chat.template import IMAGE_KINDS, PART
from jaxspec.text.images import ImageError, ImagePatches, ImageSource, patches_of, read_image
from jaxspec.tokenizer import Tokenizer

_LATER = ("audio", "input_audio", "audio_url", "video", "video_url", "input_video")
_NAMES = ("image", "image_url", "url", "path")
DETAILS = {"auto": None, "low": IMAGE_TOKENS[0], "high": IMAGE_TOKENS[-1]}
"""The values of `detail` in an image's part, as clients send it, and the most tokens that each stands for. None:
as many as images without `detail` get."""


class MessageImage(NamedTuple):
    """The source of an image in a conversation, and its field in errors.

    Attributes:
      image_tokens: the most tokens that it becomes; None: as many as other images.
    """

    field: str
    source: ImageSource
    image_tokens: int | None = None


class EncodedPrompt(NamedTuple):
    """A prompt as a model reads it.

    Attributes:
      text: None without a tokenizer.
      images: whose placeholders are among the ids.
    """

    text: str | None
    ids: tuple[int, ...]
    images: tuple[ImagePatches, ...] = ()


def encode_conversation(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    config: Any,
    *,
    image_tokens: int | None = None,
    directory: Path | None = None,
    **chat_template_kwargs: Any,
) -> EncodedPrompt:
    """Render a conversation by the chat template, and read its images.

    Args:
      config: the target's `Gemma4VisionConfig`; None: it has no vision part.
      image_tokens, directory: as in `read_images`.

    Raises:
      TokenizerError: there is no template, or it refuses these messages.
      FieldError: an image cannot be used.
    """
    messages, sources = take_images(messages)
    images = read_images(sources, config, image_tokens=image_tokens, directory=directory)
    text = tokenizer.render_chat(messages, **chat_template_kwargs)
    ids = place_images(tokenizer.encode_rendered(text), images, config)
    return EncodedPrompt(text, ids, tuple(images))


def image_of(field: str, part: Any) -> MessageImage | None:
    """Return the image of a part of a message; None for another part.

    Raises:
      FieldError: it is an image without a source, or of an unknown detail, or audio or video.
    """
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in _LATER:
        raise FieldError(
            f"{field}.type",
            f"is {shown(kind)}; text and images are read, and audio and video are planned",
        )
    if kind not in IMAGE_KINDS:
        return None
    sources = {name: part[name] for name in _NAMES if part.get(name) is not None}
    if len(sources) != 1:
        got = " and ".join(sources) or "none of them"
        raise FieldError(field, f"is an image with {got}; expected one of {', '.join(_NAMES)}")
    ((name, source),) = sources.items()
    details = {f"{field}.detail": part.get("detail")}
    if isinstance(source, Mapping):
        details[f"{field}.{name}.detail"] = source.get("detail")
        name, source = f"{name}.url", source.get("url")
    if source is None:
        raise FieldError(f"{field}.{name}", "is missing; expected a data URL")
    image_tokens = None
    for of, detail in details.items():
        if detail is not None and (not isinstance(detail, str) or detail not in DETAILS):
            raise FieldError(of, f"is {shown(detail)}; expected one of {', '.join(DETAILS)}")
        image_tokens = image_tokens or DETAILS[detail or "auto"]
    return MessageImage(f"{field}.{name}", source, image_tokens)


def take_images(
    messages: Sequence[Mapping[str, Any]], field: str = "messages"
) -> tuple[list[Mapping[str, Any]], list[MessageImage]]:
    """Take the images out of messages. `PART` stays in the place of each.

    Messages without images stay as they are.

    Raises:
      FieldError: as `image_of`; or an image is in a message that is not the user's.
    """
    images: list[MessageImage] = []
    out: list[Mapping[str, Any]] = []
    for i, message in enumerate(messages):
        content = message.get("content")
        parts: list[Any] = []
        if isinstance(content, Sequence) and not isinstance(content, str):
            parts = [*content]
        taken = [image_of(f"{field}[{i}].content[{j}]", part) for j, part in enumerate(parts)]
        own = [image for image in taken if image is not None]
        if own and message.get("role") != "user":
            raise FieldError(
                own[0].field, "is in a message that is not the user's; put it into one"
            )
        images += own
        if own:
            parts = [PART if image else part for part, image in zip(parts, taken, strict=True)]
            message = {**message, "content": parts}
        out.append(message)
    return out, images


def read_images(
    images: Sequence[MessageImage],
    config: Gemma4VisionConfig | None,
    *,
    image_tokens: int | None = None,
    directory: Path | None = None,
    only_data: bool = False,
) -> list[ImagePatches]:
    """Read images, and cut them into patches.

    Args:
      config: of the target's vision part; None: it has none.
      image_tokens: as `patches_of` takes it, for images whose part has no `detail`.
      directory: where paths begin, and which they may not leave. None: paths may be any.
      only_data: whether sources that are no data URLs are refused, as those of a client.

    Raises:
      FieldError: an image cannot be used.
    """
    if not images:
        return []
    if config is None:
        raise FieldError(
            images[0].field,
            "is an image, and the target reads text alone: its checkpoint has no vision part, or it "
            "was loaded without one (text only)",
        )

    def patches(image: MessageImage) -> ImagePatches:
        read = read_image(_resolved(image, directory, only_data), image.field)
        return patches_of(read, config, image.image_tokens or image_tokens)

    return [patches(image) for image in images]


def _resolved(image: MessageImage, directory: Path | None, only_data: bool) -> ImageSource:
    """Return the bytes of a data URL, or the path of a file within a directory."""
    field, source, _ = image
    if not isinstance(source, str | bytes) and only_data:
        raise ImageError(field, f"is {shown(source)}; expected a data URL")
    if isinstance(source, str) and source[:5].lower() == "data:":
        head, comma, data = source.partition(",")
        if not comma or not head.lower().endswith(";base64"):
            raise ImageError(field, "is no data URL of base64: data:image/png;base64,…")
        try:
            return base64.b64decode(data, validate=True)
        except (binascii.Error, ValueError) as error:
            raise ImageError(field, f"is no data URL of base64: {error}") from None
    if isinstance(source, str) and "://" in source[:16]:
        raise ImageError(
            field, f"is the address {shown(source)}; addresses are not fetched: give a data URL"
        )
    if only_data and isinstance(source, str):
        raise ImageError(field, f"is {shown(source)}; expected a data URL: data:image/png;base64,…")
    if directory is None or not isinstance(source, str | Path):
        return source
    try:
        path = (directory / source).resolve()
        is_inside = path.is_relative_to(directory.resolve())
    except (OSError, ValueError) as error:  # a loop of links, or a null byte
        raise ImageError(field, f"cannot be read: {error}") from None
    if not is_inside:
        raise ImageError(field, f"is {shown(str(source))}, which leaves {directory}")
    return path


def place_images(
    ids: Sequence[int], images: Sequence[ImagePatches], config: Gemma4VisionConfig | None
) -> tuple[int, ...]:
    """Return the ids of a prompt with as many placeholders for each image as it has tokens.

    The template has written one placeholder for each, without the tokens around an image.

    Raises:
      FieldError: there are other placeholders, or fewer.
    """
    if not images:
        return tuple(ids)
    assert config is not None
    places = np.flatnonzero(np.asarray(ids) == config.image_token_id).tolist()
    if len(places) < len(images):
        raise FieldError(
            "messages",
            f"have {len(images)} images, and the chat template has a place for {len(places)}; use a "
            "checkpoint whose template has places for images",
        )
    if len(places) > len(images):
        raise FieldError(
            "messages",
            f"have {len(images)} images, and {len(places)} placeholders of images: a text has the "
            "placeholder in it; leave it out",
        )
    out: list[int] = []
    begin = 0
    for place, image in zip(places, images, strict=True):
        tokens = [config.image_token_id] * image.num_tokens
        out += [*ids[begin:place], config.begin_token_id, *tokens, config.end_token_id]
        begin = place + 1
    return (*out, *ids[begin:])
