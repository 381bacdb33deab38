"""Grammars of a chat's replies, in the Lark dialect of llguidance: reasoning, then what is asked for.

A model may think before it answers, whatever the answer has to be. So a rule for an answer stands in a frame, where
`@body` is the answer. Calls are in the notation of the model's family.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jaxspec.text.chat.gemma_calls import gemma_calls
from jaxspec.text.chat.parser import GEMMA4, Format, Role, format_of
from jaxspec.text.grammars.json_regex import pattern_parts
from jaxspec.text.grammars.schemas import Unsupported
from jaxspec.tokenizer import Tokenizer

_THINKING = r"""
text: /(?s:.+)/?
gap: /\n{1,2}/?
"""


def frame(tokenizer: Tokenizer, prompt: Sequence[int], body: str = "@body") -> str | None:
    """Return the rule of a reply that may think, and then is `body`; None where the tokenizer has no markers.

    Args:
      prompt: what the reply continues. If it ends inside reasoning, the reply has to end that first. If its reasoning
        is over, as where a template turns thinking off, there is no more.
    """
    known = format_of(tokenizer)
    if known is None:
        return None
    think, end = (_token(tokenizer, known, role) for role in ("think", "end think"))
    last = _last_marker(tokenizer, known, prompt)
    if last == "think":
        start = f"start: text {end} gap {body}"
    elif last == "end think":
        start = f"start: {body}"
    else:
        start = f"start: (gap {think} text {end} gap)? {body}"
    return start + _THINKING


def calls(
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    tools: Sequence[Mapping[str, Any]],
    *,
    one: bool = False,
    required: bool = True,
) -> tuple[Literal["lark", "json_schema"], Any, str | None] | None:
    """Return the rule of a reply that calls tools; None where the tokenizer has no markers.

    The arguments of a call are those of the tool's schema.

    Args:
      tools: those that may be called.
      one: whether one call is all.
      required: whether the reply has to call. If not, it may be text, and calls may follow.

    Returns:
      The kind of a grammar, its source and its frame, as `GrammarTokens.compile` takes them.

    Raises:
      FieldError: a tool is strict, and its schema cannot be followed.
    """
    known = format_of(tokenizer)
    if known is None:
        return None
    call, end = (_token(tokenizer, known, role) for role in ("call", "end call"))
    functions = [tool["function"] for tool in tools]
    # Text may come before calls that are no duty, and these may be missing.
    before, more = ("", "" if one else "+") if required else ("text ", "*")
    if known is GEMMA4:
        rule = frame(tokenizer, prompt, f"{before}call{more}")
        quote = _token(tokenizer, known, "quote")
        return "lark", f"{rule}{gemma_calls(functions, call, end, quote)}", None
    schema = {"anyOf": [_hermes(function, f"#/anyOf/{i}") for i, function in enumerate(functions)]}
    body = f'{before}({call} "\\n" @body "\\n" {end} gap){more}'
    return "json_schema", schema, frame(tokenizer, prompt, body)


_BY_NAME = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
"""Keywords whose value has schemas by names of any kind."""


def _hermes(function: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return the schema of a call of one tool, which stands at a place of the whole schema."""
    arguments = function.get("parameters") or {"type": "object"}
    strict = function.get("strict") is True
    arguments = _moved(arguments, f"{place}/properties/arguments", strict=strict)
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _moved(schema: Any, place: str, *, strict: bool) -> Any:
    """Return a schema whose references within itself are those at another place.

    Args:
      strict: whether it keeps patterns that cannot be followed, for which llguidance will refuse it.
    """
    move = functools.partial(_moved, place=place, strict=strict)
    if isinstance(schema, list):
        return [move(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {}
    for name, value in schema.items():
        if name in _BY_NAME and isinstance(value, Mapping):  # the names are no keywords
            moved[name] = {n: move(part) for n, part in value.items()}
        elif name != "pattern" or strict or _can_be_followed(value):
            moved[name] = value if name in ("const", "enum") else move(value)
    if isinstance(to := schema.get("$ref"), str) and to.startswith("#"):
        moved["$ref"] = place + to[1:]
    return moved


def _can_be_followed(pattern: Any) -> bool:
    try:
        pattern_parts(pattern)
    except Unsupported:
        return False
    return True


def _token(tokenizer: Tokenizer, known: Format, role: Any) -> str:
    return f"<[{tokenizer.backend.token_to_id(known.markers[role])}]>"


def _last_marker(tokenizer: Tokenizer, known: Format, prompt: Sequence[int]) -> Role | None:
    """Return the last marker of reasoning in the last turn of a prompt."""
    roles: dict[int | None, Role | None] = {tokenizer.backend.token_to_id(known.turn): None}
    for role in ("think", "end think"):
        roles[tokenizer.backend.token_to_id(known.markers[role])] = role
    return next((roles[i] for i in reversed(prompt) if i in roles), None)
