"""Where prompts come from, and how each becomes token ids.

`read_prompts` gathers them without any model, so that mistakes show before one is loaded; `encode` then
needs the checkpoint's tokenizer, unless the prompt is ids already.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxspec.tokenizer import Tokenizer, refuse_empty

_KINDS = ("prompt", "prompt_ids", "messages")


class PromptError(ValueError):
    """Prompts that cannot be read: says where, what was expected and the way out."""


@dataclass(frozen=True)
class Prompt:
    """One prompt as it was given: exactly one of `text`, `ids` and `messages`."""

    origin: str  # where it came from, for messages
    text: str | None = None
    ids: tuple[int, ...] | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None


def read_prompts(
    arguments: Sequence[str] = (),
    id_lists: Sequence[str] = (),
    file: Path | None = None,
    stdin: Callable[[], bytes] | None = None,
    *,
    chat: bool = False,
) -> list[Prompt]:
    """Gather prompts: arguments, then lists of ids, then a file; standard input when there are none of these.

    Args:
      id_lists: "5,6,7" each.
      file: JSON lines, see `read_jsonl`.
      stdin: reads standard input to its end, as one prompt; None when it is a terminal.
      chat: texts are a user's turn; only then are messages allowed, and ids are not.

    Raises:
      PromptError: there is nothing to read, or something cannot be read.
    """
    prompts = [Prompt(f"argument {i}", text=text) for i, text in enumerate(arguments, 1)]
    prompts += [parse_ids(f"--prompt-ids {ids[:40]}", ids) for ids in id_lists]
    if file is not None:
        prompts += read_jsonl(file)
    if not prompts and stdin is not None:
        try:
            text = stdin().decode("utf-8")
            prompts = [Prompt("standard input", text=text)] if text else []
        except UnicodeDecodeError as error:
            raise PromptError(f"standard input is not UTF-8 text: {error}") from None
    if not prompts:
        raise PromptError(
            "there is no prompt; give one as an argument, on standard input, with --prompts FILE.jsonl or "
            "with --prompt-ids 5,6,7"
        )
    for prompt in prompts:
        if chat and prompt.ids is not None:
            raise PromptError(f"{prompt.origin}: token ids take no chat template; leave out --chat")
        if not chat and prompt.messages is not None:
            raise PromptError(f"{prompt.origin}: messages need the chat template; add --chat")
    return prompts


def parse_ids(origin: str, ids: str) -> Prompt:
    """Parse a comma-separated list of token ids; an empty list is an empty prompt, reported later."""
    try:
        return Prompt(origin, ids=tuple(int(i) for i in ids.split(",")) if ids.strip() else ())
    except ValueError:
        raise PromptError(f"{origin}: expected whole numbers with commas, such as 5,6,7") from None


def read_jsonl(path: Path) -> list[Prompt]:
    """Read one prompt a line: {"prompt": text}, {"prompt_ids": [...]} or {"messages": [...]}.

    Raises:
      PromptError: naming the file and the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise PromptError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise PromptError(f"{path} is not UTF-8 text: {error}") from None
    prompts = [_parse_line(f"{path}:{n}", line) for n, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise PromptError(f'{path} has no prompts; expected lines such as {{"prompt": "def f("}}')
    return prompts


def encode(
    prompt: Prompt,
    tokenizer: Tokenizer | None,
    *,
    chat: bool = False,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> tuple[str | None, tuple[int, ...]]:
    """Return a prompt's text, as the model reads it, and its ids. Ids without a tokenizer have no text.

    Raises:
      TokenizerError: the text is empty or cannot be encoded.
    """
    if prompt.ids is not None:
        return (None if tokenizer is None else tokenizer.decode(prompt.ids)), prompt.ids
    assert tokenizer is not None, "text needs a tokenizer"
    if prompt.text is not None:
        refuse_empty("the prompt", prompt.text)
    if chat:
        messages = prompt.messages or ({"role": "user", "content": prompt.text},)
        text = tokenizer.render_chat(messages, **(chat_template_kwargs or {}))
        return text, tokenizer.encode_rendered(text)
    assert prompt.text is not None
    return prompt.text, tokenizer.encode(prompt.text)


def _parse_line(origin: str, line: str) -> Prompt:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise PromptError(f"{origin}: not JSON: {error}") from None
    except RecursionError:
        raise PromptError(f"{origin}: not JSON that can be read: nested too deeply") from None
    given = [kind for kind in _KINDS if kind in value] if isinstance(value, dict) else []
    if len(given) != 1:
        raise PromptError(
            f"{origin}: expected an object with one of {', '.join(_KINDS)}, such as "
            f'{{"prompt": "def f("}}; this one has {" and ".join(given) or "none of them"}'
        )
    content = value[given[0]]
    if given[0] == "prompt" and isinstance(content, str):
        return Prompt(origin, text=content)
    if given[0] == "prompt_ids" and _is_list_of(content, int):
        return Prompt(origin, ids=tuple(content))
    if given[0] == "messages" and _is_list_of(content, dict) and content:
        return Prompt(origin, messages=tuple(content))
    expected = {
        "prompt": "a string",
        "prompt_ids": "a list of whole numbers",
        "messages": 'a list of objects such as {"role": "user", "content": "Hello"}',
    }
    raise PromptError(f"{origin}: {given[0]} must be {expected[given[0]]}")


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, kind) and not isinstance(item, bool) for item in value
    )
