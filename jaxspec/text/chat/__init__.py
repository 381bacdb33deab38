"""Chat: conversations to prompts, and the tokens of a reply to text, reasoning and tool calls.

Nothing here imports JAX. Read `parser`, then `template`.
"""

from __future__ import annotations

from jaxspec.text.chat.events import (
    Event,
    Reasoning,
    Text,
    ToolCallArguments,
    ToolCallBroken,
    ToolCallEnd,
    ToolCallStart,
    merged,
    message_of,
)
from jaxspec.text.chat.parser import Format, Parser, format_of, parser_for
from jaxspec.text.chat.template import render
from jaxspec.text.chat.tools import FirstCall, StopText, ToolChoice, choose, force

__all__ = [
    "Event",
    "FirstCall",
    "Format",
    "Parser",
    "Reasoning",
    "StopText",
    "Text",
    "ToolCallArguments",
    "ToolCallBroken",
    "ToolCallEnd",
    "ToolCallStart",
    "ToolChoice",
    "choose",
    "force",
    "format_of",
    "merged",
    "message_of",
    "parser_for",
    "render",
]
