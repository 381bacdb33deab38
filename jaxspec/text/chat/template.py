"""Turn a conversation in the OpenAI protocol's form into a prompt, by the chat template.

Templates accept less than the protocol allows, and fail late or silently. Messages are therefore
brought to one form first: the content is a string, arguments of tool calls are values instead of
JSON text, `developer` is `system`, and results of tools follow their calls. A result that a template
would leave out is refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxspec.options import FieldError, shown
from jaxspec.text.chat.declarations import for_gemma
from jaxspec.text.chat.parser import GEMMA4, format_of
from jaxspec.text.chat.values import begun_object
from jaxspec.text.strict_json import NotFinite, strict_json
from jaxspec.tokenizer import Tokenizer, TokenizerError

PART = {"type": "image"}
"""An image as chat templates know it."""
IMAGE_KINDS = ("image", "image_url", "input_image")

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
        list of text parts, which are joined by newlines. In a user's message `PART` may
        stand among them, where `images.take_images` left it. Earlier replies may have `reasoning`.
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
    fields = {id(message): f"messages[{i}]" for i, message in enumerate(normal)}
    normal = _paired(normal)
    declared = [dict(tool) for tool in tools or ()]
    if format_of(tokenizer) is GEMMA4:
        declared = [for_gemma(tool) for tool in declared]
    options = {"add_generation_prompt": add_generation_prompt, **chat_template_kwargs}
    try:
        text = tokenizer.render_chat(normal, tools=declared or None, **options)
        _refuse_to_drop(tokenizer, normal, fields, tools=declared or None, **options)
    except (FieldError, TokenizerError):
        raise
    # A template is a program that runs on a client's input. An invalid schema, or values nested so
    # deeply that it recurses too far, can raise anything.
    except Exception as error:
        raise TokenizerError(
            f"the chat template refuses these messages: {type(error).__name__}: {shown(str(error))}"
        ) from None
    return list(tokenizer.encode_rendered(text))


@dataclass
class _Made:
    """A call of the history.

    Attributes:
      id: as the client gave it; None if it gave none. `call` has an id of its own.
      owner: number of the message that makes it.
      cut: text of its arguments, if they are cut.
    """

    call: dict[str, Any]
    id: str | None
    owner: int
    cut: str | None
    is_answered: bool = False


def _paired(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in which the results of tools follow directly behind their calls.

    A call whose arguments are cut becomes text of its message, unless it has a result. Clients may give several
    calls one id. Templates would then show the result of the first for all, so ids are made to differ.
    """
    made: list[_Made] = []
    ids: set[str] = set()
    results: dict[int, list[int]] = {}  # numbers of messages, by the owner of their calls
    for number, message in enumerate(messages):
        for call in message.get("tool_calls", ()):
            id = call.get("id")
            if id is None or id in ids:
                call["id"] = next(n for i in itertools.count() if (n := f"call_{i}") not in ids)
            ids.add(call["id"])
            made.append(_Made(call, id, number, call.pop("cut", None)))
        if message["role"] == "tool" and (answered := _call_of(message, made)) is not None:
            answered.is_answered = True
            message["tool_call_id"] = answered.call["id"]
            message.setdefault("name", answered.call["function"]["name"])
            results.setdefault(answered.owner, []).append(number)
    for one in made:
        if one.cut is not None and not one.is_answered:
            _make_text(messages[one.owner], one.call, one.cut)
    moved = {number for numbers in results.values() for number in numbers}
    order = [n for i in range(len(messages)) if i not in moved for n in (i, *results.get(i, ()))]
    return [messages[number] for number in order]


def _call_of(result: Mapping[str, Any], made: Sequence[_Made]) -> _Made | None:
    """Return the call that a result answers: of its id in the newest message, else the first that waits."""
    if (wanted := result.get("tool_call_id")) is not None:
        same = [one for one in made if one.id == wanted]
        newest = [one for one in same if one.owner == same[-1].owner]
        return next((one for one in newest if not one.is_answered), same[-1] if same else None)
    name = result.get("name")
    for one in made:
        if not one.is_answered and name in (None, one.call["function"]["name"]):
            return one
    return None


def _make_text(message: dict[str, Any], call: Mapping[str, Any], cut: str) -> None:
    """Make a call text of its message. A reply of ours has told the text of it already."""
    message["tool_calls"] = [other for other in message["tool_calls"] if other is not call]
    if not message["tool_calls"]:
        del message["tool_calls"]
    name, content = call["function"]["name"], message["content"]
    if f'"{name}"' not in content and f"call:{name}{{" not in content:
        message["content"] = f"{content}\n{name}{cut}".strip()


