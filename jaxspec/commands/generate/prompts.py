"""Prompts as the user gives them: arguments, files of JSON lines, standard input.

`read_prompts` gathers them without any model, so that mistakes show before one is loaded. `encode`
then turns each into token ids. A line of a file may have settings of its own, see `FIELDS`. A line
is refused if a known field has an impossible value. Unknown fields are passed on to the line's
rows, so nothing in a line is dropped.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import re
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from jaxspec.commands.generate.options import DecodingOptions, TextOptions
from jaxspec.commands.options import UsageError, as_flag, read_text
from jaxspec.options import SEEDS, FieldError, Sampling, at_least
from jaxspec.text.image_prompts import EncodedPrompt, encode_conversation
from jaxspec.tokenizer import Tokenizer, refuse_empty

KINDS = ("prompt", "prompt_ids", "messages")
MAX_INT = 2**31 - 1
"""The largest id, count or limit: devices hold them in 32 bits."""
MAX_DEPTH = 64
"""Levels of lists and objects. Deeper ones would overflow the stack of recursive code."""


class PromptError(UsageError):
    """Prompts that cannot be read: names their place, the expectation and the way out."""


@dataclass(frozen=True)
class PromptInput:
    """A prompt as given: exactly one of `text`, `ids` and `messages`.

    Attributes:
      origin: its place in the input, for messages.
      id: the name of its rows.
      seed, max_new_tokens, stop: its own; None for those of the run.
      sampling: its own values of fields of `Sampling`.
      extra: unknown fields of its line, for its rows.
    """

    origin: str
    text: str | None = None
    ids: tuple[int, ...] | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    id: str | int | None = None
    seed: int | None = None
    max_new_tokens: int | None = None
    stop: tuple[str, ...] | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)


def read_prompts(
    arguments: Sequence[str] = (),
    id_lists: Sequence[str] = (),
    file: Path | None = None,
    stdin: Callable[[], bytes] | None = None,
    *,
    chat: bool = False,
    writes_json: bool = True,
) -> list[PromptInput]:
    """Return all prompts: arguments, lists of ids, a file; without these, standard input.

    Args:
      id_lists: "5,6,7" each.
      file: JSON lines, see `FIELDS`.
      stdin: reads standard input to its end, as one prompt; None for a terminal.
      chat: texts are a user's turn; only then are messages allowed, and ids are not.
      writes_json: rows are written as JSON, which can hold log-probabilities.

    Raises:
      PromptError: there is nothing to read, or something cannot be read.
    """
    prompts = [PromptInput(f"argument {i}", text=text) for i, text in enumerate(arguments, 1)]
    prompts += [parse_ids(f"--prompt-ids {ids[:40]}", ids) for ids in id_lists]
    if file is not None:
        prompts += read_jsonl(file)
    if not prompts and stdin is not None:
        try:
            text = stdin().decode("utf-8-sig")
            prompts = [PromptInput("standard input", text=text)] if text else []
        except UnicodeDecodeError as error:
            raise PromptError(f"standard input is not UTF-8 text: {error}") from None
    if not prompts:
        raise PromptError(
            "there is no prompt; give one as an argument, on standard input, with --prompts "
            "FILE.jsonl or with --prompt-ids 5,6,7"
        )
    for prompt in prompts:
        if chat and prompt.ids is not None:
            raise PromptError(f"{prompt.origin}: token ids take no chat template; leave out --chat")
        if not chat and prompt.messages is not None:
            raise PromptError(f"{prompt.origin}: messages need the chat template; add --chat")
        logprobs = [n for n in ("logprobs", "top_logprobs") if prompt.sampling.get(n)]
        if logprobs and not writes_json:
            raise PromptError(
                f"{prompt.origin}: {logprobs[0]} needs --json, which they are written with"
            )
    return prompts


def parse_ids(origin: str, ids: str) -> PromptInput:
    """Parse a comma-separated list of token ids; an empty list is an empty prompt."""
    try:
        return PromptInput(origin, ids=tuple(int(i) for i in ids.split(",")) if ids.strip() else ())
    except ValueError:
        raise PromptError(f"{origin}: expected whole numbers with commas, such as 5,6,7") from None


def encode(
    prompt: PromptInput,
    tokenizer: Tokenizer | None,
    *,
    options: TextOptions | None = None,
    vision: Any = None,
) -> EncodedPrompt:
    """Return a prompt as the model reads it; ids alone have no text.

    Args:
      options: None for the defaults.
      vision: the config of the target's vision part; None: it has none.

    Raises:
      TokenizerError: the text is empty or cannot be encoded.
      FieldError: an image cannot be used.
    """
    options = options or TextOptions()
    if options.images and prompt.text is None:
        raise FieldError(
            "images",
            lambda format_field: (
                f"{format_field('images')} is for prompts that are texts; messages have image parts"
            ),
        )
    if prompt.ids is not None:
        text = None if tokenizer is None else tokenizer.decode(prompt.ids)
        return EncodedPrompt(text, prompt.ids)
    assert tokenizer is not None, "text needs a tokenizer"
    if prompt.text is not None:
        refuse_empty("the prompt", prompt.text)
    if options.chat:
        content: Any = prompt.text
        directory = options.image_directory
        if options.images:
            parts = [{"type": "image", "image": path} for path in options.images]
            content, directory = [*parts, {"type": "text", "text": prompt.text}], None
        messages = prompt.messages or ({"role": "user", "content": content},)
        return encode_conversation(
            tokenizer,
            messages,
            vision,
            image_tokens=options.image_tokens,
            directory=directory,
            **(options.chat_template_kwargs or {}),
        )
    assert prompt.text is not None
    return EncodedPrompt(prompt.text, tokenizer.encode(prompt.text))


# --- lines of a file -----------------------------------------------------------------------------


def read_jsonl(path: Path) -> list[PromptInput]:
    """Read one prompt per line of a file, or of standard input for "-"; empty lines are skipped.

    Raises:
      UsageError: naming the file and the line.
    """
    lines = enumerate(read_text("--prompts", path).split("\n"), 1)
    name = "standard input" if str(path) == "-" else path
    prompts = [read_line(f"{name}:{n}", line) for n, line in lines if line.strip()]
    if not prompts:
        raise PromptError(f'{name} has no prompts; expected lines such as {{"prompt": "def f("}}')
    return prompts


def read_line(origin: str, line: str) -> PromptInput:
    """Read one prompt and its own settings.

    Raises:
      PromptError: beginning with `origin`.
    """
    try:
        values: dict[str, Any] = {"sampling": {}, "extra": {}}
        for name, value in _object(line).items():
            if name not in FIELDS:
                _refuse_misspelt(name)
                values["extra"][name] = value
            elif value is not None:  # null means the same as no value
                group = values["sampling"] if name in _SAMPLING else values
                group[name] = FIELDS[name](name, value)
        kinds = [kind for kind in KINDS if kind in values]
        if len(kinds) != 1:
            raise _Refused(
                f"expected an object with one of {', '.join(KINDS)}, such as "
                f'{{"prompt": "def f("}}; this one has {" and ".join(kinds) or "none of them"}'
            )
        content = values.pop(kinds[0])
        kind = {"prompt_ids": "ids", "prompt": "text"}.get(kinds[0], kinds[0])
        if kinds[0] == "prompt" and not isinstance(content, str):
            kind = "ids"
        Sampling(**values["sampling"])  # ranges
        return PromptInput(origin, **{kind: content}, **values)
    except (_Refused, FieldError) as error:
        raise PromptError(f"{origin}: {error}") from None


class _Refused(ValueError):
    """A line that is refused, without its place."""


def _object(line: str) -> dict[str, Any]:
    """Parse an object. Stricter than `json`: each name once, finite numbers, limited depth."""
    try:
        value = json.loads(
            line,
            object_pairs_hook=_once,
            parse_constant=_NotFinite,
            parse_float=_number_or_not,
        )
    except _Refused:
        raise
    except RecursionError:
        raise _Refused(_TOO_DEEP) from None
    except ValueError as error:
        raise _Refused(f"not JSON: {error}") from None
    level, depth = [value], 0
    while level := [inner for outer in level for inner in _children(outer)]:
        if (depth := depth + 1) > MAX_DEPTH:
            raise _Refused(_TOO_DEEP)
    fields = value if isinstance(value, dict) else {}
    for name, content in fields.items():
        if number := _not_finite(content):
            raise _Refused(f"{name} has {number.literal}, {number.reason}")
    return fields


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


_TOO_DEEP = f"lists and objects are nested more than {MAX_DEPTH} deep"


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _Refused(f"{json.dumps(twice)} is there twice; leave one out")
    return values


@dataclass(frozen=True)
class _NotFinite:
    """A number of a line that is no finite one, until the name of its field is known."""

    literal: str
    reason: str = "which is no JSON; numbers are finite"


def _not_finite(value: Any) -> _NotFinite | None:
    if isinstance(value, _NotFinite):
        return value
    return next(filter(None, map(_not_finite, _children(value))), None)


def _number_or_not(literal: str) -> float | _NotFinite:
    value = float(literal)
    too_large = "which is beyond the largest number, 1.8e308"
    return _NotFinite(literal, too_large) if math.isinf(value) else value


# --- fields --------------------------------------------------------------------------------------


def _refuse(name: str, value: Any, expected: str) -> NoReturn:
    shown = json.dumps(value)
    raise _Refused(f"{name} is {shown if len(shown) <= 60 else shown[:59] + '…'}; {expected}")


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        _refuse(name, value, "expected a number")
    try:
        return float(value)
    except OverflowError:
        _refuse(name, value, "it is beyond the largest number, 1.8e308")


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        _refuse(name, value, "expected a whole number")
    if not -MAX_INT <= value <= MAX_INT:
        _refuse(name, value, f"the largest is {MAX_INT}")
    return value


def _switch(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        _refuse(name, value, "expected true or false")
    return value


def _biases(name: str, value: Any) -> dict[int, float]:
    if not isinstance(value, dict):
        _refuse(name, value, 'expected an object, such as {"17": -2.5}')
    biases = {}
    for token, bias in value.items():
        if not re.fullmatch("[0-9]{1,10}", token) or int(token) > MAX_INT:
            _refuse(name, {token: bias}, f"expected token ids, 0 to {MAX_INT}, as names")
        is_ban = bias in ("-inf", "-Infinity")
        biases[int(token)] = -math.inf if is_ban else _number(f"{name} of {token}", bias)
    if len(biases) < len(value):
        _refuse(name, value, "one token is there twice")
    return biases


def _ids(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list):
        _refuse(name, value, "expected a list of whole numbers")
    for i in value:
        if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i <= MAX_INT:
            _refuse(name, value, f"{json.dumps(i)[:60]} is no id; expected 0 to {MAX_INT}")
    return tuple(value)


def _prompt(name: str, value: Any) -> str | tuple[int, ...]:
    if isinstance(value, list):
        return _ids(name, value)
    if not isinstance(value, str):
        _refuse(name, value, "expected text, or a list of token ids")
    return value


def _messages(name: str, value: Any) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(value, list) or not value or not all(isinstance(m, dict) for m in value):
        expected = 'expected a list of objects such as {"role": "user", "content": "Hello"}'
        _refuse(name, value, expected)
    return tuple(value)


def _id(name: str, value: Any) -> str | int:
    if isinstance(value, bool) or not isinstance(value, str | int):
        _refuse(name, value, "expected text or a whole number")
    return value


def _seed(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not SEEDS.allows(value):
        _refuse(name, value, f"expected a whole number, {SEEDS.words}")
    return value


def _limit(name: str, value: Any) -> int:
    if wrong := at_least(1).refusal(_whole(name, value)):
        raise _Refused(f"{name} {wrong}")
    return value


def _texts(name: str, value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(t, str) and t for t in texts):
        _refuse(name, value, "expected some text, or a list of texts")
    return tuple(texts)


_READERS = {float: _number, int: _whole, bool: _switch, Mapping[int, float]: _biases}
_SAMPLING = {name: _READERS[hint] for name, hint in typing.get_type_hints(Sampling).items()}

FIELDS: dict[str, Callable[[str, Any], Any]] = {
    "prompt": _prompt,
    "prompt_ids": _ids,
    "messages": _messages,
    "id": _id,
    "seed": _seed,
    "max_new_tokens": _limit,
    "stop": _texts,
    **_SAMPLING,
}
"""The known fields of a line, and the functions that read them: name and JSON value -> value."""

_RUN_FLAGS = {
    f.name: f.metadata["flag"] or as_flag(f.name)
    for f in dataclasses.fields(DecodingOptions)
    if f.name not in FIELDS
}
_ELSEWHERE = {
    "max_completion_tokens": "max_new_tokens",
    "max_length": "max_new_tokens",
    "stop_sequences": "stop",
    "stop_texts": "stop",
}
"""Other programs' names of our fields; `max_tokens` and the like are close enough without."""


def _refuse_misspelt(name: str) -> None:
    """Refuse a name that is nearly a known one: a misspelt temperature would silently be greedy."""
    plain = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
    if plain in _RUN_FLAGS:
        raise _Refused(
            f"{json.dumps(name)} is the same for all lines; give it as {_RUN_FLAGS[plain]}"
        )
    known = [ours for ours in FIELDS if ours not in (*KINDS, "id")]
    near = difflib.get_close_matches(_ELSEWHERE.get(plain, plain), known, n=1, cutoff=0.8)
    if near:
        raise _Refused(
            f'{json.dumps(name)} is not known; is it "{near[0]}"? Under a name that is less like '
            "it, it is passed on to the line's rows"
        )
