"""Turn text into token ids, and turn token ids into text while more tokens are generated.

Read `Tokenizer`, then `TextStream`. The files are those of a Hugging Face checkpoint:
`tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja`. Reading them needs neither a
model config nor torch. Only chat templates import transformers, for its hardened template sandbox.
"""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
import tokenizers.models

from checkpoints_convert.errors import CheckpointError
from checkpoints_convert.files import read_json, refuse_pointer

_LOG = logging.getLogger(__name__)
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_PRINTED = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [b for b in range(256) if b not in _PRINTED]
# What byte-level tokenizers, such as Qwen3's, write for each byte.
_BYTE_LEVEL = {chr(b): b for b in _PRINTED} | {chr(256 + n): b for n, b in enumerate(_OTHERS)}
_INCOMPLETE = "\ufffd"  # decoders emit this for bytes that are not (yet) a character


class TokenizerError(ValueError):
    """Raised if tokenizer files or text cannot be used.

    The message says what was expected and what to do.
    """


def refuse_empty(name: str, text: str) -> None:
    """Refuse an empty text, with a chat template or without.

    It is nearly always a variable that was not set. With some tokenizers it would have no token.

    Args:
      name: the name of the text in the message.

    Raises:
      TokenizerError: the text is empty.
    """
    if not text:
        raise TokenizerError(
            f"{name} is empty; give at least one character, or token ids, such as that of BOS"
        )


