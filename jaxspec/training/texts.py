"""Texts to train on: files of prompts and answers, and batches in a fixed order.

A line of a file is a JSON object. `jaxspec generate --json` writes such lines, so answers of the target itself
come from the target's own engine:

    {"prompt_ids": [...], "token_ids": [...]}      ids, with or without their texts beside them
    {"prompt": "...", "text": "..."}               texts; "completion" and "response" are read as "text"
    {"messages": [..., {"role": "assistant", "content": "..."}]}    through the chat template

Read `Texts`: ids in one flat array, which may be a file. Files are read a line at a time (`read_texts`) and
written as such a file (`write_tokens`), so that texts may be larger than memory.

Which texts an update has follows from the seed and from the number of the step alone, see `Batches`. A run that
is resumed therefore goes on with the texts that it would have had. grain draws the order and makes the batches.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.tokenizer import Tokenizer
from jaxspec.training.features import FeatureFiles
from jaxspec.training.trainer import Batch
from jaxspec.weights.atomic_dir import atomic_directory

try:
    import grain
except ImportError as error:
    raise ImportError(
        "training needs grain, the extra `train`: pip install 'jaxspec-decoding[train]'"
    ) from error

ANSWERS = ("text", "completion", "response")
COMPARED = 8
"""Lines whose ids are compared with the tokenizer's."""


class DataError(ValueError):
    """A file that cannot be trained on."""


@dataclass(frozen=True)
class Text:
    """A prompt and an answer, as ids."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True)
class Texts:
    """Texts as flat arrays. `tokens` may be in a file, the others are in memory.

    Attributes:
      tokens: ids of prompts and answers.
      starts: where each text begins among `tokens`.
      sizes, prompts: the tokens of each text, and of its prompt.
    """

    tokens: np.ndarray
    starts: np.ndarray
    sizes: np.ndarray
    prompts: np.ndarray

    @classmethod
    def of(cls, texts: Iterable[Text]) -> Texts:
        """Return texts in memory."""
        tokens, sizes, prompts = array("i"), array("q"), array("q")
        for text in texts:
            tokens.extend(text.prompt)
            tokens.extend(text.answer)
            sizes.append(len(text.prompt) + len(text.answer))
            prompts.append(len(text.prompt))
        return cls._of(np.frombuffer(tokens, np.int32), sizes, prompts)

    @classmethod
    def _of(cls, tokens: np.ndarray, sizes: Any, prompts: Any) -> Texts:
        whole, of_prompts = np.asarray(sizes, np.int64), np.asarray(prompts, np.int64)
        return cls(tokens, np.cumsum(whole) - whole, whole, of_prompts)

    @classmethod
    def open(cls, directory: Path) -> Texts:
        """Return the texts that `write_tokens` wrote. They are read when they are used."""
        sizes, prompts = np.load(directory / "sizes.npy")
        return cls._of(np.memmap(directory / "tokens.int32", np.int32, "r"), sizes, prompts)

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> Text:
        begin, size, prompt = self.starts[index], self.sizes[index], self.prompts[index]
        ids = self.tokens[begin : begin + size].tolist()
        return Text(tuple(ids[:prompt]), tuple(ids[prompt:]))

    def take(self, indices: np.ndarray) -> Texts:
        """Return some of the texts. Tokens are not copied."""
        return dataclasses.replace(
            self,
            starts=self.starts[indices],
            sizes=self.sizes[indices],
            prompts=self.prompts[indices],
        )

    def cut(self, width: int) -> Texts:
        """Return the texts without what is behind their first `width` tokens."""
        return dataclasses.replace(self, sizes=np.minimum(self.sizes, width))

    def rows(self, indices: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return padded rows of ids, their lengths, and which ids are of answers."""
        tokens = np.zeros((len(indices), width), np.int32)
        lengths = np.minimum(self.sizes[indices], width).astype(np.int32)
        for row, begin, length in zip(tokens, self.starts[indices], lengths, strict=True):
            row[:length] = self.tokens[begin : begin + length]
        at = np.arange(width)
        answers = (at >= self.prompts[indices, None]) & (at < lengths[:, None])
        return tokens, lengths, answers

    def digest(self) -> str:
        """Return a digest of all ids and of which texts they are."""
        digest = hashlib.sha256()
        for part in (self.starts, self.sizes, self.prompts):
            digest.update(np.ascontiguousarray(part, np.int64).tobytes())
        for begin in range(0, len(self.tokens), _DIGESTED):
            digest.update(self.tokens[begin : begin + _DIGESTED].tobytes())
        return digest.hexdigest()


_DIGESTED = 1 << 22  # tokens at a time


