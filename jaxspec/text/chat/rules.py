"""Grammars of a chat's replies, in the Lark dialect of llguidance: reasoning, then the answer.

A model may think before it answers. A rule for an answer therefore stands in a frame, where `@body`
is the answer. Calls are in the notation of the model's family.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jaxspec.text.chat.gemma_calls import gemma_calls
from jaxspec.text.chat.parser import GEMMA4, Format, Role, format_of
from jaxspec.text.grammars.json_regex import pattern_parts
from jaxspec.text.grammars.schemas import Unsupported, changed
from jaxspec.tokenizer import Tokenizer

_THINKING = r"""
text: /(?s:.+)/?
gap: /\n{1,2}/?
"""


def frame(tokenizer: Tokenizer, prompt: Sequence[int], body: str = "@body") -> str | None:
    """Return the rule of a reply with optional reasoning, then `body`; None without markers.

    Args:
      prompt: the prompt of the reply. If it ends inside reasoning, the reply must end that first.
        If its reasoning is over, as where a template turns thinking off, the reply has none.
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
    """Return the rule of a reply that calls tools; None if the tokenizer has no markers.

    The arguments of a call follow the tool's schema.

    Args:
      tools: the tools that may be called.
      one: whether the reply has at most one call.
      required: whether the reply must call. If not, it may be text, and calls may follow.

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
    # Calls that are not required may be missing, and text may come before them.
    before, more = ("", "" if one else "+") if required else ("text ", "*")
    if known is GEMMA4:
        rule = frame(tokenizer, prompt, f"{before}call{more}")
        quote = _token(tokenizer, known, "quote")
        return "lark", f"{rule}{gemma_calls(functions, call, end, quote)}", None
    schema = {"anyOf": [_hermes(function, f"#/anyOf/{i}") for i, function in enumerate(functions)]}
    body = f'{before}({call} "\\n" @body "\\n" {end} gap){more}'
    return "json_schema", schema, frame(tokenizer, prompt, body)


def _hermes(function: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return the schema of a call of one tool, at `path` of the whole schema."""
    arguments = function.get("parameters") or {"type": "object"}
    strict = function.get("strict") is True
    arguments = _moved(arguments, f"{path}/properties/arguments", strict=strict)
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _moved(schema: Any, path: str, *, strict: bool) -> Any:
    """Return a schema whose references to itself are valid at `path` of a larger schema.

    Args:
      strict: whether to keep patterns that cannot be followed, so that llguidance refuses them.
    """

    def change(part: dict[str, Any]) -> dict[str, Any]:
        if "pattern" in part and not strict and not _can_be_followed(part["pattern"]):
            del part["pattern"]
        if isinstance(to := part.get("$ref"), str) and to.startswith("#"):
            part["$ref"] = path + to[1:]
        return part

    return changed(schema, change)


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