class Tokenizer:
    """A checkpoint's tokenizer.

    Attributes:
      bos_token_id: the id with which every text begins; None where texts begin with none. As in
        transformers 5, the post-processor of tokenizer.json alone decides about it.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
    ):
        """Wrap a backend.

        Args:
          special_tokens: special tokens by the names that chat templates use (`bos_token`,
            `eos_token`, ...).
          chat_template: the Jinja source of the chat template.
        """
        self.backend = backend
        self._vocab_size = backend.get_vocab_size()
        self.special_tokens = dict(special_tokens or {})
        self.chat_template = chat_template
        bos = self.special_tokens.get("bos_token")
        begin = self._encode("a", add_special_tokens=True)[:1]
        adds_one = begin != self._encode("a", add_special_tokens=False)[:1]
        is_bos = adds_one and bos is not None and begin == (backend.token_to_id(bos),)
        self.bos_token_id = begin[0] if is_bos else None

    @classmethod
    def load(cls, directory: Path | str) -> Tokenizer:
        """Load the tokenizer files of a checkpoint directory.

        Raises:
          TokenizerError: there is no tokenizer.json, or the content of a file is invalid.
        """
        directory = Path(directory)
        path = directory / "tokenizer.json"
        _refuse_pointer(path)
        if not path.is_file():
            raise TokenizerError(
                f"{directory} has no tokenizer.json, so text cannot become tokens; copy the "
                "checkpoint's tokenizer files there, or give token ids instead of text"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the bindings raise bare Exception
            raise TokenizerError(f"{path} is not a tokenizer: {error}") from None
        config = _read_json(directory / "tokenizer_config.json")
        made = cls(
            backend,
            special_tokens=_special_tokens(directory, config, backend),
            chat_template=_chat_template(directory, config),
        )
        if config.get("add_bos_token") is True and made.bos_token_id is None:
            _LOG.warning(
                "%s: texts begin without a BOS: tokenizer_config.json asks for one (add_bos_token), but "
                "the post-processor of tokenizer.json adds none, and it decides, as in transformers",
                directory,
            )
        return made

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a text, with the special tokens that tokenizer.json adds."""
        return self._encode(text, add_special_tokens=True)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens and ids outside the vocabulary."""
        known = [i for i in ids if 0 <= i < self._vocab_size]
        return self.backend.decode(known, skip_special_tokens=True)

    def bytes_of(self, token_id: int, text: str) -> bytes:
        """Return the bytes of a token, maybe a part of a character; `text` is its decoded text."""
        token = self.backend.id_to_token(token_id) or ""
        if _INCOMPLETE not in text:
            return text.encode()
        if _BYTE_TOKEN.fullmatch(token):
            return bytes([int(token[3:5], 16)])
        if all(c in _BYTE_LEVEL for c in token):
            return bytes(_BYTE_LEVEL[c] for c in token)
        return text.encode()

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> str:
        """Render a conversation by the chat template, up to where the model's turn begins.

        Args:
          messages: dicts of the form {"role": ..., "content": ...}.
          kwargs: arguments of the template, such as `enable_thinking=True`.

        Raises:
          TokenizerError: there is no chat template, or the template refuses these messages.
        """
        if self.chat_template is None:
            raise TokenizerError(
                "this checkpoint has no chat template (chat_template.jinja, or chat_template in "
                "tokenizer_config.json); use an instruction-tuned checkpoint, or leave out --chat"
            )
        import jinja2

        options = {"add_generation_prompt": True, **kwargs, "tokenize": False}
        try:
            text = self._chat_renderer.apply_chat_template([dict(m) for m in messages], **options)
        except (jinja2.TemplateError, TypeError, KeyError, ValueError) as error:
            raise TokenizerError(f"the chat template refuses these messages: {error}") from None
        assert isinstance(text, str)
        return text

    def encode_rendered(self, text: str) -> tuple[int, ...]:
        """Return the ids of a text from `render_chat`. The template has written BOS already."""
        return self._encode(text, add_special_tokens=False)

    def apply_chat(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> tuple[int, ...]:
        """Return the token ids of a conversation. The arguments are as in `render_chat`."""
        return self.encode_rendered(self.render_chat(messages, **kwargs))

    def ends_bytes(self, token_id: int) -> bool:
        """Tell whether a run of raw bytes ends at or before this token.

        A run may continue after a token that is a raw byte. It may also continue after a token
        without text, such as a special token.
        """
        token = self.backend.id_to_token(token_id) if 0 <= token_id < self._vocab_size else None
        return not _BYTE_TOKEN.fullmatch(token or "<0x00>") and self.decode([token_id]) != ""

    @functools.cached_property
    def _chat_renderer(self) -> Any:
        # On import, transformers warns that there is no torch. Torch is not needed here.
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
        from transformers import PreTrainedTokenizerFast

        # Rendering needs no vocabulary, and transformers would copy the real one.
        empty = tokenizers.Tokenizer(tokenizers.models.BPE())
        return PreTrainedTokenizerFast(
            tokenizer_object=empty, chat_template=self.chat_template, **self.special_tokens
        )

    def _encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        try:
            return tuple(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)
        # Lone surrogates cause this: arguments or JSON escapes that are not Unicode text.
        except TypeError:
            raise TokenizerError("the text is not valid Unicode; it must be UTF-8") from None


class TextStream:
    """Turns a growing list of tokens into pieces of text. No piece is changed later.

    The stream holds back characters whose bytes are incomplete. It holds back runs of raw bytes,
    because one wrong byte changes how the whole run is decoded. It also holds back text that may be
    the start of a stop text. The joined pieces are exactly `completed_text` of all tokens.
    """

    def __init__(self, tokenizer: Tokenizer, stop_texts: Sequence[str] = ()):
        self._tokenizer = tokenizer
        self._stop_texts = tuple(stop_texts)
        # Text of tokens up to `_settled` is final. Decoding starts at `_window`, one piece earlier,
        # because decoders treat the first token of a text differently.
        self._window = self._settled = 0
        self._text = ""  # final text, of which the first `_emitted` characters have been returned
        self._emitted = 0

    def push(self, ids: Sequence[int]) -> str:
        """Take all tokens so far and return the text that became final."""
        if len(ids) > self._settled and self._tokenizer.ends_bytes(ids[-1]):
            before = self._tokenizer.decode(ids[self._window : self._settled])
            after = self._tokenizer.decode(ids[self._window :])
            if len(after) > len(before) and not after.endswith(_INCOMPLETE):
                self._text += after[len(before) :]
                self._window, self._settled = self._settled, len(ids)
        return self._emit(safe_length(self._text, self._stop_texts))

    def finish(self, ids: Sequence[int]) -> str:
        """Take all tokens and return the rest of their text."""
        self._text = completed_text(self._tokenizer, ids, self._stop_texts)
        return self._emit(len(self._text))

    def _emit(self, end: int) -> str:
        piece = self._text[self._emitted : end]
        self._emitted = max(self._emitted, end)
        return piece


def completed_text(tokenizer: Tokenizer, ids: Sequence[int], stop_texts: Sequence[str] = ()) -> str:
    """Return the text of generated tokens, cut before the first stop text."""
    text = tokenizer.decode(ids)
    stop = first_stop(text, stop_texts)
    return text if stop is None else text[: stop[0]]


def stop_at_text(
    tokenizer: Tokenizer, stop_texts: Sequence[str]
) -> Callable[[Sequence[int]], int | None]:
    """Return a function for `Request.stop_at` that ends a row at the first stop text.

    That function returns the fewest tokens whose text contains a stop text, or None.
    """

    def contains(ids: Sequence[int]) -> bool:
        return first_stop(tokenizer.decode(ids), stop_texts) is not None

    def stop_at(ids: Sequence[int]) -> int | None:
        if not contains(ids):
            return None
        enough, short = len(ids), 0
        while enough - short > 1:
            middle = (enough + short) // 2
            if contains(ids[:middle]):
                enough = middle
            else:
                short = middle
        return enough

    return stop_at


def first_stop(text: str, stop_texts: Sequence[str]) -> tuple[int, str] | None:
    """Return the index of the first stop text in a text, and the stop text; None without one."""
    return min(((text.index(stop), stop) for stop in stop_texts if stop in text), default=None)


def safe_length(text: str, stop_texts: Sequence[str]) -> int:
    """Return the number of characters that no stop text can cut, whatever follows the text."""
    first = first_stop(text, stop_texts)
    if first is not None:
        return first[0]
    begun = max(
        (
            n
            for stop in stop_texts
            for n in range(1, min(len(stop), len(text) + 1))
            if text.endswith(stop[:n])
        ),
        default=0,
    )
    return len(text) - begun


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return read_json(path)
    except CheckpointError as error:
        raise TokenizerError(str(error)) from None


def _refuse_pointer(path: Path) -> None:
    """Refuse a file that Git LFS has not downloaded."""
    if not path.is_file():
        return
    try:
        with path.open("rb") as file:
            refuse_pointer(path, file.read(64))
    except OSError as error:
        raise TokenizerError(f"{path} cannot be read: {error.strerror}") from None
    except CheckpointError as error:
        raise TokenizerError(str(error)) from None


_OF_CLASSES = {
    "GemmaTokenizer": {
        f"{name}_token": f"<{name}>" for name in ("unk", "bos", "eos", "pad", "mask")
    },
    "Qwen2Tokenizer": {f"{name}_token": "<|endoftext|>" for name in ("unk", "eos", "pad")},
}
"""The special tokens that a class of transformers has where its files name none."""


def _special_tokens(
    directory: Path, config: Mapping[str, Any], backend: tokenizers.Tokenizer
) -> dict[str, str]:
    """Return special tokens by name. Each is a string, or an object with its text in `content`."""
    of_class = _OF_CLASSES.get(str(config.get("tokenizer_class")).removesuffix("Fast"), {})
    named: dict[str, Any] = {
        n: t for n, t in of_class.items() if backend.token_to_id(t) is not None
    }
    for values in (config, _read_json(directory / "special_tokens_map.json")):  # as in transformers
        named |= {name: value for name, value in values.items() if name.endswith("_token")}
    for extra in ("extra_special_tokens", "model_specific_special_tokens"):
        if isinstance(config.get(extra), dict):
            named.update(config[extra])
    texts = {n: v.get("content") if isinstance(v, dict) else v for n, v in named.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _chat_template(directory: Path, config: Mapping[str, Any]) -> str | None:
    template = config.get("chat_template")
    if isinstance(template, list):  # several templates, each with a name
        objects = [t for t in template if isinstance(t, dict)]
        template = next((t.get("template") for t in objects if t.get("name") == "default"), None)
    template = template if isinstance(template, str) else None
    path = directory / "chat_template.jinja"
    if not path.is_file():
        return template
    _refuse_pointer(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from None
    if template is not None and template.strip() != text.strip():
        _LOG.warning("%s is the chat template, and not that of tokenizer_config.json", path)
    return text