def write_tokens(directory: Path, texts: Iterable[Text]) -> Texts:
    """Write texts as a directory of flat arrays, one text after the other, and return them from there.

    Raises:
      CheckpointError: the directory exists, or cannot be written.
    """
    sizes, prompts = array("q"), array("q")
    with atomic_directory(directory) as (temporary, _):
        with (temporary / "tokens.int32").open("wb") as file:
            for text in texts:
                array("i", (*text.prompt, *text.answer)).tofile(file)
                sizes.append(len(text.prompt) + len(text.answer))
                prompts.append(len(text.prompt))
        np.save(temporary / "sizes.npy", np.asarray([sizes, prompts], np.int64))
    return Texts.open(directory)


def read_texts(
    paths: Sequence[Path],
    *,
    vocab_size: int,
    tokenizer: Callable[[], Tokenizer],
    end: int | None = None,
) -> Iterator[Text]:
    """Read the texts of files, one after the other.

    Args:
      tokenizer: makes the target's, for lines that have texts.
      end: id that is put behind answers that are texts.

    Raises:
      DataError: a line is no text to train on, or its ids are of another tokenizer, or a file cannot be read. It
        names the line.
    """
    compared = count = 0
    for where, values in _lines(paths):
        if values.get("error") is not None:
            continue  # a prompt that was refused
        text = _read_line(where, values, tokenizer, end)
        if wrong := [i for i in (*text.prompt, *text.answer) if not 0 <= i < vocab_size]:
            raise DataError(
                f"{where} has the id {wrong[0]}, and the target's vocabulary has {vocab_size}: the ids "
                "are of another tokenizer"
            )
        if compared < COMPARED and _has_both(values):
            _compare(where, values, tokenizer())
            compared += 1
        count += 1
        yield text
    if not count:
        raise DataError(f"{', '.join(map(str, paths))}: no texts")


def _read_line(
    where: str, values: dict[str, Any], tokenizer: Callable[[], Tokenizer], end: int | None
) -> Text:
    def ids(key: str) -> tuple[int, ...]:
        value = values[key]
        if not isinstance(value, list) or not all(type(i) is int for i in value):
            raise DataError(f"{where}: {key} is no list of ids")
        return tuple(value)

    if "prompt_ids" in values and "token_ids" in values:
        return _checked(where, Text(ids("prompt_ids"), ids("token_ids")))
    after = () if end is None else (end,)
    if isinstance(values.get("messages"), list) and values["messages"]:
        *before, last = values["messages"]
        if not isinstance(last, dict) or last.get("role") != "assistant":
            raise DataError(f"{where}: the last message is not the assistant's")
        prompt = tokenizer().apply_chat(before)
        answer = tokenizer().encode_rendered(str(last.get("content", "")))
        return _checked(where, Text(tuple(prompt), (*answer, *after)))
    name = next((n for n in ANSWERS if isinstance(values.get(n), str)), None)
    if isinstance(values.get("prompt"), str) and name is not None:
        prompt = tokenizer().encode(values["prompt"])
        answer = tokenizer().encode_rendered(values[name])
        return _checked(where, Text(tuple(prompt), (*answer, *after)))
    raise DataError(
        f"{where} has {', '.join(values) or 'nothing'}; expected prompt_ids and token_ids, prompt and text, or "
        "messages"
    )


def _checked(where: str, text: Text) -> Text:
    if not text.prompt:
        raise DataError(f"{where} has an empty prompt: nothing comes before the answer")
    return text


def _has_both(values: dict[str, Any]) -> bool:
    return isinstance(values.get("text"), str) and bool(values.get("token_ids"))


def _compare(where: str, values: dict[str, Any], tokenizer: Tokenizer) -> None:
    """Refuse ids that the target's tokenizer reads as another text."""
    text, ours = values["text"], tokenizer.decode(values["token_ids"])
    # The end of a text may have been cut, at a stop text or inside of a character.
    size = max(len(text) - 4, 0)
    if ours[:size] != text[:size]:
        raise DataError(
            f"{where}: its token_ids are {ours[:40]!r} for the target's tokenizer, and its text is {text[:40]!r}: "
            "they were made with another tokenizer"
        )


def read_prompts(
    paths: Sequence[Path], *, tokenizer: Callable[[], Tokenizer], thinking: bool = False
) -> Iterator[tuple[int, ...]]:
    """Read the prompts of files alone, one after the other, for answers that the target is to write.

    Args:
      thinking: whether chat templates turn thinking on.

    Raises:
      DataError: a line has no prompt, or a file cannot be read. It names the line.
    """
    count = 0
    for where, values in _lines(paths):
        messages = values.get("messages")
        if isinstance(values.get("prompt_ids"), list):
            prompt = values["prompt_ids"]
        elif isinstance(messages, list) and messages:
            before = messages[:-1] if messages[-1].get("role") == "assistant" else messages
            options = {"enable_thinking": True} if thinking else {}
            prompt = tokenizer().apply_chat(before, **options)
        elif isinstance(values.get("prompt"), str):
            prompt = tokenizer().encode(values["prompt"])
        else:
            raise DataError(f"{where} has no prompt: expected prompt_ids, prompt or messages")
        if not prompt:
            raise DataError(f"{where} has an empty prompt")
        count += 1
        yield tuple(prompt)
    if not count:
        raise DataError(f"{', '.join(map(str, paths))}: no prompts")


