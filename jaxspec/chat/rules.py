"""Grammars of a chat's replies, in the Lark dialect of llguidance: reasoning, then what is asked for.

A model may think before it answers, whatever the answer has to be. So a rule for an answer stands in a frame, where
`@body` is the answer. Calls are in the notation of the model's family.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jaxspec.chat.parser import GEMMA4, Format, Role, format_of
from jaxspec.tokenizer import Tokenizer

_THINKING = r"""
text: /(?s:.+)/?
gap: /\n{1,2}/?
"""
_GEMMA_VALUES = r"""
fields: pair ("," pair)*
pair: KEY ":" value
KEY: /[^\s:,{}\[\]"<]+/
value: string | NUMBER | "true" | "false" | "null" | "{" fields? "}" | "[" (value ("," value)*)? "]"
string: QUOTE text QUOTE
NUMBER: /-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/
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
    tokenizer: Tokenizer, prompt: Sequence[int], tools: Sequence[Mapping[str, Any]], *, one: bool
) -> tuple[Literal["lark", "json_schema"], Any, str | None] | None:
    """Return the rule of a reply that calls tools; None where the tokenizer has no markers.

    Args:
      tools: those that may be called.
      one: whether one call is all.

    Returns:
      The kind of a grammar, its source and its frame, as `GrammarTokens.compile` takes them.
    """
    known = format_of(tokenizer)
    if known is None:
        return None
    call, end = (_token(tokenizer, known, role) for role in ("call", "end call"))
    functions = [tool["function"] for tool in tools]
    more = "" if one else "+"
    if known is GEMMA4:
        names = " | ".join(json.dumps(f["name"]) for f in functions)
        quote = _token(tokenizer, known, "quote")
        rule = frame(tokenizer, prompt, f"call{more}")
        values = _GEMMA_VALUES.replace("QUOTE", quote)
        source = f'{rule}call: {call} "call:" ({names}) "{{" fields? "}}" {end}\n{values}'
        return "lark", source, None
    schema = {"anyOf": [_hermes(function) for function in functions]}
    body = f'({call} "\\n" @body "\\n" {end} gap){more}'
    return "json_schema", schema, frame(tokenizer, prompt, body)


def _hermes(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a call of one tool."""
    arguments = function.get("parameters") or {"type": "object"}
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _token(tokenizer: Tokenizer, known: Format, role: Any) -> str:
    return f"<[{tokenizer.backend.token_to_id(known.markers[role])}]>"


def _last_marker(tokenizer: Tokenizer, known: Format, prompt: Sequence[int]) -> Role | None:
    """Return the last marker of reasoning in the last turn of a prompt."""
    roles: dict[int | None, Role | None] = {tokenizer.backend.token_to_id(known.turn): None}
    for role in ("think", "end think"):
        roles[tokenizer.backend.token_to_id(known.markers[role])] = role
    return next((roles[i] for i in reversed(prompt) if i in roles), None)
