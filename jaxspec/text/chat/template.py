"""Turn a conversation in the OpenAI protocol's form into a prompt, by the chat template.

Templates accept less than the protocol allows, and fail late or silently. Messages are therefore
brought to one form first: the content is a string, arguments of tool calls are values instead of
JSON text, and `developer` is `system`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jaxspec.options import FieldError, shown
from jaxspec.tokenizer import Tokenizer, TokenizerError

_ROLES = ("system", "developer", "user", "assistant", "tool")
_TEXT_PARTS = ("text", "input_text", "output_text")
# Arguments of the rendering function itself. A request that could set them could run a template of
# its own.
_RESERVED = {
    *(
        "self",
        "conversation",
        "messages",
        "tools",
        "documents",
        "chat_template",
        "add_generation_prompt",
    ),
    *(
        "continue_final_message",
        "tokenize",
        "tokenizer_kwargs",
        "padding",
        "truncation",
        "max_length",
    ),
    *("return_tensors", "return_dict", "return_assistant_tokens_mask"),
}


def render(
    tokenizer: Tokenizer,
    messages: Any,
    tools: Sequence[Mapping[str, Any]] | None = None,
    /,  # a request's arguments of the template may have any name
    *,
    add_generation_prompt: bool = True,
    **chat_template_kwargs: Any,
) -> list[int]:
    """Return the token ids of a conversation.

    Args:
      messages: the list of a request to /v1/chat/completions, as it came. Content is text, or a
        list of text parts, which are joined by newlines. Earlier replies may have `reasoning`.
      tools: `choose(...).tools`.
      add_generation_prompt: whether the model's turn begins at the end.
      chat_template_kwargs: arguments of the template, such as `enable_thinking=True`.

    Raises:
      FieldError: a message cannot be used. The field says which, such as `messages[2].content[0]`.
      TokenizerError: the template refuses these messages.
    """
    if tokenizer.chat_template is None:
        raise FieldError(
            "messages",
            "cannot be used: the checkpoint has no chat template; use an instruction-tuned "
            "checkpoint, or complete a text instead",
        )
    if reserved := sorted(_RESERVED & set(chat_template_kwargs)):
        raise FieldError(
            "chat_template_kwargs", f"has {', '.join(reserved)}, which a template does not take"
        )
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise FieldError("messages", f"is {shown(messages)}; expected a list of messages")
    normal = [_message(f"messages[{i}]", message) for i, message in enumerate(messages)]
    try:
        text = tokenizer.render_chat(
            normal,
            tools=[dict(tool) for tool in tools] if tools else None,
            add_generation_prompt=add_generation_prompt,
            **chat_template_kwargs,
        )
    except TokenizerError:
        raise
    # A template is a program that runs on a client's input. An invalid schema, or values nested so
    # deeply that it recurses too far, can raise anything.
    except Exception as error:
        raise TokenizerError(
            f"the chat template refuses these messages: {type(error).__name__}: {shown(str(error))}"
        ) from None
    return list(tokenizer.encode_rendered(text))


def _message(field: str, message: Any) -> dict[str, Any]:
    """Return a message as templates expect it."""
    if not isinstance(message, Mapping):
        raise FieldError(field, f"is {shown(message)}; expected an object with role and content")
    role = message.get("role")
    if role not in _ROLES:
        raise FieldError(f"{field}.role", f"is {shown(role)}; expected one of {', '.join(_ROLES)}")
    content = message.get("content")
    if content is None and role != "assistant":
        raise FieldError(f"{field}.content", "is missing; expected text")
    # Qwen3's template leaves out messages of unknown roles, and developer is unknown to it.
    out: dict[str, Any] = {
        "role": "system" if role == "developer" else role,
        "content": _text(f"{field}.content", content),
    }
    for name in ("name", "tool_call_id"):
        if message.get(name) is not None:
            out[name] = _string(f"{field}.{name}", message[name])
    if role == "assistant":
        reasoning = message.get("reasoning") or message.get("reasoning_content")
        if reasoning:  # the templates read one or the other
            reasoning = _string(f"{field}.reasoning", reasoning)
            out |= {"reasoning": reasoning, "reasoning_content": reasoning}
        if message.get("tool_calls"):
            out["tool_calls"] = _calls(f"{field}.tool_calls", message["tool_calls"])
    return out


def _text(field: str, content: Any) -> str:
    """Return the text of a message's content."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, Mapping) or not isinstance(content, Sequence):
        raise FieldError(field, f"is {shown(content)}; expected text or a list of text parts")
    return "\n".join(_part(f"{field}[{i}]", part) for i, part in enumerate(content))


def _part(field: str, part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "refusal":
        return _string(f"{field}.refusal", part.get("refusal"))
    if kind in _TEXT_PARTS:
        return _string(f"{field}.text", part.get("text"))
    if kind is None:
        raise FieldError(field, f"is {shown(part)}; expected a part with type and text")
    raise FieldError(f"{field}.type", f"is {shown(kind)}; this server reads text only")


def _calls(field: str, calls: Any) -> list[dict[str, Any]]:
    if isinstance(calls, str | Mapping) or not isinstance(calls, Sequence):
        raise FieldError(field, f"is {shown(calls)}; expected a list of calls")
    return [_call(f"{field}[{i}]", call) for i, call in enumerate(calls)]


def _call(field: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise FieldError(field, f"is {shown(call)}; expected an object with function")
    name = _string(f"{field}.function.name", function.get("name"))
    arguments = _arguments(f"{field}.function.arguments", function.get("arguments"))
    out = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return out if call.get("id") is None else {"id": _string(f"{field}.id", call["id"]), **out}


def _arguments(field: str, arguments: Any) -> dict[str, Any]:
    """Return the arguments of a call as values. The protocol has them as JSON text."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}", parse_constant=_refuse)
        except (ValueError, RecursionError) as error:
            raise FieldError(field, f"is no valid JSON: {error}") from None
    if arguments is None:
        return {}
    if not isinstance(arguments, Mapping):
        raise FieldError(field, f"is {shown(arguments)}; expected the JSON text of an object")
    return dict(arguments)


def _string(field: str, value: Any) -> str:
    if not isinstance(value, str):
        raise FieldError(field, f"is {shown(value)}; expected text")
    return value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number of JSON")
