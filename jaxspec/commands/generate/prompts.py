"""Where prompts come from, and how each becomes token ids.

`read_prompts` gathers them without any model, so that mistakes show before one is loaded; `encode` then
needs the checkpoint's tokenizer, unless the prompt is ids already.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxspec.commands.generate.jsonl import Prompt, PromptError, read_jsonl
from jaxspec.tokenizer import Tokenizer, refuse_empty


def read_prompts(
    arguments: Sequence[str] = (),
    id_lists: Sequence[str] = (),
    file: Path | None = None,
    stdin: Callable[[], bytes] | None = None,
    *,
    chat: bool = False,
    writes_json: bool = True,
) -> list[Prompt]:
    """Gather prompts: arguments, then lists of ids, then a file; standard input when there are none of these.

    Args:
      id_lists: "5,6,7" each.
      file: JSON lines, see `jsonl.FIELDS`.
      stdin: reads standard input to its end, as one prompt; None when it is a terminal.
      chat: texts are a user's turn; only then are messages allowed, and ids are not.
      writes_json: log-probabilities have a place to go to.

    Raises:
      PromptError: there is nothing to read, or something cannot be read.
    """
    prompts = [Prompt(f"argument {i}", text=text) for i, text in enumerate(arguments, 1)]
    prompts += [parse_ids(f"--prompt-ids {ids[:40]}", ids) for ids in id_lists]
    if file is not None:
        prompts += read_jsonl(file)
    if not prompts and stdin is not None:
        try:
            text = stdin().decode("utf-8-sig")
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
        asked = [n for n in ("logprobs", "top_logprobs") if prompt.sampling.get(n)]
        if asked and not writes_json:
            raise PromptError(
                f"{prompt.origin}: {asked[0]} needs --json, which they are written with"
            )
    return prompts


def parse_ids(origin: str, ids: str) -> Prompt:
    """Parse a comma-separated list of token ids; an empty list is an empty prompt, reported later."""
    try:
        return Prompt(origin, ids=tuple(int(i) for i in ids.split(",")) if ids.strip() else ())
    except ValueError:
        raise PromptError(f"{origin}: expected whole numbers with commas, such as 5,6,7") from None


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
