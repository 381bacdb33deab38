"""What a request says of grammars, under the names that the protocol and other servers have for it.

Read `find_structured_output`. All say one of four kinds; a request may have one.
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
    """A grammar that is asked for.

    Attributes:
      field: of the request.
    """

    field: str
    kind: Kind
    source: Any = None


def find_structured_output(asked: GenerationRequest) -> StructuredOutput | None:
    """Return the grammar that a request asks for; None for none.

    Raises:
      ApiError: it asks for two, or for one that is not supported.
    """
    found = _of_format("response_format", asked.response_format)
    for name, read in _FIELDS.items():
        if (value := getattr(asked, name)) is not None:
            found.append(read(name, value))
    for name, value in (asked.structured_outputs or {}).items():
        if value is None or value is False:
            continue
        field = f"structured_outputs.{name}"
        if name in _STRUCTURED:
            found.append(_STRUCTURED[name](field, value))
        elif name in ("structural_tag", "whitespace_pattern"):
            raise ApiError(400, f"{field} is not supported", param=field)
    if len(found) > 1:
        names = " and ".join(one.field for one in found)
        raise ApiError(
            400, f"{names} both say what the reply may be; give one", param=found[1].field
        )
    return found[0] if found else None


def _of_format(field: str, given: Mapping[str, Any] | None) -> list[StructuredOutput]:
    if given is None or (kind := given.get("type")) == "text":
        return []
    if kind == "json_object":
        return [StructuredOutput(field, "json_object")]
    if kind != "json_schema":
        said = f'{field}.type is {shown(kind)}; it is "text", "json_object" or "json_schema"'
        raise ApiError(400, said, param=field)
    inner = given.get("json_schema", given)  # /v1/responses has the schema beside the type
    schema = inner.get("schema") if isinstance(inner, Mapping) else None
    if not isinstance(schema, Mapping):
        said = f"{field}.json_schema.schema is {shown(schema)}; expected a JSON schema"
        raise ApiError(400, said, param=field)
    return [StructuredOutput(field, "json_schema", schema)]


def _kind(kind: Kind) -> Callable[[str, Any], StructuredOutput]:
    return lambda field, value: StructuredOutput(field, kind, value)


def _choice(field: str, value: Any) -> StructuredOutput:
    """Return the grammar of one of some texts."""
    if not isinstance(value, list) or not value or not all(isinstance(v, str) and v for v in value):
        raise ApiError(400, f"{field} is {shown(value)}; expected a list of texts", param=field)
    # JSON's strings are those of Lark.
    return StructuredOutput(
        field,
        "lark",
        "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in value),
    )


_FIELDS: dict[str, Callable[[str, Any], StructuredOutput]] = {
    "regex": _kind("regex"),
    "lark": _kind("lark"),
    "guided_json": _kind("json_schema"),
    "guided_regex": _kind("regex"),
    "guided_choice": _choice,
    "guided_grammar": _kind("lark"),
}
_STRUCTURED: dict[str, Callable[[str, Any], StructuredOutput]] = {
    "json": _kind("json_schema"),
    "json_object": _kind("json_object"),
    "regex": _kind("regex"),
    "choice": _choice,
    "grammar": _kind("lark"),
    "lark": _kind("lark"),
}


def compiled(
    tokens: GrammarTokens,
    asked: StructuredOutput,
    *,
    frame: str | None = None,
    lenient: bool = False,
) -> Grammar:
    """Return a grammar as the engine takes it. What was compiled lately is not compiled again.

    Raises:
      ApiError: it cannot be used.
    """
    try:
        source = json.dumps(asked.source)
        return _compiled(tokens, asked.kind, source, frame, lenient)
    except (FieldError, ValueError, RecursionError) as error:
        said = str(error)
        if isinstance(error, FieldError):
            said = re.sub(f"^{asked.kind}", asked.field, said)
        raise ApiError(400, said, param=asked.field) from None


@functools.lru_cache(maxsize=64)
def _compiled(
    tokens: GrammarTokens, kind: Kind, source: str, frame: str | None, lenient: bool
) -> Grammar:
    return tokens.compile(kind, json.loads(source), frame=frame, lenient=lenient)
