"""What requests may say, and of which types. Unknown fields are ignored; what is known must be right."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from jaxspec.serving.errors import ApiError


class ApiRequest(BaseModel):
    """Any request. None is what leaving the field out is."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)

    model: str | None = None


class StreamOptions(BaseModel):
    """What a stream shows beside the text."""

    model_config = ConfigDict(extra="ignore", strict=True)

    include_usage: bool | None = None


class GenerationRequest(ApiRequest):
    """What all requests have in common that want new tokens."""

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
    # What the reply may be: `grammars` reads them.
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
    """A request to /v1/chat/completions. `jaxspec.text.chat` reads messages and tools."""

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
"""Fields that would be served wrongly if they were ignored, with the values beside null that ask for nothing."""


class TokenizeRequest(ApiRequest):
    """A request to /tokenize: a text, or a conversation."""

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


RequestT = TypeVar("AskedT", bound=ApiRequest)


def read(kind: type[RequestT], body: bytes) -> RequestT:
    """Read a request's body.

    Raises:
      ApiError: it is no JSON, or a value is of a wrong type.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
        raise _refusal(found) from None
    except (ValueError, RecursionError):
        raise ApiError(400, "the body is no JSON object in UTF-8", code="invalid_json") from None


def _refusal(found: list[Any]) -> ApiError:
    first = found[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is no JSON: {first['msg']}", code="invalid_json")
    place = first["loc"]
    if not place:
        return ApiError(400, "the body is no JSON object", code="invalid_json")
    param = str(place[0])
    # Of a field that may be several things, each has its own complaint.
    said = list(dict.fromkeys(e["msg"] for e in found if e["loc"][:1] == place[:1]))
    return ApiError(400, f"{param}: {'; or '.join(said[:3])}", param=param)
