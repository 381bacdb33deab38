"""The tools of a request: those that the model may call, and those that it must call.

`choose` reads `tools` and `tool_choice`. `force` makes the model begin with a call, and `FirstCall`
ends a reply behind one, as `StopText` does at a stop text. They need no grammar. A choice that needs
one is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxspec.options import FieldError, shown
from jaxspec.text.chat.calls import NAME
from jaxspec.text.chat.events import Event, ToolCallEnd
from jaxspec.text.chat.parser import Parser, format_of, parser_for
from jaxspec.tokenizer import Tokenizer


@dataclass(frozen=True)
class ToolChoice:
    """The result of `choose`.

    Attributes:
      tools: the declarations for the chat template; empty if the model must not know any.
      calls: whether the parser looks for calls.
      forced: the name of the tool that the reply must begin with a call of, see `force`.
      required: the names of the tools of which the reply must call one, see `rules.calls`.
      parallel: whether a reply may have several calls. If not, `FirstCall` ends it.
    """

    tools: tuple[dict[str, Any], ...] = ()
    calls: bool = False
    forced: str | None = None
    required: tuple[str, ...] = ()
    parallel: bool = True

    @property
    def callable(self) -> list[dict[str, Any]]:
        """The declarations of the tools that are required."""
        return [tool for tool in self.tools if tool["function"]["name"] in self.required]


def choose(tools: Any, tool_choice: Any = None, *, grammars: bool = False) -> ToolChoice:
    """Read the fields `tools` and `tool_choice` of a request, as they came.

    | `tool_choice` | effect |
    |---|---|
    | "auto" or absent | the model may call tools |
    | "none" | the prompt has no tools, and calls are text |
    | a named tool; "required" with one declared tool | the reply begins with a call of it |
    | "required" with several tools | the reply calls one or more; refused without grammars |

    With grammars, `rules.calls` makes the arguments of such calls follow the tools' schemas, and
    those of `strict` tools always.

    Args:
      tools: a list of declarations, {"type": "function", "function": {"name": ..., ...}}
        each. None: there are no tools.
      tool_choice: one of the words, or {"type": "function", "function": {"name": ...}}.
      grammars: whether the reply can have one.

    Raises:
      FieldError: a field is not of this form, or the choice cannot be kept.
    """
    declared = _declared(tools)
    names = [tool["function"]["name"] for tool in declared]
    if tool_choice == "none":
        return ToolChoice()
    if tool_choice in (None, "auto"):
        return ToolChoice(declared, calls=bool(declared))
    if not declared:
        raise FieldError("tool_choice", f"is {shown(tool_choice)}, and no tools are declared")
    if tool_choice == "required":
        if len(names) > 1 and grammars:
            return ToolChoice(declared, calls=True, required=tuple(names))
        if len(names) > 1:
            raise FieldError(
                "tool_choice",
                '"required" is not supported where several tools are declared '
                f"({', '.join(names)}): it needs a grammar over their calls; name one of them, "
                'or use "auto"',
            )
        return ToolChoice(declared, calls=True, forced=names[0], required=tuple(names))
    name = _named(tool_choice)
    if name not in names:
        raise FieldError(
            "tool_choice", f"names {shown(name)}; declared tools are {', '.join(names)}"
        )
    return ToolChoice(declared, calls=True, forced=name, required=(name,))


def force(tokenizer: Tokenizer, prompt: Sequence[int], name: str) -> list[int]:
    """Return a prompt that continues with the beginning of a call of a tool.

    Pass the result to the engine and to `parser_for`. The parser then reports the start of the
    call, with this name, and reads its arguments. A prompt that lets the model think first no
    longer does. The arguments are the model's own, and may not fit the tool's schema.

    Raises:
      FieldError: the tokenizer has no markers for tool calls.
    """
    known = format_of(tokenizer)
    if known is None:
        raise FieldError(
            "tool_choice",
            f"names {shown(name)}, and this model's tokenizer has no markers of calls",
        )
    ids = list(prompt)
    think, end = (tokenizer.backend.token_to_id(known.markers[r]) for r in ("think", "end think"))
    last = next((i for i in reversed(ids) if i in (think, end)), None)
    turn = tokenizer.backend.token_to_id(known.turn)
    after_turn = ids[len(ids) - ids[::-1].index(turn) :] if turn in ids else ids
    closing = known.markers["end think"] if last == think and think in after_turn else ""
    text = f"{closing}{known.markers['call']}{known.call_prefix}{name}{known.named_prefix}"
    return [*ids, *tokenizer.encode_rendered(text)]


class _End:
    """The end of one reply, found in its events. It is the `Request.stop_at` of one request."""

    def __init__(self, begin: Callable[[], Parser]):
        self._begin = begin
        self._parser, self._seen = begin(), 0

    def __call__(self, token_ids: Sequence[int]) -> int | None:
        """Return the number of tokens to keep of the reply so far; None: it goes on."""
        if len(token_ids) < self._seen:  # the engine has restarted the request
            self._parser, self._seen = self._begin(), 0
        for token_id in token_ids[self._seen :]:
            self._seen += 1
            if self._is_over(self._parser.push((token_id,))):
                return self._seen
        return None

    def _is_over(self, events: Sequence[Event]) -> bool:
        raise NotImplementedError


class FirstCall(_End):
    """Ends a reply behind its first complete call."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]):
        super().__init__(lambda: parser_for(tokenizer, prompt))

    def _is_over(self, events: Sequence[Event]) -> bool:
        return any(isinstance(event, ToolCallEnd) for event in events)


class StopText(_End):
    """Ends a reply where its answer has a stop text. Reasoning and tool calls may have it.

    Args:
      calls: as for `parser_for`.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], stop_texts: Sequence[str], *, calls: bool
    ):
        super().__init__(lambda: parser_for(tokenizer, prompt, calls=calls, stop_texts=stop_texts))

    def _is_over(self, events: Sequence[Event]) -> bool:
        return self._parser.stop_text is not None


def _declared(tools: Any) -> tuple[dict[str, Any], ...]:
    if tools is None:
        return ()
    if isinstance(tools, str | Mapping) or not isinstance(tools, Sequence):
        raise FieldError("tools", f"is {shown(tools)}; expected a list of declarations")
    return tuple(_declaration(f"tools[{i}]", tool) for i, tool in enumerate(tools))


def _declaration(field: str, tool: Any) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        raise FieldError(field, f'is {shown(tool)}; expected {{"type": "function", ...}}')
    # /v1/responses has the members of "function" beside "type".
    function = tool.get("function", {k: v for k, v in tool.items() if k != "type"})
    if not isinstance(function, Mapping):
        raise FieldError(f"{field}.function", f"is {shown(function)}; expected an object")
    name = function.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise FieldError(
            f"{field}.function.name",
            f"is {shown(name)}; expected letters, digits and any of _ - . / :",
        )
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise FieldError(f"{field}.function.parameters", "is no object; expected a JSON schema")
    # Templates write the description without asking whether there is one.
    return {
        "type": "function",
        "function": {**function, "description": function.get("description") or ""},
    }


def _named(tool_choice: Any) -> str:
    if isinstance(tool_choice, Mapping) and tool_choice.get("type") == "function":
        function = tool_choice.get("function", tool_choice)
        if isinstance(function, Mapping) and isinstance(name := function.get("name"), str):
            return name
    raise FieldError(
        "tool_choice",
        f'is {shown(tool_choice)}; expected "auto", "none", "required" or '
        '{"type": "function", "function": {"name": ...}}',
    )
