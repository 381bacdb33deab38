"""Rewrite declarations of tools for Gemma 4's template, which writes a part of JSON Schema.

Of a parameter it writes the description, one type, the `enum` of a string, `items`, `properties`,
`required` and `nullable`. References, `anyOf`, `const`, lists of types and other enums become these
where they can. Otherwise the description has them as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxspec.options import FieldError, shown

MAX_SCHEMAS = 10_000
"""Most schemas within a declaration. References can make very many of a few."""
_KNOWN = {"description", "type", "properties", "required", "nullable"}
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array"}


def for_gemma(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a declaration that Gemma 4's template writes without a loss of types.

    Raises:
      FieldError: the schema refers to a place that it does not have, or becomes too large.
    """
    function = {**tool["function"]}
    if parameters := function.get("parameters"):
        simple, notes = _Schemas(function["name"], parameters).simple(parameters)
        function["parameters"] = {"type": "object", **simple}
        function["description"] = " ".join([function.get("description") or "", *notes]).strip()
    return {**tool, "function": function}


class _Schemas:
    def __init__(self, name: str, root: Any):
        self._name, self._root, self._count = name, root, 0

    def simple(
        self, schema: Any, within: tuple[str, ...] = (), *, is_item: bool = False
    ) -> tuple[dict[str, Any], Sequence[str]]:
        """Return a schema of the keywords that the template knows, and in words what these lack.

        Args:
          within: references that this schema is a part of.
          is_item: whether it is the `items` of a schema, whose other keywords the template writes.
        """
        self._count += 1
        if self._count > MAX_SCHEMAS:
            raise FieldError("tools", f"has {self._name}, with more than {MAX_SCHEMAS} schemas")
        schema, within = self._merged(schema, within)
        notes: list[str] = []
        options = [*(schema.pop("anyOf", None) or ()), *(schema.pop("oneOf", None) or ())]
        if options:
            schema, note = self._either(schema, [self._described(o, within) for o in options])
            notes += note
        if "const" in schema:
            schema["enum"] = [schema.pop("const")]
        kinds = schema.get("type")
        kinds = (
            [kinds] if isinstance(kinds, str) else [k for k in kinds or () if isinstance(k, str)]
        )
        if isinstance(enum := schema.get("enum"), list):
            kinds = kinds or list(dict.fromkeys(map(_type_of, enum)))
            enum = schema["enum"] = [value for value in enum if value is not None] or enum
        if "null" in kinds and len(kinds) > 1:
            kinds.remove("null")
            schema["nullable"] = True
        is_array = "items" in schema or "prefixItems" in schema
        guess = "object" if "properties" in schema else "array" if is_array else None
        if kinds or guess:
            schema["type"] = " | ".join(kinds) or guess
        if enum and schema.get("type") != "string" and not is_item:
            notes.append(f"One of: {', '.join(map(_json, enum))}.")
        if schema.get("type") == "object":
            members, values = schema.get("properties"), schema.get("additionalProperties")
            members = members if isinstance(members, Mapping) else {}
            # Without `properties` the template would take other keywords for parameters.
            if "properties" in schema or not (is_item or {*schema} <= _KNOWN):
                schema["properties"] = {n: self._described(m, within) for n, m in members.items()}
            if isinstance(values, Mapping) and values:
                notes.append(f"Other values: {_json(self._described(values, within))}.")
            if isinstance(named := schema.get("patternProperties"), Mapping) and not is_item:
                described = {name: self._described(m, within) for name, m in named.items()}
                notes.append(f"Values by pattern of their names: {_json(described)}.")
        places = schema.get("prefixItems", schema.get("items"))
        if isinstance(places, list) and not is_item:
            described = [self._described(place, within, is_item=True) for place in places]
            notes.append(f"Items in order: {_json(described)}.")
        if isinstance(schema.get("items"), Mapping):
            schema["items"] = self._described(schema["items"], within, is_item=True)
        return schema, notes

    def _described(
        self, schema: Any, within: tuple[str, ...], *, is_item: bool = False
    ) -> dict[str, Any]:
        """Return a simple schema. Its description has what the keywords lack."""
        simple, notes = self.simple(schema, within, is_item=is_item)
        if notes:
            simple["description"] = " ".join([str(simple.get("description") or ""), *notes]).strip()
        return simple

    def _either(
        self, schema: dict[str, Any], options: list[dict[str, Any]]
    ) -> tuple[dict[str, Any], list[str]]:
        """Return a schema of some options, which are simple."""
        others = [option for option in options if option.get("type") != "null"]
        nullable = len(others) < len(options) or any(option.get("nullable") for option in others)
        if nullable:
            schema = {**schema, "nullable": True}
        if len(others) == 1:
            return {**others[0], **schema}, []
        types = list(dict.fromkeys(str(option["type"]) for option in others if "type" in option))
        if types:
            schema = {"type": " | ".join(types), **schema}
        if types == ["string"] and all("enum" in option for option in others):
            return {**schema, "enum": [value for option in others for value in option["enum"]]}, []
        if all(set(option) <= {"type", "nullable"} for option in others):
            return schema, []
        return schema, [f"Any of: {_json(others)}."]

    def _merged(self, schema: Any, within: tuple[str, ...]) -> tuple[dict[str, Any], Any]:
        """Return a schema with what it refers to, and all parts of its `allOf`."""
        merged: dict[str, Any] = {}
        todo = [schema]
        while todo:
            part = todo.pop()
            if not isinstance(part, Mapping):
                continue
            part = dict(part)
            if isinstance(reference := part.pop("$ref", None), str):
                if not reference.startswith("#/") and reference != "#":
                    words = f"{part.get('description') or ''} As in {shown(reference)}."
                    part["description"] = words.strip()
                elif reference in within:
                    name = reference.rpartition("/")[2] or "the parameters"
                    part.setdefault("description", f"The same form as {name}.")
                    if part.setdefault("type", "object") == "object":
                        part.setdefault("properties", {})
                else:
                    within = (*within, reference)
                    todo.append(self._find(reference))
            todo += reversed(part.pop("allOf", None) or ())
            for name, value in part.items():
                if name == "properties" and isinstance(value, Mapping):
                    merged[name] = {**value, **merged.get(name, {})}
                elif name == "required" and isinstance(value, list):
                    merged[name] = list(dict.fromkeys([*merged.get(name, ()), *value]))
                else:
                    merged.setdefault(name, value)
        return merged, within

    def _find(self, reference: str) -> Any:
        """Return the schema at a place of the declaration, such as `#/$defs/Item`."""
        value = self._root
        try:
            for step in reference[1:].split("/")[1:]:
                step = step.replace("~1", "/").replace("~0", "~")
                value = value[int(step)] if isinstance(value, list) else value[step]
        except (KeyError, IndexError, TypeError, ValueError):
            message = (
                f"has {self._name}, whose schema refers to {shown(reference)}: it has no such part"
            )
            raise FieldError("tools", message) from None
        return value


def _type_of(value: Any) -> str:
    return "null" if value is None else _TYPES.get(type(value), "object")


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
