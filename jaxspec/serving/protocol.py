"""Bodies of requests, as pydantic models. Unknown fields are ignored."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from jaxspec.serving.errors import ApiError
from jaxspec.text.strict_json import NotFinite, strict_json


class ApiRequest(BaseModel):
    """Base of all requests. Null and a missing field mean the same."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)

    model: str | None = None


class StreamOptions(BaseModel):
    """Contents of a stream beside the text."""

    model_config = ConfigDict(extra="ignore", strict=True)

    include_usage: bool | None = None


class GenerationRequest(ApiRequest):
    """Fields that all generating routes have in common."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = None
    return_token_ids: bool | None = None
    return_steps: bool | None = None
    prompt_logprobs: int | None = None
    # Read by `structured_outputs`.
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    regex: str | None = None
    lark: str | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    # Read by `NOT_SUPPORTED`.
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    use_beam_search: bool | None = None
    truncate_prompt_tokens: Any = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    logits_processors: Any = None


class CompletionRequest(GenerationRequest):
    """A request to /v1/completions."""

    prompt: str | list[int] | list[str] | list[list[int]] | None = None
    max_tokens: int | None = None
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None
    suffix: str | None = None
    prompt_embeds: Any = None


class ChatCompletionRequest(GenerationRequest):
    """A request to /v1/chat/completions. `jaxspec.text.chat` checks messages and tools."""

    messages: list[dict[str, Any]]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    echo: bool | None = None
    continue_final_message: bool | None = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    web_search_options: Any = None
    chat_template: Any = None
    documents: Any = None


class ResponsesRequest(GenerationRequest):
    """A request to /v1/responses."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    previous_response_id: str | None = None
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None
    chat_template_kwargs: dict[str, Any] | None = None


NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "min_tokens": (0,),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "use_beam_search": (False,),
    "truncate_prompt_tokens": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "logits_processors": ([],),
    "suffix": ("",),
    "prompt_embeds": (),
    "continue_final_message": (False,),
    "functions": ([],),
    "function_call": (),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "chat_template": (),
    "documents": ([],),
}
"""Fields that must not be ignored, and their allowed values beside null."""


class TokenizeRequest(ApiRequest):
    """A request to /tokenize, with a text or a conversation."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[Any] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(ApiRequest):
    """A request to /detokenize."""

    tokens: list[int]


RequestT = TypeVar("RequestT", bound=ApiRequest)


def parse_body(model: type[RequestT], body: bytes) -> RequestT:
    """Parse a request's JSON body.

    Raises:
      ApiError: the body is no JSON, or a value is of a wrong type.
    """
    try:
        parsed = model.model_validate_json(body)
        strict_json(body)  # pydantic makes infinity of 1e400, and takes NaN
        return parsed
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False, include_input=False)
        raise _validation_error(errors) from None
    except NotFinite as error:
        name = _not_finite(json.loads(body))
        raise ApiError(400, f"{name} has {error}", param=name, code="invalid_json") from None
    except (ValueError, RecursionError):
        raise ApiError(400, "the body is no JSON object in UTF-8", code="invalid_json") from None


def _not_finite(fields: dict[str, Any]) -> str | None:
    """Return the name of the first field that has a number which is not finite."""
    for name, value in fields.items():
        try:
            json.dumps(value, allow_nan=False)
        except ValueError:
            return name
    return None


def _validation_error(errors: list[Any]) -> ApiError:
    first = errors[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is no JSON: {first['msg']}", code="invalid_json")
    path = first["loc"]
    if not path:
        return ApiError(400, "the body is no JSON object", code="invalid_json")
    param = str(path[0])
    # A field with several types has an error for each of them.
    messages = list(dict.fromkeys(e["msg"] for e in errors if e["loc"][:1] == path[:1]))
    return ApiError(400, f"{param}: {'; or '.join(messages[:3])}", param=param)
