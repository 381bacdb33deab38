"""Structured outputs: the fields of a request that constrain its reply by a grammar.

Read `find_structured_output`. The fields are those of OpenAI and of vLLM. A request may have one of
them.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxspec.options import FieldError, shown
from jaxspec.serving.errors import ApiError
from jaxspec.serving.protocol import GenerationRequest
from jaxspec.text.grammars import Grammar, GrammarTokens, Kind


@dataclass(frozen=True)
class StructuredOutput:
    """A grammar that a request names.

    Attributes:
      field: the field of the request.
      source: a JSON schema, or the text of a regex or of a Lark grammar; None for any JSON object.
    """

    field: str
    kind: Kind
    source: Any = None


def find_structured_output(request: GenerationRequest) -> StructuredOutput | None:
    """Return the structured output of a request, or None if it has none.

    Raises:
      ApiError: the request has two, or one that is not supported.
    """
    outputs = _from_response_format("response_format", request.response_format)
    for name, parse in _FIELDS.items():
        if (value := getattr(request, name)) is not None:
            outputs.append(parse(name, value))
    for name, value in (request.structured_outputs or {}).items():
        if value is None or value is False:
            continue
        field = f"structured_outputs.{name}"
        if name in _STRUCTURED_OUTPUTS:
            outputs.append(_STRUCTURED_OUTPUTS[name](field, value))
        elif name in ("structural_tag", "whitespace_pattern"):
            raise ApiError(400, f"{field} is not supported", param=field)
    if len(outputs) > 1:
        names = " and ".join(output.field for output in outputs)
        raise ApiError(
            400, f"{names} both say what the reply may be; give one", param=outputs[1].field
        )
    return outputs[0] if outputs else None


def _from_response_format(field: str, value: Mapping[str, Any] | None) -> list[StructuredOutput]:
    if value is None or (kind := value.get("type")) == "text":
        return []
    if kind == "json_object":
        return [StructuredOutput(field, "json_object")]
    if kind != "json_schema":
        message = f'{field}.type is {shown(kind)}; it is "text", "json_object" or "json_schema"'
        raise ApiError(400, message, param=field)
    inner = value.get("json_schema", value)  # /v1/responses has the schema beside the type
    schema = inner.get("schema") if isinstance(inner, Mapping) else None
    if not isinstance(schema, Mapping):
        message = f"{field}.json_schema.schema is {shown(schema)}; expected a JSON schema"
        raise ApiError(400, message, param=field)
    return [StructuredOutput(field, "json_schema", schema)]


def _of_kind(kind: Kind) -> Callable[[str, Any], StructuredOutput]:
    return lambda field, value: StructuredOutput(field, kind, value)


def _choice(field: str, value: Any) -> StructuredOutput:
    """Return the structured output of a choice between texts."""
    if not isinstance(value, list) or not value or not all(isinstance(v, str) and v for v in value):
        raise ApiError(400, f"{field} is {shown(value)}; expected a list of texts", param=field)
    # JSON and Lark write strings in the same way.
    return StructuredOutput(
        field,
        "lark",
        "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in value),
    )


_FIELDS: dict[str, Callable[[str, Any], StructuredOutput]] = {
    "regex": _of_kind("regex"),
    "lark": _of_kind("lark"),
    "guided_json": _of_kind("json_schema"),
    "guided_regex": _of_kind("regex"),
    "guided_choice": _choice,
    "guided_grammar": _of_kind("lark"),
}
_STRUCTURED_OUTPUTS: dict[str, Callable[[str, Any], StructuredOutput]] = {
    "json": _of_kind("json_schema"),
    "json_object": _of_kind("json_object"),
    "regex": _of_kind("regex"),
    "choice": _choice,
    "grammar": _of_kind("lark"),
    "lark": _of_kind("lark"),
}


def compile_grammar(
    tokens: GrammarTokens,
    output: StructuredOutput,
    *,
    frame: str | None = None,
    lenient: bool = False,
) -> Grammar:
    """Compile the grammar of a structured output for the engine. The newest 64 are cached.

    Args:
      frame: rule that the grammar stands in, as `text.chat.rules.frame` returns it.
      lenient: as for `GrammarTokens.compile`.

    Raises:
      ApiError: the grammar cannot be used.
    """
    try:
        source = json.dumps(output.source)
        return _compile(tokens, output.kind, source, frame, lenient)
    except (FieldError, ValueError, RecursionError) as error:
        message = str(error)
        if isinstance(error, FieldError):
            message = re.sub(f"^{output.kind}", output.field, message)
        raise ApiError(400, message, param=output.field) from None


@functools.lru_cache(maxsize=64)
def _compile(
    tokens: GrammarTokens, kind: Kind, source: str, frame: str | None, lenient: bool
) -> Grammar:
    return tokens.compile(kind, json.loads(source), frame=frame, lenient=lenient)