def _refuse_to_drop(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    fields: Mapping[int, str],
    **options: Any,
) -> None:
    """Refuse results, and later system messages, that the template leaves out of the prompt.

    Args:
      fields: names of the messages in errors, by `id`.

    Raises:
      FieldError: a message would be nowhere in the prompt.
    """
    probes: dict[int, str] = {}
    probed: list[Mapping[str, Any]] = []
    for number, message in enumerate(messages):
        is_probed = message["role"] == "tool" or (message["role"] == "system" and number > 0)
        if is_probed and message["content"].strip():
            probes[number] = f"the text of message {number} stands here"
            message = {**message, "content": probes[number]}
        probed.append(message)
    text = tokenizer.render_chat(probed, **options) if probes else ""
    for number, probe in probes.items():
        message = messages[number]
        if probe in text:
            continue
        if message["role"] == "system":
            why = "is a system message that the chat template leaves out; put it first"
        else:
            why = (
                f"is the result of {shown(message.get('tool_call_id') or message.get('name'))}, of "
                "which these messages have no call, and the chat template leaves it out; keep a "
                "result and its call together, or leave out both"
            )
        raise FieldError(fields[id(message)], why)


def _message(field: str, message: Any) -> dict[str, Any]:
    """Return a message as templates expect it."""
    if not isinstance(message, Mapping):
        raise FieldError(field, f"is {shown(message)}; expected an object with role and content")
    role = message.get("role")
    if role not in _ROLES:
        raise FieldError(f"{field}.role", f"is {shown(role)}; expected one of {', '.join(_ROLES)}")
    content = message.get("content")
    if content is None and role not in ("assistant", "tool"):
        raise FieldError(f"{field}.content", "is missing; expected text")
    # Qwen3's template leaves out messages of unknown roles, and developer is unknown to it.
    out: dict[str, Any] = {
        "role": "system" if role == "developer" else role,
        "content": _content(f"{field}.content", content, role),
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


def _content(field: str, content: Any, role: str) -> str | list[dict[str, str]]:
    """Return the text of a message's content, or its parts if images are among them."""
    if not isinstance(content, list) or PART not in content:
        return _text(field, content)
    if role != "user":
        raise FieldError(field, "has an image, and the message is not the user's")
    return [
        part if part == PART else {"type": "text", "text": _part(f"{field}[{i}]", part)}
        for i, part in enumerate(content)
    ]


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
    way_out = (
        "image_prompts.take_images takes it out first" if kind in IMAGE_KINDS else "expected text"
    )
    raise FieldError(f"{field}.type", f"is {shown(kind)}; {way_out}")


def _calls(field: str, calls: Any) -> list[dict[str, Any]]:
    if isinstance(calls, str | Mapping) or not isinstance(calls, Sequence):
        raise FieldError(field, f"is {shown(calls)}; expected a list of calls")
    return [_call(f"{field}[{i}]", call) for i, call in enumerate(calls)]


def _call(field: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise FieldError(field, f"is {shown(call)}; expected an object with function")
    name = _string(f"{field}.function.name", function.get("name"))
    arguments, cut = _arguments(f"{field}.function.arguments", function.get("arguments"))
    out = {"type": "function", "function": {"name": name, "arguments": arguments}}
    if call.get("id") is not None:
        out = {"id": _string(f"{field}.id", call["id"]), **out}
    return out if cut is None else {**out, "cut": cut}


def _arguments(field: str, arguments: Any) -> tuple[dict[str, Any], str | None]:
    """Return the arguments of a call as values, and their text if it is cut.

    The protocol has them as JSON text. A stream of a call that breaks ends within that text.
    """
    cut = None
    if isinstance(arguments, str):
        try:
            arguments = strict_json(arguments or "{}")
        except (ValueError, RecursionError) as error:
            begun = None if isinstance(error, NotFinite) else begun_object(arguments)
            if begun is None:
                raise FieldError(field, f"is no valid JSON: {error}") from None
            cut, arguments = arguments, begun
    if arguments is None:
        return {}, None
    if not isinstance(arguments, Mapping):
        raise FieldError(field, f"is {shown(arguments)}; expected the JSON text of an object")
    return dict(arguments), cut


def _string(field: str, value: Any) -> str:
    if not isinstance(value, str):
        raise FieldError(field, f"is {shown(value)}; expected text")
    return value