def write_texts(path: Path, texts: Iterable[Text]) -> None:
    """Add texts to a file that `read_texts` reads, one after the other. Each is there once it was yielded."""
    with path.open("a", encoding="utf-8", buffering=1) as file:
        for text in texts:
            values = {"prompt_ids": text.prompt, "token_ids": text.answer}
            file.write(json.dumps(values) + "\n")


def take_answered(path: Path, prompts: Iterator[tuple[int, ...]]) -> int:
    """Take the prompts that a file of `write_texts` has answers to off the prompts, and return their number.

    What a killed process left of its last line is cut off.

    Raises:
      DataError: an answer is to another prompt.
    """
    if not path.exists():
        return 0
    count = whole = 0
    with path.open("rb+") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            try:
                ids = tuple(json.loads(line)["prompt_ids"])
            except (ValueError, KeyError, TypeError):
                raise DataError(
                    f"{path}, line {count + 1} is no answer: remove the file to answer all prompts anew"
                ) from None
            if ids != next(prompts, None):
                raise DataError(
                    f"{path}, line {count + 1} answers another prompt than --data has there: remove "
                    "the file to answer all prompts anew"
                )
            count, whole = count + 1, whole + len(line)
        file.truncate(whole)
    return count


def _lines(paths: Sequence[Path]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place and the values of each line."""
    for path in paths:
        try:
            with path.open(encoding="utf-8") as file:
                yield from _lines_of(path, file)
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}") from None


def _lines_of(path: Path, file: Iterable[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            values = json.loads(line)
        except ValueError as error:
            raise DataError(f"{where} is not JSON: {error}") from None
        if not isinstance(values, dict):
            raise DataError(f"{where} is no JSON object")
        yield where, values


def usable(texts: Texts, drafts: int, width: int) -> Texts:
    """Return the texts with a whole block of answer within a width.

    Args:
      drafts: tokens that a drafter predicts behind an anchor.

    Raises:
      DataError: there are none.
    """
    kept = np.flatnonzero(np.minimum(texts.sizes, width) - texts.prompts > drafts)
    if not len(kept):
        longest = np.max(texts.sizes - texts.prompts)
        raise DataError(
            f"no answer is as long as a block: the longest has {longest} tokens, and an anchor and {drafts} "
            f"drafts must be within the first {width} tokens of a text; give longer answers, or a larger max_length"
        )
    return texts.take(kept)


def split(texts: Texts, held_out: int, seed: int) -> tuple[Texts, Texts]:
    """Return texts to train on, and others to measure with, at most a quarter of all."""
    order = np.random.default_rng([seed, 0x5EED]).permutation(len(texts))
    count = min(held_out, len(texts) // 4)
    return texts.take(np.sort(order[count:])), texts.take(order[:count])


class Batches:
    """The batches of a run, by the number of the update. Every text comes once before any comes twice.

    Args:
      features: the target's features of the same texts, if they are kept.
    """

    def __init__(
        self,
        texts: Texts,
        rows: int,
        parts: int,
        width: int,
        seed: int,
        features: FeatureFiles | None = None,
    ):
        self.texts, self.parts, self.width, self.features = texts, parts, width, features
        order = grain.MapDataset.range(len(texts)).seed(seed % 2**32).shuffle()
        # A batch may reach over the end of an epoch.
        self.indices: Any = order.repeat(None).batch(rows * parts)

    def __call__(self, begin: int, end: int | None = None, least: int = 0) -> Batch:
        """Return the texts of an update, or those of updates `begin` to `end - 1` with one axis more.

        Args:
          least: the least size of that axis. What is behind the updates repeats the last one.
        """
        if end is None:
            return jax.tree.map(jnp.asarray, self._of(self.indices[begin]))
        made = [self._of(self.indices[step]) for step in range(begin, end)]
        made += made[-1:] * (least - len(made))
        return jax.tree.map(lambda *x: jnp.asarray(np.stack(x)), *made)

    def _of(self, indices: np.ndarray) -> Batch:
        """Return a batch of arrays of the host."""
        rows = self.texts.rows(indices, self.width)
        features = self.features and self.features.rows(indices, self.width)
        return Batch.split(*rows, self.parts, features)


def width_of(texts: Texts, max_length: int) -> int:
    """Return the columns that texts need, in multiples of 64, and at most `max_length`."""
    return min(-(-int(np.max(texts.sizes)) // 64) * 64, max_length)
